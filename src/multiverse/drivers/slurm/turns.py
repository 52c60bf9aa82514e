"""Limits how many of Slurm's commands run at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class CommandTurns:
    """At most `most` commands run at the same time, of which at most three quarters change something.

    Observations go before changes that wait, so that any number of changes delays an observation by no more than the
    commands that run. The order is otherwise that of asking: a burst of one kind of change does not starve the others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._most_changes = max(1, most - max(1, most // 4))
        self._observations: deque[asyncio.Future[None]] = deque()
        self._changes: deque[asyncio.Future[None]] = deque()
        self._running = self._changing = 0

    @asynccontextmanager
    async def turn(self, *, observes: bool) -> AsyncIterator[None]:
        """The turn of one command. A command must not wait for the turn of another one."""
        granted = asyncio.get_running_loop().create_future()
        waiting = self._observations if observes else self._changes
        waiting.append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # it was granted in the meantime
                self._end(observes=observes)
            raise
        try:
            yield
        finally:
            self._end(observes=observes)

    def _end(self, *, observes: bool) -> None:
        self._running -= 1
        self._changing -= not observes
        self._grant()

    def _grant(self) -> None:
        while self._running < self._most:
            if (granted := _next(self._observations)) is not None:
                self._running += 1
            elif self._changing < self._most_changes and (granted := _next(self._changes)) is not None:
                self._running += 1
                self._changing += 1
            else:
                return
            granted.set_result(None)


def _next(waiting: deque[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """Take out the first that still waits, and those before it that were cancelled."""
    while waiting:
        granted = waiting.popleft()
        if not granted.done():
            return granted
    return None
