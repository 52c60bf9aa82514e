"""The index of live rows holds live rows alone: it no longer grows with every job that has ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_TABLES = ("attempts", "vms", "templates")


def upgrade() -> None:
    for name in _TABLES:
        op.drop_index(f"ix_{name}_live", name)
        op.create_index(f"ix_{name}_live", name, ["id"], sqlite_where=sa.text("live = 1"))


def downgrade() -> None:
    for name in _TABLES:
        op.drop_index(f"ix_{name}_live", name)
        op.create_index(f"ix_{name}_live", name, ["live"])
