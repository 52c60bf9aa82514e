"""Admission on rows made by hand: templates, earlier runs, limits and over-commitment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from multiverse.core.capacity.room import room_of
from multiverse.core.capacity.sizes import largest_on, template_claim, vm_claim, vm_size
from multiverse.core.context import Context
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import CloneKind, Depth, Key, Size
from multiverse.core.model.host import Claim, Host, HypervisorView, KnownHost, Overcommitment
from multiverse.core.model.job import AttemptState, Job, JobState, Request, SchedulerView
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import (
    Template,
    TemplateCondition,
    TemplateKey,
    TemplateSeen,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
)
from multiverse.core.model.world import World
from multiverse.core.planner import plan
from multiverse.core.policy import Policy, Pool
from multiverse.core.rows import Rows
from multiverse.core.state import State
from multiverse.core.transition import Change, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import (
    IMAGES,
    SOURCE,
    Decided,
    as_ready,
    attempt,
    changes_of,
    on_host,
    rows,
    template,
    vm,
    world_of,
)

A, V, T = AttemptState, VmState, TemplateState
SMALL = Size(1, 100)
NOW = 1000.0


def host(name: str = "h1", *, cpus: int = 4, memory: int = 4096, abilities: Iterable[str] = ("instant",)) -> Host:
    return Host(name, Size(cpus, memory, 65536), frozenset(abilities), images=IMAGES)


def without_plugging(name: str = "h1", *, cpus: int = 4, memory: int = 4096, can: Iterable[str] = ("fork",)) -> Host:
    """A host whose image cannot plug all."""
    return replace(host(name, cpus=cpus, memory=memory), images={"slim": frozenset(can)})


def full(name: str = "h1") -> Claim:
    """A claim on every CPU of that host."""
    return Claim(Key("vm", 90 + int(name[1:])), name, Size(4, 0))


def planned(here: Rows, *hosts: Host, now: float = NOW, policy: Policy = POLICY) -> Decided:
    """The changes of one pass when the jobs of all attempts wait at the gate, in the order of their numbers, and the
    templates that are ready in the rows are observed to be ready."""
    jobs = {
        a.job.job_id: Job(a.job, a.job_name, a.uid, JobState.PENDING, a.request, rank=a.id)
        for a in here.attempts.values()
        if a.state is A.QUEUED
    }
    view = HypervisorView({h.name: h for h in hosts}, {}, as_ready(here.templates.values()))
    return decisions(here, world_of(SchedulerView(jobs), view, now), now=now, policy=policy)


def decisions(here: Rows, world: World, *, now: float = NOW, policy: Policy = POLICY, lacking: bool = False) -> Decided:
    """The changes of one pass on these rows. `lacking`: the first attempt was found to lack memory before."""
    state = State(here, TABLES, now)
    if lacking:
        state.lacking.add((here.attempts[1].request, CloneKind.INSTANT))
    return Decided(changes_of(plan(state, world, [], now, policy)), state)


def of(changes: list[Change], kind: str) -> list[Change]:
    return [change for change in changes if change.row.key.kind == kind]


def notes(changes: Decided) -> dict[int, str]:
    return changes.reasons


# --- templates --------------------------------------------------------------------------------------


def test_the_oldest_template_that_neither_a_vm_nor_a_queued_job_needs_is_retired() -> None:
    next_in_line = Request(1, SMALL, image="next")
    here = rows(
        attempt(A.QUEUED, id=1),
        attempt(A.QUEUED, id=2, job="8", request=next_in_line),
        attempt(A.ALLOCATED, id=3, job="9"),
        vm(V.LOST, id=1, image="held", attempt=3),
        template(T.READY, id=1, since=1.0),
        template(T.READY, id=2, since=2.0, image="next"),
        template(T.READY, id=3, since=3.0, image="held"),
        template(T.BROKEN, id=4, since=4.0, image="broken"),
        template(T.READY, id=5, since=6.0, image="newer"),
        template(T.READY, id=6, since=5.0, image="older"),
        claims=[full()],
    )
    dropped = of(planned(here, host()), "template")
    assert dropped[0].row.id == 6 and dropped[0].row.state is T.RETIRING


def test_a_template_that_a_queued_job_needs_stays() -> None:
    here = rows(
        attempt(A.QUEUED, id=1),
        attempt(A.QUEUED, id=2, job="8", request=Request(1, SMALL, image="next")),
        template(T.READY, id=1),
        template(T.READY, id=2, image="next"),
        claims=[full()],
    )
    assert of(planned(here, host()), "template") == []


def test_a_template_is_built_on_one_more_host_that_is_able_and_has_room() -> None:
    here = rows(attempt(A.QUEUED), template(T.READY, host="h2"), claims=[full("h2")])
    hosts = [host("h1", abilities=["full"]), host("h2"), host("h3"), host("h4")]
    changes = planned(here, *hosts)
    (asked,) = of(changes, "template")
    assert isinstance(asked.row, Template)
    assert asked.row.host == "h3" and asked.row.image == "slim" and asked.row.state is T.BUILDING
    assert notes(changes) == {1: "the template of image slim is being built on h3"}


@pytest.mark.parametrize("state", [T.BUILDING, T.RETIRING])
def test_while_a_template_is_built_on_one_host_none_is_asked_for_on_another(state: T) -> None:
    here = rows(attempt(A.QUEUED), template(T.READY), template(state, id=2, host="h3", since=NOW), claims=[full("h1")])
    changes = planned(here, host("h1"), host("h2"), host("h3"))
    assert of(changes, "template") == []
    assert notes(changes) == {1: "the template of image slim is being built on h3"}


def test_no_template_is_built_without_room_or_for_a_job_that_needs_none() -> None:
    crowded = Claim(Key("vm", 98), "h2", Size(0, 4096 - POLICY.base.memory + 1))
    here = rows(attempt(A.QUEUED), template(T.READY), claims=[full(), crowded])
    changes = planned(here, host("h1"), host("h2"))
    assert of(changes, "template") == []
    assert notes(changes) == {1: "waiting for capacity: the hosts are full"}
    just = replace(crowded, size=Size(0, 4096 - POLICY.base.memory))
    (asked,) = of(planned(replace(here, claims=(full(), just)), host("h1"), host("h2")), "template")
    assert isinstance(asked.row, Template) and asked.row.host == "h2"
    boots = rows(attempt(A.QUEUED, request=Request(1, SMALL, kind=CloneKind.FULL)), claims=[full(), full("h2")])
    able = ["full", "instant"]
    changes = planned(boots, host("h1", abilities=able), host("h2", abilities=able))
    assert of(changes, "template") == []
    assert notes(changes) == {1: "waiting for capacity: the hosts are full"}


@pytest.mark.parametrize(("waited", "built"), [(POLICY.backoff(2) - 0.5, False), (POLICY.backoff(2), True)])
def test_a_broken_template_is_built_again_once_its_back_off_is_over(waited: float, built: bool) -> None:
    here = rows(attempt(A.QUEUED), template(T.BROKEN, tries=2, reason="no boot", since=NOW - waited))
    changes = of(planned(here, host()), "template")
    assert [(c.row.state, text_of(c.row.reason)) for c in changes] == ([(T.BUILDING, "")] if built else [])


# --- templates by size and account ------------------------------------------------------------------


def test_an_image_that_can_plug_nothing_gets_a_template_of_the_vms_size() -> None:
    here = rows(attempt(A.QUEUED, request=Request(1, Size(2, 700))), template(T.READY))
    (asked,) = of(planned(here, without_plugging()), "template")
    assert isinstance(asked.row, Template) and asked.row.size == Size(2, 1024) and asked.row.state is T.BUILDING
    here = rows(*here.attempts.values(), template(T.READY, size=Size(2, 1024)))
    (made,) = of(planned(here, without_plugging()), "vm")
    assert isinstance(made.row, Vm) and made.row.place.template == TemplateKey("h1", "slim", Size(2, 1024))
    assert made.row.size == Size(2, 1024) and made.row.node_size == Size(2, 700)


@pytest.mark.parametrize(
    ("can", "parent", "size"),
    [
        (("fork", "plug_cpus"), Size(1, 1024), Size(2, 1024)),
        (("fork", "plug_memory"), Size(2, 256), Size(2, 896)),
        (("fork", "plug_cpus", "plug_memory"), Size(1, 256), Size(2, 896)),
    ],
)
def test_what_an_image_can_plug_is_plugged(can: tuple[str, ...], parent: Size, size: Size) -> None:
    here = rows(attempt(A.QUEUED, request=Request(1, Size(2, 700))), template(T.READY, size=parent))
    (made,) = of(planned(here, without_plugging(can=can)), "vm")
    assert isinstance(made.row, Vm) and made.row.place.template
    assert (made.row.place.template.size, made.row.size) == (parent, size)


def test_the_closest_template_that_is_ready_serves_before_another_is_built() -> None:
    here = rows(
        attempt(A.QUEUED, request=Request(1, Size(1, 300))),
        template(T.READY, id=1, size=Size(4, 512)),
        template(T.READY, id=2, size=Size(2, 1024)),
        template(T.READY, id=3, size=Size(2, 512)),
        template(T.READY, id=4, size=Size(1, 512), account="physics"),
        template(T.BUILDING, id=5, size=Size(1, 512), since=NOW),
        template(T.READY, id=6, size=Size(1, 256)),
    )
    changes = planned(here, without_plugging())
    (made,) = of(changes, "vm")
    assert isinstance(made.row, Vm) and made.row.place.template
    assert made.row.place.template.size == made.row.size == Size(2, 512)


def test_a_gang_that_fits_only_with_a_smaller_template_gets_that_template() -> None:
    here = rows(attempt(A.QUEUED, request=Request(3, Size(1, 300))), template(T.READY, size=Size(2, 1024)))
    (asked,) = of(planned(here, without_plugging()), "template")
    assert isinstance(asked.row, Template) and asked.row.size == Size(1, 512)
    roomy = of(planned(here, without_plugging(cpus=8, memory=8192)), "vm")
    assert len(roomy) == 3


def test_a_job_with_an_account_uses_only_that_accounts_templates() -> None:
    theirs = Request(1, SMALL, account="physics")
    here = rows(attempt(A.QUEUED, request=theirs), template(T.READY), template(T.READY, id=2, account="biology"))
    (asked,) = of(planned(here, host()), "template")
    assert isinstance(asked.row, Template) and (asked.row.size, asked.row.account) == (POLICY.base, "physics")
    here = rows(attempt(A.QUEUED, request=theirs), template(T.READY), template(T.READY, id=2, account="physics"))
    (made,) = of(planned(here, host()), "vm")
    assert isinstance(made.row, Vm) and made.row.place.template == here.templates[2].which


@pytest.mark.parametrize("kind", [None, *CloneKind])
def test_a_job_waits_for_an_image_that_no_host_has(kind: CloneKind | None) -> None:
    """The image may be newer than the observation: what it can plug is not known before."""
    here = rows(attempt(A.QUEUED, request=Request(1, Size(2, 700), image="mine", kind=kind)),
                attempt(A.QUEUED, id=2, job="8"), template(T.READY))  # fmt: skip
    abilities = ("instant", "linked", "full")
    changes = planned(here, host(abilities=abilities), replace(host("h2", abilities=abilities), images={}))
    assert notes(changes) == {1: "no host has image mine"} and not of(changes, "template")
    assert [c.row.attempt for c in of(changes, "vm") if isinstance(c.row, Vm)] == [2], "it blocks no other job"
    has_it = Host("h2", Size(4, 4096, 65536), frozenset(abilities), images={"mine": frozenset({"fork"})})
    later = planned(here, host(abilities=abilities), has_it)
    made = [c.row for c in later if isinstance(c.row, Vm | Template) and c.row.image == "mine"]
    assert made and {row.host for row in made} == {"h2"}
    assert all(row.size == Size(2, 1024) for row in made if isinstance(row, Template))


def test_a_job_too_large_for_the_hosts_with_its_image_waits_if_it_would_fit_on_others() -> None:
    small = replace(host(memory=1024), images={"mine": IMAGES["slim"]})
    here = rows(attempt(A.QUEUED, request=Request(1, Size(1, 3000), image="mine")))
    (note,) = notes(planned(here, small, host("h2", memory=65536))).values()
    largest = largest_on(small, "mine", POLICY)
    assert f"fits on no host; the largest that fits is {largest} per node" in note
    assert note.endswith("; without image mine: h2")
    for other in (host("h2", memory=2048), replace(host("h2", memory=65536), images=small.images)):
        revoked = [change.event for change in of(planned(here, small, other), "attempt")]
        assert (revoked == [Event.IMPOSSIBLE]) == (other.capacity.memory < 3000)
    away = replace(here, hosts={name: KnownHost(name, SOURCE) for name in ("h1", "h2", "h3")})
    (note,) = notes(planned(away, small, host("h2", memory=65536))).values()
    assert "fits on no host" in note and note.endswith("; without image mine: h2; out of reach now: h3")
    (note,) = notes(planned(away, host(memory=65536))).values()
    assert note == "no host has image mine; out of reach now: h2, h3"


def test_a_job_too_large_for_any_host_is_revoked_even_if_no_host_has_its_image() -> None:
    (change,) = of(planned(rows(attempt(A.QUEUED, request=Request(1, Size(1, 9000), image="mine"))), host()), "attempt")
    assert change.event is Event.IMPOSSIBLE and "9000 MiB fits on no host" in text_of(change.reason)


def test_nothing_is_released_on_a_host_that_lacks_the_image() -> None:
    """The job cannot use the template there or the spare beside it, and other jobs can."""
    idle, mine = template(T.READY, id=1, host="h2"), template(T.READY, id=2, image="mine")
    policy = replace(POLICY, pools=tuple(Pool(image, Depth.JOINED, 1, 1, Size(2, 100), 1e9) for image in IMAGES))
    policy = replace(policy, pools=(*policy.pools, replace(policy.pools[0], image="mine")))
    busy = replace(vm(V.SERVING, id=3, image="mine", since=NOW), size=Size(2, 512))
    idle_node = replace(vm(V.JOINED, since=NOW), pool=Depth.JOINED, size=Size(2, 512), node_size=Size(2, 100))
    elsewhere, here = replace(on_host(idle_node, "h2"), id=7), replace(idle_node, id=8, image="mine")
    claims = [
        Claim(one.key, one.host, vm_claim(one.size, host(), "slim", CloneKind.INSTANT))
        for one in (busy, elsewhere, here)
    ]
    claims += [Claim(idle.key, "h2", Size(0, 3000)), Claim(mine.key, "h1", Size(0, 256))]
    hosts = [replace(host(name), images={image: IMAGES["slim"]}) for name, image in (("h1", "mine"), ("h2", "slim"))]
    asks = attempt(A.QUEUED, request=Request(1, SMALL, image="mine"))
    changes = planned(rows(asks, idle, mine, busy, elsewhere, here, claims=claims), *hosts, policy=policy)
    assert [c.row.key for c in changes if c.event is Event.RELEASED] == [here.key]
    kept = rows(asks, idle, mine, busy, replace(here, state=V.SERVING, pool=None), elsewhere, claims=claims)
    changes = planned(kept, *hosts, policy=policy)
    assert notes(changes) == {1: "waiting for capacity: the hosts are full"}
    assert not [c for c in changes if c.event in (Event.DROPPED, Event.RELEASED)]


def test_a_job_that_boots_needs_no_room_for_a_template() -> None:
    """The idle template is in its way and is retired; other processes of the machine are not in its way."""
    idle = template(T.READY)
    asks = attempt(A.QUEUED, request=Request(1, Size(1, 5000), kind=CloneKind.FULL))
    claim = vm_claim(vm_size(Size(1, 5000), POLICY.base, host(), POLICY), host(), "slim", CloneKind.INSTANT).memory
    h1 = replace(host(cpus=64, memory=8192, abilities=("instant", "full")), available=1000 + claim - 256)
    h1 = replace(h1, overcommit=OVERCOMMITTED)
    here = rows(asks, idle, claims=[Claim(idle.key, "h1", template_claim(idle.size, h1, "slim"))])
    job = Job(asks.job, "hello", 1000, JobState.PENDING, asks.request)
    seen = {idle.which: replace(as_ready([idle])[idle.which], held=256.0)}
    changes = decisions(here, world_of(SchedulerView({"7": job}), HypervisorView({"h1": h1}, {}, seen), NOW))
    assert [c.row.key for c in changes if c.event is Event.DROPPED] == [idle.key]


def test_an_image_that_cannot_be_forked_serves_booted_clones_only() -> None:
    instant, full_clone = Request(1, SMALL), Request(1, Size(2, 700), kind=CloneKind.FULL)
    changes = planned(rows(attempt(A.QUEUED, request=instant)), without_plugging(can=()))
    assert notes(changes) == {1: "no host can make instant clones of image slim"} and not of(changes, "template")
    its = replace(without_plugging(can=()), abilities=frozenset({"full"}))
    (made,) = of(planned(rows(attempt(A.QUEUED, request=full_clone)), its), "vm")
    assert isinstance(made.row, Vm) and made.row.place.template is None and made.row.size == Size(2, 896)


def test_a_job_that_waits_for_room_for_its_template_blocks_later_jobs() -> None:
    crowded = Claim(Key("vm", 98), "h1", Size(0, 4096 - 512))
    here = rows(
        attempt(A.QUEUED, id=1, request=Request(1, Size(1, 700))),
        attempt(A.QUEUED, id=2, job="8"),
        template(T.READY),
        claims=[crowded],
    )
    changes = planned(here, without_plugging())
    why = "waiting for capacity: no host has room for the template of image slim"
    assert not of(changes, "vm") and notes(changes) == {1: why, 2: why}


def test_a_template_is_retired_for_the_first_job_if_only_templates_are_in_its_way() -> None:
    big, small = Size(1, 1700), Size(1, 700)
    here = rows(
        attempt(A.QUEUED, id=1, request=Request(1, big)),
        attempt(A.QUEUED, id=2, job="8", request=Request(1, small)),
        template(T.READY, id=1, size=Size(1, 1024)),
        template(T.BROKEN, id=2, size=Size(1, 2048), since=NOW),
        claims=[Claim(Key("template", 1), "h1", Size(0, 1024)), Claim(Key("template", 2), "h1", Size(0, 2048))],
    )
    (dropped,) = of(planned(here, without_plugging()), "template")
    assert dropped.row.state is T.RETIRING and dropped.row.id == 1
    busy = replace(here, claims=(*here.claims, Claim(Key("vm", 98), "h1", Size(1, 100))))
    assert of(planned(busy, without_plugging()), "template") == [], "a VM will go, and make room"


# --- which jobs wait --------------------------------------------------------------------------------------


def told_of(*job_ids: str, array: str = "5") -> list[int]:
    """The attempts that have a reason when these jobs wait for a full host. Jobs `5_N` are tasks of one array."""
    waiting = [attempt(A.QUEUED, id=n, job=job_id) for n, job_id in enumerate(job_ids, start=1)]
    jobs = {a.job.job_id: Job(a.job, "hello", 1000, JobState.PENDING, a.request, rank=a.id,
                              array=array if a.job.job_id.startswith("5_") else "") for a in waiting}  # fmt: skip
    here = rows(*waiting, template(T.READY), claims=[full()])
    view = HypervisorView({"h1": host()}, {}, as_ready([template(T.READY)]))
    return list(decisions(here, world_of(SchedulerView(jobs), view, NOW)).reasons)


def test_ten_jobs_have_a_reason_and_an_array_is_one_of_them() -> None:
    tasks, singles = [f"5_{n}" for n in range(5)], [str(n) for n in range(10, 40)]
    assert told_of(*singles) == list(range(1, 11))
    assert told_of(*tasks, *singles) == [1, *range(6, 15)]
    assert told_of("10", *tasks) == [1, 2]


def test_behind_a_long_array_fewer_jobs_have_a_reason_and_the_pass_stays_short() -> None:
    tasks = [f"5_{n}" for n in range(5000)]
    assert told_of(*tasks, "10", "11") == [1]


def test_a_reason_changes_no_row() -> None:
    here = rows(attempt(A.QUEUED), template(T.READY), claims=[full()])
    decided = planned(here, host())
    assert decided == [] and notes(decided) == {1: "waiting for capacity: the hosts are full"}


@pytest.mark.parametrize(
    ("owner", "waits"),
    [
        ({"restarts": 1}, True),
        ({"restarts": 2}, False),
        ({"restarts": 3}, False),
        ({"restarts": 1, "job": "8"}, False),
    ],
)
@pytest.mark.parametrize("state", [V.LOST, V.RELEASING])
def test_a_job_waits_for_vms_of_its_own_earlier_runs_only(owner: dict[str, object], waits: bool, state: V) -> None:
    earlier = attempt(A.RECLAIMING, id=1, outcome="requeued", **owner)  # type: ignore[arg-type]
    here = rows(
        earlier,
        attempt(A.QUEUED, id=2, restarts=2),
        vm(state, id=4),  # serves no attempt
        vm(state, id=5, attempt=1, host="h2"),
        template(T.READY),
    )
    changes = planned(here, host("h1"))
    admitted = [c.row.id for c in changes if c.event is Event.ADMITTED]
    assert admitted == ([] if waits else [2])
    gone = "waiting until mvtest0-5 of its earlier run is gone"
    out_of_reach = "its earlier run may go on in mvtest0-5: host h2 is out of reach, neither back nor fenced"
    # Its host is out of sight, so that a VM being released there is lost in the same pass.
    assert notes(changes).get(2, "") == (out_of_reach if waits else "")
    changes = planned(here, host("h1"), host("h2", abilities=[]))
    assert notes(changes).get(2, "") == (gone if waits else "")


def test_a_job_that_waits_for_its_earlier_run_blocks_no_other() -> None:
    here = rows(
        attempt(A.RECLAIMING, id=1, outcome="requeued"),
        attempt(A.QUEUED, id=2, restarts=1),
        attempt(A.QUEUED, id=3, job="8"),
        vm(V.LOST, attempt=1, host="h2"),
        template(T.READY),
    )
    assert [c.row.id for c in planned(here, host()) if c.event is Event.ADMITTED] == [3]


def test_no_more_vms_are_made_at_once_than_allowed_except_for_one_larger_gang() -> None:
    policy = replace(POLICY, provisioning=2)
    pair = Request(2, SMALL)
    idle = rows(attempt(A.QUEUED, request=Request(3, SMALL)), template(T.READY))
    assert [c.row.id for c in planned(idle, host(), policy=policy) if c.event is Event.ADMITTED] == [1]
    making = rows(
        attempt(A.CLAIMED, id=1, job="6", request=pair),
        attempt(A.QUEUED, id=2),
        attempt(A.QUEUED, id=3, job="8"),
        vm(V.PLANNED, attempt=1, since=NOW),
        template(T.READY),
    )
    unseen = {key: row for key, row in making.attempts.items() if key != 1}
    changes = planned(replace(making, attempts=unseen), host(), policy=policy)
    assert [c.row.id for c in changes if c.event is Event.ADMITTED] == [2]
    assert notes(changes) == {3: "waiting for a turn: as many VMs as may be made at once are being made"}


# --- limits -----------------------------------------------------------------------------------------


def limited(here: Rows, left: dict[str, int], uses: dict[int, dict[str, int]], pinned: int = 0) -> list[Change]:
    """The changes when each attempt's job uses so much of what limits leave. Attempt `pinned` is past the gate."""
    jobs = {
        a.job.job_id: Job(
            a.job, a.job_name, a.uid, JobState.PENDING, a.request, rank=a.id, uses=tuple(uses[a.id].items())
        )._replace(
            gated=a.id != pinned,
            pinned=a.feature if a.id == pinned else None,
        )
        for a in here.attempts.values()
    }
    view = HypervisorView({"h1": host(cpus=8, abilities=["full"])}, {}, {})
    return decisions(here, world_of(SchedulerView(jobs, {}, left), view, NOW))


