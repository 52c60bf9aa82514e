"""The types of the API: what the daemon transmits, and what its clients and the web page read and ask for.

The service converts rows to them in `service.convert`; a client decodes a document of JSON with `decode`. They import
nothing else of Multiverse. Memory and disk are in MiB, durations in seconds, times are Unix times of the controller's
machine. Each field has a comment, which `make docs` writes to docs/api.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

T = TypeVar("T")


@cache
def adapter(of: Any) -> TypeAdapter[Any]:
    return TypeAdapter(of)


def decode(of: type[T], document: Any) -> T:
    """The document as a value of type `of`, for example `decode(list[JobView], client.jobs())`. Fields that the type
    does not know are ignored, because a newer daemon may send more. Raises `pydantic.ValidationError` if a field is
    missing or of another type."""
    value: T = adapter(of).validate_python(document)  # type: ignore[arg-type]  # a type is hashable
    return value


# --- jobs -------------------------------------------------------------------------------------------------

STAGES = ("waiting", "provisioning", "running", "ending")  # of a job, in order


@dataclass(frozen=True, slots=True)
class JobUsageView:
    """What a run of a job used: the processes of its VMs since it began. The guest's kernel, daemons and page cache
    count as far as the job made them grow."""

    seconds: float  # how long it ran
    cpus: float  # CPUs in use on each node, as a mean
    efficiency: float  # the share of the CPUs that it asked for
    peak: float  # the most memory on one node
    suggestion: tuple[int, int] | None  # CPUs and MiB for each node that suffice; null if that is not notably less
    text: str  # all of it in one line


@dataclass(frozen=True, slots=True)
class JobEvictionView:
    """A running job was to leave its host, or its run was ended for another job."""

    at: float  # when that began
    way: str  # move; save: it goes on elsewhere in another run; requeue: it begins anew; or cancel
    host: str  # that it left; empty where names of hosts are not shown
    reason: str
    memory: int  # MiB of its VMs, which were sent
    took: float | None  # seconds until it went on elsewhere, or ran again; null: it has not
    under_way: bool = False  # it has not gone on yet; if it has not at all, it stayed on its host


@dataclass(frozen=True, slots=True)
class JobView:
    """One attempt of a job."""

    job_id: str
    name: str
    uid: int
    attempt: int  # its number
    state: str
    nodes: int
    cpus: int  # for each node
    memory: int  # for each node
    image: str
    kind: str  # of clone
    since: float  # when the attempt entered its state
    waiting: str  # why it waits
    reason: str  # how it ended
    restarts: int
    vms: tuple[str, ...]
    quarantined: str  # why it is quarantined; empty: it is not
    usage: JobUsageView | None = None  # once it has run; null if that is not known, and in snapshots
    origin: str = ""  # the partition of physical nodes that it is moved from; empty if it was submitted to the gate
    stage: str = ""  # waiting, provisioning, running or ending; empty if it has ended
    user: str = ""  # a name; the uid while the name is not known
    order: int = 0  # its place in the queue, as far as the scheduler tells
    evictions: tuple[JobEvictionView, ...] = ()  # of the job, also by earlier attempts: the latest ten


@dataclass(frozen=True, slots=True)
class PhaseView:
    """A named part of an attempt's time."""

    name: str
    began: float  # the daemon's monotonic time
    seconds: float
    stages: tuple[tuple[str, float], ...] = ()  # parts of the effect that ran in this phase, in order: name, seconds


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line of the journal."""

    at: float  # seconds from the first entry on
    subject: str
    event: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimelineView:
    """The history of one attempt and its VMs."""

    job_id: str
    attempt: int
    state: str
    wall: float  # when the first entry was made
    phases: tuple[PhaseView, ...]
    entries: tuple[TimelineEntry, ...]
    waiting: str = ""  # why the attempt waits now


# --- VMs, templates and hosts -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SizeView:
    cpus: int
    memory: int
    disk: int  # 0: the image's own size
    net: int = 0  # Mbit/s; 0 of a VM: it has no limit, and claims none


@dataclass(frozen=True, slots=True)
class VmView:
    """A live VM."""

    name: str
    state: str
    host: str
    image: str
    kind: str  # of clone
    cpus: int
    memory: int
    address: str
    attempt: int | None  # the attempt that it serves
    job_id: str
    since: float  # when it entered its state
    cpu_s: float  # CPU seconds of its process; 0 in snapshots
    private: float  # memory that no other process maps: it is freed when the VM ends
    shared: float  # memory of template and programs, whole in every VM that maps it; 0 in snapshots
    pss: float  # private, with a proportional part of the shared memory; 0 unless exact figures were asked for
    reason: str
    quarantined: str  # why it is quarantined; empty: it is not
    other_host: str = ""  # to which it moves, or at which something of it is left after a move


@dataclass(frozen=True, slots=True)
class MoveBegun:
    """The beginning of a move was committed."""

    vm: str
    job_id: str
    host: str  # where it runs
    target: str  # the host to which it moves


@dataclass(frozen=True, slots=True)
class TemplateView:
    host: str
    image: str
    state: str
    cpus: int
    memory: int
    account: str  # the only account whose jobs are served from it; empty: every account
    since: float  # when it entered its state
    references: int  # live VMs that were forked from it, or are about to be
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A host that is borrowed from the scheduler."""

    name: str
    state: str  # planned, waiting (for its pilot job), starting, idle, held (by VMs), ending, lost or releasing
    partition: str
    account: str
    cpus: int  # that are asked for; 0: a whole node
    memory: int  # that is asked for; 0: a whole node
    pilot: str  # the id of its pilot job; empty if there is none yet
    node: str  # the physical node that it runs on; empty if there is none yet
    ends: float | None  # when it has ended at the latest
    since: float  # when it entered its state
    reason: str


