"""Prunes what ended long ago, beside the passes: small steps, with pauses in which passes run."""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

import structlog

from multiverse.core.errors import MultiverseError
from multiverse.ports import Clock
from multiverse.store import Pruned, Pruning, Store
from multiverse.store.job_usage import JobUsagePruning
from multiverse.store.utilization import UsagePruning

log = structlog.get_logger()

INTERVAL = 3600.0
"""Seconds between two rounds."""

SHARE, LEAST_PAUSE = 0.1, 0.005
"""The steps take at most this share of the time. A pause takes this many seconds at least."""

DAY = 86400.0


class Steps(Protocol):
    """A round of small steps."""

    def step(self) -> bool:
        """Do one. False if nothing is left to do."""
        ...


async def prune(one_round: Steps, clock: Clock, *, limit: float = math.inf) -> None:
    """Carry out a round, for `limit` seconds at most. Raises `Exhausted` if a step cannot be committed; the steps
    before it are kept."""
    more, until = True, clock.now() + limit
    while more and clock.now() < until:
        began = clock.now()
        more = one_round.step()
        await asyncio.sleep(max(LEAST_PAUSE, (clock.now() - began) * (1 / SHARE - 1)))


async def prune_regularly(store: Store, clock: Clock, days: float) -> None:
    """Prune once an hour what ended more than `days` ago, and what was used before that; never ends. 0: nothing is
    deleted."""
    while True:
        if days > 0:
            one_round = Pruning(store, clock.wall() - days * DAY)
            try:
                await prune(one_round, clock)
            except MultiverseError as error:
                log.warning("history not pruned", reason=str(error))
            if (removed := one_round.removed) != Pruned():
                log.info("history pruned", days=days, rows=removed.rows, journal=removed.journal)
        before = clock.wall() - days * DAY if days > 0 else -math.inf
        try:
            await prune(UsagePruning(store, clock.wall(), before), clock)
            await prune(JobUsagePruning(store, before), clock)
        except MultiverseError as error:
            log.warning("history of utilization not pruned", reason=str(error))
        await asyncio.sleep(INTERVAL)
