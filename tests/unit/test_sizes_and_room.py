"""The sizes of VMs and templates, what is free on hosts, and names: exact limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.capacity.placement_policies import address_of
from multiverse.core.capacity.room import Room, overcommitted
from multiverse.core.capacity.sizes import (
    largest_on,
    parked_claim,
    serves_as,
    short_of_memory,
    template_claim,
    template_size,
    vm_claim,
    vm_size,
)
from multiverse.core.errors import MultiverseError
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, ImageDisk, Overcommitment
from multiverse.core.model.identity import mac_of
from tests.unit.planner_harness import POLICY
from tests.unit.rows import IMAGES


def host(name: str = "h1", *, cpus: int = 4, memory: int = 8192, disk: int = 65536, can: str | None = None) -> Host:
    """Its image can do all, unless `can` lists what it can do."""
    return Host(name, Size(cpus, memory, disk), images=IMAGES if can is None else {"slim": frozenset(can.split())})


# --- sizes ------------------------------------------------------------------------------------------


def test_a_size_is_printed_with_units() -> None:
    assert str(Size(1, 100)) == "1 CPU, 100 MiB"
    assert str(Size(2, 100)) == "2 CPUs, 100 MiB"
    assert str(Size(0, 100, 5)) == "0 CPUs, 100 MiB, 5 MiB disk"


def test_an_error_is_printed_with_its_hint() -> None:
    plain, helpful = MultiverseError("it is full"), MultiverseError("it is full", hint="make room")
    assert (str(plain), str(helpful), plain.hint) == ("it is full", "it is full (make room)", "")
    assert repr(plain) == "MultiverseError('it is full')"


@pytest.mark.parametrize(("node_memory", "needed", "memory"), [(926, 1024, 1024), (927, 1025, 2048)])
def test_a_template_has_the_next_power_of_two_of_memory(node_memory: int, needed: int, memory: int) -> None:
    assert node_memory + POLICY.guest_reserve + node_memory // 50 == needed
    assert template_size(Size(1, node_memory), host(memory=65536, can="fork"), "slim", POLICY) == Size(1, memory)


@pytest.mark.parametrize(("asked", "allowed"), [(0, 2048), (2047, 2048), (2048, 2048), (2049, 2049)])
def test_a_job_may_write_what_it_asked_for_and_the_scratch_of_every_job_at_least(asked: int, allowed: int) -> None:
    policy = replace(POLICY, scratch=2048)
    size = vm_size(Size(1, 100, asked), POLICY.base, host(), policy)
    assert size.disk == allowed
    assert vm_claim(size, host(), "slim", CloneKind.INSTANT).disk == allowed, "its image reports no more"


@pytest.mark.parametrize(
    ("kind", "can", "claimed", "largest"),
    [
        (CloneKind.INSTANT, "fork limit_disk", 5000 + 452, 20000 - 2 * 452),
        (CloneKind.LINKED, "fork limit_disk", 5000 + 452, 20000 - 2 * 452),
        (CloneKind.FULL, "fork limit_disk", 16388, 20000 - 452),
        (CloneKind.INSTANT, "fork", 16388, 20000 - 452),
        (CloneKind.LINKED, "fork", 16388, 20000 - 452),
    ],
)
def test_a_vm_claims_its_allowance_or_the_whole_disk_where_nothing_else_limits_it(
    kind: CloneKind, can: str, claimed: int, largest: int
) -> None:
    there = replace(host(disk=20000, can=can), disks={"slim": ImageDisk(16388, 452)})
    assert vm_claim(Size(1, 256, 5000), there, "slim", kind).disk == claimed
    assert template_claim(Size(1, 256), there, "slim").disk == parked_claim(there, "slim").disk == 452
    assert largest_on(there, "slim", POLICY, kind).disk == largest, "beside the template"


@pytest.mark.parametrize(("disk", "fits"), [(2048 + 2 * 452, True), (2048 + 2 * 452 - 1, False)])
def test_no_vm_fits_beside_its_template_on_a_host_with_less_disk_than_every_job_has(disk: int, fits: bool) -> None:
    there = replace(host(disk=disk, can="fork limit_disk"), disks={"slim": ImageDisk(16388, 452)})
    assert (largest_on(there, "slim", replace(POLICY, scratch=2048)).memory > 0) is fits


@pytest.mark.parametrize(
    ("can", "other", "serves"),
    [
        ("fork plug_cpus plug_memory", Size(1, 256), True),
        ("fork plug_cpus plug_memory", Size(2, 256), False),
        ("fork plug_cpus plug_memory", Size(1, 512), False),
        ("fork plug_cpus", Size(1, 512), True),
        ("fork plug_cpus", Size(2, 256), False),
        ("fork plug_memory", Size(2, 256), True),
        ("fork plug_memory", Size(1, 512), False),
    ],
)
def test_only_of_what_cannot_be_plugged_may_a_template_have_more(can: str, other: Size, serves: bool) -> None:
    assert serves_as(other, Size(1, 256), host(can=can), "slim") is serves


def test_a_template_holds_only_memory_that_cannot_be_plugged() -> None:
    known, stiff = host(can="fork plug_cpus plug_memory"), host(can="fork plug_cpus")
    assert largest_on(known, "slim", POLICY) == largest_on(host(), "slim", POLICY)
    assert largest_on(stiff, "slim", POLICY).memory < 4096, "its template takes as much again"


def test_on_a_host_that_is_too_small_for_any_vm_nothing_fits() -> None:
    assert largest_on(host(memory=64), "slim", POLICY).memory == 0


# --- more claimed than declared ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overcommit", "available", "short"),
    [(1.0, 500, False), (1.5, 0, False), (1.5, 1, True), (1.5, 1023, True), (1.5, 1024, False), (2.5, 500, True)],
)
def test_an_over_committed_host_is_short_of_memory_below_its_floor(
    overcommit: float, available: int, short: bool
) -> None:
    one = replace(host(), available=available, overcommit=Overcommitment(memory=overcommit, floor=1024))
    assert short_of_memory(one) is short


HALF_MORE = Overcommitment(memory=1.5, floor=1000)


def test_an_over_commitment_of_one_and_a_half_lets_half_as_much_more_be_claimed() -> None:
    roomy = replace(host(memory=1000), available=100_000, overcommit=HALF_MORE)
    assert overcommitted(roomy, [4, 1000, 0, 0], 0) == ([4, 1500, 0, 0], False)


@pytest.mark.parametrize(("available", "free", "tight"), [(2501, 1500, False), (2500, 1500, False), (2499, 1499, True)])
def test_a_host_is_tight_exactly_if_its_machine_has_less_than_may_be_claimed(
    available: int, free: int, tight: bool
) -> None:
    machine = replace(host(memory=1000), available=available, overcommit=HALF_MORE)
    assert overcommitted(machine, [4, 1000, 0, 0], 0) == ([4, free, 0, 0], tight)


def test_with_over_commitment_a_vm_must_still_fit_into_the_machine() -> None:
    small = replace(host(memory=16384), machine=Size(4, 5096), overcommit=HALF_MORE)
    assert largest_on(small, "slim", POLICY) == largest_on(host(memory=4096), "slim", POLICY)


def test_a_host_lacks_memory_exactly_from_one_mib_too_much() -> None:
    machine = replace(host(memory=4000), available=1500, overcommit=HALF_MORE)
    room = Room({"h1": machine})
    free, tight = overcommitted(machine, room.free["h1"], 0)
    room.set("h1", free, tight=tight, full=False)
    assert room.free["h1"][1] == 500
    assert room.lack_memory({"h1": Size(1, 501)}) == ["h1"]
    assert room.lack_memory({"h1": Size(1, 500)}) == []
    assert room.lack_memory({"h1": Size(9, 501)}) == [], "its CPUs are lacking too"


# --- room -------------------------------------------------------------------------------------------


def test_room_that_was_taken_is_free_again_once_it_is_given_back() -> None:
    room = Room({"h1": host()})
    room.take("h1", Size(1, 100, 1000, 10))
    assert room.free["h1"] == [3, 8092, 64536, -10]
    room.give("h1", Size(1, 100, 1000, 10))
    assert room.free["h1"] == [4, 8192, 65536, 0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (host("h1", cpus=2, memory=8192), host("h2", cpus=4, memory=4096)),
        (host("h1", memory=4096, disk=65536), host("h2", memory=8192, disk=1000)),
    ],
)
def test_the_emptiest_host_has_the_most_cpus_left_and_then_the_most_memory(first: Host, second: Host) -> None:
    assert Room({"h1": first, "h2": second}).place(1, {"h1": Size(1, 1), "h2": Size(1, 1)}) == ["h2"]


def test_of_equal_hosts_the_first_by_name_is_chosen() -> None:
    assert Room({"h2": host("h2"), "h1": host("h1")}).place(1, {"h2": Size(1, 1), "h1": Size(1, 1)}) == ["h1"]


# --- names ------------------------------------------------------------------------------------------


def test_a_mac_is_six_bytes_of_which_the_last_three_are_the_serial() -> None:
    mac = mac_of("test0", 0xABCDEF)
    assert len(mac) == 17 and mac.startswith("02:") and mac.endswith(":ab:cd:ef")
    assert mac_of("test1", 0xABCDEF)[:8] != mac[:8], "another site"


def test_an_address_in_use_is_skipped() -> None:
    own = address_of(5, (), POLICY)
    assert own == "10.9.1.5/16"
    assert address_of(5, {own}, POLICY) == address_of(6, (), POLICY) == "10.9.1.6/16"
    assert address_of(5, {own, "10.9.1.6/16"}, POLICY) == "10.9.1.7/16"


def test_no_vm_gets_the_gateways_address() -> None:
    assert address_of(5, (), replace(POLICY, gateway="10.9.1.5")) == "10.9.1.6/16"
