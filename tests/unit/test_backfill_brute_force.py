"""No job that starts ahead of the first one delays it by the time limits: compared with a search of all placements."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multiverse.core.model.job import AttemptState
from multiverse.core.model.vm import Vm, VmState
from tests.unit.test_backfill import FILLING, LEAD, RECLAIM, Cluster, admitted

CPUS = 4
GRID = (60.0, 120.0, 180.0, 240.0)
"""Few times, so that ends coincide."""


@dataclass(frozen=True)
class Held:
    """CPUs that are in use on a host until a time."""

    host: str
    cpus: int
    until: float


def earliest(held: list[Held], hosts: list[str], nodes: int, cpus: int) -> float:
    """When all nodes of a job fit at the same time, by trying all placements at each time at which something ends."""
    for at in sorted({0.0, *(one.until for one in held)}):
        free = {name: CPUS - sum(one.cpus for one in held if one.host == name and one.until > at) for name in hosts}
        for chosen in product(hosts, repeat=nodes):
            if all(chosen.count(name) * cpus <= free[name] for name in hosts):
                return at
    raise AssertionError("it fits on empty hosts")


runs = st.tuples(st.integers(1, 3), st.integers(1, CPUS), st.sampled_from(GRID))
waiting = st.tuples(st.integers(1, CPUS), st.integers(1, 2), st.sampled_from((10.0, *GRID, 1e6)))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(hosts=st.integers(1, 3), running=st.lists(runs, max_size=6), first=waiting, behind=st.lists(waiting, max_size=6))
def test_jobs_that_go_ahead_never_delay_the_first_one(
    hosts: int,
    running: list[tuple[int, int, float]],
    first: tuple[int, int, float],
    behind: list[tuple[int, int, float]],
) -> None:
    names = [f"h{n}" for n in range(1, hosts + 1)]
    cluster = Cluster(hosts=hosts, policy=FILLING)
    held: list[Held] = []
    for number, (on, cpus, ends) in enumerate(running, 1):
        name = f"h{(on - 1) % hosts + 1}"
        if sum(one.cpus for one in held if one.host == name) + cpus <= CPUS:
            cluster.runs(number, cpus, ends=ends, on=name)
            held.append(Held(name, cpus, ends + RECLAIM))
    for number, (cpus, nodes, limit) in enumerate([first, *behind], 11):
        cluster.waits(number, cpus, limit=limit, nodes=min(nodes, hosts * (CPUS // cpus)))
    ahead = set(admitted(cluster.run()))
    state = cluster.state
    assert state is not None
    waits = [one.id for one in state.attempts.values() if one.state is AttemptState.QUEUED]
    if not waits:
        return
    number = min(waits)
    before = [Held(vm.host, vm.size.cpus, _until(cluster, vm)) for vm in _vms(cluster, ahead=set(), than=number)]
    after = [Held(vm.host, vm.size.cpus, _until(cluster, vm)) for vm in _vms(cluster, ahead=ahead, than=99)]
    request = state.attempts[number].request
    alone = earliest(before, names, request.nodes, request.size.cpus)
    assert alone > 0.0, "it waits because there is no room"
    assert earliest(after, names, request.nodes, request.size.cpus) == alone
    assert list(state.promised) == [number]
    assert abs(state.promised[number] - (cluster.context().now + alone)) < 1e-3


def _vms(cluster: Cluster, ahead: set[int], than: int) -> list[Vm]:
    """The VMs that are there, with those of jobs that were admitted before the number."""
    assert cluster.state is not None
    return [
        vm
        for vm in cluster.state.vms.values()
        if vm.state is VmState.SERVING or vm.attempt in ahead or (vm.attempt or 0) < than
    ]


def _until(cluster: Cluster, vm: Vm) -> float:
    """Seconds from now until the VM is gone, by the time limits."""
    assert cluster.state is not None
    job = cluster.jobs[str(vm.attempt)]
    if vm.state is VmState.SERVING:
        assert job.ends is not None
        return job.ends - cluster.context().now + RECLAIM
    return (job.limit or 0.0) + LEAD


def test_the_search_finds_what_is_expected() -> None:
    held = [Held("h1", 3, 60.0), Held("h2", 2, 120.0)]
    assert earliest(held, ["h1", "h2"], 1, 3) == 60.0
    assert earliest(held, ["h1", "h2"], 2, 2) == 60.0
    assert earliest(held, ["h1", "h2"], 2, 3) == 120.0