def three(*states: AttemptState) -> Rows:
    found = [
        attempt(state, id=n, job=str(n), request=Request(1, SMALL, kind=CloneKind.FULL), since=NOW - 30)
        for n, state in enumerate(states, 1)
    ]
    return rows(*found, *(vm(V.JOINED, id=n, attempt=n) for n, state in enumerate(states, 1) if state is A.SPAWNED))


def admitted(changes: list[Change]) -> list[int]:
    return [change.row.id for change in changes if change.event is Event.ADMITTED]


def test_no_more_jobs_are_admitted_than_a_limit_leaves() -> None:
    changes = limited(three(A.QUEUED, A.QUEUED, A.QUEUED), {"cpu": 3}, {1: {"cpu": 1}, 2: {"cpu": 2}, 3: {"cpu": 1}})
    assert admitted(changes) == [1, 2]
    assert notes(changes) == {3: "held back by cpu"}


def test_a_job_that_a_limit_holds_back_blocks_no_other() -> None:
    changes = limited(three(A.QUEUED, A.QUEUED, A.QUEUED), {"cpu": 1}, {1: {"cpu": 2}, 2: {"cpu": 1}, 3: {}})
    assert admitted(changes) == [2, 3]


def test_jobs_that_are_admitted_and_do_not_run_yet_count_for_limits() -> None:
    here = three(A.SPAWNED, A.QUEUED, A.QUEUED)
    uses = {1: {"jobs": 1}, 2: {"jobs": 1}, 3: {"jobs": 1}}
    assert admitted(limited(here, {"jobs": 2}, uses, pinned=1)) == [2]
    assert admitted(limited(here, {"jobs": 1}, uses, pinned=1)) == []


