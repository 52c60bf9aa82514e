"""What hosts and VMs use, as it is measured where they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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
