"""The scheduler's side: jobs, nodes, attempts, reservations, and leases with their pilots."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import inf
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from multiverse.core.model.basics import CloneKind, Key, Size
from multiverse.core.model.reason import Reason, Why

# --- reservations -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeReservation:
    """From `begins` until `ends` (Unix times) no job of ours can run. A job cannot start before either, unless its time
    limit ends it in time."""

    name: str
    begins: float
    ends: float

    def is_on(self, now: float) -> bool:
        """Whether it has begun, and is not over."""
        return self.begins <= now < self.ends

    def keeps(self, now: float, limit: float | None) -> bool:
        """Whether a job that takes `limit` seconds at most (None: nobody knows) cannot start now because of it."""
        return now < self.ends and now + (limit or 0.0) > self.begins

    def why(self) -> Reason:
        """Why such a job waits."""
        return Why.RESERVED(name=self.name, begins=self.begins, ends=self.ends)


def first_on(reservations: Collection[NodeReservation], now: float) -> NodeReservation | None:
    """The one of those that have begun that ends last."""
    return max((one for one in reservations if one.is_on(now)), key=lambda one: one.ends, default=None)


def first_keeping(reservations: Collection[NodeReservation], now: float, limit: float | None) -> NodeReservation | None:
    """The one because of which a job that takes `limit` seconds at most cannot start now: that which begins first."""
    return min((one for one in reservations if one.keeps(now, limit)), key=lambda one: one.begins, default=None)


# --- leases -----------------------------------------------------------------------------------------


class PilotState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"  # it was told to end (preempted, cancelled, out of time), or is completing
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class PilotSeen:
    """A pilot job as the scheduler shows it: `name` and `token` are those of its lease's specification.

    `node` is the physical node that it runs on, or ran on last; empty if it never ran. `ends` is the Unix time by which
    it has ended at the latest, infinity while that is not known. `restarts` is how often the scheduler has queued it
    again. `clean` says that nothing of it, nor of an earlier run of it, can be left on a node: it never ran, or each
    node that it ran on answered until the pilot had left COMPLETING, or has rebooted since. A node that was set DOWN
    ends its jobs in the scheduler alone. While a pilot runs `clean` means nothing. `reason` is the scheduler's word on
    why it waits, or why it ends.
    """

    name: str
    token: str
    state: PilotState
    node: str = ""
    ends: float = inf
    reason: str = ""
    restarts: int = 0
    clean: bool = False


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """What a pilot is asked for. `size` is what is taken of a node, in CPUs and MiB; zero CPUs: the whole node, zero
    memory: as the partition gives it. `account` and `user` are empty where the scheduler's defaults are meant.
    `time_limit` is in seconds."""

    name: str
    token: str
    partition: str
    size: Size = Size(0, 0)
    time_limit: float = 3600.0
    account: str = ""
    user: str = ""


@dataclass(frozen=True, slots=True)
class LeasedHost:
    """How a leased host is reached: by its pilot, named by the scheduler's id, on a physical node of the scheduler."""

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
    ENDING = "ending"  # its pilot is ending: its host takes no VM, and its agent ends those that are there
    LOST = "lost"  # its pilot is over, but its node did not answer: what was on its host may go on
    RELEASING = "releasing"  # its pilot is to be cancelled; nothing of its VMs goes on
    GONE = "gone"  # no pilot of it is left, and nothing is claimed on its host


OPEN_LEASES = (LeaseState.IDLE, LeaseState.HELD)
"""The host of a lease in one of these states takes VMs."""

GIVEN_UP_LEASES = (LeaseState.ENDING, LeaseState.LOST, LeaseState.RELEASING)
"""The host of a lease in one of these states takes no VM any more."""

