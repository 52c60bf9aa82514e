"""What QEMU and its guest print. Both are bounded, whoever runs and whatever the guest does.

A contained QEMU writes its log and the guest's console to files in a small file system in memory, which ends with it
(`host/namespaces`). This process copies them to the VM's directory whenever it measures the VM, and once more when the
VM has died. The files on disk are root's: QEMU cannot write to them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from multiverse.host import namespaces
from multiverse.host.namespaces import OUTPUT_ROOM
from multiverse.system import files
from multiverse.system.processes import ProcessIdentity

_FULL = OUTPUT_ROOM // 4
"""Bytes after which a file is begun anew. The copy of the old one is kept as `<name>.old` until the next time."""


class GuestOutput:
    """The log and the console of one contained QEMU. `opened` are descriptors, by the path of each copy."""

    def __init__(self, opened: Mapping[Path, int]) -> None:
        self._opened = dict(opened)
        self._saved: dict[Path, tuple[int, int]] = {}

    @classmethod
    def of(cls, process: ProcessIdentity, outputs: Sequence[Path]) -> GuestOutput | None:
        """The output of a QEMU that another process started. None if it has ended, or is not contained."""
        found = {path: namespaces.open_inside(process, path, os.O_RDWR) for path in outputs}
        opened = {path: fd for path, fd in found.items() if fd is not None}
        return cls(opened) if opened else None

    def save(self) -> None:
        """Copy what has changed. A disk that is full is no error: the next call tries again."""
        for path, fd in self._opened.items():
            found = os.fstat(fd)
            stamp = (found.st_size, found.st_mtime_ns)
            if stamp == self._saved.get(path):
                continue
            content = os.pread(fd, OUTPUT_ROOM, 0)  # a QEMU that was taken over can make its file appear of any size
            with suppress(OSError):
                files.replace(path, content)
                self._saved[path] = stamp
                if found.st_size > _FULL:
                    path.replace(path.with_name(f"{path.name}.old"))
                    os.ftruncate(fd, 0)

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1])


class OutputStore:
    """The outputs of this host's VMs, by name. They are found again after a restart of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs: dict[str, GuestOutput] = {}

    def keep(self, name: str, output: GuestOutput | None) -> None:
        """Keep the output of a VM that was launched."""
        with self._lock:
            self._drop(name)
            if output is not None:
                self._outputs[name] = output

    def save(self, name: str, process: ProcessIdentity, outputs: Sequence[Path]) -> None:
        """Copy what a VM has printed. Nothing is written to the directory of a VM after `drop`, if its QEMU was ended
        before."""
        with self._lock:
            output = self._outputs.get(name) or GuestOutput.of(process, outputs)
            if output is None:
                return
            self._outputs[name] = output
            output.save()

    def finish(self, name: str) -> None:
        """Copy the last of what a VM has printed, whose QEMU has ended."""
        with self._lock:
            if name in self._outputs:
                self._outputs[name].save()
                self._drop(name)

    def drop(self, name: str) -> None:
        """The VM is being removed, and its QEMU has ended."""
        with self._lock:
            self._drop(name)

    def close(self) -> None:
        with self._lock:
            for name in list(self._outputs):
                self._drop(name)

    def _drop(self, name: str) -> None:
        output = self._outputs.pop(name, None)
        if output is not None:
            output.close()
