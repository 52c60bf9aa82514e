"""Deletes rows that ended long ago, and their journal, in small steps.

Each step is a transaction of its own that touches a bounded number of rows, so that a pass of the controller waits
some milliseconds at most. Age counts from a row's end. These stay, however old they are:

- live rows and their journal;
- all attempts of a job while one of its attempts is live, and all tasks of an array while one of them is: the timeline
  of a live job is whole;
- the VMs of an attempt that stays.

Of hosts, only those that were leased end.

SQLite uses the freed space for new rows. The file itself does not shrink.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from multiverse.core.errors import Refused
from multiverse.core.model import RowKind
from multiverse.store.database import Store

Execute = Callable[[sa.Executable, dict[str, Any]], sa.CursorResult[Any]]

ROWS = 25
"""Ended rows that one step examines."""

ENTRIES = 100
"""Entries of the journal that one step deletes."""

# Whether an ended attempt stays, because its job, or another task of its array (`123_4`), has a live attempt. The index
# ix_attempts_live_job holds live attempts only. "`" follows "_", so this is a range of the index.
_LIVE_JOB = """EXISTS (
    SELECT 1 FROM (
        SELECT CASE WHEN instr({a}.job_id, '_') THEN substr({a}.job_id, 1, instr({a}.job_id, '_') - 1)
               ELSE {a}.job_id END AS base) AS job
    WHERE EXISTS (SELECT 1 FROM attempts AS other WHERE other.live = 1 AND other.job_id = job.base)
       OR EXISTS (SELECT 1 FROM attempts AS other WHERE other.live = 1
                  AND other.job_id > job.base || '_' AND other.job_id < job.base || '`'))"""
# Whether an attempt to which a VM, or an entry of its journal, belongs is not going to be deleted.
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
    """One round over all rows that ended before `before` (Unix time). Several rounds at once are harmless. With
    `dry_run` nothing is deleted, and what would be is counted."""

    def __init__(self, store: Store, before: float, *, after: str = "", dry_run: bool = False) -> None:
        """`after` is the `position` up to which another round came. Raises `Refused` if it makes no sense."""
        self._store, self._before, self._dry_run = store, before, dry_run
        self._left = list(_TABLES)
        self._after = _BEFORE_ALL  # the row, by its end and id, up to which the first of these tables is done
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
        """What the steps so far have deleted, or counted."""
        return Pruned(**self._removed)

    def step(self) -> bool:
        """One transaction. False when nothing is left to do. Raises `Exhausted` if it cannot be committed: nothing of
        it is kept, and it may be repeated."""
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
        """Deletes the entries of these rows, as many as one step may, and the rows that have none left."""
        if not ids:
            return 0, 0
        entries = execute(_DELETE_ENTRIES, {"kind": kind, "ids": ids, "entries": ENTRIES}).rowcount
        remaining = set(execute(_WITH_ENTRIES, {"kind": kind, "ids": ids}).scalars()) if entries == ENTRIES else set()
        bare = [id_ for id_ in ids if id_ not in remaining]
        if bare:
            execute(_DELETE_ROWS[kind], {"ids": bare})
            execute(_DELETE_ENDS, {"kind": kind, "ids": bare})
        return len(bare), entries
