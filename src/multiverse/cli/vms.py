"""`multiverse vms`: the VMs that exist or are about to."""

from __future__ import annotations

from typing import Annotated

import typer

from multiverse.api import VmView, decode
from multiverse.cli import render
from multiverse.client import Client


def vms(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show VMs: their state, their job, the memory that is theirs alone, and the memory that they share."""
    with Client() as client:
        document = client.vms()
    if json:
        render.as_json(document)
        return
    found = decode(list[VmView], document)
    several = len({one.host for one in found}) > 1
    table = render.table(
        "VM", "STATE", "JOB", *(["HOST"] if several else []), "KIND", "SIZE", "UNIQUE, SHARED", "CPU TIME", "ADDRESS",
        right=("CPU TIME",), fold=("SIZE", "UNIQUE, SHARED", "CPU TIME"),
    )  # fmt: skip
    for one in found:
        table.add_row(
            one.name,
            render.state(one.state, one.quarantined),
            one.job_id or "–",
            *([one.host] if several else []),
            one.kind,
            f"{one.cpus}, {render.memory(one.memory)}",
            f"{render.memory(one.private)}, {render.memory(one.shared)}" if one.private else "–",
            render.duration(one.cpu_s) if one.cpu_s else "–",
            one.address,
        )
    render.show(table, "No VMs.")
