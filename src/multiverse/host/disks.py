"""Copies of whole disks, by reference (reflink) where the file system can: then they share all unwritten blocks."""

from __future__ import annotations

import errno
import fcntl
import subprocess
from pathlib import Path

from multiverse.core.errors import Exhausted

_FICLONE = 0x40049409  # ioctl_ficlone(2)
_NO_REFLINK = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM})


def copy_disk(source: Path, target: Path) -> str:
    """Make `target` a copy of `source`. Returns how: `reflink`, or `copy` where the file system has no reflinks or the
    two are on different ones. Raises `Exhausted` if there is no room; a part of `target` may remain then."""
    try:
        with source.open("rb") as old, target.open("wb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        return "reflink"
    except OSError as error:
        if error.errno not in _NO_REFLINK:
            raise _failed(source, str(error)) from error
    argv = ["cp", "--reflink=never", "--sparse=always", "--", str(source), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise _failed(source, done.stderr.strip()[-200:])
    return "copy"


def _failed(source: Path, reason: str) -> Exhausted:
    return Exhausted(f"cannot copy the disk {source}: {reason}", hint="is the disk full?")
