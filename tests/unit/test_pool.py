"""The warm pool, the choice of a kind, and the pace of clones: in passes of the planner."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from multiverse.controller.learned import ForecastRecorder
from multiverse.core.clones.kinds import choose_clones
from multiverse.core.clones.spares import node_spec
from multiverse.core.context import Context
from multiverse.core.errors import Broken
from multiverse.core.machines.tables import effect_of
from multiverse.core.model.basics import CloneKind, Depth, Key, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.job import AttemptState, NodeState, Request
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import TemplateState, Vm, VmState
from multiverse.core.model.world import Forecast
from multiverse.core.policy import Policy, Pool, paid, wait_for
from multiverse.core.pools import pool_status
from multiverse.core.transition import Change, EffectKind, Event, Move
from tests.unit import rows as hand
from tests.unit.planner_harness import POLICY, PlannerHarness, failed

A, V, T = AttemptState, VmState, TemplateState
PARKED = Pool("slim", Depth.PARKED, 2, 2, Size(1, 512), 100.0)
JOINED = Pool("slim", Depth.JOINED, 1, 1, Size(1, 512), 100.0, offer=False)  # offers: test_offers
PARENT = ("h1", "slim", CloneKind.INSTANT)


def harness(*pools: Pool, memory: int = 8192, **policy: object) -> PlannerHarness:
    made = PlannerHarness(replace(POLICY, pools=pools, **policy), memory=memory)  # type: ignore[arg-type]
    made.template()
    return made


def fill(s: PlannerHarness) -> list[Vm]:
    """The spares, once the pools are as full as they get."""
    s.fill()
    return spare(s)


def spare(s: PlannerHarness) -> list[Vm]:
    return [vm for vm in s.rows.vms.values() if vm.attempt is None and vm.state in (V.PARKED, V.JOINED)]


# --- filling ---------------------------------------------------------------------------------------


def test_parked_spares_claim_only_the_overhead_of_a_vm() -> None:
    s = harness(PARKED)
    vms = fill(s)
    assert [(vm.state, vm.pool, vm.size) for vm in vms] == [(V.PARKED, Depth.PARKED, POLICY.base)] * 2
    held = [claim.size for claim in s.rows.claims if claim.owner.kind == "vm"]
    assert held == [Size(0, s.hosts["h1"].vm_overhead, 0)] * 2
    assert effect_of(vms[0]) is None


def test_a_joined_pool_is_filled_with_nodes() -> None:
    s = harness(JOINED)
    (vm,) = fill(s)
    assert (vm.state, vm.node_size) == (V.JOINED, Size(1, 512))
    assert node_spec(vm, None).features == ("slim", "instant", "auto", f"mv_v{vm.id}")


def test_a_pool_makes_at_most_half_as_many_vms_at_once_as_allowed() -> None:
    s = harness(replace(PARKED, least=4, most=4), provisioning=4)
    s.run()
    s.run()
    s.run()
    assert len(s.rows.vms) == 2


def test_nothing_is_made_for_the_pool_while_jobs_wait_for_room() -> None:
    s = harness(PARKED, memory=1024)
    s.job(size=Size(4, 300))
    s.job("8", size=Size(4, 300))
    for _ in range(4):
        s.run()
    assert [vm.attempt for vm in s.rows.vms.values()] == [1]


def test_on_a_small_host_the_pool_waits_until_a_job_has_started() -> None:
    s = harness(replace(PARKED, least=1, most=1))
    s.hosts["h1"] = replace(s.hosts["h1"], machine=Size(2, 8192))
    fill(s)
    attempt = s.to_allocated()
    assert attempt.since > s.clock.time - 1.0 and not spare(s)
    assert not [vm for vm in s.rows.vms.values() if vm.state is V.PLANNED], "its script may not have begun yet"
    s.run()
    assert [vm.pool for vm in s.rows.vms.values() if vm.state is V.PLANNED] == [Depth.PARKED]


def test_the_pool_rests_after_a_failure() -> None:
    s = harness(replace(PARKED, least=1, most=1))
    s.run()
    s.run()
    s.run()
    first = next(iter(s.rows.vms.values()))
    recorder = ForecastRecorder(s.policy)
    moves = s.run(failed(first, EffectKind.CREATE, Broken("it does not come up")))
    recorder.note(moves, s.clock.time)
    rest = recorder.forecast(s.clock.time).rest["slim"]
    assert rest == s.clock.time + s.policy.retry_base
    assert not [c for move in moves for c in move.changes if c.event is Event.PLANNED], "not in the same moment"
    s.ended(first.key)
    s.pass_time(s.policy.retry_base + 0.1)  # for which its host is avoided
    s.observe()
    s.world = replace(s.world, forecast=Forecast(rest={"slim": s.clock.time + 1.0}))
    assert not [c for move in s.commit() for c in move.changes if c.event is Event.PLANNED]
    assert first.id not in s.rows.vms
    s.world = replace(s.world, forecast=Forecast(rest={"slim": s.clock.time}))
    assert [c for move in s.commit() for c in move.changes if c.event is Event.PLANNED]


@pytest.mark.parametrize(
    ("event", "state", "fault"), [(Event.DIED, V.ENDING, ""), (Event.RELEASED, V.RELEASING, "host")]
)
def test_a_pool_whose_spares_end_as_soon_as_they_are_ready_rests_longer_each_time(
    event: Event, state: V, fault: str
) -> None:
    recorder, rests, now = ForecastRecorder(POLICY), [], 1000.0
    for number in range(4):
        ready = hand.vm(V.PARKED, id=number + 1, pool=Depth.PARKED)
        recorder.note([Move((Change(ready, Event.EXISTS),))], now)
        recorder.note([Move((Change(replace(ready, state=state, fault=fault), event),))], now + 1.0)
        rests.append(recorder.forecast(now + 1.0).rest["slim"] - now - 1.0)
        now += 10.0
    assert rests == [POLICY.backoff(number) for number in (1, 2, 3, 4)]
    ready = hand.vm(V.PARKED, id=9, pool=Depth.PARKED)
    recorder.note([Move((Change(ready, Event.EXISTS),))], now)
    recorder.note([Move((Change(replace(ready, attempt=1), Event.TAKEN),))], now + 1.0)
    assert "slim" not in recorder.forecast(now + 1.0).rest, "it was of use"


def test_a_spare_that_its_pool_wants_no_more_is_no_failure() -> None:
    recorder = ForecastRecorder(POLICY)
    ready = hand.vm(V.PARKED, pool=Depth.PARKED)
    recorder.note([Move((Change(ready, Event.EXISTS),))], 1000.0)
    recorder.note([Move((Change(replace(ready, state=V.RELEASING), Event.RELEASED),))], 1001.0)
    assert not recorder.forecast(1001.0).rest


# --- taking ----------------------------------------------------------------------------------------


def test_a_parked_spare_gets_the_size_of_the_job_that_takes_it() -> None:
    s = harness(PARKED)
    first, _ = fill(s)
    s.job(size=Size(3, 1000))
    s.run()
    (vm,) = s.all_vms()
    assert (vm.id, vm.state, vm.node_size) == (first.id, V.STARTING, Size(3, 1000))
    assert vm.size.cpus == 3 and vm.size.memory >= 1000
    claim = next(claim.size for claim in s.rows.claims if claim.owner == vm.key)
    assert (claim.cpus, claim.memory) == (3, vm.size.memory + s.hosts["h1"].vm_overhead)
    assert len([v for v in s.rows.vms.values() if v.state is V.PLANNED]) == 1, "the pool is refilled behind it"


def test_a_gang_takes_parked_spares_and_the_rest_is_made() -> None:
    s = harness(replace(PARKED, least=1, most=1), provisioning=8)
    fill(s)
    s.job(nodes=2)
    s.run()
    assert [(vm.pool, vm.state) for vm in s.all_vms()] == [(Depth.PARKED, V.PARKED), (None, V.PLANNED)]


@pytest.mark.parametrize("kind", [CloneKind.LINKED, CloneKind.FULL])
def test_a_job_of_another_kind_of_clone_takes_no_parked_spare(kind: CloneKind) -> None:
    s = harness(PARKED)
    s.hosts["h1"] = replace(s.hosts["h1"], abilities=frozenset({"instant", "linked", "full"}))
    fill(s)
    s.job(request=Request(1, Size(1, 400), kind=kind))
    s.run()
    assert [(vm.kind, vm.pool) for vm in s.all_vms()] == [(kind, None)]


def test_spares_do_not_keep_their_template_from_being_retired() -> None:
    s = harness(PARKED, memory=900)  # one template, two spares, and 580 MiB
    vms = fill(s)
    stiff = frozenset({"fork"})
    s.hosts["h1"] = replace(s.hosts["h1"], images={"stiff": stiff})
    s.job(request=Request(1, Size(1, 200), image="stiff"))
    s.template("stiff", Size(1, 384))  # as much as the host holds twice, for the template and for its VM
    for _ in range(3):
        s.run()
    assert s.rows.templates[1].state is T.RETIRING
    gone = {s.rows.vms[vm.id].state for vm in vms if vm.id in s.rows.vms}
    assert gone == {V.RELEASING}, "the spares go with their template"


def test_a_job_takes_a_node_that_fits_at_once() -> None:
    s = harness(JOINED)
    (vm,) = fill(s)
    s.job(size=Size(1, 400))
    s.run()
    attempt = s.attempt()
    assert (attempt.state, attempt.feature) == (A.SPAWNED, vm.feature)
    assert s.all_vms()[0].id == vm.id and s.all_vms()[0].node_size == Size(1, 512)
    effect = effect_of(attempt)
    assert effect is not None and effect.kind is EffectKind.PIN and "joined before" in effect.text


@pytest.mark.parametrize(
    "request_",
    [
        Request(1, Size(2, 400)),
        Request(1, Size(1, 600)),
        Request(1, Size(1, 400, 100)),
        Request(2, Size(1, 400)),
        Request(1, Size(1, 400), features=("gpu",)),
        Request(1, Size(1, 400), image="stock"),
        Request(1, Size(1, 400), kind=CloneKind.FULL),
    ],
    ids=str,
)
def test_a_job_takes_no_joined_spare_that_does_not_fit(request_: Request) -> None:
    s = harness(JOINED)
    s.template("stock")
    (vm,) = fill(s)
    s.job(request=request_)
    s.run()
    assert s.rows.vms[vm.id].attempt is None


@pytest.mark.parametrize("state", [NodeState.DOWN, NodeState.BUSY, None])
def test_a_node_that_is_not_idle_is_not_taken(state: NodeState | None) -> None:
    s = harness(JOINED)
    (vm,) = fill(s)
    if state is None:
        del s.nodes[vm.name]
    else:
        s.node(vm.name, state)
    s.job(size=Size(1, 400))
    s.run()
    assert s.rows.vms[vm.id].attempt is None


def test_a_spare_that_a_job_had_is_released_and_never_given_to_another() -> None:
    s = harness(JOINED)
    (vm,) = fill(s)
    s.job(size=Size(1, 400))
    s.run()
    s.job(held=True)
    s.run()
    s.ended(Key("attempt", 1))
    s.job(gated=True, pinned=None)
    s.run()
    s.run()
    assert s.rows.vms[vm.id].state is V.RELEASING


# --- leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [PARKED, JOINED], ids=["parked", "joined"])
def test_a_spare_that_is_too_old_is_replaced(pool: Pool) -> None:
    s = harness(replace(pool, least=1, most=1))
    (vm,) = fill(s)
    s.pass_time(101.0)
    s.run()
    old = s.rows.vms[vm.id]
    assert old.state is V.RELEASING and "older than 100 s" in text_of(old.reason)
    assert len([v for v in s.rows.vms.values() if v.state is V.PLANNED]) == 1


@pytest.mark.parametrize("pool", [PARKED, JOINED], ids=["parked", "joined"])
def test_a_spare_without_its_template_is_released(pool: Pool) -> None:
    s = harness(pool)
    vms = fill(s)
    s.templates.clear()
    s.run()
    assert {s.rows.vms[vm.id].state for vm in vms} == {V.RELEASING}


def test_a_spare_that_no_pool_wants_is_released() -> None:
    s = harness(PARKED)
    vms = fill(s)
    s.policy = POLICY
    s.run()
    assert {s.rows.vms[vm.id].state for vm in vms} == {V.RELEASING}


def test_no_more_spares_are_released_for_a_job_than_necessary() -> None:
    s = harness(replace(JOINED, least=3, most=3), memory=2300)  # template 256, each node 512 + 80 + 32 and rounding
    vms = fill(s)
    assert len(vms) == 3
    s.job(size=Size(2, 500))
    s.run()
    leaving = [vm for vm in s.rows.vms.values() if vm.state is V.RELEASING]
    assert len(leaving) == 1 and text_of(leaving[0].reason) == "its memory is needed"
    s.run()
    assert len([vm for vm in s.rows.vms.values() if vm.state is V.RELEASING]) == 1, "one was enough"


def test_spares_stay_if_all_of_them_would_not_be_enough() -> None:
    s = harness(JOINED, memory=2300)
    s.job("6", size=Size(1, 1000))
    s.to_allocated(job_id="6")
    fill(s)
    before = [vm.id for vm in spare(s)]
    s.job("7", size=Size(1, 1800))
    s.run()
    assert [vm.id for vm in spare(s)] == before


# --- numbers ---------------------------------------------------------------------------------------


def test_a_pool_wants_more_the_more_jobs_arrive_and_never_more_than_most() -> None:
    pool = Pool("slim", Depth.PARKED, 1, 10, Size(1, 512))
    wanted = [pool.wanted(rate, 2.0) for rate in (0.0, 0.1, 0.5, 1.0, 5.0)]
    assert wanted == [1, 2, 3, 5, 10]


def test_the_arrival_rate_fades() -> None:
    recorder = ForecastRecorder(POLICY)
    arrival = Move((Change(hand.attempt(A.CLAIMED), Event.ADMITTED),))
    for _ in range(60):
        recorder.note([arrival], 100.0)
    now, later, much_later = (recorder.forecast(at).arrivals.get("slim", 0.0) for at in (100.0, 160.0, 1000.0))
    assert now == pytest.approx(1.0) and later == pytest.approx(0.3679, abs=1e-3) and much_later == 0.0


def test_durations_are_not_learnt_from_spares_that_were_taken() -> None:
    recorder = ForecastRecorder(POLICY)
    vm = hand.vm(V.PLANNED, attempt=1)
    recorder.note([Move((Change(vm, Event.PLANNED),))], 10.0)
    recorder.note([Move((Change(replace(vm, state=V.JOINED), Event.REGISTERED),))], 13.0)
    taken = hand.vm(V.PARKED, id=2, pool=Depth.PARKED)
    recorder.note([Move((Change(taken, Event.PLANNED),))], 10.0)
    recorder.note([Move((Change(replace(taken, attempt=2), Event.TAKEN),))], 500.0)
    recorder.note([Move((Change(replace(taken, state=V.JOINED, attempt=2), Event.REGISTERED),))], 501.0)
    assert recorder.forecast(501.0).seconds == {("slim", CloneKind.INSTANT): 3.0}


# --- pace ------------------------------------------------------------------------------------------


def paced(rate: float) -> Policy:
    return replace(POLICY, rates={CloneKind.INSTANT: rate})


def test_fifteen_a_minute_is_one_each_four_seconds() -> None:
    policy, until = paced(0.25), {}
    assert wait_for(PARENT, until, 100.0, policy) == 0.0
    until = {PARENT: paid(PARENT, until, 100.0, policy)}
    assert wait_for(PARENT, until, 100.0, policy) == 4.0
    assert wait_for(PARENT, until, 104.0, policy) == 0.0


def test_two_hundred_a_second_lets_two_hundred_start_at_once() -> None:
    policy, until, made = paced(200.0), {PARENT: 0.0}, 0
    while wait_for(PARENT, until, 100.0, policy) == 0.0:
        until, made = {PARENT: paid(PARENT, until, 100.0, policy)}, made + 1
    assert made == 200


def test_a_job_that_waits_for_the_pace_of_its_template_blocks_no_other() -> None:
    s = harness(rates={CloneKind.INSTANT: 0.25}, provisioning=8, patience=0.0)
    s.template("stock")
    s.run()  # the templates are found
    for job, image in (("1", "slim"), ("2", "slim"), ("3", "stock")):
        s.job(job, request=Request(1, Size(1, 100), image=image))
    s.run()
    claimed = {a.job.job_id for a in s.rows.attempts.values() if a.state is A.CLAIMED}
    assert claimed == {"1", "3"}
    assert "0.25 a second" in s.reasons["2"]


# --- kinds -----------------------------------------------------------------------------------------


def chosen(template: T | None, *, kind: CloneKind = CloneKind.AUTO, abilities: str = "instant linked full",
           since: float = 0.0, **forecast: object) -> tuple[CloneKind, str, bool]:  # fmt: skip
    policy = replace(POLICY, kind=kind, rates={CloneKind.INSTANT: 1.0})
    some = [hand.template(template, since=since)] if template else []
    attempt = hand.attempt(A.QUEUED)
    hosts = {"h1": Host("h1", Size(4, 4096, 65536), frozenset(abilities.split()), images=hand.IMAGES)}
    world = hand.world_of(None, HypervisorView(hosts), 99.0, forecast=Forecast(**forecast))  # type: ignore[arg-type]
    state = hand.state(attempt, *some, now=100.0)
    state.paced = dict(world.forecast.paced)
    choice = choose_clones(Context(state, world, policy), attempt)
    return choice.kind, text_of(choice.why), choice.prepare


OFTEN = {"slim": 1.0}


def test_a_kind_that_was_asked_for_is_the_kind() -> None:
    assert chosen(None, kind=CloneKind.FULL) == (CloneKind.FULL, "", False)


def test_auto_forks_a_template_that_is_ready() -> None:
    kind, why, _ = chosen(T.READY)
    assert kind is CloneKind.INSTANT and "ready" in why


def test_auto_boots_when_the_queue_of_the_template_is_longer_than_a_boot() -> None:
    kind, why, _ = chosen(T.READY, paced={PARENT: 120.0})
    assert kind is CloneKind.LINKED and "queued on its template" in why


def test_auto_boots_a_single_job_and_makes_no_template_for_it() -> None:
    kind, why, prepare = chosen(None)
    assert (kind, prepare) == (CloneKind.LINKED, False) and "not worth a template" in why


def test_auto_builds_a_template_for_jobs_that_have_waited_for_long() -> None:
    """The jobs came together, long ago, and wait for their image: the forecast has forgotten their arrival."""
    s = PlannerHarness(replace(POLICY, kind=CloneKind.AUTO), cpus=64, memory=65536)
    able = replace(s.hosts["h1"], abilities=frozenset({"instant", "linked"}))
    s.hosts["h1"] = replace(able, images={})
    for number in range(2):
        s.job(str(number))
    s.run()
    s.pass_time(600.0)
    s.run()
    assert not s.all_vms() and not s.rows.templates
    s.hosts["h1"] = able
    s.run()
    assert len(s.rows.templates) == 1 and "its template" in text_of(s.attempt().choice)


def test_a_held_job_does_not_make_a_template_worth_building() -> None:
    s = PlannerHarness(replace(POLICY, kind=CloneKind.AUTO), cpus=64)
    s.hosts["h1"] = replace(s.hosts["h1"], abilities=frozenset({"instant", "linked"}))
    s.job("1", eligible=False)
    s.run()
    s.pass_time(600.0)
    s.job("0")
    s.run()
    assert not s.rows.templates and "not worth a template" in text_of(s.attempt(2).choice)


def test_auto_builds_a_template_for_later_jobs() -> None:
    kind, _, prepare = chosen(None, arrivals=OFTEN)
    assert (kind, prepare) == (CloneKind.LINKED, True)


def test_auto_waits_for_a_template_that_is_sooner_than_a_boot() -> None:
    kind, why, _ = chosen(T.BUILDING, arrivals=OFTEN, since=95.0)
    assert kind is CloneKind.INSTANT and "ready in 5 s" in why


def test_auto_boots_when_its_template_is_broken_or_no_host_forks() -> None:
    assert chosen(T.BROKEN, arrivals=OFTEN)[0] is CloneKind.LINKED
    assert chosen(T.READY, abilities="linked full")[0] is CloneKind.LINKED
    assert chosen(None, abilities="instant")[0] is CloneKind.INSTANT


def test_auto_takes_a_parked_spare_however_slow_clones_were() -> None:
    s = harness(PARKED, kind=CloneKind.AUTO)
    fill(s)
    s.job(size=Size(2, 500))
    s.observe()
    s.world = replace(s.world, forecast=Forecast(seconds={("slim", CloneKind.INSTANT): 99.0}))
    s.commit()
    assert s.all_vms()[0].pool is Depth.PARKED


def test_a_kind_without_measurements_is_taken_to_be_as_slow_as_the_others() -> None:
    busy = Forecast(seconds={("slim", CloneKind.INSTANT): 15.0})
    assert POLICY.takes("slim", CloneKind.LINKED, busy) == 80.0
    assert POLICY.takes("stock", CloneKind.LINKED, busy) == 8.0
    assert chosen(T.READY, seconds=dict(busy.seconds))[0] is CloneKind.INSTANT


def test_auto_boots_a_vm_that_no_host_could_hold_beside_its_template() -> None:
    s = PlannerHarness(replace(POLICY, kind=CloneKind.AUTO))
    s.hosts["h1"] = replace(
        s.hosts["h1"], abilities=frozenset({"instant", "linked"}), images={"slim": frozenset(["fork"])}
    )
    s.job(size=Size(1, 5000))  # the template would have as much, and 8192 are there
    s.observe()
    s.world = replace(s.world, forecast=Forecast(arrivals=OFTEN))
    s.commit()
    (vm,) = s.all_vms()
    assert vm.kind is CloneKind.LINKED and s.attempt().state is A.CLAIMED
    s = PlannerHarness(s.policy)
    s.hosts["h1"] = replace(s.hosts["h1"], abilities=frozenset({"instant"}), images={"slim": frozenset(["fork"])})
    s.job(size=Size(1, 5000))
    s.run()
    assert "fits on no host" in text_of(s.attempt().reason), "and none boots it"


def test_auto_spreads_a_burst_over_both_kinds_where_clones_queue_on_their_template() -> None:
    s = PlannerHarness(
        replace(POLICY, kind=CloneKind.AUTO, provisioning=64, rates={CloneKind.INSTANT: 1.0}), memory=1 << 20
    )
    s.hosts["h1"] = replace(
        s.hosts["h1"], abilities=frozenset({"instant", "linked"}), capacity=Size(64, 1 << 20, 1 << 20)
    )
    first = s.to_claimed(job_id="99", request=Request(1, Size(1, 400), kind=CloneKind.INSTANT))
    for number in range(1, 21):
        s.job(str(number))
    s.run()
    kinds = Counter(vm.kind for vm in s.rows.vms.values() if vm.attempt != first.id)
    waiting = sum(attempt.state is A.QUEUED for attempt in s.rows.attempts.values())
    boot, fork = (POLICY.seconds[kind] for kind in (CloneKind.LINKED, CloneKind.INSTANT))
    assert kinds[CloneKind.INSTANT] == 1 and waiting == int(boot - fork), "the others would wait longer than they boot"
    assert kinds[CloneKind.LINKED] == 20 - 1 - waiting


def test_two_jobs_together_make_a_template_worth_building() -> None:
    s = PlannerHarness(replace(POLICY, kind=CloneKind.AUTO))
    s.hosts["h1"] = replace(s.hosts["h1"], abilities=frozenset({"instant", "linked"}))
    s.job("1")
    s.job("2")
    s.run()
    assert [template.state for template in s.rows.templates.values()] == [T.BUILDING]


def test_a_job_gets_no_spare_that_is_older_than_its_pool_lets_it_be() -> None:
    for pool in (PARKED, JOINED):
        s = harness(pool)
        old = {vm.id for vm in fill(s)}
        s.pass_time(pool.max_age + 1.0)  # without any pass: the daemon was down
        s.job(size=Size(1, 400))
        s.run()
        assert old and not old & {vm.id for vm in s.all_vms()}


def test_a_spare_in_which_a_daemon_has_ended_is_released() -> None:
    for pool in (replace(PARKED, least=1, most=1), JOINED):
        s = harness(pool)
        (vm,) = fill(s)
        s.vms[vm.name] = replace(s.vms[vm.name], reason="slurmd ended (exit code 1)")
        s.job(size=Size(1, 400))
        s.run()
        assert vm.id not in {one.id for one in s.all_vms()}
        assert s.rows.vms[vm.id].state is V.RELEASING
        assert any(text_of(entry.reason) == "slurmd ended (exit code 1)" for entry in s.store.journal())


def test_jobs_come_before_pools_when_vms_are_made() -> None:
    s = harness(replace(PARKED, least=4, most=4), provisioning=4)
    for number in range(1, 5):
        s.job(str(number), size=Size(1, 200))
    s.run()
    s.run()
    s.run()
    making = [vm.attempt for vm in s.rows.vms.values()]
    assert len(making) == 4 and None not in making


def test_auto_follows_measured_durations() -> None:
    slow = {("slim", CloneKind.INSTANT): 9.0, ("slim", CloneKind.LINKED): 3.0}
    assert chosen(T.READY, seconds=slow)[0] is CloneKind.LINKED


def test_a_job_that_boots_has_a_template_built_for_later_jobs() -> None:
    s = PlannerHarness(replace(POLICY, kind=CloneKind.AUTO))
    s.hosts["h1"] = replace(s.hosts["h1"], abilities=frozenset({"instant", "linked"}))
    s.job()
    for _ in range(2):
        s.pass_time(1.0)
        s.observe()
        s.world = replace(s.world, forecast=Forecast(arrivals=OFTEN))
        s.commit()
    (template,) = s.rows.templates.values()
    assert template.state is T.BUILDING and s.attempt().state is A.CLAIMED
    assert s.all_vms()[0].kind is CloneKind.LINKED and s.all_vms()[0].place.template is None
    (needed,) = [entry for entry in s.store.journal() if entry.event == "needed"]
    assert text_of(needed.reason) == "others like this job will need it"


def test_auto_names_a_broken_template_and_waits_for_one_that_is_being_built() -> None:
    assert chosen(T.BROKEN, arrivals=OFTEN) == (CloneKind.LINKED, "its template is broken on h1", True)
    assert not chosen(T.BROKEN)[2], "no other job wants it"
    assert chosen(T.BUILDING, since=95.0)[0] is CloneKind.INSTANT, "although no other job wants it"
    late = chosen(T.BUILDING, since=99.0, seconds={("slim", CloneKind.LINKED): 10.0, ("slim", CloneKind.INSTANT): 1.5})
    assert late == (CloneKind.LINKED, "a boot takes 10.0 s, its template 9 s more", False)


def test_the_next_pass_is_due_when_a_pace_or_a_pools_rest_ends() -> None:
    recorder = ForecastRecorder(paced(0.25))
    assert recorder.next_due(0.0) == float("inf")
    vm = hand.vm(V.PLANNED)
    recorder.note([Move((Change(vm, Event.PLANNED),))], 0.0)
    assert recorder.next_due(0.0) == 4.0 and recorder.next_due(4.0) == float("inf")
    spare_vm = replace(vm, state=V.RELEASING, attempt=None, pool=Depth.PARKED)
    recorder.note([Move((Change(spare_vm, Event.FAILED),))], 1.0)
    assert recorder.next_due(1.0) == 1.0 + POLICY.backoff(1)
    fast = ForecastRecorder(paced(4.0))
    for _ in range(8):
        fast.note([Move((Change(vm, Event.PLANNED),))], 0.0)
    assert fast.next_due(0.0) == 2.0 - 0.75, "a second's worth at once is let through before"


def test_the_status_of_a_pool_counts_ready_and_new_spares() -> None:
    s = harness(PARKED, JOINED)
    s.run()
    s.run()
    by_depth = {one.pool.depth: one for one in pool_status(Context(s.state, s.world, s.policy))}
    making = by_depth[Depth.PARKED].creating + by_depth[Depth.JOINED].creating
    assert making > 0 and by_depth[Depth.PARKED].ready == 0
    fill(s)
    found = {
        one.pool.depth: (one.wanted, one.ready, one.creating)
        for one in pool_status(Context(s.state, s.world, s.policy))
    }
    assert found == {Depth.PARKED: (2, 2, 0), Depth.JOINED: (1, 1, 0)}


def test_a_job_with_an_account_takes_no_spare_without_one() -> None:
    s = harness(PARKED)
    before = {vm.id for vm in fill(s)}
    s.job(request=Request(1, Size(1, 100), account="physics"))
    s.run()
    s.run()
    assert {vm.id for vm in spare(s)} == before and s.rows.templates[2].account == "physics"
