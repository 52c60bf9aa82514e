"""`multiverse bench all`: the page of measured figures, written from runs of the benchmarks or from their files."""

from __future__ import annotations

import json as json_
import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import progress
from multiverse.cli.render import as_json, console
from multiverse.core.errors import Refused
from multiverse.system import files
from multiverse_lab.bench import checkouts
from multiverse_lab.bench import report as reports
from multiverse_lab.bench.density import machine_memory
from multiverse_lab.bench.report import BenchmarkMachine, BenchmarkRun, ChangedFigure
from multiverse_lab.cli.bench import DIRECTORY, IMAGES, Dir, Images, Json
from multiverse_lab.cli.compare import measure
from multiverse_lab.lab.program import multiverse as own_program

ALL = (
    "latency", "burst 50", "burst 30 --every 10", "throughput", "density", "queue", "neighbours", "planner",
    "submissions", "observations", "scale", "sampling", "placement", "viewers",
    "save", "checkpoint -t 2", "spread", "sleep", "containers",
    "move -m 2 --how private --large", "move -m 2", "move -m 2 --how compressed",
    "paper --simulate 0",
)  # fmt: skip


def all_benchmarks(
    given: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="What `bench NAME --json` printed, as NAME.json.")
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", help="Run this benchmark, as in 'burst 20'; may be given several times."),
    ] = None,
    write: Annotated[Path | None, typer.Option("--write", help="The page whose regions are written.")] = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep each run in a file of this directory.")] = None,
    directory: Dir = DIRECTORY,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Run all benchmarks, and write the page of measured figures, with date, commit and machine.

    All run as they are by default, for hours; --run names some, and files are taken in place of runs. The page keeps
    all text outside of the regions of these benchmarks. Which figures changed beyond their intervals since the run that
    the page has is said, if that was on a machine alike. Without --write the regions are printed.
    """
    from multiverse_lab.cli import benchmarks  # which has this command

    commit = commit_here()  # before the page itself is a change that is not committed
    before = _read(write) if write is not None else ""
    runs = [_file(path) for path in given or ()]
    asked = [shlex.split(one) for one in run or (() if given else ALL)]
    known = {command.name for command in benchmarks.app.registered_commands}
    for name in [words[0] if words else "" for words in asked]:
        if name not in known:
            raise Refused(f"--run names no benchmark: {name!r}", hint="multiverse bench --help lists them")
    for words in asked:
        runs.append(_run(words, commit, directory, images))
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            files.replace(keep / f"{runs[-1].name}.json", json_.dumps(reports.document(runs[-1])) + "\n", mode=0o644)
        if write is not None:  # what has been measured stays if a later one fails
            _write(write, runs[-1:])
    if json:
        as_json([reports.document(one) for one in runs])
    elif write is None:
        for one in runs:
            console.print(f"\n{reports.region(one)}", markup=False, soft_wrap=True)
    else:
        _write(write, runs)
        console.print(f"{write}: {', '.join(one.name for one in runs)}", markup=False, soft_wrap=True)
        for one in runs:
            _say_changes(one.name, *reports.changes(before, one))


def _say_changes(name: str, at: str, found: Sequence[ChangedFigure]) -> None:
    if not at:
        console.print(f"{name}: not compared: the page has no such run on a machine alike", soft_wrap=True)
        return
    console.print(f"{name}: {len(found) or 'no'} figures changed beyond their intervals since {at}", soft_wrap=True)
    for one in found:
        said = f"  {one.row}, {one.column}: {one.before}, and now {one.now}"
        console.print(said, markup=False, soft_wrap=True)


def _read(page: Path) -> str:
    try:
        return page.read_text()
    except OSError as error:
        raise Refused(f"cannot read {page}: {error.strerror}", hint="give the page that is to be written") from error


def _write(page: Path, runs: Sequence[BenchmarkRun]) -> None:
    """Write the regions of these runs into the page as it is now: it may have been edited while benchmarks ran."""
    files.replace(page, reports.written(_read(page), runs), mode=0o644)


def _file(path: Path) -> BenchmarkRun:
    try:
        found, at = json_.loads(path.read_text()), path.stat().st_mtime
    except (OSError, ValueError) as error:
        raise Refused(f"{path} has no JSON: {error}", hint="give files that bench NAME --json has printed") from error
    return reports.read(path.stem, found, day(at))


def day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def _run(words: Sequence[str], commit: str, directory: Path, images: Path) -> BenchmarkRun:
    """Run a benchmark of this checkout, and say where and when."""
    machine, at = machine_now(), day(time.time())
    progress.present().say(f"bench {' '.join(words)}")
    result: Any = measure("this checkout", own_program(), words, directory, images)
    return BenchmarkRun(tuple(words), at, commit, machine, result)


def commit_here() -> str:
    """The commit of this checkout; empty where the code is in none."""
    try:
        return checkouts.here(IMAGES, DIRECTORY).commit
    except Refused:
        return ""


def machine_now() -> BenchmarkMachine:
    """This machine, with the versions of what is installed."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return BenchmarkMachine(
        cpu=model[1].strip() if model else "unknown",
        cpus=os.cpu_count() or 1,
        memory=machine_memory(),
        slurm=_version("slurmctld", "-V"),
        qemu=_version("qemu-system-x86_64", "--version"),
        load=os.getloadavg()[0],
    )


def _version(*argv: str) -> str:
    try:
        said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "none"
    found = re.search(r"\d+(\.\d+)+", said)
    return found[0] if found else "unknown"
