"""A `ports.Scheduler` over the simulated cluster: its commands take time, and fail as Slurm 22.05's do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from multiverse.config import ImageSettings
from multiverse.core.errors import Gone, Refused, Stale, Unknown
from multiverse.core.model import JobRef, JobState, NodeBootstrap, NodeSpec, SchedulerView, User
from multiverse.core.provisioning.spares import named_by_none
from multiverse.simulation.cluster import Spare
from multiverse.simulation.guests import LIVE, Joining
from multiverse.simulation.jobs import JobRecord
from multiverse.simulation.world import World


@dataclass(frozen=True)
class CommandPace:
    """How long commands take, in seconds, as ranges that are drawn from: before the effect, after it, and
    until slurmctld is given up for dead."""

    there: tuple[float, float] = (0.005, 0.05)
    back: tuple[float, float] = (0.002, 0.03)
    patience: tuple[float, float] = (2.0, 10.0)


class SimulatedScheduler:
    """See `ports.Scheduler`: this is its contract's plainest reading."""

    def __init__(
        self, world: World, rng: Random, pace: CommandPace | None = None, image: ImageSettings | None = None
    ) -> None:
        self._world = world
        self._image = image or ImageSettings()
        self._cluster = world.cluster
        self._rng = rng
        self._pace = pace or CommandPace()

    async def observe(self) -> SchedulerView:
        await self._reach()
        offers = self._cluster.observe_offers()
        view = replace(self._cluster.view(), offers=offers)
        await self._reply()
        return view

    async def pin(self, job: JobRef, tag: str, nodes: Sequence[str], text: str = "") -> None:
        await self._reach()
        record = self._reread(job)
        if record.pin == tag and record.state in LIVE:
            return  # said before, and it has started since
        if record.state is not JobState.PENDING:
            raise Stale(f"job {job.job_id} is {record.state}")
        if record.held:
            raise Stale(f"job {job.job_id} is held by its user")
        if not self._cluster.offers(tag):
            record.pin = None  # Slurm has moved it all the same, and the driver puts it back at the gate
            raise Refused(f"no node has the feature {tag}", hint="pin after its nodes have registered")
        record.pin = tag
        self._wake(record)
        await self._reply()

    async def unpin(self, job: JobRef) -> None:
        await self._reach()
        record = self._reread(job)
        if record.state is not JobState.PENDING:
            raise Stale(f"job {job.job_id} is {record.state}")
        record.unpin()
        self._wake(record)
        await self._reply()

    async def requeue(self, job: JobRef) -> None:
        await self._reach()
        record = self._reread(job)
        if record.state is JobState.PENDING:
            record.unpin()
            self._wake(record)
            return
        if record.state not in LIVE:
            raise Stale(f"job {job.job_id} is {record.state}")
        self._cluster.stopped_by_us(record, "queued again")
        self._cluster.requeue(job.job_id)
        record.unpin()
        await self._reply()

    async def revoke(self, job: JobRef, reason: str) -> None:
        await self._reach()
        record = self._reread(job)
        if record.state is JobState.ENDED and record.result == "CANCELLED":
            return
        if record.state is not JobState.PENDING:
            raise Stale(f"job {job.job_id} is {record.state}")
        record.comment = record.revoked = reason
        record.cancelled = asyncio.get_running_loop().time()
        self._cluster.cancel(job.job_id, by_user=False)
        await self._reply()

    async def set_down(self, node: str, reason: str) -> None:
        self._cluster.withdraw(node)
        await self._reach()
        known = self._cluster.nodes.get(node)
        if known is not None and known.job is not None and not known.down and known.guest.alive:
            self._cluster.stopped_by_us(known.job, f"lost {node}, which we set DOWN")
        self._cluster.set_down(node, reason)
        await self._reply()

    async def delete_node(self, node: str) -> None:
        self._cluster.withdraw(node)
        await self._reach()
        self._cluster.delete(node)
        self._cluster.forget(node)
        await self._reply()

    async def explain(self, job: JobRef, text: str) -> None:
        await self._reach()
        self._reread(job).comment = text
        await self._reply()

    @property
    def offers(self) -> SimulatedScheduler:
        return self

    @property
    def submission(self) -> None:
        return None

    async def offer(self, node: NodeSpec) -> None:
        self._cluster.offer(Spare(node, *named_by_none(node.image, self._image.default, self._image.kind)))

    async def withdraw(self, node: str) -> None:
        self._cluster.withdraw(node)

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        features = (self._cluster.settings.node_feature, *node.features)
        return Joining(node.name, features, node.size).pack()

    async def user(self, uid: int) -> User:
        user = self._world.user(uid)
        if user is None:
            raise Gone(f"no user has the uid {uid}", hint="look at the site's user database")
        return user

    def _reread(self, job: JobRef) -> JobRecord:
        record = self._cluster.jobs.get(job.job_id)
        if record is None:
            raise Gone(f"no job {job.job_id}")
        if record.ref != job:
            raise Stale(f"job {job.job_id} is now {record.ref}")
        return record

    def _wake(self, record: JobRecord) -> None:
        """What slurmctld itself had put in its way is taken away; what its user wants stays."""
        record.bad = False
        if record.delayed:
            record.begin, record.delayed = asyncio.get_running_loop().time(), False

    async def _reach(self) -> None:
        await asyncio.sleep(self._rng.uniform(*self._pace.there))
        if not self._cluster.up:
            await asyncio.sleep(self._rng.uniform(*self._pace.patience))
            raise Unknown("slurmctld does not answer", hint="see whether it runs")

    async def _reply(self) -> None:
        await asyncio.sleep(self._rng.uniform(*self._pace.back))
