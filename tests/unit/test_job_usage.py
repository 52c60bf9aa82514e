"""What jobs use, from when they are seen to begin until they have ended, and over restarts; what users are told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from multiverse.controller import history
from multiverse.controller.history import JobUsageRecorder
from multiverse.core.errors import Exhausted, Gone, MultiverseError, Refused, Unknown
from multiverse.core.model.job import AttemptState, JobRef
from multiverse.core.model.usage import Baseline, HostUsage, JobUsage, VmUsage
from multiverse.core.model.vm import Vm
from multiverse.core.transition import Change, Event, Move
from multiverse.store import Store
from multiverse.store.history import RUNS_DELETED, JobUsagePruning, put_job_usage, read_job_usage
from tests.unit.planner_harness import ManualClock, PlannerHarness
from tests.unit.rows import attempt

JOB = JobRef("7", 500)


def usage(**values: Any) -> JobUsage:
    """A run of 100 s of a job that asked for 4 CPUs and 4,000 MiB, and used half of the CPUs and 1,000 MiB."""
    known = JobUsage(1, JOB, 1, 4, 4000, 0.0, (Baseline("mvt-1", "h0", 0.0, 0.0),), 100.0, 200.0, 1000.0, 1)
    return replace(known, **values)


# --- what it comes to -----------------------------------------------------------------------------


def test_a_user_is_told_what_was_asked_for_and_used_and_what_would_have_sufficed() -> None:
    one = usage()
    assert (one.cpus_used, one.efficiency, one.suggestion) == (2.0, 0.5, (4, 1280))
    assert one.text == (
        "used 2.00 of 4 CPUs (50%) and up to 1000 of 4000 MiB in 100 s, as measured at its VM with the page cache;"
        " 4 CPUs and 1280 MiB would have sufficed"
    )


@pytest.mark.parametrize(
    ("values", "suggestion"),
    [
        ({"cpu_s": 90.0}, (2, 1280)),
        ({"cpu_s": 50.0}, (1, 1280)),
        ({"cpu_s": 0.0, "peak": 0.0}, (1, 64)),
        ({"cpu_s": 390.0, "peak": 3900.0}, None),
        ({"cpu_s": 390.0, "peak": 10.0}, (4, 64)),
        ({"cpu_s": 390.0, "peak": 2600.0}, None),
        ({"cpu_s": 10.0, "seconds": 20.0}, None),
        ({"known": 0}, None),
        ({"seconds": None}, None),
    ],
)
def test_a_request_is_suggested_only_if_it_is_notably_less_and_the_run_was_long(
    values: dict[str, Any], suggestion: tuple[int, int] | None
) -> None:
    assert usage(**values).suggestion == suggestion


def test_of_several_nodes_the_cpus_are_a_mean_and_the_memory_is_the_most() -> None:
    one = usage(nodes=2, known=2, cpu_s=400.0)
    assert one.cpus_used == 2.0 and "MiB on each node in" in one.text
    assert usage(nodes=2, known=1, cpu_s=200.0).cpus_used == 2.0, "nothing is known of the other node"


def test_on_an_overloaded_host_what_guests_counted_is_what_was_used() -> None:
    """A guest takes also for use what its CPUs waited for the host's; elsewhere it would be used."""
    one = usage(cpu_s=20.0, counted_s=250.0)
    assert (one.cpus_used, one.suggestion) == (2.5, (4, 1280))
    assert "used 2.50 of 4 CPUs (62%)" in one.text and "(its host was overloaded, and gave 0.20 CPUs)" in one.text
    one = usage(cpu_s=200.0, counted_s=180.0)
    assert one.cpus_used == 2.0 and "overloaded" not in one.text, "the kernel and the emulator use some"
    assert usage(nodes=2, known=1, cpu_s=20.0, counted_s=400.0).cpus_used == 2.0
    assert "overloaded" not in usage(cpu_s=1.0, counted_s=2.0).text, "both are next to nothing"


def test_of_what_is_not_known_nothing_is_said() -> None:
    assert usage(known=0).text == "" == usage(seconds=None).text


def test_the_last_run_of_a_job_that_was_saved_tells_of_all_of_them() -> None:
    one = usage(runs=3, earlier_s=250.0, earlier_cpu_s=111.0)
    assert one.suggestion is None and one.text == (
        "used 2.00 of 4 CPUs (50%) in 100 s, as measured at its VM; with its 2 earlier runs, 350 s and 311 CPU seconds"
        " in all"
    )
    assert "; with its earlier run, 350 s and" in replace(one, runs=2).text


# --- the store ------------------------------------------------------------------------------------


def test_what_was_kept_is_read_and_what_is_old_is_deleted() -> None:
    store = Store(":memory:", ManualClock())
    put_job_usage(store, [usage(), usage(attempt=2, seconds=None)], 100.0)
    put_job_usage(store, [usage(cpu_s=5.0)], 200.0)
    assert read_job_usage(store, [1, 2, 3]) == {1: usage(cpu_s=5.0), 2: usage(attempt=2, seconds=None)}
    assert read_job_usage(store, []) == {}
    for number in range(3, 2 * RUNS_DELETED):
        put_job_usage(store, [usage(attempt=number)], 100.0)
    pruning, steps = JobUsagePruning(store, 150.0), 1
    while pruning.step():
        steps += 1
    assert steps >= 2 and read_job_usage(store, range(2 * RUNS_DELETED)) == {1: usage(cpu_s=5.0)}


