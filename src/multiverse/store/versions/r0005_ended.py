"""It is kept when rows ended, and the journal is found by row: ended rows are pruned by age."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_KINDS = {"attempts": "attempt", "vms": "vm", "templates": "template", "offers": "offer"}


def upgrade() -> None:
    op.create_table(
        "ended",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("wall", sa.Float, nullable=False),
    )
    # The last entry of a row in the journal is that of its end. What has no entry counts as ended now.
    op.execute(
        """CREATE TEMPORARY TABLE last_entry AS
           SELECT kind, id, MAX(wall) AS wall FROM journal GROUP BY kind, id"""
    )
    op.execute("CREATE UNIQUE INDEX temp.last_entry_of ON last_entry (kind, id)")
    for table, kind in _KINDS.items():
        op.execute(
            f"""INSERT INTO ended (kind, id, wall)
                SELECT '{kind}', {table}.id, COALESCE(last_entry.wall, CAST(strftime('%s', 'now') AS REAL))
                FROM {table} LEFT JOIN last_entry ON last_entry.kind = '{kind}' AND last_entry.id = {table}.id
                WHERE NOT live"""
        )
    op.execute("DROP TABLE last_entry")
    op.create_index("ix_ended_wall", "ended", ["kind", "wall"])
    op.create_index("ix_attempts_live_job", "attempts", ["job_id"], sqlite_where=sa.text("live = 1"))
    op.create_index("ix_journal_row", "journal", ["kind", "id"])


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
