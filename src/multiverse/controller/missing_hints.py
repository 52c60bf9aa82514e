"""Notices that jobs are submitted without hints, for example after a failover to a slurmctld on another machine.

A lost hint costs a poll interval and nothing else. But when all are lost every job starts that much later, and an
operator would not learn why.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from multiverse.core.model import Attempt
from multiverse.core.transition import Event, Move
from multiverse.ports import Clock

log = structlog.get_logger()

UNTIL_MISSING = 3
"""Submissions in a row without a hint, in different seconds: one or two may be lost at a restart of the daemon."""

SKEW = 5.0
"""Seconds by which a hint may come earlier than the job was submitted by the scheduler's clock."""


class MissingHints:
    """Compares the submissions that observations show with the hints that came. Times are Unix times."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listening = clock.wall()
        self._last_hint = 0.0
        self._counted: set[int] = set()  # the seconds of the submissions that had no hint
        self.since: float | None = None
        """When the first of the submissions without a hint was noticed (monotonic); None while hints come."""

    def hint_came(self) -> None:
        """A hint told of a submission."""
        self._last_hint = self._clock.wall()
        self._counted.clear()
        if self.since is not None:
            self.since = None
            log.info("hints arrive again")

    def note(self, moves: Iterable[Move]) -> None:
        """Learn from committed moves which jobs were submitted. A job that is queued again comes without a hint."""
        for change in (change for move in moves for change in move.changes):
            row = change.row
            if change.event is Event.SUBMITTED and isinstance(row, Attempt) and not row.job.restarts:
                self._submitted(row.job.submitted)

    def _submitted(self, moment: int) -> None:
        if moment < self._listening + SKEW or self._last_hint >= moment - SKEW:
            return
        self._counted.add(moment)
        if len(self._counted) >= UNTIL_MISSING and self.since is None:
            self.since = self._clock.now()
            log.warning("hints missing", reason=f"the last {UNTIL_MISSING} submissions came without one")
