"""How long it takes to make a checkpoint of a job, how long the job stands still, and how much slower it is.

The time that a job stands still is the longest pause between two of its reports.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from multiverse.api import SavedView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.computing import SETTLED, ComputingCase, ProgressReports, computing
from multiverse_lab.bench.latency import until
from multiverse_lab.lab.session import LabSession

CASES = (
    ComputingCase("small idle", 150),
    ComputingCase("small, 10 MiB/s", 150, 32, 10),
    ComputingCase("2 GiB idle", 1900),
    ComputingCase("2 GiB, 10 MiB/s", 1900, 512, 10),
    ComputingCase("2 GiB, 100 MiB/s", 1900, 512, 100),
)
EVERY = 60.0  # seconds between two checkpoints, for which the slowdown is told
_POLL = 0.02


@dataclass(frozen=True, slots=True)
class CheckpointSample:
    """Seconds, but for `size`, `slowdown` and `lost`."""

    total: float  # from the command until the checkpoint is complete
    pause: float  # the longest pause between two reports of the job meanwhile
    usual: float  # the same in as long before
    size: int  # bytes of the checkpoint
    slowdown: float  # the share of its work that the job did not do meanwhile
    lost: float  # the share of its work that it does not do with a checkpoint every `EVERY` seconds


@dataclass
class CheckpointRun:
    """Measures checkpoints, one job after the other."""

    lab: LabSession
    client: Client
    reports: ProgressReports
    samples: dict[str, list[CheckpointSample]] = field(default_factory=dict)

    def run(self, case: ComputingCase, times: int) -> list[CheckpointSample]:
        """Make so many checkpoints of a job of that case."""
        with computing(self.lab, self.client, self.reports, case) as job:
            found = [self._checkpoint(job) for _ in range(times)]
        until(lambda: not self.client.saved(), f"the checkpoints of job {job} were not removed")
        self.samples.setdefault(case.name, []).extend(found)
        return found

    def _checkpoint(self, job: str) -> CheckpointSample:
        time.sleep(SETTLED)
        before = {one.name for one in self._shown(job)}
        began = time.monotonic()
        self.client.checkpoint(job)
        made = until(lambda: self._complete(job, before), f"no checkpoint of job {job} was made", pause=_POLL)
        total = time.monotonic() - began
        progress = self.reports.between(began, began + total)
        lost = progress.slowdown * total / max(EVERY, total)
        return CheckpointSample(total, progress.pause, progress.usual, made.bytes, progress.slowdown, lost)

    def _shown(self, job: str) -> list[SavedView]:
        return [one for one in decode(list[SavedView], self.client.saved()) if one.job_id == job and one.checkpoint]

    def _complete(self, job: str, before: set[str]) -> SavedView | None:
        """The new checkpoint, once it is complete. Raises `Broken` if it was given up."""
        new = [one for one in self._shown(job) if one.name not in before]
        if not new or new[-1].state == "undoing":
            raise Broken(f"no checkpoint of job {job} was made", hint=f"multiverse explain {job}")
        return new[-1] if new[-1].state == "stored" else None
