"""What leaves leased hosts: those whose pilots end, in time, and those that others replace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from multiverse.core.capacity.room import room_of
from multiverse.core.context import Context
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.host import Claim, Drain, Host, HypervisorView, KnownHost
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    Eviction,
    Job,
    JobState,
    Lease,
    LeaseState,
    Node,
    NodeState,
    PilotSeen,
    PilotState,
    Request,
    SchedulerView,
)
from multiverse.core.model.reason import Why, said
from multiverse.core.model.saved import Saved, SavedState, Storage
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Row, Seen, World
from multiverse.core.planner import plan
from multiverse.core.policy import Policy
from multiverse.core.rebalance.leases import plan_lease_ends, plan_packing
from multiverse.core.state import State
from tests.unit import rows
from tests.unit.lease_harness import LEASING
from tests.unit.rows import IMAGES
from tests.unit.test_moving import KIND

A, L, V = AttemptState, LeaseState, VmState
NOW, EPOCH = 10_000.0, 1_700_000_000.0
UNIX = NOW + EPOCH
SHARED = Storage("shared", "qemu")
HOUR = 3600.0
RATE = 100  # MiB a second that a host sends


def host(name: str, cpus: int = 8, memory: int = 8192, **more: Any) -> Host:
    values: dict[str, Any] = {"images": IMAGES, "moves": KIND, "vm_overhead": 0, "memory_block": 1, **more}
    return Host(name, Size(cpus, memory, 65536), frozenset({"instant", "full"}), **values)


class Site:
    """Leased hosts, each a source of its own, with jobs that run there; `plan` gives what is to leave them. Where a
    site has a host of its own, that is h1."""

    def __init__(self, own: int = 0) -> None:
        self.rows: list[Row] = []
        self.claims: list[Claim] = []
        self.hosts: dict[str, Host] = {}
        self.away: set[str] = set()  # hosts out of sight
        self.jobs: dict[str, Job] = {}
        self.pilots: dict[str, PilotSeen] = {}
        self.policy: Policy = replace(LEASING, evict_host_rate=RATE, lease_keeps=600.0)
        if own:
            self.hosts["h1"] = host("h1", own)
            self.rows.append(KnownHost("h1", "h1", id=1, version=1, value=self.hosts["h1"]))

    def lease(
        self, state: LeaseState = L.HELD, *, id: int = 0, shown: dict[str, Any] | None = None, **more: Any
    ) -> str:
        """Another lease; the name of its host."""
        number = id or 1 + sum(isinstance(row, Lease) for row in self.rows)
        one = rows.lease(state, id=number, pilot=str(50 + number), **{"since": NOW - 5.0, **more})
        self.rows.append(one)
        pilot = PilotState.ENDING if state is L.ENDING else PilotState.RUNNING
        waits = state in (L.PLANNED, L.WAITING)
        shows = PilotState.PENDING if waits else pilot
        self.pilots[one.pilot] = PilotSeen(one.name, one.spec.token, shows, node="p1", ends=one.host.ends)
        if not waits:
            self.hosts[one.name] = host(one.name, **(shown or {}))
            self.rows.append(KnownHost(one.name, one.name, id=-number, version=1, value=self.hosts[one.name]))
        return one.name

    def job(
        self, *on: str, memory: int = 500, cpus: int = 1, ran: float = 1000.0, limit: float = 5000.0, **more: Any
    ) -> int:
        """A job that runs in a VM on each of these hosts, for so many seconds; its number."""
        number = 1 + sum(isinstance(row, Attempt) for row in self.rows)
        request = Request(len(on), Size(cpus, memory))
        attempt = rows.attempt(A.ALLOCATED, id=number, job=str(number), since=NOW - ran, request=request, **more)
        names = []
        for name in on:
            one = self.vm(name, memory, cpus, attempt=number)
            names.append(one.name)
        self.rows.append(attempt)
        self.jobs[str(number)] = Job(
            attempt.job,
            "hello",
            1000,
            JobState.RUNNING,
            request,
            gated=False,
            pinned=attempt.feature,
            nodes=tuple(names),
            script_node=names[0],
            limit=limit,
            ends=UNIX - ran + limit,
        )
        return number

    def vm(self, on: str, memory: int = 500, cpus: int = 1, state: VmState = V.SERVING, **more: Any) -> Vm:
        number = 1 + sum(isinstance(row, Vm) for row in self.rows)
        size = Size(cpus, memory)
        made = rows.vm(state, id=number, host=on, source=on, node_size=size, since=NOW - 10.0, **more)
        made = replace(made, size=size)
        self.rows.append(made)
        self.claims.append(Claim(made.key, on, size))
        return made

    def change(self, kind: type[Row], number: int, **more: Any) -> None:
        """Change the row of that kind and number."""
        (at,) = (at for at, row in enumerate(self.rows) if isinstance(row, kind) and row.key.id == number)
        self.rows[at] = replace(self.rows[at], **more)

    def waiting(self) -> None:
        """A job waits for room."""
        attempt = rows.attempt(A.QUEUED, id=99, job="99", since=NOW - 1.0, request=Request(1, Size(8, 500)))
        self.rows.append(attempt)
        self.jobs["99"] = Job(attempt.job, "hello", 1000, JobState.PENDING, attempt.request, limit=60.0)

    def context(self) -> Context:
        """After a pass whose limits hold every eviction back."""
        state = State(replace(rows.rows(*self.rows, claims=self.claims, known=())), TABLES)
        seen = {
            vm.name: (vm, VmSeen(vm.name, vm.host, VmCondition.RUNNING))
            for vm in state.vms.values()
            if vm.state in (V.SERVING, V.ORPHAN)
        }
        sources = {}
        for name, one in self.hosts.items():
            view = HypervisorView({name: one}, {key: what for key, (vm, what) in seen.items() if vm.host == name})
            away = name in self.away
            sources[name] = Observation(None if away else Seen(view, NOW - 1), NOW - 2 if away else 0.0)
        nodes = {vm.name: Node(vm.name, NodeState.BUSY, (vm.feature,)) for vm, _ in seen.values()}
        scheduler = SchedulerView(self.jobs, nodes, pilots=self.pilots, leasable={"physical": Size(8, 8192)})
        world = World(Seen(scheduler, NOW - 1), sources, entropy="x", epoch=EPOCH)
        plan(state, world, [], NOW, replace(self.policy, evict_at_once=0))
        assert {id_: vm.state for id_, vm in state.vms.items()} == {
            row.id: row.state for row in self.rows if isinstance(row, Vm)
        }, "the pass moves no VM by itself"
        return Context(state, world, self.policy, state.free.hosts)

    def packed(self) -> list[Step]:
        context = self.context()
        return list(plan_packing(context, room_of(context).copy()))

    def packs(self) -> dict[int, str]:
        """Which VMs leave leases that others replace, and where to."""
        return {step.vm.id: step.to for step in self.packed()}

    def left(self) -> list[Step]:
        """What leaves leases that end."""
        context = self.context()
        return list(plan_lease_ends(context, room_of(context).copy()))

    def leaves(self) -> list[tuple[int, str]]:
        """Which jobs leave leases that end, in their order, and where to; empty: they are saved."""
        return [(step.attempt.id, step.to) for step in self.left()]


# --- leases that others replace ----------------------------------------------------------------------


def two_leases(**more: Any) -> tuple[Site, str, str]:
    """A lease with a job of 500 MiB, and one with more on it and room for that job."""
    site = Site()
    less, more_used = site.lease(**more), site.lease()
    site.job(less, ran=1000.0)
    site.job(more_used, memory=1000)
    return site, less, more_used


def test_the_lease_with_less_on_it_is_emptied_into_the_one_with_more() -> None:
    site, less, more_used = two_leases()
    (step,) = site.packed()
    assert (step.method, step.attempt.id, step.vm.id, step.to) == (Method.PACKING, 1, 1, more_used)
    assert (step.memory, step.why) == (500, Why.LEASE_EMPTIED(host=less))


def test_a_lease_is_emptied_into_a_host_of_the_site_first() -> None:
    site = Site(own=4)
    less, more_used = site.lease(), site.lease()
    for memory in (500, 500, 500):
        site.job(less, memory=memory, cpus=2)
    site.job(more_used, memory=4000)
    assert site.packs() == {1: "h1", 2: "h1", 3: more_used}, "what has no room there goes to a fuller lease"


def test_leases_are_emptied_into_the_fullest_one_and_those_that_take_jobs_are_not_emptied() -> None:
    site = Site()
    small, middle, large = (site.lease() for _ in range(3))
    site.job(middle, memory=800, cpus=2)
    site.job(large, memory=2000, cpus=6)
    site.job(small, memory=500, cpus=2)
    assert site.packs() == {3: large}, "the middle one has no room left in the large one"
    site = Site()
    small, middle, large = (site.lease() for _ in range(3))
    site.job(middle, memory=800, cpus=2)
    site.job(large, memory=2000, cpus=8)
    site.job(small, memory=500, cpus=2)
    assert site.packs() == {3: middle}, "and is not emptied itself"


def test_leases_with_as_much_on_them_are_emptied_in_their_order() -> None:
    site = Site()
    first, second = site.lease(), site.lease()
    site.job(second)
    site.job(first)
    assert site.packs() == {2: second}


def test_a_lease_is_emptied_of_all_its_vms_or_of_none() -> None:
    site = Site()
    less, more_used = site.lease(), site.lease()
    site.job(less, cpus=2)
    site.job(less, cpus=2)
    site.job(more_used, memory=2000, cpus=4)
    assert site.packs() == {1: more_used, 2: more_used}
    site.change(Vm, 2, size=Size(3, 500))
    assert site.packs() == {}, "both have room there, but not at once"


def waits_for_room(site: Site) -> None:
    site.waiting()


def a_lease_is_coming(site: Site) -> None:
    site.away.add(site.lease(L.STARTING))


def is_quarantined(site: Site) -> None:
    site.change(Lease, 1, quarantined=said("it is odd"))


def is_to_be_drained(site: Site) -> None:
    site.change(KnownHost, -1, drain=Drain(UNIX + 9000.0))


def has_a_vm_without_a_job(site: Site) -> None:
    site.vm(next(row.name for row in site.rows if isinstance(row, Lease)), state=V.ORPHAN)


def has_a_job_that_ends_soon(site: Site) -> None:
    site.jobs["1"] = site.jobs["1"]._replace(ends=UNIX + 600.0)


def ends_soon_itself(site: Site) -> None:
    site.change(Lease, 1, ends=UNIX + 600.0)
    site.pilots["51"] = replace(site.pilots["51"], ends=UNIX + 600.0)


def was_packed_within_the_hour(site: Site) -> None:
    site.change(Attempt, 1, evictions=(Eviction(UNIX - HOUR + 1.0, "move", "h9", Why.LEASE_EMPTIED(host="h9"), 500),))


def cannot_move_its_vms(site: Site) -> None:
    name = next(row.name for row in site.rows if isinstance(row, Lease))
    site.hosts[name] = replace(site.hosts[name], moves=None)


def is_away(site: Site) -> None:
    site.away.add(next(row.name for row in site.rows if isinstance(row, Lease)))


STAYS = [
    waits_for_room, a_lease_is_coming, is_quarantined, is_to_be_drained, has_a_vm_without_a_job,
    has_a_job_that_ends_soon, ends_soon_itself, was_packed_within_the_hour, cannot_move_its_vms,
    is_away,
]  # fmt: skip


@pytest.mark.parametrize("how", STAYS, ids=lambda how: how.__name__)
def test_a_lease_is_not_emptied_where_that_would_help_nobody_or_cannot_be(how: Any) -> None:
    site, _, _ = two_leases()
    how(site)
    assert site.packs().get(1) is None


def test_a_lease_is_emptied_if_one_of_its_jobs_would_keep_it_for_long() -> None:
    site, less, more_used = two_leases()
    site.job(less)
    site.jobs["3"] = site.jobs["3"]._replace(ends=UNIX + 100.0)
    assert site.packs() == {1: more_used, 3: more_used}
    site.jobs["1"] = site.jobs["1"]._replace(ends=UNIX + 601.0)
    assert site.packs() == {1: more_used, 3: more_used}


@pytest.mark.parametrize(
    "earlier",
    [
        Eviction(UNIX - HOUR, "move", "h9", Why.LEASE_EMPTIED(host="h9"), 500),
        Eviction(UNIX - 1.0, "move", "h9", Why.OPERATOR(), 500),
    ],
)
def test_a_job_moves_off_a_lease_again_an_hour_later_and_after_moves_for_another_reason(earlier: Eviction) -> None:
    site, _, more_used = two_leases()
    site.change(Attempt, 1, evictions=(earlier,))
    assert site.packs() == {1: more_used}


def test_a_lease_that_keeps_a_saved_job_in_memory_is_not_emptied() -> None:
    site, less, more_used = two_leases()
    site.rows.append(rows.saved(SavedState.STORED, job=rows.attempt(A.QUEUED, job="77").job, kept=less))
    assert site.packs() == {}
    site.change(Saved, 1, kept=more_used)
    assert site.packs() == {1: more_used}


# --- leases that end ---------------------------------------------------------------------------------


def ending(left: float, *, own: int = 0, **shown: Any) -> tuple[Site, str]:
    """A lease whose agent holds its VMs for so many seconds more, and whose jobs can be saved."""
    site = Site(own)
    values = {"refuses": "the lease ends", "holds_until": UNIX + left, "storage": SHARED, "moves": None, **shown}
    return site, site.lease(L.ENDING, shown=values, reason=said("preempted"))


def test_a_job_is_saved_off_a_lease_that_ends_if_there_is_time() -> None:
    site, name = ending(8.0)  # 3 s of it for a save beside sending
    site.job(name, memory=500)
    (step,) = site.left()
    assert (step.method, step.attempt.id, step.vm.id, step.to, step.memory) == (Method.LEASE_END, 1, 1, "", 500)
    assert step.why == Why.LEAVES_LEASE(said("preempted"), host=name)
    site.change(Vm, 1, size=Size(1, 501))
    assert site.left() == []


def test_what_takes_too_long_leaves_its_time_to_the_next_one() -> None:
    site, name = ending(13.0)  # for 1000 MiB
    site.job(name, memory=400, ran=3000.0)
    site.job(name, memory=1100, ran=90_000.0, limit=100_000.0)
    site.job(name, memory=600, ran=2000.0)
    site.job(name, memory=100, ran=10.0)
    assert site.leaves() == [(1, ""), (3, "")]


def test_those_leave_first_that_lose_the_most_cpu_time_for_each_mib() -> None:
    site, name = ending(1000.0)
    site.job(name, memory=1000, cpus=1, ran=1000.0)  # 1 CPU-second for each MiB
    site.job(name, memory=1000, cpus=2, ran=1000.0)  # 2
    site.job(name, memory=200, cpus=1, ran=1000.0)  # 5
    site.job(name, memory=1000, cpus=1, ran=3000.0)  # 3
    site.job(name, memory=1000, cpus=2, ran=500.0)  # 1 as the first
    assert [id_ for id_, _ in site.leaves()] == [3, 4, 2, 1, 5]


def test_what_a_job_would_lose_counts_from_its_last_checkpoint() -> None:
    site, name = ending(1000.0)
    site.job(name, ran=2000.0)
    site.job(name, ran=1000.0)
    job = rows.attempt(A.ALLOCATED, job="1").job
    kept = rows.saved(SavedState.STORED, job=job, checkpoint=True, begun=UNIX - 900.0, vm=1, vm_name="mvtest0-1")
    site.rows += [kept, replace(kept, id=2, begun=UNIX - 1500.0)]
    assert [id_ for id_, _ in site.leaves()] == [2, 1]
    site.rows = [row for row in site.rows if row != kept]
    assert [id_ for id_, _ in site.leaves()] == [1, 2]


@pytest.mark.parametrize("began", [-5.0, -1.0])
def test_what_is_still_to_be_sent_of_earlier_ones_takes_of_the_time(began: float) -> None:
    """The earlier one has sent for the seconds since it began."""
    site, name = ending(13.0)  # for 1000 MiB
    site.job(name, memory=700)
    site.job(name, memory=300 - int(began) * RATE)
    job = rows.attempt(A.ALLOCATED, job="1").job
    site.rows.append(
        rows.saved(
            SavedState.PREPARING, job=job, begun=UNIX + began, since=NOW - 1.0, vm=1, vm_name="mvtest0-1", source=name
        )
    )
    assert site.leaves() == [(2, "")]
    site.change(Vm, 2, size=Size(1, 301 - int(began) * RATE))
    assert site.leaves() == []


def test_what_was_sent_of_earlier_ones_gives_no_more_time_than_there_is() -> None:
    site, name = ending(13.0)
    site.job(name, memory=700)
    site.job(name, memory=1001)
    job = rows.attempt(A.ALLOCATED, job="1").job
    site.rows.append(
        rows.saved(
            SavedState.PREPARING, job=job, begun=UNIX - 50.0, since=NOW - 1.0, vm=1, vm_name="mvtest0-1", source=name
        )
    )
    assert site.leaves() == []
    site.change(Vm, 2, size=Size(1, 1000))
    assert site.leaves() == [(2, "")]


def test_a_lease_that_ends_is_left_alone_while_its_vms_may_not_leave() -> None:
    def leaves(change: Any) -> list[tuple[int, str]]:
        site, name = ending(60.0)
        site.job(name)
        change(site, name)
        return site.leaves()

    def quarantined(site: Site, name: str) -> None:
        site.change(Lease, 1, quarantined=said("it is odd"))

    def away(site: Site, name: str) -> None:
        site.away.add(name)

    def untold(site: Site, name: str) -> None:
        site.hosts[name] = replace(site.hosts[name], refuses="", holds_until=0.0)

    assert leaves(lambda site, name: None) == [(1, "")]
    assert [leaves(how) for how in (quarantined, away, untold)] == [[]] * 3


def test_a_job_moves_off_a_lease_that_ends_if_another_host_takes_it() -> None:
    site, name = ending(60.0, own=4, moves=KIND)
    site.job(name, cpus=3)
    site.job(name, cpus=3, memory=600)
    (step,) = site.left()
    assert (step.method, step.attempt.id, step.to, step.memory) == (Method.LEASE_END, 1, "h1", 500), (
        "its room is not free for the other one"
    )
    site.hosts["h1"] = host("h1", 6)
    assert site.leaves() == [(1, "h1"), (2, "h1")]


def test_a_move_that_was_tried_since_the_pilot_ended_is_followed_by_a_save_and_a_save_by_nothing() -> None:
    site, name = ending(60.0, own=4, moves=KIND)
    site.job(name)
    site.change(Vm, 1, moves=1, since=NOW - 6.0)
    assert site.leaves() == [(1, "h1")], "that was before the pilot ended"
    site.change(Vm, 1, since=NOW - 5.0)
    assert site.leaves() == [(1, "")]
    site.change(Attempt, 1, evictions=(Eviction(UNIX - 5.1, "save", name, Why.OPERATOR(), 500),))
    assert site.leaves() == [(1, "")]
    site.change(Attempt, 1, evictions=(Eviction(UNIX - 5.0, "move", name, Why.OPERATOR(), 500),))
    assert site.leaves() == [(1, "")]
    site.change(Attempt, 1, evictions=(Eviction(UNIX - 5.0, "save", name, Why.OPERATOR(), 500),))
    assert site.leaves() == []


@pytest.mark.parametrize(("left", "way"), [(23.1, "h1"), (23.0, "")])
def test_a_job_of_several_vms_moves_if_there_is_time_for_twice_what_is_there_or_else_is_saved(
    left: float, way: str
) -> None:
    site, name = ending(left, own=4, moves=KIND)
    site.job(name, name)
    assert site.leaves() == [(1, way)]
    (step,) = site.left()
    assert step.memory == (500 if way else 1000)


def test_a_job_of_several_vms_moves_only_if_all_of_them_have_room() -> None:
    site, name = ending(60.0, own=4, moves=KIND)
    site.job(name, name, cpus=2)
    assert site.leaves() == [(1, "h1")]
    site, name = ending(60.0, own=3, moves=KIND)
    site.job(name, name, cpus=2)
    assert site.leaves() == [(1, "")]


@pytest.mark.parametrize(("left", "expected"), [(60.0, []), (12.0, [(1, "")])])
def test_a_move_that_others_hold_up_is_waited_for_while_there_is_time(
    left: float, expected: list[tuple[int, str]]
) -> None:
    """One VM moves to the host of the site already, and only one may at a time."""
    site, name = ending(left, own=4, moves=KIND)
    site.policy = replace(site.policy, moves_at_once=1)
    site.job(name)
    elsewhere = site.lease(id=9)
    site.job(elsewhere)
    moving = next(row for row in site.rows if isinstance(row, Vm) and row.id == 2)
    site.change(
        Vm, 2, state=V.MOVING, since=NOW - 1.0, places=(moving.place, replace(moving.place, host="h1", source="h1"))
    )
    site.claims.append(Claim(Key("vm", 2), "h1", Size(1, 500)))
    assert site.leaves() == expected


def test_nothing_is_saved_to_the_own_storage_of_a_lease_unless_no_host_has_another() -> None:
    own = Storage("its own", "qemu")
    site, name = ending(60.0, own=4, storage=own)
    site.job(name)
    assert site.leaves() == [(1, "")], "the site's host has no storage"
    site.hosts["h1"] = replace(site.hosts["h1"], storage=SHARED, moves=None)
    assert site.leaves() == []
    site.hosts[name] = replace(site.hosts[name], copies=SHARED)
    assert site.leaves() == [(1, "")], "it copies what it saves to the shared one"


def test_a_job_that_is_busy_or_does_not_run_is_passed_over() -> None:
    site, name = ending(60.0)
    site.job(name)
    site.job(name)
    capturing = rows.saved(
        SavedState.CAPTURING, job=rows.attempt(A.ALLOCATED, job="1").job, checkpoint=True, vm=1, vm_name="mvtest0-1",
        source=name,
    )  # fmt: skip
    site.rows.append(capturing)
    assert site.leaves() == [(2, "")]
    site, name = ending(13.0)  # for 1000 MiB
    site.job(name, memory=900, ran=2000.0)
    site.job(name, memory=1000)
    site.rows.append(capturing)
    assert site.leaves() == [(2, "")], "a checkpoint takes none of the time"


def test_a_job_that_cannot_leave_keeps_no_other_one() -> None:
    site, name = ending(60.0)
    site.job(name)
    site.job(name)
    site.jobs["1"] = site.jobs["1"]._replace(batch=False)
    assert site.leaves() == [(2, "")], "the scheduler cannot queue a job of salloc again"


@pytest.mark.parametrize(("memory", "expected"), [(500, [(2, "")]), (501, [])])
def test_what_is_still_to_be_sent_of_a_vm_that_moves_takes_of_the_time(
    memory: int, expected: list[tuple[int, str]]
) -> None:
    """It has sent 200 of its 700 MiB; there is time for 1000."""
    site, name = ending(13.0, own=8)
    site.job(name, memory=700)
    site.job(name, memory=memory)
    row = next(row for row in site.rows if isinstance(row, Vm) and row.id == 1)
    site.change(Vm, 1, state=V.MOVING, since=NOW - 2.0, places=(row.place, rows.place("h1", "h1")))
    site.claims.append(Claim(Key("vm", 1), "h1", Size(1, 700)))
    assert site.leaves() == expected


def test_what_is_on_a_lease_counts_not_its_number() -> None:
    site = Site()
    more_used, less = site.lease(), site.lease()
    site.job(more_used, memory=1000)
    site.job(less, memory=500)
    assert site.packs() == {2: more_used}
