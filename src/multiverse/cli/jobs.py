"""`multiverse jobs`: the jobs that have, wait for, or had a VM."""

from __future__ import annotations

from typing import Annotated

import typer

from multiverse.api import JobView, decode
from multiverse.cli import render
from multiverse.client import Client


def jobs(
    job: Annotated[str | None, typer.Argument(help="Only this job, or this array's tasks.")] = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show jobs: their state, their VMs, and the reason why a job waits."""
    with Client() as client:
        document = client.jobs(job, ended=ended)
    if json:
        render.as_json(document)
        return
    table = render.table(
        "JOB", "NAME", "STATE", "FOR", "NODES", "CPUS", "MEMORY", "IMAGE", "VMS", "REASON",
        right=("FOR", "NODES", "CPUS", "MEMORY"), fold=("VMS", "REASON"),
    )  # fmt: skip
    for one in decode(list[JobView], document):
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
            one.quarantined or one.waiting or one.reason,
        )
    render.show(table, "No jobs." if ended or job else "No live jobs; --all shows those that have ended.")
