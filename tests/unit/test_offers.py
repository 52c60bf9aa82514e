"""Joined spares that jobs take by themselves, as they are submitted: rule by rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from multiverse.core.errors import Refused, Unknown
from multiverse.core.machines.tables import effect_of
from multiverse.core.model import (
    Attempt,
    AttemptState,
    CloneKind,
    Depth,
    JobState,
    NodeState,
    Offer,
    Seen,
    Size,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
)
from multiverse.core.policy import Pool
from multiverse.core.provisioning.pools import pool_status
from multiverse.core.provisioning.spares import named_by_none
from multiverse.core.transition import EffectKind
from multiverse.service.timeline import phases
from tests.unit import rows as hand
from tests.unit.planner_harness import POLICY, PlannerHarness, failed

A, V = AttemptState, VmState
POOL = Pool("slim", Depth.JOINED, 1, 1, Size(1, 512), 100.0)


class Stage(PlannerHarness):
    """With a pool of joined spares, and the offers of the scheduler set by hand."""

    def __init__(self, pool: Pool = POOL) -> None:
        super().__init__(replace(POLICY, pools=(pool,)))
        self.offers: dict[str, bool] = {}
        self.template()
        self.fill()
        self.fill()
        self.offers.update((vm.name, False) for vm in self.rows.vms.values())
        self.run()

    @property
    def spare(self) -> Vm:
        return next(iter(self.rows.vms.values()))

    def observe(self) -> None:
        super().observe()
        if self.world.scheduler is not None:
            seen = self.world.scheduler
            view = replace(seen.value, offers=dict(self.offers))
            self.world = replace(self.world, scheduler=Seen(view, seen.began))

    def taken(self, state: JobState = JobState.RUNNING) -> Attempt:
        """A job has taken the spare as it was submitted."""
        vm = self.spare
        self.offers[vm.name] = True
        self.comes("7", vm, state)
        self.run()
        return self.attempt()

    def comes(self, job_id: str, vm: Vm, state: JobState = JobState.RUNNING, problem: str = "") -> None:
        """A job that took that spare, as the scheduler shows it."""
        job = self.job(job_id, state=state, gated=False, pinned=vm.feature, problem=problem)
        if state is not JobState.PENDING:
            self.jobs[job_id] = replace(job, nodes=(vm.name,))
            self.node(vm.name, NodeState.BUSY)

    def introduced(self) -> None:
        vm = next(iter(self.rows.vms.values()))
        self.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.RUNNING, introduced=(1000,))
        self.ended(self.attempt().key)
        self.run()


def test_a_joined_spare_is_offered_once_it_is_an_idle_node() -> None:
    s = Stage()
    assert (s.spare.state, s.spare.offer) == (V.JOINED, Offer.OPEN)
    effect = effect_of(s.spare)
    assert effect is not None and effect.kind is EffectKind.OFFER
    (pool,) = pool_status(s.rows, s.world, s.policy)
    assert (pool.ready, pool.offered, pool.making) == (1, 1, 0)
    for offers in ({}, {s.spare.name: True}):  # a scheduler that cannot offer it; a job that has just taken it
        s.offers = offers
        s.observe()
        (pool,) = pool_status(s.rows, s.world, s.policy)
        assert (pool.ready, pool.offered) == (1, 0)


def test_a_pool_that_does_not_offer_keeps_its_spares_to_the_gate() -> None:
    s = PlannerHarness(replace(POLICY, pools=(replace(POOL, offer=False),)))
    s.template()
    s.fill()
    s.run()
    (vm,) = s.rows.vms.values()
    assert (vm.state, vm.offer, effect_of(vm)) == (V.JOINED, None, None)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PENDING, JobState.SUSPENDED])
def test_a_job_that_took_a_spare_has_it_however_far_it_is(state: JobState) -> None:
    s = Stage()
    attempt = s.taken(state)
    vm = next(vm for vm in s.rows.vms.values() if vm.attempt == attempt.id)
    assert (attempt.state, attempt.feature, attempt.gated) == (A.SPAWNED, vm.feature, False)
    assert (vm.state, vm.offer) == (V.JOINED, Offer.TAKEN)
    effect = effect_of(attempt)
    assert effect is not None and effect.kind is EffectKind.PIN, "which introduces its user"
    assert effect_of(vm) is None
    assert [claim.owner for claim in s.rows.claims if claim.owner == vm.key] == [vm.key], "it is claimed as before"


def test_it_is_allocated_when_its_user_is_known_and_not_before() -> None:
    s = Stage()
    s.taken()
    s.run()
    s.run()
    assert s.attempt().state is A.SPAWNED
    s.hypervisor_known = False
    s.run()
    assert s.attempt().state is A.SPAWNED, "unknown is not introduced"
    s.hypervisor_known = True
    vm = s.spare
    s.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.RUNNING, introduced=(1,))
    s.run()
    assert s.attempt().state is A.SPAWNED, "another is"
    s.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.RUNNING, introduced=(1000,))
    s.effect_ended_at[s.attempt().key] = math.inf
    s.run()
    assert s.attempt().state is A.SPAWNED, "its user is being told what it is"
    s.introduced()
    assert s.attempt().state is A.ALLOCATED
    assert [vm.state for vm in s.all_vms()] == [V.SERVING]


def test_its_end_waits_for_that_too() -> None:
    s = Stage()
    s.taken()
    s.job(state=JobState.COMPLETING)
    s.run()
    assert s.attempt().state is A.SPAWNED, "or its node would never be free of it"
    s.introduced()
    s.run()
    assert s.attempt().state is A.RECLAIMING


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.COMPLETING])
def test_a_guest_that_cannot_be_told_ends_and_its_node_goes_down(state: JobState) -> None:
    s = Stage()
    s.taken()
    s.comes("7", s.spare, state)
    s.effect_ended_at[s.attempt().key] = s.clock.time + 5.0
    s.run(failed(s.attempt(), EffectKind.PIN, Refused("it could not be told of its user")))
    assert s.attempt().state is A.SPAWNED, "the look is from before that was said"
    s.pass_time(5.0)
    s.run()
    (vm,) = s.all_vms()
    assert (vm.state, vm.failed) == (V.RELEASING, True), "END sets a failed VM's node DOWN"
    assert s.attempt().state is A.ALLOCATED, "what becomes of its job, the scheduler says"


def test_one_that_has_let_its_job_in_is_not_ended_because_it_refuses_the_second_word() -> None:
    s = Stage()
    s.taken()
    s.effect_ended_at[s.attempt().key] = s.clock.time + 5.0
    s.run(failed(s.attempt(), EffectKind.PIN, Refused("it could not be told of its user")))
    s.pass_time(5.0)
    s.introduced()  # by the first, whose answer was lost
    assert s.attempt().state is A.ALLOCATED and [vm.state for vm in s.all_vms()] == [V.SERVING]


def test_one_that_gives_no_answer_is_told_again_and_not_for_ever() -> None:
    s = Stage()
    s.taken()
    s.run(failed(s.attempt(), EffectKind.PIN, Unknown("no answer")))
    assert s.attempt().state is A.SPAWNED and [vm.state for vm in s.all_vms()] == [V.JOINED]
    s.pass_time(s.policy.pin_timeout)
    s.ended(s.attempt().key)
    s.run()
    (vm,) = s.all_vms()
    assert (vm.state, vm.failed) == (V.RELEASING, True) and "60 s" in vm.reason


def test_while_it_is_being_told_its_time_is_not_over() -> None:
    s = Stage()
    s.taken()
    s.effect_ended_at[s.attempt().key] = math.inf
    s.pass_time(2 * s.policy.pin_timeout)
    s.run()
    assert [vm.state for vm in s.all_vms()] == [V.JOINED]
    s.introduced()
    assert s.attempt().state is A.ALLOCATED


def test_one_that_was_let_in_before_its_host_was_out_of_reach_goes_on() -> None:
    s = Stage()
    s.taken()
    away = s.hosts.pop("h1")
    s.run()
    assert [vm.state for vm in s.all_vms()] == [V.LOST]
    s.hosts["h1"] = away
    s.introduced()
    s.run()
    assert (s.attempt().state, [vm.state for vm in s.all_vms()]) == (A.ALLOCATED, [V.SERVING])


def test_one_on_a_host_out_of_reach_is_waited_for_and_then_given_up() -> None:
    s = Stage()
    s.taken()
    away = s.hosts.pop("h1")
    s.run()
    s.pass_time(s.policy.pin_timeout)
    s.run()
    assert s.attempt().state is A.SPAWNED and [vm.state for vm in s.all_vms()] == [V.LOST]
    s.hosts["h1"] = away
    s.run()
    assert [(vm.state, vm.failed) for vm in s.all_vms()] == [(V.RELEASING, True)], "its job has not begun"


def test_a_job_that_starts_when_its_attempt_has_given_up_is_not_left_waiting() -> None:
    s = Stage()
    s.taken(JobState.PENDING)
    s.pass_time(s.policy.pin_timeout)
    s.ended(s.attempt().key)
    s.run()
    assert s.attempt().state is A.RECLAIMING
    s.comes("7", next(iter(s.rows.vms.values())))
    s.run()
    s.run()
    assert [(vm.state, vm.failed) for vm in s.all_vms()] == [(V.RELEASING, True)]


def test_a_job_whose_node_is_down_goes_back_to_the_gate() -> None:
    s = Stage()
    s.taken(JobState.PENDING)
    s.node(s.spare.name, NodeState.DOWN)
    s.run()
    assert (s.attempt().state, s.attempt().outcome) == (A.RECLAIMING, "requeued")


def test_a_guest_that_dies_is_not_waited_for() -> None:
    s = Stage()
    s.taken()
    s.seen(s.spare.name, VmCondition.DEAD)
    s.run()
    s.run()
    assert s.attempt().state is A.ALLOCATED
    assert [(vm.state, vm.failed) for vm in s.all_vms()] == [(V.RELEASING, True)]


def test_what_was_taken_and_no_job_came_for_it_is_released() -> None:
    s = Stage()
    vm = s.spare
    s.offers[vm.name] = True
    s.run()
    assert s.rows.vms[vm.id].offer is Offer.TAKEN
    s.pass_time(20.0)
    s.run()
    assert s.rows.vms[vm.id].state is V.JOINED, "it may be on its way"
    s.pass_time(10.0)
    s.run()
    gone = s.rows.vms[vm.id]
    assert (gone.state, gone.failed, gone.forget) == (V.RELEASING, False, True)


def test_a_job_on_it_that_cannot_be_served_loses_it_by_its_node_going_down() -> None:
    s = Stage()
    s.offers[s.spare.name] = True
    vm = s.spare
    s.comes("7", vm, problem="no such thing")
    s.run()
    s.pass_time(6.0)
    s.run()
    gone = s.rows.vms[vm.id]
    assert (gone.state, gone.failed, gone.forget) == (V.RELEASING, True, False)


def test_a_job_at_the_gate_has_the_offer_withdrawn_and_then_the_node() -> None:
    s = Stage()
    vm = s.spare
    s.job()
    s.run()
    assert s.attempt().state is A.QUEUED
    closing = s.rows.vms[vm.id]
    assert closing.offer is Offer.CLOSING
    effect = effect_of(closing)
    assert effect is not None and effect.kind is EffectKind.WITHDRAW
    s.run()
    assert s.rows.vms[vm.id].offer is Offer.CLOSING, "nobody has said yet that it was withdrawn"
    del s.offers[vm.name]
    s.pass_time(-1.5)
    s.ended(vm.key)
    s.run()
    assert (s.attempt().state, s.attempt().feature) == (A.SPAWNED, vm.feature)
    assert s.rows.vms[vm.id].attempt == 1


def test_if_another_is_faster_that_has_it_and_the_one_at_the_gate_gets_a_clone() -> None:
    s = Stage()
    vm = s.spare
    s.job()
    s.run()
    s.offers[vm.name] = True
    s.comes("8", vm)
    s.run()
    first, second = s.attempt(1), s.attempt(2)
    assert (second.job.job_id, second.state) == ("8", A.SPAWNED)
    assert s.rows.vms[vm.id].attempt == 2
    assert first.state is A.CLAIMED and [one.id != vm.id for one in s.all_vms(1)] == [True]


def test_a_job_does_not_wait_for_ever_until_an_offer_is_withdrawn() -> None:
    s = Stage()
    vm = s.spare
    s.job()
    for _ in range(4):  # the directory cannot be written, say: the effect fails again and again
        s.run()
    assert s.attempt().state is A.CLAIMED and s.rows.vms[vm.id].attempt is None


def test_two_at_the_gate_do_not_wait_for_one_node() -> None:
    s = Stage()
    s.job()
    s.job("8")
    s.run()
    states = sorted(s.attempt(n).state for n in (1, 2))
    assert states == [A.CLAIMED, A.QUEUED]


def test_what_is_too_old_is_withdrawn_before_it_is_released() -> None:
    s = Stage()
    vm = s.spare
    s.pass_time(101.0)
    s.run()
    old = s.rows.vms[vm.id]
    assert (old.state, old.offer) == (V.JOINED, Offer.CLOSING) and "older" in old.unwanted
    del s.offers[vm.name]
    s.ended(vm.key)
    s.run()
    assert s.rows.vms[vm.id].state is V.RELEASING and "older" in s.rows.vms[vm.id].reason


def test_one_that_is_taken_while_it_is_withdrawn_serves() -> None:
    s = Stage()
    s.pass_time(101.0)
    s.run()
    attempt = s.taken()
    (vm,) = s.all_vms()
    assert attempt.state is A.SPAWNED and (vm.attempt, vm.offer, vm.unwanted) == (attempt.id, Offer.TAKEN, "")


def test_on_a_host_out_of_reach_it_is_withdrawn() -> None:
    s = Stage()
    del s.hosts["h1"]
    s.run()
    assert s.spare.state is V.LOST
    effect = effect_of(s.spare)
    assert effect is not None and effect.kind is EffectKind.WITHDRAW


def test_a_look_from_before_says_nothing_of_it() -> None:
    s = Stage()
    vm = s.spare
    s.observe()
    s.effect_ended_at[vm.key] = s.clock.time + 10.0
    s.offers[vm.name] = True
    s.run()
    assert s.rows.vms[vm.id].offer is Offer.OPEN


def test_one_that_was_withdrawn_for_a_job_that_went_is_replaced_by_one_on_offer() -> None:
    s = Stage()
    s.job()
    s.run()
    vm = s.spare
    del s.offers[vm.name]
    s.jobs.clear()
    s.ended(vm.key)
    s.run()
    assert s.rows.vms[vm.id].state is V.RELEASING and "nobody took it" in s.rows.vms[vm.id].reason


def test_while_jobs_wait_for_room_nothing_is_on_offer_to_those_that_come() -> None:
    s = Stage()
    s.to_allocated(size=Size(3, 5000))
    vm = s.spare
    assert vm.offer is Offer.OPEN
    s.job("8", size=Size(3, 6000))
    s.run()
    assert (s.rows.vms[vm.id].offer, s.rows.vms[vm.id].unwanted) == (Offer.CLOSING, ""), "its room would not be enough"


def test_a_job_that_needs_the_room_of_one_costs_the_others_nothing() -> None:
    s = Stage(replace(POOL, least=2, most=2))
    assert [vm.offer for vm in s.rows.vms.values()] == [Offer.OPEN] * 2
    s.job(size=Size(3, 500))  # of four CPUs each spare has one
    s.run()
    assert [vm.offer for _, vm in sorted(s.rows.vms.items())] == [Offer.CLOSING, Offer.OPEN]


def test_those_that_were_withdrawn_in_vain_are_replaced_one_after_the_other() -> None:
    s = Stage(replace(POOL, least=2, most=2))
    s.to_allocated(size=Size(1, 3000))
    s.job("8", size=Size(1, 5500))  # more than it would have without them
    s.run()
    spares = [vm for vm in s.rows.vms.values() if vm.pool]
    assert [vm.offer for vm in spares] == [Offer.CLOSING] * 2
    for vm in spares:
        del s.offers[vm.name]
        s.ended(vm.key)
    s.run()
    assert [s.rows.vms[vm.id].offer for vm in spares] == [Offer.CLOSED] * 2, "they may yet serve who waits"
    del s.jobs["8"]
    s.run()
    assert sorted(s.rows.vms[vm.id].state for vm in spares) == [V.JOINED, V.RELEASING]
    s.run()
    assert sorted(s.rows.vms[vm.id].state for vm in spares) == [V.JOINED, V.RELEASING]


def test_what_its_pool_offers_no_more_is_withdrawn_and_stays_for_the_gate() -> None:
    s = Stage()
    s.policy = replace(s.policy, pools=(replace(POOL, offer=False),))
    s.run()
    vm = s.spare
    assert vm.offer is Offer.CLOSING
    del s.offers[vm.name]
    for _ in range(3):
        s.ended(vm.key)
        s.run()
    assert (s.rows.vms[vm.id].state, s.rows.vms[vm.id].offer) == (V.JOINED, Offer.CLOSED)


def test_of_one_in_quarantine_nothing_is_done_but_that_no_job_comes_to_it() -> None:
    for offer in (Offer.OPEN, Offer.CLOSING):
        effect = effect_of(hand.vm(V.JOINED, pool=Depth.JOINED, offer=offer, quarantined="a fault"))
        assert effect is not None and effect.kind is EffectKind.WITHDRAW


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        ("slim", CloneKind.INSTANT, (True, True)),
        ("slim", CloneKind.AUTO, (True, True)),
        ("slim", CloneKind.FULL, (True, False)),
        ("warm", CloneKind.LINKED, (False, False)),
    ],
)
def test_what_a_job_may_leave_unsaid(image: str, kind: CloneKind, expected: tuple[bool, bool]) -> None:
    assert named_by_none(image, "slim", kind) == expected


def test_its_phases_follow_each_other_without_gap() -> None:
    s = Stage()
    s.taken()
    s.introduced()
    found = phases(s.store.journal(attempts=[1]), s.clock.time)
    assert [p.name for p in found] == ["queued", "clone", "join", "launch", "run"]
    assert [p.seconds for p in found[:3]] == [0.0] * 3 and found[3].seconds > 0
