"""`multiverse timeline JOB`: where a job's time went, and all that happened on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import TimelineView, decode
from multiverse.cli import render
from multiverse.cli.asking import Controller, asker

_BAR_WIDTH = 60
_STAGE_INDENT = 12


def timeline(
    job: Annotated[str, typer.Argument(help="A job id: 123, or 123_4; 123 shows all tasks of an array.")],
    events: Annotated[bool, typer.Option("--events", "-e", help="Every event as well.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    controller: Controller = "",
) -> None:
    """Show where a job's time went, attempt by attempt. Users may ask about their own jobs."""
    with asker(controller) as client:
        document = client.timeline(job)
    if json:
        render.as_json(document)
        return
    for one in decode(list[TimelineView], document):
        _show_phases(one)
        if events:
            _show_events(one)
        render.console.print()


def _show_phases(one: TimelineView) -> None:
    """The attempt's bar, and its phases with their stages."""
    total = sum(phase.seconds for phase in one.phases)
    head = Text.assemble(
        ("job ", "bold"), (one.job_id, "bold"), f"  attempt {one.attempt}  ",
        render.state(one.state), f"  {render.duration(total)} in all",
    )  # fmt: skip
    render.console.print(head)
    if one.waiting:
        render.console.print(Text(f"  {one.waiting}"))
    width = min(_BAR_WIDTH, render.console.width - 4)
    parts = [(phase.seconds, render.PHASE_STYLES[phase.name]) for phase in one.phases]
    render.console.print(Text("  ") + render.bar(parts, width))
    for phase in one.phases:
        line = Text("  ")
        line.append(f"{phase.name:<8}", style=render.PHASE_STYLES[phase.name])
        line.append(f"{render.duration(phase.seconds):>9}")
        render.console.print(line)
        reasons = [entry.reason for entry in one.entries if phase.name == "queued" and entry.event == "admitted"]
        for text in reasons or _stage_lines(phase.stages, render.console.width - _STAGE_INDENT):
            render.console.print(Text(" " * _STAGE_INDENT + text, style="dim"))


def _show_events(one: TimelineView) -> None:
    table = render.table("AT", "OF", "EVENT", "STATE", "REASON", right=("AT",), fold=("REASON",))
    for entry in one.entries:
        table.add_row(f"{entry.at:.3f} s", entry.subject, entry.event, render.state(entry.state), entry.reason)
    render.console.print(table)


def _stage_lines(stages: Sequence[tuple[str, float]], width: int) -> list[str]:
    """The stages as `name 12 ms`, as many on a line as fit."""
    lines: list[str] = []
    for name, seconds in stages:
        item = f"{name} {seconds * 1000:.0f} ms"
        if lines and len(lines[-1]) + len(item) + 3 <= width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines
