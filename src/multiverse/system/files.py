"""Atomic replacement of files: a reader sees the old content or the new one, never a part of either."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def replace(
    path: Path, content: str | bytes, *, mode: int = 0o600, uid: int = -1, gid: int = -1, dir_fd: int | None = None
) -> None:
    """Write `content` to a temporary file beside `path`, and rename it to `path`.

    The file gets exactly `mode` and, unless -1, this owner and group before it holds any content. It is not synced to
    disk. After an `OSError` the old file is unchanged and the temporary file is removed. Processes and threads that
    replace the same file at once do not disturb each other: the last rename wins.

    A relative `path` begins at the open directory `dir_fd`, if one is given. The directory may belong to another user:
    the content is written to a new file, never to a file or through a link that this user has put there.
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
    """Create a file, readable by its owner only, in place of what a process that was killed has left at `path`."""
    try:
        return os.open(path, _CREATE, 0o600, dir_fd=dir_fd)
    except FileExistsError:
        os.unlink(path, dir_fd=dir_fd)
        return os.open(path, _CREATE, 0o600, dir_fd=dir_fd)
