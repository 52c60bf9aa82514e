"""Attempts from their opening to their end, what the journal says of them, and commands and results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core import planner
from multiverse.core.admission.admit import Admission
from multiverse.core.errors import Broken, Refused
from multiverse.core.machines.attempt import attempt_is_settled
from multiverse.core.machines.tables import TABLES, effect_of
from multiverse.core.model.basics import CloneKind, Key, Size
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    Job,
    JobRef,
    JobState,
    Node,
    NodeState,
    Request,
    SchedulerView,
)
from multiverse.core.model.reason import Why, said, text_of
from multiverse.core.model.vm import TemplateState, VmCondition, VmState
from multiverse.core.model.world import Forecast, World
from multiverse.core.planner import plan
from multiverse.core.state import State
from multiverse.core.transition import TERMINAL, Change, Command, Done, EffectKind, Event, Move
from tests.unit import rows as hand
from tests.unit.planner_harness import POLICY, PlannerHarness, failed

A, V, T = AttemptState, VmState, TemplateState


def reasons(harness: PlannerHarness, event: Event) -> list[str]:
    """The reasons that the journal gives for such an event of attempts, in order."""
    return [
        text_of(entry.reason) for entry in harness.store.journal() if entry.event == event and entry.kind == "attempt"
    ]


def built(harness: PlannerHarness) -> None:
    """The template is ready before any job needs it."""
    harness.template()
    harness.run(Command("build", "h1", "slim"))
    harness.run()


def on(harness: PlannerHarness, *nodes: str, state: JobState = JobState.RUNNING, pinned: str | None = None) -> None:
    """The job is there, tied to that feature."""
    harness.jobs["7"] = harness.jobs["7"]._replace(state=state, nodes=nodes, gated=False, pinned=pinned, eligible=True)


def observe_at_once(harness: PlannerHarness) -> None:
    """Plan one pass on observations that began at the time of the last commit."""
    harness.observe()
    harness.commit()


def requeue(harness: PlannerHarness, **more: object) -> None:
    harness.job(ref=JobRef("7", 600, 1), **more)


# --- opening ----------------------------------------------------------------------------------------


def test_a_fresh_attempt_knows_its_job_and_is_held_back_by_nothing() -> None:
    harness = PlannerHarness()
    harness.job(work_dir="/home/ada")
    harness.run()
    attempt = harness.attempt()
    assert (attempt.work_dir, attempt.not_before, attempt.tries, text_of(attempt.note)) == ("/home/ada", 0.0, 0, "")
    assert reasons(harness, Event.SUBMITTED) == [""]


def test_a_job_is_looked_at_for_an_attempt_until_it_has_one_or_is_over() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    assert harness.state.unserved == set()
    harness.job("8", state=JobState.RUNNING, nodes=("elsewhere",), gated=False)
    harness.run()
    assert harness.state.unserved == {"8"}, "it may have taken a spare"
    for job_id in "78":
        del harness.jobs[job_id]
    harness.run()
    assert harness.state.unserved == set()


def test_a_job_that_cannot_be_read_asks_for_nothing() -> None:
    harness = PlannerHarness()
    harness.hypervisor_known = False
    harness.job(problem="what is this?", request=None)
    harness.job("8")
    harness.run()
    assert harness.attempt(1).request == Request(0, Size(0, 0))
    harness.job("8", problem="what is this?", request=None)
    harness.run()
    assert harness.attempt(2).request == Request(0, Size(0, 0))


def test_the_journal_says_which_restart_an_attempt_is_for() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    requeue(harness, state=JobState.PENDING, gated=True, pinned=None)
    harness.run()
    assert reasons(harness, Event.SUBMITTED) == ["", "restart 1"]
    assert reasons(harness, Event.RESTARTED) == ["the scheduler requeued the job"]


# --- waiting ----------------------------------------------------------------------------------------


def test_a_job_that_is_not_at_the_gate_is_put_there_before_it_is_admitted() -> None:
    harness = PlannerHarness()
    built(harness)
    harness.job(gated=False)
    harness.run()
    found = effect_of(harness.attempt())
    assert harness.attempt().state is A.UNGATED and found and found.kind is EffectKind.GATE
    harness.job(gated=True)
    harness.run()
    assert harness.attempt().state is A.CLAIMED


def test_a_job_that_leaves_the_gate_while_it_waits_is_put_back() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.job(gated=False)
    harness.run()
    assert harness.attempt().state is A.UNGATED


def test_the_journal_says_what_changed_while_a_job_waited() -> None:
    harness = PlannerHarness(replace(POLICY, patience=60.0))
    harness.job()
    harness.run()
    harness.job(name="other")
    harness.run()
    harness.job(request=Request(1, Size(2, 100)))
    harness.run()
    assert reasons(harness, Event.NOTED) == ["", "changed while waiting"]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED])
def test_a_job_that_runs_while_its_attempt_waits_is_requeued_before_it_is_admitted(state: JobState) -> None:
    """Requeued with its old pin, it was started on a VM of its earlier attempt, which is about to go."""
    harness = PlannerHarness()
    built(harness)
    harness.job(eligible=False)
    harness.run()
    earlier = replace(hand.vm(V.PLANNED, id=9), version=0, since=harness.clock.time)
    with harness.store.transaction() as tx:
        tx.apply(Move((Change(earlier, Event.PLANNED),)))
    harness.state = State(harness.rows, TABLES)
    on(harness, "mvtest0-9", state=state, pinned="mv_9")
    harness.run()
    harness.run()
    found = effect_of(harness.attempt())
    assert harness.attempt().state is A.STRAY and found and found.kind is EffectKind.REQUEUE
    assert reasons(harness, Event.STRAYED) == ["it runs on a VM of an earlier attempt"], "once"
    assert not text_of(harness.attempt().quarantined)
    harness.job(state=JobState.PENDING, gated=True, pinned=None)
    harness.run()
    assert harness.attempt().state is A.CLAIMED


def test_a_job_that_is_completing_while_its_attempt_waits_is_left_to_its_end() -> None:
    harness = PlannerHarness()
    harness.job(eligible=False)
    harness.run()
    on(harness, "mvtest0-9", state=JobState.COMPLETING)
    harness.run()
    assert harness.attempt().state is A.QUEUED


def test_a_job_that_ends_while_it_waits_is_told_nothing_more() -> None:
    harness = PlannerHarness(cpus=1)
    harness.job(size=Size(1, 100))
    harness.run()
    assert harness.reasons["7"]
    harness.job(state=JobState.ENDED, result="CANCELLED")
    harness.run()
    assert (harness.attempt().outcome, text_of(harness.attempt().reason)) == ("cancelled", "CANCELLED")
    assert not harness.reasons


# --- observations -----------------------------------------------------------------------------------


def test_an_observation_that_began_as_the_state_was_entered_counts() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.job(state=JobState.ENDED, result="CANCELLED")
    observe_at_once(harness)
    assert harness.attempt().state is A.CANCELLED


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
def test_a_job_that_an_old_observation_does_not_show_goes_on(stage: str) -> None:
    harness = PlannerHarness()
    before = getattr(harness, stage)()
    harness.jobs.clear()
    harness.ended(before.key)
    observe_at_once(harness)
    assert (harness.attempt().state, text_of(harness.attempt().quarantined)) == (before.state, "")


def test_a_waiting_job_that_an_old_observation_does_not_show_goes_on_waiting() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.jobs.clear()
    observe_at_once(harness)
    assert (harness.attempt().state, text_of(harness.attempt().quarantined)) == (A.QUEUED, "")


def test_a_job_that_is_completing_when_it_is_first_seen_is_allocated_first() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(state=JobState.COMPLETING, gated=False, pinned=attempt.feature)
    harness.run()
    assert harness.attempt().state is A.ALLOCATED


def test_a_vm_that_fails_is_replaced_before_the_next_observation_of_the_scheduler() -> None:
    harness = PlannerHarness()
    harness.second_host()
    built(harness)
    harness.job()
    harness.run()
    assert harness.attempt().since > harness.clock.time - 0.5
    harness.commit(failed(harness.all_vms()[0], EffectKind.CREATE, Refused("no luck")))
    assert [vm.state for vm in harness.all_vms()] == [V.ENDING, V.PLANNED]
    assert harness.attempt().state is A.CLAIMED and not text_of(harness.attempt().quarantined)


# --- making -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
@pytest.mark.parametrize("state", [JobState.ENDED, JobState.PENDING])
def test_a_job_that_ends_or_starts_over_while_its_vms_are_made_leaves_nothing_in_quarantine(
    stage: str, state: JobState
) -> None:
    harness = PlannerHarness()
    getattr(harness, stage)()
    if state is JobState.ENDED:
        harness.job(state=state, result="CANCELLED")
    else:
        requeue(harness)
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and not text_of(harness.attempt().quarantined)


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawned"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"held": True, "eligible": False}, "the job was held"),
        ({"request": Request(1, Size(2, 100)), "eligible": False}, "the job's request was changed"),
    ],
)
def test_the_next_attempt_says_why_the_one_before_gave_up(stage: str, change: dict[str, object], why: str) -> None:
    harness = PlannerHarness()
    getattr(harness, stage)()
    harness.job(**change)  # type: ignore[arg-type]
    harness.run()
    assert reasons(harness, Event.CHANGED) == [why] and text_of(harness.attempt().note) == ""
    harness.ended(harness.attempt().key)
    harness.run()
    harness.clear()
    harness.run()
    again = harness.attempt(2)
    assert (again.state, text_of(again.note), again.tries, again.not_before) == (A.QUEUED, why, 0, 0.0)


@pytest.mark.parametrize(("reason", "why"), [("Resources", "Resources"), ("", "no reason")])
def test_a_pin_that_expires_says_what_the_scheduler_said(reason: str, why: str) -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature, reason=reason)
    harness.pass_time(POLICY.pin_timeout + 1)
    harness.run()
    assert text_of(harness.attempt().reason) == f"the scheduler did not start it: {why}"


def test_a_vm_that_is_lost_while_it_is_made_is_replaced_on_a_host_that_is_in_sight() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.hosts["h2"] = replace(harness.hosts["h1"], name="h2")
    harness.template(host="h2")
    harness.run(Command("build", "h2", "slim"))
    harness.run()
    del harness.hosts["h1"]
    harness.run()
    assert [(vm.host, vm.state) for vm in harness.all_vms()] == [("h1", V.LOST), ("h2", V.PLANNED)]
    assert text_of(harness.attempt().choice) == "instant on h1; then instant on h2"
    assert reasons(harness, Event.REPLACED) == ["a VM was lost; now instant on h2"]
    assert not text_of(harness.attempt().quarantined)


def test_an_attempt_whose_image_went_meanwhile_waits_for_it_and_is_charged_no_try() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.hosts["h1"] = replace(harness.hosts["h1"], images={})
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Refused("no image slim")))
    attempt = harness.attempt()
    assert attempt.state is A.RETURNING and attempt.tries == 0
    assert reasons(harness, Event.GAVE_UP) == ["no image slim; no host has its image"]


def test_a_gang_of_two_whose_vms_have_started_is_given_up_when_one_fails() -> None:
    harness = PlannerHarness(cpus=64)
    harness.to_spawning(nodes=2)
    harness.run(failed(harness.all_vms()[0], EffectKind.START, Broken("no luck")))
    assert harness.attempt().state is A.RETURNING and len(harness.all_vms()) == 2


def test_a_single_vm_that_fails_as_it_starts_is_replaced_and_the_new_one_is_started_too() -> None:
    harness = PlannerHarness()
    harness.second_host()
    harness.to_spawning()
    harness.run(failed(harness.all_vms()[0], EffectKind.START, Broken("no luck")))
    assert harness.attempt().state is A.SPAWNING
    harness.seen(harness.all_vms()[1].name, VmCondition.PARKED)
    harness.run()
    assert [vm.state for vm in harness.all_vms()] == [V.REMOVING, V.STARTING]


def test_a_job_is_not_pinned_while_a_node_that_no_record_explains_has_its_tag() -> None:
    """Seed 64309 of saving: before the database was restored from a copy, the attempt had a VM already."""
    harness = PlannerHarness()
    harness.to_spawning()
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.RUNNING)
    harness.node(vm.name)
    harness.nodes["mvtest0-90"] = Node("mvtest0-90", NodeState.IDLE, ("slim", harness.attempt().feature))
    for _ in range(2):
        harness.run()
    assert harness.all_vms()[0].state is V.JOINED and harness.attempt().state is A.SPAWNING
    harness.nodes["mvtest0-90"] = replace(harness.nodes["mvtest0-90"], state=NodeState.DOWN)
    harness.run()
    assert harness.attempt().state is A.SPAWNED


@pytest.mark.parametrize("shown", [NodeState.IDLE, NodeState.SILENT, None])
def test_a_job_is_not_pinned_while_it_might_start_on_a_vm_that_was_replaced(shown: NodeState | None) -> None:
    """Both VMs have the attempt's tag, and the start that failed may have succeeded."""
    harness = PlannerHarness()
    harness.second_host()
    harness.to_spawning()
    harness.commit(failed(harness.all_vms()[0], EffectKind.START, Broken("no luck")))
    old, new = harness.all_vms()
    harness.effect_ended_at[old.key] = float("inf")
    harness.seen(new.name, VmCondition.PARKED)
    harness.run()
    harness.seen(new.name, VmCondition.RUNNING)
    harness.node(new.name)
    if shown:
        harness.node(old.name, shown)
    harness.run()
    harness.run()
    assert [vm.state for vm in harness.all_vms()] == [V.ENDING, V.JOINED]
    assert harness.attempt().state is A.SPAWNING
    if shown is NodeState.IDLE:
        harness.node(old.name, NodeState.DOWN)
    else:
        harness.ended(old.key)
        del harness.vms[old.name]
    harness.run()
    assert harness.attempt().state is A.SPAWNED


