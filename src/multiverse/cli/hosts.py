"""`multiverse hosts`: what hosts declare, what of it is claimed, what the machines have and what VMs take of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from multiverse.cli import render
from multiverse.client import Client

_PLUGGED = {"plug_cpus": "CPUs", "plug_memory": "memory"}


def hosts(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show hosts. Admission counts against what is declared, which need not be what the machine has."""
    with Client() as client:
        found = client.hosts()
    if json:
        render.as_json(found)
        return
    table = render.table(
        "HOST", "VMS", "CPUS CLAIMED", "MEMORY CLAIMED", "VMS TAKE", "TEMPLATES", "MACHINE HAS", "CLONES",
        right=("VMS",), fold=("CPUS CLAIMED", "MEMORY CLAIMED", "VMS TAKE", "TEMPLATES", "MACHINE HAS", "CLONES"),
    )  # fmt: skip
    for one in found:
        declared, claimed = one["declared"], one["claimed"]
        table.add_row(
            one["name"],
            str(one["vms"]),
            f"{claimed['cpus']} of {declared['cpus']}",
            _claimed(claimed["memory"], declared["memory"], one["overcommit"]),
            f"{render.memory(one['private'])}, {render.memory(one['shared'])} shared",
            render.memory(one["templates"]) + (", held twice" if one["template_copies"] > 1 else ""),
            f"{_machine(one['machine'], one['available'])}, runs {one['accelerator']}",
            " ".join(a for a in one["abilities"] if a in ("instant", "linked", "full")),
        )
    render.show(table, "No host is in sight; multiverse lab status tells more.")
    for one in found:
        for image, can in one["images"].items():
            if lacking := [what for ability, what in _PLUGGED.items() if ability not in can]:
                told = f"On {one['name']} guests of {image} take up no {' or '.join(lacking)} while they run: "
                render.console.print(Text(f"{told}it has a template for each size.", style="dim"))


def _claimed(claimed: int, declared: int, overcommit: float) -> str:
    times = f" × {overcommit:g}" if overcommit > 1 else ""
    return f"{render.memory(claimed)} of {render.memory(declared)}{times}"


def _machine(size: dict[str, Any] | None, available: int) -> str:
    if not size:
        return "–"
    free = f", {render.memory(available)} available" if available else ""
    return f"{size['cpus']} CPUs, {render.memory(size['memory'])}{free}"
