"""What hosts, VMs and runs of jobs use, as it is measured where they run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from multiverse.core.model.job import JobRef


class Load(NamedTuple):
    """What all processes of a host together have used in the last minute, rounded: CPUs, and memory in MiB that is
    not available to new processes."""

    cpus: float
    memory: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What a host or a VM has used, as means over `span` seconds.

    `cpus` is the number of CPUs in use, `memory` MiB in use, `active` MiB of it that were used lately; the peaks are
    the highest of the samples. `received`, `sent`, `read` and `written` are bytes per second on the network and on
    disks. The pressures are shares of the time, from 0 to 1, in which a process waited for CPU, memory or disks
    (the kernel's pressure stall information, "some"). None: the kernel does not tell.
    """

    span: float
    cpus: float
    cpus_peak: float
    memory: float
    memory_peak: float
    received: float
    sent: float
    read: float
    written: float
    active: float | None = None
    cpu_pressure: float | None = None
    memory_pressure: float | None = None
    io_pressure: float | None = None


PEAKS = ("cpus_peak", "memory_peak")
MEANS = (
    "cpus",
    "memory",
    "received",
    "sent",
    "read",
    "written",
    "active",
    "cpu_pressure",
    "memory_pressure",
    "io_pressure",
)
"""Figures of `Usage`, in an order that does not change: it is that of samples and of columns of the database."""


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
    """What a VM has used: `cpu_s` are the CPU seconds of its process and `peak` the most memory in MiB, both since it
    was started, and `memory` what it had in the last sample. `usage` is None for a VM that has ended a short while
    ago."""

    cpu_s: float
    peak: float
    usage: Usage | None = None
    memory: float = 0.0


@dataclass(frozen=True, slots=True)
class HostUsage:
    """What a host, and each VM on it by name, has used. `usage` is None before the second sample."""

    usage: Usage | None = None
    vms: Mapping[str, VmUsage] = field(default_factory=dict)


LONG_ENOUGH = 60.0
"""Seconds that a run must have taken before another request is suggested: a short one is mostly its start."""

LITTLE_USED = 0.75
"""A request of which more than this share was used is not worth changing."""

MARGIN = 1.25
"""What is suggested is so many times what was used."""

OVERLOADED, NOTABLE = 0.25, 0.05
"""A host was overloaded if its guests counted so much more than it gave, as a share and in CPUs."""

MEMORY_STEP = 64
"""MiB, to a multiple of which a suggestion is rounded up."""


class Baseline(NamedTuple):
    """What a VM had used when its job was seen to begin: CPU seconds, and memory in MiB. `source` answers for it."""

    vm: str
    source: str
    cpu_s: float
    memory: float


@dataclass(frozen=True, slots=True)
class JobUsage:
    """One run of a job. `cpus` and `memory` (MiB) are what it asked for, for each of `nodes`.

    `began` is Unix time, and `seconds` how long it ran; None while it does. `cpu_s` are the CPU seconds of its VMs'
    processes since it began, and `peak` the most memory, in MiB, that one of its VMs took beyond what it had then: both
    contain the guest's kernel and daemons as far as the job made them work, and `peak` the guest's page cache. Memory
    that a guest has used once stays with its VM, so `peak` is no less than what the job needed. `known` says of how
    many of its VMs this is known. `counted_s` are the CPU seconds that the scheduler's accounting has of its processes,
    as its guests counted them; 0 if they are not known. A guest counts also the time in which its CPUs waited for the
    host's: where these are overloaded, that is what the job would have used.
    """

    attempt: int
    job: JobRef
    nodes: int
    cpus: int
    memory: int
    began: float
    baselines: tuple[Baseline, ...] = ()
    seconds: float | None = None
    cpu_s: float = 0.0
    peak: float = 0.0
    known: int = 0
    counted_s: float = 0.0

    @property
    def cpus_given(self) -> float:
        """CPUs that hosts gave to a node, as a mean over the nodes of which it is known and over the run."""
        return self.cpu_s / max(1.0, self.seconds or 0.0) / max(1, self.known)

    @property
    def cpus_used(self) -> float:
        """CPUs in use on a node, as a mean over the nodes and over the run: what hosts gave, or what guests counted
        where that is more."""
        return max(self.cpus_given, self.counted_s / max(1.0, self.seconds or 0.0) / max(1, self.nodes))

    @property
    def efficiency(self) -> float:
        """The share of the CPUs that it asked for which was used."""
        return self.cpus_used / max(1, self.cpus)

    @property
    def suggestion(self) -> tuple[int, int] | None:
        """CPUs and MiB for each node that would have sufficed, if that is notably less than what was asked for; None if
        it is not, or if that cannot be told."""
        if self.seconds is None or self.seconds < LONG_ENOUGH or not self.known:
            return None
        cpus = min(self.cpus, max(1, math.ceil(self.cpus_used * MARGIN)))
        memory = min(self.memory, max(1, math.ceil(self.peak * MARGIN / MEMORY_STEP)) * MEMORY_STEP)
        cpus = cpus if cpus < LITTLE_USED * self.cpus else self.cpus
        memory = memory if memory < LITTLE_USED * self.memory else self.memory
        return (cpus, memory) if (cpus, memory) != (self.cpus, self.memory) else None

    @property
    def text(self) -> str:
        """One line for the job's user."""
        if not self.known or self.seconds is None:
            return ""
        many = " on each node" if self.nodes > 1 else ""
        line = (
            f"used {self.cpus_used:.2f} of {self.cpus} CPUs ({self.efficiency:.0%}) and up to {self.peak:.0f} of"
            f" {self.memory} MiB{many} in {self.seconds:.0f} s, as measured at its VM with the page cache"
        )
        if self.cpus_used - self.cpus_given > max(NOTABLE, self.cpus_given * OVERLOADED):
            line += f" (its host was overloaded, and gave {self.cpus_given:.2f} CPUs)"
        if (less := self.suggestion) is not None:
            line += f"; {less[0]} CPU{'s' if less[0] > 1 else ''} and {less[1]} MiB would have sufficed"
        return line