def test_every_limit_must_leave_enough() -> None:
    changes = limited(three(A.QUEUED, A.QUEUED), {"a": 2, "b": 0}, {1: {"a": 1, "b": 1}, 2: {"a": 1}})
    assert admitted(changes) == [2]
    assert notes(changes) == {1: "held back by b"}


def test_a_negative_limit_lets_no_job_start() -> None:
    assert admitted(limited(three(A.QUEUED), {"jobs": -2}, {1: {"jobs": 1}})) == []


# --- more claimed than declared --------------------------------------------------------------------

OVERCOMMITTED = Overcommitment(memory=4.0, floor=1000)


def admission_beside(available: int, *vms: tuple[Vm, float], overcommit: Overcommitment = OVERCOMMITTED) -> str:
    """What becomes of a small job, or why it waits, on a host that declares exactly what these VMs claim. Each VM
    comes with the memory that it was observed to use."""
    claims = [Claim(one.key, "h1", vm_claim(one.size, host(), "slim", CloneKind.INSTANT)) for one, _ in vms]
    ready = template(T.READY)
    claims.append(Claim(ready.key, "h1", template_claim(ready.size, host(), "slim")))
    declared = host(cpus=64, memory=sum(claim.size.memory for claim in claims))
    h1 = replace(declared, available=available, overcommit=overcommit)
    here = rows(attempt(A.QUEUED, request=Request(1, SMALL)), ready, *(one for one, _ in vms), claims=claims)
    job = Job(here.attempts[1].job, "hello", 1000, JobState.PENDING, here.attempts[1].request)
    seen = {one.name: VmSeen(one.name, "h1", VmCondition.RUNNING, private=held) for one, held in vms}
    frozen = TemplateSeen("t", "h1", ready.image, TemplateCondition.READY, ready.size, held=256.0)
    view = HypervisorView({"h1": h1}, seen, {ready.which: frozen})
    world = world_of(SchedulerView({job.ref.job_id: job}), view, NOW - 1)
    decided = decisions(here, world)
    return next((text_of(c.reason) for c in decided if c.row.key == Key("attempt", 1)), decided.reasons.get(1, ""))


