"""The planner's decisions, one by one, with a real store and observations that each test sets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core import planner
from multiverse.core.admission import admit
from multiverse.core.changes import mark_changes, orphans
from multiverse.core.context import Context
from multiverse.core.errors import Broken, Exhausted, Gone, Refused, Unknown
from multiverse.core.machines.tables import TABLES, effect_of
from multiverse.core.model.basics import CloneKind, Key, Size
from multiverse.core.model.host import Claim
from multiverse.core.model.job import Attempt, AttemptState, JobRef, JobState, Node, NodeState, Request
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import TemplateState, VmCondition, VmState
from multiverse.core.state import State
from multiverse.core.transition import Change, Command, Done, EffectKind, Event
from multiverse_lab.simulation.promises import orphans_by_looking_at_all
from tests.unit.planner_harness import POLICY, PlannerHarness, failed
from tests.unit.rows import SOURCE

A, V = AttemptState, VmState


def states(harness: PlannerHarness) -> list[str]:
    return [str(vm.state) for vm in harness.all_vms()]


def effect(row: object) -> EffectKind | None:
    found = effect_of(row)  # type: ignore[arg-type]
    return found.kind if found else None


def test_a_job_makes_its_template_first_and_waits_without_claims_of_its_own() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    assert harness.attempt().state is A.QUEUED
    (template,) = harness.rows.templates.values()
    assert template.state is TemplateState.BUILDING and effect(template) is EffectKind.BUILD
    assert [claim.owner for claim in harness.rows.claims] == [template.key]
    harness.ended(template.key)
    harness.run()
    assert harness.attempt().state is A.QUEUED, "no template is observed yet"
    harness.template()
    harness.run()
    assert harness.attempt().state is A.CLAIMED


def test_admission_claims_before_anything_exists() -> None:
    harness = PlannerHarness()
    attempt = harness.to_claimed(size=Size(2, 1000))
    (vm,) = harness.all_vms()
    assert attempt.state is A.CLAIMED and vm.state is V.PLANNED and effect(vm) is EffectKind.CREATE
    claim = next(c for c in harness.rows.claims if c.owner == vm.key)
    assert claim.size.cpus == 2 and claim.size.memory >= vm.size.memory >= 1000
    assert vm.name == "mvtest0-1" and vm.address == "10.9.1.1/16"


def test_a_job_from_its_submission_to_its_end() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawning()
    assert attempt.state is A.SPAWNING and states(harness) == ["starting"]
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.RUNNING)
    harness.ended(vm.key)
    harness.run()
    assert harness.attempt().state is A.SPAWNING, "no node yet"
    harness.node(vm.name)
    harness.run()
    assert harness.attempt().state is A.SPAWNED and effect(harness.attempt()) is EffectKind.PIN
    harness.jobs["7"] = harness.jobs["7"]._replace(
        state=JobState.RUNNING, nodes=(vm.name,), gated=False, pinned=attempt.feature
    )
    harness.run()
    assert harness.attempt().state is A.ALLOCATED and states(harness) == ["serving"]
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.COMPLETING, result="COMPLETED")
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and states(harness) == ["serving"], "a completing job keeps its VM"
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED)
    harness.run()
    assert states(harness) == ["releasing"]
    harness.clear()
    harness.run()
    assert harness.attempt().state is A.DONE and states(harness) == ["gone"]
    assert not harness.rows.attempts and not harness.rows.vms
    assert [c.owner.kind for c in harness.rows.claims] == ["template"]


def test_a_gang_is_admitted_whole_or_not_at_all() -> None:
    harness = PlannerHarness(replace(POLICY, provisioning=8), cpus=3)
    harness.to_claimed(nodes=4)
    assert harness.attempt().state is A.REVOKING, "four CPUs never fit on three"
    harness = PlannerHarness(cpus=4)
    harness.to_claimed(nodes=4)
    assert states(harness) == ["planned"] * 4
    for vm in harness.all_vms()[:3]:
        harness.seen(vm.name, VmCondition.PARKED)
    harness.run()
    assert states(harness) == ["parked"] * 3 + ["planned"] and harness.attempt().state is A.CLAIMED
    harness.seen(harness.all_vms()[3].name, VmCondition.PARKED)
    harness.run()
    assert states(harness) == ["starting"] * 4


def test_what_fits_on_no_host_is_revoked_with_what_would_fit() -> None:
    harness = PlannerHarness(cpus=4, memory=4096)
    harness.job(size=Size(5, 100))
    harness.run()
    attempt = harness.attempt()
    assert attempt.state is A.REVOKING and attempt.outcome == "revoked"
    assert "5 CPUs" in text_of(attempt.reason) and "the largest that fits is 4 CPUs" in text_of(attempt.reason)
    assert effect(attempt) is EffectKind.REVOKE
    harness.run()
    assert harness.attempt().state is A.REVOKING, "not over before the scheduler says so"
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="CANCELLED")
    harness.ended(attempt.key)
    harness.run()
    assert harness.attempt().state is A.REVOKED


def test_the_first_job_that_waits_for_capacity_blocks_those_behind_it() -> None:
    harness = PlannerHarness(cpus=4)
    harness.to_claimed(size=Size(2, 100))
    harness.job("8", size=Size(4, 100), rank=1)
    harness.jobs["8"] = harness.jobs["8"]._replace(ref=JobRef("8", 501))
    harness.job("9", rank=2)
    harness.jobs["9"] = harness.jobs["9"]._replace(ref=JobRef("9", 502))
    for _ in range(5):
        harness.run()
    found = {a.job.job_id: a for a in harness.rows.attempts.values()}
    assert found["8"].state is found["9"].state is A.QUEUED
    assert "hosts are full" in harness.reasons["8"] and harness.reasons["9"] == harness.reasons["8"]


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
@pytest.mark.parametrize("gone", [True, False])
def test_a_job_cancelled_on_the_way_releases_its_vms(stage: str, gone: bool) -> None:
    harness = PlannerHarness()
    getattr(harness, stage)()
    if gone:
        del harness.jobs["7"]
    else:
        harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="CANCELLED")
    harness.run()
    harness.run()
    # Whether a pinned job that is no longer shown has run is not known.
    outcome = "done" if stage == "to_spawned" and gone else "cancelled"
    assert harness.attempt().state is A.RECLAIMING and harness.attempt().outcome == outcome
    assert states(harness) == ["releasing"]
    harness.clear()
    harness.run()
    assert str(harness.attempt().state) == outcome


def test_unknown_is_not_absent() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.scheduler_known = harness.hypervisor_known = False
    harness.unknown_since = harness.clock.time
    harness.jobs.clear()
    harness.vms.clear()
    harness.nodes.clear()
    for _ in range(3):
        assert harness.run() == []
    harness.pass_time(POLICY.silence)
    harness.run()
    assert states(harness) == ["lost"], "its source has been silent for too long"
    assert harness.attempt().state is A.ALLOCATED and len(harness.rows.claims) == 2
    harness.pass_time(10_000)
    assert harness.run() == []


def test_absence_counts_only_in_an_observation_begun_after_the_last_effect() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    attempt = harness.attempt()
    harness.observe()  # the observation begins ...
    harness.pass_time(1)
    harness.ended(attempt.key)  # ... and the pin ends after that
    del harness.jobs["7"]
    harness.world = replace(harness.world, effect_ended_at=dict(harness.effect_ended_at))
    harness.commit()
    assert harness.attempt().state is A.SPAWNED
    harness.run()
    assert harness.attempt().state is A.RECLAIMING


def test_a_failed_vm_is_replaced_within_the_attempt_and_then_no_more() -> None:
    harness = PlannerHarness(replace(POLICY, replacements=2, attempts=2, retry_base=0.0))
    harness.to_claimed()
    for count in (2, 3):
        vm = harness.all_vms()[-1]
        harness.run(failed(vm, EffectKind.CREATE, Gone("no luck")))
        assert len(harness.all_vms()) == count and harness.attempt().state is A.CLAIMED
    harness.run(failed(harness.all_vms()[-1], EffectKind.CREATE, Gone("no luck")))
    attempt = harness.attempt()
    assert attempt.state is A.RETURNING and attempt.outcome == "requeued" and attempt.tries == 1
    harness.clear()
    for _ in range(3):
        harness.run()
    assert harness.attempt().state is A.REQUEUED
    second = harness.attempt(2)
    assert second.state is A.CLAIMED and second.tries == 1, "the same job, another attempt"
    for _ in range(3):
        harness.run(failed(harness.all_vms(2)[-1], EffectKind.CREATE, Gone("no luck")))
    assert harness.attempt(2).outcome == "failed" and "2 attempts: no luck" in text_of(harness.attempt(2).reason)
    assert effect(harness.attempt(2)) is EffectKind.REVOKE, "given up, and the user is told"


def test_a_gang_whose_vms_have_started_is_given_up_as_a_whole_when_one_fails() -> None:
    """The VMs of a gang know each other by name: the others would not know a VM that is made later."""
    harness = PlannerHarness(replace(POLICY, retry_base=0.0))
    harness.to_claimed(nodes=3)
    harness.run(failed(harness.all_vms()[1], EffectKind.CREATE, Gone("no luck")))
    assert len(harness.all_vms()) == 4 and harness.attempt().state is A.CLAIMED, "none has started yet"
    for vm in harness.all_vms():
        harness.seen(vm.name, VmCondition.PARKED)
        harness.ended(vm.key)
    harness.run()
    starting = [vm for vm in harness.all_vms() if vm.state is V.STARTING]
    assert harness.attempt().state is A.SPAWNING and len(starting) == 3
    harness.run(failed(starting[0], EffectKind.START, Gone("no luck")))
    attempt = harness.attempt()
    assert (attempt.state, attempt.outcome, attempt.tries) == (A.RETURNING, "requeued", 1)
    assert len(harness.all_vms()) == 4
    harness.run()
    harness.ended(attempt.key)
    harness.run()
    assert sorted(states(harness)) == ["releasing", "releasing", "removing", "removing"], "two had failed"


def test_an_unknown_end_of_an_effect_moves_nothing() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    assert harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Unknown("no reply"))) == []


def test_a_late_result_about_a_state_that_was_left_since_moves_nothing() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    late = failed(harness.all_vms()[0], EffectKind.CREATE, Broken("too late"))
    harness.seen(harness.all_vms()[0].name, VmCondition.PARKED)
    harness.run()
    assert states(harness) == ["starting"]
    harness.run(late)
    assert states(harness) == ["starting"]


def test_a_pin_that_starts_nothing_goes_back_to_the_gate_and_backs_off_with_slurms_reason() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature, reason="QOSMaxJobsPerUserLimit")
    harness.pass_time(POLICY.pin_timeout)
    harness.run()
    attempt = harness.attempt()
    assert attempt.outcome == "requeued" and "QOSMaxJobsPerUserLimit" in text_of(attempt.reason)
    assert effect(attempt) is EffectKind.GATE and states(harness) == ["joined"], "the gate comes before the node goes"
    harness.job(gated=True, pinned=None)
    harness.ended(attempt.key)
    harness.run()
    assert states(harness) == ["releasing"]
    harness.clear()
    harness.run()
    assert harness.attempt().state is A.REQUEUED
    assert harness.attempt(2).not_before > harness.clock.time
    assert "QOSMaxJobsPerUserLimit" in text_of(harness.attempt(2).note), "its user is told"


def test_a_pinned_job_that_slurm_holds_back_gives_its_vm_up_soon() -> None:
    """Not at once: what Slurm says may still be about the gate."""
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature, eligible=False, reason="AssocGrpCPUMinutesLimit")
    harness.pass_time(POLICY.held_timeout / 2)
    harness.run()
    assert harness.attempt().state is A.SPAWNED
    harness.pass_time(POLICY.held_timeout / 2)
    harness.run()
    assert harness.attempt().outcome == "requeued" and "AssocGrpCPUMinutesLimit" in text_of(harness.attempt().reason)


def test_a_pin_that_is_on_its_way_is_waited_for_whatever_held_the_job_back() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    harness.job(eligible=False)
    harness.pass_time(POLICY.pin_timeout - 2)
    harness.run()
    assert harness.attempt().state is A.SPAWNED


def test_a_job_that_starts_just_as_its_pin_is_taken_back_keeps_its_vm() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature)
    harness.pass_time(POLICY.pin_timeout)
    harness.run()
    name = harness.all_vms()[0].name
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.RUNNING, nodes=(name,))
    harness.ended(attempt.key)
    for _ in range(3):
        harness.run()
    assert harness.attempt().outcome == "done" and states(harness) == ["joined"]
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED")
    harness.run()
    assert states(harness) == ["releasing"]


def test_a_vm_that_dies_before_the_job_runs_is_kept_until_the_job_is_off_it() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature)
    harness.seen(harness.all_vms()[0].name, VmCondition.DEAD)
    harness.run()
    harness.run()
    assert harness.attempt().outcome == "requeued" and states(harness) == ["dead"]
    harness.job(gated=True, pinned=None)
    harness.ended(attempt.key)
    harness.run()
    assert states(harness) == ["removing"]


def test_a_vm_that_dies_under_its_job_goes_down_and_the_scheduler_decides() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.seen(harness.all_vms()[0].name, VmCondition.DEAD)
    harness.run()
    assert harness.attempt().state is A.ALLOCATED and states(harness) == ["ending"]
    assert effect(harness.all_vms()[0]) is EffectKind.END, "its node is set DOWN, and stays while the job is on it"
    harness.ended(harness.all_vms()[0].key)
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.COMPLETING)
    harness.run()
    assert effect(harness.all_vms()[0]) is EffectKind.END
    ref = harness.jobs["7"].ref
    harness.jobs["7"] = harness.jobs["7"]._replace(
        state=JobState.PENDING, ref=replace(ref, restarts=1), nodes=(), eligible=False
    )
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and harness.attempt().outcome == "requeued"
    assert effect(harness.all_vms()[0]) is EffectKind.REMOVE
    second = harness.attempt(2)
    assert second.state is A.UNGATED and effect(second) is EffectKind.GATE, "it has the old pin still"
    harness.job(gated=True, pinned=None)
    harness.clear()
    harness.run()
    assert harness.attempt().state is A.REQUEUED


def test_a_job_that_was_completing_when_it_was_requeued_is_told_so() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.COMPLETING)
    harness.run()
    assert harness.attempt().outcome == "done"
    ref = replace(harness.jobs["7"].ref, restarts=1)
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.PENDING, ref=ref, nodes=(), eligible=False)
    harness.run()
    assert harness.attempt().outcome == "requeued" and "requeued" in text_of(harness.attempt().reason)


def test_an_ended_attempt_says_how_its_job_ended() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.COMPLETING)
    harness.run()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="TIMEOUT", nodes=())
    harness.run()
    harness.clear()
    harness.run()
    assert harness.attempt().state is A.DONE and text_of(harness.attempt().reason) == "TIMEOUT"


def test_a_held_job_gives_its_vms_back_and_waits_without_penalty() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    harness.job(held=True, eligible=False)
    harness.run()
    assert harness.attempt().outcome == "requeued"
    harness.run()
    harness.clear()
    harness.run()
    second = harness.attempt(2)
    assert second.state is A.QUEUED and second.tries == 0
    harness.run()
    assert harness.attempt(2).state is A.QUEUED
    harness.job(held=False, eligible=True)
    harness.run()
    assert harness.attempt(2).state is A.CLAIMED


def test_a_changed_request_while_waiting_is_taken_as_it_is_now() -> None:
    harness = PlannerHarness(cpus=1)
    harness.to_claimed()
    harness.job("8")
    harness.jobs["8"] = harness.jobs["8"]._replace(ref=JobRef("8", 501), rank=1)
    harness.run()
    request = replace(harness.jobs["8"].request, size=Size(1, 700))  # type: ignore[type-var]
    harness.job("8", request=request)
    harness.run()
    assert harness.attempt(2).request == request


def test_a_job_id_that_comes_again_is_another_job() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.jobs["7"] = harness.jobs["7"]._replace(ref=JobRef("7", 900), state=JobState.PENDING, nodes=(), pinned=None)
    harness.jobs["7"] = harness.jobs["7"]._replace(gated=True)
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and harness.attempt().outcome == "done"
    assert harness.attempt(2).job == JobRef("7", 900)


@pytest.mark.parametrize("status", [JobState.RUNNING, JobState.COMPLETING])
def test_a_job_that_began_on_a_vm_that_has_died_is_left_to_the_scheduler(status: JobState) -> None:
    """As after an older database was restored: the row does not know that the job was pinned."""
    harness = PlannerHarness()
    harness.to_spawning()
    (vm,) = harness.all_vms()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=status, nodes=(vm.name,))
    harness.seen(vm.name, VmCondition.DEAD)
    for _ in range(3):
        harness.run()
    assert not text_of(harness.attempt().quarantined)
    assert [each.state for each in harness.all_vms()] == [V.ENDING]
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="NODE_FAIL")
    harness.run()
    assert harness.attempt().state is A.RECLAIMING


def test_a_job_that_is_completing_elsewhere_is_waited_for() -> None:
    """The database is older than the VM on which it ran, and that VM is gone: its run is over, whatever is shown."""
    harness = PlannerHarness()
    harness.to_claimed()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.COMPLETING, nodes=("elsewhere",))
    harness.run()
    assert not text_of(harness.attempt().quarantined) and harness.attempt().state is A.CLAIMED
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="NODE_FAIL", nodes=())
    harness.run()
    assert harness.attempt().state is A.RECLAIMING


def test_an_impossible_observation_quarantines_one_attempt_and_stops_no_other() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.RUNNING, nodes=("elsewhere",))
    harness.job("8")
    harness.jobs["8"] = harness.jobs["8"]._replace(ref=JobRef("8", 501))
    harness.run()
    assert "before it was given its nodes" in text_of(harness.attempt().quarantined)
    assert effect(harness.attempt()) is None
    assert harness.attempt(2).state is A.CLAIMED
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED")
    for _ in range(3):
        harness.run()
        harness.clear()
    assert harness.attempt().state in (A.CANCELLED, A.DONE), "the job's end ends the quarantine"


def test_a_node_that_comes_up_down_fails_its_vm() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    harness.node(harness.all_vms()[0].name, NodeState.DOWN)
    harness.run()
    assert states(harness) == ["ending"]


def test_a_vm_is_gone_when_both_sides_show_neither_vm_nor_node_after_its_destruction() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    del harness.jobs["7"]
    vm = harness.all_vms()[0]
    for _ in range(3):
        harness.run()
    assert states(harness) == ["releasing"], "no destruction has ended yet"
    harness.ended(vm.key)
    harness.node(vm.name)
    harness.run()
    assert states(harness) == ["deleting"], "the scheduler still shows its node"
    harness.nodes.clear()
    harness.run()
    assert states(harness) == ["gone"] and harness.attempt().state is A.CANCELLED


def test_the_claims_on_an_unreachable_host_are_kept() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    host = harness.hosts.pop("h1")
    harness.vms.clear()
    harness.run()
    assert states(harness) == ["lost"] and len(harness.rows.claims) == 2
    harness.hosts["h1"] = host
    harness.run()
    assert states(harness) == ["ending"]


def test_a_broken_template_is_tried_again_later_and_says_why() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    (template,) = harness.rows.templates.values()
    harness.run(failed(template, EffectKind.BUILD, Broken("it does not boot")))  # type: ignore[arg-type]
    (template,) = harness.rows.templates.values()
    assert template.state is TemplateState.BROKEN
    harness.run()
    assert "it does not boot" in harness.reasons["7"]
    harness.pass_time(POLICY.backoff(1))
    harness.run()
    (template,) = harness.rows.templates.values()
    assert template.state is TemplateState.BUILDING


def test_an_unused_template_is_retired_when_a_job_needs_its_memory() -> None:
    harness = PlannerHarness(memory=1024)
    harness.template("other")
    harness.run(Command("build", "h1", "other"))
    harness.run()
    harness.to_claimed(size=Size(1, 500))
    assert next(t for t in harness.rows.templates.values() if t.image == "other").state is TemplateState.RETIRING


def test_unused_templates_are_retired_one_after_the_other() -> None:
    harness = PlannerHarness(memory=1600)
    for image in ("one", "two"):
        harness.template(image)
        harness.run(Command("build", "h1", image))
        harness.run()
    harness.to_claimed(size=Size(1, 1000))
    states = {t.image: t.state for t in harness.rows.templates.values()}
    assert states["one"] is TemplateState.RETIRING and states["two"] is TemplateState.READY
    del harness.templates[next(which for which in harness.templates if which.image == "one")]
    harness.ended(next(t.key for t in harness.rows.templates.values() if t.image == "one"))
    harness.run()
    assert {t.image: t.state for t in harness.rows.templates.values()}["two"] is TemplateState.RETIRING


def test_operators_build_and_drop() -> None:
    harness = PlannerHarness()
    harness.run(Command("build", "h1", "slim"))
    (template,) = harness.rows.templates.values()
    assert template.state is TemplateState.BUILDING
    harness.template()
    harness.run()
    harness.run(Command("drop", "h1", "slim"))
    (template,) = harness.rows.templates.values()
    assert template.state is TemplateState.RETIRING and effect(template) is EffectKind.DROP
    harness.ended(template.key)
    harness.templates.clear()
    harness.run()
    assert not harness.rows.templates and not harness.rows.claims


def test_a_refused_pin_goes_back_to_the_gate() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.run(failed(attempt, EffectKind.PIN, Refused("no such feature")))
    assert harness.attempt().outcome == "requeued" and text_of(harness.attempt().reason) == "no such feature"


def test_orphans_are_named_with_their_source_but_never_a_node_with_a_job() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.seen("mvtest0-77", VmCondition.RUNNING)
    harness.node("mvtest0-78", NodeState.IDLE)
    harness.node("mvtest0-79", NodeState.BUSY)
    harness.seen("mvtest0-79", VmCondition.RUNNING)
    harness.nodes["mvtest0-80"] = Node("mvtest0-80", NodeState.IDLE, ("vm", "mv_9"))
    harness.job("9", gated=False, pinned="mv_9", eligible=False)
    harness.observe()
    mark_changes(harness.state, harness.world, harness.policy)
    assert orphans(harness.state, harness.world) == [("mvtest0-77", SOURCE), ("mvtest0-78", "")]
    assert orphans(harness.state, harness.world) == orphans_by_looking_at_all(harness.state, harness.world)
    harness.scheduler_known = False
    harness.observe()
    assert orphans(harness.state, harness.world) == []


def test_no_job_is_revoked_while_no_host_is_in_sight() -> None:
    harness = PlannerHarness()
    harness.hosts.clear()
    harness.job(size=Size(64, 10**6))
    harness.run()
    assert harness.attempt().state is A.QUEUED


def test_a_machine_that_was_rebooted_keeps_its_rows_and_forgets_old_times() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.clock.boot, harness.clock.time = "boot-2", 5.0
    harness.effect_ended_at.clear()
    with harness.store._begin():
        harness.store._enter_boot()
    harness.store._forget()
    harness.state = State(harness.rows, TABLES)
    assert all(row.since == 5.0 for row in harness.rows.attempts.values())
    harness.vms.clear()
    harness.run()
    assert states(harness) == ["ending"], "its VM did not outlive the machine"


def test_fencing_a_host_ends_its_vms_and_their_claims_are_released_without_an_observation_of_the_host() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    (vm,) = harness.all_vms()
    harness.run(Command("fence", "h1"))
    assert states(harness) == ["serving"] and not harness.state.is_fenced("h1"), "a host in sight is not off"
    host = harness.hosts.pop("h1")
    harness.run(Command("fence", "elsewhere"))
    assert states(harness) == ["lost"] and not harness.state.is_fenced("h1")
    harness.run(Command("fence", "h1"))
    assert states(harness) == ["ending"] and harness.state.is_fenced("h1")
    assert vm.key in [claim.owner for claim in harness.rows.claims], "its claim is held until its end is recorded"
    harness.jobs.clear()
    harness.ended(harness.attempt().key)
    harness.clear()
    harness.run()
    harness.run()
    assert states(harness) == ["gone"] and not [c for c in harness.rows.claims if c.owner == vm.key]
    harness.hosts["h1"] = host
    harness.run()
    assert not harness.state.is_fenced("h1"), "a host that is observed again is not fenced"


def test_a_job_does_not_start_again_while_its_earlier_run_may_go_on() -> None:
    harness = PlannerHarness()
    first = harness.to_allocated()
    harness.hosts["h2"] = replace(harness.hosts["h1"], name="h2")
    harness.template(host="h2")
    harness.run(Command("build", "h2", "slim"))
    harness.run()
    host = harness.hosts.pop("h1")
    again = replace(first.job, submitted=first.job.submitted + 60, restarts=1)
    harness.job(ref=again, state=JobState.PENDING, nodes=(), gated=True, pinned=None)
    for _ in range(4):
        harness.run()
    second = harness.attempt(2)
    assert second.state is A.QUEUED and "neither back nor fenced" in harness.reasons["7"]
    harness.hosts["h1"] = host
    harness.run()
    assert harness.all_vms(1)[0].state is VmState.ENDING
    assert harness.attempt(2).state is A.QUEUED, "back, but its VM is not gone yet"
    harness.clear()
    harness.run()
    harness.run()
    assert harness.attempt(2).state is A.CLAIMED


def test_a_retry_ends_quarantine_and_back_off() -> None:
    harness = PlannerHarness()
    attempt = harness.to_claimed()
    harness.job(state=JobState.RUNNING, nodes=("elsewhere",))
    harness.run()
    assert text_of(harness.attempt().quarantined)
    harness.job(state=JobState.PENDING, nodes=())
    harness.run()
    assert text_of(harness.attempt().quarantined), "it stays until an operator ends it"
    harness.run(Command("retry", key=attempt.key))
    assert not text_of(harness.attempt().quarantined)
    harness.run(Command("retry", key=Key("attempt", 99)))  # long gone: nothing to do

    broken = PlannerHarness()
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
    harness = PlannerHarness()
    getattr(harness, stage)()
    harness.job(**change)  # type: ignore[arg-type]
    harness.run()
    attempt = harness.attempt()
    assert attempt.outcome == "requeued" and attempt.tries == 0
    found = effect_of(attempt)
    assert harness.attempt().state is A.RETURNING and found and found.kind is EffectKind.GATE


def test_a_launch_that_the_scheduler_took_back_goes_to_the_gate_without_penalty() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.PENDING, nodes=())
    harness.run()
    attempt = harness.attempt()
    assert attempt.state is A.RETURNING and attempt.outcome == "requeued" and attempt.tries == 0
    assert states(harness) == ["serving"], "the job still has the pin"


def test_a_job_that_runs_elsewhere_is_quarantined_with_the_nodes_named() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(state=JobState.RUNNING, gated=False, pinned=attempt.feature)
    harness.jobs["7"] = harness.jobs["7"]._replace(nodes=("elsewhere", "beyond"))
    harness.run()
    assert harness.attempt().state is A.SPAWNED
    assert "runs on elsewhere, beyond, not on its own VMs" in text_of(harness.attempt().quarantined)
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED")
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and not text_of(harness.attempt().quarantined)


def test_a_job_that_is_completing_when_it_is_first_seen_on_its_nodes_has_run() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(state=JobState.COMPLETING, gated=False, pinned=attempt.feature)
    harness.run()
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and harness.attempt().outcome == "done"


def observe_at(harness: PlannerHarness, time: float) -> None:
    """Plan one pass on observations that began at `time`."""
    harness.clock.time = time
    harness.observe()
    harness.pass_time(0.01)
    harness.commit()


# --- deadlines: only an observation that began after them counts ------------------------------------


def test_a_pin_expires_only_in_an_observation_begun_after_its_deadline() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature)
    observe_at(harness, attempt.since + POLICY.pin_timeout)
    assert harness.attempt().state is A.SPAWNED
    observe_at(harness, attempt.since + POLICY.pin_timeout + 0.5)
    assert harness.attempt().state is A.RETURNING and harness.attempt().tries == 1


def test_a_vm_that_was_not_made_fails_only_in_an_observation_begun_after_its_deadline() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    since = harness.all_vms()[0].since
    observe_at(harness, since + POLICY.spawn_timeout)
    assert states(harness) == ["planned"]
    observe_at(harness, since + POLICY.spawn_timeout + 0.5)
    assert states(harness) == ["ending"]


def test_a_vm_does_not_fail_while_its_creation_is_under_way() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (vm,) = harness.all_vms()
    harness.effect_ended_at[vm.key] = float("inf")
    observe_at(harness, vm.since + 4 * POLICY.spawn_timeout)
    assert states(harness) == ["planned"], "a large disk may take as long to copy"
    harness.ended(vm.key)
    observe_at(harness, harness.clock.time + 1.0)
    assert states(harness) == ["ending"]


def test_an_unregistered_node_fails_its_vm_only_in_an_observation_begun_after_its_deadline() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    since = harness.all_vms()[0].since
    observe_at(harness, since + POLICY.spawn_timeout)
    assert states(harness) == ["starting"]
    observe_at(harness, since + POLICY.spawn_timeout + 0.5)
    assert states(harness)[0] == "ending"


@pytest.mark.parametrize("ready", [VmCondition.STARTING, VmCondition.PARKED])
def test_a_registered_node_whose_guest_is_not_complete_has_not_joined(ready: VmCondition) -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    harness.seen(harness.all_vms()[0].name, ready)
    harness.node(harness.all_vms()[0].name)
    harness.run()
    assert states(harness) == ["starting"]


def test_a_completing_job_keeps_its_vms_until_the_limit_and_then_its_node_goes_down_first() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.COMPLETING)
    harness.run()
    since = harness.attempt().since
    observe_at(harness, since + POLICY.complete_timeout)
    assert states(harness) == ["serving"]
    observe_at(harness, since + POLICY.complete_timeout + 0.5)
    (vm,) = harness.all_vms()
    assert vm.state is V.ENDING
    found = effect_of(vm)
    assert found and found.kind is EffectKind.END


def test_a_vm_whose_job_has_left_it_is_released_with_its_node_at_once() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED", nodes=())
    harness.run()
    harness.run()
    (vm,) = harness.all_vms()
    assert vm.state is V.RELEASING and effect(vm) is EffectKind.RELEASE


# --- absence and effects ----------------------------------------------------------------------------


def test_a_vm_is_gone_only_in_an_observation_begun_after_its_destruction_ended() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    del harness.jobs["7"]
    harness.run()
    harness.run()
    harness.pass_time(5)
    ended = harness.clock.time
    harness.clear()
    observe_at(harness, ended)
    assert states(harness) == ["releasing"] and len(harness.rows.claims) == 2
    observe_at(harness, ended + 0.5)
    assert states(harness) == ["gone"] and len(harness.rows.claims) == 1


def test_nothing_is_released_on_an_observation_that_began_before_the_last_effect_ended() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature, held=True, eligible=False)
    harness.run()
    harness.job(gated=True, pinned=None)
    harness.pass_time(5)
    ended = harness.clock.time
    harness.ended(attempt.key)
    observe_at(harness, ended)
    assert states(harness) == ["joined"], "the observation is no newer than the gate's end"
    observe_at(harness, ended + 0.5)
    assert states(harness) == ["releasing"]


def test_a_pin_that_reaches_the_scheduler_late_is_taken_back_again() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(held=True, eligible=False)
    harness.run()  # given back; seen at the gate, so the VM may go
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and states(harness) == ["releasing"]
    harness.job(gated=False, pinned=attempt.feature)
    harness.clear()
    harness.run()
    found = effect_of(harness.attempt())
    assert harness.attempt().state is A.RETURNING and found and found.kind is EffectKind.GATE


# --- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Refused, Exhausted, Gone, Broken])
def test_every_definite_failure_of_making_a_vm_replaces_it_and_its_claim_is_made(error: type[Exception]) -> None:
    harness = PlannerHarness()
    harness.second_host()
    harness.to_claimed()
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, error("no")))
    assert states(harness) == ["ending", "planned"]
    owners = [claim.owner for claim in harness.rows.claims]
    assert all(vm.key in owners for vm in harness.all_vms()), "one to be gone yet, one to come"


def test_a_failed_effect_of_another_kind_fails_no_vm() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.run(failed(harness.all_vms()[0], EffectKind.RELEASE, Broken("no")))
    assert states(harness) == ["planned"]


def test_a_failed_pin_that_may_yet_work_moves_nothing_and_a_refused_one_counts_once() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.run(failed(attempt, EffectKind.PIN, Gone("not now")))
    assert harness.attempt().state is A.SPAWNED
    harness.run(failed(attempt, EffectKind.PIN, Refused("never")))
    assert harness.attempt().state is A.RETURNING and harness.attempt().tries == 1


def test_a_template_that_breaks_counts_one_failure_and_its_claim_stays() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    (template,) = harness.rows.templates.values()
    harness.run(Done(template.key, EffectKind.DROP, str(template.state), Broken("no")))
    assert next(iter(harness.rows.templates.values())).state is TemplateState.BUILDING
    harness.run(Done(template.key, EffectKind.BUILD, str(template.state), Broken("no")))
    (template,) = harness.rows.templates.values()
    assert template.state is TemplateState.BROKEN and template.tries == 1
    assert list(harness.rows.claims) == [Claim(template.key, "h1", Size(0, POLICY.base.memory))]


def test_without_room_for_a_replacement_the_attempt_gives_up_and_that_counts() -> None:
    harness = PlannerHarness(cpus=1)
    harness.to_claimed()
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Gone("no luck")))
    attempt = harness.attempt()
    assert attempt.state is A.RETURNING and attempt.outcome == "requeued" and attempt.tries == 1
    assert text_of(attempt.reason) == "no luck" and len(harness.all_vms()) == 1


def test_a_vm_lost_before_its_job_ran_counts_as_a_failure() -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    harness.hosts.clear()
    harness.run()
    assert harness.attempt().outcome == "requeued" and harness.attempt().tries == 1
    assert states(harness) == ["lost"]


def test_a_dead_vm_whose_pin_was_taken_back_is_kept_until_the_gate_is_seen() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature, held=True, eligible=False)
    harness.run()
    harness.seen(harness.all_vms()[0].name, VmCondition.DEAD)
    harness.run()
    assert states(harness) == ["dead"]
    harness.scheduler_known = False
    harness.run()
    assert states(harness) == ["dead"], "while the scheduler is unknown, its job may be pinned"


# --- operators --------------------------------------------------------------------------------------


def test_an_operator_builds_what_is_broken_and_leaves_what_is_ready() -> None:
    harness = PlannerHarness()
    harness.run(Command("drop", "h1", "slim"))
    assert not harness.rows.templates, "there is nothing to drop"
    harness.run(Command("build", "h1", "slim"))
    harness.template()
    harness.run()
    (ready,) = harness.rows.templates.values()
    assert ready.state is TemplateState.READY
    assert harness.run(Command("build", "h1", "slim")) == []
    harness.run(Command("drop", "h1", "slim"))
    assert harness.run(Command("drop", "h1", "slim")) == []
    harness.run(Command("build", "h1", "slim"))
    assert next(iter(harness.rows.templates.values())).state is TemplateState.RETIRING


def test_a_node_down_before_its_guest_is_ready_says_why_it_failed() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    vm = harness.all_vms()[0]
    harness.node(vm.name, NodeState.DOWN)
    harness.run()
    assert states(harness)[0] == "ending" and "came up down" in text_of(harness.all_vms()[0].reason)


def test_a_job_goes_on_after_its_host_was_out_of_reach_for_a_moment() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    host = harness.hosts.pop("h1")
    harness.run()
    assert states(harness) == ["lost"]
    harness.hosts["h1"] = host
    harness.run()
    assert states(harness) == ["serving"]


def test_a_job_that_starts_just_as_its_host_gets_out_of_reach_runs_on_its_own_vms() -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.hosts.clear()
    harness.job(state=JobState.RUNNING, nodes=tuple(vm.name for vm in harness.all_vms()), gated=False, pinned="mv_1")
    harness.run()
    assert harness.attempt(attempt.id).state is A.ALLOCATED and states(harness) == ["lost"]


# --- the end ----------------------------------------------------------------------------------------


def show(harness: PlannerHarness, **more: object) -> None:
    """What the scheduler shows of job 7 is now this."""
    harness.jobs["7"] = harness.jobs["7"]._replace(**more)  # type: ignore[arg-type]


def restarted(harness: PlannerHarness, **more: object) -> None:
    """The scheduler started job 7 over, and shows it so."""
    ref = harness.jobs["7"].ref
    show(harness, ref=replace(ref, restarts=ref.restarts + 1, submitted=ref.submitted + 60), **more)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED])
def test_a_restarted_job_keeps_its_nodes_until_the_limit_and_then_they_go_down_first(state: JobState) -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    restarted(harness, state=state)
    harness.run()
    attempt = harness.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "requeued"
    observe_at(harness, attempt.since + POLICY.complete_timeout)
    assert states(harness) == ["serving"] and harness.attempt().outcome == "requeued"
    observe_at(harness, attempt.since + POLICY.complete_timeout + 0.5)
    (vm,) = harness.all_vms()
    assert vm.state is V.ENDING, "the job is still on its node"
    show(harness, state=JobState.PENDING, nodes=(), gated=True, pinned=None)
    harness.run()
    harness.clear()
    harness.run()
    assert harness.attempt().state is A.REQUEUED


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING])
def test_a_restarted_job_that_is_elsewhere_has_its_old_nodes_released_at_once(state: JobState) -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    restarted(harness, state=state, nodes=("elsewhere",))
    harness.run()
    harness.run()
    (vm,) = harness.all_vms()
    assert vm.state is V.RELEASING and effect(vm) is EffectKind.RELEASE


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED])
def test_a_job_that_started_after_all_keeps_its_vm_for_as_long_as_it_runs(state: JobState) -> None:
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    show(harness, gated=False, pinned=attempt.feature)
    harness.pass_time(POLICY.pin_timeout)
    harness.run()
    assert harness.attempt().outcome == "requeued"
    show(harness, state=state, nodes=(harness.all_vms()[0].name,))
    harness.run()
    attempt = harness.attempt()
    assert attempt.state is A.RECLAIMING and attempt.outcome == "done" and effect(attempt) is None
    harness.pass_time(POLICY.complete_timeout * 2)
    assert harness.run() == [], "it has all the time that the scheduler gives it"
    assert states(harness) == ["joined"]


def test_a_failed_attempt_waits_for_its_jobs_cancellation() -> None:
    harness = PlannerHarness(replace(POLICY, replacements=0, attempts=1))
    harness.to_claimed()
    (vm,) = harness.all_vms()
    harness.run(failed(vm, EffectKind.CREATE, Gone("no luck")))
    assert harness.attempt().outcome == "failed" and text_of(harness.attempt().reason).endswith("1 attempt: no luck")
    harness.clear()
    harness.run()
    harness.run()
    assert states(harness) == ["gone"] and harness.attempt().state is A.REVOKING
    show(harness, state=JobState.RUNNING, nodes=(vm.name,))
    harness.run()
    attempt = harness.attempt()
    assert attempt.state is A.REVOKING and attempt.outcome == "failed", "not to be let run after all"
    assert effect(attempt) is EffectKind.REVOKE
    show(harness, state=JobState.ENDED, result="CANCELLED", nodes=())
    harness.run()
    assert harness.attempt().state is A.FAILED


def test_a_failed_attempt_keeps_its_vms_until_its_job_is_cancelled() -> None:
    harness = PlannerHarness(replace(POLICY, replacements=0, attempts=1))
    harness.to_claimed(nodes=2)
    one, other = harness.all_vms()
    harness.run(failed(one, EffectKind.CREATE, Gone("no luck")))
    harness.run()
    assert harness.attempt().outcome == "failed" and states(harness) == ["ending", "planned"]
    show(harness, state=JobState.RUNNING, nodes=(other.name,))
    harness.run()
    assert harness.attempt().outcome == "failed" and states(harness) == ["ending", "planned"]
    show(harness, state=JobState.ENDED, result="CANCELLED", nodes=())
    harness.run()
    assert states(harness) == ["ending", "releasing"]


def completing() -> PlannerHarness:
    harness = PlannerHarness()
    harness.to_allocated()
    show(harness, state=JobState.COMPLETING)
    harness.run()
    assert harness.attempt().outcome == "done" and text_of(harness.attempt().reason) == "its job is completing"
    return harness


def test_an_end_without_a_result_leaves_the_reason_as_it_was() -> None:
    harness = completing()
    show(harness, state=JobState.ENDED, result="", nodes=())
    harness.run()
    assert text_of(harness.attempt().reason) == "its job is completing" and states(harness) == ["releasing"]


def test_a_completing_job_that_vanishes_is_done() -> None:
    harness = completing()
    del harness.jobs["7"]
    harness.run()
    assert states(harness) == ["releasing"]
    harness.clear()
    harness.run()
    assert harness.attempt().state is A.DONE and text_of(harness.attempt().reason) == "its job is completing"


def test_the_gate_of_a_job_requeued_while_completing_is_left_to_its_next_attempt() -> None:
    harness = completing()
    restarted(harness, state=JobState.PENDING, nodes=(), eligible=False, gated=False)
    harness.run()
    first, second = harness.attempt(1), harness.attempt(2)
    assert first.outcome == "requeued" and first.state is A.RECLAIMING and effect(first) is None
    assert states(harness) == ["serving"], "the job still has its pin"
    assert effect(second) is EffectKind.GATE
    show(harness, gated=True, pinned=None)
    harness.run()
    assert states(harness) == ["releasing"]


def test_only_an_attempt_that_ran_learns_how_its_job_ended() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    job = harness.jobs.pop("7")
    harness.run()
    assert harness.attempt().outcome == "cancelled" and "no longer shows" in text_of(harness.attempt().reason)
    harness.jobs["7"] = job._replace(state=JobState.ENDED, result="TIMEOUT")
    harness.run()
    assert harness.attempt().outcome == "cancelled" and "no longer shows" in text_of(harness.attempt().reason)


# --- replacing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CloneKind.INSTANT, CloneKind.FULL])
def test_a_vm_is_replaced_on_a_host_that_can_make_it_however_empty_the_others_are(kind: CloneKind) -> None:
    harness = PlannerHarness(replace(POLICY, kind=kind))
    attempt = harness.to_claimed()
    assert attempt.state is A.CLAIMED
    large = replace(harness.hosts["h1"], capacity=Size(64, 65536, 65536))
    other = CloneKind.FULL if kind is CloneKind.INSTANT else CloneKind.INSTANT
    harness.hosts["h2"] = replace(large, name="h2", abilities=frozenset({other.value}))
    harness.hosts["h3"] = replace(large, name="h3")
    harness.run(Command("build", "h2", "slim"), Command("build", "h3", "slim"))
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Gone("no luck")))
    # The template on h3 is still being built; a clone that boots from the image needs none.
    assert [vm.host for vm in harness.all_vms()] == ["h1", "h1" if kind is CloneKind.INSTANT else "h3"]
    assert harness.attempt().replaced == 1


def test_an_instant_clone_is_replaced_on_the_emptiest_host_with_a_ready_template_of_its_image() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    large = replace(harness.hosts["h1"], capacity=Size(64, 65536, 65536))
    for name, image in (("h2", "slim"), ("h3", "other")):
        harness.hosts[name] = replace(large, name=name, capacity=Size(64 if name == "h2" else 128, 65536, 65536))
        harness.template(image, host=name)
        harness.run(Command("build", name, image))
    harness.run()
    harness.run(failed(harness.all_vms()[0], EffectKind.CREATE, Broken("no luck")))
    assert [vm.host for vm in harness.all_vms()] == ["h1", "h2"]


def test_replacements_are_counted_by_vm_and_the_last_failure_is_the_reason() -> None:
    harness = PlannerHarness(replace(POLICY, replacements=3))
    harness.to_claimed(nodes=2)
    one, other = harness.all_vms()
    harness.run(failed(one, EffectKind.CREATE, Gone("first")), failed(other, EffectKind.CREATE, Gone("second")))
    assert harness.attempt().replaced == 2 and states(harness) == ["ending"] * 2 + ["planned"] * 2
    one, other = harness.all_vms()[2:]
    harness.run(failed(one, EffectKind.CREATE, Gone("third")), failed(other, EffectKind.CREATE, Gone("fourth")))
    attempt = harness.attempt()
    assert attempt.state is A.RETURNING and attempt.outcome == "requeued" and attempt.tries == 1
    assert text_of(attempt.reason) == "fourth", "three may be replaced, not four"


@pytest.mark.parametrize("fault", ["it breaks", "it wants what the tables forbid"])
def test_a_fault_in_deciding_about_one_record_quarantines_that_record_only(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    harness = PlannerHarness()
    harness.job("8")
    harness.to_claimed()
    first, second = harness.store.vms_of([1, 2])
    sound = planner.step_vm

    def unsound(state: State, vm_id: int, *rest: object) -> None:
        if vm_id != first.id:
            return sound(state, vm_id, *rest)  # type: ignore[arg-type]
        if fault == "it breaks":
            raise KeyError("x")
        state.move(Change(replace(state.vms[vm_id], state=V.SERVING), Event.RUNS))

    monkeypatch.setattr(planner, "step_vm", unsound)
    for vm in (first, second):
        harness.seen(vm.name, VmCondition.PARKED)
    harness.run()
    harness.run()
    first, second = harness.store.vms_of([1, 2])
    assert first.state is V.PLANNED and text_of(first.quarantined).startswith("a fault of Multiverse")
    assert second.state is V.STARTING
    monkeypatch.undo()
    harness.run(Command("retry", key=first.key))
    assert harness.store.vms_of([1, 2])[0].state is V.STARTING, "after the retry it goes on"


def test_a_quarantined_vm_goes_when_its_job_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    monkeypatch.setattr(planner, "step_vm", lambda *_: {}["x"])
    harness.seen("mvtest0-1", VmCondition.STARTING)
    harness.run()
    (vm,) = harness.all_vms()
    assert text_of(vm.quarantined)
    monkeypatch.undo()
    harness.run()
    assert harness.all_vms()[0].state is V.SERVING, "it serves its job, and no effect of it begins"
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED")
    harness.run()
    harness.clear()
    harness.run()
    harness.run()
    assert not harness.rows.vms and not harness.rows.attempts


def test_a_fault_in_admitting_one_job_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = PlannerHarness()
    harness.template()
    harness.job("7")
    harness.job("8")
    sound = admit.choose_clones

    def unsound(context: Context, attempt: Attempt, *rest: object) -> object:
        return {}["x"] if attempt.job.job_id == "7" else sound(context, attempt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(admit, "choose_clones", unsound)
    for _ in range(3):
        harness.run()
    by_job = {attempt.job.job_id: attempt for attempt in harness.rows.attempts.values()}
    assert by_job["7"].state is A.QUEUED and text_of(by_job["7"].quarantined).startswith("a fault of Multiverse")
    assert by_job["8"].state is A.CLAIMED


def test_a_job_that_is_changed_before_it_is_refused_is_not_refused() -> None:
    """Found by a simulation: the first cancellation hung, the user changed the job, and the second cancelled it."""
    harness = PlannerHarness()
    harness.template()
    harness.job(size=Size(1, 1 << 20))
    harness.run()
    assert harness.attempt().state is A.REVOKING and harness.attempt().outcome == "revoked"
    harness.job(request=Request(1, Size(1, 100)))
    harness.run()
    harness.run()
    assert harness.attempt(1).state is A.REQUEUED
    assert harness.attempt(2).state is A.CLAIMED
