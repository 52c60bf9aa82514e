"""Room on the disk for the commits of releases: neither a guest nor a pass that adds can take it.

SQLite appends changed pages to its log, and copies them to the database at a checkpoint, after 1000 pages. Both files
get their blocks in advance:

- The log is extended to 12 MiB. SQLite overwrites it from the beginning after each checkpoint and never shortens it.
- The database gets the blocks of new pages before the commit. Otherwise checkpoints could fail and the log would grow.
- One row of `schema.reserve` holds `PAGES` pages. A transaction that releases deletes it and uses its pages. One that
  adds is refused until the row is whole again, and makes it whole when there is room.

SQLite deletes the log when the database is closed. Its blocks are kept under another name until it is opened again,
perhaps on a full disk. On file systems that never overwrite in place (btrfs, ZFS) this promises nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from multiverse.core.errors import Exhausted

PAGES = 1024  # Pages of the database that are held for releases: 4 MiB. The release of 100 VMs takes about 30
CHECKPOINT = 1000  # pages in the log after which SQLite makes a checkpoint (its default)
_FRAME = 24  # bytes before each page in the log (SQLite's file format, section 4)
_LOG_HEADER = 32
_AHEAD = 256 << 10  # bytes that are allocated beyond what is needed, because each allocation takes some 100 µs
_INDEX_BYTES = 64 << 10  # for the log's index (`-shm`), which is made when the database is opened

Execute = Callable[..., sa.CursorResult[Any]]
"""Executes SQL as the driver takes it: `sqlalchemy.Connection.exec_driver_sql`."""


class Reserve:
    """The reserve of one database. `path` None: the database is in memory, and nothing is reserved.

    Call `open` after the first commit, then `lend` after BEGIN of a transaction that releases, `prepare` before each
    COMMIT, `forget` after each rollback, and `keep` before the database is closed and `close` after.
    """

    def __init__(self, path: Path | None, execute: Execute) -> None:
        self._path, self._execute = path, execute
        self._file: int | None = None  # kept open: closing it would drop SQLite's locks (fcntl(2))
        self._page_bytes = 4096
        self._log_is_whole = False
        self._is_whole: bool | None = None  # None: not known

    def open(self) -> None:
        """Take hold of a database's files. A full disk is no error: transactions that add are refused then."""
        if self._path is None:
            return
        self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._page_bytes = self._pragma("page_size")

    def lend(self) -> None:
        """Give the pages to the transaction that has begun, which releases."""
        if self._file is not None and self._is_whole is not False:
            self._execute("DELETE FROM reserve")
            self._is_whole = False

    def prepare(self, *, adds: bool) -> None:
        """Allocate what the transaction needs before its commit. Raises `Exhausted`."""
        if self._file is None:
            return
        try:
            self._extend_log()
        except OSError as error:
            if adds:
                raise _full(error) from error
        try:
            if adds and not self._whole():
                missing = max(0, PAGES - self._pragma("freelist_count"))
                self._allocate(self._pragma("page_count") + missing)  # before anything is written to the log
                room = (PAGES - 1) * (self._page_bytes - 4)
                self._execute("INSERT INTO reserve (id, room) VALUES (1, zeroblob(?))", (room,))
                self._is_whole = True
            self._allocate(self._pragma("page_count"))
        except OSError as error:
            raise _full(error) from error

    def forget(self) -> None:
        self._is_whole = None

    def keep(self) -> None:
        """Keep the log's blocks, before the database is closed. If that fails they are lost for a while."""
        if self._path is not None:
            with suppress(OSError):
                _kept(self._path).unlink(missing_ok=True)
                os.link(_log(self._path), _kept(self._path))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _whole(self) -> bool:
        if self._is_whole is None:
            self._is_whole = bool(self._execute("SELECT COUNT(*) FROM reserve").scalar())
        return self._is_whole

    def _extend_log(self) -> None:
        if self._log_is_whole or self._path is None:
            return
        fd = os.open(_log(self._path), os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, _log_bytes(self._page_bytes) + _INDEX_BYTES)
        finally:
            os.close(fd)
        self._log_is_whole = True

    def _allocate(self, pages: int) -> None:
        """Give the database's file blocks for so many pages. A checkpoint cuts off what is beyond the last page."""
        assert self._file is not None
        there, needed = os.fstat(self._file).st_size, pages * self._page_bytes
        if needed > there:
            try:
                os.posix_fallocate(self._file, there, needed + _AHEAD - there)
            except OSError:
                os.posix_fallocate(self._file, there, needed - there)

    def _pragma(self, name: str) -> int:
        return int(self._execute(f"PRAGMA {name}").scalar_one())


def restore_log(path: Path) -> None:
    """Put the log's kept blocks back before the database is opened. SQLite takes them for empty."""
    kept, log = _kept(path), _log(path)
    with suppress(OSError):
        if not log.exists():
            with kept.open("r+b") as file:
                file.write(bytes(_LOG_HEADER))
                file.flush()
                os.fsync(file.fileno())
                file.truncate(max(_LOG_HEADER, os.fstat(file.fileno()).st_size - _INDEX_BYTES))
            os.link(kept, log)
        kept.unlink()


def _full(error: OSError) -> Exhausted:
    return Exhausted(f"the database has no room: {error.strerror}", hint="make room in the state directory")


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _kept(path: Path) -> Path:
    return path.with_name(f"{path.name}-reserve")


def _log_bytes(page: int) -> int:
    """A checkpoint comes after the transaction that exceeds its limit: twice the reserve at most."""
    return _LOG_HEADER + (CHECKPOINT + 2 * PAGES) * (page + _FRAME)
