"""Which running jobs leave drained hosts, by a move or by a save, within which limits, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.capacity.room import room_of
from multiverse.core.context import Context
from multiverse.core.explanation import explain
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.host import Claim, Drain, HostState
from multiverse.core.model.job import Attempt, Eviction, JobRef
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import SavedState, Storage
from multiverse.core.model.vm import VmCondition, VmState
from multiverse.core.policy import Policy
from multiverse.core.rebalance.drains import plan_drains, why_stay
from multiverse.core.rebalance.limits import EvictionLimits
from multiverse.core.rebalance.plan import proposals
from multiverse.core.transition import Command
from tests.unit.rows import known_host, saved
from tests.unit.test_moving import TwoJobs, ready
from tests.unit.test_places import Site
from tests.unit.test_preemption import CROWDED, NOW, UNIX, Crowd, host

V = VmState
STORAGE = Storage("shared", "qemu")
BOTH = Drain(moves=True, saves=True)


def storing(site: Site) -> Site:
    """The hosts of the site have a storage for saved jobs."""
    site.hosts = {name: replace(host, storage=STORAGE) for name, host in site.hosts.items()}
    site.run()
    return site


def drain(site: Site, how: Drain) -> None:
    site.run(Command("drain", "h1", drain=how))


def attempt(site: Site) -> Attempt:
    return site.rows.attempts[1]


def proposed(site: Site) -> list[Step]:
    return proposals(Context(site.state, site.world, site.policy))


def ways(site: Site) -> list[str]:
    return [one.way for one in attempt(site).evictions]


@pytest.mark.parametrize("how", [Drain(saves=True), BOTH])
def test_a_job_that_no_other_host_takes_is_saved_if_the_operator_says_so(how: Drain) -> None:
    site = storing(ready(moves=None))
    drain(site, how)
    (saved,) = site.rows.saved.values()
    assert (saved.state, saved.asked.kind) == (SavedState.PREPARING, Why.HOST_DRAINED)
    assert ways(site) == ["save"] and saved.evictions == attempt(site).evictions


def test_it_moves_if_another_host_takes_it_and_is_waited_for_if_that_is_asked() -> None:
    site = storing(ready())
    drain(site, BOTH)
    assert site.vm.state is V.MOVING and not site.rows.saved and ways(site) == ["move"]
    waiting = storing(ready(moves=None))
    drain(waiting, Drain(moves=True))
    assert waiting.vm.state is V.SERVING and not waiting.rows.saved


def test_a_vm_that_waits_for_other_moves_alone_is_not_saved() -> None:
    site = TwoJobs()
    storing(site)
    drain(site, BOTH)
    site.run()
    assert site.states == [V.MOVING, V.SERVING] and not site.rows.saved


def test_only_so_many_jobs_are_evicted_at_once() -> None:
    site = TwoJobs()
    site.policy = replace(site.policy, moves_at_once=2, evict_at_once=1)
    drain(site, Drain(moves=True))
    assert site.states == [V.MOVING, V.SERVING]
    (step,) = proposed(site)
    assert step.vm.id == 2 and step.held == Why.EVICTIONS_AT_ONCE(limit=1)
    site.end_move()
    site.run()
    assert site.states == [V.SERVING, V.MOVING]


def test_evictions_send_only_so_much_in_a_minute() -> None:
    site = TwoJobs()
    memory = site.vm.size.memory
    site.policy = replace(site.policy, moves_at_once=2, evict_rate=memory // 60)
    drain(site, Drain(moves=True))
    assert site.states == [V.MOVING, V.SERVING]
    (step,) = proposed(site)
    assert step.held == Why.EVICTION_RATE(sent=memory, rate=memory // 60)
    site.pass_time(61)
    site.run()
    assert site.states == [V.MOVING, V.MOVING]


def test_a_job_is_evicted_only_so_often_in_an_hour() -> None:
    site = ready()
    site.policy = replace(site.policy, evict_per_job=1)
    drain(site, Drain(moves=True))
    site.there = {"h1": VmCondition.RUNNING}
    site.act()
    site.run()
    site.pass_time(site.policy.move_again + 1)
    site.run()
    assert site.vm.state is V.SERVING
    (step,) = proposed(site)
    assert step.held == Why.EVICTED_OFTEN(times=1)
    site.pass_time(3600)
    site.run()
    assert site.vm.state is V.MOVING


def test_the_method_can_be_switched_off() -> None:
    site = ready()
    site.policy = replace(site.policy, evict_drains=False)
    drain(site, Drain(moves=True))
    assert site.vm.state is V.SERVING and not proposed(site)


def test_nothing_changes_while_it_is_shown_what_would_be_done() -> None:
    site = storing(ready())
    site.policy = replace(site.policy, evict_drains=False)
    drain(site, Drain(moves=True))
    site.policy = replace(site.policy, evict_drains=True)
    number, moves = site.state.numbers.next_saved, len(site.state.moves)
    (step,) = proposed(site)
    assert (step.to, step.held) == ("h2", None)
    assert (site.state.numbers.next_saved, len(site.state.moves), site.vm.state) == (number, moves, V.SERVING)


def test_what_an_eviction_took_is_remembered_and_explained() -> None:
    site = ready()
    drain(site, Drain(moves=True))
    (begun,) = attempt(site).evictions
    assert (begun.way, begun.host, begun.why.kind, begun.took) == ("move", "h1", Why.HOST_DRAINED, None)
    site.pass_time(4)
    site.there = {"h2": VmCondition.RUNNING}
    site.act()
    site.run()
    (ended,) = attempt(site).evictions
    assert ended.took is not None and ended.took >= 4
    told = explain(Context(site.state, site.world, site.policy), attempt(site), site.clock.time)
    assert "It left h1" in (said := " ".join(map(str, told.sentences))) and "because host h1 is drained" in said


def test_the_latest_evictions_of_a_job_are_kept() -> None:
    site = ready()
    one = attempt(site)
    for number in range(15):
        one = one.with_eviction(Eviction(float(number), "move", "h1", Why.OPERATOR(), 100))
    assert [eviction.at for eviction in one.evictions] == list(map(float, range(5, 15)))


# --- the limits ---------------------------------------------------------------------------------------


def step_of(crowd: Crowd, method: Method = Method.DRAIN, memory: int = 300, **more: object) -> Step:
    """A step for job 1."""
    state = crowd.decide()
    return Step(method, state.attempts[1], state.vms[10], "h2", Why.OPERATOR(), memory, **more)  # type: ignore[arg-type]


def ago(*seconds: float, memory: int = 600) -> tuple[Eviction, ...]:
    return tuple(Eviction(UNIX - one, "move", "h1", Why.OPERATOR(), memory, took=1.0) for one in seconds)


RATED = replace(CROWDED, evict_rate=10)  # 600 MiB a minute


@pytest.mark.parametrize(
    ("policy", "before", "memory", "held"),
    [
        (RATED, (), 700, None),
        (RATED, ago(59.0, memory=300), 300, None),
        (RATED, ago(59.0, memory=300), 301, Why.EVICTION_RATE(sent=300, rate=10)),
        (RATED, ago(60.0, memory=300), 301, None),
        (RATED, ago(1.0, 2.0, memory=300), 1, Why.EVICTION_RATE(sent=600, rate=10)),
        (CROWDED, ago(1.0, memory=9999), 9999, None),
        (replace(CROWDED, evict_per_job=2), ago(3599.0, 9.0), 1, Why.EVICTED_OFTEN(times=2)),
        (replace(CROWDED, evict_per_job=2), ago(3600.0, 9.0), 1, None),
        (replace(CROWDED, evict_at_once=0), (), 1, Why.EVICTIONS_AT_ONCE(limit=0)),
        (replace(CROWDED, evict_at_once=-1), (), 1, Why.EVICTIONS_AT_ONCE(limit=-1)),
    ],
)
def test_a_limit_holds_a_step_back_by_what_was_evicted_before(
    policy: Policy, before: tuple[Eviction, ...], memory: int, held: Reason | None
) -> None:
    crowd = Crowd([host("h1"), host("h2")], policy=policy)
    crowd.runs(1, evictions=before)
    step = step_of(crowd, memory=memory)
    assert EvictionLimits(crowd.context).why_held(step) == held
    ends = replace(step, ends="requeue")
    assert EvictionLimits(crowd.context).why_held(ends) == (held if held and held.kind is Why.EVICTED_OFTEN else None)
    lost = EvictionLimits(crowd.context).why_held(replace(step, method=Method.LEASE_END))
    assert lost == (None if held and held.kind is Why.EVICTED_OFTEN else held)


def test_what_moves_or_is_saved_counts_and_so_does_what_has_begun() -> None:
    crowd = Crowd([host("h1", 9), host("h2", 9)], policy=replace(CROWDED, evict_at_once=4, evict_rate=10))
    crowd.runs(1)
    crowd.moves(2, "h1", "h2")
    crowd.runs(3)
    crowd.rows.append(saved(SavedState.WRITING, id=7, job=JobRef("3", 503), vm=30, vm_name="mvtest0-30"))
    step = step_of(crowd, memory=300)
    limits = EvictionLimits(crowd.context)
    assert limits.left == 2
    limits.take(replace(step, ends="cancel"))
    assert limits.left == 2
    limits.take(step)
    assert limits.left == 1 and limits.why_held(replace(step, memory=301)) == Why.EVICTION_RATE(sent=300, rate=10)
    limits.take(step)
    assert limits.why_held(step) == Why.EVICTIONS_AT_ONCE(limit=4)
    limits.left = 1
    assert limits.why_held(replace(step, memory=1)) == Why.EVICTION_RATE(sent=600, rate=10)
    crowd.policy = replace(crowd.policy, evict_at_once=1)
    assert EvictionLimits(crowd.context).left == 0, "more are under way than may be"


# --- how VMs leave drained hosts -----------------------------------------------------------------------


def drained(crowd: Crowd, how: Drain = BOTH, name: str = "h1") -> Crowd:
    crowd.rows.append(replace(known_host(HostState.KNOWN, drain=how), name=name, id=40 + int(name[1:])))
    return crowd


def leaving(crowd: Crowd, closed: str = "h1") -> dict[int, str]:
    """Where the VMs of drained hosts go, by number; empty for a save."""
    crowd.decide().close_hosts(frozenset({closed}), frozenset())
    steps = list(plan_drains(crowd.context, room_of(crowd.context).copy()))
    assert {(one.method, one.why) for one in steps} <= {(Method.DRAIN, Why.HOST_DRAINED(host=closed))}
    assert all(one.attempt.id == one.vm.id // 10 for one in steps)
    crowd.sent = {one.vm.id: one.memory for one in steps}
    return {one.vm.id: one.to for one in steps}


def two(cpus: int = 2, stores: bool = True, moves: bool = True) -> Crowd:
    """Two jobs run on h1. h2 has so many CPUs."""
    crowd = Crowd([host("h1", moves=moves, stores=stores), host("h2", cpus, moves=moves)])
    crowd.runs(1, memory=300)
    crowd.runs(2, memory=400)
    return crowd


@pytest.mark.parametrize(
    ("how", "crowd", "expected"),
    [
        (BOTH, two(), {10: "h2", 20: "h2"}),
        (Drain(moves=True), two(), {10: "h2", 20: "h2"}),
        (BOTH, two(1), {10: "h2"}),  # the other one waits for room that a move takes
        (BOTH, two(0), {10: "", 20: ""}),
        (Drain(moves=True), two(0), {}),
        (Drain(saves=True), two(), {10: "", 20: ""}),
        (Drain(), two(), {}),
        (BOTH, two(0, stores=False), {}),
        (BOTH, two(moves=False), {10: "", 20: ""}),
        (Drain(moves=True), two(moves=False), {}),
    ],
)
def test_vms_of_a_drained_host_move_or_are_saved_as_the_drain_says(
    how: Drain, crowd: Crowd, expected: dict[int, str]
) -> None:
    assert leaving(drained(crowd, how)) == expected
    assert crowd.sent == {one: {10: 300, 20: 400}[one] for one in expected}


def test_only_vms_of_hosts_that_take_no_others_leave() -> None:
    assert leaving(drained(two()), closed="h2") == {}


def test_a_vm_that_waits_for_other_moves_alone_stays_though_it_could_be_saved() -> None:
    hosts, none = [host("h1", 3, moves=True), host("h2", 3, moves=True)], dict[int, str]()
    for at_once, expected in ((1, none), (2, {10: "h2"})):
        crowd = Crowd(hosts, policy=replace(CROWDED, moves_at_once=at_once))
        crowd.runs(1)
        crowd.moves(2, "h1", "h2")
        assert leaving(drained(crowd)) == expected
        other = Crowd([host("h1", moves=True), host("h2", 3, moves=True), host("h3", moves=True)], policy=crowd.policy)
        other.runs(1)
        other.moves(2, "h3", "h2")
        other.claims.append(Claim(Key("vm", 77), "h3", Size(2, 100)))
        assert leaving(drained(other)) == expected


def test_a_vm_that_came_back_from_a_move_waits_for_a_while() -> None:
    for since, expected in ((CROWDED.move_again, {}), (CROWDED.move_again + 0.1, {10: "h2"})):
        crowd = Crowd([host("h1", moves=True), host("h2", moves=True)])
        crowd.runs(1)
        crowd.change(1, moves=1, since=NOW - since)
        assert leaving(drained(crowd)) == expected


def test_a_job_of_several_vms_is_saved_once_and_whole() -> None:
    crowd = Crowd([host("h1"), host("h2")])
    crowd.runs(1, "h1", "h1", memory=300)
    crowd.runs(2, "h2")
    assert leaving(drained(crowd)) == {10: ""} and crowd.sent == {10: 600}


def test_of_a_job_of_several_vms_each_one_that_can_move_is_shown() -> None:
    crowd = Crowd([host("h1", moves=True), host("h2", moves=True)])
    crowd.runs(1, "h1", "h1")
    assert leaving(drained(crowd)) == {10: "h2", 11: "h2"}


def test_a_vm_that_cannot_leave_does_not_keep_the_others() -> None:
    crowd = Crowd([host("h1", 3, moves=True), host("h2", 9, moves=True)])
    crowd.runs(1, vms=V.LOST)
    crowd.runs(2)
    del crowd.jobs["2"]
    crowd.runs(3)
    assert leaving(drained(crowd)) == {30: "h2"}


def test_of_each_host_one_vm_says_why_it_stays() -> None:
    crowd = Crowd([host(name, moves=True, stores=False) for name in ("h1", "h2", "h3")])
    for number, name in enumerate(("h1", "h1", "h2", "h3"), 1):
        crowd.runs(number, name, cpus=2 if name == "h3" else 1, vms=V.LOST if number == 1 else V.SERVING)
    drained(drained(crowd, Drain(moves=True)), Drain(moves=True), "h2")
    crowd.decide().close_hosts(frozenset({"h1", "h2"}), frozenset())
    said = why_stay(crowd.context)
    assert list(said) == ["h1", "h2"]
    assert "VM mvtest0-20 cannot move" in said["h1"] and "h3: it has no room" in said["h1"]
    assert "VM mvtest0-30 cannot move" in said["h2"]
    crowd.hosts[2] = host("h3", 4, moves=True)
    assert not why_stay(crowd.context), "there is room for either"


# --- what is shown -------------------------------------------------------------------------------------


def test_what_would_be_begun_is_shown_with_what_the_limits_hold_back_and_since_when() -> None:
    crowd = drained(two())
    crowd.policy = replace(CROWDED, evict_at_once=1)
    crowd.decide().close_hosts(frozenset({"h1"}), frozenset())
    first, second = proposals(crowd.context)
    assert (first.vm.id, first.held, first.held_since) == (10, None, 0.0)
    assert (second.vm.id, second.held, second.held_since) == (20, Why.EVICTIONS_AT_ONCE(limit=1), NOW)
    crowd.context.state.held_back["drain"] = [replace(second, held_since=NOW - 70)]
    assert [one.held_since for one in proposals(crowd.context)] == [0.0, NOW - 70]
    crowd.context.state.held_back["drain"] = [replace(second, held=Why.EVICTED_OFTEN(times=1), held_since=NOW - 70)]
    assert [one.held_since for one in proposals(crowd.context)] == [0.0, NOW], "it was held by another limit"
    assert not proposals(replace(crowd.context, world=replace(crowd.context.world, scheduler=None)))
    crowd.policy = replace(CROWDED, evict_drains=False)
    assert not proposals(crowd.context)


def test_what_is_held_back_is_kept_while_it_is_and_forgotten_after_that() -> None:
    crowd = drained(two())
    crowd.policy = replace(CROWDED, evict_at_once=1)
    assert crowd.run() == {1: "move to h2"} and crowd.state is not None
    (held,) = crowd.state.held_back["drain"]
    assert (held.vm.id, held.held, held.held_since) == (20, Why.EVICTIONS_AT_ONCE(limit=1), NOW)
    assert not crowd.run(NOW + 30)
    assert [one.held_since for one in crowd.state.held_back["drain"]] == [NOW]
    crowd.policy = replace(CROWDED, evict_drains=False)
    assert not crowd.run(NOW + 31)
    assert crowd.state.held_back["drain"] == []


def test_a_step_that_is_held_back_does_not_hold_the_next_one_back() -> None:
    """300 MiB were sent in this minute, and 600 may be. The first job would send 400, and the second one 200."""
    crowd = Crowd([host("h1", moves=True), host("h2", 9, moves=True)], policy=RATED)
    crowd.runs(1, memory=400, evictions=ago(30.0, memory=300))
    crowd.runs(2, memory=200)
    assert drained(crowd).run() == {2: "move to h2"} and crowd.state is not None
    assert [one.vm.id for one in crowd.state.held_back["drain"]] == [10]
