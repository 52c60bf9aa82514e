"""`multiverse bench sleep`: how long it takes to suspend and resume jobs whose VMs free their memory meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse_lab.bench.save import JobReports
from multiverse_lab.bench.sleep import SleepRun
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

AFTER = 1  # seconds after which VMs sleep
_HEADS = ("ALL ASLEEP", "FIRST GOES ON", "MIDDLE", "LAST", "MEMORY BEFORE", "AND SUSPENDED")


def sleep(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=20, help="Jobs that are suspended at once.")] = 10,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Jobs that are suspended and resumed: in VMs of 288 MiB that stay awake, and that sleep meanwhile."""
    build_images(SLIM_CLONES, images, json)
    cases = dict[str, Any]()
    for number, (name, after) in enumerate((("awake", 0), ("asleep", AFTER)), 1):
        settings = {"save": {"sleep_after": after}}
        options = LabOptions(cores=20, memory=16384, image="slim", images=images, settings=settings)
        cases |= on_lab(options, directory, json, partial(_measure, name=name, number=number, jobs=jobs, json=json))
    found = {"jobs": jobs, **cases.pop("host"), "cases": cases}
    render.present(found, json, _print)


def _measure(lab: LabSession, name: str, number: int, jobs: int, json: bool) -> dict[str, Any]:
    with Client(lab.settings.socket) as client, JobReports(lab.settings.network.gateway) as reports:
        found = SleepRun(lab, client, reports, jobs).run(sleeps=name == "asleep")
        job_progress(json)(name, number, 2, found.middle)
        return {name: asdict(found), "host": host_figures(client)}


def _print(found: Mapping[str, Any]) -> None:
    console.print(f"\n{found['jobs']} jobs at once; guests run on {found['accelerator']}.\n", markup=False)
    table = render.table("VMS", *_HEADS, right=_HEADS)
    for name, one in found["cases"].items():
        asleep = render.duration(one["asleep"]) if one["asleep"] else "–"
        seconds = [render.duration(one[key]) for key in ("first", "middle", "last")]
        table.add_row(name, asleep, *seconds, f"{one['memory']:.0f} MiB", f"{one['left']:.0f} MiB")
    console.print(table)