def test_the_vms_of_an_attempt_are_started_in_the_move_that_finds_them_all_made() -> None:
    harness = PlannerHarness(cpus=64)
    harness.to_claimed(nodes=2)
    for vm in harness.all_vms():
        harness.seen(vm.name, VmCondition.PARKED)
    moves = harness.run()
    (started,) = [move for move in moves if any(change.event is Event.CREATED for change in move.changes)]
    assert [change.event for change in started.changes] == [Event.CREATED, Event.START, Event.START]


def test_a_vm_of_whichever_kind_is_best_is_replaced_too() -> None:
    harness = PlannerHarness(replace(POLICY, kind=CloneKind.AUTO))
    harness.hosts["h1"] = replace(harness.hosts["h1"], abilities=frozenset({"instant", "linked"}))
    harness.second_host()
    harness.to_claimed()
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Broken("no luck")))
    assert [vm.state for vm in harness.all_vms()] == [V.ENDING, V.PLANNED] and not text_of(
        harness.attempt().quarantined
    )


def test_the_pace_of_the_passes_before_is_kept() -> None:
    harness = PlannerHarness(replace(POLICY, rates={CloneKind.INSTANT: 0.25}))
    built(harness)
    harness.job()
    harness.pass_time(1.0)
    harness.observe()
    wait = Forecast(paced={("h1", "slim", CloneKind.INSTANT): harness.clock.time + 0.5})
    harness.world = replace(harness.world, forecast=wait)
    harness.commit()
    assert harness.attempt().state is A.QUEUED
    harness.pass_time(0.5)
    harness.commit()
    assert harness.attempt().state is A.CLAIMED


