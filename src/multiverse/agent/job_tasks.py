"""VMs inside jobs without a plugin of Slurm: steps of the batch file have them made, list them, and give them back.

The control groups of the process that asks tell its job: only Slurm puts processes there. slurmctld tells the job's
user and nodes. No prolog and no epilog of ours tells when the job begins and ends, so the agent watches: a job without
steps here may have ended, and then slurmctld is asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from multiverse.agent.job_protocol import LAUNCH, LaunchVms, PlainRequest, ProvideVm, StepRequest
from multiverse.agent.jobs import JobHost, JobVm, JobVmService
from multiverse.core.errors import Gone, MultiverseError, Refused
from multiverse.system.processes import Peer

log = structlog.get_logger()

LOOK = 1.0  # seconds between two looks at the steps of jobs. A look costs nothing

FIRST_QUESTION, LAST_QUESTION = 1.0, 32.0
"""Seconds between two questions to slurmctld about a job without steps: at first, and after many."""

QUESTION_WITH_STEPS = 60.0
"""Seconds between two questions about a job that has steps: a step may outlast its job, if it cannot be killed."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """A run of a job."""

    job: int
    uid: int
    started: int  # Unix time
    nodes: tuple[str, ...]  # in an order that is the same on each


class JobRuns(Protocol):
    """Asks the scheduler about jobs. Each call raises `Unknown` if the scheduler does not answer."""

    async def run_of(self, job: int) -> JobRun | None:
        """The run of a job; None if the job has ended, or waits to run again."""

    async def comment(self, job: int) -> str:
        """The comment that the user gave the job."""

    async def share(self, job: int, node: str) -> tuple[int, int]:
        """The CPUs and the memory (MiB; 0: not limited) of a job on a node."""


@dataclass(slots=True)
class _Watch:
    """The state of a job whose end is watched for."""

    question: float = 0.0  # when slurmctld is asked next (time of the loop)
    pause: float = FIRST_QUESTION
    had_steps: bool = False
    verified: bool = False  # slurmctld has said that the VMs are of the job's present run, and steps were here since
    told: str = ""  # the last reason that was logged
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)  # of `list`: the tasks of a step come at the same time


class JobTasks:
    """Answers steps of jobs, and watches for the ends of these jobs. `node` is what the scheduler calls this host."""

    def __init__(self, vms: JobVmService, host: JobHost, runs: JobRuns, node: str) -> None:
        self._vms, self._host, self._runs, self._node = vms, host, runs, node
        self._watched: dict[int, _Watch] = {}
        self._looking: dict[int, asyncio.Task[None]] = {}
        self._launching = Counter[tuple[int, int]]()  # requests for VMs under way, by job and start of its run

    # --- what is asked for ----------------------------------------------------------------------------

    async def answer(self, request: StepRequest, peer: Peer) -> str:
        """What a step is told. Raises `Refused` if the process is in no job of its user, and errors of what is
        asked."""
        job = await asyncio.to_thread(self._host.find_job, peer.pid)
        if not job:
            raise Refused(
                "this process is in no control groups of a job of Slurm",
                hint="call multiverse-vm in a job; its node needs proctrack/cgroup or task/cgroup",
            )
        match request:
            case PlainRequest.COMMENT:
                await self._own_run(job, peer.uid)
                return await self._runs.comment(job)
            case LaunchVms():
                await self._launch(request.wanted, job, peer)
            case PlainRequest.RECLAIM:
                if any(vm.uid != peer.uid for vm in self._vms.vms_of(job)):
                    raise _foreign(job)
                await self._vms.release(job)
                return str(job)
        return self._shown(job, await self._own_vms(job, peer.uid))

    async def _launch(self, wanted: ProvideVm, job: int, peer: Peer) -> None:
        run = await self._own_run(job, peer.uid)
        cores, allocated = await self._runs.share(job, self._node)
        request = replace(
            wanted,
            job=job,
            uid=run.uid,
            cores=cores,
            allocated=allocated,
            nodes=run.nodes,
            node=run.nodes.index(self._node),
            started=run.started,
        )
        self._launching[job, run.started] += 1
        try:
            await self._vms.provide(request, peer.pid)
        finally:
            self._launching[job, run.started] -= 1
            self._launching += Counter()  # without zeros
        now = asyncio.get_running_loop().time()
        self._watched[job] = _Watch(now + QUESTION_WITH_STEPS, had_steps=True, verified=True)

    async def _own_run(self, job: int, uid: int) -> JobRun:
        """The run of a job of this user here. Raises `Refused` and `Gone`."""
        run = await self._runs.run_of(job)
        if run is None or self._node not in run.nodes:
            raise Gone(f"job {job} does not run on {self._node}", hint="did it end? is job_vms.node Slurm's name?")
        if run.uid != uid:
            raise _foreign(job)
        return run

    async def _own_vms(self, job: int, uid: int) -> tuple[JobVm, ...]:
        """The VMs of the present run of a job of this user. Raises `Refused` if there are none."""
        vms = self._vms.vms_of(job)
        if vms and vms[0].uid != uid:
            raise _foreign(job)
        if vms and vms[0].watched:
            known = self._watch(job)
            async with known.asking:
                if not known.verified:
                    run = await self._own_run(job, uid)
                    known.verified = run.started == vms[0].record
                    vms = vms if known.verified else ()
        if not vms:
            raise Refused(f"job {job} has no VM on this node", hint=f"launch it first: {LAUNCH}")
        return vms

    def _shown(self, job: int, vms: tuple[JobVm, ...]) -> str:
        return " ".join([str(job), str(len(vms[0].regions)), *("=".join(self._host.known_as(vm)) for vm in vms)])

    # --- the ends of jobs -----------------------------------------------------------------------------

    async def watch(self) -> None:
        """Release the VMs of jobs that have ended, until cancelled."""
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK)
        finally:
            looking = list(self._looking.values())
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)

    def look(self) -> None:
        jobs = {vms[0].job: vms[0] for vms in self._vms.known() if vms[0].watched}
        for job in self._watched.keys() - jobs.keys():
            del self._watched[job]
        for job, vm in jobs.items():
            if job not in self._looking:
                self._looking[job] = asyncio.create_task(self._look_at(vm), name=f"end of job {job}")

    async def _look_at(self, vm: JobVm) -> None:
        try:
            await self._release_if_ended(vm, self._watch(vm.job))
        finally:
            self._looking.pop(vm.job, None)

    async def _release_if_ended(self, vm: JobVm, known: _Watch) -> None:
        now = asyncio.get_running_loop().time()
        has_steps = await asyncio.to_thread(self._host.has_steps, vm)
        if not has_steps:
            known.verified = False
            if known.had_steps:
                known.question, known.pause = now, FIRST_QUESTION
        known.had_steps = has_steps
        if now < known.question:
            return
        known.question = now + (QUESTION_WITH_STEPS if has_steps else known.pause)
        known.pause = min(2 * known.pause, LAST_QUESTION)
        try:
            run = await self._runs.run_of(vm.job)
            has_ended = run is None or run.started != vm.record or self._node not in run.nodes
            if run is not None and self._launching[vm.job, run.started]:
                return  # it has removed VMs of an earlier run; a release would end the VMs of this run
            if has_ended and vm in self._vms.vms_of(vm.job):
                log.info("a job with VMs has ended", job=vm.job)
                await self._vms.release(vm.job)
        except MultiverseError as error:  # asked and tried again
            if str(error) != known.told:
                log.warning("the VMs of a job cannot be released, or its end is unknown", job=vm.job, reason=str(error))
            known.told = str(error)

    def _watch(self, job: int) -> _Watch:
        return self._watched.setdefault(job, _Watch())


def _foreign(job: int) -> Refused:
    return Refused(f"job {job} is another user's")
