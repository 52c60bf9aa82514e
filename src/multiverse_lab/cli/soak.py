"""`multiverse soak`: jobs of all kinds on a full lab, with incidents, and a verdict on each job."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from multiverse.cli import progress, render
from multiverse.cli.render import console, duration
from multiverse.core.errors import Broken
from multiverse.core.model.basics import number_of
from multiverse.images.build import build as build_image
from multiverse.system import interrupts
from multiverse_lab.cli.bench import AMPLE_DISK, lab_progress
from multiverse_lab.lab.layout import layout
from multiverse_lab.lab.plan import LabOptions, load
from multiverse_lab.lab.session import session
from multiverse_lab.soak import disk, leftovers, run, summary
from multiverse_lab.soak.judge import Ending, Verdict
from multiverse_lab.soak.plan import SoakPlan, make_plan
from multiverse_lab.soak.run import SoakResult

IMAGE = "slim"
CORES = 6
TIMELINE_LINES = 25
ENDING = 120.0
"""Seconds after the last submission, about, until all jobs have ended and the lab is down."""


def soak(
    seed: Annotated[int | None, typer.Option(help="Of jobs and incidents. [default: chosen at random]")] = None,
    minutes: Annotated[float, typer.Option(min=0.5, help="For how long jobs are submitted.")] = 120.0,
    directory: Annotated[Path, typer.Option("--dir", help="Where the lab is kept.")] = Path("/var/lib/multiverse/soak"),
    images: Annotated[Path, typer.Option("--images", help="Where images are kept.")] = Path(
        "/var/lib/multiverse/images"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fill a lab with jobs of all kinds for hours, kill every component again and again, and judge each job.

    Ctrl-C ends the test early: all jobs are cancelled, judged, and everything is taken down. Exits with 1 if a job
    broke a promise or anything is left."""
    seed = random.randrange(1_000_000) if seed is None else seed
    build_image(IMAGE, "slim", images, progress=_progress(json))
    with progress.working(f"soak, {minutes:g} minutes of jobs", minutes * 60 + ENDING):
        result = interrupts.run(_soak(directory, images, make_plan(seed, minutes * 60), json))
    if json:
        render.as_json(summary.document(result, seed, minutes))
    else:
        _print(result, seed, minutes)
    if not result.good:
        raise Broken(
            f"seed {seed}: {number_of(sum(bool(one.violations) for one in result.verdicts), 'job')} broke a promise, "
            f"{len(result.died)} services ended by themselves, and {len(result.leftovers)} things are left",
            hint=f"see the logs in {directory}/log",
        )


def _progress(silent: bool) -> run.Progress:
    """Prints each line after the time since the start."""
    began = time.monotonic()

    def say(line: str) -> None:
        progress.present().say(line)
        if not silent:
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            console.print(f"{minutes:>4}:{seconds:02d}  {line}", markup=False, soft_wrap=True)

    return say


async def _soak(directory: Path, images: Path, plan: SoakPlan, silent: bool) -> SoakResult:
    where, stop = layout(directory), asyncio.Event()
    # More is claimed than the small disk holds, so that it can get full while VMs run.
    settings = {"host": {"disk": AMPLE_DISK}}
    options = LabOptions(CORES, 16384, (run.share(where),), IMAGE, images, settings=settings)
    async with session(where, options, lab_progress(silent), disk=disk.small_disk) as lab:
        with interrupts.noted(stop):
            result = await run.run(lab, plan, stop, _progress(silent))
    planned = load(where)
    result.leftovers += leftovers.of_lab(where, planned.bridge if planned else "")
    return result


def _print(result: SoakResult, seed: int, minutes: float) -> None:
    count = Counter(one.ending for one in result.verdicts)
    console.print(
        f"\n[bold]{number_of(len(result.verdicts), 'job')}[/] in {duration(minutes * 60)}, seed {seed}", end=""
    )
    console.print(f"; {result.put_off} more were planned, but too many waited" if result.put_off else "")
    if result.stopped:
        console.print("The test was interrupted, and its last jobs were cancelled.", style="yellow")
    _print_jobs(result, count)
    _print_incidents(result)
    _print_explained(result)
    _print_violations(result)
    if not result.leftovers:
        console.print("[green]✓[/] nothing is left of the jobs and of the lab")
    for what, lines in (("died: ", result.died), ("left: ", result.leftovers)):
        for line in lines:
            console.print(Text.assemble((what, "bold red"), line), soft_wrap=True)


def _print_jobs(result: SoakResult, count: Counter[Ending]) -> None:
    shown = [ending for ending in Ending if ending in (Ending.EXPECTED, Ending.WRONG) or count[ending]]
    heads = [ending.upper() for ending in shown]
    table = render.table("KIND", "JOBS", *heads, right=("JOBS", *heads))
    for kind, endings in sorted(summary.by_kind(result.verdicts).items()):
        table.add_row(kind, str(endings.total()), *(_figure(ending, endings[ending]) for ending in shown))
    table.add_section()
    table.add_row("all", str(count.total()), *(_figure(ending, count[ending]) for ending in shown))
    render.show(table, "No job was submitted.")


def _figure(ending: Ending, number: int) -> Text:
    style = {Ending.EXPECTED: "green", Ending.WRONG: "bold red"}.get(ending, "yellow")
    return Text(str(number) if number else "·", style=style if number else "dim")


def _print_incidents(result: SoakResult) -> None:
    right = ("TIMES", "LONGEST", "UNTIL A JOB STARTED")
    table = render.table("INCIDENT", *right, right=right)
    for kind, one in sorted(summary.incidents(result.incidents, result.verdicts).items()):
        start = "–" if one.until_start is None else duration(one.until_start)
        table.add_row(kind, str(one.count), duration(one.lasted), start)
    render.show(table, "There was no incident.")


def _print_explained(result: SoakResult) -> None:
    """A line for each job that an incident excuses."""
    for one in result.verdicts:
        if one.ending in summary.EXPLAINED:
            _print_job(one, one.explanation, "yellow")


def _print_violations(result: SoakResult) -> None:
    """The violations, each job with the incidents of its life and the end of its journal."""
    for one in result.verdicts:
        for violation in one.violations:
            _print_job(one, violation, "bold red")
        if one.violations:
            lines = result.timelines.get(one.facts.name, [])[-TIMELINE_LINES:]
            for line in (f"while it lived: {', '.join(summary.hits(one)) or 'no incident'}", *lines):
                console.print(Text(f"    {line}", style="dim"), soft_wrap=True)


def _print_job(one: Verdict, words: str, style: str) -> None:
    facts = one.facts
    head = Text.assemble((facts.name, style), f" ({facts.kind.name}, job {facts.job_id or 'unknown'}): ")
    console.print(head, render.plain(words), sep="", soft_wrap=True)
