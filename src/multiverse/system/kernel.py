"""Calls to the kernel that Python 3.11 lacks: namespaces (namespaces(7)), mounts (mount(2)), and the exchange of two
names (renameat2(2)). All raise OSError."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# <linux/sched.h>
CLONE_FS, CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x200, 0x20000, 0x2000000, 0x4000000
CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x8000000, 0x20000000, 0x40000000

# <sys/mount.h>
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_MOVE, MS_REC, MS_PRIVATE, MNT_DETACH = 8192, 16384, 1 << 18, 2

_AT_FDCWD = -100  # <fcntl.h>
_RENAME_EXCHANGE = 2  # <linux/fs.h>
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]


def unshare(flags: int) -> None:
    """Move this thread into new namespaces; of a new PID namespace only its children are members."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Move this thread into namespaces: that of a file in /proc/PID/ns, or those of a pidfd's process (setns(2))."""
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str | None, target: Path, flags: int, kind: str | None = None, options: str | None = None) -> None:
    """mount(2)."""
    arguments = [None if value is None else os.fsencode(value) for value in (source, kind, options)]
    _check(_libc.mount(arguments[0], os.fsencode(target), arguments[1], flags, arguments[2]), source or str(target))


def umount(path: str) -> None:
    """Take a mount out of sight. It ends when nothing uses it any more."""
    _check(_libc.umount2(os.fsencode(path), MNT_DETACH), path)


def pivot_root() -> None:
    """Make the working directory the root. The old root is mounted over it."""
    _check(_libc.pivot_root(b".", b"."), "pivot_root")


def die_with_parent() -> None:
    """Be killed when the thread that has started this process ends (prctl(2), PR_SET_PDEATHSIG)."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(9), *map(ctypes.c_ulong, (0, 0, 0))), "prctl")


def exchange(one: Path, other: Path) -> None:
    """Give two files or directories each other's name, at once. NFS and a few other file systems answer EINVAL."""
    names = os.fsencode(one), os.fsencode(other)
    _check(_libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE), f"{one}, {other}")


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
