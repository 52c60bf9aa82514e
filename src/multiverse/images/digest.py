"""The digest of an image's files, by which a copy of it is verified."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from multiverse.core.errors import Broken
from multiverse.system import files

FILES = ("image.json", "vmlinuz", "initrd.img", "disk.raw")
"""The files of an image."""

_RECORD = "image.sha256"  # not in the manifest, which is one of the files
_BLOCK = 64 << 10
_ZEROS = bytes(_BLOCK)


def digest_of(directory: Path) -> str:
    """The digest of the image in a directory, as of `digest_of_files`. Raises `Broken` if a file cannot be read."""
    try:
        return digest_of_files(directory, FILES)
    except OSError as error:
        raise Broken(f"cannot read the image in {directory}: {error}", hint="copy or build it again") from error


def digest_of_files(directory: Path, names: Sequence[str]) -> str:
    """The digest of these files in a directory: SHA-256 over each one's name and size, and the offset and content of
    its blocks of 64 KiB that are not all zero. So it does not depend on where a sparse file has holes, and holes are
    not read. Raises `OSError`."""
    found = hashlib.sha256()
    for name in names:
        with (directory / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(f"{name}\0{size}\0".encode())
            for offset, block in _blocks(file.fileno(), size):
                found.update(f"{offset}\0".encode())
                found.update(block)
    return found.hexdigest()


def recorded(directory: Path) -> str:
    """The digest that was recorded beside the image; empty if none was."""
    try:
        return (directory / _RECORD).read_text().strip()
    except OSError:
        return ""


def record(directory: Path, digest: str) -> None:
    """Record the digest of the image in that directory."""
    files.replace(directory / _RECORD, f"{digest}\n", mode=0o644)


def _blocks(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Each block that is not all zero, with its offset."""
    offset = 0
    while offset < size:
        try:
            data = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole follows
            return
        offset, end = data // _BLOCK * _BLOCK, os.lseek(fd, data, os.SEEK_HOLE)
        while offset < end:
            block = os.pread(fd, _BLOCK, offset)
            if not block:
                return
            if block != _ZEROS[: len(block)]:
                yield offset, block
            offset += _BLOCK
