"""`multiverse bench sampling`: what it costs an agent to sample its host and its VMs."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from typing import Annotated

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse_lab.bench import sampling as bench
from multiverse_lab.bench.sampling import SamplingPlan
from multiverse_lab.bench.stats import median
from multiverse_lab.cli.bench import DIRECTORY, Dir, Json


def sampling(
    vms: Annotated[int, typer.Option(min=1, help="VMs: processes with control groups and taps of their own.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, help="Of each round.")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="With sampling, and without.")] = 3,
    directory: Dir = DIRECTORY,
    json: Json = False,
) -> None:
    """The CPU of an agent that samples each second, beside one that does not."""

    def measured(line: str) -> None:
        progress.present().say(line)
        if not json:
            console.print(f"  {line}", style="dim", markup=False)

    plan, where = SamplingPlan(vms, seconds, rounds), directory / "sampling"
    try:
        where.mkdir(parents=True, exist_ok=True)
        found = bench.run(where, plan, measured)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    if json:
        render.as_json({**asdict(plan), **asdict(found)})
        return
    console.print(f"\nAn agent with {vms} VMs, shares of a core in {rounds} rounds of {seconds:g} s, in turn.\n")
    table = render.table("AGENT", "MEDIAN", "LEAST", "MOST", right=("MEDIAN", "LEAST", "MOST"))
    for name, shares in (("sampling each second", found.sampling), ("without sampling", found.without)):
        table.add_row(name, *(f"{share:.3%}" for share in (median(shares), min(shares), max(shares))))
    console.print(table)
