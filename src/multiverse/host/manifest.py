"""The specification of a VM that is to be created, and the manifest of a VM that exists."""

from __future__ import annotations

import errno
import ipaddress
import json
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import Exhausted, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import DiskCost
from multiverse.core.model.vm import VmSpec
from multiverse.system import files
from multiverse.system.processes import ProcessIdentity

_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BRIDGE = re.compile(r"[^\s/]{1,15}")
_SPECIFICATION_HINT = "correct the specification"


@dataclass(frozen=True, slots=True)
class Specification(VmSpec):
    """One VM to create. Its writer chose everything that tells it from other VMs; the host adds uid, tap and directory.
    Callers that know no token or address yet leave them empty: then nothing is checked about them."""

    bridge: str = ""
    job_groups: tuple[str, ...] = ()  # directories of the control groups of the job that it is inside of, if it is
    job_address: str = ""  # with prefix length: a second one that such a VM has in the network of its job
    functions: int = 0  # virtual functions of this host that it has
    function_groups: tuple[int, ...] | None = None  # the IOMMU groups that these may be of; None: any

    @property
    def bare_address(self) -> str:
        return self.address.partition("/")[0]

    def check(self) -> None:
        """Raise `Refused`, naming the field, if a value makes no sense."""
        problem = self._problem()
        if problem:
            raise Refused(f"the specification of VM {self.name!r} is wrong: {problem}", hint=_SPECIFICATION_HINT)

    def _problem(self) -> str:
        if not _MAC.fullmatch(self.mac) or int(self.mac[1], 16) & 1:
            return f"mac: {self.mac!r} is no unicast MAC, six pairs of lower-case hex digits"
        if self.token and not _TOKEN.fullmatch(self.token):
            return "token: 1 to 64 letters, digits, - and _"
        if not _BRIDGE.fullmatch(self.bridge):
            return f"bridge: {self.bridge!r} is no name of an interface"
        if self.size.cpus < 1 or self.size.memory < 1:
            return f"size: {self.size}, at least 1 CPU and 1 MiB"
        if self.kind is CloneKind.AUTO:
            return "kind: a VM is instant, linked or full"
        if self.address:
            try:
                ipaddress.IPv4Interface(self.address)
            except ValueError:
                return f"address: {self.address!r} is no IPv4 address with a prefix length"
        return ""

    @classmethod
    def from_json(cls, text: str | bytes) -> Specification:
        """The specification that is a JSON object with these fields; a size is an object with `cpus`, `memory` and
        `disk` (MiB). Raises `Refused`, naming every wrong field; token, address and bridge too must be there."""
        try:
            raw: Any = json.loads(text)
            unknown = sorted(set(raw) - {one.name for one in fields(cls)}) if isinstance(raw, dict) else []
            if unknown:
                raise Refused(f"unknown fields in a specification: {', '.join(unknown)}", hint=_SPECIFICATION_HINT)
            found = TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg'].lower()}" for each in error.errors()]
            what = f"this is no specification of a VM: {'; '.join(problems)}"
            raise Refused(what, hint=_SPECIFICATION_HINT) from error
        except ValueError as error:
            raise Refused(f"this is not JSON: {error}", hint=_SPECIFICATION_HINT) from error
        empty = [field for field in ("token", "address") if not getattr(found, field)]
        if empty:
            raise Refused(f"the specification of VM {found.name!r} lacks: {', '.join(empty)}", hint=_SPECIFICATION_HINT)
        found.check()
        return found


FILE = "manifest.json"


class VmPhase(StrEnum):
    """How far the creation or the start of a VM has come."""

    CREATING = "creating"
    PARKED = "parked"
    STARTING = "starting"  # its guest may have its identity already
    STARTED = "started"
    INCOMING = "incoming"  # it runs on another host, and is to go on here
    ASLEEP = "asleep"  # its memory is in a file, and something stands in for it; its QEMU has ended, or is to end


@dataclass(frozen=True)
class Moving:
    """A move of a VM to another host, or from it, that has begun and has not ended here."""

    number: int
    secret: str
    # At the host that the VM leaves: where the other one receives it. See `links.MovePeer`.
    address: str = ""
    port: int = 0
    certificate: str = ""
    bridge: str = ""  # that its tap is a port of when it runs
    handed_over: bool = False  # it may run at the other host, and goes on here only if that has no such VM


@dataclass(frozen=True)
class Sleep:
    """The file with the memory of a VM that sleeps, and the process that stands in for it."""

    number: int  # of the sleep, among those of the VM
    size: int = 0  # bytes of the file
    digest: str = ""  # of it: see `saved_files.SavedFile`
    encrypted: bool = False
    backends: tuple[str, ...] = ()  # of plugged memory, by name: the file is read into backends of the same names
    pid: int = 0  # 0: it was not started
    started: int = 0
    boot_id: str = ""

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started, self.boot_id)


