"""`multiverse bench density`: how many VMs with a running job each a host holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.model.basics import number_of
from multiverse.system import interrupts
from multiverse_lab.bench import density as densities
from multiverse_lab.bench.density import DensityBounds, DensityStep
from multiverse_lab.bench.latency import JobKind
from multiverse_lab.cli.bench import (
    AMPLE_DISK,
    DIRECTORY,
    IMAGES,
    Dir,
    Images,
    Json,
    build_images,
    host_figures,
    lab_progress,
)
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import session

CLAIM = 288
"""MiB that a VM of the smallest size claims, with its QEMU."""

RESERVED = 2048
"""MiB of the machine that are not declared, for everything that is not a VM."""


def density(
    most: Annotated[int, typer.Option(min=1, max=2000, help="Stop at so many VMs.")] = 200,
    by: Annotated[int, typer.Option("--step", min=1, help="Jobs added at a time.")] = 20,
    floor: Annotated[int, typer.Option(min=0, help="Stop when less is available, in MiB.")] = 1024,
    patience: Annotated[float, typer.Option(min=1.0, help="Stop when no job has started for so many seconds.")] = 120.0,
    provisioning: Annotated[int, typer.Option(min=1, help="VMs between claim and node at the same time.")] = 4,
    tb_size: Annotated[
        int, typer.Option(min=0, help="MiB of translated code that each VM keeps, see qemu.tb_size.")
    ] = 32,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Add jobs that hold their VMs until memory or CPUs are exhausted, and measure what each takes."""
    build_images([JobKind("instant", densities.OPTIONS)], images, json)
    declared = densities.machine_memory() - RESERVED
    settings: dict[str, dict[str, Any]] = {
        "host": {"overcommit": densities.overcommit(most, CLAIM, declared), "floor": floor, "disk": AMPLE_DISK},
        "pacing": {"provisioning": provisioning, "spawn_timeout": patience},
        "qemu": {"tb_size": tb_size, "max_cpus": 1, "max_memory": 1024},  # a guest that may grow needs more memory
    }
    options = LabOptions(most, declared, image="slim", images=images, settings=settings)
    found = interrupts.run(_density(directory, options, DensityBounds(most, by, floor, patience), json))
    found["tb_size"] = tb_size
    render.present(found, json, _print)


async def _density(directory: Path, options: LabOptions, bounds: DensityBounds, json: bool) -> dict[str, Any]:
    def measured(step: DensityStep) -> None:
        progress.present().say(number_of(step.vms, "VM"))
        if not json:
            console.print(
                f"  {number_of(step.vms, 'VM'):>8}: the last started after {render.duration(step.slowest)}; "
                f"{step.private:.1f} MiB each their own; {render.memory(step.available)} available; "
                f"CPUs {step.busy:.0%}",
                markup=False,
            )

    async with session(layout(directory), options, lab_progress(json)) as lab:
        with Client(lab.settings.socket) as client:
            found = await asyncio.to_thread(densities.run, lab, client, bounds, measured)
            figures = host_figures(client)
            host = next(host for host in client.hosts() if host["reachable"])
    return {
        "most": bounds.most,
        **figures,
        "overcommit": host["overcommit"],
        "templates": host["templates"],
        "gave_out": found.gave_out,
        "vms": found.most,
        "steps": [asdict(step) for step in found.steps],
    }


def _print(found: Mapping[str, Any]) -> None:
    machine = found["machine"] or {}
    console.print(
        f"\nJobs that hold their VMs; guests run on {found['accelerator']}; this machine has {machine.get('cpus')} "
        f"CPUs and {render.memory(machine.get('memory', 0))}, of which {render.memory(found['declared']['memory'])} "
        f"are declared and {found['overcommit']:g} times that may be claimed; templates take "
        f"{render.memory(found['templates'])}; of translated code each keeps {found['tb_size'] or 1024} MiB at most. "
        "Shared memory is counted in each VM that maps it; CPU figures are those of the whole machine.\n",
        markup=False,
    )
    table = render.table(
        "VMS", "UNIQUE", "SHARED", "MACHINE USED", "PER VM", "AVAILABLE", "CPUS, IDLE", "OF ONE, EACH", "LAST STARTED",
        right=("VMS", "UNIQUE", "SHARED", "MACHINE USED", "PER VM", "AVAILABLE", "CPUS, IDLE", "OF ONE, EACH",
               "LAST STARTED"),
    )  # fmt: skip
    for one in found["steps"]:
        table.add_row(
            str(one["vms"]),
            f"{one['private']:.1f} MiB",
            f"{one['shared']:.1f} MiB",
            render.memory(one["used"]),
            f"{one['used'] / one['vms']:.1f} MiB",
            render.memory(one["available"]),
            f"{one['busy']:.0%}",
            f"{one['vm_cpu']:.2%}",
            f"{one['slowest']:.1f} s",
        )
    render.show(table, "Not one job started.")
    end = f"then gave out: {found['gave_out']}" if found["gave_out"] else "and nothing had given out"
    console.print(f"{number_of(found['vms'], 'VM')} ran jobs at once, {end}", markup=False)
