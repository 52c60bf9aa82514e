"""`multiverse rebalance`: which running jobs would leave their hosts now, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from multiverse import api
from multiverse.api import decode
from multiverse.cli import render
from multiverse.client import Client

_NOTHING = "No job would leave its host now."
_ENDS = {"requeue": "is queued again", "cancel": "is cancelled"}


def rebalance(
    json: render.Json = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show, as without this option.")] = False,
) -> None:
    """Show which running jobs would leave their hosts now: off drained hosts, or for jobs that may preempt them. The
    daemon begins that by itself, within the limits of [rebalance]."""
    with Client() as client:
        document = client.evictions()
    if json:
        return render.as_json(document)
    table = render.table("JOB", "VM", "FROM", "HOW", "MEMORY", "WHY", right=("MEMORY",))
    for one in decode(list[api.EvictionView], document):
        how = f"moves to {one.target}" if one.target else _ENDS.get(one.ends, "is saved")
        why = f"{one.reason}; not now: {one.held}" if one.held else one.reason
        table.add_row(one.job_id, one.vm, one.host, how, render.memory(one.memory), why)
    render.show(table, _NOTHING)
