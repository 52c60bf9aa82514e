"""The disks of VMs: how large their files can become, and copies of whole disks."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from pathlib import Path

from multiverse.core.errors import Exhausted
from multiverse.core.model import ImageDisk

_FICLONE = 0x40049409  # ioctl_ficlone(2)
_NO_REFLINK = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM})


_MIB = 1 << 20
_CLUSTER = 64 << 10  # of qcow2, as `qemu-img create` makes it
_GROUP = 128 << 20  # bytes of ext4 that one bitmap of blocks describes
# What a node's daemons write, changes of the image's own files, and clusters of which a guest writes a part: a block of
# 4 KiB takes a whole cluster of the overlay.
_NODE_FILES = 192


def image_disk(size: int) -> ImageDisk:
    """How large the files of VMs can become whose disk has `size` bytes.

    An overlay has tables of 10 bytes for each cluster: 8 in its L2 tables, 2 in its reference counts (QEMU,
    docs/interop/qcow2.txt). ext4 has an inode of 256 bytes for each 16 KiB, and two bitmaps of 4 KiB for each group
    (mke2fs.conf(5), `inode_size` and `inode_ratio`): a user who makes many small files writes all of these, and none of
    them counts as space that is used.
    """
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
    """Make `target` a copy of `source`, by reference where the file system can: then they share all unwritten blocks.

    Returns how: `reflink`, or `copy` where the file system has no reflinks or the two are on different ones. Raises
    `Exhausted` if there is no room; a part of `target` may remain then.
    """
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
