"""Pauses before something that failed, or that has to be ensured, is done again."""

from __future__ import annotations

from random import Random

AGAIN, AGAIN_LIMIT = 2.0, 60.0
"""Seconds before the first repetition, doubled for each further one up to the limit."""

JITTER = 0.5
"""A pause is longer by up to this share, by chance: what began at the same time is not repeated at the same time."""


def pause(runs: int, rng: Random) -> float:
    """Seconds until something that was done so many times is done again."""
    shortest = min(AGAIN_LIMIT, AGAIN * 2.0 ** min(runs - 1, 16))
    return shortest * (1.0 + JITTER * rng.random())
