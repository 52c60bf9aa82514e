"""The same core with each pair of scheduler and hypervisor, and what a missing ability means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.config import ImageSettings, PoolSettings, Settings
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import Host
from multiverse_lab.simulation.cloud import CLOUD_ABILITIES, QUOTA
from multiverse_lab.simulation.faults import FaultKind, Incident, IncidentKind, PlannedFault
from multiverse_lab.simulation.generate import PAIRS, with_faults, without_faults
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import Pair, WorldSettings

CLOUD = WorldSettings((Host(QUOTA, Size(4, 8192, 65536), CLOUD_ABILITIES, template_copies=0, vm_overhead=0),))
FULL = Settings(image=ImageSettings(kind=CloneKind.FULL))


def one(pair: Pair, batch: Batch, **more: object) -> Outcome:
    world = replace(CLOUD if pair.has_cloud else WorldSettings(), pair=pair)
    settings = FULL if pair.has_cloud else Settings()
    scenario = Scenario(7, (Arrival(1.0, batch),), world, settings)
    outcome = simulate(replace(scenario, **more))  # type: ignore[arg-type]
    assert not outcome.violations, outcome.story()
    return outcome


def test_the_seeds_are_shared_by_all_pairs() -> None:
    assert [with_faults(seed).world.pair for seed in range(4)] == list(PAIRS) == list(Pair)
    assert [without_faults(seed, Pair.GRID_CLOUD).world.pair for seed in range(4)] == [Pair.GRID_CLOUD] * 4


@pytest.mark.parametrize("pair", Pair)
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_job_runs_on_every_pair(pair: Pair, nodes: int) -> None:
    outcome = one(pair, Batch(nodes=nodes))
    assert list(outcome.results.values()) == ["COMPLETED"]


@pytest.mark.parametrize("pair", [Pair.SLURM_CLOUD, Pair.GRID_CLOUD])
def test_a_row_learns_the_address_that_the_cloud_assigned(pair: Pair) -> None:
    outcome = one(pair, Batch())
    (start,) = [call for call in outcome.calls if call.id == "h5"]
    identity = start.arguments[-1]
    assert identity.address.startswith("10.77.") and identity.mac.startswith("fa:16:3e:")  # type: ignore[attr-defined]
    assert not any(call.id in ("h2", "h3") for call in outcome.calls), "no template is built or deleted"


@pytest.mark.parametrize("pair", [Pair.SLURM_CLOUD, Pair.GRID_CLOUD])
def test_the_vms_of_a_rack_that_fails_are_replaced(pair: Pair) -> None:
    fails = Incident(90.0, IncidentKind.HOST_FENCED, 40.0)
    outcome = one(pair, Batch(seconds=100.0), incidents=(fails,))
    assert list(outcome.results.values()) == ["COMPLETED"] and any("rack" in line for line in outcome.journal)


@pytest.mark.parametrize("pair", [Pair.SLURM_HOSTS, Pair.GRID_HOSTS])
def test_a_job_gets_a_joined_spare_with_offers_and_without(pair: Pair) -> None:
    """Slurm lets the job take the spare as it is submitted. In the grid the controller ties the job to the spare."""
    pool = PoolSettings(depth=Depth.JOINED, min=1, memory=500)
    arrival = Arrival(50.0, Batch(size=Size(1, 500)))
    outcome = one(pair, Batch(), settings=Settings(pool=(pool,)), arrivals=(arrival,))
    assert list(outcome.results.values()) == ["COMPLETED"]
    offered = any(call.id == "s9" for call in outcome.calls)
    assert offered == (not pair.has_grid) and any(call.id == "h6" for call in outcome.calls)


@pytest.mark.parametrize("pair", [Pair.SLURM_HOSTS, Pair.GRID_HOSTS])
def test_a_job_is_not_tied_to_a_vm_that_is_being_destroyed(pair: Pair) -> None:
    """The first VM dies as it starts and takes minutes to be destroyed; the job is tied to the second one alone."""
    hung = tuple(PlannedFault(f"hypervisor.destroy mvsimul-1 #{n}", FaultKind.HUNG, 50.0) for n in (1, 2, 3))
    outcome = one(pair, Batch(seconds=3.0), faults=hung, incidents=(Incident(6.5, IncidentKind.VM_DIES),))
    assert list(outcome.results.values()) == ["COMPLETED"]
    assert not any("effect pin failed" in line for line in outcome.journal), outcome.story()


@pytest.mark.parametrize("pair", Pair)
def test_a_node_without_a_vm_is_deleted(pair: Pair) -> None:
    """The registration of a guest that is gone arrives after its node was deleted: only the scheduler shows it."""
    late = Incident(150.0, IncidentKind.REGISTERS_AGAIN)
    outcome = one(pair, Batch(seconds=1.0), incidents=(late,))
    assert any("is heard only now" in text for _, text in outcome.events)
