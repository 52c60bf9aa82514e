"""A made-up revision after the newest one, as the next release would add it: what upgrades is tried with it."""

from __future__ import annotations

from pathlib import Path

from multiverse.store import schema

NEWER = f"{int(schema.HEAD) + 1:04}"

_REVISION = f'''
import sqlalchemy as sa
from alembic import op

revision = "{NEWER}"
down_revision = "{schema.HEAD}"


def upgrade():
    op.add_column("vms", sa.Column("made_up", sa.Integer, nullable=False, server_default="7"))
    op.execute("UPDATE vms SET body = json_set(body, '$.made_up', 7)")
    op.drop_index("ix_templates_live", "templates")
    op.create_index("ix_templates_live", "templates", ["id"], sqlite_where=sa.text("live = 1"))
'''


def make_newer(directory: Path) -> None:
    """Let the store of this process have the newer schema, with the revisions in that directory, which is made."""
    directory.mkdir()
    for known in schema.VERSIONS.glob("*.py"):
        (directory / known.name).write_text(known.read_text())
    (directory / f"r{NEWER}_made_up.py").write_text(_REVISION)
    vars(schema)["VERSIONS"], vars(schema)["HEAD"] = directory, NEWER
