"""Hosts are rows like the others: with a number, a version and a state. What operators do to them is in the journal."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.rename_table("hosts", "hosts_before")
    op.create_table(
        "hosts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("live", sa.Boolean, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
    )
    # What the body does not say has its default.
    op.execute(
        """INSERT INTO hosts (id, version, state, live, body, name)
           SELECT number, 0, json_extract(body, '$.state'), 1, json_set(body, '$.id', number), name
           FROM (SELECT row_number() OVER (ORDER BY name) AS number, name, body FROM hosts_before)"""
    )
    op.drop_table("hosts_before")
    op.create_index("ix_hosts_live", "hosts", ["id"], sqlite_where=sa.text("live = 1"))
    op.create_index("ix_hosts_name", "hosts", ["name"], unique=True)


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
