"""`multiverse bench lease-start`: the time from a pilot's start to the first job in a VM, by phases."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.images.build import build as build_image
from multiverse.images.catalog import Image
from multiverse.system import interrupts
from multiverse_lab.bench import lease_start as bench
from multiverse_lab.bench.lease_start import PHASES, LeaseStart
from multiverse_lab.bench.stats import median
from multiverse_lab.cli.bench import DIRECTORY, IMAGES, Dir, Images, Json, host_figures, job_progress, lab_progress
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import session


def lease_start(
    repeat: Annotated[int, typer.Option(min=2, help="Leases, one after the other.")] = 4,
    copies: Annotated[bool, typer.Option("--copies", help="Templates are copied from the first lease's.")] = False,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """How long a leased node takes until a VM on it runs a job, and which share its template has."""

    def say(line: str) -> None:
        progress.present().say(line)

    image = build_image("slim", "slim", images, progress=say)
    found = interrupts.run(_measured(directory, image, repeat, copies, json))
    render.present(found, json, _print)


async def _measured(directory: Path, image: Image, repeat: int, copies: bool, json: bool) -> dict[str, Any]:
    options = LabOptions(physical=1, cores=4, memory=6144, images=image.path.parent, settings={})
    # Beside the lab's directory, which each node of the lab has for itself.
    shared = directory.absolute().with_name(f"{directory.name}-templates")
    site = bench.SITE + (f'[image]\ntemplates = "{shared}"\n' if copies else "")
    try:
        async with session(layout(directory), options, lab_progress(json), site) as lab:
            with Client(lab.settings.socket) as client:
                samples = await asyncio.to_thread(bench.run, lab, client, repeat, job_progress(json))
                host = host_figures(client)
    finally:
        if copies:
            shutil.rmtree(shared, ignore_errors=True)
    return {"repeat": repeat, "copies": copies, **host, **document(samples)}


def document(samples: list[LeaseStart]) -> dict[str, Any]:
    """The first lease, whose node copies the image, and the medians of the others, by phases; and the share that the
    template has of the others' time."""
    first, *others = samples
    whole = [one.whole for one in others]
    return {
        "first": {**first.phases, "whole": first.whole},
        "others": {**{name: median([one.phases[name] for one in others]) for name in PHASES}, "whole": median(whole)},
        "template_share": median([one.phases["template"] / one.whole for one in others]),
        "before": median([one.before for one in samples]),
    }


def _print(found: dict[str, Any]) -> None:
    console.print(
        f"\nFrom the start of a lease's pilot to its first job, in seconds: the first of {found['repeat']} leases, "
        f"which copies the image to the node, and medians of the others. "
        f"{'Only the first template is booted, the others are copied. ' if found['copies'] else ''}"
        f"Guests: {found['accelerator']}. From the submission to the pilot's start: {found['before']:.1f} s.\n",
        markup=False,
    )
    right = ("FIRST", "OTHERS")
    table = render.table("PHASE", *right, right=right)
    for name, text in (*PHASES.items(), ("whole", "in all")):
        table.add_row(text, *(f"{found[which][name]:.2f}" for which in ("first", "others")))
    console.print(table)
    console.print(f"\nThe template's share: {found['template_share']:.0%}\n", markup=False)
