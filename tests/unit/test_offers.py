"""Joined spares that jobs take by themselves, as they are submitted: the planner's rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from multiverse.core import planner
from multiverse.core.changes import mark_changes
from multiverse.core.clones.spares import named_by_none
from multiverse.core.context import Context
from multiverse.core.errors import Refused, Unknown
from multiverse.core.machines.attempt import open_attempts, step_attempt
from multiverse.core.machines.offer import step_offer
from multiverse.core.machines.tables import effect_of
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.job import Attempt, AttemptState, Job, JobRef, JobState, NodeState, Request, SchedulerView
from multiverse.core.model.reason import said, text_of
from multiverse.core.model.vm import Offer, OfferState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.policy import Pool
from multiverse.core.pools import pool_status
from multiverse.core.transition import Effect, EffectKind, Event
from multiverse.service.convert import phases
from tests.unit import rows as hand
from tests.unit.planner_harness import POLICY, PlannerHarness, failed
from tests.unit.rows import effects_of

A, V, O = AttemptState, VmState, OfferState  # noqa: E741
POOL = Pool("slim", Depth.JOINED, 1, 1, Size(1, 512), 100.0)
SPARE = hand.vm(V.JOINED, pool=Depth.JOINED)
STRANGE = Job(JobRef("7", 500), "x", 1, JobState.RUNNING, None, problem="it cannot be served", nodes=(SPARE.name,))


class SparesHarness(PlannerHarness):
    """A pool of joined spares, and a scheduler whose offers a test sets."""

    def __init__(self, pool: Pool = POOL) -> None:
        super().__init__(replace(POLICY, pools=(pool,)))
        self.template()
        self.fill()
        self.fill()
        self.offers.update((vm.name, False) for vm in self.rows.vms.values())
        self.run()

    @property
    def shown(self) -> dict[str, bool]:
        """The offers that the scheduler shows."""
        assert self.offers is not None
        return self.offers

    @property
    def spare(self) -> Vm:
        return next(iter(self.rows.vms.values()))

    def taken(self, state: JobState = JobState.RUNNING) -> Attempt:
        """A job has taken the spare as it was submitted."""
        vm = self.spare
        self.shown[vm.name] = True
        self.comes("7", vm, state)
        self.run()
        return self.attempt()

    def comes(self, job_id: str, vm: Vm, state: JobState = JobState.RUNNING, problem: str = "") -> None:
        """A job that took that spare, as the scheduler shows it."""
        job = self.job(job_id, state=state, gated=False, pinned=vm.feature, problem=problem)
        if state is not JobState.PENDING:
            self.jobs[job_id] = job._replace(nodes=(vm.name,))
            self.node(vm.name, NodeState.BUSY)

    def offer_of(self, vm: Vm) -> O | None:
        """The state of the VM's offer."""
        offer = self.rows.offers.get(vm.id)
        return offer.state if offer else None

    def offer_effect(self, vm: Vm) -> EffectKind | None:
        """The effect that runs under the VM's key."""
        return next((effect.kind for _, effect in effects_of(self.rows) if effect.key == vm.key), None)

    def ends(self) -> list[str]:
        """The states of the first attempt's VMs."""
        return [str(vm.state) for vm in self.all_vms()]

    def user_added(self) -> None:
        vm = next(iter(self.rows.vms.values()))
        self.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.RUNNING, users_added=(1000,))
        self.ended(self.attempt().key)
        self.run()


def test_a_joined_spare_is_offered_when_it_is_an_idle_node() -> None:
    s = SparesHarness()
    assert (s.spare.state, s.offer_of(s.spare)) == (V.JOINED, O.OPEN)
    assert s.offer_effect(s.spare) is EffectKind.OFFER
    (pool,) = pool_status(Context(s.state, s.world, s.policy))
    assert (pool.ready, pool.offered, pool.creating) == (1, 1, 0)
    for offers in ({}, {s.spare.name: True}, None):  # not offered yet, just taken, a scheduler that cannot offer
        s.offers = offers
        s.observe()
        (pool,) = pool_status(Context(s.state, s.world, s.policy))
        assert (pool.ready, pool.offered) == (1, 0)


