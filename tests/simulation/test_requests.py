"""Requests beside the size: a bandwidth, so many VMs on a host, and sockets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import Job
from multiverse_lab.simulation.cluster import Cluster
from multiverse_lab.simulation.generate import requesting
from multiverse_lab.simulation.jobs import Batch, JobRecord
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import Pair, WorldSettings

HOSTS = tuple(Host(f"h{n}", Size(8, 16384, 65536, 1000), ABILITIES, Size(8, 16384, 65536), "tcg") for n in (1, 2))


def scenario(*batches: Batch, hosts: tuple[Host, ...] = HOSTS, pair: Pair = Pair.SLURM_HOSTS) -> Scenario:
    arrivals = tuple(Arrival(1.0 + number, batch) for number, batch in enumerate(batches))
    return Scenario(3, arrivals, WorldSettings(hosts, pair=pair))


def test_jobs_whose_bandwidth_does_not_fit_together_run_one_after_the_other() -> None:
    batch = Batch(seconds=20.0, size=Size(1, 500, net=600))
    outcome = simulate(scenario(batch, batch, hosts=HOSTS[:1]))
    assert not outcome.violations and set(outcome.results.values()) == {"COMPLETED"}
    (_, _, ended), (_, began, _) = sorted(outcome.runs, key=lambda run: run[1])
    assert ended < began


@pytest.mark.parametrize("pair", [Pair.SLURM_HOSTS, Pair.GRID_HOSTS])
def test_at_most_so_many_vms_of_a_job_are_on_one_host(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = scenario(Batch(nodes=2, size=Size(1, 500), per_host=1), pair=pair)
    outcome = simulate(apart)
    assert not outcome.violations and set(outcome.results.values()) == {"COMPLETED"}
    shown = JobRecord.shown

    def without(job: JobRecord, *arguments: Any, **more: Any) -> Job:
        seen = shown(job, *arguments, **more)
        return seen._replace(request=seen.request and replace(seen.request, per_host=0))

    monkeypatch.setattr(JobRecord, "shown", without)
    monkeypatch.setattr(Cluster, "_allows", lambda cluster, batch: True)
    violations = simulate(replace(apart, world=WorldSettings(HOSTS[:1], pair=pair))).violations
    assert any("VMs on a host at most" in text for text in violations), "the world notices a placement that ignores it"


def test_a_job_with_sockets_gets_a_node_that_has_them() -> None:
    outcome = simulate(scenario(Batch(size=Size(2, 500), sockets=2)))
    assert not outcome.violations and set(outcome.results.values()) == {"COMPLETED"}


def test_there_are_scenarios_with_each_of_these_requests() -> None:
    found = [requesting(seed) for seed in range(40)]
    batches = [one.batch for scenario in found for one in scenario.arrivals]
    assert any(batch.size.net for batch in batches) and any(batch.per_host for batch in batches)
    assert any(batch.sockets > 1 for batch in batches)
    assert all(batch.size.cpus % batch.sockets == 0 for batch in batches)
    assert any(host.capacity.net for scenario in found for host in scenario.world.hosts)
    assert not any(scenario.world.pair.has_cloud for scenario in found)


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_promises_are_kept_with_requests(first: int) -> None:
    for seed in range(first, first + 8):
        assert not simulate(requesting(seed)).violations, f"seed {seed}"