CLAIM = vm_claim(vm_size(SMALL, POLICY.base, host(), POLICY), host(), "slim", CloneKind.INSTANT).memory


def serving(since: float, serial: int = 5) -> Vm:
    return replace(vm(V.SERVING, id=serial, since=since), size=Size(1, 2304))


def test_a_vm_that_has_settled_counts_as_the_memory_that_it_uses() -> None:
    room = 1000 + CLAIM + 50
    assert admission_beside(room, (serving(NOW - 30), 200.0)) == "instant on h1"
    assert admission_beside(room, (serving(NOW - 29), 200.0)) == "waiting for memory: h1 must keep 1000 MiB available"
    assert "must keep" in admission_beside(room, (serving(NOW - 30), 0.0)), "it has not been measured"
    assert "must keep" in admission_beside(room, (replace(serving(NOW - 300), state=V.RELEASING), 200.0))


def test_the_floor_is_kept_to_the_last_mib() -> None:
    assert admission_beside(1000 + CLAIM + 50, (serving(0.0), 200.0)) == "instant on h1"
    assert "must keep 1000 MiB" in admission_beside(1000 + CLAIM + 49, (serving(0.0), 200.0))


def test_without_over_commitment_available_memory_does_not_count() -> None:
    assert "the hosts are full" in admission_beside(100_000, (serving(0.0), 200.0), overcommit=Overcommitment())


