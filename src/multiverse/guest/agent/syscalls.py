"""System calls that the standard library does not have. All raise OSError."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)

RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207  # <linux/random.h>
SYS_FINIT_MODULE = 313  # <asm/unistd_64.h>
MNT_DETACH = 2  # <sys/mount.h>
PTRACE_TRACEME, PTRACE_CONT, PTRACE_GETREGS, PTRACE_SETREGS, PTRACE_DETACH = 0, 7, 12, 13, 17  # <linux/ptrace.h>


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    args = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    if _libc.mount(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def unmount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def fallocate(fd: int, size: int) -> None:
    """fallocate(2) of the first `size` bytes. Where the file system cannot, os.posix_fallocate would write them."""
    if _libc.fallocate(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_long(0), ctypes.c_long(size)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "fallocate")


def add_entropy(seed: bytes) -> None:
    """Give random bytes to the kernel and make its generator use them at once (random(4)).

    Adding them alone would leave two clones with identical bytes until the kernel reseeds its generator.
    """
    device = os.open("/dev/random", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(device, RNDRESEEDCRNG)
    finally:
        os.close(device)


def load_module(path: str) -> None:
    """finit_module(2), by number because glibc has no wrapper. A module that is already loaded is no error."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syscall(ctypes.c_long(SYS_FINIT_MODULE), ctypes.c_int(fd), b"", ctypes.c_int(0)) != 0:
            code = ctypes.get_errno()
            if code != errno.EEXIST:
                raise OSError(code, os.strerror(code), path)
    finally:
        os.close(fd)


def ptrace(request: int, pid: int, data: ctypes.Array[ctypes.c_ulong] | None = None) -> None:
    """ptrace(2) with no address."""
    if _libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "ptrace")


def sync_file_system(path: str) -> None:
    """syncfs(2): write back what is not written yet of the file system that `path` is in."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(ctypes.c_int(fd)) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(fd)
