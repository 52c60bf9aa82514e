"""Claims hold a share of the network's bandwidth. Until now nothing claimed any."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("claims", sa.Column("net", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
