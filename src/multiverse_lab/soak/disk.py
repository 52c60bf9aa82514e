"""A small disk of its own for the lab's state: a file with a file system. Files that are mounted over others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from multiverse.core.errors import Broken

SIZE = 6 << 30
"""Bytes. Most of them are never written. A full clone copies its image to this disk."""


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mount a small file system at `directory` while the context lasts. What an earlier one, which was killed, has left
    is taken away first. `Broken` if this machine cannot.

    The process may enter a mount namespace of its own meanwhile. The file system is mounted outside of it, too, so that
    `multiverse lab down` finds the VMs if this process is killed.
    """
    file = directory.with_name("state.disk")
    outside = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _unmount(file, directory, outside)
        _mount(file, directory)
        yield
    finally:
        _unmount(file, directory, outside)
        os.close(outside)


def _mount(file: Path, directory: Path) -> None:
    with file.open("wb") as new:
        new.truncate(SIZE)
    file.chmod(0o600)
    directory.mkdir(exist_ok=True)
    # Without blocks that are reserved for root, the daemon meets the end of the disk as anybody does.
    _run("mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard", str(file))
    _run("mount", "-o", "loop,nosuid,nodev", str(file), str(directory))


def _unmount(file: Path, directory: Path, outside: int) -> None:
    """Take the file system away from this namespace and from the one that `outside` is open on, and then its file."""
    if os.path.ismount(directory):
        _run("umount", str(directory))
    enter = ("nsenter", f"--mount=/proc/self/fd/{outside}")
    if subprocess.run([*enter, "mountpoint", "-q", str(directory)], pass_fds=[outside], check=False).returncode == 0:
        _run(*enter, "umount", str(directory), keep=outside)
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


def _run(*argv: str, keep: int | None = None) -> None:
    kept = [] if keep is None else [keep]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, pass_fds=kept)
    except FileNotFoundError as error:
        raise Broken(f"cannot run {argv[0]}: it is missing", hint="install e2fsprogs, mount and util-linux") from error
    if done.returncode:
        raise Broken(f"{' '.join(argv)}: {done.stderr.strip()}", hint="this needs root, and loop devices")
