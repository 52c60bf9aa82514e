"""Jobs that are queued again: whose delay is waited for, and how repeated ends within seconds are braked."""

from __future__ import annotations

import pytest

from multiverse.core.context import Context
from multiverse.core.errors import Broken
from multiverse.core.explanation import explain
from multiverse.core.machines.tables import effect_of
from multiverse.core.model.job import MOST_SHORT_RUNS, SHORT_RUN, Attempt, AttemptState, JobRef, JobState, NodeState
from multiverse.core.model.vm import VmCondition
from multiverse.core.policy import PAUSE_BASE, PAUSE_LIMIT
from multiverse.core.transition import EffectKind
from tests.unit.planner_harness import POLICY, PlannerHarness, failed

A = AttemptState
DELAY = 121.0
"""Seconds after a requeue that Slurm waits."""


def newest(harness: PlannerHarness) -> Attempt:
    return harness.rows.attempts[max(harness.rows.attempts)]


def requeued(harness: PlannerHarness, *, delayed: bool = True) -> None:
    """Slurm queues the job again by itself, and its VMs go."""
    job = harness.jobs["7"]
    ref = JobRef("7", job.ref.submitted + 1, job.ref.restarts + 1)
    until = harness.clock.wall() + DELAY if delayed else None
    harness.job(ref=ref, state=JobState.PENDING, nodes=(), gated=True, pinned=None, delayed_until=until)
    harness.run()
    harness.clear()
    harness.run()
    harness.run()


def runs(harness: PlannerHarness, seconds: float = 1.0) -> None:
    """The job's newest attempt gets its VM, and the job runs there for so long."""
    for condition in (VmCondition.PARKED, VmCondition.RUNNING):
        (vm,) = harness.all_vms(newest(harness).id)
        harness.seen(vm.name, condition)
        harness.ended(vm.key)
        if condition is VmCondition.RUNNING:
            harness.node(vm.name)
        harness.run()
    harness.node(vm.name, NodeState.BUSY)
    harness.job(state=JobState.RUNNING, nodes=(vm.name,), gated=False, pinned=newest(harness).feature)
    harness.ended(newest(harness).key)
    harness.run()
    assert newest(harness).state is A.ALLOCATED
    harness.pass_time(seconds)


def started() -> PlannerHarness:
    harness = PlannerHarness(cpus=64)
    harness.to_claimed()
    return harness


def delay_ends(harness: PlannerHarness) -> None:
    harness.pass_time(DELAY)
    harness.job(delayed_until=None)
    harness.run()


def test_slurms_own_delay_is_waited_for_and_explain_says_so() -> None:
    harness = started()
    runs(harness, 60.0)
    requeued(harness)
    attempt = newest(harness)
    assert attempt.state is A.QUEUED and not attempt.at_once
    told = explain(Context(harness.state, harness.world, POLICY), attempt, harness.clock.time)
    assert "the scheduler queued it again, not because of Multiverse" in str(told.sentences[0])
    delay_ends(harness)
    assert newest(harness).state is A.CLAIMED and not newest(harness).at_once


def queued_again_after_its_vm_was_lost(seconds: float = 60.0) -> PlannerHarness:
    """After so long a run."""
    harness = started()
    runs(harness, seconds)
    harness.seen(harness.all_vms(newest(harness).id)[0].name, VmCondition.DEAD)
    harness.run()
    requeued(harness)
    return harness


def test_a_run_whose_vm_was_lost_is_followed_by_another_at_once() -> None:
    harness = queued_again_after_its_vm_was_lost()
    assert newest(harness).state is A.CLAIMED and newest(harness).at_once, "we set its node DOWN"


def test_after_a_run_that_was_lost_as_it_began_its_launch_is_given_up_first() -> None:
    """The failure of that launch would end the next run."""
    harness = queued_again_after_its_vm_was_lost(1.0)
    attempt = newest(harness)
    assert attempt.state is A.QUEUED and attempt.at_once
    assert PAUSE_BASE / 2 < attempt.not_before - harness.clock.time <= PAUSE_BASE
    told = explain(Context(harness.state, harness.world, POLICY), attempt, harness.clock.time)
    assert "the scheduler has yet to give up that start" in " ".join(map(str, told.sentences))
    harness.pass_time(PAUSE_BASE)
    harness.run()
    assert newest(harness).state is A.CLAIMED and newest(harness).at_once, "and not after the scheduler's own delay"


