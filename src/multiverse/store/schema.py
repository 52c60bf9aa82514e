"""The tables, as the newest revision has them. A change here is a new revision in `versions`."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

HEAD = "0001"
"""The newest revision: what a database is upgraded to."""

metadata = sa.MetaData()
meta = sa.Table(
    "meta", metadata, sa.Column("key", sa.String, primary_key=True), sa.Column("value", sa.String, nullable=False)
)


def _row_table(name: str, *extra: sa.Column[Any]) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("live", sa.Boolean, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        *extra,
        # Of the live rows alone: those that have ended are many, and never asked for by that.
        sa.Index(f"ix_{name}_live", "id", sqlite_where=sa.text("live = 1")),
    )


attempts = _row_table("attempts", sa.Column("job_id", sa.String, nullable=False, index=True))
sa.Index("ix_attempts_live_job", attempts.c.job_id, sqlite_where=sa.text("live = 1"))
vms = _row_table("vms", sa.Column("attempt", sa.Integer, nullable=True, index=True))
templates = _row_table("templates")
offers = _row_table("offers")
ended = sa.Table(
    "ended",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("wall", sa.Float, nullable=False),  # Unix time
    sa.Index("ix_ended_wall", "kind", "wall"),
)
"""When rows of the four tables above, leases and their hosts ended; live rows are not in it."""
reserve = sa.Table(
    "reserve",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("room", sa.LargeBinary, nullable=False),
)
"""At most one row, which holds pages for releases (`store/reserve`)."""
hosts = _row_table("hosts", sa.Column("name", sa.String, nullable=False, unique=True, index=True))
leases = _row_table("leases")
claims = sa.Table(
    "claims",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("domain", sa.String, primary_key=True),
    sa.Column("cpus", sa.Integer, nullable=False),
    sa.Column("memory", sa.Integer, nullable=False),
    sa.Column("disk", sa.Integer, nullable=False),
    sa.Column("net", sa.Integer, nullable=False, server_default="0"),
)
journal = sa.Table(
    "journal",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("boot", sa.String, nullable=False),
    sa.Column("mono", sa.Float, nullable=False),
    sa.Column("wall", sa.Float, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("id", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=True, index=True),
    sa.Column("event", sa.String, nullable=False),
    sa.Column("source", sa.String, nullable=True),
    sa.Column("target", sa.String, nullable=True),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("detail", sa.String, nullable=False),
    sa.Index("ix_journal_row", "kind", "id"),
)
utilization = sa.Table(
    "utilization",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),  # of what: host or vm
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("span", sa.Integer, primary_key=True),  # seconds: 60 or 3600
    sa.Column("wall", sa.Integer, primary_key=True),  # Unix time at which the span begins
    sa.Column("covered", sa.Float, nullable=False),  # seconds of it that are known
    sa.Column("cpus_peak", sa.Float, nullable=False),
    sa.Column("memory_peak", sa.Float, nullable=False),
    sa.Column("cpus", sa.Float, nullable=False),
    sa.Column("memory", sa.Float, nullable=False),
    sa.Column("received", sa.Float, nullable=False),
    sa.Column("sent", sa.Float, nullable=False),
    sa.Column("read", sa.Float, nullable=False),
    sa.Column("written", sa.Float, nullable=False),
    sa.Column("active", sa.Float, nullable=True),
    sa.Column("cpu_pressure", sa.Float, nullable=True),
    sa.Column("memory_pressure", sa.Float, nullable=True),
    sa.Column("io_pressure", sa.Float, nullable=True),
    sa.Index("ix_utilization_age", "span", "wall"),
    sqlite_with_rowid=False,
)
"""What hosts and VMs have used (`store/utilization`)."""
job_usage = sa.Table(
    "job_usage",
    metadata,
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("wall", sa.Float, nullable=False, index=True),  # Unix time at which it was written
    sa.Column("body", sa.String, nullable=False),
)
"""What runs of jobs have used (`store/job_usage`)."""
