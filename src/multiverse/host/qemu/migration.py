"""QEMU's part of a move, or of a checkpoint: what its monitor is told at both hosts, and its connections between them.

The disk is mirrored over NBD, each write of the guest at once, so that it never falls behind. The memory is a migration
stream, which pauses before its last step: then the guest stands still, and the mirror can be ended. QEMU has no
network: it gets connected sockets, and one that listens. A checkpoint is sent to two files in the same way.
"""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from multiverse.core.errors import Broken, Exhausted, Unknown
from multiverse.host.links import relay, shut_down
from multiverse.host.qemu.channels import Command, Monitor, QmpError
from multiverse.host.qemu.disks import OUT_OF_ROOM

T = TypeVar("T")
NO_LIMIT = 1 << 50  # bytes per second: QEMU's default of 128 MiB/s is less than a disk writes
NBD = "nbd"  # the name of the socket of QEMU's disk, among those of the VM
_LATE_DISK = "late-block-activate"  # QEMU takes the disk over when the VM is continued, not when all of it is there
_EXPORT, _NODE, _MIRROR, _FLATTEN = "disk", "move", "mirror", "flatten"
_CAPABILITIES = ("x-ignore-shared", "pause-before-switchover", "auto-converge", _LATE_DISK)
_MOST_THROTTLED = 80  # percent of its time that a guest may be slowed down, if it writes faster than is sent
_ENDS = 15.0  # seconds until QEMU has given up what it was told to give up
_FILES = 1  # the number of the set of descriptors with the file that a disk is copied to
_LITTLE, _ROUNDS = 48 << 20, 3  # bytes that are left to send, or rounds: then a job is frozen for a checkpoint
_HELD = 4096  # bytes per second while that is done: then hardly anything more is sent
_LOOK = 0.01  # seconds between two looks at what QEMU has done
_UNDER_WAY = frozenset({"setup", "active", "cancelling", "pre-switchover", "device", "wait-unplug"})


def capabilities(*on: str) -> Command:
    listed = [{"capability": one, "state": one in on} for one in _CAPABILITIES]
    return "migrate-set-capabilities", {"capabilities": listed}


