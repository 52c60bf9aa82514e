"""A line of the log for each row that a committed move has changed: its state before and after, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from multiverse.core.model import Attempt, Reason, Row, Vm, text_of
from multiverse.core.rows import LiveRows
from multiverse.core.transition import TERMINAL, Change, Done, Move

log = structlog.get_logger()


class MoveLog:
    """A watcher of the controller. `rows` are those that it begins with: a move does not say what a row was before."""

    def __init__(self, rows: LiveRows) -> None:
        tables = (rows.attempts, rows.vms, rows.templates, rows.offers, rows.leases)
        self._states = {row.key: str(row.state) for table in tables for row in table.values()}
        self._states |= {host.key: str(host.state) for host in rows.hosts.values()}

    def moved(self, moves: Sequence[Move], now: float) -> None:
        for move in moves:
            for change in move.changes:
                self._log(change)

    def ended(self, done: Done) -> None:
        """Effects are logged where they fail, and measured in the journal."""

    def _log(self, change: Change) -> None:
        row = change.row
        old = self._states.pop(row.key, "")
        if row.state not in TERMINAL:
            self._states[row.key] = str(row.state)
        log.info(
            "moved", row=str(row.key), old=old, new=str(row.state), by=str(change.event), **_whose(row),
            reason=text_of(change.reason or _why(row, old)),
        )  # fmt: skip


def _whose(row: Row) -> dict[str, Any]:
    if isinstance(row, Attempt):
        return {"attempt": row.id, "job": row.job.job_id}
    if isinstance(row, Vm):
        return {"attempt": row.attempt, "vm": row.name, "host": row.host}
    return {}


def _why(row: Row, old: str) -> Reason | None:
    """The row's own reason, where the state that it tells of has just begun."""
    return row.reason if old != row.state else None
