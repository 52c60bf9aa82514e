"""`multiverse bench across`: MPI and HPL across hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.images.build import build as build_image
from multiverse.images.catalog import Image
from multiverse.system import interrupts
from multiverse_lab.bench import across as bench
from multiverse_lab.bench.across import PLAIN, AcrossSample
from multiverse_lab.bench.hpcc import PACKAGE
from multiverse_lab.bench.stats import Estimate, median, ratio
from multiverse_lab.cli.bench import DIRECTORY, IMAGES, Dir, Images, Json, host_figures, job_progress, lab_progress
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import session

IMAGE = "across"
FIGURES = {
    "latency": "latency, us",
    "ring_latency": "latency as both send, us",
    "bandwidth": "bandwidth, MB/s",
    "hpl": "HPL, GFlop/s",
}


def across(
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turns.")] = 3,
    routed: Annotated[bool, typer.Option("--routed", help="A router between the hosts, and so a VXLAN.")] = False,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """MPI latency and bandwidth, and HPL, in VMs of two hosts and of one, and on two plain nodes."""

    def say(line: str) -> None:
        progress.present().say(line)

    image = build_image(IMAGE, "slim", images, packages=(PACKAGE,), progress=say)
    found = interrupts.run(_across(directory, image, repeat, routed, json))
    render.present(found, json, _print)


async def _across(directory: Path, image: Image, repeat: int, routed: bool, json: bool) -> dict[str, Any]:
    options = LabOptions(
        hosts=2, physical=2, routed=routed, cores=4, memory=8192, image=IMAGE, images=image.path.parent, settings={}
    )
    async with session(layout(directory), options, lab_progress(json)) as lab:
        with Client(lab.settings.socket) as client:
            samples = await asyncio.to_thread(bench.run, lab, client, repeat, image.disk, job_progress(json))
            host = host_figures(client)
    return {"repeat": repeat, "routed": routed, **host, "kinds": document(samples)}


def document(samples: dict[str, list[AcrossSample]]) -> dict[str, Any]:
    """Each figure of each kind: its median, its samples, and how many times that of the plain nodes it is."""
    return {kind: {figure: _compared(figure, each, samples[PLAIN]) for figure in FIGURES}
            for kind, each in samples.items()}  # fmt: skip


def _compared(figure: str, some: Sequence[AcrossSample], plain: Sequence[AcrossSample]) -> dict[str, Any]:
    values, base = ([float(getattr(one, figure)) for one in each] for each in (some, plain))
    times = ratio(values, base)
    return {"median": median(values), "samples": values, "times_plain": asdict(times) if times is not None else None}


def _print(found: dict[str, Any]) -> None:
    between = "a router, so a VXLAN," if found["routed"] else "a switch"
    console.print(
        f"\nHPCC with two ranks, medians of {found['repeat']} runs of each kind in turns, with {between} between the "
        f"hosts. Guests: {found['accelerator']}. All hosts and nodes share this machine's CPUs.\n",
        markup=False,
    )
    right = ("MEDIAN", "TIMES THE PLAIN NODES'")
    table = render.table("FIGURE", "WHERE", *right, right=right)
    for figure, name in FIGURES.items():
        for kind, figures in found["kinds"].items():
            one = figures[figure]
            table.add_row(name, kind, _number(one["median"]), "" if kind == PLAIN else _times(one["times_plain"]))
            name = ""
    console.print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(found: dict[str, float] | None) -> str:
    """With its 95 % interval, if there is one."""
    if found is None:
        return ""
    times = Estimate(**found)
    interval = f" ({times.low:.2f} to {times.high:.2f})" if times.low < times.high else ""
    return f"{times.value:.2f}{interval}"
