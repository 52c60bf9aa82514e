"""Single steps of checkpoints, on rows and a world that a test sets: what one pass decides, when, and why."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from multiverse.core.machines.checkpoint import ask_for_checkpoint, checkpoints_of, step_state
from multiverse.core.model.job import AttemptState, Job, JobRef, JobState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import Saved, SavedState
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Row, World
from multiverse.core.transition import Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import attempt, state, vm
from tests.unit.test_saved_steps import (
    DISCARDED,
    EPOCH,
    KEEPS,
    NEXT,
    NOW,
    PENDING,
    READ,
    RUN,
    SINCE,
    TWICE,
    TWO_STORAGES,
    VM,
    WHOLE,
    WHY,
    after,
    file,
    job,
    of_next,
    restored,
    row,
    shown,
    step,
    told,
    world,
)

S, A, V, J = SavedState, AttemptState, VmState, JobState
OVER = (*DISCARDED, Why.SAVED_JOB_OVER(job="7"))
OLD = (*DISCARDED, Why.CHECKPOINT_OLD())


def checkpoint(state: SavedState, **more: object) -> Saved:
    return row(state, checkpoint=True, **more)


@pytest.mark.parametrize("shared", [False, True])
def test_one_is_begun_as_it_was_asked_for(shared: bool) -> None:
    change = ask_for_checkpoint(row(S.PREPARING), shared_files=shared)
    assert (change.event, change.reason) == (Event.CHECKPOINT_DUE, row(S.PREPARING).asked)
    assert change.row == checkpoint(S.CAPTURING, froze=True, shared_files=shared)


@pytest.mark.parametrize(
    ("seen", "vms", "change"),
    [
        (world(job(), files=[WHOLE], ended=READ), [VM], (Event.STORED, S.STORED, None)),
        (world(job(), files=[WHOLE]), [VM], (Event.STORED, S.STORED, None)),
        (world(job(), files=[WHOLE], ended=inf), [VM], None),
        (world(job(), ended=READ), [VM], None),
        (world(job(), files=[file(token="of another VM")], ended=READ), [VM], None),
        (world(None, files=[WHOLE], ended=READ), [VM], OVER),
        (world(None, began=SINCE, ended=READ), [VM], None),
        (world(None, began=SINCE, read={"7": READ}, ended=READ), [VM], OVER),
        (world(job(state=J.ENDED), files=[WHOLE], ended=READ), [VM], OVER),
        (world(PENDING, files=[WHOLE], ended=READ), [VM], OVER),
        (world(job(state=J.SUSPENDED), files=[WHOLE], ended=READ), [VM], (Event.STORED, S.STORED, None)),
        (world(job(), files=[WHOLE], ended=READ), [], (*DISCARDED, Why.SAVED_VM_LOST(vm="mvtest0-1"))),
        (world(job(), files=[WHOLE], ended=READ), [vm(V.LOST)], (*DISCARDED, Why.SAVED_VM_LOST(vm="mvtest0-1"))),
    ],
)
def test_it_is_complete_while_its_run_goes_on_or_of_no_use(seen: World, vms: list[Vm], change: object) -> None:
    here = step(checkpoint(S.CAPTURING, bytes=0, written=0.0), seen, *vms)
    assert told(here) == ([] if change is None else [change])
    if change == (Event.STORED, S.STORED, None):
        assert (after(here).bytes, after(here).written) == (5, EPOCH + NOW)


@pytest.mark.parametrize(
    ("kept", "older", "gone"),
    [
        (2, [2], []),
        (2, [2, 3], [2]),
        (2, [3, 2], [2]),
        (2, [2, 3, 4], [2, 3]),
        (1, [2], [2]),
        (5, [2, 3], []),
        (2, [], []),
    ],
)
def test_the_oldest_go_once_there_are_more_than_the_site_keeps(kept: int, older: list[int], gone: list[int]) -> None:
    standing = [checkpoint(S.COPYING if id == 3 else S.STORED, id=id) for id in older]
    others = [row(S.WRITING, id=8), checkpoint(S.UNDOING, id=9)]
    made = checkpoint(S.CAPTURING, id=10)
    seen = world(job(), files=[file("mvtest0-1-10")])
    here = step(made, seen, VM, *standing, *others, policy=replace(POLICY, save_checkpoints=kept))
    assert told(here) == [(Event.STORED, S.STORED, None), *[OLD] * len(gone)]
    assert [one.id for one in here.saved.values() if one.state is S.DISCARDING] == gone
    assert [one.id for one in checkpoints_of(here, "7")] == sorted([*older, 9, 10])


def test_once_one_is_made_its_user_reads_no_more_that_none_was() -> None:
    note = Why.NO_CHECKPOINT(WHY)
    seen = world(job(), files=[WHOLE])
    for before, left, told_so in ((note, None, True), (WHY, WHY, False), (None, None, False)):
        here = step(checkpoint(S.CAPTURING), seen, VM, attempt(A.ALLOCATED, note=before))
        assert here.attempts[1].note == left
        noted = [(Event.NOTED, A.ALLOCATED, Why.CHECKPOINT_MADE())] if told_so else []
        assert told(here) == [(Event.STORED, S.STORED, None), *noted]


# --- while it waits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [S.STORED, S.COPYING, S.THAWING])
@pytest.mark.parametrize(
    ("seen", "over"),
    [
        (world(None), True),
        (world(job(state=J.ENDED)), True),
        (world(None, began=SINCE), False),
        (world(None, began=SINCE, read={"7": READ}), True),
        (world(job(NEXT)), False),
        (world(job(NEXT, J.SUSPENDED)), False),
    ],
)
def test_it_goes_with_its_job(before: SavedState, seen: World, over: bool) -> None:
    here = step(checkpoint(before, again=NEXT), seen, restored(V.JOINED), of_next())
    assert told(here) == ([OVER] if over else [])


@pytest.mark.parametrize(
    ("before", "other", "old"),
    [
        *((S.STORED, row(state, id=2), True) for state in (S.STORED, S.COPYING, S.RESUMING, S.THAWING)),
        (S.COPYING, row(S.STORED, id=2), True),
        (S.THAWING, row(S.STORED, id=2), False),
        *((S.STORED, row(state, id=2), False) for state in (S.WRITING, S.KEEPING, S.HOLDING, S.UNDOING, S.DISCARDING)),
        (S.STORED, checkpoint(S.STORED, id=2), False),
        (S.STORED, row(S.STORED, id=2, job=JobRef("8", 500)), False),
    ],
)
def test_it_is_of_no_use_once_the_whole_job_is_saved(before: SavedState, other: Saved, old: bool) -> None:
    here = step(checkpoint(before, again=NEXT), world(job(NEXT)), other, restored(V.JOINED), of_next())
    assert told(here) == ([OLD] if old else [])


@pytest.mark.parametrize(
    ("age", "now", "old"),
    [(86401.0, PENDING, True), (86400.0, PENDING, False), (86401.0, job(NEXT), False), (86401.0, None, False)],
)
def test_it_waits_so_long_for_a_job_that_waits(age: float, now: Job | None, old: bool) -> None:
    one = checkpoint(S.STORED, written=EPOCH + NOW - age)
    seen = world(now, began=READ if now else SINCE)
    assert told(step(one, seen)) == [], "for ever, if the site does not say how long"
    assert told(step(one, seen, policy=KEEPS)) == ([(*DISCARDED, Why.SAVED_TOO_OLD(age=age))] if old else [])


@pytest.mark.parametrize(
    ("others", "change"),
    [
        ([restored(), of_next()], (Event.RUNS, S.THAWING, None)),
        ([restored(V.JOINED), of_next()], None),
        ([restored(), of_next(A.CLAIMED)], None),
        ([restored(), of_next(restarts=0)], (Event.COPY_DUE, S.COPYING, None)),
        ([restored()], (Event.COPY_DUE, S.COPYING, None)),
        ([], (Event.COPY_DUE, S.COPYING, None)),
    ],
)
def test_the_processes_may_go_on_once_a_later_run_has_begun_in_its_vm(others: list[Row], change: object) -> None:
    """While no later run goes on with it, it is copied."""
    here = step(checkpoint(S.STORED), world(job(NEXT), hosts=[TWO_STORAGES]), *others)
    assert told(here) == ([] if change is None else [change])
    assert [one.again for one in here.saved.values()] == [NEXT if change == (Event.RUNS, S.THAWING, None) else None]


def test_it_may_be_used_while_it_is_being_copied() -> None:
    seen = world(job(NEXT), hosts=[TWO_STORAGES])
    assert told(step(checkpoint(S.COPYING), seen, restored(), of_next())) == [(Event.RUNS, S.THAWING, None)]


# --- the run that goes on with it -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vms", "ended", "began", "go_on"),
    [
        ([shown()], READ - 1.0, READ, True),
        ([shown()], READ, READ, False),
        ([shown()], None, READ, False),
        ([shown()], SINCE - 1.0, SINCE, False),
        ([shown(frozen=True)], READ - 1.0, READ, False),
        ([shown(condition=VmCondition.DEAD)], READ - 1.0, READ, False),
    ],
)
def test_from_when_its_processes_go_on_it_is_of_that_run(
    vms: list[VmSeen], ended: float | None, began: float, go_on: bool
) -> None:
    one = checkpoint(S.THAWING, again=NEXT, runs=1)
    others = [checkpoint(S.STORED, id=2), checkpoint(S.CAPTURING, id=3), row(S.UNDOING, id=4)]
    mine = attempt(A.ALLOCATED, id=5, restarts=1, runs=4)
    here = step(one, world(job(NEXT), vms=vms, ended=ended, began=began), restored(), mine, *others)
    why = Why.RESTART(number=1)
    assert told(here) == ([(Event.KEPT, S.STORED, why), (Event.NOTED, S.STORED, why)] if go_on else [])
    rows = {one.id: (one.job, one.again, one.runs) for one in here.saved.values()}
    assert rows[1] == ((NEXT, None, 4) if go_on else (RUN, NEXT, 1))
    assert rows[2] == (NEXT if go_on else RUN, None, 1)
    assert rows[3] == rows[4] == (RUN, None, 1), "only what is complete is of that run"


@pytest.mark.parametrize(
    "others",
    [
        [],
        [restored()],
        [restored(), of_next(A.RECLAIMING)],
        [restored(), of_next(restarts=2)],
        [of_next()],
    ],
)
def test_a_run_that_is_lost_before_its_processes_went_on_leaves_it_as_it_was(others: list[Row]) -> None:
    seen: dict[str, Any] = {"vms": [shown()], "ended": READ - 1.0}
    here = step(checkpoint(S.THAWING, again=NEXT), world(job(NEXT), **seen), *others)
    why: Reason = Why.CHECKPOINT_UNUSED(job="7", restart=1)
    assert told(here) == [(Event.KEPT, S.STORED, why)]
    assert (after(here).job, after(here).again) == (RUN, None)


# --- which steps are its own ------------------------------------------------------------------------


@pytest.mark.parametrize("before", [S.CAPTURING, S.STORED, S.THAWING])
def test_nothing_moves_what_is_quarantined_or_while_the_scheduler_is_unknown(before: SavedState) -> None:
    one = checkpoint(before, again=NEXT)
    assert told(step(one, world(None))) == [OVER]
    assert told(step(replace(one, quarantined=WHY), world(None))) == []
    assert told(step(one, replace(world(None), scheduler=None))) == []


def test_its_end_is_that_of_any_state() -> None:
    """It never waits for another run's restart count: a job that was queued again twice goes on with it, too."""
    gone = world(job(TWICE, J.PENDING), ended=READ - 1.0)
    assert told(step(checkpoint(S.DISCARDING, reason=WHY), gone)) == [(Event.ABSENT, S.GONE, WHY)]
    assert told(step(checkpoint(S.UNDOING, reason=WHY), gone)) == [(Event.THAWED, S.GONE, WHY)]
    assert told(step(checkpoint(S.STORED), gone)) == []


def test_a_row_that_is_gone_is_not_stepped() -> None:
    here = state(now=NOW)
    step_state(here, 1, world(job()), POLICY)
    assert here.moves == []
