"""An attempt from its opening to its end, at the edges: what mutation testing found that no other test would have
noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core import planner
from multiverse.core.errors import Broken, Refused
from multiverse.core.machines.tables import effect_of
from multiverse.core.model import (
    AttemptState,
    CloneKind,
    Forecast,
    HypervisorView,
    JobRef,
    JobState,
    Key,
    NodeState,
    Request,
    SchedulerView,
    Seen,
    Size,
    TemplateState,
    VmCondition,
    VmState,
    World,
)
from multiverse.core.planner import plan
from multiverse.core.state import Rows
from multiverse.core.transition import Command, Done, EffectKind, Event
from tests.unit import rows as hand
from tests.unit.planner_harness import POLICY, PlannerHarness, failed

A, V, T = AttemptState, VmState, TemplateState


def told(harness: PlannerHarness, event: Event) -> list[str]:
    """The reasons that the journal gives for such moves of attempts, in their order."""
    return [entry.reason for entry in harness.store.journal() if entry.event == event and entry.kind == "attempt"]


def built(harness: PlannerHarness) -> None:
    """Its template is ready before anybody asks for it."""
    harness.template()
    harness.run(Command("build", "h1", "slim"))
    harness.run()


def on(harness: PlannerHarness, *nodes: str, state: JobState = JobState.RUNNING, pinned: str | None = None) -> None:
    """The job is there, tied to that feature."""
    harness.jobs["7"] = replace(harness.jobs["7"], state=state, nodes=nodes, gated=False, pinned=pinned, eligible=True)


def look_at_once(harness: PlannerHarness) -> None:
    """One pass on a look that began in the very moment of the last commit."""
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
    assert (attempt.work_dir, attempt.not_before, attempt.tries, attempt.note) == ("/home/ada", 0.0, 0, "")
    assert told(harness, Event.SUBMITTED) == [""]


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
    assert told(harness, Event.SUBMITTED) == ["", "restart 1"]
    assert told(harness, Event.RESTARTED) == ["the scheduler requeued the job"]


# --- waiting ----------------------------------------------------------------------------------------


def test_a_job_that_is_not_at_the_gate_is_put_there_before_it_is_admitted() -> None:
    harness = PlannerHarness()
    built(harness)
    harness.job(gated=False)
    harness.run()
    found = effect_of(harness.attempt())
    assert harness.attempt().state is A.QUEUED and found and found.kind is EffectKind.GATE
    harness.job(gated=True)
    harness.run()
    assert harness.attempt().state is A.CLAIMED


def test_a_job_that_leaves_the_gate_while_it_waits_is_put_back() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.job(gated=False)
    harness.run()
    assert not harness.attempt().gated


def test_the_journal_says_what_changed_while_a_job_waited() -> None:
    harness = PlannerHarness(replace(POLICY, patience=60.0))
    harness.job()
    harness.run()
    harness.job(name="other")
    harness.run()
    harness.job(request=Request(1, Size(2, 100)))
    harness.run()
    assert told(harness, Event.NOTED) == ["", "changed while waiting"]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED])
def test_a_job_that_runs_while_its_attempt_waits_is_requeued_before_it_is_admitted(state: JobState) -> None:
    """Requeued with its old pin, it was started on a VM of its earlier attempt, which is about to go."""
    harness = PlannerHarness()
    built(harness)
    harness.job(eligible=False)
    harness.run()
    on(harness, "mvtest0-9", state=state, pinned="mv_9")
    harness.run()
    harness.run()
    found = effect_of(harness.attempt())
    assert harness.attempt().state is A.QUEUED and found and found.kind is EffectKind.REQUEUE
    assert told(harness, Event.NOTED) == ["it runs on a VM of an earlier attempt"], "once"
    assert not harness.attempt().quarantined
    harness.job(state=JobState.PENDING, gated=True, pinned=None)
    harness.run()
    assert not harness.attempt().stray and harness.attempt().state is A.CLAIMED


def test_a_job_that_is_completing_while_its_attempt_waits_is_left_to_its_end() -> None:
    harness = PlannerHarness()
    harness.job(eligible=False)
    harness.run()
    on(harness, "mvtest0-9", state=JobState.COMPLETING)
    harness.run()
    assert harness.attempt().state is A.QUEUED and not harness.attempt().stray


def test_what_a_user_was_told_while_his_job_waited_is_forgotten_when_it_ends() -> None:
    harness = PlannerHarness(cpus=1)
    harness.job(size=Size(1, 100))
    harness.run()
    harness.pass_time(POLICY.patience)
    harness.run()
    assert harness.attempt().note
    harness.job(state=JobState.ENDED, result="CANCELLED")
    harness.run()
    assert (harness.attempt().outcome, harness.attempt().note, harness.attempt().reason) == (
        "cancelled",
        "",
        "CANCELLED",
    )


# --- looks ------------------------------------------------------------------------------------------


def test_what_a_look_shows_that_began_as_the_state_was_entered_is_heeded() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.job(state=JobState.ENDED, result="CANCELLED")
    look_at_once(harness)
    assert harness.attempt().state is A.CANCELLED


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
def test_a_job_that_an_old_look_does_not_show_goes_on(stage: str) -> None:
    harness = PlannerHarness()
    before = getattr(harness, stage)()
    harness.jobs.clear()
    harness.ended(before.key)
    look_at_once(harness)
    assert (harness.attempt().state, harness.attempt().quarantined) == (before.state, "")


def test_a_waiting_job_that_an_old_look_does_not_show_goes_on_waiting() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.jobs.clear()
    look_at_once(harness)
    assert (harness.attempt().state, harness.attempt().quarantined) == (A.QUEUED, "")


def test_an_end_that_was_seen_as_the_job_began_waits_for_the_next_look() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(state=JobState.COMPLETING, gated=False, pinned=attempt.feature)
    harness.run()
    assert harness.attempt().state is A.ALLOCATED


def test_a_vm_that_fails_is_replaced_though_the_scheduler_has_not_been_looked_at_since() -> None:
    harness = PlannerHarness()
    built(harness)
    harness.job()
    harness.run()
    assert harness.attempt().since > harness.clock.time - 0.5
    harness.commit(failed(harness.all_vms()[0], EffectKind.CREATE, Refused("no luck")))
    assert [vm.state for vm in harness.all_vms()] == [V.RELEASING, V.PLANNED]
    assert harness.attempt().state is A.CLAIMED and not harness.attempt().quarantined


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
    assert harness.attempt().state is A.RECLAIMING and not harness.attempt().quarantined


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
    assert told(harness, Event.CHANGED) == [why] and harness.attempt().note == ""
    harness.ended(harness.attempt().key)
    harness.run()
    harness.clear()
    harness.run()
    again = harness.attempt(2)
    assert (again.state, again.note, again.tries, again.not_before) == (A.QUEUED, why, 0, 0.0)


@pytest.mark.parametrize(("reason", "why"), [("Resources", "Resources"), ("", "no reason")])
def test_a_pin_that_expires_says_what_the_scheduler_said(reason: str, why: str) -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature, reason=reason)
    harness.pass_time(POLICY.pin_timeout + 1)
    harness.run()
    assert harness.attempt().reason == f"the scheduler did not start it: {why}"


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
    assert harness.attempt().choice == "instant on h1; then instant on h2"
    assert told(harness, Event.REPLACED) == ["a VM was lost; now instant on h2"] and not harness.attempt().quarantined


def test_an_attempt_whose_image_went_meanwhile_waits_for_it_and_is_charged_no_try() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.hosts["h1"] = replace(harness.hosts["h1"], images={})
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Refused("no image slim")))
    attempt = harness.attempt()
    assert attempt.state is A.RECLAIMING and attempt.tries == 0
    assert told(harness, Event.GAVE_UP) == ["no image slim; no host has its image"]


def test_a_gang_of_two_whose_vms_have_started_is_not_mended_either() -> None:
    harness = PlannerHarness(cpus=64)
    harness.to_spawning(nodes=2)
    harness.run(failed(harness.all_vms()[0], EffectKind.START, Broken("no luck")))
    assert harness.attempt().state is A.RECLAIMING and len(harness.all_vms()) == 2


def test_a_single_vm_that_fails_as_it_starts_is_replaced_and_the_new_one_is_started_too() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    harness.run(failed(harness.all_vms()[0], EffectKind.START, Broken("no luck")))
    assert harness.attempt().state is A.SPAWNING
    harness.seen(harness.all_vms()[1].name, VmCondition.PARKED)
    harness.run()
    assert [vm.state for vm in harness.all_vms()] == [V.RELEASING, V.STARTING]


def test_a_vm_of_whichever_kind_is_best_is_replaced_too() -> None:
    harness = PlannerHarness(replace(POLICY, kind=CloneKind.AUTO))
    harness.hosts["h1"] = replace(harness.hosts["h1"], abilities=frozenset({"instant", "linked"}))
    harness.to_claimed()
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Broken("no luck")))
    assert [vm.state for vm in harness.all_vms()] == [V.RELEASING, V.PLANNED] and not harness.attempt().quarantined


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
    found = effect_of(harness.attempt())
    assert harness.attempt().state is A.RECLAIMING and found and found.kind is EffectKind.GATE


def test_a_quarantine_says_what_cannot_be_in_these_words() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    on(harness, "elsewhere", pinned=attempt.feature)
    harness.run()
    why = "its job runs on elsewhere, not on its own VMs"
    assert harness.attempt().quarantined == why and told(harness, Event.QUARANTINED) == [why]


def test_an_attempt_whose_vm_was_lost_or_whose_launch_was_taken_back_says_so() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    harness.seen(harness.all_vms()[0].name, VmCondition.DEAD)
    harness.run()
    assert harness.attempt().reason == "a VM was lost before the job ran"
    other = PlannerHarness()
    other.to_allocated()
    other.job(state=JobState.PENDING)
    other.run()
    assert other.attempt().reason == "the scheduler took the launch back"


# --- the end ----------------------------------------------------------------------------------------


def end(state: A = A.RECLAIMING, **more: object) -> list[tuple[str, str, Event]]:
    """What a look, long after, at a scheduler that has forgotten the job decides about an attempt without VMs."""
    attempt = hand.attempt(state, **more)
    world = World(Seen(SchedulerView(), 1000.0), Seen(HypervisorView(), 1000.0))
    moves = plan(Rows("test0", 10, 10, 10, {1: attempt}), world, [], 1000.0, POLICY)
    rows = [(change.row, change.event) for move in moves for change in move.changes]
    return [(str(row.state), row.quarantined, event) for row, event in rows]


def test_a_job_that_vanishes_on_its_way_back_to_the_gate_is_not_tried_again() -> None:
    assert end(outcome="requeued", gated=True) == [("requeued", "", Event.RECLAIMED)]


def test_an_attempt_that_is_over_is_in_quarantine_no_more() -> None:
    assert end(outcome="done", quarantined="it cannot be") == [("done", "", Event.RECLAIMED)]


def test_an_attempt_whose_job_was_cancelled_has_nothing_to_learn_of_the_gate() -> None:
    assert end(outcome="cancelled", gated=False) == [("cancelled", "", Event.RECLAIMED)]


def test_a_vm_that_did_its_duty_is_released_without_a_reason_of_its_own() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.job(state=JobState.ENDED, result="COMPLETED")
    harness.run()
    harness.run()
    (vm,) = harness.all_vms()
    assert (vm.state, vm.failed, vm.reason) == (V.RELEASING, False, "")
    assert {entry.reason for entry in harness.store.journal() if entry.event == "released"} == {"COMPLETED"}


def test_what_becomes_of_a_job_that_was_refused_or_started_after_all_is_told() -> None:
    harness = PlannerHarness()
    harness.job(size=Size(64, 100))
    harness.run()
    harness.job(request=Request(1, Size(1, 100)))
    harness.run()
    assert told(harness, Event.NOTED) == ["changed before it was refused"]
    late = PlannerHarness()
    attempt = late.to_spawned()
    late.pass_time(POLICY.pin_timeout + 1)
    late.run()
    on(late, late.all_vms()[0].name, pinned=attempt.feature)
    late.node(late.all_vms()[0].name, NodeState.BUSY)
    late.run()
    assert told(late, Event.NOTED) == ["the job started after all"]


def test_the_journal_says_when_a_job_was_off_our_nodes_and_what_its_attempt_ended_for() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    harness.job(held=True, eligible=False)
    harness.run()
    harness.ended(harness.attempt().key)
    harness.run()
    harness.clear()
    harness.run()
    assert told(harness, Event.NOTED) == ["its job is off our nodes"]
    assert told(harness, Event.RECLAIMED) == ["the job was held"]


def test_a_job_that_was_completing_and_is_requeued_says_so() -> None:
    harness = PlannerHarness()
    attempt = harness.to_allocated()
    on(harness, harness.all_vms()[0].name, state=JobState.COMPLETING, pinned=attempt.feature)
    harness.run()
    requeue(harness, state=JobState.PENDING, gated=True, pinned=None)
    harness.run()
    assert harness.attempt().reason == "the scheduler requeued the job"
    assert told(harness, Event.NOTED)[0] == "the scheduler requeued the job"


# --- faults of ours ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["step_template", "step_attempt"])
def test_a_fault_in_deciding_about_a_record_puts_it_in_quarantine(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    monkeypatch.setattr(planner, step, lambda *_: {}["x"])
    harness.run()
    (row,) = harness.rows.templates.values() if step == "step_template" else harness.rows.attempts.values()
    assert row.quarantined.startswith("a fault of Multiverse")


def test_a_fault_in_heeding_a_message_puts_its_record_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (vm,) = harness.all_vms()
    monkeypatch.setattr(planner, "apply_result", lambda *_: {}["x"])
    harness.run(failed(vm, EffectKind.CREATE, Refused("no luck")))
    assert harness.all_vms()[0].quarantined.startswith("a fault of Multiverse")
    assert harness.all_vms()[0].key == Key("vm", vm.id)


# --- messages ---------------------------------------------------------------------------------------


def test_the_journal_has_the_words_of_what_failed() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    harness.run(failed(harness.attempt(), EffectKind.PIN, Refused("no such feature")))
    assert told(harness, Event.GAVE_UP) == ["no such feature"]
    other = PlannerHarness()
    other.to_claimed()
    (row,) = other.rows.templates.values()
    other.run(
        failed(other.all_vms()[0], EffectKind.CREATE, Refused("no such image")),
        Command("build", "h1", "other"),
    )
    (broken,) = [one for one in other.rows.templates.values() if one.key != row.key]
    other.run(Done(broken.key, EffectKind.BUILD, "building", Broken("no boot")))
    reasons = {entry.event: entry.reason for entry in other.store.journal()}
    assert reasons["failed"] == "no such image" and reasons["broke"] == "no boot"


def test_what_an_operator_builds_is_claimed_as_often_as_its_host_holds_it() -> None:
    harness = PlannerHarness()
    harness.run(Command("build", "h1", "slim", account="physics"))
    (row,), (claim,) = harness.rows.templates.values(), harness.rows.claims
    assert (row.account, claim.size) == ("physics", Size(0, POLICY.base.memory))


def test_the_journal_says_that_an_operator_asked_for_it() -> None:
    harness = PlannerHarness()
    harness.run(Command("build", "h1", "slim"))
    harness.run(Command("drop", "h1", "slim"))
    assert {entry.event: entry.reason for entry in harness.store.journal()} == dict.fromkeys(
        ("needed", "dropped"), "an operator asked for it"
    )


def test_the_journal_says_who_ended_a_quarantine() -> None:
    stuck = hand.attempt(A.QUEUED, quarantined="it cannot be")
    vm = hand.vm(V.SERVING, quarantined="it cannot be")
    rows = Rows("test0", attempts={1: stuck}, vms={1: vm})
    moves = plan(rows, World(), [Command("retry", key=row.key) for row in (stuck, vm)], 1000.0, POLICY)
    found = [(change.event, change.reason) for move in moves for change in move.changes]
    assert found == [(Event.RETRIED, "an operator asked for it")] * 2
