"""The history of what hosts and VMs have used: a row for each and a minute, and for each and an hour when it is old.

Every method does a bounded amount of work, in one transaction of its own. Rows are added only while the disk has more
room than is reserved for releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from multiverse.core.model import Usage
from multiverse.core.model.usage import MEANS, PEAKS, combined
from multiverse.store import schema
from multiverse.store.database import Store

MINUTE, HOUR, DAY = 60, 3600, 86400

MINUTES_KEPT = DAY
"""Seconds for which rows of a minute stay; then those of an hour become one."""

ADDED, MERGED, DELETED = 200, 10, 500
"""Rows that one step adds; hosts and VMs whose hour one step merges; old rows that one step deletes."""

UsedBy = Literal["host", "vm"]

_TABLE = schema.utilization
_FIGURES = (*PEAKS, *MEANS)
_PUT = _TABLE.insert().prefix_with("OR REPLACE")
_READ = sa.text(
    f"""SELECT wall, span, covered, {", ".join(_FIGURES)} FROM utilization
        WHERE kind = :kind AND name = :name AND span IN (60, 3600) AND wall >= :since ORDER BY wall, span"""
)
_OLDEST = sa.text("SELECT MIN(wall) FROM utilization WHERE span = 60")
_OF_HOUR = sa.text(
    """SELECT DISTINCT kind, name FROM utilization
       WHERE span = 60 AND wall >= :hour AND wall < :hour + 3600 LIMIT :most"""
)
_MINUTES = sa.text(
    f"""SELECT covered, {", ".join(_FIGURES)} FROM utilization
        WHERE kind = :kind AND name = :name AND span = 60 AND wall >= :hour AND wall < :hour + 3600"""
)
_DROP_MINUTES = sa.text(
    """DELETE FROM utilization
       WHERE kind = :kind AND name = :name AND span = 60 AND wall >= :hour AND wall < :hour + 3600"""
)
_DROP_OLD = sa.text(
    """DELETE FROM utilization WHERE (kind, name, span, wall) IN (
           SELECT kind, name, span, wall FROM utilization WHERE span = 3600 AND wall < :before LIMIT :most)"""
)


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What a host or VM used in the `span` seconds from `wall` (Unix time) on; `usage.span` of them are known."""

    kind: UsedBy
    name: str
    wall: int
    span: int
    usage: Usage


def add_usage(store: Store, records: Sequence[UsageRecord]) -> None:
    """Keep some records, `ADDED` at most, in place of those of the same times. Raises `Exhausted` if there is no room
    beyond what is reserved."""
    if records:
        with store.maintenance(adds=True) as execute:
            execute(_PUT, [_row(one) for one in records])


def read_usage(store: Store, kind: UsedBy, name: str, since: float) -> list[UsageRecord]:
    """The records of a host or VM from `since` (Unix time) on, in order."""
    with store.maintenance() as execute:
        rows = execute(_READ, {"kind": kind, "name": name, "since": since}).all()
    return [UsageRecord(kind, name, row.wall, row.span, _usage(row[2:])) for row in rows]


class UsagePruning:
    """One round: rows of a minute that are older than a day become rows of an hour, and those that are older than
    `before` (Unix time) are deleted."""

    def __init__(self, store: Store, now: float, before: float) -> None:
        self._store, self._before = store, before
        self._minutes_before = now - MINUTES_KEPT
        self._merging = True

    def step(self) -> bool:
        """Do a little. False if nothing is left to do. Raises `Exhausted` if it could not be committed."""
        with self._store.maintenance() as execute:
            if self._merging:
                self._merging = self._merge(execute)
                return True
            deleted = execute(_DROP_OLD, {"before": self._before, "most": DELETED}).rowcount
        return deleted == DELETED

    def _merge(self, execute: Any) -> bool:
        oldest = execute(_OLDEST, {}).scalar()
        if oldest is None or (hour := int(oldest) // HOUR * HOUR) + HOUR > self._minutes_before:
            return False
        for kind, name in execute(_OF_HOUR, {"hour": hour, "most": MERGED}).all():
            which = {"kind": kind, "name": name, "hour": hour}
            usage = combined([_usage(row) for row in execute(_MINUTES, which).all()])
            execute(_PUT, [_row(UsageRecord(kind, name, hour, HOUR, usage))])
            execute(_DROP_MINUTES, which)
        return True


def _row(one: UsageRecord) -> dict[str, Any]:
    figures = {name: getattr(one.usage, name) for name in _FIGURES}
    which = {"kind": one.kind, "name": one.name, "span": one.span, "wall": one.wall}
    return {**which, "covered": one.usage.span, **figures}


def _usage(row: Sequence[Any]) -> Usage:
    covered, *figures = row
    return Usage(covered, **dict(zip(_FIGURES, figures, strict=True)))
