"""What the controller asks of a batch scheduler."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from multiverse.core.model.host import JobLimits
from multiverse.core.model.identity import NodeBootstrap, User
from multiverse.core.model.job import JobRef, LeaseSpec, NodeSpec, SchedulerPart, SchedulerView


class Scheduler(Protocol):
    """A batch scheduler, which answers as one source.

    Calls that name a job carry its expected restart count (in `JobRef`). They read the job again first, and raise
    `Stale` if it has moved on or is another job with the same id, `Gone` if there is none.
    """

    @property
    def offers(self) -> Offers | None:
        """Lets jobs take idle nodes as they are submitted; None if the scheduler cannot."""

    @property
    def submission(self) -> SubmissionLimits | None:
        """Refuses jobs that no host could hold as they are submitted; None if the scheduler cannot."""

    @property
    def addresses(self) -> Addresses | None:
        """Tells users' commands where nodes are; None if the scheduler always does that itself."""

    @property
    def parts(self) -> Parts | None:
        """Reads some jobs and nodes without the others; None if the scheduler cannot."""

    @property
    def leases(self) -> Leases | None:
        """Lends its nodes as hosts, by pilot jobs; None if the scheduler cannot, or the site wants none."""

    @property
    def overflow(self) -> Overflow | None:
        """Puts jobs back into the partitions that they were moved from; None if the scheduler moves none."""

    @property
    def saving(self) -> Saving | None:
        """Ends the run of a job that is saved, so that a later run goes on with it; None if the scheduler cannot."""

    @property
    def standing_in(self) -> StandingIn | None:
        """Says what answers in place of a node that sleeps; None if the scheduler lets no node sleep."""

    @property
    def preempting(self) -> Preempting | None:
        """Ends runs for other jobs; None if the scheduler preempts no jobs."""

    async def observe(self) -> SchedulerView:
        """All jobs of our partitions, those that overflow, and all nodes of our site. Raises `Unknown`."""

    async def pin(
        self,
        job: JobRef,
        tag: str,
        nodes: Sequence[str],
        text: str = "",
        *,
        at_once: bool = False,
        limit: float | None = None,
    ) -> None:
        """Tie a pending job to `nodes`, whose tag is `tag`, and let it start; it is shown with `Job.pinned` equal to
        `tag`. `text` is left for its user, as by `explain`. `Stale` if its user holds it. A job in its own partition is
        moved out of it, and its user is told. `at_once`: also during the scheduler's own back-off
        (`Job.delayed_until`). `limit`: the run takes at most so many seconds, if its time limit is longer."""

    async def unpin(self, job: JobRef) -> None:
        """Put a pending job back at the gate, released unless its user holds it. Nothing is done for a job at the gate,
        or in its own partition; `Stale` for a job that is not pending."""

    async def requeue(self, job: JobRef) -> None:
        """Stop a running job and queue it again, at the gate. A job that ends meanwhile stays ended; only an observed
        restart shows that the job was queued again."""

    async def hold(self, job: JobRef, reason: str) -> None:
        """Hold a pending job so that its user may release it, and leave `reason` where its user finds it. Nothing is
        done for a job that is held; `Stale` for one that is not pending."""

    async def revoke(self, job: JobRef, reason: str) -> None:
        """Cancel a pending job for good and leave `reason` where its user finds it."""

    async def set_down(self, node: str, reason: str) -> None:
        """Set a node DOWN, so that its jobs end, and withdraw its offer. Success if there is no such node."""

    async def delete_node(self, node: str) -> None:
        """Make the scheduler forget a node and its offer. `Refused` while a job is on it; `NotYet` while the scheduler
        itself keeps it, for a reservation, say; success if there is none. No job may be tied to the node."""

    async def explain(self, jobs: Sequence[JobRef], text: str) -> None:
        """Leave one line for the users of jobs at the gate, in place of an earlier line of ours. A task stands for all
        tasks of its array at the gate. Jobs that do not wait there as these runs, are held, or read the line already
        are left alone. `Exhausted` if some are being pinned or cancelled now; the others were told."""

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        """What a VM needs to become this node of the cluster."""

    async def user(self, uid: int) -> User:
        """The user with all groups. `Gone` only if there surely is none, `Unknown` if nobody can tell."""


class Reports(Protocol):
    """Tells users what their jobs did, after these have ended."""

    async def report(self, job: JobRef, text: str) -> None:
        """Leave one line in the accounting of a job that has ended, or is completing, in place of our others. `Gone` or
        `Stale` if this run is not known any more, `Refused` without accounting, or if what others wrote would not
        stay."""

    async def cpu_seconds(self, job: JobRef) -> float:
        """The CPU seconds of all processes of a job that has ended, as its nodes counted them; 0 if the accounting does
        not have them. Raises `Unknown`, `Refused` or `Exhausted` if it cannot be asked."""


class Parts(Protocol):
    """Reads some jobs and nodes again, at a cost that does not grow with the cluster."""

    async def read(
        self, jobs: Mapping[str, int | None], users: Collection[int], nodes: Collection[str]
    ) -> SchedulerPart:
        """Read these jobs (by id, with the uid if known), all jobs of these users (uids), these nodes, and the offers.
        The answer says what was read: perhaps more, or less if it was too much at once. Raises `Unknown`."""


