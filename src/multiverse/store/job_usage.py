"""What jobs used, a row for each run of a job. Bounded work, in transactions of their own."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from pydantic import TypeAdapter

from multiverse.core.model.usage import JobUsage
from multiverse.store import schema
from multiverse.store.database import Store

DELETED = 100
"""Rows that one step of pruning deletes."""

_TABLE = schema.job_usage
_ADAPTER = TypeAdapter(JobUsage)
_PUT = _TABLE.insert().prefix_with("OR REPLACE")
_READ = sa.select(_TABLE.c.body).where(_TABLE.c.attempt.in_(sa.bindparam("attempts", expanding=True)))
_DROP = sa.text(
    "DELETE FROM job_usage WHERE attempt IN (SELECT attempt FROM job_usage WHERE wall < :before LIMIT :most)"
)


def put_job_usage(store: Store, usages: Sequence[JobUsage], wall: float) -> None:
    """Keep what these runs have used, as of `wall` (Unix time). Raises `Exhausted` if there is no room beyond what is
    reserved."""
    if usages:
        with store.maintenance(adds=True) as execute:
            execute(_PUT, [{"attempt": one.attempt, "wall": wall, "body": _body(one)} for one in usages])


def read_job_usage(store: Store, attempts: Sequence[int]) -> dict[int, JobUsage]:
    """What is known of these attempts, by their numbers."""
    if not attempts:
        return {}
    with store.maintenance() as execute:
        bodies = execute(_READ, {"attempts": list(attempts)}).scalars().all()
    return {one.attempt: one for one in map(_ADAPTER.validate_json, bodies)}


class JobUsagePruning:
    """Deletes the rows that were written last before `before` (Unix time)."""

    def __init__(self, store: Store, before: float) -> None:
        self._store, self._before = store, before

    def step(self) -> bool:
        """Do a little. False if nothing is left to do."""
        with self._store.maintenance() as execute:
            return execute(_DROP, {"before": self._before, "most": DELETED}).rowcount == DELETED


def _body(one: JobUsage) -> str:
    return str(_ADAPTER.dump_json(one), "utf-8")
