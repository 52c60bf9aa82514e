"""`multiverse bench burst`: many jobs at once, or one every few seconds, of every kind of clone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.system import interrupts
from multiverse_lab.bench import burst as bursts
from multiverse_lab.bench.burst import BurstPlan
from multiverse_lab.bench.stats import Estimate, Summary
from multiverse_lab.cli.bench import (
    AMPLE_DISK,
    DIRECTORY,
    IMAGES,
    Dir,
    Images,
    Json,
    build_images,
    host_figures,
    job_progress,
    kinds_of,
    lab_progress,
)
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import session

ALL = ",".join(kind.name for kind in bursts.KINDS)
SPAWN_TIMEOUT = 900.0
"""Seconds for a node to register. Many full boots at once are slow on few CPUs; they are measured, not given up."""


def burst(
    jobs: Annotated[int, typer.Argument(min=1, help="Jobs of each kind.")] = 50,
    every: Annotated[
        float | None, typer.Option(min=0.1, help="Submit one each so many seconds, not all at once.")
    ] = None,
    kinds: Annotated[str, typer.Option(help="Which kinds, with commas.")] = ALL,
    provisioning: Annotated[int, typer.Option(min=1, help="VMs between claim and node at the same time.")] = 4,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Provisioning and first instruction of many jobs, and how many times faster instant clones are than full ones."""
    plan = BurstPlan(jobs, every, kinds_of(kinds, bursts.KINDS))
    build_images(plan.kinds, images, json)
    found = interrupts.run(_burst(directory, images, plan, provisioning, json))
    render.present(found, json, _print)


async def _burst(directory: Path, images: Path, plan: BurstPlan, provisioning: int, json: bool) -> dict[str, Any]:
    settings: dict[str, dict[str, Any]] = {
        "pacing": {"provisioning": provisioning, "spawn_timeout": SPAWN_TIMEOUT},
        "host": {"disk": AMPLE_DISK},
    }
    options = LabOptions(max(8, min(plan.jobs, 50)), 16384, image="slim", images=images, settings=settings)
    async with session(layout(directory), options, lab_progress(json)) as lab:
        with Client(lab.settings.socket) as client:
            # One job of each kind that is not counted builds the template and fills the page cache.
            warm_up = BurstPlan(1, None, plan.kinds)
            await asyncio.to_thread(bursts.run, lab, client, warm_up, lambda *_: None)
            samples = await asyncio.to_thread(bursts.run, lab, client, plan, job_progress(json))
            host = host_figures(client)
    return {
        "jobs": plan.jobs,
        "every": plan.every,
        "provisioning_at_once": provisioning,
        **host,
        "note": "provisioning is from the claim to a node that can run the job; a burst is one array",
        "kinds": {name: asdict(bursts.result(one)) for name, one in samples.items()},
        "ratios": [asdict(one) for one in bursts.ratios(samples)],
        "paper": bursts.PAPER["burst" if plan.every is None else "steady"],
    }


def _print(found: Mapping[str, Any]) -> None:
    machine = found["machine"] or {}
    how = "at once" if found["every"] is None else f"one each {found['every']:g} s"
    console.print(
        f"\n{found['jobs']} jobs of each kind, {how}, kind after kind; at most {found['provisioning_at_once']} VMs "
        f"being made; guests run on {found['accelerator']}; this machine has {machine.get('cpus')} CPUs. "
        f"{found['note']}.\n",
        markup=False,
    )
    table = render.table(
        "KIND", "PROVISIONING mean", "p50", "95 % OF p50", "p95", "SUBMIT → START mean", "p95", "ALL RAN", "AGAIN",
        right=("PROVISIONING mean", "p50", "p95", "SUBMIT → START mean", "ALL RAN", "AGAIN"),
    )  # fmt: skip
    for name, one in found["kinds"].items():
        made, start = Summary(**one["provisioning"]), Summary(**one["submit_to_start"])
        table.add_row(
            name,
            f"{made.mean:.2f} s",
            f"{made.p50:.2f} s",
            f"{made.low:.2f}–{made.high:.2f}",
            f"{made.p95:.2f} s",
            f"{start.mean:.1f} s",
            f"{start.p95:.1f} s",
            f"{one['all_ran']:.1f} s",
            str(one["again"]),
        )
    console.print(table)
    for name, one in found["kinds"].items():
        stages = " · ".join(f"{stage} {seconds * 1000:.0f}" for stage, seconds in one["stages"].items())
        console.print(f"{name}, ms: {stages}", style="dim", markup=False)
    for one in found["ratios"]:
        means, medians, starts = (_ratio(one[name]) for name in ("means", "medians", "submit_to_start"))
        console.print(
            f"{one['over']} ÷ {one['under']}: provisioning {means} of means, {medians} of medians; "
            f"submit → start {starts} of means",
            markup=False,
        )
    paper = found["paper"]
    console.print(
        f"the paper, on vSphere: full {paper['full']:g} s, instant {paper['instant']:g} s, {paper['ratio']:g}×",
        style="dim",
        markup=False,
    )


def _ratio(estimate: Mapping[str, float]) -> str:
    one = Estimate(**estimate)
    return f"{one.value:.1f}× ({one.low:.1f}–{one.high:.1f})"
