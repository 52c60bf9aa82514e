"""What users submit, and what a simulated cluster keeps of each job and node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.job import YEAR, CheckpointWish, Job, JobRef, JobState, Node, NodeState, Request, SaveWish

if TYPE_CHECKING:
    from multiverse_lab.simulation.guests import Guest


KILL_WAIT = 5.0
"""Seconds that a job may take longer than its limit says, until the scheduler has ended it."""


@dataclass(frozen=True)
class Batch:
    """What a user gives to `sbatch`, and what the script will do: run for `seconds` and exit with `exit_code`.

    `delay` is the job's `--begin`, in seconds. `after` is the id of a job that must have ended first. `requeue` says
    whether a run that loses its node is queued again. `lingers` is how many seconds the job takes to be stopped.
    `problem`, if any, says why the request cannot be served although the gate accepts it. At most `at_most` tasks of an
    array run at once (0: all). At most `per_host` of its VMs are on one host (0: any number). Each of its nodes has
    `sockets`, among which the CPUs are divided evenly. `account` is the account whose own templates the job needs;
    empty where all accounts share them. `placement` names the policy that places its VMs. A run is ended after `limit`
    seconds (None: it has no limit). `save` says that the job is to be saved ahead of that, and how long ahead. `origin`
    is the partition of physical nodes that it is submitted to; empty for the gate. `preempt_class` is its class in the
    cluster's `Preemption`. An `interactive` job has no script that the scheduler could start again.
    """

    name: str = "job"
    uid: int = 1000
    seconds: float = 5.0
    exit_code: int = 0
    nodes: int = 1
    size: Size = field(default=Size(1, 128))
    image: str | None = None
    kind: CloneKind | None = None
    features: tuple[str, ...] = ()
    priority: int = 1000
    requeue: bool = True
    held: bool = False
    delay: float = 0.0
    after: str = ""
    lingers: float = 0.0
    problem: str = ""
    at_most: int = 0
    account: str = ""
    limit: float | None = None
    placement: str | None = None
    per_host: int = 0
    sockets: int = 1
    origin: str = ""
    save: SaveWish | None = None
    checkpoint: CheckpointWish | None = None
    preempt_class: str = ""
    interactive: bool = False


_GROUPED_BY = frozenset({"state", "batch", "pin", "at_origin"})
"""The attributes of a job by which `tables.KeptGroups` groups it."""


@dataclass(eq=False)
class JobRecord:
    """A job in the scheduler's memory. The job is at the gate while `pin` is None, unless it is in the partition of
    physical nodes that it was submitted to (`at_origin`). `waits_for_nodes` says that it was tried there. `number` is
    the world's own: job ids are used again, and submit times change."""

    number: int
    job_id: str
    submitted: int
    batch: Batch
    begin: float
    state: JobState = JobState.PENDING
    restarts: int = 0
    pin: str | None = None  # the tag of its nodes
    pinned_nodes: tuple[str, ...] = ()  # by name; only where the scheduler ties jobs to names
    took_offer: bool = False  # it was pinned as it was submitted
    held: bool = False  # by its user
    bad: bool = False  # BadConstraints: priority 0, without a hold
    delayed: bool = False  # `begin` was set by slurmctld, after a requeue
    by_controller: bool = False  # the controller has stopped the run, or set one of its nodes DOWN
    not_before: float = 0.0  # until when slurmctld's own delay is to be waited for
    short_runs: int = 0  # that ended within seconds and were queued again, in a row
    run_seconds: float = 0.0  # of the run that has ended last
    placed: tuple[object, ...] = ()  # the guests of its last start
    repeats: int = 0  # starts in a row on these nodes
    placements: list[float] = field(default_factory=list)  # when it first started on each set of nodes, s
    nodes: tuple[str, ...] = ()
    busy: list[str] = field(default_factory=list)  # nodes that have not released the job yet
    again: bool = False  # it is queued again once its nodes have released it
    result: str = ""
    exit_code: int = 0
    told: list[str] = field(default_factory=list)  # what its user was told, one after the other
    remark: str = ""  # the text of others beside that
    array: str = ""  # the id of its array, if it is a task of one
    by_user: bool = False  # cancelled by its user
    warned: float | None = None  # when the run was told to end, as its place is taken
    preempted: int = 0  # runs that the controller ended for another job
    revoked: str = ""  # the controller's reason for cancelling it
    cancelled: float = 0.0  # when the controller cancelled it
    changed: tuple[float, Batch] | None = None  # when its user changed it last, and its request before that
    ended: float = 0.0
    started: float = 0.0  # of the run, later by the time that it was suspended
    suspended: float = 0.0  # since when it is
    at_origin: bool = False
    waits_for_nodes: bool = False
    changes: dict[int, JobRecord] | None = None  # where it notes that it may belong to another of its table's groups
    _shown: tuple[tuple[object, ...], Job] | None = None  # last, and by what

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in _GROUPED_BY and self.changes is not None:
            self.changes[self.number] = self

    @property
    def ref(self) -> JobRef:
        return JobRef(self.job_id, self.submitted, self.restarts)

    @property
    def comment(self) -> str:
        """What its user was told last."""
        return self.told[-1] if self.told else ""

    def tell(self, text: str) -> None:
        if text != self.comment:
            self.told.append(text)

    @property
    def waits_at_gate(self) -> bool:
        return self.state is JobState.PENDING and self.pin is None and not self.at_origin

    def unpin(self) -> None:
        """Put the job back at the gate."""
        self.pin, self.pinned_nodes, self.took_offer = None, (), False

    @property
    def runs_until(self) -> float:
        """When a run that is not suspended is ended by its time limit."""
        return self.started + (YEAR if self.batch.limit is None else self.batch.limit)

    def shown(
        self,
        rank: int,
        eligible: bool,
        uses: Mapping[str, int],
        ends: float | None = None,
        delayed_until: float | None = None,
    ) -> Job:
        """How slurmctld shows it: the same object for as long as that stays the same, as the driver keeps it, too."""
        of = (rank, eligible, (*uses.items(),), ends, delayed_until, self.batch, self.ref, self.state, self.pin,
              self.at_origin, self.held, self.bad, self.nodes, self.result, self.exit_code)  # fmt: skip
        if self._shown is None or self._shown[0] != of:
            self._shown = of, self._as_job(rank, eligible, uses, ends, delayed_until)
        return self._shown[1]

    def _as_job(
        self, rank: int, eligible: bool, uses: Mapping[str, int], ends: float | None, delayed_until: float | None
    ) -> Job:
        batch = self.batch
        request = Request(
            batch.nodes,
            batch.size,
            batch.image,
            batch.kind,
            batch.features,
            batch.account,
            batch.placement,
            batch.per_host,
            batch.sockets,
            batch.save,
            batch.checkpoint,
        )
        pending = self.state is JobState.PENDING
        return Job(
            ref=self.ref,
            name=batch.name,
            uid=batch.uid,
            state=self.state,
            request=None if batch.problem else request,
            problem=batch.problem,
            reason="BadConstraints" if self.bad else "JobHeldUser" if self.held else "" if eligible else "BeginTime",
            rank=rank,
            eligible=pending and eligible,
            held=pending and self.held,
            gated=self.pin is None and not self.at_origin,
            pinned=self.pin,
            nodes=self.nodes,
            result=self.result,
            exit_code=self.exit_code,
            work_dir=f"/home/u{batch.uid}",
            uses=tuple(uses.items()) if pending else (),
            array=self.array,
            limit=(YEAR if batch.limit is None else batch.limit) + KILL_WAIT,
            ends=ends,
            deadline=None if ends is None else ends - KILL_WAIT,
            script_node=self.nodes[0] if self.nodes and not pending else "",
            batch=not batch.interactive,
            requeues=batch.requeue,
            origin=batch.origin,
            at_origin=self.at_origin,
            delayed_until=delayed_until if pending else None,
            preempt_class=batch.preempt_class,
        )


@dataclass(eq=False)
class NodeRecord:
    """A dynamic node. `silent` is when its daemon stopped answering, None while the daemon answers. `planned`:
    slurmctld shows that backfill plans to use it. `stuck`: it counts a job on it that has left."""

    name: str
    features: tuple[str, ...]
    size: Size
    guest: Guest
    down: bool = False
    reason: str = ""
    job: JobRecord | None = None
    silent: float | None = None
    sockets: int = 1
    drained: bool = False
    planned: bool = False
    counted_twice: bool = False
    place: int = 0  # in the scheduler's table: a new node takes the first one that is free
    stuck: bool = False

    def shown(self, *, reserved: bool = False) -> Node:
        busy = NodeState.BUSY if self.job else NodeState.IDLE
        drained = self.drained or self.stuck  # as Slurm's driver shows a node that is allocated without a job
        state = NodeState.DOWN if self.down else NodeState.DRAINED if drained else busy
        return Node(self.name, state, self.features, self.reason, reserved)
