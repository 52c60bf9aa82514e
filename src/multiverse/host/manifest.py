"""What is on disk about each VM: all that is needed to find it and to remove it, whatever died meanwhile.

A manifest is replaced whole and before each step it speaks of. It is not synced: it describes processes,
and no machine crash leaves those. One that cannot be read therefore stands for a VM that is dead.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from multiverse.core.errors import Exhausted
from multiverse.core.model import CloneKind

FILE = "manifest.json"


class Phase(StrEnum):
    """How far a VM has come."""

    MAKING = "making"
    PARKED = "parked"
    STARTING = "starting"  # it may know who it is
    STARTED = "started"


@dataclass(frozen=True)
class Manifest:
    """`pid` 0: its QEMU was not started yet, or this was not written down. `cpus` and `memory` as booted, in MiB.

    `uid` 0: its QEMU runs as the daemon's own user.
    """

    name: str
    kind: CloneKind
    phase: Phase
    mac: str
    cpus: int
    memory: int
    pid: int = 0
    started: int = 0  # the process's start, in clock ticks since the machine's boot
    boot_id: str = ""
    uid: int = 0
    address: str = ""  # what it may speak as on the bridge, and with which other VMs; none before it is someone
    peers: tuple[str, ...] = ()
    introduced: tuple[int, ...] = ()  # users that its guest was told of after its start


def write(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in `directory`. After `Exhausted` the old one stands."""
    fresh = directory / f"{FILE}.new"
    try:
        fresh.touch(mode=0o600)
        fresh.write_text(json.dumps(asdict(manifest)))
        fresh.rename(directory / FILE)
    except OSError as error:
        raise Exhausted(
            f"cannot write down how far VM {manifest.name} is: {error}", hint=f"is there room in {directory}?"
        ) from error


def read(directory: Path) -> Manifest | None:
    """The manifest in `directory`; None if there is none that can be read."""
    try:
        raw = json.loads((directory / FILE).read_text())
        raw["kind"], raw["phase"] = CloneKind(raw["kind"]), Phase(raw["phase"])
        raw["peers"] = tuple(raw.get("peers", ()))
        raw["introduced"] = tuple(raw.get("introduced", ()))
        return Manifest(**raw)
    except (OSError, ValueError, TypeError, KeyError):
        return None


@contextmanager
def locked(directory: Path, *, make: bool) -> Iterator[bool]:
    """Hold a VM's lock, across threads and processes. Gives False, without a lock, if there is no such directory.

    The lock is on the directory itself, so it goes with it; one that was removed while we waited is tried again.
    """
    while True:
        if make:
            directory.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if make:
                continue
            yield False
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(fd), directory.stat())
            except FileNotFoundError:
                same = False
            if same:
                yield True
                return
        finally:
            os.close(fd)
