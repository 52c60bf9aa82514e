"""The schema as it was when Alembic came."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _row_table(name: str, *extra: sa.Column[Any]) -> None:
    op.create_table(
        name,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("live", sa.Boolean, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        *extra,
    )
    op.create_index(f"ix_{name}_live", name, ["live"])


def upgrade() -> None:
    op.create_table(
        "meta", sa.Column("key", sa.String, primary_key=True), sa.Column("value", sa.String, nullable=False)
    )
    _row_table("attempts", sa.Column("job_id", sa.String, nullable=False))
    op.create_index("ix_attempts_job_id", "attempts", ["job_id"])
    _row_table("vms", sa.Column("attempt", sa.Integer, nullable=True))
    op.create_index("ix_vms_attempt", "vms", ["attempt"])
    _row_table("templates")
    op.create_table(
        "claims",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("cpus", sa.Integer, nullable=False),
        sa.Column("memory", sa.Integer, nullable=False),
        sa.Column("disk", sa.Integer, nullable=False),
    )
    op.create_table(
        "journal",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("boot", sa.String, nullable=False),
        sa.Column("mono", sa.Float, nullable=False),
        sa.Column("wall", sa.Float, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=True),
        sa.Column("event", sa.String, nullable=False),
        sa.Column("source", sa.String, nullable=True),
        sa.Column("target", sa.String, nullable=True),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
    )
    op.create_index("ix_journal_attempt", "journal", ["attempt"])
