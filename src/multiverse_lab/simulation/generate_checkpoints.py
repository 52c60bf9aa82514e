"""Scenarios with jobs of which checkpoints are made, and whose VMs are lost, drawn from a seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from multiverse.core.model.job import CheckpointWish
from multiverse_lab.simulation.faults import IncidentKind, every
from multiverse_lab.simulation.generate import in_time
from multiverse_lab.simulation.generate_saving import UNTIL, saving
from multiverse_lab.simulation.scenario import Arrival, Scenario

_LOSSES: dict[IncidentKind, tuple[float, ...]] = {
    IncidentKind.VM_DIES: (8.0, 15.0, 30.0),
    IncidentKind.HOST_FENCED: (0.0, 0.0, 60.0),
    IncidentKind.STORAGE_AWAY: (0.0, 0.0, 20.0),
    IncidentKind.STORAGE_LOST: (0.0, 0.0, 40.0),
}
"""The mean seconds between two incidents of a kind: one is drawn for each scenario, 0 for never."""


def checkpointing(seed: int) -> Scenario:
    """The scenario of jobs that are saved and resumed, in which checkpoints are made of most of them, in short
    intervals. Their VMs die more often, and storages lose files more often."""
    rng = Random(f"{seed}/checkpoints")
    scenario = saving(seed)
    incidents = scenario.incidents
    for kind, means in _LOSSES.items():
        if (mean := rng.choice(means)) and incidents:  # else nothing is to go wrong
            incidents += every(mean, kind, rng, 3 * UNTIL)
    save = replace(scenario.settings.save, checkpoints=rng.choice((1, 2, 3)))
    return replace(
        scenario,
        arrivals=tuple(_with_checkpoints(arrival, rng) for arrival in scenario.arrivals),
        incidents=in_time(incidents),
        settings=replace(scenario.settings, save=save),
    )


def _with_checkpoints(arrival: Arrival, rng: Random) -> Arrival:
    if rng.random() < 0.2:
        return arrival
    wish = CheckpointWish(rng.choice((2.0, 5.0, 10.0, 30.0)))
    batch = replace(arrival.batch, checkpoint=wish, requeue=rng.random() < 0.95, nodes=1)
    if batch.save is None and rng.random() < 0.7:
        batch = replace(batch, seconds=rng.choice((60.0, 120.0)), limit=None)
    return replace(arrival, batch=batch, actions=arrival.actions if rng.random() < 0.5 else ())
