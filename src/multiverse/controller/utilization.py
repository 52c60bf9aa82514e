"""Asks the hosts what they and their VMs use, and keeps a history of it. No pass waits for it, and none uses it.

A host that does not answer, or a database without room, leaves a gap in the history and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

import structlog

from multiverse.core.errors import MultiverseError
from multiverse.core.model import HostUsage, Usage
from multiverse.core.model.usage import combined
from multiverse.ports import Clock, Measurements
from multiverse.store import Store
from multiverse.store.utilization import ADDED, MINUTE, UsageRecord, UsedBy, add_usage

INTERVAL = 10.0
"""Seconds between two questions to a host, and the span that each answer covers."""

TIMEOUT = 10.0
"""Seconds that a host has to answer."""

AT_ONCE = 32
"""Hosts that are asked at the same time."""

STALE = 60.0
"""Seconds after which the figures of a host that does not answer are unknown."""

PAUSE = 0.02
"""Seconds between two steps that add rows."""

log = structlog.get_logger()


class UtilizationRecorder:
    """What the hosts of these sources use, as of a few seconds ago, and its history."""

    def __init__(
        self, store: Store, measurements: Measurements, sources: Callable[[], Collection[str]], clock: Clock
    ) -> None:
        self.store = store
        self._measurements, self._sources, self._clock = measurements, sources, clock
        self._latest: dict[str, tuple[float, HostUsage]] = {}
        self._minute = 0  # the Unix time of its beginning
        self._in_minute: dict[tuple[UsedBy, str], list[Usage]] = {}
        self._failures: dict[str, str] = {}  # those that were logged

    def current(self) -> Mapping[str, HostUsage]:
        """What each host, by name, has used lately; without hosts of which that is not known."""
        fresh = self._clock.now() - STALE
        return {name: usage for name, (at, usage) in sorted(self._latest.items()) if at >= fresh}

    async def run(self) -> None:
        """Ask and keep until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(INTERVAL)

    async def ask(self) -> None:
        """Ask all hosts once, and keep the last minute if it is over."""
        turns, sources = asyncio.Semaphore(AT_ONCE), list(self._sources())
        for gone in self._failures.keys() - {"", *sources}:
            del self._failures[gone]
        for gone in self._latest.keys() - self.current().keys():
            del self._latest[gone]
        minute, before = int(self._clock.wall()) // MINUTE * MINUTE, self._in_minute
        if minute != self._minute:
            await self._add(self._minute, before)
            self._minute, self._in_minute = minute, {}
        await asyncio.gather(*(self._ask(source, turns) for source in sources))

    async def _ask(self, source: str, turns: asyncio.Semaphore) -> None:
        reason = ""
        try:
            async with turns, asyncio.timeout(TIMEOUT):
                found = await self._measurements.used(source, INTERVAL)
        except (MultiverseError, TimeoutError) as error:
            reason = str(error) or f"no answer within {TIMEOUT:g} s"
        except Exception as error:  # a defect of a driver leaves a gap
            reason = f"{type(error).__name__}: {error}"
        else:
            for host, usage in found.items():
                self._note(host, usage)
        if reason and self._failures.get(source) != reason:
            log.info("utilization not known", source=source, reason=reason)
        self._failures[source] = reason

    def _note(self, host: str, usage: HostUsage) -> None:
        self._latest[host] = self._clock.now(), usage
        if usage.usage is not None:
            self._in_minute.setdefault(("host", host), []).append(usage.usage)
        for name, vm in usage.vms.items():
            if vm.usage is not None:
                self._in_minute.setdefault(("vm", name), []).append(vm.usage)

    async def _add(self, minute: int, used: Mapping[tuple[UsedBy, str], list[Usage]]) -> None:
        """Keep a minute, in small steps."""
        records = [UsageRecord(kind, name, minute, MINUTE, combined(all_)) for (kind, name), all_ in used.items()]
        reason = ""
        for first in range(0, len(records), ADDED):
            try:
                add_usage(self.store, records[first : first + ADDED])
            except MultiverseError as error:
                reason = str(error)
                break
            await asyncio.sleep(PAUSE)
        if reason and self._failures.get("") != reason:
            log.info("history of utilization not kept", reason=reason)
        self._failures[""] = reason