COMING_LEASES = (LeaseState.PLANNED, LeaseState.WAITING, LeaseState.STARTING)
"""The host of a lease in one of these states is expected to take VMs."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A host borrowed from the scheduler, or about to be. Its host has its name, which never recurs.

    `since` is when it entered its state (monotonic). `pilot` is the scheduler's id of its pilot, `node` the physical
    node, `ends` the Unix time by which the pilot has ended, as last observed, None if nobody can tell. `used` is how
    often VMs were claimed on its host after there had been none.
    """

    id: int
    version: int = field(default=0, kw_only=True)
    state: LeaseState = field(default=LeaseState.PLANNED, kw_only=True)
    since: float
    spec: LeaseSpec
    pilot: str = ""
    node: str = ""
    ends: float | None = None
    reason: Reason | None = None
    quarantined: Reason | None = None
    used: int = 0

    @property
    def key(self) -> Key:
        return Key("lease", self.id)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def host(self) -> LeasedHost:
        """How its host is reached."""
        return LeasedHost(self.spec, self.pilot, self.node, inf if self.ends is None else self.ends)


# --- jobs, nodes and attempts -----------------------------------------------------------------------


V = TypeVar("V")

YEAR = 365 * 86400
"""Seconds. A job without any time limit counts as one that takes so long, as in Slurm (YEAR_MINUTES)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks for, per node. `size.memory` is what the job may use, not what its VM has. `account`: its VMs
    are forked from that account's own templates; empty where all share them. `placement` names the policy that places
    its VMs; None: the site's. At most `per_host` of its VMs are on one host; 0: any number. Its nodes have `sockets`,
    among which their CPUs are divided evenly."""

    nodes: int
    size: Size
    image: str | None = None
    kind: CloneKind | None = None
    features: tuple[str, ...] = ()
    account: str = ""
    placement: str | None = None
    per_host: int = 0
    sockets: int = 1

    def most_on_a_host(self, held: int) -> int:
        """How many of its VMs may be on a host that could hold `held` of them."""
        return min(held, self.per_host) if self.per_host else held


@dataclass(frozen=True, slots=True, order=True)
class JobRef:
    """One run of one job. Job ids come again and requeued jobs keep theirs, hence all three.

    `job_id` is the scheduler's own string (`123`, `123_4`), `submitted` Unix time, `restarts` the
    scheduler's restart count. A store serves one cluster, so the cluster's name is not repeated here.
    """

    job_id: str
    submitted: int
    restarts: int = 0


class JobState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"  # ended, but its node is not free of it yet
    ENDED = "ended"


class Job(NamedTuple):
    """A job of ours as the scheduler shows it; jobs outside our partitions are never shown.

    `rank` orders pending jobs as the scheduler would start them (lower first). It depends on the job alone, so that
    it stays the same while other jobs come and go. `eligible` says that
    nothing but the gate keeps it waiting, and limits that are counted: no hold, dependency, begin time
    or other limit. `gated` says that it waits at the gate; `pinned` names the attempt's feature it is
    tied to. `problem` says why its request cannot be served at all; `request` is None exactly then.
    `result` is the scheduler's own word for how it ended (`COMPLETED`, `FAILED`, ...). `uses` is what a
    pending job will take of which of the view's limits once it runs. `array` is the id of the array of which it is a
    task, if it is one. `limit` is how many seconds a run takes at most: the time limit, and what the scheduler lets
    pass until it has ended a job that exceeds it. `ends` is the Unix time by which a job that runs has ended for that
    reason. Both are None where the scheduler does not tell; a job that is suspended has no such time. `requeues` says
    that the scheduler can queue it again once it runs: not a job whose user waits for it, or forbids that.

    `origin` is the partition of physical nodes that the job was submitted to, and from which it may be moved to a VM;
    empty for a job that was submitted to the gate. `at_origin` says that it waits there, or runs there without a VM of
    ours: it is eligible then if it has waited for nodes long enough to be moved, and its rank is behind those of all
    jobs at the gate. `account` is the one that it is charged to.

    `delayed_until` is the Unix time until which the scheduler itself holds back a job that was queued again (its own
    back-off); None if it does not. It does not count for `eligible`.

    A named tuple, because each pass compares all jobs with those before, and Python compares tuples without a call for
    each (decision 30).
    """

    ref: JobRef
    name: str
    uid: int
    state: JobState
    request: Request | None
    problem: str = ""
    reason: str = ""
    rank: int = 0
    eligible: bool = True
    held: bool = False
    gated: bool = True
    pinned: str | None = None
    nodes: tuple[str, ...] = ()
    result: str = ""
    exit_code: int = 0
    work_dir: str = ""
    uses: tuple[tuple[str, int], ...] = ()
    array: str = ""
    limit: float | None = None
    ends: float | None = None
    requeues: bool = True
    origin: str = ""
    at_origin: bool = False
    account: str = ""
    delayed_until: float | None = None


