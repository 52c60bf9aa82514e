"""Namespaces of a program's own (namespaces(7)): it reaches only the files, sockets and interfaces that it is given.

A short-lived thread of this process enters new namespaces, builds a root directory there, and starts the program. So no
other program is executed, and a start takes about a millisecond more. The kernel removes namespaces and mounts when the
program ends.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from multiverse.core.errors import Broken, Exhausted
from multiverse.host.process import in_thread
from multiverse.system import kernel
from multiverse.system.kernel import (
    CLONE_FS,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    MS_BIND,
    MS_MOVE,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
)
from multiverse.system.processes import ProcessIdentity

T = TypeVar("T")

# Bytes that a contained program can write to its outputs in all, unless somebody truncates them meanwhile.
OUTPUT_ROOM = 1 << 20
_INODES = 256  # of the root's own file system: some fifty mount points, and the outputs
_DATA = MS_NOSUID | MS_NODEV | MS_NOEXEC
_HINT = (
    "the daemon needs root with CAP_SYS_ADMIN and CAP_SYS_CHROOT, a root directory that is a mount point, and no"
    " RestrictNamespaces= in its unit"
)
_FULL = "see `sysctl user | grep namespaces` and the free memory"


@dataclass(frozen=True, slots=True)
class System:
    """The part of this machine that every contained program sees."""

    programs: tuple[Path, ...]  # directories with programs and libraries
    files: tuple[Path, ...]
    hidden: tuple[Path, ...]  # directories in `programs` that appear empty
    links: Mapping[Path, str]  # symbolic links, by their paths
    devices: tuple[Path, ...]

    @classmethod
    def of(cls, binary: str, devices: tuple[Path, ...]) -> System:
        """The parts that this machine's program `binary` needs: /usr, the places of libraries outside of it, and the
        prefix in which it is installed. The site's own software in /usr/local is hidden."""
        usual = [Path(path) for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64")]
        links = {path: os.fspath(path.readlink()) for path in usual if path.is_symlink()}
        programs = [path for path in usual if path.is_dir() and path not in links]
        hidden = [path for path in (Path("/usr/local"),) if path.is_dir()]
        found = shutil.which(binary)
        if found is not None:
            for place in {Path(found).absolute().parent, Path(found).resolve().parent}:
                if any(place.is_relative_to(path) for path in hidden):
                    hidden = []
                elif not any(place.is_relative_to(path) for path in (*programs, *links)):
                    programs.append(place.parent if place.name in ("bin", "sbin", "libexec") else place)
        always = tuple(Path("/dev", name) for name in ("null", "zero", "urandom"))
        files = tuple(path for path in (Path("/etc/ld.so.cache"),) if path.exists())  # ld.so(8)
        return cls(tuple(programs), files, tuple(hidden), links, (*always, *devices))


@dataclass(frozen=True, slots=True)
class View:
    """The files that one program can reach. Paths are the same inside as outside; files keep owner and mode."""

    system: System
    base: Path  # an empty directory: the new root is mounted there, inside only
    readable: tuple[Path, ...] = ()  # files and directories
    writable: tuple[Path, ...] = ()  # files
    devices: tuple[Path, ...] = ()  # beside those of the system
    outputs: tuple[Path, ...] = ()  # new files in a file system of `OUTPUT_ROOM` bytes that ends with the program
    owner: int = 0  # of the outputs
    proc: bool = False  # the program sees /proc with itself alone, until `remove_proc` is called


def start(view: View, spawn: Callable[[Mapping[Path, int]], T]) -> tuple[T, dict[Path, int]]:
    """Call `spawn` in new namespaces, with a descriptor of each output. Returns its result, and these descriptors,
    which the caller closes. The first process that `spawn` starts is process 1 of its PID namespace: when it ends, the
    kernel kills all others there. Raises `Broken` if namespaces are not permitted, `Exhausted` if there is no room for
    more, and what `spawn` raises."""
    return in_thread(lambda: _start(view, spawn))


def check(system: System, base: Path) -> None:
    """Raise `Broken` or `Exhausted` if programs cannot be started in namespaces on this machine."""
    start(View(system, base), lambda outputs: None)


def remove_proc(process: ProcessIdentity) -> None:
    """Remove /proc from the sight of a contained program. A program that has ended is success."""
    with suppress(ProcessLookupError, FileNotFoundError):
        in_thread(lambda: _remove_proc(process))


def command_prefix(view: View) -> list[str]:
    """The start of a command line that completes the view from inside: only a process of the new PID namespace can
    mount its /proc (proc(5))."""
    return ["unshare", "--mount-proc=/proc", "--"] if view.proc else []


def open_inside(process: ProcessIdentity, path: Path, flags: int) -> int | None:
    """Open a file as a contained program sees it. None if the program has ended, or has no such file."""
    root = f"/proc/{process.pid}/root"
    try:
        if os.path.samestat(os.stat(root), os.stat("/")):  # noqa: PTH116  (a magic link, not a path)
            return None
        fd = os.open(f"{root}{path}", flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if process.is_alive():
        return fd
    os.close(fd)  # the pid may be another process's already
    return None


def _start(view: View, spawn: Callable[[Mapping[Path, int]], T]) -> tuple[T, dict[Path, int]]:
    outputs: dict[Path, int] = {}
    try:
        try:
            _enter(view, outputs)
        except OSError as error:
            what = f"cannot start a program in namespaces of its own: {error}"
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                raise Exhausted(what, hint=_FULL) from error
            raise Broken(what, hint=_HINT) from error
        return spawn(outputs), outputs
    except BaseException:
        for fd in outputs.values():
            os.close(fd)
        raise


def _enter(view: View, outputs: dict[Path, int]) -> None:
    """Move this thread into new namespaces, and build their root. Adds a descriptor of each output to `outputs`. The
    thread gets a mount namespace and a working directory of its own (unshare(2)); its children are in the PID
    namespace."""
    kernel.unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID)
    os.umask(0o022)
    kernel.mount(None, Path("/"), MS_REC | MS_PRIVATE)
    kernel.mount("tmpfs", view.base, _DATA, "tmpfs", f"mode=0755,size={OUTPUT_ROOM},nr_inodes={_INODES}")
    root = _Root(view.base)
    for path, target in view.system.links.items():
        root.inside(path).symlink_to(target)
    for path, flags in _binds(view):
        if flags is None:
            kernel.mount("tmpfs", root.directory(path), _DATA, "tmpfs", "mode=0755,size=4k")
        else:
            root.bind(path, flags)
    if view.proc:
        root.directory(Path("/proc"))
    for path in view.outputs:
        outputs[path] = fd = os.open(root.file(path), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.fchown(fd, view.owner, view.owner)
    root.change_to()


def _binds(view: View) -> Iterator[tuple[Path, int | None]]:
    """The paths to mount, with their flags; None for an empty directory. Outer directories come before inner ones."""
    found: dict[Path, int | None] = {}
    system = view.system
    found |= dict.fromkeys(system.programs, MS_RDONLY | MS_NOSUID | MS_NODEV)
    found |= dict.fromkeys(system.hidden, None)
    found |= dict.fromkeys((*system.files, *view.readable), MS_RDONLY | _DATA)
    found |= dict.fromkeys(view.writable, _DATA)
    found |= dict.fromkeys((*system.devices, *view.devices), MS_RDONLY | MS_NOSUID | MS_NOEXEC)
    return iter(sorted(found.items(), key=lambda item: len(item[0].parts)))


class _Root:
    def __init__(self, base: Path) -> None:
        self._base = base

    def inside(self, path: Path) -> Path:
        return self._base.joinpath(*path.parts[1:])

    def directory(self, path: Path) -> Path:
        there = self.inside(path)
        there.mkdir(parents=True, exist_ok=True)
        return there

    def file(self, path: Path) -> Path:
        there = self.inside(path)
        if not there.exists():
            self.directory(path.parent)
            there.touch()
        return there

    def bind(self, path: Path, flags: int) -> None:
        """Show the file or directory at `path` outside, without file systems that are mounted below it. Flags of a bind
        mount are set by a second call (mount(2))."""
        there = self.directory(path) if path.is_dir() else self.file(path)
        kernel.mount(os.fspath(path), there, MS_BIND)
        kernel.mount(None, there, MS_REMOUNT | MS_BIND | flags)

    def change_to(self) -> None:
        """Make this the root directory of this thread and its children, and remove the old one from their sight."""
        os.chdir(self._base)
        try:
            kernel.pivot_root()
            kernel.umount(".")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The machine's root is its initial ramdisk, as on nodes without a disk: it can be covered, not replaced.
            kernel.mount(".", Path("/"), MS_MOVE)
            os.chroot(".")
        os.chdir("/")


def _remove_proc(process: ProcessIdentity) -> None:
    fd = os.open(f"/proc/{process.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not process.is_alive():
            return
        kernel.unshare(CLONE_FS)  # setns(2) wants it
        kernel.setns(fd, CLONE_NEWNS)
    finally:
        os.close(fd)
    kernel.umount("/proc")
