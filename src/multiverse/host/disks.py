"""Copies of whole disks: by reference where the file system can, which shares every block until one side writes it."""

from __future__ import annotations

import errno
import fcntl
import subprocess
from pathlib import Path

from multiverse.core.errors import Exhausted

_FICLONE = 0x40049409  # ioctl_ficlone(2)
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM})


def copy(source: Path, target: Path) -> str:
    """Make `target` a copy of `source`, and say how: `reflink`, or `copy` where file systems cannot do that, or are
    two. `Exhausted` if there is no room; something of `target` may remain then."""
    try:
        with source.open("rb") as old, target.open("wb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        return "reflink"
    except OSError as error:
        if error.errno not in _CANNOT:
            raise _no_room(source, str(error)) from error
    argv = ["cp", "--reflink=never", "--sparse=always", "--", str(source), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise _no_room(source, done.stderr.strip()[-200:])
    return "copy"


def _no_room(source: Path, why: str) -> Exhausted:
    return Exhausted(f"cannot copy the disk {source}: {why}", hint="is the disk full?")
