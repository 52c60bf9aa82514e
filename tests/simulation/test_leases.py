"""Hosts that are leased, in virtual time: each thing that happens to a pilot, at each moment of a job on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sampled import one_in

from multiverse.config import LeaseSettings, PacingSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse_lab.bench.leases import compare_leases
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import ControllerCrash, Incident, IncidentKind
from multiverse_lab.simulation.generate import leasing
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.pilots import PARTITION, PhysicalNodes
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import WorldSettings

K = IncidentKind
HOST = Host("h1", Size(1, 4096, 65536), ABILITIES, Size(2, 4096, 65536), "tcg")
LEASE = LeaseSettings(PARTITION, max=2, time_limit=600.0, min_wait=5.0, idle=30.0, start_timeout=20.0)
ENDS = (K.PILOT_PREEMPTED, K.PILOT_CANCELLED, K.PILOT_REQUEUED, K.PILOT_LOST, K.PILOT_NODE_DOWN)
MOMENTS = (7.0, 10.0, 14.0, 20.0, 40.0, 80.0)
"""Seconds: as the pilot waits, as it starts, as the template and the VM are made, while the job runs, and after."""


def scenario(*incidents: Incident, jobs: int = 2, crash: int = 0, lease: LeaseSettings = LEASE) -> Scenario:
    """Jobs of a minute that fit on a leased host alone, two at a time; a pilot waits for three seconds."""
    batch = Batch(seconds=60.0, size=Size(3, 500), limit=90.0)
    return Scenario(
        7,
        tuple(Arrival(1.0 + number, batch) for number in range(jobs)),
        WorldSettings(
            (HOST,),
            cluster=ClusterSettings(node_timeout=20.0, min_job_age=(2.0, 30.0)),
            physical=PhysicalNodes(2, wait=(3.0, 3.0)),
        ),
        Settings(pacing=PacingSettings(silence=10.0), lease=(lease,)),
        incidents=incidents,
        crashes=(ControllerCrash(crash, True, 5.0),) if crash else (),
        limit=6000.0,
    )


def leases(outcome: Outcome) -> int:
    """How many leases were asked for."""
    return outcome.transitions["lease: nothing - planned -> planned"]


def all_ran(outcome: Outcome) -> bool:
    return all(result == "COMPLETED" for result in outcome.results.values())


def test_jobs_run_on_a_leased_host_which_is_given_back_when_it_is_idle() -> None:
    outcome = simulate(scenario())
    assert not outcome.violations and all_ran(outcome)
    assert leases(outcome) == 1, "both jobs fit on one node"
    assert outcome.transitions["lease: idle - released -> releasing"] == 1
    assert outcome.transitions["lease: releasing - absent -> gone"] == 1


@pytest.mark.parametrize("at", one_in(2, MOMENTS))
@pytest.mark.parametrize("kind", ENDS)
def test_whatever_happens_to_a_pilot_each_job_runs_once_in_the_end(kind: IncidentKind, at: float) -> None:
    outcome = simulate(scenario(Incident(at, kind)))
    assert not outcome.violations and all_ran(outcome)


def test_a_jobs_end_is_explained_by_the_pilots_though_the_scheduler_shows_that_later() -> None:
    """Whoever tells first, the agent or the scheduler: no VM is taken for dead, and nothing new is put on the host."""
    first = set()
    for seed in range(7, 13):
        outcome = simulate(replace(scenario(Incident(40.0, K.PILOT_PREEMPTED)), seed=seed))
        assert not outcome.violations and all_ran(outcome)
        (why,) = (line for line in outcome.journal if "lease 1: held -> ending" in line)
        first.add("its agent says that the lease ends" in why)
        again = [line for line in outcome.journal if "reclaiming (restarted" in line]
        assert again and all("its pilot 9000001 is ending" in line for line in again)
        assert not any("(died" in line for line in outcome.journal)
    assert first == {True, False}


@pytest.mark.parametrize("at", one_in(2, MOMENTS))
@pytest.mark.parametrize("kind", ENDS)
def test_the_same_while_slurmctld_is_away(kind: IncidentKind, at: float) -> None:
    away = Incident(max(2.0, at - 2.0), K.CLUSTER_AWAY, 60.0)
    outcome = simulate(scenario(away, Incident(at, kind)))
    assert not outcome.violations and all_ran(outcome)


def test_an_outage_of_slurmctld_ends_no_job_on_a_leased_host() -> None:
    outcome = simulate(scenario(Incident(30.0, K.CLUSTER_AWAY, 200.0)))
    assert not outcome.violations and all_ran(outcome)
    assert len(outcome.runs) == 2, "none of them began twice"


@pytest.mark.parametrize("commit", range(4, 40, 3))
def test_a_controller_that_crashes_at_any_commit_forgets_no_lease(commit: int) -> None:
    outcome = simulate(scenario(Incident(40.0, K.PILOT_PREEMPTED), crash=commit))
    assert not outcome.violations and all_ran(outcome)


def test_a_lease_that_is_granted_after_it_was_given_up_is_released() -> None:
    """Its job is cancelled as the pilot is about to start, while slurmctld does not answer the controller."""
    made = scenario(Incident(7.5, K.CLUSTER_AWAY, 30.0), jobs=1)
    arrival = replace(made.arrivals[0], actions=(UserAction(5.5, "cancel"),))
    outcome = simulate(replace(made, arrivals=(arrival,)))
    assert not outcome.violations and leases(outcome) == 1
    assert outcome.transitions["lease: releasing - absent -> gone"] == 1


def test_no_lease_is_asked_for_again_and_again_where_hosts_stay_without_use() -> None:
    """The only job that waits can be on no leased host: nothing is leased at all."""
    made = scenario(jobs=1)
    small = replace(made.arrivals[0].batch, size=Size(1, 500), requeue=False)
    first = replace(small, seconds=200.0, limit=230.0)
    outcome = simulate(replace(made, arrivals=(Arrival(1.0, first), Arrival(2.0, small))))
    assert not outcome.violations and all_ran(outcome) and leases(outcome) == 0


@pytest.mark.parametrize("seed", one_in(2, range(24)))
def test_histories_with_leases_keep_all_promises(seed: int) -> None:
    assert simulate(leasing(seed)).violations == []


def test_leases_follow_bursts_without_oscillating() -> None:
    found = compare_leases(hours=3.0)
    leasing = found.leasing
    assert leasing.leases > 1 and (leasing.unused, leasing.again) == (0, 0)
    assert 0.0 < leasing.used <= leasing.leased < found.always.leased
    assert leasing.mean_wait < found.without.mean_wait
    assert (leasing.moves, found.packing.unused, found.packing.again) == (0, 0, 0)
    assert found.packing.moves > 0 and found.packing.leased < leasing.leased
