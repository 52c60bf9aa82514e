"""What is old, and what was used: pruning of ended rows, and the history of what hosts, VMs and jobs have used.

Each step is a small transaction of its own, so that passes wait some milliseconds at most. Rows of use are added only
while the disk has more room than is reserved for releases.

`Pruning` deletes rows that ended long ago, and their journal. These stay: live rows; all attempts of a job, and all
tasks of an array, while one of them is live, so that the timeline of a live job is whole; the VMs of such attempts.
SQLite uses the freed space for new rows; the file does not shrink.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa
from pydantic import TypeAdapter

from multiverse.core.errors import Refused
from multiverse.core.model.basics import RowKind
from multiverse.core.model.usage import MEANS, PEAKS, JobUsage, Usage, combined
from multiverse.store import schema
from multiverse.store.database import Store

Execute = Callable[[sa.Executable, dict[str, Any]], sa.CursorResult[Any]]

ROWS = 25  # ended rows that one step examines
ENTRIES = 100  # entries of the journal that one step deletes

# Whether an ended attempt stays, because its job, or another task of its array (`123_4`), has a live attempt. The index
# ix_attempts_live_job holds live attempts only. "`" follows "_", so this is a range of the index.
_LIVE_JOB = """EXISTS (
    SELECT 1 FROM (
        SELECT CASE WHEN instr({a}.job_id, '_') THEN substr({a}.job_id, 1, instr({a}.job_id, '_') - 1)
               ELSE {a}.job_id END AS base) AS job
    WHERE EXISTS (SELECT 1 FROM attempts AS other WHERE other.live = 1 AND other.job_id = job.base)
       OR EXISTS (SELECT 1 FROM attempts AS other WHERE other.live = 1
                  AND other.job_id > job.base || '_' AND other.job_id < job.base || '`'))"""
# Whether the attempt of a VM, or of an entry of its journal, stays.
_KEPT = f"""(
    NOT EXISTS (SELECT 1 FROM ended AS old WHERE old.kind = 'attempt' AND old.id = kept.id AND old.wall < :before)
    OR {_LIVE_JOB.format(a="kept")})"""
_ATTEMPT_STAYS = f"EXISTS (SELECT 1 FROM attempts AS own WHERE own.id = ended.id AND {_LIVE_JOB.format(a='own')})"
_VM_STAYS = f"""(
    EXISTS (SELECT 1 FROM vms JOIN attempts AS kept ON kept.id = vms.attempt WHERE vms.id = ended.id AND {_KEPT})
    OR EXISTS (SELECT 1 FROM journal JOIN attempts AS kept ON kept.id = journal.attempt
               WHERE journal.kind = 'vm' AND journal.id = ended.id AND {_KEPT}))"""

_TABLES: tuple[tuple[RowKind, str, str], ...] = (
    ("attempt", "attempts", _ATTEMPT_STAYS),
    ("vm", "vms", _VM_STAYS),
    ("offer", "offers", "0"),
    ("template", "templates", "0"),
    ("lease", "leases", "0"),
    ("host", "hosts", "0"),
)
_EXAMINE = {
    kind: sa.text(
        f"""SELECT id, wall, {stays} AS stays FROM ended
            WHERE kind = :kind AND wall < :before AND (wall, id) > (:wall, :id) ORDER BY wall, id LIMIT :rows"""
    )
    for kind, _, stays in _TABLES
}
_ids: sa.BindParameter[int] = sa.bindparam("ids", expanding=True)
_COUNT_ENTRIES = sa.text("SELECT COUNT(*) FROM journal WHERE kind = :kind AND id IN :ids").bindparams(_ids)
_DELETE_ENTRIES = sa.text(
    "DELETE FROM journal WHERE seq IN (SELECT seq FROM journal WHERE kind = :kind AND id IN :ids LIMIT :entries)"
).bindparams(_ids)
_WITH_ENTRIES = sa.text("SELECT DISTINCT id FROM journal WHERE kind = :kind AND id IN :ids").bindparams(_ids)
_DELETE_ROWS = {
    kind: sa.text(f"DELETE FROM {table} WHERE id IN :ids AND NOT live").bindparams(_ids) for kind, table, _ in _TABLES
}
_DELETE_ENDS = sa.text("DELETE FROM ended WHERE kind = :kind AND id IN :ids").bindparams(_ids)
_BEFORE_ALL = (float("-inf"), -1)


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows of each kind, and how many entries of the journal, were deleted or would be."""

    attempts: int = 0
    vms: int = 0
    offers: int = 0
    templates: int = 0
    journal: int = 0
    leases: int = 0
    hosts: int = 0

    @property
    def rows(self) -> int:
        """All but the journal."""
        return self.attempts + self.vms + self.offers + self.templates + self.leases + self.hosts


