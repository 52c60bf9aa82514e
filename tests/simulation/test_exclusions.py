"""A user who calls `sbatch --test-only` in a loop takes offered spares, and no job comes for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.config import PoolSettings, Settings
from multiverse.core import pools
from multiverse.core.model.basics import Depth, Size
from multiverse.core.transition import Event
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import FaultKind, Incident, IncidentKind, PlannedFault
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

TESTER = 1002
TIMES = (15.0, 100.0, 200.0, 300.0, 400.0, 500.0)
SCENARIO = Scenario(
    7,
    tuple(Arrival(at, Batch(uid=1000, seconds=2.0, size=Size(1, 500))) for at in TIMES),
    WorldSettings(cluster=ClusterSettings(tester=TESTER, tests_end=600.0)),
    Settings(pool=(PoolSettings(depth=Depth.JOINED, min=1, max=2, memory=500),)),
)


def count(outcome: Outcome, event: Event) -> int:
    return sum(entry.event == event for entry in outcome.entries)


@pytest.mark.parametrize("seed", range(5))
def test_other_users_jobs_start_and_take_spares_and_few_are_made_in_vain(seed: int) -> None:
    outcome = simulate(replace(SCENARIO, seed=seed))
    assert not outcome.violations, outcome.story()
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert count(outcome, Event.TOOK) >= 4
    assert count(outcome, Event.MISSED) <= 8, "each exclusion is twice as long as the one before"


def test_without_exclusions_the_user_would_have_spares_made_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverse.controller.learned.Exclusions.excluded", lambda *_: frozenset())
    outcome = simulate(SCENARIO)
    assert count(outcome, Event.MISSED) > 20


def test_a_users_own_jobs_start_at_the_gate_while_the_user_is_excluded() -> None:
    cluster = replace(SCENARIO.world.cluster, tester=1000)
    outcome = simulate(replace(SCENARIO, world=replace(SCENARIO.world, cluster=cluster)))
    assert not outcome.violations and set(outcome.results.values()) == {"COMPLETED"}, outcome.story()


@pytest.mark.parametrize("fault", [FaultKind.FAILED, FaultKind.HUNG, FaultKind.LOST, FaultKind.CUT, FaultKind.TWICE])
def test_an_exclusion_that_fails_is_repeated(fault: FaultKind) -> None:
    faults = tuple(PlannedFault(f"scheduler.exclude #{number}", fault, 1.0) for number in (1, 2))
    outcome = simulate(replace(SCENARIO, faults=faults))
    assert not outcome.violations and set(outcome.results.values()) == {"COMPLETED"}, outcome.story()
    assert len(outcome.faults) == 2 and count(outcome, Event.MISSED) <= 8


def test_a_restart_forgets_an_exclusion_and_the_next_spare_in_vain_begins_it_anew() -> None:
    crash = Incident(60.0, IncidentKind.CONTROLLER_CRASH, 1.0)
    outcome = simulate(replace(SCENARIO, incidents=(crash,)))
    assert not outcome.violations and set(outcome.results.values()) == {"COMPLETED"}, outcome.story()
    assert count(outcome, Event.TOOK) >= 3 and count(outcome, Event.MISSED) <= 10


def test_the_world_reports_a_pool_that_grows_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "awaiting_job", lambda state: [])
    violations = simulate(SCENARIO).violations
    assert any("pool of slim may have 2 spares, and has 5" in violation for violation in violations), violations


@pytest.mark.parametrize("fault", [FaultKind.FAILED, FaultKind.LOST, FaultKind.CUT, FaultKind.TWICE])
def test_an_offer_that_fails_is_repeated(fault: FaultKind) -> None:
    faults = tuple(PlannedFault(f"scheduler.offer mvsimul-{number} #1", fault, 1.0) for number in (1, 2, 3))
    outcome = simulate(replace(SCENARIO, faults=faults))
    assert [one.call for one in outcome.faults if one.call.startswith("scheduler.offer")], outcome.story()
    assert not outcome.violations and set(outcome.results.values()) == {"COMPLETED"}, outcome.story()
