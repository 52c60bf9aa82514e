"""What hosts and VMs use."""

from __future__ import annotations

from dataclasses import dataclass

from multiverse.api.machines import SizeView


@dataclass(frozen=True, slots=True)
class UsageView:
    """What a host or a VM has used, as means over `span` seconds. `cpus` is the number of CPUs in use, `memory` MiB in
    use, `active` MiB of it that were used lately; the peaks are the highest of the samples. `received`, `sent`, `read`
    and `written` are bytes per second. The pressures are shares of the time, from 0 to 1, in which a process waited
    for CPU, memory or disks. None: the kernel does not tell."""

    span: float
    cpus: float
    cpus_peak: float
    memory: float
    memory_peak: float
    received: float
    sent: float
    read: float
    written: float
    active: float | None
    cpu_pressure: float | None
    memory_pressure: float | None
    io_pressure: float | None


@dataclass(frozen=True, slots=True)
class UtilizationView:
    """A host (`kind` host), with all processes on it, or a VM (vm), with the memory and CPU time of its process on the
    host. `cpus` and `memory` are what the host's machine, or the VM, has (0: unknown). `now` is a few seconds old; None
    if it is not known, as the others are. A VM has the `host` that it is on, and a `job_id` if it serves a job."""

    kind: str
    name: str
    host: str
    job_id: str
    cpus: int
    memory: int
    now: UsageView | None
    five_minutes: UsageView | None
    hour: UsageView | None


@dataclass(frozen=True, slots=True)
class UsagePoint:
    """A row of the history: what was used in the `span` seconds from `wall` (Unix time) on, of which `usage.span` are
    known."""

    wall: int
    span: int
    usage: UsageView


@dataclass(frozen=True, slots=True)
class CompatibleHostView:
    """A host that has room for a VM now. `free` may still be claimed there, of which the VM would claim `claim`, with
    its guest's reserve; `holds` of them fit. `use` is the share of its CPUs or of its memory, whichever is more, that
    is in use: as measured, or by claims where that is not known."""

    name: str
    free: SizeView
    claim: SizeView
    holds: int
    use: float
