"""`multiverse bench throughput`: short tasks a minute on a few CPUs, beside bare metal, and what bounds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse.system import interrupts
from multiverse_lab.bench import throughput as throughputs
from multiverse_lab.bench.latency import LOG_HINT
from multiverse_lab.bench.throughput import ThroughputPlan, ThroughputResult
from multiverse_lab.cli.bench import (
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
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.baremetal import baremetal as bare_slurmd
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import LabSession, session

ALL = ",".join(kind.name for kind in throughputs.KINDS)
_FULL = 300.0  # seconds until the pool must be full


def throughput(
    tasks: Annotated[int, typer.Option("--tasks", "-n", min=1, max=5000, help="Tasks of the array.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of each task.")] = 1.0,
    cpus: Annotated[int, typer.Option("--cpus", "-c", min=1, help="CPUs that run tasks.")] = 8,
    kinds: Annotated[str, typer.Option(help="Which kinds, with commas.")] = ALL,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Short tasks a minute, in VMs, with joined spares, and on bare metal: what computes, and what bounds it."""
    # In this order: the pool of joined spares comes last, and stays.
    chosen = kinds_of(kinds, throughputs.KINDS)
    plan = ThroughputPlan(tasks, seconds, cpus, [kind for kind in throughputs.KINDS if kind in chosen])
    build_images(plan.kinds, images, json)
    found = interrupts.run(_throughput(directory, images, plan, json))
    render.present(found, json, _print)


async def _throughput(directory: Path, images: Path, plan: ThroughputPlan, json: bool) -> dict[str, Any]:
    where, results = layout(directory), dict[str, ThroughputResult]()
    options = LabOptions(cores=plan.cpus, memory=16384, image="slim", images=images, settings={})
    async with session(where, options, lab_progress(json)) as lab, bare_slurmd(lab.lab, plan.cpus):
        for kind in plan.kinds:
            if kind is throughputs.JOINED:
                (where.etc / "site.toml").write_text(throughputs.pool(plan.cpus))
                await lifecycle.up(where, options, lab_progress(json))
            results[kind.name] = await asyncio.to_thread(_run, lab, plan, kind.name, json)
        with Client(lab.settings.socket) as client:
            host = host_figures(client)
    return {
        "tasks": plan.tasks,
        "seconds": plan.seconds,
        "cpus": plan.cpus,
        **host,
        "note": "one array of each kind, kind after kind; a task waits for its seconds and leaves the machine's CPUs "
        "to what starts and ends tasks; with joined spares, these have as many CPUs again to wait on",
        "kinds": {name: asdict(one) for name, one in results.items()},
        "beside": _beside(results),
        "paper": throughputs.paper(plan),
    }


def _run(lab: LabSession, plan: ThroughputPlan, name: str, json: bool) -> ThroughputResult:
    """Measure one kind, after one task that is not counted, which builds the template and fills the page cache."""
    kind = next(kind for kind in plan.kinds if kind.name == name)
    with Client(lab.settings.socket) as client:
        throughputs.run_kind(lab, client, replace(plan, tasks=1, seconds=0.1), kind, lambda *_: None)
        if kind is throughputs.JOINED:
            _until_full(client)
        samples = throughputs.run_kind(lab, client, plan, kind, _sparse(json))
    return throughputs.result(samples, plan)


def _sparse(json: bool) -> throughputs.Progress:
    """Prints a line for every tenth of the tasks."""
    say, shown = job_progress(json), [0]

    def progress(kind: str, number: int, of: int, seconds: float) -> None:
        if number * 10 // of > shown[0]:
            shown[0] = number * 10 // of
            say(kind, number, of, seconds)

    return progress


def _until_full(client: Client) -> None:
    deadline = time.monotonic() + _FULL
    while any(pool["ready"] < pool["wanted"] for pool in client.status()["pools"]):
        if time.monotonic() > deadline:
            raise Broken(f"the pool was not full within {_FULL:g} s", hint=LOG_HINT)
        time.sleep(0.1)


def _beside(results: Mapping[str, ThroughputResult]) -> dict[str, float]:
    """The tasks a minute of each kind as a share of bare metal's."""
    bare = results.get(throughputs.BARE.name)
    if bare is None:
        return {}
    return {name: one.tasks_per_minute / bare.tasks_per_minute for name, one in results.items() if one is not bare}


def _print(found: Mapping[str, Any]) -> None:
    machine = found["machine"] or {}
    console.print(
        f"\n{found['tasks']} tasks of {found['seconds']:g} s on {found['cpus']} CPUs; guests run on "
        f"{found['accelerator']}; this machine has {machine.get('cpus')} CPUs. {found['note']}.\n",
        markup=False,
    )
    figures = ("TASKS A MINUTE", "COMPUTES", "OF BARE METAL", "ALL RAN", "FOUND A SPARE", "AGAIN")
    right = (*figures, "MACHINE", "CONTROLLER", "SLURMCTLD")
    table = render.table("KIND", *right, right=right)
    for name, one in found["kinds"].items():
        share = found["beside"].get(name)
        table.add_row(
            name,
            f"{one['tasks_per_minute']:.1f}",
            f"{one['computing']:.1%}",
            f"{share:.1%}" if share is not None else "–",
            f"{one['all_ran']:.1f} s",
            str(one["spares"]) if name == throughputs.JOINED.name else "–",
            str(one["again"]),
            f"{one['machine']:.0%}",
            *(f"{one['daemons'].get(daemon, 0.0):.0%}" for daemon in ("controller", "slurmctld")),
        )
    paper = found["paper"]
    table.add_row("published*", f"{paper['tasks_per_minute']:.1f}", f"{paper['computing']:.1%}", *["–"] * 7)
    console.print(table)
    for name, one in found["kinds"].items():
        console.print(f"{name} is bounded by {one['bounded_by']}", markup=False)
        parts = " · ".join(f"{stage} {seconds:.2f}" for stage, seconds in one["stages"].items())
        console.print(f"  s of a CPU for each task: {parts}", style="dim", markup=False)
    console.print(
        f"* computed from the Multiverse paper's published mean of {paper['provisioning']:g} s to provision an instant "
        f"clone on vSphere, as if all CPUs were provisioned at once. Published, too: its own {paper['jobs']} jobs of "
        f"140 to 350 s on 220 CPUs took {paper['all']:g} s, {paper['jobs_per_minute']:.1f} a minute.",
        style="dim",
        markup=False,
    )