# --- running ----------------------------------------------------------------------------------------


def test_a_job_that_is_started_over_before_it_ran_is_put_back_at_the_gate() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    requeue(harness, gated=False, pinned=attempt.feature)
    harness.run()
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and effect_of(harness.attempt()) is None
    assert [vm.state for vm in harness.all_vms()] == [V.JOINED], "its job has the pin still"
    found = effect_of(harness.attempt(2))
    assert harness.attempt(2).state is A.UNGATED and found and found.kind is EffectKind.GATE


def test_a_quarantine_says_on_which_nodes_the_job_runs() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    on(harness, "elsewhere", pinned=attempt.feature)
    harness.run()
    why = "its job runs on elsewhere, not on its own VMs"
    assert text_of(harness.attempt().quarantined) == why and reasons(harness, Event.QUARANTINED) == [why]


def test_an_attempt_whose_vm_was_lost_or_whose_launch_was_taken_back_says_so() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    harness.seen(harness.all_vms()[0].name, VmCondition.DEAD)
    harness.run()
    assert text_of(harness.attempt().reason) == "a VM was lost before the job ran"
    other = PlannerHarness()
    other.to_allocated()
    other.job(state=JobState.PENDING)
    other.run()
    assert text_of(other.attempt().reason) == "the scheduler took the launch back"


