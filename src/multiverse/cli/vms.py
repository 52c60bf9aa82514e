"""`multiverse vms`: the VMs that exist or are about to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from multiverse.api import VmView, decode
from multiverse.cli import render
from multiverse.cli.watch import Watch, watched
from multiverse.client import Client


def vms(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Watch = False,
) -> None:
    """Show VMs: their state, their job, the memory that is theirs alone, and the memory that they share."""
    watched(lambda: _show(json=json), again=watch)


def _show(*, json: bool) -> None:
    with Client() as client:
        document = client.vms()
    if json:
        render.as_json(document)
        return
    found = decode(list[VmView], document)
    several = len({one.host for one in found}) > 1
    render.show((_wide if render.is_wide() else _narrow)(found, several=several), "No VMs.")


def _wide(found: Sequence[VmView], *, several: bool) -> Table:
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
            _size(one),
            f"{render.memory(one.private)}, {render.memory(one.shared)}" if one.private else "–",
            render.duration(one.cpu_s) if one.cpu_s else "–",
            one.address,
        )
    return table


def _narrow(found: Sequence[VmView], *, several: bool) -> Table:
    """What fits 80 columns."""
    table = render.table(
        "VM", "STATE", "JOB", *(["HOST"] if several else []), "SIZE", "UNIQUE", "ADDRESS",
        right=("UNIQUE",), fold=("STATE", "SIZE"),
    )  # fmt: skip
    for one in found:
        table.add_row(
            one.name,
            render.state(one.state, one.quarantined),
            one.job_id or "–",
            *([one.host] if several else []),
            _size(one),
            render.memory(one.private) if one.private else "–",
            one.address,
        )
    return table


def _size(one: VmView) -> str:
    return f"{one.cpus}, {render.memory(one.memory)}"
