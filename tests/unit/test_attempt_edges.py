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
from tests.unit.scene import POLICY, Scene, failed

A, V, T = AttemptState, VmState, TemplateState


def told(scene: Scene, event: Event) -> list[str]:
    """The reasons that the journal gives for such moves of attempts, in their order."""
    return [entry.reason for entry in scene.store.journal() if entry.event == event and entry.kind == "attempt"]


def built(scene: Scene) -> None:
    """Its template is ready before anybody asks for it."""
    scene.template()
    scene.run(Command("build", "h1", "slim"))
    scene.run()


def on(scene: Scene, *nodes: str, state: JobState = JobState.RUNNING, pinned: str | None = None) -> None:
    """The job is there, tied to that feature."""
    scene.jobs["7"] = replace(scene.jobs["7"], state=state, nodes=nodes, gated=False, pinned=pinned, eligible=True)


def look_at_once(scene: Scene) -> None:
    """One pass on a look that began in the very moment of the last commit."""
    scene.observe()
    scene.commit()


def requeue(scene: Scene, **more: object) -> None:
    scene.job(ref=JobRef("7", 600, 1), **more)


# --- opening ----------------------------------------------------------------------------------------


def test_a_fresh_attempt_knows_its_job_and_is_held_back_by_nothing() -> None:
    scene = Scene()
    scene.job(work_dir="/home/ada")
    scene.run()
    attempt = scene.attempt()
    assert (attempt.work_dir, attempt.not_before, attempt.tries, attempt.note) == ("/home/ada", 0.0, 0, "")
    assert told(scene, Event.SUBMITTED) == [""]


def test_a_job_that_cannot_be_read_asks_for_nothing() -> None:
    scene = Scene()
    scene.hypervisor_known = False
    scene.job(problem="what is this?", request=None)
    scene.job("8")
    scene.run()
    assert scene.attempt(1).request == Request(0, Size(0, 0))
    scene.job("8", problem="what is this?", request=None)
    scene.run()
    assert scene.attempt(2).request == Request(0, Size(0, 0))


def test_the_journal_says_which_restart_an_attempt_is_for() -> None:
    scene = Scene()
    scene.to_allocated()
    requeue(scene, state=JobState.PENDING, gated=True, pinned=None)
    scene.run()
    assert told(scene, Event.SUBMITTED) == ["", "restart 1"]
    assert told(scene, Event.RESTARTED) == ["the scheduler requeued the job"]


# --- waiting ----------------------------------------------------------------------------------------


def test_a_job_that_is_not_at_the_gate_is_put_there_before_it_is_admitted() -> None:
    scene = Scene()
    built(scene)
    scene.job(gated=False)
    scene.run()
    found = effect_of(scene.attempt())
    assert scene.attempt().state is A.QUEUED and found and found.kind is EffectKind.GATE
    scene.job(gated=True)
    scene.run()
    assert scene.attempt().state is A.CLAIMED


def test_a_job_that_leaves_the_gate_while_it_waits_is_put_back() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    scene.job(gated=False)
    scene.run()
    assert not scene.attempt().gated


def test_the_journal_says_what_changed_while_a_job_waited() -> None:
    scene = Scene(replace(POLICY, patience=60.0))
    scene.job()
    scene.run()
    scene.job(name="other")
    scene.run()
    scene.job(request=Request(1, Size(2, 100)))
    scene.run()
    assert told(scene, Event.NOTED) == ["", "changed while waiting"]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED])
def test_a_job_that_runs_while_its_attempt_waits_is_requeued_before_it_is_admitted(state: JobState) -> None:
    """Requeued with its old pin, it was started on a VM of its earlier attempt, which is about to go."""
    scene = Scene()
    built(scene)
    scene.job(eligible=False)
    scene.run()
    on(scene, "mvtest0-9", state=state, pinned="mv_9")
    scene.run()
    scene.run()
    found = effect_of(scene.attempt())
    assert scene.attempt().state is A.QUEUED and found and found.kind is EffectKind.REQUEUE
    assert told(scene, Event.NOTED) == ["it runs on a VM of an earlier attempt"], "once"
    assert not scene.attempt().quarantined
    scene.job(state=JobState.PENDING, gated=True, pinned=None)
    scene.run()
    assert not scene.attempt().stray and scene.attempt().state is A.CLAIMED


