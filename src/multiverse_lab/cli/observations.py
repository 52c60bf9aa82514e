"""`multiverse bench observations`: what it costs to observe a Slurm with many jobs."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.system import interrupts
from multiverse_lab.bench import observations as bench
from multiverse_lab.bench.observations import ObservationPlan
from multiverse_lab.cli.bench import DIRECTORY, Dir, Json, lab_progress
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import CONTROLLER
from multiverse_lab.lab.session import session


def observations(
    ours: Annotated[int, typer.Option(min=1, help="Jobs that wait in Multiverse's partition.")] = 5_000,
    others: Annotated[int, typer.Option(min=1, help="Jobs that wait in another partition.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each kind of observation.")] = 7,
    directory: Dir = DIRECTORY,
    json: Json = False,
) -> None:
    """The time that an observation takes, and the CPU of Slurm's commands, of the controller and of slurmctld."""
    found = interrupts.run(_observations(directory, ObservationPlan(ours, others, rounds), json))
    render.present(found, json, _print)


async def _observations(directory: Path, plan: ObservationPlan, json: bool) -> dict[str, Any]:
    def measured(line: str) -> None:
        progress.present().say(line)
        if not json:
            console.print(f"  {line}", markup=False, highlight=False)

    options, where = LabOptions(cores=8, memory=16384, settings={}), layout(directory)
    where.make()
    site = where.etc / "site.conf"
    before = site.read_text() if site.exists() else ""
    site.write_text(bench.SITE)
    try:
        async with session(where, options, lab_progress(json)) as lab:
            await CONTROLLER.stop(lab.where)
            costs = await asyncio.to_thread(bench.run, lab, plan, measured)
    finally:
        site.write_text(before)
    return {**asdict(plan), "kinds": [asdict(cost) for cost in costs]}


def _print(found: dict[str, Any]) -> None:
    console.print(
        f"\n{found['ours']:,} jobs wait in Multiverse's partition and {found['others']:,} in another one; ten of these "
        f"change each second. Medians of {found['rounds']} rounds. PAUSE is the longest time for which the event loop "
        "did not turn.\n",
        markup=False,
    )
    right = ("TIME", "CPU, COMMANDS", "CPU, CONTROLLER", "CPU, SLURMCTLD", "PAUSE")
    table = render.table("OBSERVATION", *right, right=right)
    for one in found["kinds"]:
        figures = (one["took"], one["commands"], one["process"], one["slurmctld"], one["pause"])
        table.add_row(one["name"], *(f"{seconds * 1000:,.0f} ms" for seconds in figures))
    render.show(table, "Nothing was measured.")
