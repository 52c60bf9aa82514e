"""Single steps of attempts: from which moment an observation counts, which limits end what, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from multiverse.core.machines.attempt import JobStatus, begin_grace, effect_text, job_status, preempt_job, step_attempt
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    Eviction,
    Job,
    JobRef,
    JobState,
    Node,
    NodeReservation,
    NodeState,
    Request,
    SchedulerView,
)
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Row, Seen, World
from multiverse.core.state import State
from multiverse.core.transition import Change, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE, attempt, changes_of, state, vm

A, J, V = AttemptState, JobState, VmState
NOW, SINCE = 1000.0, 900.0
NAME = "mvtest0-1"


def one(in_state: AttemptState, **more: Any) -> Attempt:
    return attempt(in_state, **{"since": SINCE, **more})


def job(of: Attempt, in_state: JobState = J.PENDING, *, pinned: bool = False, **more: Any) -> Job:
    tag = of.feature if pinned else None
    made = Job(of.job, of.job_name, of.uid, in_state, of.request, gated=not pinned, pinned=tag)
    return made._replace(**more)


def runs(of: Attempt, *nodes: str, **more: Any) -> Job:
    return job(of, J.RUNNING, pinned=True, nodes=nodes or (NAME,), **more)


class Step:
    """One step of an attempt whose job is shown so, observed at `began`."""

    def __init__(
        self,
        row: Attempt,
        shown: Job | None,
        *others: Row,
        began: float = NOW,
        ended: float | None = None,
        nodes: Mapping[str, NodeState] | None = None,
        vms: Mapping[str, VmCondition] | None = None,
        reservations: tuple[NodeReservation, ...] = (),
    ) -> None:
        self.state: State = state(row, *others, now=NOW)
        view = SchedulerView(
            {shown.ref.job_id: shown} if shown else {},
            {name: Node(name, one) for name, one in (nodes or {}).items()},
            reservations=reservations,
        )
        seen = {name: VmSeen(name, "h1", how) for name, how in (vms or {}).items()}
        hypervisor = HypervisorView({"h1": Host("h1", Size(8, 8192, 65536))}, seen)
        ends = {} if ended is None else {Key("attempt", 1): ended}
        sources = {SOURCE: Observation(Seen(hypervisor, NOW), 0.0)}
        step_attempt(self.state, 1, World(Seen(view, began), sources, effect_ended_at=ends), POLICY)

    @property
    def changes(self) -> list[Change]:
        return changes_of(self.state.moves)

    @property
    def what(self) -> tuple[Event, AttemptState, object] | None:
        """Event, new state and kind of reason of the first change of the attempt."""
        for change in self.changes:
            if isinstance(change.row, Attempt):
                return change.event, change.row.state, change.reason.kind if change.reason else None
        return None

    @property
    def row(self) -> Attempt:
        return next(change.row for change in self.changes if isinstance(change.row, Attempt))


def serving(in_state: VmState = V.SERVING, **more: Any) -> Vm:
    return vm(in_state, **{"attempt": 1, "since": SINCE, **more})


# --- what is shown of a job ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, JobStatus.PENDING),
        ({"state": J.SUSPENDED}, JobStatus.RUNNING),
        ({"ref": JobRef("7", 500, 1)}, JobStatus.RESTARTED),
        ({"ref": JobRef("7", 501, 1)}, JobStatus.RESTARTED),  # a requeued job has a new submit time
        ({"ref": JobRef("7", 499, 1)}, JobStatus.UNSEEN),  # an earlier job of that id
        ({"ref": JobRef("7", 501, 0)}, JobStatus.UNSEEN),  # another job
        ({"at_origin": True}, JobStatus.PENDING),
        ({"at_origin": True, "state": J.RUNNING}, JobStatus.ELSEWHERE),
        ({"at_origin": True, "state": J.COMPLETING, "result": "CANCELLED"}, JobStatus.ELSEWHERE),
        ({"at_origin": True, "state": J.ENDED, "result": "COMPLETED"}, JobStatus.ELSEWHERE),
        ({"at_origin": True, "state": J.ENDED, "result": "CANCELLED"}, JobStatus.ENDED),
    ],
)
def test_what_an_observation_says_of_a_job(changes: dict[str, Any], status: JobStatus) -> None:
    shown = job(one(A.QUEUED))._replace(**changes)
    found, its_job = job_status(JobRef("7", 500), SchedulerView({"7": shown}))
    assert found is status and its_job == (None if status is JobStatus.UNSEEN else shown)
    assert job_status(JobRef("8", 500), SchedulerView({"7": shown})) == (JobStatus.UNSEEN, None)


@pytest.mark.parametrize(
    ("before", "event", "outcome"),
    [
        (A.QUEUED, Event.CANCELLED, "cancelled"),
        (A.CLAIMED, Event.CANCELLED, "cancelled"),
        (A.SPAWNED, Event.ENDED, "done"),
        (A.ALLOCATED, Event.ENDED, "done"),
    ],
)
def test_a_job_that_is_shown_no_more_is_over_once_it_was_looked_for_after_the_last_effect(
    before: AttemptState, event: Event, outcome: str
) -> None:
    for began, ended in ((SINCE, None), (SINCE + 1.0, SINCE + 1.0), (NOW, inf)):
        assert Step(one(before), None, began=began, ended=ended).what is None
    gone = Step(one(before), None, began=SINCE + 1.1, ended=SINCE + 1.0)
    assert gone.what == (event, A.RECLAIMING, Why.SHOWN_NO_MORE) and gone.row.outcome == outcome


@pytest.mark.parametrize(
    ("before", "result", "event", "outcome"),
    [
        (A.SPAWNED, "CANCELLED", Event.CANCELLED, "cancelled"),
        (A.SPAWNED, "COMPLETED", Event.ENDED, "done"),
        (A.ALLOCATED, "CANCELLED", Event.ENDED, "done"),
        (A.QUEUED, "FAILED", Event.CANCELLED, "cancelled"),
    ],
)
def test_a_job_that_ended_ran_unless_it_was_cancelled_before(
    before: AttemptState, result: str, event: Event, outcome: str
) -> None:
    row = one(before)
    stepped = Step(row, job(row, J.ENDED, result=result, exit_code=3))
    assert stepped.what == (event, A.RECLAIMING, Why.RESULT) and stepped.row.outcome == outcome
    assert stepped.row.reason == Why.RESULT(word=result, code=3 if result == "FAILED" else None)
    unopened = Step(row, job(row, J.ENDED, result=result, unopened=True))
    assert unopened.row.reason == Why.UNOPENED(word=result)
    assert Step(row, job(row, J.ENDED)).row.reason is None


@pytest.mark.parametrize(("before", "event"), [(A.QUEUED, Event.CANCELLED), (A.ALLOCATED, Event.ENDED)])
def test_a_job_that_runs_on_a_physical_node_needs_no_vm(before: AttemptState, event: Event) -> None:
    row = one(before)
    stepped = Step(row, job(row, J.RUNNING, at_origin=True, origin="batch", nodes=("p1",)))
    assert stepped.what == (event, A.RECLAIMING, Why.ON_PHYSICAL) and stepped.row.outcome == "cancelled"


# --- a pin ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ({"eligible": True}, POLICY.pin_timeout),
        ({"eligible": False}, POLICY.held_timeout),
        ({"eligible": False, "pinned": None}, POLICY.pin_timeout),
    ],
)
def test_a_job_that_does_not_start_in_time_goes_back_to_the_gate(more: dict[str, Any], limit: float) -> None:
    row = one(A.SPAWNED, since=NOW - limit)
    shown, joined = job(row, pinned=True)._replace(**more), serving(V.JOINED)
    assert Step(row, shown, joined).what is None
    late = Step(row, shown, joined, began=NOW + 0.1)
    assert late.what == (Event.PIN_EXPIRED, A.RETURNING, Why.NOT_STARTED)
    assert (late.row.tries, late.row.outcome, late.row.reason) == (1, "requeued", Why.NOT_STARTED(word="no reason"))


@pytest.mark.parametrize(
    ("vms", "what"),
    [
        ((), (Event.GAVE_UP, A.RETURNING, Why.VM_LOST_BEFORE)),
        ((serving(V.LOST),), (Event.GAVE_UP, A.RETURNING, Why.VM_LOST_BEFORE)),
        ((serving(V.DEAD),), (Event.GAVE_UP, A.RETURNING, Why.VM_LOST_BEFORE)),
        ((serving(V.JOINED),), None),
    ],
)
def test_a_pinned_job_whose_vm_is_lost_goes_back_to_the_gate(vms: tuple[Vm, ...], what: object) -> None:
    row = one(A.SPAWNED, since=NOW - 1.0)
    stepped = Step(row, job(row, pinned=True), *vms)
    assert stepped.what == what and (what is None or stepped.row.tries == 1)


def test_a_job_that_is_held_changed_or_reserved_against_goes_back_without_counting_as_a_try() -> None:
    for state_, its_vm in ((A.SPAWNED, serving(V.JOINED)), (A.SPAWNING, serving(V.STARTING))):
        row = one(state_, since=NOW - 1.0)
        shown = job(row, pinned=state_ is A.SPAWNED)
        keeps = NodeReservation("maintenance", NOW - 1.0, NOW + 600.0)
        for found, why in (
            (Step(row, shown._replace(held=True), its_vm), Why.JOB_HELD),
            (Step(row, shown, its_vm, reservations=(keeps,)), keeps.why().kind),
            (Step(row, shown._replace(request=Request(1, Size(2, 100))), its_vm), Why.REQUEST_CHANGED),
        ):
            assert found.what == (Event.CHANGED, A.RETURNING, why) and found.row.tries == 0
        assert Step(row, shown, its_vm).what is None


def test_a_job_that_runs_makes_its_joined_vms_serve_and_ends_what_was_remembered_of_failures() -> None:
    eviction = Eviction(NOW - 30.0, "requeue", "h1", Why.OPERATOR(), 500)
    row = one(A.SPAWNED, evictions=(eviction,), failed_on=("h9",))
    stepped = Step(row, runs(row), serving(V.JOINED))
    assert stepped.what == (Event.RUNS, A.ALLOCATED, None) and stepped.row.failed_on == ()
    assert [change.row.state for change in stepped.changes] == [A.ALLOCATED, V.SERVING]
    assert stepped.row.evictions[-1].took == 30.0
    elsewhere = Step(row, runs(row, "mvtest0-9"), serving(V.JOINED))
    assert elsewhere.row.quarantined == Why.NOT_ON_OWN(hosts=("mvtest0-9",))


# --- running -------------------------------------------------------------------------------------------


def test_a_run_that_is_taken_back_or_is_completing_ends() -> None:
    row = one(A.ALLOCATED)
    back = Step(row, job(row, pinned=True), serving())
    assert back.what == (Event.CHANGED, A.RETURNING, Why.TAKEN_BACK) and back.row.tries == 0
    ends = Step(row, job(row, J.COMPLETING, pinned=True, nodes=(NAME,)), serving())
    assert ends.what == (Event.ENDED, A.RECLAIMING, Why.COMPLETING) and ends.row.outcome == "done"
    assert Step(row, runs(row), serving()).what is None


@pytest.mark.parametrize(("grace", "after"), [(0.0, A.PREEMPTING), (30.0, A.WARNED)])
def test_a_run_that_gives_way_to_another_job_ends_after_its_grace_time(grace: float, after: AttemptState) -> None:
    eviction = Eviction(NOW, "requeue", "h1", Why.OPERATOR(), 500)
    change = preempt_job(one(A.ALLOCATED, note=Why.NOT_SAVED(None)), eviction, grace)
    assert isinstance(change.row, Attempt) and (change.event, change.reason) == (Event.PREEMPTED, Why.OPERATOR())
    row = change.row
    assert (row.state, row.grace, row.reason, row.note) == (after, grace, Why.OPERATOR(), None)
    assert row.evictions == (eviction,)


def test_a_grace_time_runs_from_when_the_job_was_told_to_end() -> None:
    warned = one(A.WARNED, grace=30.0, reason=Why.OPERATOR())
    change = begin_grace(warned, SINCE + 4.0)
    assert isinstance(change.row, Attempt) and (change.event, change.reason) == (Event.NOTED, Why.OPERATOR())
    told = change.row
    assert (told.state, told.warned, told.grace) == (A.WARNED, True, 34.0)
    assert Step(told, runs(told), serving(), began=SINCE + 33.9).what is None
    over = Step(told, runs(told), serving(), began=SINCE + 34.0)
    assert over.what == (Event.GRACE_OVER, A.PREEMPTING, Why.OPERATOR) and over.row.grace == 0.0
    assert Step(warned, runs(warned), serving()).what is None, "it was not told"


# --- making its VMs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replaced", "tries", "what"),
    [
        (POLICY.replacements - 1, 0, None),  # another VM is made
        (POLICY.replacements, 0, (Event.GAVE_UP, A.RETURNING, Why.DIED_CREATING)),
        (POLICY.replacements, POLICY.attempts - 2, (Event.GAVE_UP, A.RETURNING, Why.DIED_CREATING)),
        (POLICY.replacements, POLICY.attempts - 1, (Event.GAVE_UP, A.REVOKING, Why.NO_VM_CREATED)),
    ],
)
def test_a_vm_that_failed_is_replaced_so_often_and_the_job_tried_so_often(
    replaced: int, tries: int, what: tuple[Event, AttemptState, Why] | None
) -> None:
    row = one(A.CLAIMED, replaced=replaced, tries=tries)
    dead = serving(V.ENDING, reason=Why.DIED_CREATING(), fault="")
    stepped = Step(row, job(row), dead)
    assert stepped.what == what
    if what is None:
        (missing,) = stepped.state.missing
        assert (missing.attempt, missing.count, missing.counts) == (1, 1, True)
    elif what[1] is A.RETURNING:
        assert stepped.row.tries == tries + 1
    else:
        assert stepped.row.outcome == "failed"
        at_origin = replace(row, origin="batch")
        kept = Step(at_origin, job(at_origin, origin="batch"), dead)
        assert kept.what == (Event.GAVE_UP, A.RETURNING, Why.DIED_CREATING), "it may start on a physical node"


@pytest.mark.parametrize(
    ("fault", "replaced", "counts"),
    [("host", POLICY.replacements, False), ("", 0, True)],
)
def test_the_fault_of_a_host_does_not_count(fault: str, replaced: int, counts: bool) -> None:
    row = one(A.CLAIMED, replaced=replaced)
    stepped = Step(row, job(row), serving(V.ENDING, reason=Why.DIED_CREATING(), fault=fault))
    (missing,) = stepped.state.missing
    assert (missing.counts, missing.reason) == (counts, Why.DIED_CREATING()) and stepped.what is None


def test_the_fault_of_a_job_makes_no_other_vm_and_a_gang_that_starts_is_made_again_as_a_whole() -> None:
    row = one(A.CLAIMED)
    at_fault = Step(row, job(row), serving(V.ENDING, reason=Why.DIED_CREATING(), fault="job"))
    assert at_fault.what == (Event.GAVE_UP, A.RETURNING, Why.DIED_CREATING) and at_fault.row.tries == 1
    for fault, tries in (("host", 0), ("", 1)):
        gang = one(A.SPAWNING, request=Request(2, Size(1, 100)))
        dead = serving(V.ENDING, id=2, reason=Why.DIED_CREATING(), fault=fault)
        stepped = Step(gang, job(gang), serving(V.STARTING), dead)
        assert stepped.what == (Event.GAVE_UP, A.RETURNING, Why.DIED_CREATING) and stepped.row.tries == tries


def test_vms_start_once_all_exist_and_are_pinned_to_once_all_have_joined() -> None:
    gang = one(A.CLAIMED, request=Request(2, Size(1, 100)))
    made = Step(gang, job(gang), serving(V.PARKED), serving(V.PARKED, id=2))
    assert [change.row.state for change in made.changes] == [A.SPAWNING, V.STARTING, V.STARTING]
    assert Step(gang, job(gang), serving(V.PARKED), serving(V.PLANNED, id=2)).what is None
    starting = replace(gang, state=A.SPAWNING)
    joined = Step(starting, job(gang), serving(V.JOINED), serving(V.JOINED, id=2))
    assert joined.what == (Event.ALL_JOINED, A.SPAWNED, None)
    assert Step(starting, job(gang), serving(V.JOINED), serving(V.STARTING, id=2)).what is None


# --- its end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("began", "ended", "moves"),
    [
        (SINCE, None, True),
        (SINCE - 0.1, None, False),
        (SINCE + 1.0, SINCE + 1.0, False),
        (SINCE + 1.1, SINCE + 1.0, True),
    ],
)
def test_an_attempt_goes_on_ending_by_an_observation_since_its_last_effect(
    began: float, ended: float | None, moves: bool
) -> None:
    row = one(A.RETURNING, outcome="requeued")
    stepped = Step(row, job(row), serving(V.JOINED), began=began, ended=ended)
    assert [change.row.state for change in stepped.changes] == ([A.RECLAIMING, V.RELEASING] if moves else [])


@pytest.mark.parametrize(
    ("how", "limit"), [(VmCondition.RUNNING, POLICY.complete_timeout), (VmCondition.PAUSED, POLICY.paused_timeout)]
)
def test_a_job_that_does_not_leave_its_node_in_time_has_it_set_down(how: VmCondition, limit: float) -> None:
    row = one(A.RECLAIMING, outcome="done", since=NOW - limit)
    shown = job(row, J.COMPLETING, pinned=True, nodes=(NAME,))
    assert Step(row, shown, serving(), vms={NAME: how}).changes == []
    late = Step(row, shown, serving(), vms={NAME: how}, began=NOW + 0.1)
    assert [(change.event, change.row.state) for change in late.changes] == [(Event.RELEASED, V.ENDING)]
    elsewhere = Step(row, shown._replace(nodes=("mvtest0-9",)), serving(), vms={NAME: how})
    assert [change.row.state for change in elsewhere.changes] == [V.RELEASING]


def test_a_job_that_is_tied_to_the_nodes_goes_to_the_gate_before_they_go() -> None:
    row = one(A.RECLAIMING, outcome="requeued")
    assert Step(row, job(row, pinned=True), serving(V.JOINED)).what == (Event.LEFT_GATE, A.RETURNING, Why.TIED)
    done = one(A.RECLAIMING, outcome="done")
    assert Step(done, job(done, pinned=True), serving(V.JOINED)).changes == []
    late = one(A.RETURNING, outcome="requeued")
    started = Step(late, runs(late), serving(V.JOINED))
    assert started.what == (Event.STARTED_LATE, A.RECLAIMING, Why.STARTED_AFTER_ALL) and started.row.outcome == "done"


@pytest.mark.parametrize(("tries", "waits"), [(0, False), (2, True)])
def test_a_job_that_is_back_at_the_gate_gets_another_attempt_that_knows_the_earlier_tries(
    tries: int, waits: bool
) -> None:
    row = one(
        A.RECLAIMING, outcome="requeued", tries=tries, reason=Why.VM_LOST(), overtaken=4, caused=1, short_runs=1,
        failed_on=("h9",),
    )  # fmt: skip
    stepped = Step(row, job(row, work_dir="/home/ada"))
    over, again = stepped.changes
    assert (over.event, over.row.state, over.reason) == (Event.RECLAIMED, A.REQUEUED, Why.VM_LOST())
    new = again.row
    assert isinstance(new, Attempt) and (again.event, new.state, new.tries) == (Event.SUBMITTED, A.QUEUED, tries)
    assert new.not_before == (NOW + POLICY.backoff(tries) if waits else 0.0)
    assert (new.note, new.overtaken, new.caused, new.short_runs, new.failed_on, new.work_dir) == (
        Why.VM_LOST(), 4, 1, 1, ("h9",), "/home/ada",
    )  # fmt: skip
    gone = Step(row, None)
    assert [change.row.state for change in gone.changes] == [A.REQUEUED]


def test_what_is_told_with_an_effect() -> None:
    def told(in_state: AttemptState) -> str:
        reasons: dict[str, Reason | None] = {"note": said("note"), "choice": said("choice"), "reason": said("reason")}
        return effect_text(one(in_state, **reasons))

    assert told(A.HOLDING) == "note" and {told(one) for one in (A.SPAWNED, A.ADDING_USER)} == {"choice"}
    assert {told(one) for one in (A.WARNED, A.PREEMPTING, A.REVOKING)} == {"reason"}
    assert {told(one) for one in (A.STRAY, A.UNGATED, A.RETURNING, A.RESTORING)} == {""}
