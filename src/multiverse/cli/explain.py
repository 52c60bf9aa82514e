"""`multiverse explain JOB`: why a job waits, in which stage it is, or why it failed, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import ExplanationsView, ExplanationView, HostGroupView, decode
from multiverse.cli import render
from multiverse.cli.asking import Controller, asker

GROUPS = 8
"""The most groups of hosts that are shown; with --hosts, all."""


def explain(
    job: Annotated[str, typer.Argument(help="A job id: 123, or 123_4; 123 tells of an array's first tasks.")],
    hosts: Annotated[bool, typer.Option("--hosts", help="All groups of hosts, with all names.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    controller: Controller = "",
) -> None:
    """Say why a job waits, in which stage it is, or why it failed, and what to do; and of which hosts it is told.

    Operators may ask about any job, and users about their own."""
    with asker(controller) as client:
        document = client.explain(job)
    if json:
        render.as_json(document)
        return
    found = decode(ExplanationsView, document)
    for number, (one, *others) in enumerate(_alike(found.jobs)):
        if number:
            render.console.print()
        _show(one, every=hosts)
        if others:
            render.say(f"The same is true of {', '.join(other.job_id for other in others)}.")
    if found.more:
        render.console.print(f"And {found.more} more tasks of this array; ask for one of them by its id.")


def _alike(jobs: Sequence[ExplanationView]) -> list[list[ExplanationView]]:
    """The tasks of an array of which the same is to be said, together: those that wait for the same."""
    groups: dict[tuple[str, ...], list[ExplanationView]] = {}
    for one in jobs:
        groups.setdefault((one.state, one.short, one.behind) if one.short else (one.job_id,), []).append(one)
    return list(groups.values())


def _show(one: ExplanationView, *, every: bool) -> None:
    head = Text.assemble(("job ", "bold"), (render.plain(one.job_id).plain, "bold"), "  ")
    head.append_text(render.plain(one.name)).append("  ").append_text(render.state(one.state))
    render.console.print(head)
    render.say(one.text)
    if one.expected is not None:
        moment = datetime.fromtimestamp(one.expected)
        render.say(f"By the time limits it starts by {moment:%Y-%m-%d %H:%M:%S} at the latest.")
    if one.todo:
        render.say(f"to do: {one.todo}")
    show_groups(one.hosts, every=every)


def show_groups(groups: Sequence[HostGroupView], *, every: bool) -> None:
    """Which hosts could take a VM, and why the others are passed over."""
    if not groups:
        return
    table = render.table("HOSTS", "NAMES", "FOR THIS JOB", right=("HOSTS",), fold=("NAMES", "FOR THIS JOB"))
    for one in groups if every else groups[:GROUPS]:
        names = one.hosts if every or len(one.hosts) <= _SHORT else one.hosts[:_SHORT] + "…"
        table.add_row(str(one.count), names, Text(render.plain(one.why).plain, style="green" if one.fits else ""))
    render.console.print(table)
    if not every and len(groups) > GROUPS:
        render.console.print(f"  And {len(groups) - GROUPS} more groups of hosts: --hosts shows all.", style="dim")


_SHORT = 30
"""Characters of a node set that are shown."""