def test_nothing_is_offered_where_the_scheduler_cannot_offer() -> None:
    s = SparesHarness()
    s.pass_time(101.0)  # another spare is made in place of this one
    s.run()
    s.shown.clear()
    s.ended(s.spare.key)
    s.run()
    s.clear()
    s.offers = None
    s.run()
    s.fill()
    s.run()
    assert [vm.state for vm in s.rows.vms.values()] == [V.JOINED]
    assert s.rows.offers == {} and s.offer_effect(s.spare) is None


def test_a_pool_that_does_not_offer_keeps_its_spares_to_the_gate() -> None:
    s = PlannerHarness(replace(POLICY, pools=(replace(POOL, offer=False),)))
    s.template()
    s.fill()
    s.run()
    (vm,) = s.rows.vms.values()
    assert (vm.state, s.rows.offers, effect_of(vm)) == (V.JOINED, {}, None)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.PENDING, JobState.SUSPENDED])
def test_a_job_that_took_a_spare_has_it_in_whichever_state_it_is(state: JobState) -> None:
    s = SparesHarness()
    attempt = s.taken(state)
    vm = next(vm for vm in s.rows.vms.values() if vm.attempt == attempt.id)
    assert (attempt.state, attempt.feature) == (A.ADDING_USER, vm.feature)
    assert (vm.state, s.offer_of(vm)) == (V.JOINED, O.TAKEN)
    effect = effect_of(attempt)
    assert effect is not None and effect.kind is EffectKind.PIN, "which adds its user"
    assert s.offer_effect(vm) is None
    assert [claim.owner for claim in s.rows.claims if claim.owner == vm.key] == [vm.key], "it is claimed as before"


@pytest.mark.parametrize("state", [JobState.COMPLETING, JobState.ENDED])
def test_a_job_that_is_over_when_it_is_first_seen_gets_no_attempt(state: JobState) -> None:
    s = SparesHarness()
    s.comes("7", s.spare, state)
    s.run()
    assert s.rows.attempts == {} and s.spare.attempt is None
    assert s.state.unserved == set(), "it is not looked at again"


def test_what_is_said_of_a_job_that_took_a_spare() -> None:
    s = SparesHarness()
    vm = s.spare
    s.comes("7", vm)
    s.run()
    choice = "instant on h1, joined before, taken as it was submitted"
    assert text_of(s.attempt().choice) == choice
    found = {
        (entry.kind, entry.event): text_of(entry.reason)
        for entry in s.store.journal()
        if entry.event.startswith("took")
    }
    assert found == {("attempt", Event.TOOK): choice}
    taken = {entry.kind: text_of(entry.reason) for entry in s.store.journal() if entry.event == Event.TAKEN}
    assert taken == dict.fromkeys(("vm", "offer"), "by job 7, as it came")


def test_a_job_takes_no_vm_that_was_never_offered_and_none_that_serves_another_attempt() -> None:
    spare = hand.vm(V.JOINED, pool=Depth.JOINED)
    earlier = hand.attempt(A.RECLAIMING, outcome="requeued")
    again = STRANGE._replace(ref=JobRef("7", 600, 1), request=Request(1, Size(1, 100)), problem="", gated=False)
    for held in (
        hand.state(spare, earlier),
        hand.state(replace(spare, attempt=1), earlier, hand.offer(O.TAKEN)),
    ):
        before = held.vms[1]
        jobs = {"7": again._replace(state=JobState.PENDING, nodes=(), pinned=spare.feature)}
        world = hand.world_of(SchedulerView(jobs), None, 1.0)
        mark_changes(held, world, POLICY)
        open_attempts(held, world, POLICY)
        assert held.attempts[100].state is A.UNGATED and held.vms[1] == before


