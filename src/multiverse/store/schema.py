"""The tables, as the newest revision has them, and the upgrade of a database to it.

Opening a database makes or upgrades it within its transaction; a newer one is refused. After a failure it is as it was,
and before an upgrade a copy is kept. To change the schema, change the tables here and add a file to `versions`: its
`revision` is the new `HEAD`, its `down_revision` the one before, and `upgrade` changes tables and rows by `alembic.op`.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import structlog

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.core.model.usage import MAY_BE_UNKNOWN, MEANS, PEAKS
from multiverse.system.interrupts import called_every

HEAD = "0001"  # the newest revision: what a database is upgraded to

metadata = sa.MetaData()
meta = sa.Table(
    "meta", metadata, sa.Column("key", sa.String, primary_key=True), sa.Column("value", sa.String, nullable=False)
)


def _row_table(name: str, *extra: sa.Column[Any]) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("live", sa.Boolean, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        *extra,
        # Of the live rows alone: the ended ones are many.
        sa.Index(f"ix_{name}_live", "id", sqlite_where=sa.text("live = 1")),
    )


attempts = _row_table("attempts", sa.Column("job_id", sa.String, nullable=False, index=True))
sa.Index("ix_attempts_live_job", attempts.c.job_id, sqlite_where=sa.text("live = 1"))
vms = _row_table("vms", sa.Column("attempt", sa.Integer, nullable=True, index=True))
templates = _row_table("templates")
offers = _row_table("offers")
ended = sa.Table(
    "ended",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("wall", sa.Float, nullable=False),  # Unix time
    sa.Index("ix_ended_wall", "kind", "wall"),
)
"""When rows of the four tables above, leases and their hosts ended; live rows are not in it."""
reserve = sa.Table(
    "reserve",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("room", sa.LargeBinary, nullable=False),
)
"""At most one row, which holds pages for releases (`store/reserve`)."""
hosts = _row_table("hosts", sa.Column("name", sa.String, nullable=False, unique=True, index=True))
leases = _row_table("leases")
saved = _row_table("saved")
claims = sa.Table(
    "claims",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("domain", sa.String, primary_key=True),
    sa.Column("cpus", sa.Integer, nullable=False),
    sa.Column("memory", sa.Integer, nullable=False),
    sa.Column("disk", sa.Integer, nullable=False),
    sa.Column("net", sa.Integer, nullable=False, server_default="0"),
)
journal = sa.Table(
    "journal",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("boot", sa.String, nullable=False),
    sa.Column("mono", sa.Float, nullable=False),
    sa.Column("wall", sa.Float, nullable=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("id", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=True, index=True),
    sa.Column("event", sa.String, nullable=False),
    sa.Column("source", sa.String, nullable=True),
    sa.Column("target", sa.String, nullable=True),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("detail", sa.String, nullable=False),
    sa.Index("ix_journal_row", "kind", "id"),
)
utilization = sa.Table(
    "utilization",
    metadata,
    sa.Column("kind", sa.String, primary_key=True),  # of what: host or vm
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("span", sa.Integer, primary_key=True),  # seconds: 60 or 3600
    sa.Column("wall", sa.Integer, primary_key=True),  # Unix time at which the span begins
    sa.Column("covered", sa.Float, nullable=False),  # seconds of it that are known
    *(sa.Column(name, sa.Float, nullable=name in MAY_BE_UNKNOWN) for name in (*PEAKS, *MEANS)),
    sa.Index("ix_utilization_age", "span", "wall"),
    sqlite_with_rowid=False,
)
"""What hosts and VMs have used (`store/history`)."""
job_usage = sa.Table(
    "job_usage",
    metadata,
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("wall", sa.Float, nullable=False, index=True),  # Unix time at which it was written
    sa.Column("body", sa.String, nullable=False),
)
"""What runs of jobs have used (`store/history`)."""


# --- upgrade ----------------------------------------------------------------------------------------


log = structlog.get_logger()

TELLS_EVERY = 5.0  # seconds between two lines of the log while an upgrade goes on

VERSIONS = Path(__file__).parent / "versions"

_VERSION = sa.Table(  # as Alembic itself would make it
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


def upgrade(connection: sa.Connection, path: Path | None) -> None:
    """Bring the schema up to `HEAD`. Call it within BEGIN IMMEDIATE; `path` None: in memory.
    `Refused` for a database of newer software, `Broken` when a revision fails, `Exhausted` when no copy can be kept."""
    found = revision(connection)
    if found == HEAD:
        return
    if found is None:
        metadata.create_all(connection, checkfirst=False)
        _VERSION.create(connection, checkfirst=False)
        connection.execute(_VERSION.insert(), {"version_num": HEAD})
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
        connection, opts={"fn": lambda revisions, _: scripts._upgrade_revs(HEAD, revisions)}
    )
    try:
        scripts.revision_map.get_revision(found)
    except ResolutionError as error:
        raise Refused(
            f"{path} is of a newer Multiverse: it has schema {found}, this one knows up to {HEAD}",
            hint="run the newer one, or put back the copy that it kept beside it",
        ) from error
    log.info("database has to be upgraded", path=str(path), was=found, to=HEAD)
    with _told("database is being copied"):
        copy = _keep_copy(path, found) if path else None
    try:
        with _told("database is being upgraded"), Operations.context(context):
            context.run_migrations()
    except sa.exc.DatabaseError as error:
        raise Broken(
            f"{path} could not be upgraded from schema {found} to {HEAD}: {error.orig}",
            hint="it is as it was; is its disk full? If not, run the Multiverse that wrote it, and report this",
        ) from error
    log.info("database upgraded", path=str(path), was=found, now=HEAD, copy=str(copy))


def _told(what: str) -> AbstractContextManager[None]:
    """Log every few seconds that this goes on, so that nobody thinks that the daemon hangs."""
    began = time.monotonic()
    return called_every(TELLS_EVERY, lambda: log.info(what, seconds=round(time.monotonic() - began)), what)


def _keep_copy(path: Path, found: str) -> Path:
    """A copy as of the last commit, whole or not there at all. It replaces an older copy."""
    copy = path.with_name(f"{path.name}.schema-{found}")
    fresh = copy.with_name(f"{copy.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        # A connection of its own: SQLite's backup waits for ever on a connection that writes.
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(fresh)) as target:
            source.backup(target)
        fresh.rename(copy)
    except (OSError, sqlite3.Error) as error:
        fresh.unlink(missing_ok=True)
        raise Exhausted(
            f"cannot keep a copy of {path} before its upgrade: {error}", hint="is its disk full? nothing was changed"
        ) from error
    return copy
