"""`multiverse bench queue` and `bench neighbours`: what thousands of waiting jobs do to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.system import interrupts
from multiverse_lab.bench import long_queue, neighbours
from multiverse_lab.bench.long_queue import LongQueuePlan, Phase
from multiverse_lab.bench.neighbours import NeighboursPlan
from multiverse_lab.bench.stats import percentile, ratio
from multiverse_lab.cli.bench import (
    DIRECTORY,
    IMAGES,
    SLIM_CLONES,
    Dir,
    Images,
    Json,
    build_images,
    host_figures,
    lab_progress,
)
from multiverse_lab.lab.baremetal import baremetal as bare_slurmd
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import session


def queue(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=2, help="Jobs measured in each phase.")] = 20,
    waiting: Annotated[int, typer.Option(min=1, help="Jobs that wait in Multiverse's partition.")] = 5_000,
    others: Annotated[int, typer.Option(min=0, help="Jobs that wait in another partition.")] = 10_000,
    idle: Annotated[float, typer.Option(min=1.0, help="Seconds for which the idle controller is measured.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of the sizes and of the gaps.")] = 1,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """The start of a job that fits and has the highest priority, with an empty and with a long queue."""
    build_images(SLIM_CLONES, images, json)
    found = interrupts.run(_queue(directory, images, LongQueuePlan(jobs, waiting, others, idle, seed), json))
    render.present(found, json, _print)


async def _queue(directory: Path, images: Path, plan: LongQueuePlan, json: bool) -> dict[str, Any]:
    phases, host = await _measured(directory, images, partial(long_queue.run, plan=plan), json)
    return {
        **asdict(plan),
        **host,
        "phases": [asdict(phase) for phase in phases],
        "ratios": {
            "long": _ratios(phases[1].start, phases[0].start + phases[2].start),
            "long, bare metal": _ratios(phases[1].bare, phases[0].bare + phases[2].bare),
        },
    }


async def _measured(
    directory: Path, images: Path, run: Callable[..., list[Phase]], json: bool
) -> tuple[list[Phase], dict[str, Any]]:
    """The phases that `run` measures in a lab with its bare node, and what the results say about the host."""

    def measured(line: str) -> None:
        progress.present().say(line)
        if not json:
            console.print(f"  {line}", markup=False, highlight=False)

    options = LabOptions(cores=8, memory=16384, image="slim", images=images, settings={})
    async with session(layout(directory), options, lab_progress(json)) as lab, bare_slurmd(lab.lab):
        with Client(lab.settings.socket) as client:
            phases = await asyncio.to_thread(run, lab, client, progress=measured)
            return phases, host_figures(client)


def _ratios(times: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Percentiles of the times of a phase against those of its baseline."""
    compared = {
        name: ratio(times, baseline, partial(percentile, share=share)) for name, share in (("p50", 0.5), ("p95", 0.95))
    }
    return {name: asdict(one) for name, one in compared.items() if one}


def neighbours_(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=2, help="Jobs measured in each phase.")] = 40,
    waiting: Annotated[int, typer.Option(min=1, help="Jobs at the gate that are not held.")] = 5_000,
    starting: Annotated[int, typer.Option(min=1, help="VMs that are started in one phase.")] = 100,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """The start of jobs of another partition, alone, beside a full gate, and while VMs start."""
    build_images(SLIM_CLONES, images, json)
    found = interrupts.run(_neighbours(directory, images, NeighboursPlan(jobs, waiting, starting), json))
    if json:
        render.as_json(found)
        return
    console.print(
        f"\nFrom submission to the first instruction of jobs of another partition, on bare metal, beside "
        f"{found['waiting']:,} jobs at the gate that are not held. Cycles: mean lengths of slurmctld's scheduling "
        "cycles.\n",
        markup=False,
    )
    _print_phases(found, "alone")


async def _neighbours(directory: Path, images: Path, plan: NeighboursPlan, json: bool) -> dict[str, Any]:
    phases, _ = await _measured(directory, images, partial(neighbours.run, plan=plan), json)
    alone, full, starting, again = phases
    return {
        **asdict(plan),
        "phases": [asdict(phase) for phase in phases],
        "ratios": {one.name: _ratios(one.start, alone.start + again.start) for one in (full, starting)},
    }


def _print(found: Mapping[str, Any]) -> None:
    console.print(
        f"\nFrom submission to the first instruction of a job that fits, in a VM and on bare metal, with "
        f"{found['waiting']:,} jobs waiting in Multiverse's partition and {found['others']:,} in another one; guests "
        f"run on {found['accelerator']}. Idle: "
        "CPU of the controller and of slurmctld while nothing is submitted. Cycles: mean lengths of slurmctld's "
        "scheduling cycles.\n",
        markup=False,
    )
    _print_phases(found, "empty")
    for phase in found["phases"]:
        for where, stages in (("in a VM", phase["stages"]), ("on bare metal", phase["bare_stages"])):
            text = " · ".join(f"{stage} {seconds * 1000:.0f}" for stage, seconds in stages.items())
            console.print(f"{phase['name']}, {where}, ms: {text}", style="dim", markup=False)


def _print_phases(found: Mapping[str, Any], baseline: str) -> None:
    daemons = list(found["phases"][0]["idle"])
    kinds = [("start", "")]
    if any(phase["bare"] for phase in found["phases"]):
        kinds.append(("bare", "BARE METAL, "))
    percentiles = [f"{kind}{name}" for _, kind in kinds for name in ("P50", "P95")]
    right = (*percentiles, *(f"{name.upper()}, IDLE" for name in daemons), "MAIN CYCLE", "BACKFILL CYCLE")
    table = render.table("QUEUE", *right, right=right)
    for phase in found["phases"]:
        idle, cycles = phase["idle"], phase["cycles"]
        table.add_row(
            phase["name"],
            *(f"{percentile(phase[kind], share):.2f} s" for kind, _ in kinds for share in (0.5, 0.95)),
            *(f"{idle[name]:.1%}" for name in daemons),
            *(f"{cycles[name] / 1000:.1f} ms" if name in cycles else "" for name in ("main", "backfill")),
        )
    render.show(table, "Nothing was measured.")
    for phase, figures in found["ratios"].items():
        for name, one in figures.items():
            interval = f"({one['low']:.2f} to {one['high']:.2f})"
            console.print(f"{name}, {phase} against {baseline}: {one['value']:.2f} {interval}", markup=False)