def test_the_attempt_is_allocated_when_the_guest_knows_the_user_and_not_before() -> None:
    s = SparesHarness()
    s.taken()
    s.run()
    s.run()
    assert s.attempt().state is A.ADDING_USER
    s.hypervisor_known, s.unknown_since = False, s.clock.time
    s.run()
    assert s.attempt().state is A.ADDING_USER, "nothing is known of the guest"
    s.hypervisor_known = True
    vm = s.spare
    s.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.RUNNING, users_added=(1,))
    s.run()
    assert s.attempt().state is A.ADDING_USER, "another user was added"
    s.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.RUNNING, users_added=(1000,))
    s.effect_ended_at[s.attempt().key] = math.inf
    s.run()
    assert s.attempt().state is A.ADDING_USER, "its effect still runs"
    s.user_added()
    assert s.attempt().state is A.ALLOCATED
    assert [vm.state for vm in s.all_vms()] == [V.SERVING]


def test_the_end_of_the_job_waits_until_the_guest_knows_the_user_too() -> None:
    s = SparesHarness()
    s.taken()
    s.job(state=JobState.COMPLETING)
    s.run()
    assert s.attempt().state is A.ADDING_USER, "or its node would never be free of it"
    s.user_added()
    s.run()
    assert s.attempt().state is A.RECLAIMING


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.COMPLETING])
def test_a_guest_that_refuses_the_user_ends_and_its_node_goes_down(state: JobState) -> None:
    s = SparesHarness()
    s.taken()
    s.comes("7", s.spare, state)
    s.effect_ended_at[s.attempt().key] = s.clock.time + 5.0
    s.refused[s.attempt().key] = "it could not add the user"
    s.run(failed(s.attempt(), EffectKind.PIN, Refused("it could not add the user")))
    assert s.attempt().state is A.ADDING_USER, "the observation began before the effect ended"
    s.pass_time(5.0)
    s.run()
    (vm,) = s.all_vms()
    assert vm.state is V.ENDING and text_of(vm.reason) == "it could not add the user"
    assert effect_of(vm) == Effect(EffectKind.END, vm.key), "which sets its node DOWN"
    assert s.attempt().state is A.ALLOCATED, "the scheduler decides about its job"


def test_a_guest_that_knows_the_user_is_not_ended_because_it_refuses_the_second_request() -> None:
    s = SparesHarness()
    s.taken()
    s.effect_ended_at[s.attempt().key] = s.clock.time + 5.0
    s.refused[s.attempt().key] = "it could not add the user"
    s.run(failed(s.attempt(), EffectKind.PIN, Refused("it could not add the user")))
    s.pass_time(5.0)
    s.user_added()  # by the first request, whose answer was lost
    assert s.attempt().state is A.ALLOCATED and [vm.state for vm in s.all_vms()] == [V.SERVING]


def test_a_guest_that_does_not_answer_is_given_up_after_a_time() -> None:
    s = SparesHarness()
    s.taken()
    s.run(failed(s.attempt(), EffectKind.PIN, Unknown("no answer")))
    assert s.attempt().state is A.ADDING_USER and [vm.state for vm in s.all_vms()] == [V.JOINED]
    s.pass_time(s.policy.pin_timeout)
    s.ended(s.attempt().key)
    s.run()
    (vm,) = s.all_vms()
    assert vm.state is V.ENDING and "60 s" in text_of(vm.reason)


def test_a_guest_is_not_given_up_while_its_effect_runs() -> None:
    s = SparesHarness()
    s.taken()
    s.effect_ended_at[s.attempt().key] = math.inf
    s.pass_time(2 * s.policy.pin_timeout)
    s.run()
    assert [vm.state for vm in s.all_vms()] == [V.JOINED]
    s.user_added()
    assert s.attempt().state is A.ALLOCATED


def test_a_job_whose_user_was_added_goes_on_after_its_host_was_out_of_reach() -> None:
    s = SparesHarness()
    s.taken()
    away = s.hosts.pop("h1")
    s.run()
    assert [vm.state for vm in s.all_vms()] == [V.LOST]
    s.hosts["h1"] = away
    s.user_added()
    s.run()
    assert (s.attempt().state, [vm.state for vm in s.all_vms()]) == (A.ALLOCATED, [V.SERVING])


