"""Another checkout of this repository, to measure it: a git worktree, and a Python environment that runs its code.

The daemons of a lab do not get the environment of the command that starts them, so a variable such as PYTHONPATH would
let them run the code of this checkout. The other one has a virtual environment instead, with the packages of this one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import multiverse
from multiverse.core.errors import Broken, Refused
from multiverse.system.interrupts import held
from multiverse_lab.bench.latency import WARM
from multiverse_lab.lab.program import multiverse as own_program

_IMAGES = ("slim", WARM)
"""Those that the short benchmarks use."""

_KEPT = 3
"""Checkouts whose images are kept for the next comparison."""
_CLONE_HINT = "run it in a git clone: `git clone` the repository, `make setup` there, and call its .venv/bin/multiverse"
_PROGRAM = "import sys\nfrom multiverse.cli.main import main\nsys.exit(main())\n"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout that can be measured. `commit` has a "+" if something is changed that is not committed. `program` is
    its `multiverse`, `images` where its images are, `lab` where its labs are."""

    name: str
    commit: str
    program: tuple[str, ...]
    images: Path
    lab: Path


def root() -> Path:
    """The git checkout that this code runs from. Raises `Refused` if it does not run from one."""
    code = Path(multiverse.__file__).resolve().parent
    found = code.parents[1]
    if code.parent.name != "src" or not (found / ".git").exists():
        raise Refused(f"{code} belongs to no git checkout", hint=_CLONE_HINT)
    if shutil.which("git") is None:
        raise Refused("there is no git on this machine", hint="apt-get install git")
    return found


def git(*words: str) -> str:
    """What git says in this checkout. Raises `Refused` with its message if it fails."""
    done = subprocess.run(["git", "-C", root(), *words], text=True, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise Refused(f"git {words[0]} failed: {said[-1]}", hint="git log --oneline shows the commits that there are")
    return done.stdout.strip()


def commit_of(revision: str) -> str:
    """The commit that a revision names. Raises `Refused` if there is none."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except Refused:
        root()
        raise Refused(
            f"there is no commit {revision!r} here", hint="git log --oneline shows the commits that there are"
        ) from None


def here(images: Path, lab: Path) -> Checkout:
    """This checkout, as it is now."""
    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return Checkout("here", git("rev-parse", "HEAD") + changed, tuple(own_program()), images, lab)


@contextmanager
def checked_out(revision: str, below: Path, images: Path, like: Path) -> Iterator[Checkout]:
    """A worktree of that revision in the directory `below`, while the context lasts. Its images are kept in a directory
    of `images` that is named by the commit, and begin as a copy of those in `like`, of which the guest agent is then
    replaced if nothing else differs."""
    commit = commit_of(revision)
    tree, python = below / "tree", below / "venv"
    git("worktree", "add", "--detach", "--quiet", str(tree), commit)
    try:
        if not (tree / "src" / "multiverse").is_dir():
            raise Refused(f"commit {commit[:12]} has no src/multiverse", hint="compare with a later one")
        own = images / commit[:12]
        _forget_others(images, own)
        _copy_images(like, own)
        _build_plugin(tree)
        yield Checkout(revision, commit, environment(tree / "src", python), own, below / "lab-of-revision")
    finally:
        with held():
            remove(tree)


def remove(tree: Path) -> None:
    """Remove a worktree, whatever is changed or lacking in it."""
    with_git = ["git", "-C", str(root()), "worktree"]
    subprocess.run([*with_git, "remove", "--force", str(tree)], capture_output=True, check=False)
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run([*with_git, "prune"], capture_output=True, check=False)


def environment(source: Path, where: Path) -> tuple[str, ...]:
    """Make a virtual environment that has the code in `source` and the packages of this one, and return its
    `multiverse`."""
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", where], text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise Broken(f"cannot make {where}: {done.stderr.strip()}", hint="apt-get install python3-venv")
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    own = Path(sysconfig.get_path("purelib", vars={"base": str(where)}))
    (own / "checkout.pth").write_text("".join(f"{path}\n" for path in (source, *sorted(packages))))
    program = where / "bin" / "multiverse"
    program.write_text(f"#!{where}/bin/python\n{_PROGRAM}")
    program.chmod(0o755)
    return (str(program),)


def _forget_others(images: Path, own: Path) -> None:
    """Remove the images of the checkouts that were measured longest ago, so that they do not fill the disk."""
    others = sorted((one for one in images.glob("*") if one != own), key=lambda one: one.stat().st_mtime)
    for one in others[: max(0, len(others) - _KEPT + 1)]:
        shutil.rmtree(one, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    own.touch()


def _copy_images(like: Path, own: Path) -> None:
    """Give a checkout the images of this one to begin with, so that only what differs is built."""
    for manifest in (like / name / "image.json" for name in _IMAGES):
        there = own / manifest.parent.name
        if manifest.exists() and not there.exists():
            beside = own / f".{there.name}.new"
            shutil.rmtree(beside, ignore_errors=True)
            subprocess.run(
                ["cp", "-a", "--sparse=always", "--reflink=auto", manifest.parent, beside], check=True
            )  # fmt: skip
            beside.rename(there)


def _build_plugin(tree: Path) -> None:
    """Build Slurm's plugin if this checkout has it: every command of Slurm in a lab loads it."""
    if (root() / "var" / "spank" / "multiverse.so").exists() and (tree / "spank" / "Makefile").exists():
        done = subprocess.run(["make", "-s", "-C", tree / "spank"], text=True, capture_output=True, check=False)
        if done.returncode:
            raise Broken(f"cannot build the plugin: {done.stderr.strip()}", hint="make -C spank says more")


def knows(checkout: Checkout, words: Sequence[str]) -> str:
    """Why a checkout has no such benchmark, or not with these options; empty if it has."""
    known = options(checkout.program, words[0])
    if not known:
        return f"{checkout.name} has no such benchmark"
    lacking = [word for word in words[1:] if word.startswith("--") and word not in known]
    return f"{checkout.name} has no {', '.join(lacking)} there" if lacking else ""


def options(program: Sequence[str], benchmark: str) -> frozenset[str]:
    """The options that a benchmark has by the help of that `multiverse`; none if there is no such benchmark."""
    done = subprocess.run(
        [*program, "bench", benchmark, "--help"], text=True, capture_output=True, check=False,
        env={"COLUMNS": "200", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "NO_COLOR": "1"},
    )  # fmt: skip
    return frozenset(re.findall(r"--[a-z][a-z-]*", done.stdout)) if done.returncode == 0 else frozenset()
