"""How long it takes to make a checkpoint of a job, how long the job stands still, and how much slower it is.

The jobs are those of the benchmark of moves. As there, the time down is the longest pause between two reports of a job,
because the clock of an emulated guest stands still with it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from multiverse.api import SavedView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.latency import until
from multiverse_lab.bench.move import PROGRAM, SETTLED, MoveCase, ProgressReports, longest_pause, pace
from multiverse_lab.lab.session import LabSession

CASES = (
    MoveCase("small idle", 150),
    MoveCase("small, 10 MiB/s", 150, 32, 10),
    MoveCase("2 GiB idle", 1900),
    MoveCase("2 GiB, 10 MiB/s", 1900, 512, 10),
    MoveCase("2 GiB, 100 MiB/s", 1900, 512, 100),
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

    def run(self, case: MoveCase, times: int) -> list[CheckpointSample]:
        """Make so many checkpoints of a job of that case."""
        program = self.lab.user.home / "checkpoints.py"
        program.write_text(PROGRAM)
        command = f"python3 {program} {self.reports.host} {self.reports.port} {case.filled} {case.rate}"
        self.reports.taken.clear()
        job = self.lab.submit(f"#!/bin/sh\n{command}\n", "--output=/dev/null", f"--mem={case.memory}", "--time=60")
        try:
            until(lambda: bool(self.reports.taken), f"job {job} did not report")
            time.sleep(SETTLED + case.filled / 200)
            found = [self._checkpoint(job) for _ in range(times)]
        finally:
            self.lab.run("scancel", job)
            until(lambda: not self.client.vms(), f"the VM of job {job} was not released")
            until(lambda: not self.client.saved(), f"the checkpoints of job {job} were not removed")
        self.samples.setdefault(case.name, []).extend(found)
        return found

    def _checkpoint(self, job: str) -> CheckpointSample:
        time.sleep(SETTLED)
        before = {one.name for one in self._shown(job)}
        began = time.monotonic()
        self.client.checkpoint(job)
        until(lambda: self._complete(job, before) is not None, f"no checkpoint of job {job} was made", pause=_POLL)
        total = time.monotonic() - began
        made = self._complete(job, before)
        assert made is not None
        time.sleep(0.3)  # for the reports that are under way
        meanwhile, usual = self.reports.between(began, began + total), self.reports.between(began - SETTLED, began)
        slower = 1.0 - pace(meanwhile) / pace(usual) if pace(usual) else 0.0
        return CheckpointSample(
            total,
            longest_pause(meanwhile),
            longest_pause(usual),
            made.bytes,
            slower,
            slower * total / max(EVERY, total),
        )

    def _shown(self, job: str) -> list[SavedView]:
        return [one for one in decode(list[SavedView], self.client.saved()) if one.job_id == job and one.checkpoint]

    def _complete(self, job: str, before: set[str]) -> SavedView | None:
        """The new checkpoint, once it is complete. Raises `Broken` if it was given up."""
        new = [one for one in self._shown(job) if one.name not in before]
        if not new or new[-1].state == "undoing":
            raise Broken(f"no checkpoint of job {job} was made", hint=f"multiverse explain {job}")
        return new[-1] if new[-1].state == "stored" else None
