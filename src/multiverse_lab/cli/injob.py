"""`multiverse bench injob`: VMs inside jobs, in the ways and parts of Slurm-V's paper."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import structlog
import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.images.build import build as build_image
from multiverse.images.catalog import Flavour, Image
from multiverse.system import interrupts
from multiverse_lab.bench import applications
from multiverse_lab.bench import injob as bench
from multiverse_lab.bench.applications import ApplicationSamples
from multiverse_lab.bench.hpcc import PACKAGE
from multiverse_lab.bench.injob import PAPER, SLURM, SUBMISSION, InjobPlan, ManyVms, StartSamples
from multiverse_lab.bench.ivshmem import PassingFigures, PassingRound
from multiverse_lab.bench.launches import (
    ADDRESSES,
    ANSWER,
    COPY,
    DESCRIPTION,
    IMAGE,
    INSTANT,
    REGION,
    VM,
    WAYS,
    Launches,
)
from multiverse_lab.bench.stats import Estimate, ratio, summary
from multiverse_lab.cli.bench import DIRECTORY, IMAGES, Dir, Images, Json, host_figures, job_progress, lab_progress
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import LabSession, session
from multiverse_lab.lab.spank import built_plugin

NODES = 4
CORES, MEMORY = 4, 4096
"""What each node declares at least, in MiB: the machine has less."""
SECTIONS = ("start", "many", "ivshmem", "applications")
ROWS = {
    SUBMISSION: "submission",
    DESCRIPTION: "description",
    IMAGE: "image",
    VM: "VM",
    ANSWER: "first answer",
    ADDRESSES: "addresses",
    REGION: "IVShmem",
}


def injob(
    repeat: Annotated[int, typer.Option(min=1, help="Starts in each way, and rounds of passing data.")] = 5,
    vms: Annotated[int, typer.Option(min=NODES, help=f"VMs on {NODES} nodes, one by one and at once.")] = 32,
    flavour: Annotated[str, typer.Option(help="Of the image: slim or stock.")] = "slim",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each application in each scenario.")] = 2,
    sections: Annotated[str, typer.Option(help="What is measured, with commas.")] = ",".join(SECTIONS),
    seed: Annotated[int, typer.Option(help="Of the order and of the gaps.")] = 1,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """VMs inside jobs: their start in parts, many of them, memory they share, and what they cost an application."""
    if flavour not in get_args(Flavour):
        raise Refused(f"no such flavour: {flavour}", hint=f"there are: {', '.join(get_args(Flavour))}")
    chosen = [each.strip() for each in sections.split(",") if each.strip()]
    if wrong := [each for each in chosen if each not in SECTIONS]:
        raise Refused(f"no such section: {', '.join(wrong)}", hint=f"there are: {', '.join(SECTIONS)}")
    if vms % NODES:
        raise Refused(f"--vms {vms}: the same number on each of {NODES} nodes", hint=f"give a multiple of {NODES}")
    if built_plugin() is None:
        raise Refused("Slurm's plugin is not built", hint="build it: make spank")

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))  # not of launches

    def say(line: str) -> None:
        progress.present().say(line)

    name = f"injob-{flavour}"
    image = build_image(name, cast(Flavour, flavour), images, packages=(PACKAGE,), progress=say)
    found = interrupts.run(_injob(directory, image, InjobPlan(name, repeat, vms, seed, runs), chosen, json))
    render.present(found, json, _print)


async def _injob(directory: Path, image: Image, plan: InjobPlan, sections: Sequence[str], json: bool) -> dict[str, Any]:
    where, per_node = layout(directory), plan.vms // NODES
    options = LabOptions(
        physical=NODES, cores=max(CORES, per_node), memory=max(MEMORY, per_node * bench.VM_MEMORY), image=image.name,
        images=image.path.parent, settings={},
    )  # fmt: skip
    found: dict[str, Any] = {"repeat": plan.repeat, "seed": plan.seed, "image": _about(image), "paper": PAPER}
    found["loads"] = {}  # of this machine over the last five minutes of each section
    async with session(where, options, lab_progress(json)) as lab:
        measure = _measures(lab, image, plan, job_progress(json))
        for section in SECTIONS:
            if section in sections:
                found[section] = await asyncio.to_thread(measure[section])
                found["loads"][section] = os.getloadavg()[1]
        with Client(lab.settings.socket) as client:
            found |= host_figures(client)
    return found


def _measures(
    lab: LabSession, image: Image, plan: InjobPlan, say: bench.Progress
) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """What measures each section, and returns its document."""

    def start() -> dict[str, Any]:
        place = lab.where.root / "launches"
        place.mkdir(exist_ok=True)
        with Launches(lab.settings, image.name, place) as launches:
            return start_document(bench.measure_starts(lab, launches, plan, say))

    def of_applications() -> dict[str, Any]:
        chosen = tuple(applications.UNITS)
        return applications_document(applications.run(lab, image.name, chosen, plan.runs, say))

    return {
        "start": start,
        "many": lambda: many_document(bench.measure_many(lab, plan, say)),
        "ivshmem": lambda: passing_document(bench.measure_shared(lab, plan, say)),
        "applications": of_applications,
    }


def _about(image: Image) -> dict[str, Any]:
    """The image, and MiB of its disk: as the guest sees it, and as it is written."""
    about = image.disk.stat()
    return {"flavour": image.flavour, "disk": about.st_size >> 20, "written": about.st_blocks * 512 >> 20}


def start_document(samples: StartSamples) -> dict[str, Any]:
    """Medians of each way's parts and of its time in all, with and without the job's submission, and how many times as
    long the copy of the same round takes."""
    ways = {}
    for way in WAYS:
        totals, made = samples.totals(way), samples.totals(way, submission=False)
        ways[way] = {
            "parts": {part: _plain(summary(values)) for part, values in samples.parts[way].items()},
            "total": _plain(summary(totals)),
            "made": _plain(summary(made)),
            "copy_over": _plain(_in_rounds(samples.totals(COPY), totals)),
            "copy_over_made": _plain(_in_rounds(samples.totals(COPY, submission=False), made)),
        }
    return {
        "ways": ways,
        "slurm": _plain(summary(samples.totals(SLURM))),
        "copy_over_slurm": _plain(_in_rounds(samples.totals(COPY), samples.totals(SLURM))),
    }


def _in_rounds(over: Sequence[float], under: Sequence[float]) -> Estimate | None:
    """The median of the rounds' quotients. The load may change during a run more than within a round, and then the
    quotient of the medians compares starts under different loads."""
    found = summary([a / b for a, b in zip(over, under, strict=True)])
    return Estimate(found.p50, found.low, found.high) if found is not None else None


def many_document(found: ManyVms) -> dict[str, Any]:
    return {
        "vms": len(found.each),
        "nodes": NODES,
        "one_by_one": found.one_by_one,
        "each": _plain(summary(found.each)),
        "at_once": found.at_once,
        "less": 1 - found.at_once / found.one_by_one,
        "paper_less": 1 - PAPER["at_once"] / PAPER["one_by_one"],
    }


def passing_document(found: PassingFigures) -> dict[str, Any]:
    """Medians of both ways in microseconds and MiB a second, and how many times the bridge's the memory's are."""
    shared, tcp = found.shared_memory, found.tcp
    return {
        "shared_memory": _passing(shared),
        "tcp": _passing(tcp),
        "times_shorter": _plain(ratio(_column(tcp, "microseconds"), _column(shared, "microseconds"))),
        "times_faster": _plain(ratio(_column(shared, "mib_per_second"), _column(tcp, "mib_per_second"))),
    }


def _passing(rounds: Sequence[PassingRound]) -> dict[str, Any]:
    return {name: _plain(summary(_column(rounds, name))) for name in ("microseconds", "mib_per_second")}


def _column(rounds: Sequence[PassingRound], name: str) -> list[float]:
    return [getattr(one, name) for one in rounds]


def applications_document(found: Mapping[str, ApplicationSamples]) -> dict[str, Any]:
    """Median speeds of each application in each scenario, and what VMs cost, in percent of the whole node's."""
    return {
        application: {scenario: _application(one, scenario) for scenario in applications.SCENARIOS}
        for application, one in found.items()
    }


