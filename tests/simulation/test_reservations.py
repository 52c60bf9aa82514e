"""Reservations of all nodes, backfill that plans to use nodes, and a slurmctld that counts jobs twice, in virtual
time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sampled import one_in

from multiverse.config import PoolSettings, Settings
from multiverse.core.model.basics import Depth, Size
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import Incident, IncidentKind
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.scheduler import SimulatedSlurm
from multiverse_lab.simulation.world import Pair, WorldSettings

NOW, SOON, LATER = 0.0, 0.001, 0.002  # `Incident.pick`: when the reservation begins


def scenario(*incidents: Incident, cluster: ClusterSettings | None = None, pair: Pair = Pair.SLURM_HOSTS,
             jobs: int = 1, seconds: float = 10.0, settings: Settings | None = None) -> Scenario:  # fmt: skip
    arrivals = tuple(Arrival(1.0 + 3 * each, Batch(seconds=seconds, size=Size(1, 64))) for each in range(jobs))
    world = WorldSettings(cluster=cluster or ClusterSettings(), pair=pair)
    return Scenario(7, arrivals, world, settings or Settings(), incidents=incidents)


@pytest.mark.parametrize("pair", [Pair.SLURM_HOSTS, Pair.GRID_HOSTS])
@pytest.mark.parametrize("pick", [NOW, SOON, LATER])
@pytest.mark.parametrize("at", one_in(2, [0.5, 2.0, 4.0, 8.0, 16.0]))
def test_whenever_all_nodes_are_reserved_each_job_runs_once_and_nothing_is_left(
    pair: Pair, pick: float, at: float
) -> None:
    pools = Settings(pool=(PoolSettings("slim", depth=Depth.JOINED, min=1, max=2),))
    reserved = Incident(at, IncidentKind.RESERVED, 60.0, pick)
    outcome = simulate(scenario(reserved, pair=pair, jobs=3, settings=pools))
    assert not outcome.violations, outcome.story()
    assert list(outcome.results.values()) == ["COMPLETED"] * 3


def test_a_node_whose_job_was_counted_twice_is_deleted_though_slurmctld_never_gives_it_up() -> None:
    never = ClusterSettings(node_timeout=1e6)
    outcome = simulate(scenario(Incident(8.0, IncidentKind.RECONFIGURED), cluster=never))
    assert not outcome.violations, outcome.story()
    assert list(outcome.results.values()) == ["COMPLETED"]


def test_a_vm_of_which_no_record_tells_is_released_though_slurmctld_counts_its_job_for_ever() -> None:
    """Seed 10301144: the database is lost, and slurmctld reads its configuration, while the job runs."""
    never = ClusterSettings(node_timeout=1e6)
    incidents = (Incident(9.0, IncidentKind.DATABASE_LOST), Incident(12.0, IncidentKind.RECONFIGURED))
    outcome = simulate(scenario(*incidents, cluster=never, seconds=30.0))
    assert not outcome.violations, outcome.story()
    assert list(outcome.results.values()) == ["COMPLETED"]


def test_the_world_notices_a_driver_that_deletes_nodes_which_backfill_plans_to_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = ClusterSettings(cycle=10.0, bf_interval=(0.3, 1.0), bf_cycle=(8.0, 12.0))
    short = scenario(cluster=busy, jobs=40, seconds=0.5)
    assert not (outcome := simulate(short)).violations, outcome.story()
    monkeypatch.setattr(SimulatedSlurm, "_may_be_planned", lambda *_: False)
    violations = simulate(replace(short)).violations
    assert any("slurmctld crashes" in one for one in violations), violations
