"""A table for what jobs have used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "job_usage",
        sa.Column("attempt", sa.Integer, primary_key=True),
        sa.Column("wall", sa.Float, nullable=False),
        sa.Column("body", sa.String, nullable=False),
    )
    op.create_index("ix_job_usage_wall", "job_usage", ["wall"])


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
