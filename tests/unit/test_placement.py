"""Sizes, room, names and addresses: properties that hold for all inputs."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.capacity.placement_policies import address_of
from multiverse.core.capacity.room import Room, left_behind, overcommitted, yet_to_come
from multiverse.core.capacity.sizes import (
    NodeRequest,
    could_ever_fit,
    largest_on,
    serves_as,
    short_of_memory,
    template_claim,
    template_size,
    vm_claims,
    vm_size,
)
from multiverse.core.model.basics import CloneKind, Key, Size
from multiverse.core.model.host import Claim, Host, Overcommitment
from multiverse.core.model.identity import mac_of
from multiverse.core.model.job import Request
from multiverse.core.model.vm import TemplateState, VmState
from multiverse.core.policy import Policy
from tests.unit.planner_harness import POLICY
from tests.unit.rows import IMAGES, template, vm

BLOCK = 128
sizes = st.builds(Size, st.integers(1, 128), st.integers(1, 2**20))


def host(cpus: int, memory: int, name: str = "h1", *, rigid: bool = False) -> Host:
    """The image of a `rigid` host can plug nothing."""
    return Host(name, Size(cpus, memory, 1 << 20), images={"slim": frozenset({"fork"})} if rigid else IMAGES)


def template_sizes(node: Size, hosts: dict[str, Host], policy: Policy = POLICY) -> dict[str, Size]:
    return {name: template_size(node, each, "slim", policy) for name, each in hosts.items()}


def could_fit(node: Size, count: int, hosts: dict[str, Host], policy: Policy = POLICY) -> bool:
    return could_ever_fit(
        NodeRequest(node, "slim", CloneKind.INSTANT),
        Request(count, node),
        template_sizes(node, hosts, policy),
        hosts,
        policy,
    )


@given(sizes)
def test_a_vm_has_more_memory_than_its_node_declares_in_whole_blocks(node: Size) -> None:
    size = vm_size(node, POLICY.base, host(1, 1024), POLICY)
    plugged = size.memory - POLICY.base.memory
    assert plugged >= 0 and plugged % BLOCK == 0
    assert size.memory - plugged // 64 - POLICY.guest_reserve // 2 > node.memory, "the guest really has it"
    assert size.memory <= node.memory * 51 // 50 + POLICY.guest_reserve + POLICY.base.memory + BLOCK
    assert size.cpus >= node.cpus


@given(st.integers(1, 64), st.integers(600, 10**6))
def test_the_largest_that_fits_does_fit_and_a_little_more_does_not(cpus: int, memory: int) -> None:
    hosts = {"h1": host(cpus, memory)}
    fit = largest_on(hosts["h1"], "slim", POLICY)
    assert could_fit(fit, 1, hosts)
    assert not could_fit(Size(cpus + 1, 1), 1, hosts)
    assert not could_fit(Size(1, fit.memory + BLOCK + 2), 1, hosts)


def test_where_all_can_be_plugged_the_base_template_serves_all_sizes() -> None:
    assert {template_size(Size(n, 100 * n), host(64, 1 << 20), "slim", POLICY) for n in range(1, 50)} == {POLICY.base}
    cpus_only = Host("h1", Size(64, 1 << 20), images={"slim": frozenset({"fork", "plug_cpus"})})
    memory_only = Host("h1", Size(64, 1 << 20), images={"slim": frozenset({"fork", "plug_memory"})})
    assert template_size(Size(3, 900), cpus_only, "slim", POLICY) == Size(1, 1024)
    assert template_size(Size(3, 900), memory_only, "slim", POLICY) == Size(3, 256)
    assert vm_size(Size(3, 900), Size(1, 1024), cpus_only, POLICY) == Size(3, 1024)


@given(sizes, st.integers(1, 128), st.integers(600, 1 << 22))
def test_where_nothing_can_be_plugged_a_vm_has_the_size_of_its_template(node: Size, cpus: int, memory: int) -> None:
    its = host(cpus, memory, rigid=True)
    forked_from = template_size(node, its, "slim", POLICY)
    size = vm_size(node, forked_from, its, POLICY)
    assert size == forked_from, "nothing is plugged"
    assert size.cpus == node.cpus and size.memory >= node.memory + POLICY.guest_reserve
    cut = forked_from.memory & (forked_from.memory - 1) != 0
    assert not cut or could_fit(node, 1, {"h1": replace(its, capacity=Size(128, memory))}), "cut to what the host holds"
    assert serves_as(forked_from, forked_from, its, "slim") or cpus < node.cpus


@given(st.integers(1, 64), st.integers(1200, 10**6))
def test_of_an_image_that_can_plug_nothing_the_largest_that_fits_does_fit(cpus: int, memory: int) -> None:
    hosts = {"h1": host(cpus, memory, rigid=True)}
    fit = largest_on(hosts["h1"], "slim", POLICY)
    assert could_fit(fit, 1, hosts)
    assert not could_fit(Size(1, fit.memory + BLOCK + 2), 1, hosts)


def test_a_template_that_is_larger_serves_up_to_twice_the_size_while_its_host_holds_a_vm_of_it() -> None:
    its, own = host(8, 8192, rigid=True), Size(2, 1024)
    for other in (own, Size(4, 2048), Size(3, 1024), Size(2, 2048)):
        assert serves_as(other, own, its, "slim")
    for other in (Size(1, 1024), Size(2, 1023), Size(5, 1024), Size(2, 2049)):
        assert not serves_as(other, own, its, "slim")
    assert not serves_as(Size(4, 2048), own, host(3, 8192, rigid=True), "slim")
    assert not serves_as(Size(4, 2048), own, host(8, 4096, rigid=True), "slim")
    assert not serves_as(Size(2, 2048), own, host(8, 8192), "slim"), "what is plugged is the base's"


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(300, 8192)), min_size=1, max_size=5), sizes, st.integers(1, 9)
)
def test_placement_takes_all_or_nothing_and_never_more_than_there_is(
    machines: list[tuple[int, int]], node: Size, count: int
) -> None:
    hosts = {f"h{i}": host(c, m, f"h{i}") for i, (c, m) in enumerate(machines)}
    room = Room(hosts)
    before = {name: list(free) for name, free in room.free.items()}
    chosen = room.place(
        count, vm_claims(NodeRequest(node, "slim", CloneKind.INSTANT), template_sizes(node, hosts), hosts, POLICY)
    )
    if chosen is None:
        assert room.free == before
    else:
        assert len(chosen) == count and all(min(free) >= 0 for free in room.free.values())


def test_without_hosts_nothing_fits() -> None:
    assert not could_fit(Size(1, 1), 1, {})


def test_a_template_is_claimed_as_often_as_its_host_holds_it() -> None:
    once, twice = host(4, 4096), replace(host(4, 4096), template_copies=2)
    size = Size(4, 512)
    assert template_claim(size, once, "slim") == Size(0, 512) and template_claim(size, twice, "slim") == Size(0, 1024)
    assert template_claim(size, None, "slim") == Size(0, 1024), "of a host out of sight the worst is assumed"
    for rigid in (IMAGES, {"slim": frozenset({"fork"})}):
        once, twice = replace(once, images=rigid), replace(twice, images=rigid)
        fits = largest_on(once, "slim", POLICY)
        assert could_fit(fits, 1, {"h1": once}) and not could_fit(fits, 1, {"h1": twice})
        assert could_fit(largest_on(twice, "slim", POLICY), 1, {"h1": twice})


def test_a_deleted_template_counts_once_while_vms_map_it() -> None:
    vms = [vm(VmState.SERVING, id=n, template_id=origin) for n, origin in ((1, 1), (2, 7), (3, 7), (4, 8), (5, None))]
    boots = vm(VmState.SERVING, id=6, kind=CloneKind.FULL)
    held = left_behind([one.place for one in (*vms, boots)], {1: template(TemplateState.READY)})
    assert held == [Claim(Key("template", n), "h1", Size(0, 256)) for n in (7, 8)]


@given(st.integers(1, 2**29 - 1), st.integers(1, 2**29 - 1))
def test_macs_are_local_unicast_and_different_for_different_serials(one: int, two: int) -> None:
    assert int(mac_of("abcde", one)[:2], 16) & 0b11 == 0b10
    assert mac_of("abcde", one)[:2] != "fe", "which taps have"
    assert (mac_of("abcde", one) == mac_of("abcde", two)) == (one == two)


@given(st.integers(1, 10**7), st.sets(st.integers(1, 3000), max_size=50))
def test_addresses_are_free_ones_of_the_subnet_and_never_the_gateway(serial: int, others: set[int]) -> None:
    used = {address_of(other, (), POLICY) or "" for other in others}
    address = address_of(serial, used, POLICY)
    assert address and address not in used and address.endswith("/16")
    assert address != f"{POLICY.gateway}/16" and not address.startswith("10.9.0.")


def test_a_full_subnet_has_no_address() -> None:
    import ipaddress

    small = replace(POLICY, subnet=ipaddress.IPv4Network("10.9.0.0/29"), first_address=2)
    taken: set[str] = set()
    while (address := address_of(1, taken, small)) is not None:
        taken.add(address)
    assert taken == {f"10.9.0.{n}/29" for n in range(2, 7)}


# --- more claimed than declared --------------------------------------------------------------------

OVERCOMMITTED = Overcommitment(memory=3.0, floor=1000)


@given(st.integers(1, 10**6), st.floats(0, 10**6))
def test_the_memory_yet_to_come_is_the_rest_of_the_claim_or_less_once_settled(claim: int, held: float) -> None:
    rest = yet_to_come(Size(1, claim), held, settled=False)
    assert rest == max(0, math.ceil(claim - held)) and rest + held >= claim
    settled = yet_to_come(Size(1, claim), held, settled=True)
    assert settled == min(rest, math.ceil(held / 4))


@given(st.integers(1, 20_000), st.integers(0, 20_000), st.integers(0, 20_000))
def test_free_memory_is_what_may_be_claimed_or_what_the_machine_has_left(
    available: int, coming: int, claimed: int
) -> None:
    one = replace(host(4, 4096), available=available, overcommit=OVERCOMMITTED)
    room = Room({"h1": one}, {"h1": Size(0, claimed)})
    free, tight = overcommitted(one, room.free["h1"], coming)
    room.set("h1", free, tight=tight, full=False)
    by_claims, by_machine = 3 * 4096 - claimed, available - 1000 - coming
    assert room.free["h1"][1] == min(by_claims, by_machine)
    lacks = room.lack_memory({"h1": Size(1, 500)})
    assert (lacks == ["h1"]) == (by_machine < 500 and by_machine < by_claims)
    assert not room.lack_memory({"h1": Size(5, 500)}), "it lacks CPUs"


def test_nothing_is_over_committed_by_default_or_where_the_machine_is_not_known() -> None:
    for one in (replace(host(4, 4096), available=10), replace(host(4, 4096), overcommit=OVERCOMMITTED)):
        assert overcommitted(one, [4, 4096, 0], 5000) == ([4, 4096, 0], False)
        assert not short_of_memory(one)


def test_a_vm_larger_than_the_machine_never_fits_however_much_is_declared() -> None:
    declared = replace(host(4, 16384), machine=Size(2, 6000), available=5500)
    small = replace(declared, overcommit=OVERCOMMITTED)
    fit = largest_on(small, "slim", POLICY)
    assert could_fit(fit, 1, {"h1": small}) and fit.memory < 5000
    assert not could_fit(Size(1, 8000), 1, {"h1": small})
    assert could_fit(Size(1, 8000), 1, {"h1": declared}), "as it is declared, so it is taken"
    rigid = replace(small, images={"slim": frozenset({"fork"})})
    assert could_fit(largest_on(rigid, "slim", POLICY), 1, {"h1": rigid})
