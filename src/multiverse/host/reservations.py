"""Which VM of this host has which uid, MAC, address and token.

Each reservation is a symbolic link below the directory of the VMs, for example `.macs/02:00:00:00:00:07` -> `mva-7`.
Looking one up costs the same for one VM as for a thousand. All processes that share the directory see the same
reservations; they change them under the host's lock (`host_lock`), which is held for the allocation only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from multiverse.core.errors import Refused
from multiverse.host import manifest
from multiverse.system.locks import locked_file

_LOCK = ".lock"


class Resource(StrEnum):
    """What one VM only may have, by the name of the directory that holds its reservations."""

    UID = ".uids"
    MAC = ".macs"
    ADDRESS = ".addresses"
    TOKEN = ".tokens"


_LABELS = {Resource.UID: "uid", Resource.MAC: "MAC", Resource.ADDRESS: "address", Resource.TOKEN: "token"}


@contextmanager
def host_lock(vms: Path) -> Iterator[None]:
    """Hold the lock of this host, across threads and processes. `vms` is the directory of its VMs, which exists."""
    with locked_file(vms / _LOCK):
        yield


class Reservations:
    """The reservations of all VMs below `vms`. Callers of `claim` and `try_claim` hold the host's lock."""

    def __init__(self, vms: Path) -> None:
        self._vms = vms

    def holder(self, resource: Resource, value: str) -> str:
        """The name of the VM that has it; empty if none has. A VM without a directory does not exist."""
        try:
            name = str((self._vms / resource / value).readlink())
        except FileNotFoundError:
            return ""
        return name if (self._vms / name).exists() else ""

    def claim(self, name: str, wanted: Mapping[Resource, str]) -> None:
        """Reserve all of `wanted` for that VM, or nothing: `Refused` names the first one that another VM has.

        What the VM has already stays its own. Empty values are not reserved.
        """
        values = {resource: value for resource, value in wanted.items() if value}
        for resource, value in values.items():
            if (holder := self.holder(resource, value)) not in ("", name):
                shown = "" if resource is Resource.TOKEN else f" {value}"  # a token is a secret
                raise Refused(
                    f"VM {name} cannot have the {_LABELS[resource]}{shown}: VM {holder} has it",
                    hint=f"destroy {holder} first, or specify another {_LABELS[resource]}",
                )
        for resource, value in values.items():
            self.try_claim(name, resource, value)

    def try_claim(self, name: str, resource: Resource, value: str) -> bool:
        """Reserve one value for that VM; False if another VM has it."""
        link = self._vms / resource / value
        while True:
            try:
                link.symlink_to(name)
            except FileNotFoundError:
                link.parent.mkdir(mode=0o700, exist_ok=True)
            except FileExistsError:
                if (holder := self.holder(resource, value)) != "":
                    return holder == name
                link.unlink(missing_ok=True)  # its VM was removed by other means than ours
            else:
                return True

    def release(self, name: str, resource: Resource, value: str = "") -> None:
        """Release what that VM has of a resource. Its `value`, if it is known, saves a search. Absent is success."""
        directory = self._vms / resource
        everything = directory.iterdir() if directory.is_dir() else ()
        for link in [directory / value] if value else everything:
            try:
                if str(link.readlink()) == name:
                    link.unlink(missing_ok=True)
            except FileNotFoundError:
                continue

    def import_manifests(self) -> None:
        """Reserve what the existing VMs have: a release without these reservations may have created some of them."""
        if not self._vms.is_dir():
            return
        with host_lock(self._vms):
            for home in sorted(self._vms.glob("[!.]*")):
                found = manifest.read(home)
                if found is not None:
                    for resource, value in reserved_by(found).items():
                        self.try_claim(found.name, resource, value)


def reserved_by(known: manifest.Manifest) -> dict[Resource, str]:
    """What the VM of that manifest has reserved, by its manifest."""
    values = {Resource.UID: str(known.uid) if known.uid else "", Resource.MAC: known.mac,
              Resource.ADDRESS: known.address, Resource.TOKEN: known.token}  # fmt: skip
    return {resource: value for resource, value in values.items() if value}
