"""`multiverse status`: the state of the controller, and what is wrong with what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from multiverse.api import Alert, PoolView, SourceView, StatusView, decode
from multiverse.cli import render
from multiverse.cli.watch import Watch, watched
from multiverse.client import Client

ALERTS_PRESENT = 1
"""The exit status when there is an alert with something to do."""


def status(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Watch = False,
) -> None:
    """Show the state of the controller, and each alert with its remedy.

    Exits with 1 when there is an alert that can be remedied. Settings of Slurm that do not reach VMs (kind "unserved")
    are only shown."""
    watched(lambda: _status(json=json), again=watch)


def _status(*, json: bool) -> None:
    with Client() as client:
        document = client.status()
    found = decode(StatusView, document)
    if json:
        render.as_json(document)
    else:
        _show(found)
    if any(alert.kind != "unserved" for alert in found.alerts):
        raise typer.Exit(ALERTS_PRESENT)


def _show(found: StatusView) -> None:
    _line(
        "controller",
        f"up for {render.duration(found.up)}, pid {found.pid}, site {found.site}, version {found.version}",
    )
    for source in found.sources:
        _line(source.name, _source(source))
    jobs = found.jobs
    _line("jobs", f"{jobs['waiting']} waiting, {jobs['provisioning']} being provisioned, {jobs['running']} running, "
          f"{jobs['ending']} ending")  # fmt: skip
    for label, counts in (("VMs", found.vms), ("templates", found.templates)):
        _line(label, ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none")
    for pool in found.pools:
        _line("pool", _pool(pool))
    render.console.print()
    if not found.alerts:
        render.console.print("No alerts.", style="green")
    for alert in found.alerts:
        _show_alert(alert)


def _source(source: SourceView) -> str:
    if source.known:
        return f"observed {render.duration(source.age)} ago"
    return f"unknown for {render.duration(source.unknown_for)}"


def _pool(pool: PoolView) -> str:
    size = f" of {pool.cpus} CPU, {render.memory(pool.memory)}" if pool.cpus else ""
    offered = f", {pool.offered} on offer" if pool.offered else ""
    making = f", {pool.making} being created" if pool.making else ""
    return (
        f"{pool.ready} of {pool.wanted} {pool.depth} {pool.image}{size}{offered}{making}"
        f" ({pool.least} to {pool.most} by the arrival rate)"
    )


def _show_alert(alert: Alert) -> None:
    """The message, the remedy, and what a repair would do, below the alert's name."""
    render.console.print(Text(alert.name, style="bold red"))
    lines = [Text(alert.message), Text(f"to do: {alert.remedy}")]
    if alert.repair:
        flag = " --fenced" if alert.needs_fenced else ""
        lines.append(Text(f"multiverse repair {alert.name}{flag}: {alert.repair}", style="dim"))
    for line in lines:
        render.console.print(Padding(line, (0, 0, 0, 2), expand=False))


def _line(label: str, text: str) -> None:
    render.console.print(Text.assemble((f"{label:<12}", "bold"), text))
