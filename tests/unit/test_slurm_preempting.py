"""How a run ends for another job in Slurm: which commands are run for a job in each state."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from multiverse.core.errors import Refused, Stale
from multiverse.core.model.job import JobRef
from multiverse.drivers.slurm.acting.jobs import CurrentJob, compose
from multiverse.drivers.slurm.acting.preempting import SlurmPreempting
from tests.unit.test_slurm_saving import JOB, PENDING, RUNNING

TEXT = "job 12 (high) takes its place"
TOLD = f"AdminComment={compose('', TEXT)}"


class Slurm:
    """Records the commands, some of which it refuses, and answers with one job."""

    def __init__(self, job: CurrentJob, *refused: str) -> None:
        self.job, self.refused = job, refused
        self.ran, self.gated = list[tuple[str, ...]](), list[CurrentJob]()
        commands: Any = self
        self.preempting = SlurmPreempting(commands, self._reread, self._to_gate)

    async def run(self, *argv: str) -> str:
        self.ran.append(argv)
        if argv[1] in self.refused:
            raise Refused(f"{argv[1]} is refused")
        return ""

    async def _reread(self, job: JobRef) -> CurrentJob:
        assert job == JOB
        return self.job

    async def _to_gate(self, job: JobRef, current: CurrentJob) -> None:
        self.gated.append(current)


def test_the_steps_are_signalled_before_the_user_is_told() -> None:
    slurm = Slurm(RUNNING)
    asyncio.run(slurm.preempting.warn(JOB, TEXT))
    assert slurm.ran == [
        ("scancel", "--state=RUNNING", "--signal=CONT", "7"),
        ("scancel", "--state=RUNNING", "--signal=TERM", "7"),
        ("scontrol", "update", "JobId=7", TOLD),
    ]


def test_a_user_who_was_told_gets_no_second_signal() -> None:
    slurm = Slurm(replace(RUNNING, comment=compose("of others", TEXT)))
    asyncio.run(slurm.preempting.warn(JOB, TEXT))
    assert not slurm.ran


@pytest.mark.parametrize("refused", [(), ("update",)])
def test_a_job_is_told_and_queued_again_at_the_gate(refused: tuple[str, ...]) -> None:
    slurm = Slurm(RUNNING, *refused)
    asyncio.run(slurm.preempting.preempt(JOB, requeue=True, text=TEXT))
    assert slurm.ran == [("scontrol", "update", "JobId=7", TOLD), ("scontrol", "requeue", "Incomplete", "7")]
    assert slurm.gated == [RUNNING]


def test_what_slurm_does_not_queue_again_is_cancelled_while_it_runs() -> None:
    slurm = Slurm(RUNNING, "requeue")
    asyncio.run(slurm.preempting.preempt(JOB, requeue=True, text=TEXT))
    assert slurm.ran[1:] == [("scontrol", "requeue", "Incomplete", "7"), ("scancel", "--state=RUNNING", "7")]
    slurm = Slurm(replace(RUNNING, state="SUSPENDED"))
    asyncio.run(slurm.preempting.preempt(JOB, requeue=False, text=TEXT))
    assert slurm.ran[1:] == [("scancel", "--state=SUSPENDED", "7")] and not slurm.gated


def test_a_repeated_call_only_brings_the_job_to_the_gate() -> None:
    again = replace(RUNNING, state="COMPLETING", requeued=True)
    slurm = Slurm(again)
    asyncio.run(slurm.preempting.preempt(JOB, requeue=True, text=TEXT))
    assert slurm.gated == [again] and not slurm.ran


@pytest.mark.parametrize("job", [PENDING, replace(RUNNING, state="COMPLETING"), replace(RUNNING, state="CANCELLED")])
def test_a_job_that_does_not_run_is_left_alone(job: CurrentJob) -> None:
    slurm = Slurm(job)
    for call in (slurm.preempting.warn(JOB, TEXT), slurm.preempting.preempt(JOB, requeue=True, text=TEXT)):
        with pytest.raises(Stale):
            asyncio.run(call)
    assert not slurm.ran and not slurm.gated
