"""Summaries of samples: median, 95th percentile and maximum, and a bootstrap interval of the median."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the samples lie, interpolated linearly between neighbours
    (method 7 of Hyndman and Fan, 1996, as in most statistics software). At least one sample is needed."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of `n` samples, in their own unit. `low` and `high` bound the median with 95 % confidence."""

    n: int
    p50: float
    p95: float
    max: float
    low: float
    high: float


def summary(samples: Sequence[float], seed: int = 1) -> Summary | None:
    """A summary, or None of nothing. The interval is the percentile bootstrap of the median, 1,000 resamples."""
    if not samples:
        return None
    chance = random.Random(seed)
    medians = [percentile(chance.choices(samples, k=len(samples)), 0.5) for _ in range(1000)]
    return Summary(
        n=len(samples),
        p50=percentile(samples, 0.5),
        p95=percentile(samples, 0.95),
        max=max(samples),
        low=percentile(medians, 0.025),
        high=percentile(medians, 0.975),
    )
