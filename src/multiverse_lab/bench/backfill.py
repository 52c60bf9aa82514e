"""Backfill compared with none, and with an ideal EASY scheduler, on the same trace.

The controller is the real one, over the simulated Slurm and hosts, in virtual time: VMs are created, join and are
released, which takes time. The ideal scheduler is `bench.easy`. Each job asks for as many VMs of one CPU as the trace
has processors for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from multiverse.config import BackfillSettings, PacingSettings, Settings
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse_lab.bench import easy
from multiverse_lab.bench.easy import Stay
from multiverse_lab.bench.swf import TraceJob
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.fuzz import silent_logs
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import WorldSettings

TOGETHER = 10.0
"""Seconds between jobs that started together: the VMs of one may take longer than those of another."""

SHORT = 10.0
"""Seconds: of jobs that are shorter, the slowdown is bounded (D. G. Feitelson et al., "Theory and practice in parallel
job scheduling", JSSPP 1997)."""

CPUS_PER_HOST = 16
_ENDLESS = 1 << 40  # turns of the loop: the scenario has a limit of its own
_NODE = Size(1, 64)


@dataclass(frozen=True, slots=True)
class Figures:
    """What became of a trace. `utilization` is the share of all processors' time, from the first submission to the last
    end, in which jobs ran. Times in seconds. `ahead` is how many jobs started well before one that came earlier."""

    utilization: float
    mean_wait: float
    longest_wait: float
    bounded_slowdown: float
    seconds: float
    ahead: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same trace three times."""

    jobs: int
    processors: int
    without: Figures
    backfill: Figures
    ideal: Figures


def compare(jobs: Sequence[TraceJob], processors: int, seed: int = 1) -> Comparison:
    """Run a trace three times. Jobs that ask for more than all processors are left out."""
    jobs = [job for job in jobs if job.processors <= processors]
    with silent_logs():
        without = run(jobs, processors, seed, BackfillSettings(enabled=False))
        with_ = run(jobs, processors, seed, BackfillSettings())
    ideal = easy.schedule(jobs, processors)
    return Comparison(len(jobs), processors, *(figures(stays, processors) for stays in (without, with_, ideal)))


def run(jobs: Sequence[TraceJob], processors: int, seed: int, backfill: BackfillSettings) -> list[Stay]:
    """Run a trace through the controller."""
    outcome = simulate(scenario_of(jobs, processors, seed, backfill), most=_ENDLESS)
    if outcome.violations:
        raise RuntimeError(f"the simulation broke promises: {outcome.violations[:3]}")
    by_number = {str(job.number): job for job in jobs}
    return [Stay(by_number[name], began, ended) for name, began, ended in outcome.runs]


def scenario_of(jobs: Sequence[TraceJob], processors: int, seed: int, backfill: BackfillSettings) -> Scenario:
    """The trace as a scenario: hosts with as many CPUs together as there are processors, and no faults."""
    counts = [CPUS_PER_HOST] * (processors // CPUS_PER_HOST) + [processors % CPUS_PER_HOST] * bool(
        processors % CPUS_PER_HOST
    )
    hosts = tuple(
        Host(f"h{n}", Size(cpus, 1024 + 512 * cpus, 1 << 20), ABILITIES, Size(cpus, 1 << 20, 1 << 20), "tcg")
        for n, cpus in enumerate(counts, 1)
    )
    arrivals = tuple(
        Arrival(
            job.submitted,
            Batch(name=str(job.number), seconds=job.runs, nodes=job.processors, size=_NODE, limit=job.limit),
        )
        for job in jobs
    )
    work = sum(job.limit for job in jobs)
    return Scenario(
        seed,
        arrivals,
        WorldSettings(hosts, cluster=replace(ClusterSettings(), max_nodes=processors, min_job_age=(2.0, 30.0))),
        Settings(pacing=PacingSettings(provisioning=processors), backfill=backfill, poll=20.0),
        hints=1.0,
        limit=jobs[-1].submitted + work + 3600.0,
    )


def figures(stays: Sequence[Stay], processors: int) -> Figures:
    """The figures of a trace that was run."""
    begin, end = min(one.job.submitted for one in stays), max(one.ended for one in stays)
    busy = sum(one.job.seconds * one.job.processors for one in stays)
    order = sorted(stays, key=lambda one: (one.job.submitted, one.job.number))
    latest, ahead = 0.0, 0
    for one in order:
        ahead += one.started < latest - TOGETHER
        latest = max(latest, one.started)
    return Figures(
        busy / (processors * (end - begin)),
        fmean(one.waited for one in stays),
        max(one.waited for one in stays),
        fmean(bounded_slowdown(one) for one in stays),
        end - begin,
        ahead,
    )


def bounded_slowdown(stay: Stay) -> float:
    """How many times as long as its run a job took from submission to end."""
    seconds = stay.job.seconds
    return max(1.0, (stay.waited + seconds) / max(seconds, SHORT))
