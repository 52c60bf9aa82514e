"""`multiverse leases`: the hosts that are borrowed from Slurm, or about to be."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from multiverse.api import LeaseView, decode
from multiverse.cli import render
from multiverse.client import Client


def leases(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the hosts that are leased from Slurm, with their pilot jobs, also those that wait.

    To give one back once its jobs have ended: multiverse hosts drain HOST.
    """
    with Client() as client:
        document = client.leases()
    if json:
        render.as_json(document)
        return
    table = render.table("HOST", "STATE", "PARTITION", "PILOT", "NODE", "SINCE", "UNTIL", "REASON", right=("SINCE",))
    for one in decode(list[LeaseView], document):
        until = f"{datetime.fromtimestamp(one.ends):%m-%d %H:%M}" if one.ends is not None else "–"
        cells = (one.partition, one.pilot or "–", one.node or "–", render.duration(one.age), until, one.reason)
        table.add_row(one.name, render.state(one.state), *cells)
    render.show(table, "No host is leased.")