# --- the end ----------------------------------------------------------------------------------------


def end(state: A = A.RECLAIMING, **more: object) -> list[tuple[str, str, Event]]:
    """What one pass decides about an attempt without VMs, long after, when the scheduler no longer shows its job."""
    held = hand.state(hand.attempt(state, **more), now=1000.0)
    world = hand.world_of(SchedulerView(), HypervisorView(), 1000.0)
    found = hand.changes_of(plan(held, world, [], 1000.0, POLICY))
    return [(str(change.row.state), text_of(change.row.quarantined), change.event) for change in found]


def test_a_job_that_vanishes_on_its_way_back_to_the_gate_is_not_tried_again() -> None:
    assert end(outcome="requeued") == [("requeued", "", Event.RECLAIMED)]
    assert end(A.RETURNING, outcome="requeued") == [
        ("reclaiming", "", Event.RETURNED),
        ("requeued", "", Event.RECLAIMED),
    ]


def test_the_quarantine_of_an_attempt_ends_with_the_attempt() -> None:
    assert end(outcome="done", quarantined=said("it cannot be")) == [("done", "", Event.RECLAIMED)]
    assert end() == [("done", "", Event.RECLAIMED)], "as does one that no outcome was recorded of"


def test_an_attempt_whose_job_was_cancelled_ends_cancelled() -> None:
    assert end(outcome="cancelled") == [("cancelled", "", Event.RECLAIMED)]