@dataclass(frozen=True, slots=True)
class SavedView:
    """A job that is being saved, or is saved, or a checkpoint of a job that goes on."""

    name: str
    job_id: str
    uid: int
    checkpoint: bool
    # capturing (a checkpoint), preparing, freezing, cutting (off from the scheduler), writing, keeping (in memory),
    # stored, copying (to another storage), resuming, holding, thawing, undoing or discarding
    state: str
    since: float  # when it entered its state
    vm: str  # in which its script runs
    vms: list[str]  # all of them
    spread: float | None  # seconds between the first and the last one that was frozen; null: there is one VM
    bytes: int  # of its files; 0 until they are complete
    storage: str  # where its files are, or are written; empty: nowhere, because it is in memory
    copy: str  # another storage with the same files; empty: none has them
    in_memory: bool  # it could not be written, and is kept in the memory of its host
    held: bool  # until somebody resumes it
    reason: str


@dataclass(frozen=True, slots=True)
class SavedChanged:
    """The saving, or resuming, of this job was committed."""

    job_id: str


@dataclass(frozen=True, slots=True)
class NumaView:
    """A NUMA node of a host."""

    number: int
    cpus: tuple[int, ...]
    memory: int
    free: int  # memory
    taken: SizeView  # by VMs that are kept there; 0 on a host with one node
    distances: tuple[int, ...]  # from each of the host's nodes


@dataclass(frozen=True, slots=True)
class HostFaultView:
    """VMs of an image do not come up on a host. It then gets one job at a time until a VM of that image has joined."""

    image: str
    failures: int  # in a row; 0 if an operator had it tried at once
    until: float  # until then it gets no VM of that image
    reason: str