def test_that_we_caused_a_restart_holds_for_that_one_only() -> None:
    harness = queued_again_after_its_vm_was_lost()
    runs(harness, 60.0)
    requeued(harness)
    assert newest(harness).state is A.QUEUED and not newest(harness).at_once


def test_of_a_job_whose_record_was_lost_the_delay_is_waited_for() -> None:
    harness = PlannerHarness()
    harness.template()
    until = harness.clock.wall() + DELAY
    harness.job(ref=JobRef("7", 500, 3), delayed_until=until)
    for _ in range(3):
        harness.run()
    assert newest(harness).state is A.QUEUED
    delay_ends(harness)
    harness.run()
    assert newest(harness).state is A.CLAIMED


def test_repeated_ends_within_seconds_slow_down_and_end_in_a_hold() -> None:
    harness = started()
    pauses = []
    for number in range(1, MOST_SHORT_RUNS + 1):
        runs(harness)
        requeued(harness, delayed=False)
        if number < MOST_SHORT_RUNS:
            pauses.append(max(0.0, newest(harness).not_before - harness.clock.time))
            harness.pass_time(pauses[-1])
            harness.run()
            assert newest(harness).state is A.CLAIMED
    assert pauses[0] == 0.0 and PAUSE_BASE / 2 < pauses[1] <= PAUSE_BASE and pauses[1:] == sorted(pauses[1:])
    assert pauses[-1] <= PAUSE_LIMIT and sum(pauses) > 3000
    attempt = newest(harness)
    effect = effect_of(attempt)
    assert attempt.state is A.HOLDING and effect is not None and effect.kind is EffectKind.HOLD
    assert effect.text.startswith("held by Multiverse: its last 10 runs ended within 10 s of their start")
    harness.run()
    assert newest(harness).state is A.HOLDING, "until it is seen to be held"
    harness.job(held=True, eligible=False)
    harness.run()
    held = newest(harness)
    assert (held.state, held.short_runs, effect_of(held)) == (A.QUEUED, 0, None)
    told = explain(Context(harness.state, harness.world, POLICY), held, harness.clock.time)
    assert "its last 10 runs ended" in " ".join(map(str, told.sentences))
    harness.job(held=False, eligible=True)
    harness.run()
    assert newest(harness).state is A.CLAIMED, "its user has released it"


@pytest.mark.parametrize("seconds", [SHORT_RUN + 1.0, 3600.0])
def test_a_job_that_requeues_itself_slowly_goes_on_as_ever(seconds: float) -> None:
    """As one that saves a checkpoint and is queued again."""
    harness = started()
    for _ in range(2 * MOST_SHORT_RUNS):
        runs(harness, seconds)
        requeued(harness)
        assert newest(harness).not_before == 0.0 and newest(harness).short_runs == 0
        delay_ends(harness)
        assert newest(harness).state is A.CLAIMED


def test_a_long_run_begins_the_count_anew() -> None:
    harness = started()
    for seconds in (1.0, 1.0, SHORT_RUN + 1.0, 1.0):
        runs(harness, seconds)
        requeued(harness, delayed=False)
        harness.pass_time(PAUSE_BASE)
        harness.run()
    assert newest(harness).short_runs == 1


def test_a_start_that_fails_does_not_begin_the_pause_anew() -> None:
    """A host on which the VM fails is avoided for ten minutes at most: with a longer pause the job came back to it each
    time (seed 10302425)."""
    harness = started()
    for _ in range(8):
        runs(harness)
        requeued(harness, delayed=False)
        harness.pass_time(max(0.0, newest(harness).not_before - harness.clock.time))
        harness.run()
    attempt = newest(harness)
    assert attempt.state is A.CLAIMED and attempt.short_runs == 8
    (vm,) = harness.all_vms(attempt.id)
    harness.run(failed(vm, EffectKind.CREATE, Broken("the host cannot")))
    for _ in range(4):
        harness.clear()
        harness.run()
    following = newest(harness)
    assert following.id > attempt.id and following.short_runs == 8
    assert following.not_before - harness.clock.time < PAUSE_BASE
