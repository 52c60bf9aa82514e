"""Slurm as a `Scheduler` (see `ports`): VMs are dynamic nodes; jobs wait at the gate and are pinned by a feature.

A job at the gate and one that is pinned are in the same partition, and differ by three fields (see `gate`): the
feature, the gate's licence, and the nice value. One update changes all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path

from multiverse.config import Settings
from multiverse.core.errors import Exhausted, Gone, Refused, Stale
from multiverse.core.model.identity import NodeBootstrap, User
from multiverse.core.model.job import JobRef, LeaseSpec, NodeSpec, NodeState, SchedulerPart, SchedulerView
from multiverse.drivers.slurm.acting import gate_keeper
from multiverse.drivers.slurm.acting.delete import NodeDeleter
from multiverse.drivers.slurm.acting.jobs import (
    CommentTurns,
    CurrentJob,
    compose,
    plain_line,
    reread,
    survives_sacctmgr,
    updates,
    waiting_records,
)
from multiverse.drivers.slurm.acting.preempting import SlurmPreempting
from multiverse.drivers.slurm.acting.saving import SlurmSaving
from multiverse.drivers.slurm.acting.standing_in import SlurmStandingIn
from multiverse.drivers.slurm.command import Execute, SlurmCommands, execute
from multiverse.drivers.slurm.leases import PilotReader, SlurmLeases, user_of
from multiverse.drivers.slurm.reading.name_service import NameService
from multiverse.drivers.slurm.reading.reader import SlurmReader
from multiverse.drivers.slurm.site import bootstrap as node_bootstrap
from multiverse.drivers.slurm.site import conf, gate, requirements
from multiverse.drivers.slurm.site.conf import seconds_of
from multiverse.drivers.slurm.site.install import AddressFile
from multiverse.drivers.slurm.submission import OfferFiles, OffersSeen, SlurmOffers, SubmissionFile

_RETRY_DELAYS = (0.05, 0.1, 0.2, *(0.4,) * 20)  # seconds before an update that slurmctld cannot do now is repeated
_OFFER_TERM = 10.0  # seconds for which the list of offers is valid, at least
_SUBMISSION_TERM = 60.0  # seconds for which the published sizes are valid, at least


def _mark(origin: str) -> tuple[str, ...]:
    """The feature by which a job that was moved is recognised, if it was."""
    return (gate.MOVED_FROM + origin,) if origin else ()


class SlurmScheduler:
    """`ports.Scheduler`, with `ports.Parts`, `ports.Overflow` and `ports.Reports`."""

    def __init__(
        self,
        settings: Settings,
        site: str,
        *,
        leased: Collection[LeaseSpec] = (),
        env: Mapping[str, str] | None = None,
        execute: Execute = execute,
    ) -> None:
        """`leased` are the present leases: they are given back even if the settings name them no more."""
        # Overflow is there also where no partition overflows any more: moved jobs are put back.
        self.parts = self.overflow = self
        self._settings, self._leased = settings, leased
        self._slurm = settings.slurm
        self._commands = SlurmCommands(settings.slurm, env, execute)
        self._name_service = NameService()
        self._reader = SlurmReader(settings, site, self._commands.for_observations())
        self._pilots = PilotReader(settings, site, self._commands.for_observations(), leased)
        self.leases = SlurmLeases(settings, self._commands) if settings.lease or leased else None
        self.saving = SlurmSaving(self._commands, self._reread, self._to_gate, self._release)
        self.standing_in = SlurmStandingIn(settings, self._commands, self._reread)
        self.preempting = SlurmPreempting(self._commands, self._reread, self._to_gate)
        self._comment_turns = CommentTurns()
        # Each observation renews both files, so they have to be valid for several polls.
        self._offer_files = OfferFiles(settings.slurm.inbox, site, max(_OFFER_TERM, 4 * settings.poll))
        self.offers = SlurmOffers(settings, self._offer_files)
        submission_term = max(_SUBMISSION_TERM, 10 * settings.poll)
        self.submission = SubmissionFile(settings.slurm.inbox, submission_term)
        names = Path(settings.network.names) if settings.network.names else None
        self.addresses = AddressFile(settings.slurm.addresses_file(), names, site)
        self._gate = gate_keeper.GateKeeper(settings.slurm, self._commands)
        self._node_deleter = NodeDeleter(self._commands, self._is_reserved)

    def check_overflow(self) -> None:
        """Raise `Refused` if jobs of partitions that overflow would have other limits or prices in VMs."""
        if self._settings.overflow:
            for found in gate.examine_overflow(self._settings, conf.read(self._slurm.conf)):
                raise Refused(found.message, hint=found.remedy)

    def check_leases(self) -> None:
        """Raise `Refused` if the site's Slurm cannot lend the nodes that the settings want to lease, or if the settings
        do not say any more how leased hosts are reached."""
        named = {one.partition for one in self._settings.lease}
        for lease in self._leased:
            if lease.partition not in named and user_of(lease.user) != "root":
                raise Refused(
                    f"nodes of partition {lease.partition} are leased, and without its [[lease]] in the settings their "
                    f"hosts cannot be reached: their pilots are jobs of {user_of(lease.user)}, who has to become root",
                    hint=f'put [[lease]] of partition "{lease.partition}" back with its user and become, and max = 0; '
                    "remove it once `multiverse leases` shows none of it",
                )
        if self._settings.lease:
            for found in requirements.lease_sources(self._settings, conf.read(self._slurm.conf)):
                raise Refused(found.message, hint=found.remedy)

    def close(self) -> None:
        """Withdraw the list of offers and the published sizes: they need a running controller."""
        self._offer_files.close()
        self.submission.close()

    async def observe(self) -> SchedulerView:
        seen = self._renew()
        (jobs, nodes, limits), (pilots, leasable), (reservations, maintenance), preemption = await asyncio.gather(
            self._reader.whole(), self._pilots.read(), self._reader.reservations(), self._reader.preemption()
        )
        await self._gate.tend()
        self._renew_offers()
        return SchedulerView(
            jobs=jobs,
            nodes=nodes,
            limits=limits,
            offers=seen.offers,
            takers=seen.takers,
            pilots=pilots,
            leasable=leasable,
            reservations=reservations,
            preemption=preemption,
            maintenance=maintenance,
        )

    async def read(
        self, jobs: Mapping[str, int | None], users: Collection[int], nodes: Collection[str]
    ) -> SchedulerPart:
        seen = self._renew()
        part = await self._reader.part(jobs, users, nodes)
        self._renew_offers()
        return replace(part, offers=seen.offers, takers=seen.takers)

    def _renew(self) -> OffersSeen:
        self.submission.renew()
        return self._offer_files.observe()

    def _renew_offers(self) -> None:
        nodes = self._reader.nodes.items()
        idle = [name for name, node in nodes if node.state is NodeState.IDLE and not node.reserved]
        self._offer_files.renew(idle)

    async def _reread(self, job: JobRef) -> CurrentJob:
        return await reread(self._commands, job, self._slurm)

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
        """By the feature `tag`, not by the names of nodes: a restart of slurmctld kills jobs that name a deleted
        node."""
        async with self._comment_turns.changing(job):
            await self._pin(job, tag, text, at_once=at_once, limit=limit)

    async def _pin(self, job: JobRef, tag: str, text: str, *, at_once: bool, limit: float | None) -> None:
        current = await self._reread(job)
        origin = current.origin or (current.partition if self._overflows(current.partition) else "")
        if origin:
            text = gate.moved_text(origin, text)
        comment = compose(current.comment, text) if text else current.comment
        pinned = current.partition == self._slurm.partition and current.pinned == tag and not current.licensed
        if pinned and (current.active or (current.pending and current.priority)):
            # An earlier call pinned the job, or it took an offered node; it may have started since.
            if comment != current.comment:
                await self._update(job, f"AdminComment={comment}")
            return
        await self._call_back(job, current)
        current.check_pending(job)
        if current.priority == 0:
            raise Stale(f"job {job.job_id} is held: {current.reason}")
        if origin and current.partition == origin and comment != current.comment:
            # Slurm may change the partition and refuse the features: then only this tells where the job belongs.
            await self._update(job, f"AdminComment={comment}")
            current = replace(current, comment=comment)
        features = "&".join((*current.own, *_mark(origin), tag))
        nice = gate.boosted(current.nice, await self._boost())
        wanted = [*self._partition(current), f"Features={features}", f"Licenses={','.join(current.licences)}"]
        wanted.append(f"Nice={nice}")
        if comment != current.comment:
            wanted.append(f"AdminComment={comment}")
        if limit is not None and current.takes > (minutes := max(1, ceil(limit / 60))):
            wanted.append(f"TimeLimit={minutes}")
        if at_once:
            wanted.append("StartTime=now")  # a requeued job has a begin time two minutes off
        # One update: between two, the job would wait for its features in the wrong partition and lose its turn.
        try:
            await self._update(job, *wanted)
        except Refused:
            # Slurm moves the job also when it answers "Requested partition configuration not available now", which
            # means that the nodes are busy or too small at this moment.
            after = await self._reread(job)
            if after.partition != self._slurm.partition or after.pinned != tag or after.licensed:
                if not self._overflows(after.partition):
                    await self._to_gate(job, after)  # Slurm refused the features and changed the partition all the same
                raise

    async def unpin(self, job: JobRef) -> None:
        current = await self._reread(job)
        await self._call_back(job, current)
        current.check_pending(job)
        if self._overflows(current.partition) and current.pinned is None:
            return
        await self._to_gate(job, current)
        after = await self._reread(job)
        if not self._is_at_gate(after):
            raise Stale(f"job {job.job_id} left the gate at once")
        if after.held_by_slurm:
            await self._release(job)

    async def _release(self, job: JobRef) -> None:
        """End a hold, and then the boost of a job that kept it while it was held."""
        await self._commands.run("scontrol", "release", job.job_id)
        if nice := await self._usual_nice(await self._reread(job)):
            await self._update(job, *nice)

    async def _to_gate(self, job: JobRef, current: CurrentJob) -> None:
        if self._is_at_gate(current):
            return
        origin = current.origin or gate.told_origin(current.comment)
        features = "&".join((*current.own, *_mark(origin), self._slurm.gate_feature))
        licences = ",".join((*current.licences, f"{self._slurm.licence}:1"))
        wanted = [*self._partition(current), f"Features={features}", f"Licenses={licences}"]
        await self._update(job, *wanted, *await self._usual_nice(current))

    def _is_at_gate(self, current: CurrentJob) -> bool:
        return current.partition == self._slurm.partition and current.at_gate and current.licensed

    def _partition(self, current: CurrentJob) -> tuple[str, ...]:
        """The change of partition of a job that is still in the partition of its submission, which overflows."""
        return () if current.partition == self._slurm.partition else (f"Partition={self._slurm.partition}",)

    async def _usual_nice(self, current: CurrentJob) -> tuple[str, ...]:
        """The change back to the nice value of the job's user, if it has another one. A held job keeps it: with
        priority/basic a new nice value gives a job a priority, which releases it (`_update_job` in job_mgr.c)."""
        nice = gate.unboosted(current.nice, await self._boost())
        return () if current.priority == 0 or nice == current.nice else (f"Nice={nice}",)

    async def _boost(self) -> int:
        # In a thread: the file may lie on a file system that does not answer.
        return gate.boost(await asyncio.to_thread(node_bootstrap.read, self._slurm.conf))

    async def _call_back(self, job: JobRef, current: CurrentJob) -> None:
        """Take a job back that got past the gate's licence and was given nodes of the gate, where it runs nothing.
        Raises `Stale` then: it is queued again. A job of srun or salloc, which Slurm cannot queue again, ends."""
        if not current.gate_nodes or not current.active:
            return
        self._gate.look_again()
        if current.batch:
            await self._update(job, "Requeue=1")  # it has not run, so it loses nothing even with --no-requeue
            await self._requeue(job)
            await self._to_gate(job, current)
        else:
            text = "it was given nodes without a VM, because the gate was open: submit it again"
            await self._update(job, f"AdminComment={compose(current.comment, text)}")
            await self._commands.run("scancel", job.job_id)
        await self._gate.release(current.gate_nodes)
        raise Stale(f"job {job.job_id} got past the gate and was taken back")

    def _overflows(self, partition: str) -> bool:
        return any(one.partition == partition for one in self._settings.overflow)

    async def restore(self, job: JobRef) -> None:
        async with self._comment_turns.changing(job):
            current = await self._reread(job)
            current.check_pending(job)
            if not current.origin:
                return  # an earlier call has put it back
            if current.pinned is not None:
                raise Stale(f"job {job.job_id} is pinned")
            comment = compose(current.comment, f"back in partition {current.origin}")
            wanted = [f"Partition={current.origin}", f"Features={'&'.join(current.own)}"]
            wanted += [f"Licenses={','.join(current.licences)}", *await self._usual_nice(current)]
            await self._update(job, *wanted, f"AdminComment={comment}")
            after = await self._reread(job)
            if after.pending and after.held_by_slurm:
                await self._commands.run("scontrol", "release", job.job_id)

    async def requeue(self, job: JobRef) -> None:
        current = await self._reread(job)
        if current.requeued:  # by an earlier call; the job is still completing on its nodes
            await self._to_gate(job, current)
            return
        if current.pending:
            await self.unpin(job)
            return
        if not current.active:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")
        await self._requeue(job)
        # The job is queued again. If this fails, the next observation shows where, and `unpin` moves it to the gate.
        with suppress(Stale, Gone, Refused):
            await self._to_gate(job, current)

    async def _requeue(self, job: JobRef) -> None:
        """Without the flag slurmctld would also run a job again that was cancelled, or has ended, since it was read.
        With it slurmctld leaves such a job alone, and returns success (`_job_requeue_op` in job_mgr.c)."""
        await self._commands.run("scontrol", "requeue", "Incomplete", job.job_id)

    async def hold(self, job: JobRef, reason: str) -> None:
        """A hold of the user (`uhold`): users cannot release an operator's hold. The reason is left in AdminComment."""
        async with self._comment_turns.changing(job):
            current = await self._reread(job)
            current.check_pending(job)
            if current.priority == 0 and not current.held_by_slurm:
                return
            await self._comment(job, current, reason)
            await self._commands.run("scontrol", "uhold", job.job_id)

    async def revoke(self, job: JobRef, reason: str) -> None:
        async with self._comment_turns.changing(job):
            current = await self._reread(job)
            if current.ended:
                return
            current.check_pending(job)
            await self._comment(job, current, reason)
            # Cancelled only while it is pending: a job that started in the meantime goes on.
            await self._commands.run("scancel", "--state=PENDING", job.job_id)

    async def _comment(self, job: JobRef, current: CurrentJob, text: str) -> None:
        if (comment := compose(current.comment, text)) != current.comment:
            await self._update(job, f"AdminComment={comment}")

    async def set_down(self, node: str, reason: str) -> None:
        name = f"NodeName={node}"
        self._offer_files.withdraw_if_possible(node)
        with suppress(Gone):
            # Drained as well: with ReturnToService=2 a slurmd that still answers would make a DOWN node idle again.
            for state in ("State=DRAIN", "State=DOWN"):
                await self._commands.run("scontrol", "update", name, state, f"Reason={plain_line(reason)}")

    def _is_reserved(self, node: str) -> bool:
        known = self._reader.nodes.get(node)
        return known is not None and known.reserved

    async def delete_node(self, node: str) -> None:
        self._offer_files.withdraw_if_possible(node)  # first: Slurm refuses a job with the tag of a deleted node
        await self._node_deleter.delete(node)
        self._offer_files.forget(node)

    async def explain(self, jobs: Sequence[JobRef], text: str) -> None:
        """In AdminComment, beside the text of others. Tasks of an array that share one record stay together."""
        slurm = self._slurm
        async with self._comment_turns.explaining(jobs) as free:
            bases = {job.job_id.partition("_")[0] for job in free}
            records = await waiting_records(self._commands, bases, slurm.partition, slurm.gate_feature) if free else []
            for comment, addresses in updates(records, free, text):
                which = f"JobId={','.join(addresses)}"
                await self._commands.run("scontrol", "update", which, f"AdminComment={comment}")
        if len(free) < len(jobs):
            raise Exhausted("some of these jobs, or tasks of their arrays, are being pinned or cancelled")

    async def report(self, job: JobRef, text: str) -> None:
        """slurmctld changes nothing of a job that is completing or has ended ("Job has already finished"). slurmdbd
        changes the record of the job that has this id and was submitted last. sacctmgr of 22.05 writes small letters
        only: nobody is told where others wrote capital letters."""
        current = await self._reread(job)
        if current.pending or current.active or current.requeued:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")
        if not survives_sacctmgr(current.comment):
            raise Refused(f"sacctmgr would change what others wrote into the AdminComment of job {job.job_id}")
        comment = compose(current.comment, gate.moved_text(current.origin, text) if current.origin else text)
        if comment != current.comment:
            which = ("where", f"jobid={job.job_id}")
            await self._commands.run("sacctmgr", "-i", "modify", "job", *which, "set", f"AdminComment={comment}")

    async def cpu_seconds(self, job: JobRef) -> float:
        """sacct's sum of a job is that of its steps."""
        argv = ("sacct", "-n", "-P", "-j", job.job_id, "-o", "JobID,TotalCPU")
        rows = (line.split("|") for line in (await self._commands.run(*argv)).splitlines())
        return next((seconds_of(row[1]) for row in rows if row[0] == job.job_id and len(row) == 2), 0.0)

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        return await asyncio.to_thread(node_bootstrap.bootstrap, self._settings, node)

    async def user(self, uid: int) -> User:
        return await self._name_service.user(uid)

    async def _update(self, job: JobRef, *changes: str) -> None:
        """Change a job. slurmctld 24.11 may refuse a change for some seconds after another one: the update is repeated
        for about eight seconds, then `Exhausted` is raised."""
        command = ("scontrol", "update", f"JobId={job.job_id}", *changes)
        for delay in _RETRY_DELAYS:
            try:
                await self._commands.run(*command)
                return
            except Exhausted:
                await asyncio.sleep(delay)
        await self._commands.run(*command)
