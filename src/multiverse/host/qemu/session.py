"""A running QEMU: its start, the connections to it, its files, and its output."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from multiverse.core.errors import Broken, Exhausted, Unknown
from multiverse.core.model.basics import Size
from multiverse.host import manifest, namespaces, process
from multiverse.host.namespaces import OUTPUT_ROOM, System, View
from multiverse.host.network import open_tap, open_vhost_net
from multiverse.host.qemu.channels import AgentChannel, Command, Monitor
from multiverse.host.qemu.machine import Feature, QemuMachine, Wiring
from multiverse.host.registry import ProcessUser
from multiverse.system import files
from multiverse.system.processes import ProcessIdentity

# Bytes after which a file is begun anew. The copy of the old one is kept as `<name>.old` until the next time.
_FULL = OUTPUT_ROOM // 4


class GuestOutput:
    """The log and the console of one contained QEMU. `opened` are descriptors, by the path of each copy. QEMU writes
    both to files in a small file system in memory, which ends with it (`host.namespaces`). This process copies them to
    the VM's directory when it measures the VM, and once more when the VM has died. The copies are bounded, and root's:
    QEMU cannot write to them."""

    def __init__(self, opened: Mapping[Path, int]) -> None:
        self._opened = dict(opened)
        self._saved: dict[Path, tuple[int, int]] = {}

    @classmethod
    def of(cls, process: ProcessIdentity, outputs: Sequence[Path]) -> GuestOutput | None:
        """The output of a QEMU that another process started. None if it has ended, or is not contained."""
        found = {path: namespaces.open_inside(process, path, os.O_RDWR) for path in outputs}
        opened = {path: fd for path, fd in found.items() if fd is not None}
        return cls(opened) if opened else None

    def save(self) -> None:
        """Copy changed outputs. A disk that is full is no error: the next call tries again."""
        for path, fd in self._opened.items():
            found = os.fstat(fd)
            stamp = (found.st_size, found.st_mtime_ns)
            if stamp == self._saved.get(path):
                continue
            content = os.pread(fd, OUTPUT_ROOM, 0)  # a QEMU that was taken over can make its file appear of any size
            with suppress(OSError):
                files.replace(path, content)
                self._saved[path] = stamp
                if found.st_size > _FULL:
                    path.replace(path.with_name(f"{path.name}.old"))
                    os.ftruncate(fd, 0)

    def append(self, path: Path, content: bytes) -> None:
        """Add to one of the outputs what the VM's QEMU on another host has written."""
        with suppress(OSError):  # it has no room; the VM goes on all the same
            os.write(self._opened[path], content)

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1])