def test_claims_stay_within_the_over_commitment_however_little_memory_is_used() -> None:
    many = [(serving(0.0, serial), 20.0) for serial in range(5, 8)]
    assert admission_beside(100_000, *many) == "instant on h1"
    barely = replace(OVERCOMMITTED, memory=1.0 + (CLAIM - 1) / (3 * 2336 + 256))
    assert "the hosts are full" in admission_beside(100_000, *many, overcommit=barely)


def test_a_job_that_waits_for_memory_of_other_processes_blocks_no_other() -> None:
    ready, busy = template(T.READY), replace(serving(0.0), size=Size(1, 4096))
    here = rows(attempt(A.QUEUED, request=Request(1, Size(1, 5000))), attempt(A.QUEUED, id=2, job="8"), ready, busy,
                claims=[Claim(ready.key, "h1", template_claim(ready.size, host(), "slim")),
                        Claim(busy.key, "h1", vm_claim(busy.size, host(), "slim", CloneKind.INSTANT))])  # fmt: skip

    def decided(available: int, held: float, *, lacking: bool = False) -> tuple[list[int], dict[int, str]]:
        """The attempts that are admitted, and the notes of the others."""
        jobs = {a.job.job_id: Job(a.job, "hello", 1000, JobState.PENDING, a.request, rank=a.id)
                for a in here.attempts.values()}  # fmt: skip
        seen = {busy.name: VmSeen(busy.name, "h1", VmCondition.RUNNING, private=held)}
        h1 = replace(host(cpus=64, memory=8192), available=available, overcommit=OVERCOMMITTED)
        view = HypervisorView({"h1": h1}, seen, as_ready([ready]))
        changes = decisions(here, world_of(SchedulerView(jobs), view, NOW), lacking=lacking)
        return [c.row.attempt for c in of(changes, "vm") if isinstance(c.row, Vm) and c.row.attempt], notes(changes)

    # Its own claim, and that of the template beside it.
    need = vm_claim(vm_size(Size(1, 5000), POLICY.base, host(), POLICY), host(), "slim", CloneKind.INSTANT).memory + 256
    floor = "h1 must keep 1000 MiB available"
    both = dict.fromkeys((1, 2), f"waiting for memory: {floor}")
    assert decided(1000 + need - 2000, 2000.0) == ([], both), "it would fit if the VM ended"
    beyond = {1: f"waiting for memory: {floor}, and others there leave too little of it"}
    assert decided(1000 + need - 2001, 2000.0) == ([2], beyond)
    assert decided(1000 + need + 1000, 2000.0)[0] == [1, 2]

    eighth = OVERCOMMITTED.floor // 8
    assert decided(1000 + need - 2000 + eighth - 1, 2000.0, lacking=True) == ([2], beyond), (
        "it has had this reason before: the last MiB do not count"
    )
    assert decided(1000 + need - 2000 + eighth, 2000.0, lacking=True) == ([], both)


