"""Summaries of samples and comparisons of two sets, each with a 95 % interval by the bootstrap (1,000 resamples)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

RESAMPLES = 1000


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the samples lie, interpolated linearly between neighbours
    (method 7 of Hyndman and Fan, 1996, as in most statistics software). At least one sample is needed."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 0.5)


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary of `n` samples, in their unit. `low` and `high` bound the median with 95 % confidence."""

    n: int
    mean: float
    p50: float
    p95: float
    max: float
    low: float
    high: float


def summary(samples: Sequence[float], seed: int = 1) -> Summary | None:
    """The summary; None without samples. The interval is the percentile bootstrap of the median."""
    if not samples:
        return None
    chance = random.Random(seed)
    medians = [median(chance.choices(samples, k=len(samples))) for _ in range(RESAMPLES)]
    return Summary(
        n=len(samples),
        mean=fmean(samples),
        p50=percentile(samples, 0.5),
        p95=percentile(samples, 0.95),
        max=max(samples),
        low=percentile(medians, 0.025),
        high=percentile(medians, 0.975),
    )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure computed from two sets of samples, with its 95 % bounds."""

    value: float
    low: float
    high: float


Figure = Callable[[Sequence[float]], float]


def ratio(over: Sequence[float], under: Sequence[float], of: Figure = median, seed: int = 1) -> Estimate | None:
    """The median of `over` divided by that of `under` (or another figure, given as `of`); None unless both have
    samples."""
    return _compared(over, under, lambda a, b: of(a) / of(b), seed)


def excess(more: Sequence[float], less: Sequence[float], seed: int = 1) -> Estimate | None:
    """The median of `more` minus that of `less`; None unless both have samples."""
    return _compared(more, less, lambda a, b: median(a) - median(b), seed)


def _compared(
    one: Sequence[float],
    other: Sequence[float],
    figure: Callable[[Sequence[float], Sequence[float]], float],
    seed: int,
) -> Estimate | None:
    """Both sets are resampled independently of each other."""
    if not one or not other:
        return None
    chance = random.Random(seed)
    drawn = [figure(chance.choices(one, k=len(one)), chance.choices(other, k=len(other))) for _ in range(RESAMPLES)]
    return Estimate(figure(one, other), percentile(drawn, 0.025), percentile(drawn, 0.975))


def mean(samples: Sequence[float], seed: int = 1) -> Estimate | None:
    """The mean, with its interval; None without samples."""
    return ratio(samples, (1.0,), fmean, seed)
