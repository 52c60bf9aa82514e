"""Which waiting jobs are told why they wait, and when (`controller.comments`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multiverse.controller.comments import (
    CALLS_AT_ONCE,
    CONSIDERED_AT_ONCE,
    GROUP,
    GROUP_INTERVAL,
    RETRY_LIMIT,
    RETRY_PAUSE,
    TEXT_INTERVAL,
    CommentPlan,
    CommentWriter,
    Telling,
)
from multiverse.core.errors import Unknown
from multiverse.core.model.job import Attempt, AttemptState, Job, JobRef, JobState
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.queue import BEHIND as _BEHIND
from multiverse.core.transition import Change, Event, Move
from multiverse_lab.simulation.loop import run
from tests.unit.planner_harness import POLICY
from tests.unit.rows import attempt

A = AttemptState
BEHIND = str(_BEHIND)
FULL, TURN = "waiting for capacity: the hosts are full", "waiting for a turn"


def queued(number: int, *, since: float = 0.0, job: str = "", **more: object) -> Attempt:
    return attempt(A.QUEUED, id=number, job=job or str(number), since=since, **more)  # type: ignore[arg-type]


@dataclass
class Calls:
    """A `CommentPlan` with its clock. Each call ends at once."""

    plan: CommentPlan = field(default_factory=lambda: CommentPlan(POLICY))
    jobs: dict[str, Job] = field(default_factory=dict)
    now: float = 0.0
    made: list[tuple[float, Telling]] = field(default_factory=list)

    def add(self, *some: Attempt, array: str = "", **more: object) -> None:
        for one in some:
            job = Job(one.job, "hello", 1000, JobState.PENDING, one.request, array=array, **more)  # type: ignore[arg-type]
            self.jobs[one.job.job_id] = job
        self.move(*some)

    def move(self, *some: Attempt) -> None:
        self.plan.note([Move(tuple(Change(one, Event.SUBMITTED) for one in some))])

    def reasons(self, *numbers: int, why: str = FULL) -> None:
        self.plan.explained(dict.fromkeys(numbers, Why.SAID(text=why)))

    def until(self, time: float, *, failed: bool = False) -> list[tuple[float, tuple[str, ...], str]]:
        """Make the calls that are due until then: when, for which jobs, with which text."""
        before = len(self.made)
        while True:
            while telling := self.plan.next_call(self.jobs, self.now):
                self.made.append((self.now, telling))
                self.plan.ended(telling, self.now, failed=failed)
            due = max(self.now + 0.01, self.plan.next_due())
            if due > time:
                self.now = time
                return [(at, tuple(job.job_id for job in one.jobs), one.text) for at, one in self.made[before:]]
            self.now = due


def texts(found: Iterable[tuple[float, tuple[str, ...], str]]) -> list[tuple[tuple[str, ...], str]]:
    return [(jobs, text) for _, jobs, text in found]


# --- what is told ------------------------------------------------------------------------------------


def test_a_job_is_told_its_reason_once_it_has_waited_as_long_as_the_policy_says() -> None:
    calls = Calls()
    calls.add(queued(1))
    calls.reasons(1)
    assert calls.until(POLICY.patience - 0.1) == []
    ((at, jobs, text),) = calls.until(1000.0)
    assert (jobs, text) == (("1",), FULL) and POLICY.patience <= at <= POLICY.patience + 0.1


def test_a_text_changes_at_most_once_in_an_interval_and_the_latest_counts() -> None:
    calls = Calls()
    calls.add(queued(1))
    calls.reasons(1)
    calls.until(5.0)
    for why in ("one", "two", TURN):
        calls.reasons(1, why=why)
        assert calls.until(calls.now + 5.0) == []
    ((at, _, text),) = calls.until(200.0)
    assert text == TURN and at >= calls.made[0][0] + TEXT_INTERVAL


def test_a_text_that_is_right_again_before_it_was_due_to_change_is_not_repeated() -> None:
    calls = Calls()
    calls.add(queued(1))
    calls.reasons(1)
    assert len(calls.until(5.0)) == 1
    calls.reasons(1, why=TURN)
    calls.until(20.0)
    calls.reasons(1)
    assert calls.until(1000.0) == []


def test_jobs_behind_the_first_are_told_so_together_and_once() -> None:
    calls = Calls()
    calls.add(*(queued(number) for number in range(1, 31)))
    calls.reasons(*range(1, 11))
    found = texts(calls.until(30.0))
    assert found[:10] == [((str(number),), FULL) for number in range(1, 11)]
    assert found[10:] == [(tuple(str(number) for number in range(11, 31)), BEHIND)]
    calls.reasons(*range(1, 11), why=TURN)
    assert all(text == TURN for _, text in texts(calls.until(3600.0)))


def test_long_queues_are_told_in_groups_with_pauses() -> None:
    calls = Calls()
    calls.add(*(queued(number) for number in range(1, 1011)))
    calls.reasons(*range(1, 11))
    groups = [(at, jobs) for at, jobs, text in calls.until(300.0) if text == BEHIND]
    assert [len(jobs) for _, jobs in groups] == [GROUP] * 10 and len(
        {job for _, jobs in groups for job in jobs}
    ) == 1000
    assert all(later - earlier >= GROUP_INTERVAL for (earlier, _), (later, _) in pairwise(groups))


def test_nobody_is_said_to_wait_behind_others_while_nothing_is_known_of_the_queue() -> None:
    calls = Calls()
    calls.add(queued(1), queued(2))
    assert calls.until(500.0) == []


@pytest.mark.parametrize("held", [{"eligible": False, "held": True}, {"eligible": False}])
def test_a_job_that_is_held_back_by_the_scheduler_is_told_nothing_until_it_may_run(held: dict[str, object]) -> None:
    calls = Calls()
    calls.add(queued(1), queued(2))
    calls.jobs["2"] = calls.jobs["2"]._replace(**held)  # type: ignore[arg-type]
    calls.reasons(1)
    assert texts(calls.until(100.0)) == [(("1",), FULL)]
    calls.jobs["2"] = calls.jobs["2"]._replace(eligible=True, held=False)
    assert texts(calls.until(100.0 + 2 * TEXT_INTERVAL)) == [(("2",), BEHIND)]


def test_a_job_in_its_back_off_is_told_why_the_attempt_before_failed() -> None:
    calls = Calls()
    calls.add(queued(1, note=said("it does not boot"), not_before=100.0, tries=4))
    assert texts(calls.until(50.0)) == [(("1",), "it does not boot")]


def test_a_job_that_falls_behind_is_told_so() -> None:
    calls = Calls()
    calls.add(queued(1))
    calls.reasons(1)
    calls.until(10.0)
    calls.add(queued(2, since=10.0))
    calls.reasons(2)
    assert texts(calls.until(300.0)) == [(("2",), FULL), (("1",), BEHIND)]


# --- arrays ------------------------------------------------------------------------------------------


def test_an_array_is_told_once_whichever_task_is_the_first() -> None:
    calls = Calls()
    tasks = [queued(number, job=f"5_{number}") for number in range(1, 501)]
    calls.add(*tasks, array="5")
    calls.reasons(1)
    assert texts(calls.until(100.0)) == [(("5_1",), FULL)]
    calls.move(replace(tasks[0], state=A.CLAIMED))
    calls.reasons(2)
    assert calls.until(1000.0) == []


def test_an_array_behind_the_first_jobs_is_told_once() -> None:
    calls = Calls()
    calls.add(queued(1))
    calls.add(*(queued(number, job=f"5_{number}") for number in range(2, 2000)), array="5")
    calls.reasons(1)
    assert texts(calls.until(3600.0)) == [(("1",), FULL), (("5_2",), BEHIND)]


def test_a_task_that_came_back_to_the_gate_is_told_with_its_array() -> None:
    calls = Calls()
    calls.add(queued(1, job="5_1"), queued(2, job="5_2"), array="5")
    calls.reasons(1)
    calls.until(10.0)
    calls.add(queued(3, job="5_3", since=10.0), array="5")
    assert texts(calls.until(200.0)) == [(("5_1",), FULL)]


# --- what happens meanwhile --------------------------------------------------------------------------


@pytest.mark.parametrize("left", [A.CLAIMED, A.UNGATED, A.STRAY, A.RECLAIMING])
def test_a_job_that_waits_no_more_is_told_nothing(left: A) -> None:
    calls = Calls()
    calls.add(queued(1), queued(2))
    calls.reasons(1)
    calls.move(replace(queued(1), state=left), replace(queued(2), state=left))
    assert calls.until(500.0) == []
    assert calls.plan.next_due() == math.inf


def test_a_job_whose_row_is_quarantined_is_told_nothing() -> None:
    calls = Calls()
    calls.add(queued(1), replace(queued(2), quarantined=said("it is odd")))
    calls.reasons(1)
    assert texts(calls.until(500.0)) == [(("1",), FULL)]


def test_another_run_of_a_job_is_told_anew() -> None:
    calls = Calls()
    calls.add(queued(1))
    calls.reasons(1)
    calls.until(10.0)
    calls.move(replace(queued(1), state=A.RECLAIMING))
    calls.add(queued(2, job="1", since=10.0, restarts=1))
    calls.reasons(2)
    calls.until(100.0)
    assert [telling.jobs for _, telling in calls.made] == [(JobRef("1", 500),), (JobRef("1", 500, 1),)]


def test_a_failed_call_is_repeated_after_growing_pauses() -> None:
    calls = Calls()
    calls.add(queued(1))
    calls.reasons(1)
    times = [at for at, _, _ in calls.until(3000.0, failed=True)]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[0] >= RETRY_PAUSE and pauses == sorted(pauses) and pauses[-1] == pytest.approx(RETRY_LIMIT, abs=1)
    assert len(calls.until(4000.0)) == 1, "and not after it succeeded"


def test_a_job_is_in_one_call_at_a_time() -> None:
    calls = Calls()
    calls.add(queued(1), queued(2))
    calls.reasons(1, 2)
    calls.now = 10.0
    first, second = (calls.plan.next_call(calls.jobs, 10.0) for _ in range(2))
    assert first and second and {*first.subjects, *second.subjects} == {"1", "2"}
    assert calls.plan.next_call(calls.jobs, 500.0) is None
    calls.plan.ended(first, 11.0, failed=False)
    assert calls.plan.next_call(calls.jobs, 500.0) is None, "it reads that already"


def test_after_a_restart_the_jobs_that_wait_are_known() -> None:
    calls = Calls()
    calls.add(queued(1), queued(2))
    calls.plan = CommentPlan(POLICY, [queued(1), queued(2), replace(queued(3), state=A.CLAIMED)])
    calls.reasons(1)
    assert texts(calls.until(100.0)) == [(("1",), FULL), (("2",), BEHIND)]


def test_a_go_over_a_long_queue_considers_a_bounded_number_of_jobs() -> None:
    looked: list[str] = []

    class Counted(dict[str, Job]):
        def get(self, key: str, default: Job | None = None) -> Job | None:  # type: ignore[override]
            looked.append(key)
            return super().get(key, default)

    calls = Calls()
    calls.add(*(queued(number) for number in range(1, 20_001)), eligible=False, held=True)
    calls.reasons(1)
    calls.plan.next_call(Counted(calls.jobs), 50.0)
    looked.clear()
    assert calls.plan.next_call(Counted(calls.jobs), 100.0) is None
    assert 0 < len(looked) <= 2 * CONSIDERED_AT_ONCE


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "go", "reason", "wait", "fail", "hold"]),
        st.integers(1, 15),
        st.sampled_from([FULL, TURN, "three"]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
@example([("come", 6, FULL), ("wait", 1, FULL), ("come", 8, FULL), ("reason", 6, FULL), ("wait", 15, FULL)])
def test_texts_keep_their_distance_and_are_never_repeated(steps: list[tuple[str, int, str]]) -> None:
    """Whatever happens, in whatever order; 1 to 5 are jobs, the others tasks of two arrays."""
    calls, reasons, waiting = Calls(), dict[int, Reason](), dict[int, Attempt]()
    last: dict[str, tuple[float, str]] = {}
    for number, (what, which, text) in enumerate(steps):
        name = str(which) if which <= 5 else f"{50 + which % 2}_{which}"
        if what == "come" and which not in waiting:
            waiting[which] = queued(1000 * which + number, job=name, since=calls.now)
            calls.add(waiting[which], array=name.partition("_")[0] if which > 5 else "")
        elif what == "go" and which in waiting:
            gone = waiting.pop(which)
            reasons.pop(gone.id, None)
            calls.move(replace(gone, state=A.CLAIMED))
            last.pop(name.partition("_")[0], None)
        elif what == "reason" and which in waiting:
            reasons[waiting[which].id] = Why.SAID(text=text)
        elif what == "hold" and which in waiting:
            calls.jobs[name] = calls.jobs[name]._replace(eligible=not calls.jobs[name].eligible)
        calls.plan.explained(reasons)
        if what in ("wait", "fail"):
            joined = {one.job.job_id.partition("_")[0] for one in waiting.values() if one.since == calls.now}
            for one in joined:  # a task that came is told with its array
                if one in last:
                    last[one] = (last[one][0], "")
            for at, jobs, said in calls.until(calls.now + 4.0 * which, failed=what == "fail"):
                names = {one.job.job_id for one in waiting.values()}
                assert set(jobs) <= names, "only jobs that wait are told anything"
                assert said != BEHIND or reasons
                for subject in {job.partition("_")[0] for job in jobs} if what == "wait" else set():
                    before = last.get(subject)
                    if before:
                        assert at - before[0] >= TEXT_INTERVAL and said != before[1]
                    last[subject] = (at, said)


# --- the writer --------------------------------------------------------------------------------------


class LoopClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()


class Slow:
    """A scheduler whose calls take a second; those in `broken` fail once."""

    def __init__(self, *broken: BaseException) -> None:
        self.told: list[tuple[tuple[str, ...], str]] = []
        self.running = self.most = 0
        self.broken = list(broken)

    async def explain(self, jobs: Sequence[JobRef], text: str) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(1.0)
            if self.broken:
                raise self.broken.pop()
            self.told.append((tuple(job.job_id for job in jobs), text))
        finally:
            self.running -= 1


def written(scheduler: Slow, seconds: float) -> Slow:
    """What the users of 20 jobs are told within some time, of which the first ten have a reason."""

    async def main() -> None:
        calls = Calls()
        plan = CommentPlan(POLICY)
        writer = CommentWriter(scheduler, LoopClock(), plan, lambda: calls.jobs)  # type: ignore[arg-type]
        task = asyncio.create_task(writer.run())
        await asyncio.sleep(100.0)
        some = [queued(number, since=LoopClock().now()) for number in range(1, 21)]
        calls.add(*some)
        writer.passed([Move((Change(one, Event.SUBMITTED),)) for one in some], dict.fromkeys(range(1, 11), FULL))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert scheduler.running == 0

    run(main(), 0)
    return scheduler


def test_the_writer_makes_few_calls_at_the_same_time() -> None:
    scheduler = written(Slow(), 60.0)
    assert scheduler.most == CALLS_AT_ONCE
    assert sorted(scheduler.told) == sorted(
        [*(((str(n),), FULL) for n in range(1, 11)), (tuple(str(n) for n in range(11, 21)), BEHIND)]
    )


def test_calls_that_fail_are_repeated_whatever_the_error() -> None:
    scheduler = written(Slow(Unknown("no answer"), ValueError("a bug")), 60.0)
    assert len(scheduler.told) == len(set(scheduler.told)) == 11


def test_calls_that_run_are_ended_with_the_writer() -> None:
    scheduler = written(Slow(), POLICY.patience + 0.5)
    assert scheduler.told == [] and scheduler.most == CALLS_AT_ONCE


def test_a_saved_job_is_told_so_before_the_reason_why_it_waits() -> None:
    def told(one: Attempt, why: Reason | None) -> Reason | None:
        return Why.SAVED_SINCE(why, at=0.0, size=46, storage="a") if one.id < 3 else why

    calls = Calls(CommentPlan(POLICY, told=told))
    calls.add(*map(queued, range(1, 5)))
    calls.reasons(1, 3)
    saved = "saved since 1970-01-01 00:00:00 UTC (46 MiB in storage a)"
    found = {job: text for jobs, text in texts(calls.until(TEXT_INTERVAL)) for job in jobs}
    assert found == {"1": f"{saved}: {FULL}", "2": f"{saved}: {BEHIND}", "3": FULL, "4": BEHIND}
