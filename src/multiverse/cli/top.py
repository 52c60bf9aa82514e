"""`multiverse top`: hosts, VMs, jobs and rates as they change, on one screen."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import decode
from multiverse.api.grid import Snapshot
from multiverse.cli import render, top_views
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Refused

MOST_JOBS = 40
"""Jobs that are printed where there is no screen."""


def top(
    once: Annotated[bool, typer.Option("--once", "-1", help="Print it once. So it is without a terminal.")] = False,
) -> None:
    """Show hosts, VMs, jobs and rates live. Keys: q ends, s chooses a stage, / filters, arrows scroll."""
    if once or not console.is_terminal:
        with Client() as client:
            show(decode(Snapshot, client.snapshot()))
        return
    try:
        from multiverse.cli.top_screen import TopScreen  # imported late: only this needs textual, which loads slowly
    except ModuleNotFoundError as error:
        raise Refused(
            "the package textual is not installed", hint="pip install textual, or: multiverse top --once"
        ) from error
    with Client() as client:
        client.snapshot()  # or else the error would be shown on a screen that is gone
        TopScreen(client.snapshot).run()


def show(snapshot: Snapshot) -> None:
    """Print the snapshot."""
    width = console.width
    for line in top_views.head(snapshot, width):
        console.print(line)
    console.print()
    for line in top_views.host_lines(snapshot, width):
        console.print(line)
    jobs = top_views.listed(snapshot)
    if not jobs:
        console.print("\nNo job waits or runs.")
        return
    table = render.table(*top_views.columns(width), right=("FOR",), fold=("WHY",))
    vms = {vm.name: vm for vm in snapshot.vms}
    for job in jobs[:MOST_JOBS]:
        table.add_row(*top_views.job_cells(job, vms, snapshot.summary.wall, width))
    console.print(table)
    if len(jobs) > MOST_JOBS:
        console.print(Text(f"and {len(jobs) - MOST_JOBS} more jobs: multiverse jobs", style="dim"))
