"""What users may write to the guest's disk: all other free space belongs to a file of root's.

The host lets the files of this VM grow to the allowance and what the file system itself needs. A user who writes more
is told so by the file system, at once, and not by errors of the disk when the data is written back.
"""

# ruff: noqa: PTH110, PTH116

from __future__ import annotations

import os

from multiverse.guest.agent.contract import DISK
from multiverse.guest.agent.syscalls import fallocate

RESERVE = "/.multiverse-reserve"
NODE_FILES = 64 << 20  # bytes beside the allowance, for what the daemons write: logs, scripts of jobs

_allowance = 0  # MiB; 0: nothing is reserved


def reserve_disk(options: list[str]) -> None:
    """Reserve the free space beyond the allowance that the kernel's command line gives, if it gives one.

    The blocks of the file are allocated and never written (fallocate(2)), so they take no space on the host. A disk
    that has less free space than the allowance is left as it is. Raises OSError.
    """
    global _allowance
    for option in options:
        if option.startswith(DISK):
            _allowance = int(option[len(DISK) :])
    if not _allowance:
        return
    disk = os.statvfs("/")
    size = disk.f_bavail * disk.f_frsize - (_allowance << 20) - NODE_FILES
    if size > 0:
        fd = os.open(RESERVE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fallocate(fd, size)
        finally:
            os.close(fd)


def set_allowance(allowance: int) -> None:
    """Free as much of the reserved space as users may write more than was said at boot. Raises OSError."""
    global _allowance
    if 0 < _allowance < allowance:
        if os.path.exists(RESERVE):
            size = os.stat(RESERVE).st_size
            os.truncate(RESERVE, max(0, size - (allowance - _allowance << 20)))
        _allowance = allowance