class OutputStore:
    """The outputs of this host's VMs, by name. They are found again after a restart of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._outputs: dict[str, GuestOutput] = {}

    def keep(self, name: str, output: GuestOutput) -> None:
        with self._lock:
            self.drop(name)
            self._outputs[name] = output

    def save(self, name: str, process: ProcessIdentity, outputs: Sequence[Path]) -> None:
        """Copy the output of a VM. After `drop`, and the end of its QEMU, nothing is written to its directory."""
        with self._lock:
            output = self._outputs.get(name) or GuestOutput.of(process, outputs)
            if output is None:
                return
            self._outputs[name] = output
            output.save()

    def append(self, name: str, path: Path, content: bytes) -> None:
        """See `GuestOutput.append`. QEMUs that are not contained write to the file itself."""
        with self._lock:
            if name in self._outputs:
                self._outputs[name].append(path, content)
            else:
                with suppress(OSError), path.open("ab") as file:
                    file.write(content)

    def finish(self, name: str) -> None:
        """Copy the last output of a VM whose QEMU has ended."""
        with self._lock:
            if name in self._outputs:
                self._outputs[name].save()
                self.drop(name)

    def drop(self, name: str) -> None:
        with self._lock:
            if (output := self._outputs.pop(name, None)) is not None:
                output.close()

    def close(self) -> None:
        for name in list(self._outputs):
            self.drop(name)


_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_STATE_TIMEOUT = 30.0  # seconds to save or restore the state of the devices, which is under one MiB
_REMOVALS = 3  # times that a directory is emptied, if files appear in it meanwhile
_TAIL = 400  # bytes of a log that are quoted in an error message
# Template and clones map the same memory file, so only the state of the devices is saved and restored.
_IGNORE_SHARED: Command = (
    "migrate-set-capabilities", {"capabilities": [{"capability": "x-ignore-shared", "state": True}]})  # fmt: skip


class Paths:
    """The files of one VM: `home` holds those on disk, `run` its sockets."""

    def __init__(self, home: Path, run: Path) -> None:
        self.home, self.run = home, run
        self.monitor, self.agent = run / "qmp", run / "agent"
        self.log, self.console = home / "qemu.log", home / "console.log"
        self.outputs = self.log, self.console  # `GuestOutput` bounds these files
        self.overlay = home / "disk.qcow2"  # the disk of a VM that shares its image's or template's disk
        self.full_disk = home / "disk.raw"  # the disk of a VM that has a copy of its image's disk

    @property
    def disk(self) -> Path:
        return self.overlay if self.overlay.exists() else self.full_disk

    def tail(self) -> str:
        """The end of both outputs, for an error message. A QEMU that is not contained can make them of any size."""
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


@dataclass(frozen=True)
class FrozenTemplate:
    image: str
    key: str  # says what made it
    path: Path
    size: Size  # that its clones have before anything is plugged
    account: str = ""
    build: str = ""  # tells it from an earlier one of the same key

    @property
    def memory(self) -> Path:
        return self.path / "memory"

    def memory_used(self) -> int:
        """Bytes that its memory takes. Pages that were never written take none."""
        try:
            return self.memory.stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    @property
    def state(self) -> Path:
        return self.path / "state"


@dataclass(frozen=True)
class Launch:
    machine: QemuMachine
    paths: Paths
    binary: str
    tap: str
    bridge: str | None  # that the tap joins
    paused: bool = False
    incoming: bool = False  # QEMU waits for a state to be restored
    user: ProcessUser | None = None  # that QEMU runs as; then it is contained in `system` and the three fields below
    system: System | None = None
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    fds: Sequence[int] = ()  # that QEMU inherits at the same numbers, and opens by their paths in /proc
    started: Callable[[ProcessIdentity], None] = lambda identity: None  # called at once with the new process
    # Called with the reason, if QEMU ends by itself before it answers and does not lack memory.
    failed: Callable[[str], None] = lambda reason: None
    stage: Callable[[str], None] = lambda name: None  # called with the name of each stage that ends

    @property
    def view(self) -> View | None:
        """The files that QEMU can reach; None if it is not contained."""
        if self.user is None or self.system is None:
            return None
        paths, seen = self.paths, (self.readable, self.writable, self.devices)
        return View(self.system, paths.run, *seen, paths.outputs, self.user.uid, proc=bool(self.fds))


class QemuSession:
    """A running QEMU, and the connections to its monitor and to the agent in its guest."""

    def __init__(self, identity: ProcessIdentity, monitor: Monitor, channel: AgentChannel) -> None:
        self.process = identity
        self.monitor = monitor
        self.channel = channel
        self.output: GuestOutput | None = None

    @classmethod
    def launch(cls, launch: Launch) -> QemuSession:
        """Start a QEMU and connect to it. This process creates the listening sockets and the tap and passes their
        descriptors on: so connecting does not wait until the sockets appear, and QEMU needs no privilege. QEMU opens
        all other files as its user, who owns its console and disk. After an error the process may still run; its
        command line names `machine.disk`."""
        paths = launch.paths
        identity, output = cls._spawn(launch)
        try:
            launch.started(identity)
            session = cls.connect(identity, paths)
            try:
                if launch.fds and output is not None:
                    namespaces.remove_proc(identity)  # QEMU has opened them before it answers
            except BaseException:
                session.close()
                raise
        except BaseException as error:
            if isinstance(error, Unknown):  # QEMU writes the reason before it ends
                process.kill(identity)
            if output is not None:
                output.save()
                output.close()
            if isinstance(error, Unknown):
                what = f"QEMU for {launch.machine.name} did not start{paths.tail()}"
                hint = "see its command line, which this machine's QEMU does not accept"
                if "Permission denied" in what:
                    hint = "may every user pass through the directories above that file? see qemu.uids"
                if "allocate memory" in what:
                    raise Exhausted(what, hint=hint) from error
                launch.failed(what)
                raise Broken(what, hint=hint) from error
            raise
        session.output = output
        launch.stage("exec")
        return session

    @staticmethod
    def _spawn(launch: Launch) -> tuple[ProcessIdentity, GuestOutput | None]:
        paths, machine = launch.paths, launch.machine
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
            ours.append(open_tap(launch.tap, launch.bridge, machine.mac))
            launch.stage("tap")
            vhost = open_vhost_net() if Feature.VHOST_NET in machine.features else None
            ours += [vhost] if vhost is not None else []
            wiring = Wiring(ours[0], ours[1], ours[2], paths.console, vhost)
            argv = machine.argv(launch.binary, wiring, paused=launch.paused, incoming=launch.incoming)
            if launch.user is not None:
                argv = [*launch.user.command_prefix(*machine.accelerator.groups()), *argv]
            try:
                return _execute(launch, argv, (*ours, *launch.fds))
            except OSError as error:
                what = f"cannot run {launch.binary}: {error.strerror}"
                raise Broken(what, hint="install QEMU (qemu-system-x86 in Debian)") from error
        finally:
            for fd in ours:
                os.close(fd)

    @classmethod
    def connect(cls, identity: ProcessIdentity, paths: Paths) -> QemuSession:
        """Connect to a QEMU that another process started. Raises `Unknown` if it does not answer."""
        channel = AgentChannel(paths.agent)
        try:
            return cls(identity, Monitor.connect(paths.monitor), channel)
        except BaseException:
            channel.close()
            raise

    def freeze(self, state: Path) -> None:
        """Stop the guest and save the state of its devices. Nothing changes its memory file from then on."""
        with state.open("wb") as file:
            self._migrate(file, ("stop", {}), ("migrate", {"uri": "fd:state"}))

    def restore(self, state: Path) -> None:
        """Restore the state of the devices, which belongs to the memory that the guest maps."""
        with state.open("rb") as file:
            self._migrate(file, ("migrate-incoming", {"uri": "fd:state"}))

    def _migrate(self, state: BinaryIO, *commands: Command) -> None:
        prepared = [*commands[:-1], ("getfd", {"fdname": "state"}), _IGNORE_SHARED, commands[-1]]
        self.monitor.execute_all(prepared, state.fileno())
        self.monitor.wait_event("MIGRATION", _STATE_TIMEOUT, status="completed")

    def shut_down(self) -> None:
        """End both connections. Another thread that waits for an answer on one gets `Unknown`."""
        self.monitor.shut_down()
        self.channel.shut_down()

    def close(self) -> None:
        self.monitor.close()
        self.channel.close()
        if self.output is not None:
            self.output.close()


def _execute(launch: Launch, argv: list[str], fds: Sequence[int]) -> tuple[ProcessIdentity, GuestOutput | None]:
    view, paths = launch.view, launch.paths
    if view is None:
        if launch.user is not None:
            launch.user.take_file(paths.console)
        return process.spawn(argv, fds, paths.log, _ENVIRONMENT), None
    command = [*namespaces.command_prefix(view), *argv]
    pid, opened = namespaces.start(view, lambda out: process.execute(command, fds, out[paths.log], _ENVIRONMENT))
    return process.identify(pid), GuestOutput(opened)


def remove_files(paths: Paths) -> None:
    """Remove the files of a VM, its manifest last: until then, all of it can still be found."""
    shutil.rmtree(paths.run, ignore_errors=True)
    for turn in range(_REMOVALS):
        for entry in paths.home.iterdir() if paths.home.is_dir() else ():
            if entry.name != manifest.FILE:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink(missing_ok=True)
        (paths.home / manifest.FILE).unlink(missing_ok=True)
        try:
            paths.home.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:  # another process, which observes this host, has just copied QEMU's log
            if error.errno != errno.ENOTEMPTY or turn == _REMOVALS - 1:
                raise
        else:
            return
