"""Parameters of which the usual run takes some: the others are slow tests, which `scripts/slow` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """The values, of which one in so many is in the usual run, the first one among them."""
    return [
        pytest.param(value, marks=pytest.mark.slow) if number % every else value for number, value in enumerate(values)
    ]
