"""What answers in place of a node that sleeps, and the time limit of its job: `ports.StandingIn`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from multiverse.config import Settings
from multiverse.core.model.identity import NodeBootstrap
from multiverse.core.model.job import JobRef, NodeSpec
from multiverse.drivers.slurm.acting.jobs import CurrentJob
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.site.stand_in import stand_in


class SlurmStandingIn:
    """`reread` reads a job as it is now."""

    def __init__(
        self, settings: Settings, commands: SlurmCommands, reread: Callable[[JobRef], Awaitable[CurrentJob]]
    ) -> None:
        self._settings, self._commands, self._reread = settings, commands, reread

    async def stand_in(self, node: NodeSpec) -> NodeBootstrap:
        return await asyncio.to_thread(stand_in, self._settings, node)

    async def keep_time(self, job: JobRef, left: float) -> None:
        """By what is left now, so that it may be repeated, and a limit that somebody else changes stays changed."""
        current = await self._reread(job)
        if current.state != "RUNNING":
            return
        ends = (await self._commands.run("squeue", "-h", "-j", job.job_id, "-O", "EndTime:32")).strip()
        if ends.isdigit() and (minutes := round((time.time() + left - int(ends)) / 60)) > 0:
            await self._commands.run("scontrol", "update", f"JobId={job.job_id}", f"TimeLimit=+{minutes}")
