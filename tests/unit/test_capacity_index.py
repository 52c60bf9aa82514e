"""What is free on hosts: found through the index as by looking at every host, whatever was changed before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.capacity.placement_policies import BUILT_IN, draws
from multiverse.core.capacity.room import HostLimits, Room, every_host, room_of
from multiverse.core.capacity_index import CapacityIndex, HostGroup, fits
from multiverse.core.context import Context
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Placement, Size
from multiverse.core.model.host import Host, HypervisorView, Overcommitment
from multiverse.core.model.vm import TemplateKey
from multiverse.core.state import State
from tests.unit.planner_harness import POLICY
from tests.unit.rows import rows, world_of

NAMES = [f"h{n}" for n in range(8)]

frees = st.tuples(st.integers(-1, 4), st.integers(-1, 6), st.integers(-1, 3), st.integers(-1, 2)).map(list)
claims = st.builds(Size, st.integers(0, 4), st.integers(0, 6), st.integers(0, 3), st.integers(0, 2))
changes = st.lists(st.tuples(st.sampled_from(NAMES), st.none() | frees), max_size=40)


def by_order(free: dict[str, list[int]], claim: Size) -> dict[str, list[str]]:
    """The hosts on which the claim fits, in each order, found by looking at all."""
    fitting = [name for name in free if fits(claim, free[name])]
    return {
        "emptiest": sorted(fitting, key=lambda name: (-free[name][0], -free[name][1], name)),
        "tightest": sorted(fitting, key=lambda name: (free[name][0], free[name][1], name)),
        "by_name": sorted(fitting),
    }


@given(changes, claims, st.booleans())
def test_a_group_finds_the_same_hosts_in_the_same_order_as_a_scan(
    steps: list[tuple[str, list[int] | None]], claim: Size, asked_before: bool
) -> None:
    group, free = HostGroup(), dict[str, list[int]]()
    for name, now in steps:
        if asked_before:
            next(group.by_name(claim), None)  # what was found before is kept up to date
        if now is None:
            group.drop(name)
            free.pop(name, None)
        else:
            group.put(name, now)
            free[name] = now
    assert list(group) == sorted(free) and len(group) == len(free)
    for order, expected in by_order(free, claim).items():
        assert list(getattr(group, order)(claim)) == expected
    others = [have for name, have in free.items() if name not in NAMES[:2]]
    assert group.most(NAMES[:2]) == tuple(max((0, *(have[n] for have in others))) for n in range(2))
    enough = [name for name in free if claim.cpus <= free[name][0] and claim.memory <= free[name][1]]
    assert group.count(claim) == len(enough)
    found = [group.nth(claim, number) for number in range(len(enough))]
    assert sorted(name for name in found if name) == sorted(by_order(free, claim)["by_name"])


def host(name: str, cpus: int = 4, memory: int = 4000, **more: object) -> Host:
    return Host(name, Size(cpus, memory, 1000), frozenset({"instant"}), **more)  # type: ignore[arg-type]


def room(*sizes: tuple[int, int]) -> Room:
    return Room({f"h{n}": host(f"h{n}", *size) for n, size in enumerate(sizes)})


def placed(policy: str, on: Room, count: int, claim: Size, seed: str = "") -> list[str] | None:
    return on.place(count, dict.fromkeys(on.free, claim), choose=BUILT_IN[policy], seed=seed)


def test_a_host_whose_network_has_become_slower_takes_vms_that_claim_no_bandwidth() -> None:
    on = Room({"h0": replace(host("h0"), capacity=Size(4, 4000, 1000, 1000))})
    on.take("h0", Size(1, 1000, 0, 8000))  # claimed when the uplink was faster
    assert placed("pack", on, 2, Size(1, 1000)) == ["h0", "h0"] and on.held("h0", Size(1, 1000)) == 1
    assert placed("pack", on, 1, Size(1, 1000, 0, 1)) is None and on.held("h0", Size(1, 1000, 0, 1)) == 0


# --- the policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [("worst-fit", "h1"), ("best-fit", "h3"), ("first-fit", "h0"), ("pack", "h3"), ("spread", "h1")],
)
def test_a_policy_chooses_by_free_cpus_then_memory_then_name(policy: str, chosen: str) -> None:
    on = room((4, 4000), (8, 4000), (8, 3000), (3, 3000), (3, 4000), (1, 9000))
    assert placed(policy, on, 1, Size(2, 1000)) == [chosen]


def test_random_fit_depends_on_the_seed_alone_and_chooses_each_host_that_fits() -> None:
    def chosen(seed: int) -> str:
        (name,) = placed("random-fit", room(*[(4, 4000)] * 3, (1, 4000)), 1, Size(2, 10), str(seed)) or ["none"]
        return name

    found = Counter(chosen(seed) for seed in range(300))
    assert set(found) == {"h0", "h1", "h2"} and min(found.values()) > 60
    assert [chosen(seed) for seed in range(20)] == [chosen(seed) for seed in range(20)]


def test_random_fit_finds_the_only_usable_host_among_many() -> None:
    many = room(*[(4, 4000)] * 400)
    only = dict.fromkeys(many.free, Size(1, 1))
    assert many.place(1, only, choose=BUILT_IN["random-fit"], hosts=HostLimits(lambda name: name == "h399")) == ["h399"]
    assert many.place(1, only, choose=BUILT_IN["random-fit"], hosts=HostLimits(lambda _: False)) is None


def test_packing_takes_the_host_that_holds_the_most_and_the_tightest_for_the_rest() -> None:
    on = room((3, 9000), (8, 9000), (2, 9000), (4, 9000))
    assert placed("pack", on, 11, Size(1, 10)) == ["h1"] * 8 + ["h0"] * 3
    assert placed("pack", room((2, 9000), (8, 9000), (4, 9000)), 4, Size(1, 10)) == ["h2"] * 4


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3000)), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 1500),
    st.sampled_from(list(Placement)),
)
def test_every_policy_places_all_or_none_and_never_more_than_there_is(
    sizes: list[tuple[int, int]], count: int, cpus: int, memory: int, policy: str
) -> None:
    on, claim = room(*sizes), Size(cpus, memory)
    before = {name: list(free) for name, free in on.free.items()}
    held = {name: on.held(name, claim) for name in before}
    chosen = placed(policy, on, count, claim, "seed")
    assert (chosen is not None) == (sum(held.values()) >= count), "all policies find room exactly where there is"
    if chosen is None:
        assert dict(on.free) == before
        return
    assert len(chosen) == count and all(chosen.count(name) <= held[name] for name in chosen)
    assert all(min(free) >= 0 for free in on.free.values())
    if policy == "pack":
        fewest = next(n for n in range(1, 9) if sum(sorted(held.values(), reverse=True)[:n]) >= count)
        assert len(set(chosen)) == fewest


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from(Placement),
)
def test_no_policy_places_more_on_a_host_than_the_job_allows(
    cpus: list[int], count: int, most: int, policy: str
) -> None:
    on, claim = room(*[(have, 4000) for have in cpus]), Size(1, 1)
    before = {name: list(free) for name, free in on.free.items()}
    chosen = on.place(
        count, dict.fromkeys(on.free, claim), choose=BUILT_IN[policy], seed="s", hosts=HostLimits(limit=lambda _: most)
    )
    assert (chosen is not None) == (sum(min(most, have) for have in cpus) >= count)
    if chosen is None:
        assert dict(on.free) == before
    else:
        assert len(chosen) == count and max(map(chosen.count, chosen)) <= most


def test_one_vm_has_no_more_cpus_than_its_host_however_many_may_be_claimed() -> None:
    on = Room({"h0": host("h0", 4, overcommit=Overcommitment(cpus=2.0))})
    on.give("h0", Size(4, 0))
    for policy in Placement:
        assert placed(policy, on, 1, Size(5, 10)) is None
    assert not on.fits("h0", Size(5, 10)) and placed("worst-fit", on, 2, Size(4, 10)) == ["h0", "h0"]


# --- rooms ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["h0", "h1", "h2"]), st.integers(1, 3)), max_size=12), claims)
def test_a_copy_and_its_room_change_by_themselves(steps: list[tuple[bool, str, int]], claim: Size) -> None:
    one = room((4, 4), (3, 9), (4, 4))
    other = one.copy()
    mirrors = ({name: list(free) for name, free in one.free.items()}, {n: list(f) for n, f in one.free.items()})
    for first, name, cpus in steps:
        (one if first else other).take(name, Size(cpus, 1))
        mirror = mirrors[0 if first else 1]
        mirror[name] = [mirror[name][0] - cpus, mirror[name][1] - 1, *mirror[name][2:]]
    for found, mirror in ((one, mirrors[0]), (other, mirrors[1])):
        assert {name: list(free) for name, free in found.free.items()} == mirror
        expected = by_order(mirror, claim)["emptiest"]
        least = Size(max(1, claim.cpus), claim.memory, claim.disk)
        expected = by_order(mirror, least)["emptiest"]
        assert found.place(1, dict.fromkeys(mirror, least)) == (expected[:1] or None)


# --- the index --------------------------------------------------------------------------------------


def test_equal_hosts_form_a_class_whatever_they_have_available() -> None:
    index = CapacityIndex()
    index.follow({
        "h1": host("h1", available=10), "h2": host("h2", available=20, available_disk=5), "h3": host("h3", 5),
    })  # fmt: skip
    assert sorted(sorted(one.names) for one in index.classes.values()) == [["h1", "h2"], ["h3"]]
    index.show(replace(index.hosts["h3"], capacity=Size(4, 4000, 1000)))
    assert [sorted(one.names) for one in index.classes.values()] == [["h1", "h2", "h3"]]
    index.follow({"h2": index.hosts["h2"]})
    assert [sorted(one.names) for one in index.classes.values()] == [["h2"]] and set(index.hosts) == {"h2"}


def test_closed_hosts_are_classes_of_their_own_until_they_are_open_again() -> None:
    index, which = CapacityIndex(), TemplateKey("h1", "slim", Size(1, 256))
    index.close(frozenset({"h1", "h9"}))
    index.follow({name: host(name) for name in ("h1", "h2")})
    index.set_free("h1", [1, 1, 1, 0])
    for closed in (frozenset({"h1", "h9"}), frozenset({"h2"}), frozenset[str]()):
        index.close(closed)
        assert {name for one in index.classes.values() if one.closed for name in one.names} == closed - {"h9"}
        assert {name for one in index.classes.values() if not one.closed for name in one.names} == {"h1", "h2"} - closed
        assert "h1" in index.class_of["h1"].hosts and index.free["h1"] == [1, 1, 1, 0], "what is free there is kept"
        index.set_ready(which, ready=True)
        assert "h1" in index.class_of["h1"].ready_with("slim", "", Size(1, 256))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([Placement.WORST_FIT, Placement.BEST_FIT, Placement.FIRST_FIT, Placement.PACK]),
    st.integers(1, 5),
)
def test_decisions_are_as_if_closed_hosts_were_not_there(
    some: list[tuple[int, bool, bool]], policy: Placement, count: int
) -> None:
    hosts = {f"h{n}": host(f"h{n}", cpus) for n, (cpus, _, _) in enumerate(some)}
    closed = frozenset(f"h{n}" for n, (_, drained, _) in enumerate(some) if drained)
    without = frozenset(f"h{n}" for n, (_, _, left_out) in enumerate(some) if left_out)
    state = State(rows(), TABLES, 0.0)
    state.close_hosts(closed, frozenset())
    world = world_of(None, HypervisorView(hosts, {}, {}), 0.0)
    context = Context(state, world, POLICY, without=without)
    still = {name: one for name, one in hosts.items() if name not in closed | without}
    claim = Size(1, 10)
    claims = every_host(context, claim)
    assert dict(context.hosts) == still == {name: context.hosts[name] for name in claims}
    assert len(context.hosts) == len(claims) == len(still) and dict.fromkeys(still, claim) == dict(claims)
    assert not any(name in context.hosts or name in claims for name in closed | without)
    alone = Room(still).place(count, dict.fromkeys(still, claim), choose=BUILT_IN[policy])
    assert room_of(context).place(count, claims, choose=BUILT_IN[policy]) == alone


def test_hosts_with_a_template_ready_are_kept_apart_while_they_are_in_sight() -> None:
    index, which = CapacityIndex(), TemplateKey("h1", "slim", Size(1, 256))
    index.follow({name: host(name) for name in ("h1", "h2")})
    for name in ("h1", "h2"):
        index.set_free(name, [1, 1, 1, 0])
    index.set_ready(which, ready=True)
    (one,) = index.classes.values()
    assert list(one.ready_with("slim", "", Size(1, 256))) == ["h1"]
    assert not len(one.ready_with("slim", "physics", Size(1, 256)))
    index.set_free("h1", [3, 1, 1, 0])
    assert list(one.ready_with("slim", "", Size(1, 256)).emptiest(Size(2, 0))) == ["h1"]
    index.set_ready(which, ready=False)
    assert not len(one.ready_with("slim", "", Size(1, 256)))
    index.set_ready(which, ready=True)
    index.hide("h1")
    assert not len(one.ready_with("slim", "", Size(1, 256))) and list(one.hosts) == ["h2"]


@pytest.mark.parametrize("ready", ["h1", "h2"])
def test_a_template_is_ready_on_a_host_of_which_nothing_else_is_known_yet(ready: str) -> None:
    """As after a restart: what is free there is computed last. On another host of the class it is not ready."""
    index, size = CapacityIndex(), Size(1, 256)
    index.follow({name: host(name) for name in ("h1", "h2")})
    for name in (ready, "h1", "h2"):
        index.set_ready(TemplateKey(name, "slim", size), ready=name == ready)
    for name in ("h1", "h2"):
        index.set_free(name, [1, 1, 1, 0])
    (one,) = index.classes.values()
    assert list(one.ready_with("slim", "", size)) == [ready]
    index.set_ready(TemplateKey(ready, "slim", size), ready=False)
    assert one.ready == {("slim", ""): {}}, "nothing is kept of sizes that no host has ready"


def test_what_time_alone_changes_is_computed_again_when_its_time_has_come() -> None:
    index = CapacityIndex()
    index.follow({name: host(name) for name in ("h1", "h2")})
    assert index.take_stale(0.0) == ["h1", "h2"] and index.take_stale(0.0) == []
    index.when("h1", 10.0)
    index.when("h2", 20.0)
    index.when("h2", None)
    assert index.take_stale(9.0) == [] and index.take_stale(30.0) == ["h1"] and index.take_stale(40.0) == []


def test_the_same_seed_draws_the_same_numbers() -> None:
    def some(draw: Callable[[], int]) -> list[int]:
        return [draw() for _ in range(5)]

    one, same, other = (draws(seed).__next__ for seed in ("a", "a", "b"))
    assert some(one) == some(same) != some(other)
