"""A template's memory as QEMU before 8.2 may map it: it opens the file for writing, whatever it does with it.

A file in a file system in memory cannot be read-only to one who may open it so; a sealed memfd(2) can: its pages are
shared by all clones, as the file's would be, and nobody can write to them any more, not even root. It is copied
from the template once for each life of this process, in about the time of a clone, and costs its size again.
"""

from __future__ import annotations

import fcntl
import os
import threading

from multiverse.core.errors import Gone
from multiverse.host.qemu.templates import Template

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SealedMemory:
    """The sealed memory of each template, kept while the template is the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[int, int]] = {}  # by name: its memory file's inode, the descriptor

    def open(self, template: Template) -> int:
        """A descriptor of the caller's own. `Gone` if the template has been dropped."""
        name = template.path.name
        with self._lock:
            try:
                with template.memory.open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    if self._kept.get(name, (0, 0))[0] != inode:
                        self._let_go(name)
                        self._kept[name] = (inode, _sealed_copy(file.fileno()))
            except FileNotFoundError as error:
                raise Gone(f"the template of {template.image} is gone", hint="it is made again on demand") from error
            return fcntl.fcntl(self._kept[name][1], fcntl.F_DUPFD_CLOEXEC, 3)

    def held(self, name: str) -> int:
        """Bytes of memory that its copy takes; 0 if there is none."""
        with self._lock:
            kept = self._kept.get(name)
            return os.fstat(kept[1]).st_blocks * 512 if kept else 0

    def drop(self, name: str) -> None:
        """Let go of it; VMs that map it keep it until they end."""
        with self._lock:
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        if name in self._kept:
            os.close(self._kept.pop(name)[1])


def _sealed_copy(source: int) -> int:
    size = os.fstat(source).st_size
    # Its name ends as the file's does: by that, `process.memory` tells it from what is a VM's own.
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
    """Where data or a hole begins from there on; the file's size if nowhere."""
    try:
        return os.lseek(fd, at, whence)
    except OSError:  # ENXIO: no more data
        return size