def test_the_memory_of_a_deleted_template_is_free_when_the_last_vm_that_maps_it_is_gone() -> None:
    vms = [replace(vm(V.SERVING, id=n, template_id=9), size=Size(1, 512)) for n in (1, 2)]
    state = State(
        rows(*vms, claims=[Claim(one.key, "h1", vm_claim(one.size, host(), "slim", CloneKind.INSTANT)) for one in vms]),
        TABLES,
        NOW,
    )
    view = HypervisorView({"h1": replace(host(memory=65536), available=5000, overcommit=OVERCOMMITTED)}, {
        one.name: VmSeen(one.name, "h1", VmCondition.RUNNING, private=300.0) for one in vms
    }, {})  # fmt: skip
    coming = 75  # they have settled: a quarter of what they hold
    context = Context(state, world_of(None, view, NOW), POLICY)
    left = {n: room_of(context, without=[one.key for one in vms[:n]]).free["h1"][1] for n in range(3)}
    assert left == {0: 4000 - 2 * coming, 1: 4000 - coming + 300, 2: 4000 + 600 + 256}


def test_a_deleted_template_takes_room_while_vms_map_it() -> None:
    some = [replace(vm(V.SERVING, id=n, template_id=9), size=Size(1, 512)) for n in (1, 2)]
    state = State(rows(*some), TABLES, NOW)
    context = Context(state, world_of(None, HypervisorView({"h1": host()}), NOW), POLICY)
    free = {n: room_of(context, without=[one.key for one in some[:n]]).free["h1"][1] for n in range(3)}
    assert free == {0: 4096 - 256, 1: 4096 - 256, 2: 4096}


