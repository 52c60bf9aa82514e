"""`multiverse bench`: measurements, with their baseline in the same run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.progress import working
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.images.build import build as build_image
from multiverse.images.catalog import Flavour
from multiverse.system import interrupts
from multiverse_lab.bench import baremetal, latency
from multiverse_lab.bench.latency import LatencyPlan
from multiverse_lab.bench.stats import Estimate, Summary
from multiverse_lab.lab.baremetal import baremetal as bare_slurmd
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.lifecycle import Progress
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import LabSession, session


def show_progress(context: typer.Context) -> None:
    """Measurements, with their baseline in the same run."""
    if context.invoked_subcommand and not {"--help", "-h"} & set(sys.argv):
        context.with_resource(working(f"bench {context.invoked_subcommand}"))


# MiB. The jobs of benchmarks write hardly anything: what their VMs could write is not to limit how many there are.
AMPLE_DISK = 1 << 24
ALL_KINDS = ",".join(kind.name for kind in latency.KINDS)
SLIM_CLONES = (latency.JobKind("instant", ("--constraint=slim&instant",)),)
DIRECTORY, IMAGES = Path("/var/lib/multiverse/bench"), Path("/var/lib/multiverse/images")
Dir = Annotated[Path, typer.Option("--dir", help="Where the lab is kept.")]
Images = Annotated[Path, typer.Option("--images", help="Where images are kept.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def latency_(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Jobs of each kind.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the gaps and of the order.")] = 1,
    kinds: Annotated[str, typer.Option(help="Which kinds, with commas.")] = ALL_KINDS,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """From `sbatch` to the script's first instruction: instant clones, full boots, bare metal."""
    plan = LatencyPlan(jobs, seed, kinds_of(kinds, latency.KINDS))
    build_images(plan.kinds, images, json)
    found = interrupts.run(_latency(directory, images, plan, json))
    render.present(found, json, _print)


def build_images(kinds: Sequence[latency.JobKind], images: Path, silent: bool) -> None:
    """Build the images that these kinds ask for, unless they are there."""
    flavours: dict[str, Flavour] = {"slim": "slim", "stock": "stock", latency.WARM: "slim"}

    def built(line: str) -> None:
        progress.present().say(line)
        if not silent:
            console.print(f"  {line}", style="dim")

    for name, flavour in flavours.items():
        if uses_image(name, kinds):
            build_image(name, flavour, images, progress=built)


def uses_image(name: str, kinds: Sequence[latency.JobKind]) -> bool:
    """Whether any of the kinds asks for this image."""
    return any(f"{name}&" in option for kind in kinds for option in kind.options)


def lab_progress(silent: bool) -> Progress:
    """Prints a line for each service of the lab that has started."""

    def say(name: str, word: str, seconds: float) -> None:
        progress.present().begin(f"lab: {name} {word}")
        if not silent:
            console.print(f"[green]✓[/] {name} {word} [dim]{render.duration(seconds)}[/]")

    return say


def job_progress(silent: bool) -> Callable[[str, int, int, float], None]:
    """Prints a line for each job, or batch of jobs, that has been measured."""

    def say(kind: str, number: int, of: int, seconds: float) -> None:
        progress.present().advance(number, of)
        progress.present().say(kind)
        if not silent:
            console.print(f"  {number:>4} of {of}  {kind:<12}{render.duration(seconds):>9}", markup=False)

    return say


def host_figures(client: Client) -> dict[str, Any]:
    """What every result says about the lab's only host."""
    host = next(host for host in client.hosts() if host["reachable"])
    return {name: host[name] for name in ("accelerator", "machine", "declared")}


