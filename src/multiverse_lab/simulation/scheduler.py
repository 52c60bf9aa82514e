"""Schedulers over the simulated cluster. Commands take time and fail as those of Slurm 22.05 do."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from multiverse.config import ImageSettings
from multiverse.core.clones.spares import named_by_none
from multiverse.core.errors import Gone, NotYet, Refused, Stale, Unknown
from multiverse.core.model.host import JobLimits
from multiverse.core.model.identity import NodeBootstrap, User
from multiverse.core.model.job import JobRef, JobState, LeaseSpec, NodeSpec, SchedulerPart, SchedulerView
from multiverse.ports import Addresses, Leases, Offers, Overflow, Parts, SubmissionLimits
from multiverse_lab.simulation.cluster import Cluster, OfferedNode
from multiverse_lab.simulation.guests import LIVE, Registration
from multiverse_lab.simulation.jobs import JobRecord
from multiverse_lab.simulation.pilots import Pilots


@dataclass(frozen=True)
class CommandLatencies:
    """How long commands take before their effect and after it, and how long they wait for a slurmctld that does not
    answer: ranges in seconds that are drawn from."""

    request: tuple[float, float] = (0.005, 0.05)
    reply: tuple[float, float] = (0.002, 0.03)
    patience: tuple[float, float] = (2.0, 10.0)
    look_up: float = 0.001


FindUser = Callable[[int], User | None]


class SimulatedScheduler(ABC):
    """What the simulated schedulers have in common."""

    def __init__(
        self, cluster: Cluster, find_user: FindUser, rng: Random, latencies: CommandLatencies | None = None
    ) -> None:
        self.cluster, self.rng = cluster, rng
        self._find_user = find_user
        self.latencies = latencies or CommandLatencies()

    @property
    @abstractmethod
    def offers(self) -> Offers | None: ...

    @property
    @abstractmethod
    def parts(self) -> Parts | None: ...

    @property
    @abstractmethod
    def submission(self) -> SubmissionLimits | None: ...

    @property
    @abstractmethod
    def addresses(self) -> Addresses | None: ...

    @property
    @abstractmethod
    def leases(self) -> Leases | None: ...

    @property
    @abstractmethod
    def overflow(self) -> Overflow | None: ...

    @abstractmethod
    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap: ...

    @abstractmethod
    def _tie(self, record: JobRecord, tag: str, nodes: Sequence[str]) -> None:
        """Tie a pending job to its nodes. Raises `Refused` if they do not exist; the job is at the gate then."""

    async def observe(self) -> SchedulerView:
        await self.reach()
        view = self._view()
        await self.reply()
        return view

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
        await self.reach()
        record = self.reread(job)
        if record.pin == tag and record.state in LIVE:
            return  # a repeated call: the job has started since
        if record.state is not JobState.PENDING:
            raise Stale(f"job {job.job_id} is {record.state}")
        if record.held:
            raise Stale(f"job {job.job_id} is held by its user")
        self._tie(record, tag, nodes)
        record.bad = False
        if at_once and record.delayed:
            record.begin, record.delayed = asyncio.get_running_loop().time(), False
        if limit is not None and (record.batch.limit is None or limit < record.batch.limit):
            record.batch = replace(record.batch, limit=limit)
        if text:
            record.tell(text)
        await self.reply()

    async def unpin(self, job: JobRef) -> None:
        await self.reach()
        record = self.reread(job)
        if record.state is not JobState.PENDING:
            raise Stale(f"job {job.job_id} is {record.state}")
        if not record.at_origin:
            record.unpin()
            record.bad = False  # slurmctld's own hold
        await self.reply()

    async def hold(self, job: JobRef, reason: str) -> None:
        await self.reach()
        record = self.reread(job)
        if record.state is not JobState.PENDING:
            raise Stale(f"job {job.job_id} is {record.state}")
        if not record.held:
            record.tell(reason)
            self.cluster.held_by_controller(record, reason)
        await self.reply()

    async def requeue(self, job: JobRef) -> None:
        await self.reach()
        record = self.reread(job)
        if record.state is JobState.PENDING:
            record.unpin()
            record.bad = False
            return
        if record.state not in LIVE:
            raise Stale(f"job {job.job_id} is {record.state}")
        self.cluster.stopped_by_controller(record, "queued again")
        record.by_controller = True
        self.cluster.requeue(job.job_id)
        record.unpin()
        await self.reply()

    async def revoke(self, job: JobRef, reason: str) -> None:
        await self.reach()
        record = self.reread(job)
        if record.state is JobState.ENDED and record.result == "CANCELLED":
            return
        if record.state is not JobState.PENDING:
            raise Stale(f"job {job.job_id} is {record.state}")
        record.tell(reason)
        record.revoked = reason
        record.cancelled = asyncio.get_running_loop().time()
        self.cluster.cancel(job.job_id, by_user=False)
        await self.reply()

    def _view(self) -> SchedulerView:
        return self.cluster.view()

    def _is_taken_away(self, node: str) -> bool:
        """Whether the node is a VM on a leased host that the scheduler takes away."""
        return False

    async def set_down(self, node: str, reason: str) -> None:
        await self.reach()
        known = self.cluster.nodes.get(node)
        going = self._is_taken_away(node)
        if known is not None and known.job is not None and not known.down and known.guest.alive and not going:
            self.cluster.stopped_by_controller(known.job, f"lost {node}, which we set DOWN")
        self.cluster.set_down(node, reason)
        await self.reply()

    async def delete_node(self, node: str) -> None:
        await self.reach()
        await self._delete(node)
        await self.reply()

    async def _delete(self, node: str) -> None:
        self.cluster.delete(node)

    async def explain(self, jobs: Sequence[JobRef], text: str) -> None:
        await self.reach()
        for job in jobs:
            record = self.cluster.jobs.get(job.job_id)
            if record is None or record.ref != job or not record.waits_at_gate:
                continue
            for one in self.cluster.tasks_beside(record):
                if one.waits_at_gate and not one.held:
                    one.tell(text)
        await self.reply()

    async def user(self, uid: int) -> User:
        await asyncio.sleep(self.latencies.look_up)
        user = self._find_user(uid)
        if user is None:
            raise Gone(f"no user has the uid {uid}", hint="look at the site's user database")
        return user

    def reread(self, job: JobRef) -> JobRecord:
        record = self.cluster.jobs.get(job.job_id)
        if record is None:
            raise Gone(f"no job {job.job_id}")
        if record.ref != job:
            raise Stale(f"job {job.job_id} is now {record.ref}")
        return record

    async def reach(self) -> None:
        await asyncio.sleep(self.rng.uniform(*self.latencies.request))
        if not self.cluster.up:
            await asyncio.sleep(self.rng.uniform(*self.latencies.patience))
            raise Unknown("slurmctld does not answer", hint="see whether it runs")

    async def reply(self) -> None:
        await asyncio.sleep(self.rng.uniform(*self.latencies.reply))


class SimulatedStandingIn:
    """`ports.StandingIn`, as `drivers.slurm.acting.standing_in` does it."""

    def __init__(self, slurm: SimulatedSlurm) -> None:
        self._slurm, self._cluster = slurm, slurm.cluster

    async def stand_in(self, node: NodeSpec) -> NodeBootstrap:
        return await self._slurm.bootstrap(node)

    async def keep_time(self, job: JobRef, left: float) -> None:
        await self._slurm.reach()
        record = self._slurm.reread(job)
        now = asyncio.get_running_loop().time()
        more = round((now + left - record.runs_until) / 60) * 60.0
        if record.state is JobState.RUNNING and record.batch.limit is not None and more > 0:
            record.batch = replace(record.batch, limit=record.batch.limit + more)
        await self._slurm.reply()


class SimulatedPreempting:
    """`ports.Preempting`, as `drivers.slurm.acting.preempting` does it."""

    def __init__(self, slurm: SimulatedSlurm) -> None:
        self._slurm, self._cluster = slurm, slurm.cluster

    async def warn(self, job: JobRef, text: str) -> None:
        await self._slurm.reach()
        record = self._slurm.reread(job)
        self._check_live(record)
        if text not in record.told:
            self._cluster.warn(record)
            record.tell(text)
        await self._slurm.reply()

    async def preempt(self, job: JobRef, *, requeue: bool, text: str) -> None:
        """Two commands: between them a job that is queued again is not at the gate yet."""
        await self._slurm.reach()
        record = self._slurm.reread(job)
        if not (record.state is JobState.COMPLETING and record.again):
            self._check_live(record)
            record.tell(text)
            self._cluster.preempt(record, requeue=requeue)
        await self._slurm.reply()
        await self._slurm.reach()
        if record.job_id in self._cluster.jobs and record.again:
            record.unpin()
        await self._slurm.reply()

    @staticmethod
    def _check_live(record: JobRecord) -> None:
        if record.state not in LIVE:
            raise Stale(f"job {record.job_id} is {record.state}")


class SimulatedSlurm(SimulatedScheduler):
    """Slurm: ties jobs to nodes by features, and lets jobs take offered nodes as they are submitted."""

    def __init__(
        self,
        cluster: Cluster,
        find_user: FindUser,
        rng: Random,
        latencies: CommandLatencies | None = None,
        *,
        image: ImageSettings | None = None,
        pilots: Pilots | None = None,
    ) -> None:
        super().__init__(cluster, find_user, rng, latencies)
        self._image, self._pilots = image or ImageSettings(), pilots
        self.exact = False
        self._drained: dict[str, float] = {}  # nodes that are to be deleted, and since when they are drained
        self.saving, self.standing_in = SimulatedSaving(self), SimulatedStandingIn(self)
        self.preempting = SimulatedPreempting(self)

    @property
    def offers(self) -> SimulatedSlurm:
        return self

    @property
    def parts(self) -> SimulatedSlurm:
        return self

    @property
    def submission(self) -> SimulatedSlurm:
        return self

    @property
    def addresses(self) -> SimulatedSlurm:
        return self

    def _is_taken_away(self, node: str) -> bool:
        return self._pilots is not None and self._pilots.take_away(node)

    @property
    def leases(self) -> SimulatedSlurm | None:
        return self if self._pilots is not None else None

    @property
    def overflow(self) -> SimulatedSlurm:
        return self

    async def restore(self, job: JobRef) -> None:
        """See `ports.Overflow`."""
        await self.reach()
        record = self.reread(job)
        if record.state is not JobState.PENDING or record.pin is not None:
            raise Stale(f"job {job.job_id} is {record.state} or pinned")
        if record.batch.origin and not record.at_origin:
            record.at_origin, record.waits_for_nodes = True, False
            record.tell(f"back in partition {record.batch.origin}")
        await self.reply()

    async def request(self, lease: LeaseSpec) -> None:
        """See `ports.Leases`."""
        await self.reach()
        assert self._pilots is not None, "without pilots nobody asks"
        self._pilots.request(lease)
        await self.reply()

    async def release(self, name: str, pilots: Sequence[str]) -> None:
        """See `ports.Leases`."""
        await self.reach()
        assert self._pilots is not None, "without pilots nobody asks"
        self._pilots.release(name, tuple(pilots))
        await self.reply()

    async def read(
        self, jobs: Mapping[str, int | None], users: Collection[int], nodes: Collection[str]
    ) -> SchedulerPart:
        """See `ports.Parts`. Nothing is asked of slurmctld if nothing but the offers is wanted. Now and then it reads
        less than was asked for, and all nodes in place of some, unless it is `exact`."""
        if not (jobs or users or nodes):
            return self._part((), (), ())
        await self.reach()
        everything = self.exact or self.rng.random() < 0.9
        asked = sorted(jobs) if everything else [job_id for job_id in sorted(jobs) if self.rng.random() < 0.5]
        of_users = sorted(users) if everything else [uid for uid in sorted(users) if self.rng.random() < 0.5]
        part = self._part(asked, of_users, nodes)
        if nodes and not self.exact and self.rng.random() < 0.5:
            part = replace(part, nodes=self.cluster.shown_nodes(self.cluster.nodes), all_nodes=True)
        await self.reply()
        return part

    def _part(self, jobs: Collection[str], users: Collection[int], nodes: Collection[str]) -> SchedulerPart:
        """What slurmctld shows of these jobs, users and nodes."""
        known = self.cluster.jobs
        asked = {job_id: known[job_id] for job_id in jobs if job_id in known}
        asked.update((job.job_id, job) for uid in users for job in known.of_user(uid))
        return SchedulerPart(
            jobs=self.cluster.shown_jobs(asked.values()),
            nodes=self.cluster.shown_nodes(nodes),
            job_ids=frozenset(jobs),
            users=frozenset(users),
            node_names=frozenset(nodes),
            limits=self.cluster.limits_left(),
            offers=self.cluster.observe_offers(),
            takers=self.cluster.takers(),
        )

    async def tell(self, nodes: Mapping[str, str]) -> None:
        """See `ports.Addresses`."""
        self.cluster.addresses = nodes

    async def publish(self, limits: JobLimits) -> None:
        self.cluster.limit_submissions(limits)

    def _view(self) -> SchedulerView:
        offers = self.cluster.observe_offers()
        view = replace(self.cluster.view(), offers=offers, takers=self.cluster.takers())
        if self._pilots is None:
            return view
        return replace(view, pilots=self._pilots.view(), leasable=self._pilots.leasable())

    def _tie(self, record: JobRecord, tag: str, nodes: Sequence[str]) -> None:
        if record.at_origin:
            self.cluster.check_move(record)
        if not self.cluster.any_node_has(tag):
            record.pin = None  # Slurm moves the job all the same, and the driver puts it back at the gate
            raise Refused(f"no node has the feature {tag}", hint="pin after its nodes have registered")
        record.pin, record.at_origin = tag, False

    async def set_down(self, node: str, reason: str) -> None:
        self.cluster.withdraw(node)
        await super().set_down(node, reason)

    async def delete_node(self, node: str) -> None:
        self.cluster.withdraw(node)
        await super().delete_node(node)

    async def _delete(self, node: str) -> None:
        """As `drivers.slurm.acting.delete` does."""
        if self._may_be_planned(node):
            if node not in self._drained:
                self.cluster.drain(node)
                self._drained[node] = asyncio.get_running_loop().time()
            raise NotYet(f"backfill may plan to use node {node}")
        await asyncio.sleep(self.rng.uniform(*self.latencies.request))
        known = self.cluster.nodes.get(node)
        if known is not None and known.stuck and not self.cluster.is_reserved():
            self.cluster.set_down(node, "its VM is gone")
        self.cluster.delete(node)
        self.cluster.forget(node)
        self._drained.pop(node, None)

    def _may_be_planned(self, node: str) -> bool:
        known, backfill, since = self.cluster.nodes.get(node), self.cluster.backfill, self._drained.get(node)
        if known is None or (since is not None and backfill.began > since):
            return False
        return backfill.active or known.planned

    async def offer(self, node: NodeSpec) -> None:
        self.cluster.offer(OfferedNode(node, *named_by_none(node.image, self._image.default, self._image.kind)))

    async def withdraw(self, node: str) -> None:
        self.cluster.withdraw(node)

    async def exclude(self, users: Collection[int]) -> None:
        self.cluster.excluded = frozenset(users)

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        features = (self.cluster.settings.node_feature, *node.features)
        return Registration(node.name, features, node.size, node.sockets).pack()


class SimulatedSaving:
    """`ports.Saving`, as `drivers.slurm.acting.saving` does it."""

    def __init__(self, slurm: SimulatedSlurm) -> None:
        self._slurm, self._cluster = slurm, slurm.cluster

    async def check(self, job: JobRef) -> None:
        await self._slurm.reach()
        record = self._slurm.reread(job)
        if record.state not in LIVE:
            raise Stale(f"job {job.job_id} is {record.state}")
        await self._slurm.reply()

    async def prepare(self, job: JobRef, nodes: Sequence[str], *, requeues: bool = True) -> None:
        await self.check(job)
        await self._slurm.reach()
        if not requeues:
            record = self._slurm.reread(job)
            record.batch = replace(record.batch, requeue=True)
            await self._slurm.reply()
            await self._slurm.reach()
        for node in nodes:
            self._cluster.drain(node)
        await self._slurm.reply()

    async def check_script(self, nodes: Sequence[str]) -> None:
        await self._slurm.reach()
        if (first := self._cluster.first_listed(nodes)) != nodes[0]:
            raise Refused(f"the script would start on {first or 'another node'}, not on {nodes[0]}")
        await self._slurm.reply()

    async def undo(self, job: JobRef, nodes: Sequence[str], *, requeues: bool = True) -> None:
        await self._slurm.reach()
        for node in nodes:
            self._cluster.undrain(node)
        await self._slurm.reply()
        if not requeues:
            await self.forbid_requeue(job)

    async def forbid_requeue(self, job: JobRef) -> None:
        await self._slurm.reach()
        record = self._slurm.reread(job)
        if record.state in LIVE:
            record.batch = replace(record.batch, requeue=False)
        await self._slurm.reply()

    async def requeue(self, job: JobRef, *, hold: bool = False, text: str = "") -> None:
        """Two commands: between them the job is queued again, and not at the gate yet."""
        await self._slurm.reach()
        record = self._slurm.reread(job)
        if record.state in LIVE:
            record.tell(text or record.comment)
            self._cluster.requeue_saved(record, hold=hold)
        elif not (record.state is JobState.COMPLETING and record.again):
            raise Stale(f"job {job.job_id} is {record.state}")
        await self._slurm.reply()
        await self._slurm.reach()
        if record.job_id in self._cluster.jobs and record.state in (JobState.COMPLETING, JobState.PENDING):
            record.unpin()
        await self._slurm.reply()

    async def release(self, job: JobRef) -> None:
        await self._slurm.reach()
        record = self._slurm.reread(job)
        if record.state is not JobState.PENDING:
            raise Stale(f"job {job.job_id} is {record.state}")
        self._cluster.release(job.job_id)
        await self._slurm.reply()
