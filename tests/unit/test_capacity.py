"""The largest node that a host could ever hold, and what the scheduler is told of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multiverse.core.admission.admit import admit
from multiverse.core.capacity.empty_hosts import could_ever_fit, largest_nodes, largest_on
from multiverse.core.capacity.room import Room
from multiverse.core.capacity.sizes import NodeRequest, template_size
from multiverse.core.changes import mark_changes
from multiverse.core.context import Context
from multiverse.core.model import (
    AttemptState,
    CloneKind,
    Host,
    HostState,
    HypervisorView,
    ImageDisk,
    Job,
    JobState,
    KnownHost,
    Overcommitment,
    Request,
    SchedulerView,
    Size,
)
from multiverse.core.policy import Policy
from multiverse.core.transition import Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE, attempt, changes_of, state, world_of

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


# --- what the scheduler is told ---------------------------------------------------------------------


def known(name: str, cpus: int, memory: int, disk: int = 0, **more: object) -> KnownHost:
    facts: dict[str, object] = {"images": {"slim": ABLE}, **more}
    return KnownHost(name, SOURCE, value=Host(name, Size(cpus, memory, disk), **facts))  # type: ignore[arg-type]


def nodes(*some: KnownHost, policy: Policy = POLICY) -> dict[str, tuple[Size, ...]]:
    return largest_nodes({one.name: one for one in some}, policy)


def test_a_size_that_another_host_contains_is_left_out() -> None:
    many, much, small, disk = known("h1", 64, 4096), known("h2", 4, 65536), known("h3", 4, 4096), known("h4", 1, 900, 9)
    largest = {one.name: largest_on(one.value, "slim", POLICY) for one in (many, much, small, disk) if one.value}
    for some in ((many, much, small, disk), (disk, small, much, many)):
        found = nodes(*some)["slim"]
        assert set(found) == {largest["h1"], largest["h2"], largest["h4"]} and len(found) == 3
    assert nodes(small, replace(small, name="h5"))["slim"] == (largest["h3"],), "of equals one is kept"


def test_hosts_out_of_reach_count_as_they_were_observed_last() -> None:
    """`largest_nodes` is given all known hosts: a fenced one will be repaired, as in admission."""
    near, away = known("h1", 4, 4096), known("h2", 64, 65536)
    assert nodes(near, away) == nodes(away) == nodes(near, replace(away, state=HostState.FENCED))
    for away_for_good in (HostState.REMOVED, HostState.RETURNED):
        assert nodes(near, replace(away, state=away_for_good)) == nodes(near) != nodes(away)


@pytest.mark.parametrize("named", [1, 2])
def test_nothing_is_said_while_a_host_of_the_settings_was_never_observed(named: int) -> None:
    unseen = [KnownHost(f"h{n}", SOURCE) for n in range(2, 2 + named)]
    assert nodes(known("h1", 4, 4096), *unseen) == {}
    assert nodes(*unseen) == {} and nodes() == {}
    assert nodes(known("h1", 4, 4096))


def test_every_image_of_any_host_and_the_default_image_are_listed() -> None:
    able, unable = known("h1", 4, 4096, images={"a": ABLE}), known("h2", 4, 4096, images={"b": frozenset({"fork"})})
    found = nodes(able, unable)
    assert set(found) == {"a", "b", "slim"}
    assert found["slim"] == found["a"], "an image that is not there yet may plug all that it lacks"
    assert found["b"] == nodes(known("h1", 4, 4096))["slim"], "h1 may yet get the image, and could hold more of it"
    assert nodes(unable)["b"] < found["b"]


@pytest.mark.parametrize(("ability", "larger"), [("instant", False), ("linked", True), ("full", True)])
def test_a_host_that_boots_holds_larger_nodes_of_an_image_that_cannot_plug(ability: str, larger: bool) -> None:
    host = known("h1", 4, 8192, images={"slim": frozenset({"fork"})}, abilities=frozenset({"instant", ability}))
    (size,) = nodes(host)["slim"]
    assert (size.memory >= 5000) is larger


def is_refused(host: Host, policy: Policy, request: Request) -> bool:
    """Whether admission cancels a job because of its size, where that host is the only one."""
    asks = attempt(AttemptState.QUEUED, request=request)
    here = state(asks, now=1000.0)
    job = Job(asks.job, "hello", 1000, JobState.PENDING, request)
    world = world_of(SchedulerView({job.ref.job_id: job}), HypervisorView({"h1": host}), 1000.0)
    mark_changes(here, world, policy)
    admit(Context(here, world, policy))
    return Event.IMPOSSIBLE in [change.event for change in changes_of(here.moves)]


@settings(deadline=None)
@given(hosts(), policies, node_sizes, st.sampled_from(CloneKind), st.sets(st.sampled_from(["linked", "full"])))
@example(
    Host("h1", Size(4, 8192), images={"slim": frozenset({"fork"})}), POLICY, Size(1, 5000), CloneKind.AUTO, {"linked"}
)
def test_whatever_submission_refuses_admission_would_refuse_too(
    host: Host, policy: Policy, node: Size, kind: CloneKind, boots: set[str]
) -> None:
    host = replace(host, abilities=frozenset({"instant", *boots}))
    listed = nodes(KnownHost("h1", SOURCE, value=host), policy=policy)["slim"]
    is_listed = any(contains(size, node) for size in listed)
    refused = is_refused(host, policy, Request(1, node, kind=kind))
    makes_it = kind is CloneKind.AUTO or kind.value in host.abilities
    if not is_listed and makes_it:
        assert refused
    if is_listed and host.images.get("slim", ABLE) >= ABLE:
        assert not refused, "of an image that can plug all, any kind of clone may be as large"


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8192), st.integers(0, 3)), min_size=1, max_size=5))
def test_no_listed_size_contains_another_and_each_host_s_largest_is_contained(
    machines: list[tuple[int, int, int]],
) -> None:
    some = [known(f"h{n}", *size) for n, size in enumerate(machines)]
    found = nodes(*some)["slim"]
    assert not [(one, other) for one, other in product(found, found) if one != other and contains(one, other)]
    assert len(set(found)) == len(found)
    for one in some:
        assert one.value is not None
        assert any(contains(listed, largest_on(one.value, "slim", POLICY)) for listed in found)