class Offers(Protocol):
    """Lets a job take a joined spare by itself, as the job is submitted. `SchedulerView.offers` shows the result."""

    async def offer(self, node: NodeSpec) -> None:
        """Let one job that fits take this idle node. It is tied to the node as by `pin`, and waits until its user has
        been added to the guest. A node that was taken or withdrawn is never offered again."""

    async def withdraw(self, node: str) -> None:
        """Let no job take the node any more; a later `offer` is without effect. Nothing is done for a node that was
        taken or never offered: the next observation tells."""

    async def exclude(self, users: Collection[int]) -> None:
        """Let no job of these users (uids) take a node. A scheduler that starts may exclude nobody."""


class SubmissionLimits(Protocol):
    """Refuses, at submission, jobs that no host could ever hold."""

    async def publish(self, limits: JobLimits) -> None:
        """From now on refuse the jobs that `limits` does not allow, by one node or by the sum of their nodes."""


class Addresses(Protocol):
    """Tells the commands of users, wherever they run, at which addresses nodes are."""

    async def tell(self, nodes: Mapping[str, str]) -> None:
        """From now on these nodes, by name, are at these addresses, and no other VM of ours is anywhere. It goes on to
        hold while no controller runs. A node may be told of before it has registered."""


class Saving(Protocol):
    """Ends the run of a job whose processes are frozen, and queues the job again."""

    async def prepare(self, job: JobRef, nodes: Sequence[str], *, requeues: bool = True) -> None:
        """Let the job be queued again (`Job.requeues`), and let its nodes take no other job (DRAINED). `requeues`: it
        can be already. `Refused` if the job can never be queued again, or its next run would lose output."""

    async def check(self, job: JobRef) -> None:
        """Raise `Refused` if the job can never be queued again, or if its next run would lose output."""

    async def check_script(self, nodes: Sequence[str]) -> None:
        """Raise `Refused` if the script of a job on these nodes would start on another one than the first."""

    async def undo(self, job: JobRef, nodes: Sequence[str], *, requeues: bool = True) -> None:
        """Let the nodes serve as before, and the job be queued again only if it `requeues`."""

    async def requeue(self, job: JobRef, *, hold: bool = False, text: str = "") -> None:
        """Queue the running job again, whose nodes answer for it, and leave `text` for its user. `hold`: it waits until
        somebody releases it. Nothing is done for a job that does not run; only an observed restart shows that it was
        queued again."""

    async def forbid_requeue(self, job: JobRef) -> None:
        """Let the job be queued again no more. `Gone` or `Stale` if this run is not known any more."""

    async def release(self, job: JobRef) -> None:
        """End the hold of a pending job that `requeue` held. `Stale` if the job is not pending."""


class StandingIn(Protocol):
    """What answers in place of the node of a VM that sleeps with its suspended job."""

    async def stand_in(self, node: NodeSpec) -> NodeBootstrap:
        """The daemons that answer the scheduler on the VM's host. They find the names of the job's steps there."""

    async def keep_time(self, job: JobRef, left: float) -> None:
        """Let a running job have about `left` seconds from now on before its time limit is over, or more, in whole
        minutes. Nothing is done for a job that does not run."""


class Preempting(Protocol):
    """Ends the run of a job for another one, as the scheduler does to a job that it preempts."""

    async def warn(self, job: JobRef, text: str) -> None:
        """Tell the processes of a running job to end, as the scheduler does when the grace time begins, and its user
        `text`. Nothing is done if `text` was told before; `Stale` for a job that does not run."""

    async def preempt(self, job: JobRef, *, requeue: bool, text: str) -> None:
        """End the run of a job, and tell its user `text`. The job is queued again, at the gate, if it is to `requeue`
        and the scheduler allows that, and otherwise cancelled. Nothing is done for a job that is queued again already;
        `Stale` for one that does not run."""


class Leases(Protocol):
    """Lends physical nodes as hosts, each by a pilot job, in which an agent runs. `SchedulerView.pilots` shows them.

    A pilot is known by the name and the token of its lease. It is subject to its partition's priorities, limits and
    preemption like any job, is never queued again, and ends with its time limit.
    """

    async def request(self, lease: LeaseSpec) -> None:
        """Submit a pilot for this lease, unless one of its name and token is shown. `Refused` if the scheduler will
        never take it. After `Unknown` or a cancellation one may be shown late, and another call may submit a second
        one: `release` ends them."""

    async def release(self, name: str, pilots: Sequence[str]) -> None:
        """Cancel these pilots (by the scheduler's ids) or, if none are given, all of that name. Success if there are
        none, or they are ending. A pilot of another name is left alone: ids come again. An observation shows when they
        have ended."""


class Overflow(Protocol):
    """Lets jobs of partitions of physical nodes run in VMs. `Job.origin` shows which jobs these are, `pin` moves one
    out of its partition, and `unpin` and `requeue` leave it at the gate."""

    async def restore(self, job: JobRef) -> None:
        """Put a pending job back from the gate into its own partition, as it was submitted, and tell its user. Nothing
        is done for a job that is there; `Stale` for one that is not pending, or is pinned."""
