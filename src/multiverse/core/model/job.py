"""The scheduler's side: jobs, nodes, attempts, reservations, and leases with their pilots."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple, TypeVar

from multiverse.core.model.basics import CloneKind, Key, Size
from multiverse.core.model.reason import Reason, Why


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """No job of ours can run from `begins` until `ends` (Unix times), nor start before unless it ends in time."""

    name: str
    begins: float
    ends: float

    def is_on(self, now: float) -> bool:
        return self.begins <= now < self.ends

    def keeps(self, now: float, limit: float | None) -> bool:
        """Whether a job that takes `limit` seconds at most (None: nobody knows) cannot start now because of it."""
        return now < self.ends and now + (limit or 0.0) > self.begins

    def why(self) -> Reason:
        return Why.RESERVED(name=self.name, begins=self.begins, ends=self.ends)


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The scheduler's reservation of some machines for maintenance, from `begins` until `ends` (Unix times)."""

    name: str
    begins: float
    ends: float
    nodes: tuple[str, ...]  # of the scheduler


def first_on(reservations: Collection[NodeReservation], now: float) -> NodeReservation | None:
    """The reservation that has begun and ends last."""
    return max((one for one in reservations if one.is_on(now)), key=lambda one: one.ends, default=None)


def first_keeping(reservations: Collection[NodeReservation], now: float, limit: float | None) -> NodeReservation | None:
    """The first reservation that keeps a job of `limit` seconds from starting now."""
    return min((one for one in reservations if one.keeps(now, limit)), key=lambda one: one.begins, default=None)


class PilotState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"  # it was told to end (preempted, cancelled, out of time), or is completing
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PilotSeen:
    """A pilot job as the scheduler shows it."""

    name: str  # of its lease's specification, as is the token
    token: str
    state: PilotState
    node: str = ""  # the physical node that it runs on, or ran on last
    ends: float = inf  # Unix time by which it has ended at the latest; infinity: not known
    reason: str = ""  # the scheduler's word on why it waits or ends
    restarts: int = 0  # how often the scheduler has queued it again
    clean: bool = False  # nothing of it can be left on a node: it never ran, or its nodes answered or rebooted


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """What a pilot is asked for."""

    name: str
    token: str
    partition: str
    size: Size = Size(0, 0)  # of a node, in CPUs and MiB; no CPUs: a whole node; no memory: the partition's
    time_limit: float = 3600.0  # seconds
    account: str = ""  # empty: the scheduler's default, as for the user
    user: str = ""


@dataclass(frozen=True, slots=True)
class LeasedHost:
    """How a leased host is reached: by its pilot (the scheduler's id), on a physical node of the scheduler."""

    lease: LeaseSpec
    pilot: str
    node: str
    ends: float = inf


class LeaseState(StrEnum):
    PLANNED = "planned"  # its pilot is to be submitted
    WAITING = "waiting"  # its pilot waits in the scheduler
    STARTING = "starting"  # its pilot runs; its host has not been in sight yet
    IDLE = "idle"  # its host is in sight, and no VM is claimed on it
    HELD = "held"  # VMs are claimed on its host
    ENDING = "ending"  # its pilot is ending: its host takes no VM, and its agent ends its VMs
    LOST = "lost"  # its pilot is over, but its node did not answer: what was on its host may go on
    RELEASING = "releasing"  # its pilot is to be cancelled; nothing of its VMs goes on
    GONE = "gone"  # no pilot of it is left, and nothing is claimed on its host


OPEN_LEASES = (LeaseState.IDLE, LeaseState.HELD)  # the host of a lease in one of these states takes VMs

GIVEN_UP_LEASES = (LeaseState.ENDING, LeaseState.LOST, LeaseState.RELEASING)
"""The host of a lease in one of these states takes no VM any more."""

COMING_LEASES = (LeaseState.PLANNED, LeaseState.WAITING, LeaseState.STARTING)
"""The host of a lease in one of these states is expected to take VMs."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A host borrowed from the scheduler, or about to be. Its host has its name, which never recurs."""

    id: int
    version: int = field(default=0, kw_only=True)
    state: LeaseState = field(default=LeaseState.PLANNED, kw_only=True)
    since: float  # when it entered its state (monotonic)
    spec: LeaseSpec
    pilot: str = ""  # the scheduler's id of it
    node: str = ""  # the physical node
    ends: float | None = None  # Unix time by which the pilot has ended, as last observed; None: nobody can tell
    reason: Reason | None = None
    quarantined: Reason | None = None
    used: int = 0  # how often VMs came to its empty host

    @property
    def key(self) -> Key:
        return Key("lease", self.id)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def host(self) -> LeasedHost:
        return LeasedHost(self.spec, self.pilot, self.node, inf if self.ends is None else self.ends)


