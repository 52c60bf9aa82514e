"""Brings a database to the schema of this software, within the transaction that opens it.

A fresh database is made at once, an older one is upgraded, and one of newer software is refused. After a failure
the database is as it was. Before an upgrade a copy of it is kept beside it.

To change the schema, change `schema.py` and add a file to `versions`: its `revision` is the new `schema.HEAD`, its
`down_revision` the one before, and its function `upgrade` changes the tables and rows by `alembic.op`.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import AbstractContextManager, closing
from pathlib import Path

import sqlalchemy as sa
import structlog

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.store import schema
from multiverse.system.interrupts import called_every

log = structlog.get_logger()

TELLS_EVERY = 5.0
"""Seconds between two lines of the log while an upgrade goes on."""

VERSIONS = Path(__file__).parent / "versions"

_VERSION = sa.Table(  # as Alembic itself would make it
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def upgrade(connection: sa.Connection, path: Path | None) -> None:
    """Bring the schema up to `schema.HEAD`. Call it within BEGIN IMMEDIATE; `path` None: in memory.
    `Refused` for a database of newer software, `Broken` when a revision fails, `Exhausted` when no copy can be kept."""
    found = revision(connection)
    if found == schema.HEAD:
        return
    if found is None:
        schema.metadata.create_all(connection, checkfirst=False)
        _VERSION.create(connection, checkfirst=False)
        connection.execute(_VERSION.insert(), {"version_num": schema.HEAD})
        return
    _run(connection, path, found)


def revision(connection: sa.Connection) -> str | None:
    """The database's revision; None if it is empty. `Broken` if it is some other software's."""
    tables = set(connection.scalars(sa.text("SELECT name FROM sqlite_master WHERE type = 'table'")))
    if not tables:
        return None
    if _VERSION.name in tables and (found := connection.scalar(sa.select(_VERSION.c.version_num))):
        return str(found)
    raise Broken("it is a database of something else", hint="set state_dir in the settings")


def _run(connection: sa.Connection, path: Path | None, found: str) -> None:
    # Only an upgrade needs Alembic, and loading it takes longer than opening a thousand databases.
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory
    from alembic.script.revision import ResolutionError

    scripts = ScriptDirectory(VERSIONS.parent, version_locations=[VERSIONS])
    context = MigrationContext.configure(
        connection, opts={"fn": lambda revisions, _: scripts._upgrade_revs(schema.HEAD, revisions)}
    )
    try:
        scripts.revision_map.get_revision(found)
    except ResolutionError as error:
        raise Refused(
            f"{path} is of a newer Multiverse: it has schema {found}, this one knows up to {schema.HEAD}",
            hint="run the newer one, or put back the copy that it kept beside it",
        ) from error
    log.info("database has to be upgraded", path=str(path), was=found, to=schema.HEAD)
    with _told("database is being copied"):
        copy = _keep_copy(path, found) if path else None
    try:
        with _told("database is being upgraded"), Operations.context(context):
            context.run_migrations()
    except sa.exc.DatabaseError as error:
        raise Broken(
            f"{path} could not be upgraded from schema {found} to {schema.HEAD}: {error.orig}",
            hint="it is as it was; is its disk full? If not, run the Multiverse that wrote it, and report this",
        ) from error
    log.info("database upgraded", path=str(path), was=found, now=schema.HEAD, copy=str(copy))


def _told(what: str) -> AbstractContextManager[None]:
    """Log every few seconds that this goes on: nobody is to think that a daemon hangs that has a large database."""
    began = time.monotonic()
    return called_every(TELLS_EVERY, lambda: log.info(what, seconds=round(time.monotonic() - began)), what)


def _keep_copy(path: Path, found: str) -> Path:
    """A copy as of the last commit, whole or not there at all; an older copy of that revision makes way for it."""
    copy = path.with_name(f"{path.name}.schema-{found}")
    fresh = copy.with_name(f"{copy.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        # A connection of its own: SQLite's backup waits for ever on one that is within a transaction that writes.
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(fresh)) as target:
            source.backup(target)
        fresh.rename(copy)
    except (OSError, sqlite3.Error) as error:
        fresh.unlink(missing_ok=True)
        raise Exhausted(
            f"cannot keep a copy of {path} before its upgrade: {error}", hint="is its disk full? nothing was changed"
        ) from error
    return copy