def test_a_job_that_is_completing_while_its_attempt_waits_is_left_to_its_end() -> None:
    scene = Scene()
    scene.job(eligible=False)
    scene.run()
    on(scene, "mvtest0-9", state=JobState.COMPLETING)
    scene.run()
    assert scene.attempt().state is A.QUEUED and not scene.attempt().stray


def test_what_a_user_was_told_while_his_job_waited_is_forgotten_when_it_ends() -> None:
    scene = Scene(cpus=1)
    scene.job(size=Size(1, 100))
    scene.run()
    scene.pass_time(POLICY.patience)
    scene.run()
    assert scene.attempt().note
    scene.job(state=JobState.ENDED, result="CANCELLED")
    scene.run()
    assert (scene.attempt().outcome, scene.attempt().note, scene.attempt().reason) == ("cancelled", "", "CANCELLED")


# --- looks ------------------------------------------------------------------------------------------


def test_what_a_look_shows_that_began_as_the_state_was_entered_is_heeded() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    scene.job(state=JobState.ENDED, result="CANCELLED")
    look_at_once(scene)
    assert scene.attempt().state is A.CANCELLED


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
def test_a_job_that_an_old_look_does_not_show_goes_on(stage: str) -> None:
    scene = Scene()
    before = getattr(scene, stage)()
    scene.jobs.clear()
    scene.ended(before.key)
    look_at_once(scene)
    assert (scene.attempt().state, scene.attempt().quarantined) == (before.state, "")


def test_a_waiting_job_that_an_old_look_does_not_show_goes_on_waiting() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    scene.jobs.clear()
    look_at_once(scene)
    assert (scene.attempt().state, scene.attempt().quarantined) == (A.QUEUED, "")


def test_an_end_that_was_seen_as_the_job_began_waits_for_the_next_look() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(state=JobState.COMPLETING, gated=False, pinned=attempt.feature)
    scene.run()
    assert scene.attempt().state is A.ALLOCATED


def test_a_vm_that_fails_is_replaced_though_the_scheduler_has_not_been_looked_at_since() -> None:
    scene = Scene()
    built(scene)
    scene.job()
    scene.run()
    assert scene.attempt().since > scene.clock.time - 0.5
    scene.commit(failed(scene.all_vms()[0], EffectKind.CREATE, Refused("no luck")))
    assert [vm.state for vm in scene.all_vms()] == [V.RELEASING, V.PLANNED]
    assert scene.attempt().state is A.CLAIMED and not scene.attempt().quarantined


# --- making -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
@pytest.mark.parametrize("state", [JobState.ENDED, JobState.PENDING])
def test_a_job_that_ends_or_starts_over_while_its_vms_are_made_leaves_nothing_in_quarantine(
    stage: str, state: JobState
) -> None:
    scene = Scene()
    getattr(scene, stage)()
    if state is JobState.ENDED:
        scene.job(state=state, result="CANCELLED")
    else:
        requeue(scene)
    scene.run()
    assert scene.attempt().state is A.RECLAIMING and not scene.attempt().quarantined


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawned"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"held": True, "eligible": False}, "the job was held"),
        ({"request": Request(1, Size(2, 100)), "eligible": False}, "the job's request was changed"),
    ],
)
def test_the_next_attempt_says_why_the_one_before_gave_up(stage: str, change: dict[str, object], why: str) -> None:
    scene = Scene()
    getattr(scene, stage)()
    scene.job(**change)  # type: ignore[arg-type]
    scene.run()
    assert told(scene, Event.CHANGED) == [why] and scene.attempt().note == ""
    scene.ended(scene.attempt().key)
    scene.run()
    scene.clear()
    scene.run()
    again = scene.attempt(2)
    assert (again.state, again.note, again.tries, again.not_before) == (A.QUEUED, why, 0, 0.0)


@pytest.mark.parametrize(("reason", "why"), [("Resources", "Resources"), ("", "no reason")])
def test_a_pin_that_expires_says_what_the_scheduler_said(reason: str, why: str) -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature, reason=reason)
    scene.pass_time(POLICY.pin_timeout + 1)
    scene.run()
    assert scene.attempt().reason == f"the scheduler did not start it: {why}"


