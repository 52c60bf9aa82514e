"""Samples the use of this host and its VMs, each second, and remembers an hour."""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import structlog

from multiverse.core.model.identity import site_of
from multiverse.core.model.usage import MEANS, HostUsage, Load, Usage, VmUsage
from multiverse.host import manifest
from multiverse.host.cgroups import Hierarchy, hierarchies
from multiverse.system.processes import ProcessIdentity, boot_id

log = structlog.get_logger(__name__)

# --- history -----------------------------------------------------------------------------------------

UNKNOWN = -1.0  # in place of a figure that the kernel does not tell: no figure is negative
WIDTH = 1 + len(MEANS)  # values of a sample: its time in seconds since its chunk began, and the figures of `MEANS`
CHUNK = 60  # samples; the oldest chunk is dropped as a whole
SAMPLE_BYTES = 4 * WIDTH
_CPUS, _MEMORY = 1 + MEANS.index("cpus"), 1 + MEANS.index("memory")


class History:
    """Samples of an hour, of one host or VM, in compact arrays: the last `limit`, and up to a minute's more."""

    def __init__(self, limit: int = 3600) -> None:
        self.limit = limit
        self._chunks: deque[tuple[float, array[float]]] = deque()

    def __len__(self) -> int:
        return sum(len(data) for _, data in self._chunks) // WIDTH

    def add(self, now: float, figures: Sequence[float]) -> None:
        """Add a sample that was taken at `now` (monotonic), after all others."""
        if not self._chunks or len(self._chunks[-1][1]) >= CHUNK * WIDTH:
            self._chunks.append((now, array("f")))
            while (len(self._chunks) - 2) * CHUNK >= self.limit:
                self._chunks.popleft()
        began, data = self._chunks[-1]
        data.append(now - began)
        data.extend(figures)

    def usage(self, after: float, interval: float) -> Usage | None:
        """The means and peaks of the samples later than `after` (monotonic); None if there is none. Each sample covers
        `interval` seconds. A figure that some samples do not know is the mean of the others."""
        parts = list(self._since(after))
        count = sum(len(part) for part in parts) // WIDTH
        if not count:
            return None
        means: dict[str, float | None] = {}
        for column, name in enumerate(MEANS, start=1):
            columns = [part[column::WIDTH] for part in parts]
            unknown = sum(values.count(UNKNOWN) for values in columns)
            known = sum(map(sum, columns)) - unknown * UNKNOWN
            means[name] = known / (count - unknown) if unknown < count else None
        return Usage(
            count * interval,
            cpus_peak=max(max(part[_CPUS::WIDTH]) for part in parts),
            memory_peak=max(max(part[_MEMORY::WIDTH]) for part in parts),
            **means,  # type: ignore[arg-type]
        )

    def _since(self, after: float) -> Iterator[array[float]]:
        """The samples later than that, the newest chunk first."""
        for began, data in reversed(self._chunks):
            if began > after:
                yield data
                continue
            times = data[0::WIDTH]
            if (first := bisect_right(times, after - began)) < len(times):
                yield data[first * WIDTH :]
            return


# --- reading -----------------------------------------------------------------------------------------

TICKS = os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SECTOR = 512  # bytes, in /proc/diskstats on any disk
_READ = 1 << 16  # bytes: the files read here are smaller, but for those of many interfaces or disks
_PRESSURES = ("cpu", "memory", "io")

Traffic = Mapping[bytes, tuple[int, int]]  # bytes that were received and sent, by interface


class Reading(NamedTuple):
    """The counters at one moment: CPU seconds, bytes and seconds of pressure; memory in MiB. `UNKNOWN`: not told."""

    cpu_s: float
    memory: float
    active: float
    received: int
    sent: int
    read: int
    written: int
    pressures: tuple[float, float, float]


class OpenFile:
    """A file of the kernel that is kept open, because opening costs several times as much as reading. A file of
    /proc/PID stays with its process: after its end, reading fails with ESRCH, whichever process has the pid."""

    def __init__(self, path: Path | str, closing: ExitStack) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        closing.callback(os.close, self._fd)

    def read(self) -> bytes:
        return os.pread(self._fd, _READ, 0)

    def read_all(self) -> bytes:
        """The content of a file with many lines: the kernel gives some pages at a time."""
        parts, at = [], 0
        while part := os.pread(self._fd, _READ, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts)


def _opened(paths: Sequence[Path], closing: ExitStack) -> OpenFile | None:
    """The first of the files that can be opened and read; None if there is none."""
    for path in paths:
        # Pressure stall information that was turned off fails when it is read.
        with suppress(OSError), ExitStack() as opened:
            file = OpenFile(path, opened)
            file.read()
            closing.push(opened.pop_all())
            return file
    return None


