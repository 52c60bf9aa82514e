"""What `multiverse bench throughput` computes: the parts of a CPU's time, the computing share, and what bounds it."""

from __future__ import annotations

import os
import socket
import time
from itertools import count

import pytest
from typer.testing import CliRunner

from multiverse.api import PhaseView, TimelineEntry, TimelineView
from multiverse.cli.commands import build
from multiverse.core.transition import Event
from multiverse_lab.bench.throughput import (
    TaskReports,
    ThroughputPlan,
    ThroughputSamples,
    bounded_by,
    paper,
    result,
    stages,
    took_spare,
)

PLAN = ThroughputPlan(tasks=2, seconds=1.0, cpus=1)


def _task(job: str, claimed: float, *, reason: str = "") -> TimelineView:
    """One that has its node after a second, and is reclaimed in half a second."""
    phases = (
        PhaseView("queued", 0.0, claimed),
        PhaseView("clone", claimed, 0.25),
        PhaseView("join", claimed + 0.25, 0.75),
        PhaseView("launch", claimed + 1.0, 2.0),
        PhaseView("run", claimed + 3.0, 0.0),
        PhaseView("reclaim", claimed + 3.0, 0.5),
    )
    return TimelineView(job, 1, "done", 0.0, phases, (TimelineEntry(0.0, "vm 1", Event.PLANNED, "planned", reason),))


def _samples() -> ThroughputSamples:
    """Two tasks one after the other, each claimed a second after the CPU was free."""
    first, second = _task("7_1", 11.0), _task("7_2", 15.5)
    return ThroughputSamples(
        10.0, {"7_1": 12.5, "7_2": 17.0}, {"7_1": 13.5, "7_2": 18.0}, [first, second], 0.5, {"controller": 0.1}
    )


def test_the_parts_of_a_cpus_time_are_all_of_it() -> None:
    parts = stages(_samples(), PLAN)
    assert parts == pytest.approx(
        {"clone": 0.25, "join": 0.75, "start": 0.5, "task": 1.0, "end": 0.25, "reclaim": 0.25, "free": 1.0}
    ), "what comes after the end of the last task is not counted"
    assert sum(parts.values()) == pytest.approx((18.0 - 10.0) / 2)


def test_on_bare_metal_a_cpu_is_free_between_its_tasks() -> None:
    bare = ThroughputSamples(10.0, {"7_1": 11.0, "7_2": 13.0}, {"7_1": 12.0, "7_2": 14.0})
    assert stages(bare, PLAN) == {"task": 1.0, "free": 1.0}


def test_the_figures_count_from_the_submission_to_the_end_of_the_last_task() -> None:
    found = result(_samples(), PLAN)
    assert found.all_ran == 8.0 and found.tasks_per_minute == 15.0 and found.computing == 0.25
    assert found.again == 0 and found.spares == 0


def test_an_attempt_that_was_given_up_counts_as_again_and_holds_a_cpu() -> None:
    samples = _samples()
    lost = TimelineView("7_1", 1, "requeued", 0.0, (PhaseView("clone", 10.0, 0.5),), ())
    samples.timelines.append(lost)
    assert result(samples, PLAN).again == 1
    assert stages(samples, PLAN)["clone"] == pytest.approx(0.5) and stages(samples, PLAN)["free"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("event", "state", "took"),
    [
        (Event.TAKEN, "joined", True),
        (Event.TOOK, "adding_user", True),
        (Event.TAKEN, "parked", False),
        (Event.PLANNED, "planned", False),
    ],
)
def test_only_a_joined_spare_counts_as_found(event: Event, state: str, took: bool) -> None:
    one = TimelineView("7", 1, "done", 0.0, (), (TimelineEntry(0.0, "vm 1", event, state, ""),))
    assert took_spare(one) is took


def test_what_bounds_is_the_machine_then_a_daemon_then_the_longest_part() -> None:
    cpus = os.cpu_count() or 1
    parts = {"join": 4.0, "task": 1.0, "free": 0.5}
    busy = {"controller": 0.9 * cpus, "slurmctld": 0.001}
    assert bounded_by(parts, 0.95, busy) == f"this machine's {cpus} CPUs: 95% busy (controller 90%, all else 5%)"
    assert bounded_by(parts, 0.6, {"controller": 0.9}) == "controller: it uses 90% of one CPU"
    assert bounded_by(parts, 0.6, {"slurmctld": 0.99, "controller": 0.2}) == "slurmctld: it uses 99% of one CPU"
    assert bounded_by(parts, 0.6, {"agent": 1.5}) == "the stage join: 4.00 of the 5.50 s that a CPU spends on a task"
    assert bounded_by({"task": 1.0, "free": 0.5}, 0.1, {}).startswith("the tasks themselves: 1.00 of the 1.50 s")
    assert bounded_by({"task": 1.0, "free": 1.5}, 0.1, {}).startswith("the wait of free CPUs for their next task")


def test_the_paper_provisions_all_cpus_at_once() -> None:
    found = paper(ThroughputPlan(500, 1.0, 8))
    assert found["tasks_per_minute"] == pytest.approx(8 * 60 / 37) and found["computing"] == pytest.approx(1 / 37)


def test_a_task_reports_its_beginning_and_its_end() -> None:
    with TaskReports("127.0.0.1", 1.0) as reports:
        port = int(reports.script.split("/dev/tcp/127.0.0.1/")[1].split()[0])
        with socket.create_connection(("127.0.0.1", port)) as one, socket.create_connection(("127.0.0.1", port)) as two:
            one.sendall(b"7_1\n")
            two.sendall(b"7_2\n")
            deadline = time.monotonic() + 10
            while len(reports.began) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert set(reports.began) == {"7_1", "7_2"} and not reports.ended
            one.sendall(b"end\n")
            seen = list[int]()
            alive = count()
            assert reports.wait(["7_1"], 10.0, seen.append, lambda: next(alive) < 1000) == []
            assert seen == [1] and reports.ended["7_1"] >= reports.began["7_1"]
        assert reports.wait(["7_2"], 0.3, seen.append, lambda: True) == ["7_2"], "it never said that it had ended"


def test_kinds_that_there_are_not_are_refused() -> None:
    done = CliRunner().invoke(build(), ["bench", "throughput", "--kinds", "full"])
    assert done.exit_code != 0 and "no such kind: full" in str(done.exception)
