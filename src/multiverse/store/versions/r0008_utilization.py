"""A table for what hosts and VMs have used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "utilization",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("span", sa.Integer, primary_key=True),
        sa.Column("wall", sa.Integer, primary_key=True),
        sa.Column("covered", sa.Float, nullable=False),
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
        sqlite_with_rowid=False,
    )
    op.create_index("ix_utilization_age", "utilization", ["span", "wall"])


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
