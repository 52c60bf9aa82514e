"""`multiverse bench`: measurements, with their baseline in the same run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.bench import baremetal, latency
from multiverse.bench.stats import Estimate, Summary
from multiverse.cli import render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.guest import image
from multiverse.lab.baremetal import baremetal as bare_slurmd
from multiverse.lab.layout import layout
from multiverse.lab.lifecycle import Progress
from multiverse.lab.plan import LabOptions
from multiverse.lab.session import LabSession, session

app = typer.Typer(help="Measurements, with their baseline in the same run.", no_args_is_help=True)

DIRECTORY, IMAGES = Path("/var/lib/multiverse/bench"), Path("/var/lib/multiverse/images")
Dir = Annotated[Path, typer.Option("--dir", help="Where the lab is kept.")]
Images = Annotated[Path, typer.Option("--images", help="Where images are kept.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("latency")
def latency_(
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Jobs of each kind.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the gaps and of the order.")] = 1,
    kinds: Annotated[str, typer.Option(help="Which kinds, with commas.")] = ",".join(k.name for k in latency.KINDS),
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """From `sbatch` to the script's first instruction: instant clones, full boots, bare metal."""
    chosen = kinds_of(kinds, latency.KINDS)
    build_images(chosen, images, json)
    found = asyncio.run(_latency(directory, images, jobs, seed, chosen, json))
    if json:
        render.as_json(found)
    else:
        _print(found)


def build_images(kinds: Sequence[latency.Kind], images: Path, silent: bool) -> None:
    """Those that these kinds ask for, unless they are there."""
    flavours: dict[str, image.Flavour] = {"slim": "slim", "stock": "stock", latency.WARM: "slim"}
    for name, flavour in flavours.items():
        if asked_for(name, kinds):
            image.build(
                name, flavour, images, progress=lambda line: None if silent else console.print(f"  {line}", style="dim")
            )


def asked_for(name: str, kinds: Sequence[latency.Kind]) -> bool:
    """Whether some of the kinds are of this image."""
    return any(f"{name}&" in option for kind in kinds for option in kind.options)


def part(silent: bool) -> Progress:
    """Tells of the lab's parts as they come up."""

    def say(name: str, word: str, seconds: float) -> None:
        if not silent:
            console.print(f"[green]✓[/] {name} {word} [dim]{render.duration(seconds)}[/]")

    return say


def kinds_of(kinds: str, among: Sequence[latency.Kind]) -> list[latency.Kind]:
    """By their names, with commas between. `Refused` names those that there are."""
    known = {kind.name: kind for kind in among}
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    if wrong := [name for name in names if name not in known]:
        raise Refused(f"no such kind: {', '.join(wrong)}", hint=f"there are: {', '.join(known)}")
    return [known[name] for name in names]


async def _latency(
    directory: Path, images: Path, jobs: int, seed: int, kinds: Sequence[latency.Kind], json: bool
) -> dict[str, Any]:
    def progress(kind: str, number: int, of: int, seconds: float) -> None:
        if not json:
            console.print(f"  {number:>4} of {of}  {kind:<12}{render.duration(seconds):>9}", markup=False)

    site = latency.POOLS if asked_for(latency.WARM, kinds) else ""
    wishes = LabOptions(cores=8, memory=16384, image="slim", images=images, settings={})
    async with session(layout(directory), wishes, part(json), site) as lab, bare_slurmd(lab.lab):
        with Client(lab.settings.socket) as client:
            await asyncio.to_thread(_warm, lab, client, kinds)
            samples = await asyncio.to_thread(latency.run, lab, client, jobs, seed, kinds, baremetal.cost, progress)
            host = client.hosts()[0]
    return {
        "jobs": jobs,
        "seed": seed,
        "accelerator": host["accelerator"],
        "machine": host["machine"],
        "declared": host["declared"],
        "note": "every kind goes through Slurm from submission to end; cpu_s and memory are taken at the script's "
        "first instruction",
        "kinds": {name: asdict(latency.result(one)) for name, one in samples.items()},
        "beside": [asdict(one) for one in latency.beside(samples)],
        "plugging": {name: one and asdict(one) for name, one in latency.plugging(samples).items()},
    }


def _warm(lab: LabSession, client: Client, kinds: Sequence[latency.Kind]) -> None:
    """One job of each kind that is not counted: the template is made, and the page cache is warm for all."""
    latency.run(lab, client, 1, 0, kinds, lambda job: None, lambda *_: None)


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
        told = ", ".join(
            f"{name} {one.value * 1000:+.0f} ms ({one.low * 1000:+.0f} to {one.high * 1000:+.0f})"
            for name, one in adds.items()
        )
        console.print(f"plugging a CPU and memory adds, medians with 95 %: {told}", markup=False)
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
