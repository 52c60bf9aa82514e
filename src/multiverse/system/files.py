"""Files that are replaced whole, keep a part of their own among the lines of others, or survive a loss of power.

A file that was rendered ends with a comment, which has a digest of all lines above. So the file itself tells whether an
administrator has changed it, wherever it was copied to.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from glob import iglob
from pathlib import Path
from typing import NamedTuple

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def replace(
    path: Path, content: str | bytes, *, mode: int = 0o600, uid: int = -1, gid: int = -1, dir_fd: int | None = None
) -> None:
    """Write `content` to a temporary file beside `path`, and rename it to `path`. It is not synced to disk.

    The file has exactly `mode` and, unless -1, this owner and group before it holds any content. After an `OSError` the
    old file is unchanged. Whoever replaces the same file at once does no harm: the last rename wins. A relative `path`
    begins at the open directory `dir_fd`. The directory may belong to another user: the content goes to a new file,
    never to a file or through a link that this user has put there.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.new")
    try:
        fd = _create(temporary, dir_fd)
        with open(fd, "wb", buffering=0) as file:  # noqa: PTH123  (a descriptor, not a path)
            if (uid, gid) != (-1, -1):
                os.fchown(fd, uid, gid)
            os.fchmod(fd, mode)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.rename(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise


def _create(path: Path, dir_fd: int | None) -> int:
    """Create a file, readable by its owner only. A file that a killed process left at `path` goes."""
    try:
        return os.open(path, _CREATE, 0o600, dir_fd=dir_fd)
    except FileExistsError:
        os.unlink(path, dir_fd=dir_fd)
        return os.open(path, _CREATE, 0o600, dir_fd=dir_fd)


# --- a record that is overwritten in place ----------------------------------------------------------

RECORD_SIZE = 32 * 1024  # bytes of each of the two copies in the file


class Record:
    """The text of a file that is allocated when it is first opened, so that later writes need no free disk (where the
    file system overwrites in place, unlike Btrfs and ZFS). It has two copies, each with a number and a checksum. A
    write replaces the older one: if it is interrupted, the other one is whole, and counts."""

    def __init__(self, path: Path) -> None:
        """Read the text; it is empty in a new file. Raises `OSError`, and `ValueError` if neither copy is whole."""
        self._path = path
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = _encode(0, "") * 2
            create_whole(path, data)
        copies = [copy for copy in (_decode(data[:RECORD_SIZE]), _decode(data[RECORD_SIZE:])) if copy is not None]
        if not copies:
            raise ValueError("neither of its two copies is whole")
        self._number, self.text = max(copies)

    def write(self, text: str) -> None:
        """Replace the text; it is on the disk when this returns. After an `OSError` the text is the old one, unless the
        new one is found whole when the file is opened again. Raises `ValueError` if it is too long."""
        number = self._number + 1
        data = _encode(number, text)
        fd = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.pwrite(fd, data, number % 2 * RECORD_SIZE) < RECORD_SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        self._number, self.text = number, text


def create_whole(path: Path, data: bytes) -> None:
    """Let the file appear with its content, on the disk: renamed first, it could be empty after a loss of power."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_back(path: Path) -> None:
    """Write a file to its disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _encode(number: int, text: str) -> bytes:
    content = f"{number} {text}".encode()
    data = b"%08x %s\n" % (zlib.crc32(content), content)
    if len(data) > RECORD_SIZE:
        raise ValueError(f"a text of {len(data)} bytes does not fit in {RECORD_SIZE}")
    return data.ljust(RECORD_SIZE)


def _decode(data: bytes) -> tuple[int, str] | None:
    """The number and the text of a copy; None if it is not whole."""
    checksum, _, content = data.rstrip(b" ").removesuffix(b"\n").partition(b" ")
    if checksum != b"%08x" % zlib.crc32(content):
        return None
    number, _, text = content.decode().partition(" ")
    return int(number), text


# --- names in a file of hosts(5) --------------------------------------------------------------------


def keep_names(path: Path, owner: str, names: Mapping[str, str]) -> None:
    """Have these names with their addresses in the file, and no others of `owner`. Other lines stay. Raises OSError."""
    try:
        before, about = path.read_text(encoding="utf-8", errors="surrogateescape"), path.stat()
    except FileNotFoundError:
        before, about = "", None
    after = _with_block(before, owner, [f"{address} {name}" for name, address in names.items()])
    if after == before:
        return
    data = after.encode("utf-8", errors="surrogateescape")
    if about is None:
        replace(path, data, mode=0o644)
        return
    try:
        replace(path.resolve(), data, mode=about.st_mode & 0o7777, uid=about.st_uid, gid=about.st_gid)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a file that is mounted there, as in containers, cannot be replaced
            raise
        path.write_bytes(data)


def _with_block(text: str, owner: str, lines: list[str]) -> str:
    """The text with these lines in place of those of `owner`. If the end of the old ones was removed, only lines that
    name our VMs count as old, so that nothing of others is lost."""
    first, last = f"# multiverse {owner}: names of VMs, kept by the daemon", f"# multiverse {owner}: end"
    old = text.splitlines()
    block = [first, *lines, last] if lines else []
    if first not in old:
        return "\n".join([*old, *block]) + "\n" if block else text
    at = old.index(first)
    end = at + 1
    while end < len(old) and old[end] != last and f" mv{owner}-" in old[end]:
        end += 1
    end += old[end : end + 1] == [last]
    return "\n".join([*old[:at], *block, *old[end:]]) + "\n"


def matching(top: Path | str, pattern: str) -> Iterator[Path]:
    """The paths below `top` that match; `**` stands for any directories. A directory that vanishes meanwhile is passed
    over, where Path.glob raises FileNotFoundError."""
    return map(Path, iglob(f"{top}/{pattern}", recursive=True))  # noqa: PTH207


# --- rendered files ---------------------------------------------------------------------------------

_LAST = re.compile(
    r"(?P<text>.*\n)?(?:#|--) Rendered by multiverse; sha256 of the above: (?P<digest>[0-9a-f]{16})\n", re.S
)


class Origin(StrEnum):
    RENDERED = "rendered"  # and unchanged since
    CHANGED = "changed"  # rendered, and then changed by somebody
    FOREIGN = "foreign"  # written by somebody else


class SiteFile(NamedTuple):
    """A file at its place on the site's machine. One that is `begun` is changed by the daemon: what is there stays."""

    path: Path
    content: str
    mode: int
    begun: bool = False


def signed(text: str, comment: str = "#") -> str:
    """The text with its last line. `comment` begins a comment in the file's language: `#` or `--`."""
    return f"{text}{comment} Rendered by multiverse; sha256 of the above: {_digest(text)}\n"


def origin(text: str) -> Origin:
    """Who wrote this text. A text in which a rendered file's last line is missing counts as foreign."""
    match = _LAST.fullmatch(text)
    if match is None:
        return Origin.CHANGED if "Rendered by multiverse; sha256" in text else Origin.FOREIGN
    return Origin.RENDERED if _digest(match["text"] or "") == match["digest"] else Origin.CHANGED


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
