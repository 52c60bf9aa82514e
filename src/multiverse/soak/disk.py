"""A small disk of its own for the lab's state: a file with a file system, mounted in this process's mount namespace."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from multiverse.core.errors import Broken

SIZE = 6 << 30
"""Bytes. Most of them are never written. A full clone copies its image to this disk."""


def mount(file: Path, directory: Path) -> None:
    """Make a file system in `file` and mount it at `directory`. `Broken` if this machine cannot."""
    file.unlink(missing_ok=True)
    with file.open("wb") as new:
        new.truncate(SIZE)
    file.chmod(0o600)
    directory.mkdir(parents=True, exist_ok=True)
    # Without blocks that are reserved for root, the daemon meets the end of the disk as anybody does.
    _run("mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard", str(file))
    _run("mount", "-o", "loop,nosuid,nodev", str(file), str(directory))
    directory.chmod(0o711)


def unmount(file: Path, directory: Path) -> None:
    """Take the file system away. It is the last thing that holds the file."""
    if os.path.ismount(directory):
        _run("umount", str(directory))
    file.unlink(missing_ok=True)


def fill(path: Path) -> None:
    """Allocate a file until the file system is full. Hardly anything is written (posix_fallocate(3))."""
    with path.open("wb") as file:
        offset = 0
        for size in (64 << 20, 1 << 20, 1 << 12):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), offset, size)
                    offset += size


def bind(file: Path, over: Path) -> None:
    _run("mount", "--bind", str(file), str(over))


def unbind(over: Path) -> None:
    _run("umount", str(over))


def _run(*argv: str) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError as error:
        raise Broken(f"cannot run {argv[0]}: it is missing", hint="install the package e2fsprogs or mount") from error
    if done.returncode:
        raise Broken(f"{' '.join(argv)}: {done.stderr.strip()}", hint="this needs root, and loop devices")
