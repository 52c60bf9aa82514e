"""Calls that the process of a simulated host executes, an agent or the library in its caller's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from multiverse.core.errors import Unknown
from multiverse_lab.simulation.machines import Machines

T = TypeVar("T")


class HostCalls:
    """Where agents serve calls, a call goes on when its caller has gone, as those of the real driver do. Elsewhere it
    ends with its caller."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._sources: dict[asyncio.Task[Any], str] = {}  # that executes each

    def end(self, source: str) -> None:
        """The process that executes the calls of a source has ended."""
        for task in [task for task, where in self._sources.items() if where == source]:
            task.cancel()

    async def run(self, source: str, work: Coroutine[Any, Any, T]) -> T:
        """Begin a call and wait for it. Raises `Unknown` if its process ends before."""
        return await self.wait_for(self.begin(source, work))

    def begin(self, source: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._sources[task] = source
        task.add_done_callback(self._ended)
        return task

    async def wait_for(self, task: asyncio.Task[T]) -> T:
        """The result of a call that was begun. Several may wait for it."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._machines.has_agents:
                task.cancel()
            if task.cancelled():  # its process has ended
                raise Unknown("the agent has ended") from None
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._sources.pop(task, None)
        if not task.cancelled():
            task.exception()  # of which nobody may have waited
