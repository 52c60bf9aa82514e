"""What a lease has in the file system of its node: a directory, named after it, below `agent.leases`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from multiverse.core.errors import Exhausted, Refused
from multiverse.host import path_security
from multiverse.system import files
from multiverse.system.locks import locked_directory, try_lock
from multiverse.system.processes import ProcessIdentity

_SLOTS = ".slots"
SLOTS = 16
"""Leases that one node can have at the same time: each has as large a part of `qemu.uids`."""

NODE_SHARE = SLOTS
"""The part of `qemu.uids` that no lease has: it is for VMs inside jobs."""


@dataclass(frozen=True, slots=True)
class PilotRecord:
    """What the sweep needs to know of a pilot: its scheduler's job, its first process as the node sees it, and the
    control groups that it has made."""

    job: str
    pid: int
    started: int
    boot_id: str
    groups: tuple[str, ...] = ()

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started, self.boot_id)


@dataclass(frozen=True, slots=True)
class LeaseDirectory:
    """The directory of one lease. `vms` has its VMs' disks, `socket` is its agent's, as the whole node sees it."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def socket(self) -> Path:
        return self.root / "agent.sock"

    @property
    def vms(self) -> Path:
        return self.root / "vms"

    @property
    def state(self) -> Path:
        return self.root / "agent"

    @property
    def lock(self) -> Path:
        """Held by the processes of the pilot for as long as one of them lives."""
        return self.root / "lock"

    def make(self) -> None:
        """Make the directories; what is there of an earlier pilot of this name has been removed. The users of QEMU pass
        through those above the VMs', and nobody else may write anywhere. Raises `Refused` as `path_security` does."""
        path_security.make_directory(self.root.parent, 0o711)
        for path, mode in ((self.root, 0o711), (self.vms, 0o711), (self.state, 0o700)):
            path_security.make_directory(path, mode)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Make the directories and hold the lock, which processes that are started meanwhile inherit; gives False if
        another pilot of this name holds it. From the first moment on no sweep takes it for what an earlier one left."""
        path_security.make_directory(self.root.parent, 0o711)
        with locked_directory(self.root, create=True):
            self.make()
            lock = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            ours = try_lock(lock)
        try:
            yield ours
        finally:
            os.close(lock)

    @contextmanager
    def incoming(self, image: str, owner: int) -> Iterator[Path]:
        """Where sbcast(1), which writes as the user `owner`, may bring the archive of an image meanwhile."""
        directory = self.root / "incoming"
        directory.mkdir(mode=0o700, exist_ok=True)
        os.chown(directory, owner, -1)
        file = directory / f"{image}.tar"
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)

    def record(self, known: PilotRecord) -> None:
        """Write down what the sweep needs."""
        files.replace(self._record, json.dumps(asdict(known)), mode=0o600)

    def recorded(self) -> PilotRecord | None:
        """What was written down; None if nothing was, or not completely."""
        try:
            raw = json.loads(self._record.read_text())
            return PilotRecord(**(raw | {"groups": tuple(raw["groups"])}))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @property
    def _record(self) -> Path:
        return self.root / "pilot.json"


def directory_of(leases: Path, name: str) -> LeaseDirectory:
    """The place of a lease. Raises `Refused` for what is no name of a lease: it names a directory."""
    plain = name.replace("-", "").isalnum() and name.isascii() and not name.startswith("-")
    if not plain or len(name) > 40:
        raise Refused(f"{name!r} is no name of a lease", hint="the controller names them: lease-SITE-NUMBER")
    return LeaseDirectory(leases / name)


def lease_directories(leases: Path) -> list[LeaseDirectory]:
    """The places of all leases of which something is on this node."""
    if not leases.is_dir():
        return []
    return [
        LeaseDirectory(path) for path in sorted(leases.iterdir()) if path.is_dir() and not path.name.startswith(".")
    ]


@contextmanager
def slot(leases: Path) -> Iterator[int]:
    """Hold a number below `SLOTS` that no other lease of this node holds. Raises `Exhausted` if there is none."""
    directory = leases / _SLOTS
    path_security.make_directory(directory, 0o700)
    for number in range(SLOTS):
        fd = os.open(directory / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(fd):
                yield number
                return
        finally:
            os.close(fd)
    raise Exhausted(f"this node has {SLOTS} leases", hint="lease larger parts of a node: cpus under [[lease]]")


def share_of(uids: tuple[int, int], number: int) -> tuple[int, int]:
    """The users of QEMUs of the lease that holds this slot, or of `NODE_SHARE`, as (first, count). With a count of 0
    none has its own."""
    first, count = uids
    share = count // (SLOTS + 1)
    return first + number * share, share


def group_paths(record: PilotRecord) -> Sequence[Path]:
    """The control groups of a pilot."""
    return [Path(path) for path in record.groups]