@pytest.mark.parametrize("outcome", ["revoked", "failed"])
def test_an_attempt_that_revokes_its_job_ends_when_the_job_is_no_longer_shown(outcome: str) -> None:
    assert end(A.REVOKING, outcome=outcome) == [
        ("reclaiming", "", Event.CANCELLED),
        (outcome, "", Event.RECLAIMED),
    ]


def test_a_vm_whose_job_has_ended_is_released_without_a_reason_of_its_own() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.job(state=JobState.ENDED, result="COMPLETED")
    harness.run()
    harness.run()
    (vm,) = harness.all_vms()
    assert (vm.state, vm.failed, text_of(vm.reason)) == (V.RELEASING, False, "")
    assert {text_of(entry.reason) for entry in harness.store.journal() if entry.event == "released"} == {"COMPLETED"}


def test_the_journal_says_that_a_job_was_changed_before_it_was_cancelled_or_started_after_all() -> None:
    harness = PlannerHarness()
    harness.job(size=Size(64, 100))
    harness.run()
    harness.job(request=Request(1, Size(1, 100)))
    harness.run()
    assert reasons(harness, Event.CHANGED) == ["its user changed the job before it was cancelled"]
    late = PlannerHarness()
    attempt = late.to_spawned()
    late.pass_time(POLICY.pin_timeout + 1)
    late.run()
    on(late, late.all_vms()[0].name, pinned=attempt.feature)
    late.node(late.all_vms()[0].name, NodeState.BUSY)
    late.run()
    assert reasons(late, Event.STARTED_LATE) == ["the job started after all"]


def test_the_journal_says_when_a_job_was_off_its_nodes_and_why_its_attempt_ended() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    harness.job(held=True, eligible=False)
    harness.run()
    harness.ended(harness.attempt().key)
    harness.run()
    harness.clear()
    harness.run()
    assert reasons(harness, Event.RETURNED) == ["its job is off its nodes"]
    assert reasons(harness, Event.RECLAIMED) == ["the job was held"]


def test_a_job_that_is_tied_to_its_nodes_again_goes_back_to_the_gate_first() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(held=True, eligible=False)
    harness.run()
    harness.ended(attempt.key)
    harness.run()
    assert harness.attempt().state is A.RECLAIMING
    harness.job(gated=False, pinned=attempt.feature)  # a pin that was under way when the attempt gave up
    harness.run()
    assert harness.attempt().state is A.RETURNING
    assert reasons(harness, Event.LEFT_GATE) == ["its job is tied to its nodes"]


def test_a_job_that_was_completing_and_is_requeued_says_so() -> None:
    harness = PlannerHarness()
    attempt = harness.to_allocated()
    on(harness, harness.all_vms()[0].name, state=JobState.COMPLETING, pinned=attempt.feature)
    harness.run()
    requeue(harness, state=JobState.PENDING, gated=True, pinned=None)
    harness.run()
    assert text_of(harness.attempt().reason) == "the scheduler requeued the job"
    assert reasons(harness, Event.RESTARTED) == ["the scheduler requeued the job"]


