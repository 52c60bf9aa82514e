"""`multiverse hosts`: what hosts declare, what of that is claimed, what the machines have and what VMs take of it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import HostView, decode
from multiverse.cli import render
from multiverse.client import Client

_PLUG_ABILITIES = {"plug_cpus": "CPUs", "plug_memory": "memory"}
_CLONE_KINDS = ("instant", "linked", "full")


def hosts(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show hosts. Admission counts against what is declared, which need not be what the machine has."""
    with Client() as client:
        document = client.hosts()
    if json:
        render.as_json(document)
        return
    found = decode(list[HostView], document)
    wide = ("CPUS CLAIMED", "MEMORY CLAIMED", "DISK CLAIMED", "VMS TAKE", "TEMPLATES", "MACHINE HAS", "CLONES")
    table = render.table("HOST", "VMS", *wide, right=("VMS",), fold=wide)
    for one in found:
        table.add_row(
            one.name,
            str(one.vms),
            f"{one.claimed.cpus} of {one.declared.cpus}{_times(one.cpu_overcommit)}",
            _memory_claimed(one),
            f"{render.memory(one.claimed.disk)} of {render.memory(one.declared.disk)}{_times(one.disk_overcommit)}",
            f"{render.memory(one.private)}, {render.memory(one.shared)} shared",
            render.memory(one.templates) + (", held twice" if one.template_copies > 1 else ""),
            f"{_machine(one)}, runs {one.accelerator}",
            " ".join(ability for ability in one.abilities if ability in _CLONE_KINDS),
        )
    render.show(table, "No host is in reach; see: multiverse status.")
    for one in found:
        for image, abilities in one.images.items():
            if lacking := [what for ability, what in _PLUG_ABILITIES.items() if ability not in abilities]:
                note = f"On {one.name} guests of {image} take up no {' or '.join(lacking)} while they run: "
                render.console.print(Text(f"{note}it has a template for each size.", style="dim"))
            if "limit_disk" not in abilities:
                note = f"On {one.name} VMs of {image} claim all of their disk, because its guests do not limit users: "
                render.console.print(Text(f"{note}build it again with `multiverse image build`.", style="dim"))


def _memory_claimed(host: HostView) -> str:
    declared = render.memory(host.declared.memory)
    return f"{render.memory(host.claimed.memory)} of {declared}{_times(host.overcommit)}"


def _times(overcommit: float) -> str:
    return f" × {overcommit:g}" if overcommit > 1 else ""


def _machine(host: HostView) -> str:
    if host.machine is None:
        return "–"
    free = f", {render.memory(host.available)} available" if host.available else ""
    return f"{host.machine.cpus} CPUs, {render.memory(host.machine.memory)}{free}"
