"""Copies of templates: whole ones for other hosts, and sealed copies of their memory for an old QEMU."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from multiverse.core.errors import Broken, Gone, MultiverseError
from multiverse.images.catalog import digest_of_files

log = structlog.get_logger(__name__)

_FILES = ("memory", "state", "disk.qcow2", "kernel.stub", "initrd.stub")
_FACTS = "copy.json"
_KEPT = 7 * 86400.0  # seconds after which a copy gives way to a new one of the same name
_PLACE = re.compile(r"(?P<name>.+)@[0-9a-f]{16}")


@dataclass(frozen=True)
class TemplateCopies:
    """Templates that the hosts of a site share by a directory: one host has booted and frozen them, others copy them.
    The state of a frozen guest fits hosts with the same image, QEMU, machine and kind of CPU. A copy is found by the
    template's key, which covers all but the last, and by the kind of CPU. It appears as a whole, and is verified by its
    digest. Templates of one account alone are not shared."""

    directory: Path
    cpu: str  # the kind of CPU that guests have
    check: Callable[[Path], None]  # called with a directory before something is taken from there

    def take(self, name: str, key: str, work: Path, disk: Path) -> int | None:
        """Copy the template of that directory name and key to `work`, on top of the image's disk. Returns the number of
        CPUs that its kernel has room for (0: unknown), or None if there is no usable copy."""
        place = self._place(name, key)
        if not place.is_dir():
            return None
        try:
            self.check(place)
            facts = json.loads((place / _FACTS).read_text())
            _copy(place, work)
            if digest_of_files(work, _FILES) != facts["digest"]:
                raise Broken("its digest is another one")
            rebase(work / "disk.qcow2", disk)
            return int(facts["possible"])
        except (OSError, ValueError, KeyError, TypeError, MultiverseError) as error:
            log.warning("the copy of a template cannot be used", path=str(place), reason=str(error))
            for file in _FILES:
                (work / file).unlink(missing_ok=True)
            return None

    def offer(self, template: Path, key: str, possible: int) -> None:
        """Let other hosts copy this template, and remove old copies. Errors are logged: nothing depends on it."""
        place = self._place(template.name, key)
        if place.exists():
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.check(self.directory)
            work = Path(tempfile.mkdtemp(prefix=f".{template.name}@new-", dir=self.directory))
            try:
                _copy(template, work)
                (work / _FACTS).write_text(json.dumps({"digest": digest_of_files(work, _FILES), "possible": possible}))
                work.chmod(0o755)
                _sync(work)
                work.rename(place)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            log.info("template offered to other hosts", template=template.name, path=str(place))
            self._remove_others(template.name, place)
        except (OSError, MultiverseError) as error:
            log.warning("a template is not offered to other hosts", template=template.name, reason=str(error))

    def _place(self, name: str, key: str) -> Path:
        return self.directory / f"{name}@{hashlib.sha256(f'{key} {self.cpu}'.encode()).hexdigest()[:16]}"

    def _remove_others(self, name: str, own: Path) -> None:
        """Remove copies of that name, and remains of crashed hosts, after a week. Other hosts may boot again."""
        oldest = own.stat().st_mtime - _KEPT
        for place in self.directory.iterdir():
            match = _PLACE.fullmatch(place.name)
            is_other = match is not None and match["name"] == name
            if (is_other or place.name.startswith(f".{name}@new-")) and place.stat().st_mtime < oldest:
                shutil.rmtree(place, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    files = [str(source / file) for file in _FILES]
    if problem := failure_of(["cp", "--sparse=always", "--", *files, str(target)]):
        raise Broken(f"cannot copy it: {problem}")


def _sync(directory: Path) -> None:
    """Write the files of a directory back, which others are to read after a crash of this machine."""
    for path in (*directory.iterdir(), directory):
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def rebase(disk: Path, image: Path) -> None:
    """Name the image's disk of this host: the copy has the path that it had on another one."""
    if problem := failure_of(["qemu-img", "rebase", "-u", "-b", str(image), "-F", "raw", str(disk)]):
        raise Broken(f"qemu-img failed: {problem}")


def failure_of(argv: list[str]) -> str:
    """Run a program. Returns the end of its errors if it fails, or nothing."""
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    return (done.stderr.strip()[-300:] or f"exit status {done.returncode}") if done.returncode else ""


_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SealedMemory:
    """One sealed copy of each memory file (memfd_create(2)), kept until the file is replaced or the copy is discarded.

    A QEMU before 8.2 maps such a copy, because it opens a template's file for writing even when it maps it privately,
    and a tmpfs cannot allow that without letting it write. Not even root can write to a sealed memfd, and all clones
    share its pages. Each template is copied once per process: this takes about as long as a clone, and the template's
    size of memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[Path, tuple[int, int]] = {}  # by path: the inode that was copied, the memfd

    def open(self, path: Path) -> int:
        """A descriptor of the sealed copy, which the caller closes. Raises `Gone` if there is no such file."""
        with self._lock:
            try:
                with path.open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    if self._copies.get(path, (0, 0))[0] != inode:
                        self._close(path)
                        self._copies[path] = (inode, _sealed_copy(file.fileno()))
            except FileNotFoundError as error:
                raise Gone(f"there is no memory file {path}", hint="its template is built again on demand") from error
            return fcntl.fcntl(self._copies[path][1], fcntl.F_DUPFD_CLOEXEC, 3)

    def size(self, path: Path) -> int:
        """Bytes of memory that the copy of this file takes; 0 if there is none."""
        with self._lock:
            found = self._copies.get(path)
            return os.fstat(found[1]).st_blocks * 512 if found else 0

    def discard(self, path: Path) -> None:
        """Close the copy of this file; VMs that map the copy keep it until they end."""
        with self._lock:
            self._close(path)

    def _close(self, path: Path) -> None:
        if path in self._copies:
            os.close(self._copies.pop(path)[1])


def _sealed_copy(source: int) -> int:
    size = os.fstat(source).st_size
    # The copy's name ends as the file's does: `process.exact_memory` tells shared pages by that.
    copy = os.memfd_create("multiverse/memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(copy, size)
        at = 0
        while (at := _seek(source, at, os.SEEK_DATA, size)) < size:
            end = _seek(source, at, os.SEEK_HOLE, size)
            os.lseek(copy, at, os.SEEK_SET)
            while at < end:
                at += os.sendfile(copy, source, at, end - at)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(copy)
        raise
    return copy


def _seek(fd: int, at: int, whence: int, size: int) -> int:
    """Where data or a hole begins from `at` on; the file's size if nowhere."""
    try:
        return os.lseek(fd, at, whence)
    except OSError:  # ENXIO: no more data
        return size
