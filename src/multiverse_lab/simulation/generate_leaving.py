"""Scenarios in which jobs leave leased hosts: as their pilots end, and so that these can be given back, drawn from a
seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from multiverse.config import RebalanceSettings, SaveSettings
from multiverse.core.model.basics import Size
from multiverse.core.model.saved import Storage
from multiverse_lab.simulation.faults import IncidentKind, every
from multiverse_lab.simulation.generate import in_time, leasing
from multiverse_lab.simulation.generate_moving import KIND
from multiverse_lab.simulation.scenario import Arrival, Scenario

UNTIL = 400.0  # seconds in which pilots are told to end, as in `leasing`
_ENDS = (IncidentKind.PILOT_PREEMPTED, IncidentKind.PILOT_CANCELLED)


def leaving(seed: int) -> Scenario:
    """The scenario of jobs on leased hosts, whose agents hold their VMs for a while as their pilots end: from a second
    to two minutes, of which some jobs need more. Hosts have a storage, VMs move, or both. Most jobs are longer than
    there, so that some leased hosts are emptied. In most scenarios more pilots are preempted or cancelled, and links
    between hosts are cut."""
    rng = Random(f"{seed}/leaving")
    scenario = leasing(seed)
    storage = Storage("shared", "qemu") if rng.random() < 0.8 else None
    moves = KIND if storage is None or rng.random() < 0.7 else None
    hosts = tuple(replace(one, storage=storage, moves=moves) for one in scenario.world.hosts)
    if rng.random() < 0.8:
        size = Size(rng.choice((2, 4, 8)), 8192, 65536)
        hosts = (*hosts, replace(hosts[0], name="h2", capacity=size, machine=size))
    notice = rng.choice(((1.0, 5.0), (5.0, 30.0), (5.0, 30.0), (20.0, 120.0)))
    physical = replace(scenario.world.physical, notice=notice, storage=storage, moves=moves)
    rebalance = RebalanceSettings(
        at_once=rng.choice((1, 2, 8)),
        per_job=rng.choice((1, 6)),
        host_rate=rng.choice((40, 200, 200)),
        keeps=rng.choice((0.0, 10.0, 40.0)),
    )
    ends = () if rng.random() < 0.1 else every(rng.choice((15.0, 40.0)), rng.choice(_ENDS), rng, UNTIL)
    return replace(
        scenario,
        arrivals=tuple(_longer(one, rng) for one in scenario.arrivals),
        world=replace(scenario.world, hosts=hosts, physical=physical, links_cut=rng.choice((0.0, 0.0, 0.1, 0.4))),
        settings=replace(
            scenario.settings, save=SaveSettings(enabled=True, no_requeue=rng.random() < 0.5), rebalance=rebalance
        ),
        incidents=in_time((*scenario.incidents, *ends)),
    )


def _longer(arrival: Arrival, rng: Random) -> Arrival:
    """Most jobs are longer, and may be on leased hosts."""
    batch, seconds = arrival.batch, arrival.batch.seconds * rng.choice((1, 2, 4))
    limit = seconds + rng.choice((20.0, 60.0)) if rng.random() < 0.8 else None
    return replace(arrival, batch=replace(batch, seconds=seconds, limit=limit, requeue=rng.random() < 0.9))
