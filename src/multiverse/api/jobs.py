"""Jobs, and where their time went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobUsageView:
    """What a run of a job used, beside what it asked for (`JobView`): `cpus` CPUs on each node as a mean over its
    `seconds`, which is the share `efficiency` of what it asked for, and `peak` MiB at most on one node. They are those
    of its VMs' processes since it began, with the guest's kernel, daemons and page cache as far as it made them grow.
    `suggestion` are CPUs and MiB for each node that would have sufficed, None if that is not notably less; `text` says
    it all in one line."""

    seconds: float
    cpus: float
    efficiency: float
    peak: float
    suggestion: tuple[int, int] | None
    text: str


@dataclass(frozen=True, slots=True)
class JobView:
    """One attempt of a job. `cpus` and `memory` are per node. `age` is the time since the attempt entered its state,
    `waiting` the reason why it waits, `reason` how it ended, `quarantined` why it is quarantined (empty: it is not).
    `usage` is what it used, once it has run; None if that is not known. `origin` is the partition of physical nodes
    that the job is moved from; empty for one that was submitted to the gate."""

    job_id: str
    name: str
    uid: int
    attempt: int
    state: str
    nodes: int
    cpus: int
    memory: int
    image: str
    kind: str
    age: float
    waiting: str
    reason: str
    restarts: int
    vms: tuple[str, ...]
    quarantined: str
    usage: JobUsageView | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class PhaseView:
    """A named part of an attempt's time. `began` is the daemon's monotonic time. `stages` are the parts of the effect
    that ran in this phase, in order: (name, seconds)."""

    name: str
    began: float
    seconds: float
    stages: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line of the journal. `at` counts from the first entry."""

    at: float
    subject: str
    event: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimelineView:
    """The history of one attempt and its VMs. `wall` is the Unix time of the first entry, `waiting` why the attempt
    waits now."""

    job_id: str
    attempt: int
    state: str
    wall: float
    phases: tuple[PhaseView, ...]
    entries: tuple[TimelineEntry, ...]
    waiting: str = ""
