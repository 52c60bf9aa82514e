"""The clock of a simulation: the virtual loop's own time."""

from __future__ import annotations

import asyncio

EPOCH = 1_700_000_000.0  # Unix time at which every simulation begins
READING = 1e-7  # seconds that reading the clock takes


class VirtualClock:
    """A `ports.Clock` over the loop that runs when the clock is created.

    `ahead` is the first value of `now()`. It is not zero, so that code which takes 0 for "never" is not misled. As with
    a real clock, no two readings are equal: events of one virtual instant still have an order."""

    def __init__(self, *, ahead: float = 1000.0, boot: str = "simulated-boot") -> None:
        self._loop = asyncio.get_running_loop()
        self._ahead = ahead
        self._boot = boot
        self._last = 0.0

    def now(self) -> float:
        self._last = max(self._loop.time() + self._ahead, self._last + READING)
        return self._last

    def wall(self) -> float:
        return self._loop.time() + EPOCH

    def boot_id(self) -> str:
        return self._boot
