"""Decisions at their edges: what mutation testing found that no other test would have noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.model import (
    AttemptState,
    JobState,
    NodeState,
    Size,
    TemplateCondition,
    TemplateSeen,
    TemplateState,
    VmCondition,
    VmSeen,
    VmState,
)
from tests.unit.scene import POLICY, Scene

A, V = AttemptState, VmState


def only(scene: Scene) -> str:
    (vm,) = scene.all_vms()
    return vm.name


# --- VMs ------------------------------------------------------------------------------------------


def test_a_vm_that_dies_while_it_is_made_has_failed_once_its_making_has_ended() -> None:
    scene = Scene()
    scene.to_claimed()
    (vm,) = scene.all_vms()
    scene.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.DEAD, "its QEMU has ended")
    scene.effect_ended_at[vm.key] = float("inf")  # create is under way: what it does next is not known
    scene.run()
    assert scene.all_vms()[0].state is V.PLANNED
    scene.ended(vm.key)
    scene.observe()
    scene.commit()
    assert scene.all_vms()[0].state is V.PLANNED, "a look that began as it ended may be the older one"
    scene.run()
    dead = scene.all_vms()[0]
    assert (dead.state, dead.failed, dead.reason) == (V.RELEASING, True, "its QEMU has ended")


def test_a_vm_that_is_dead_without_a_word_says_so_itself() -> None:
    scene = Scene()
    scene.to_claimed()
    (vm,) = scene.all_vms()
    scene.seen(vm.name, VmCondition.DEAD)
    scene.run()
    assert scene.all_vms()[0].reason == "the VM died while it was made"


def test_a_vm_that_is_being_made_is_neither_dead_nor_there() -> None:
    scene = Scene()
    scene.to_claimed()
    scene.seen(only(scene), VmCondition.MAKING)
    scene.run()
    assert scene.all_vms()[0].state is V.PLANNED


def test_absence_counts_only_in_a_look_that_began_after_the_effect_ended() -> None:
    scene = Scene()
    scene.to_spawning()
    (vm,) = scene.all_vms()
    scene.vms.clear()
    scene.effect_ended_at[vm.key] = float("inf")
    scene.run()
    assert scene.all_vms()[0].state is V.STARTING
    scene.ended(vm.key)
    scene.observe()
    scene.commit()
    assert scene.all_vms()[0].state is V.STARTING
    scene.run()
    assert scene.all_vms()[0].state is V.RELEASING and scene.all_vms()[0].reason == "the VM died"


# --- a dead VM and its job's pin --------------------------------------------------------------------


def test_a_dead_vm_is_kept_while_its_job_is_on_its_way_back_to_the_gate() -> None:
    """Its node is deleted with it, and a job pinned to no node may never start."""
    scene = Scene()
    attempt = scene.to_spawned()
    scene.job(gated=False, pinned=attempt.feature)
    scene.pass_time(POLICY.pin_timeout + 1)
    scene.run()
    assert scene.attempt().state is A.RECLAIMING and not scene.attempt().gated
    scene.seen(only(scene), VmCondition.DEAD)
    scene.run()
    scene.run()
    assert scene.all_vms()[0].state is V.JOINED, "still pinned"
    scene.job(gated=True, pinned=None)
    scene.ended(scene.attempt().key)
    scene.run()
    assert scene.all_vms()[0].state is V.RELEASING


@pytest.mark.parametrize("outcome", ["done", "cancelled"])
def test_a_dead_vm_of_a_job_that_is_over_goes_at_once(outcome: str) -> None:
    scene = Scene()
    scene.to_allocated() if outcome == "done" else scene.to_spawned()
    state = JobState.COMPLETING if outcome == "done" else JobState.ENDED
    scene.job(state=state, result="CANCELLED")
    scene.seen(only(scene), VmCondition.DEAD)
    scene.run()
    scene.run()
    assert scene.all_vms()[0].state is V.RELEASING


def test_a_vm_that_dies_under_its_running_job_goes_and_the_scheduler_decides() -> None:
    scene = Scene()
    scene.to_allocated()
    scene.seen(only(scene), VmCondition.DEAD)
    scene.run()
    assert scene.all_vms()[0].state is V.RELEASING and scene.attempt().state is A.ALLOCATED


def test_an_attempt_that_is_over_leaves_neither_vm_nor_claim() -> None:
    scene = Scene()
    attempt = scene.to_allocated()
    (vm,) = scene.all_vms()
    scene.job(state=JobState.ENDED, result="COMPLETED", nodes=())
    scene.ended(attempt.key)
    scene.run()
    scene.run()
    assert scene.all_vms()[0].state is V.RELEASING
    scene.clear()
    scene.run()
    assert scene.all_vms()[0].state is V.GONE and scene.attempt().state is A.DONE
    assert vm.key not in {claim.owner for claim in scene.rows.claims}


# --- templates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["", "its file system is gone"])
def test_a_template_that_vanishes_is_absent_and_frees_its_claim(said: str) -> None:
    scene = Scene()
    scene.to_claimed()
    (row,) = scene.rows.templates.values()
    del scene.templates[row.which]
    if said:
        scene.templates[row.which] = TemplateSeen("t", "h1", "slim", TemplateCondition.BROKEN, row.size, said)
    scene.run()
    assert not scene.rows.templates and row.key not in {claim.owner for claim in scene.rows.claims}
    (entry,) = [entry for entry in scene.store.journal() if entry.event == "vanished"]
    assert entry.reason == (said or "it is no longer there")


def test_a_template_built_after_failures_starts_counting_anew() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    (row,) = scene.rows.templates.values()
    scene.template()
    scene.ended(row.key)
    scene.observe()
    scene.commit()
    assert next(iter(scene.rows.templates.values())).state is TemplateState.BUILDING, "that look is no later"
    scene.run()
    (row,) = scene.rows.templates.values()
    assert (row.state, row.tries) == (TemplateState.READY, 0)


# --- the queue --------------------------------------------------------------------------------------


def admitted(scene: Scene) -> set[str]:
    return {a.job.job_id for a in scene.store.attempts() if a.state is not A.QUEUED}


def test_none_of_those_that_wait_for_something_of_their_own_keep_back_who_comes_after() -> None:
    scene = Scene(cpus=8)
    scene.template()
    scene.job("0", rank=0, problem="it cannot be served", request=None)
    scene.job("1", rank=1, eligible=False)
    scene.job("2", rank=2, size=Size(99, 100))
    scene.job("3", rank=3, gated=False)
    scene.job("9", rank=9)
    for _ in range(3):
        scene.run()
    outcomes = {a.job.job_id: (str(a.state), a.outcome) for a in scene.store.attempts()}
    assert outcomes["0"] == outcomes["2"] == ("reclaiming", "revoked")
    assert outcomes["1"] == outcomes["3"] == ("queued", None)
    assert outcomes["9"][0] == "claimed"


def test_a_job_that_is_no_longer_seen_keeps_nobody_back() -> None:
    scene = Scene()
    scene.job("1", rank=1)
    scene.run()
    del scene.jobs["1"]
    scene.effect_ended_at[scene.attempt().key] = float("inf")  # not known to have ended: its last effect is under way
    scene.template()
    scene.job("2", rank=2)
    for _ in range(3):
        scene.run()
    assert admitted(scene) == {"2"}


def test_jobs_are_admitted_in_the_schedulers_order_not_in_that_of_their_coming() -> None:
    scene = Scene(cpus=2)
    scene.job("1", rank=2, size=Size(2, 100))
    scene.run()
    scene.job("2", rank=1, size=Size(2, 100))
    scene.template()
    for _ in range(3):
        scene.run()
    assert admitted(scene) == {"2"}


def test_who_finds_the_hosts_full_keeps_back_who_is_smaller() -> None:
    scene = Scene(cpus=2)
    scene.template()
    scene.job("1", rank=1, size=Size(2, 100))
    for _ in range(3):
        scene.run()
    scene.job("2", rank=2, size=Size(2, 100))
    scene.job("3", rank=3)
    scene.run()
    scene.pass_time(POLICY.patience)
    scene.run()
    assert admitted(scene) == {"1"}
    notes = {a.job.job_id: a.note for a in scene.store.attempts()}
    assert notes["2"] == notes["3"] == "waiting for capacity: the hosts are full"


def test_a_back_off_ends_at_its_moment_and_an_admitted_job_has_no_note() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    scene.pass_time(POLICY.patience)
    scene.run()
    assert scene.attempt().note, "its template is being built"
    scene.template()
    scene.ended(next(iter(scene.rows.templates.values())).key)
    scene.run()
    assert scene.attempt().state is A.CLAIMED and scene.attempt().note == ""


def test_when_addresses_have_run_out_jobs_wait_and_are_told_so() -> None:
    small = replace(POLICY, subnet=type(POLICY.subnet)("10.9.0.0/30"), gateway="10.9.0.1", first_address=2)
    scene = Scene(small, cpus=8)
    scene.template()
    for number in "123":
        scene.job(number, rank=int(number))
    for _ in range(3):
        scene.run()
    scene.pass_time(POLICY.patience)
    scene.run()
    assert admitted(scene) == {"1"}
    notes = {a.job.job_id: a.note for a in scene.store.attempts()}
    assert notes["2"] == notes["3"] == "waiting for a free address"


# --- how an attempt ends ----------------------------------------------------------------------------


def test_a_job_that_is_not_seen_in_an_old_look_is_not_over() -> None:
    scene = Scene()
    attempt = scene.to_allocated()
    scene.jobs.clear()
    scene.ended(attempt.key)
    scene.observe()
    scene.commit()
    assert scene.attempt().state is A.ALLOCATED, "the look began as our last word to the scheduler ended"
    scene.run()
    assert scene.attempt().outcome == "done"
    assert scene.attempt().reason == "the scheduler no longer shows the job"


def test_a_job_that_changes_into_one_that_cannot_be_served_is_revoked_with_the_reason() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    scene.job(problem="it cannot be served", request=None)
    scene.run()
    scene.run()
    assert (scene.attempt().outcome, scene.attempt().reason) == ("revoked", "it cannot be served")
    assert scene.attempt().request.nodes == 0


def test_what_its_user_changes_while_it_waits_is_kept() -> None:
    scene = Scene()
    scene.job()
    scene.run()
    scene.job(name="other", work_dir="/elsewhere", uid=1001)
    scene.run()
    attempt = scene.attempt()
    assert (attempt.job_name, attempt.work_dir, attempt.uid) == ("other", "/elsewhere", 1001)


def test_a_node_that_is_only_joining_is_not_registered() -> None:
    scene = Scene()
    scene.to_spawning()
    name = only(scene)
    scene.seen(name, VmCondition.RUNNING)
    scene.node(name, NodeState.JOINING)
    scene.run()
    assert scene.all_vms()[0].state is V.STARTING
