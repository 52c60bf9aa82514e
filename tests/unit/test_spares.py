"""Spares of the warm pools: which are taken, which give way, which are kept and which are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from multiverse.core.admission.obstacles import release_spares
from multiverse.core.capacity.room import Blockage, Room
from multiverse.core.capacity.sizes import vm_size
from multiverse.core.clones.spares import give_back, joined_for, parked_for
from multiverse.core.context import Context
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import Claim, Host, HypervisorView, Overcommitment
from multiverse.core.model.job import Attempt, AttemptState, Job, JobState, Node, NodeState, Request, SchedulerView
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import OfferState, Template, TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Forecast, Observation, Row, Seen, World
from multiverse.core.planner import plan
from multiverse.core.policy import Policy, Pool
from multiverse.core.pools import pool_status, reconcile_pools
from multiverse.core.rows import Rows
from multiverse.core.state import State
from multiverse.core.transition import Change, Event, Move
from tests.unit.planner_harness import POLICY
from tests.unit.rows import (
    IMAGES,
    SOURCE,
    as_ready,
    attempt,
    changes_of,
    offer,
    on_host,
    rows,
    state,
    template,
    vm,
    world_of,
)

A, V, T = AttemptState, VmState, TemplateState
NOW = 1000.0
BASE = Size(1, 256)
PARKED = Pool("slim", Depth.PARKED, 1, 1, Size(1, 100), 100.0)
JOINED = Pool("slim", Depth.JOINED, 1, 1, Size(1, 100), 100.0)


def host(name: str = "h1", *, cpus: int = 64, memory: int = 65536, **more: object) -> Host:
    facts: dict[str, object] = {"images": IMAGES, **more}
    return Host(name, Size(cpus, memory, 65536), frozenset({"instant", "full"}), **facts)  # type: ignore[arg-type]


def parked(serial: int = 1, **more: object) -> Vm:
    return vm(V.PARKED, id=serial, **{"pool": Depth.PARKED, "since": NOW - 50, **more})


def joined(serial: int = 1, node_size: Size = Size(1, 100), **more: object) -> Vm:  # noqa: B008
    return vm(V.JOINED, id=serial, **{"pool": Depth.JOINED, "since": NOW - 50, "node_size": node_size, **more})


def condition(one: Vm) -> VmCondition:
    return VmCondition.PARKED if one.state is V.PARKED else VmCondition.RUNNING


def world(*vms: Vm, hosts: Collection[Host] = (), jobs: Collection[Job] = (), nodes: Mapping[str, Node] | None = None,
          ready: Collection[Row] = (), dead: Collection[int] = (), **forecast: object) -> World:  # fmt: skip
    """All VMs run or are parked, except those that are `dead`. All that have joined are idle nodes, unless `nodes` is
    given."""
    seen = {one.name: VmSeen(one.name, one.host, VmCondition.DEAD if one.id in dead else condition(one)) for one in vms}
    idle = {one.name: Node(one.name, NodeState.IDLE) for one in vms if one.state is V.JOINED}
    return world_of(
        SchedulerView({job.ref.job_id: job for job in jobs}, idle if nodes is None else nodes, offers=None),
        HypervisorView({one.name: one for one in hosts or (host(),)}, seen, as_ready(ready)),
        NOW,
        forecast=Forecast(**forecast),  # type: ignore[arg-type]
    )


def kept(*some: Row, pools: tuple[Pool, ...] = (PARKED,), hosts: Collection[Host] = (),
         nodes: Mapping[str, Node] | None = None, claims: Collection[Claim] = (), forecast: Forecast | None = None,
         **policy: object) -> list[Change]:  # fmt: skip
    """The changes of one pass with these pools. Every job has an attempt."""
    rules = replace(POLICY, pools=pools, **policy)  # type: ignore[arg-type]
    vms = [row for row in some if isinstance(row, Vm)]
    jobs = [
        Job(a.job, a.job_name, a.uid, JobState.PENDING if a.state is A.QUEUED else JobState.RUNNING, a.request,
            nodes=tuple(one.name for one in vms if one.attempt == a.id))
        for a in some if isinstance(a, Attempt)
    ]  # fmt: skip
    here = world(*vms, hosts=hosts, jobs=jobs, nodes=nodes, ready=some)
    if forecast is not None:
        here = replace(here, forecast=forecast)
    return changes_of(plan(State(rows(*some, claims=claims), TABLES, NOW), here, [], NOW, rules))


def moves_of(here: Rows, shown: World, rules: Policy) -> list[Move]:
    return plan(State(here, TABLES, NOW), shown, [], NOW, rules)


def made(changes: list[Change]) -> list[Vm]:
    return [c.row for c in changes if isinstance(c.row, Vm) and c.event is Event.PLANNED]


def released(changes: list[Change]) -> list[tuple[int, str]]:
    return [(c.row.id, text_of(c.reason)) for c in changes if c.event is Event.RELEASED]


READY = template(T.READY)

# --- taking: joined ---------------------------------------------------------------------------------


def taken(request: Request, *vms: Vm) -> Vm | None:
    return joined_for(Context(state(*vms, now=NOW), world(*vms), POLICY), attempt(A.QUEUED, request=request))


def test_a_joined_spare_of_exactly_the_requested_size_is_taken() -> None:
    exact = joined(node_size=Size(1, 100))
    assert taken(Request(1, Size(1, 100), features=("slim", "instant", "auto")), exact) == exact
    assert taken(Request(1, Size(1, 101)), exact) is None


def test_the_smallest_joined_spare_that_fits_is_taken_and_the_first_of_equals() -> None:
    large, fit, also = joined(1, Size(1, 900)), joined(2, Size(1, 400)), joined(3, Size(1, 400))
    assert taken(Request(1, Size(1, 300)), also, large, fit) == fit


def test_of_equal_joined_spares_one_that_no_other_job_may_take_is_taken() -> None:
    one, other = joined(1), joined(2)
    for offered, expected in ((1, other), (2, one)):
        held = state(one, other, offer(OfferState.OPEN, id=offered), now=NOW)
        assert joined_for(Context(held, world(one, other), POLICY), attempt(A.QUEUED)) == expected
    held = state(one, replace(other, node_size=Size(1, 101)), offer(OfferState.OPEN, id=1), now=NOW)
    assert joined_for(Context(held, world(one, other), POLICY), attempt(A.QUEUED)) == one, "the smaller one first"


def in_pool(state: State, world: World) -> Context:
    """With a pool of parked spares."""
    return Context(state, world, replace(POLICY, pools=(PARKED,)))


# --- taking: parked ---------------------------------------------------------------------------------


def grown(*vms: Vm, nodes: int = 1, size: Size = Size(1, 1000), hosts: Collection[Host] = (),  # noqa: B008
          dead: Collection[int] = (), room: Room | None = None) -> list[int]:  # fmt: skip
    """The spares that become VMs of such an attempt."""
    hosts = hosts or (host(),)
    room = room or Room({one.name: one for one in hosts})
    parents = {one.name: BASE for one in hosts}
    found = parked_for(
        in_pool(state(*vms, now=NOW), world(*vms, hosts=hosts, dead=dead)),
        attempt(A.QUEUED, request=Request(nodes, size)),
        parents,
        room,
    )
    return [one.id for one, _ in found]


def test_only_healthy_parked_spares_of_the_image_are_taken() -> None:
    assert grown(parked()) == [1]
    for other in (
        parked(image="other"),
        parked(account="physics"),
        parked(template_size=Size(2, 256)),
        parked(pool=Depth.JOINED),
        replace(parked(), state=V.PLANNED),
        parked(host="h2"),
    ):
        assert grown(other) == [], other
    assert grown(parked(), dead=[1]) == []


def test_a_spare_that_its_host_does_not_show_is_not_taken() -> None:
    here, unseen = world(), parked()
    found = parked_for(in_pool(state(unseen, now=NOW), here), attempt(A.QUEUED), {"h1": BASE}, Room({"h1": host()}))
    assert found == []


def test_no_more_parked_spares_are_taken_than_needed_and_than_have_room_to_grow() -> None:
    two = (parked(1), parked(2))
    assert grown(*two) == [1] and grown(*two, nodes=2) == [1, 2]
    grows = vm_size(Size(1, 1000), BASE, host(), POLICY).memory
    assert grown(*two, nodes=2, hosts=[host(memory=2 * grows)]) == [1, 2]
    assert grown(*two, nodes=2, hosts=[host(memory=2 * grows - 1)]) == [1]
    assert grown(*two, nodes=2, hosts=[host(cpus=1)]) == [1]
    assert grown(*two, nodes=2, size=Size(1, 100, 40_000)) == [1]


@pytest.mark.parametrize(
    ("first", "second"),
    [({"cpus": 2, "memory": 8192}, {"cpus": 4, "memory": 4096}), ({"memory": 4096}, {"memory": 8192})],
)
def test_spares_on_the_emptiest_host_are_taken_first(first: dict[str, int], second: dict[str, int]) -> None:
    hosts = [host("h1", **first), host("h2", **second)]
    assert grown(parked(1), parked(2, host="h2"), size=Size(1, 100), hosts=hosts) == [2]


def test_room_taken_for_spares_can_be_given_back() -> None:
    room = Room({"h1": host()})
    before = {name: list(free) for name, free in room.free.items()}
    spare = parked()
    found = parked_for(
        in_pool(state(spare, now=NOW), world(spare)),
        attempt(A.QUEUED, request=Request(1, Size(2, 1000, 500))),
        {"h1": BASE},
        room,
    )
    assert room.free != before
    give_back(found, room)
    assert room.free == before


# --- giving way -------------------------------------------------------------------------------------


def gives_way(*vms: Vm, needed: int) -> tuple[bool, list[int]]:
    """Whether there is room then, and which VMs are released. Each VM claims 100 MiB of a full host."""
    claims = [Claim(one.key, "h1", Size(0, 100)) for one in vms]
    here = state(*vms, claims=claims, now=NOW)
    context = Context(here, world(*vms, hosts=[host(memory=100 * len(vms))], ready=[READY]), POLICY)
    enough = release_spares(context, "slim", 1, {"h1": Size(0, needed)})
    return enough, [change.row.id for change in changes_of(here.moves)]


def test_joined_spares_are_released_first_and_parked_ones_of_the_image_last() -> None:
    vms = (parked(1), parked(2, image="other"), joined(3))
    assert gives_way(*vms, needed=100) == (True, [3])
    assert gives_way(*vms, needed=200) == (True, [3, 2])
    assert gives_way(*vms, needed=300) == (True, [3, 2, 1])
    assert gives_way(*vms, needed=301) == (False, [])


def test_spares_that_are_being_released_count_before_others_are_released() -> None:
    leaving = replace(vm(V.RELEASING, id=9), pool=Depth.PARKED)
    assert gives_way(leaving, parked(1), needed=100) == (True, [])
    assert gives_way(leaving, needed=100) == (True, [])
    assert gives_way(leaving, needed=101) == (False, [])
    assert gives_way(vm(V.SERVING, id=9), needed=0) == (False, []), "there are no spares"


# --- keeping ----------------------------------------------------------------------------------------


def test_spares_are_released_only_where_memory_is_short() -> None:
    both = Overcommitment(memory=1.5, floor=1024)
    hosts = [replace(host(name), available=have, overcommit=both) for name, have in (("h1", 100), ("h2", 100_000))]
    changes = kept(
        READY, template(T.READY, id=2, host="h2"), parked(1), parked(2, host="h2"),
        pools=(replace(PARKED, least=2, most=2),), hosts=hosts,
    )  # fmt: skip
    assert released(changes) == [(1, "host h1 is short of memory")]


def test_a_pool_that_is_made_smaller_releases_its_oldest() -> None:
    assert released(kept(READY, parked(1), parked(2), parked(3))) == [
        (1, "its pool keeps 1 now"),
        (2, "its pool keeps 1 now"),
    ]


def test_a_spare_that_is_too_old_is_released_before_the_pool_shrinks() -> None:
    changes = kept(READY, parked(1, since=NOW - 101), parked(2))
    assert released(changes) == [(1, "it is older than 100 s")]


def test_a_spare_of_exactly_the_greatest_age_stays() -> None:
    assert released(kept(READY, parked(since=NOW - 100))) == []


@pytest.mark.parametrize(
    ("nodes", "since", "why"),
    [
        ({}, NOW - 1, "its node is gone"),
        ({}, NOW, ""),
        ({"mvtest0-1": Node("mvtest0-1", NodeState.DOWN, (), "no answer")}, NOW - 1, "its node is down: no answer"),
        ({"mvtest0-1": Node("mvtest0-1", NodeState.SILENT, (), "no answer")}, NOW - 1, "its node is silent: no answer"),
        ({"mvtest0-1": Node("mvtest0-1", NodeState.DRAINED, (), "mine")}, NOW - 1, "its node is drained: mine"),
        ({"mvtest0-1": Node("mvtest0-1", NodeState.IDLE)}, NOW - 1, ""),
    ],
)
def test_a_joined_spare_without_a_working_node_is_released(nodes: dict[str, Node], since: float, why: str) -> None:
    assert released(kept(READY, joined(since=since), pools=(JOINED,), nodes=nodes)) == ([(1, why)] if why else [])


def test_the_release_of_a_spare_says_why() -> None:
    assert released(kept(parked())) == [(1, "its template is gone")]
    assert released(kept(READY, parked(), pools=())) == [(1, "no pool of the settings wants it")]


def test_spares_of_a_deleted_image_are_released_except_on_hosts_out_of_sight() -> None:
    """This holds even if the template is there: no job is given such a spare any more, and the pool would be full."""
    assert released(kept(READY, parked(), hosts=[host(images={})])) == [(1, "its image is gone")]
    assert released(kept(READY, parked(), hosts=[host("h2")])) == []


def test_joined_spares_of_another_size_are_replaced_and_parked_ones_fit_any() -> None:
    changes = kept(READY, joined(node_size=Size(1, 999)), pools=(JOINED,))
    assert released(changes) == [(1, "no pool of the settings wants it")]
    assert [one.node_size for one in made(changes)] == [JOINED.size]
    assert kept(READY, parked(), pools=(replace(PARKED, size=Size(1, 999)),)) == []


def test_an_empty_pool_has_no_template_built() -> None:
    assert kept(pools=(replace(PARKED, least=0),)) == []


def test_nothing_is_released_or_made_while_a_source_is_unknown() -> None:
    here, rules = rows(READY, parked(since=0.0)), replace(POLICY, pools=(PARKED,), silence=NOW)
    known = world(parked(), ready=[READY])
    assert moves_of(here, replace(known, scheduler=None), rules) == []
    assert moves_of(here, replace(known, sources={SOURCE: Observation(None, 0.0)}), rules) == []


# --- making -----------------------------------------------------------------------------------------


def spares_of(serials: range, state: V) -> list[Vm]:
    return [replace(parked(serial), state=state) for serial in serials]


@pytest.mark.parametrize(
    ("provisioning", "making", "more"), [(8, 0, 4), (8, 3, 1), (8, 4, 0), (2, 0, 1), (2, 1, 0), (1, 0, 1)]
)
def test_a_pool_makes_half_as_many_vms_at_once_as_allowed_and_one_at_least(
    provisioning: int, making: int, more: int
) -> None:
    pool = replace(PARKED, least=9, most=9)
    here = rows(READY, *spares_of(range(1, 1 + making), V.PLANNED))
    planned = moves_of(here, world(ready=[READY]), replace(POLICY, pools=(pool,), provisioning=provisioning))
    assert len(made(changes_of(planned))) == more


def test_no_more_spares_are_made_than_missing() -> None:
    pool = replace(PARKED, least=3, most=3)
    (change,) = kept(READY, parked(1), parked(2), pools=(pool,), provisioning=8)
    assert (change.event, text_of(change.reason)) == (Event.PLANNED, "for the parked pool of slim")


def test_joined_spares_have_the_memory_that_their_nodes_declare() -> None:
    (one,) = made(kept(READY, pools=(replace(JOINED, size=Size(2, 1000)),)))
    assert one.size == vm_size(Size(2, 1000), BASE, host(), POLICY) != BASE


def test_a_spare_on_a_host_out_of_reach_is_replaced_on_another_host() -> None:
    lost = replace(on_host(parked(1), "h2"), state=V.LOST)
    planned = moves_of(rows(READY, lost), world(ready=[READY]), replace(POLICY, pools=(PARKED,)))
    (one,) = made(changes_of(planned))
    assert one.host == "h1"


def test_a_pool_is_made_at_the_pace_of_its_template() -> None:
    pool, rates = replace(PARKED, least=4, most=4), {CloneKind.INSTANT: 0.25}
    assert len(made(kept(READY, pools=(pool,), provisioning=8, rates=rates))) == 1
    paid = Forecast(paced={("h1", "slim", CloneKind.INSTANT): NOW + 0.5})
    assert made(kept(READY, pools=(pool,), provisioning=8, rates=rates, forecast=paid)) == []


def test_a_pools_template_is_built_only_where_its_image_can_be_forked() -> None:
    stiff, unable = frozenset({"fork", "plug_cpus"}), frozenset({"plug_cpus"})
    (change,) = kept(pools=(replace(PARKED, size=Size(1, 900)),), hosts=[host(images={"slim": stiff})])
    assert isinstance(change.row, Template) and text_of(change.reason) == "its pool needs it"
    assert change.row.size == Size(1, 1024), "as large as what cannot be plugged must be"
    assert kept(hosts=[host(images={"slim": unable})]) == []


def test_a_pools_broken_template_is_tried_again_after_its_back_off() -> None:
    broken = template(T.BROKEN, tries=1, since=NOW - POLICY.backoff(1))
    (change,) = kept(broken)
    assert change.event is Event.NEEDED
    assert kept(replace(broken, since=broken.since + 0.5)) == []


@pytest.mark.parametrize(("since", "free"), [(NOW - 1.0, True), (NOW - 0.5, False)])
def test_a_job_is_starting_until_its_script_has_begun(since: float, free: bool) -> None:
    running = attempt(A.ALLOCATED, since=since)
    changes = kept(READY, running, vm(V.SERVING, id=9, attempt=1), hosts=[host(cpus=2)])
    assert bool(made(changes)) is free


@pytest.mark.parametrize(("cpus", "starting", "free"), [(3, 1, False), (4, 1, True), (4, 2, False), (6, 2, True)])
def test_half_of_the_cpus_are_left_to_jobs_that_start(cpus: int, starting: int, free: bool) -> None:
    running = [attempt(A.ALLOCATED, id=n, job=str(n), since=NOW - 0.5) for n in range(1, 1 + starting)]
    old = attempt(A.ALLOCATED, id=9, job="9", since=NOW - 500)
    vms = [vm(V.SERVING, id=10 + a.id, attempt=a.id) for a in (*running, old)]
    assert bool(made(kept(READY, *running, old, *vms, hosts=[host(cpus=cpus)]))) is free


# --- offers and failures -----------------------------------------------------------------------------

OFFERING = replace(JOINED, most=1, offer=True)


def reconciled(*some: Row, pool: Pool = OFFERING, blockage: Blockage = Blockage.NONE,
               rest: float = 0.0) -> list[tuple[str, int, str, str]]:  # fmt: skip
    """What is decided about the pools: kind and number of each row, its new state, and the reason. The scheduler can
    offer nodes."""
    held, vms = state(READY, *some, now=NOW), [row for row in some if isinstance(row, Vm)]
    here = world(*vms, ready=[READY], rest={"slim": rest})
    assert here.scheduler is not None
    here = replace(here, scheduler=Seen(replace(here.scheduler.value, offers={}), NOW))
    reconcile_pools(Context(held, here, replace(POLICY, pools=(pool,))), blockage)
    return [(c.row.key.kind, c.row.id, str(c.row.state), text_of(c.reason)) for c in changes_of(held.moves)]


def test_offers_are_open_while_no_job_waits_for_room() -> None:
    spare, opened = joined(), offer(OfferState.OPEN)
    for blockage in (Blockage.NONE, Blockage.TURN):
        assert reconciled(spare, opened, blockage=blockage) == []
    assert reconciled(spare, opened, blockage=Blockage.ROOM) == [("offer", 1, "closing", "jobs wait for room")]
    assert reconciled(spare, opened, pool=replace(OFFERING, offer=False)) == [
        ("offer", 1, "closing", "its pool offers none")
    ]


def test_a_spare_is_offered_while_no_job_waits() -> None:
    assert reconciled(joined()) == [("offer", 1, "open", "to jobs as they come")]
    for blockage in (Blockage.TURN, Blockage.ROOM):
        assert reconciled(joined(), blockage=blockage) == []
    assert reconciled(joined(), pool=replace(OFFERING, offer=False)) == []


def test_a_spare_that_was_withdrawn_is_replaced_while_no_job_waits_and_no_other_is_being_replaced() -> None:
    spare, closed = joined(), offer(OfferState.CLOSED)
    released = [("vm", 1, "releasing", "it was withdrawn, and nobody took it")]
    assert reconciled(spare, closed) == released
    for blockage in (Blockage.TURN, Blockage.ROOM):
        assert reconciled(spare, closed, blockage=blockage) == []
    assert reconciled(spare, closed, pool=replace(OFFERING, offer=False)) == []
    for changing in (V.PLANNED, V.PARKED, V.STARTING, V.ENDING, V.REMOVING, V.RELEASING, V.RETIRING):
        other = replace(joined(2), state=changing)
        keeps_both = replace(OFFERING, least=2, most=2)
        assert released[0] not in reconciled(spare, closed, other, pool=keeps_both), changing
        for unlike in ({"image": "stock"}, {"pool": Depth.PARKED}, {"attempt": 1}):
            found = reconciled(spare, closed, replace(other, **unlike))
            assert released[0] in found, (changing, unlike)


@pytest.mark.parametrize("going", [V.ENDING, V.REMOVING])
def test_a_pool_makes_no_spare_while_one_of_its_own_that_failed_is_being_destroyed(going: V) -> None:
    failed = replace(parked(), state=going)
    assert reconciled(failed, pool=PARKED) == []
    made = [("vm", 100, "planned", "for the parked pool of slim")]
    for unlike in ({"pool": None}, {"attempt": 1}, {"image": "stock"}, {"pool": None, "attempt": 1}):
        assert reconciled(replace(failed, **unlike), pool=PARKED) == made, unlike
    assert reconciled(replace(failed, state=V.RELEASING), pool=PARKED) == made, "it has not failed"


def test_a_pool_makes_no_spare_before_its_rest_is_over_or_while_jobs_wait() -> None:
    made = [("vm", 100, "planned", "for the parked pool of slim")]
    assert reconciled(pool=PARKED, rest=NOW) == made
    assert reconciled(pool=PARKED, rest=NOW + 0.1) == []
    for blockage in (Blockage.TURN, Blockage.ROOM):
        assert reconciled(pool=PARKED, blockage=blockage) == []


@pytest.mark.parametrize(("making", "more"), [(0, 2), (1, 1), (2, 1), (3, 1), (4, 0), (5, 0)])
def test_a_pool_makes_half_of_what_jobs_leave_of_a_turn_and_one_at_least(making: int, more: int) -> None:
    for going in (V.PLANNED, V.STARTING):
        of_jobs = [vm(going, id=number, attempt=number) for number in range(1, 1 + making)]
        found = reconciled(*of_jobs, pool=replace(PARKED, least=9, most=9))
        assert [number for _, number, _, _ in found] == list(range(100, 100 + more)), going


def test_nothing_is_on_offer_while_the_scheduler_is_unknown() -> None:
    held = state(joined(), offer(OfferState.OPEN))
    (found,) = pool_status(Context(held, replace(world(joined()), scheduler=None), replace(POLICY, pools=(OFFERING,))))
    assert (found.ready, found.offered) == (1, 0)
