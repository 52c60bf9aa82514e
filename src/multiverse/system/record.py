"""A short text in a file that needs no more room as it changes, and that a loss of power leaves whole."""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path

SIZE = 32 * 1024
"""Bytes of each of the two copies in the file."""


class Record:
    """The text of the file `path`.

    The file is allocated when it is first opened, with all its blocks, so that later writes need no free disk (where
    the file system overwrites in place, which Btrfs and ZFS do not). It has two copies, each with a number and a
    checksum. A write replaces the older one: if it is interrupted, the other one is whole, and counts.
    """

    def __init__(self, path: Path) -> None:
        """Read the text; it is empty in a new file. Raises `OSError`, and `ValueError` if neither copy is whole."""
        self._path = path
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = _encode(0, "") * 2
            _create(path, data)
        copies = [copy for copy in (_decode(data[:SIZE]), _decode(data[SIZE:])) if copy is not None]
        if not copies:
            raise ValueError("neither of its two copies is whole")
        self._number, self.text = max(copies)

    def write(self, text: str) -> None:
        """Replace the text; it is on the disk when this returns. After an `OSError` the text is the one before, unless
        the file is opened again and the new one is found whole. Raises `ValueError` if the text is too long."""
        number = self._number + 1
        data = _encode(number, text)
        fd = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.pwrite(fd, data, number % 2 * SIZE) < SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        self._number, self.text = number, text


def _create(path: Path, data: bytes) -> None:
    """Let the file appear with its content, on the disk: renamed first, it could be empty after a loss of power."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _encode(number: int, text: str) -> bytes:
    content = f"{number} {text}".encode()
    data = b"%08x %s\n" % (zlib.crc32(content), content)
    if len(data) > SIZE:
        raise ValueError(f"a text of {len(data)} bytes does not fit in {SIZE}")
    return data.ljust(SIZE)


def _decode(data: bytes) -> tuple[int, str] | None:
    """The number and the text of a copy; None if it is not whole."""
    checksum, _, content = data.rstrip(b" ").removesuffix(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(content):
        return None
    number, _, text = content.decode().partition(" ")
    return int(number), text
