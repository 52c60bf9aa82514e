"""`multiverse utilization`: what hosts and VMs use, and have used."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from multiverse.api import CompatibleHostView, UsagePoint, UsageView, UtilizationView, decode
from multiverse.cli import render
from multiverse.cli.sizes import mebibytes
from multiverse.client import Client
from multiverse.core.errors import Refused

UNKNOWN = "–"

app = typer.Typer(help="What hosts and VMs use, and which hosts have room for a VM.", invoke_without_command=True)


@app.callback()
def utilization(
    context: typer.Context,
    only: Annotated[str, typer.Option("--only", metavar="NAMES", help="Hosts or VMs, with commas.")] = "",
    history: Annotated[str, typer.Option("--history", metavar="NAME", help="What a host or VM has used.")] = "",
    hours: Annotated[float, typer.Option("--hours", min=0.1, help="Of the history.")] = 24.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what hosts and VMs use: now, and as means of the last five minutes and of the last hour.

    A host counts with all processes on it; a VM with its process on the host, which includes the guest's own kernel,
    daemons and page cache. Memory that a guest has used once stays with its VM until the VM ends. From 140 columns on:
    the memory that was used lately, bytes per second on the network and on disks, and the shares of the time in which
    a process waited for CPU, memory and disks."""
    if context.invoked_subcommand is not None:
        return
    with Client() as client:
        document = client.usage_history(history, hours) if history else client.utilization(only.split(","))
    if json:
        render.as_json(document)
    elif history:
        render.show(_history(decode(list[UsagePoint], document)), "Nothing is known.")
    else:
        render.show(_table(decode(list[UtilizationView], document)), "There is no such host or VM.")


@app.command()
def compatible(
    cpus: Annotated[int, typer.Option("--cpus", "-c", min=1, help="Of each node of the job.")] = 1,
    memory: Annotated[str, typer.Option("--mem", help="Of each node of the job: 800M, 8G.")] = "1G",
    image: Annotated[str, typer.Option("--image", help="By default that of the settings.")] = "",
    policy: Annotated[str, typer.Option("--policy", help="Of placement; by default that of the settings.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the hosts that have room for a VM now: first the one that the placement policy would take, then by their
    use. Nothing is reserved. Exits with 1 if there is none."""
    size = mebibytes(memory)
    if not size:
        raise Refused("--mem 0: a VM needs memory", hint="give a number with a unit: 800M, 8G")
    with Client() as client:
        document = client.compatible(cpus, size, image=image, policy=policy)
    found = decode(list[CompatibleHostView], document)
    if json:
        render.as_json(document)
    else:
        right = ("IN USE", "FREE CPUS", "FREE MEMORY", "VM CLAIMS", "FIT")
        table = render.table("HOST", *right, right=right)
        for one in found:
            claim = f"{one.claim.cpus}, {render.memory(one.claim.memory)}"
            table.add_row(one.name, f"{one.use:.0%}", str(one.free.cpus), render.memory(one.free.memory), claim,
                          str(one.holds))  # fmt: skip
        render.show(table, "No host has room for such a VM now.")
    if not found:
        raise typer.Exit(1)


def _table(found: Sequence[UtilizationView]) -> Table:
    wide = render.is_wide()
    columns = ("CPUS", "5 MIN", "HOUR", "MEMORY", "5 MIN", "HOUR")
    more = ("ACTIVE", "IN/S", "OUT/S", "READ/S", "WRITTEN/S", "WAITING") if wide else ()
    table = render.table("NAME", "JOB", *columns, *more, right=(*columns, *more))
    for one in found:
        spans = (one.now, one.five_minutes, one.hour)
        cpus = [_number(usage.cpus) if usage else UNKNOWN for usage in spans]
        memory = [_memory(usage.memory) if usage else UNKNOWN for usage in spans]
        if one.cpus:
            cpus[0] += f" of {one.cpus}"
        name = one.name if one.kind == "host" else f"  {one.name}"
        table.add_row(name, one.job_id, *cpus, *memory, *(_more(one.now) if wide else ()))
    return table


def _more(usage: UsageView | None) -> list[str]:
    if usage is None:
        return [UNKNOWN] * 6
    rates = [_rate(value) for value in (usage.received, usage.sent, usage.read, usage.written)]
    active = UNKNOWN if usage.active is None else _memory(usage.active)
    return [active, *rates, _pressure(usage)]


def _pressure(usage: UsageView) -> str:
    """Shares of the time in which something waited for CPU, memory and disk."""
    shares = (usage.cpu_pressure, usage.memory_pressure, usage.io_pressure)
    return "/".join(UNKNOWN if one is None else f"{one:.0%}" for one in shares)


def _history(found: Sequence[UsagePoint]) -> Table:
    columns = ("FOR", "CPUS", "MOST", "MEMORY", "MOST", "IN/S", "OUT/S", "READ/S", "WRITTEN/S")
    table = render.table("FROM", *columns, right=columns)
    for one in found:
        used = one.usage
        rates = (used.received, used.sent, used.read, used.written)
        table.add_row(
            f"{datetime.fromtimestamp(one.wall):%m-%d %H:%M}",
            "hour" if one.span == 3600 else "min",
            _number(used.cpus),
            _number(used.cpus_peak),
            _memory(used.memory),
            _memory(used.memory_peak),
            *map(_rate, rates),
        )
    return table


def _number(cpus: float) -> str:
    return f"{cpus:.2f}" if cpus < 10 else f"{cpus:.1f}"


def _memory(mib: float) -> str:
    """A size given in MiB, as short as it can be read."""
    return f"{mib / 1024:.1f}G" if mib >= 1000 else f"{mib:.0f}M"


def _rate(value: float) -> str:
    """Bytes per second, in powers of ten."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return "0" if value < 1 else f"{value:.0f}"
