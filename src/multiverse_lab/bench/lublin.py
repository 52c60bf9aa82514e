"""Workloads of the Lublin-Feitelson model: when jobs come, on how many processors they run, and how long.

U. Lublin and D. G. Feitelson, "The workload on parallel supercomputers: modeling the characteristics of rigid jobs",
Journal of Parallel and Distributed Computing 63(11), 2003. The parameters are those that the paper gives for all jobs
together, without telling batch from interactive ones, as in the authors' program (lublin99.c). The paper has no
estimates of run times: a job's limit is its run time times a number between 1 and `Model.estimates`, all alike likely
(the f-model of A. Mu'alem and D. G. Feitelson, IEEE TPDS 12(6), 2001), in whole minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from multiverse_lab.bench.swf import TraceJob

_DAY, _BUCKETS = 86400, 48
_BUCKET = _DAY // _BUCKETS  # seconds: half an hour
_FIRST_BUCKET = 11  # where the daily cycle begins
_LONGEST_GAP = 13.0  # its logarithm


@dataclass(frozen=True, slots=True)
class Model:
    """The parameters of the model, with the letters of the paper. `longest` is the logarithm of the longest run time in
    seconds: longer ones are drawn again."""

    processors: int = 128
    serial: float = 0.244  # share of jobs on one processor
    power2: float = 0.576  # share of jobs on a power of two
    low: float = 0.8  # log2 of the fewest processors of a parallel job
    middle: float = 2.5  # below log2 of all processors: where the two uniform distributions meet
    first: float = 0.86  # share of the lower one
    a1: float = 4.2
    b1: float = 0.94
    a2: float = 312.0
    b2: float = 0.03
    pa: float = -0.0054
    pb: float = 0.78
    a_gap: float = 10.2303
    b_gap: float = 0.4871
    a_day: float = 8.1737
    b_day: float = 3.9631
    rush: float = 1.0225  # from the gaps of the rush hours to those of the whole day
    longest: float = 12.0
    estimates: float = 5.0


def generate(count: int, seed: int, model: Model | None = None, load: float = 0.0) -> list[TraceJob]:
    """So many jobs. With `load` the gaps between them are stretched so that the jobs ask for that share of all
    processors until the last one comes."""
    model = model or Model()
    jobs = list(stream(count, seed, model))
    span = jobs[-1].submitted
    if load and span:
        stretch = sum(job.runs * job.processors for job in jobs) / (model.processors * load * span)
        jobs = [replace(job, submitted=round(job.submitted * stretch)) for job in jobs]
    return jobs


def stream(count: int, seed: int, model: Model) -> Iterator[TraceJob]:
    """The same without `load`, one after the other. The first one comes at 0."""
    rng, begin = Random(seed), None
    arrivals = _Arrivals(model, rng)
    for number in range(1, count + 1):
        at, processors = arrivals.next(), _processors(model, rng)
        begin = at if begin is None else begin
        runs = max(1, int(_runs(model, rng, processors)))
        limit = math.ceil(runs * rng.uniform(1.0, model.estimates) / 60) * 60
        yield TraceJob(number, at - begin, runs, processors, limit)


def _processors(model: Model, rng: Random) -> int:
    """A serial job, or 2 to the power of a number of two uniform distributions, a whole one for powers of two."""
    chance, high = rng.random(), math.log2(model.processors)
    if chance <= model.serial:
        return 1
    middle = max(model.low, high - model.middle)
    low, top = (model.low, middle) if rng.random() <= model.first else (middle, high)
    power = rng.uniform(low, top)
    if chance <= model.serial + model.power2:
        power = float(round(power))
    return max(1, min(model.processors, round(2**power)))


def _runs(model: Model, rng: Random, processors: int) -> float:
    """Seconds: the logarithm is of one of two gamma distributions, of the longer one more often for wide jobs."""
    share = min(1.0, max(0.0, model.pa * processors + model.pb))
    while True:
        shape, scale = (model.a1, model.b1) if rng.random() <= share else (model.a2, model.b2)
        logarithm = rng.gammavariate(shape, scale)
        if logarithm <= model.longest:
            return math.exp(logarithm)


class _Arrivals:
    """When jobs come. Each half hour of the day has a weight. A gap of the rush hours, whose logarithm is of a gamma
    distribution, is paid with the weights of the half hours that it takes."""

    def __init__(self, model: Model, rng: Random) -> None:
        self._model, self._rng = model, rng
        shares = {
            (number - 1) % _BUCKETS: _share_of_gamma(number - 0.5, number + 0.5, model.a_day, model.b_day)
            for number in range(_FIRST_BUCKET, _FIRST_BUCKET + _BUCKETS)
        }
        mean = sum(shares.values()) / _BUCKETS
        self._weights = [shares[number] / mean for number in range(_BUCKETS)]
        self._bucket, self._points, self._within, self._at = 0, 0.0, 0.0, 0.0

    def next(self) -> float:
        """Seconds from the first midnight until the next job comes."""
        shape, scale = self._model.a_gap * self._model.rush, self._model.b_gap
        while (logarithm := self._rng.gammavariate(shape, scale)) > _LONGEST_GAP:
            pass
        self._points += math.exp(logarithm) / _BUCKET
        while self._points > self._weights[self._bucket]:
            self._points -= self._weights[self._bucket]
            self._bucket = (self._bucket + 1) % _BUCKETS
            self._at += _BUCKET
        within = self._points / self._weights[self._bucket]
        self._at += _BUCKET * (within - self._within)
        self._within = within
        return self._at


def _share_of_gamma(low: float, high: float, shape: float, scale: float, steps: int = 64) -> float:
    """The probability of a gamma distribution between two values, by Simpson's rule."""

    def density(x: float) -> float:
        return math.exp((shape - 1) * math.log(x) - x / scale - math.lgamma(shape) - shape * math.log(scale))

    width = (high - low) / steps
    weights = (1, *((4, 2) * (steps // 2))[:-1], 1)
    return width / 3 * sum(weight * density(low + n * width) for n, weight in enumerate(weights))
