"""`multiverse hosts`: what hosts declare, what of it is claimed, and what the machines have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.client import Client


def hosts(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show hosts. Admission counts against what is declared, which need not be what the machine has."""
    with Client() as client:
        found = client.hosts()
    if json:
        render.as_json(found)
        return
    table = render.table(
        "HOST", "VMS", "CPUS CLAIMED", "MEMORY CLAIMED", "MACHINE HAS", "RUNS ON", "CLONES", right=("VMS",),
        fold=("MACHINE HAS", "CLONES"),
    )  # fmt: skip
    for one in found:
        declared, claimed = one["declared"], one["claimed"]
        table.add_row(
            one["name"],
            str(one["vms"]),
            f"{claimed['cpus']} of {declared['cpus']}",
            f"{render.memory(claimed['memory'])} of {render.memory(declared['memory'])}",
            _machine(one["machine"]),
            one["accelerator"],
            " ".join(a for a in one["abilities"] if a in ("instant", "linked", "full")),
        )
    render.show(table, "No host is in sight; multiverse lab status tells more.")


def _machine(size: dict[str, Any] | None) -> str:
    return f"{size['cpus']} CPUs, {render.memory(size['memory'])}" if size else "–"
