"""The groups of jobs that the simulated slurmctld looks at again and again."""

from __future__ import annotations

from multiverse.core.model.job import JobState
from multiverse_lab.simulation.jobs import Batch, JobRecord
from multiverse_lab.simulation.tables import KeptJobs


def kept(*limits: float | None) -> tuple[KeptJobs, list[JobRecord]]:
    """Jobs that run since 0 with these time limits."""
    jobs = KeptJobs("_")
    records = [JobRecord(number, str(number), 0, Batch(limit=limit), 0.0) for number, limit in enumerate(limits)]
    for job in records:
        jobs[job.job_id] = job
        job.state = JobState.RUNNING
    return jobs, records


def test_a_job_is_overdue_once_it_has_run_for_longer_than_its_limit() -> None:
    jobs, (first, second, _) = kept(30.0, 20.0, None)
    assert jobs.groups.overdue(20.0) == []
    assert jobs.groups.overdue(1000.0) == [first, second], "in the order in which they were submitted"


def test_time_in_which_a_job_was_suspended_does_not_count() -> None:
    jobs, (job,) = kept(30.0)
    assert jobs.groups.overdue(10.0) == []
    job.started = 15.0
    assert jobs.groups.overdue(31.0) == []
    assert jobs.groups.overdue(46.0) == [job]


def test_a_job_that_runs_no_more_is_not_overdue() -> None:
    jobs, (ended, forgotten) = kept(30.0, 30.0)
    assert not jobs.groups.ended
    ended.state = JobState.ENDED
    del jobs[forgotten.job_id]
    assert jobs.groups.overdue(31.0) == []
    assert [*jobs.groups.ended.values()] == [ended]


def test_a_job_is_pinned_while_it_is_pending() -> None:
    jobs, (job,) = kept(None)
    job.pin = "mv-1"
    assert not jobs.groups.pinned
    job.state = JobState.PENDING
    assert [*jobs.groups.pinned.values()] == [job]
    job.unpin()
    assert not jobs.groups.pinned
