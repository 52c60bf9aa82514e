"""One snapshot of everything for all viewers, and what changes in it. Without viewers nothing is computed.

A viewer gets the whole once, and then deltas; all get the same bytes. Documents are kept as text, so that a snapshot
costs what has changed. The more a snapshot costs, the longer is the time until the next one: all viewers together take
no more than a share of a core.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, NamedTuple

import structlog

from multiverse.api import SummaryView, adapter
from multiverse.core.errors import Exhausted
from multiverse.service.backend import Backend, Source

log = structlog.get_logger()

INTERVAL = 1.0  # seconds between two snapshots, at least
SHARE = 0.03  # the share of a core that snapshots and their transmission take, at most, however large the site is
TRANSMISSION = 0.0001  # CPU seconds for one event to one viewer; `multiverse bench viewers` measures it

HEARTBEAT = 10.0
"""Seconds after which viewers are sent something though nothing has changed: they see that the connection lives."""

KEPT = 64  # events that are kept for viewers that are behind. Who is further behind gets the whole anew.
PIECE = 65536
"""Bytes that are handed to a connection at a time: what a slow viewer does not take yet is not copied for it."""

KINDS = ("hosts", "vms", "jobs", "alerts", "evictions")


# --- documents --------------------------------------------------------------------------------------------


class Changed(NamedTuple):
    """Keys of new and changed documents, and of documents that are gone."""

    changed: Sequence[str]
    gone: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.changed or self.gone)


@dataclass(slots=True)
class Documents:
    """Texts by key. A text is made again only when its source has changed."""

    texts: dict[str, str] = field(default_factory=dict)
    _made_from: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def update(self, found: Iterable[Source]) -> Changed:
        """Take all documents that there are, and tell how they differ from those before."""
        changed, seen = [], set()
        for key, made_from, make in found:
            seen.add(key)
            before = self._made_from.get(key)
            if before is not None and before[0] is made_from[0] and before[1:] == made_from[1:]:
                continue
            self._made_from[key] = made_from
            text = _encoded(make())
            if self.texts.get(key) != text:
                self.texts[key] = text
                changed.append(key)
        gone = [key for key in self.texts if key not in seen] if len(seen) != len(self.texts) else []
        for key in gone:
            del self.texts[key], self._made_from[key]
        return Changed(changed, gone)


def _encoded(value: object) -> str:
    """A value of the API as JSON."""
    return adapter(type(value)).dump_json(value).decode()  # type: ignore[arg-type]  # a type is hashable


def _whole(number: int, summary: SummaryView, documents: Mapping[str, Documents]) -> str:
    """A `Snapshot` as JSON."""
    parts = (f'"{kind}":[{",".join(documents[kind].texts.values())}]' for kind in KINDS)
    return f'{{"number":{number},"summary":{_encoded(summary)},{",".join(parts)}}}'


def _delta(
    number: int, summary: SummaryView | None, documents: Mapping[str, Documents], found: Mapping[str, Changed]
) -> str:
    """A `Delta` as JSON."""
    parts = [f'"number":{number}', f'"summary":{_encoded(summary) if summary else "null"}']
    for kind in KINDS:
        texts = documents[kind].texts
        parts.append(f'"{kind}":[{",".join(texts[key] for key in found[kind].changed)}]')
    gone = {kind: found[kind].gone for kind in KINDS if found[kind].gone}
    return "{" + ",".join([*parts, f'"gone":{json.dumps(gone)}']) + "}"


# --- the publisher ----------------------------------------------------------------------------------------


class Publisher:
    """Serves at most `most` viewers at a time."""

    def __init__(self, backend: Backend, most: int = 500) -> None:
        self._backend, self._most = backend, most
        self._documents = {kind: Documents() for kind in KINDS}
        self._summary: SummaryView | None = None
        self._epoch, self._number = token_hex(4), 0
        self._events: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._published = asyncio.Event()
        self._whole: tuple[int, bytes] = (0, b"")
        self._made = self._sent = 0.0  # when the last snapshot was made, and the last event (monotonic)
        self._cost = 0.0  # CPU seconds of a snapshot
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.viewers = 0

    async def snapshot(self) -> bytes:
        """A `Snapshot` as JSON, at most `INTERVAL` seconds old unless it is costly."""
        self._ensure_fresh()
        return self._as_whole()

    async def events(self, last: str = "") -> AsyncGenerator[bytes | memoryview]:
        """Server-sent events for one viewer until it leaves: `snapshot`, then `delta`. `last` is the id of the last
        event that it has. Raises `Exhausted` if there are too many viewers."""
        if self.viewers >= self._most:
            raise Exhausted(f"{self._most} viewers are connected", hint="close some, or raise web.viewers")
        self._count(1)
        try:
            self._ensure_running()
            self._ensure_fresh()
            seen = self._resumed(last)
            while not self._closed:
                published = self._published
                if seen < self._number:
                    pieces, seen = self._since(seen), self._number
                    for piece in pieces:
                        yield piece
                    continue  # more may have happened while that was sent
                await published.wait()
                if seen == self._number and not self._closed:
                    yield b": \n\n"
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        self.viewers += more
        self._backend.statistics.viewers = self.viewers

    async def close(self) -> None:
        """Let all viewers go, and end."""
        self._closed = True
        self._published.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _since(self, seen: int) -> list[memoryview]:
        """What a viewer lacks that has seen the event of that number (0: none), in pieces."""
        if seen > 0 and self._events[0][0] <= seen + 1:
            events = [text for number, text in self._events if number > seen]
        else:
            events = [self._event("snapshot", self._number, self._as_whole())]
        views = [memoryview(event) for event in events]
        return [view[start : start + PIECE] for view in views for start in range(0, len(view), PIECE)]

    # --- snapshots ---------------------------------------------------------------------------------

    @property
    def interval(self) -> float:
        """Seconds from one snapshot to the next."""
        return max(INTERVAL, (self._cost + self.viewers * TRANSMISSION) / SHARE)

    def _ensure_fresh(self) -> None:
        if self._number == 0 or time.monotonic() - self._made >= self.interval:
            self._refresh()

    def _refresh(self) -> None:
        began = time.thread_time()
        summary, found = self._backend.shown()
        changed = {kind: self._documents[kind].update(found[kind]) for kind in KINDS}
        now = time.monotonic()
        same = self._summary is not None and replace(self._summary, wall=summary.wall) == summary
        if not same or any(changed.values()):
            self._number += 1
            text = _delta(self._number, None if same else summary, self._documents, changed)
            self._events.append((self._number, self._event("delta", self._number, text.encode())))
            self._summary = summary
            self._announce(now)
        elif now - self._sent >= HEARTBEAT:
            self._announce(now)
        self._made = now
        self._cost = max(0.8 * self._cost, time.thread_time() - began)

    def _announce(self, now: float) -> None:
        self._sent = now
        published, self._published = self._published, asyncio.Event()
        published.set()

    def _as_whole(self) -> bytes:
        number, text = self._whole
        if number != self._number and self._summary is not None:
            text = _whole(self._number, self._summary, self._documents).encode()
            self._whole = (self._number, text)
        return text

    def _event(self, name: str, number: int, text: bytes) -> bytes:
        return b"event: %s\nid: %s-%d\ndata: %s\n\n" % (name.encode(), self._epoch.encode(), number, text)

    def _resumed(self, last: str) -> int:
        """The number of the last event that the viewer has; 0: it has none of this publisher's."""
        epoch, _, number = last.partition("-")
        return int(number) if epoch == self._epoch and number.isdecimal() and int(number) <= self._number else 0

    # --- the task ----------------------------------------------------------------------------------

    def _ensure_running(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="snapshots for viewers")

    async def _run(self) -> None:
        while self.viewers and not self._closed:
            await asyncio.sleep(self.interval)
            if not self.viewers:
                break
            try:
                self._refresh()
            except Exception:  # a defect; viewers keep what they have, and the controller is not affected
                log.exception("no snapshot for viewers")
        self._whole = (0, b"")  # it may be large, and nobody looks
