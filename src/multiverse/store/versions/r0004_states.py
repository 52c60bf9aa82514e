"""What steered a VM and an attempt from flags beside their states is in the states; offers have rows of their own;
claims are keyed by owner and capacity domain; hosts are kept with what they can hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_SIZES = [sa.Column(name, sa.Integer, nullable=False) for name in ("cpus", "memory", "disk")]

_VM_STATE = """CASE
    WHEN state = 'releasing' AND NOT COALESCE(json_extract(body, '$.forget'), 0) THEN 'ending'
    WHEN state = 'releasing' AND json_extract(body, '$.failed') THEN 'removing'
    WHEN state IN ('joined', 'serving') AND json_extract(body, '$.failed') THEN 'dead'
    WHEN state = 'joined' AND attempt IS NULL AND COALESCE(json_extract(body, '$.unwanted'), '') != '' THEN 'retiring'
    ELSE state END"""

_ATTEMPT_STATE = """CASE
    WHEN state = 'queued' AND json_extract(body, '$.stray') THEN 'stray'
    WHEN state = 'queued' AND NOT json_extract(body, '$.gated') THEN 'ungated'
    WHEN state = 'spawned' AND id IN
        (SELECT attempt FROM vms WHERE live AND json_extract(body, '$.offer') = 'taken') THEN 'adding_user'
    WHEN state = 'reclaiming' AND json_extract(body, '$.outcome') IN ('revoked', 'failed') THEN 'revoking'
    WHEN state = 'reclaiming' AND json_extract(body, '$.outcome') = 'requeued'
        AND NOT json_extract(body, '$.gated') THEN 'returning'
    ELSE state END"""


def upgrade() -> None:
    op.create_table(
        "hosts", sa.Column("name", sa.String, primary_key=True), sa.Column("body", sa.String, nullable=False)
    )
    op.create_table(
        "offers",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("live", sa.Boolean, nullable=False),
        sa.Column("body", sa.String, nullable=False),
    )
    op.create_index("ix_offers_live", "offers", ["id"], sqlite_where=sa.text("live = 1"))
    _move_offers()
    _move_hosts()
    _move_states()
    _key_claims_by_domain()


def _move_offers() -> None:
    """Before the VMs lose what says it. A body that lacks a field is from a release that did not have it."""
    op.execute(
        """INSERT INTO offers (id, version, state, live, body)
           SELECT id, 1, json_extract(body, '$.offer'), 1, json_object(
               'id', id, 'version', 1, 'state', json_extract(body, '$.offer'),
               'since', COALESCE(json_extract(body, '$.offered'), 0.0), 'reason', '', 'quarantined', '')
           FROM vms WHERE live AND json_extract(body, '$.offer') IS NOT NULL"""
    )


def _move_hosts() -> None:
    op.execute(
        """INSERT INTO hosts (name, body)
           SELECT value, json_object('name', value, 'source', value, 'state', 'known', 'value', NULL)
           FROM json_each((SELECT value FROM meta WHERE key = 'hosts'))"""
    )
    op.execute(
        """INSERT OR REPLACE INTO hosts (name, body)
           SELECT DISTINCT host, json_object('name', host, 'source', host, 'state', 'fenced', 'value', NULL)
           FROM (SELECT json_extract(body, '$.host') AS host FROM vms WHERE live AND json_extract(body, '$.fenced'))
           WHERE host NOT IN (SELECT name FROM hosts)"""
    )
    op.execute("DELETE FROM meta WHERE key = 'hosts'")


def _move_states() -> None:
    op.execute(f"UPDATE attempts SET state = {_ATTEMPT_STATE} WHERE live")
    op.execute(f"UPDATE vms SET state = {_VM_STATE} WHERE live")
    op.execute("""UPDATE attempts SET body = json_remove(json_set(body, '$.state', state), '$.gated', '$.stray')""")
    op.execute(
        """UPDATE vms SET body = json_remove(
               json_set(body, '$.state', state,
                        '$.reason', CASE state WHEN 'retiring' THEN json_extract(body, '$.unwanted')
                                         ELSE COALESCE(json_extract(body, '$.reason'), '') END,
                        '$.node_size', json_extract(body, '$.told'),
                        '$.template_size', json_extract(body, '$.parent'),
                        '$.template_id', json_extract(body, '$.origin'),
                        '$.source', json_extract(body, '$.host'), '$.token', ''),
               '$.told', '$.parent', '$.origin', '$.failed', '$.forget', '$.fenced', '$.offer', '$.offered',
               '$.unwanted')
        """
    )
    op.execute("UPDATE templates SET body = json_set(body, '$.source', json_extract(body, '$.host'))")


def _key_claims_by_domain() -> None:
    op.execute("CREATE TEMPORARY TABLE old_claims AS SELECT * FROM claims")
    op.drop_table("claims")
    op.create_table(
        "claims",
        sa.Column("kind", sa.String, primary_key=True),
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("domain", sa.String, primary_key=True),
        *_SIZES,
    )
    op.execute("INSERT INTO claims SELECT kind, id, host, cpus, memory, disk FROM old_claims")
    op.execute("DROP TABLE old_claims")


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