def test_how_a_job_ended_is_noted_when_it_is_known() -> None:
    harness = PlannerHarness()
    attempt = harness.to_allocated()
    on(harness, harness.all_vms()[0].name, state=JobState.COMPLETING, pinned=attempt.feature)
    harness.run()
    harness.job(state=JobState.ENDED, result="TIMEOUT")
    harness.run()
    assert reasons(harness, Event.NOTED) == ["TIMEOUT"] and reasons(harness, Event.RESTARTED) == []
    assert (harness.attempt().outcome, text_of(harness.attempt().reason)) == ("done", "TIMEOUT")


@pytest.mark.parametrize("completing", [True, False])
def test_a_job_whose_files_could_not_be_opened_keeps_that_as_its_reason(completing: bool) -> None:
    harness = PlannerHarness()
    attempt = harness.to_allocated()
    if completing:
        on(harness, harness.all_vms()[0].name, state=JobState.COMPLETING, pinned=attempt.feature)
        harness.run()
    harness.job(state=JobState.ENDED, result="FAILED", unopened=True)
    harness.run()
    assert harness.attempt().reason == Why.UNOPENED(word="FAILED")


@pytest.mark.parametrize(("result", "said"), [("FAILED", "FAILED (exit code 3)"), ("CANCELLED", "CANCELLED")])
def test_a_job_that_failed_keeps_its_exit_code_as_the_reason(result: str, said: str) -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.job(state=JobState.ENDED, result=result, exit_code=3)
    harness.run()
    assert text_of(harness.attempt().reason) == said


def test_a_job_that_an_old_observation_does_not_show_is_not_over() -> None:
    harness = PlannerHarness()
    attempt = harness.to_allocated()
    harness.jobs.clear()
    harness.ended(attempt.key)
    harness.observe()
    harness.commit()
    assert harness.attempt().state is A.ALLOCATED, "the observation began as the last effect ended"
    harness.run()
    assert harness.attempt().outcome == "done"
    assert text_of(harness.attempt().reason) == "the scheduler no longer shows the job"


def test_a_job_that_changes_into_one_that_cannot_be_served_is_revoked_with_the_reason() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.job(problem="it cannot be served", request=None)
    harness.run()
    harness.run()
    assert (harness.attempt().outcome, text_of(harness.attempt().reason)) == ("revoked", "it cannot be served")
    assert harness.attempt().request.nodes == 0


def test_what_its_user_changes_while_it_waits_is_kept() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.job(name="other", work_dir="/elsewhere", uid=1001)
    harness.run()
    attempt = harness.attempt()
    assert (attempt.job_name, attempt.work_dir, attempt.uid) == ("other", "/elsewhere", 1001)


# --- faults of ours ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["step_template", "step_attempt"])
def test_a_fault_in_deciding_about_a_record_puts_it_in_quarantine(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    monkeypatch.setattr(planner, step, lambda *_: {}["x"])
    harness.run()
    (row,) = harness.rows.templates.values() if step == "step_template" else harness.rows.attempts.values()
    assert text_of(row.quarantined).startswith("a fault of Multiverse")


def test_a_fault_in_applying_a_result_puts_its_record_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (vm,) = harness.all_vms()
    monkeypatch.setattr(planner, "apply_result", lambda *_: {}["x"])
    harness.run(failed(vm, EffectKind.CREATE, Refused("no luck")))
    assert text_of(harness.all_vms()[0].quarantined).startswith("a fault of Multiverse")
    assert harness.all_vms()[0].key == Key("vm", vm.id)


@pytest.mark.parametrize("part", ["check", "consider"])
def test_a_fault_in_admission_puts_its_attempt_in_quarantine(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    harness = PlannerHarness()
    built(harness)
    whole = getattr(Admission, part)

    def faulty(self: Admission, row: Attempt) -> None:
        whole(self, row) if row.job.job_id == "8" else {}["x"]

    monkeypatch.setattr(Admission, part, faulty)
    harness.job("7")
    harness.job("8")
    harness.run()
    assert text_of(harness.attempt(1).quarantined).startswith("a fault of Multiverse")
    assert (harness.attempt(2).state, text_of(harness.attempt(2).quarantined)) == (A.CLAIMED, "")


def test_a_fault_in_replacing_a_vm_puts_its_attempt_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    monkeypatch.setattr(planner, "supply_missing", lambda *_: {}["x"])
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Refused("no luck")))
    assert text_of(harness.attempt().quarantined).startswith("a fault of Multiverse")
    assert harness.all_vms()[0].state is V.ENDING and not text_of(harness.all_vms()[0].quarantined)


