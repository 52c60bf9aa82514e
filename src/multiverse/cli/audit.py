"""`multiverse audit`: checks the promises about VMs on those that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import IdentityAudit, VmIdentity, decode
from multiverse.cli import render
from multiverse.client import Client

app = typer.Typer(help="Check what is promised of VMs on those that run.", no_args_is_help=True, rich_markup_mode=None)

NOT_SHOWN = 1
"""The exit status unless the promise was shown to hold."""

_WIDTHS = {"machine_id": 8, "boot_id": 8, "random": 8, "fresh": 8, "mac": 17, "address": 15, "host_keys": 8}
"""The most characters that are shown of each property, in the order of the columns."""


@app.callback()
def audit() -> None:
    """Check what is promised of VMs on those that run."""


@app.command()
def identity(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Ask every VM that runs who it is: no two may share an id, an address, a key or random bytes, and each clock is
    right to the second. Exits with 1 unless that is shown, for two VMs at least."""
    with Client() as client:
        document = client.audit_identity()
    found = decode(IdentityAudit, document)
    if json:
        render.as_json(document)
    else:
        _show(found.vms)
        if found.distinct:
            render.console.print(f"{len(found.vms)} VMs, all distinct.", style="green")
        elif len(found.vms) < 2:
            render.console.print("There are no two VMs to compare: submit some jobs, then ask again.", style="yellow")
    if not found.distinct:
        raise typer.Exit(NOT_SHOWN)


def _show(vms: Sequence[VmIdentity]) -> None:
    table = render.table("VM", "JOB", "MACHINE-ID", "BOOT ID", "FIRST RANDOM", "RANDOM NOW", "MAC", "ADDRESS",
                         "HOST KEYS", "CLOCK", right=("CLOCK",))  # fmt: skip
    for one in vms:
        facts = [_short(one.facts[name], width) for name, width in _WIDTHS.items()]
        style = "red" if one.problems else ""
        table.add_row(Text(one.name, style=style), one.job_id or "–", *facts, f"{one.skew} ms off")
    render.show(table, "No VMs.")
    for one in vms:
        for problem in one.problems:
            render.console.print(Text(f"{one.name}: {problem}", style="red"))


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[:width]}…"
