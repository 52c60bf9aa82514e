"""The planner's decisions, one by one, on a real store and a world set by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core import planner
from multiverse.core.errors import Broken, Exhausted, Gone, Refused, Unknown
from multiverse.core.machines.tables import effect_of
from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    JobRef,
    JobState,
    Key,
    NodeState,
    Request,
    Size,
    TemplateState,
    VmCondition,
    VmState,
)
from multiverse.core.planner import orphans
from multiverse.core.provisioning import admission
from multiverse.core.state import PlanState
from multiverse.core.transition import Change, Command, Done, EffectKind, Event
from tests.unit.scene import POLICY, Scene, failed

A, V = AttemptState, VmState


def states(scene: Scene) -> list[str]:
    return [str(vm.state) for vm in scene.all_vms()]


def effect(row: object) -> EffectKind | None:
    found = effect_of(row)  # type: ignore[arg-type]
    return found.kind if found else None


def test_a_job_makes_its_template_first_and_waits_without_claims_of_its_own() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    assert scene.attempt().state is A.QUEUED
    (template,) = scene.rows.templates.values()
    assert template.state is TemplateState.BUILDING and effect(template) is EffectKind.BUILD
    assert [claim.owner for claim in scene.rows.claims] == [template.key]
    scene.ended(template.key)
    scene.run()
    assert scene.attempt().state is A.QUEUED, "the look shows no template yet"
    scene.template()
    scene.run()
    assert scene.attempt().state is A.CLAIMED


def test_admission_claims_before_anything_exists() -> None:
    scene = Scene()
    attempt = scene.to_claimed(size=Size(2, 1000))
    (vm,) = scene.all_vms()
    assert attempt.state is A.CLAIMED and vm.state is V.PLANNED and effect(vm) is EffectKind.CREATE
    claim = next(c for c in scene.rows.claims if c.owner == vm.key)
    assert claim.size.cpus == 2 and claim.size.memory >= vm.size.memory >= 1000
    assert vm.name == "mvtest0-1" and vm.address == "10.9.1.1/16"


def test_the_whole_way_of_a_job() -> None:
    scene = Scene()
    attempt = scene.to_spawning()
    assert attempt.state is A.SPAWNING and states(scene) == ["starting"]
    (vm,) = scene.all_vms()
    scene.seen(vm.name, VmCondition.RUNNING)
    scene.ended(vm.key)
    scene.run()
    assert scene.attempt().state is A.SPAWNING, "no node yet"
    scene.node(vm.name)
    scene.run()
    assert scene.attempt().state is A.SPAWNED and effect(scene.attempt()) is EffectKind.PIN
    scene.jobs["7"] = replace(
        scene.jobs["7"], state=JobState.RUNNING, nodes=(vm.name,), gated=False, pinned=attempt.feature
    )
    scene.run()
    assert scene.attempt().state is A.ALLOCATED and states(scene) == ["serving"]
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.COMPLETING, result="COMPLETED")
    scene.run()
    assert scene.attempt().state is A.RECLAIMING and states(scene) == ["serving"], "COMPLETING comes to its end first"
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED)
    scene.run()
    assert states(scene) == ["releasing"]
    scene.clear()
    scene.run()
    assert scene.attempt().state is A.DONE and states(scene) == ["gone"]
    assert not scene.rows.attempts and not scene.rows.vms
    assert [c.owner.kind for c in scene.rows.claims] == ["template"]


def test_a_gang_is_admitted_whole_or_not_at_all() -> None:
    scene = Scene(replace(POLICY, provisioning=8), cpus=3)
    scene.to_claimed(nodes=4)
    assert scene.attempt().state is A.RECLAIMING, "four CPUs never fit on three"
    scene = Scene(cpus=4)
    scene.to_claimed(nodes=4)
    assert states(scene) == ["planned"] * 4
    for vm in scene.all_vms()[:3]:
        scene.seen(vm.name, VmCondition.PARKED)
    scene.run()
    assert states(scene) == ["parked"] * 3 + ["planned"] and scene.attempt().state is A.CLAIMED
    scene.seen(scene.all_vms()[3].name, VmCondition.PARKED)
    scene.run()
    assert states(scene) == ["starting"] * 4


def test_what_fits_on_no_host_is_revoked_with_what_would_fit() -> None:
    scene = Scene(cpus=4, memory=4096)
    scene.job(size=Size(5, 100))
    scene.run()
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "revoked"
    assert "5 CPUs" in attempt.reason and "the largest that fits is 4 CPUs" in attempt.reason
    assert effect(attempt) is EffectKind.REVOKE
    scene.run()
    assert scene.attempt().state is A.RECLAIMING, "not over before the scheduler says so"
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="CANCELLED")
    scene.ended(attempt.key)
    scene.run()
    assert scene.attempt().state is A.REVOKED


def test_the_first_that_waits_for_capacity_blocks_those_behind_it() -> None:
    scene = Scene(cpus=4)
    scene.to_claimed(size=Size(2, 100))
    scene.job("8", size=Size(4, 100), rank=1)
    scene.jobs["8"] = replace(scene.jobs["8"], ref=JobRef("8", 501))
    scene.job("9", rank=2)
    scene.jobs["9"] = replace(scene.jobs["9"], ref=JobRef("9", 502))
    for _ in range(5):
        scene.run()
    found = {a.job.job_id: a for a in scene.rows.attempts.values()}
    assert found["8"].state is found["9"].state is A.QUEUED
    assert "hosts are full" in found["8"].note and effect(found["8"]) is EffectKind.EXPLAIN


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_job_cancelled_on_the_way_releases_its_vms(stage: str, gone: bool) -> None:
    scene = Scene()
    getattr(scene, stage)()
    if gone:
        del scene.jobs["7"]
    else:
        scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="CANCELLED")
    scene.run()
    scene.run()
    # Of a pinned job that is no longer shown nobody knows whether it ran.
    outcome = "done" if stage == "to_spawned" and gone else "cancelled"
    assert scene.attempt().state is A.RECLAIMING and scene.attempt().outcome == outcome
    assert states(scene) == ["releasing"]
    scene.clear()
    scene.run()
    assert str(scene.attempt().state) == outcome


def test_unknown_is_not_absent() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.scheduler_known = scene.hypervisor_known = False
    scene.jobs.clear()
    scene.vms.clear()
    scene.nodes.clear()
    for _ in range(3):
        assert scene.run() == []
    scene.pass_time(10_000)
    assert scene.run() == []


def test_absence_counts_only_in_a_look_begun_after_the_last_effect() -> None:
    scene = Scene()
    scene.to_spawned()
    attempt = scene.attempt()
    scene.observe()  # the look begins ...
    scene.pass_time(1)
    scene.ended(attempt.key)  # ... and the pin ends after that
    del scene.jobs["7"]
    scene.world = replace(scene.world, effect_ended_at=dict(scene.effect_ended_at))
    scene.commit()
    assert scene.attempt().state is A.SPAWNED
    scene.run()
    assert scene.attempt().state is A.RECLAIMING


def test_a_failed_vm_is_replaced_within_the_attempt_and_then_no_more() -> None:
    scene = Scene(replace(POLICY, replacements=2, attempts=2, retry_base=0.0))
    scene.to_claimed()
    for count in (2, 3):
        vm = scene.all_vms()[-1]
        scene.run(failed(vm, EffectKind.CREATE, Broken("no luck")))
        assert len(scene.all_vms()) == count and scene.attempt().state is A.CLAIMED
    scene.run(failed(scene.all_vms()[-1], EffectKind.CREATE, Broken("no luck")))
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "requeued" and attempt.tries == 1
    scene.clear()
    for _ in range(3):
        scene.run()
    assert scene.attempt().state is A.REQUEUED
    second = scene.attempt(2)
    assert second.state is A.CLAIMED and second.tries == 1, "the same job, another attempt"
    for _ in range(3):
        scene.run(failed(scene.all_vms(2)[-1], EffectKind.CREATE, Broken("no luck")))
    assert scene.attempt(2).outcome == "failed" and "2 attempts: no luck" in scene.attempt(2).reason
    assert effect(scene.attempt(2)) is EffectKind.REVOKE, "given up, and the user is told"


def test_a_gang_whose_vms_have_started_is_not_mended_but_rolled_back() -> None:
    """They know each other by name; a fourth that comes later would be a stranger to them."""
    scene = Scene(replace(POLICY, retry_base=0.0))
    scene.to_claimed(nodes=3)
    scene.run(failed(scene.all_vms()[1], EffectKind.CREATE, Broken("no luck")))
    assert len(scene.all_vms()) == 4 and scene.attempt().state is A.CLAIMED, "nobody knows anybody yet"
    for vm in scene.all_vms():
        scene.seen(vm.name, VmCondition.PARKED)
        scene.ended(vm.key)
    scene.run()
    starting = [vm for vm in scene.all_vms() if vm.state is V.STARTING]
    assert scene.attempt().state is A.SPAWNING and len(starting) == 3
    scene.run(failed(starting[0], EffectKind.START, Broken("no luck")))
    attempt = scene.attempt()
    assert (attempt.state, attempt.outcome, attempt.tries) == (A.RECLAIMING, "requeued", 1)
    assert len(scene.all_vms()) == 4
    scene.run()
    scene.ended(attempt.key)
    scene.run()
    assert set(states(scene)) == {"releasing"}


def test_an_unknown_end_of_an_effect_moves_nothing() -> None:
    scene = Scene()
    scene.to_claimed()
    assert scene.run(failed(scene.all_vms()[0], EffectKind.CREATE, Unknown("no reply"))) == []


def test_a_late_message_about_a_state_since_left_is_not_heeded() -> None:
    scene = Scene()
    scene.to_claimed()
    late = failed(scene.all_vms()[0], EffectKind.CREATE, Broken("too late"))
    scene.seen(scene.all_vms()[0].name, VmCondition.PARKED)
    scene.run()
    assert states(scene) == ["starting"]
    scene.run(late)
    assert states(scene) == ["starting"]


def test_a_pin_that_starts_nothing_goes_back_to_the_gate_and_backs_off_with_slurms_reason() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature, reason="QOSMaxJobsPerUserLimit")
    scene.pass_time(POLICY.pin_timeout)
    scene.run()
    attempt = scene.attempt()
    assert attempt.outcome == "requeued" and "QOSMaxJobsPerUserLimit" in attempt.reason
    assert effect(attempt) is EffectKind.GATE and states(scene) == ["joined"], "the gate comes before the node goes"
    scene.job(gated=True, pinned=None)
    scene.ended(attempt.key)
    scene.run()
    assert states(scene) == ["releasing"]
    scene.clear()
    scene.run()
    assert scene.attempt().state is A.REQUEUED
    assert scene.attempt(2).not_before > scene.clock.time
    assert "QOSMaxJobsPerUserLimit" in scene.attempt(2).note, "its user is told"


def test_a_pinned_job_that_slurm_holds_back_gives_its_vm_up_soon() -> None:
    """Not at once: what Slurm says may still be about the gate."""
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature, eligible=False, reason="AssocGrpCPUMinutesLimit")
    scene.pass_time(POLICY.held_timeout / 2)
    scene.run()
    assert scene.attempt().state is A.SPAWNED
    scene.pass_time(POLICY.held_timeout / 2)
    scene.run()
    assert scene.attempt().outcome == "requeued" and "AssocGrpCPUMinutesLimit" in scene.attempt().reason


def test_a_pin_that_is_on_its_way_is_waited_for_whatever_held_the_job_back() -> None:
    scene = Scene()
    scene.to_spawned()
    scene.job(eligible=False)
    scene.pass_time(POLICY.pin_timeout - 2)
    scene.run()
    assert scene.attempt().state is A.SPAWNED


def test_a_job_that_starts_just_as_its_pin_is_taken_back_keeps_its_vm() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature)
    scene.pass_time(POLICY.pin_timeout)
    scene.run()
    name = scene.all_vms()[0].name
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.RUNNING, nodes=(name,))
    scene.ended(attempt.key)
    for _ in range(3):
        scene.run()
    assert scene.attempt().outcome == "done" and states(scene) == ["joined"]
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="COMPLETED")
    scene.run()
    assert states(scene) == ["releasing"]


def test_a_vm_that_dies_before_the_job_runs_is_kept_until_the_job_is_off_it() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature)
    scene.seen(scene.all_vms()[0].name, VmCondition.DEAD)
    scene.run()
    scene.run()
    assert scene.attempt().outcome == "requeued" and states(scene) == ["joined"]
    scene.job(gated=True, pinned=None)
    scene.ended(attempt.key)
    scene.run()
    assert states(scene) == ["releasing"]


def test_a_vm_that_dies_under_its_job_goes_down_and_the_scheduler_decides() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.seen(scene.all_vms()[0].name, VmCondition.DEAD)
    scene.run()
    assert scene.attempt().state is A.ALLOCATED and states(scene) == ["releasing"]
    assert scene.all_vms()[0].failed, "so that its node is set DOWN first"
    assert effect(scene.all_vms()[0]) is EffectKind.END, "the node stays while the job is on it"
    scene.ended(scene.all_vms()[0].key)
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.COMPLETING)
    scene.run()
    assert effect(scene.all_vms()[0]) is EffectKind.END
    ref = scene.jobs["7"].ref
    scene.jobs["7"] = replace(
        scene.jobs["7"], state=JobState.PENDING, ref=replace(ref, restarts=1), nodes=(), eligible=False
    )
    scene.run()
    assert scene.attempt().state is A.RECLAIMING and scene.attempt().outcome == "requeued"
    assert effect(scene.all_vms()[0]) is EffectKind.RELEASE
    second = scene.attempt(2)
    assert second.state is A.QUEUED and effect(second) is EffectKind.GATE, "it still wears the old pin"
    scene.job(gated=True, pinned=None)
    scene.clear()
    scene.run()
    assert scene.attempt().state is A.REQUEUED


def test_a_job_that_was_completing_when_it_was_requeued_is_told_so() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.COMPLETING)
    scene.run()
    assert scene.attempt().outcome == "done"
    ref = replace(scene.jobs["7"].ref, restarts=1)
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.PENDING, ref=ref, nodes=(), eligible=False)
    scene.run()
    assert scene.attempt().outcome == "requeued" and "requeued" in scene.attempt().reason


def test_an_ended_attempt_says_how_its_job_ended() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.COMPLETING)
    scene.run()
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="TIMEOUT", nodes=())
    scene.run()
    scene.clear()
    scene.run()
    assert scene.attempt().state is A.DONE and scene.attempt().reason == "TIMEOUT"


def test_a_held_job_gives_its_vms_back_and_waits_without_penalty() -> None:
    scene = Scene()
    scene.to_spawning()
    scene.job(held=True, eligible=False)
    scene.run()
    assert scene.attempt().outcome == "requeued"
    scene.run()
    scene.clear()
    scene.run()
    second = scene.attempt(2)
    assert second.state is A.QUEUED and second.tries == 0
    scene.run()
    assert scene.attempt(2).state is A.QUEUED
    scene.job(held=False, eligible=True)
    scene.run()
    assert scene.attempt(2).state is A.CLAIMED


def test_a_changed_request_while_waiting_is_taken_as_it_is_now() -> None:
    scene = Scene(cpus=1)
    scene.to_claimed()
    scene.job("8")
    scene.jobs["8"] = replace(scene.jobs["8"], ref=JobRef("8", 501), rank=1)
    scene.run()
    request = replace(scene.jobs["8"].request, size=Size(1, 700))  # type: ignore[type-var]
    scene.job("8", request=request)
    scene.run()
    assert scene.attempt(2).request == request


def test_a_job_id_that_comes_again_is_another_job() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.jobs["7"] = replace(scene.jobs["7"], ref=JobRef("7", 900), state=JobState.PENDING, nodes=(), pinned=None)
    scene.jobs["7"] = replace(scene.jobs["7"], gated=True)
    scene.run()
    assert scene.attempt().state is A.RECLAIMING and scene.attempt().outcome == "done"
    assert scene.attempt(2).job == JobRef("7", 900)


def test_what_cannot_be_is_quarantined_and_stops_nobody_else() -> None:
    scene = Scene()
    scene.to_claimed()
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.RUNNING, nodes=("elsewhere",))
    scene.job("8")
    scene.jobs["8"] = replace(scene.jobs["8"], ref=JobRef("8", 501))
    scene.run()
    assert "before it was given its nodes" in scene.attempt().quarantined
    assert effect(scene.attempt()) is None
    assert scene.attempt(2).state is A.CLAIMED
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="COMPLETED")
    for _ in range(3):
        scene.run()
        scene.clear()
    assert scene.attempt().state in (A.CANCELLED, A.DONE), "the job's end ends the quarantine"


def test_a_node_that_comes_up_down_fails_its_vm() -> None:
    scene = Scene()
    scene.to_spawning()
    scene.node(scene.all_vms()[0].name, NodeState.DOWN)
    scene.run()
    assert states(scene)[0] == "releasing" and len(scene.all_vms()) == 2


def test_gone_needs_both_sides_and_looks_begun_after_the_destruction() -> None:
    scene = Scene()
    scene.to_claimed()
    del scene.jobs["7"]
    vm = scene.all_vms()[0]
    for _ in range(3):
        scene.run()
    assert states(scene) == ["releasing"], "nothing was destroyed yet, so nothing is known to be gone"
    scene.ended(vm.key)
    scene.node(vm.name)
    scene.run()
    assert states(scene) == ["releasing"], "the scheduler still shows its node"
    scene.nodes.clear()
    scene.run()
    assert states(scene) == ["gone"] and scene.attempt().state is A.CANCELLED


def test_an_unreachable_host_keeps_its_claims() -> None:
    scene = Scene()
    scene.to_allocated()
    host = scene.hosts.pop("h1")
    scene.vms.clear()
    scene.run()
    assert states(scene) == ["lost"] and len(scene.rows.claims) == 2
    scene.hosts["h1"] = host
    scene.run()
    assert states(scene) == ["releasing"]


def test_a_broken_template_is_tried_again_later_and_says_why() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    (template,) = scene.rows.templates.values()
    scene.run(failed(template, EffectKind.BUILD, Broken("it does not boot")))  # type: ignore[arg-type]
    (template,) = scene.rows.templates.values()
    assert template.state is TemplateState.BROKEN
    scene.run()
    assert "it does not boot" in scene.attempt().note
    scene.pass_time(POLICY.backoff(1))
    scene.run()
    (template,) = scene.rows.templates.values()
    assert template.state is TemplateState.BUILDING


def test_a_template_that_nothing_uses_makes_way() -> None:
    scene = Scene(memory=1024)
    scene.template("other")
    scene.run(Command("build", "h1", "other"))
    scene.run()
    scene.to_claimed(size=Size(1, 500))
    assert next(t for t in scene.rows.templates.values() if t.image == "other").state is TemplateState.RETIRING


def test_templates_make_way_one_after_the_other() -> None:
    scene = Scene(memory=1600)
    for image in ("one", "two"):
        scene.template(image)
        scene.run(Command("build", "h1", image))
        scene.run()
    scene.to_claimed(size=Size(1, 1000))
    states = {t.image: t.state for t in scene.rows.templates.values()}
    assert states["one"] is TemplateState.RETIRING and states["two"] is TemplateState.READY
    del scene.templates[next(which for which in scene.templates if which.image == "one")]
    scene.ended(next(t.key for t in scene.rows.templates.values() if t.image == "one"))
    scene.run()
    assert {t.image: t.state for t in scene.rows.templates.values()}["two"] is TemplateState.RETIRING


def test_operators_build_and_drop() -> None:
    scene = Scene()
    scene.run(Command("build", "h1", "slim"))
    (template,) = scene.rows.templates.values()
    assert template.state is TemplateState.BUILDING
    scene.template()
    scene.run()
    scene.run(Command("drop", "h1", "slim"))
    (template,) = scene.rows.templates.values()
    assert template.state is TemplateState.RETIRING and effect(template) is EffectKind.DROP
    scene.ended(template.key)
    scene.templates.clear()
    scene.run()
    assert not scene.rows.templates and not scene.rows.claims


def test_a_refused_pin_goes_back_to_the_gate() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.run(failed(attempt, EffectKind.PIN, Refused("no such feature")))
    assert scene.attempt().outcome == "requeued" and scene.attempt().reason == "no such feature"


def test_strangers_are_named_but_never_a_node_with_a_job() -> None:
    scene = Scene()
    scene.to_claimed()
    scene.seen("mvtest0-77", VmCondition.RUNNING)
    scene.node("mvtest0-78", NodeState.IDLE)
    scene.node("mvtest0-79", NodeState.BUSY)
    scene.seen("mvtest0-79", VmCondition.RUNNING)
    scene.observe()
    assert orphans(scene.rows, scene.world) == ["mvtest0-77", "mvtest0-78"]
    scene.hypervisor_known = False
    scene.observe()
    assert orphans(scene.rows, scene.world) == []


def test_nobody_is_revoked_while_no_host_is_in_sight() -> None:
    scene = Scene()
    scene.hosts.clear()
    scene.job(size=Size(64, 10**6))
    scene.run()
    assert scene.attempt().state is A.QUEUED


def test_a_machine_that_was_rebooted_keeps_its_rows_and_forgets_old_times() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.clock.boot, scene.clock.time = "boot-2", 5.0
    scene.effect_ended_at.clear()
    with scene.store._begin():
        scene.store._enter_boot()
    assert all(row.since == 5.0 for row in scene.rows.attempts.values())
    scene.vms.clear()
    scene.run()
    assert states(scene) == ["releasing"], "its VM did not outlive the machine"


def test_a_fenced_host_frees_its_vms_though_nobody_can_look_there() -> None:
    scene = Scene()
    scene.to_allocated()
    (vm,) = scene.all_vms()
    scene.hosts.pop("h1")
    scene.run(Command("fence", "h1"))  # nothing is lost yet: a fence is for what is
    assert scene.all_vms()[0].state is VmState.LOST and not scene.all_vms()[0].fenced
    scene.run(Command("fence", "elsewhere"))
    assert scene.all_vms()[0].state is VmState.LOST
    scene.run(Command("fence", "h1"))
    assert scene.all_vms()[0].state is VmState.RELEASING and scene.all_vms()[0].fenced
    assert vm.key in [claim.owner for claim in scene.rows.claims], "its claim is held until it is seen gone"
    scene.jobs.clear()
    scene.ended(scene.attempt().key)
    scene.clear()
    scene.run()
    scene.run()
    assert scene.all_vms()[0].state is VmState.GONE and not [c for c in scene.rows.claims if c.owner == vm.key]


def test_a_job_does_not_start_again_while_its_earlier_run_may_go_on() -> None:
    scene = Scene()
    first = scene.to_allocated()
    scene.hosts["h2"] = replace(scene.hosts["h1"], name="h2")
    scene.template(host="h2")
    scene.run(Command("build", "h2", "slim"))
    scene.run()
    host = scene.hosts.pop("h1")
    again = replace(first.job, submitted=first.job.submitted + 60, restarts=1)
    scene.job(ref=again, state=JobState.PENDING, nodes=(), gated=True, pinned=None)
    for _ in range(4):
        scene.run()
    second = scene.attempt(2)
    assert second.state is A.QUEUED and "neither back nor fenced" in second.note
    scene.hosts["h1"] = host
    scene.run()
    assert scene.all_vms(1)[0].state is VmState.RELEASING
    assert scene.attempt(2).state is A.QUEUED, "back, but its VM is not gone yet"
    scene.clear()
    scene.run()
    scene.run()
    assert scene.attempt(2).state is A.CLAIMED


def test_a_retry_ends_quarantine_and_back_off() -> None:
    scene = Scene()
    attempt = scene.to_claimed()
    scene.job(state=JobState.RUNNING, nodes=("elsewhere",))
    scene.run()
    assert scene.attempt().quarantined
    scene.job(state=JobState.PENDING, nodes=())
    scene.run()
    assert scene.attempt().quarantined, "it stays until somebody has looked at it"
    scene.run(Command("retry", key=attempt.key))
    assert not scene.attempt().quarantined
    scene.run(Command("retry", key=Key("attempt", 99)))  # long gone: nothing to do

    broken = Scene()
    broken.job()
    broken.run()
    (template,) = broken.rows.templates.values()
    broken.run(Done(template.key, EffectKind.BUILD, "building", Broken("no boot")))
    assert broken.rows.templates[1].state is TemplateState.BROKEN
    broken.run(Command("retry", key=template.key))
    assert broken.rows.templates[1].state is TemplateState.BUILDING


# --- what ends a state -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
@pytest.mark.parametrize("change", [{"held": True, "eligible": False}, {"request": None, "problem": "what is this?"}])
def test_a_job_held_or_changed_before_it_runs_gives_its_vms_back_without_penalty(
    stage: str, change: dict[str, object]
) -> None:
    scene = Scene()
    getattr(scene, stage)()
    scene.job(**change)  # type: ignore[arg-type]
    scene.run()
    attempt = scene.attempt()
    assert attempt.outcome == "requeued" and attempt.tries == 0 and not attempt.gated
    found = effect_of(attempt)
    assert scene.attempt().state is A.RECLAIMING and found and found.kind is EffectKind.GATE


def test_a_launch_that_the_scheduler_took_back_goes_to_the_gate_without_penalty() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.PENDING, nodes=())
    scene.run()
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "requeued" and attempt.tries == 0
    assert states(scene) == ["serving"], "the job still wears the pin"


def test_a_job_that_runs_elsewhere_is_quarantined_with_the_nodes_named() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(state=JobState.RUNNING, gated=False, pinned=attempt.feature)
    scene.jobs["7"] = replace(scene.jobs["7"], nodes=("elsewhere", "beyond"))
    scene.run()
    assert scene.attempt().state is A.SPAWNED
    assert "runs on elsewhere, beyond, not on its own VMs" in scene.attempt().quarantined
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="COMPLETED")
    scene.run()
    assert scene.attempt().state is A.RECLAIMING and not scene.attempt().quarantined


def test_a_job_already_completing_when_first_seen_ran() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(state=JobState.COMPLETING, gated=False, pinned=attempt.feature)
    scene.run()
    scene.run()
    assert scene.attempt().state is A.RECLAIMING and scene.attempt().outcome == "done"


def look_at(scene: Scene, time: float) -> None:
    """One pass on a look that began exactly then."""
    scene.clock.time = time
    scene.observe()
    scene.pass_time(0.01)
    scene.commit()


# --- deadlines: only a look that began after them counts --------------------------------------------


def test_a_pin_expires_only_in_a_look_begun_after_its_deadline() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature)
    look_at(scene, attempt.since + POLICY.pin_timeout)
    assert scene.attempt().state is A.SPAWNED
    look_at(scene, attempt.since + POLICY.pin_timeout + 0.5)
    assert scene.attempt().state is A.RECLAIMING and scene.attempt().tries == 1


def test_a_vm_that_was_not_made_fails_only_in_a_look_begun_after_its_deadline() -> None:
    scene = Scene()
    scene.to_claimed()
    since = scene.all_vms()[0].since
    look_at(scene, since + POLICY.spawn_timeout)
    assert states(scene) == ["planned"]
    look_at(scene, since + POLICY.spawn_timeout + 0.5)
    assert states(scene) == ["releasing", "planned"], "another is made for it"


def test_a_vm_that_is_being_made_is_let_be_until_that_has_ended() -> None:
    scene = Scene()
    scene.to_claimed()
    (vm,) = scene.all_vms()
    scene.effect_ended_at[vm.key] = float("inf")
    look_at(scene, vm.since + 4 * POLICY.spawn_timeout)
    assert states(scene) == ["planned"], "a large disk may take as long to copy"
    scene.ended(vm.key)
    look_at(scene, scene.clock.time + 1.0)
    assert states(scene) == ["releasing", "planned"]


def test_a_node_that_did_not_register_fails_its_vm_only_in_a_look_begun_after_its_deadline() -> None:
    scene = Scene()
    scene.to_spawning()
    since = scene.all_vms()[0].since
    look_at(scene, since + POLICY.spawn_timeout)
    assert states(scene) == ["starting"]
    look_at(scene, since + POLICY.spawn_timeout + 0.5)
    assert states(scene)[0] == "releasing"


@pytest.mark.parametrize("ready", [VmCondition.STARTING, VmCondition.PARKED])
def test_a_registered_node_whose_guest_is_not_all_itself_has_not_joined(ready: VmCondition) -> None:
    scene = Scene()
    scene.to_spawning()
    scene.seen(scene.all_vms()[0].name, ready)
    scene.node(scene.all_vms()[0].name)
    scene.run()
    assert states(scene) == ["starting"]


def test_a_completing_job_keeps_its_vms_until_the_limit_and_then_its_node_goes_down_first() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.COMPLETING)
    scene.run()
    since = scene.attempt().since
    look_at(scene, since + POLICY.complete_timeout)
    assert states(scene) == ["serving"]
    look_at(scene, since + POLICY.complete_timeout + 0.5)
    (vm,) = scene.all_vms()
    assert vm.state is V.RELEASING and vm.failed and not vm.forget
    found = effect_of(vm)
    assert found and found.kind is EffectKind.END


def test_a_vm_whose_job_has_left_it_is_released_with_its_node_at_once() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="COMPLETED", nodes=())
    scene.run()
    scene.run()
    (vm,) = scene.all_vms()
    assert vm.state is V.RELEASING and vm.forget and not vm.failed


# --- absence and effects ----------------------------------------------------------------------------


def test_gone_only_in_a_look_begun_after_the_destruction_ended() -> None:
    scene = Scene()
    scene.to_claimed()
    del scene.jobs["7"]
    scene.run()
    scene.run()
    scene.pass_time(5)
    ended = scene.clock.time
    scene.clear()
    look_at(scene, ended)
    assert states(scene) == ["releasing"] and len(scene.rows.claims) == 2
    look_at(scene, ended + 0.5)
    assert states(scene) == ["gone"] and len(scene.rows.claims) == 1


def test_nothing_is_reclaimed_on_a_look_that_an_effect_still_ran_through() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature, held=True, eligible=False)
    scene.run()
    scene.job(gated=True, pinned=None)
    scene.pass_time(5)
    ended = scene.clock.time
    scene.ended(attempt.key)
    look_at(scene, ended)
    assert states(scene) == ["joined"], "the look is no newer than the gate's end"
    look_at(scene, ended + 0.5)
    assert states(scene) == ["releasing"]


def test_a_pin_that_reaches_the_scheduler_late_is_taken_back_again() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(held=True, eligible=False)
    scene.run()  # given back; seen at the gate, so the VM may go
    scene.run()
    assert scene.attempt().gated and states(scene) == ["releasing"]
    scene.job(gated=False, pinned=attempt.feature)
    scene.clear()
    scene.run()
    found = effect_of(scene.attempt())
    assert scene.attempt().state is A.RECLAIMING and found and found.kind is EffectKind.GATE


# --- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Refused, Exhausted, Gone, Broken])
def test_every_definite_failure_of_making_a_vm_replaces_it_and_its_claim_is_made(error: type[Exception]) -> None:
    scene = Scene()
    scene.to_claimed()
    scene.run(failed(scene.all_vms()[0], EffectKind.CREATE, error("no")))
    assert states(scene) == ["releasing", "planned"]
    owners = [claim.owner for claim in scene.rows.claims]
    assert all(vm.key in owners for vm in scene.all_vms()), "one to be gone yet, one to come"


def test_a_failed_effect_of_another_kind_fails_no_vm() -> None:
    scene = Scene()
    scene.to_claimed()
    scene.run(failed(scene.all_vms()[0], EffectKind.RELEASE, Broken("no")))
    assert states(scene) == ["planned"]


def test_a_failed_pin_that_may_yet_work_moves_nothing_and_a_refused_one_counts_once() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.run(failed(attempt, EffectKind.PIN, Gone("not now")))
    assert scene.attempt().state is A.SPAWNED
    scene.run(failed(attempt, EffectKind.PIN, Refused("never")))
    assert scene.attempt().state is A.RECLAIMING and scene.attempt().tries == 1


def test_a_template_that_breaks_counts_one_failure_and_its_claim_stays() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    (template,) = scene.rows.templates.values()
    scene.run(Done(template.key, EffectKind.DROP, str(template.state), Broken("no")))
    assert next(iter(scene.rows.templates.values())).state is TemplateState.BUILDING
    scene.run(Done(template.key, EffectKind.BUILD, str(template.state), Broken("no")))
    (template,) = scene.rows.templates.values()
    assert template.state is TemplateState.BROKEN and template.tries == 1
    assert list(scene.rows.claims) == [Claim(template.key, "h1", Size(0, POLICY.base.memory))]


def test_without_room_for_a_replacement_the_attempt_gives_up_and_that_counts() -> None:
    scene = Scene(cpus=1)
    scene.to_claimed()
    scene.run(failed(scene.all_vms()[0], EffectKind.CREATE, Broken("no luck")))
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "requeued" and attempt.tries == 1
    assert attempt.reason == "no luck; no room for another VM" and len(scene.all_vms()) == 1


def test_a_vm_lost_before_its_job_ran_counts_as_a_failure() -> None:
    scene = Scene()
    scene.to_spawned()
    scene.hosts.clear()
    scene.run()
    assert scene.attempt().outcome == "requeued" and scene.attempt().tries == 1
    assert states(scene) == ["lost"]


def test_a_dead_vm_whose_pin_was_taken_back_is_kept_until_the_gate_is_seen() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature, held=True, eligible=False)
    scene.run()
    scene.seen(scene.all_vms()[0].name, VmCondition.DEAD)
    scene.run()
    assert states(scene) == ["joined"] and scene.all_vms()[0].failed
    scene.scheduler_known = False
    scene.run()
    assert states(scene) == ["joined"], "who cannot see the scheduler takes it for pinned"


# --- operators --------------------------------------------------------------------------------------


def test_an_operator_builds_what_is_broken_and_leaves_what_is_ready() -> None:
    scene = Scene()
    scene.template()
    scene.run(Command("drop", "h1", "slim"))
    assert not scene.rows.templates, "there is nothing to drop"
    scene.run(Command("build", "h1", "slim"))
    scene.run()
    (ready,) = scene.rows.templates.values()
    assert ready.state is TemplateState.READY
    assert scene.run(Command("build", "h1", "slim")) == []
    scene.run(Command("drop", "h1", "slim"))
    assert scene.run(Command("drop", "h1", "slim")) == []
    scene.run(Command("build", "h1", "slim"))
    assert next(iter(scene.rows.templates.values())).state is TemplateState.RETIRING


def test_a_node_down_before_its_guest_is_ready_says_why_it_failed() -> None:
    scene = Scene()
    scene.to_spawning()
    vm = scene.all_vms()[0]
    scene.node(vm.name, NodeState.DOWN)
    scene.run()
    assert scene.all_vms()[0].failed and "came up down" in scene.all_vms()[0].reason


def test_a_host_that_was_out_of_reach_for_a_moment_costs_its_jobs_nothing() -> None:
    scene = Scene()
    scene.to_allocated()
    host = scene.hosts.pop("h1")
    scene.run()
    assert states(scene) == ["lost"]
    scene.hosts["h1"] = host
    scene.run()
    assert states(scene) == ["serving"] and not scene.all_vms()[0].failed


def test_a_job_that_starts_just_as_its_host_gets_out_of_reach_runs_on_its_own_vms() -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    scene.hosts.clear()
    scene.job(state=JobState.RUNNING, nodes=tuple(vm.name for vm in scene.all_vms()), gated=False, pinned="mv_1")
    scene.run()
    assert scene.attempt(attempt.id).state is A.ALLOCATED and states(scene) == ["lost"]


# --- the end ----------------------------------------------------------------------------------------


def show(scene: Scene, **more: object) -> None:
    """What the scheduler shows of job 7 is now this."""
    scene.jobs["7"] = replace(scene.jobs["7"], **more)  # type: ignore[arg-type]


def restarted(scene: Scene, **more: object) -> None:
    """The scheduler started job 7 over, and shows it so."""
    ref = scene.jobs["7"].ref
    show(scene, ref=replace(ref, restarts=ref.restarts + 1, submitted=ref.submitted + 60), **more)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED])
def test_a_restarted_job_keeps_our_nodes_until_the_limit_and_then_they_go_down_first(state: JobState) -> None:
    scene = Scene()
    scene.to_allocated()
    restarted(scene, state=state)
    scene.run()
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "requeued"
    look_at(scene, attempt.since + POLICY.complete_timeout)
    assert states(scene) == ["serving"] and scene.attempt().outcome == "requeued"
    look_at(scene, attempt.since + POLICY.complete_timeout + 0.5)
    (vm,) = scene.all_vms()
    assert vm.state is V.RELEASING and vm.failed and not vm.forget, "the job is still on its node"
    show(scene, state=JobState.PENDING, nodes=(), gated=True, pinned=None)
    scene.run()
    scene.clear()
    scene.run()
    assert scene.attempt().state is A.REQUEUED


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING])
def test_a_restarted_job_that_is_elsewhere_releases_our_nodes_at_once(state: JobState) -> None:
    scene = Scene()
    scene.to_allocated()
    restarted(scene, state=state, nodes=("elsewhere",))
    scene.run()
    scene.run()
    (vm,) = scene.all_vms()
    assert vm.state is V.RELEASING and vm.forget and not vm.failed


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED])
def test_a_job_that_started_after_all_keeps_its_vm_for_as_long_as_it_runs(state: JobState) -> None:
    scene = Scene()
    attempt = scene.to_spawned()
    show(scene, gated=False, pinned=attempt.feature)
    scene.pass_time(POLICY.pin_timeout)
    scene.run()
    assert scene.attempt().outcome == "requeued"
    show(scene, state=state, nodes=(scene.all_vms()[0].name,))
    scene.run()
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "done" and effect(attempt) is None
    scene.pass_time(POLICY.complete_timeout * 2)
    assert scene.run() == [], "it has all the time that the scheduler gives it"
    assert states(scene) == ["joined"]


def test_a_failed_attempt_waits_for_its_jobs_cancellation() -> None:
    scene = Scene(replace(POLICY, replacements=0, attempts=1))
    scene.to_claimed()
    (vm,) = scene.all_vms()
    scene.run(failed(vm, EffectKind.CREATE, Broken("no luck")))
    assert scene.attempt().outcome == "failed" and scene.attempt().reason.endswith("1 attempts: no luck")
    scene.clear()
    scene.run()
    scene.run()
    assert states(scene) == ["gone"] and scene.attempt().state is A.RECLAIMING
    show(scene, state=JobState.RUNNING, nodes=(vm.name,))
    scene.run()
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "failed", "not to be let run after all"
    assert effect(attempt) is EffectKind.REVOKE
    show(scene, state=JobState.ENDED, result="CANCELLED", nodes=())
    scene.run()
    assert scene.attempt().state is A.FAILED


def test_a_failed_attempt_keeps_its_vms_until_its_job_is_cancelled() -> None:
    scene = Scene(replace(POLICY, replacements=0, attempts=1))
    scene.to_claimed(nodes=2)
    one, other = scene.all_vms()
    scene.run(failed(one, EffectKind.CREATE, Broken("no luck")))
    scene.run()
    assert scene.attempt().outcome == "failed" and states(scene) == ["releasing", "planned"]
    show(scene, state=JobState.RUNNING, nodes=(other.name,))
    scene.run()
    assert scene.attempt().outcome == "failed" and states(scene) == ["releasing", "planned"]
    show(scene, state=JobState.ENDED, result="CANCELLED", nodes=())
    scene.run()
    assert states(scene) == ["releasing", "releasing"]


def completing() -> Scene:
    scene = Scene()
    scene.to_allocated()
    show(scene, state=JobState.COMPLETING)
    scene.run()
    assert scene.attempt().outcome == "done" and scene.attempt().reason == "its job is completing"
    return scene


def test_an_end_without_a_result_teaches_nothing() -> None:
    scene = completing()
    show(scene, state=JobState.ENDED, result="", nodes=())
    scene.run()
    assert scene.attempt().reason == "its job is completing" and states(scene) == ["releasing"]


def test_a_completing_job_that_vanishes_is_done() -> None:
    scene = completing()
    del scene.jobs["7"]
    scene.run()
    assert states(scene) == ["releasing"]
    scene.clear()
    scene.run()
    assert scene.attempt().state is A.DONE and scene.attempt().reason == "its job is completing"


def test_the_gate_of_a_job_requeued_while_completing_is_left_to_its_next_attempt() -> None:
    scene = completing()
    restarted(scene, state=JobState.PENDING, nodes=(), eligible=False, gated=False)
    scene.run()
    first, second = scene.attempt(1), scene.attempt(2)
    assert first.outcome == "requeued" and first.gated and effect(first) is None
    assert states(scene) == ["serving"], "the job still wears its pin"
    assert effect(second) is EffectKind.GATE
    show(scene, gated=True, pinned=None)
    scene.run()
    assert states(scene) == ["releasing"]


def test_only_an_attempt_that_ran_learns_how_its_job_ended() -> None:
    scene = Scene()
    scene.to_claimed()
    job = scene.jobs.pop("7")
    scene.run()
    assert scene.attempt().outcome == "cancelled" and "no longer shows" in scene.attempt().reason
    scene.jobs["7"] = replace(job, state=JobState.ENDED, result="TIMEOUT")
    scene.run()
    assert scene.attempt().outcome == "cancelled" and "no longer shows" in scene.attempt().reason


# --- replacing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CloneKind.INSTANT, CloneKind.FULL])
def test_a_vm_is_replaced_on_a_host_that_can_make_it_however_empty_the_others_are(kind: CloneKind) -> None:
    scene = Scene(replace(POLICY, kind=kind))
    attempt = scene.to_claimed()
    assert attempt.state is A.CLAIMED
    large = replace(scene.hosts["h1"], capacity=Size(64, 65536, 65536))
    other = CloneKind.FULL if kind is CloneKind.INSTANT else CloneKind.INSTANT
    scene.hosts["h2"] = replace(large, name="h2", abilities=frozenset({other.value}))
    scene.hosts["h3"] = replace(large, name="h3")
    scene.run(Command("build", "h2", "slim"), Command("build", "h3", "slim"))
    scene.run(failed(scene.all_vms()[0], EffectKind.CREATE, Broken("no luck")))
    # A template on h3 is only being built; who boots from the image needs none.
    assert [vm.host for vm in scene.all_vms()] == ["h1", "h1" if kind is CloneKind.INSTANT else "h3"]
    assert scene.attempt().replaced == 1


def test_an_instant_clone_is_replaced_on_the_emptiest_host_with_a_ready_template_of_its_image() -> None:
    scene = Scene()
    scene.to_claimed()
    large = replace(scene.hosts["h1"], capacity=Size(64, 65536, 65536))
    for name, image in (("h2", "slim"), ("h3", "other")):
        scene.hosts[name] = replace(large, name=name, capacity=Size(64 if name == "h2" else 128, 65536, 65536))
        scene.template(image, host=name)
        scene.run(Command("build", name, image))
    scene.run()
    scene.run(failed(scene.all_vms()[0], EffectKind.CREATE, Broken("no luck")))
    assert [vm.host for vm in scene.all_vms()] == ["h1", "h2"]


def test_replacements_are_counted_by_vm_and_the_last_failure_is_the_reason() -> None:
    scene = Scene(replace(POLICY, replacements=3))
    scene.to_claimed(nodes=2)
    one, other = scene.all_vms()
    scene.run(failed(one, EffectKind.CREATE, Broken("first")), failed(other, EffectKind.CREATE, Broken("second")))
    assert scene.attempt().replaced == 2 and states(scene) == ["releasing"] * 2 + ["planned"] * 2
    one, other = scene.all_vms()[2:]
    scene.run(failed(one, EffectKind.CREATE, Broken("third")), failed(other, EffectKind.CREATE, Broken("fourth")))
    attempt = scene.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "requeued" and attempt.tries == 1
    assert attempt.reason == "fourth", "three may be replaced, not four"


@pytest.mark.parametrize("fault", ["it breaks", "it wants what the tables forbid"])
def test_a_fault_in_deciding_about_one_record_costs_that_record_only(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    scene = Scene()
    scene.job("8")
    scene.to_claimed()
    first, second = scene.store.vms_of([1, 2])
    sound = planner.step_vm

    def unsound(draft: PlanState, vm_id: int, *rest: object) -> None:
        if vm_id != first.id:
            return sound(draft, vm_id, *rest)  # type: ignore[arg-type]
        if fault == "it breaks":
            raise KeyError("x")
        draft.move(Change(replace(draft.vms[vm_id], state=V.SERVING), Event.RUNS))

    monkeypatch.setattr(planner, "step_vm", unsound)
    for vm in (first, second):
        scene.seen(vm.name, VmCondition.PARKED)
    scene.run()
    scene.run()
    first, second = scene.store.vms_of([1, 2])
    assert first.state is V.PLANNED and first.quarantined.startswith("a fault of Multiverse")
    assert second.state is V.STARTING
    monkeypatch.undo()
    scene.run(Command("retry", key=first.key))
    assert scene.store.vms_of([1, 2])[0].state is V.STARTING, "mended and retried, it goes on"


def test_a_quarantined_vm_goes_when_its_job_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.to_allocated()
    monkeypatch.setattr(planner, "step_vm", lambda *_: {}["x"])
    scene.run()
    (vm,) = scene.all_vms()
    assert vm.quarantined
    monkeypatch.undo()
    scene.run()
    assert scene.all_vms()[0].state is V.SERVING, "it serves on, and nothing is done to it"
    scene.jobs["7"] = replace(scene.jobs["7"], state=JobState.ENDED, result="COMPLETED")
    scene.run()
    scene.clear()
    scene.run()
    scene.run()
    assert not scene.rows.vms and not scene.rows.attempts


def test_a_fault_in_admitting_one_job_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.template()
    scene.job("7")
    scene.job("8")
    sound = admission.choose_clones

    def unsound(draft: PlanState, attempt: Attempt, *rest: object) -> object:
        return {}["x"] if attempt.job.job_id == "7" else sound(draft, attempt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(admission, "choose_clones", unsound)
    for _ in range(3):
        scene.run()
    by_job = {attempt.job.job_id: attempt for attempt in scene.rows.attempts.values()}
    assert by_job["7"].state is A.QUEUED and by_job["7"].quarantined.startswith("a fault of Multiverse")
    assert by_job["8"].state is A.CLAIMED


def test_a_job_that_is_changed_before_it_is_refused_is_not_refused() -> None:
    """Troubled 1600: the first try to cancel it hung, its user made it smaller, and the second try cancelled it."""
    scene = Scene()
    scene.template()
    scene.job(size=Size(1, 1 << 20))
    scene.run()
    assert scene.attempt().state is A.RECLAIMING and scene.attempt().outcome == "revoked"
    scene.job(request=Request(1, Size(1, 100)))
    scene.run()
    scene.run()
    assert scene.attempt(1).state is A.REQUEUED
    assert scene.attempt(2).state is A.CLAIMED