class Pressures:
    """The pressure stall information of a host or of a control group of version 2."""

    def __init__(self, places: Sequence[Sequence[Path]], closing: ExitStack) -> None:
        self._files = tuple(_opened(paths, closing) for paths in places)

    def read(self) -> tuple[float, float, float]:
        """The seconds in which a process waited for CPU, memory and disks."""
        cpu, memory, disks = (UNKNOWN if file is None else _stalled(file.read()) for file in self._files)
        return cpu, memory, disks


def _stalled(data: bytes) -> float:
    begin = data.find(b"total=") + 6
    return int(data[begin : data.find(b"\n", begin)]) / 1e6


class VmProbe:
    """Reads the use of one VM: its QEMU's process, its control groups, and its tap."""

    def __init__(self, name: str, process: ProcessIdentity, hierarchies: Sequence[Hierarchy]) -> None:
        """Raises `ProcessLookupError` if the process has ended, and OSError if its files cannot be opened."""
        self.process = process
        self.huge_memory = 0  # MiB in huge pages, which the kernel counts in no process's resident memory
        self._tap = name.encode()
        self._pressures: Pressures | None = None
        self._last_io = 0, 0
        with ExitStack() as closing:  # closes all files if one of them cannot be used
            try:
                self._stat, self._statm, self._io = (
                    OpenFile(f"/proc/{process.pid}/{x}", closing) for x in ("stat", "statm", "io")
                )
                fields = self._fields()
                if process.boot_id != boot_id() or int(fields[19]) != process.started:
                    raise ProcessLookupError
            except (FileNotFoundError, ProcessLookupError) as error:
                raise ProcessLookupError(f"the QEMU of {name} has ended") from error
            stats = [each.parent / name / "memory.stat" for each in hierarchies if "memory" in each.controllers]
            self._memory_stat = _opened(stats, closing)
            groups = [each.parent / name for each in hierarchies if each.version == 2]
            if groups:
                files = [[group / f"{what}.pressure" for group in groups] for what in _PRESSURES]
                self._pressures = Pressures(files, closing)
            self.close = closing.pop_all().close

    def read(self, traffic: Traffic) -> Reading:
        """Raises `ProcessLookupError` once the process has ended."""
        fields = self._fields()
        memory, shared = self._statm.read().split(None, 3)[1:3]
        sent, received = traffic.get(self._tap, (0, 0))  # what a tap receives, its guest has sent
        active, pressures = UNKNOWN, (UNKNOWN, UNKNOWN, UNKNOWN)
        with suppress(OSError):  # its control group is removed just now
            active = active_bytes(self._memory_stat.read()) / MIB if self._memory_stat is not None else UNKNOWN
        with suppress(OSError):
            pressures = self._pressures.read() if self._pressures is not None else pressures
        return Reading(
            (int(fields[11]) + int(fields[12])) / TICKS,
            max(0, int(memory) - int(shared)) * _PAGE / MIB + self.huge_memory,
            active,
            received,
            sent,
            *self._disk_bytes(),
            pressures,
        )

    def _fields(self) -> list[bytes]:
        fields = self._stat.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X", b"x"):
            raise ProcessLookupError
        return fields

    def _disk_bytes(self) -> tuple[int, int]:
        """Bytes that the kernel read from and wrote to disks for it. Some containers do not permit to ask."""
        with suppress(PermissionError, IndexError):
            lines = self._io.read().split(b"\n")
            self._last_io = int(lines[4].split()[1]), int(lines[5].split()[1])
        return self._last_io


def active_bytes(memory_stat: bytes) -> int:
    """The bytes that the kernel counts as used lately, from memory.stat of a control group of either version."""
    found = 0
    for key in (b"\nactive_anon ", b"\nactive_file "):
        begin = memory_stat.find(key)
        if begin >= 0:
            found += int(memory_stat[begin + len(key) : memory_stat.find(b"\n", begin + 1)])
    return found


