"""`multiverse top`: hosts, VMs, jobs and rates as they change, on one screen."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import Snapshot, decode
from multiverse.cli import top_lines
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.core.model.basics import number_of

MOST_JOBS = 40  # jobs that are printed where there is no screen


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
    width = console.width
    for line in top_lines.head(snapshot, width):
        console.print(line)
    console.print()
    for line in top_lines.host_lines(snapshot, width):
        console.print(line)
    jobs = top_lines.listed(snapshot)
    if not jobs:
        console.print("\nNo job waits or runs.")
        return
    console.print()
    heading, rows = top_lines.job_rows(snapshot, jobs[:MOST_JOBS], width)
    for line in (heading, *rows):
        console.print(line)
    if len(jobs) > MOST_JOBS:
        console.print(Text(f"and {number_of(len(jobs) - MOST_JOBS, 'more job')}: multiverse jobs", style="dim"))