def test_a_taken_spare_on_a_host_out_of_reach_is_given_up_when_the_host_is_back() -> None:
    s = SparesHarness()
    s.taken()
    away = s.hosts.pop("h1")
    s.run()
    s.pass_time(s.policy.pin_timeout)
    s.run()
    assert s.attempt().state is A.ADDING_USER and [vm.state for vm in s.all_vms()] == [V.LOST]
    s.hosts["h1"] = away
    s.run()
    assert [vm.state for vm in s.all_vms()] == [V.ENDING], "its job has not begun"


def test_a_job_that_starts_after_its_attempt_gave_up_loses_its_vm() -> None:
    s = SparesHarness()
    s.taken(JobState.PENDING)
    s.pass_time(s.policy.pin_timeout)
    s.ended(s.attempt().key)
    s.run()
    assert s.attempt().state is A.RETURNING
    s.comes("7", next(iter(s.rows.vms.values())))
    s.run()
    assert [vm.state for vm in s.all_vms()] == [V.ENDING]
    assert (s.attempt().state, s.attempt().outcome) == (A.RECLAIMING, "done"), "its job is on its node"
    s.run()
    assert [vm.state for vm in s.all_vms()] == [V.ENDING]


@pytest.mark.parametrize("state", [NodeState.DOWN, NodeState.SILENT, NodeState.DRAINED])
def test_a_job_whose_node_takes_no_job_goes_back_to_the_gate(state: NodeState) -> None:
    s = SparesHarness()
    s.taken(JobState.PENDING)
    s.node(s.spare.name, state)
    s.run()
    assert (s.attempt().state, s.attempt().outcome) == (A.RETURNING, "requeued")
    assert s.attempt().tries == 1, "it counts as a try that failed"


def test_a_guest_that_dies_is_not_waited_for() -> None:
    s = SparesHarness()
    s.taken()
    s.seen(s.spare.name, VmCondition.DEAD)
    s.run()
    s.run()
    assert s.attempt().state is A.ALLOCATED
    assert [vm.state for vm in s.all_vms()] == [V.ENDING]


def test_a_spare_that_was_taken_is_released_if_its_job_does_not_come() -> None:
    s = SparesHarness()
    vm = s.spare
    s.shown[vm.name] = True
    s.run()
    assert s.offer_of(vm) is O.TAKEN
    s.pass_time(20.0)
    s.run()
    assert s.rows.vms[vm.id].state is V.JOINED, "it may be on its way"
    s.pass_time(10.0)
    s.run()
    gone = s.rows.vms[vm.id]
    assert gone.state is V.RELEASING and text_of(gone.reason) == "the job that took it did not come"


def test_a_spare_with_a_job_that_cannot_be_served_ends() -> None:
    s = SparesHarness()
    s.shown[s.spare.name] = True
    vm = s.spare
    s.comes("7", vm, problem="no such thing")
    s.run()
    s.pass_time(6.0)
    s.run()
    gone = s.rows.vms[vm.id]
    assert gone.state is V.ENDING, "its node goes DOWN"


def test_a_job_at_the_gate_has_the_offer_withdrawn_and_then_the_node() -> None:
    s = SparesHarness()
    vm = s.spare
    s.job()
    s.run()
    assert s.attempt().state is A.QUEUED
    assert s.offer_of(vm) is O.CLOSING and s.offer_effect(vm) is EffectKind.WITHDRAW
    s.run()
    assert s.offer_of(vm) is O.CLOSING, "its withdrawal has not ended"
    del s.shown[vm.name]
    s.pass_time(-1.5)
    s.ended(vm.key)
    s.run()
    assert (s.attempt().state, s.attempt().feature) == (A.SPAWNED, vm.feature)
    assert s.rows.vms[vm.id].attempt == 1


def test_a_job_that_takes_a_promised_spare_keeps_it_and_the_job_at_the_gate_gets_a_clone() -> None:
    s = SparesHarness()
    vm = s.spare
    s.job()
    s.run()
    s.shown[vm.name] = True
    s.comes("8", vm)
    s.run()
    first, second = s.attempt(1), s.attempt(2)
    assert (second.job.job_id, second.state) == ("8", A.ADDING_USER)
    assert s.rows.vms[vm.id].attempt == 2
    assert first.state is A.CLAIMED and [one.id != vm.id for one in s.all_vms(1)] == [True]


