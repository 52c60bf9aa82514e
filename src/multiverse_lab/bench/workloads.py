"""Jobs for simulated clusters, one after the other: of a trace, or drawn. None of them is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random

from multiverse.core.model.basics import Size
from multiverse_lab.bench import lublin
from multiverse_lab.bench.swf import TraceJob
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.scenario import Arrival

USERS = 64
"""Users of drawn jobs. Jobs of a trace are of the users that it has, modulo this number."""
FIRST_UID = 1000

_DAY = 86400.0
_BURST = 20  # jobs of one user within a minute
_LONGEST = 4 * 3600.0  # seconds that a drawn job runs at most
_TAIL = 1.5  # exponent of Pareto's distribution, whose variance is infinite (M. Harchol-Balter, A. Downey, 1997)
_MEDIAN = 300.0  # seconds


@dataclass(frozen=True, slots=True)
class DrawnJobs:
    """What is drawn. `rate` is jobs a minute on average; `widest` the most CPUs of a job."""

    count: int
    rate: float
    widest: int
    seed: int


def poisson(drawn: DrawnJobs) -> Iterator[TraceJob]:
    """Jobs that come independently of each other."""
    rng = Random(f"{drawn.seed}/poisson")
    at = 0.0
    for number in range(1, drawn.count + 1):
        at += rng.expovariate(drawn.rate / 60)
        yield _job(rng, number, at, drawn, _usual(rng))


def bursts(drawn: DrawnJobs) -> Iterator[TraceJob]:
    """Many jobs of one user within a minute, and then none for a while."""
    rng, number, at = Random(f"{drawn.seed}/bursts"), 0, 0.0
    while number < drawn.count:
        at += rng.expovariate(drawn.rate / 60 / _BURST)
        user = rng.randrange(USERS)
        ends = min(drawn.count, number + _BURST)
        for moment in sorted(at + rng.uniform(0.0, 60.0) for _ in range(number, ends)):
            number, at = number + 1, max(at, moment)
            yield replace(_job(rng, number, at, drawn, _usual(rng)), user=user)


def days(drawn: DrawnJobs) -> Iterator[TraceJob]:
    """Jobs by a rate that goes up and down with the hours of the day (P. Lewis, G. Shedler, 1979: thinning)."""
    rng, number, at = Random(f"{drawn.seed}/days"), 0, 0.0
    most = 1.8 * drawn.rate / 60
    while number < drawn.count:
        at += rng.expovariate(most)
        if rng.random() * 1.8 < 1 - 0.8 * math.cos(2 * math.pi * at / _DAY):
            number += 1
            yield _job(rng, number, at, drawn, _usual(rng))


def heavy(drawn: DrawnJobs) -> Iterator[TraceJob]:
    """Jobs of which a few run very long."""
    rng = Random(f"{drawn.seed}/heavy")
    at = 0.0
    for number in range(1, drawn.count + 1):
        at += rng.expovariate(drawn.rate / 60)
        yield _job(rng, number, at, drawn, 60.0 * rng.paretovariate(_TAIL))


def lublin_feitelson(drawn: DrawnJobs) -> Iterator[TraceJob]:
    """Jobs of that model, whose gaps are stretched to the rate."""
    model = lublin.Model(processors=drawn.widest, longest=math.log(_LONGEST))
    last = 0.0
    for job in lublin.stream(drawn.count, drawn.seed, model):
        last = job.submitted
    stretch = drawn.count / drawn.rate * 60 / last if last else 1.0
    rng = Random(f"{drawn.seed}/users")
    for job in lublin.stream(drawn.count, drawn.seed, model):
        yield replace(job, submitted=job.submitted * stretch, user=rng.randrange(USERS))


GENERATORS: Mapping[str, Callable[[DrawnJobs], Iterator[TraceJob]]] = {
    "poisson": poisson,
    "bursts": bursts,
    "days": days,
    "heavy": heavy,
    "lublin": lublin_feitelson,
}


def _usual(rng: Random) -> float:
    return rng.lognormvariate(math.log(_MEDIAN), 0.8)


def _job(rng: Random, number: int, at: float, drawn: DrawnJobs, seconds: float) -> TraceJob:
    widths = [width for width in (1, 2, 4, 8) if width <= drawn.widest]
    runs = min(_LONGEST, max(10.0, seconds))
    limit = math.ceil(runs * rng.uniform(1.1, 3.0) / 60) * 60
    return TraceJob(number, at, runs, rng.choice(widths), limit, rng.randrange(USERS))


def mean_work(jobs: Iterable[TraceJob]) -> float:
    """CPU-seconds of a job on average."""
    works = [job.seconds * job.processors for job in jobs]
    return sum(works) / len(works)


def arrivals(jobs: Iterable[TraceJob], cores: int, memory: int) -> Iterator[Arrival]:
    """The jobs as VMs of at most `cores` CPUs, with `memory` MiB for each CPU. Times begin at the first submission."""
    first: float | None = None
    for job in jobs:
        first = job.submitted if first is None else first
        vms = math.ceil(job.processors / cores)
        cpus = math.ceil(job.processors / vms)
        yield Arrival(
            job.submitted - first,
            Batch(
                name=str(job.number),
                uid=FIRST_UID + job.user % USERS,
                seconds=job.runs,
                nodes=vms,
                size=Size(cpus, cpus * memory),
                limit=job.limit,
            ),
        )
