"""Slurm as a `Scheduler` (ports.py): VMs are dynamic nodes, jobs wait at the gate and are pinned by a feature."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from multiverse.config import Settings
from multiverse.core.errors import Exhausted, Gone, Refused, Stale, Unknown
from multiverse.core.model import JobRef, NodeBootstrap, NodeSpec, NodeState, SchedulerView, User
from multiverse.core.pool import named_by_none
from multiverse.drivers.slurm import account, conf, parse
from multiverse.drivers.slurm import bootstrap as node_bootstrap
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.delete import NodeDeleter
from multiverse.drivers.slurm.limits import AccountingLimits, licences
from multiverse.drivers.slurm.offers import OfferFiles
from multiverse.drivers.slurm.reread import CurrentJob, reread

_RETRY_DELAYS = (0.05, 0.1, 0.2, *(0.4,) * 20)  # seconds between asking and asking again
_OFFER_TERM = 10.0  # seconds that offers hold without a look, or a few looks' time if that is more
_LONGEST_COMMENT = 500  # bytes of a line left for a user


class SlurmScheduler:
    def __init__(self, settings: Settings, site: str, *, env: Mapping[str, str] | None = None) -> None:
        self._settings = settings
        self._slurm = settings.slurm
        self._site = site
        self._commands = SlurmCommands(settings.slurm, env)
        self._nodes_by: tuple[str, ...] = ("sinfo", "-a")
        self._offers = OfferFiles(settings.slurm.inbox, site, max(_OFFER_TERM, 4 * settings.poll))
        self._node_deleter = NodeDeleter(self._commands, (settings.slurm.gate_partition, settings.slurm.run_partition))

    def unserved(self) -> list[conf.UnsupportedSetting]:
        """What the site's Slurm is configured to do that does not reach jobs in VMs."""
        return conf.unsupported(node_bootstrap.read(self._slurm.conf))

    def close(self) -> None:
        """Offer nothing any more: nobody is there to introduce users."""
        self._offers.close()

    async def observe(self) -> SchedulerView:
        offers = self._offers.observe()
        names, enforced = await asyncio.to_thread(self._names)
        try:
            (jobs, limits), nodes = await asyncio.gather(self._read_jobs(names, enforced), self._read_nodes())
            seen_jobs, seen_nodes = await asyncio.gather(
                asyncio.to_thread(parse.jobs, jobs, names, time.time(), limits.uses),
                asyncio.to_thread(parse.nodes, nodes, names),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Unknown(
                f"Slurm's JSON is not as it was: {error!r}", hint="which release is this? report it"
            ) from error
        # A submission that names the features of a node that Slurm does not know is refused.
        self._offers.keep([name for name, node in seen_nodes.items() if node.state is NodeState.IDLE])
        return SchedulerView(jobs=seen_jobs, nodes=seen_nodes, limits=limits.left, offers=offers)

    async def _read_jobs(self, names: parse.SiteNames, enforced: bool) -> tuple[list[parse.Record], AccountingLimits]:
        """Jobs first, limits second: a job that starts in between counts twice, and none is forgotten."""
        # -a: hidden partitions too; -t all: ended jobs, which newer releases leave out otherwise.
        document = await self._commands.json("squeue", "-a", "-t", "all")
        jobs = parse.ours(document.get("jobs", ()), names)
        waiting = parse.waiting(jobs, names)
        assoc_mgr, free = await asyncio.gather(
            self._show(enforced and bool(waiting), "assoc_mgr", "flags=assoc,qos"),
            self._show(any(map(licences, waiting)), "licenses"),
        )
        return jobs, AccountingLimits(jobs, assoc_mgr, free)

    async def _read_nodes(self) -> list[parse.Record]:
        document = await self._commands.json(*self._nodes_by)
        if "sinfo" in document:  # from 23.02 on it tells of nodes by the group; scontrol has no JSON before
            self._nodes_by = ("scontrol", "show", "nodes", "-a")
            document = await self._commands.json(*self._nodes_by)
        return list(document.get("nodes", ()))

    async def _show(self, wanted: bool, *what: str) -> str:
        return await self._commands.run("scontrol", "show", *what) if wanted else ""

    def _names(self) -> tuple[parse.SiteNames, bool]:
        """What parsing needs to know, and whether Slurm keeps limits of associations and QOS."""
        text = node_bootstrap.read(self._slurm.conf)
        default = conf.memory_per_cpu(text, parse.MEMORY_PER_CPU)
        return parse.SiteNames(
            site=self._site,
            gate_partition=self._slurm.gate_partition,
            run_partition=self._slurm.run_partition,
            gate_feature=self._slurm.gate_feature,
            memory_per_cpu=default,
            per_account=self._settings.image.per_account,
        ), conf.limits_are_kept(text)

    async def _reread(self, job: JobRef) -> CurrentJob:
        return await reread(self._commands, job, self._slurm.gate_feature)

    async def pin(self, job: JobRef, tag: str, nodes: Sequence[str], text: str = "") -> None:
        current = await self._reread(job)
        tied = current.partition == self._slurm.run_partition and current.pinned == tag
        if tied and (current.active or (current.pending and current.priority)):
            if text and not current.comment:
                await self._update(job, f"AdminComment={_line(text)}")
            return  # said before, or it took a spare by itself; it may have started since
        if not current.pending:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")
        if current.priority == 0:
            raise Stale(f"job {job.job_id} is held: {current.reason}")
        changes = [f"Partition={self._slurm.run_partition}", f"Features={'&'.join((*current.own, tag))}"]
        if text:
            changes.append(f"AdminComment={_line(text)}")
        if job.restarts:
            changes.append("StartTime=now")  # a requeued job has a begin time two minutes off
        # One update: between two, the job would wait for its features in the wrong partition and lose its turn.
        try:
            await self._update(job, *changes)
        except Refused:
            # "Requested partition configuration not available now" is a remark, not a refusal: the nodes
            # are busy or too small at this moment, and the job has been moved all the same.
            after = await self._reread(job)
            if after.partition != self._slurm.run_partition or after.pinned != tag:
                await self._to_gate(job, after)  # features that no node has are refused, the partition is not
                raise

    async def unpin(self, job: JobRef) -> None:
        current = await self._reread(job)
        if not current.pending:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")
        await self._to_gate(job, current)
        after = await self._reread(job)
        if after.partition != self._slurm.gate_partition:
            raise Stale(f"job {job.job_id} left the gate at once")
        if after.priority == 0 and parse.slurms_hold(after.reason, after.description):
            await self._commands.run("scontrol", "release", job.job_id)

    async def _to_gate(self, job: JobRef, current: CurrentJob) -> None:
        if current.partition == self._slurm.gate_partition and current.at_gate:
            return
        features = "&".join((*current.own, self._slurm.gate_feature))
        await self._update(job, f"Partition={self._slurm.gate_partition}", f"Features={features}")

    async def requeue(self, job: JobRef) -> None:
        current = await self._reread(job)
        if current.requeued:  # by an earlier call; its nodes are not free of it yet
            await self._to_gate(job, current)
            return
        if current.pending:
            await self.unpin(job)
            return
        if not current.active:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")
        await self._commands.run("scontrol", "requeue", job.job_id)
        try:
            await self._to_gate(job, current)
        except (Stale, Gone, Refused):
            return  # it is queued again; the next look shows where, and `unpin` puts it right

    async def revoke(self, job: JobRef, reason: str) -> None:
        current = await self._reread(job)
        if current.ended:
            return
        if not current.pending:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")
        await self.explain(job, reason)
        # Only while it is pending: one that started in the meantime goes on.
        await self._commands.run("scancel", "--state=PENDING", job.job_id)

    async def set_down(self, node: str, reason: str) -> None:
        name = f"NodeName={node}"
        self._offers.close_to(node)
        try:
            # Drained as well: with ReturnToService=2 a slurmd that still answers would make a DOWN node idle again.
            await self._commands.run("scontrol", "update", name, "State=DRAIN", f"Reason={_line(reason)}")
            await self._commands.run("scontrol", "update", name, "State=DOWN", f"Reason={_line(reason)}")
        except Gone:
            return

    async def delete_node(self, node: str) -> None:
        self._offers.close_to(node)  # first: a job that names the features of a node that is gone is refused
        await self._node_deleter.delete(node)
        self._offers.forget(node)

    async def explain(self, job: JobRef, text: str) -> None:
        await self._reread(job)
        await self._update(job, f"AdminComment={_line(text)}")

    @property
    def offers(self) -> SlurmScheduler:
        """See `ports.Scheduler`."""
        return self

    @property
    def submission(self) -> None:
        """See `ports.Scheduler`."""
        return None

    async def offer(self, node: NodeSpec) -> None:
        if await asyncio.to_thread(node_bootstrap.may_be_offered, self._settings, node):
            any_image, any_kind = named_by_none(node.image, self._settings.image.default, self._settings.image.kind)
            self._offers.offer(node, any_image=any_image, any_kind=any_kind)

    async def withdraw(self, node: str) -> None:
        self._offers.withdraw(node)

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        return await asyncio.to_thread(node_bootstrap.bootstrap, self._settings, node)

    async def user(self, uid: int) -> User:
        return await asyncio.to_thread(account.lookup, uid)

    async def _update(self, job: JobRef, *changes: str) -> None:
        """Change a job. For some seconds after a change of its own slurmctld may not be able to (24.11): it is asked
        again, and `Exhausted` raised in the end."""
        change = ("scontrol", "update", f"JobId={job.job_id}", *changes)
        for delay in _RETRY_DELAYS:
            try:
                await self._commands.run(*change)
                return
            except Exhausted:
                await asyncio.sleep(delay)
        await self._commands.run(*change)


def _line(text: str) -> str:
    """One printable line. scontrol takes the whole argument as the value, quotes included."""
    plain = "".join(c if c.isprintable() else " " for c in text.replace('"', "'"))
    return " ".join(plain.split())[:_LONGEST_COMMENT]
