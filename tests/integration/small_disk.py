"""Small file systems for tests that fill them."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, kind: str, mebibytes: int) -> Iterator[Path]:
    """A file system of that size, mounted at `place` while the context lasts. Nothing of it is set aside for root."""
    new = not place.exists()
    place.mkdir(exist_ok=True)
    disk = place.with_name(f"{place.name}.disk")
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(place)]
    else:
        with disk.open("wb") as file:
            file.truncate(mebibytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(disk)], check=True)
        command = ["mount", "-o", "loop", str(disk), str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    try:
        if mounted.returncode:
            pytest.skip(f"this machine mounts no {kind} here: {mounted.stderr.strip()}")
        yield place
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", "-l", str(place)], check=True)  # a test that failed may have files open
        disk.unlink(missing_ok=True)
        if new:
            place.rmdir()


def fill(directory: Path, leave: int = 0) -> Path:
    """Write to a file until the file system has `leave` bytes left, or none at all."""
    filler = directory / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while not leave or available(directory) > leave + size:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC
    return filler


def available(directory: Path) -> int:
    """Bytes that the file system has left."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