def test_a_job_does_not_wait_for_ever_until_an_offer_is_withdrawn() -> None:
    s = SparesHarness()
    vm = s.spare
    s.job()
    for _ in range(4):  # the directory cannot be written, say: the effect fails again and again
        s.run()
    assert s.attempt().state is A.CLAIMED and s.rows.vms[vm.id].attempt is None


def test_two_jobs_at_the_gate_do_not_wait_for_one_spare() -> None:
    s = SparesHarness()
    s.job()
    s.job("8")
    s.run()
    states = sorted(s.attempt(n).state for n in (1, 2))
    assert states == [A.CLAIMED, A.QUEUED]


def test_a_spare_that_is_too_old_is_withdrawn_before_it_is_released() -> None:
    s = SparesHarness()
    vm = s.spare
    s.pass_time(101.0)
    s.run()
    old = s.rows.vms[vm.id]
    assert (old.state, s.offer_of(old)) == (V.RETIRING, O.CLOSING) and "older" in text_of(old.reason)
    assert s.offer_effect(old) is EffectKind.WITHDRAW
    del s.shown[vm.name]
    s.ended(vm.key)
    s.run()
    assert s.rows.vms[vm.id].state is V.RELEASING and "older" in text_of(s.rows.vms[vm.id].reason)


def test_a_retiring_spare_that_is_taken_while_it_is_withdrawn_serves() -> None:
    s = SparesHarness()
    s.pass_time(101.0)
    s.run()
    assert s.spare.state is V.RETIRING
    attempt = s.taken()
    (vm,) = s.all_vms()
    assert (attempt.state, vm.state, s.offer_of(vm)) == (A.ADDING_USER, V.JOINED, O.TAKEN)
    assert (vm.attempt, text_of(vm.reason)) == (attempt.id, ""), "nothing says any more that it is to go"


def test_a_spare_on_a_host_out_of_reach_is_withdrawn() -> None:
    s = SparesHarness()
    del s.hosts["h1"]
    s.run()
    assert (s.spare.state, s.offer_of(s.spare)) == (V.LOST, O.CLOSING)
    assert s.offer_effect(s.spare) is EffectKind.WITHDRAW


def test_an_observation_from_before_the_last_effect_says_nothing_of_an_offer() -> None:
    s = SparesHarness()
    vm = s.spare
    s.observe()
    s.effect_ended_at[vm.key] = s.clock.time + 10.0
    s.shown[vm.name] = True
    s.run()
    assert s.offer_of(vm) is O.OPEN


def test_a_spare_withdrawn_for_a_job_that_went_is_replaced_by_one_on_offer() -> None:
    s = SparesHarness()
    s.job()
    s.run()
    vm = s.spare
    del s.shown[vm.name]
    s.jobs.clear()
    s.ended(vm.key)
    s.run()
    assert s.rows.vms[vm.id].state is V.RELEASING and "nobody took it" in text_of(s.rows.vms[vm.id].reason)


def test_while_jobs_wait_for_room_no_spare_is_on_offer() -> None:
    s = SparesHarness()
    s.to_allocated(size=Size(3, 5000))
    vm = s.spare
    assert s.offer_of(vm) is O.OPEN
    s.job("8", size=Size(3, 6000))
    s.run()
    assert (s.rows.vms[vm.id].state, s.offer_of(vm)) == (V.JOINED, O.CLOSING), "its room would not be enough"


def test_a_job_that_needs_the_room_of_one_spare_leaves_the_others_on_offer() -> None:
    s = SparesHarness(replace(POOL, least=2, most=2))
    assert [s.offer_of(vm) for vm in s.rows.vms.values()] == [O.OPEN] * 2
    s.job(size=Size(3, 500))  # of four CPUs each spare has one
    s.run()
    assert [s.offer_of(vm) for _, vm in sorted(s.rows.vms.items())][:2] == [O.CLOSING, O.OPEN]


