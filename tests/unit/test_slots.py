"""When hosts will have room: only what may have changed is computed again, and the order is kept."""

from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.capacity_index import HostSlots, Slot, SlotTable, Touched

HOSTS = ("h1", "h2", "h3")


def test_hosts_are_named_on_which_something_has_changed_since() -> None:
    touched = Touched()
    touched.note("h1")
    touched.note("h2")
    before = touched.count
    assert touched.since(0) == ["h2", "h1"] and touched.since(before) == []
    touched.note()
    assert touched.count > before and touched.since(before) == []
    touched.note("h1")
    assert touched.since(before) == ["h1"] and touched.since(0) == ["h1", "h2"]


class Hosts:
    """Slots that a test sets, and of which hosts they were asked for."""

    def __init__(self) -> None:
        self.slots: dict[str, HostSlots] = {name: HostSlots() for name in HOSTS}
        self.asked: list[str] = []

    def compute(self, host: str) -> HostSlots:
        self.asked.append(host)
        return self.slots[host]

    def taken(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


def test_only_hosts_that_may_have_changed_are_computed_again() -> None:
    hosts, touched, table = Hosts(), Touched(), SlotTable()
    hosts.slots["h2"] = HostSlots([Slot(50.0, "h2")], until=40.0)
    table.refresh(HOSTS, touched, 0.0, hosts.compute)
    assert hosts.taken() == ["h1", "h2", "h3"]
    table.refresh(HOSTS, touched, 40.0, hosts.compute)
    assert hosts.taken() == [], "nothing has changed, and what was found is right until then"
    table.refresh(HOSTS, touched, 40.5, hosts.compute)
    assert hosts.taken() == ["h2"]
    touched.note("h1")
    table.refresh(HOSTS, touched, 30.0, hosts.compute, changing=["h3", "h9"])
    assert hosts.taken() == ["h1", "h3"]
    table.refresh(HOSTS, touched, 30.0, hosts.compute)
    assert hosts.taken() == ["h3"], "it changes unnoticed no more, and may have changed since it was computed"
    table.refresh(HOSTS, touched, 30.0, hosts.compute)
    assert hosts.taken() == []


def test_a_host_that_comes_or_goes_has_no_other_one_computed() -> None:
    hosts, touched, table = Hosts(), Touched(), SlotTable()
    hosts.slots |= {name: HostSlots([Slot(at, name)]) for at, name in enumerate(HOSTS, 1)}
    table.refresh(HOSTS, touched, 0.0, hosts.compute)
    hosts.taken()
    touched.note("h1")
    table.refresh(HOSTS[1:], touched, 0.0, hosts.compute)
    assert hosts.taken() == [] and [slot.host for slot in table.first(9, ())] == ["h2", "h3"]
    touched.note("h1")
    table.refresh(HOSTS, touched, 0.0, hosts.compute)
    assert hosts.taken() == ["h1"] and [slot.host for slot in table.first(9, ())] == list(HOSTS)


times = st.lists(st.sampled_from([1.0, 2.0, 3.0, inf]), max_size=3).map(sorted)


@given(
    st.lists(st.tuples(st.sampled_from(HOSTS), times), max_size=12), st.integers(0, 9), st.sets(st.sampled_from(HOSTS))
)
def test_the_earliest_slots_are_those_of_all_hosts(
    changes: list[tuple[str, list[float]]], count: int, without: set[str]
) -> None:
    hosts, touched, table = Hosts(), Touched(), SlotTable()
    for host, found in [("h1", [2.0]), *changes]:
        hosts.slots[host] = HostSlots([Slot(at, host) for at in found])
        touched.note(host)
        table.refresh(HOSTS, touched, 0.0, hosts.compute)
    every = sorted(slot for one in hosts.slots.values() for slot in one.slots if slot.host not in without)
    assert table.first(count, without) == every[:count]
