"""Calls to the kernel that Python 3.11 lacks. All raise OSError, but for those of the clock."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    """Move this thread into the namespace of a file in /proc/PID/ns, or of a pidfd's process (setns(2))."""
    _check(_libc.setns(fd, flags), "setns")


@contextmanager
def in_network(namespace: int | None) -> Iterator[None]:
    """This thread is in that network namespace (a descriptor) meanwhile; None: where it is. A socket that it makes
    stays there."""
    if namespace is None:
        yield
        return
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(namespace, CLONE_NEWNET)
        try:
            yield
        finally:
            setns(own, CLONE_NEWNET)
    finally:
        os.close(own)


def mount(source: str | None, target: Path, flags: int, kind: str | None = None, options: str | None = None) -> None:
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


# --- /sys of a process with mount and network namespaces of its own ---------------------------------

_CGROUPS = Path("/sys/fs/cgroup")


def mount_sys(groups: Mapping[Path, Path], empty: Path) -> None:
    """Mount /sys anew: it shows the interfaces of this network namespace. It shows these control groups alone, each as
    the whole hierarchy: `groups` has them by mount point. `empty` is a directory to use meanwhile. Raises OSError."""
    kept = {where: empty / f"group{number}" for number, where in enumerate(groups)}
    for where, beside in kept.items():
        beside.mkdir()
        mount(str(groups[where]), beside, MS_BIND)
    umount("/sys")  # with all that is mounted below it
    mount_new(Path("/sys"), "sysfs")
    if _CGROUPS not in groups:
        mount_new(_CGROUPS, "tmpfs", "mode=0755")
    for where, beside in kept.items():
        where.mkdir(exist_ok=True)
        mount(str(beside), where, MS_MOVE)
        beside.rmdir()


def mount_new(path: Path, kind: str, options: str | None = None) -> None:
    """Mount a file system of this kind without devices or set-user-ID programs. Raises OSError."""
    mount(kind, path, MS_NOSUID | (0 if kind == "sysfs" else MS_NODEV), kind, options)


# --- memory that processes share --------------------------------------------------------------------
# Files without a name (memfd_create(2)): nobody can open one by a path outside of the processes that have it, and the
# kernel frees it with the last of them. Its size cannot change: a process that maps what another one has cut off would
# be killed (mmap(2), SIGBUS).

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemory:
    """Regions of memory of `size` MiB each: zero, and not allocated yet. Their descriptors `fds` are closed by `close`,
    or when nobody refers to this object any more."""

    def __init__(self, ids: Sequence[str], size: int) -> None:
        """The kernel shows the ids as names of the files. Raises OSError if there is no room for descriptors."""
        self.size = size
        fds: list[int] = []
        self.close = weakref.finalize(self, _close_all, fds)
        for each in ids:
            fds.append(os.memfd_create(f"multiverse/ivshmem-{each}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(fds[-1], size << 20)
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, _SEALS)
        self.fds = tuple(fds)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


# --- clocks -----------------------------------------------------------------------------------------

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised to a reliable server
_SIZE = 256  # at least as large as struct timex


def is_synchronised() -> bool | None:
    """Whether something keeps the clock right, such as chrony or ntpd; None if the kernel does not say."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_SIZE))  # of zeros: it only reads
    return None if state < 0 else state != _TIME_ERROR


_READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx,32; or rax,rdx; ret
_TRIES = 20  # readings of clock and counter. The closest pair counts: another process may run between the two.


def measured_khz(seconds: float = 0.1) -> int | None:
    """The frequency in kHz, measured against the monotonic clock; in 0.1 s it is right to a few parts in a million.
    None if the CPUs' counter is not constant, or a program may not execute what it wrote."""
    if os.uname().machine != "x86_64" or " constant_tsc " not in Path("/proc/cpuinfo").read_text():
        return None
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    page.write(_READ_COUNTER)
    counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    clock, count = _read_both(counter)
    time.sleep(seconds)
    later, counted = _read_both(counter)
    return round((counted - count) * 1_000_000 / (later - clock))


def _read_both(counter: Callable[[], int]) -> tuple[float, int]:
    """The monotonic clock in nanoseconds, and the counter at that time."""
    readings = []
    for _ in range(_TRIES):
        before = time.monotonic_ns()
        count = counter()
        after = time.monotonic_ns()
        readings.append((after - before, (before + after) / 2, count))
    _, clock, count = min(readings)
    return clock, count
