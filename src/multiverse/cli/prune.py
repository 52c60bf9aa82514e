"""`multiverse prune`: deletes the records of what ended long ago."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from multiverse.api import PruneView, decode
from multiverse.cli import progress, render
from multiverse.client import Client
from multiverse.core.errors import Refused

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="As 90d, 12h or 2w; by default history_days.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> None:
    """Delete the records of jobs, VMs and templates that ended long ago, and their journal.

    The records of a job stay while it waits or runs. The daemon does the same by itself, every hour.
    """
    age = None if older_than is None else seconds(older_than)
    with Client() as client, progress.step("examining the records of what has ended", "records examined"):
        found = decode(PruneView, client.prune(age, dry_run=dry_run))
    counts = {
        "attempts": found.attempts,
        "VMs": found.vms,
        "offers": found.offers,
        "templates": found.templates,
        "leases": found.leases,
        "journal entries": found.journal,
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items())
    verb = "would be deleted" if found.dry_run else "deleted"
    render.console.print(f"{verb}, ended more than {span(found.older_than)} ago: {text}", markup=False, soft_wrap=True)


def seconds(text: str) -> float:
    """An age such as `30d` in seconds. Raises `Refused`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise Refused(f"{text} is not an age", hint="give a number with a unit: 90d, 12h, 2w, 45m, 30s")
    return float(match[1]) * _SECONDS[match[2]]


def span(age: float) -> str:
    """Seconds as an operator writes them."""
    unit = next((unit for unit in "dhm" if age >= _SECONDS[unit] and age % _SECONDS[unit] == 0), "s")
    return f"{age / _SECONDS[unit]:g}{unit}"
