"""A QEMU and our two connections to it: its monitor and the agent's channel."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Broken, Exhausted, Unknown
from multiverse.host import process
from multiverse.host.qemu.channel import Channel
from multiverse.host.qemu.machine import Machine, Wiring
from multiverse.host.qemu.qmp import Command, Monitor
from multiverse.host.tap import open_tap
from multiverse.host.uids import ProcessUser

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_MOVE_TIMEOUT = 30.0  # seconds for under one MiB
_TAIL = 400  # bytes of a log that say what went wrong
# Memory lies in the template's file, which both sides map: only the devices' state is moved.
_IGNORE_SHARED: Command = (
    "migrate-set-capabilities", {"capabilities": [{"capability": "x-ignore-shared", "state": True}]})  # fmt: skip


@dataclass(frozen=True)
class Paths:
    """Where the things of one VM are: `home` on disk, `run` for its sockets."""

    home: Path
    run: Path

    @property
    def monitor(self) -> Path:
        return self.run / "qmp"

    @property
    def agent(self) -> Path:
        return self.run / "agent"

    @property
    def console(self) -> Path:
        return self.home / "console.log"

    @property
    def log(self) -> Path:
        return self.home / "qemu.log"

    def tail(self) -> str:
        """The last of what QEMU and the guest's console said, for an error message. The console is its QEMU's own
        file, which may be of any size."""
        said = []
        for name, path in (("QEMU", self.log), ("console", self.console)):
            try:
                with path.open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                    text = file.read(_TAIL).decode(errors="replace")
            except OSError:
                continue
            text = " | ".join(
                "".join(c if c.isprintable() else " " for c in line).strip() for line in text.splitlines()
            )
            if text.strip():
                said.append(f"; {name}: {text.strip()}")
        return "".join(said)


class Session:
    """A running QEMU that is ours to talk to."""

    def __init__(self, pid: int, started: int, monitor: Monitor, channel: Channel) -> None:
        self.pid = pid
        self.started = started
        self.monitor = monitor
        self.channel = channel

    @classmethod
    def launch(cls, machine: Machine, paths: Paths, binary: str, *, tap: str, bridge: str | None, paused: bool,
               incoming: bool = False, owner: ProcessUser | None = None, fds: Sequence[int] = (),
               spawned: Callable[[int, int], None] = lambda pid, started: None,
               lap: Callable[[str], None] = lambda name: None) -> Session:  # fmt: skip
        """Start a QEMU and connect. `spawned` is told its pid and start time at once; `lap` the end of each stage.

        We make the listening sockets, and hand them over: connecting needs no waiting for them to appear.
        So are the tap and `fds`, at their own numbers; all else it opens as `owner`, whose are its console and disk.
        After an error the process may run on; its command line names `machine.disk`.
        """
        paths.run.parent.mkdir(parents=True, exist_ok=True)
        paths.run.mkdir(mode=0o700, exist_ok=True)
        ours: list[int] = []
        try:
            for path in (paths.monitor, paths.agent):
                path.unlink(missing_ok=True)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                    listener.bind(str(path))
                    path.chmod(0o600)
                    listener.listen(1)
                    ours.append(listener.detach())
            ours.append(open_tap(tap, bridge, machine.mac))
            lap("tap")
            argv = machine.argv(
                binary, Wiring(ours[0], ours[1], ours[2], paths.console), paused=paused, incoming=incoming
            )
            if owner is not None:
                owner.give(paths.console)
                argv = [*owner.become(*machine.accelerator.groups()), *argv]
            try:
                pid, started = process.spawn(argv, (*ours, *fds), paths.log, _ENVIRONMENT)
            except OSError as error:
                raise Broken(f"cannot run {binary}: {error.strerror}", hint="`make setup` installs QEMU") from error
        finally:
            for fd in ours:
                os.close(fd)
        spawned(pid, started)
        try:
            channel = Channel(paths.agent)
            try:
                monitor = Monitor.connect(paths.monitor)
            except BaseException:
                channel.close()
                raise
        except Unknown as error:
            # It says why before it ends, and the sockets close when it has.
            process.end(pid, started)
            tail = paths.tail()
            kind = Exhausted if "allocate memory" in tail else Broken
            hint = "its command line is not to this machine's liking"
            if "Permission denied" in tail:
                hint = "may every user go through the directories above that file? see qemu.uids"
            raise kind(f"QEMU for {machine.name} did not come up{tail}", hint=hint) from error
        lap("exec")
        return cls(pid, started, monitor, channel)

    @classmethod
    def rejoin(cls, pid: int, started: int, paths: Paths) -> Session:
        """Connect to a QEMU that somebody before us started. `Unknown` if it does not answer."""
        channel = Channel(paths.agent)
        try:
            return cls(pid, started, Monitor.connect(paths.monitor), channel)
        except BaseException:
            channel.close()
            raise

    def freeze(self, state: Path) -> None:
        """Stop the guest and write the state of its devices; memory stays in its file, untouched from now on."""
        with state.open("wb") as file:
            commands: list[Command] = [
                ("stop", {}),
                ("getfd", {"fdname": "state"}),
                _IGNORE_SHARED,
                ("migrate", {"uri": "fd:state"}),
            ]
            self.monitor.execute_all(commands, file.fileno())
            self.monitor.wait_event("MIGRATION", _MOVE_TIMEOUT, status="completed")

    def restore(self, state: Path) -> None:
        """Load the state of the devices, into the memory that it was frozen with."""
        with state.open("rb") as file:
            commands: list[Command] = [
                ("getfd", {"fdname": "state"}),
                _IGNORE_SHARED,
                ("migrate-incoming", {"uri": "fd:state"}),
            ]
            self.monitor.execute_all(commands, file.fileno())
            self.monitor.wait_event("MIGRATION", _MOVE_TIMEOUT, status="completed")

    def hang_up(self) -> None:
        """End both connections, also under somebody who waits on them in another thread."""
        self.monitor.hang_up()
        self.channel.hang_up()

    def close(self) -> None:
        self.monitor.close()
        self.channel.close()


def remove(paths: Paths) -> None:
    """Remove the files of a VM, its manifest last: until then, all of it can still be found."""
    shutil.rmtree(paths.run, ignore_errors=True)
    for entry in paths.home.iterdir() if paths.home.is_dir() else ():
        if entry.name != "manifest.json":
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
    (paths.home / "manifest.json").unlink(missing_ok=True)
    try:
        paths.home.rmdir()
    except FileNotFoundError:
        pass
