"""Whose a place is: what a VM is made from gets the munge key, so nobody but root and us may put anything there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from multiverse.core.errors import Refused


def make(place: Path, mode: int) -> None:
    """Have a directory of that mode, and above it what is missing: others may go through that, whatever the umask.
    Raises what `check` does, also for what somebody else has made meanwhile."""
    missing = [path for path in place.parents if not path.exists()]
    try:
        for path in (*reversed(missing), place):
            path.mkdir(exist_ok=True)
            check(path)
            path.chmod(mode if path == place else 0o755)
    except OSError as error:
        raise Refused(
            f"cannot make {place}: {error.strerror}", hint="run as root, or choose other places under [qemu]"
        ) from error


def check(place: Path, *, inside: bool = False) -> None:
    """`Refused` if somebody else could put something into this place, or another in its stead: it, and all on the way
    to it, has to be root's or ours, and nobody else's to write to, but for what is sticky above it, such as /tmp. With
    `inside`, each file in it too."""
    # Who owns our own program could change that as well. A group of somebody's own has his number (as in sudo(8)).
    trusted = frozenset((0, os.geteuid(), Path(__file__).stat().st_uid))
    try:
        end = Path(os.path.realpath(place, strict=True))
        for path in _way(place):
            _judge(path, path.lstat(), trusted, above=path != end)
        for path in end.iterdir() if inside else ():
            if path.is_symlink():
                check(path)
            else:
                _judge(path, path.lstat(), trusted)
    except OSError as error:
        raise Refused(f"cannot look at {place}: {error.strerror}", hint="see the places under [qemu]") from error


def _judge(path: Path, found: os.stat_result, trusted: frozenset[int], *, above: bool = False) -> None:
    if found.st_uid not in trusted:
        raise Refused(
            f"{path} belongs to user {found.st_uid}, who could put something of his own there",
            hint="remove it, or choose other places under [qemu]",
        )
    theirs = found.st_mode & 0o002 or (found.st_mode & 0o020 and found.st_gid not in trusted)
    kept = stat.S_ISLNK(found.st_mode) or (above and found.st_mode & stat.S_ISVTX)
    if theirs and not kept:
        raise Refused(
            f"others may write to {path}, and could put something of their own there",
            hint=f"see what is in it, then chmod go-w {path}, or choose other places under [qemu]",
        )


def _way(place: Path) -> Iterator[Path]:
    """All that the kernel goes through to that place, from the root on: directories, links, and itself."""
    here, left = Path("/"), [*reversed(place.absolute().parts[1:])]
    yield here
    while left:
        part = left.pop()
        here = here.parent if part == ".." else here / part
        yield here
        if here.is_symlink():
            target = here.readlink()
            here = Path("/") if target.is_absolute() else here.parent
            left += reversed([part for part in target.parts if part != "/"])
