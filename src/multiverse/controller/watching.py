"""Who is told what the controller has done. Watchers decide nothing, and the controller reads nothing of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from multiverse.core.transition import Done, Move


class Watcher(Protocol):
    """Is told at once, within the controller's loop: it takes no time and raises nothing."""

    def moved(self, moves: Sequence[Move], now: float) -> None:
        """These moves were committed at `now` (monotonic seconds), in this order."""

    def ended(self, done: Done) -> None:
        """This effect has ended."""
