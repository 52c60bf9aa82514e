"""What a service of a lab is, and what all services use."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from multiverse.core.errors import Broken, Refused
from multiverse.system.interrupts import held, whole
from multiverse_lab.lab import process
from multiverse_lab.lab.configure import environment
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.plan import LabPlan
from multiverse_lab.lab.process import DaemonCommand, RunningDaemon

_MOST_PATIENCE = 100


PATIENCE = "MULTIVERSE_LAB_PATIENCE"
"""The variable that says how many times longer than usual a lab waits: on a machine that is emulated itself, ten."""


def patience() -> float:
    """How many times longer than usual a lab waits for what it starts. Raises `Refused` if the variable is no such
    number."""
    given = os.environ.get(PATIENCE, "1")
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 1 <= found <= _MOST_PATIENCE:
        raise Refused(f"{PATIENCE} is {given}", hint=f"give a number from 1 to {_MOST_PATIENCE}, or unset it")
    return found


@dataclass(frozen=True, slots=True)
class Lab:
    """One lab: its paths and its plan."""

    where: Layout
    plan: LabPlan


@dataclass(frozen=True, slots=True)
class Service:
    """A daemon of the lab.

    `prepare` creates what the daemon needs, and may block. `ready` tries to connect. `initialize` runs after the daemon
    is ready. A change of one of `config_files` requires a restart, unless `essence` of a file's name and text stays the
    same: then `reread` makes the daemon know the file as it is now. `timeout` and `grace`, in seconds, limit the start
    and the stop; `patience` multiplies both.
    """

    name: str
    command: Callable[[Lab], DaemonCommand]
    ready: Callable[[Lab], bool]
    prepare: Callable[[Lab], None] = lambda lab: None
    initialize: Callable[[Lab], None] = lambda lab: None
    config_files: tuple[str, ...] = ()
    essence: Callable[[str, str], str] = lambda name, text: text
    reread: Callable[[Lab], None] = lambda lab: None
    timeout: float = 30.0
    grace: float = 10.0

    def record(self, where: Layout) -> Path:
        return where.run / f"{self.name}.json"

    def running(self, where: Layout) -> RunningDaemon | None:
        return process.recorded(self.record(where))

    def digest(self, lab: Lab) -> str:
        """A digest of the command and of what requires a restart, a full stop, and a digest of the whole files."""
        essence = hashlib.sha256(repr(self.command(lab).argv).encode())
        whole = hashlib.sha256()
        for name in self.config_files:
            text = (lab.where.etc / name).read_text()
            essence.update(self.essence(name, text).encode())
            whole.update(text.encode())
        return f"{essence.hexdigest()[:16]}.{whole.hexdigest()[:16]}"

    async def ensure(self, lab: Lab) -> bool:
        """Start the service unless it runs with this configuration; True if it was started.

        `Broken` if the service does not become ready; it has been stopped then.
        """
        running, wanted = self.running(lab.where), self.digest(lab)
        if running and running.digest.startswith(wanted.partition(".")[0]) and await asyncio.to_thread(self.ready, lab):
            if running.digest != wanted:
                await asyncio.to_thread(self.reread, lab)
                process.keep(replace(running, digest=wanted), self.record(lab.where))
            return False
        if running:
            await process.stop(running, self.grace * patience())
        await whole(self.prepare, lab)
        command = self.command(lab)
        started = process.start(command, self.record(lab.where), wanted)
        try:
            await process.until(lambda: self.ready(lab), started, command, self.timeout * patience())
            await whole(self.initialize, lab)
        except BaseException:
            with held():
                await self.stop(lab.where)
            raise
        return True

    async def stop(self, where: Layout) -> bool:
        """Stop the service; True if it was alive."""
        running = self.running(where)
        if running:
            await process.stop(running, self.grace * patience())
        self.record(where).unlink(missing_ok=True)
        return running is not None


def directory(path: Path, user: str, mode: int) -> None:
    """Make sure that there is such a directory, with this owner and mode."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    account = pwd.getpwnam(user)
    os.chown(path, account.pw_uid, account.pw_gid)


def answers(address: str | tuple[str, int]) -> bool:
    """Whether something listens at a Unix socket, or at an address and port."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


def run(lab: Lab, *argv: str, check: bool = True) -> str:
    """Run a command; its output. `Broken` with its error message if it fails and `check` is set."""
    more, limit = environment(lab.where), 60 * patience()
    done = subprocess.run(argv, env=os.environ | more, capture_output=True, text=True, timeout=limit)
    if check and done.returncode:
        raise Broken(f"{argv[0]}: {(done.stderr or done.stdout).strip()[-300:]}", hint=f"see {lab.where.log}")
    return done.stdout