V = TypeVar("V")

YEAR = 365 * 86400  # seconds that a job without a time limit takes, as in Slurm (YEAR_MINUTES)


@dataclass(frozen=True, slots=True)
class SaveWish:
    """A job asks to be saved ahead of its time limit, and to go on in a later run."""

    before: float = 0.0  # seconds before its time limit; 0: as the site says
    restart: bool = False  # it may begin anew if it cannot go on


@dataclass(frozen=True, slots=True)
class CheckpointWish:
    """A job asks for checkpoints while it runs: it goes on from the last one if its VM is lost."""

    every: float  # seconds
    shared_files: bool = False  # it may write to shared files, which are not what they were at the checkpoint


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks for, per node."""

    nodes: int
    size: Size  # memory: what the job may use, not what its VM has
    image: str | None = None
    kind: CloneKind | None = None
    features: tuple[str, ...] = ()
    account: str = ""  # its VMs are forked from that account's templates; empty: from shared ones
    placement: str | None = None  # the policy that places its VMs; None: the site's
    per_host: int = 0  # VMs on one host at most; 0: any number
    sockets: int = 1  # of a node, among which its CPUs are divided evenly
    save: SaveWish | None = None
    checkpoint: CheckpointWish | None = None

    def most_on_a_host(self, held: int) -> int:
        """How many of its VMs may be on a host that has room for `held`."""
        return min(held, self.per_host) if self.per_host else held


@dataclass(frozen=True, slots=True, order=True)
class JobRef:
    """One run of one job. Job ids come again and requeued jobs keep theirs, hence all three."""

    job_id: str  # the scheduler's own: 123, 123_4
    submitted: int  # Unix time
    restarts: int = 0  # the scheduler's restart count


class JobState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"  # ended, but its node is not free of it yet
    ENDED = "ended"


class Job(NamedTuple):
    """A job of ours as the scheduler shows it; jobs outside our partitions are never shown. A named tuple, because each
    pass compares all jobs, and Python compares tuples without a call for each (decision 30)."""

    ref: JobRef
    name: str
    uid: int
    state: JobState
    request: Request | None  # None: it cannot be served at all
    problem: str = ""  # why it cannot be served at all
    reason: str = ""
    rank: int = 0  # orders pending jobs as they would start, lower first; depends on the job alone
    eligible: bool = True  # only the gate, or a limit that is counted, keeps it waiting
    held: bool = False
    gated: bool = True  # it waits at the gate
    pinned: str | None = None  # the tag that it is tied to
    nodes: tuple[str, ...] = ()
    result: str = ""  # the scheduler's word for how it ended: COMPLETED, FAILED, …
    exit_code: int = 0
    unopened: bool = False  # it ended before it began: its input, output or error file could not be opened
    work_dir: str = ""
    uses: tuple[tuple[str, int], ...] = ()  # what it will take of the view's limits, by limit
    array: str = ""  # the id of its array, if it is a task of one
    other_id: str = ""  # of a task of an array: the number by which the scheduler shows it, too, if it has one
    limit: float | None = None  # seconds that a run takes at most, until the scheduler has ended it; None: unknown
    ends: float | None = None  # Unix time by which it has ended; None: unknown, or suspended
    deadline: float | None = None  # Unix time at which its time limit is over; None as for `ends`
    batch: bool = True  # it has a script, which the scheduler can start again
    script_node: str = ""  # the node on which that runs; empty: it does not run
    requeues: bool = True  # it has a script, and is queued again if its node fails
    origin: str = ""  # the partition of physical nodes from which it may be moved to a VM
    at_origin: bool = False  # it waits there (eligible: long enough to be moved), or runs there without a VM of ours
    account: str = ""  # that it is charged to
    delayed_until: float | None = None  # Unix time: the scheduler's back-off of a requeued job, beside `eligible`
    preempt_class: str = ""  # its class in `Preemption`; empty where the scheduler preempts no jobs


@dataclass(frozen=True, slots=True)
class Preemption:
    """Whose place a waiting job may take, by the scheduler's own settings. Classes are QOS, or partitions."""

    takes: Mapping[str, frozenset[str]]  # by class of a waiting job: the classes of running jobs that it may preempt
    exempt: Mapping[str, float]  # by class: seconds from its start for which a run is left alone; others have none
    # By class of a running job, what the scheduler does to it itself: requeue, cancel or suspend. A class that is left
    # alone has the mode off, and is in nobody's `takes`.
    modes: Mapping[str, str]
    grace: Mapping[str, float]  # by class: seconds from the signal until the scheduler kills it; others have none


