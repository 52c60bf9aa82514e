"""What fails again and again is braked: hosts on which VMs fail, and launches of a user's jobs that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sampled import one_in

from multiverse.config import PacingSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import Attempt
from multiverse.core.policy import Policy
from multiverse_lab.simulation.faults import Incident, IncidentKind
from multiverse_lab.simulation.generate import failing
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings


def host(name: str, cpus: int) -> Host:
    return Host(name, Size(cpus, 16384, 65536), ABILITIES, Size(8, 16384, 65536), "tcg")


BROKEN = Scenario(
    3,
    tuple(Arrival(10.0 + 20.0 * number, Batch(seconds=5.0)) for number in range(30)),
    WorldSettings((host("h0", 8), host("h1", 4))),
    Settings(pacing=PacingSettings(attempts=2)),
    incidents=(Incident(0.0, IncidentKind.HOST_REFUSES, 1e9, 0.0),),
)
"""The emptiest host creates no VM, for ever."""

UNLAUNCHABLE = Scenario(
    5,
    (Arrival(1.0, Batch(uid=1000)),),
    WorldSettings((host("h0", 8),)),
    incidents=(Incident(0.0, IncidentKind.LAUNCHES_FAIL, 600.0, 0.0),),
)
"""slurmctld makes no credentials for the job's user for ten minutes."""


@pytest.mark.parametrize("seed", one_in(2, range(6)))
def test_what_fails_is_braked(seed: int) -> None:
    outcome = simulate(failing(seed))
    assert not outcome.violations, outcome.story()


@pytest.mark.parametrize("kind", [IncidentKind.HOST_REFUSES, IncidentKind.HOST_SPOILS, IncidentKind.HOST_MUTES])
def test_jobs_run_on_the_other_host_and_the_broken_one_is_tried_ever_less_often(kind: IncidentKind) -> None:
    outcome = simulate(replace(BROKEN, incidents=(Incident(0.0, kind, 1e9, 0.0),)))
    assert not outcome.violations, outcome.story()
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert 2 <= outcome.transitions["host: known - avoided -> known"] <= 12, outcome.transitions


def test_slurms_delay_is_waited_for() -> None:
    outcome = simulate(UNLAUNCHABLE)
    assert not outcome.violations, outcome.story()
    assert list(outcome.results.values()) == ["COMPLETED"]


@pytest.mark.slow
def test_the_world_notices_a_host_that_is_chosen_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverse.core.context.avoided", lambda *_: frozenset())
    found = simulate(replace(BROKEN, limit=900.0)).violations
    assert any("VMs of slim were tried on h0, where they fail" in one for one in found)


def test_the_world_notices_a_failure_of_a_host_that_counts_as_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverse.core.machines.attempt.whose_fault", lambda _: "job")
    found = simulate(replace(BROKEN, limit=900.0)).violations
    assert any("was charged for the failures" in one for one in found)


def test_the_world_notices_a_run_before_slurms_delay_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "at_once", property(lambda self: self.job.restarts > 0))
    found = simulate(replace(UNLAUNCHABLE, limit=900.0)).violations
    assert any("before slurmctld's delay was over" in one for one in found)


def test_the_world_notices_a_hot_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempt, "at_once", property(lambda self: self.job.restarts > 0))
    monkeypatch.setattr(Policy, "pause_after", lambda *_, **__: 0.0)
    monkeypatch.setattr("multiverse.core.machines.attempt.MOST_SHORT_RUNS", 1000)
    found = simulate(replace(UNLAUNCHABLE, limit=900.0)).violations
    assert any("sets of VMs in ten minutes" in one for one in found), found
