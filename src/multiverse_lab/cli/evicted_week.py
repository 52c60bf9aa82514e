"""`multiverse bench evictions`: a simulated week with urgent jobs and maintenance, with and without evictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse_lab.bench.evictions import Week, WeekFigures, simulate_week
from multiverse_lab.cli.bench import Json


def evicted_week(
    days: Annotated[float, typer.Option(min=0.1, help="Virtual days.")] = 7.0,
    seed: Annotated[int, typer.Option(help="Of the jobs and of the simulation.")] = 1,
    json: Json = False,
) -> None:
    """Simulate jobs of low priority that fill four hosts, bursts of urgent ones, and a host a day that is drained for
    two hours: without evictions, with each method, and with all."""
    result = simulate_week(days, seed)
    render.present(result, json, _print)


def _print(result: Week) -> None:
    console.print(
        f"\n{result.jobs:,} jobs, {result.urgent:,} of them urgent, in {result.days:g} days on {result.cpus} CPUs. "
        "Slowdown: from submission to end, by the time that the job computes, of at least 10 s. Not evicted: the mean "
        "slowdown of the low jobs that no method touched, and that of the same jobs without any method.\n",
        markup=False,
        highlight=False,
    )
    methods = [name.upper() for name in result.figures]
    table = render.table("", *methods, right=methods)
    for name, show in ROWS.items():
        table.add_row(name, *map(show, result.figures.values()))
    render.show(table, "Nothing was simulated.")


ROWS: dict[str, Callable[[WeekFigures], str]] = {
    "moves": lambda one: f"{one.moves:,}",
    "saves": lambda one: f"{one.saves:,}",
    "evictions of a low job, mean": lambda one: f"{one.per_job:.3f}",
    "of one job, at most": lambda one: f"{one.most}",
    "CPU hours": lambda one: f"{one.hours:,.0f}",
    "slowdown, low: mean": lambda one: f"{one.low.mean:.2f}",
    "slowdown, low: 95 %": lambda one: f"{one.low.p95:.2f}",
    "slowdown, urgent: mean": lambda one: f"{one.high.mean:.2f}",
    "slowdown, urgent: 95 %": lambda one: f"{one.high.p95:.2f}",
    "not evicted": lambda one: f"{one.untouched:.2f}",
    "the same jobs without": lambda one: f"{one.untouched_without:.2f}",
}
