"""What the user of a waiting job is told. Pure. `State.reasons` has the first jobs in the queue, and why they wait."""

from __future__ import annotations

from collections.abc import Mapping

from multiverse.core.model import Attempt, AttemptState, Job

BEHIND = "waiting behind earlier jobs"
"""What is said of all other jobs that wait for their turn. It has no figures, so it does not change."""


def reason_of(attempt: Attempt, job: Job | None, reasons: Mapping[int, str], now: float) -> str:
    """Why an attempt waits, or nothing: for a job that the scheduler itself keeps waiting (a hold, a dependency), for
    one that is not at the gate, and as long as nothing was decided. `job` is its job as observed last."""
    if attempt.id in reasons:
        return reasons[attempt.id]
    if attempt.state is not AttemptState.QUEUED or attempt.quarantined:
        return ""
    if job is None or job.ref != attempt.job or not job.eligible:
        return ""
    if now < attempt.not_before:
        return attempt.note
    return BEHIND if reasons else ""
