"""A VM's row names the template that it was forked from by its size: its host had one of each image until now."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    size = """(SELECT json_extract(templates.body, '$.size') FROM templates
               WHERE templates.live AND json_extract(templates.body, '$.host') = json_extract(vms.body, '$.host')
               AND json_extract(templates.body, '$.image') = json_extract(vms.body, '$.image'))"""
    op.execute(
        f"""UPDATE vms SET body = json_set(body, '$.parent', json({size}))
            WHERE live AND json_extract(body, '$.kind') = 'instant' AND {size} IS NOT NULL"""
    )


def downgrade() -> None:
    op.execute("UPDATE vms SET body = json_remove(body, '$.parent', '$.account') WHERE live")
