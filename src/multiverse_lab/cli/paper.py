"""`multiverse bench paper`: the evaluation of the Multiverse paper on the lab, and its report as one HTML page."""

from __future__ import annotations

import asyncio
import itertools
import json as json_
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.render import console
from multiverse.client import Client
from multiverse.core.errors import Refused
from multiverse.images.build import build as build_image
from multiverse.images.catalog import Image
from multiverse.system import interrupts
from multiverse_lab.bench.hpcc import PACKAGE
from multiverse_lab.cli.bench import (
    AMPLE_DISK,
    DIRECTORY,
    IMAGES,
    Dir,
    Images,
    Json,
    host_figures,
    job_progress,
    lab_progress,
)
from multiverse_lab.cli.report import commit_here, day, machine_now
from multiverse_lab.cli.report_files import check_destinations, command_here, say_where, write_report
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.baremetal import baremetal as bare_slurmd
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.session import LabSession, session

if TYPE_CHECKING:  # the simulator is an extra, and its imports must not delay other commands
    from multiverse_lab.bench.paper.measure import PaperBench
    from multiverse_lab.bench.paper.records import PaperRunTimes
    from multiverse_lab.bench.paper.workload import PaperScale, RoundCosts

USUAL_SCALE, QUICK_SCALE = 0.1, 0.06
SPAWN_TIMEOUT = 900.0
"""Seconds for a node to register. Many full boots at once are slow on few CPUs; they are measured, not given up."""
_MEMORY_OF_CPU, _MEMORY_OF_TEMPLATES = 450, 4096  # MiB that are declared: that of a short job's VM with its QEMU


