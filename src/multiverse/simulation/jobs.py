"""What a simulated cluster keeps of each job and node, and what users ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiverse.core.model import CloneKind, Job, JobRef, JobState, Node, NodeState, Request, Size

if TYPE_CHECKING:
    from multiverse.simulation.guests import Guest


@dataclass(frozen=True)
class Batch:
    """What a user hands to `sbatch`, and what the script will do: run for `seconds`, exit with `exit_code`.

    `delay` is its `--begin`, in seconds; `after` a job id that must have ended first; `requeue` says whether
    a run that loses its node is queued again. `lingers` is how many seconds it takes to be stopped. `problem`
    makes it a job that the gate let through but that this scheme cannot serve. Of an array, `at_most` tasks
    run at once (0: all). `account` is whose templates it is to have, empty where all share them.
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


@dataclass(eq=False)
class JobRecord:
    """A job in slurmctld's memory. It is at the gate while `pin` is None. `number` is the world's own: job ids
    come again, and submit times change."""

    number: int
    job_id: str
    submitted: int
    batch: Batch
    begin: float
    state: JobState = JobState.PENDING
    restarts: int = 0
    pin: str | None = None
    took: bool = False  # it has its pin by taking a spare as it was submitted
    held: bool = False  # by its user
    bad: bool = False  # BadConstraints: priority 0, though nobody holds it
    delayed: bool = False  # `begin` is slurmctld's own, after a requeue
    nodes: tuple[str, ...] = ()
    busy: list[str] = field(default_factory=list)  # nodes that have not let go of it yet
    again: bool = False  # once they have, it is queued again
    result: str = ""
    exit_code: int = 0
    comment: str = ""
    by_user: bool = False  # its user cancelled it
    revoked: str = ""  # why we cancelled it
    cancelled: float = 0.0  # and when
    changed: tuple[float, Batch] | None = None  # when its user changed it last, and what it had asked for before
    ended: float = 0.0

    @property
    def ref(self) -> JobRef:
        return JobRef(self.job_id, self.submitted, self.restarts)

    def unpin(self) -> None:
        """Back to the gate, however it came by its pin."""
        self.pin, self.took = None, False

    def shown(self, rank: int, eligible: bool, uses: Mapping[str, int]) -> Job:
        batch = self.batch
        request = Request(batch.nodes, batch.size, batch.image, batch.kind, batch.features, batch.account)
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
            gated=self.pin is None,
            pinned=self.pin,
            nodes=self.nodes,
            result=self.result,
            exit_code=self.exit_code,
            work_dir=f"/home/u{batch.uid}",
            uses=tuple(uses.items()) if pending else (),
        )


@dataclass(eq=False)
class NodeRecord:
    """A dynamic node. `silent` is since when its daemon has not answered."""

    name: str
    features: tuple[str, ...]
    size: Size
    guest: Guest
    down: bool = False
    reason: str = ""
    job: JobRecord | None = None
    silent: float | None = None

    def shown(self) -> Node:
        state = NodeState.DOWN if self.down else NodeState.BUSY if self.job else NodeState.IDLE
        return Node(self.name, state, self.features, self.reason)
