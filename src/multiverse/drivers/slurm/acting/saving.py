"""The end of the run of a job whose processes are frozen, and its return to the queue: `ports.Saving`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from multiverse.core.errors import Gone, Refused, Stale
from multiverse.core.model.job import JobRef
from multiverse.drivers.slurm.acting.jobs import CurrentJob
from multiverse.drivers.slurm.command import SlurmCommands

REASON = "multiverse: its job is being saved"


class SlurmSaving:
    """`reread` reads a job as it is now. `to_gate` moves a job that waits, or is about to, to the gate. `release` ends
    the hold of a pending job."""

    def __init__(
        self,
        commands: SlurmCommands,
        reread: Callable[[JobRef], Awaitable[CurrentJob]],
        to_gate: Callable[[JobRef, CurrentJob], Awaitable[None]],
        release: Callable[[JobRef], Awaitable[None]],
    ) -> None:
        self._commands, self._reread, self._to_gate, self._release = commands, reread, to_gate, release

    async def prepare(self, job: JobRef, node: str) -> None:
        """The node keeps its tag, by which the next run could start there while it is saved: hence DRAIN."""
        current = await self._reread(job)
        if not current.active:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")
        if not current.batch:
            hint = "submit it with sbatch"
            raise Refused(f"job {job.job_id} is of srun or salloc, which Slurm cannot queue again", hint=hint)
        await self._commands.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={REASON}")

    async def undo(self, job: JobRef, node: str) -> None:
        with suppress(Gone):
            await self._commands.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    async def requeue(self, job: JobRef, *, hold: bool = False, remaining: float | None = None) -> None:
        """With the flag Incomplete Slurm leaves jobs alone that have ended. It returns success when it did nothing."""
        current = await self._reread(job)
        if not current.requeued:
            if not current.active:
                raise Stale(f"job {job.job_id} is {current.state.lower()}")
            await self._commands.run("scontrol", "requeuehold" if hold else "requeue", "Incomplete", job.job_id)
        if hold:  # a change of its nice value would release it (`_update_job` in job_mgr.c)
            current = replace(current, priority=0)
        with suppress(Stale, Gone, Refused):
            await self._to_gate(job, current)

    async def release(self, job: JobRef) -> None:
        current = await self._reread(job)
        current.check_pending(job)
        await self._release(job)