def paper(
    scale: Annotated[
        float, typer.Option(min=0, max=1, help="The share of the paper's cluster and of its jobs; 0: as usual.")
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Few jobs, a quarter as long: minutes.")] = False,
    seed: Annotated[int, typer.Option(help="Of the jobs.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each workload, from that seed on.")] = 1,
    html: Annotated[
        Path | None, typer.Option("--html", help="Where the report is written. paper.html, or nowhere with --json.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Also write the figures' data here.")] = None,
    simulate: Annotated[
        int | None, typer.Option(min=0, help="Seeds of what is simulated; 0 leaves it out. 3, or 0 with --quick.")
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option("--with", help="What `bench injob --json` or `bench move --json` printed; a part of its own."),
    ] = None,
    given: Annotated[
        Path | None, typer.Option("--from", help="Run nothing; the report of what --json printed.")
    ] = None,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """The Multiverse paper's evaluation, scaled to this machine, beside its published figures, as one HTML page."""
    html = html or (None if json else Path("paper.html"))
    check_destinations(html, csv)
    parts = [_beside(path) for path in beside or ()]
    if given is not None:
        found = _read(given)
    else:
        share = scale or (QUICK_SCALE if quick else USUAL_SCALE)
        image = build_image("paper", "slim", images, packages=(PACKAGE,), progress=progress.present().say)
        run = _Run(directory, image, share, range(seed, seed + repeat), quick, json)
        found = interrupts.run(run.measure())
        seeds = range(seed, seed + ((0 if quick else 3) if simulate is None else simulate))
        found["simulated"] = _simulate(seeds) if seeds else None
    found["with"] = parts or found.get("with", [])
    _write(found, html, csv)
    render.present(found, json, lambda found: _print(found, html))


def _json(path: Path) -> Any:
    try:
        return json_.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refused(f"{path} has no JSON: {error}", hint="give what bench NAME --json has printed") from error


_KEYS = frozenset({"command", "at", "commit", "host", "quick", "seeds", "full_provisioning", "round_costs", "scale",
                   "accelerator", "runs"})  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    found = _json(path)
    if not isinstance(found, dict) or not found.keys() >= _KEYS or not found["runs"]:
        raise Refused(f"{path} is of another benchmark", hint="give what bench paper --json has printed")
    return found


def _beside(path: Path) -> dict[str, Any]:
    result = _json(path)
    for name, keys in (("injob", {"start", "repeat", "seed", "accelerator"}), ("move", {"cases", "how", "moves"})):
        if isinstance(result, dict) and keys <= result.keys():
            return {"benchmark": name, "at": day(path.stat().st_mtime), "result": result}
    raise Refused(f"{path} is of no benchmark that the report has", hint="give that of bench injob or of bench move")


# --- the runs ----------------------------------------------------------------------------------------


class _Run:
    """All runs in one lab, kind after kind. Over-commitment is a setting, which is changed in between."""

    def __init__(self, directory: Path, image: Image, share: float, seeds: range, quick: bool, json: bool) -> None:
        self._where, self._image, self._share = layout(directory), image, share
        self._seeds, self._quick, self._json = seeds, quick, json

    async def measure(self) -> dict[str, Any]:
        from multiverse_lab.bench.paper.workload import STEADY, W1, W2, cluster_cpus

        cpus = cluster_cpus(self._share)
        options = LabOptions(
            cores=cpus, memory=2 * cpus * _MEMORY_OF_CPU + _MEMORY_OF_TEMPLATES, image=self._image.name,
            images=self._image.path.parent, settings=_settings(),
        )  # fmt: skip
        about = {
            "command": command_here(),
            "at": day(time.time()),
            "commit": commit_here(),
            "host": asdict(machine_now()),
        }
        async with session(self._where, options, lab_progress(self._json)) as lab:
            with _programs(lab, self._image) as (here, root):
                with self._bench(lab, here, root) as bench:
                    full = await asyncio.to_thread(bench.provisioning_of_full, 1 if self._quick else 3)
                    costs = await asyncio.to_thread(bench.costs)
                    scale = self._scale(full)
                    runs = await self._runs(lab, bench, (W1, STEADY), scale, costs)
                (self._where.etc / "site.toml").write_text("[host]\ncpu_overcommit = 2.0\n")
                await lifecycle.up(self._where, options, lab_progress(self._json))
                with self._bench(lab, here, root) as bench:
                    runs += await self._runs(lab, bench, (W2,), scale, costs)
            with Client(lab.settings.socket) as client:
                host = host_figures(client)
        return {
            **about,
            "quick": self._quick,
            "seeds": list(self._seeds),
            "full_provisioning": full,
            "round_costs": costs,
            "scale": asdict(scale),
            **host,
            "runs": [asdict(one) for one in runs],
        }

    def _scale(self, full: Sequence[float]) -> PaperScale:
        from multiverse_lab.bench.paper.workload import scaled

        return scaled(self._share, sum(full) / len(full), os.cpu_count() or 1, quick=self._quick)

    @contextmanager
    def _bench(self, lab: LabSession, here: Path, root: Path) -> Iterator[PaperBench]:
        from multiverse_lab.bench.paper.measure import PaperBench

        with Client(lab.settings.socket) as client:
            yield PaperBench(lab, client, here, root, job_progress(self._json))

    async def _runs(
        self, lab: LabSession, bench: PaperBench, workloads: Sequence[str], scale: PaperScale, costs: RoundCosts
    ) -> list[PaperRunTimes]:
        from multiverse_lab.bench.paper.records import BARE_METAL, KINDS
        from multiverse_lab.bench.paper.workload import jobs

        found = []
        for seed, workload, kind in itertools.product(self._seeds, workloads, KINDS):
            wanted = jobs(workload, scale, seed)
            if kind == BARE_METAL:
                async with bare_slurmd(lab.lab, scale.claimable(workload)):
                    found.append(await asyncio.to_thread(bench.run, workload, kind, seed, wanted, scale, costs))
            else:
                found.append(await asyncio.to_thread(bench.run, workload, kind, seed, wanted, scale, costs))
        return found


def _settings() -> dict[str, dict[str, Any]]:
    """All VMs of a burst may be made at once, as in the paper; only its platform paced them."""
    return {"host": {"disk": AMPLE_DISK}, "pacing": {"provisioning": 100, "spawn_timeout": SPAWN_TIMEOUT}}


@contextmanager
def _programs(lab: LabSession, image: Image) -> Iterator[tuple[Path, Path]]:
    """The directories of what jobs run, and of what they run on bare metal, which is removed."""
    from multiverse_lab.bench.paper import programs

    root = lab.where.root / "hpcc"
    try:
        programs.copy_hpcc(image.disk, root)
        yield programs.write_programs(lab.user.home), root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _simulate(seeds: range) -> dict[str, Any]:
    from multiverse_lab.bench.paper.sections import CHOICES, RATES, choices
    from multiverse_lab.bench.paper_cluster import EXPERIMENTS, reproduced, run_paper
    from multiverse_lab.cli.simulated_cluster import summary_of

    count = len(seeds) * (len(EXPERIMENTS) + len(CHOICES) * len(RATES))
    progress.present().say("the paper's cluster, simulated")
    done = itertools.count(1)
    found = reproduced(run_paper(seeds, lambda: progress.present().advance(next(done), count)))
    return {
        "seeds": list(seeds),
        "reproduced": [asdict(one) for one in found],
        "summary": summary_of(found),
        "choices": choices(seeds, lambda: progress.present().advance(next(done), count)),
    }


# --- the report --------------------------------------------------------------------------------------


def _write(found: dict[str, Any], html: Path | None, csv: Path | None) -> None:
    """Write the report, and add its figures to what was found."""
    from multiverse_lab.bench.paper.document import report_of
    from multiverse_lab.bench.paper.figures import summary

    report = report_of(found)
    found["figures"] = summary(report.figures)
    write_report(report, html, csv)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} s"


def _print(found: Mapping[str, Any], html: Path | None) -> None:
    from multiverse_lab.bench.clusters import MeanOver
    from multiverse_lab.bench.paper.page import shown

    table = render.table("FIGURE", "PUBLISHED", "HERE", "PAPER'S TIME", fold=("FIGURE",))
    for name, one in found["figures"].items():
        ours = one["ours"] and MeanOver(**one["ours"])
        in_paper = one["in_paper_seconds"]
        table.add_row(name, one["published"], shown(ours, one["unit"]), _seconds(in_paper))
    console.print(table)
    say_where(html)
