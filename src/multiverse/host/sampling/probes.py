"""Reading what a host and its VMs have used, from files of the kernel that are kept open.

Opening a file of /proc costs several times as much as reading it, so each is opened once and read with pread(2). A file
of /proc/PID stays with its process: once that has ended, reading it fails with ESRCH, whichever process gets the pid
next. A probe whose process has ended raises `ProcessLookupError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from multiverse.host.cgroups import Hierarchy
from multiverse.host.sampling.history import UNKNOWN
from multiverse.system.processes import ProcessIdentity, boot_id

TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECTOR = 512  # bytes, in /proc/diskstats on any disk
_READ = 1 << 16  # bytes: the files read here are smaller, but for those of many interfaces or disks
_PRESSURES = ("cpu", "memory", "io")

Traffic = Mapping[bytes, tuple[int, int]]
"""Bytes that were received and sent, by interface."""


class Reading(NamedTuple):
    """What was read at one moment. CPU seconds, bytes and seconds of pressure are counted since the beginning; memory
    is in MiB. `UNKNOWN`: the kernel does not tell."""

    cpu_s: float
    memory: float
    active: float
    received: int
    sent: int
    read: int
    written: int
    pressures: tuple[float, float, float]


class OpenFile:
    """A file of the kernel that is kept open."""

    __slots__ = ("_fd",)

    def __init__(self, path: Path | str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> bytes:
        """What it says now."""
        return os.pread(self._fd, _READ, 0)

    def read_all(self) -> bytes:
        """The same of a file whose lines are many: the kernel gives some pages at a time."""
        parts, at = [], 0
        while part := os.pread(self._fd, _READ, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def close(self) -> None:
        os.close(self._fd)


def _opened(paths: Sequence[Path]) -> OpenFile | None:
    """The first of the files that can be opened and read; None if there is none."""
    for path in paths:
        try:
            file = OpenFile(path)
        except OSError:
            continue
        try:
            file.read()
        except OSError:  # pressure stall information that was turned off fails only here
            file.close()
            continue
        return file
    return None


# --- pressure -------------------------------------------------------------------------------------


class Pressures:
    """The pressure stall information of a host or of a control group of version 2."""

    def __init__(self, places: Sequence[Sequence[Path]]) -> None:
        self._files = tuple(_opened(paths) for paths in places)

    def read(self) -> tuple[float, float, float]:
        """The seconds in which a process waited for CPU, memory and disks."""
        cpu, memory, disks = (UNKNOWN if file is None else _stalled(file.read()) for file in self._files)
        return cpu, memory, disks

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                file.close()


def _stalled(data: bytes) -> float:
    """The `total` of the first line, "some", which is in microseconds."""
    begin = data.find(b"total=") + 6
    return int(data[begin : data.find(b"\n", begin)]) / 1e6


# --- VMs ------------------------------------------------------------------------------------------


class VmProbe:
    """Reads what one VM uses: its QEMU's process, its control groups, and its tap."""

    def __init__(self, name: str, process: ProcessIdentity, hierarchies: Sequence[Hierarchy]) -> None:
        """Raises `ProcessLookupError` if the process has ended, and OSError if its files cannot be opened."""
        self.process = process
        self.huge_memory = 0
        """MiB in huge pages, which the kernel counts in no process's resident memory."""
        self._tap = name.encode()
        self._files: list[OpenFile] = []
        self._memory_stat: OpenFile | None = None
        self._pressures: Pressures | None = None
        self._last_io = 0, 0
        try:
            self._stat, self._statm, self._io = (
                self._open(f"/proc/{process.pid}/{x}") for x in ("stat", "statm", "io")
            )
            fields = self._fields()
            if process.boot_id != boot_id() or int(fields[19]) != process.started:
                raise ProcessLookupError
        except (FileNotFoundError, ProcessLookupError) as error:
            self.close()
            raise ProcessLookupError(f"the QEMU of {name} has ended") from error
        except OSError:
            self.close()
            raise
        self._memory_stat = _opened([h.parent / name / "memory.stat" for h in hierarchies if "memory" in h.controllers])
        groups = [hierarchy.parent / name for hierarchy in hierarchies if hierarchy.version == 2]
        if groups:
            self._pressures = Pressures([[group / f"{what}.pressure" for group in groups] for what in _PRESSURES])

    def _open(self, path: str) -> OpenFile:
        file = OpenFile(path)
        self._files.append(file)
        return file

    def read(self, traffic: Traffic) -> Reading:
        """What it has used by now. Raises `ProcessLookupError` once its process has ended."""
        fields = self._fields()
        memory, shared = self._statm.read().split(None, 3)[1:3]
        sent, received = traffic.get(self._tap, (0, 0))  # what a tap receives, its guest has sent
        read, written = self._disk_bytes()
        return Reading(
            (int(fields[11]) + int(fields[12])) / TICKS,
            max(0, int(memory) - int(shared)) * _PAGE / MIB + self.huge_memory,
            UNKNOWN if self._memory_stat is None else self._active(self._memory_stat),
            received,
            sent,
            read,
            written,
            (UNKNOWN, UNKNOWN, UNKNOWN) if self._pressures is None else self._read_pressures(self._pressures),
        )

    def _fields(self) -> list[bytes]:
        fields = self._stat.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X", b"x"):
            raise ProcessLookupError
        return fields

    def _disk_bytes(self) -> tuple[int, int]:
        """Bytes that the kernel read from and wrote to disks for it. Some containers do not permit to ask."""
        try:
            lines = self._io.read().split(b"\n")
            self._last_io = int(lines[4].split()[1]), int(lines[5].split()[1])
        except (PermissionError, IndexError):
            pass
        return self._last_io

    @staticmethod
    def _active(file: OpenFile) -> float:
        try:
            return active_bytes(file.read()) / MIB
        except OSError:  # its control group is removed just now
            return UNKNOWN

    @staticmethod
    def _read_pressures(pressures: Pressures) -> tuple[float, float, float]:
        try:
            return pressures.read()
        except OSError:
            return UNKNOWN, UNKNOWN, UNKNOWN

    def close(self) -> None:
        for file in self._files:
            file.close()
        if self._memory_stat is not None:
            self._memory_stat.close()
        if self._pressures is not None:
            self._pressures.close()


