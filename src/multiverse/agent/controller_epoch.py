"""The epoch of this run of the controller: above that of every controller before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection


class ControllerEpoch:
    """One above every epoch that the store or any agent knows, once the agents were asked.

    Hosts that do not answer in time are not waited for. If one of them has seen a higher epoch, it refuses this
    controller: then a controller with another database has commanded it, and an operator has to decide.
    """

    def __init__(self, kept: int, keep: Callable[[int], None], hosts: Collection[str], wait: float) -> None:
        """`kept` is the store's epoch, and `keep` stores the next one before any agent hears of it. The agents of
        `hosts` have `wait` seconds to answer."""
        self._highest, self._keep, self._wait = kept, keep, wait
        self._awaited = set(hosts)
        self._all_answered = asyncio.Event()
        self._number: asyncio.Task[int] | None = None
        if not self._awaited:
            self._all_answered.set()

    def answered(self, host: str, epoch: int) -> None:
        """An agent has said which epoch it has seen."""
        if self._number is None or not self._number.done():
            self._highest = max(self._highest, epoch)
        self.given_up(host)

    def given_up(self, host: str) -> None:
        """An agent could not be reached: nobody waits for it."""
        self._awaited.discard(host)
        if not self._awaited:
            self._all_answered.set()

    async def number(self) -> int:
        """The epoch, once it is known. Raises what storing it raises; then the next call tries again."""
        failed = self._number is not None and self._number.done() and self._number.exception() is not None
        if self._number is None or failed:
            self._number = asyncio.create_task(self._decide(), name="epoch")
        return await asyncio.shield(self._number)

    async def _decide(self) -> int:
        try:
            await asyncio.wait_for(self._all_answered.wait(), self._wait)
        except TimeoutError:
            pass
        number = self._highest + 1
        self._keep(number)
        return number
