"""A partition of physical nodes that overflows into VMs: what becomes of its jobs, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sampled import one_in

from multiverse.config import OverflowSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.generate import OVERFLOWING_PARTITION, overflowing
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import WorldSettings

HOST = Host("h1", Size(2, 4096, 65536), ABILITIES, Size(2, 4096, 65536), "tcg")
JOB = Batch(seconds=60.0, origin=OVERFLOWING_PARTITION, limit=300.0)


def outcome_of(*arrivals: Arrival, min_wait: float = 5.0, nodes: int = 1) -> Outcome:
    """With one host of two CPUs, and so many physical nodes."""
    cluster = ClusterSettings(min_wait=min_wait)
    world = WorldSettings((HOST,), cluster=cluster, overflowing=nodes)
    settings = Settings(overflow=(OverflowSettings(OVERFLOWING_PARTITION, min_wait=min_wait),))
    outcome = simulate(Scenario(1, arrivals, world, settings))
    assert not outcome.violations, outcome.story()
    return outcome


def begun(outcome: Outcome) -> list[str]:
    """Where scripts began, in the order of the jobs' ids."""
    words = (line.split() for line in outcome.story().splitlines() if "the script of" in line and "begins" in line)
    return [node.rstrip(":") for _, node in sorted((line[5], line[1]) for line in words)]


def test_jobs_that_find_the_nodes_taken_run_in_vms_and_no_others() -> None:
    outcome = outcome_of(*(Arrival(1.0 + n / 10, JOB) for n in range(3)))
    places = begun(outcome)
    assert places[0] == "p1" and all(place.startswith("mv") for place in places[1:])
    assert outcome.transitions["attempt: nothing - submitted -> queued"] == 2
    assert set(outcome.results.values()) == {"COMPLETED"}


def test_a_job_starts_on_a_physical_node_that_is_free_before_its_vm() -> None:
    """The first job ends as the template of the other's VM is being built."""
    outcome = outcome_of(Arrival(1.0, replace(JOB, seconds=8.0)), Arrival(1.1, JOB))
    assert begun(outcome) == ["p1", "p1"]
    assert outcome.transitions["attempt: queued - cancelled -> reclaiming"] == 1


@pytest.mark.parametrize(
    "batch",
    [replace(JOB, nodes=2), replace(JOB, requeue=False), replace(JOB, problem="it asks for a GPU")],
)
def test_a_job_that_a_vm_cannot_serve_waits_for_physical_nodes(batch: Batch) -> None:
    outcome = outcome_of(Arrival(1.0, replace(JOB, nodes=2)), Arrival(1.1, batch), nodes=2)
    assert begun(outcome) == ["p1", "p1"] and not outcome.transitions["attempt: nothing - submitted -> queued"]


def test_a_job_of_which_no_host_holds_a_vm_is_not_cancelled() -> None:
    outcome = outcome_of(Arrival(1.0, JOB), Arrival(1.1, replace(JOB, size=Size(16, 100))))
    assert begun(outcome) == ["p1", "p1"] and set(outcome.results.values()) == {"COMPLETED"}


def test_jobs_at_the_gate_come_before_those_of_physical_nodes() -> None:
    """The host has room for one VM of each size; the job at the gate came last."""
    wide = replace(JOB, size=Size(2, 100))
    outcome = outcome_of(Arrival(1.0, JOB), Arrival(1.1, wide), Arrival(1.2, replace(wide, origin="")), nodes=1)
    places = begun(outcome)
    assert places[:2] == ["p1", "p1"] and places[2].startswith("mv")


def test_a_job_that_was_moved_and_queued_again_goes_back_to_its_partition() -> None:
    again = (UserAction(30.0, "requeue"),)
    outcome = outcome_of(Arrival(1.0, replace(JOB, seconds=300.0)), Arrival(1.1, JOB, actions=again))
    assert outcome.transitions["attempt: queued - sent back -> restoring"] == 1
    assert outcome.transitions["attempt: restoring - at the gate -> queued"] == 1
    assert set(outcome.results.values()) == {"COMPLETED"}


@pytest.mark.parametrize("first", one_in(2, range(0, 40, 10)))
def test_promises_are_kept_with_a_partition_that_overflows(first: int) -> None:
    for seed in range(first, first + 10):
        outcome = simulate(overflowing(seed))
        assert not outcome.violations, outcome.story()
