"""Sealed copies of memory files (memfd_create(2)): what a QEMU before 8.2 maps instead of a template's file.

Such a QEMU opens the file for writing even when it maps it privately, and a tmpfs cannot let it open a file for writing
without letting it write. Nobody, not even root, can write to a sealed memfd, and its pages are shared by all clones as
the file's would be. Each template is copied once per process: this takes about as long as a clone, and the template's
size of memory.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from multiverse.core.errors import Gone

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SealedMemory:
    """One sealed copy of each memory file, kept until the file is replaced or the copy is discarded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[Path, tuple[int, int]] = {}  # by path: the inode that was copied, the memfd

    def open(self, path: Path) -> int:
        """A descriptor of the sealed copy, which the caller closes. Raises `Gone` if there is no such file."""
        with self._lock:
            try:
                with path.open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    if self._copies.get(path, (0, 0))[0] != inode:
                        self._close(path)
                        self._copies[path] = (inode, _sealed_copy(file.fileno()))
            except FileNotFoundError as error:
                raise Gone(f"there is no memory file {path}", hint="its template is built again on demand") from error
            return fcntl.fcntl(self._copies[path][1], fcntl.F_DUPFD_CLOEXEC, 3)

    def size(self, path: Path) -> int:
        """Bytes of memory that the copy of this file takes; 0 if there is none."""
        with self._lock:
            found = self._copies.get(path)
            return os.fstat(found[1]).st_blocks * 512 if found else 0

    def discard(self, path: Path) -> None:
        """Close the copy of this file; VMs that map the copy keep it until they end."""
        with self._lock:
            self._close(path)

    def _close(self, path: Path) -> None:
        if path in self._copies:
            os.close(self._copies.pop(path)[1])


def _sealed_copy(source: int) -> int:
    size = os.fstat(source).st_size
    # The copy's name ends as the file's does: `process.exact_memory` tells shared pages by that.
    copy = os.memfd_create("multiverse/memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(copy, size)
        at = 0
        while (at := _seek(source, at, os.SEEK_DATA, size)) < size:
            end = _seek(source, at, os.SEEK_HOLE, size)
            os.lseek(copy, at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(copy, source, at, end - at)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _seek(fd: int, at: int, whence: int, size: int) -> int:
    """Where data or a hole begins from `at` on; the file's size if nowhere."""
    try:
        return os.lseek(fd, at, whence)
    except OSError:  # ENXIO: no more data
        return size
