"""The disks of VMs: how large their files can become, copies of whole disks, and guests on a full disk."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from multiverse.core.errors import Exhausted, MultiverseError
from multiverse.core.model.host import ImageDisk
from multiverse.host.qemu.channels import Monitor
from multiverse.host.qemu.session import Paths

log = structlog.get_logger(__name__)

_FICLONE = 0x40049409  # ioctl_ficlone(2)
_NO_REFLINK = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM})


_MIB = 1 << 20
_CLUSTER = 64 << 10  # of qcow2, as `qemu-img create` makes it
_GROUP = 128 << 20  # bytes of ext4 that one bitmap of blocks describes
# What a node's daemons write, changes of the image's own files, and clusters that a guest writes in part: a block
# of 4 KiB takes a whole cluster of the overlay.
_NODE_FILES = 192


def image_disk(size: int) -> ImageDisk:
    """How large the files of VMs can become whose disk has `size` bytes. An overlay has tables of 10 bytes for each
    cluster: 8 in its L2 tables, 2 in its reference counts (QEMU, docs/interop/qcow2.txt). ext4 has an inode of 256
    bytes for each 16 KiB, and two bitmaps of 4 KiB for each group (mke2fs.conf(5), `inode_size` and `inode_ratio`): a
    user who makes many small files writes all of these, and none of them counts as space that is used."""
    tables = -(-size // _CLUSTER) * 10
    inodes = size // 16384 * 256 + -(-size // _GROUP) * 8192
    return ImageDisk(-(-(size + tables) // _MIB) + 1, -(-(tables + inodes) // _MIB) + _NODE_FILES)


def virtual_size(disk: Path) -> int:
    """Bytes of the disk that a guest sees, whose file is raw or qcow2; 0 if there is no such file."""
    try:
        with disk.open("rb") as file:
            head = file.read(32)
            return int.from_bytes(head[24:32]) if head[:4] == b"QFI\xfb" else file.seek(0, os.SEEK_END)
    except OSError:
        return 0


def copy_disk(source: Path, target: Path) -> str:
    """Make `target` a copy of `source`. Returns how: `reflink`, so that they share unwritten blocks, or `copy` where
    the file system cannot do that. Raises `Exhausted` if there is no room; a part of `target` may remain then."""
    try:
        with source.open("rb") as old, target.open("wb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        return "reflink"
    except OSError as error:
        if error.errno not in _NO_REFLINK:
            raise _failed(source, str(error)) from error
    argv = ["cp", "--reflink=never", "--sparse=always", "--", str(source), str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise _failed(source, done.stderr.strip()[-200:])
    return "copy"


def _failed(source: Path, reason: str) -> Exhausted:
    return Exhausted(f"cannot copy the disk {source}: {reason}", hint="is the disk full?")


OUT_OF_ROOM = "io-error"  # the status of a guest that QEMU has paused for that
REASON = "it is paused, because the disk of its host is full"

_SHORT = 1 << 30  # bytes below which a disk may have been full a moment ago
_ROOM = 64 << 20  # bytes with which guests are resumed; with less they would be paused again at once
_AGAIN = 60.0  # seconds until a guest is asked again that was not paused, while the disk has room
_TIMEOUT = 1.0  # seconds for an answer; somebody else may be connected to the monitor


class PausedGuests:
    """The guests of one host that are known to be paused because its disk is full, by name. `directory` is on the file
    system of their disks; `paths` gives the files of a VM.

    QEMU pauses a guest whose write found no room (`werror=enospc`) and keeps the request; `cont` repeats it. So no
    guest sees an error. QEMU tells only its monitor's connection, so it is asked. A paused guest uses no CPU time: only
    guests that used none since their last measurement are asked, and at most once a minute while the disk has room.
    """

    def __init__(self, directory: Path, paths: Callable[[str], Paths]) -> None:
        self._directory, self._paths = directory, paths
        self._paused: set[str] = set()
        self._asked: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._paused

    def ask(self, name: str) -> None:
        """Ask a guest that has been started, and used no CPU time lately, whether it is paused."""
        now = time.monotonic()
        if name in self._paused or (
            now - self._asked.get(name, -_AGAIN) < _AGAIN and available_disk(self._directory) >= _SHORT
        ):
            return
        self._asked[name] = now
        if self._execute(name, "query-status") == OUT_OF_ROOM:
            self._paused.add(name)
            log.warning("guest paused", vm=name, reason="the disk of its host is full")

    def resume(self) -> None:
        """Let the paused guests go on, if the disk has room again. One that ends meanwhile is no error."""
        if not self._paused or available_disk(self._directory) < _ROOM:
            return
        for name in sorted(self._paused):
            if self._execute(name, "cont") is not None:
                self._paused.discard(name)
                log.info("guest resumed", vm=name)

    def keep_only(self, names: Collection[str]) -> None:
        self._paused.intersection_update(names)
        for gone in self._asked.keys() - names:
            del self._asked[gone]

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