class NodeState(StrEnum):
    IDLE = "idle"
    BUSY = "busy"  # runs a job, or is completing one
    DRAINED = "drained"  # gets no job any more: drained, failing, or registered wrongly; the jobs on it go on
    SILENT = "silent"  # does not answer; the scheduler still waits for it, and for the jobs on it
    DOWN = "down"  # given up: the scheduler ends the jobs on it, or queues them again
    JOINING = "joining"  # known by name, not registered yet


@dataclass(frozen=True, slots=True)
class Node:
    """A VM as the scheduler sees it; only dynamic nodes of our site are shown."""

    name: str
    state: NodeState
    features: tuple[str, ...] = ()
    reason: str = ""
    reserved: bool = False  # it is in a reservation that has begun, and cannot be deleted

    @property
    def answers(self) -> bool:
        """Whether the scheduler reaches it, be it of use or not."""
        return self.state in (NodeState.IDLE, NodeState.BUSY, NodeState.DRAINED)

    @property
    def is_given_up(self) -> bool:
        """Whether the scheduler takes the jobs on it for lost."""
        return self.state is NodeState.DOWN

    @property
    def is_unusable(self) -> bool:
        """Whether it gets no job, though it has registered."""
        return self.state in (NodeState.DRAINED, NodeState.SILENT, NodeState.DOWN)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A VM as the scheduler is to know it as a node."""

    name: str
    address: str  # with prefix length
    size: Size
    features: tuple[str, ...]  # what a job may ask for and find here, the tag among them
    tag: str  # ties jobs to it (`Scheduler.pin`)
    image: str  # the VM's own, as is the account
    account: str = ""
    spare: bool = False  # it joins before its job is known: the job has to wait there until its user is added
    sockets: int = 1
    peers: tuple[tuple[str, str], ...] = ()  # names and addresses (without prefix length) of its job's other VMs
    resumed: int = 0  # which restart of its job goes on in it with the processes of an earlier run; 0: none


@dataclass(frozen=True)
class SchedulerView:
    """One observation of the scheduler. Some jobs and nodes may have been read again since the whole was observed."""

    jobs: Mapping[str, Job] = field(default_factory=dict)  # by id; ended ones may be missing
    nodes: Mapping[str, Node] = field(default_factory=dict)  # by name
    limits: Mapping[str, int] = field(default_factory=dict)  # how much more each limit lets run
    offers: Mapping[str, bool] | None = field(default_factory=dict)  # nodes that jobs may take; True: taken
    takers: Mapping[str, int] = field(default_factory=dict)  # uids whose submissions took nodes
    jobs_began: Mapping[str, float] = field(default_factory=dict)  # when each was last looked for (monotonic)
    nodes_began: Mapping[str, float] = field(default_factory=dict)
    pilots: Mapping[str, PilotSeen] = field(default_factory=dict)  # of our site's leases, by the scheduler's id
    leasable: Mapping[str, Size] = field(default_factory=dict)  # of a node at least, by partition
    reservations: tuple[NodeReservation, ...] = ()  # that keep all nodes of VMs from jobs
    preemption: Preemption | None = None  # None: no job preempts another
    maintenance: tuple[Maintenance, ...] = ()  # of machines that may be hosts

    def is_unusable(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node].is_unusable

    @cached_property
    def occupied(self) -> Set[str]:
        """The nodes that a job has not left. Slurm 22.05 crashes at a job's last step if its node was deleted."""
        free = (JobState.PENDING, JobState.ENDED)
        return {node for job in self.jobs.values() if job.nodes and job.state not in free for node in job.nodes}

    @cached_property
    def _running(self) -> Mapping[str, list[str]]:
        """The jobs that run, by their class in `preemption`."""
        found: dict[str, list[str]] = {}
        for job_id, job in self.jobs.items():
            if job.preempt_class and job.state is JobState.RUNNING:
                found.setdefault(job.preempt_class, []).append(job_id)
        return found

    def running_in(self, classes: Collection[str]) -> list[str]:
        """The jobs that run in these classes of preemption, by id."""
        return sorted(job_id for one in classes for job_id in self._running.get(one, ()))

    def own_id(self, asked: str) -> str:
        """The id of the task of an array that the scheduler also shows by the number `asked`; else `asked` itself."""
        if asked in self.jobs:
            return asked
        return next((job_id for job_id, job in self.jobs.items() if job.other_id == asked), asked)

    def may_have_a_job(self, name: str) -> bool:
        """Whether a job is on a node, or is tied to one of its tags and may start there at any moment."""
        node = self.nodes.get(name)
        if (node is not None and node.state is NodeState.BUSY) or name in self.occupied:
            return True
        tags = node.features if node is not None else ()
        return any(job.pinned in tags for job in self.jobs.values() if job.pinned and job.state is JobState.PENDING)

    def merged(self, part: SchedulerPart, began: float) -> SchedulerView:
        """This view with a part of it read again, in a reading that began at `began` (monotonic)."""
        gone = {job_id for job_id, job in self.jobs.items() if job.uid in part.users} if part.users else set()
        jobs_read = {*gone, *part.job_ids, *part.jobs}
        nodes_read = {*(self.nodes if part.all_nodes else ()), *part.node_names, *part.nodes}
        return replace(
            self,
            jobs={**_without(self.jobs, jobs_read - part.jobs.keys()), **part.jobs},
            nodes={**_without(self.nodes, nodes_read - part.nodes.keys()), **part.nodes},
            limits={**self.limits, **part.limits},
            offers=part.offers,
            takers=part.takers,
            jobs_began={**self.jobs_began, **dict.fromkeys(jobs_read, began)},
            nodes_began={**self.nodes_began, **dict.fromkeys(nodes_read, began)},
        )


