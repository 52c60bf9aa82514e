"""A VM's host, source and template are its place, of which it may have two."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"

_TEMPLATE = """CASE WHEN json_extract(body, '$.template_size') IS NULL THEN NULL
    ELSE json_array(json_extract(body, '$.host'), json_extract(body, '$.image'),
                    json(json_extract(body, '$.template_size')), COALESCE(json_extract(body, '$.account'), '')) END"""


def upgrade() -> None:
    op.execute(
        f"""UPDATE vms SET body = json_remove(
                json_set(body, '$.places', json_array(json_object(
                    'host', json_extract(body, '$.host'), 'source', json_extract(body, '$.source'),
                    'template', json({_TEMPLATE}), 'template_id', json_extract(body, '$.template_id')))),
                '$.host', '$.source', '$.template_size', '$.template_id')"""
    )


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
