"""Writes rendered files. What an administrator has changed is not overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path

from multiverse.core.errors import Refused
from multiverse.system import files, rendered
from multiverse.system.rendered import Origin, SiteFile


class WriteOutcome(StrEnum):
    CREATED = "created"
    UNCHANGED = "unchanged"
    UPDATED = "updated"
    KEPT = "kept: it was changed here"  # the new file is beside it


def write(wanted: Iterable[SiteFile], root: Path, *, force: bool = False) -> Iterator[tuple[Path, WriteOutcome]]:
    """Write each file below `root`; yields where, and what was done.

    A file that somebody changed, or that we never wrote, stays, and the new one is written beside it as NAME.new; with
    `force` it is overwritten. Raises `Refused` if a file cannot be written.
    """
    for file in wanted:
        path = root / file.path.relative_to("/")
        try:
            yield path, _write_one(file, path, force=force)
        except (OSError, UnicodeDecodeError) as error:
            raise Refused(f"cannot write {path}: {error}", hint="run as root, or choose another directory") from error


def beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _write_one(file: SiteFile, path: Path, *, force: bool) -> WriteOutcome:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = path.read_text()
    except FileNotFoundError:
        files.replace(path, file.content, mode=file.mode)
        return WriteOutcome.CREATED
    if file.begun:
        return WriteOutcome.UNCHANGED
    if before != file.content and rendered.origin(before) is not Origin.RENDERED and not force:
        files.replace(beside(path), file.content, mode=file.mode)
        return WriteOutcome.KEPT
    beside(path).unlink(missing_ok=True)
    if (before, path.stat().st_mode & 0o7777) == (file.content, file.mode):
        return WriteOutcome.UNCHANGED
    files.replace(path, file.content, mode=file.mode)
    return WriteOutcome.UPDATED