class NodeState(StrEnum):
    IDLE = "idle"
    BUSY = "busy"  # runs a job, or is completing one
    DRAINED = "drained"  # gets no job any more: drained, failing, or registered wrongly; the jobs on it go on
    SILENT = "silent"  # does not answer; the scheduler still waits for it, and for the jobs on it
    DOWN = "down"  # given up: the scheduler ends the jobs on it, or queues them again
    JOINING = "joining"  # known by name, not registered yet


@dataclass(frozen=True, slots=True)
class Node:
    """A VM as the scheduler sees it; only dynamic nodes of our site are shown. `reserved`: it is in a reservation that
    has begun, so the scheduler does not let it be deleted."""

    name: str
    state: NodeState
    features: tuple[str, ...] = ()
    reason: str = ""
    reserved: bool = False

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
    """A VM as the scheduler is to know it as a node.

    `tag` is what ties jobs to it (`Scheduler.pin`), `features` what a job may ask for and find here, the tag among
    them. `spare` says that the VM joins before its job is known: a job that takes it has to wait on it until the job's
    user has been added. `image` and `account` are the VM's own; `address` has a prefix length. `peers` are the names
    and addresses (without prefix length) of the other VMs of its job.
    """

    name: str
    address: str
    size: Size
    features: tuple[str, ...]
    tag: str
    image: str
    account: str = ""
    spare: bool = False
    sockets: int = 1
    peers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SchedulerView:
    """One observation of the scheduler: `jobs` by job id, `nodes` by name.

    Ended jobs may be missing or shown as ended. `limits` is how much more each limit lets run, beside all that ran when
    the jobs were observed. `offers` are the nodes that jobs may take by themselves, and those that were taken (True);
    None if the scheduler cannot offer nodes. `takers` are the users (uids) whose submissions took nodes, as far as the
    scheduler tells.

    Some jobs and nodes may have been read again since the whole was observed: `jobs_began` and `nodes_began` say when
    that reading of each began (monotonic). Those that it did not find are named there, too.

    `pilots` are all pilot jobs of our site's leases, by the scheduler's id, whatever their partition; those that ended
    may be missing. `leasable` is what a whole node of each partition that may be leased from has at least, in CPUs and
    MiB. `reservations` are those that keep all nodes of VMs from jobs, or will. All three are as of the whole
    observation.
    """

    jobs: Mapping[str, Job] = field(default_factory=lambda: MappingProxyType({}))
    nodes: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    offers: Mapping[str, bool] | None = field(default_factory=lambda: MappingProxyType({}))
    takers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    jobs_began: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    nodes_began: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    pilots: Mapping[str, PilotSeen] = field(default_factory=lambda: MappingProxyType({}))
    leasable: Mapping[str, Size] = field(default_factory=lambda: MappingProxyType({}))
    reservations: tuple[NodeReservation, ...] = ()

    def is_unusable(self, node: str) -> bool:
        """Whether the node is known and gets no job."""
        return node in self.nodes and self.nodes[node].is_unusable

    @cached_property
    def occupied(self) -> Set[str]:
        """The nodes that a job runs on or has not left yet. slurmctld 22.05 lets such a node be deleted once it is
        DOWN, and crashes when it comes to the job's last step (a null pointer in step_mgr.c)."""
        free = (JobState.PENDING, JobState.ENDED)
        return {node for job in self.jobs.values() if job.nodes and job.state not in free for node in job.nodes}

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
    """Some jobs and nodes of the scheduler, read without the others.

    All jobs of `users` (uids) were read, the jobs of `job_ids`, and the nodes of `node_names`, or all nodes. What of
    these is not in `jobs` or `nodes` does not exist; nothing is said about any other. `limits` are those that were
    counted again. `offers` and `takers` are whole, as in a `SchedulerView`.
    """

    jobs: Mapping[str, Job] = field(default_factory=lambda: MappingProxyType({}))
    nodes: Mapping[str, Node] = field(default_factory=lambda: MappingProxyType({}))
    job_ids: frozenset[str] = frozenset()
    users: frozenset[int] = frozenset()
    node_names: frozenset[str] = frozenset()
    all_nodes: bool = False
    limits: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    offers: Mapping[str, bool] | None = field(default_factory=lambda: MappingProxyType({}))
    takers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


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

