"""Leases: hosts that are borrowed from the scheduler. Their hosts end with them, so rows of hosts end, too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("live", sa.Boolean, nullable=False),
        sa.Column("body", sa.String, nullable=False),
    )
    op.create_index("ix_leases_live", "leases", ["id"], sqlite_where=sa.text("live = 1"))


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
