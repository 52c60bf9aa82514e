"""`multiverse bench checkpoint`: how long checkpoints of jobs take, and how much they cost the jobs."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse_lab.bench.checkpoint import CASES, EVERY, CheckpointRun
from multiverse_lab.bench.computing import ProgressReports
from multiverse_lab.cli.bench import (
    DIRECTORY,
    IMAGES,
    SLIM_CLONES,
    Dir,
    Images,
    Json,
    build_images,
    host_figures,
    job_progress,
    medians,
    on_lab,
)
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import LabSession

_SECONDS = ("total", "pause", "usual")
_FIGURES = (*_SECONDS, "size", "slowdown", "lost")


def checkpoint(
    times: Annotated[int, typer.Option("--times", "-t", min=1, help="Checkpoints of each job.")] = 4,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Checkpoints of jobs that go on: VMs of 288 MiB and 2 GiB, idle and while their jobs write to memory."""
    build_images(SLIM_CLONES, images, json)
    options = LabOptions(cores=4, memory=8192, image="slim", images=images, settings={})
    found = on_lab(options, directory, json, lambda lab: _measure(lab, times, json))
    render.present(found, json, _print)


def _measure(lab: LabSession, times: int, json: bool) -> dict[str, Any]:
    say = job_progress(json)
    with Client(lab.settings.socket) as client, ProgressReports(lab.settings.network.gateway) as reports:
        run = CheckpointRun(lab, client, reports)
        for number, case in enumerate(CASES, 1):
            say(case.name, number, len(CASES), median(one.total for one in run.run(case, times)))
        cases = {case.name: medians(run.samples[case.name], _FIGURES) for case in CASES}
        return {"times": times, **host_figures(client), "cases": cases}


def _print(found: Mapping[str, Any]) -> None:
    console.print(
        f"\nMedians of {found['times']} checkpoints of each job; guests run on {found['accelerator']}.\n", markup=False
    )
    heads = ("COMPLETE", "JOB STANDS STILL", "USUAL PAUSE", "SIZE", "SLOWER MEANWHILE", f"SLOWER, EACH {EVERY:.0f} s")
    table = render.table("JOB", *heads, right=heads)
    for name, one in found["cases"].items():
        seconds = [render.duration(one[key]) for key in _SECONDS]
        table.add_row(name, *seconds, f"{one['size'] / (1 << 20):.0f} MiB", f"{one['slowdown']:.0%}",
                      f"{one['lost']:.1%}")  # fmt: skip
    console.print(table)
