"""Scenarios in which running jobs leave their hosts, for urgent jobs or off drained hosts, drawn from a seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from multiverse.config import RebalanceSettings
from multiverse.core.model.basics import Size
from multiverse.core.model.job import Preemption
from multiverse_lab.simulation.generate_moving import KIND
from multiverse_lab.simulation.generate_saving import saving
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.scenario import Arrival, Scenario

RULES = Preemption(
    takes={"high": frozenset({"low", "normal"}), "normal": frozenset({"low"})},
    exempt={"normal": 20.0},
    modes={"low": "requeue", "normal": "cancel"},
    grace={},
)


def evicting(seed: int) -> Scenario:
    """The scenario of jobs that are saved and resumed, on hosts between which most VMs also move, with more jobs than
    the hosts hold. Jobs of two classes come that may preempt those of a lower one. Where hosts have no storage, or jobs
    are not to be queued again, runs end as the scheduler's modes say. Operators drain hosts with all ways to leave them
    where hosts have agents. The limits of evictions are small in most scenarios."""
    rng = Random(f"{seed}/evicting")
    scenario = saving(seed)
    moves = rng.random() < 0.8
    hosts = tuple(replace(one, moves=KIND if moves and rng.random() < 0.9 else None) for one in scenario.world.hosts)
    if rng.random() < 0.4:
        hosts = tuple(replace(one, storage=None, copies=None) if rng.random() < 0.7 else one for one in hosts)
    low = tuple(_of_class(one, rng.choice(("low", "low", "normal")), rng) for one in scenario.arrivals)
    more = tuple(_arrival(rng, rng.choice(("low", "low", "normal", "high", "high"))) for _ in range(rng.randint(2, 8)))
    rules = replace(
        RULES,
        exempt=rng.choice(({}, RULES.exempt)),
        modes=rng.choice((RULES.modes, RULES.modes, {"low": "suspend", "normal": "requeue"})),
        grace=rng.choice(({}, {"low": 15.0, "normal": 5.0})),
    )
    cluster = replace(scenario.world.cluster, preemption=rules)
    rebalance = RebalanceSettings(
        at_once=rng.choice((1, 2, 8)), bandwidth=rng.choice((0, 0, 0, 5)), per_job=rng.choice((1, 2, 6))
    )
    return replace(
        scenario,
        arrivals=(*low, *more),
        world=replace(scenario.world, hosts=hosts, cluster=cluster),
        settings=replace(scenario.settings, rebalance=rebalance),
    )


def _of_class(arrival: Arrival, name: str, rng: Random) -> Arrival:
    return replace(arrival, batch=_prioritized(arrival.batch, name, rng))


def _prioritized(batch: Batch, name: str, rng: Random) -> Batch:
    """In one scenario of ten a job's priority does not agree with its class."""
    usual = {"low": 1000, "normal": 2000, "high": 3000}[name]
    return replace(batch, preempt_class=name, priority=rng.choice((*(usual,) * 9, 1500)))


def _arrival(rng: Random, name: str) -> Arrival:
    seconds = rng.choice((10.0, 30.0, 60.0, 120.0))
    batch = Batch(
        uid=rng.choice((1000, 1001)),
        seconds=seconds,
        nodes=rng.choice((1, 1, 1, 1, 2)),
        size=rng.choice((Size(1, 64), Size(2, 500), Size(2, 900))),
        limit=rng.choice((None, seconds + 30.0)),
        requeue=rng.random() < 0.8,
    )
    return Arrival(rng.uniform(0.5, 90.0), _prioritized(batch, name, rng))