class Wire:
    """Connects a socket that QEMU gets with a connection to the other host, in threads of its own. The memory may pass
    through a program that compresses it."""

    def __init__(
        self,
        connection: socket.socket,
        program: tuple[str, ...] = (),
        *,
        outwards: bool = True,
        qemu: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        """`outwards`: the program's output goes to the other host. `qemu`: a pair of connected sockets, the first of
        which QEMU has or gets."""
        self._connection = connection
        self.qemu, ours = qemu or socket.socketpair()
        self._sockets = [connection, ours]
        self._program: subprocess.Popen[bytes] | None = None
        if program:
            plain, near = ours, socket.socketpair()
            ours, packed = near
            self._sockets += near
            ends = (plain, packed) if outwards else (packed, plain)
            source, target = (sock.fileno() for sock in ends)
            self._program = subprocess.Popen(program, stdin=source, stdout=target, stderr=subprocess.DEVNULL)
            plain.close()
            packed.close()
        self._thread = threading.Thread(target=self._run, args=(ours,), name="wire", daemon=True)
        self._thread.start()

    def _run(self, ours: socket.socket) -> None:
        relay(ours, self._connection)
        for sock in (ours, self._connection):
            shut_down(sock)

    def close(self) -> None:
        """End both sides."""
        for sock in self._sockets:
            shut_down(sock)
        self._thread.join()
        for sock in (*self._sockets, self.qemu):
            sock.close()
        if self._program is not None:
            self._program.kill()
            self._program.wait()


# --- the host that the VM leaves ---------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    bandwidth: int  # MiB/s; 0: any
    downtime: float  # seconds
    deadline: float  # monotonic: until then the guest has to stand still
    emulated: bool = False


class TooSoon(Broken):
    """The guest of a VM stood still while its job was not frozen yet."""


class Sender:
    """One QEMU that sends its VM. `tick` is called every second while it waits, and raises an error to end that.
    Sockets are closed here once QEMU has them."""

    def __init__(self, monitor: Monitor, limits: Limits, tick: Callable[[], None]) -> None:
        self._monitor, self._limits, self._tick = monitor, limits, tick

    def flatten(self, image: Path) -> None:
        """Begin to copy what the template has written into the VM's own disk, which is on top of the image alone from
        then on."""
        nodes = self._monitor.execute("query-named-block-nodes")
        disk = next(node for node in nodes if node.get("node-name") == "disk")
        if disk.get("backing_file") not in (None, "", str(image)):
            self._monitor.execute("block-stream", **{"job-id": _FLATTEN, "device": "disk", "base": str(image)})
            self._job_ends(_FLATTEN)

    def send_disk(self, sock: socket.socket, *, whole: bool) -> None:
        """Mirror the disk to the other host, until `end_disk`. Returns when both are the same."""
        node = {"driver": "nbd", "node-name": _NODE, "server": {"type": "fd", "str": "nbd"}, "export": _EXPORT}
        with sock:
            self._mirror(("getfd", {"fdname": "nbd"}), node, sock.fileno(), whole=whole)

    def copy_disk(self, path: Path, *, whole: bool) -> None:
        """The same, to a file in the format qcow2, which exists."""
        file = {"driver": "file", "filename": f"/dev/fdset/{_FILES}"}
        node = {"driver": "qcow2", "node-name": _NODE, "file": file, "backing": None}
        with path.open("r+b") as opened:
            self._mirror(("add-fd", {"fdset-id": _FILES}), node, opened.fileno(), whole=whole)

    def _mirror(self, descriptor: Command, node: dict[str, Any], fd: int, *, whole: bool) -> None:
        mirror = {"job-id": _MIRROR, "device": "disk", "target": _NODE, "sync": "full" if whole else "top",
                  "copy-mode": "write-blocking"}  # fmt: skip
        self._monitor.execute_all([descriptor, ("blockdev-add", node), ("blockdev-mirror", mirror)], fd)
        self._until(lambda event, data: event == "BLOCK_JOB_READY" and data.get("device") == _MIRROR)

    def send_memory(self, sink: socket.socket | FileIO, freeze: Callable[[], None] | None = None) -> None:
        """Send the memory into a socket or pipe. Returns when the guest stands still, and the last of it is ready to be
        sent. `freeze` is called when little is left: it ends before the guest stands still, or else `TooSoon` is
        raised.

        Emulation notices a guest's writes by its cache of translated addresses. QEMU (7.2 to 10) clears marks of pages
        that were written without cleaning that cache, if all of these pages are still to be sent: later writes to them
        may be lost (`cpu_physical_memory_sync_dirty_bitmap`). So an emulated guest stands still when QEMU first clears
        the marks, which takes milliseconds, and they are cleared only once more: when it stands still at the end."""
        emulated = self._limits.emulated
        downtime = 0 if emulated else int(self._limits.downtime * 1000)
        bandwidth = self._limits.bandwidth << 20 or NO_LIMIT
        parameters = {
            "max-bandwidth": bandwidth,
            "downtime-limit": 0 if freeze is not None else downtime,
            "max-cpu-throttle": _MOST_THROTTLED,
        }
        throttled = () if emulated or freeze is not None else ("auto-converge",)
        commands: list[Command] = [
            capabilities("pause-before-switchover", *throttled),
            ("migrate-set-parameters", parameters),
            *([("stop", {})] if emulated else []),
            ("getfd", {"fdname": "memory"}),
            ("migrate", {"uri": "fd:memory"}),
        ]
        with sink:
            self._monitor.execute_all(commands, sink.fileno())
        if emulated:
            self._until(lambda event, data: event == "MIGRATION" and data.get("status") == "active")
            self._monitor.execute("cont")
        if freeze is not None:
            self._await_little()
            self._monitor.execute("migrate-set-parameters", **{"max-bandwidth": _HELD})
            freeze()
            if self._monitor.execute("query-migrate").get("status") != "active":
                raise TooSoon("the guest stood still before its job was frozen")
            parameters = {"max-bandwidth": bandwidth, "downtime-limit": downtime}
            self._monitor.execute("migrate-set-parameters", **parameters)
        self._until(lambda event, data: event == "MIGRATION" and data.get("status") == "pre-switchover")

    def _await_little(self) -> None:
        """Wait until little is left to send, or the guest writes faster than that is sent."""
        while True:
            found = self._monitor.execute("query-migrate")
            ram = found.get("ram", {"remaining": _LITTLE, "dirty-sync-count": 0})
            if found.get("status") == "pre-switchover":
                raise TooSoon("the guest stood still before its job was frozen")
            if ram["remaining"] < _LITTLE or ram["dirty-sync-count"] > _ROUNDS or found.get("status") not in _UNDER_WAY:
                return
            self._tick()
            time.sleep(_LOOK)

    def end_disk(self) -> None:
        """End the mirror of a guest that stands still."""
        self._monitor.execute("block-job-cancel", device=_MIRROR)  # of one that is ready: it completes
        self._job_ends(_MIRROR)
        forget_target(self._monitor)

    def end_memory(self) -> None:
        """Send the last of the memory, and the devices."""
        self._monitor.execute("migrate-continue", state="pre-switchover")
        self._until(lambda event, data: event == "MIGRATION" and data.get("status") == "completed")
        state_after(self._monitor)

    def _job_ends(self, job: str) -> None:
        self._until(lambda event, data: event == "BLOCK_JOB_COMPLETED" and data.get("device") == job)

    def _until(self, wanted: Callable[[str, Mapping[str, Any]], bool]) -> None:
        while True:
            message = self._monitor.next_event(1.0)
            if message is not None:
                event, data = message["event"], message.get("data", {})
                _check(event, data)
                if wanted(event, data):
                    return
            elif time.monotonic() > self._limits.deadline:
                raise Exhausted(
                    "it was not sent in time: the job writes to its memory or disk faster than that",
                    hint="try again later, or see move.bandwidth and move.timeout",
                )
            else:
                self._tick()


_FAILED = {"read": "it could not be read", "write": "it could not be written on the other host"}
"""What QEMU was doing when a copy of the disk failed."""


def _check(event: str, data: Mapping[str, Any]) -> None:
    """Raise `Broken` if that event of QEMU means that the VM cannot be sent."""
    if event == "MIGRATION" and data.get("status") in ("failed", "cancelled", "cancelling"):
        raise Broken("its memory could not be sent", hint="see the logs of the agents, and of QEMU on both hosts")
    if event in ("BLOCK_JOB_ERROR", "BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"):
        ours = data.get("device") in (_MIRROR, _FLATTEN)
        if ours and (event != "BLOCK_JOB_COMPLETED" or data.get("error")):
            reason = data.get("error") or _FAILED.get(data.get("operation", ""), "its job was ended")
            hint = "is the other host's disk full? else see the logs of the agents, and of QEMU on both hosts"
            raise Broken(f"its disk could not be copied: {reason}", hint=hint)


def forget_target(monitor: Monitor) -> None:
    """Close what the disk was mirrored to."""
    monitor.execute("blockdev-del", **{"node-name": _NODE})
    if monitor.execute("query-fdsets"):
        monitor.execute("remove-fd", **{"fdset-id": _FILES})


def _await(ask: Callable[[], T], done: Callable[[T], bool]) -> T:
    """Ask QEMU until that answer shows that it is done, and return it."""
    deadline = time.monotonic() + _ENDS
    while not done(answer := ask()):
        if time.monotonic() > deadline:
            raise Unknown("QEMU does not end what it was to end", hint="see its log beside the VM's manifest")
        time.sleep(_LOOK)
    return answer


def state_after(monitor: Monitor) -> str:
    """The guest's state once QEMU has ended a migration. QEMU reports the end a moment earlier, and refuses `cont`
    until then. Raises `Unknown` if that is not done in time."""
    return _await(lambda: str(monitor.execute("query-status")["status"]), lambda state: state != "finish-migrate")


def stay(monitor: Monitor) -> None:
    """Let a VM go on that was being sent, or that was sent and not handed over, as if nothing had been. Its connections
    to the other host have ended. Raises `Unknown` if that is not done in time; the same again is success."""

    def status() -> str:
        return str(monitor.execute("query-migrate").get("status", "none"))

    def jobs() -> list[str]:
        return [job["id"] for job in monitor.execute("query-jobs") if job["id"] in (_MIRROR, _FLATTEN)]

    if status() in _UNDER_WAY:
        monitor.execute("migrate_cancel")
        _await(status, lambda now: now not in _UNDER_WAY)
    for job in jobs():
        with suppress(QmpError):  # it has just ended
            monitor.execute("block-job-cancel", device=job, force=True)
    _await(jobs, lambda left: not left)
    if any(node.get("node-name") == _NODE for node in monitor.execute("query-named-block-nodes")):
        forget_target(monitor)
    if state_after(monitor) != OUT_OF_ROOM:  # see `PausedGuests`
        monitor.execute("cont")


# --- the host that receives --------------------------------------------------------------------------


def serve_disk(monitor: Monitor, path: Path) -> None:
    """Let whoever connects to the socket at `path` write to the VM's disk. Only root reaches it."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(1)
        server = {"addr": {"type": "fd", "data": {"str": "nbd"}}, "max-connections": 1}
        export = {"type": "nbd", "id": "move", "node-name": "disk", "name": _EXPORT, "writable": True}
        commands: list[Command] = [("getfd", {"fdname": "nbd"}), ("nbd-server-start", server),
                                   ("block-export-add", export)]  # fmt: skip
        monitor.execute_all(commands, listening.fileno())


def connect_disk(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    return sock


def receive_memory(monitor: Monitor, sock: socket.socket, *, is_shared: bool = False) -> None:
    """Begin to read memory and devices. The socket is closed here once QEMU has it. `is_shared`: the other host writes
    to the same disk until then."""
    on = (_LATE_DISK,) if is_shared else ()
    commands: list[Command] = [capabilities(*on), ("migrate-set-parameters", {"max-bandwidth": NO_LIMIT}),
                               ("getfd", {"fdname": "memory"}), ("migrate-incoming", {"uri": "fd:memory"})]  # fmt: skip
    with sock:
        monitor.execute_all(commands, sock.fileno())


def is_complete(monitor: Monitor) -> bool:
    """Whether all of a VM is here."""
    return bool(monitor.execute("query-migrate").get("status") == "completed")


def go_on(monitor: Monitor) -> None:
    """Let a VM run that was received. The same again is success."""
    with suppress(QmpError):  # it was stopped before
        monitor.execute("nbd-server-stop")
    monitor.execute("cont")
