"""Daemons that outlive the command that started them, identified by pid and start time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import pwd
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.system import files
from multiverse.system.processes import ProcessIdentity

_INTERVAL = 0.02  # seconds between two attempts to connect to a starting daemon

_LAB = "MULTIVERSE_DAEMON_OF"
"""The variable with the directory of its lab that each daemon has: in it, `run` has the records."""
_END = 5.0  # seconds for which a daemon may go on after SIGTERM

# The children of this process, by pid. A Popen object that is deleted can take the child's exit status with it.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A process that was started here. The names of the fields are those of the record file.

    `born` is its start time in clock ticks since the boot `boot`. `digest` is that of its configuration. `since` is
    Unix time.
    """

    pid: int
    born: int
    boot: str
    digest: str
    since: float

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.born, self.boot)

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return self.identity.is_alive()


@dataclass(frozen=True, slots=True)
class DaemonCommand:
    """How to run a daemon: as which user, and with which log file. A `launcher` is a program that starts the daemon,
    prints its pid, and ends."""

    argv: Sequence[str]
    log: Path
    user: str = "root"
    env: Mapping[str, str] = field(default_factory=dict)
    umask: int = 0o022
    log_mode: int = 0o644
    launcher: bool = False

    @property
    def name(self) -> str:
        """What an error message calls it."""
        return self.log.stem if self.launcher or self.argv[0] == sys.executable else self.argv[0]


def recorded(record: Path) -> RunningDaemon | None:
    """The process in a record file, if it is still alive."""
    try:
        running = RunningDaemon(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return running if running.alive() else None


def keep(running: RunningDaemon, record: Path) -> None:
    """Write the record of a process."""
    files.replace(record, json.dumps(asdict(running)), mode=0o644)


def start(command: DaemonCommand, record: Path, digest: str) -> RunningDaemon:
    """Start a daemon in a session of its own and write its record. `Broken` if it cannot be executed."""
    for child in list(_children.values()):
        child.poll()  # one that was killed does not stay a zombie
    account = pwd.getpwnam(command.user)
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with command.log.open("ab") as log:
        os.fchmod(log.fileno(), command.log_mode)
        try:
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if command.launcher else log,
                stderr=log,
                cwd="/",
                env=_environment() | {_LAB: str(record.parents[1])} | dict(command.env),
                user=account.pw_uid,
                group=account.pw_gid,
                extra_groups=os.getgrouplist(account.pw_name, account.pw_gid),
                umask=command.umask,
                start_new_session=True,
            )
        except OSError as error:
            raise Broken(
                f"cannot run {command.argv[0]}: {error.strerror}", hint="install the lab's packages: make setup"
            ) from error
    if not command.launcher:
        _children[process.pid] = process
    started = ProcessIdentity.of(_launched(process, command) if command.launcher else process.pid)
    running = RunningDaemon(started.pid, started.started, started.boot_id, digest, time.time())
    keep(running, record)
    return running


def _launched(launcher: subprocess.Popen[bytes], command: DaemonCommand) -> int:
    """The pid of the daemon that a launcher has started."""
    output, _ = launcher.communicate()
    if launcher.returncode:
        raise Broken(f"cannot start {command.name}: {last_line(command.log)}", hint=f"see {command.log}")
    return int(output)


def _environment() -> dict[str, str]:
    """An environment that does not depend on the caller's variables for Slurm or its locale."""
    path = os.environ.get("PATH", "")
    return {"PATH": f"{path}:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/"}


async def until(reached: Callable[[], bool], started: RunningDaemon, command: DaemonCommand, timeout: float) -> None:
    """Wait until `reached` (an attempt to connect) succeeds.

    `Broken`, with the last line of the log, if the process ends or if `timeout` seconds have passed.
    """
    name, log = command.name, command.log
    deadline = time.monotonic() + timeout
    while not await asyncio.to_thread(reached):
        if not started.alive():
            said = last_line(log)
            raise Broken(f"{name} ended{_status(started.pid)}: {said}", hint=_remedy(said, log))
        if time.monotonic() > deadline:
            raise Broken(f"{name} is not ready after {timeout:g} s: {last_line(log)}", hint=f"see {log}")
        await asyncio.sleep(_INTERVAL)


def _remedy(said: str, log: Path) -> str:
    if os.strerror(errno.EADDRINUSE) not in said:
        return f"see {log}"
    return f"end the program that listens there, which `ss -ltnp` names, or use another --dir; see {log}"


async def stop(running: RunningDaemon, grace: float) -> None:
    """Terminate a process, and kill it after `grace` seconds. Returns when it has ended, at once if it had ended."""
    handle = running.identity.open()
    if handle is None:
        return
    try:
        for sent, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 10.0)):
            if not running.alive():
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, sent)
            await asyncio.to_thread(select.select, [handle], [], [], patience)
        if running.alive():
            raise Broken(f"process {running.pid} does not end", hint=f"see /proc/{running.pid}/stack")
    finally:
        os.close(handle)
        _reap(running.pid)


def end_unrecorded(lab: Path) -> int:
    """End the daemons of the lab in this directory, whatever its records say; how many there were.

    The command that started one may have been killed before it wrote the record, or the record may be lost. `Broken` if
    one does not end.
    """
    wanted = f"{_LAB}={lab}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError, ProcessLookupError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(ProcessIdentity.of(int(path.parent.name)))
    for number, patience in ((signal.SIGTERM, _END), (signal.SIGKILL, _END)):
        for one in found:
            if one.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, number)
        deadline = time.monotonic() + patience
        while any(one.is_alive() for one in found) and time.monotonic() < deadline:
            time.sleep(_INTERVAL)
    if left := [one.pid for one in found if one.is_alive()]:
        raise Broken(f"process {left[0]} does not end", hint=f"see /proc/{left[0]}/stack")
    return len(found)


def _reap(pid: int) -> None:
    """Reap the process if it is a child of this one."""
    if child := _children.pop(pid, None):
        child.poll()


def _status(pid: int) -> str:
    """With which exit status a process has ended, for an error message; empty if it is no child of this one."""
    child = _children.get(pid)
    code = child.poll() if child else None
    return "" if code is None else f" with {code}"


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, for an error message."""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines()[-20:] if line.strip()]
        if lines:
            return lines[-1].strip()[:300]
    return "its log is empty"
