"""What squeue's table leaves out of a job, read with `scontrol show job`, which asks slurmctld for one job or array.

These are how many tasks of an array may run at once, and whether the requested memory is that of a CPU or of a node in
the few cases in which the table does not tell. Nothing else is taken from this output: a user chooses a job's name, in
which any text may stand.

Both may be changed while the job waits, and the table looks the same afterwards. multiverse.lua leaves a hint then that
names the job. Should that be lost, some jobs are read again with each whole table, in turn.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection
from dataclasses import dataclass

from multiverse.core.errors import Gone
from multiverse.drivers.slurm.command import SlurmCommands

_AT_ONCE = 4  # processes
_NEW = 200  # jobs of which nothing is known yet that are read in one go; others follow with the next table
_AGAIN = 3  # jobs that were read before and are read again with a whole table: those that were read longest ago
_AGE = 1.0  # seconds for which a job that was read is not read again, unless a hint names it


@dataclass(frozen=True, slots=True)
class JobDetails:
    """`at_most` is how many tasks of the array may run at once (0: no limit)."""

    at_most: int = 0
    memory_per_cpu: bool = False


UNKNOWN = JobDetails(memory_per_cpu=True)
"""What is assumed as long as a job's details are unknown: the larger of the two requests."""


class DetailReader:
    """Reads details of jobs and arrays, by the base id, and remembers them."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: dict[tuple[str, int], tuple[JobDetails, float]] = {}

    def of(self, key: tuple[str, int]) -> JobDetails:
        """The details of a job by its base id and its submit time, or of an array by its id and 0."""
        return self._known[key][0] if key in self._known else UNKNOWN

    def keep(self, keys: Collection[tuple[str, int]]) -> None:
        """Forget all jobs but these."""
        self._known = {key: known for key, known in self._known.items() if key in keys}

    async def complete(self, keys: Collection[tuple[str, int]], named: Collection[tuple[str, int]] = ()) -> None:
        """Read what is not known of these, and those that are `named` in any case."""
        new = sorted(set(keys) - self._known.keys())[:_NEW]
        await self._read_all([*new, *sorted(set(named) & self._known.keys())])

    async def read_again(self) -> None:
        """Read the jobs again that were read longest ago."""
        before = time.monotonic() - _AGE
        old = sorted((at, key) for key, (_, at) in self._known.items() if at <= before)
        await self._read_all([key for _, key in old[:_AGAIN]])

    async def _read_all(self, keys: Collection[tuple[str, int]]) -> None:
        turn = asyncio.Semaphore(_AT_ONCE)

        async def read(key: tuple[str, int]) -> None:
            async with turn:
                began = time.monotonic()
                self._known[key] = await self._read(key[0]), began

        await asyncio.gather(*map(read, keys))

    async def _read(self, base: str) -> JobDetails:
        try:
            text = await self._commands.run("scontrol", "-o", "show", "job", base)
        except Gone:
            return UNKNOWN
        return parse_details(text)


def parse_details(text: str) -> JobDetails:
    """The details in the lines of `scontrol -o show job`, one for each record of an array."""
    throttles = re.findall(r"^JobId=\d+ ArrayJobId=\d+ ArrayTaskId=\S+ ArrayTaskThrottle=(\d+) ", text, re.MULTILINE)
    return JobDetails(max(map(int, throttles), default=0), re.search(r" MinMemoryCPU=\S+ ", text) is not None)
