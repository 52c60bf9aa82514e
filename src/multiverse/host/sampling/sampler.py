"""Samples the host and its VMs, in a thread of its own.

VMs are found by their manifests, whichever site or process created them. One that vanishes in the middle of a sample is
left out of it. Nothing that goes wrong with a VM stops the sampling of others.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from multiverse.core.model.identity import site_of
from multiverse.core.model.usage import HostUsage, Load, VmUsage
from multiverse.host import manifest
from multiverse.host.cgroups import Hierarchy, hierarchies
from multiverse.host.sampling.history import SAMPLE_BYTES, UNKNOWN, History
from multiverse.host.sampling.probes import HostProbe, Reading, VmProbe

HOUR = 3600.0
"""Seconds that are remembered."""

MOST_BYTES = 64 << 20
"""Of all samples together. An hour of 400 VMs takes as much; with more VMs, less than an hour is remembered."""

KNOWN_AFTER_END, MOST_ENDED = 600.0, 1000
"""Seconds for which what a VM had used is remembered after its end, and of how many."""

_LOOK_AGAIN = 10.0  # seconds after which directories and manifests are read again, though they seem unchanged
_LOAD_SPAN = 60.0  # seconds
_LOAD_STALE = 10.0  # seconds without a sample after which the load is unknown
_CPU_STEP, _MEMORY_STEP = 0.1, 64  # to which a load is rounded, so that observations of a quiet host are equal

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Series:
    """The samples of a host or VM, and what the last one was made of."""

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


class Sampler:
    """Samples this host, and the VMs below `vms`. Methods other than `run` may be called from any thread."""

    def __init__(
        self, vms: Path, interval: float = 1.0, found: Callable[[], Sequence[Hierarchy]] = hierarchies
    ) -> None:
        self.interval = interval
        self._directory = vms
        self._hierarchies = found()
        self._host_probe, self._host = HostProbe(), _Series()
        self._vms: dict[str, _Vm] = {}
        self._ended: dict[str, tuple[float, VmUsage]] = {}
        self._stamp, self._read_at = -1, -math.inf
        self._awaited: set[str] = set()  # VMs whose QEMU was not seen yet
        self._lock = threading.Lock()  # held for a moment, never while files are read
        self._load: tuple[float, Load] | None = None
        self._failed = ""

    # --- sampling -------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Sample until `stop` is set."""
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
        """Open what there is of VMs that are new. The directory is read only if it has changed."""
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
                vm = self._vms[name] = _Vm(probe)
                self._limit_histories()
        vm.probe.huge_memory = known.huge_memory
        self._awaited.discard(name)

    def _end(self, name: str, now: float) -> None:
        vm = self._vms.pop(name)
        vm.probe.close()
        if vm.series.last is not None:
            self._ended[name] = now, VmUsage(vm.series.last[1].cpu_s, vm.series.peak)
        old = [other for other, (at, _) in self._ended.items() if now - at > KNOWN_AFTER_END]
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
        """Close all files. What was sampled stays."""
        with self._lock:
            for vm in self._vms.values():
                vm.probe.close()
            self._vms.clear()
            self._host_probe.close()

    # --- what was sampled -----------------------------------------------------------------------------

    def load(self) -> Load | None:
        """What the host has used in the last minute; None if that is not known."""
        latest = self._load
        return latest[1] if latest is not None and time.monotonic() - latest[0] < _LOAD_STALE else None

    def usage(self, span: float, prefix: str = "") -> HostUsage:
        """What was used in the last `span` seconds, by the host and by the VMs whose names begin with `prefix`. Takes
        a fraction of a millisecond for each VM and minute."""
        now = time.monotonic()
        with self._lock:
            host = self._host.history.usage(now - span, self.interval)
            vms = {name: usage for name, (_, usage) in self._ended.items() if name.startswith(prefix)}
            for name, vm in self._vms.items():
                if name.startswith(prefix) and (last := vm.series.last) is not None:
                    found = vm.series.history.usage(now - span, self.interval)
                    vms[name] = VmUsage(last[1].cpu_s, vm.series.peak, found, last[1].memory)
        return HostUsage(host, vms)