@dataclass(frozen=True)
class Manifest:
    """Everything that is needed to find a VM and to remove it, whichever process died meanwhile. The names of the
    fields are those on disk, so they stay from release to release. A manifest is replaced as a whole, before the step
    that it records. It is not synced to disk: it describes processes, which end with the machine. A manifest that
    cannot be read therefore belongs to a VM that is dead."""

    name: str
    kind: CloneKind
    phase: VmPhase
    mac: str
    cpus: int  # before anything was plugged
    memory: int  # MiB, before anything was plugged
    pid: int = 0  # 0: its QEMU was not started, or that was not recorded
    started: int = 0  # start of the process in clock ticks since the boot `boot_id`
    boot_id: str = ""
    uid: int = 0  # 0: its QEMU runs as the user of the process that created it
    address: str = ""  # without prefix length; empty if the VM has none yet
    peers: tuple[str, ...] = ()  # names of the other VMs of its job
    peer_addresses: tuple[str, ...] = ()  # of these VMs, in the same order
    users_added: tuple[int, ...] = ()  # uids of the users that were added to its guest after the start
    total_cpus: int = 0  # with plugged CPUs; 0: nothing was plugged
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
    image: str = ""  # empty: written by a release that did not record it
    frozen: bool = False  # the processes of its job are stopped
    freezing: bool = False  # they were to be stopped, and nothing tells whether they are
    checkpoint: str = ""  # the saved VM that is being made of it while its job goes on
    saved: str = ""  # the saved VM that it was restored from
    uncut: bool = False  # that was a checkpoint: its job was not cut off yet from the run that was lost
    kept: str = ""  # it is stopped, and kept in memory as the saved VM of that name: it is no VM until it is restored
    group: int = 0  # of VMs that reach each other, as of its start or its user; 0: it reaches its peers alone
    moving: Moving | None = None
    cpu: str = ""  # QEMU's CPU model; empty: written by a release that did not record it
    most: Size | None = None  # up to which it can be plugged; None: written by a release that did not record it
    sleep: Sleep | None = None  # of a VM that is asleep, or is about to be
    told: bool | None = None  # whether its job runs, as its guest was told last after that sleep; None: nothing
    slept: int = 0  # the number of its last sleep that has ended: neither that one nor an earlier one is begun again
    moved: int = 0  # the number of its last move that has ended: neither that one nor an earlier one is begun again

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started, self.boot_id)

    @property
    def handed_over(self) -> bool:
        """Whether it may run on another host by now."""
        return self.moving is not None and self.moving.handed_over

    @property
    def on_network(self) -> bool:
        """Whether the VM, or what stands in for it, may have sent frames as its address, or is about to."""
        on = (VmPhase.STARTING, VmPhase.STARTED, VmPhase.INCOMING, VmPhase.ASLEEP)
        return self.phase in on and bool(self.address)


_ADAPTER = TypeAdapter(Manifest)


def write(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest in `directory`. After `Exhausted` the old one is unchanged."""
    try:
        files.replace(directory / FILE, json.dumps(asdict(manifest)))
    except OSError as error:
        what = f"cannot write the manifest of VM {manifest.name}: {error}"
        raise Exhausted(what, hint=f"is there room in {directory}?") from error


def read(directory: Path) -> Manifest | None:
    """The manifest in `directory`; None if there is none that can be read. Fields of a later release are ignored."""
    try:
        return _ADAPTER.validate_json((directory / FILE).read_bytes())
    except (OSError, ValueError):
        return None


def refuse_moving(known: Manifest | None) -> None:
    """Raise `Refused` if a VM is moving."""
    if known is not None and known.moving is not None:
        raise Refused(f"VM {known.name} is moving to another host", hint="ask again when it has moved")


def refuse_other(known: Manifest | None, token: str) -> None:
    """Raise `Refused` if a VM has another token, as after a restore of an old database. An empty token matches any."""
    if known is not None and token and known.token != token:
        hint = f"a controller with another database made it; if nobody needs it, end process {known.pid}"
        raise Refused(f"{known.name} is another VM: it has another token", hint=hint)


# --- VMs that were received ---------------------------------------------------------------------------

RECEIVED = ".received-"  # at the beginning of the name of a file beside the VMs' directories
_KEPT = 30 * 86400.0  # seconds: longer than a host waits for another one that has its VM


@dataclass(frozen=True)
class Received:
    """A VM that this host took over from another one. This outlives the VM, and a loss of power: the other host asks,
    perhaps much later, whether it may let the VM go on, and would run it a second time."""

    token: str
    move: int


_RECEIVED_ADAPTER = TypeAdapter(Received)


def write_received(vms: Path, name: str, received: Received) -> None:
    """Record it durably. Raises OSError; then it may be recorded all the same."""
    files.create_whole(vms / f"{RECEIVED}{name}", json.dumps(asdict(received)).encode())


def read_received(vms: Path, name: str) -> Received | None:
    """What was recorded last about the VM of that name. Raises OSError if that cannot be read."""
    try:
        return _RECEIVED_ADAPTER.validate_json((vms / f"{RECEIVED}{name}").read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OSError(errno.EIO, str(error), f"{RECEIVED}{name}") from error


def forget_received(vms: Path, name: str) -> None:
    """The other host has nothing of the VM any more."""
    (vms / f"{RECEIVED}{name}").unlink(missing_ok=True)


def forget_old_received(vms: Path) -> None:
    for path in vms.glob(f"{RECEIVED}*"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _KEPT:
                path.unlink()