@dataclass(frozen=True, slots=True)
class HostView:
    """A host. While it is out of reach, its figures are as last observed; they are 0 if it never was."""

    name: str
    reachable: bool
    declared: SizeView  # its capacity for VMs
    claimed: SizeView  # what claims have reached
    machine: SizeView | None  # the machine itself; null: unknown
    accelerator: str
    abilities: tuple[str, ...]
    images: Mapping[str, tuple[str, ...]]  # each image on the host, with what it can do there
    vms: int
    available: int  # memory for new processes; 0: unknown; in steps of 128 MiB in snapshots
    private: float  # sum over its VMs; 0 in snapshots
    shared: float  # sum over its VMs, once for each VM that maps it; 0 in snapshots
    templates: float  # memory of templates, with all their copies; 0 in snapshots
    template_copies: int
    overcommit: float  # of memory; above 1 only while the machine keeps `floor` available
    floor: int
    usable: SizeView  # what claims may reach, with over-commitment
    cpu_overcommit: float = 1.0
    disk_overcommit: float = 1.0
    state: str = "up"  # up, avoided, closing (drained later), draining, drained, away, silent, fencing or fenced
    reason: str = ""  # why it is avoided, drained or fenced
    drain_from: float | None = None  # when it is drained
    away_since: float | None = None  # when it was last heard of; null: it is in reach
    why: str = ""  # why reaching it fails
    jobs: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # what it can do for its VMs beyond its abilities, such as vhost-net
    todo: str = ""  # what an operator can do; empty: nothing
    features_off: Mapping[str, str] = field(default_factory=dict)  # what it does without, and why
    lease: LeaseView | None = None  # of a leased host
    numa: tuple[NumaView, ...] = ()  # while it is in reach; empty in snapshots
    faults: tuple[HostFaultView, ...] = ()
    # The images of jobs that name none and of pools that it lacks, in reach. The controller copies them there once they
    # are wanted, if it has them.
    lacks: tuple[str, ...] = ()
    # The machine that VMs see, on hosts from and to which they move while they run; empty: none do. VMs move between
    # hosts of which this is the same.
    moves: str = ""
    # The newest CPU model with which VMs would move between all hosts whose CPUs have its vendor. Empty: there is none,
    # or they do as it is.
    common_cpu: str = ""


@dataclass(frozen=True, slots=True)
class HostsChanged:
    """What became of a change to hosts."""

    done: tuple[str, ...]  # hosts for which it was committed
    refused: Mapping[str, str]  # hosts for which it was refused, and why


@dataclass(frozen=True, slots=True)
class EvictionView:
    """A running job that would leave its host now."""

    method: str  # drain, preemption, lease or packing
    job_id: str
    vm: str  # its VM on that host
    host: str
    target: str  # the host to which the VM would move; empty: it would not
    memory: int  # MiB to be sent
    reason: str
    held: str = ""  # the limit by which that does not begin; empty: it does
    held_since: float | None = None  # since when that limit holds evictions for this reason; null: it does not
    ends: str = ""  # requeue or cancel: its run would be ended so; empty: it would move, or else be saved


@dataclass(frozen=True, slots=True)
class VmIdentity:
    """What one guest reports about itself."""

    name: str
    job_id: str
    skew: int  # its clock minus the host's, in milliseconds
    facts: Mapping[str, str]  # each property that must be unique
    problems: tuple[str, ...]  # what is wrong, one sentence each


@dataclass(frozen=True, slots=True)
class IdentityAudit:
    """The comparison of all running VMs."""

    vms: tuple[VmIdentity, ...]
    distinct: bool  # there are at least two VMs, all have answered, and none has a problem


# --- the daemon, and what is wrong ------------------------------------------------------------------------

AlertKind = Literal[
    "source",
    "hints",
    "store",
    "memory",
    "disk",
    "image",
    "quarantine",
    "back-off",
    "avoided",
    "placement",
    "settings",
    "template",
    "host",
    "fenced",
    "nodes",
    "user",
    "effect",
    "orphan",
    "unserved",
    "eviction",
]

Severity = Literal["critical", "warning", "notice"]


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that is wrong."""

    kind: AlertKind
    name: str
    message: str  # what is wrong
    remedy: str  # what an operator can do
    repair: str = ""  # what `multiverse repair NAME` would do; empty: there is no such repair
    needs_fenced: bool = False  # the repair needs the operator's assurance that the host is switched off
    version: int = 0  # rises with each change of the record: an alert that is there after a repair is a new one
    jobs: tuple[str, ...] = ()  # that are affected
    severity: Severity = "warning"  # critical: stops or endangers jobs now; notice: asks for nothing
    command: str = ""  # the command to copy: the repair, or what the remedy names; empty: none


@dataclass(frozen=True, slots=True)
class SourceView:
    """A source of observations: the scheduler, or what shows hosts."""

    name: str
    known: bool
    observations: int  # since the daemon's start
    age: float  # since the last successful one began; 0: there is none
    unknown_for: float  # how long every observation has failed
    failure: str  # the last error
    awaited: float = 0.0  # how long the observation that runs has waited for its answer; 0: none runs


@dataclass(frozen=True, slots=True)
class PoolView:
    """A warm pool. A pool of parked VMs has no size: `cpus` and `memory` are 0."""

    image: str
    depth: str
    cpus: int
    memory: int
    least: int  # spares that it keeps at least
    most: int
    wanted: int  # its present target
    ready: int
    creating: int
    offered: int  # spares that a job may take by itself


@dataclass(frozen=True, slots=True)
class StatusView:
    """The daemon's process and site, with the number of objects by state."""

    pid: int
    version: str
    site: str
    up: float  # how long it runs
    sources: tuple[SourceView, ...]
    jobs: Mapping[str, int]  # by stage
    attempts: Mapping[str, int]
    vms: Mapping[str, int]
    templates: Mapping[str, int]
    pools: tuple[PoolView, ...]
    alerts: tuple[Alert, ...]


