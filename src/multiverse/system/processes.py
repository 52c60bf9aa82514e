"""Processes: their identity, and who is at the other end of a socket."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

_DEAD = frozenset({"Z", "X", "x"})


@cache
def boot_id() -> str:
    """Tells this boot of the machine from every other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat_fields(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on; None if there is no such process. The second field, the
    command's name, may hold spaces and parentheses (proc(5))."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123  (read at each observation, for each VM)
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since the machine's boot; 0 if there is none."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def cpu_seconds_with_children(pid: int) -> float | None:
    """CPU seconds of a process and its children that were waited for (proc(5)). None if there is no such process."""
    fields = stat_fields(pid)
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else None


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process. `started` is in clock ticks since the boot that `boot_id` names. A `pid` of 0 names none."""

    pid: int
    started: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The process that has this pid now. If there is none, the result names none that lives."""
        return cls(pid, start_time(pid), boot_id())

    def is_alive(self) -> bool:
        """Whether this process runs. A zombie, dead but not reaped, does not."""
        if self.pid <= 0 or self.boot_id != boot_id():
            return False
        fields = stat_fields(self.pid)
        return fields is not None and fields[0] not in _DEAD and int(fields[19]) == self.started

    def open(self) -> int | None:
        """A pidfd of this process (pidfd_open(2)), a zombie too; None if it is gone. The caller closes it."""
        if self.pid <= 0 or self.boot_id != boot_id():
            return None
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # The pidfd was opened first: if the pid is this process now, the pidfd is of this process.
        if start_time(self.pid) == self.started:
            return handle
        os.close(handle)
        return None


# --- sockets ----------------------------------------------------------------------------------------

_UCRED = "3i"


class Peer(NamedTuple):
    """A process, with its user and group, as of its connect(2)."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected Unix socket (socket(7), SO_PEERCRED)."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_UCRED))
    return Peer(*struct.unpack(_UCRED, found))


_TIMEOUT = 3.0  # seconds for a connection


def unreachable(address: str, port: int) -> str:
    """Why no connection can be made; empty if one can."""
    try:
        with closing(socket.create_connection((address, port), _TIMEOUT)):
            return ""
    except OSError as error:
        return error.strerror or str(error)
