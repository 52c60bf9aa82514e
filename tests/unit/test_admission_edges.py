"""Admission at its edges: what mutation testing found that no other test would have noticed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest

from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    Depth,
    Forecast,
    Host,
    HypervisorView,
    Job,
    JobRef,
    JobState,
    Key,
    Node,
    NodeState,
    Request,
    Row,
    SchedulerView,
    Seen,
    Size,
    Template,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
    World,
)
from multiverse.core.planner import plan
from multiverse.core.policy import Policy, Pool
from multiverse.core.provisioning.sizes import template_claim, vm_claim, vm_size
from multiverse.core.transition import Change, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import IMAGES, as_ready, attempt, changes_of, rows, template, vm

A, V, T = AttemptState, VmState, TemplateState
NOW = 1000.0
SMALL = Size(1, 100)
READY = template(T.READY)
PARKED = Pool("slim", Depth.PARKED, 1, 9, SMALL, 1e9)
EAGER = replace(POLICY, patience=0.0)


def host(name: str = "h1", *, cpus: int = 64, memory: int = 65536, can: str | None = None, **more: object) -> Host:
    images = IMAGES if can is None else {"slim": frozenset(can.split())}
    abilities = frozenset({"instant", "full", "linked"})
    return Host(name, Size(cpus, memory, 65536), abilities, images=images, **more)  # type: ignore[arg-type]


def queued(number: int, size: Size = SMALL, *, nodes: int = 1, **request: object) -> Attempt:
    asked = Request(nodes, size, **request)  # type: ignore[arg-type]
    return attempt(A.QUEUED, id=number, job=str(number), request=asked)


def decided(*some: Row, hosts: Collection[Host] = (), policy: Policy = EAGER, claims: Iterable[Claim] = (),
            known: Collection[str] = (), change: dict[int, dict[str, object]] | None = None,
            gone: Collection[int] = (), limits: dict[str, int] | None = None, unseen: Collection[int] = (),
            began: float = NOW, **forecast: object) -> list[Change]:  # fmt: skip
    """What is decided when the jobs of all attempts that do not run wait at the gate, in their order, and all VMs and
    templates are seen as their rows say."""
    here = rows(*some, claims=claims, known=known)
    jobs = {}
    for a in here.attempts.values():
        state = JobState.RUNNING if a.state is A.ALLOCATED else JobState.PENDING
        nodes = tuple(one.name for one in here.vms.values() if one.attempt == a.id)
        job = Job(a.job, a.job_name, a.uid, state, a.request, rank=a.id, nodes=nodes)
        if a.id not in gone:
            jobs[a.job.job_id] = replace(job, **(change or {}).get(a.id, {}))  # type: ignore[arg-type]
    vms = {
        one.name: VmSeen(one.name, one.host, VmCondition.RUNNING, private=1.0)
        for one in here.vms.values()
        if one.state is not V.PLANNED and one.id not in unseen
    }
    nodes_ = {one.name: Node(one.name, NodeState.IDLE) for one in here.vms.values() if one.state is V.JOINED}
    world = World(
        Seen(SchedulerView(jobs, nodes_, limits or {}), began),
        Seen(HypervisorView({one.name: one for one in hosts}, vms, as_ready(some)), began),
        {Key("attempt", number): float("inf") for number in gone},
        Forecast(**forecast),  # type: ignore[arg-type]
    )
    changes = changes_of(plan(here, world, [], NOW, policy))
    assert not [c for c in changes if c.event is Event.QUARANTINED]
    return changes


def admitted(changes: list[Change]) -> set[int]:
    return {c.row.id for c in changes if c.event is Event.ADMITTED}


def notes(changes: list[Change]) -> dict[int, str]:
    return {c.row.id: c.row.note for c in changes if isinstance(c.row, Attempt) and c.event is Event.NOTED}


def made(changes: list[Change]) -> list[Vm]:
    return [c.row for c in changes if isinstance(c.row, Vm) and c.event is Event.PLANNED]


def templates(changes: list[Change]) -> list[tuple[Event, Template]]:
    return [(c.event, c.row) for c in changes if isinstance(c.row, Template)]


def claim_of(one: Vm | Template) -> Claim:
    size = vm_claim(one.size, POLICY) if isinstance(one, Vm) else template_claim(one.size, host())
    return Claim(one.key, one.host, size)


# --- whom nothing keeps back ------------------------------------------------------------------------


def test_a_job_that_is_not_seen_is_passed_over() -> None:
    assert admitted(decided(READY, queued(1), queued(2), gone=[1], hosts=[host()])) == {2}


def test_a_job_that_got_the_id_of_one_that_is_not_over_yet_is_admitted() -> None:
    old = replace(queued(1), job=JobRef("2", 400))
    assert admitted(decided(READY, old, queued(2), gone=[1], hosts=[host()])) == {2}


def test_however_many_are_refused_the_next_is_admitted_in_the_same_pass() -> None:
    refused = [queued(number) for number in range(1, 31)]
    problem: dict[int, dict[str, object]] = {one.id: {"problem": "what is this?"} for one in refused}
    assert admitted(decided(READY, *refused, queued(50), change=problem, hosts=[host()])) == {50}
    large = [queued(number, Size(999, 100)) for number in range(1, 31)]
    assert admitted(decided(READY, *large, queued(50), hosts=[host()])) == {50}


def test_what_fits_on_no_host_in_sight_waits_for_those_that_are_out_of_reach_and_blocks_nobody() -> None:
    changes = decided(READY, queued(1, Size(99, 100)), queued(2), hosts=[host()], known=["h1", "h2", "h3"])
    (why,) = notes(changes).values()
    assert why.startswith("a VM of 99 CPUs, 100 MiB fits on no host;") and why.endswith("; out of reach now: h2, h3")
    assert admitted(changes) == {2}


def test_while_no_host_is_in_sight_a_user_is_told_so() -> None:
    assert notes(decided(queued(1), known=["h2"])) == {1: "no host is in sight; out of reach now: h2"}


def test_a_back_off_that_ends_now_is_over() -> None:
    assert admitted(decided(READY, replace(queued(1), not_before=NOW), hosts=[host()])) == {1}
    assert admitted(decided(READY, replace(queued(1), not_before=NOW + 0.1), hosts=[host()])) == set()


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_user_is_told_what_did_not_fit_and_what_would(nodes: int) -> None:
    stiff = host(cpus=4, memory=4096, can="fork")
    (refused,) = [c for c in decided(queued(1, Size(9, 100), nodes=nodes), hosts=[stiff]) if c.event == "impossible"]
    many = "a VM" if nodes == 1 else f"{nodes} VMs"
    fit = "4 CPUs, 1803 MiB, 65536 MiB disk"
    assert refused.reason == f"{many} of 9 CPUs, 100 MiB fits on no host; the largest that fits is {fit} per node"


# --- who is kept back -------------------------------------------------------------------------------


def test_all_behind_one_that_waits_for_room_are_told() -> None:
    busy = Claim(Key("vm", 90), "h1", Size(4, 0))
    waiting = [queued(number) for number in range(1, 5)]
    told = notes(decided(READY, *waiting, hosts=[host(cpus=4)], claims=[claim_of(READY), busy]))
    assert told == dict.fromkeys(range(1, 5), "waiting for capacity: the hosts are full")


def test_all_behind_one_that_waits_for_a_turn_are_told() -> None:
    making = vm(V.STARTING, id=9, attempt=9)
    waiting = [queued(number) for number in range(1, 5)]
    told = notes(
        decided(
            READY,
            attempt(A.SPAWNING, id=9, job="9"),
            making,
            *waiting,
            hosts=[host()],
            policy=replace(EAGER, provisioning=1),
            began=NOW - 1,
        )
    )
    assert set(told) == {1, 2, 3, 4} and {text.split(":")[0] for text in told.values()} == {"waiting for a turn"}


def test_vms_that_serve_or_are_parked_for_anybody_take_no_turn() -> None:
    runs = [attempt(A.ALLOCATED, id=n, job=str(n)) for n in range(11, 15)]
    serving = [vm(V.SERVING, id=a.id, attempt=a.id) for a in runs]
    parked = [vm(V.PARKED, id=n, pool=Depth.PARKED) for n in range(21, 25)]
    policy = replace(EAGER, pools=(replace(PARKED, least=4),), provisioning=2)
    changes = decided(READY, *runs, *serving, *parked, queued(1, kind=CloneKind.FULL), hosts=[host()], policy=policy)
    assert admitted(changes) == {1}


@pytest.mark.parametrize("state", [V.PLANNED, V.PARKED, V.STARTING])
def test_vms_that_are_made_for_the_pool_or_parked_for_a_job_take_a_turn(state: V) -> None:
    gang = attempt(A.CLAIMED, id=9, job="9", request=Request(3, SMALL))
    some = [vm(state if n == 1 else V.PLANNED, id=n, attempt=9, since=NOW - 5) for n in (1, 2, 3)]
    policy = replace(EAGER, provisioning=3, pools=(replace(PARKED, least=3),))
    assert admitted(decided(READY, gang, *some, queued(1), hosts=[host()], policy=policy)) == set()
    spares = [vm(V.PLANNED, id=n, pool=Depth.PARKED, since=NOW) for n in (1, 2, 3)]
    assert admitted(decided(READY, *spares, queued(1), hosts=[host()], policy=policy)) == set()


def test_nodes_that_are_there_already_count_for_a_limit_as_they_are_taken() -> None:
    joined = [vm(V.JOINED, id=n, pool=Depth.JOINED) for n in (1, 2)]
    uses: dict[int, dict[str, object]] = {n: {"uses": (("two jobs", 1),)} for n in (1, 2)}
    policy = replace(EAGER, pools=(replace(PARKED, depth=Depth.JOINED, least=2),))
    changes = decided(
        READY, *joined, queued(1), queued(2), change=uses, limits={"two jobs": 1}, policy=policy, hosts=[host()]
    )
    assert admitted(changes) == {1}


def test_however_many_nodes_are_there_they_are_all_taken_in_one_pass() -> None:
    joined = [vm(V.JOINED, id=n, pool=Depth.JOINED) for n in range(1, 31)]
    policy = replace(EAGER, pools=(replace(PARKED, depth=Depth.JOINED, least=30, most=30),))
    jobs = [queued(n) for n in range(1, 31)]
    assert admitted(decided(READY, *joined, *jobs, policy=policy, hosts=[host()])) == set(range(1, 31))


# --- the story --------------------------------------------------------------------------------------


def test_a_user_is_told_where_his_vms_are_and_why() -> None:
    both = [READY, template(T.READY, id=2, host="h2")]
    hosts = [host("h1", cpus=8), host("h2", cpus=8)]
    parked = [vm(V.PARKED, id=n, host=f"h{n}", pool=Depth.PARKED) for n in (1, 2)]
    policy = replace(EAGER, pools=(PARKED,), kind=CloneKind.AUTO)
    (change,) = [
        c for c in decided(*both, *parked, queued(1, nodes=2), hosts=hosts, policy=policy) if c.event == "admitted"
    ]
    assert change.reason == "instant on h1, h2, parked before, one is parked"


def test_one_that_takes_a_node_is_told_that_it_was_there() -> None:
    policy = replace(EAGER, pools=(replace(PARKED, depth=Depth.JOINED),))
    changes = decided(READY, vm(V.JOINED, pool=Depth.JOINED), queued(1), hosts=[host()], policy=policy)
    told = {c.event: c.reason for c in changes}
    assert told[Event.ADMITTED] == "instant on h1, joined before" and told[Event.TAKEN] == "by job 1"


# --- spares and templates ---------------------------------------------------------------------------


def test_what_is_parked_is_taken_whatever_the_pace() -> None:
    policy = replace(EAGER, pools=(PARKED,), rates={CloneKind.INSTANT: 0.25})
    paid = {("h1", "slim", CloneKind.INSTANT): NOW + 60}
    parked = vm(V.PARKED, pool=Depth.PARKED)
    assert admitted(decided(READY, parked, queued(1), hosts=[host()], policy=policy, paced=paid)) == {1}
    gang = decided(READY, parked, queued(1, nodes=2), queued(2), hosts=[host(cpus=2)], policy=policy, paced=paid)
    assert admitted(gang) == {2}, "one that waits for the pace leaves to others what is parked, and its room"


def test_spares_give_their_room_to_a_template_that_a_job_needs() -> None:
    spare = replace(vm(V.JOINED, pool=Depth.JOINED), size=Size(1, 512))
    held = [claim_of(READY), claim_of(spare)]
    policy = replace(EAGER, pools=(replace(PARKED, depth=Depth.JOINED),))
    small = host(memory=256 + 544)
    changes = decided(READY, spare, queued(1, image="other"), hosts=[small], claims=held, policy=policy)
    assert [(c.row.key, c.reason) for c in changes if c.event is Event.RELEASED] == [
        (spare.key, "its memory is needed")
    ]
    # Room for one such template, not for two, nor for one that is kept twice.
    tight = replace(small, capacity=Size(64, 256 + 300, 65536))
    lean = replace(spare, size=Size(1, 256))
    held = [claim_of(READY), claim_of(lean)]
    changes = decided(READY, lean, queued(1, Size(1, 50), image="other"), hosts=[tight], claims=held, policy=policy)
    assert [(c.row.key, c.reason) for c in changes if c.event is Event.RELEASED] == [(lean.key, "its memory is needed")]


def test_what_is_parked_of_the_jobs_own_image_gives_way_last() -> None:
    ready = [READY, template(T.READY, id=2, image="other")]
    parked = [vm(V.PARKED, id=n, pool=Depth.PARKED, image="slim" if n == 1 else "other") for n in (1, 2, 3)]
    claims = [*map(claim_of, ready), *(Claim(one.key, "h1", Size(0, 32)) for one in parked)]
    pools = (replace(PARKED, most=1), replace(PARKED, image="other", least=2))
    room = sum(claim.size.memory for claim in claims) + 288 - 2 * 32  # for one VM, once two spares have gone
    policy = replace(EAGER, pools=pools)
    changes = decided(*ready, *parked, queued(1), hosts=[host(memory=room)], claims=claims, policy=policy)
    assert [c.row.id for c in changes if c.event is Event.RELEASED] == [2, 3]


def test_two_jobs_do_not_have_templates_made_where_there_is_room_for_one() -> None:
    other = Claim(Key("vm", 90), "h1", Size(0, 100))
    changes = decided(queued(1, image="one"), queued(2, image="two"), hosts=[host(memory=600)], claims=[other])
    assert [row.image for _, row in templates(changes)] == ["one"]
    assert notes(changes)[2] == "waiting for capacity: no host has room for the template of image two"


def test_a_template_that_broke_on_another_host_is_tried_again_when_the_first_is_full() -> None:
    full = Claim(Key("vm", 90), "h1", Size(64, 0))
    broken = template(T.BROKEN, id=2, host="h2", tries=1, since=NOW - POLICY.backoff(1))
    (change,) = [
        c
        for c in decided(READY, broken, queued(1), hosts=[host("h1"), host("h2")], claims=[claim_of(READY), full])
        if isinstance(c.row, Template)
    ]
    assert (change.row.id, change.event, change.reason) == (2, Event.NEEDED, "job 1 needs it")


def test_of_templates_as_old_as_each_other_the_first_makes_way() -> None:
    idle = [template(T.READY, id=n, image=f"idle{n}", since=5.0) for n in (3, 2)]
    full = Claim(Key("vm", 90), "h1", Size(64, 0))
    changes = decided(READY, *idle, queued(1), hosts=[host()], claims=[full])
    assert [(event, row.id) for event, row in templates(changes)] == [(Event.DROPPED, 2)]
    assert [c.reason for c in changes if c.event is Event.DROPPED] == ["its memory is needed"]


@pytest.mark.parametrize(
    ("can", "ready"), [("fork plug_cpus", Size(1, 512)), ("fork plug_memory", Size(2, 256)), ("fork", Size(2, 512))]
)
def test_a_template_with_more_of_what_cannot_be_plugged_serves_on_whichever_host(can: str, ready: Size) -> None:
    """On the first host all can be plugged, and there is no room."""
    here = template(T.READY, host="h2", size=ready)
    hosts = [host("h1", cpus=1), replace(host("h2"), images={"slim": frozenset(can.split())})]
    full = Claim(Key("vm", 90), "h1", Size(1, 0))
    (one,) = made(decided(here, queued(1), hosts=hosts, claims=[full]))
    assert (one.host, one.parent) == ("h2", ready)


def test_of_templates_with_more_that_with_the_least_memory_serves() -> None:
    lean, fat = template(T.READY, id=1, size=Size(2, 512)), template(T.READY, id=2, size=Size(1, 1024))
    stiff = host(can="fork")
    (one,) = made(decided(fat, lean, queued(1, Size(1, 400)), hosts=[stiff]))
    assert one.parent == Size(2, 512)


def test_a_template_for_those_that_come_after_is_as_large_as_what_cannot_be_plugged() -> None:
    often = {"slim": 1.0}
    policy = replace(EAGER, kind=CloneKind.AUTO)
    changes = decided(queued(1, Size(1, 400)), hosts=[host(can="fork")], policy=policy, arrivals=often)
    assert [row.size for _, row in templates(changes)] == [Size(1, 512)]
    assert [one.kind for one in made(changes)] == [CloneKind.LINKED]


# --- addresses --------------------------------------------------------------------------------------


def test_two_vms_of_one_gang_never_get_one_address() -> None:
    other = replace(vm(V.SERVING, id=9, attempt=9), address="10.9.1.100/16")
    runs = attempt(A.ALLOCATED, id=9, job="9")
    gang = made(decided(READY, runs, other, queued(1, nodes=2), hosts=[host()]))
    assert [one.address for one in gang] == ["10.9.1.101/16", "10.9.1.102/16"]


# --- more claimed than declared ---------------------------------------------------------------------


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
@pytest.mark.parametrize("state", [V.PLANNED, V.SERVING])
def test_what_is_not_seen_yet_will_take_all_that_it_claims(state: V, spare: int, fits: bool) -> None:
    policy = replace(EAGER, overcommit=1.5, floor=1000)
    runs = attempt(A.ALLOCATED if state is V.SERVING else A.CLAIMED, id=9, job="9")
    other = replace(vm(state, id=9, attempt=9, since=NOW - 40), size=Size(1, 1000))
    mine = vm_claim(vm_size(SMALL, POLICY.base, POLICY), POLICY).memory
    claims = [claim_of(READY), claim_of(other)]
    coming = 256 + (
        1 if state is V.SERVING else 1032
    )  # a VM that serves has settled at the MiB that it was seen to have
    h1 = host(memory=sum(claim.size.memory for claim in claims), available=1000 + mine + coming + spare)
    changes = decided(READY, runs, other, queued(1), hosts=[h1], claims=claims, policy=policy, began=NOW - 1)
    assert (admitted(changes) == {1}) is fits


def test_hosts_that_lack_memory_are_named() -> None:
    policy = replace(EAGER, overcommit=1.5, floor=1000)
    both = [READY, template(T.READY, id=2, host="h2")]
    hosts = [host(name, available=1100) for name in ("h1", "h2")]
    told = notes(decided(*both, queued(1), hosts=hosts, claims=[claim_of(one) for one in both], policy=policy))
    why = "waiting for memory: h1, h2 must keep 1000 MiB available, of which others there leave too little"
    assert told == {1: why}


def test_a_template_beside_which_its_own_job_has_no_room_gives_way_to_it() -> None:
    """Seen in the simulation (troubled 1581, as it then was): it was kept for the very job that it kept out."""
    large, gang = template(T.READY, size=Size(1, 896)), queued(1, Size(1, 500), nodes=2, kind=CloneKind.AUTO)
    small = host(memory=2048, can="fork", template_copies=1)
    held = [Claim(large.key, "h1", template_claim(large.size, small))]
    assert (Event.DROPPED, large.id) in [
        (event, row.id) for event, row in templates(decided(large, gang, hosts=[small], claims=held))
    ]
    (alone, _) = made(decided(gang, hosts=[small]))
    assert alone.kind is CloneKind.LINKED