@dataclass(frozen=True, slots=True)
class PruneView:
    """How many records were deleted, or would be."""

    older_than: float  # seconds
    next: str  # where the next request goes on (`PruneRequest.after`); empty when all is done
    dry_run: bool
    attempts: int
    vms: int
    offers: int
    templates: int
    journal: int  # entries
    leases: int = 0
    hosts: int = 0


# --- why jobs wait, and what would start ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReasonView:
    """A reason as a value. Jobs and hosts are left out where they are not shown."""

    kind: str
    text: str  # the reason in words
    figures: dict[str, int | float | str]
    jobs: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    because: tuple[ReasonView, ...] = ()  # the reasons that it rests on


@dataclass(frozen=True, slots=True)
class HostGroupView:
    """Hosts that are alike for one job."""

    hosts: str  # a node set; empty where names of hosts are not shown
    count: int
    fits: bool  # they could take at least one of its VMs now
    why: str  # why they are passed over, or what fits
    kind: str = ""  # of that reason


@dataclass(frozen=True, slots=True)
class ExplanationView:
    """What is said of one job, or of one task of an array."""

    job_id: str
    name: str
    uid: int
    attempt: int | None  # the latest; null: it has none yet
    state: str  # of the attempt
    waiting_since: float | None  # when it was submitted; null: it does not wait
    short: str  # what its user reads in Slurm's AdminComment
    text: str  # one to three sentences
    todo: str  # what its user can do; empty: nothing
    ahead: int  # jobs before it
    behind: str  # the job that keeps it waiting; empty: none, or it may not be named
    expected: float | None  # when it starts at the latest; null: nobody can tell
    hosts: tuple[HostGroupView, ...] = ()  # all hosts of the site, while it waits for VMs
    reasons: tuple[ReasonView, ...] = ()  # the sentences of `text` as values
    evictions: tuple[JobEvictionView, ...] = ()  # as in JobView


@dataclass(frozen=True, slots=True)
class ExplanationsView:
    """A job, or the first tasks of an array, the live ones first."""

    jobs: tuple[ExplanationView, ...]
    more: int = 0  # tasks that are left out


@dataclass(frozen=True, slots=True)
class StartableView:
    """A size of a node, and how many jobs of one such node would start at once."""

    cpus: int
    memory: int
    disk: int
    now: int
    with_template: int  # how many more fit on hosts that have to build the template first


@dataclass(frozen=True, slots=True)
class CapacityUsageView:
    """What the hosts in sight have, with the claims on it."""

    hosts: int
    closed_hosts: int  # that take no new VM
    total: SizeView  # what may be claimed
    jobs: SizeView
    spares: SizeView
    templates: SizeView
    free: SizeView  # on hosts that take new VMs
    closed: SizeView  # free on hosts that take none


@dataclass(frozen=True, slots=True)
class CapacityView:
    """What would start at once. While a job blocks, a later one starts only if it does not delay that job."""

    image: str  # this was computed for it
    usage: CapacityUsageView
    sizes: tuple[StartableView, ...]
    waiting: int  # jobs in the queue
    blocked: bool
    blocked_by: str  # the job that waits for capacity and comes before all later ones; empty if it may not be named


@dataclass(frozen=True, slots=True)
class ImageView:
    """An image that a job may request."""

    name: str
    default: bool  # jobs that request none get it
    hosts: int  # in reach that have it
    about: str  # what is in it; empty: that is not known here