def test_releasing_a_spare_frees_the_memory_that_it_uses() -> None:
    ready, spare = template(T.READY), replace(vm(V.JOINED, id=5, pool=Depth.JOINED, since=NOW), size=Size(1, 1024))
    here = rows(attempt(A.QUEUED, request=Request(1, Size(2, 100))), ready, spare,
                claims=[Claim(ready.key, "h1", template_claim(ready.size, host(), "slim")),
                        Claim(spare.key, "h1", vm_claim(spare.size, host(), "slim", CloneKind.INSTANT))])  # fmt: skip
    job = Job(here.attempts[1].job, "hello", 1000, JobState.PENDING, here.attempts[1].request)
    pooled = replace(POLICY, pools=(Pool("slim", Depth.JOINED, 1, 1, SMALL, 1e9),))
    for held, released in ((float(CLAIM), True), (float(CLAIM - 1), False)):
        seen = {spare.name: VmSeen(spare.name, "h1", VmCondition.RUNNING, private=held)}
        h1 = replace(host(cpus=64, memory=8192), available=1000 + 256, overcommit=OVERCOMMITTED)  # the template's alone
        view = HypervisorView({"h1": h1}, seen, as_ready([ready]))
        changes = decisions(here, world_of(SchedulerView({"7": job}), view, NOW), policy=pooled)
        gone = [
            c for c in of(changes, "vm") if c.event is Event.RELEASED and text_of(c.reason) == "its memory is needed"
        ]
        assert bool(gone) == released, held
