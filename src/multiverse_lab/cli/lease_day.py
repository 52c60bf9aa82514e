"""`multiverse bench leases`: node-hours leased beside node-hours used, on a simulated day with bursts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse_lab.bench.leases import LeaseComparison, LeaseFigures, compare_leases
from multiverse_lab.cli.bench import Json


def lease_day(
    hours: Annotated[float, typer.Option(min=1.0, help="Virtual hours.")] = 24.0,
    nodes: Annotated[int, typer.Option(min=1, help="Physical nodes, of 16 CPUs, that may be leased.")] = 4,
    idle: Annotated[float, typer.Option(min=1.0, help="Seconds until an idle node is given back.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Of the jobs and of the simulation.")] = 1,
    json: Json = False,
) -> None:
    """Simulate a day with bursts of jobs on a host of 8 CPUs: with leases, with leases that are emptied by moves, and
    with all nodes all day."""
    result = compare_leases(hours, nodes, idle, seed)
    render.present(result, json, _print)


def _print(result: LeaseComparison) -> None:
    console.print(
        f"\n{result.jobs:,} jobs in {result.hours:g} h, on a host of 8 CPUs and up to {result.nodes} nodes of 16 that "
        f"are given back after {result.idle:g} s. Ideal: {result.ideal:.1f} node-hours, with as many nodes at each "
        "moment as the jobs that run need, and no time for pilots, templates and VMs. Again: leases that began less "
        "than the idle time after another one ended. Emptied: jobs move off leases that other hosts could replace. No "
        "leases: an ideal EASY scheduler on the host alone.\n",
        markup=False,
        highlight=False,
    )
    heads = ("NO LEASES", "LEASES", "EMPTIED", "ALL DAY")
    table = render.table("", *heads, right=heads)
    for name, show in ROWS.items():
        table.add_row(name, *(show(one) for one in (result.without, result.leasing, result.packing, result.always)))
    render.show(table, "Nothing was measured.")


ROWS: dict[str, Callable[[LeaseFigures], str]] = {
    "node-hours leased": lambda one: f"{one.leased:.1f}",
    "node-hours used": lambda one: f"{one.used:.1f}" if one.used else "–",
    "leases": lambda one: f"{one.leases:,}",
    "without any VM": lambda one: f"{one.unused:,}",
    "again": lambda one: f"{one.again:,}",
    "moves": lambda one: f"{one.moves:,}",
    "mean wait": lambda one: render.duration(one.mean_wait),
    "longest wait": lambda one: render.duration(one.longest_wait),
}
