"""The end of the run of a job whose processes are frozen, and its return to the queue: `ports.Saving`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from multiverse.core.errors import Exhausted, Gone, MultiverseError, Refused, Stale
from multiverse.core.model.job import JobRef
from multiverse.drivers.slurm.acting.jobs import CurrentJob, compose
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading.nodes import first_listed

REASON = "multiverse: its job is being saved"
_TRUNCATES = re.compile(r"--open-mode[= \t]['\"]?t")  # as in "append|truncate", which may be abbreviated
_PATIENCE = 10.0  # seconds that the accounting has for one answer
_PAUSES = (1.0, 3.0)  # seconds between the tries to ask the accounting
_NO_ACCOUNTING = "accounting storage is disabled"  # sacct, where slurm.conf names no AccountingStorageType
_OPTIONS = re.compile(r"^#SBATCH[ \t].*", re.MULTILINE)


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

    async def prepare(self, job: JobRef, nodes: Sequence[str], *, requeues: bool = True) -> None:
        """The nodes keep their tag, by which the next run could start there while it is saved: hence DRAIN."""
        await self.check(job)
        if not requeues:
            await self._update(job, "Requeue=1")
        names = f"NodeName={','.join(nodes)}"
        await self._commands.run("scontrol", "update", names, "State=DRAIN", f"Reason={REASON}")

    async def check(self, job: JobRef) -> None:
        current = await self._reread(job)
        if not current.active:
            raise Stale(f"job {job.job_id} is {current.state.lower()}")
        if not current.batch:
            hint = "submit it with sbatch"
            raise Refused(f"job {job.job_id} is of srun or salloc, which Slurm cannot queue again", hint=hint)
        if await self._truncates(job, current.record):
            what = f"job {job.job_id} has --open-mode=truncate: its next run would delete the output so far"
            raise Refused(what, hint="submit it without that option")

    async def _truncates(self, job: JobRef, record: str) -> bool:
        """Whether files of output are truncated when the job starts again. No command of Slurm shows that, but the
        script does, and the command line of sbatch, which only the accounting keeps. `12_3` would be read as `12`, the
        task of an array that may be gone."""
        write = ("scontrol", "write", "batch_script", record, "-")
        script, line = await asyncio.gather(self._commands.run(*write), self._command_line(job))
        return any(_TRUNCATES.search(text) for text in (line, *_OPTIONS.findall(script)))

    async def _command_line(self, job: JobRef) -> str:
        """That of sbatch; empty at a site without accounting. `Exhausted` if the accounting does not show the job: what
        is not known could delete the job's output."""
        for pause in (*_PAUSES, 0.0):
            try:
                async with asyncio.timeout(_PATIENCE):
                    line = await self._commands.run("sacct", "-n", "-P", "-X", "-j", job.job_id, "-o", "SubmitLine")
                if line:
                    return line
                why = "sacct does not show the job"
            except TimeoutError:
                why = f"sacct did not end within {_PATIENCE:g} s"
            except MultiverseError as error:
                if _NO_ACCOUNTING in error.message:
                    return ""
                why = error.message
            await asyncio.sleep(pause)
        what = f"it is not known whether the next run of job {job.job_id} would delete the output so far"
        hint = f"--open-mode=truncate: try again when `sacct -j {job.job_id}` shows the job"
        raise Exhausted(f"{what}: {why}", hint=hint)

    async def check_script(self, nodes: Sequence[str]) -> None:
        """Slurm starts a script on that one of its job's nodes which it lists first."""
        if (first := await first_listed(self._commands, nodes)) != nodes[0]:
            what = f"Slurm would start the script on {first or 'another node'}, not on {nodes[0]}"
            raise Refused(what, hint="the VMs of its job are restored once more")

    async def undo(self, job: JobRef, nodes: Sequence[str], *, requeues: bool = True) -> None:
        for node in nodes:
            with suppress(Gone, Refused):  # a node that is not drained cannot be resumed
                await self._commands.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        if not requeues:
            await self.forbid_requeue(job)

    async def forbid_requeue(self, job: JobRef) -> None:
        current = await self._reread(job)
        if current.active:
            await self._update(job, "Requeue=0")

    async def requeue(self, job: JobRef, *, hold: bool = False, text: str = "") -> None:
        """With the flag Incomplete Slurm leaves jobs alone that have ended. It returns success when it did nothing."""
        current = await self._reread(job)
        if not current.requeued:
            if not current.active:
                raise Stale(f"job {job.job_id} is {current.state.lower()}")
            comment = compose(current.comment, text)
            if text and comment != current.comment:
                with suppress(MultiverseError):  # the text alone must not keep the job here
                    await self._update(job, f"AdminComment={comment}")
                    current = replace(current, comment=comment)
            await self._commands.run("scontrol", "requeuehold" if hold else "requeue", "Incomplete", job.job_id)
        if hold:  # a change of its nice value would release it (`_update_job` in job_mgr.c)
            current = replace(current, priority=0)
        with suppress(Stale, Gone, Refused):
            await self._to_gate(job, current)

    async def release(self, job: JobRef) -> None:
        current = await self._reread(job)
        current.check_pending(job)
        await self._release(job)

    async def _update(self, job: JobRef, change: str) -> None:
        await self._commands.run("scontrol", "update", f"JobId={job.job_id}", change)