def test_the_earlier_runs_of_a_job_that_goes_on_are_added() -> None:
    harness = PlannerHarness()
    recorder = JobUsageRecorder(harness.store, harness.state, None, None, harness.clock)  # type: ignore[arg-type]
    with harness.store.transaction() as tx:
        for number in (1, 2, 3, 4):
            one = attempt(AttemptState.QUEUED, id=number, restarts=number)
            tx.apply(Move((Change(replace(one, version=0), Event.SUBMITTED),)))
    put_job_usage(harness.store, [usage(attempt=number, cpu_s=number * 10.0) for number in (1, 2, 3)], 100.0)
    found = recorder._with_earlier_runs(usage(attempt=4, seconds=None), 3)
    assert (found.runs, found.earlier_s, found.earlier_cpu_s) == (3, 200.0, 50.0), "the first one began anew"


# --- the recorder ---------------------------------------------------------------------------------


class Site:
    """A job that runs, on a host that tells what `vms` use; `told` is what users were told."""

    def __init__(self) -> None:
        self.harness = PlannerHarness()
        self.vms: dict[str, VmUsage] = {}
        self.elsewhere: dict[str, dict[str, VmUsage]] = {}  # what other sources tell, by name
        self.error: Exception | None = None
        self.refusals: list[MultiverseError] = []
        self.told: list[tuple[JobRef, str]] = []
        self.counted: float | MultiverseError = 0.0
        self.recorder = self.again()

    def again(self) -> JobUsageRecorder:
        """The recorder of the next controller."""
        return JobUsageRecorder(self.harness.store, self.harness.state, self, self, self.harness.clock)

    async def used(self, source: str, span: float) -> Mapping[str, HostUsage]:
        if self.error is not None:
            raise self.error
        return {source: HostUsage(None, dict(self.elsewhere.get(source, self.vms)))}

    async def report(self, job: JobRef, text: str) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.told.append((job, text))

    async def cpu_seconds(self, job: JobRef) -> float:
        if isinstance(self.counted, MultiverseError):
            raise self.counted
        return self.counted

    def look(self) -> None:
        asyncio.run(self.recorder.look())

    def tell(self) -> None:
        async def all_of_them() -> None:
            while self.recorder._to_tell:
                await self.recorder._tell(self.recorder._to_tell.popleft()[1])

        asyncio.run(all_of_them())

    def begin(self) -> Vm:
        self.harness.to_allocated()
        (vm,) = self.harness.rows.vms.values()
        return vm

    def end(self) -> None:
        """The job has ended, and nothing of its VM is left."""
        self.harness.jobs.clear()
        for _ in range(6):
            self.harness.run()
            self.harness.clear()
        assert not self.harness.rows.attempts

    def kept(self) -> JobUsage:
        return read_job_usage(self.harness.store, [1])[1]


def test_a_job_is_followed_from_its_beginning_to_its_end() -> None:
    site = Site()
    site.look()
    vm = site.begin()
    site.vms[vm.name] = VmUsage(3.0, 150.0, memory=120.0)
    site.look()
    assert site.kept().baselines == (Baseline(vm.name, vm.place.source, 3.0, 120.0),) and site.kept().seconds is None
    site.look()
    site.harness.pass_time(100.0)
    site.vms[vm.name] = VmUsage(83.0, 420.0)
    site.end()
    site.look()
    done = site.kept()
    assert (done.cpu_s, done.peak, done.known) == (80.0, 300.0, 1)
    assert done.seconds == pytest.approx(100.0, abs=10.0) and done.job.job_id == "7"
    site.tell()
    assert site.told == [(done.job, done.text)]
    site.look()
    assert not list(site.recorder.running)


@pytest.mark.parametrize(
    ("seconds", "counted", "used"),
    [(100.0, 90.0, 90.0), (100.0, Unknown("away"), 20.0), (100.0, Refused("no accounting"), 20.0), (5.0, 90.0, 20.0)],
)
def test_of_a_long_run_the_accounting_is_asked_too(
    seconds: float, counted: float | MultiverseError, used: float
) -> None:
    site = Site()
    site.counted = counted
    put_job_usage(site.harness.store, [usage(seconds=seconds, cpu_s=20.0)], 1.0)
    site.recorder._to_tell.append((0.0, usage(seconds=seconds, cpu_s=20.0)))
    site.tell()
    ((_, text),) = site.told
    assert f"used {used / seconds:.2f} of 4 CPUs" in text and site.kept().text == text


