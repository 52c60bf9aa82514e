"""The end of a run for another job, as slurmctld ends it (slurm_job_preempt in preempt.c): `ports.Preempting`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from multiverse.core.errors import Gone, MultiverseError, Refused, Stale
from multiverse.core.model.job import JobRef
from multiverse.drivers.slurm.acting.jobs import CurrentJob, compose, our_part
from multiverse.drivers.slurm.command import SlurmCommands


class SlurmPreempting:
    """`reread` reads a job as it is now. `to_gate` moves a job that waits, or is about to, to the gate."""

    def __init__(
        self,
        commands: SlurmCommands,
        reread: Callable[[JobRef], Awaitable[CurrentJob]],
        to_gate: Callable[[JobRef, CurrentJob], Awaitable[None]],
    ) -> None:
        self._commands, self._reread, self._to_gate = commands, reread, to_gate

    async def warn(self, job: JobRef, text: str) -> None:
        """As slurmctld: SIGCONT and SIGTERM for all steps, and none for the batch script itself. The comment comes
        last: a call that was cut short signals once more, rather than not at all."""
        current = await self._reread(job)
        self._check_active(job, current)
        if our_part(text) in current.comment:
            return
        for signal in ("CONT", "TERM"):
            await self._cancel(job, current, f"--signal={signal}")
        await self._comment(job, current, text)

    async def preempt(self, job: JobRef, *, requeue: bool, text: str) -> None:
        """What slurmctld cannot queue again it kills. With the flag Incomplete it leaves jobs alone that have ended."""
        current = await self._reread(job)
        if not current.requeued:
            self._check_active(job, current)
            with suppress(MultiverseError):  # the text alone must not keep the job here
                await self._comment(job, current, text)
            if not (requeue and await self._queue_again(job)):
                await self._cancel(job, current)
                return
        with suppress(Stale, Gone, Refused):
            await self._to_gate(job, current)

    @staticmethod
    def _check_active(job: JobRef, current: CurrentJob) -> None:
        if not current.active:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")

    async def _queue_again(self, job: JobRef) -> bool:
        try:
            await self._commands.run("scontrol", "requeue", "Incomplete", job.job_id)
        except Refused:
            return False
        return True

    async def _cancel(self, job: JobRef, current: CurrentJob, *signal: str) -> None:
        """By the state: a job that was queued again in this moment goes on waiting."""
        state = "SUSPENDED" if current.state == "SUSPENDED" else "RUNNING"
        await self._commands.run("scancel", f"--state={state}", *signal, job.job_id)

    async def _comment(self, job: JobRef, current: CurrentJob, text: str) -> None:
        if (comment := compose(current.comment, text)) != current.comment:
            await self._commands.run("scontrol", "update", f"JobId={job.job_id}", f"AdminComment={comment}")
