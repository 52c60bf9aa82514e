"""Tells the scheduler a value that it is to know: once for each change, and again after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Generic, TypeVar

import structlog

from multiverse.controller.backoff import pause
from multiverse.core.errors import MultiverseError
from multiverse.ports import Clock

T = TypeVar("T")
log = structlog.get_logger()

TIMEOUT = 60.0
"""Seconds."""


class Publication(Generic[T]):
    """`what` names the value in the log. `known` is what the scheduler knows before anything was published."""

    def __init__(self, what: str, clock: Clock, rng: Random, known: T | None = None) -> None:
        self._what, self._known = what, known
        self._clock, self._rng = clock, rng
        self._task: asyncio.Task[None] | None = None
        self._failures = 0  # in a row
        self._again_at = 0.0

    def ensure(self, value: T, publish: Callable[[T], Awaitable[None]]) -> None:
        """Publish the value if it is not the one that was published last. Awaits nothing: a call that failed, and a
        value that changed during a call, are published by a later `ensure`."""
        busy = self._task is not None and not self._task.done()
        if value == self._known or busy or self._clock.now() < self._again_at:
            return
        self._task = asyncio.create_task(self._publish(value, publish), name=f"publish the {self._what}")

    async def _publish(self, value: T, publish: Callable[[T], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                await publish(value)
        except (MultiverseError, TimeoutError) as error:
            self._failures += 1
            self._again_at = self._clock.now() + pause(self._failures, self._rng)
            reason = str(error) or f"it did not end within {TIMEOUT:g} s"
            log.warning(f"{self._what} not published", reason=reason)
        else:
            self._known, self._failures = value, 0

    async def close(self) -> None:
        """Stop a call that runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
