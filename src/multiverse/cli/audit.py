"""`multiverse audit`: are the VMs that run as they are promised to be?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from multiverse.cli import render
from multiverse.client import Client

app = typer.Typer(help="Check what is promised of VMs on those that run.", no_args_is_help=True, rich_markup_mode=None)

NOT_SHOWN = 1
_COLUMNS = {"machine_id": 8, "boot_id": 8, "random": 8, "fresh": 8, "mac": 17, "address": 15, "host_keys": 8}


@app.callback()
def audit() -> None:
    """Check what is promised of VMs on those that run."""


@app.command()
def identity(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Ask every VM that runs who it is: no two may share an id, an address, a key or random bytes, and each clock is
    right to the second. Exits with 1 unless that is shown, for two VMs at least."""
    with Client() as client:
        found = client.audit_identity()
    if json:
        render.as_json(found)
    else:
        _show(found["vms"])
        if found["strangers"]:
            render.console.print(f"{len(found['vms'])} VMs, all strangers.", style="green")
        elif len(found["vms"]) < 2:
            render.console.print("There are no two VMs to compare: submit some jobs, then ask again.", style="yellow")
    if not found["strangers"]:
        raise typer.Exit(NOT_SHOWN)


def _show(vms: list[dict[str, object]]) -> None:
    table = render.table("VM", "JOB", "MACHINE-ID", "BOOT ID", "FIRST RANDOM", "RANDOM NOW", "MAC", "ADDRESS",
                         "HOST KEYS", "CLOCK", right=("CLOCK",))  # fmt: skip
    for one in vms:
        facts = one["facts"]
        assert isinstance(facts, dict)
        told = [_short(str(facts[name]), width) for name, width in _COLUMNS.items()]
        style = "red" if one["problems"] else ""
        table.add_row(Text(str(one["name"]), style=style), str(one["job_id"]) or "–", *told, f"{one['skew']} ms off")
    render.show(table, "No VMs.")
    for one in vms:
        problems = one["problems"]
        assert isinstance(problems, list)
        for problem in problems:
            render.console.print(Text(f"{one['name']}: {problem}", style="red"))


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[:width]}…"
