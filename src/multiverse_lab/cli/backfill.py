"""`multiverse bench backfill`: backfill beside none and beside an ideal EASY scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse_lab.bench import lublin, swf
from multiverse_lab.bench.backfill import Comparison, Figures, compare
from multiverse_lab.cli.bench import Json


def backfill(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=2, help="Jobs of the generated trace.")] = 150,
    processors: Annotated[int, typer.Option(min=1, help="CPUs of all hosts together.")] = 64,
    load: Annotated[float, typer.Option(min=0.05, help="Share of the CPUs that the jobs ask for.")] = 0.9,
    longest: Annotated[float, typer.Option(min=1, help="The longest run time, in hours.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of the trace and of the simulation.")] = 1,
    trace: Annotated[Path | None, typer.Option(help="A trace in the Standard Workload Format instead.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the trace to this file.")] = None,
    json: Json = False,
) -> None:
    """Run a trace through the controller in virtual time, with and without backfill, and through an ideal scheduler."""
    model = lublin.Model(processors=processors, longest=math.log(longest * 3600))
    found = swf.read(trace)[:jobs] if trace else lublin.generate(jobs, seed, model, load)
    if write:
        made = f"Lublin-Feitelson model, seed {seed}, load {load:g}" if trace is None else str(trace)
        swf.write(found, write, [f"MaxJobs: {len(found)}", f"MaxProcs: {processors}", f"Note: {made}"])
    result = compare(found, processors, seed)
    render.present(result, json, _print)


def _print(result: Comparison) -> None:
    console.print(
        f"\n{result.jobs:,} jobs on {result.processors:,} CPUs. None: nothing starts ahead of the first job that waits "
        "for room. Backfill: the controller, over simulated hosts. Ideal: EASY with VMs that take no time. Ahead: jobs "
        "that started before one that came earlier.\n",
        markup=False,
        highlight=False,
    )
    table = render.table("", "NONE", "BACKFILL", "IDEAL EASY", right=("NONE", "BACKFILL", "IDEAL EASY"))
    columns = (result.without, result.backfill, result.ideal)
    for name, show in ROWS.items():
        table.add_row(name, *(show(one) for one in columns))
    render.show(table, "Nothing was measured.")


ROWS: dict[str, Callable[[Figures], str]] = {
    "utilization": lambda one: f"{one.utilization:.1%}",
    "mean wait": lambda one: render.duration(one.mean_wait),
    "longest wait": lambda one: render.duration(one.longest_wait),
    "mean bounded slowdown": lambda one: f"{one.bounded_slowdown:.1f}",
    "ahead": lambda one: f"{one.ahead:,}",
    "in all": lambda one: render.duration(one.seconds),
}