def test_spares_that_were_withdrawn_in_vain_are_replaced_one_after_the_other() -> None:
    s = SparesHarness(replace(POOL, least=2, most=2))
    s.to_allocated(size=Size(1, 3000))
    s.job("8", size=Size(1, 5500))  # more than it would have without them
    s.run()
    spares = [vm for vm in s.rows.vms.values() if vm.pool]
    assert [s.offer_of(vm) for vm in spares] == [O.CLOSING] * 2
    for vm in spares:
        del s.shown[vm.name]
        s.ended(vm.key)
    s.run()
    assert [s.offer_of(vm) for vm in spares] == [O.CLOSED] * 2, "they may yet serve the job that waits"
    del s.jobs["8"]
    s.run()
    assert sorted(s.rows.vms[vm.id].state for vm in spares) == [V.JOINED, V.RELEASING]
    s.run()
    assert sorted(s.rows.vms[vm.id].state for vm in spares) == [V.JOINED, V.RELEASING]


def test_a_spare_whose_pool_offers_no_more_is_withdrawn_and_stays_for_the_gate() -> None:
    s = SparesHarness()
    s.policy = replace(s.policy, pools=(replace(POOL, offer=False),))
    s.run()
    vm = s.spare
    assert s.offer_of(vm) is O.CLOSING
    del s.shown[vm.name]
    for _ in range(3):
        s.ended(vm.key)
        s.run()
    assert (s.rows.vms[vm.id].state, s.offer_of(vm)) == (V.JOINED, O.CLOSED)


def test_the_offer_of_a_spare_in_quarantine_is_withdrawn_and_nothing_else_is_done_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s = SparesHarness()
    monkeypatch.setattr(planner, "step_vm", lambda *_: {}["x"])
    s.run()
    monkeypatch.undo()
    s.run()
    assert text_of(s.spare.quarantined) and s.spare.state is V.JOINED
    assert (s.offer_of(s.spare), s.offer_effect(s.spare)) == (O.CLOSING, EffectKind.WITHDRAW)
    assert effect_of(s.spare) is None


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        ("slim", CloneKind.INSTANT, (True, True)),
        ("slim", CloneKind.AUTO, (True, True)),
        ("slim", CloneKind.FULL, (True, False)),
        ("warm", CloneKind.LINKED, (False, False)),
    ],
)
def test_whether_jobs_without_image_or_kind_are_served(
    image: str, kind: CloneKind, expected: tuple[bool, bool]
) -> None:
    assert named_by_none(image, "slim", kind) == expected


def test_the_phases_of_a_job_that_took_a_spare_follow_each_other_without_gap() -> None:
    s = SparesHarness()
    s.taken()
    s.user_added()
    found = phases(s.store.journal(attempts=[1]), s.clock.time)
    assert [p.name for p in found] == ["queued", "clone", "join", "launch", "run"]
    assert [p.seconds for p in found[:3]] == [0.0] * 3 and found[3].seconds > 0


# --- one step of an offer ---------------------------------------------------------------------------


def stepped(
    offer: Offer, began: float, *jobs: Job, shown: bool | None = None, ended: float = 0.0
) -> list[tuple[Event, str, str]]:
    """The event, the new state and the reason that the journal gives, of each change of one step of the offer. The
    scheduler was observed at `began`, and shows the offer as `shown`; the VM's last effect ended at `ended`."""
    held = hand.state(SPARE, offer)
    offers = {} if shown is None else {SPARE.name: shown}
    view = SchedulerView({job.ref.job_id: job for job in jobs}, offers=offers)
    step_offer(held, offer.id, hand.world_of(view, None, began, effect_ended_at={SPARE.key: ended}))
    return [(change.event, str(change.row.state), text_of(change.reason)) for change in hand.changes_of(held.moves)]


