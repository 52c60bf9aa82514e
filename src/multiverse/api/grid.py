"""What the web page and `multiverse top` show: everything at a glance, as documents that are sent when they change.

A viewer gets a `Snapshot` first and then `Delta`s. Times are Unix times of the controller's machine, so that what has
not changed is not sent again only because it has become older.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from multiverse.api.machines import SizeView


@dataclass(frozen=True, slots=True)
class GridHost:
    """A host. `usable` is what claims may reach in all, with over-commitment; `claimed` is what they have reached.
    `available` is what the machine could give to new processes, in steps of 128 MiB (0: unknown). The other fields are
    those of a `HostView`; `away_since` is None while the host is in reach."""

    name: str
    state: str
    usable: SizeView
    claimed: SizeView
    available: int
    accelerator: str
    images: tuple[str, ...]
    features: tuple[str, ...]
    reason: str = ""
    why: str = ""
    todo: str = ""
    away_since: float | None = None


@dataclass(frozen=True, slots=True)
class GridVm:
    """A VM. `since` is when it entered its state, `private` its unique memory in MiB."""

    name: str
    state: str
    host: str
    image: str
    kind: str
    cpus: int
    memory: int
    address: str
    job_id: str
    attempt: int | None
    since: float
    private: int
    reason: str
    quarantined: str


@dataclass(frozen=True, slots=True)
class GridJob:
    """A live attempt of a job. `order` is its place among the attempts: the queue's order for those that wait, as far
    as the scheduler tells. `user` is a name, or a uid while the name is not known. `reason` is why it waits, or how it
    ends."""

    attempt: int
    job_id: str
    name: str
    user: str
    state: str
    stage: str
    nodes: int
    cpus: int
    memory: int
    image: str
    kind: str
    since: float
    order: int
    reason: str
    restarts: int
    vms: tuple[str, ...]
    quarantined: str


@dataclass(frozen=True, slots=True)
class GridAlert:
    """An alert. `message` says what is wrong, `remedy` what to do, `command` is the command to copy (empty: none)."""

    kind: str
    name: str
    message: str
    remedy: str
    command: str
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds that something took: the median and the 95th percentile of so many."""

    count: int
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class GridRates:
    """What happened in the last quarter of an hour. `step` is the seconds of one entry of each series, the newest last,
    which is not over yet. `series` counts events: jobs submitted, started and ended, VMs made, and failures.
    `latencies` are of the phases of attempts, of `start` (from submission until the job runs) and of `provision` (from
    its admission on)."""

    step: float
    series: Mapping[str, tuple[int, ...]]
    latencies: Mapping[str, Quantiles]


@dataclass(frozen=True, slots=True)
class GridSummary:
    """What is said of the whole. `wall` is when the snapshot was made. `jobs` counts jobs by stage, `sources` maps each
    source to why it is unknown (empty: it is known)."""

    site: str
    version: str
    wall: float
    up_since: float
    jobs: Mapping[str, int]
    vms: Mapping[str, int]
    sources: Mapping[str, str]
    rates: GridRates


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything. `number` rises with each snapshot; a `Delta` of the next number follows it."""

    number: int
    summary: GridSummary
    hosts: tuple[GridHost, ...]
    vms: tuple[GridVm, ...]
    jobs: tuple[GridJob, ...]
    alerts: tuple[GridAlert, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What has changed since the snapshot before: new and changed documents, and the keys of those that are gone.
    Those are names, numbers of attempts for jobs, and kind and name for alerts. A `summary` of None has not changed."""

    number: int
    summary: GridSummary | None = None
    hosts: tuple[GridHost, ...] = ()
    vms: tuple[GridVm, ...] = ()
    jobs: tuple[GridJob, ...] = ()
    alerts: tuple[GridAlert, ...] = ()
    gone: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
