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
from tests.unit.planner_harness import POLICY, PlannerHarness

A, V = AttemptState, VmState


def only(harness: PlannerHarness) -> str:
    (vm,) = harness.all_vms()
    return vm.name


# --- VMs ------------------------------------------------------------------------------------------


def test_a_vm_that_dies_while_it_is_made_has_failed_once_its_making_has_ended() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (vm,) = harness.all_vms()
    harness.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.DEAD, "its QEMU has ended")
    harness.effect_ended_at[vm.key] = float("inf")  # create is under way: what it does next is not known
    harness.run()
    assert harness.all_vms()[0].state is V.PLANNED
    harness.ended(vm.key)
    harness.observe()
    harness.commit()
    assert harness.all_vms()[0].state is V.PLANNED, "a look that began as it ended may be the older one"
    harness.run()
    dead = harness.all_vms()[0]
    assert (dead.state, dead.reason) == (V.ENDING, "its QEMU has ended")


def test_a_vm_that_is_dead_without_a_word_says_so_itself() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.DEAD)
    harness.run()
    assert harness.all_vms()[0].reason == "the VM died while it was made"


def test_a_vm_that_is_being_made_is_neither_dead_nor_there() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.seen(only(harness), VmCondition.MAKING)
    harness.run()
    assert harness.all_vms()[0].state is V.PLANNED


def test_absence_counts_only_in_a_look_that_began_after_the_effect_ended() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    (vm,) = harness.all_vms()
    harness.vms.clear()
    harness.effect_ended_at[vm.key] = float("inf")
    harness.run()
    assert harness.all_vms()[0].state is V.STARTING
    harness.ended(vm.key)
    harness.observe()
    harness.commit()
    assert harness.all_vms()[0].state is V.STARTING
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING and harness.all_vms()[0].reason == "the VM died"


# --- a dead VM and its job's pin --------------------------------------------------------------------


def test_a_dead_vm_is_kept_while_its_job_is_on_its_way_back_to_the_gate() -> None:
    """Its node is deleted with it, and a job pinned to no node may never start."""
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature)
    harness.pass_time(POLICY.pin_timeout + 1)
    harness.run()
    assert harness.attempt().state is A.RETURNING
    harness.seen(only(harness), VmCondition.DEAD)
    harness.run()
    harness.run()
    assert harness.all_vms()[0].state is V.DEAD, "still pinned"
    harness.job(gated=True, pinned=None)
    harness.ended(harness.attempt().key)
    harness.run()
    assert harness.all_vms()[0].state is V.REMOVING


@pytest.mark.parametrize("outcome", ["done", "cancelled"])
def test_a_dead_vm_of_a_job_that_is_over_goes_at_once(outcome: str) -> None:
    harness = PlannerHarness()
    harness.to_allocated() if outcome == "done" else harness.to_spawned()
    state = JobState.COMPLETING if outcome == "done" else JobState.ENDED
    harness.job(state=state, result="CANCELLED")
    harness.seen(only(harness), VmCondition.DEAD)
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING


def test_a_vm_that_dies_under_its_running_job_goes_and_the_scheduler_decides() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.seen(only(harness), VmCondition.DEAD)
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING and harness.attempt().state is A.ALLOCATED


def test_an_attempt_that_is_over_leaves_neither_vm_nor_claim() -> None:
    harness = PlannerHarness()
    attempt = harness.to_allocated()
    (vm,) = harness.all_vms()
    harness.job(state=JobState.ENDED, result="COMPLETED", nodes=())
    harness.ended(attempt.key)
    harness.run()
    harness.run()
    assert harness.all_vms()[0].state is V.RELEASING
    harness.clear()
    harness.run()
    assert harness.all_vms()[0].state is V.GONE and harness.attempt().state is A.DONE
    assert vm.key not in {claim.owner for claim in harness.rows.claims}


# --- templates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["", "its file system is gone"])
def test_a_template_that_vanishes_is_absent_and_frees_its_claim(said: str) -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (row,) = harness.rows.templates.values()
    del harness.templates[row.which]
    if said:
        harness.templates[row.which] = TemplateSeen("t", "h1", "slim", TemplateCondition.BROKEN, row.size, said)
    harness.run()
    assert not harness.rows.templates and row.key not in {claim.owner for claim in harness.rows.claims}
    (entry,) = [entry for entry in harness.store.journal() if entry.event == "vanished"]
    assert entry.reason == (said or "it is no longer there")


def test_a_template_built_after_failures_starts_counting_anew() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    (row,) = harness.rows.templates.values()
    harness.template()
    harness.ended(row.key)
    harness.observe()
    harness.commit()
    assert next(iter(harness.rows.templates.values())).state is TemplateState.BUILDING, "that look is no later"
    harness.run()
    (row,) = harness.rows.templates.values()
    assert (row.state, row.tries) == (TemplateState.READY, 0)


# --- the queue --------------------------------------------------------------------------------------


