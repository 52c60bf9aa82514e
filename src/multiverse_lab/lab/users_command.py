"""The `multiverse` that users of a lab call, if they cannot execute the one of this process.

A checkout, its Python environment or Python itself may be below a directory that others may not enter, such as root's
home. The lab then has a copy of the packages, which the distribution's Python executes.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import multiverse
from multiverse.system import files
from multiverse_lab.lab.layout import Layout

_MAIN = "import sys; sys.path.insert(0, sys.argv.pop(1)); import multiverse.cli.main as m; m.main()"


def directories(where: Layout) -> list[Path]:
    """Where the users of the lab find its commands, in the order of their PATH. Who can execute the distribution's
    `multiverse` does: it is the one that brings the lab up."""
    return [Path(sys.executable).parent, *filter(Path.exists, [where.programs])]


def install(where: Layout) -> None:
    """Give the lab a `multiverse` that all users can execute, if they cannot execute this one. Without a Python of the
    same release that they can execute, there is none."""
    command = where.programs / "multiverse"
    python = None if all(map(open_to_all, _own())) else _python()
    if python is None:
        command.unlink(missing_ok=True)
        return
    packages = where.programs / "python"
    _copy(packages)
    words = shlex.join([str(python), "-I", "-c", _MAIN, str(packages)])
    files.replace(command, f'#!/bin/sh\nexec {words} "$@"\n', mode=0o755)


def open_to_all(path: Path) -> bool:
    """Whether any user can read or enter what is at this path, by the modes of it and of what it is in."""
    there = path.resolve()
    wanted = 0o5 if there.is_dir() else 0o4
    return there.stat().st_mode & wanted == wanted and all(each.stat().st_mode & 0o1 for each in there.parents)


def _own() -> list[Path]:
    """What a user who executes this process's `multiverse` reads."""
    program = Path(sys.executable).with_name("multiverse")
    packages = Path(str(metadata.distribution("typer").locate_file("")))
    return [Path(sys.executable), Path(multiverse.__file__), packages, *filter(Path.exists, [program])]


def _python() -> Path | None:
    """A Python that all users can execute, of the release for which the packages were installed."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = (Path(sys.executable), *(Path(place, name) for place in ("/usr/bin", "/usr/local/bin")))
    return next((path for path in candidates if path.exists() and open_to_all(path)), None)


def _copy(packages: Path) -> None:
    """Copy `multiverse` and what it requires to `packages`, unless it is there already."""
    sources = dict(_files())
    source = ((name, path.stat()) for name, path in sources.items() if path.suffix != ".pyc")
    stats = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in source)
    stamp, digest = packages / "complete", hashlib.sha256(repr(stats).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    fresh = packages.with_name(f".{packages.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    for name, path in sources.items():
        copy = fresh / name
        _make(copy.parent, fresh)
        try:
            _link(path, copy)
        except OSError:
            shutil.copy2(path, copy)  # with its time: otherwise compiled files would count as outdated
            copy.chmod(0o644)
    files.replace(fresh / stamp.name, digest, mode=0o644)
    shutil.rmtree(packages, ignore_errors=True)
    fresh.rename(packages)


def _link(path: Path, copy: Path) -> None:
    """Link a file that all may read: that takes a tenth of the time. `OSError` if that is not possible."""
    if path.stat().st_mode & 0o444 != 0o444:
        raise PermissionError(path)
    copy.hardlink_to(path)


def _make(directory: Path, top: Path) -> None:
    """Make a directory in `top`, and those above it, for all to read whatever the umask is."""
    for each in [*reversed([one for one in directory.parents if one.is_relative_to(top)]), directory]:
        if not each.exists():
            each.mkdir()
            each.chmod(0o755)


def _files() -> Iterator[tuple[str, Path]]:
    """The files that are to be copied, by their paths in a directory of packages."""
    top = Path(multiverse.__file__).parent
    for path in top.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(top.parent)), path
    for distribution in _required("multiverse"):
        for name in distribution.files or ():
            path = Path(str(distribution.locate_file(name)))
            if ".." not in name.parts and path.is_file():
                yield str(name), path


def _required(name: str) -> list[metadata.Distribution]:
    """The installed distributions that one requires, directly or not, without extras."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        try:
            one = metadata.distribution(waiting.pop())
        except metadata.PackageNotFoundError:  # not required with this Python
            continue
        if one.name not in found:
            found[one.name] = one
            words = (text.partition(";") for text in one.requires or ())
            waiting += [
                re.split(r"[^A-Za-z0-9._-]", need.strip())[0] for need, _, when in words if "extra ==" not in when
            ]
    return [one for each, one in found.items() if each != name]
