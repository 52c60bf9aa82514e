"""`multiverse bench containers`: what containers cost to start, and isolate, beside VMs and bare metal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse_lab.bench import containers as starts
from multiverse_lab.bench import isolation, latency
from multiverse_lab.bench.containers import WAYS, StartWay
from multiverse_lab.bench.stats import Estimate
from multiverse_lab.cli.bench import (
    DIRECTORY,
    IMAGES,
    Dir,
    Images,
    Json,
    build_images,
    host_figures,
    job_progress,
    on_lab,
    uses_image,
    warm_up,
)
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import LabSession

ALL_WAYS = ",".join(way.name for way in WAYS)
_SLIM = (latency.JobKind("", ("slim&",)),)  # whose disk containers get, too


class ContainersPlan(NamedTuple):
    jobs: int
    seed: int
    ways: list[StartWay]
    image: Path  # the disk whose files containers have


def containers(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Jobs of each kind.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the gaps and of the order.")] = 1,
    kinds: Annotated[str, typer.Option(help="Which kinds, with commas.")] = ALL_WAYS,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """What rootless containers and Slurm's --container cost to start, and isolate, beside VMs and bare metal."""
    ways = starts.ways_of(kinds)
    if any(way.contained for way in ways):
        starts.check_packages()
    plain = [latency.JobKind(way.name, way.options, way.vm) for way in ways]
    build_images([*plain, *_SLIM], images, json)
    site = latency.POOLS if uses_image(latency.WARM, plain) else ""
    # The prolog of VMs inside jobs is not to be part of the baseline. Full boots take minutes on a busy machine.
    settings: dict[str, dict[str, Any]] = {"job_vms": {"enabled": False}, "pacing": {"spawn_timeout": 240.0}}
    options = LabOptions(cores=8, memory=16384, physical=1, image="slim", images=images, settings=settings)
    plan = ContainersPlan(jobs, seed, ways, images / "slim" / "disk.raw")
    found = on_lab(options, directory, json, lambda lab: _measure(lab, plan, json), site)
    render.present(found, json, _print)


def _measure(lab: LabSession, plan: ContainersPlan, json: bool) -> dict[str, Any]:
    kinds = [way.kind(lab.user.home) for way in plan.ways]
    say, contained = job_progress(json), any(way.contained for way in plan.ways)
    with starts.containers(lab, plan.image) if contained else nullcontext(), Client(lab.settings.socket) as client:
        warm_up(lab, client, kinds)
        order = latency.LatencyPlan(plan.jobs, plan.seed, kinds)
        samples = latency.run(lab, client, order, starts.node_cost(lab), say)
        began = time.monotonic()
        isolated = isolation.table(
            lab,
            plan.ways,
            lambda name, number: say(f"{name}: isolation", number, len(plan.ways), time.monotonic() - began),
        )
        return {
            "jobs": plan.jobs,
            "seed": plan.seed,
            **host_figures(client),
            "programs": starts.versions(plan.ways, lab.run),
            "kinds": {name: asdict(starts.figures(one)) for name, one in samples.items()},
            "beside": [asdict(one) for one in starts.compared(samples)],
            "isolation": isolated,
        }


def _print(found: Mapping[str, Any]) -> None:
    said = "".join(f"; {version}" for version in found["programs"].values())
    console.print(
        f"\n{found['jobs']} jobs of each kind, interleaved, gaps of 0 to 1 s (seed {found['seed']}); guests run on "
        f"{found['accelerator']}{said}. CPU time and memory of the job and its VM at the script's first "
        f"instruction; medians with 95 %.\n",
        markup=False,
    )
    heads = ("SUBMIT → START", "× BARE METAL", "MORE", "CPU", "UNIQUE")
    beside = {one["kind"]: one for one in found["beside"]}
    table = render.table("KIND", *heads, right=heads)
    for name, one in found["kinds"].items():
        cells = [
            _middle(one[which], unit) for which, unit in (("submit_to_start", "s"), ("cpu_s", "s"), ("uss_mib", "MiB"))
        ]
        more = [_estimate(beside.get(name, {}).get(which), unit) for which, unit in (("ratio", ""), ("excess", " s"))]
        table.add_row(name, cells[0], *more, *cells[1:])
    console.print(table)
    ways = list(found["kinds"])
    for row, by_way in found["isolation"].items():
        console.print(f"{row}:", markup=False)
        for way in ways:
            console.print(f"  {way:<20} {by_way[way]}", markup=False)


def _middle(one: Mapping[str, float] | None, unit: str) -> str:
    return "–" if one is None else f"{one['p50']:.2f} {unit} ({one['low']:.2f}–{one['high']:.2f})"


def _estimate(one: Mapping[str, float] | None, unit: str) -> str:
    if one is None:
        return "–"
    found = Estimate(**one)
    return f"{found.value:.2f}{unit} ({found.low:.2f}–{found.high:.2f})"
