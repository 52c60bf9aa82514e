"""`multiverse bench compare`: the short benchmarks of another commit and of this checkout in turns; what changed."""

from __future__ import annotations

import json as json_
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from multiverse.cli import progress, render
from multiverse.cli.commands import NOT_DONE
from multiverse.cli.render import console
from multiverse.core.errors import Broken, Refused
from multiverse.system.interrupts import held
from multiverse.system.locks import try_locked_file
from multiverse_lab.bench import checkouts, figures
from multiverse_lab.bench.checkouts import Checkout
from multiverse_lab.bench.figures import ComparedFigure, Figure
from multiverse_lab.bench.latency import KINDS, JobKind
from multiverse_lab.bench.stats import median
from multiverse_lab.cli.bench import DIRECTORY, IMAGES, Images, Json, build_images
from multiverse_lab.lab.program import multiverse as own_program

SHORT: dict[str, tuple[str, ...]] = {
    "latency": ("--jobs", "3", "--kinds", "instant,joined,bare_metal"),
    "burst": ("8", "--kinds", "instant"),
    "throughput": ("--tasks", "10", "--kinds", "instant"),
    "queue": ("--jobs", "2", "--waiting", "40", "--others", "40", "--idle", "3"),
    "planner": ("--jobs", "1000", "--vms", "500", "--repeat", "5"),
    "density": ("--most", "6", "--step", "6"),
}
"""The benchmarks and their parameters. One turn of both checkouts takes about ten minutes on two cores."""

WORKSPACE = DIRECTORY.with_name("compare")
WITHOUT_LAB = frozenset({"planner"})
_SHOWN = 3  # lines of an error that are shown


def compare(
    revision: Annotated[str, typer.Argument(metavar="REV", help="The commit to compare this checkout with.")],
    turns: Annotated[int, typer.Option(min=1, help="Runs of each benchmark in each checkout.")] = 3,
    only: Annotated[str, typer.Option(help="Which benchmarks, with commas.")] = ",".join(SHORT),
    fail: Annotated[bool, typer.Option("--fail", help="End with status 1 if a figure is worse.")] = False,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where labs and the images of other commits are kept.")
    ] = WORKSPACE,
    images: Images = IMAGES,
    json: Json = False,
) -> None:
    """Run the short benchmarks of commit REV and of this checkout in turns, and say what changed beyond its interval.

    A figure has changed if its medians differ by more than 10 %, and all its turns in one checkout lie on one side of
    all its turns in the other, with the 95 % intervals that a benchmark gives. Of ten figures that are the same, one
    looks changed by chance with three turns, one of a hundred with five. After one turn no figure has changed.
    """
    names = chosen(only)
    checkouts.commit_of(revision)
    if needed := _kinds_in_vms(names):
        build_images(needed, images, json)  # before the other checkout begins with a copy of them
    found = _compare(revision, turns, names, directory, images)
    render.present(found, json, _print)
    if fail and any(one["verdict"] == "worse" for one in found["figures"]):
        raise typer.Exit(NOT_DONE)


def chosen(only: str) -> list[str]:
    """The benchmarks with these names, which are separated by commas. Raises `Refused` for one that is not short."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if wrong := [name for name in names if name not in SHORT]:
        raise Refused(f"no short benchmark: {', '.join(wrong)}", hint=f"there are: {', '.join(SHORT)}")
    return names


def _kinds_in_vms(names: Sequence[str]) -> list[JobKind]:
    """The kinds of jobs whose images these benchmarks need."""
    if not set(names) - WITHOUT_LAB:
        return []
    wanted = SHORT["latency"][-1].split(",") if "latency" in names else ["instant"]
    return [kind for kind in KINDS if kind.name in wanted]


def _compare(revision: str, turns: int, names: Sequence[str], directory: Path, images: Path) -> dict[str, Any]:
    with _workspace(directory) as work, checkouts.checked_out(revision, work, directory / "images", images) as old:
        new = checkouts.here(images, work / "lab")
        left_out = {name: why for name in names for one in (old, new) if (why := checkouts.knows(one, _words(name)))}
        runs: dict[str, list[dict[str, Figure]]] = {"old": [], "new": []}
        measured = [name for name in names if name not in left_out]
        number, of = 0, turns * len(measured) * 2
        for turn in range(turns):
            both: dict[str, dict[str, Figure]] = {"old": {}, "new": {}}
            order = (("old", old), ("new", new)) if turn % 2 == 0 else (("new", new), ("old", old))
            for name in measured:
                for side, checkout in order:
                    progress.present().advance(number, of)
                    progress.present().say(f"{name} of {checkout.name}")
                    both[side] |= figures.flatten(name, _measure(checkout, name))
                    number += 1
            for side, found in both.items():
                runs[side].append(found)
    return {
        "rev": revision,
        "old": old.commit,
        "new": new.commit,
        "turns": turns,
        "threshold": figures.THRESHOLD,
        "left_out": left_out,
        "figures": [_shown(one) for one in figures.compare(runs["old"], runs["new"])],
        "only_old": figures.only_in(runs["old"], runs["new"]),
        "only_new": figures.only_in(runs["new"], runs["old"]),
    }


def _words(name: str) -> list[str]:
    return [name, *SHORT[name]]


@contextmanager
def _workspace(directory: Path) -> Iterator[Path]:
    """A temporary directory with the worktree and the labs, which are gone when the context ends, and so is what an
    earlier comparison left that was killed. `Refused` while another one goes on in the same directory."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    with try_locked_file(directory / "lock") as ours:
        if not ours:
            raise Refused(f"another comparison uses {directory}", hint="wait until it has ended, or use another --dir")
        for left in directory.glob("t-*"):
            _end(left)
        work = Path(tempfile.mkdtemp(prefix="t-", dir=directory))
        work.chmod(0o755)  # daemons of other users have files in the labs
        try:
            yield work
        finally:
            with held():
                _end(work)


