"""`multiverse jobs`: the jobs that have, wait for, or had a VM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from multiverse.api import JobView, decode
from multiverse.cli import render
from multiverse.cli.watch import Watch, watched
from multiverse.client import Client

NAMED = 6
"""Of so many jobs with the same reason, at most, the ids are shown, where there is no column for reasons."""


def jobs(
    job: Annotated[str | None, typer.Argument(help="Only this job, or this array's tasks.")] = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Watch = False,
) -> None:
    """Show jobs: their state, their VMs, and the reason why a job waits."""
    watched(lambda: _show(job, ended=ended, json=json), again=watch)


def _show(job: str | None, *, ended: bool, json: bool) -> None:
    with Client() as client:
        document = client.jobs(job, ended=ended)
    if json:
        render.as_json(document)
        return
    found = decode(list[JobView], document)
    empty = "No jobs." if ended or job else "No live jobs; --all shows those that have ended."
    if render.is_wide():
        _show_wide(found, empty)
    else:
        _show_narrow(found, empty)
    for one in found if job is not None else ():
        if one.usage is not None:
            render.say(f"{one.job_id}: {one.usage.text}", indent=1)


def _show_wide(found: Sequence[JobView], empty: str) -> None:
    table = render.table(
        "JOB", "NAME", "STATE", "FOR", "NODES", "CPUS", "MEMORY", "IMAGE", "VMS", "REASON",
        right=("FOR", "NODES", "CPUS", "MEMORY"), fold=("VMS", "REASON"),
    )  # fmt: skip
    for one in found:
        table.add_row(
            one.job_id,
            one.name,
            render.state(one.state, one.quarantined),
            render.duration(one.age),
            str(one.nodes),
            str(one.cpus),
            render.memory(one.memory),
            one.image,
            " ".join(one.vms),
            _reason(one),
        )
    render.show(table, empty)


def _show_narrow(found: Sequence[JobView], empty: str) -> None:
    """What fits 80 columns, and the reasons below, once for all jobs that have the same."""
    table = render.table("JOB", "NAME", "STATE", "FOR", "SIZE", "VMS", right=("FOR",), fold=("NAME", "VMS"))
    reasons: dict[str, list[str]] = {}
    for one in found:
        size = f"{f'{one.nodes} × ' if one.nodes > 1 else ''}{one.cpus}, {render.memory(one.memory)}"
        state = render.state(one.state, "" if not one.quarantined else "see below")
        table.add_row(one.job_id, one.name, state, render.duration(one.age), size, " ".join(one.vms) or "–")
        if reason := _reason(one):
            reasons.setdefault(reason, []).append(one.job_id)
    render.show(table, empty)
    for reason, ids in reasons.items():
        more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
        render.say(f"{', '.join(ids[:NAMED])}{more}: {reason}", indent=1)


def _reason(one: JobView) -> str:
    why = one.quarantined or one.waiting or one.reason
    if not one.origin:
        return why
    moved = one.state in ("allocated", "reclaiming", "done")
    where = f"moved from partition {one.origin}, which was full" if moved else f"in partition {one.origin}"
    return f"{where}: {why}" if why else where
