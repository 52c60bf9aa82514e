"""Writes a small file that slurmctld's user reads, in a directory that slurmctld's user may own."""

from __future__ import annotations

import os

CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def replace_file(directory: int, name: str, content: str) -> None:
    """Replace the file `name` in the open directory as a whole, readable by everybody.

    No symbolic link is followed. After an error the old file is still there. Raises OSError.
    """
    temporary = f".{name}.new"
    unlink(directory, temporary)
    with os.fdopen(os.open(temporary, CREATE, 0o644, dir_fd=directory), "w") as file:
        file.write(content)
        os.fchmod(file.fileno(), 0o644)  # the daemon's umask is 0077
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def unlink(directory: int, name: str) -> None:
    """Remove a file from the open directory, if it is there."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
