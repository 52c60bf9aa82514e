"""The users who could change a path. VMs are made from files that see the munge key, so only root and this process's
user may be able to put anything into the directories that hold them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from multiverse.core.errors import Refused

_PLACES = "choose other directories under [qemu]"
_MOST_LINKS = 40


def make_directory(path: Path, mode: int) -> None:
    """Make sure that there is such a directory, with that mode, and that only trusted users can change it. Missing
    directories above it get mode 0755. Raises `Refused` as `check` does."""
    try:
        with suppress(FileNotFoundError):  # before anything follows a link of somebody else
            _check_way(path)
        missing = [above for above in path.parents if not above.exists()]
        for each in (*reversed(missing), path):
            each.mkdir(exist_ok=True)
            check(each)
            each.chmod(mode if each == path else 0o755)
    except OSError as error:
        raise Refused(f"cannot make {path}: {error.strerror}", hint=f"run as root, or {_PLACES}") from error


def check(path: Path, *, inside: bool = False) -> None:
    """Raise `Refused` if an untrusted user could put something into this directory, or replace the directory. Trusted
    are root, the user of this process and the owner of this program. The path, and every directory and link on the way
    to it, must belong to one of them and be writable by nobody else. Sticky directories, such as /tmp, are accepted
    above it. With `inside`, each file in the directory is checked too."""
    try:
        _check_way(path)
        end = Path(os.path.realpath(path, strict=True))
        _check_one(end, end.lstat())
        for each in end.iterdir() if inside else ():
            if each.is_symlink():
                check(each)
            else:
                _check_one(each, each.lstat())
    except OSError as error:
        raise Refused(f"cannot examine {path}: {error.strerror}", hint="see the directories under [qemu]") from error


def _check_way(path: Path) -> None:
    """Check all that the kernel passes, in that order: nothing is reached by a link that was not checked."""
    for each in _components(path):
        _check_one(each, each.lstat(), above=True)


def _check_one(path: Path, found: os.stat_result, *, above: bool = False) -> None:
    # Whoever owns this program could change it as well. A user's own group has the user's number (as in sudo(8)).
    trusted = (0, os.geteuid(), Path(__file__).stat().st_uid)
    if found.st_uid not in trusted:
        problem = f"{path} belongs to user {found.st_uid}, who could put files of their own there"
        raise Refused(problem, hint=f"remove it, or {_PLACES}")
    writable = found.st_mode & 0o002 or (found.st_mode & 0o020 and found.st_gid not in trusted)
    harmless = stat.S_ISLNK(found.st_mode) or (above and found.st_mode & stat.S_ISVTX)
    if writable and not harmless:
        what = f"others may write to {path}, and could put files of their own there"
        raise Refused(what, hint=f"examine its content, then chmod go-w {path}, or {_PLACES}")


def _components(path: Path) -> Iterator[Path]:
    """All directories and links that the kernel passes on the way to that path, from the root, and the path. Raises
    `OSError` after as many links as the kernel follows (path_resolution(7))."""
    here, left, links = Path("/"), [*reversed(path.absolute().parts[1:])], 0
    yield here
    while left:
        part = left.pop()
        here = here.parent if part == ".." else here / part
        yield here
        if here.is_symlink():
            if (links := links + 1) > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = here.readlink()
            here = Path("/") if target.is_absolute() else here.parent
            left += reversed([part for part in target.parts if part != "/"])
