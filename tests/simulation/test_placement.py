"""Placement on several hosts: many submissions at once fill no host beyond what may be claimed there."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from tests.sampled import one_in

from multiverse.config import PacingSettings, PlacementSettings, Settings
from multiverse.core.model.basics import Placement, Size
from multiverse.core.model.host import Host, Overcommitment
from multiverse_lab.simulation.faults import IncidentKind, Odds, every
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES, Machines
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

SITE = tuple(
    Host(f"h{number}", size, ABILITIES, Size(32, 65536, 0), "tcg", template_copies=1, overcommit=Overcommitment(times))
    for number, (size, times) in enumerate((
        (Size(8, 16384, 1 << 18), 1.0), (Size(4, 8192, 1 << 18), 2.0), (Size(16, 8192, 1 << 18), 1.0),
        (Size(8, 16384, 1 << 18), 1.5),
    ))
)  # fmt: skip
"""Hosts of three classes, two of which over-commit their CPUs."""


def crowd(seed: int, policy: str, count: int, **more: object) -> Scenario:
    """So many jobs within two seconds, some of several VMs, some with a policy of their own."""
    rng = Random(f"{seed}/crowd")
    arrivals = tuple(
        Arrival(
            rng.uniform(0.0, 2.0),
            Batch(
                seconds=rng.uniform(1.0, 20.0),
                size=rng.choice((Size(1, 200), Size(2, 900), Size(4, 500))),
                nodes=rng.choice((1, 1, 1, 1, 2, 5, 9)),
                priority=rng.randint(1, 3) * 1000,
                placement=rng.choice((None, None, *(one.value for one in Placement))),
            ),
        )
        for _ in range(count)
    )
    settings = Settings(pacing=PacingSettings(provisioning=64), placement=PlacementSettings(policy))
    return Scenario(seed, arrivals, WorldSettings(SITE), settings, limit=3000.0, **more)  # type: ignore[arg-type]


def keeps_its_promises(scenario: Scenario) -> Outcome:
    outcome = simulate(scenario)
    assert not outcome.violations, outcome.story()
    return outcome


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The most CPUs that each host carried. The world itself reports what is more than it may."""
    most: Counter[str] = Counter()
    check = Machines.check_capacity

    def checked(self: Machines, host: str) -> None:
        most[host] = max(most[host], self.used(host).cpus)
        check(self, host)

    monkeypatch.setattr(Machines, "check_capacity", checked)
    return most


@pytest.mark.parametrize("policy", one_in(2, [one.value for one in Placement]))
def test_many_submissions_at_once_fill_no_host_beyond_what_may_be_claimed(policy: str, carried: Counter[str]) -> None:
    """Jobs of several VMs get all of them or none, and none waits for ever for the rest."""
    outcome = keeps_its_promises(crowd(1, policy, 16))
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert carried["h1"] <= 8 and carried["h3"] <= 12


@pytest.mark.slow
def test_two_hundred_submissions_at_once_fill_no_host(carried: Counter[str]) -> None:
    outcome = keeps_its_promises(crowd(2, "random-fit", 200))
    assert set(outcome.results.values()) == {"COMPLETED"} and len(outcome.results) == 200
    assert 4 < carried["h1"] <= 8 and 8 < carried["h3"] <= 12, "where CPUs are over-committed, more are used"


def test_submissions_with_faults_fill_no_host() -> None:
    rng = Random("faults")
    incidents = tuple(
        one
        for kind in (IncidentKind.VM_DIES, IncidentKind.HOST_AWAY, IncidentKind.CONTROLLER_CRASH)
        for one in every(15.0, kind, rng, 60.0)
    )
    odds = Odds.even(0.05, 60.0)
    keeps_its_promises(crowd(3, "pack", 20, incidents=incidents, scheduler_odds=odds, hypervisor_odds=odds))
