"""Advisory locks by flock(2), which hold between threads and between processes, and end with their holder.

The locked file or directory may be removed by its holder. Whoever waited for it then notices that the path leads
elsewhere, and tries again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_INTERVAL = 0.02  # seconds between two calls of `while_waiting`


def try_lock(fd: int) -> bool:
    """Take the exclusive lock of an open file without waiting; False if somebody else holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock of that file now. A file that does not exist is not locked."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def locked_file(path: Path, while_waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is created if it is missing. `while_waiting` is called every 20 ms while somebody
    else holds the lock, for example to end the holder."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while while_waiting is not None and not try_lock(fd):
                while_waiting()
                time.sleep(_INTERVAL)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _leads_to(path, fd):
                yield
                return
        finally:
            os.close(fd)


@contextmanager
def try_locked_file(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, which is created if it is missing; gives False, without waiting, if it is taken."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield try_lock(fd) and _leads_to(path, fd)
    finally:
        os.close(fd)


@contextmanager
def try_locked_directory(directory: Path) -> Iterator[bool]:
    """Hold the lock of a directory, which exists; gives False, without waiting, if it is taken."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_lock(fd) and _leads_to(directory, fd)
    finally:
        os.close(fd)


@contextmanager
def locked_directory(directory: Path, *, create: bool) -> Iterator[bool]:
    """Hold the lock of a directory, which is created first if `create`; gives False if there is none. The lock is on
    the directory itself: it goes with the directory."""
    while True:
        if create:
            directory.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if create:
                continue
            yield False
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _leads_to(directory, fd):
                yield True
                return
        finally:
            os.close(fd)


def _leads_to(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
