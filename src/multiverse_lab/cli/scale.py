"""`multiverse bench scale`: clones over several hosts, and what a clone on another host costs."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.images.build import build as build_image
from multiverse.system import interrupts
from multiverse_lab.bench import scale as scales
from multiverse_lab.bench.scale import ScalePlan, ScaleResult
from multiverse_lab.bench.stats import Estimate, Summary, excess, summary
from multiverse_lab.cli.bench import DIRECTORY, IMAGES, Dir, Images, Json, lab_progress
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions, load

_HOSTS = (1, 2, 4)


def scale(
    clones: Annotated[int, typer.Argument(min=1, help="Clones in each round.")] = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Clones that are made on a host at the same time.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Clones by ssh and as many by the socket, in turns.")] = 40,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Clones over 1, 2 and 4 hosts of a lab, one at a time and at once; a remote clone beside a local one."""
    build_image("slim", "slim", images, progress=lambda line: None if json else console.print(f"  {line}"))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # not that agents connect
    plan = ScalePlan(clones, _HOSTS, at_once, turns, "slim")
    found = _document(plan, interrupts.run(_scale(directory, images, plan, json)))
    render.present(found, json, _print)


async def _scale(directory: Path, images: Path, plan: ScalePlan, json: bool) -> ScaleResult:
    where = layout(directory)
    options = LabOptions(hosts=max(plan.hosts), cores=64, memory=65536, image="slim", images=images, settings={})
    await lifecycle.down(where)  # what a killed run left
    try:
        settings = await lifecycle.up_hosts(where, options, lab_progress(json))
        lab = load(where)
        assert lab is not None, "the lab is up, so its plan is written"
        names = [host.name for host in lab.own_hosts]

        def say(line: str) -> None:
            progress.present().say(line)
            if not json:
                console.print(f"  {line}", markup=False, highlight=False)

        return await scales.run(where, settings, names, plan, say)
    finally:
        await lifecycle.down(where)


def _document(plan: ScalePlan, found: ScaleResult) -> dict[str, Any]:
    return {
        "clones": plan.clones,
        "at_once": plan.at_once,
        "cpus": os.cpu_count(),
        "rounds": [
            {"hosts": hosts, "at_once": parallel, "took": one.took, "clone": _plain(summary(one.clones))}
            for (hosts, parallel), one in found.rounds.items()
        ],
        "local": _plain(summary(found.local)),
        "remote": _plain(summary(found.remote)),
        "remote_excess": _plain(excess(found.remote, found.local)),
        "round_trip": found.round_trip,
        "paper": scales.PAPER,
    }


def _plain(one: Summary | Estimate | None) -> dict[str, Any] | None:
    return asdict(one) if one is not None else None


def _print(found: dict[str, Any]) -> None:
    console.print(
        f"\n{found['clones']} instant clones over the hosts of a lab, by their agents, without Slurm: each from the "
        f"call until the guest has its identity. At once: {found['at_once']} on each host at the same time. "
        f"All hosts share this machine's {found['cpus']} CPUs.\n",
        markup=False,
    )
    table = render.table("HOSTS", "HOW", "ALL", "CLONE p50", "p95", right=("HOSTS", "ALL", "CLONE p50", "p95"))
    for one in found["rounds"]:
        clone = Summary(**one["clone"])
        how = "at once" if one["at_once"] else "one at a time"
        table.add_row(str(one["hosts"]), how, f"{one['took']:.1f} s", f"{clone.p50:.3f} s", f"{clone.p95:.3f} s")
    console.print(table)
    local, remote, more = Summary(**found["local"]), Summary(**found["remote"]), Estimate(**found["remote_excess"])
    trips = {name: f"{seconds * 1000:.2f} ms" for name, seconds in found["round_trip"].items()}
    console.print(
        f"one clone on the same host, medians: {local.p50 * 1000:.0f} ms by the agent's socket, "
        f"{remote.p50 * 1000:.0f} ms by ssh, "
        f"{more.value * 1000:+.0f} ms ({more.low * 1000:+.0f} to {more.high * 1000:+.0f}); "
        f"a round trip takes {trips['local']} and {trips['remote']}",
        markup=False,
    )
    paper = found["paper"]
    console.print(
        f"Slurm-V, 32 VMs: {paper['sequential']:g} s one after the other, {paper['parallel']:g} s in parallel",
        style="dim",
        markup=False,
    )