def test_the_next_controller_goes_on_with_the_baseline() -> None:
    site = Site()
    vm = site.begin()
    site.vms[vm.name] = VmUsage(3.0, 150.0, memory=120.0)
    site.look()
    site.recorder = site.again()
    site.harness.pass_time(50.0)
    site.vms[vm.name] = VmUsage(53.0, 220.0)
    site.look()
    site.end()
    site.look()
    assert (site.kept().cpu_s, site.kept().peak) == (50.0, 100.0)


def test_a_job_that_began_unseen_counts_with_all_that_its_vm_used() -> None:
    site = Site()
    vm = site.begin()
    site.harness.pass_time(60.0)
    site.vms[vm.name] = VmUsage(33.0, 220.0, memory=200.0)
    site.look()
    site.end()
    site.look()
    assert (site.kept().cpu_s, site.kept().peak) == (33.0, 220.0) and site.kept().seconds == pytest.approx(
        60.0, abs=10.0
    )


def test_what_an_earlier_vm_of_that_name_used_is_not_taken_for_what_the_job_began_with() -> None:
    """A restored VM has the name of the VM that was saved, and may not have been sampled yet."""
    site = Site()
    vm = site.begin()
    site.vms[vm.name] = VmUsage(50.0, 150.0)
    site.look()
    site.vms[vm.name] = VmUsage(33.0, 220.0, memory=200.0)
    site.end()
    site.look()
    assert site.kept().cpu_s == 33.0


def test_a_vm_of_that_name_that_ended_on_another_host_is_not_the_jobs() -> None:
    site = Site()
    vm = site.begin()
    site.vms[vm.name] = VmUsage(3.0, 150.0, memory=120.0)
    site.look()
    lost = replace(usage(attempt=9, seconds=None), baselines=(Baseline("mvt-9", "far", 0.0, 0.0),))
    site.recorder._running[9] = lost
    site.elsewhere["far"] = {vm.name: VmUsage(500.0, 150.0)}
    site.vms[vm.name] = VmUsage(33.0, 220.0)
    site.end()
    site.look()
    assert site.kept().cpu_s == 30.0


def test_what_a_vm_used_where_it_was_before_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    vm = site.begin()
    here = vm.place.source
    site.elsewhere = {here: {vm.name: VmUsage(3.0, 150.0, memory=120.0)}, "there": {}}
    site.look()
    with monkeypatch.context() as changed:
        there = replace(vm, moves=1, places=(replace(vm.place, host="there", source="there"),))
        changed.setitem(site.harness.state.vms, vm.id, there)
        site.elsewhere = {here: {vm.name: VmUsage(63.0, 150.0)}, "there": {vm.name: VmUsage(2.0, 300.0, memory=300.0)}}
        site.look()
        assert site.kept().moved_s == 0.0, "not each look asks where the VMs are"
        site.harness.pass_time(history.MOVES_INTERVAL)
        site.look()
        assert (site.kept().moved_s, site.kept().baselines) == (60.0, (Baseline(vm.name, "there", 0.0, 120.0),))
        changed.setitem(site.harness.state.vms, vm.id, replace(vm, moves=2))  # and back, where it counts from 0 again
        site.elsewhere = {here: {vm.name: VmUsage(1.0, 300.0, memory=300.0)}, "there": {vm.name: VmUsage(7.0, 300.0)}}
        site.harness.pass_time(history.MOVES_INTERVAL)
        site.look()
    site.elsewhere = {here: {vm.name: VmUsage(5.0, 300.0)}, "there": {}}
    site.end()
    site.look()
    assert (site.kept().cpu_s, site.kept().known) == (72.0, 1)


@pytest.mark.parametrize("error", [Unknown("away"), TimeoutError()])
def test_of_a_host_that_does_not_answer_nothing_is_said(error: Exception) -> None:
    site = Site()
    site.begin()
    site.error = error
    site.look()
    site.end()
    site.look()
    site.tell()
    assert site.kept().known == 0 and site.kept().text == "" and site.told == []


def test_telling_is_tried_again_where_the_scheduler_is_busy_and_given_up_where_it_knows_the_job_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "TRY_PAUSE", 0.0)
    busy = Exhausted("busy")
    for refusals, told in (([busy, busy], 1), ([busy] * history.TRIES, 0), ([Gone("no such job")], 0)):
        site = Site()
        site.refusals = list(refusals)
        site.recorder._to_tell.append((0.0, usage()))
        site.tell()
        assert len(site.told) == told and not site.refusals


def test_a_full_disk_keeps_no_user_from_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()
    vm = site.begin()
    site.vms[vm.name] = VmUsage(3.0, 150.0, memory=120.0)

    def full(*_: object) -> None:
        raise Exhausted("full")

    monkeypatch.setattr(history, "put_job_usage", full)
    with pytest.raises(Exhausted):
        site.look()
    site.end()
    with pytest.raises(Exhausted):
        site.look()
    site.tell()
    assert len(site.told) == 1 and not read_job_usage(site.harness.store, [1])


def test_a_job_that_waits_is_not_followed() -> None:
    site = Site()
    site.harness.to_spawning()
    site.look()
    assert not list(site.recorder.running)
    assert site.harness.rows.attempts[1].state is not AttemptState.ALLOCATED
