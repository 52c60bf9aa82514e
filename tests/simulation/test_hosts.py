"""Hosts that operators drain and remove, that die, and that are cut off: over real connections to real agents, in
virtual time. A job never runs twice, whatever the fence command does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sampled import one_in

from multiverse.config import FenceSettings, PacingSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import Incident, IncidentKind
from multiverse_lab.simulation.generate import operated
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.network import AgentBehaviour
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

HOSTS = tuple(Host(f"h{n}", Size(4, 8192, 65536), ABILITIES, Size(4, 16384), "tcg") for n in range(3))
FENCE = FenceSettings(("fence", "{host}"), after=30.0)


def scenario(
    *incidents: Incident,
    hosts: int = 3,
    fence: FenceSettings = FENCE,
    jobs: int = 4,
    agents: AgentBehaviour = AgentBehaviour(),  # noqa: B008
) -> Scenario:
    """Hosts behind agents, and jobs of two minutes that fill more than one host."""
    arrivals = tuple(Arrival(1.0 + n, Batch(seconds=120.0, size=Size(2, 500), limit=150.0)) for n in range(jobs))
    world = WorldSettings(
        HOSTS[:hosts], cluster=ClusterSettings(node_timeout=20.0, min_job_age=(2.0, 30.0)), agents=agents
    )
    settings = Settings(pacing=PacingSettings(silence=10.0), fence=fence)
    return Scenario(7, arrivals, world, settings, incidents=incidents, limit=4000.0)


def outcome_of(one: Scenario) -> Outcome:
    outcome = simulate(one)
    assert outcome.violations == []
    return outcome


def said(outcome: Outcome, text: str) -> int:
    return sum(text in line for _, line in outcome.events)


@pytest.mark.parametrize("seed", one_in(2, range(6)))
def test_whatever_happens_to_hosts_no_promise_is_broken(seed: int) -> None:
    outcome_of(operated(seed))


def test_a_dead_host_is_fenced_by_command_and_its_jobs_run_elsewhere() -> None:
    outcome = outcome_of(scenario(Incident(40.0, IncidentKind.HOST_CRASHES, 3000.0, pick=0.0)))
    assert outcome.transitions["host: fencing - fenced -> fenced"] == 1
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert outcome.seconds > 3000, "the host came back at the end"
    assert said(outcome, "the fence command") >= 1


def test_without_a_fence_command_the_jobs_of_a_dead_host_wait_until_it_is_back() -> None:
    crash = Incident(40.0, IncidentKind.HOST_CRASHES, 900.0, pick=0.0)
    outcome = outcome_of(scenario(crash, fence=FenceSettings()))
    assert outcome.transitions["host: known - silent -> silent"] == 1
    assert not any("fenc" in name for name in outcome.transitions)
    assert set(outcome.results.values()) == {"COMPLETED"}


def test_a_host_whose_agent_is_not_reached_is_not_fenced_while_its_nodes_answer() -> None:
    incidents = (
        Incident(40.0, IncidentKind.LINK_HANGS, 600.0, 0.0),
        Incident(45.0, IncidentKind.AGENT_DIES, 500.0, 0.4),
    )
    outcome = outcome_of(scenario(*incidents))
    assert not any(name.startswith("host: known - silent") for name in outcome.transitions)
    assert set(outcome.results.values()) == {"COMPLETED"} and said(outcome, "restart 1") == 0


def test_a_controller_that_is_cut_off_from_all_hosts_fences_none() -> None:
    """Though the nodes of two hosts have gone DOWN, because these are cut off from everybody."""
    away = (Incident(40.0, IncidentKind.HOST_AWAY, 400.0, 0.0), Incident(41.0, IncidentKind.HOST_AWAY, 400.0, 0.4))
    outcome = outcome_of(scenario(Incident(42.0, IncidentKind.LINK_HANGS, 400.0, 0.9), *away))
    assert outcome.transitions["host: known - silent -> silent"] >= 1
    assert outcome.transitions["host: silent - fence -> fencing"] == 0
    assert said(outcome, "the fence command") == 0


def test_a_host_is_drained_removed_and_added_while_jobs_run() -> None:
    outcome = outcome_of(scenario(Incident(30.0, IncidentKind.HOST_REMOVED, 60.0, pick=0.0), jobs=6))
    assert outcome.transitions["host: known - removed -> removed"] == 1
    assert outcome.transitions["host: removed - added -> known"] == 1
    assert set(outcome.results.values()) == {"COMPLETED"} and said(outcome, "restart 1") == 0


def test_a_drain_in_time_keeps_jobs_off_that_would_not_end_by_then() -> None:
    """Two hosts: until the drain of the first one begins, only jobs that end by then are placed there."""
    short = Arrival(8.0, Batch(seconds=20.0, size=Size(2, 500), limit=30.0))
    one = scenario(Incident(0.5, IncidentKind.HOST_CLOSING, 200.0, pick=0.0), hosts=2, jobs=3)
    outcome = outcome_of(replace(one, arrivals=(*one.arrivals, short)))
    admitted = [line for _, line in outcome.events if "admitted" in line]
    first = [line for line in admitted if "on h0" in line]
    assert len(admitted) == 4 and len(first) >= 1
    assert set(outcome.results.values()) == {"COMPLETED"}


# --- agents that end their VMs by themselves ---------------------------------------------------------


def test_the_jobs_of_a_host_that_has_ended_its_vms_by_itself_run_elsewhere_while_it_is_away() -> None:
    away = Incident(40.0, IncidentKind.HOST_AWAY, 3000.0, pick=0.0)
    outcome = outcome_of(scenario(away, fence=FenceSettings(), agents=AgentBehaviour(self_fence=60.0)))
    assert outcome.transitions["host: silent - fenced -> fenced"] == 1
    assert said(outcome, "by itself") >= 2, "an agent says so, and the controller"
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert max(ended for _, _, ended in outcome.runs) < 1000


def test_no_vm_is_ended_by_its_host_by_default() -> None:
    away = Incident(40.0, IncidentKind.HOST_AWAY, 900.0, pick=0.0)
    outcome = outcome_of(scenario(away, fence=FenceSettings()))
    assert said(outcome, "by itself") == 0 and not any("fenc" in name for name in outcome.transitions)


@pytest.mark.parametrize("kind", [IncidentKind.CONTROLLER_CUT_OFF, IncidentKind.CLUSTER_AWAY])
def test_no_vm_is_ended_while_either_the_controller_or_the_scheduler_reaches_it(kind: IncidentKind) -> None:
    outcome = outcome_of(scenario(Incident(40.0, kind, 900.0), agents=AgentBehaviour(self_fence=60.0)))
    assert said(outcome, "by itself") == 0 and said(outcome, "restart 1") == 0
    assert set(outcome.results.values()) == {"COMPLETED"}


@pytest.mark.parametrize("seconds", [40.0, 50.0, 54.0, 58.0, 62.0, 70.0])
def test_no_vm_is_ended_once_the_scheduler_is_back_while_an_agent_asks_it(seconds: float) -> None:
    """Its command had begun before, and tries again."""
    alone = Incident(40.0, IncidentKind.CONTROLLER_CUT_OFF, 900.0)
    away = Incident(41.0, IncidentKind.CLUSTER_AWAY, seconds)
    outcome = outcome_of(scenario(alone, away, agents=AgentBehaviour(self_fence=60.0)))
    assert set(outcome.results.values()) == {"COMPLETED"}


# --- who commands, and of which release ---------------------------------------------------------------


def test_of_two_controllers_the_older_ends_and_no_job_notices() -> None:
    outcome = outcome_of(scenario(Incident(20.0, IncidentKind.CONTROLLER_RIVAL, 200.0)))
    assert said(outcome, "the controller run-0 ends: another controller of site") == 1
    assert set(outcome.results.values()) == {"COMPLETED"} and said(outcome, "restart 1") == 0


def test_jobs_go_on_while_agents_of_other_releases_run_and_answer_late_and_twice() -> None:
    replaced = (Incident(10.0 + 15 * n, IncidentKind.AGENT_REPLACED, 60.0, pick=n / 9) for n in range(9))
    outcome = outcome_of(scenario(*replaced, agents=AgentBehaviour(late=0.05, twice=0.5)))
    releases = [line.split()[-1] for _, line in outcome.events if "is of release" in line]
    assert {"0.9", "1.1"} & {*releases} and {"0.8", "2.0"} & {*releases}
    assert set(outcome.results.values()) == {"COMPLETED"} and said(outcome, "restart 1") == 0
