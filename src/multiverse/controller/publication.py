"""Tells the scheduler the values that it is to know, such as where nodes are: once for each change, and again after a
failure. And how long to pause before something that failed, or that has to be ensured, is done again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from typing import Generic, TypeVar

import structlog

from multiverse.core.errors import MultiverseError
from multiverse.core.model import Vm, VmState
from multiverse.core.transition import Move
from multiverse.ports import Addresses, Clock

AGAIN, AGAIN_LIMIT = 2.0, 60.0
"""Seconds before the first repetition, doubled for each further one up to the limit."""

JITTER = 0.5
"""A pause is longer by up to this share, by chance: what began at the same time is not repeated at the same time."""


def pause(runs: int, rng: Random) -> float:
    """Seconds until something that was done so many times is done again."""
    shortest = min(AGAIN_LIMIT, AGAIN * 2.0 ** min(runs - 1, 16))
    return shortest * (1.0 + JITTER * rng.random())


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


_HAS_JOBS = (VmState.STARTING, VmState.JOINED, VmState.SERVING, VmState.RETIRING, VmState.ORPHAN, VmState.LOST)
"""A VM in one of these states runs a job or may get one. That of a lost VM goes on if its host comes back."""


class AddressBook:
    """Follows the moves that were committed, at the cost of what they change."""

    def __init__(self, vms: Iterable[Vm], clock: Clock, rng: Random) -> None:
        self._of_node: dict[str, str] = {}
        self._changes = 0
        self._told = Publication[int]("addresses of nodes", clock, rng)
        for vm in vms:
            self._note(vm)

    def note(self, moves: Iterable[Move]) -> None:
        """Learn from moves that were committed."""
        for change in (change for move in moves for change in move.changes):
            if isinstance(change.row, Vm):
                self._note(change.row)

    def _note(self, vm: Vm) -> None:
        address = vm.address.partition("/")[0] if vm.state in _HAS_JOBS else ""
        if address != self._of_node.get(vm.name, ""):
            self._changes += 1
            if address:
                self._of_node[vm.name] = address
            else:
                del self._of_node[vm.name]

    def ensure(self, addresses: Addresses | None) -> None:
        """Tell what has changed, and everything once. Awaits nothing."""
        if addresses is not None:
            told = addresses
            self._told.ensure(self._changes, lambda _: told.tell(dict(self._of_node)))

    async def close(self) -> None:
        """Stop a call that runs."""
        await self._told.close()
