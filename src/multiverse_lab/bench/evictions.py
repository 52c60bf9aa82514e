"""A simulated week with bursts of urgent jobs and maintenance of hosts: what evictions cost, and what they give.

The controller is the real one, over the simulated Slurm with preemption by QOS, in virtual time. The same jobs are
simulated without any method of eviction, with each one, and with all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from multiverse.config import BackfillSettings, PacingSettings, RebalanceSettings, SaveSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import Preemption
from multiverse.core.model.saved import Storage
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import Incident, IncidentKind
from multiverse_lab.simulation.fuzz import silent_logs
from multiverse_lab.simulation.generate_moving import KIND
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

METHODS: Mapping[str, RebalanceSettings] = {
    "none": RebalanceSettings(drains=False, preemption=False),
    "drain": RebalanceSettings(preemption=False),
    "preemption": RebalanceSettings(drains=False),
    "all": RebalanceSettings(),
}
RULES = Preemption({"high": frozenset({"low"})}, exempt={}, modes={"low": "requeue"}, grace={})

_ENDLESS = 1 << 40  # turns of the loop: the scenario has a limit of its own
_HOST = Size(16, 32768, 1 << 20)
_HOSTS = 4
_DAY = 86400.0
_SHORT = 10.0  # seconds: slowdown is bounded by it (Feitelson et al., 1997)
_MAINTENANCE = 7200.0  # seconds for which a host is drained, once a day another one


@dataclass(frozen=True, slots=True)
class Slowdown:
    """From submission to end, by the time that the job computes; of jobs of one priority."""

    mean: float
    p95: float


@dataclass(frozen=True, slots=True)
class WeekFigures:
    """`hours` are those of CPUs that VMs held. `untouched` is the mean slowdown of the low jobs that were never
    evicted, and `untouched_without` that of the same jobs without any method. `most` is how often one job left a
    host."""

    moves: int
    saves: int
    per_job: float
    most: int
    hours: float
    low: Slowdown
    high: Slowdown
    untouched: float
    untouched_without: float


@dataclass(frozen=True, slots=True)
class Week:
    days: float
    jobs: int
    urgent: int
    cpus: int
    figures: Mapping[str, WeekFigures]  # by method


def simulate_week(days: float = 7.0, seed: int = 1) -> Week:
    """Simulate the jobs with each method. Raises `RuntimeError` if a promise was broken."""
    arrivals = week(days, seed)
    with silent_logs():
        outcomes = {name: _run(_scenario(arrivals, days, seed, how)) for name, how in METHODS.items()}
    without = _slowdowns(outcomes["none"], arrivals)
    urgent = sum(one.batch.preempt_class == "high" for one in arrivals)
    figures = {name: _figures(outcome, arrivals, without) for name, outcome in outcomes.items()}
    return Week(days, len(arrivals), urgent, _HOSTS * _HOST.cpus, figures)


def week(days: float, seed: int) -> tuple[Arrival, ...]:
    """Jobs of low priority that fill the hosts, and bursts of urgent ones a few times a day. A job is named by its
    number."""
    rng = Random(f"{seed}/week")
    found: list[tuple[float, Batch]] = []
    at = 0.0
    while (at := at + rng.expovariate(1 / 240.0)) < days * _DAY:
        found.append((at, _job(rng, "low", rng.lognormvariate(7.6, 0.9))))
    at = 0.0
    while (at := at + rng.expovariate(1 / 21600.0)) < days * _DAY - 3600.0:
        burst = rng.randint(4, 16)
        found += [(at + rng.uniform(0.0, 300.0), _job(rng, "high", rng.uniform(120.0, 1800.0))) for _ in range(burst)]
    ordered = sorted(found, key=lambda one: one[0])
    return tuple(Arrival(at, replace(batch, name=str(number))) for number, (at, batch) in enumerate(ordered))


def _job(rng: Random, urgency: str, seconds: float) -> Batch:
    return Batch(
        seconds=min(seconds, 6 * 3600.0),
        size=Size(rng.choice((1, 2, 4, 8)), 1024),
        limit=min(seconds, 6 * 3600.0) * rng.uniform(1.1, 2.0) + 60.0,
        nodes=rng.choice((1, 1, 1, 1, 2)),
        priority=3000 if urgency == "high" else 1000,
        preempt_class=urgency,
    )


def _scenario(arrivals: Sequence[Arrival], days: float, seed: int, how: RebalanceSettings) -> Scenario:
    hosts = tuple(
        Host(f"h{number}", _HOST, ABILITIES, _HOST, "tcg", storage=Storage("shared", "qemu"), moves=KIND)
        for number in range(_HOSTS)
    )
    drained = (
        Incident(day * _DAY + 36000.0, IncidentKind.HOST_DRAINED, _MAINTENANCE, (day % _HOSTS + 0.05) / _HOSTS)
        for day in range(int(days))
    )
    return Scenario(
        seed,
        tuple(arrivals),
        WorldSettings(hosts, cluster=ClusterSettings(cycle=5.0, min_job_age=(2.0, 30.0), preemption=RULES)),
        Settings(
            pacing=PacingSettings(provisioning=16),
            backfill=BackfillSettings(True),
            save=SaveSettings(True),
            rebalance=how,
            poll=30.0,
        ),
        incidents=tuple(drained),
        hints=1.0,
        limit=(days + 3) * _DAY,
    )


def _run(scenario: Scenario) -> Outcome:
    outcome = simulate(scenario, most=_ENDLESS)
    if outcome.violations:
        raise RuntimeError(f"the simulation broke promises: {outcome.violations[:3]}")
    return outcome


def _slowdowns(outcome: Outcome, arrivals: Sequence[Arrival]) -> dict[int, float]:
    """By job."""
    ended: dict[int, float] = {}
    for name, _, end in outcome.runs:
        ended[int(name)] = max(end, ended.get(int(name), 0.0))
    return {
        number: max(1.0, (end - arrivals[number].at) / max(_SHORT, arrivals[number].batch.seconds))
        for number, end in ended.items()
    }


def _figures(outcome: Outcome, arrivals: Sequence[Arrival], without: Mapping[int, float]) -> WeekFigures:
    evicted = _evictions(outcome)
    slowdowns = _slowdowns(outcome, arrivals)
    low = [number for number, one in enumerate(arrivals) if one.batch.preempt_class == "low"]
    high = [number for number, one in enumerate(arrivals) if one.batch.preempt_class == "high"]
    untouched = [number for number in low if number not in evicted]
    moves = sum(way == "move" for ways in evicted.values() for way in ways)
    saves = sum(way == "save" for ways in evicted.values() for way in ways)
    return WeekFigures(
        moves,
        saves,
        (moves + saves) / len(low),
        max(map(len, evicted.values()), default=0),
        sum((end - began) * arrivals[int(name)].batch.size.cpus for name, began, end in outcome.runs) / 3600.0,
        _slowdown([slowdowns[number] for number in low]),
        _slowdown([slowdowns[number] for number in high]),
        fmean(slowdowns[number] for number in untouched),
        fmean(without[number] for number in untouched),
    )


def _slowdown(values: Sequence[float]) -> Slowdown:
    ordered = sorted(values)
    return Slowdown(fmean(ordered), ordered[math.ceil(0.95 * len(ordered)) - 1])


def _evictions(outcome: Outcome) -> dict[int, list[str]]:
    """The ways in which each job left a host, by job: ids are given in the order of submission."""
    left = {
        int(job_id) - 1: [str(one.way) for one in of_job if one.took is not None]
        for job_id, of_job in outcome.evictions.items()
    }
    return {number: ways for number, ways in left.items() if ways}
