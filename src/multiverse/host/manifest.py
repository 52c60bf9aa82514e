"""The manifest of a VM: all that is needed to find the VM and to remove it, whichever process died meanwhile.

A manifest is replaced as a whole, before the step that it records. It is not synced to disk: it describes processes,
which end with the machine. A manifest that cannot be read therefore belongs to a VM that is dead.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from multiverse.core.errors import Exhausted, Refused
from multiverse.core.model import CloneKind, DiskCost
from multiverse.system import files
from multiverse.system.locks import locked_directory
from multiverse.system.processes import ProcessIdentity

FILE = "manifest.json"


class VmPhase(StrEnum):
    """How far the creation or the start of a VM has come."""

    CREATING = "creating"
    PARKED = "parked"
    STARTING = "starting"  # its guest may have its identity already
    STARTED = "started"


@dataclass(frozen=True)
class Manifest:
    """One VM. The names of the fields are those on disk, so they stay from release to release.

    `cpus` and `memory` (MiB) are what the VM had before anything was plugged. A `pid` of 0 says that its QEMU was not
    started, or that this was not recorded; `started` is the process's start in clock ticks since the boot `boot_id`. A
    `uid` of 0 says that its QEMU runs as the user of the process that created it.
    """

    name: str
    kind: CloneKind
    phase: VmPhase
    mac: str
    cpus: int
    memory: int
    pid: int = 0
    started: int = 0
    boot_id: str = ""
    uid: int = 0
    address: str = ""  # without prefix length; empty if the VM has none yet
    peers: tuple[str, ...] = ()  # names of the other VMs of its job
    peer_addresses: tuple[str, ...] = ()  # of these VMs, in the same order
    users_added: tuple[int, ...] = ()  # uids of the users that were added to its guest after the start
    total_cpus: int = 0  # with what was plugged; 0: nothing was
    total_memory: int = 0  # MiB, like `total_cpus`
    huge_memory: int = 0  # MiB of it in huge pages, which are taken whether or not the guest uses them
    token: str = ""
    disk_cost: DiskCost = DiskCost()
    job_groups: tuple[str, ...] = ()  # control groups of the job that the VM is inside of
    job_address: str = ""  # without prefix length: a second one, in the network of that job
    disk: int = 0  # MiB that its files can grow to now
    # The NUMA node that it is kept on; -1: on none of them, None: no node was chosen, as on a machine with one node.
    numa: int | None = None
    template_build: str = ""  # of an instant clone: which build of its template it maps
    net: int = 0  # Mbit/s that it may send, and may receive; 0: any
    group: int = 0  # of VMs that reach each other, with which it was started or given to a user; 0: its peers alone

    @property
    def process(self) -> ProcessIdentity:
        """The VM's QEMU."""
        return ProcessIdentity(self.pid, self.started, self.boot_id)

    @property
    def on_network(self) -> bool:
        """Whether the VM may have sent frames as its address."""
        return self.phase in (VmPhase.STARTING, VmPhase.STARTED) and bool(self.address)


_ADAPTER = TypeAdapter(Manifest)


def write(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in `directory`. After `Exhausted` the old one is unchanged."""
    try:
        files.replace(directory / FILE, json.dumps(asdict(manifest)))
    except OSError as error:
        raise Exhausted(
            f"cannot write the manifest of VM {manifest.name}: {error}", hint=f"is there room in {directory}?"
        ) from error


def read(directory: Path) -> Manifest | None:
    """The manifest in `directory`; None if there is none that can be read. Fields of a later release are ignored."""
    try:
        return _ADAPTER.validate_json((directory / FILE).read_bytes())
    except (OSError, ValueError):
        return None


def refuse_other(known: Manifest | None, token: str) -> None:
    """Raise `Refused` if a VM has another token than `token`: then it is another VM, as of a database that was restored
    from a copy. An empty token matches any."""
    if known is not None and token and known.token != token:
        hint = f"a controller with another database made it; if nobody needs it, end process {known.pid}"
        raise Refused(f"{known.name} is another VM: it has another token", hint=hint)


def locked(directory: Path, *, create: bool) -> AbstractContextManager[bool]:
    """Hold the lock of the VM in `directory`. Gives False, without a lock, if there is no such directory."""
    return locked_directory(directory, create=create)
