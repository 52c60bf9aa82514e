"""A temporary lab with a user of its own, for the demonstration and the benchmarks.

This process gets a mount namespace in which the user exists; the lab's daemons inherit it. The lab goes down however
the session ends. After a session was killed, the next session in the same directory cleans up, and so does
`multiverse lab down --dir`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.system.interrupts import held
from multiverse.system.locks import try_locked_file
from multiverse_lab.lab import lifecycle, users_command
from multiverse_lab.lab.configure import users_environment
from multiverse_lab.lab.layout import Layout
from multiverse_lab.lab.lifecycle import Progress
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.service import Lab
from multiverse_lab.lab.users import PrivateUser, enter_private_namespace, private_users

USERS = (("ada", 30707), ("bob", 30708))


@dataclass(frozen=True)
class LabSession:
    """A running lab and a user in it, who has the environment; and another user."""

    where: Layout
    settings: Settings
    user: PrivateUser
    lab: Lab
    env: Mapping[str, str] = field(default_factory=dict)
    other: PrivateUser | None = None
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)

    def run(self, *argv: str, stdin: str = "", timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command as the user, in the user's home and environment."""
        more = self._as_user()
        return subprocess.run(argv, input=stdin, text=True, capture_output=True, timeout=timeout, check=False, **more)

    def start(self, output: Path, *argv: str) -> subprocess.Popen[bytes]:
        """Start a command as the user, without input. Its output is written to a file."""
        with output.open("wb") as file:
            made = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **self._as_user())
        self._started.append(made)
        return made

    def end(self) -> None:
        """Kill what `start` started, and start nothing any more. After an interruption a thread may still be at work in
        the session."""
        self._ending.set()
        for one in self._started:
            if one.poll() is None:
                one.kill()
                one.wait()

    def _as_user(self) -> dict[str, Any]:
        if self._ending.is_set():
            raise Refused("the session is ending")
        return {
            "cwd": self.user.home,
            "env": {**self.env, "HOME": str(self.user.home), "USER": self.user.name, "LOGNAME": self.user.name},
            "user": self.user.uid,
            "group": self.user.uid,
            "extra_groups": [],
            "umask": 0o022,
        }

    def submit(self, script: str, *options: str) -> str:
        """Submit a script with sbatch; the job id. Raises `Refused` with sbatch's message."""
        done = self.run("sbatch", "--parsable", *options, stdin=script)
        match = re.search(r"^(\d+)", done.stdout, re.MULTILINE)
        if done.returncode != 0 or match is None:
            raise Refused(_complaint(done.stderr))
        return match[1]


def _complaint(stderr: str) -> str:
    """sbatch's messages, without the last one if it only says that the submission failed."""
    lines = [re.sub(r"^sbatch: (error: )?", "", line) for line in stderr.strip().splitlines()]
    return "\n".join(line for line in lines if not line.startswith("Batch job submission failed") or len(lines) == 1)


@contextmanager
def _locked(where: Layout) -> Iterator[None]:
    """Hold the directory's lock. `Refused` while another session holds it."""
    where.make()
    with try_locked_file(where.root / "session") as ours:
        if not ours:
            raise Refused(f"another session uses {where.root}", hint="wait until it has ended, or use another --dir")
        yield


async def _clean_up(where: Layout) -> None:
    """Stop what a killed session left, and delete the jobs of earlier sessions, which Slurm would start again."""
    await lifecycle.down(where)
    for path in (where.slurmctld, where.database):
        shutil.rmtree(path, ignore_errors=True)
    for path in where.controller.glob("multiverse.db*"):
        path.unlink()


StateDisk = Callable[[Path], AbstractContextManager[None]]
"""Mounts something at the controller's state directory for as long as its context lasts."""


@asynccontextmanager
async def session(
    where: Layout, options: LabOptions, progress: Progress, site: str = "", disk: StateDisk = lambda _: nullcontext()
) -> AsyncIterator[LabSession]:
    """Run a lab in `where` while the context lasts. Settings in `site` (TOML) override the lab's.

    Call this in a process with one thread that does nothing else: it changes the process's mount namespace.
    """
    if os.geteuid() != 0:
        raise Refused("a lab needs root: it makes links and starts daemons as their own users", hint="use sudo")
    with _locked(where):
        await _clean_up(where)
        with disk(where.controller):
            (where.etc / "site.toml").write_text(site)
            enter_private_namespace()
            homes = where.root / "home"
            user, other = private_users([(name, uid, homes / name) for name, uid in USERS])
            os.environ.pop("SUDO_USER", None)  # the caller is not the user who submits here
            async with _taken_down(where) as made:
                shares = (*options.shares, user.home, other.home)
                settings = await lifecycle.up(where, replace(options, shares=shares), progress)
                plan = load(where)
                assert plan is not None, "the lab is up, so its plan is written"
                made.append(LabSession(where, settings, user, Lab(where, plan), session_environment(where), other))
                yield made[0]


@asynccontextmanager
async def _taken_down(where: Layout) -> AsyncIterator[list[LabSession]]:
    """Take the lab down however the context ends, with the session that was put into the list."""
    made: list[LabSession] = []
    try:
        yield made
    finally:
        with held():
            for one in made:
                one.end()
            await lifecycle.down(where)


def session_environment(where: Layout) -> dict[str, str]:
    """The environment of a user's shell in the lab, without this process's own variables."""
    path = os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    own = ":".join(map(str, users_command.directories(where)))
    base = {"PATH": f"{own}:{path}", "LANG": os.environ.get("LANG", "C.UTF-8")}
    return base | users_environment(where)