@pytest.mark.parametrize(("jobs", "limit", "target"), [((), 30.0, "releasing"), ((STRANGE,), 5.0, "ending")])
def test_a_spare_that_was_taken_in_vain_goes_after_the_limit_and_not_at_it(
    jobs: tuple[Job, ...], limit: float, target: str
) -> None:
    taken = hand.offer(O.TAKEN, since=100.0)
    assert stepped(taken, 100.0 + limit, *jobs, shown=True) == []
    assert stepped(taken, 100.0 + limit + 0.1, *jobs, shown=True) == [
        (Event.RELEASED, target, "the job that took it did not come"),
        (Event.MISSED, "taken", "the job that took it did not come"),
    ]


@pytest.mark.parametrize(("takers", "by"), [({SPARE.name: 1001}, " of uid 1001"), ({}, ""), ({"mvtest0-9": 1001}, "")])
def test_a_taken_offer_names_the_user_if_the_scheduler_does(takers: dict[str, int], by: str) -> None:
    held = hand.state(SPARE, hand.offer(O.OPEN))
    step_offer(held, 1, hand.world_of(SchedulerView(offers={SPARE.name: True}, takers=takers), None, 100.0))
    (change,) = hand.changes_of(held.moves)
    assert isinstance(change.row, Offer) and change.row.uid == takers.get(SPARE.name)
    assert text_of(change.reason) == f"by a submission{by}"


@pytest.mark.parametrize("most", [1, 3])
def test_spares_that_are_taken_in_vain_count_towards_the_most_that_the_pool_has(most: int) -> None:
    """A user takes each offer and submits no job, as with `sbatch --test-only` in a loop."""
    s = SparesHarness(replace(POOL, most=most))
    counts = []
    for _ in range(60):
        s.shown.update((vm.name, True) for vm in s.rows.vms.values() if s.offer_of(vm) is O.OPEN)
        s.run()
        s.fill()
        s.shown.update((vm.name, False) for vm in s.rows.vms.values() if s.offer_of(vm) is O.OPEN)
        s.run()
        counts.append(len(s.rows.vms))
        s.pass_time(1.0)
    assert max(counts) == most, "without the limit, a spare would be made each second"


def test_a_spare_whose_job_has_come_counts_no_more_towards_the_most_that_the_pool_has() -> None:
    s = SparesHarness()
    first = s.spare
    s.taken(JobState.PENDING)
    s.fill()
    assert len(s.rows.vms) == 2 and s.offer_of(first) is O.TAKEN, "another one is made beside the one that serves"


@pytest.mark.parametrize(("since", "ended"), [(100.0, 50.0), (50.0, 100.0)])
def test_an_observation_tells_of_an_offer_if_it_began_after_its_state_and_its_effect(
    since: float, ended: float
) -> None:
    for row, shown, expected in (
        (hand.offer(O.OPEN, since=since), True, (Event.TAKEN, "taken", "by a submission")),
        (
            replace(hand.offer(O.CLOSING, since=since), reason="jobs wait for room"),
            None,
            (Event.CLOSED, "closed", "jobs wait for room"),
        ),
    ):
        assert stepped(row, 100.0, shown=shown, ended=ended) == []
        assert stepped(row, 100.1, shown=shown, ended=ended) == [expected]


def test_the_journal_says_why_the_offer_of_a_vm_that_serves_nobody_is_withdrawn() -> None:
    held = hand.state(replace(SPARE, state=V.LOST), hand.offer(O.OPEN))
    step_offer(held, 1, World())
    assert [text_of(change.reason) for change in hand.changes_of(held.moves)] == ["its VM can serve no job"]


def test_an_offer_ends_once_nothing_or_only_the_node_of_its_vm_is_left() -> None:
    quarantined = replace(hand.offer(O.OPEN), quarantined=said("a fault"))
    for rows in ([hand.offer(O.TAKEN)], [quarantined], [hand.offer(O.CLOSED), replace(SPARE, state=V.DELETING)]):
        held = hand.state(*rows)
        step_offer(held, 1, World())
        assert [(change.row.state, change.event) for change in hand.changes_of(held.moves)] == [(O.ENDED, Event.ABSENT)]
        assert not held.offers


def test_a_vm_without_an_offer_is_left_alone() -> None:
    held = hand.state(SPARE)
    step_offer(held, 1, World())
    assert held.moves == []


