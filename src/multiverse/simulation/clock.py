"""The clock of a simulation: the virtual loop's own time."""

from __future__ import annotations

import asyncio

EPOCH = 1_700_000_000.0  # Unix time at which every simulation begins


class VirtualClock:
    """A `ports.Clock` over the loop that runs when it is made. `ahead` is what `now()` begins at: never
    zero, lest a time be taken for a missing one."""

    def __init__(self, *, ahead: float = 1000.0, boot: str = "simulated-boot") -> None:
        self._loop = asyncio.get_running_loop()
        self._ahead = ahead
        self._boot = boot

    def now(self) -> float:
        return self._loop.time() + self._ahead

    def wall(self) -> float:
        return self._loop.time() + EPOCH

    def boot_id(self) -> str:
        return self._boot
