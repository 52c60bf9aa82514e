"""`multiverse bench move`: how long moves of VMs take, and how long a VM stands still."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse_lab.bench.computing import ComputingCase, ProgressReports
from multiverse_lab.bench.move import CASES, LARGE, MoveRun
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

_SECONDS = ("total", "inside", "outside", "usual")
_CPU = ("cpu_old", "cpu_new", "cpu_agents")
_FIGURES = (*_SECONDS, "sent", "slowdown", *_CPU, "cpu_usual")
PUBLISHED = "10 to 13 s for 500 MB (Sandia), 2.3 s and 26 ms down for an idle VM of 8 GiB (QEMU with KVM)"
HOW = {"encrypted": {}, "compressed": {"compress": True}, "private": {"private": True}}


def move(
    moves: Annotated[int, typer.Option("--moves", "-m", min=1, help="Moves of each job.")] = 4,
    how: Annotated[str, typer.Option(help="encrypted, compressed (and encrypted) or private (neither).")] = "encrypted",
    large: Annotated[bool, typer.Option("--large", help="Also a VM of 8 GiB.")] = False,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Moving VMs between two hosts: small and large ones, idle and while their jobs write to memory."""
    build_images(SLIM_CLONES, images, json)
    cases = (*CASES, LARGE) if large else CASES
    if how not in HOW:
        raise Refused(f"--how {how}: there is no such way", hint=f"choose one of {', '.join(HOW)}")
    memory = max(case.memory for case in cases) + 2048
    settings: dict[str, dict[str, Any]] = {"move": HOW[how], "image": {"source": str(images)}}
    options = LabOptions(hosts=2, cores=2, memory=memory, image="slim", images=images, settings=settings)
    found = on_lab(options, directory, json, lambda lab: _measure(lab, MovePlan(cases, moves, how), json))
    render.present(found, json, _print)


class MovePlan(NamedTuple):
    cases: tuple[ComputingCase, ...]
    moves: int  # of each job
    how: str  # a key of `HOW`


def _measure(lab: LabSession, plan: MovePlan, json: bool) -> dict[str, Any]:
    say = job_progress(json)
    with Client(lab.settings.socket) as client, ProgressReports(lab.settings.network.gateway) as reports:
        run = MoveRun(lab, client, reports)
        for number, case in enumerate(plan.cases, 1):
            say(case.name, number, len(plan.cases), median(one.total for one in run.run(case, plan.moves)))
        return {
            "moves": plan.moves,
            "how": plan.how,
            **host_figures(client),
            "cases": {case.name: medians(run.samples[case.name], _FIGURES) for case in plan.cases},
        }


def _print(found: Mapping[str, Any]) -> None:
    console.print(
        f"\nMedians of {found['moves']} moves of each job, {found['how']}; guests run on {found['accelerator']}. "
        f"Published: {PUBLISHED}.\n",
        markup=False,
    )
    heads = ("MOVED", "DOWN, INSIDE", "DOWN, OUTSIDE", "USUAL PAUSE", "SENT", "JOB SLOWER BY",
             "CPU: OLD + NEW + AGENTS", "USUAL CPU")  # fmt: skip
    table = render.table("JOB", *heads, right=heads)
    for name, one in found["cases"].items():
        seconds = [render.duration(one[key]) for key in _SECONDS]
        cpu = " + ".join(f"{one[key]:.2f}" for key in _CPU)
        table.add_row(name, *seconds, f"{one['sent'] / (1 << 20):.0f} MiB", f"{one['slowdown']:.0%}",
                      f"{cpu} s", f"{one['cpu_usual']:.2f} s")  # fmt: skip
    console.print(table)
