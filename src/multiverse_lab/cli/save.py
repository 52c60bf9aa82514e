"""`multiverse bench save`: how long it takes to save a job and to resume it, beside a fresh clone and the storage."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse_lab.bench.save import CASES, JobReports, SaveCase, SaveRun, SaveSample, disk_speed
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
    on_lab,
)
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import LabSession

_SPEED = 512 << 20  # bytes that are written to learn the storage's speed
_SECONDS = ("start", "frozen", "requeued", "written", "resume")


def save(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Jobs of each size.")] = 3,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Saving a job and resuming it: VMs of 288 MiB and 2 GiB, idle and with full memory, beside fresh clones."""
    build_images(SLIM_CLONES, images, json)
    options = LabOptions(cores=4, memory=8192, image="slim", images=images, settings={})
    found = on_lab(options, directory, json, lambda lab: _measure(lab, jobs, json))
    render.present(found, json, _print)


def _measure(lab: LabSession, jobs: int, json: bool) -> dict[str, Any]:
    storage, say = lab.settings.save.directory, job_progress(json)
    with Client(lab.settings.socket) as client, JobReports(lab.settings.network.gateway) as reports:
        run = SaveRun(lab, client, reports)
        for case in (CASES[0], CASES[2]):  # a fresh clone of each size has a template from here on
            run.run(case)
        run.samples.clear()
        order = [case for _ in range(jobs) for case in CASES]
        for number, case in enumerate(order, 1):
            say(case.name, number, len(order), run.run(case).resume)
        speed = median(disk_speed(storage, _SPEED) for _ in range(3))
        return {
            "jobs": jobs,
            **host_figures(client),
            "storage_mib_s": speed / (1 << 20),
            "cases": {case.name: _figures(case, run.samples[case.name], speed) for case in CASES},
        }


def _figures(case: SaveCase, samples: list[SaveSample], speed: float) -> dict[str, Any]:
    """Medians. `at_disk_speed`: seconds in which the storage writes as many bytes."""
    size = median(one.size for one in samples)
    found = {name: median(getattr(one, name) for one in samples) for name in _SECONDS}
    return {
        "touched_mib": case.touched,
        **found,
        "size_mib": size / (1 << 20),
        "at_disk_speed": size / speed,
        "samples": [{name: getattr(one, name) for name in _SECONDS} for one in samples],
    }


def _print(found: Mapping[str, Any]) -> None:
    console.print(
        f"\nMedians of {found['jobs']} jobs of each size; guests run on {found['accelerator']}. The storage writes "
        f"{found['storage_mib_s']:.0f} MiB/s.\n",
        markup=False,
    )
    heads = ("FRESH START", "FROZEN", "REQUEUED", "WRITTEN", "STATE", "AT DISK SPEED", "RESUMED")
    table = render.table("JOB", *heads, right=heads)
    for name, one in found["cases"].items():
        seconds = {key: render.duration(one[key]) for key in (*_SECONDS, "at_disk_speed")}
        size = f"{one['size_mib']:.0f} MiB"
        cells = [seconds[key] for key in ("start", "frozen", "requeued", "written")]
        table.add_row(name, *cells, size, seconds["at_disk_speed"], seconds["resume"])
    console.print(table)
    idle, full = found["cases"][CASES[2].name], found["cases"][CASES[3].name]
    gib = full["touched_mib"] / 1024
    each = {key: (full[key] - idle[key]) / gib for key in ("written", "resume")}
    console.print(
        f"Each GiB that was touched adds {each['written']:.1f} s until the state is written, and "
        f"{each['resume']:.1f} s until the job goes on.",
        markup=False,
    )
