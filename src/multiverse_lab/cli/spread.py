"""`multiverse bench spread`: how far apart the VMs of a job are frozen when it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse_lab.bench.save import JobReports
from multiverse_lab.bench.spread import HOST_MEMORY, MEMORY, SpreadRun, SpreadSample
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

VMS = tuple(MEMORY)
_FIGURES = ("frozen", "spread", "usual", "resume")
_HEADS = ("FROZEN", "SPREAD", "WHILE IT RUNS", "RESUMED")


def spread(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Jobs of each size.")] = 3,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Saving jobs of 2, 4 and 8 VMs on two hosts: how far apart their VMs are frozen."""
    build_images(SLIM_CLONES, images, json)
    with TemporaryDirectory(prefix="multiverse-states-") as shared:  # by both hosts
        settings: dict[str, dict[str, Any]] = {"image": {"source": str(images)}, "save": {"directory": shared}}
        options = LabOptions(hosts=2, cores=8, memory=HOST_MEMORY, image="slim", images=images, settings=settings)
        found = on_lab(options, directory, json, lambda lab: _measure(lab, jobs, json))
    render.present(found, json, _print)


def _measure(lab: LabSession, jobs: int, json: bool) -> dict[str, Any]:
    say, samples = job_progress(json), dict[int, list[SpreadSample]]()
    with Client(lab.settings.socket) as client, JobReports(lab.settings.network.gateway) as reports:
        run = SpreadRun(lab, client, reports)
        run.run(VMS[0])  # templates are ready from here on
        order = [vms for _ in range(jobs) for vms in VMS]
        for number, vms in enumerate(order, 1):
            samples.setdefault(vms, []).append(run.run(vms))
            say(f"{vms} VMs", number, len(order), samples[vms][-1].resume)
        return {
            "jobs": jobs,
            **host_figures(client),
            "cases": {f"{vms} VMs": medians(samples[vms], _FIGURES) for vms in VMS},
        }


def _print(found: Mapping[str, Any]) -> None:
    console.print(
        f"\nMedians of {found['jobs']} jobs of each size on two hosts; guests run on {found['accelerator']}.\n",
        markup=False,
    )
    table = render.table("JOB", *_HEADS, right=_HEADS)
    for name, one in found["cases"].items():
        table.add_row(name, *(render.duration(one[key]) for key in _FIGURES))
    console.print(table)
