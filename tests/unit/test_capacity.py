"""The largest node that a host could ever hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multiverse.core.capacity.room import Room
from multiverse.core.capacity.sizes import NodeRequest, could_ever_fit, largest_on, template_size
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, ImageDisk, Overcommitment
from multiverse.core.model.job import Request
from multiverse.core.policy import Policy
from tests.unit.planner_harness import POLICY

ABLE = frozenset({"fork", "plug_cpus", "plug_memory"})

memory = st.integers(0, 1 << 17)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    """Hosts of any size, with any costs, whose image can plug CPUs, memory, both or nothing, can limit its disk or not,
    or is not there."""
    cpus = st.integers(1, 64)
    image = draw(st.none() | st.sets(st.sampled_from(["plug_cpus", "plug_memory", "limit_disk"])))
    return Host(
        "h1",
        Size(draw(cpus), draw(memory), draw(st.integers(0, 1 << 16))),
        machine=draw(st.none() | st.builds(Size, cpus, memory)),
        template_copies=draw(st.integers(0, 2)),
        images={} if image is None else {"slim": frozenset({"fork", *image})},
        memory_block=draw(st.sampled_from([1, 128, 1000, 1024])),
        vm_overhead=draw(st.sampled_from([0, 32, 500])),
        disks={} if image is None else {"slim": draw(image_disks)},
        overcommit=draw(overcommitments),
    )


overcommitments = st.builds(
    Overcommitment,
    st.sampled_from([1.0, 1.5, 2.0]),
    st.sampled_from([1.0, 1.5, 4.0]),
    st.sampled_from([1.0, 1.5]),
    st.integers(0, 4096),
)

image_disks = st.builds(ImageDisk, st.sampled_from([0, 1000, 16388]), st.sampled_from([0, 1, 452]))
kinds = st.sampled_from([CloneKind.INSTANT, CloneKind.LINKED, CloneKind.FULL])
node_sizes = st.builds(Size, st.integers(1, 70), st.integers(1, 1 << 17), st.integers(0, 1 << 17))

policies = st.builds(
    lambda base, scratch: replace(POLICY, base=base, scratch=scratch),
    st.builds(Size, st.integers(1, 3), st.sampled_from([128, 256, 1024])),
    st.sampled_from([0, 64, 2048]),
)


def fits(node: Size, host: Host, policy: Policy, kind: CloneKind = CloneKind.INSTANT) -> bool:
    """Whether one VM for the node could ever run on that host alone. An image that is not there is taken to plug all
    that it lacks."""
    template = template_size(node, host, "slim", policy) if kind is CloneKind.INSTANT and host.images else policy.base
    return could_ever_fit(NodeRequest(node, "slim", kind), Request(1, node), {"h1": template}, {"h1": host}, policy)


def contains(largest: Size, node: Size) -> bool:
    return node.cpus <= largest.cpus and node.memory <= largest.memory and node.disk <= largest.disk


@given(hosts(), policies, node_sizes, kinds)
@example(
    Host("h1", Size(1, 4096), images={"slim": ABLE}),
    replace(POLICY, base=Size(2, 256)),
    Size(1, 100),
    CloneKind.INSTANT,
)
def test_a_node_fits_on_a_host_exactly_if_it_is_not_larger_than_the_largest(
    host: Host, policy: Policy, node: Size, kind: CloneKind
) -> None:
    largest = largest_on(host, "slim", policy, kind)
    assert fits(node, host, policy, kind) == contains(largest, node)


@given(hosts(), policies, kinds)
def test_the_largest_node_fits_and_nothing_larger_in_any_dimension_does(
    host: Host, policy: Policy, kind: CloneKind
) -> None:
    largest = largest_on(host, "slim", policy, kind)
    assert largest.memory >= 0
    if largest.memory:
        assert fits(largest, host, policy, kind)
    for larger in (Size(largest.cpus + 1, 1), Size(1, largest.memory + 1), Size(1, 1, largest.disk + 1)):
        assert not fits(larger, host, policy, kind)


@pytest.mark.parametrize(
    ("copies", "images", "expected"),
    [
        # The template's 256 MiB and 32 MiB of overhead leave 3808 MiB: a VM of 3712 in blocks.
        (1, {"slim": ABLE}, 3561),
        (2, {"slim": ABLE}, 3310),
        (0, {"slim": ABLE}, 3812),
        # Half of the host, in whole blocks, is the template's; of a template with two copies, two thirds.
        (1, {"slim": frozenset({"fork"})}, 1804),
        (2, {"slim": frozenset({"fork"})}, 1177),
        (0, {"slim": frozenset({"fork"})}, 3812),
        # An image that is not there yet is taken to plug all that it lacks.
        (1, {}, 3561),
    ],
)
def test_the_largest_node_leaves_room_for_the_copies_of_its_template(
    copies: int, images: dict[str, frozenset[str]], expected: int
) -> None:
    host = Host("h1", Size(4, 4096, 7000), template_copies=copies, images=images)
    assert largest_on(host, "slim", POLICY) == Size(4, expected, 7000)


def test_a_host_that_is_smaller_than_a_templates_cpus_holds_nothing() -> None:
    host = Host("h1", Size(1, 4096), images={"slim": ABLE})
    assert largest_on(host, "slim", replace(POLICY, base=Size(2, 256))).memory == 0
    assert largest_on(host, "slim", replace(POLICY, base=Size(1, 256))).memory > 0


def test_sizes_are_whole_mib() -> None:
    rigid = Host("h1", Size(4, 5000), template_copies=2, images={"slim": frozenset({"fork"})})
    assert str(template_size(Size(1, 1400), rigid, "slim", POLICY)) == "1 CPU, 1536 MiB"


@pytest.mark.parametrize(("block", "overhead"), [(128, 32), (1024, 32), (128, 500), (1, 0)])
def test_the_largest_node_follows_the_block_size_and_the_overhead_of_its_host(block: int, overhead: int) -> None:
    host = Host("h1", Size(4, 4096), images={"slim": ABLE}, memory_block=block, vm_overhead=overhead)
    largest = largest_on(host, "slim", POLICY).memory
    blocks = (4096 - 256 - 256 - overhead) // block  # beside the template and the memory that the VM boots with
    guest = 256 + blocks * block
    assert largest + 80 + largest // 50 <= guest < largest + 1 + 80 + (largest + 1) // 50


def test_vms_of_which_one_has_no_room_take_no_room() -> None:
    room = Room({name: Host(name, Size(cpus, 4096, 100)) for name, cpus in (("h1", 3), ("h2", 2))})
    claims = {"h1": Size(1, 100, 10), "h2": Size(1, 200, 20)}
    assert room.place(6, claims) is None
    assert room.free == {"h1": [3, 4096, 100, 0], "h2": [2, 4096, 100, 0]}
    assert room.place(5, claims) == ["h1", "h2", "h1", "h1", "h2"]