def test_a_vm_that_is_lost_while_it_is_made_is_replaced_on_a_host_that_is_in_sight() -> None:
    scene = Scene()
    scene.to_claimed()
    scene.hosts["h2"] = replace(scene.hosts["h1"], name="h2")
    scene.template(host="h2")
    scene.run(Command("build", "h2", "slim"))
    scene.run()
    del scene.hosts["h1"]
    scene.run()
    assert [(vm.host, vm.state) for vm in scene.all_vms()] == [("h1", V.LOST), ("h2", V.PLANNED)]
    assert scene.attempt().choice == "instant on h1; then instant on h2"
    assert told(scene, Event.REPLACED) == ["a VM was lost; now instant on h2"] and not scene.attempt().quarantined


def test_an_attempt_whose_image_went_meanwhile_waits_for_it_and_is_charged_no_try() -> None:
    scene = Scene()
    scene.to_claimed()
    scene.hosts["h1"] = replace(scene.hosts["h1"], images={})
    scene.run(failed(scene.all_vms()[0], EffectKind.CREATE, Refused("no image slim")))
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.tries == 0
    assert told(scene, Event.GAVE_UP) == ["no image slim; no host has its image"]


def test_a_gang_of_two_whose_vms_have_started_is_not_mended_either() -> None:
    scene = Scene(cpus=64)
    scene.to_spawning(nodes=2)
    scene.run(failed(scene.all_vms()[0], EffectKind.START, Broken("no luck")))
    assert scene.attempt().state is A.RECLAIMING and len(scene.all_vms()) == 2


def test_a_single_vm_that_fails_as_it_starts_is_replaced_and_the_new_one_is_started_too() -> None:
    scene = Scene()
    scene.to_spawning()
    scene.run(failed(scene.all_vms()[0], EffectKind.START, Broken("no luck")))
    assert scene.attempt().state is A.SPAWNING
    scene.seen(scene.all_vms()[1].name, VmCondition.PARKED)
    scene.run()
    assert [vm.state for vm in scene.all_vms()] == [V.RELEASING, V.STARTING]


def test_a_vm_of_whichever_kind_is_best_is_replaced_too() -> None:
    scene = Scene(replace(POLICY, kind=CloneKind.AUTO))
    scene.hosts["h1"] = replace(scene.hosts["h1"], abilities=frozenset({"instant", "linked"}))
    scene.to_claimed()
    scene.run(failed(scene.all_vms()[0], EffectKind.CREATE, Broken("no luck")))
    assert [vm.state for vm in scene.all_vms()] == [V.RELEASING, V.PLANNED] and not scene.attempt().quarantined


def test_the_pace_of_the_passes_before_is_kept() -> None:
    scene = Scene(replace(POLICY, rates={CloneKind.INSTANT: 0.25}))
    built(scene)
    scene.job()
    scene.pass_time(1.0)
    scene.observe()
    wait = Forecast(paced={("h1", "slim", CloneKind.INSTANT): scene.clock.time + 0.5})
    scene.world = replace(scene.world, forecast=wait)
    scene.commit()
    assert scene.attempt().state is A.QUEUED
    scene.pass_time(0.5)
    scene.commit()
    assert scene.attempt().state is A.CLAIMED


# --- running ----------------------------------------------------------------------------------------


def test_a_job_that_is_started_over_before_it_ran_is_put_back_at_the_gate() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    requeue(scene, gated=False, pinned=attempt.feature)
    scene.run()
    found = effect_of(scene.attempt())
    assert scene.attempt().state is A.RECLAIMING and found and found.kind is EffectKind.GATE


def test_a_quarantine_says_what_cannot_be_in_these_words() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    on(scene, "elsewhere", pinned=attempt.feature)
    scene.run()
    why = "its job runs on elsewhere, not on its own VMs"
    assert scene.attempt().quarantined == why and told(scene, Event.QUARANTINED) == [why]


def test_an_attempt_whose_vm_was_lost_or_whose_launch_was_taken_back_says_so() -> None:
    scene = Scene()
    scene.to_spawned()
    scene.seen(scene.all_vms()[0].name, VmCondition.DEAD)
    scene.run()
    assert scene.attempt().reason == "a VM was lost before the job ran"
    other = Scene()
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
    scene = Scene()
    scene.to_allocated()
    scene.job(state=JobState.ENDED, result="COMPLETED")
    scene.run()
    scene.run()
    (vm,) = scene.all_vms()
    assert (vm.state, vm.failed, vm.reason) == (V.RELEASING, False, "")
    assert {entry.reason for entry in scene.store.journal() if entry.event == "released"} == {"COMPLETED"}


