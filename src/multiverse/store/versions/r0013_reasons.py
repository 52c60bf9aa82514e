"""Reasons are values: their kind, figures, jobs and hosts. Those of earlier releases are text."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_REASONS = {
    "attempts": ("reason", "note", "quarantined", "choice"),
    **dict.fromkeys(("vms", "templates", "offers", "hosts", "leases"), ("reason", "quarantined")),
}
"""The fields of rows that are reasons, by table. What is said of a host's failures is forgotten with them: a host that
fails is avoided again."""


def upgrade() -> None:
    for table, names in _REASONS.items():
        values = ", ".join(f"'$.{name}', json({_said(name)})" for name in names)
        op.execute(sa.text(f"UPDATE {table} SET body = json_set(body, {values})"))
    op.execute(sa.text("UPDATE hosts SET body = json_set(body, '$.faults', json('[]'))"))


def _said(name: str) -> str:
    """SQL for such a field as a value: null where it is empty."""
    text = f"COALESCE(json_extract(body, '$.{name}'), '')"
    figures = f"json_array(json_array('text', {text}))"
    return f"CASE {text} WHEN '' THEN 'null' ELSE json_object('kind', 'said', 'figures', {figures}) END"


def downgrade() -> None:
    raise NotImplementedError("the database of the earlier release is kept beside this one")
