"""What the user of a waiting job is told. Pure. `State.reasons` has the first jobs in the queue, and why they wait."""

from __future__ import annotations

from collections.abc import Container, Mapping

from multiverse.core.model import Attempt, AttemptState, Job, Reason, Why
from multiverse.core.queue import Queue

FIRST = 10  # Of so many waiting jobs, the first of the queue, it is said why each of them waits. An array counts once

PASSED_OVER = 100  # attempts behind the one that blocks that are looked at: a long array may be in between

BEHIND = Why.BEHIND()  # what is said of all other jobs; it has no figures, so it does not change


def reason_of(attempt: Attempt, job: Job | None, reasons: Mapping[int, Reason], now: float) -> Reason | None:
    """Why an attempt waits. None if the scheduler keeps its job, or nothing was decided. `job`: as observed last."""
    if attempt.state is not AttemptState.QUEUED or attempt.quarantined:
        return None
    if attempt.id in reasons:
        return reasons[attempt.id]
    if job is None or job.ref != attempt.job or not job.eligible or attempt.waits_for_delay(job):
        return None
    if now < attempt.not_before:
        return attempt.note
    return BEHIND if reasons else None


class FirstReasons:
    """Collects, in one round of admission, why the first jobs of the queue wait: one attempt for each job or array."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._found: list[tuple[int, int, Reason]] = []  # rank, attempt, reason
        self._jobs: set[str] = set()  # these jobs and arrays

    @property
    def full(self) -> bool:
        return len(self._found) >= FIRST

    def add(self, rank: int, attempt_id: int, why: Reason) -> None:
        """Add why an attempt waits. They are added in the order of the queue."""
        if not self.full:
            self._add(rank, attempt_id, why)

    def _add(self, rank: int, attempt_id: int, why: Reason) -> None:
        job = self._queue.job_of(attempt_id)
        if (job_or_array := job.array or job.ref.job_id) not in self._jobs:
            self._jobs.add(job_or_array)
            self._found.append((rank, attempt_id, why))

    def of(self, attempts: Container[int]) -> dict[int, Reason]:
        """The reasons of those that still wait, and of jobs that no host in sight could hold, in the queue's order."""
        for rank, attempt_id in self._queue.unfit.first(FIRST):
            self._add(rank, attempt_id, self._queue.why_unfit[attempt_id])
        first = sorted(self._found, key=lambda one: one[:2])[:FIRST]
        return {attempt_id: why for _, attempt_id, why in first if attempt_id in attempts}
