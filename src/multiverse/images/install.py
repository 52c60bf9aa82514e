"""How an image comes to its place: it is made in a directory beside it, and appears there as a whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multiverse.core.errors import Refused
from multiverse.system import kernel
from multiverse.system.locks import locked_file

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")


def check_name(name: str) -> None:
    """Raise `Refused` if this cannot be the name of an image, which is one of a directory."""
    if not _NAME.fullmatch(name):
        raise Refused(
            f"{name!r} is not a valid name of an image",
            hint="use at most 40 lower-case letters, digits, dots and dashes",
        )


@contextmanager
def locked(images: Path, name: str) -> Iterator[None]:
    """Hold the lock under which the image of that name is made or replaced."""
    with locked_file(images / f".{name}.lock"):
        yield


@contextmanager
def beside(images: Path, name: str) -> Iterator[Path]:
    """A new directory beside the place of the image, whose lock is held. It is removed after an error. What interrupted
    attempts have left is removed first, but for an image that was to be replaced and is not: that goes back to its
    place. No other file here has an @ in its name."""
    for remains in (*images.glob(f".{name}@old-*"), *images.glob(f".{name}@new-*")):
        if "@old-" in remains.name and not (images / name).exists():
            remains.rename(images / name)
        else:
            shutil.rmtree(remains)
    work = Path(tempfile.mkdtemp(prefix=f".{name}@new-", dir=images))
    try:
        work.chmod(0o755)
        yield work
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def put(work: Path, images: Path, name: str) -> None:
    """Replace the image of that name by the complete one in `work`. VMs that use the old one keep its files. At each
    moment one of the two is in its place, if the file system can exchange them."""
    place, old = images / name, work
    os.sync()
    if not place.exists():
        work.rename(place)
        return
    try:
        kernel.exchange(work, place)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        old = work.with_name(work.name.replace("@new-", "@old-"))  # what `beside` puts back after a crash
        place.rename(old)
        work.rename(place)
    shutil.rmtree(old, ignore_errors=True)