class Pruning:
    """One round over rows that ended before a Unix time. With `dry_run` rows are counted and not deleted."""

    def __init__(self, store: Store, before: float, *, after: str = "", dry_run: bool = False) -> None:
        """`after` is the `position` of another round. Raises `Refused` if it makes no sense."""
        self._store, self._before, self._dry_run = store, before, dry_run
        self._left = list(_TABLES)
        self._after = _BEFORE_ALL  # the last row that is done in the first of these tables: its end and id
        self._removed: Counter[str] = Counter()
        if after:
            self._go_to(after)

    def _go_to(self, position: str) -> None:
        kinds = [kind for kind, _, _ in _TABLES]
        try:
            kind, wall, id_ = position.split(" ")
            self._left = self._left[kinds.index(kind) :]  # type: ignore[arg-type]
            self._after = (float(wall), int(id_))
        except ValueError as error:
            raise Refused(f"{position!r} is no position of a round", hint="begin with an empty one") from error

    @property
    def position(self) -> str:
        """Where another round can go on; empty when nothing is left to do."""
        return f"{self._left[0][0]} {self._after[0]!r} {self._after[1]}" if self._left else ""

    @property
    def removed(self) -> Pruned:
        return Pruned(**self._removed)

    def step(self) -> bool:
        """One transaction. False when nothing is left to do. Raises `Exhausted`; then it may be repeated."""
        if not self._left:
            return False
        kind, table, _ = self._left[0]
        wall, id_ = self._after
        position = {"kind": kind, "before": self._before, "wall": wall, "id": id_, "rows": ROWS}
        with self._store.maintenance() as execute:
            rows = execute(_EXAMINE[kind], position).all()
            old = [row.id for row in rows if not row.stays]
            rows_removed, entries = (self._count if self._dry_run else self._delete)(execute, kind, old)
        self._removed.update({table: rows_removed, "journal": entries})
        if not rows:
            self._left.pop(0)
            self._after = _BEFORE_ALL
        elif rows_removed == len(old):  # else some have entries left, and are examined again
            self._after = (rows[-1].wall, rows[-1].id)
        return bool(self._left)

    @staticmethod
    def _count(execute: Execute, kind: RowKind, ids: list[int]) -> tuple[int, int]:
        return len(ids), execute(_COUNT_ENTRIES, {"kind": kind, "ids": ids}).scalar_one() if ids else 0

    @staticmethod
    def _delete(execute: Execute, kind: RowKind, ids: list[int]) -> tuple[int, int]:
        if not ids:
            return 0, 0
        entries = execute(_DELETE_ENTRIES, {"kind": kind, "ids": ids, "entries": ENTRIES}).rowcount
        remaining = set(execute(_WITH_ENTRIES, {"kind": kind, "ids": ids}).scalars()) if entries == ENTRIES else set()
        bare = [id_ for id_ in ids if id_ not in remaining]
        if bare:
            execute(_DELETE_ROWS[kind], {"ids": bare})
            execute(_DELETE_ENDS, {"kind": kind, "ids": bare})
        return len(bare), entries


# --- what hosts and VMs have used: a row for each minute, and for each hour when it is old ----------


MINUTE, HOUR, DAY = 60, 3600, 86400

MINUTES_KEPT = DAY  # seconds for which rows of a minute stay; then an hour becomes one row
ADDED, MERGED, DELETED = 200, 10, 500  # per step: rows added, hosts and VMs whose hour is merged, old rows deleted

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
    """What a host or VM used in the `span` seconds from `wall` (Unix time) on; `usage.span` seconds are known."""

    kind: UsedBy
    name: str
    wall: int
    span: int
    usage: Usage


def add_usage(store: Store, records: Sequence[UsageRecord]) -> None:
    """Keep `ADDED` records at most. Raises `Exhausted` if there is no room beyond what is reserved."""
    if records:
        with store.maintenance(adds=True) as execute:
            execute(_PUT, [_row(one) for one in records])


def read_usage(store: Store, kind: UsedBy, name: str, since: float) -> list[UsageRecord]:
    """The records of a host or VM from `since` (Unix time) on, in order."""
    with store.maintenance() as execute:
        rows = execute(_READ, {"kind": kind, "name": name, "since": since}).all()
    return [UsageRecord(kind, name, row.wall, row.span, _usage(row[2:])) for row in rows]


class UsagePruning:
    """One round: minutes older than a day become hours, and rows older than `before` are deleted."""

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


# --- what runs of jobs have used --------------------------------------------------------------------


RUNS_DELETED = 100  # rows that one step of pruning deletes

_RUNS = schema.job_usage
_RUN = TypeAdapter(JobUsage)
_PUT_RUN = _RUNS.insert().prefix_with("OR REPLACE")
_READ_RUNS = sa.select(_RUNS.c.body).where(_RUNS.c.attempt.in_(sa.bindparam("attempts", expanding=True)))
_DROP_RUNS = sa.text(
    "DELETE FROM job_usage WHERE attempt IN (SELECT attempt FROM job_usage WHERE wall < :before LIMIT :most)"
)


def put_job_usage(store: Store, usages: Sequence[JobUsage], wall: float) -> None:
    """Keep what runs have used, as of a Unix time. Raises `Exhausted` if there is no room beyond the reserve."""
    if usages:
        with store.maintenance(adds=True) as execute:
            bodies = [(one.attempt, str(_RUN.dump_json(one), "utf-8")) for one in usages]
            execute(_PUT_RUN, [{"attempt": attempt, "wall": wall, "body": body} for attempt, body in bodies])


def read_job_usage(store: Store, attempts: Sequence[int]) -> dict[int, JobUsage]:
    if not attempts:
        return {}
    with store.maintenance() as execute:
        bodies = execute(_READ_RUNS, {"attempts": list(attempts)}).scalars().all()
    return {one.attempt: one for one in map(_RUN.validate_json, bodies)}


class JobUsagePruning:
    """Deletes the rows that were written last before `before` (Unix time)."""

    def __init__(self, store: Store, before: float) -> None:
        self._store, self._before = store, before

    def step(self) -> bool:
        with self._store.maintenance() as execute:
            return execute(_DROP_RUNS, {"before": self._before, "most": RUNS_DELETED}).rowcount == RUNS_DELETED
