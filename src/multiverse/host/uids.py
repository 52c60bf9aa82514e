"""Users without a name, one for each VM's QEMU: a guest that breaks out of its QEMU can reach its own VM only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Exhausted, Refused
from multiverse.core.model import serial_of
from multiverse.host.registry import Resource, VmRegistry


@dataclass(frozen=True, slots=True)
class ProcessUser:
    """The user that a QEMU runs as: user and group of the same number, and a member of the group `readers`, which may
    read templates."""

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
    """The users of one host: `count` of them from `first` on. The first owns templates, and is no VM's user. A count
    of 0 means that every QEMU runs as the user of this process."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    @property
    def template_user(self) -> ProcessUser | None:
        """The user that templates are built as; None if every QEMU runs as the user of this process."""
        return ProcessUser(self._first, self._first) if self._count else None

    def check(self) -> None:
        """Raise `Refused` if this process may not run programs as other users."""
        if self._count and os.geteuid() != 0:
            raise Refused(
                "VMs cannot have users of their own: the daemon is not root",
                hint="run it as root, or set qemu.uids = [0, 0] to run every QEMU as the daemon's own user",
            )

    def allocate(self, name: str, registry: VmRegistry) -> ProcessUser | None:
        """A user that no other VM has. The caller holds the host's lock until the VM's manifest is written. Raises
        `Exhausted` if all users are taken."""
        if not self._count:
            return None
        start = serial_of(name)  # serials never recur, so a uid is used again as late as possible
        for turn in range(self._count - 1):
            uid = self._first + 1 + (start + turn) % (self._count - 1)
            if registry.holder(Resource.UID, str(uid)) in ("", name):
                return ProcessUser(uid, self._first)
        raise Exhausted(f"all {self._count - 1} users for VMs are taken", hint="widen qemu.uids")
