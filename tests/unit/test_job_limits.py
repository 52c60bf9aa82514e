"""Submission refuses what admission would cancel: the planner, the published limits and multiverse.lua agree."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multiverse.config import ImageSettings, SaveSettings, Settings, SlurmSettings
from multiverse.core.admission.admit import admit
from multiverse.core.capacity.sizes import NodeRequest, could_ever_fit, job_limits, largest_on, template_size
from multiverse.core.changes import mark_changes
from multiverse.core.context import Context
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import (
    MOST_NODES,
    OTHER_IMAGES,
    EqualHosts,
    Host,
    HostState,
    HypervisorView,
    ImageDisk,
    JobLimits,
    KnownHost,
    Overcommitment,
)
from multiverse.core.model.job import AttemptState, Job, JobState, Request, SchedulerView
from multiverse.core.model.reason import text_of
from multiverse.core.policy import Policy
from multiverse.core.transition import Event
from multiverse.drivers.slurm.submission import SubmissionFile
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE, attempt, changes_of, state, world_of
from tests.unit.slurm_lua import install_scripts, modify, needs_lua, submit_each

ALL = frozenset({"fork", "plug_cpus", "plug_memory", "limit_disk"})
BOOTS = frozenset({"instant", "linked", "full"})

image_abilities = st.sets(st.sampled_from(sorted(ALL))).map(frozenset)


image_disks = st.builds(ImageDisk, st.sampled_from([0, 900, 16388]), st.sampled_from([0, 1, 452]))


bandwidth = st.sampled_from([0, 0, 100, 1000])
nodes = st.builds(
    Size, st.integers(1, 13), st.integers(1, 1 << 13), st.just(0) | st.integers(1, 1 << 15), bandwidth | st.just(300)
)


@st.composite
def host_lists(draw: st.DrawFn) -> list[Host]:
    """One to four hosts, some of them equal, of any costs, with or without the images `slim` and `rigid`."""
    kinds = st.builds(
        Host,
        name=st.just(""),
        capacity=st.builds(
            Size, st.integers(0, 12), st.integers(0, 1 << 14), st.sampled_from([0, 999, 1 << 16]), bandwidth
        ),
        abilities=st.sets(st.sampled_from(sorted(BOOTS))).map(frozenset),
        machine=st.none() | st.builds(Size, st.integers(1, 12), st.integers(0, 1 << 14)),
        template_copies=st.integers(0, 2),
        images=st.dictionaries(st.sampled_from(["slim", "rigid"]), image_abilities),
        memory_block=st.sampled_from([1, 128, 1000, 1024]),
        vm_overhead=st.sampled_from([0, 32, 500]),
        disks=st.dictionaries(st.sampled_from(["slim", "rigid"]), image_disks),
        overcommit=st.builds(
            Overcommitment,
            st.sampled_from([1.0, 1.0, 1.5, 2.0]),
            st.sampled_from([1.0, 1.5]),
            st.sampled_from([1.0, 1.5]),
            st.integers(0, 2048),
        ),
    )
    different = draw(st.lists(kinds, min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(different), min_size=1, max_size=4))
    return [replace(host, name=f"h{number}") for number, host in enumerate(chosen)]


requests = st.builds(
    Request,
    nodes=st.integers(1, 30),
    size=nodes,
    image=st.sampled_from([None, "slim", "rigid", "absent"]),
    kind=st.none() | st.sampled_from(CloneKind),
    per_host=st.sampled_from([0, 0, 1, 2]),
)

policies = st.builds(
    lambda base, kind, scratch: replace(POLICY, base=base, kind=kind, scratch=scratch),
    st.builds(Size, st.integers(1, 3), st.sampled_from([128, 256, 1024])),
    st.sampled_from(CloneKind),
    st.sampled_from([0, 64, 2048]),
)


def limits_of(hosts: Sequence[Host], policy: Policy = POLICY) -> JobLimits:
    found = job_limits({host.name: KnownHost(host.name, SOURCE, value=host) for host in hosts}, policy)
    assert found is not None
    return found


def is_cancelled(hosts: Sequence[Host], policy: Policy, request: Request) -> bool:
    """Whether admission cancels the job because of its size, while all hosts are in sight and nothing is on them."""
    asks = attempt(AttemptState.QUEUED, request=request)
    here = state(asks, now=1000.0, known=[host.name for host in hosts])
    job = Job(asks.job, "hello", 1000, JobState.PENDING, request)
    view = HypervisorView({host.name: host for host in hosts})
    world = world_of(SchedulerView({job.ref.job_id: job}), view, 1000.0)
    mark_changes(here, world, policy)
    admit(Context(here, world, policy))
    assert not text_of(here.attempts[asks.id].quarantined)
    return Event.IMPOSSIBLE in [change.event for change in changes_of(here.moves)]


def allows(limits: JobLimits, request: Request) -> bool:
    return limits.allow(request.image, request.kind, request.nodes, request.size, request.per_host)


def able(name: str, cpus: int, memory: int, disk: int = 1 << 16, **more: object) -> Host:
    facts: dict[str, object] = {"images": {"slim": ALL}, "abilities": BOOTS, **more}
    return Host(name, Size(cpus, memory, disk), **facts)  # type: ignore[arg-type]


LAB = [able("h1", 8, 15872)]
RIGID = [able("h1", 8, 8192, images={"slim": frozenset({"fork"})})]


# --- the planner ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(host_lists(), policies, st.lists(requests, min_size=1, max_size=8))
@example(LAB, POLICY, [Request(2, Size(8, 300)), Request(2, Size(4, 300)), Request(9, Size(1, 100))])
@example(RIGID, POLICY, [Request(1, Size(1, 5000), kind=kind) for kind in CloneKind])
@example([able("h1", 0, 0)], POLICY, [Request(1, Size(1, 1))])
@example([able("h1", 2, 4096, overcommit=Overcommitment(1.5))], replace(POLICY, base=Size(3, 128)),
         [Request(1, Size(1, 1))])  # fmt: skip
@example([able("h1", 1, 512, 0, disks={"rigid": ImageDisk(0, 1)})], POLICY, [Request(1, Size(1, 1), image="rigid")])
def test_submission_refuses_exactly_the_jobs_that_admission_would_cancel(
    hosts: list[Host], policy: Policy, wanted: list[Request]
) -> None:
    limits = limits_of(hosts, policy)
    for request in wanted:
        assert allows(limits, request) != is_cancelled(hosts, policy, request), request


@settings(deadline=None)
@given(host_lists(), policies, st.booleans(), nodes.map(lambda node: replace(node, disk=0)), st.integers(0, 3))
def test_the_numbers_of_nodes_that_hosts_hold_add_up_to_what_could_ever_fit(
    hosts: list[Host], policy: Policy, forks: bool, node: Size, per_host: int
) -> None:
    kind = CloneKind.INSTANT if forks else CloneKind.FULL
    hosts = [replace(host, images={"slim": host.images.get("slim", frozenset())}) for host in hosts]
    by_name = {host.name: host for host in hosts}
    templates = {
        name: template_size(node, host, "slim", policy) if forks else policy.base for name, host in by_name.items()
    }
    limits = limits_of(hosts, policy)
    for count in range(1, 52):
        fits = could_ever_fit(
            NodeRequest(node, "slim", kind), Request(count, node, per_host=per_host), templates, by_name, policy
        )
        assert limits.allow("slim", kind, count, node, per_host) == fits, count


def test_one_node_may_be_as_large_as_the_largest_that_the_host_holds() -> None:
    for host in (*LAB, *RIGID):
        limits = limits_of([host])
        for kind in (CloneKind.INSTANT, CloneKind.LINKED, CloneKind.FULL):
            (limit,) = (limit for limit in limits.limits["slim"] if kind in limit.kinds)
            largest = largest_on(host, "slim", POLICY, kind)
            assert limit.hosts[0].memory[0] == largest.memory
            assert (limit.hosts[0].cpus, limit.hosts[0].disk) == (largest.cpus, largest.disk)


def test_equal_hosts_are_counted_and_different_ones_are_listed() -> None:
    two, other = [able("h1", 4, 4096), able("h2", 4, 4096)], able("h3", 2, 9000)
    (limit,) = limits_of([*two, other]).limits["slim"]
    assert [(hosts.count, hosts.cpus) for hosts in limit.hosts] == [(1, 2), (2, 4)]
    assert limit.kinds == set(CloneKind), "an image that can plug all may be as large for each kind of clone"
    assert len(limits_of(RIGID).limits["slim"]) == 2


def test_the_limits_of_images_that_no_host_has_are_those_of_an_image_that_can_plug_everything() -> None:
    limits = limits_of(RIGID)
    assert set(limits.limits) == {"slim", OTHER_IMAGES}
    assert limits.limits[OTHER_IMAGES][0] == replace(limits_of([able("h1", 8, 8192)]).limits["slim"][0])


def test_removed_hosts_do_not_count_and_nothing_is_said_while_a_host_is_unknown() -> None:
    one, two = (KnownHost(name, SOURCE, value=able(name, 4, 4096)) for name in ("h1", "h2"))
    gang = (None, None, 2, Size(4, 100))
    for known, allowed in ((HostState.KNOWN, True), (HostState.FENCED, True), (HostState.REMOVED, False)):
        limits = job_limits({"h1": one, "h2": replace(two, state=known)}, POLICY)
        assert limits is not None and limits.allow(*gang) is allowed
    assert job_limits({"h1": one, "h2": KnownHost("h2", SOURCE)}, POLICY) is None
    assert job_limits({}, POLICY) is None


def test_a_host_of_thousands_of_cpus_has_a_list_that_ends() -> None:
    (limit,) = limits_of([able("quota", 100_000, 1 << 24)]).limits["slim"]
    assert len(limit.hosts[0].memory) == MOST_NODES
    limits = limits_of([able("quota", 100_000, 1 << 24)])
    assert limits.allow(None, None, MOST_NODES, Size(1, 100))
    assert limits.allow(None, None, MOST_NODES + 1, Size(1, 100)), "nobody counted that far"


@pytest.mark.parametrize(
    ("size", "held"),
    [
        (Size(1, 100), 6),
        (Size(2, 100), 4),
        (Size(4, 100), 2),
        (Size(5, 100), 0),
        (Size(1, 101), 4),
        (Size(1, 501), 0),
        (Size(1, 100, 300), 6),
        (Size(1, 100, 301), 4),
        (Size(1, 100, 901), 0),
    ],
)
def test_as_many_nodes_are_held_as_cpus_memory_and_disk_allow(size: Size, held: int) -> None:
    assert EqualHosts(2, 4, 900, (500, 200, 100)).nodes_held(size) == held


# --- multiverse.lua ----------------------------------------------------------------------------------


def publish(directory: Path, limits: JobLimits, save: SaveSettings | None = None) -> Path:
    """Install the scripts and publish limits, as the daemon does; the directory of the scripts."""
    slurm = SlurmSettings(conf=directory / "slurm.conf", inbox=directory / "inbox")
    image = ImageSettings(default=limits.image, tmp_disk=1 << 20)
    site = Settings(slurm=slurm, image=image, save=save or SaveSettings())
    installed = install_scripts(site)
    publication = SubmissionFile(site.slurm.inbox, 60.0).publish(limits)
    with pytest.raises(StopIteration):
        publication.send(None)  # it awaits nothing
    return installed


def comment_of(request: Request) -> str:
    wishes = {"net": request.size.net, "per-host": request.per_host}
    return "mine vm:" + ",".join(f"{key}={value}" for key, value in wishes.items() if value)


def fields_of(request: Request) -> str:
    """What sbatch sends for a job of exactly that size."""
    words = [*([request.image] if request.image else []), *([request.kind.value] if request.kind else [])]
    values: Mapping[str, object] = {
        "user_id": 1000,
        "min_nodes": request.nodes,
        "max_nodes": request.nodes,
        "num_tasks": request.nodes,
        "cpus_per_task": request.size.cpus,
        "min_cpus": request.nodes * request.size.cpus,
        "min_mem_per_node": request.size.memory,
        "pn_min_tmp_disk": request.size.disk,
        "features": f"'{'&'.join(words)}'",
        "comment": f"'{comment_of(request)}'",
    }
    return ", ".join(f"{name} = {value}" for name, value in values.items())


@needs_lua
@settings(deadline=None, max_examples=30)
@given(host_lists(), policies, st.lists(requests, min_size=20, max_size=40))
@example(LAB, POLICY, [Request(2, Size(8, 300)), Request(2, Size(4, 300)), Request(9, Size(1, 100))])
@example(RIGID, POLICY, [Request(1, Size(1, 5000), kind=kind) for kind in CloneKind])
@example([able("h1", 0, 0)], POLICY, [Request(1, Size(1, 1))])
def test_the_script_refuses_exactly_the_jobs_that_admission_would_cancel(
    hosts: list[Host], policy: Policy, wanted: list[Request]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        installed = publish(Path(directory), limits_of(hosts, policy))
        answers = submit_each(installed, [fields_of(request) for request in wanted])
    cancelled = [is_cancelled(hosts, policy, request) for request in wanted]
    assert [not answer.accepted for answer in answers] == cancelled


@needs_lua
@settings(deadline=None, max_examples=40)
@given(
    host_lists(),
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4000)),
        min_size=20,
        max_size=40,
    ),
)
def test_of_a_range_of_nodes_the_smallest_number_that_fits_is_chosen(
    hosts: list[Host], ranges: list[tuple[int, int, int, int, int]]
) -> None:
    limits = limits_of(hosts)
    fields, expected = [], []
    for least, more, tasks, each, memory in ranges:
        fields.append(
            f"user_id = 1000, min_nodes = {least}, max_nodes = {least + more}, num_tasks = {tasks}, "
            f"cpus_per_task = {each}, min_cpus = {tasks * each}, min_mem_per_node = {memory}"
        )
        fitting = (
            nodes
            for nodes in range(least, least + more + 1)
            if limits.allow(None, None, nodes, Size(-(-tasks // nodes) * each, memory))
        )
        expected.append(next(fitting, None))
    with tempfile.TemporaryDirectory() as directory:
        answers = submit_each(publish(Path(directory), limits), fields)
    assert [answer.nodes if answer.accepted else None for answer in answers] == expected


@needs_lua
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("comment = 'vm:net=1G'", ["no host here has bandwidth to claim", "submit without vm:net"]),
        ("min_nodes = 2, comment = 'vm:per-host=1'", ["2 nodes", ", at most 1 on a host, but", "can hold 1 of them"]),
        ("min_nodes = 2, max_nodes = 2, num_tasks = 16", ["2 nodes with 8 CPUs", "can hold 1 of them", "fewer nodes"]),
        ("min_nodes = 9, max_nodes = 9, min_mem_per_node = 100", ["can hold 8 of them"]),
        ("min_nodes = 2, max_nodes = 2, num_tasks = 18", ["9 CPUs", "the largest VM", "has 8 CPUs and 15106 MiB"]),
        ("min_mem_per_node = 15107", ["1 CPU and 15107 MiB", "has 8 CPUs and 15106 MiB"]),
    ],
)
def test_the_message_says_how_many_nodes_the_hosts_can_hold(tmp_path: Path, fields: str, words: list[str]) -> None:
    (answer,) = submit_each(publish(tmp_path, limits_of(LAB)), [f"user_id = 1000, {fields}"])
    assert not answer.accepted
    assert [word for word in words if word not in answer.message] == []


@needs_lua
def test_a_waiting_job_cannot_grow_to_more_nodes_than_the_hosts_can_hold(tmp_path: Path) -> None:
    installed = publish(tmp_path, limits_of(LAB))
    record = "partition = 'vm', job_state = 0, min_nodes = 1, min_cpus = 4, min_mem_per_node = 300, features = 'mvgate'"
    assert "|0|" in modify(installed, "min_nodes = 2, min_cpus = 8, num_tasks = 4, cpus_per_task = 2", record)
    said = modify(installed, "min_nodes = 2, min_cpus = 16, num_tasks = 4, cpus_per_task = 4", record)
    assert "|2014|" in said and "can hold 1 of them" in said


@needs_lua
@pytest.mark.parametrize(
    "line", ["slim 1 1 default 1 8/8 0/0/0/0 x", "slim 1 1 default", "slim 1 x default 1 8/8 0/0/0/0 5", "* 0 1"]
)
def test_a_damaged_line_refuses_nothing(tmp_path: Path, line: str) -> None:
    installed = publish(tmp_path, limits_of(LAB))
    file = tmp_path / "inbox.limits"
    head = re.match(r"\S+ \S+\n", file.read_text())
    assert head
    file.write_text(f"{head.group()}{line}\n")
    (answer,) = submit_each(installed, ["user_id = 1000, min_nodes = 9, max_nodes = 9, min_mem_per_node = 100"])
    assert answer.accepted