def admitted(harness: PlannerHarness) -> set[str]:
    return {a.job.job_id for a in harness.store.attempts() if a.state is not A.QUEUED}


def test_none_of_those_that_wait_for_something_of_their_own_keep_back_who_comes_after() -> None:
    harness = PlannerHarness(cpus=8)
    harness.template()
    harness.job("0", rank=0, problem="it cannot be served", request=None)
    harness.job("1", rank=1, eligible=False)
    harness.job("2", rank=2, size=Size(99, 100))
    harness.job("3", rank=3, gated=False)
    harness.job("9", rank=9)
    for _ in range(3):
        harness.run()
    outcomes = {a.job.job_id: (str(a.state), a.outcome) for a in harness.store.attempts()}
    assert outcomes["0"] == outcomes["2"] == ("revoking", "revoked")
    assert (outcomes["1"], outcomes["3"]) == (("queued", None), ("ungated", None))
    assert outcomes["9"][0] == "claimed"


def test_a_job_that_is_no_longer_seen_keeps_nobody_back() -> None:
    harness = PlannerHarness()
    harness.job("1", rank=1)
    harness.run()
    del harness.jobs["1"]
    harness.effect_ended_at[harness.attempt().key] = float(
        "inf"
    )  # not known to have ended: its last effect is under way
    harness.template()
    harness.job("2", rank=2)
    for _ in range(3):
        harness.run()
    assert admitted(harness) == {"2"}


def test_jobs_are_admitted_in_the_schedulers_order_not_in_that_of_their_coming() -> None:
    harness = PlannerHarness(cpus=2)
    harness.job("1", rank=2, size=Size(2, 100))
    harness.run()
    harness.job("2", rank=1, size=Size(2, 100))
    harness.template()
    for _ in range(3):
        harness.run()
    assert admitted(harness) == {"2"}


def test_who_finds_the_hosts_full_keeps_back_who_is_smaller() -> None:
    harness = PlannerHarness(cpus=2)
    harness.template()
    harness.job("1", rank=1, size=Size(2, 100))
    for _ in range(3):
        harness.run()
    harness.job("2", rank=2, size=Size(2, 100))
    harness.job("3", rank=3)
    harness.run()
    harness.pass_time(POLICY.patience)
    harness.run()
    assert admitted(harness) == {"1"}
    notes = {a.job.job_id: a.note for a in harness.store.attempts()}
    assert notes["2"] == notes["3"] == "waiting for capacity: the hosts are full"


def test_a_back_off_ends_at_its_moment_and_an_admitted_job_has_no_note() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.pass_time(POLICY.patience)
    harness.run()
    assert harness.attempt().note, "its template is being built"
    harness.template()
    harness.ended(next(iter(harness.rows.templates.values())).key)
    harness.run()
    assert harness.attempt().state is A.CLAIMED and harness.attempt().note == ""


def test_when_addresses_have_run_out_jobs_wait_and_are_told_so() -> None:
    small = replace(POLICY, subnet=type(POLICY.subnet)("10.9.0.0/30"), gateway="10.9.0.1", first_address=2)
    harness = PlannerHarness(small, cpus=8)
    harness.template()
    for number in "123":
        harness.job(number, rank=int(number))
    for _ in range(3):
        harness.run()
    harness.pass_time(POLICY.patience)
    harness.run()
    assert admitted(harness) == {"1"}
    notes = {a.job.job_id: a.note for a in harness.store.attempts()}
    assert notes["2"] == notes["3"] == "waiting for a free address"


# --- how an attempt ends ----------------------------------------------------------------------------


def test_a_job_that_is_not_seen_in_an_old_look_is_not_over() -> None:
    harness = PlannerHarness()
    attempt = harness.to_allocated()
    harness.jobs.clear()
    harness.ended(attempt.key)
    harness.observe()
    harness.commit()
    assert harness.attempt().state is A.ALLOCATED, "the look began as our last word to the scheduler ended"
    harness.run()
    assert harness.attempt().outcome == "done"
    assert harness.attempt().reason == "the scheduler no longer shows the job"


def test_a_job_that_changes_into_one_that_cannot_be_served_is_revoked_with_the_reason() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.job(problem="it cannot be served", request=None)
    harness.run()
    harness.run()
    assert (harness.attempt().outcome, harness.attempt().reason) == ("revoked", "it cannot be served")
    assert harness.attempt().request.nodes == 0


def test_what_its_user_changes_while_it_waits_is_kept() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.job(name="other", work_dir="/elsewhere", uid=1001)
    harness.run()
    attempt = harness.attempt()
    assert (attempt.job_name, attempt.work_dir, attempt.uid) == ("other", "/elsewhere", 1001)


def test_a_node_that_is_only_joining_is_not_registered() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    name = only(harness)
    harness.seen(name, VmCondition.RUNNING)
    harness.node(name, NodeState.JOINING)
    harness.run()
    assert harness.all_vms()[0].state is V.STARTING