class HostProbe:
    """Reads the use of all processes of this machine together."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._sys, closing = sys, ExitStack()
        self.close = closing.close
        self._stat, self._meminfo = OpenFile(proc / "stat", closing), OpenFile(proc / "meminfo", closing)
        self._net, self._disks = _opened([proc / "net/dev"], closing), _opened([proc / "diskstats"], closing)
        self._pressures = Pressures([[proc / "pressure" / what] for what in _PRESSURES], closing)
        self._outer: dict[bytes, bool] = {}  # by interface, whether it leads out of this machine
        self._whole: dict[bytes, bool] = {}  # by disk, whether it is a whole one

    def read(self) -> tuple[Reading, Traffic]:
        fields = self._stat.read().split(b"\n", 1)[0].split()
        # user, nice, system; irq, softirq, steal. Guests' time is in user (proc(5)).
        busy = sum(map(int, (*fields[1:4], *fields[6:9])))
        memory = {line.split(b":")[0]: line for line in self._meminfo.read().split(b"\n", 8)[:8]}
        total, available, active = (int(memory[key].split()[1]) for key in (b"MemTotal", b"MemAvailable", b"Active"))
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


def _traffic(data: bytes) -> dict[bytes, tuple[int, int]]:
    found = {}
    for line in data.split(b"\n")[2:-1]:
        name, _, figures = line.partition(b":")
        fields = figures.split(None, 9)
        found[name.strip()] = int(fields[0]), int(fields[8])
    return found


# --- sampling ----------------------------------------------------------------------------------------

HOUR = 3600.0  # seconds that are remembered
MOST_BYTES = 64 << 20  # of all samples together: an hour of 400 VMs; with more VMs, less than an hour is remembered
KNOWN_AFTER_END, MOST_ENDED = 600.0, 1000  # seconds for which the use of a VM is remembered after its end; VMs
_LOOK_AGAIN = 10.0  # seconds after which directories and manifests are read again, though they seem unchanged
_LOAD_SPAN = 60.0  # seconds
_LOAD_STALE = 10.0  # seconds without a sample after which the load is unknown
_CPU_STEP, _MEMORY_STEP = 0.1, 64  # to which a load is rounded, so that observations of a quiet host are equal


@dataclass(slots=True)
class _Series:
    """The samples of a host or VM, and the last counters."""

    history: History = field(default_factory=History)
    last: tuple[float, Reading] | None = None
    peak: float = 0.0

    def note(self, now: float, reading: Reading) -> None:
        before, self.last = self.last, (now, reading)
        self.peak = max(self.peak, reading.memory)
        if before is not None and now > before[0]:
            self.history.add(now, _rates(now - before[0], before[1], reading))


def _rates(seconds: float, before: Reading, after: Reading) -> list[float]:
    """The figures of a sample, in the order of `usage.MEANS`."""
    counted = ((before.cpu_s, after.cpu_s), (before.received, after.received), (before.sent, after.sent),
               (before.read, after.read), (before.written, after.written))  # fmt: skip
    # A counter may go back: an interface that was made anew begins at 0.
    cpus, *traffic = (max(0.0, (new - old) / seconds) for old, new in counted)
    stalled = [
        UNKNOWN if UNKNOWN in (old, new) else min(1.0, max(0.0, (new - old) / seconds))
        for old, new in zip(before.pressures, after.pressures, strict=True)
    ]
    return [cpus, after.memory, *traffic, after.active, *stalled]


@dataclass(slots=True)
class _Vm:
    probe: VmProbe
    series: _Series = field(default_factory=_Series)
    earlier_s: float = 0.0  # CPU seconds of its processes before it slept

    def usage(self, last: Reading, usage: Usage | None = None, memory: float = 0.0) -> VmUsage:
        return VmUsage(self.earlier_s + last.cpu_s, self.series.peak, usage, memory)


class Sampler:
    """Samples this host, and the VMs below `vms`, in a thread of its own. Methods other than `run` may be called from
    any thread. VMs are found by their manifests, whichever site or process created them. A VM that vanishes in the
    middle of a sample is left out of it. An error with one VM does not stop the sampling of others."""

    def __init__(
        self, vms: Path, interval: float = 1.0, found: Callable[[], Sequence[Hierarchy]] = hierarchies
    ) -> None:
        self.interval = interval
        self._directory = vms
        self._hierarchies = found()
        self._host_probe, self._host = HostProbe(), _Series()
        self._vms: dict[str, _Vm] = {}
        self._ended: dict[str, tuple[float, VmUsage]] = {}
        self._asleep: set[str] = set()  # those of them that go on with another process
        self._stamp, self._read_at = -1, -math.inf
        self._awaited: set[str] = set()  # VMs whose QEMU was not seen yet
        self._lock = threading.Lock()  # held for a moment, never while files are read
        self._load: tuple[float, Load] | None = None
        self._failed = ""

    # --- sampling -------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            try:
                self.sample(time.monotonic())
                self._failed = ""
            except Exception as error:  # a defect must not end the sampling, and is told once
                if (reason := f"{type(error).__name__}: {error}") != self._failed:
                    log.exception("host not sampled", reason=reason)
                self._failed = reason
            due = max(due + self.interval, time.monotonic())  # samples that are late are not made up for
        self.close()

    def sample(self, now: float) -> None:
        """Take one sample of everything. `now` is monotonic."""
        self._find_vms(now)
        reading, traffic = self._host_probe.read()
        readings: list[tuple[_Vm, Reading]] = []
        ended: list[str] = []
        for name, vm in self._vms.items():
            try:
                readings.append((vm, vm.probe.read(traffic)))
            except ProcessLookupError:
                ended.append(name)
            except (OSError, ValueError, IndexError) as error:
                log.debug("VM not sampled", vm=name, reason=str(error))
        with self._lock:
            self._host.note(now, reading)
            for vm, read in readings:
                vm.series.note(now, read)
            for name in ended:
                self._end(name, now)
        self._note_load(now)

    def _find_vms(self, now: float) -> None:
        """Open the probes of new VMs. The directory is read only if it has changed."""
        try:
            stamp = os.stat(self._directory).st_mtime_ns  # noqa: PTH116  (each second)
        except OSError:
            stamp = -1
        again = now - self._read_at >= _LOOK_AGAIN
        if stamp != self._stamp or again:
            self._stamp, self._read_at = stamp, now
            try:
                names = {entry.name for entry in os.scandir(self._directory) if site_of(entry.name)}
            except OSError:
                names = set()
            self._awaited = names if again else (self._awaited & names) | (names - self._vms.keys())
            self._asleep &= names
        for name in sorted(self._awaited):
            self._open(name)

    def _open(self, name: str) -> None:
        known = manifest.read(self._directory / name)
        vm = self._vms.get(name)
        if known is None or not known.pid:
            return  # it stays awaited
        if vm is None or vm.probe.process != known.process:
            try:
                probe = VmProbe(name, known.process, self._hierarchies)
            except ProcessLookupError:
                self._awaited.discard(name)
                return
            except OSError as error:
                log.debug("VM not sampled", vm=name, reason=str(error))
                return
            with self._lock:
                if vm is not None:
                    vm.probe.close()
                vm = self._vms[name] = self._goes_on(name, probe)
                self._limit_histories()
        vm.probe.huge_memory = known.huge_memory
        self._awaited.discard(name)

    def _goes_on(self, name: str, probe: VmProbe) -> _Vm:
        """The VM with this process. One that slept goes on counting; any other one is another VM of the same name."""
        _, before = self._ended.pop(name, (0.0, None))
        if before is None or name not in self._asleep:
            return _Vm(probe)
        self._asleep.remove(name)
        return _Vm(probe, _Series(peak=before.peak), before.cpu_s)

    def _end(self, name: str, now: float) -> None:
        vm = self._vms.pop(name)
        vm.probe.close()
        if vm.series.last is not None:
            self._ended[name] = now, vm.usage(vm.series.last[1])
        known = manifest.read(self._directory / name)
        if known is not None and known.phase is manifest.VmPhase.ASLEEP:
            self._asleep.add(name)
        self._awaited.add(name)  # perhaps there is another VM of that name already
        old = [
            other for other, (at, _) in self._ended.items() if now - at > KNOWN_AFTER_END and other not in self._asleep
        ]
        for other in old or list(self._ended)[: max(0, len(self._ended) - MOST_ENDED)]:
            del self._ended[other]
        self._limit_histories()

    def _limit_histories(self) -> None:
        """Let all samples together take no more than `MOST_BYTES`."""
        limit = min(int(HOUR / self.interval), MOST_BYTES // (SAMPLE_BYTES * (len(self._vms) + 1)))
        for vm in self._vms.values():
            vm.series.history.limit = limit

    def _note_load(self, now: float) -> None:
        usage = self._host.history.usage(now - _LOAD_SPAN, self.interval)
        if usage is not None:
            cpus = round(round(usage.cpus / _CPU_STEP) * _CPU_STEP, 1)
            self._load = now, Load(cpus, round(usage.memory / _MEMORY_STEP) * _MEMORY_STEP)

    def close(self) -> None:
        """Close all files. The samples stay."""
        with self._lock:
            for vm in self._vms.values():
                vm.probe.close()
            self._vms.clear()
            self._host_probe.close()

    # --- results --------------------------------------------------------------------------------------

    def load(self) -> Load | None:
        """The use of the host in the last minute; None if that is not known."""
        latest = self._load
        return latest[1] if latest is not None and time.monotonic() - latest[0] < _LOAD_STALE else None

    def usage(self, span: float, prefix: str = "") -> HostUsage:
        """The use in the last `span` seconds, by the host and by the VMs of `prefix`. Takes below 1 ms for each VM."""
        now = time.monotonic()
        with self._lock:
            host = self._host.history.usage(now - span, self.interval)
            vms = {name: usage for name, (_, usage) in self._ended.items() if name.startswith(prefix)}
            for name, vm in self._vms.items():
                if name.startswith(prefix) and (last := vm.series.last) is not None:
                    found = vm.series.history.usage(now - span, self.interval)
                    vms[name] = vm.usage(last[1], found, last[1].memory)
        return HostUsage(host, vms)