def medians(samples: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """The medians of these fields of the samples, which are dataclasses, and all samples."""
    middles = {name: median(getattr(one, name) for one in samples) for name in names}
    return {**middles, "samples": [asdict(one) for one in samples]}


def on_lab(
    options: LabOptions, directory: Path, json: bool, measure: Callable[[LabSession], dict[str, Any]], site: str = ""
) -> dict[str, Any]:
    """What `measure` returns for a lab with these options, and settings in `site`, which is stopped afterwards."""

    async def run() -> dict[str, Any]:
        async with session(layout(directory), options, lab_progress(json), site) as lab:
            return await asyncio.to_thread(measure, lab)

    return interrupts.run(run())


def kinds_of(kinds: str, among: Sequence[latency.JobKind]) -> list[latency.JobKind]:
    """The kinds with these names, which are separated by commas. Raises `Refused` for a name that there is not."""
    known = {kind.name: kind for kind in among}
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    if wrong := [name for name in names if name not in known]:
        raise Refused(f"no such kind: {', '.join(wrong)}", hint=f"there are: {', '.join(known)}")
    return [known[name] for name in names]


async def _latency(directory: Path, images: Path, plan: LatencyPlan, json: bool) -> dict[str, Any]:
    site = latency.POOLS if uses_image(latency.WARM, plan.kinds) else ""
    options = LabOptions(cores=8, memory=16384, image="slim", images=images, settings={})
    async with session(layout(directory), options, lab_progress(json), site) as lab, bare_slurmd(lab.lab):
        with Client(lab.settings.socket) as client:
            await asyncio.to_thread(warm_up, lab, client, plan.kinds)
            samples = await asyncio.to_thread(latency.run, lab, client, plan, baremetal.cost, job_progress(json))
            host = host_figures(client)
    return {
        "jobs": plan.jobs,
        "seed": plan.seed,
        **host,
        "note": "every kind goes through Slurm from submission to end; cpu_s and memory are taken at the script's "
        "first instruction",
        "kinds": {name: asdict(latency.result(one)) for name, one in samples.items()},
        "beside": [asdict(one) for one in latency.beside_bare_metal(samples)],
        "plugging": {name: one and asdict(one) for name, one in latency.plugging(samples).items()},
    }


def warm_up(lab: LabSession, client: Client, kinds: Sequence[latency.JobKind]) -> None:
    """Run one job of each kind that is not counted, to build the template and to fill the page cache."""
    latency.run(lab, client, LatencyPlan(1, 0, kinds), lambda job: None, lambda *_: None)


def _print(found: dict[str, Any]) -> None:
    machine = found["machine"] or {}
    console.print(
        f"\n{found['jobs']} jobs of each kind, interleaved, gaps of 0 to 1 s (seed {found['seed']}); guests run on "
        f"{found['accelerator']}; this machine has {machine.get('cpus')} CPUs. {found['note']}.\n",
        markup=False,
    )
    table = render.table(
        "KIND", "SUBMIT → START p50", "95 % OF p50", "p95", "MAX", "CPU", "UNIQUE", "PSS",
        right=("SUBMIT → START p50", "p95", "MAX", "CPU", "UNIQUE", "PSS"),
    )  # fmt: skip
    for name, one in found["kinds"].items():
        start = Summary(**one["submit_to_start"])
        table.add_row(
            name,
            f"{start.p50:.2f} s",
            f"{start.low:.2f}–{start.high:.2f}",
            f"{start.p95:.2f} s",
            f"{start.max:.2f} s",
            _figure(one["cpu_s"], "s", 2),
            _figure(one["uss_mib"], "MiB", 1),
            _figure(one["pss_mib"], "MiB", 1),
        )
    console.print(table)
    for name, one in found["kinds"].items():
        if one["stages"]:
            console.print(f"{name}: clone start → first byte {_figure(_p50(one['first_byte']), 's', 3)}, "
                          f"→ node idle {_figure(_p50(one['node_idle']), 's', 2)} (medians)", markup=False)  # fmt: skip
            stages = " · ".join(f"{stage} {seconds * 1000:.0f}" for stage, seconds in one["stages"].items())
            console.print(f"  ms: {stages}", style="dim", markup=False)
    if adds := {name: Estimate(**one) for name, one in found["plugging"].items() if one}:
        text = ", ".join(
            f"{name} {one.value * 1000:+.0f} ms ({one.low * 1000:+.0f} to {one.high * 1000:+.0f})"
            for name, one in adds.items()
        )
        console.print(f"plugging a CPU and memory adds, medians with 95 %: {text}", markup=False)
    if found["beside"]:
        base = found["kinds"]["bare_metal"]["submit_to_start"]["p50"]
        console.print(f"beside bare metal's {base:.2f} s, medians with 95 %:", markup=False)
        for one in found["beside"]:
            times, more = Estimate(**one["ratio"]), Estimate(**one["excess"])
            console.print(
                f"  {one['kind']:<12}{times.value:.2f}× ({times.low:.2f}–{times.high:.2f}), "
                f"{more.value:+.2f} s ({more.low:+.2f} to {more.high:+.2f})",
                markup=False,
            )


def _p50(one: dict[str, Any] | None) -> float | None:
    return float(one["p50"]) if one else None


def _figure(value: float | None, unit: str, digits: int) -> str:
    return f"{value:.{digits}f} {unit}" if value is not None else "–"
