"""Which observations of hosts need no pass of their own: those that move no row and for which nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from multiverse.core.model.basics import Depth, Size
from multiverse.core.model.host import Drain, HostState
from multiverse.core.model.job import AttemptState, LeaseState
from multiverse.core.model.saved import SavedSeen, SavedState
from multiverse.core.model.usage import Load
from multiverse.core.model.vm import TemplateState, VmCondition, VmState
from multiverse.core.model.world import Observation, Row
from multiverse.core.policy import Pool
from multiverse.core.quiet import can_wait, expected_sources
from multiverse.core.rows import DirtyRows
from multiverse.core.state import State
from multiverse_lab.bench.clusters import ClusterSpec, PolicyChoice, run_cluster
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.scenario import Arrival
from multiverse_lab.simulation.workload import WorkloadTotals
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.rows import SOURCE, attempt, known_host, lease, place, saved, state, template, vm


def serving() -> PlannerHarness:
    """A job runs in a VM, and nothing else happens."""
    harness = PlannerHarness()
    harness.to_allocated()
    harness.run()
    return harness


def next_observation_can_wait(harness: PlannerHarness) -> bool:
    told = harness.world.sources[SOURCE]
    harness.pass_time(30.0)
    harness.observe()
    expected = expected_sources(harness.state, harness.policy)
    waits = expected is not None and SOURCE not in expected
    return waits and can_wait(told, harness.world.sources[SOURCE].latest)


def vm_of(harness: PlannerHarness) -> str:
    return next(iter(harness.vms))


def measure_otherwise(harness: PlannerHarness) -> None:
    harness.hosts["h1"] = replace(harness.hosts["h1"], load=Load(3.0, 500), available=100)
    harness.vms[vm_of(harness)] = replace(harness.vms[vm_of(harness)], private=77.0, cpu_s=4.0)
    which = next(iter(harness.templates))
    harness.templates[which] = replace(harness.templates[which], held=12.0)


def test_what_is_measured_can_wait_and_moves_nothing() -> None:
    harness = serving()
    measure_otherwise(harness)
    assert next_observation_can_wait(harness)
    assert harness.commit() == []


def let_its_vm_die(harness: PlannerHarness) -> None:
    harness.seen(vm_of(harness), VmCondition.DEAD)


def freeze_its_job(harness: PlannerHarness) -> None:
    harness.vms[vm_of(harness)] = replace(harness.vms[vm_of(harness)], frozen=True)


def freeze_its_job_soon(harness: PlannerHarness) -> None:
    harness.vms[vm_of(harness)] = replace(harness.vms[vm_of(harness)], freezing=True)


def lose_its_vm(harness: PlannerHarness) -> None:
    harness.vms.clear()


def lose_its_template(harness: PlannerHarness) -> None:
    harness.templates.clear()


def grow_the_host(harness: PlannerHarness) -> None:
    harness.hosts["h1"] = replace(harness.hosts["h1"], capacity=Size(8, 16384, 65536))


def show_another_host(harness: PlannerHarness) -> None:
    harness.second_host()


def drain_the_host(harness: PlannerHarness) -> None:
    harness.state.drains["h1"] = Drain()


def keep_a_pool(harness: PlannerHarness) -> None:
    harness.policy = replace(POLICY, pools=(Pool("slim", Depth.PARKED, 1, 1, Size(1, 100)),))


def let_a_job_wait(harness: PlannerHarness) -> None:
    harness.job("8", size=Size(4, 6000))
    harness.run()
    assert not harness.state.queue.is_idle


def end_the_job(harness: PlannerHarness) -> None:
    harness.jobs.clear()
    harness.run()


def show_a_stranger(harness: PlannerHarness) -> None:
    harness.state.compared.unexplained.add(("mv-test0-99", SOURCE))


MATTERS = [
    let_its_vm_die, freeze_its_job, freeze_its_job_soon, lose_its_vm, lose_its_template, grow_the_host,
    show_another_host, drain_the_host, keep_a_pool, let_a_job_wait, end_the_job, show_a_stranger,
]  # fmt: skip


@pytest.mark.parametrize("change", MATTERS, ids=lambda change: change.__name__)
def test_what_moves_rows_or_is_waited_for_cannot_wait(change: Callable[[PlannerHarness], None]) -> None:
    harness = serving()
    change(harness)
    assert not next_observation_can_wait(harness)


def test_a_source_that_was_or_is_unknown_cannot_wait() -> None:
    harness = serving()
    latest = harness.world.sources[SOURCE].latest
    assert not can_wait(Observation(None, 0.0), latest)
    assert not can_wait(harness.world.sources[SOURCE], None)
    assert not can_wait(None, latest)


def test_an_observation_that_was_told_before_can_wait() -> None:
    harness = serving()
    told = harness.world.sources[SOURCE]
    assert told.latest is not None and can_wait(told, told.latest)
    harness.vms[vm_of(harness)] = replace(harness.vms[vm_of(harness)], frozen=True)
    harness.observe()
    frozen = harness.world.sources[SOURCE]
    assert can_wait(frozen, frozen.latest), "the last pass was told that the job is frozen"
    harness.observe()
    assert not can_wait(frozen, harness.world.sources[SOURCE].latest), "and is told again, as its rows may differ"


def test_an_observation_that_shows_another_saved_job_cannot_wait() -> None:
    told = serving().world.sources[SOURCE]
    assert told.latest is not None
    seen = SavedSeen("mvtest0-9", "token", 46 << 20, "shared")
    more = replace(told.latest, value=replace(told.latest.value, saved={"mvtest0-9": seen}))
    assert not can_wait(told, more)


def at_rest(*rows: Row) -> State:
    """A state in which no row is to be looked at."""
    here = state(*rows)
    here.queue.take_unchecked()
    here.dirty = DirtyRows()
    return here


@pytest.mark.parametrize(
    "row",
    [
        lease(LeaseState.IDLE),
        saved(SavedState.STORED),
        *(known_host(one) for one in (HostState.SILENT, HostState.FENCING, HostState.FENCED)),
        *(vm(one) for one in (VmState.ASLEEP, VmState.DELAYED)),
    ],
    ids=lambda row: f"{row.key.kind} {row.state}",
)
def test_while_something_waits_for_room_or_for_any_host_all_sources_are_expected(row: Row) -> None:
    assert expected_sources(at_rest(vm(VmState.SERVING, id=2)), POLICY) == set()
    assert expected_sources(at_rest(row), POLICY) is None


def test_while_a_source_is_silent_or_shows_what_has_no_row_all_sources_are_expected() -> None:
    silent, stray, unexplained = at_rest(), at_rest(), at_rest()
    silent.compared.silent.add(SOURCE)
    stray.compared.stray[SOURCE] = ("mvtest0-7",)
    unexplained.compared.unexplained.add(("mvtest0-7", SOURCE))
    assert [expected_sources(one, POLICY) for one in (silent, stray, unexplained)] == [None] * 3


def test_the_sources_of_rows_that_are_looked_at_again_are_expected() -> None:
    moving = vm(VmState.MOVING, places=(place("h1", "a"), place("h2", "b")))
    of_job, of_unread = (vm(VmState.SERVING, id=id_, attempt=id_, source=f"of {id_}") for id_ in (2, 3))
    jobs = [attempt(AttemptState.ALLOCATED, id=id_, job=str(id_)) for id_ in (2, 3)]
    here = at_rest(moving, of_job, of_unread, *jobs, template(TemplateState.BUILDING, source="builds"))
    gone = 99  # what is gone was looked at and is not any more
    here.dirty = DirtyRows(attempts={2, gone}, unread={3}, vms={1, gone}, templates={1, gone})
    assert expected_sources(here, POLICY) == {"a", "b", "of 2", "of 3", "builds"}


def test_idle_hosts_make_no_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one job runs for an hour, fifty hosts are observed thousands of times."""
    from multiverse.controller.loop import Controller

    passes = 0
    whole = Controller.run_pass

    def counted(self: Controller) -> bool:
        nonlocal passes
        passes += 1
        return whole(self)

    monkeypatch.setattr(Controller, "run_pass", counted)
    totals: list[WorkloadTotals] = []
    one = [Arrival(0.0, Batch("1", seconds=3600.0, size=Size(1, 1024), limit=7200.0))]
    spec = ClusterSpec(hosts=50, cores=4, memory=16384)
    run_cluster(spec, PolicyChoice(), iter(one), 1, totals.append)
    assert totals[-1].seconds > 3600
    assert passes < 600, "fewer than 6,000 observations of hosts"
