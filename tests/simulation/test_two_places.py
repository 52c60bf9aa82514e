"""A VM with two places, either of which may be lost, with the real controller and store in the simulated world.

There are no moves yet. The simulation gives a VM that runs a job a second place, as a move will, and holds the VM there
too; the controller has to hold a claim at each place, free it only when nothing is left there, and leave nothing.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from tests.sampled import one_in

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse_lab.simulation.faults import Incident, IncidentKind, Odds
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, ControllerCrash, Scenario
from multiverse_lab.simulation.world import WorldSettings

HOSTS = tuple(Host(name, Size(8, 8192, 65536), ABILITIES) for name in ("h1", "h2"))
FIRST, SECOND = 0.2, 0.7  # which of the two hosts an incident picks
MOVED, LEFT_THERE, FAILED, INTERRUPTED = 0.0, 0.001, 0.002, 0.003
"""How a move ends: the VM went on at its second place and nothing is left at the first, or its process is; the copy
failed and is gone, or is still there."""
MOVE = Incident(20.0, IncidentKind.VM_MOVES, 40.0)  # the VM goes on at its second place 40 s after the start
JOB = Arrival(1.0, Batch(seconds=120.0))
AWAY, FENCED = IncidentKind.HOST_AWAY, IncidentKind.HOST_FENCED


def run(outcome: float, *incidents: Incident, job: Arrival = JOB, **more: object) -> Outcome:
    move = replace(MOVE, pick=outcome)
    scenario = Scenario(7, (job,), WorldSettings(HOSTS), incidents=(move, *incidents))
    found = simulate(replace(scenario, **more))  # type: ignore[arg-type]
    assert not found.violations, found.story()
    return found


def said(outcome: Outcome, text: str) -> bool:
    return any(text in line for _, line in outcome.events)


@pytest.mark.parametrize("outcome", [MOVED, LEFT_THERE, FAILED, INTERRUPTED])
def test_a_job_goes_on_in_a_vm_that_has_two_places_and_leaves_nothing_at_either(outcome: float) -> None:
    found = run(outcome)
    assert list(found.results.values()) == ["COMPLETED"]
    assert said(found, "a VM moves") and said(found, "goes on on") == (outcome in (MOVED, LEFT_THERE))
    left = found.transitions["vm: serving - place left -> serving"]
    assert left == (outcome in (MOVED, FAILED)), "a place is left once nothing is there, and not before"


@pytest.mark.parametrize("outcome", [MOVED, LEFT_THERE, FAILED, INTERRUPTED])
@pytest.mark.parametrize("host", [FIRST, SECOND])
@pytest.mark.parametrize("at", [25.0, 45.0, 70.0])
@pytest.mark.parametrize("kind", [AWAY, FENCED])
def test_either_place_is_lost(outcome: float, host: float, at: float, kind: IncidentKind) -> None:
    """A job whose VM goes on is not disturbed by the loss of its other place, and any other job is run again."""
    found = run(outcome, Incident(at, kind, 200.0, host))
    assert list(found.results.values()) == ["COMPLETED"]
    assert said(found, "a VM moves")


def test_the_loss_of_the_place_that_it_left_costs_a_job_nothing() -> None:
    losses = [Incident(45.0, FENCED, 100.0, host) for host in (FIRST, SECOND)]
    ends = [run(LEFT_THERE, loss) for loss in losses]
    assert [said(found, "the script of 1 has ended") for found in ends] == [True, True]
    assert sorted(found.transitions["vm: serving - place left -> serving"] for found in ends) == [0, 1]
    assert sorted(len(found.runs) for found in ends) == [1, 2], "the other loss is that of its VM"


@pytest.mark.parametrize("outcome", [MOVED, LEFT_THERE, FAILED, INTERRUPTED])
@pytest.mark.parametrize("at", [22.0, 41.0, 59.0, 61.0])
def test_a_vm_that_dies_at_two_places_costs_a_run_and_leaves_nothing(outcome: float, at: float) -> None:
    found = run(outcome, Incident(at, IncidentKind.VM_DIES))
    assert list(found.results.values()) == ["COMPLETED"]


@pytest.mark.parametrize("outcome", [MOVED, LEFT_THERE, FAILED, INTERRUPTED])
@pytest.mark.parametrize("at", [21.0, 39.0, 42.0, 61.0, 110.0])
@pytest.mark.parametrize("kind", [IncidentKind.CONTROLLER_CRASH, IncidentKind.CLUSTER_AWAY])
def test_a_new_controller_goes_on_with_a_vm_at_two_places(outcome: float, at: float, kind: IncidentKind) -> None:
    found = run(outcome, Incident(at, kind, 15.0))
    assert list(found.results.values()) == ["COMPLETED"]


@pytest.mark.parametrize("seed", one_in(10, list(range(300))))
def test_whatever_else_happens_what_is_there_is_claimed_for_and_nothing_is_left(seed: int) -> None:
    """Moves, losses of either host, deaths and crashes at times that are drawn, with calls that fail."""
    rng = Random(seed)
    kinds = (AWAY, FENCED, IncidentKind.VM_DIES, IncidentKind.CONTROLLER_CRASH, IncidentKind.CLUSTER_AWAY)
    incidents = [
        Incident(rng.uniform(5, 150), IncidentKind.VM_MOVES, rng.uniform(1, 60), rng.random()) for _ in range(5)
    ]
    incidents += [Incident(rng.uniform(5, 200), rng.choice(kinds), rng.uniform(1, 120), rng.random()) for _ in range(4)]
    jobs = tuple(
        Arrival(rng.uniform(0, 60), Batch(nodes=rng.randint(1, 2), seconds=rng.uniform(1, 100))) for _ in range(4)
    )
    odds = Odds.even(rng.choice([0.0, 0.05, 0.2]), until=200.0)
    crashes = tuple(ControllerCrash(rng.randint(5, 60), rng.random() < 0.5, rng.uniform(1, 10)) for _ in range(2))
    scenario = Scenario(
        seed, jobs, WorldSettings(HOSTS), scheduler_odds=odds, hypervisor_odds=odds,
        incidents=tuple(incidents), crashes=crashes,
    )  # fmt: skip
    found = simulate(scenario)
    assert not found.violations, found.story()