def test_what_becomes_of_a_job_that_was_refused_or_started_after_all_is_told() -> None:
    scene = Scene()
    scene.job(size=Size(64, 100))
    scene.run()
    scene.job(request=Request(1, Size(1, 100)))
    scene.run()
    assert told(scene, Event.NOTED) == ["changed before it was refused"]
    late = Scene()
    attempt = late.to_spawned()
    late.pass_time(POLICY.pin_timeout + 1)
    late.run()
    on(late, late.all_vms()[0].name, pinned=attempt.feature)
    late.node(late.all_vms()[0].name, NodeState.BUSY)
    late.run()
    assert told(late, Event.NOTED) == ["the job started after all"]


def test_the_journal_says_when_a_job_was_off_our_nodes_and_what_its_attempt_ended_for() -> None:
    scene = Scene()
    scene.to_spawned()
    scene.job(held=True, eligible=False)
    scene.run()
    scene.ended(scene.attempt().key)
    scene.run()
    scene.clear()
    scene.run()
    assert told(scene, Event.NOTED) == ["its job is off our nodes"]
    assert told(scene, Event.RECLAIMED) == ["the job was held"]


def test_a_job_that_was_completing_and_is_requeued_says_so() -> None:
    scene = Scene()
    attempt = scene.to_allocated()
    on(scene, scene.all_vms()[0].name, state=JobState.COMPLETING, pinned=attempt.feature)
    scene.run()
    requeue(scene, state=JobState.PENDING, gated=True, pinned=None)
    scene.run()
    assert scene.attempt().reason == "the scheduler requeued the job"
    assert told(scene, Event.NOTED)[0] == "the scheduler requeued the job"


# --- faults of ours ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["step_template", "step_attempt"])
def test_a_fault_in_deciding_about_a_record_puts_it_in_quarantine(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    scene = Scene()
    scene.job()
    scene.run()
    monkeypatch.setattr(planner, step, lambda *_: {}["x"])
    scene.run()
    (row,) = scene.rows.templates.values() if step == "step_template" else scene.rows.attempts.values()
    assert row.quarantined.startswith("a fault of Multiverse")


def test_a_fault_in_heeding_a_message_puts_its_record_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.to_claimed()
    (vm,) = scene.all_vms()
    monkeypatch.setattr(planner, "apply_result", lambda *_: {}["x"])
    scene.run(failed(vm, EffectKind.CREATE, Refused("no luck")))
    assert scene.all_vms()[0].quarantined.startswith("a fault of Multiverse")
    assert scene.all_vms()[0].key == Key("vm", vm.id)


# --- messages ---------------------------------------------------------------------------------------


def test_the_journal_has_the_words_of_what_failed() -> None:
    scene = Scene()
    scene.to_spawned()
    scene.run(failed(scene.attempt(), EffectKind.PIN, Refused("no such feature")))
    assert told(scene, Event.GAVE_UP) == ["no such feature"]
    other = Scene()
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
    scene = Scene()
    scene.run(Command("build", "h1", "slim", account="physics"))
    (row,), (claim,) = scene.rows.templates.values(), scene.rows.claims
    assert (row.account, claim.size) == ("physics", Size(0, POLICY.base.memory))


def test_the_journal_says_that_an_operator_asked_for_it() -> None:
    scene = Scene()
    scene.run(Command("build", "h1", "slim"))
    scene.run(Command("drop", "h1", "slim"))
    assert {entry.event: entry.reason for entry in scene.store.journal()} == dict.fromkeys(
        ("needed", "dropped"), "an operator asked for it"
    )


def test_the_journal_says_who_ended_a_quarantine() -> None:
    stuck = hand.attempt(A.QUEUED, quarantined="it cannot be")
    vm = hand.vm(V.SERVING, quarantined="it cannot be")
    rows = Rows("test0", attempts={1: stuck}, vms={1: vm})
    moves = plan(rows, World(), [Command("retry", key=row.key) for row in (stuck, vm)], 1000.0, POLICY)
    found = [(change.event, change.reason) for move in moves for change in move.changes]
    assert found == [(Event.RETRIED, "an operator asked for it")] * 2
