"""A simulated day with bursts: node-hours that are leased, beside those that are used.

The controller is the real one, over the simulated Slurm with physical nodes, in virtual time. The same jobs are
simulated with leases that last as long as their jobs, with leases that are emptied by moves, and with all nodes as
hosts all day, and an ideal EASY scheduler runs them on the site's own host alone. `ideal` is what a lease would take
that begins and ends with the jobs that the site's own host cannot hold, without any time for pilots, agents, templates
and VMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from statistics import fmean

from multiverse.config import LeaseSettings, PacingSettings, RebalanceSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse_lab.bench import easy
from multiverse_lab.bench.swf import TraceJob
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.fuzz import silent_logs
from multiverse_lab.simulation.generate_moving import KIND
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.pilots import PARTITION, PhysicalNodes
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

_ENDLESS = 1 << 40  # turns of the loop: the scenario has a limit of its own
_STATIC = Size(8, 16384, 1 << 20)
_NODE = Size(16, 32768, 1 << 20)


@dataclass(frozen=True, slots=True)
class LeaseFigures:
    """`leased` and `used` are node-hours of physical nodes: from a pilot's start to its end, and of these the ones in
    which a VM was on the host. `unused` counts the leases that never had one. `again` counts those that began while a
    lease that had ended less than the idle time ago could have gone on: each of them is an oscillation. `moves` are
    those of running jobs. Waits are in seconds."""

    leased: float
    used: float
    leases: int
    unused: int
    again: int
    moves: int
    mean_wait: float
    longest_wait: float


@dataclass(frozen=True, slots=True)
class LeaseComparison:
    """The same day four times, and the node-hours of an ideal lease. `without` is an ideal scheduler's; `packing` also
    empties leases by moves."""

    jobs: int
    hours: float
    nodes: int
    idle: float
    leasing: LeaseFigures
    packing: LeaseFigures
    without: LeaseFigures
    always: LeaseFigures
    ideal: float


def compare_leases(hours: float = 24.0, nodes: int = 4, idle: float = 120.0, seed: int = 1) -> LeaseComparison:
    """Simulate the day with leases, with leases that are emptied, and with all nodes as hosts."""
    arrivals = bursts(hours, seed)
    with silent_logs():
        scenario = _scenario(arrivals, hours, nodes, idle, seed)
        leasing = _run(scenario)
        packing = _run(replace(scenario, settings=replace(scenario.settings, rebalance=RebalanceSettings())))
        always = _run(_scenario(arrivals, hours, 0, idle, seed, static=nodes))
    all_day = _figures(always, arrivals, idle)
    taken = replace(all_day, leased=nodes * hours, leases=nodes)
    return LeaseComparison(
        len(arrivals),
        hours,
        nodes,
        idle,
        _figures(leasing, arrivals, idle),
        _figures(packing, arrivals, idle),
        _alone(arrivals),
        taken,
        _ideal(leasing, arrivals),
    )


def bursts(hours: float, seed: int) -> tuple[Arrival, ...]:
    """Some jobs all day, which the site's own host holds, and a burst of many each two hours or so. A job is named by
    its number."""
    rng = Random(f"{seed}/bursts")
    times: list[tuple[float, Batch]] = []
    at = 0.0
    while (at := at + rng.expovariate(1 / 900.0)) < hours * 3600.0:
        times.append((at, _job(rng, 2)))
    at = 0.0
    while (at := at + rng.expovariate(1 / 7200.0)) < hours * 3600.0 - 1800.0:
        times += [(at + rng.uniform(0.0, 60.0), _job(rng, rng.choice((2, 4, 8)))) for _ in range(rng.randint(8, 24))]
    ordered = sorted(times, key=lambda one: one[0])
    return tuple(
        Arrival(at, Batch(**{**vars(batch), "name": str(number)})) for number, (at, batch) in enumerate(ordered)
    )


def _job(rng: Random, cpus: int) -> Batch:
    seconds = rng.uniform(120.0, 1500.0)
    return Batch(seconds=seconds, size=Size(cpus, 1024), limit=seconds * rng.uniform(1.1, 2.0) + 60.0)


def _scenario(
    arrivals: Sequence[Arrival], hours: float, nodes: int, idle: float, seed: int, static: int = 0
) -> Scenario:
    own = Host("h1", _STATIC, ABILITIES, _STATIC, "tcg", moves=KIND)
    hosts = (own, *(Host(f"n{number}", _NODE, ABILITIES, _NODE, "tcg") for number in range(1, static + 1)))
    lease = LeaseSettings(PARTITION, max=max(1, nodes), time_limit=14400.0, min_wait=10.0, idle=idle)
    return Scenario(
        seed,
        tuple(arrivals),
        WorldSettings(
            hosts,
            cluster=ClusterSettings(min_job_age=(2.0, 30.0)),
            physical=PhysicalNodes(nodes, size=_NODE, wait=(1.0, 30.0), moves=KIND),
        ),
        Settings(
            pacing=PacingSettings(provisioning=16),
            lease=(lease,) if nodes else (),
            rebalance=RebalanceSettings(leases=False),
            poll=15.0,
        ),
        hints=1.0,
        limit=hours * 7200.0 + 36000.0,
    )


def _run(scenario: Scenario) -> Outcome:
    outcome = simulate(scenario, most=_ENDLESS)
    if outcome.violations:
        raise RuntimeError(f"the simulation broke promises: {outcome.violations[:3]}")
    return outcome


def _figures(outcome: Outcome, arrivals: Sequence[Arrival], idle: float) -> LeaseFigures:
    began: dict[int, float] = {}
    held: dict[int, float] = {}
    used: dict[int, float] = {}
    spans: list[tuple[float, float]] = []
    for one in (entry for entry in outcome.entries if entry.kind == "lease" and entry.target != entry.source):
        if one.target == "starting":
            began[one.id], used[one.id] = one.mono, 0.0
        if one.source == "held" and one.id in held:
            used[one.id] += one.mono - held.pop(one.id)
        if one.target == "held":
            held[one.id] = one.mono
        if one.target == "gone" and one.id in began:
            spans.append((began[one.id], one.mono))
    waits = [start - arrivals[int(name)].at for name, start, _ in outcome.runs]
    again = sum(any(0.0 <= start - end < idle for _, end in spans) for start, _ in spans)
    return LeaseFigures(
        sum(end - start for start, end in spans) / 3600.0,
        sum(used.values()) / 3600.0,
        len(spans),
        sum(not seconds for seconds in used.values()),
        again,
        sum(one.way == "move" and one.took is not None for of_job in outcome.evictions.values() for one in of_job),
        fmean(waits),
        max(waits),
    )


def _alone(arrivals: Sequence[Arrival]) -> LeaseFigures:
    """The waits on the site's own host alone."""
    jobs = [
        TraceJob(number, one.at, one.batch.seconds, one.batch.size.cpus, one.batch.limit or one.batch.seconds)
        for number, one in enumerate(arrivals)
    ]
    waits = [stay.waited for stay in easy.schedule(jobs, _STATIC.cpus)]
    return LeaseFigures(0.0, 0.0, 0, 0, 0, 0, fmean(waits), max(waits))


def _ideal(outcome: Outcome, arrivals: Sequence[Arrival]) -> float:
    """Node-hours of as many nodes as the jobs that run need at each moment beside the site's own host."""
    changes: list[tuple[float, int]] = []
    for name, began, ended in outcome.runs:
        cpus = arrivals[int(name)].batch.size.cpus
        changes += [(began, cpus), (ended, -cpus)]
    total, cpus, before = 0.0, 0, 0.0
    for at, change in sorted(changes):
        total += ceil(max(0, cpus - _STATIC.cpus) / _NODE.cpus) * (at - before)
        cpus, before = cpus + change, at
    return total / 3600.0