# --- one step of an attempt whose job took a spare ----------------------------------------------------

SINCE = 100.0
ADDING_USER = hand.attempt(A.ADDING_USER, since=SINCE, pin=SPARE.feature)
RUNS = STRANGE._replace(request=ADDING_USER.request, problem="", gated=False, pinned=SPARE.feature)


def step_on(
    row: Attempt,
    spare: Vm,
    began: float | None,
    *,
    ended: float | None = None,
    refused: str = "",
    users_added: tuple[int, ...] = (),
) -> list[tuple[str, str, str]]:
    """What one step of an attempt decides, whose job runs on the spare: kind of row, new state, reason. The source of
    the VM was observed at `began` (None: it is unknown), and the attempt's effect ended at `ended` (None: none has)."""
    held = hand.state(row, replace(spare, attempt=1), hand.offer(O.TAKEN), now=500.0)
    view = HypervisorView(vms={SPARE.name: VmSeen(SPARE.name, "h1", VmCondition.RUNNING, users_added=users_added)})
    world = World(
        scheduler=Seen(SchedulerView({"7": RUNS}), 500.0),
        sources={SPARE.place.source: Observation(None if began is None else Seen(view, began), 0.0)},
        effect_ended_at={} if ended is None else {row.key: ended},
        refused={row.key: refused} if refused else {},
    )
    step_attempt(held, 1, world, POLICY)
    assert all(
        text_of(c.row.reason) == text_of(c.reason) for c in hand.changes_of(held.moves) if c.row.key.kind == "vm"
    )
    return [
        (change.row.key.kind, str(change.row.state), text_of(change.reason)) for change in hand.changes_of(held.moves)
    ]


def test_a_guest_has_until_its_limit_to_learn_of_the_user() -> None:
    limit = SINCE + POLICY.pin_timeout
    late = "its guest was not told of the user within 60 s"
    assert step_on(ADDING_USER, SPARE, SINCE + 1, ended=SINCE) == []
    assert step_on(ADDING_USER, SPARE, limit, ended=SINCE) == []
    assert step_on(ADDING_USER, SPARE, limit + 0.1, ended=SINCE) == [("vm", "ending", late)]
    assert step_on(ADDING_USER, SPARE, limit + 0.1) == [], "nobody has tried to add the user yet"


def test_a_refusal_counts_in_an_observation_that_began_after_the_effect_ended() -> None:
    assert step_on(ADDING_USER, SPARE, SINCE + 5, ended=SINCE + 5, refused="no such user") == [], (
        "the user may be there since"
    )
    assert step_on(ADDING_USER, SPARE, SINCE + 5.1, ended=SINCE + 5, refused="no such user") == [
        ("vm", "ending", "no such user")
    ]


RETURNING = replace(ADDING_USER, state=A.RETURNING, outcome="requeued")
LATE = [("attempt", "reclaiming", "the job started after all")]


def test_a_vm_whose_job_starts_when_no_user_is_added_any_more_ends() -> None:
    ending = [("vm", "ending", "its job started when no user was added any more")]
    assert step_on(RETURNING, SPARE, SINCE + 0.1) == ending
    assert step_on(RETURNING, SPARE, SINCE + 9.1, ended=SINCE + 9) == ending
    over = replace(RETURNING, state=A.RECLAIMING, outcome="done")
    assert step_on(over, SPARE, SINCE + 0.1) == ending


def test_a_vm_stays_while_no_observation_since_shows_that_its_guest_lacks_the_user() -> None:
    assert step_on(RETURNING, SPARE, SINCE) == LATE, "it may have been added as the attempt gave up"
    assert step_on(RETURNING, SPARE, SINCE + 9, ended=SINCE + 9) == LATE, "it may have been added by the last effect"
    assert step_on(RETURNING, SPARE, None) == LATE, "nothing is known of the guest"
    assert step_on(RETURNING, SPARE, SINCE + 1, users_added=(1000,)) == LATE, "the guest knows the user"
    assert step_on(RETURNING, replace(SPARE, state=V.LOST), SINCE + 1) == LATE, "its host is out of reach"