def active_bytes(memory_stat: bytes) -> int:
    """The bytes that the kernel counts as used lately, from memory.stat of a control group of either version."""
    found = 0
    for key in (b"\nactive_anon ", b"\nactive_file "):
        begin = memory_stat.find(key)
        if begin >= 0:
            found += int(memory_stat[begin + len(key) : memory_stat.find(b"\n", begin + 1)])
    return found


# --- the host -------------------------------------------------------------------------------------


class HostProbe:
    """Reads what all processes of this machine use together."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._sys = sys
        self._stat, self._meminfo = OpenFile(proc / "stat"), OpenFile(proc / "meminfo")
        self._net, self._disks = _opened([proc / "net/dev"]), _opened([proc / "diskstats"])
        self._pressures = Pressures([[proc / "pressure" / what] for what in _PRESSURES])
        self._outer: dict[bytes, bool] = {}  # by interface, whether it leads out of this machine
        self._whole: dict[bytes, bool] = {}  # by disk, whether it is a whole one

    def read(self) -> tuple[Reading, Traffic]:
        """What was used by now, and the traffic of each interface."""
        fields = self._stat.read().split(b"\n", 1)[0].split()
        # user, nice, system; irq, softirq, steal. Guests' time is in user (proc(5)).
        busy = sum(map(int, (*fields[1:4], *fields[6:9])))
        memory = {line.split(b":")[0]: line for line in self._meminfo.read().split(b"\n", 8)[:8]}
        total, available, active = (_kib(memory[key]) for key in (b"MemTotal", b"MemAvailable", b"Active"))
        traffic = {} if self._net is None else _traffic(self._net.read_all())
        outer = [traffic[name] for name in traffic if self._leads_out(name)]
        read, written = (0, 0) if self._disks is None else self._disk_bytes(self._disks.read_all())
        reading = Reading(
            busy / TICKS,
            (total - available) / 1024,
            active / 1024,
            sum(received for received, _ in outer),
            sum(sent for _, sent in outer),
            read,
            written,
            self._pressures.read(),
        )
        return reading, traffic

    def _leads_out(self, name: bytes) -> bool:
        """Whether it is an interface with a device behind it: no bridge, tap or loopback, which carry others' bytes."""
        known = self._outer.get(name)
        if known is None:
            if len(self._outer) > 10_000:  # taps come and go
                self._outer.clear()
            known = self._outer[name] = (self._sys / "class/net" / os.fsdecode(name) / "device").exists()
        return known

    def _disk_bytes(self, data: bytes) -> tuple[int, int]:
        read = written = 0
        for line in data.splitlines():
            fields = line.split(None, 10)
            name = fields[2]
            whole = self._whole.get(name)
            if whole is None:
                whole = self._whole[name] = (self._sys / "block" / os.fsdecode(name) / "device").exists()
            if whole:
                read += int(fields[5])
                written += int(fields[9])
        return read * _SECTOR, written * _SECTOR

    def close(self) -> None:
        for file in (self._stat, self._meminfo, self._net, self._disks):
            if file is not None:
                file.close()
        self._pressures.close()


def _kib(line: bytes) -> int:
    return int(line.split()[1])


def _traffic(data: bytes) -> dict[bytes, tuple[int, int]]:
    found = {}
    for line in data.split(b"\n")[2:-1]:
        name, _, figures = line.partition(b":")
        fields = figures.split(None, 9)
        found[name.strip()] = int(fields[0]), int(fields[8])
    return found
