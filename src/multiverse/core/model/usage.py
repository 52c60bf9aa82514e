"""What hosts, VMs and runs of jobs use, as it is measured where they run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from multiverse.core.model.basics import number_of
from multiverse.core.model.job import JobRef


class Load(NamedTuple):
    """CPUs, and MiB not available to new processes, that all processes of a host used in the last minute."""

    cpus: float
    memory: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a host or a VM has used, as means over `span` seconds; None: the kernel does not tell."""

    span: float
    cpus: float  # in use
    cpus_peak: float  # the highest sample, as of memory
    memory: float  # MiB in use
    memory_peak: float
    received: float  # bytes a second, as are sent, read, written
    sent: float
    read: float
    written: float
    active: float | None = None  # MiB that were used lately
    cpu_pressure: float | None = None  # share of time in which a process waited (PSI, some)
    memory_pressure: float | None = None
    io_pressure: float | None = None


MAY_BE_UNKNOWN = ("active", "cpu_pressure", "memory_pressure", "io_pressure")
PEAKS = ("cpus_peak", "memory_peak")
MEANS = (*("cpus", "memory", "received", "sent", "read", "written"), *MAY_BE_UNKNOWN)
"""Figures of `Usage`. Samples and columns of the database have this order, so it never changes."""


def combined(usages: Sequence[Usage]) -> Usage:
    """What spans that follow each other come to; there is one at least."""
    span = sum(one.span for one in usages)
    figures: dict[str, float | None] = {name: max(getattr(one, name) for one in usages) for name in PEAKS}
    for name in MEANS:
        known = [(one.span, value) for one in usages if (value := getattr(one, name)) is not None]
        weight = sum(seconds for seconds, _ in known)
        figures[name] = sum(seconds * value for seconds, value in known) / weight if weight else None
    return Usage(span, **figures)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class VmUsage:
    """What a VM has used."""

    cpu_s: float  # CPU seconds of its processes since it came to this host
    peak: float  # the most MiB since then
    usage: Usage | None = None  # None: it has ended a short while ago, or sleeps, or was sampled only once
    memory: float = 0.0  # MiB in the last sample; 0: it has ended or sleeps

    @property
    def lives(self) -> bool:
        return self.memory > 0.0


@dataclass(frozen=True, slots=True)
class HostUsage:
    """What a host, and each VM on it by name, has used."""

    usage: Usage | None = None  # None before the second sample
    vms: Mapping[str, VmUsage] = field(default_factory=dict)


LONG_ENOUGH = 60.0  # seconds of a run before another request is suggested: a short one is mostly its start
LITTLE_USED = 0.75  # a request is not worth changing if more than this share was used
MARGIN = 1.25  # what is suggested is so many times what was used

OVERLOADED, NOTABLE = 0.25, 0.05
"""A host was overloaded if its guests counted so much more than it gave, as a share and in CPUs."""

MEMORY_STEP = 64  # MiB: suggestions are multiples of this


class Baseline(NamedTuple):
    """What a VM had used when its job was seen to begin, or 0 at a host that it came to later."""

    vm: str
    source: str  # answers for it
    cpu_s: float
    memory: float  # MiB


@dataclass(frozen=True, slots=True)
class JobUsage:
    """One run of a job. Figures contain its guest's kernel, daemons and page cache. Memory that was used once stays
    with a VM, so `peak` is no less than what the job needed."""

    attempt: int
    job: JobRef
    nodes: int  # that it asked for
    cpus: int  # for each node
    memory: int  # MiB for each node
    began: float  # Unix time
    baselines: tuple[Baseline, ...] = ()
    seconds: float | None = None  # how long it ran; None while it does
    cpu_s: float = 0.0  # CPU seconds of its VMs' processes since it began
    peak: float = 0.0  # the most MiB that a VM took beyond what it had then
    known: int = 0  # of how many VMs this is known
    runs: int = 1  # of the job's processes, with this one: more than 1 if they were saved
    earlier_s: float = 0.0  # seconds of the earlier ones, as far as they are known
    earlier_cpu_s: float = 0.0  # CPU seconds of the earlier ones
    counted_s: float = 0.0  # CPU seconds by the scheduler's accounting, waits for overloaded hosts included; 0: unknown
    ended_for: str = ""  # why the run was ended for another job, if it was
    moved_s: float = 0.0  # CPU seconds at hosts that its VMs have left since it began

    @property
    def cpus_given(self) -> float:
        """CPUs that hosts gave to a node, as a mean over the run and the known nodes."""
        return self.cpu_s / max(1.0, self.seconds or 0.0) / max(1, self.known)

    @property
    def cpus_used(self) -> float:
        """CPUs in use on a node, as a mean: what hosts gave, or what guests counted if that is more."""
        return max(self.cpus_given, self.counted_s / max(1.0, self.seconds or 0.0) / max(1, self.nodes))

    @property
    def efficiency(self) -> float:
        return self.cpus_used / max(1, self.cpus)

    @property
    def suggestion(self) -> tuple[int, int] | None:
        """CPUs and MiB for each node that would have sufficed; None if hardly less, or if nobody can tell."""
        if self.seconds is None or self.seconds < LONG_ENOUGH or not self.known or self.runs > 1:
            return None
        cpus = min(self.cpus, max(1, math.ceil(self.cpus_used * MARGIN)))
        memory = min(self.memory, max(1, math.ceil(self.peak * MARGIN / MEMORY_STEP)) * MEMORY_STEP)
        cpus = cpus if cpus < LITTLE_USED * self.cpus else self.cpus
        memory = memory if memory < LITTLE_USED * self.memory else self.memory
        return (cpus, memory) if (cpus, memory) != (self.cpus, self.memory) else None

    @property
    def text(self) -> str:
        if not self.known or self.seconds is None:
            return ""
        many = " on each node" if self.nodes > 1 else ""
        # A restored VM shares no memory with a template: what it takes says nothing of what its job needed.
        memory = f" and up to {self.peak:.0f} of {self.memory} MiB" if self.runs == 1 else ""
        line = (
            f"used {self.cpus_used:.2f} of {number_of(self.cpus, 'CPU')} ({self.efficiency:.0%}){memory}{many}"
            f" in {self.seconds:.0f} s, as measured at its VM{' with the page cache' if memory else ''}"
        )
        if self.cpus_used - self.cpus_given > max(NOTABLE, self.cpus_given * OVERLOADED):
            line += f" (its host was overloaded, and gave {self.cpus_given:.2f} CPUs)"
        if (less := self.suggestion) is not None:
            line += f"; {number_of(less[0], 'CPU')} and {less[1]} MiB would have sufficed"
        if self.runs > 1:
            seconds, cpu_s = self.earlier_s + self.seconds, self.earlier_cpu_s + max(self.cpu_s, self.counted_s)
            earlier = f"{self.runs - 1} earlier runs" if self.runs > 2 else "earlier run"
            line += f"; with its {earlier}, {seconds:.0f} s and {cpu_s:.0f} CPU seconds in all"
        return f"{self.ended_for}; {line}" if self.ended_for else line