# --- messages ---------------------------------------------------------------------------------------


def test_the_journal_has_the_message_of_a_failed_effect() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    harness.run(failed(harness.attempt(), EffectKind.PIN, Refused("no such feature")))
    assert reasons(harness, Event.GAVE_UP) == ["no such feature"]
    other = PlannerHarness()
    other.to_claimed()
    (row,) = other.rows.templates.values()
    other.run(
        failed(other.all_vms()[0], EffectKind.CREATE, Refused("no such image")),
        Command("build", "h1", "other"),
    )
    (broken,) = [one for one in other.rows.templates.values() if one.key != row.key]
    other.run(Done(broken.key, EffectKind.BUILD, "building", Broken("no boot")))
    by_event = {entry.event: text_of(entry.reason) for entry in other.store.journal()}
    assert by_event["failed"] == "no such image" and by_event["broke"] == "no boot"


def test_a_template_that_an_operator_builds_has_its_claim() -> None:
    harness = PlannerHarness()
    harness.run(Command("build", "h1", "slim", account="physics"))
    (row,), (claim,) = harness.rows.templates.values(), harness.rows.claims
    assert (row.account, claim.size) == ("physics", Size(0, POLICY.base.memory))


def test_the_journal_says_that_an_operator_asked_for_it() -> None:
    harness = PlannerHarness()
    harness.run(Command("build", "h1", "slim"))
    harness.run(Command("drop", "h1", "slim"))
    assert {entry.event: text_of(entry.reason) for entry in harness.store.journal()} == dict.fromkeys(
        ("needed", "dropped"), "an operator asked for it"
    )


def test_the_journal_says_who_ended_a_quarantine() -> None:
    stuck = hand.attempt(A.QUEUED, quarantined=said("it cannot be"))
    vm = hand.vm(V.SERVING, quarantined=said("it cannot be"))
    held = hand.state(stuck, vm, now=1000.0)
    moves = plan(held, World(), [Command("retry", key=row.key) for row in (stuck, vm)], 1000.0, POLICY)
    found = [(change.event, text_of(change.reason)) for change in hand.changes_of(moves)]
    assert found == [(Event.RETRIED, "an operator asked for it")] * 2


# --- rest -------------------------------------------------------------------------------------------


def rests(state: A, shown: JobState | None, *, began: float = 10.0, **more: object) -> bool:
    """Whether an attempt since 10 rests whose job is shown in that state (None: it is not shown)."""
    row = hand.attempt(state, **{"since": 10.0, **more})
    job = Job(row.job, row.job_name, row.uid, shown, row.request) if shown else None
    view = SchedulerView({"7": job} if job else {})
    return attempt_is_settled(row, hand.world_of(view, None, began))


def test_an_attempt_rests_while_its_job_waits_or_runs_as_before() -> None:
    resting = {(A.QUEUED, JobState.PENDING), (A.ALLOCATED, JobState.RUNNING), (A.ALLOCATED, JobState.SUSPENDED)}
    live = [state for state in A if state not in TERMINAL]
    assert {(state, shown) for state in live for shown in [None, *JobState] if rests(state, shown)} == resting
    assert not rests(A.QUEUED, JobState.PENDING, began=9.9), "it is newer than the observation"
    assert not attempt_is_settled(hand.attempt(A.QUEUED), World()), "the scheduler is unknown"


def test_rows_that_rest_are_not_looked_at_again() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.run()
    assert (harness.state.dirty.attempts, harness.state.dirty.vms) == (set(), set())


def test_an_attempt_in_quarantine_rests_until_its_job_is_over() -> None:
    for state in (A.QUEUED, A.SPAWNING, A.ALLOCATED, A.RECLAIMING):
        found = {shown for shown in [None, *JobState] if rests(state, shown, quarantined=said("it cannot be"))}
        assert found == {JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}, state