def _end(work: Path) -> None:
    """Take the labs in a workspace down, and remove it."""
    for lab in work.glob("lab*"):
        subprocess.run([*own_program("lab", "down"), "--dir", lab], capture_output=True, check=False)
    checkouts.remove(work / "tree")
    shutil.rmtree(work, ignore_errors=True)


def _measure(checkout: Checkout, name: str) -> Any:
    return measure(checkout.name, checkout.program, _words(name), checkout.lab, checkout.images)


def measure(where: str, program: Sequence[str], words: Sequence[str], lab: Path, images: Path) -> Any:
    """What a benchmark printed that the `multiverse` of a checkout runs. If this is interrupted, so is the benchmark,
    and it ends its lab."""
    places = {"--dir": lab, "--images": images}
    known = checkouts.options(program, words[0])
    more = [text for name, path in places.items() if name in known for text in (name, str(path))]
    running = subprocess.Popen(
        [*program, "bench", *words, "--json", *more],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        output, said = running.communicate()
    except BaseException:
        with held():
            running.send_signal(signal.SIGTERM)
            running.communicate()
        raise
    if running.returncode:
        lines = [line for line in said.splitlines() if line.strip() and not line.startswith("  bench ")]
        raise Broken(
            f"bench {words[0]} of {where} failed: {' '.join(lines[-_SHOWN:]) or 'it said nothing'}",
            hint=f"run it alone: multiverse bench {' '.join(words)}",
        )
    return json_.loads(output)


def _shown(one: ComparedFigure) -> dict[str, Any]:
    return {
        **asdict(one),
        "old_median": median(one.old),
        "new_median": median(one.new),
        "ratio": one.ratio,
        "better": figures.better(one.name),
    }


def _print(found: Mapping[str, Any]) -> None:
    console.print(
        f"\n{found['rev']} ({found['old'][:12]}) beside this checkout ({_short(found['new'])}), {found['turns']} turns "
        f"of each: medians, and from the smallest to the largest turn. A figure changed if its medians differ by more "
        f"than {found['threshold']:.0%} and its turns and intervals do not overlap.\n",
        markup=False,
    )
    right = (found["rev"], "HERE", "RATIO")
    table = render.table("FIGURE", *right, "CHANGE", right=right, fold=("FIGURE",))
    for one in found["figures"]:
        ratio = f"{one['ratio']:.2f}" if one["ratio"] is not None else "–"
        style = {"worse": "red", "better": "green", "changed": "yellow"}.get(one["verdict"], "")
        table.add_row(one["name"], _range(one["old"]), _range(one["new"]), ratio, one["verdict"], style=style)
    render.show(table, "No figure differs in any turn.")
    for name, why in found["left_out"].items():
        console.print(f"{name} is left out: {why}", markup=False)
    for side, where in (("only_old", found["rev"]), ("only_new", "this checkout")):
        if found[side]:
            console.print(f"only in {where}: {', '.join(found[side])}", style="dim", markup=False)
    changed = [one for one in found["figures"] if one["verdict"]]
    words = ", ".join(f"{sum(one['verdict'] == word for one in changed)} {word}" for word in ("worse", "better"))
    console.print(f"{words}, of {len(found['figures'])} figures", markup=False)


def _short(commit: str) -> str:
    return commit[:12] + ("+" if commit.endswith("+") else "")


def _range(values: Sequence[float]) -> str:
    middle = f"{median(values):.4g}"
    return f"{middle} ({min(values):.4g}–{max(values):.4g})" if len(values) > 1 else middle
