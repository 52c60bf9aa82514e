"""Hosts that are drained ahead of the scheduler's reservations for maintenance, and when such drains end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.context import Context
from multiverse.core.model.host import Drain, Host, HostState, KnownHost
from multiverse.core.model.job import LeaseState, Maintenance, SchedulerView
from multiverse.core.model.reason import Why
from multiverse.core.policy import Policy
from multiverse.core.rebalance.maintenance import follow_maintenance
from multiverse.core.transition import Change, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import known_host, lease, state, world_of
from tests.unit.test_preemption import EPOCH, NOW, UNIX
from tests.unit.test_preemption import host as host_value

NOTICE = POLICY.maintenance_notice
MOVES, STORES = host_value("h1", moves=True, stores=False), host_value("h1")
FIXED = replace(STORES, storage=None)


def known(value: Host | None = MOVES, **more: object) -> KnownHost:
    return known_host(more.pop("state", HostState.KNOWN), value=value, **more)  # type: ignore[arg-type]


def reserved(begins: float, ends: float = 9999.0, *nodes: str, name: str = "fans") -> Maintenance:
    """From and until so many seconds from now."""
    return Maintenance(name, UNIX + begins, UNIX + ends, nodes or ("h1",))


def followed(
    host: KnownHost, *maintenance: Maintenance, policy: Policy = POLICY, leases: tuple[object, ...] = ()
) -> tuple[Drain | None, list[Change]]:
    """How the host is drained then, and what changed."""
    here = state(host, *leases, now=NOW, known=())  # type: ignore[arg-type]
    follow_maintenance(Context(here, world_of(SchedulerView(maintenance=maintenance), None, NOW, epoch=EPOCH), policy))
    return here.hosts[host.name].drain, [change for move in here.moves for change in move.changes]


def begun(begins: float, name: str = "fans") -> Drain:
    """The drain for a reservation that begins so many seconds from now."""
    why = str(Why.MAINTENANCE(name=name, begins=UNIX + begins))
    return Drain(UNIX + begins - NOTICE, why, moves=True, saves=True, reservation=name)


@pytest.mark.parametrize(
    ("value", "begins", "drained"),
    [
        (MOVES, NOTICE, True),
        (STORES, NOTICE, True),
        (MOVES, NOTICE + 1, False),
        (STORES, NOTICE + 1, False),
        (FIXED, NOTICE + 1, True),
        (None, NOTICE + 1, True),
        (FIXED, -5.0, True),
    ],
)
def test_a_host_that_jobs_can_leave_is_drained_when_the_notice_begins_and_another_one_at_once(
    value: Host | None, begins: float, drained: bool
) -> None:
    drain, changes = followed(known(value), reserved(begins))
    assert drain == (begun(begins) if drained else None)
    assert [change.event for change in changes] == [Event.DRAINED] * drained


@pytest.mark.parametrize(
    "one", [reserved(1.0, 2.0, "h2"), reserved(-9.0, 0.0), reserved(-9.0, -1.0)], ids=["other", "ending", "over"]
)
def test_no_host_is_drained_for_a_reservation_of_others_or_one_that_is_over(one: Maintenance) -> None:
    assert followed(known(), one) == (None, [])
    assert followed(known(), one, reserved(5.0))[0] == begun(5.0), "though another one comes first"


def test_of_several_reservations_the_first_one_counts() -> None:
    for some in ((reserved(5.0), reserved(9.0, name="disks")), (reserved(9.0, name="disks"), reserved(5.0))):
        assert followed(known(), *some)[0] == begun(5.0)


@pytest.mark.parametrize(
    ("host", "changed"),
    [
        (known(drain=begun(5.0)), False),
        (known(drain=begun(7.0)), True),
        (known(drain=begun(5.0, "disks")), True),
        (known(drain=Drain(0.0, "an operator's")), False),
        (known(state=HostState.REMOVED), False),
        (known(state=HostState.FENCED), True),
    ],
)
def test_a_drain_follows_its_reservation_and_an_operators_one_stays(host: KnownHost, changed: bool) -> None:
    drain, changes = followed(host, reserved(5.0))
    assert drain == (begun(5.0) if changed else host.drain)
    assert bool(changes) is changed


def test_a_drain_ends_with_its_reservation_and_says_so() -> None:
    drain, changes = followed(known(drain=begun(-9.0)), reserved(-9.0, 0.0))
    assert drain is None
    assert [(one.event, one.reason) for one in changes] == [(Event.DRAINED, Why.MAINTENANCE_OVER(name="fans"))]
    kept = Drain(0.0, "an operator's")
    assert followed(known(drain=kept)) == (kept, [])


def test_without_the_setting_no_host_is_drained_and_drains_end() -> None:
    off = replace(POLICY, evict_maintenance=False)
    assert followed(known(), reserved(5.0), policy=off) == (None, [])
    assert followed(known(drain=begun(5.0)), reserved(5.0), policy=off)[0] is None


def test_a_leased_host_is_drained_for_the_machine_that_it_is_on() -> None:
    one = lease(LeaseState.IDLE, node="p1")
    host = replace(known(), name=one.name)
    assert followed(host, reserved(5.0, 9.0, "p1"), leases=(one,))[0] == begun(5.0)
    assert followed(host, reserved(5.0, 9.0, "p2"), leases=(one,))[0] is None
    assert followed(known(), reserved(5.0, 9.0, ""), leases=(replace(one, node=""),))[0] is None
