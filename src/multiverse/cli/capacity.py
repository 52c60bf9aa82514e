"""`multiverse capacity`: what would start at once, and what is free."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer
from rich.text import Text

from multiverse.api import CapacityUsageView, CapacityView, SizeView, TrialView, decode
from multiverse.cli import render
from multiverse.cli.asking import Controller, asker
from multiverse.cli.explain import show_groups
from multiverse.cli.requests import parse_request


def capacity(
    request: Annotated[
        str,
        typer.Option("--for", metavar="REQUEST", help='One request, as for sbatch: "-N 2 -c 4 --mem=8G -t 1:00:00"'),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    controller: Controller = "",
) -> None:
    """Show which sizes would start at once and how many of each, and what is free beside what is used.

    With --for, whether one request would start at once; if not, why, and when it is expected to."""
    asked = parse_request(request) if request else None
    with asker(controller) as client:
        document = client.trial(**asked) if asked is not None else client.capacity()
    if json:
        render.as_json(document)
    elif asked is not None:
        _show_trial(decode(TrialView, document))
    else:
        _show(decode(CapacityView, document))


def _show(found: CapacityView) -> None:
    _show_usage(found.usage)
    table = render.table(
        "NODE OF", "MEMORY", "DISK", "START AT ONCE", "AFTER A TEMPLATE IS BUILT",
        right=("MEMORY", "DISK", "START AT ONCE", "AFTER A TEMPLATE IS BUILT"),
    )  # fmt: skip
    for one in found.sizes:
        table.add_row(
            f"{one.cpus} CPU{'s' * (one.cpus != 1)}",
            render.memory(one.memory),
            render.memory(one.disk) if one.disk else "–",
            Text(str(one.now), style="bold green" if one.now else "dim"),
            f"+ {one.with_template}" if one.with_template else "–",
        )
    render.show(table, "No host that takes new VMs is in sight.")
    render.console.print(f"Each line for itself: jobs of one node, of image {found.image}.")
    if found.blocked:
        name = f"Job {found.blocked_by}" if found.blocked_by else "A job"
        text = (
            f"{name} waits for capacity and comes first: a later job starts only if it does not delay it by its time"
            " limit. Ask with --for."
        )
        render.say(text, indent=0, style="yellow")
    elif found.waiting:
        render.console.print(f"{found.waiting} jobs wait for something else than capacity.", markup=False)


def _show_usage(usage: CapacityUsageView) -> None:
    table = render.table(
        "", "CPUS", "MEMORY", "DISK", right=("CPUS", "MEMORY", "DISK"),
    )  # fmt: skip
    for label, size in (
        ("jobs", usage.jobs),
        ("spares", usage.spares),
        ("templates", usage.templates),
        ("free", usage.free),
        ("on closed hosts", usage.closed),
        ("in all", usage.total),
    ):
        if label != "on closed hosts" or usage.closed_hosts:
            table.add_row(Text(label, style="bold green" if label == "free" else ""), *_cells(size))
    hosts = f"{usage.hosts} host{'s' * (usage.hosts != 1)} in sight"
    closed = f", {usage.closed_hosts} of which take no new VM" if usage.closed_hosts else ""
    render.console.print(hosts + closed)
    render.console.print(table)


def _cells(size: SizeView) -> tuple[str, str, str]:
    return str(size.cpus), render.memory(size.memory), render.memory(size.disk)


def _show_trial(found: TrialView) -> None:
    if found.starts:
        render.console.print(Text("It would start at once.", style="bold green"))
        where = f" on {found.hosts}" if found.hosts and found.hosts not in found.why else ""
        render.say(f"{found.why}{where}")
        return
    said = "It would be cancelled." if found.never else "It would wait."
    render.console.print(Text(said, style="bold red" if found.never else "bold yellow"))
    render.say(found.why)
    if found.ahead:
        behind = f", of which job {found.behind} keeps the others waiting" if found.behind else ""
        jobs = "1 job" if found.ahead == 1 else f"{found.ahead} jobs"
        render.say(f"{jobs} would be ahead of it{behind}.")
    if found.expected is not None:
        render.say(f"It would start by {_moment(found.expected)} at the latest, by the time limits.")
    elif found.alone is not None and not found.never:
        render.say(f"Without other jobs that wait, it would start by {_moment(found.alone)} at the latest.")
    elif not found.never:
        render.say("Nobody can tell when: no time limit says by when there is room for it.")
    show_groups(found.groups, every=False)


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
