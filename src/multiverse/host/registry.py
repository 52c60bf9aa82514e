"""Which VM of this host has which name, uid, MAC, address and token: an index of the manifests.

The manifests alone are the truth, so nothing can be reserved for a VM that does not exist. To create a VM, a process
holds the host's lock while it reads the index, chooses, and writes the new manifest. So all processes that share the
directory of the VMs agree. A creation holds the lock for about a millisecond.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from multiverse.core.errors import Exhausted, Refused
from multiverse.core.model.identity import serial_of
from multiverse.host import manifest
from multiverse.host.manifest import Manifest
from multiverse.system.locks import locked_file

_LOCK = ".lock"


class Resource(StrEnum):
    """Values that only one VM may have."""

    UID = "uid"
    MAC = "MAC"
    ADDRESS = "address"
    TOKEN = "token"


@contextmanager
def host_lock(vms: Path) -> Iterator[None]:
    """Hold the lock of this host, across threads and processes. `vms` is the directory of its VMs, which exists."""
    with locked_file(vms / _LOCK):
        yield


class VmRegistry:
    """The values of the VMs below `vms`, whichever process or release created them. Its users hold the host's lock. A
    manifest is read once. It is read again while it lacks an address, which a start may add, and if the directory is
    another one; the other values of a VM never change."""

    def __init__(self, vms: Path) -> None:
        self._vms = vms
        self._directories: dict[str, int] = {}  # inodes by name; their manifests are not read again
        self._values: dict[str, dict[Resource, str]] = {}
        self._holders: dict[tuple[Resource, str], str] = {}

    def refresh(self) -> None:
        """Read the changes on disk. Costs a directory listing, and reading the manifests of new VMs."""
        with os.scandir(self._vms) as entries:
            current = {entry.name: entry.inode() for entry in entries}
        for gone in self._values.keys() - current.keys():
            self._remove(gone)
        for name, inode in current.items() - self._directories.items():
            self._remove(name)
            found = manifest.read(self._vms / name) if not name.startswith(".") else None
            if found is not None:
                self._add(name, inode, found)

    def holder(self, resource: Resource, value: str) -> str:
        """The name of the VM that has this value; empty if no VM has it."""
        return self._holders.get((resource, value), "")

    def check_free(self, name: str, wanted: Mapping[Resource, str]) -> None:
        """Raise `Refused` if another VM than `name` has one of the values. Empty values are not checked."""
        for resource, value in wanted.items():
            holder = self.holder(resource, value) if value else ""
            if holder not in ("", name):
                shown = "" if resource is Resource.TOKEN else f" {value}"  # a token is a secret
                what = f"VM {name} cannot have the {resource}{shown}: VM {holder} has it"
                raise Refused(what, hint=f"destroy {holder} first, or specify another {resource}")

    def _add(self, name: str, inode: int, found: Manifest) -> None:
        values = {
            Resource.UID: str(found.uid) if found.uid else "",
            Resource.MAC: found.mac,
            Resource.ADDRESS: found.address,
            Resource.TOKEN: found.token,
        }
        self._values[name] = values
        for key in values.items():
            self._holders.setdefault(key, name)
        if found.address:
            self._directories[name] = inode

    def _remove(self, name: str) -> None:
        self._directories.pop(name, None)
        for key in self._values.pop(name, {}).items():
            if self._holders.get(key) == name:
                del self._holders[key]


@dataclass(frozen=True, slots=True)
class ProcessUser:
    """The user of a QEMU, without a name: a guest that breaks out of its QEMU can reach its own VM only. Its group has
    the same number, and it is a member of the group `readers`, which may read templates."""

    uid: int
    readers: int

    def command_prefix(self, *groups: int) -> list[str]:
        """The start of a command line that runs the rest as this user, without a capability or a way to get one."""
        members = ",".join(str(group) for group in (self.readers, *groups))
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", f"--groups={members}", "--inh-caps=-all",
                "--bounding-set=-all", "--no-new-privs", "--"]  # fmt: skip

    def take_file(self, path: Path, mode: int = 0o600) -> None:
        """Make a file this user's own; an empty one if there is none."""
        path.touch(mode=0o600)
        path.chmod(mode)
        os.chown(path, self.uid, self.uid)

    def allow_traversal(self, directory: Path) -> None:
        """Let this user pass through a directory that stays root's, so that only root can replace the files in it."""
        os.chown(directory, 0, self.uid)
        directory.chmod(0o710)


class UidPool:
    """The users of one host: `count` of them from `first` on. The first owns templates, and is no VM's user. A count of
    0 means that every QEMU runs as the user of this process."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count
        self.template_user = ProcessUser(first, first) if count else None  # that templates are built as

    def check(self) -> None:
        """Raise `Refused` if this process may not run programs as other users."""
        if self._count and os.geteuid() != 0:
            hint = "run it as root, or set qemu.uids = [0, 0] to run every QEMU as the daemon's own user"
            raise Refused("VMs cannot have users of their own: the daemon is not root", hint=hint)

    def user(self, uid: int) -> ProcessUser | None:
        """The user of a VM that has this uid."""
        return ProcessUser(uid, self._first) if uid else None

    def allocate(self, name: str, registry: VmRegistry) -> ProcessUser | None:
        """A user that no other VM has. Hold the host's lock until the manifest is written. Raises `Exhausted`."""
        if not self._count:
            return None
        start = serial_of(name)  # serials never recur, so a uid is used again as late as possible
        for turn in range(self._count - 1):
            uid = self._first + 1 + (start + turn) % (self._count - 1)
            if registry.holder(Resource.UID, str(uid)) in ("", name):
                return self.user(uid)
        raise Exhausted(f"all {self._count - 1} users for VMs are taken", hint="widen qemu.uids")
