"""Small files, by plain descriptors: buffered files and pathlib are code that an emulator translates in each clone."""

# ruff: noqa: PTH103, PTH112, PTH120

from __future__ import annotations

import os
import pwd

from multiverse.guest.agent.contract import MAX_LINE, GuestAgentError

_known_owners = {"root": (0, 0)}


def read(path: str) -> str:
    """The content of a small file, at most MAX_LINE bytes of it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, MAX_LINE).decode("utf-8", "surrogateescape")
    finally:
        os.close(fd)


def write(path: str, content: str | bytes, mode: int = 0o644, owner: tuple[int, int] = (0, 0)) -> None:
    """Make a file hold `content`, with this mode and owner (uid, gid). Nobody else can open a new file before that.

    The file is written in place, because nothing else runs yet: a rename would make the kernel allocate and write
    blocks. A symbolic link at `path` is not followed. Raises OSError.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(fd)
        if (before.st_uid, before.st_gid) != owner:
            os.fchown(fd, *owner)
        if before.st_mode & 0o7777 != mode:
            os.fchmod(fd, mode)
        at = 0
        while at < len(data):
            at += os.write(fd, data[at:])
        if before.st_size > len(data):
            os.ftruncate(fd, len(data))
    finally:
        os.close(fd)


def write_kernel_file(path: str, text: str) -> None:
    """Write to a file of procfs or sysfs, by one call. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Make a directory and its parents, if it is absent. Testing first runs less code than catching an exception."""
    if not os.path.isdir(path):
        os.makedirs(path, exist_ok=True)


def make_pipe(path: str) -> int:
    """Make a named pipe and return a descriptor of it. The pipe is open for writing, so its readers block."""
    make_directory(os.path.dirname(path))
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        pass
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def owner_ids(name: str) -> tuple[int, int]:
    """The uid and gid of a user of the image; they are looked up once. Raises GuestAgentError for an unknown user."""
    if name not in _known_owners:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise GuestAgentError(f"the image has no user {name!r}") from None
        _known_owners[name] = entry.pw_uid, entry.pw_gid
    return _known_owners[name]
