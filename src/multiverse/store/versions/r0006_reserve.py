"""Room in the database that only releases may use. See `store/reserve.py`, which fills the table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "reserve",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("room", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
