"""Users without a name, one for each VM's QEMU: a guest that breaks out of its QEMU owns that VM and nothing else.

Which are taken is on disk alone: `<vms>/.uids/<uid>` is a link to the name of the VM that has it. Making a link is
atomic and fails if there is one, so two creates never get the same, in whatever processes they are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Exhausted, Refused

_TAKEN = ".uids"


@dataclass(frozen=True, slots=True)
class ProcessUser:
    """Whom a QEMU runs as: user and group of the same number, and the group that may read templates."""

    uid: int
    readers: int

    def become(self, *groups: int) -> list[str]:
        """The command line that runs another one as this user, without a capability or a way to get one."""
        member = ",".join(str(group) for group in (self.readers, *groups))
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", f"--groups={member}", "--inh-caps=-all",
                "--bounding-set=-all", "--no-new-privs", "--"]  # fmt: skip

    def give(self, path: Path, mode: int = 0o600) -> None:
        """Make a file this user's own; an empty one if there is none."""
        path.touch(mode=0o600)
        path.chmod(mode)
        os.chown(path, self.uid, self.uid)

    def admit(self, directory: Path) -> None:
        """Let this user go through a directory that stays root's: what root acts on there, nobody else can replace."""
        os.chown(directory, 0, self.uid)
        directory.chmod(0o710)


class UidPool:
    """The users of one host. `first` is also the group that may read templates, and no VM's user."""

    def __init__(self, vms: Path, first: int, count: int) -> None:
        self._vms, self._taken = vms, vms / _TAKEN
        self._first, self._count = first, count

    @property
    def builder(self) -> ProcessUser | None:
        """Whom templates are made by; None where every QEMU runs as the daemon's own user."""
        return ProcessUser(self._first, self._first) if self._count else None

    def check(self) -> None:
        """`Refused` if we may not give users away."""
        if self._count and os.geteuid() != 0:
            raise Refused(
                "VMs cannot have users of their own: the daemon is not root",
                hint="run it as root, or set qemu.uids = [0, 0] to run every QEMU as the daemon's own user",
            )

    def lease(self, name: str) -> ProcessUser | None:
        """A user for that VM, the same as long as it is not released. `Exhausted` if all are taken."""
        if not self._count:
            return None
        self._taken.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._vms.chmod(0o711)  # every QEMU goes through it to its own
        start = int(name.partition("-")[2], 36)  # serials never recur, so a user comes again as late as can be
        for turn in range(self._count - 1):
            uid = self._first + 1 + (start + turn) % (self._count - 1)
            if self._take(self._taken / str(uid), name):
                return ProcessUser(uid, self._first)
        raise Exhausted(f"all {self._count - 1} users for VMs are taken", hint="widen qemu.uids")

    def _take(self, link: Path, name: str) -> bool:
        try:
            link.symlink_to(name)
        except FileExistsError:
            return self._holder(link) == name
        return True

    def release(self, name: str, uid: int = 0) -> None:
        """Give back what that VM has leased; `uid` tells where to look, if it is known. Nothing of it may still run."""
        everywhere = self._taken.iterdir() if self._taken.is_dir() else ()
        for link in [self._taken / str(uid)] if uid else everywhere:
            if self._holder(link) == name:
                link.unlink(missing_ok=True)

    @staticmethod
    def _holder(link: Path) -> str:
        try:
            return str(link.readlink())
        except FileNotFoundError:
            return ""