@dataclass(frozen=True, slots=True)
class TrialView:
    """What would become of one request."""

    starts: bool  # at once
    never: bool  # it would be refused
    why: str  # why it would wait, or what its VMs would be
    hosts: str  # where it would start: a node set
    ahead: int  # as in ExplanationView
    behind: str  # as in ExplanationView
    expected: float | None  # as in ExplanationView
    alone: float | None  # when it would start at the latest if no other job waited
    groups: tuple[HostGroupView, ...] = ()


# --- utilization ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UsageView:
    """What a host or a VM has used, as means; the peaks are the highest of the samples. A pressure is the share of the
    time, from 0 to 1, in which a process waited. null: the kernel does not tell."""

    span: float  # seconds
    cpus: float  # in use
    cpus_peak: float
    memory: float  # in use
    memory_peak: float
    received: float  # bytes per second
    sent: float  # bytes per second
    read: float  # bytes per second
    written: float  # bytes per second
    active: float | None  # memory that was used lately
    cpu_pressure: float | None
    memory_pressure: float | None
    io_pressure: float | None


@dataclass(frozen=True, slots=True)
class UtilizationView:
    """A host with all its processes, or a VM with the memory and CPU time of its process on the host. A figure that is
    not known is null."""

    kind: str  # host or vm
    name: str
    host: str  # of a VM
    job_id: str  # of a VM that serves a job
    cpus: int  # of the host's machine, or the VM; 0: unknown
    memory: int  # of the host's machine, or the VM; 0: unknown
    now: UsageView | None  # a few seconds old
    five_minutes: UsageView | None
    hour: UsageView | None


@dataclass(frozen=True, slots=True)
class UsagePoint:
    """A row of the history."""

    wall: int  # when it begins
    span: int  # seconds; `usage.span` of them are known
    usage: UsageView


@dataclass(frozen=True, slots=True)
class CompatibleHostView:
    """A host that has room for a VM now."""

    name: str
    free: SizeView  # what may still be claimed there
    claim: SizeView  # what the VM would claim, with its guest's reserve
    holds: int  # how many of them fit
    use: float  # the share in use of its CPUs or memory, whichever is more; by claims where nothing is measured


# --- the whole, for the web page and `multiverse top` -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quantiles:
    """How long something took, in seconds."""

    count: int
    p50: float  # the median
    p95: float  # the 95th percentile


@dataclass(frozen=True, slots=True)
class RatesView:
    """What happened in the last quarter of an hour."""

    step: float  # seconds of one entry of each series; the newest is the last, and not over yet
    series: Mapping[str, tuple[int, ...]]  # jobs submitted, started and ended, VMs made, and failures
    latencies: Mapping[str, Quantiles]  # phases; `start`: until the job runs; `provision`: the same from admission on


@dataclass(frozen=True, slots=True)
class EvictionCounts:
    """How many evictions of one kind have begun in the last six hours, or since the daemon's start."""

    way: str  # move, save, requeue or cancel
    cause: str  # drain, preemption, lease, packing or operator
    step: float  # seconds of one entry of `begun`; the newest is the last, and not over yet
    begun: tuple[int, ...]
    failed: int  # by which a job did not leave its host


