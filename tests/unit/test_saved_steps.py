"""Single steps of saved jobs, on rows and a world that a test sets: what one pass decides, when, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import pytest

from multiverse.core.machines.checkpoint import step_state
from multiverse.core.machines.saved import (
    MOST_COPY_TRIES,
    abandon,
    count_failed_copy,
    count_failure,
    drop_storage,
    give_up,
    hold_saved,
    is_unfit,
    limit_of_next_run,
    next_run_takes,
    note_spread,
    resume_saved,
    saved_is_settled,
    text_of_saved,
    undo_save,
    undo_unexplained,
)
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.host import Claim, Host, HostState, HypervisorView
from multiverse.core.model.job import (
    AttemptState,
    Job,
    JobRef,
    JobState,
    Node,
    NodeState,
    Request,
    SaveWish,
    SchedulerView,
)
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.saved import Saved, SavedPart, SavedSeen, SavedState, Storage
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Row, World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Change, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE, attempt, changes_of, known_host, saved, state, vm, world_of

S, A, V, J, N = SavedState, AttemptState, VmState, JobState, NodeState
SINCE, READ, NOW = 160.0, 180.0, 200.0  # a row has its state, everything was observed, a pass is planned
EPOCH = 1_700_000_000.0
RUN, NEXT = JobRef("7", 500), JobRef("7", 500, 1)  # the run that was saved, and the one that goes on
ASKED = Why.SAVE_ORDERED()
WHY = Why.SAVED_GIVEN_UP()
HOST = Host("h1", Size(4, 8192), storage=Storage("shared", "qemu"))
OTHER = SavedPart(2, "mvtest0-2", "token", "", "10.9.1.2/16", Size(1, 256), SOURCE)


def row(state: SavedState, **more: object) -> Saved:
    """A saved job of one VM, which claims that its files are in the storage of its host."""
    values: dict[str, Any] = {"since": SINCE, "asked": ASKED, "written": EPOCH, "bytes": 1 << 20}
    return saved(state, **(values | more))


def job(ref: JobRef = RUN, state: JobState = J.RUNNING, **more: Any) -> Job:
    return Job(ref, "hello", 1000, state, Request(1, Size(1, 100)), **more)


def shown(**more: Any) -> VmSeen:
    """How its host shows the VM."""
    return replace(VmSeen("mvtest0-1", "h1", VmCondition.RUNNING), **more)


def file(name: str = "mvtest0-1-1", **more: Any) -> SavedSeen:
    return replace(SavedSeen(name, "token", 5, "shared"), **more)


def world(
    job: Job | None = None,
    *,
    nodes: Mapping[str, NodeState] | None = None,
    vms: Iterable[VmSeen] = (),
    files: Iterable[SavedSeen] = (),
    began: float = READ,
    read: Mapping[str, float] | None = None,
    hosts: Iterable[Host] = (HOST,),
    ended: float | None = None,
) -> World:
    """Observations that all began at `began`; `read`: when jobs and nodes were read again; `ended`: when the effect of
    the saved job ended."""
    seen = {name: Node(name, how) for name, how in (nodes or {}).items()}
    jobs = {job.ref.job_id: job} if job is not None else {}
    scheduler = SchedulerView(jobs, seen, jobs_began=read or {}, nodes_began=read or {})
    view = HypervisorView({host.name: host for host in hosts}, {one.name: one for one in vms}, {})
    view = replace(view, saved={one.name: one for one in files})
    effects = {} if ended is None else {Key("saved", 1): ended}
    return world_of(scheduler, view, began, epoch=EPOCH, effect_ended_at=effects)


def step(one: Saved, seen: World, *others: Row, policy: Policy = POLICY, claims: Iterable[Claim] = ()) -> State:
    """One step of a saved job."""
    here = state(one, *others, now=NOW, claims=claims)
    here.free.hosts.update(seen.hosts)
    step_state(here, one.id, seen, policy)
    return here


Told = list[tuple[Event, object, Reason | None]]


def told(here: State) -> Told:
    """What the journal has of that: the events, the new states and the reasons."""
    return [(change.event, change.row.state, change.reason) for change in changes_of(here.moves)]


def after(here: State) -> Saved:
    """The row that the step left."""
    return changes_of(here.moves)[0].row  # type: ignore[return-value]


# --- changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "event", "values"),
    [
        (undo_unexplained, Event.FOUND, {"state": S.UNDOING, "froze": True, "reason": ASKED}),
        (partial(resume_saved, why=WHY, anew=False), Event.RESUMED, {"state": S.RESUMING, "ends": False}),
        (partial(resume_saved, why=WHY, anew=True), Event.RESUMED, {"state": S.RESUMING, "ends": True}),
        (partial(note_spread, seconds=0.5), Event.NOTED, {"state": S.STORED, "spread": 0.5}),
        (partial(count_failure, why=WHY), Event.NOTED, {"state": S.STORED, "tries": 1, "reason": WHY}),
        (partial(hold_saved, why=WHY), Event.HELD_BACK, {"state": S.HOLDING, "hold": True, "reason": WHY}),
        (
            partial(hold_saved, why=WHY, ends=True),
            Event.HELD_BACK,
            {"state": S.HOLDING, "hold": True, "ends": True, "reason": WHY},
        ),
    ],
)
def test_a_change_tells_the_row_and_the_journal_why(
    change: Callable[[Saved], Change], event: Event, values: dict[str, Any]
) -> None:
    made = change(row(S.STORED))
    assert made.row == replace(row(S.STORED), **values)
    assert (made.event, made.reason) == (event, {Event.FOUND: ASKED}.get(event, None if "spread" in values else WHY))


def test_what_is_counted_as_a_failure_tells_the_cause_and_how_often() -> None:
    cause = said("no room")
    assert cause is not None
    kept = count_failure(row(S.WRITING, tries=2), cause)
    why = Why.SAVE_FAILED(cause, tries=3)
    assert (kept.event, kept.reason) == (Event.UNWRITTEN, why)
    assert kept.row == row(S.KEEPING, tries=3, reason=why)
    copied = count_failed_copy(row(S.COPYING, copy_tries=4), cause)
    why = Why.COPY_FAILED(cause, tries=5)
    assert (copied.event, copied.reason) == (Event.UNCOPIED, why)
    assert copied.row == row(S.STORED, copy_tries=5, copy_reason=why)


def test_of_two_storages_the_damaged_one_is_read_no_more_and_none_is_given_up_without_another() -> None:
    cause = said("its digest is another")
    assert cause is not None
    both = row(S.STORED, copy="copies")
    for damaged, left in (("shared", "copies"), ("copies", "shared")):
        change = drop_storage(both, damaged, cause)
        why = Why.COPY_DAMAGED(cause, storage=damaged)
        assert change is not None and (change.event, change.reason) == (Event.NOTED, why)
        assert change.row == row(S.STORED, storage=left, copy_tries=MOST_COPY_TRIES, copy_reason=why)
    assert drop_storage(both, "a third one", cause) is None
    assert drop_storage(row(S.STORED), "shared", cause) is None
    assert drop_storage(row(S.STORED), "a third one", cause) is None, "its one storage was not damaged"


@pytest.mark.parametrize(
    ("one", "other", "held"),
    [
        (row(S.WRITING), None, True),
        (row(S.WRITING, may_restart=True), None, False),
        (row(S.WRITING), row(S.STORED, id=2, checkpoint=True), False),
        (row(S.WRITING), row(S.CAPTURING, id=2, checkpoint=True), True),
        (row(S.STORED, checkpoint=True), None, False),
    ],
)
def test_a_job_whose_state_is_lost_is_held_unless_it_goes_on_otherwise(
    one: Saved, other: Saved | None, held: bool
) -> None:
    change = give_up(state(one, *filter(None, [other])), one, WHY)
    assert (change.event, change.row.state) == (
        (Event.HELD_BACK, S.HOLDING) if held else (Event.ABANDONED, S.DISCARDING)
    )
    assert change.reason == WHY == change.row.reason and change.row.ends is held  # type: ignore[union-attr]


def test_what_cannot_be_restored_holds_its_job_and_is_kept_unless_it_is_a_checkpoint() -> None:
    assert is_unfit(row(S.STORED), WHY) == hold_saved(row(S.STORED), WHY)
    assert is_unfit(row(S.STORED, checkpoint=True), WHY) == abandon(row(S.STORED, checkpoint=True), WHY)


@pytest.mark.parametrize("give_up", [abandon, undo_save])
def test_what_is_given_up_moves_on_though_it_was_quarantined(give_up: Any) -> None:
    for before in (S.FREEZING, S.CAPTURING):
        assert give_up(row(before, quarantined="a fault"), WHY).row.quarantined is None


# --- which run goes on ------------------------------------------------------------------------------

LATER = JobRef("7", 530, 1)  # the scheduler forgot the run that it had queued, and did so once more


@pytest.mark.parametrize(
    ("before", "again", "job", "change", "known"),
    [
        (S.STORED, NEXT, job(LATER, J.PENDING), (Event.NOTED, S.STORED, Why.REQUEUE_FORGOTTEN()), LATER),
        (S.WRITING, NEXT, job(LATER, J.PENDING), (Event.NOTED, S.WRITING, Why.REQUEUE_FORGOTTEN()), LATER),
        (S.STORED, NEXT, job(RUN), (Event.FORGOTTEN, S.QUEUEING, Why.REQUEUE_FORGOTTEN()), None),
        (S.COPYING, NEXT, job(RUN), (Event.FORGOTTEN, S.QUEUEING, Why.REQUEUE_FORGOTTEN()), None),
        (S.RESUMING, NEXT, job(RUN), (Event.FORGOTTEN, S.QUEUEING, Why.REQUEUE_FORGOTTEN()), None),
        (S.WRITING, NEXT, job(RUN), (Event.NOTED, S.WRITING, Why.REQUEUE_FORGOTTEN()), None),
        (S.HOLDING, NEXT, job(RUN), (Event.NOTED, S.HOLDING, Why.REQUEUE_FORGOTTEN()), None),
        (S.WRITING, None, job(NEXT, J.PENDING), (Event.NOTED, S.WRITING, Why.RESTART(number=1)), NEXT),
        (S.STORED, None, job(LATER, J.PENDING), (Event.NOTED, S.STORED, Why.RESTART(number=1)), LATER),
        (S.QUEUEING, None, job(LATER, J.PENDING), (Event.QUEUED_AGAIN, S.STORED, Why.RESTART(number=1)), LATER),
        (S.CUTTING, None, job(NEXT, J.PENDING), (Event.QUEUED_AGAIN, S.WRITING, Why.RESTART(number=1)), NEXT),
    ],
)
def test_the_run_that_goes_on_is_noted_once_it_is_seen(
    before: SavedState, again: JobRef | None, job: Job, change: tuple[Event, SavedState, Reason], known: JobRef | None
) -> None:
    """A reading that began before the row had its state does not count, and nothing else moves it in that pass."""
    one, serving = row(before, again=again), vm(V.SERVING)
    everything: dict[str, Any] = {"vms": [shown()], "files": [file()], "ended": READ}
    here = step(one, world(job, **everything), serving)
    assert told(here) == [change] and after(here).again == known
    assert told(step(one, world(job, began=0.0, read={"7": READ}, vms=[shown()]), serving)) == [change]
    if before is not S.CUTTING:  # there the restart count proves it
        assert told(step(one, world(job, began=SINCE, vms=[shown()]), serving)) == []


@pytest.mark.parametrize(("ref", "state"), [(NEXT, J.PENDING), (RUN, J.PENDING), (JobRef("7", 530, 2), J.PENDING)])
def test_a_run_that_is_known_or_another_ones_is_not_noted(ref: JobRef, state: JobState) -> None:
    here = step(row(S.HOLDING, again=NEXT), world(job(ref, state)))
    assert not [event for event, _, _ in told(here) if event is Event.NOTED]


# --- from the request until the state is complete ---------------------------------------------------

VM, LOST = vm(V.SERVING), Why.SAVED_VM_LOST(vm="mvtest0-1")
SECOND = vm(V.SERVING, id=2)
TWICE, GANG = JobRef("7", 500, 2), {"others": (OTHER,)}
UNDONE, DISCARDED, HELD = (Event.ABANDONED, S.UNDOING), (Event.ABANDONED, S.DISCARDING), (Event.HELD_BACK, S.HOLDING)


@pytest.mark.parametrize(
    ("before", "more", "job", "vms", "change"),
    [
        (S.PREPARING, {}, None, [VM], (*UNDONE, Why.SAVED_JOB_OVER(job="7"))),
        (S.FREEZING, {}, job(state=J.ENDED), [VM], (*UNDONE, Why.SAVED_JOB_OVER(job="7"))),
        (S.CUTTING, {}, job(NEXT, J.ENDED), [VM], (*DISCARDED, Why.SAVED_JOB_OVER(job="7"))),
        (S.PREPARING, {}, job(NEXT, J.PENDING), [VM], (*UNDONE, Why.SAVED_RUN_OVER(job="7", restart=1))),
        (S.FREEZING, {}, job(NEXT, J.PENDING), [VM], (*UNDONE, Why.SAVED_RUN_OVER(job="7", restart=1))),
        (S.PREPARING, {}, job(TWICE, J.PENDING), [VM], (*UNDONE, Why.SAVED_RUN_OVER(job="7", restart=2))),
        (S.CUTTING, {}, job(TWICE, J.PENDING), [VM], (*DISCARDED, Why.SAVED_RUN_OVER(job="7", restart=2))),
        (S.WRITING, {"again": NEXT}, job(RUN, J.PENDING), [VM], (*DISCARDED, Why.SAVED_RUN_OVER(job="7", restart=0))),
        (S.WRITING, {}, job(NEXT, J.RUNNING), [VM], (Event.NOTED, S.WRITING, Why.RESTART(number=1))),
        (S.WRITING, {"again": NEXT}, job(NEXT), [VM], (*DISCARDED, Why.SAVED_RUN_OVER(job="7", restart=1))),
        (S.PREPARING, {}, job(), [vm(V.LOST)], (*UNDONE, LOST)),
        (S.FREEZING, {}, job(), [], (*UNDONE, LOST)),
        (S.CUTTING, {}, job(), [vm(V.LOST)], None),
        (S.CUTTING, {}, job(), [vm(V.ENDING)], (*DISCARDED, LOST)),
        (S.CUTTING, {}, job(), [], (*DISCARDED, LOST)),
        (S.WRITING, {"again": NEXT}, job(NEXT, J.PENDING), [vm(V.LOST)], (*HELD, LOST)),
        (S.KEEPING, {"again": NEXT}, job(NEXT, J.PENDING), [], (*HELD, LOST)),
        (S.PREPARING, GANG, job(), [VM, vm(V.LOST, id=2)], (*UNDONE, Why.SAVED_VM_LOST(vm="mvtest0-2"))),
        (S.CUTTING, GANG, job(), [VM, vm(V.LOST, id=2)], None),
        (S.CUTTING, GANG, job(), [vm(V.LOST)], (*DISCARDED, LOST)),
        (S.CUTTING, GANG, job(), [VM], (*DISCARDED, Why.SAVED_VM_LOST(vm="mvtest0-2"))),
        (S.CUTTING, GANG, job(), [VM, vm(V.ENDING, id=2)], (*DISCARDED, Why.SAVED_VM_LOST(vm="mvtest0-2"))),
    ],
)
def test_what_ends_a_save_before_its_state_is_complete(
    before: SavedState, more: dict[str, Any], job: Job | None, vms: list[Vm], change: object
) -> None:
    here = step(row(before, **more), world(job, vms=[shown()]), *vms)
    assert told(here) == ([] if change is None else [change])
    if (event := told(here)[0][0] if change else None) is Event.HELD_BACK:
        assert after(here).ends, f"{event}: nothing is left to go on with"


@pytest.mark.parametrize("before", [S.PREPARING, S.CUTTING, S.WRITING])
def test_a_reading_from_before_a_step_ends_no_save(before: SavedState) -> None:
    one = row(before, again=NEXT)
    assert told(step(one, world(None, began=SINCE, vms=[shown()]), VM)) == []
    ((_, _, why),) = told(step(one, world(None, began=SINCE, read={"7": READ}, vms=[shown()]), VM))
    assert why == Why.SAVED_JOB_OVER(job="7"), "it was looked for since then"


@pytest.mark.parametrize(
    ("before", "seconds", "limited"),
    [(S.PREPARING, 60.0, False), (S.PREPARING, 60.5, True), (S.FREEZING, 60.5, True), (S.CUTTING, 900.0, False)],
)
def test_a_step_that_can_be_undone_has_its_time(before: SavedState, seconds: float, limited: bool) -> None:
    here = step(row(before, since=NOW - seconds), world(job(), began=NOW, vms=[shown()]), VM)
    assert told(here) == ([(*UNDONE, Why.SAVE_LATE(step=before, limit=60.0))] if limited else [])


@pytest.mark.parametrize(("before", "told_nothing"), [(S.PREPARING, True), (S.FREEZING, False)])
def test_a_guest_that_can_be_told_nothing_is_left_alone_before_it_is_to_stop(
    before: SavedState, told_nothing: bool
) -> None:
    here = step(row(before, **GANG), world(job(), vms=[shown(), shown(name="mvtest0-2", mute=True)]), VM, SECOND)
    assert told(here) == ([(*UNDONE, Why.SAVE_MUTE(vm="mvtest0-2"))] if told_nothing else [])


DRAINED = {"mvtest0-1": N.DRAINED}


@pytest.mark.parametrize(
    ("seen", "ready"),
    [
        (world(job(), nodes=DRAINED), True),
        (world(job(), nodes={"mvtest0-1": N.BUSY}), False),
        (world(job()), False),
        (world(job(), nodes=DRAINED, began=SINCE), False),
        (world(job(), nodes=DRAINED, began=SINCE, read={"mvtest0-1": READ}), True),
        (world(job(state=J.SUSPENDED), nodes=DRAINED), False),
        (world(job(requeues=False), nodes=DRAINED), False),
        (world(None, nodes=DRAINED, began=SINCE, read={"mvtest0-1": READ}), False),
    ],
)
def test_a_job_is_stopped_once_its_node_takes_no_other_and_it_can_be_queued_again(seen: World, ready: bool) -> None:
    here = step(row(S.PREPARING), seen, VM)
    assert told(here) == ([(Event.READY, S.FREEZING, None)] if ready else [])
    if ready:
        assert after(here).froze
        both = [VM, SECOND]
        assert told(step(row(S.PREPARING, **GANG), seen, *both)) == [], "the node of the other VM takes others"


@pytest.mark.parametrize(
    ("vms", "began", "cut"),
    [
        ([shown(frozen=True)], READ, True),
        ([shown(frozen=True)], SINCE, False),
        ([shown(frozen=False)], READ, False),
        ([], READ, False),
    ],
)
def test_a_job_is_cut_off_once_its_processes_are_seen_stopped(vms: list[VmSeen], began: float, cut: bool) -> None:
    here = step(row(S.FREEZING), world(job(), vms=vms, began=began), VM)
    assert told(here) == ([(Event.FROZEN, S.CUTTING, None)] if cut else [])


@pytest.mark.parametrize(
    ("times", "wish", "expected"),
    [
        ({"limit": 660.0, "deadline": 600.0, "ends": 660.0}, None, (660.0, 400.0, 60.0)),
        ({"limit": 660.0, "deadline": 600.0, "ends": 660.0}, SaveWish(), (660.0, None, 60.0)),
        ({"limit": 660.0, "deadline": 600.0, "ends": None}, None, (660.0, 400.0, 0.0)),
        ({"limit": 660.0, "deadline": NOW - 5.0, "ends": NOW}, None, (660.0, 0.0, 5.0)),
        ({"limit": None, "deadline": None, "ends": 700.0}, None, (None, None, 0.0)),
        (None, None, (None, None, 0.0)),
    ],
)
def test_the_next_run_gets_what_is_left_of_the_time_limit(
    times: dict[str, float | None] | None, wish: SaveWish | None, expected: tuple[float | None, ...]
) -> None:
    """Of a job that asks to be saved at its limit, as much as this one. `None`: the scheduler did not show the job as
    it was read last, before its processes stopped."""
    unix = {
        name: None if at is None else at + (EPOCH if name != "limit" else 0.0) for name, at in (times or {}).items()
    }
    seen = world(job(**unix) if times is not None else None, vms=[shown(frozen=True)])
    if times is None:
        assert seen.scheduler is not None
        seen = replace(seen, scheduler=replace(seen.scheduler, began=SINCE))
    mine = attempt(A.ALLOCATED, request=Request(1, Size(1, 100), save=wish))
    cut = after(step(row(S.FREEZING), seen, VM, mine))
    assert (cut.limit, cut.remaining, cut.beyond) == expected


@pytest.mark.parametrize(
    ("limit", "remaining", "now", "left", "takes"),
    [
        (600.0, 400.0, 600.0, 400.0, 430.0),
        (600.0, 400.0, 700.0, 500.0, 530.0),
        (600.0, 400.0, 100.0, 0.0, 30.0),
        (600.0, 400.0, 401.0, 201.0, 231.0),
        (None, 400.0, 600.0, 400.0, 430.0),
        (600.0, 400.0, None, 400.0, 430.0),
        (600.0, None, 600.0, None, 600.0),
        (None, None, None, None, inf),
        (600.0, 590.0, 600.0, 590.0, 600.0),
    ],
)
def test_how_long_the_next_run_may_take(
    limit: float | None, remaining: float | None, now: float | None, left: float | None, takes: float
) -> None:
    one = row(S.STORED, limit=limit, remaining=remaining, beyond=30.0)
    assert (limit_of_next_run(one, job(limit=now)), next_run_takes(one, job(limit=now))) == (left, takes)


PENDING = job(NEXT, J.PENDING)
WHOLE = file()


@pytest.mark.parametrize(
    ("before", "files", "vms", "ended", "written"),
    [
        (S.WRITING, [WHOLE], [VM], READ, True),
        (S.WRITING, [WHOLE], [VM], None, True),
        (S.WRITING, [WHOLE], [VM], inf, False),
        (S.WRITING, [WHOLE], [vm(V.LOST)], inf, True),
        (S.WRITING, [], [VM], READ, False),
        (S.WRITING, [file(token="of another VM")], [VM], READ, False),
        (S.WRITING, [file(storage="another")], [VM], READ, False),
        (S.WRITING, [file(complete=False)], [VM], READ, False),
        (S.WRITING, [file(kept=True)], [VM], READ, False),
        (S.KEEPING, [WHOLE], [VM], READ, False),
        (S.KEEPING, [WHOLE], [], READ, True),
    ],
)
def test_a_state_is_complete_once_its_files_are_and_nobody_writes_them(
    before: SavedState, files: list[SavedSeen], vms: list[Vm], ended: float | None, written: bool
) -> None:
    one = row(before, again=NEXT, written=0.0, bytes=0, reason="no room")
    here = step(one, world(PENDING, files=files, vms=[shown()], ended=ended), *vms)
    assert told(here) == ([(Event.STORED, S.STORED, None)] if written else [])
    if written:
        assert (after(here).bytes, after(here).written, after(here).reason) == (5, EPOCH + NOW, None)


def test_the_state_of_a_job_of_two_vms_is_complete_with_the_files_of_both() -> None:
    one, second = row(S.WRITING, again=NEXT, **GANG), file("mvtest0-2-1", size=0)
    for files, size in (([WHOLE], None), ([second], None), ([WHOLE, second], 5), ([WHOLE, replace(second, size=3)], 8)):
        here = step(one, world(PENDING, files=files, vms=[shown()], ended=READ), VM, SECOND)
        assert (after(here).bytes if told(here) else None) == size
    lost = step(one, world(PENDING, files=[WHOLE, second], ended=inf), VM)
    assert told(lost) == [(Event.STORED, S.STORED, None)], "written, and one VM is there no more"


KEPT = file(size=0, storage="", kept=True)
CLAIMS = [Claim(VM.key, "h1", Size(1, 256, 10)), Claim(Key("vm", 9), "h1", Size(1, 1, 1))]


@pytest.mark.parametrize(
    ("seen", "taken"),
    [
        (world(PENDING, files=[KEPT]), True),
        (world(PENDING, files=[]), False),
        (world(PENDING, files=[replace(KEPT, kept=False)]), False),
        (world(PENDING, files=[replace(KEPT, token="another")]), False),
        (world(PENDING, files=[KEPT], hosts=[replace(HOST, name="h2")]), False),
    ],
)
def test_what_its_host_keeps_has_the_room_of_its_vm(seen: World, taken: bool) -> None:
    cause = said("no room in the storage")
    here = step(row(S.KEEPING, again=NEXT, reason=cause, written=0.0), seen, VM, claims=CLAIMS)
    assert told(here) == ([(Event.STORED, S.STORED, Why.SAVED_KEPT(cause, host="h1"))] if taken else [])
    owners = {claim.owner: claim.size for claim in here.claims.values()}
    assert owners == {Key("saved", 1) if taken else VM.key: Size(1, 256, 10), Key("vm", 9): Size(1, 1, 1)}
    if taken:
        assert (after(here).kept, after(here).written, after(here).reason) == ("h1", EPOCH + NOW, None)


# --- while it waits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "seen", "change"),
    [
        (False, world(job(NEXT, J.PENDING, held=True)), (Event.HELD, S.STORED, ASKED)),
        (True, world(job(NEXT, J.PENDING, held=True)), (*DISCARDED, ASKED)),
        (True, world(PENDING), None),
        (True, world(job(NEXT, J.PENDING, held=True), began=SINCE), None),
        (True, world(job(NEXT, J.PENDING, held=True), began=SINCE, read={"7": READ}), (*DISCARDED, ASKED)),
        (False, world(None), (*DISCARDED, Why.SAVED_JOB_OVER(job="7"))),
        (False, world(None, began=SINCE), None),
        (False, world(job(TWICE, J.PENDING)), (*DISCARDED, Why.SAVED_RUN_OVER(job="7", restart=2))),
        (False, world(job(NEXT)), (*DISCARDED, Why.SAVED_RUN_OVER(job="7", restart=1))),
    ],
)
def test_a_job_that_cannot_go_on_is_held_and_told_why(ends: bool, seen: World, change: object) -> None:
    one = row(S.HOLDING, again=NEXT, hold=True, ends=ends, reason=ASKED)
    waiting, started = attempt(A.QUEUED, id=1, restarts=1), attempt(A.ALLOCATED, id=2)
    here = step(one, seen, waiting, started)
    note = ASKED if ends and change else None
    assert told(here) == [*filter(None, [change]), *([(Event.NOTED, A.QUEUED, ASKED)] if note else [])]
    assert (here.attempts[1].note, here.attempts[2].note) == (note, None), "it reads that after the state is gone, too"


@pytest.mark.parametrize(
    ("ends", "seen", "change"),
    [
        (False, world(PENDING), (Event.RESUMED, S.STORED, None)),
        (True, world(PENDING), (*DISCARDED, Why.SAVED_GIVEN_UP())),
        (False, world(job(NEXT, J.PENDING, held=True)), None),
        (False, world(PENDING, began=SINCE), None),
        (False, world(PENDING, began=SINCE, read={"7": READ}), (Event.RESUMED, S.STORED, None)),
        (False, world(None, began=SINCE), None),
        (False, world(job(TWICE, J.PENDING)), (*DISCARDED, Why.SAVED_RUN_OVER(job="7", restart=2))),
        (False, world(job(NEXT)), (*DISCARDED, Why.SAVED_RUN_OVER(job="7", restart=1))),
    ],
)
def test_a_job_that_is_released_goes_on_or_begins_anew(ends: bool, seen: World, change: object) -> None:
    here = step(row(S.RESUMING, again=NEXT, hold=True, ends=ends, reason=ASKED), seen)
    assert told(here) == ([] if change is None else [change])
    if change == (Event.RESUMED, S.STORED, None):
        assert (after(here).hold, after(here).reason) == (False, None)


DAY = 86400.0
KEEPS = replace(POLICY, save_keep=DAY)
IN_MEMORY: dict[str, Any] = {"again": NEXT, "kept": "h1", "bound": 7 << 20}
MINE = Claim(Key("saved", 1), "h1", Size(1, 256, 7))
MEMORY_LOST = (*HELD, Why.SAVED_KEPT_LOST(host="h1"))


@pytest.mark.parametrize(("age", "kept"), [(DAY, True), (DAY + 1.0, False)])
def test_a_state_waits_for_so_long(age: float, kept: bool) -> None:
    one = row(S.STORED, again=NEXT, written=EPOCH + NOW - age)
    assert told(step(one, world(PENDING))) == [], "for ever, if the site does not say how long"
    here = step(one, world(PENDING), policy=KEEPS)
    assert told(here) == ([] if kept else [(*HELD, Why.SAVED_TOO_OLD(age=age))])


@pytest.mark.parametrize(
    ("seen", "change"),
    [
        (world(PENDING, files=[KEPT]), None),
        (world(PENDING), MEMORY_LOST),
        (world(PENDING, began=SINCE), None),
        (world(PENDING, files=[replace(KEPT, token="another")]), MEMORY_LOST),
        (world(PENDING, hosts=[replace(HOST, name="h2")]), None),
        (world_of(SchedulerView({"7": PENDING}), None, READ), None),
    ],
)
def test_what_is_in_the_memory_of_a_host_is_lost_once_that_does_not_show_it(seen: World, change: object) -> None:
    here = step(row(S.STORED, **IN_MEMORY), seen, claims=[MINE])
    assert told(here) == ([] if change is None else [change])
    assert here.claims[MINE.key] == MINE


def test_what_is_in_the_memory_of_a_host_is_lost_with_that() -> None:
    for seen in (world(PENDING, files=[KEPT]), world_of(SchedulerView({"7": PENDING}), None, READ)):
        here = step(row(S.STORED, **IN_MEMORY), seen, known_host(HostState.FENCED))
        assert told(here) == [MEMORY_LOST]


def test_what_is_in_the_memory_of_a_host_claims_its_room_if_no_vm_does() -> None:
    here = step(row(S.STORED, **IN_MEMORY), world(PENDING, files=[KEPT]))
    assert told(here) == [(Event.NOTED, S.STORED, None)] and list(here.claims.values()) == [MINE]


# --- copies -----------------------------------------------------------------------------------------

TWO_STORAGES = replace(HOST, copies=Storage("copies", "qemu"))


@pytest.mark.parametrize(
    ("tries", "pause"),
    [(0, 0.0), (1, 60.0), (2, 120.0), (3, 240.0), (6, 1920.0), (7, 3600.0), (11, 3600.0), (MOST_COPY_TRIES, inf)],
)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_copy_is_tried_again_after_a_pause_and_not_for_ever(tries: int, pause: float, checkpoint: bool) -> None:
    waited = min(pause, 1e6)
    early = row(S.STORED, again=NEXT, copy_tries=tries, since=NOW - waited + 0.5, checkpoint=checkpoint)
    due = replace(early, since=NOW - waited)
    seen = world(PENDING, began=NOW, hosts=[TWO_STORAGES])
    assert told(step(early, seen)) == []
    assert told(step(due, seen)) == ([(Event.COPY_DUE, S.COPYING, None)] if pause < inf else [])
    assert saved_is_settled(step(due, seen), due, seen) is (pause == inf)


@pytest.mark.parametrize(
    ("more", "host"), [({"copy": "copies"}, TWO_STORAGES), ({}, HOST), ({}, replace(HOST, copies=HOST.storage))]
)
def test_what_is_copied_or_reaches_no_other_storage_is_not_copied(more: dict[str, Any], host: Host) -> None:
    assert told(step(row(S.STORED, again=NEXT, **more), world(PENDING, hosts=[host]))) == []


@pytest.mark.parametrize(
    ("more", "files", "copy"),
    [
        ({}, [file(copy="copies")], "copies"),
        ({}, [file(storage="copies")], "copies"),
        ({}, [file(storage="b", copy="a")], "a"),
        ({}, [WHOLE], ""),
        ({}, [], ""),
        ({}, [file(copy="copies", token="of another VM")], ""),
        (GANG, [file(copy="copies"), file("mvtest0-2-1", copy="copies")], "copies"),
        (GANG, [file(copy="copies"), file("mvtest0-2-1", copy="another")], ""),
        (GANG, [file(copy="copies")], ""),
    ],
)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_copy_is_complete_once_one_storage_has_all_files(
    more: dict[str, Any], files: list[SavedSeen], copy: str, checkpoint: bool
) -> None:
    one = row(S.COPYING, again=NEXT, copy_reason=WHY, checkpoint=checkpoint, **more)
    here = step(one, world(PENDING, files=files, hosts=[TWO_STORAGES]))
    assert told(here) == ([(Event.COPIED, S.STORED, None)] if copy else [])
    if copy:
        begun = step(one, world(job(NEXT), files=files), *BOTH, of_next())
        assert told(begun) == told(here), "what else is due waits for the next pass"
        assert (after(here).copy, after(here).copy_reason) == (copy, None)
    assert told(step(replace(one, state=S.STORED), world(PENDING, files=files))) == [], "none is being made"


# --- the next run -----------------------------------------------------------------------------------


def restored(state: VmState = V.SERVING, *, id: int = 3, name: str = "mvtest0-1") -> Vm:
    """A VM of attempt 5 that goes on with the state."""
    return replace(vm(state, id=id, attempt=5, saved=f"{name}-1"), name=name)


def of_next(state: AttemptState = A.ALLOCATED, restarts: int = 1) -> Row:
    return attempt(state, id=5, restarts=restarts)


BOTH = [restored(), restored(id=4, name="mvtest0-2")]


@pytest.mark.parametrize("before", [S.STORED, S.COPYING, S.RESUMING])
@pytest.mark.parametrize(
    ("more", "others", "runs"),
    [
        ({}, [restored(), of_next()], True),
        ({}, [restored(), of_next(A.CLAIMED)], False),
        ({}, [restored(V.JOINED), of_next()], False),
        ({}, [restored(), of_next(restarts=2)], False),
        ({}, [restored()], False),
        (GANG, [*BOTH, of_next()], True),
        (GANG, [restored(), of_next()], False),
        (GANG, [restored(), restored(V.JOINED, id=4, name="mvtest0-2"), of_next()], False),
    ],
)
def test_the_processes_may_go_on_once_the_next_run_has_begun_in_all_its_vms(
    before: SavedState, more: dict[str, Any], others: list[Row], runs: bool
) -> None:
    here = step(row(before, again=NEXT, **more), world(job(NEXT, held=before is S.RESUMING)), *others)
    assert told(here) == ([(Event.RUNS, S.THAWING, None)] if runs else [])


@pytest.mark.parametrize(
    ("more", "vms", "ended", "began", "go_on"),
    [
        ({}, [shown()], READ - 1.0, READ, True),
        ({}, [shown(condition=VmCondition.PAUSED)], READ - 1.0, READ, True),
        ({}, [shown()], READ, READ, False),
        ({}, [shown()], SINCE - 1.0, SINCE, False),
        ({}, [shown()], None, READ, False),
        ({}, [shown(frozen=True)], READ - 1.0, READ, False),
        ({}, [shown(condition=VmCondition.DEAD)], READ - 1.0, READ, False),
        ({}, [], READ - 1.0, READ, False),
        (GANG, [shown(), shown(name="mvtest0-2")], READ - 1.0, READ, True),
        (GANG, [shown(), shown(name="mvtest0-2", frozen=True)], READ - 1.0, READ, False),
    ],
)
def test_a_state_is_used_up_once_its_processes_are_seen_to_go_on_after_they_were_told_to(
    more: dict[str, Any], vms: list[VmSeen], ended: float | None, began: float, go_on: bool
) -> None:
    seen = world(job(NEXT), vms=vms, ended=ended, began=began)
    here = step(row(S.THAWING, **more), seen, *BOTH[: 2 if more else 1], of_next())
    assert told(here) == ([(Event.THAWED, S.DISCARDING, None)] if go_on else [])


@pytest.mark.parametrize(
    ("more", "others", "lost"),
    [({}, [of_next()], "mvtest0-1"), (GANG, [restored(), of_next()], "mvtest0-2"), ({}, [restored()], "mvtest0-1")],
)
def test_a_state_whose_processes_may_have_gone_on_is_of_no_use_once_a_vm_is_lost(
    more: dict[str, Any], others: list[Row], lost: str
) -> None:
    here = step(row(S.THAWING, **more), world(job(NEXT)), *others)
    assert told(here) == [(*DISCARDED, Why.SAVED_VM_LOST(vm=lost))]


# --- undone, and discarded --------------------------------------------------------------------------

BUSY = {"mvtest0-1": N.BUSY}


@pytest.mark.parametrize(
    ("more", "seen", "vms", "gone"),
    [
        ({}, world(job(), nodes=BUSY, vms=[shown()], ended=READ - 1.0), [VM], True),
        ({}, world(job(), nodes=DRAINED, vms=[shown()], ended=READ - 1.0), [VM], False),
        ({"checkpoint": True}, world(job(), nodes=DRAINED, vms=[shown()], ended=READ - 1.0), [VM], True),
        ({}, world(job(), vms=[shown()], ended=READ - 1.0), [VM], True),
        ({}, world(job(), nodes=BUSY, vms=[shown(frozen=True)], ended=READ - 1.0), [VM], False),
        ({}, world(job(), nodes=BUSY, vms=[], ended=READ - 1.0), [VM], False),
        ({}, world(job(), nodes=BUSY, vms=[shown()], ended=READ), [VM], False),
        ({}, world(job(), nodes=BUSY, vms=[shown()]), [VM], False),
        ({}, world(job(), nodes=BUSY, vms=[shown()], ended=0.0, began=SINCE), [VM], False),
        ({}, world(job(NEXT), nodes=BUSY, vms=[shown(frozen=True)]), [VM], True),
        ({}, world(None, nodes=BUSY, vms=[shown(frozen=True)]), [VM], True),
        ({}, world(job(), nodes=BUSY, vms=[shown(frozen=True)]), [], True),
        ({}, world(job(), nodes=BUSY, vms=[shown(frozen=True)]), [vm(V.ENDING)], True),
        (GANG, world(job(), nodes=BUSY, vms=[shown()], ended=READ - 1.0), [VM, SECOND], False),
        (GANG, world(job(), nodes=BUSY, vms=[shown()], ended=READ - 1.0), [VM, vm(V.ENDING, id=2)], True),
    ],
)
def test_a_save_is_undone_once_all_its_vms_serve_as_before(
    more: dict[str, Any], seen: World, vms: list[Vm], gone: bool
) -> None:
    here = step(row(S.UNDOING, reason=WHY, **more), seen, *vms)
    assert told(here) == ([(Event.THAWED, S.GONE, WHY)] if gone else [])


@pytest.mark.parametrize(("host", "node", "gone"), [(1.0, 1.0, True), (0.0, 1.0, False), (1.0, 0.0, False)])
def test_both_its_host_and_its_node_are_read_after_its_processes_were_told_to_go_on(
    host: float, node: float, gone: bool
) -> None:
    seen = world(job(), nodes=BUSY, vms=[shown()], ended=READ, began=READ + host)
    assert seen.scheduler is not None
    scheduler = replace(seen.scheduler.value, nodes_began={"mvtest0-1": READ + node})
    here = step(row(S.UNDOING), replace(seen, scheduler=replace(seen.scheduler, value=scheduler, began=SINCE)), VM)
    assert bool(told(here)) is gone


NOT_SAVED = Why.NOT_SAVED(Why.HOST_DRAINED(host="h1"))


@pytest.mark.parametrize(
    ("more", "state", "note", "kept"),
    [
        ({}, A.ALLOCATED, None, Why.SAVE_UNDONE(WHY)),
        ({}, A.ALLOCATED, WHY, Why.SAVE_UNDONE(WHY)),
        ({}, A.ALLOCATED, NOT_SAVED, NOT_SAVED),
        ({}, A.RECLAIMING, None, None),
        ({"checkpoint": True}, A.ALLOCATED, None, None),
        ({"asked": Why.FOUND_FROZEN()}, A.ALLOCATED, None, None),
    ],
)
def test_the_user_of_a_job_that_goes_on_reads_why_it_was_not_saved(
    more: dict[str, Any], state: AttemptState, note: Reason | None, kept: Reason | None
) -> None:
    seen = world(job(), nodes=BUSY, vms=[shown()], ended=READ - 1.0)
    here = step(row(S.UNDOING, reason=WHY, **more), seen, VM, attempt(state, note=note))
    assert here.attempts[1].note == kept
    changed = [(Event.NOTED, state, kept)] if kept != note else []
    assert told(here) == [(Event.THAWED, S.GONE, WHY), *changed]


ELSEWHERE = replace(HOST, storage=Storage("another", "qemu"))
COPIES = replace(HOST, storage=Storage("another", "qemu"), copies=Storage("copies", "qemu"))


@pytest.mark.parametrize(
    ("more", "seen", "others", "gone"),
    [
        ({}, world(ended=READ - 1.0), [], True),
        ({}, world(ended=READ), [], False),
        ({}, world(), [], False),
        ({}, world(ended=0.0, began=SINCE), [], False),
        ({}, world(ended=READ - 1.0, files=[WHOLE]), [], False),
        ({}, world(ended=READ - 1.0, files=[file("mvtest0-2-1")]), [], True),
        (GANG, world(ended=READ - 1.0, files=[file("mvtest0-2-1")]), [], False),
        ({}, world(ended=READ - 1.0), [VM], False),
        ({"checkpoint": True}, world(ended=READ - 1.0), [VM], True),
        ({"kept": "h1"}, world(ended=READ - 1.0), [VM], True),
        ({}, world(ended=READ - 1.0, hosts=[ELSEWHERE]), [], False),
        ({"copy": "copies"}, world(ended=READ - 1.0, hosts=[COPIES]), [], True),
        ({"kept": "h1"}, world(ended=READ - 1.0, hosts=[ELSEWHERE]), [], True),
        ({"kept": "h1"}, world(ended=READ - 1.0, hosts=[replace(HOST, name="h2")]), [], False),
        ({"kept": "h1"}, world(ended=READ - 1.0, files=[KEPT]), [known_host(HostState.FENCED)], True),
        ({}, world(ended=READ - 1.0, files=[WHOLE]), [known_host(HostState.FENCED)], False),
    ],
)
def test_a_state_is_gone_once_nobody_who_could_shows_it_after_its_removal(
    more: dict[str, Any], seen: World, others: list[Row], gone: bool
) -> None:
    other = replace(MINE, owner=Key("saved", 2))
    here = step(row(S.DISCARDING, reason=WHY, **more), seen, *others, claims=[MINE, other] if "kept" in more else [])
    assert told(here) == ([(Event.ABSENT, S.GONE, WHY)] if gone else [])
    claims = ([other] if gone else [MINE, other]) if "kept" in more else []
    assert list(here.claims.values()) == claims


# --- what is read of a row --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "hold", "why"),
    [
        (S.HOLDING, True, WHY),
        (S.CUTTING, False, Why.SAVED_SINCE(ASKED, at=EPOCH)),
        (S.QUEUEING, False, Why.SAVED_SINCE(ASKED, at=EPOCH)),
        (S.CUTTING, True, Why.SAVED_HELD(at=EPOCH, id="7")),
        (S.WRITING, True, None),
    ],
)
def test_what_its_user_is_told_as_it_is_queued_again_or_held(
    before: SavedState, hold: bool, why: Reason | None
) -> None:
    assert text_of_saved(row(before, hold=hold, reason=WHY, begun=EPOCH)) == ("" if why is None else str(why))


@pytest.mark.parametrize(
    ("one", "seen", "settled"),
    [
        (row(S.STORED), world(PENDING), True),
        (row(S.STORED), world(PENDING, began=SINCE), False),
        (row(S.STORED), world(PENDING, began=SINCE, read={"7": READ}), True),
        (row(S.HOLDING), world(PENDING), False),
        (row(S.HOLDING, quarantined="a fault"), world(PENDING), True),
    ],
)
def test_a_state_that_nothing_but_its_job_moves_is_not_looked_at(one: Saved, seen: World, settled: bool) -> None:
    assert saved_is_settled(state(one), one, seen) is settled


@pytest.mark.parametrize(
    "before", [S.PREPARING, S.FREEZING, S.CUTTING, S.WRITING, S.STORED, S.HOLDING, S.RESUMING, S.UNDOING, S.DISCARDING]
)
def test_nothing_moves_what_is_quarantined_or_while_the_scheduler_is_unknown(before: SavedState) -> None:
    everything = world(None, nodes=DRAINED, vms=[shown(frozen=True)], ended=READ - 1.0)
    assert told(step(row(before), everything)), "otherwise something does"
    assert told(step(row(before, quarantined="a fault"), everything)) == []
    assert told(step(row(before), replace(everything, scheduler=None))) == []
