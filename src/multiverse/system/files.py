"""Atomic replacement of files: a reader sees the old content or the new one, never a part of either."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def replace(path: Path, content: str | bytes, *, mode: int = 0o600, uid: int = -1, gid: int = -1) -> None:
    """Write `content` to a temporary file beside `path`, and rename it to `path`.

    The file gets exactly `mode` and, unless -1, this owner and group before it holds any content. It is not synced to
    disk. After an `OSError` the old file is unchanged and the temporary file is removed. Processes and threads that
    replace the same file at once do not disturb each other: the last rename wins.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as file:  # noqa: PTH123  (a descriptor, not a path)
            if (uid, gid) != (-1, -1):
                os.fchown(fd, uid, gid)
            os.fchmod(fd, mode)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