def _application(found: ApplicationSamples, scenario: str) -> dict[str, Any]:
    whole, vms = found.whole[scenario], found.vms[scenario]
    share = ratio(vms, whole)
    cost = Estimate(*(100 * (1 - each) for each in (share.value, share.high, share.low))) if share is not None else None
    return {
        "whole": _plain(summary(whole)),
        "vms": _plain(summary(vms)),
        "cost": _plain(cost),
        "paper": applications.PAPER[scenario],
    }


def _plain(one: Any) -> dict[str, Any] | None:
    return asdict(one) if one is not None else None


def _print(found: dict[str, Any]) -> None:
    image = found["image"]
    console.print(
        f"\nVMs inside jobs on {NODES} bare-metal nodes of a lab, which share this machine's {os.cpu_count()} CPUs. "
        f"Guests: {found['accelerator']}. The image: {image['flavour']}, {image['written']} MiB.",
        markup=False,
    )
    loads = ", ".join(f"{section} {load:.0f}" for section, load in found["loads"].items())
    console.print(f"The machine's load: {loads}.", markup=False)
    if "start" in found:
        _print_start(found)
    if "many" in found:
        _print_many(found)
    if "ivshmem" in found:
        _print_passing(found)
    if "applications" in found:
        _print_applications(found)