@dataclass(frozen=True, slots=True)
class SummaryView:
    """What is said of the whole."""

    site: str
    version: str
    wall: float  # when the snapshot was made
    up_since: float
    jobs: Mapping[str, int]  # by stage
    vms: Mapping[str, int]  # by state
    sources: Mapping[str, str]  # each with why it is unknown; empty: it is known
    rates: RatesView
    evictions: tuple[EvictionCounts, ...] = ()  # of kinds that there were


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything. A `Delta` of the next number follows it. Figures that change all the time are left out, so that a
    document is sent again only when something has changed."""

    number: int  # rises with each snapshot
    summary: SummaryView
    hosts: tuple[HostView, ...]
    vms: tuple[VmView, ...]
    jobs: tuple[JobView, ...]
    alerts: tuple[Alert, ...]
    evictions: tuple[EvictionView, ...] = ()  # that a limit holds back


@dataclass(frozen=True, slots=True)
class Delta:
    """New and changed documents since the snapshot before."""

    number: int
    summary: SummaryView | None = None  # null: it has not changed
    hosts: tuple[HostView, ...] = ()
    vms: tuple[VmView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    alerts: tuple[Alert, ...] = ()
    evictions: tuple[EvictionView, ...] = ()
    # Keys of documents that are gone: names, numbers of attempts for jobs, kind and name for alerts, method and VM for
    # evictions.
    gone: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# --- requests ---------------------------------------------------------------------------------------------

_IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class TemplateRequest(BaseModel):
    """Which templates to build or to drop. If only one of `cpus` and `memory` is given, the other is that of the base
    size. To build, a missing size is the base size, and a missing account means every account. To drop, a missing size
    or account matches all."""

    image: str = Field(min_length=1, max_length=64, pattern=_IMAGE)
    host: str = Field(default="", max_length=255)  # empty: the only host that there is
    cpus: int | None = Field(default=None, ge=1, le=4096)
    memory: int | None = Field(default=None, ge=1, le=1 << 30)
    account: str | None = Field(default=None, max_length=255)


class HostRequest(BaseModel):
    """What to do to hosts."""

    hosts: str = Field(min_length=1, max_length=100_000)  # a ClusterShell node set, such as n[1-4]
    reason: str = Field(default="", max_length=200)  # of a drain
    begins: float | None = Field(default=None, ge=0, le=1e11)  # when a drain begins; null: now
    move: bool = False  # at a drain: VMs of running jobs move to other hosts
    save: bool = False  # at a drain: running jobs that no other host takes are saved


class MoveRequest(BaseModel):
    """Which VM to move while its job runs."""

    what: str = Field(min_length=1, max_length=100)  # the name of a VM, or the id of a job of one VM
    host: str = Field(default="", max_length=100)  # where to; empty: to any host that has room and makes its machine


class PruneRequest(BaseModel):
    """Which records to delete."""

    older_than: float | None = Field(default=None, ge=0, le=1e10)  # seconds since their end; null: as in the settings
    dry_run: bool = False  # they are only counted
    after: str = Field(default="", max_length=100)  # `PruneView.next` of the answer before


class RepairRequest(BaseModel):
    """Which alert to repair."""

    name: str = Field(min_length=1, max_length=255)
    fenced: bool = False  # the operator's assurance that the host of that name is switched off


class TrialRequest(BaseModel):
    """A job that somebody may submit."""

    nodes: int = Field(default=1, ge=1, le=1_000_000)
    cpus: int = Field(default=1, ge=1, le=4096)  # for each node
    memory: int = Field(default=512, ge=1, le=1 << 30)  # for each node
    disk: int = Field(default=0, ge=0, le=1 << 40)  # for each node
    image: str | None = Field(default=None, max_length=64, pattern=_IMAGE)  # null: the site's
    kind: Literal["instant", "linked", "full", "auto"] | None = None  # null: the site's
    limit: float | None = Field(default=None, ge=0, le=1e10)  # seconds that it runs at most; null: unlimited


# --- questions of users -----------------------------------------------------------------------------------
# On a Unix socket: one line of JSON with a `Question`. The daemon answers with one line: the answer as of the API's
# route of the same name, or `{"error": …, "hint": …, "status": …}`. Over TCP the line is `{"credential": …}`: a munge
# credential whose payload is the question with its `purpose`. So a credential is good once, for this question only.

PURPOSE = "multiverse-question-1"  # what credentials that carry questions are made for
LONGEST_QUESTION = 16 * 1024  # bytes of one line
JOB_ID = r"[0-9]{1,10}(_[0-9]{1,10})?"


class Question(BaseModel):
    """What users may ask the daemon, or ask of it, without being its operators."""

    model_config = ConfigDict(extra="forbid")

    ask: Literal["explain", "timeline", "capacity", "trial", "images", "saved", "save", "resume", "checkpoint"]
    job: str = Field(default="", pattern=f"^({JOB_ID})?$")  # where the question is about a job
    hold: bool = False  # of `save`
    anew: bool = False  # of `resume`
    shared_files: bool = False  # of `checkpoint`: also of a job that writes to shared files
    request: TrialRequest | None = None  # of `trial`
    purpose: str = Field(default="", max_length=64)