ENDING_STATES = (AttemptState.RETURNING, AttemptState.REVOKING, AttemptState.RECLAIMING)
"""An attempt in one of these states only ends."""

SHORT_RUN = 10.0
"""Seconds. A run that ends sooner and is queued again has done nothing that would have to be repeated at once."""

MOST_SHORT_RUNS = 10
"""So many short runs in a row, and the job is held. With the pauses between them that takes an hour."""

Outcome = Literal["done", "cancelled", "requeued", "revoked", "failed"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at giving a job its VMs.

    `since` is when it entered its state; `not_before` when it may be admitted (back-off); `tries` counts the attempts
    before it that failed in a row; `replaced` the VMs that were replaced within it. `outcome` is how it ends, once it
    ends. `note` is why the attempt before it failed or was given up, until it is admitted. `pin` is the tag of the one
    joined spare that it took. `choice` says what its VMs are, and why: the job's user is told when the job is pinned.
    `overtaken` is how often a later job started ahead of it while nobody could tell when it would start itself.
    `origin` is the partition that its job is moved from (`Job.origin`). `caused` is the restart of its job that we have
    caused, 0 if none is known: before that one alone the scheduler's own delay is not waited for. `short_runs` is how
    many runs of its job in a row ended within seconds and were queued again. `failed_on` are the hosts on which VMs of
    the job failed to come up since it last ran.
    """

    id: int
    version: int = field(default=0, kw_only=True)
    state: AttemptState = field(default=AttemptState.QUEUED, kw_only=True)
    since: float
    job: JobRef
    job_name: str
    uid: int
    request: Request
    outcome: Outcome | None = None
    reason: Reason | None = None
    not_before: float = 0.0
    tries: int = 0
    replaced: int = 0
    note: Reason | None = None
    work_dir: str = ""
    quarantined: Reason | None = None
    pin: str = ""
    choice: Reason | None = None
    overtaken: int = 0
    origin: str = ""
    caused: int = 0
    short_runs: int = 0
    failed_on: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return Key("attempt", self.id)

    @property
    def at_once(self) -> bool:
        """Whether we have caused the restart of its job, so that the scheduler's own delay is not waited for."""
        return 0 < self.job.restarts == self.caused

    def waits_for_delay(self, job: Job) -> bool:
        """Whether the scheduler's own delay keeps its job waiting."""
        return job.delayed_until is not None and not self.at_once

    @property
    def feature(self) -> str:
        """The tag that ties its job to its nodes."""
        return self.pin or f"mv_{self.id}"

    def ran_for(self, seconds: float) -> Attempt:
        """Itself after its job has run for so long."""
        return replace(self, short_runs=self.short_runs + 1 if seconds < SHORT_RUN else 0)