def _without(values: Mapping[str, V], names: Collection[str]) -> Mapping[str, V]:
    return {name: value for name, value in values.items() if name not in names} if names else values


@dataclass(frozen=True, slots=True)
class SchedulerPart:
    """Some jobs and nodes of the scheduler, read without the others. What was read and is not shown does not exist."""

    jobs: Mapping[str, Job] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    job_ids: frozenset[str] = frozenset()  # jobs that were read
    users: frozenset[int] = frozenset()  # uids whose jobs were all read
    node_names: frozenset[str] = frozenset()  # nodes that were read
    all_nodes: bool = False  # all nodes were read
    limits: Mapping[str, int] = field(default_factory=dict)  # those that were counted again
    offers: Mapping[str, bool] | None = field(default_factory=dict)  # whole, as are the takers
    takers: Mapping[str, int] = field(default_factory=dict)


class AttemptState(StrEnum):
    QUEUED = "queued"  # its job waits at the gate
    UNGATED = "ungated"  # its job waits, but not at the gate, where it is to be put first
    STRAY = "stray"  # its job runs on a VM of an earlier attempt, and is to be queued again
    RESTORING = "restoring"  # its job waits at the gate, and is to go back to the partition that it was moved from
    HOLDING = "holding"  # its job waits, and is to be held: its runs ended at once, again and again
    CLAIMED = "claimed"  # its VMs are being created
    SPAWNING = "spawning"  # its VMs are being started
    SPAWNED = "spawned"  # its VMs have joined, and its job is being tied to them
    ADDING_USER = "adding_user"  # its job took a joined spare by itself, whose guest is to learn of the job's user
    ALLOCATED = "allocated"  # its job runs
    WARNED = "warned"  # its job, whose place is taken, was told to end, and has its grace time for that
    PREEMPTING = "preempting"  # its job, whose place is taken, is to be queued again or cancelled
    RETURNING = "returning"  # its job is to go back to the gate, before its VMs go
    REVOKING = "revoking"  # its job is to be cancelled, before its VMs go
    RECLAIMING = "reclaiming"  # its job is over or elsewhere, and its VMs go
    DONE = "done"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    REVOKED = "revoked"
    FAILED = "failed"


WAITING_STATES = (
    AttemptState.QUEUED,
    AttemptState.UNGATED,
    AttemptState.STRAY,
    AttemptState.RESTORING,
    AttemptState.HOLDING,
)
"""An attempt in one of these states has no VM yet."""

