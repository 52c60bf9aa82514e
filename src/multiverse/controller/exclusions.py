"""Users who take offered nodes in vain: they get none for a while.

Slurm does not tell its submit script whether a request is a test (`sbatch --test-only`), and may refuse a job after the
script. Such a submission takes a node, and no job comes. Or the job comes, and Slurm does not start it, because a limit
of the user's is used up, which the script cannot know. The node serves nobody else in the meantime, so the user is
excluded from the offers for a while. The user's jobs wait at the gate then, where limits are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from multiverse.core.model import Attempt, Offer, text_of
from multiverse.core.transition import Event, Move

log = structlog.get_logger()

EXCLUSION, EXCLUSION_LIMIT = 60.0, 3600.0
"""Seconds that a user is excluded for after the first time, doubled with each further time up to the limit."""

FORGOTTEN = 3600.0
"""Seconds after the end of an exclusion until it counts no more."""


@dataclass(slots=True)
class _Taker:
    times: int
    until: float


class Exclusions:
    """Remembers, from the moves that were committed, which users took nodes in vain. A restart forgets it."""

    def __init__(self) -> None:
        self._takers: dict[int, _Taker] = {}

    def note(self, moves: Iterable[Move], now: float) -> None:
        """Learn from moves that were committed at `now`."""
        for move in moves:
            for change in move.changes:
                row, event = change.row, change.event
                if isinstance(row, Offer) and event is Event.MISSED and row.uid is not None:
                    self._missed(row.uid, now, "no job came for a taken spare")
                elif isinstance(row, Attempt) and event is Event.PIN_EXPIRED and row.pin:
                    self._missed(row.uid, now, text_of(change.reason))

    def _missed(self, uid: int, now: float, reason: str) -> None:
        taker = self._takers.setdefault(uid, _Taker(0, now))
        seconds = min(EXCLUSION_LIMIT, EXCLUSION * 2.0 ** min(taker.times, 16))
        if taker.until <= now:
            log.info("user is excluded from offers", uid=uid, seconds=seconds, reason=reason)
        taker.times, taker.until = taker.times + 1, now + seconds

    def excluded(self, now: float) -> frozenset[int]:
        """The users who get no offered node at `now`. What is long past is forgotten."""
        for uid in [uid for uid, taker in self._takers.items() if taker.until + FORGOTTEN <= now]:
            del self._takers[uid]
        return frozenset(uid for uid, taker in self._takers.items() if taker.until > now)
