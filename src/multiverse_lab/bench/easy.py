"""An ideal scheduler, as a reference: first come, first served with EASY backfill, on processors that are all alike.

Jobs start the moment that they may, and processors are free the moment that a job ends. Nothing of the core is used.
(D. A. Lifka, "The ANL/IBM SP scheduling system", JSSPP 1995; the algorithm as in A. Mu'alem and D. G. Feitelson,
IEEE TPDS 12(6), 2001, figure 1.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from multiverse_lab.bench.swf import TraceJob


@dataclass(frozen=True, slots=True)
class Stay:
    """When a job came, started and ended, in seconds."""

    job: TraceJob
    started: float
    ended: float

    @property
    def waited(self) -> float:
        return max(0.0, self.started - self.job.submitted)


def schedule(jobs: Sequence[TraceJob], processors: int, *, backfill: bool = True) -> list[Stay]:
    """When each job of a trace runs."""
    coming = sorted(jobs, key=lambda job: (job.submitted, job.number), reverse=True)
    queue: list[TraceJob] = []
    running: list[tuple[float, int, TraceJob, float]] = []  # a heap: end, number, job, and the end by its limit
    stays, free, now = [], processors, 0.0

    def start(job: TraceJob) -> None:
        nonlocal free
        free -= job.processors
        heapq.heappush(running, (now + job.seconds, job.number, job, now + job.limit))
        stays.append(Stay(job, now, now + job.seconds))

    while coming or queue or running:
        now = min(coming[-1].submitted if coming else inf, running[0][0] if running else inf)
        while running and running[0][0] <= now:
            free += heapq.heappop(running)[2].processors
        while coming and coming[-1].submitted <= now:
            queue.append(coming.pop())
        while queue and queue[0].processors <= free:
            start(queue.pop(0))
        if queue and backfill:
            shadow, extra = _reservation(queue[0], free, running)
            for job in queue[1:]:
                in_time = now + job.limit <= shadow
                if job.processors <= (free if in_time else min(free, extra)):
                    extra -= 0 if in_time else job.processors
                    queue.remove(job)
                    start(job)
    return stays


def _reservation(
    first: TraceJob, free: int, running: Sequence[tuple[float, int, TraceJob, float]]
) -> tuple[float, int]:
    """When the first job starts at the latest, and how many processors are left beside it then."""
    for _, _, job, until in sorted(running, key=lambda one: one[3]):
        free += job.processors
        if free >= first.processors:
            return until, free - first.processors
    return inf, 0