PINNED_STATES = (AttemptState.SPAWNED, AttemptState.ADDING_USER)
"""The job of an attempt in one of these states is tied to its nodes, or is about to be."""

PREEMPTED_STATES = (AttemptState.WARNED, AttemptState.PREEMPTING)
"""The job of an attempt in one of these states runs, and its run is to end for another job."""

ENDING_STATES = (*PREEMPTED_STATES, AttemptState.RETURNING, AttemptState.REVOKING, AttemptState.RECLAIMING)
"""An attempt in one of these states only ends."""

SHORT_RUN = 10.0  # seconds: a run that ends sooner and is queued again has done nothing
MOST_SHORT_RUNS = 10  # short runs in a row until the job is held; with their pauses that takes an hour

Outcome = Literal["done", "cancelled", "requeued", "revoked", "failed"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """A running job was to leave its host: by a move, or by a save after which it goes on elsewhere. Or its run was
    ended, and the job queued again or cancelled."""

    at: float  # Unix time at which that began
    way: Literal["move", "save", "requeue", "cancel"]
    host: str  # that it left
    why: Reason
    memory: int  # MiB of its VMs
    took: float | None = None  # seconds until it went on elsewhere, or ran again; None: it has not


EVICTIONS_KEPT = 10  # of a job: more than may be within the hour for which the limit counts them


def went_on(evictions: tuple[Eviction, ...], took: float) -> tuple[Eviction, ...]:
    """A job's evictions once it goes on after the last one."""
    if not evictions or evictions[-1].took is not None:
        return evictions
    return (*evictions[:-1], replace(evictions[-1], took=took))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at giving a job its VMs."""

    id: int
    version: int = field(default=0, kw_only=True)
    state: AttemptState = field(default=AttemptState.QUEUED, kw_only=True)
    since: float  # when it entered its state
    job: JobRef
    job_name: str
    uid: int
    request: Request
    outcome: Outcome | None = None  # how it ends, once it ends
    reason: Reason | None = None
    not_before: float = 0.0  # when it may be admitted (back-off)
    tries: int = 0  # attempts before it that failed in a row
    replaced: int = 0  # VMs that were replaced within it
    note: Reason | None = None  # why the attempt before it failed or was given up, until it is admitted
    work_dir: str = ""
    quarantined: Reason | None = None
    pin: str = ""  # the tag of the joined spare that it took
    choice: Reason | None = None  # what its VMs are, and why, as the job's user is told
    overtaken: int = 0  # how often later jobs started ahead of it while nobody knew when it starts
    origin: str = ""  # the partition that its job is moved from
    caused: int = 0  # the restart of its job that we have caused; 0: none is known
    short_runs: int = 0  # runs in a row that ended within seconds and were queued again
    failed_on: tuple[str, ...] = ()  # hosts on which VMs of the job failed since it last ran
    runs: int = 1  # of its processes, with this one: more than 1 if they were saved
    limit: float | None = None  # seconds that this run may take, if less than the job's time limit
    captured: float = 0.0  # Unix time at which the last checkpoint of this run was begun
    evictions: tuple[Eviction, ...] = ()  # of the job, the latest ones
    grace: float = 0.0  # seconds that its job has from the beginning of "warned" on; 0 as soon as they are over
    warned: bool = False  # that job was told so; until then its grace time has not begun

    @property
    def key(self) -> Key:
        return Key("attempt", self.id)

    @property
    def preempted(self) -> Eviction | None:
        """The eviction that ended the latest run of its job, or ends it; None if another reason did."""
        last = self.evictions[-1] if self.evictions else None
        return last if last is not None and last.took is None and last.way in ("requeue", "cancel") else None

    @property
    def at_once(self) -> bool:
        """Whether we have caused the restart of its job, so that the scheduler's own delay is not waited for."""
        return 0 < self.job.restarts == self.caused

    def waits_for_delay(self, job: Job) -> bool:
        return job.delayed_until is not None and not self.at_once

    @property
    def feature(self) -> str:
        """The tag that ties its job to its nodes."""
        return self.pin or f"mv_{self.id}"

    def with_eviction(self, eviction: Eviction) -> Attempt:
        return replace(self, evictions=(*self.evictions, eviction)[-EVICTIONS_KEPT:])

    def ran_for(self, seconds: float) -> Attempt:
        """Itself after its job has run for so long."""
        return replace(self, short_runs=self.short_runs + 1 if seconds < SHORT_RUN else 0)