def _print_start(found: dict[str, Any]) -> None:
    start, paper = found["start"], found["paper"]
    console.print(
        f"\nThe start of a VM inside a job: medians of {found['repeat']} rounds, in seconds. The copy is compared with "
        "the other starts of its round.\n",
        markup=False,
    )
    table = render.table("PART", "COPY", "SNAPSHOT", "OVERLAPPED", "INSTANT", right=tuple(way.upper() for way in WAYS))
    ways = [start["ways"][way] for way in WAYS]
    for part, name in ROWS.items():
        table.add_row(name, *(_seconds(way["parts"].get(part)) for way in ways))
    table.add_row("virtual functions", *["none"] * len(ways))  # the paper's other part: the lab's nodes offer none
    table.add_section()
    table.add_row("in all", *(_seconds(way["total"]) for way in ways))
    table.add_row("without submission", *(_seconds(way["made"]) for way in ways))
    table.add_row("copy is times as long", *(_times(way["copy_over"]) for way in ways))
    table.add_row("  without submission", *(_times(way["copy_over_made"]) for way in ways))
    console.print(table)
    instant, slurm = start["ways"][INSTANT], start["slurm"]
    times = Estimate(**instant["copy_over"])
    made = Estimate(**instant["copy_over_made"])
    whole = Estimate(**start["copy_over_slurm"])
    console.print(
        f"An instant clone takes {times.value:.1f} times less than the copy ({times.low:.1f} to {times.high:.1f}), "
        f"without the submission {made.value:.1f} times ({made.low:.1f} to {made.high:.1f}); its description is a part "
        f"of `image`. The same {SLURM} and the plugin in one piece, from sbatch to the script's first instruction in "
        f"the guest: {slurm['p50']:.2f} s, {whole.value:.1f} times less than the copy ({whole.low:.1f} to "
        f"{whole.high:.1f}).",
        markup=False,
    )
    console.print(
        f"Slurm-V: snapshots made the start {paper['copy_over_snapshot']:g} times shorter; {paper['spank']:g} s by its "
        f"plugin, {paper['overlapped']:g} s with overlap (KVM, an image of 2.2 GB).",
        style="dim",
        markup=False,
    )


def _print_many(found: dict[str, Any]) -> None:
    many, paper = found["many"], found["paper"]
    console.print(f"\n{many['vms']} VMs on {many['nodes']} nodes, until the last one's script runs:\n", markup=False)
    table = render.table("HOW", "HERE", "SLURM-V", right=("HERE", "SLURM-V"))
    table.add_row("one by one, a job each", f"{many['one_by_one']:.1f} s", f"{paper['one_by_one']:g} s")
    table.add_row("at once, one job", f"{many['at_once']:.1f} s", f"{paper['at_once']:g} s")
    table.add_row("less", f"{many['less']:.0%}", f"{many['paper_less']:.0%}")
    console.print(table)


def _print_passing(found: dict[str, Any]) -> None:
    passing = found["ivshmem"]
    console.print(f"\nTwo VMs of a job on one node pass data: medians of {found['repeat']} rounds.\n", markup=False)
    table = render.table("WAY", "8 BYTES, us", "1 MiB, MiB/s", right=("8 BYTES, us", "1 MiB, MiB/s"))
    for way, name in (("shared_memory", "IVShmem"), ("tcp", "TCP on the job's bridge")):
        one = passing[way]
        table.add_row(name, f"{one['microseconds']['p50']:.0f}", f"{one['mib_per_second']['p50']:.0f}")
    shorter, faster = passing["times_shorter"], passing["times_faster"]
    table.add_row("IVShmem is times better", _times(shorter), _times(faster))
    console.print(table)


def _print_applications(found: dict[str, Any]) -> None:
    console.print(
        "\nApplications of two processes, medians: in one guest as large as the node (bare metal under the same "
        "emulation), and in VMs with one CPU for each process. What VMs cost, in percent, with 95 %; Slurm-V's figures "
        "are Graph500's.\n",
        markup=False,
    )
    right = ("NODE", "VMs", "COST %", "SLURM-V")
    table = render.table("APPLICATION", "SCENARIO", *right, right=right)
    for application, scenarios in found["applications"].items():
        name = f"{application}, {applications.UNITS[application]}"
        for scenario, one in scenarios.items():
            cost = Estimate(**one["cost"])
            table.add_row(
                name,
                f"{scenario}: {applications.SCENARIOS[scenario]}",
                f"{one['whole']['p50']:.3g}",
                f"{one['vms']['p50']:.3g}",
                f"{cost.value:.0f} ({cost.low:.0f} to {cost.high:.0f})",
                f"under {one['paper']:g} %" if application == applications.BFS else "",
            )
            name = ""
    console.print(table)


def _seconds(one: dict[str, Any] | None) -> str:
    return f"{one['p50']:.3f}" if one is not None else "–"


def _times(one: dict[str, Any] | None) -> str:
    return f"{one['value']:.2f}" if one is not None else "–"
