"""A pass visits the rows about which something is to be decided, however many others there are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from ipaddress import IPv4Network
from typing import Any, cast

import pytest

from multiverse.core import changes, planner
from multiverse.core.admission import backfill
from multiverse.core.admission.admit import Admission
from multiverse.core.capacity import room
from multiverse.core.capacity.placement_policies import COMPARED
from multiverse.core.capacity_index import CapacityIndex, HostGroup, HostKind, _FirstFit
from multiverse.core.model.basics import CloneKind, Placement
from multiverse.core.model.host import Drain
from multiverse.core.model.job import AttemptState, JobState
from multiverse.core.policy import Backfill, Policy
from multiverse.core.queue import Queue
from multiverse.core.state import State
from multiverse.store import Store
from multiverse_lab.bench.placement import OBSERVED, FullSite, Planning
from multiverse_lab.bench.placement import measure as measure_placement
from multiverse_lab.bench.planner import BASE, BlockedCluster, MonotonicClock, Passes, UncheckedTables, measure

HOSTS_POLICY = Policy(IPv4Network("10.0.0.0/8"), "10.0.0.1", base=BASE)

SMALL, LARGE = (60, 100), (600, 400)
"""Queued jobs and VMs."""


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often rows are visited, by what is done with them."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            counts[name] += 1
            return whole(*arguments, **more)

        monkeypatch.setattr(owner, name, counted)

    for name in ("step_vm", "step_attempt"):
        count(planner, name)
    for name in ("check", "consider"):
        count(Admission, name)
    count(Queue, "put")
    count(backfill, "_slots_on")
    return counts


@pytest.fixture
def passes_of() -> Iterator[Callable[[int, int], Passes]]:
    stores: list[Store] = []

    def make(jobs: int, vms: int) -> Passes:
        cluster = BlockedCluster(jobs, vms)
        store = Store(":memory:", MonotonicClock(), site="bench", tables=cast(Any, UncheckedTables()))
        stores.append(store)
        with store.transaction() as tx:
            for move in cluster.moves():
                tx.apply(move)
        return Passes(cluster, store)

    yield make
    for store in stores:
        store.close()


async def visits(make: Callable[[int, int], Passes], size: tuple[int, int], counts: Counter[str],
                 change: Callable[[BlockedCluster], None]) -> Counter[str]:  # fmt: skip
    """What a pass visits after the cluster has changed so."""
    passes = make(*size)
    for _ in range(3):
        passes.timed()
    change(passes.cluster)
    counts.clear()
    passes.timed()
    found = Counter(counts)
    await passes.controller.close()
    return found


async def test_a_pass_on_equal_observations_steps_no_row(
    passes_of: Callable[[int, int], Passes], visited: Counter[str]
) -> None:
    for change in (lambda _: None, BlockedCluster.renew):
        found = await visits(passes_of, LARGE, visited, change)
        assert set(found) <= {"consider"} and found["consider"] <= 10, "only the first of the queue are considered"


async def test_equal_jobs_are_compared_without_a_call_for_each(passes_of: Callable[[int, int], Passes]) -> None:
    async def calls(jobs: int) -> int:
        passes = passes_of(jobs, 100)
        for _ in range(3):
            passes.timed()
        passes.cluster.renew()
        passes.observe()
        found = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal found
            found += event == "call"

        sys.setprofile(count)
        try:
            passes.timed_pass()
        finally:
            sys.setprofile(None)
        await passes.controller.close()
        return found

    few, many = await calls(60), await calls(600)
    assert 0 < many < few + 100


async def test_the_rows_that_a_pass_visits_when_a_job_ends_do_not_grow_with_the_queue(
    passes_of: Callable[[int, int], Passes], visited: Counter[str]
) -> None:
    def end(cluster: BlockedCluster) -> None:
        cluster.end_a_job(1)

    small = await visits(passes_of, SMALL, visited, end)
    large = await visits(passes_of, LARGE, visited, end)
    assert small == large and small["step_attempt"] and small["step_vm"]
    assert small["_slots_on"] >= 1, "of the host on which it has ended, and of no other"
    assert sum(small.values()) < 60


async def test_a_job_that_is_held_is_visited_alone(
    passes_of: Callable[[int, int], Passes], visited: Counter[str]
) -> None:
    def hold(cluster: BlockedCluster) -> None:
        cluster.jobs["500"] = cluster.jobs["500"]._replace(eligible=False, held=True)

    found = await visits(passes_of, LARGE, visited, hold)
    assert (found["step_attempt"], found["check"], found["step_vm"]) == (1, 1, 0)


async def test_jobs_that_wait_for_the_same_limit_are_considered_once(
    passes_of: Callable[[int, int], Passes], visited: Counter[str]
) -> None:
    passes = passes_of(*LARGE)
    for job_id, job in passes.cluster.jobs.items():
        if job.state is JobState.PENDING:
            passes.cluster.jobs[job_id] = job._replace(uses=(("QOSMaxJobsPerUserLimit", 1),))
    passes.cluster.limits["QOSMaxJobsPerUserLimit"] = 0
    for _ in range(3):
        passes.timed()
    visited.clear()
    passes.timed()
    requests = {a.request for a in passes.controller.state.attempts_in(AttemptState.QUEUED)}
    assert 0 < visited["consider"] <= len(requests)
    assert all("QOSMaxJobsPerUserLimit" in str(why) for why in passes.controller.state.reasons.values())
    assert len(passes.controller.state.reasons) == 10, "the first of the queue are told"
    await passes.controller.close()


# --- hosts ------------------------------------------------------------------------------------------

FEW, MANY = 40, 800
"""Hosts, each a source of its own with 10 VMs at most."""


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often hosts, templates and VMs are looked at, by what is done with them."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            counts[name] += 1
            return whole(*arguments, **more)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (room, "_refresh"), (room.Search, "usable"), (HostGroup, "put"), (CapacityIndex, "show"),
        (planner, "step_template"), (planner, "step_vm"), (changes, "_mark_source"), (changes, "_follow_hosts"),
        (State, "template_for"), (_FirstFit, "__init__"), (_FirstFit, "put"), (HostKind, "ready_with"),
    ):  # fmt: skip
        count(owner, name)
    return counts


def planning_of(hosts: int, **abilities: object) -> Planning:
    site = FullSite(hosts, 9 * hosts, 30)
    for name, view in site.views.items():
        site.views[name] = replace(view, hosts={name: replace(view.hosts[name], **abilities)})
    planning = Planning(site)
    policy = replace(HOSTS_POLICY, provisioning=0)
    for _ in range(3):
        planning.run(policy, keep=True)
    return planning


@pytest.mark.parametrize("placement", [one for one in Placement if one is not Placement.LEAST_LOADED])
def test_the_hosts_that_an_admission_looks_at_do_not_grow_with_their_number(
    placement: str, looked_at: Counter[str]
) -> None:
    found = []
    for hosts in (FEW, MANY):
        planning, policy = planning_of(hosts), replace(HOSTS_POLICY, placement=placement, provisioning=10)
        planning.run(policy)  # the first time that a policy is asked, its order is made
        looked_at.clear()
        planning.run(policy)
        found.append(Counter(looked_at))
    few, many = found
    assert few["usable"] >= 9, "jobs are placed"
    assert sum(many.values()) < 2 * sum(few.values()) + OBSERVED, (few, many)
    assert many["_refresh"] <= 2 * OBSERVED, "what was taken is computed again, and nothing else"


def test_least_loaded_compares_no_more_hosts_than_it_is_to(looked_at: Counter[str]) -> None:
    planning, policy = planning_of(MANY), replace(HOSTS_POLICY, placement=Placement.LEAST_LOADED, provisioning=10)
    planning.run(policy)
    looked_at.clear()
    planning.run(policy)
    assert 9 <= looked_at["usable"] <= 10 * COMPARED and looked_at["_refresh"] <= 2 * OBSERVED


def test_a_blocked_pass_looks_at_what_was_observed_anew(looked_at: Counter[str]) -> None:
    found = []
    for hosts in (FEW, MANY):
        planning = planning_of(hosts)
        planning.site.ask_for_a_host()
        for _ in range(2):
            planning.run(replace(HOSTS_POLICY, provisioning=10), keep=True)
        looked_at.clear()
        planning.run(replace(HOSTS_POLICY, provisioning=10))
        found.append(Counter(looked_at))
    few, many = found
    assert sum(many.values()) < 2 * sum(few.values()) + 4 * OBSERVED, (few, many)


class Walked(dict[str, Any]):
    """A dictionary that counts how many of its entries are gone through."""

    steps = 0

    def _each(self, entries: Iterable[Any]) -> Iterator[Any]:
        for entry in entries:
            self.steps += 1
            yield entry

    def __iter__(self) -> Iterator[str]:
        return self._each(super().__iter__())

    def keys(self) -> Any:
        return self._each(super().keys())

    def values(self) -> Any:
        return self._each(super().values())

    def items(self) -> Any:
        return self._each(super().items())


def test_a_blocked_pass_in_which_a_job_ends_goes_through_no_list_of_all_hosts(
    looked_at: Counter[str], visited: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = HostGroup.__iter__

    def counted(self: HostGroup) -> Iterator[str]:
        for name in names(self):
            looked_at["name"] += 1
            yield name

    monkeypatch.setattr(HostGroup, "__iter__", counted)
    found = []
    for hosts in (FEW, MANY):
        planning, policy = planning_of(hosts), replace(HOSTS_POLICY, provisioning=10, backfill=Backfill(100, 20))
        planning.site.ask_for_a_host()
        for _ in range(4):
            planning.run(policy, keep=True)
        planning.site.end_a_job()
        free = planning.state.free.free = Walked(planning.state.free.free)
        looked_at.clear()
        visited.clear()
        planning.run(policy)
        assert 1 <= visited["_slots_on"] <= 3, "of the host on which it has ended"
        looked_at["free"] = free.steps
        found.append(Counter(looked_at))
    few, many = found
    assert sum(many.values()) < 2 * sum(few.values()) + 4 * OBSERVED, (few, many)


@pytest.mark.parametrize("placement", [Placement.WORST_FIT, Placement.FIRST_FIT, Placement.RANDOM_FIT])
def test_an_admission_meets_no_drained_host(placement: str, looked_at: Counter[str]) -> None:
    planning = planning_of(MANY, abilities=frozenset({"instant", "full"}))
    policy = replace(HOSTS_POLICY, placement=placement, provisioning=10, kind=CloneKind.FULL)
    planning.run(policy)
    looked_at.clear()
    planning.run(policy)
    before = looked_at["usable"]
    state = planning.state
    free = sorted(state.free.free, key=lambda name: (-state.free.free[name][0], name))
    drained = free[: MANY // 4]  # the emptiest
    for name in drained:
        state.know_host(replace(state.hosts[name], drain=Drain()))
    planning.run(replace(policy, provisioning=0), keep=True)
    there = set(state.vms)
    looked_at.clear()
    planning.run(policy, keep=True)
    assert not {vm.host for vm in state.vms.values() if vm.id not in there} & {*drained}
    assert 9 <= looked_at["usable"] <= 2 * before, "and no search passes over them"


async def test_a_pass_that_one_host_has_woken_goes_through_no_list_of_all(looked_at: Counter[str]) -> None:
    store = Store(":memory:", MonotonicClock(), site="bench", tables=cast(Any, UncheckedTables()))
    cluster = BlockedCluster(60, LARGE[1], per_host=1)
    with store.transaction() as tx:
        for move in cluster.moves():
            tx.apply(move)
    passes = Passes(cluster, store)
    for _ in range(3):
        passes.timed()
    controller = passes.controller
    effects, state = controller._effects, controller.state
    effects._ended_at.update((vm.key, 1.0) for vm in state.vms.values())
    told = controller._hosts._told = Walked(controller._hosts._told)
    ended_at = effects._ended_at = cast(Any, Walked(cast(Any, effects._ended_at)))
    templates = state.templates = cast(Any, Walked(cast(Any, state.templates)))
    passes.observe_host("h7")
    looked_at.clear()
    passes.timed_pass()
    assert looked_at["_mark_source"] == 1
    assert [walked.steps for walked in (told, ended_at, templates)] == [1, 0, 0], "one: whether any host is in sight"
    await controller.close()
    store.close()


def test_the_benchmark_of_placement_measures_every_policy() -> None:
    found = measure_placement(20, 180, 12, 2)
    assert [one.policy for one in found] == list(Placement)
    assert all(one.whole_pass.n == one.blocked.n == one.one_ended.n == 2 and one.scan.n for one in found)
    assert all(one.admission.n for one in found)


async def test_the_benchmark_measures_passes_of_all_sorts() -> None:
    found = await measure(20, 50, 3)
    assert (found.jobs, found.vms) == (20, 50)
    assert all(one.n == 3 for one in (found.one_host, found.unchanged, found.equal, found.one_ended, found.all_rows))
