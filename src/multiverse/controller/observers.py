"""Observers: one polling task for each source, quicker when a hint says that something may have changed.

A slow or silent source makes only its own objects stale: each observer waits for its own source alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

from multiverse.core.errors import MultiverseError
from multiverse.core.model import Seen
from multiverse.ports import Clock

T = TypeVar("T")
log = structlog.get_logger()

BURST = (0.0, 0.05, 0.15, 0.4)
"""Seconds after a hint at which to observe: the change that it reports may not be visible at once."""

TIMEOUT = 60.0


class Observer(Generic[T]):
    """Keeps the latest whole view of one source. After a failed observation the source is unknown."""

    def __init__(
        self,
        name: str,
        observe: Callable[[], Awaitable[T]],
        clock: Clock,
        interval: Callable[[], float],
        seen: Callable[[], None],
    ) -> None:
        self.name = name
        self.latest: Seen[T] | None = None
        self.failure = ""
        self.observations = 0
        self.since = clock.now()  # since when it is known, or unknown
        self._observe, self._clock, self._interval, self._seen = observe, clock, interval, seen
        self._due: list[float] = []
        self._poked = asyncio.Event()

    def poke(self, *, burst: bool = False) -> None:
        """Observe soon: once, or several times when the change may take a moment to be visible."""
        now = self._clock.now()
        self._due = sorted({*self._due, *(now + wait for wait in (BURST if burst else BURST[:1]))})
        self._poked.set()

    async def run(self) -> None:
        """Observe until cancelled."""
        while True:
            began = self._clock.now()
            self._due = [due for due in self._due if due > began]
            try:
                async with asyncio.timeout(TIMEOUT):
                    value = await self._observe()
            except (MultiverseError, TimeoutError) as error:
                self._unknown(str(error) or f"no answer within {TIMEOUT:g} s")
            except Exception as error:  # a defect of a driver: its source is unknown, and the others go on
                self._unknown(f"{type(error).__name__}: {error}", traceback=True)
            else:
                if self.failure:
                    log.info("source is back", source=self.name)
                self._turn(self.latest is None)
                self.latest, self.failure = Seen(value, began), ""
            self.observations += 1
            self._seen()
            await self._wait(began)

    def _unknown(self, reason: str, *, traceback: bool = False) -> None:
        """The observation failed. A failure is logged once for as long as it repeats."""
        if reason != self.failure:
            log.warning("source is unknown", source=self.name, reason=reason, exc_info=traceback)
        self._turn(self.latest is not None)
        self.latest, self.failure = None, reason

    def _turn(self, turned: bool) -> None:
        if turned:
            self.since = self._clock.now()

    async def _wait(self, began: float) -> None:
        """Until the next observation is due: a hint's time, or the interval since the last observation began."""
        while True:
            due = min([began + self._interval(), *self._due])
            left = due - self._clock.now()
            if left <= 0:
                return
            self._poked.clear()
            try:
                async with asyncio.timeout(left):
                    await self._poked.wait()
            except TimeoutError:
                return
