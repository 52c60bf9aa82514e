"""Guests that QEMU has paused because the host's disk is full, and their resumption.

QEMU pauses a guest whose write found no room (`werror=enospc`) and keeps the request; `cont` repeats it. No guest sees
an error then, and one that finds no room again is paused again. QEMU says so only to whoever is connected to its
monitor, so it is asked. A paused guest uses no CPU time: only guests that used none since they were measured last are
asked, and while the disk has room each of them at most once a minute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from multiverse.core.errors import MultiverseError
from multiverse.host.qemu.qmp import Monitor
from multiverse.host.qemu.session import Paths

log = structlog.get_logger(__name__)

REASON = "it is paused, because the disk of its host is full"

_SHORT = 1 << 30  # bytes below which a disk may have been full a moment ago
_ROOM = 64 << 20  # bytes with which guests are resumed; with less they would be paused again at once
_AGAIN = 60.0  # seconds until a guest is asked again that was not paused, while the disk has room
_TIMEOUT = 1.0  # seconds for an answer; somebody else may be connected to the monitor


class PausedGuests:
    """The guests of one host that are known to be paused, by name. `directory` is on the file system of their disks;
    `paths` gives the files of a VM."""

    def __init__(self, directory: Path, paths: Callable[[str], Paths]) -> None:
        self._directory, self._paths = directory, paths
        self._paused: set[str] = set()
        self._asked: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._paused

    def ask(self, name: str) -> None:
        """Ask a guest that has been started, and used no CPU time lately, whether it is paused."""
        now = time.monotonic()
        if name in self._paused or (now - self._asked.get(name, -_AGAIN) < _AGAIN and self._available() >= _SHORT):
            return
        self._asked[name] = now
        if self._execute(name, "query-status") == "io-error":
            self._paused.add(name)
            log.warning("guest paused", vm=name, reason="the disk of its host is full")

    def resume(self) -> None:
        """Let the paused guests go on, if the disk has room again. One that ends meanwhile is no error."""
        if not self._paused or self._available() < _ROOM:
            return
        for name in sorted(self._paused):
            if self._execute(name, "cont") is not None:
                self._paused.discard(name)
                log.info("guest resumed", vm=name)

    def keep_only(self, names: Collection[str]) -> None:
        """Forget all guests but these."""
        self._paused.intersection_update(names)
        for gone in self._asked.keys() - names:
            del self._asked[gone]

    def _available(self) -> int:
        return available_disk(self._directory)

    def _execute(self, name: str, command: str) -> str | None:
        """The status of the guest after that command. None if its QEMU does not answer."""
        try:
            with Monitor.connect(self._paths(name).monitor, _TIMEOUT) as monitor:
                status = monitor.execute_all([(command, {}), ("query-status", {})])[-1]
        except MultiverseError:
            return None
        return str(status.get("status"))


def available_disk(directory: Path) -> int:
    """Bytes that a user other than root can write to a directory's file system; 0 if there is no such directory."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
