"""Live rows, claims, and the journal, in one SQLite file.

Synchronous, on the loop's thread: one connection, explicit BEGIN IMMEDIATE, one commit for each pass. A row is its
dataclass as JSON beside the few columns that are asked for. After a failure in a transaction nothing of it is kept.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from pydantic import TypeAdapter

from multiverse.core.copies import replaced
from multiverse.core.errors import Broken, Exhausted, MultiverseError, Refused
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Key, RowKind, Size
from multiverse.core.model.host import Claim, KnownHost
from multiverse.core.model.identity import LAST_SERIAL
from multiverse.core.model.job import Attempt, Lease
from multiverse.core.model.reason import Reason, said
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import Offer, Stage, Template, Vm
from multiverse.core.model.world import Row
from multiverse.core.rows import Rows
from multiverse.core.transition import TERMINAL, Change, Move, RowState, Tables
from multiverse.ports import Clock
from multiverse.store import schema
from multiverse.store.reserve import Reserve, restore_log
from multiverse.store.schema import upgrade

_KINDS: dict[RowKind, tuple[sa.Table, type[Row]]] = {
    "attempt": (schema.attempts, Attempt),
    "vm": (schema.vms, Vm),
    "template": (schema.templates, Template),
    "offer": (schema.offers, Offer),
    "host": (schema.hosts, KnownHost),
    "lease": (schema.leases, Lease),
    "saved": (schema.saved, Saved),
}
_TABLES = {kind: table for kind, (table, _) in _KINDS.items()}
_COUNTERS: dict[RowKind, str] = {
    "attempt": "next_attempt",
    "vm": "next_serial",
    "template": "next_template",
    "lease": "next_lease",
    "saved": "next_saved",
}
"""An offer has the serial of its VM. The number of a host is one above those of the other hosts; that of a leased one
is its lease's, made negative."""

_ALL_META = sa.select(schema.meta)
_LEAVE_OUT = sa.text("UPDATE meta SET value = MAX(CAST(value AS INTEGER) + :number, :least) WHERE key = :key")


# What every pass executes is text for SQLite's driver, which keeps it prepared: SQLAlchemy takes ten times as long to
# look a statement up as SQLite to run it.
def _insert(table: sa.Table, *left_out: str) -> str:
    names = [column.name for column in table.columns if column.name not in left_out]
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})"


def _update(table: sa.Table) -> str:
    names = [column.name for column in table.columns if column.name != "id"]
    return f"UPDATE {table.name} SET {', '.join(f'{name} = :{name}' for name in names)} WHERE id = :id"


_LIVE = {
    kind: f"SELECT id, version, body FROM {table.name} WHERE live = 1 ORDER BY id" for kind, table in _TABLES.items()
}
_ALL_CLAIMS = "SELECT kind, id, domain, cpus, memory, disk, net FROM claims ORDER BY kind, id, domain"
_STATE = {kind: f"SELECT version, state FROM {table.name} WHERE id = ?" for kind, table in _TABLES.items()}
_INSERT = {kind: _insert(table) for kind, table in _TABLES.items()}
_UPDATE = {kind: _update(table) for kind, table in _TABLES.items()}
_COUNT = "UPDATE meta SET value = MAX(CAST(value AS INTEGER), :next) WHERE key = :key"
_PUT_META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
_CLAIM = _insert(schema.claims)
_UNCLAIM = "DELETE FROM claims WHERE kind = ? AND id = ? AND domain = ?"
_KEEP_HOST = """INSERT INTO hosts (id, version, state, live, body, name) VALUES (:id, :version, :state, 1, :body, :name)
                ON CONFLICT (id) DO UPDATE SET version = :version, state = :state, body = :body"""
_NOTE = _insert(schema.journal, "seq")
_ENDED = _insert(schema.ended)

_ADAPTERS = {kind: TypeAdapter[Any](type_) for kind, (_, type_) in _KINDS.items()}


_REASON = TypeAdapter(Reason)
_SKIPPED = TypeAdapter(list[tuple[int, int]])


def _body(row: Row) -> str:
    if isinstance(row, KnownHost):  # what was observed of a host has sets, too; it is seldom written
        return str(_ADAPTERS["host"].dump_json(row), "utf-8")
    return _JSON.encode(row)


def _plain(value: object) -> object:
    """A value for JSON; of a reason, without what is empty. (`asdict` copies everything first, and is slow.)"""
    kind: Any = type(value)
    names, read = _fields_of(kind)
    if not names:
        return str(value)
    found = zip(names, read(value), strict=True)
    return {name: one for name, one in found if one} if kind is Reason else dict(found)


_JSON = json.JSONEncoder(default=_plain)


@cache
def _fields_of(kind: type[Any]) -> tuple[tuple[str, ...], Callable[[object], tuple[object, ...]]]:
    """The names of a dataclass's fields, and what reads them; no names for another class."""
    names = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
    if len(names) < 2:
        return names, lambda value: tuple(getattr(value, name) for name in names)
    return names, attrgetter(*names)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal. `mono` compares only among entries of one `boot`."""

    seq: int
    boot: str
    mono: float
    wall: float
    kind: RowKind
    id: int
    attempt: int | None
    event: str
    source: str | None
    target: str | None
    reason: Reason | None
    detail: dict[str, Any]


Values = dict[str, Any] | list[dict[str, Any]]  # the parameters of a statement, or of each of its executions

NUMBERS_A_SECOND = 20
"""Numbers that are left out at each opening for each second since the last use: more than a site gives on average. So a
database that was restored from an older copy gives no number again. They are left out for each second since the site's
first if it was in use before this boot, or elsewhere, or replaces a lost one: names suffice for 89 years of that."""

MOST_SKIPPED = 1000
"""Ranges of numbers of saved jobs that are known to have been left out, the last ones: each opening adds one at most.
States are kept for days, in which a controller is not started so often."""

USE_NOTED_EVERY = 20.0  # seconds between two notes of the time while nothing else changes
FIRST_SITE = 1_600_000_000.0  # Unix time before which no site began: September 2020


class StoreConflict(MultiverseError):
    """A move was planned on a row that has changed since, or against the tables: a bug, never routine."""


class Store:
    """Opens or makes the database. `path` ":memory:" keeps it in this process alone. A move that `tables` lack is
    refused. `recovered` says that VMs of `site` may exist, should the database be a new one."""

    def __init__(
        self,
        path: Path | str,
        clock: Clock,
        *,
        site: str | None = None,
        recovered: bool = False,
        tables: Tables = TABLES,
    ) -> None:
        self._tables = tables
        self._clock = clock
        kept = None if str(path) == ":memory:" else Path(path)
        if kept is None:
            engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
        else:
            restore_log(kept)
            engine = sa.create_engine(f"sqlite:///{path}")
        sa.event.listen(engine, "connect", _configure)
        self._open = False
        self.commits = 0  # that changed something
        self._cache: dict[tuple[RowKind, int, int], Row] = {}
        self._active: Rows | None = None  # as committed; we are the only writer, so a quiet pass reads nothing
        self._reserve = Reserve(kept, lambda *statement: self._connection.exec_driver_sql(*statement))
        try:
            self._connection = engine.connect()
            with self._begin():
                upgrade(self._connection, kept)
                self._set_default("since", str(self._site_began(recovered)))
                self._set_default("site", site or _new_site())
                self._set_default("epoch", "0")
                for counter in _COUNTERS.values():
                    self._set_default(counter, "1")
                self._set_default("skipped_saved", "[]")
                self._skip_numbers()
                self._enter_boot()
                self._put_meta("used", str(clock.wall()))
            self._use_noted = clock.now()
            self._reserve.open()
            with suppress(Exhausted), self._begin():  # if there is room for it
                self._reserve.prepare(adds=True)
        except MultiverseError:
            engine.dispose()
            self._reserve.close()
            raise
        except sa.exc.OperationalError as error:
            hint = "is there room on its disk, and may this process write to its directory?"
            raise Exhausted(f"cannot open {path}: {error.orig}", hint=hint) from error
        except sa.exc.DatabaseError as error:
            raise Broken(f"cannot open {path}: {error.orig}", hint="is it a database of Multiverse?") from error
        self.site = self._meta("site")

    def close(self) -> None:
        self._use_noted = -USE_NOTED_EVERY
        self.note_use()
        self._reserve.keep()
        self._connection.close()
        self._connection.engine.dispose()
        self._reserve.close()

    # --- transactions ------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, *, releasing: bool = False) -> Iterator[Transaction]:
        """One transaction. Leaving it commits; an exception rolls back, and nothing of it is kept.
        Raises `Exhausted` when the disk is full; a transaction that only releases (`releasing`) may use the room that
        is reserved for it. Nothing is asked of the database before there is something to read or write, which in most
        passes there is not."""
        with ExitStack() as stack:

            def begin() -> None:
                if not self._open:
                    stack.enter_context(self._begin(adds=not releasing, borrows=releasing))

            yield Transaction(self, begin)

    @contextmanager
    def _begin(self, *, adds: bool = False, borrows: bool = False, counted: bool = True) -> Iterator[None]:
        """Refused if it `adds` and the reserve is not whole. `borrows`: it may use the reserve."""
        try:
            self._driver().execute("BEGIN IMMEDIATE")
            self._open = True
            try:
                if borrows:
                    self._reserve.lend()
                before = self._changes()
                yield
                changed = self._changes() > before
                if changed:
                    self._reserve.prepare(adds=adds)
                self._driver().execute("COMMIT")
                self.commits += changed and counted
            except BaseException:
                self._forget()
                if self._driver().in_transaction:
                    self._driver().execute("ROLLBACK")
                self._reserve.forget()
                raise
        except (sa.exc.OperationalError, sqlite3.OperationalError) as error:
            why = error.orig if isinstance(error, sa.exc.OperationalError) else error
            raise Exhausted(f"the database did not take it: {why}", hint="is its disk full?") from error
        finally:
            # The driver's transaction is over; SQLAlchemy's view of it must not stay open across passes.
            self._open = False
            self._connection.commit()

    @contextmanager
    def maintenance(self, *, adds: bool = False) -> Iterator[Callable[[sa.Executable, Values], sa.CursorResult[Any]]]:
        """One transaction on what no pass reads: a function that executes a statement. Raises as `transaction`."""
        with self._begin(adds=adds):
            yield self._execute

    def _driver(self) -> sqlite3.Connection:
        return self._connection.connection.dbapi_connection  # type: ignore[return-value]

    def _changes(self) -> int:
        return self._driver().total_changes

    @contextmanager
    def _reading(self) -> Iterator[None]:
        yield
        if not self._open:
            self._connection.commit()

    def _forget(self) -> None:
        self._cache.clear()
        self._active = None

    def _site_began(self, recovered: bool) -> float:
        """The Unix time of the first thing that the database knows of: each copy of it says the same."""
        if self._scalar("SELECT value FROM meta WHERE key = 'site'") is None:
            return FIRST_SITE if recovered else self._clock.wall()
        first = self._scalar("SELECT MIN(wall) FROM journal")
        return FIRST_SITE if first is None else float(first)

    def _scalar(self, query: str) -> Any:
        return self._connection.scalar(sa.text(query))

    def _skip_numbers(self) -> None:
        """Take no number that a later state of this database, or an earlier database, may have given."""
        now, meta = self._clock.wall(), {row.key: row.value for row in self._connection.execute(_ALL_META)}
        unused = now - float(meta.get("used", now))
        here = "used" in meta and unused >= 0 and meta.get("boot") == self._clock.boot_id()
        left_out, least = _numbers(unused), 0 if here else _numbers(now - float(meta["since"]))
        for counter in ("next_serial", "next_attempt", "next_lease", "next_saved"):
            self._execute(_LEAVE_OUT, {"number": left_out, "least": least, "key": counter})
        self._note_skipped(int(meta["next_saved"]), int(self._meta("next_saved")))

    def _note_skipped(self, first: int, end: int) -> None:
        """Keep which numbers of saved jobs were left out: files of that number are of no row that has ended."""
        ranges = _SKIPPED.validate_json(self._meta("skipped_saved"))
        if ranges and ranges[-1][1] == first:  # none was given meanwhile
            first = ranges.pop()[0]
        if first < end:
            ranges = [*ranges[1 - MOST_SKIPPED :], (first, end)]
        self._put_meta("skipped_saved", json.dumps(ranges))

    def note_use(self) -> None:
        """Note the time in the database, if the last note is too old. The next commit reports a failure."""
        now = self._clock.now()
        if now - self._use_noted < USE_NOTED_EVERY:
            return
        self._use_noted = now
        with suppress(Exhausted), self._begin(counted=False):
            self._put_meta("used", str(self._clock.wall()))

    def _enter_boot(self) -> None:
        """Monotonic times of an earlier boot mean nothing now: live rows are taken as of this moment."""
        boot = self._clock.boot_id()
        before = self._connection.scalar(sa.select(schema.meta.c.value).where(schema.meta.c.key == "boot"))
        if before not in (None, boot):
            for kind, table in _TABLES.items():
                for row in self._live(kind):
                    moved = replace(row, since=self._clock.now())
                    if isinstance(moved, Attempt):
                        moved = replace(moved, not_before=0.0)
                    self._execute(table.update().where(table.c.id == row.id).values(body=_body(moved)))
        self._cache.clear()
        self._put_meta("boot", boot)

    # --- rows --------------------------------------------------------------------------------------

    def _live(self, kind: RowKind) -> list[Any]:
        return [self._decode(kind, *row) for row in self._run(_LIVE[kind], ()).fetchall()]

    def _decode(self, kind: RowKind, id_: int, version: int, body: str) -> Any:
        cached = self._cache.get((kind, id_, version))
        if cached is None:
            cached = self._cache[kind, id_, version] = _ADAPTERS[kind].validate_json(body)
        return cached

    def _execute(self, statement: sa.Executable, values: Values | None = None) -> sa.CursorResult[Any]:
        return self._connection.execute(statement, values)

    def _run(self, statement: str, values: Mapping[str, object] | tuple[object, ...]) -> sqlite3.Cursor:
        return self._driver().execute(statement, values)

    def _meta(self, key: str) -> str:
        with self._reading():
            return str(self._connection.scalar(sa.select(schema.meta.c.value).where(schema.meta.c.key == key)))

    @property
    def epoch(self) -> int:
        """The highest epoch that was kept, 0 if none: controllers with this database are numbered by it."""
        return int(self._meta("epoch"))

    def keep_epoch(self, number: int) -> None:
        """Keep the epoch of this run of the controller. Raises as `transaction` does."""
        with self._begin():
            self._put_meta("epoch", str(number))

    def _put_meta(self, key: str, value: str) -> None:
        self._run(_PUT_META, (key, value))

    def _set_default(self, key: str, value: str) -> None:
        self._execute(sa.text("INSERT OR IGNORE INTO meta VALUES (:key, :value)").bindparams(key=key, value=value))

    # --- for people ----------------------------------------------------------------------------------

    def rows(self) -> Rows:
        with self.transaction() as tx:
            return tx.load_active()

    def attempts(self, *, job_id: str | None = None, limit: int = 1000) -> list[Attempt]:
        """Attempts, the newest first, ended ones too; of one job, or of an array (`123` finds `123_4`)."""
        query = sa.select(schema.attempts.c.body)
        if job_id is not None:
            # Not LIKE, which would read every attempt there ever was: "`" follows "_", so this is the index's range.
            known = schema.attempts.c.job_id
            query = query.where((known == job_id) | ((known > f"{job_id}_") & (known < f"{job_id}`")))
        with self._reading():
            rows = self._execute(query.order_by(schema.attempts.c.id.desc()).limit(limit)).all()
        return [_ADAPTERS["attempt"].validate_json(row.body) for row in rows]

    def vms_of(self, attempts: Sequence[int]) -> list[Vm]:
        """All VMs, gone ones too, that were made for these attempts."""
        query = sa.select(schema.vms.c.body).where(schema.vms.c.attempt.in_(attempts))
        with self._reading():
            rows = self._execute(query.order_by(schema.vms.c.id)).all()
        return [_ADAPTERS["vm"].validate_json(row.body) for row in rows]

    def leases(self, limit: int = 100) -> list[Lease]:
        """Leases, the newest first, gone ones too."""
        query = sa.select(schema.leases.c.body).order_by(schema.leases.c.id.desc()).limit(limit)
        with self._reading():
            rows = self._execute(query).all()
        return [_ADAPTERS["lease"].validate_json(row.body) for row in rows]

    def journal(self, *, attempts: Sequence[int] | None = None, after: int = 0) -> list[Entry]:
        """Journal entries in order; of these attempts and their VMs only, if given."""
        query = sa.select(schema.journal).where(schema.journal.c.seq > after)
        if attempts is not None:
            query = query.where(schema.journal.c.attempt.in_(attempts))
        with self._reading():
            rows = self._execute(query.order_by(schema.journal.c.seq)).mappings().all()
        return [
            Entry(
                **{
                    **row,
                    "reason": _REASON.validate_json(row["reason"]) if row["reason"] else None,
                    "detail": json.loads(row["detail"]),
                }
            )
            for row in rows
        ]


class Transaction:
    """What may be done between BEGIN and COMMIT."""

    def __init__(self, store: Store, begin: Callable[[], None]) -> None:
        self._store = store
        self._begin = begin

    def load_active(self) -> Rows:
        s = self._store
        if s._active is None:
            self._begin()
            s._active = self._read_active()
        return s._active

    def _read_active(self) -> Rows:
        s = self._store
        meta = {row.key: row.value for row in s._execute(_ALL_META)}
        claims = s._run(_ALL_CLAIMS, ()).fetchall()
        found: dict[str, Any] = {name: {row.id: row for row in s._live(kind)} for kind, name in Rows.table_of.items()}
        found |= {name: int(meta[name]) for name in _COUNTERS.values()}
        found["skipped_saved"] = tuple(_SKIPPED.validate_json(meta["skipped_saved"]))
        return Rows(
            site=meta["site"],
            claims=tuple(Claim(Key(kind, id_), domain, Size(*held)) for kind, id_, domain, *held in claims),
            hosts={row.name: row for row in sorted(s._live("host"), key=lambda host: host.name)},
            **found,
        )

    def keep_host(self, host: KnownHost) -> None:
        """Keep what is known of a host, which is no move of it."""
        self._begin()
        s = self._store
        s._active = None
        known = {"id": host.id, "version": host.version, "state": str(host.state), "name": host.name}
        s._run(_KEEP_HOST, {**known, "body": _body(host)})
        s._cache["host", host.id, host.version] = host

    def apply(self, move: Move) -> None:
        """Write one move: version check, table check, rows, claims, journal. Raises `StoreConflict`."""
        self._begin()
        self._store._active = None
        for key in move.free:
            self._store._run(_UNCLAIM, (key.owner.kind, key.owner.id, key.domain))
        for change in move.changes:
            self._apply(change)
        for claim in move.make:
            size = claim.size
            held = {"cpus": size.cpus, "memory": size.memory, "disk": size.disk, "net": size.net}
            self._store._run(_CLAIM, {"kind": claim.owner.kind, "id": claim.owner.id, "domain": claim.domain, **held})

    def _apply(self, change: Change) -> None:
        row, s = change.row, self._store
        kind = row.key.kind
        known = s._cache.get((kind, row.id, row.version))  # as committed: we are the only writer
        source = known.state if known is not None else self._state_of(row)
        if not s._tables.allowed(kind, source, change.event, row.state):
            raise StoreConflict(f"{row.key}: no transition {source} --{change.event}--> {row.state} in its table")
        written = replaced(row, version=row.version + 1)
        live = written.state not in TERMINAL
        values: dict[str, Any] = {
            "id": row.id,
            "version": written.version,
            "state": str(written.state),
            "live": live,
            "body": _body(written),
        }
        if isinstance(written, Attempt):
            values["job_id"] = written.job.job_id
        elif isinstance(written, Vm):
            values["attempt"] = written.attempt
        elif isinstance(written, KnownHost):
            values["name"] = written.name
        if source is None:
            s._run(_INSERT[kind], values)
            if kind in _COUNTERS:
                s._run(_COUNT, {"next": row.id + 1, "key": _COUNTERS[kind]})
        else:
            s._run(_UPDATE[kind], values)
        if not live:
            s._run(_ENDED, {"kind": kind, "id": row.id, "wall": s._clock.wall()})
        s._cache.pop((kind, row.id, row.version), None)
        if live:
            s._cache[kind, row.id, written.version] = written
        self._journal(written, str(change.event), source, written.state, change.reason, {})

    def _state_of(self, row: Row) -> RowState | None:
        """The state of a row of that version in the database; None if the row is new. Raises `StoreConflict`."""
        found = self._store._run(_STATE[row.key.kind], (row.id,)).fetchone()
        if found is None and row.version != 0:
            raise StoreConflict(f"{row.key} does not exist, the move was made for version {row.version}")
        if found is None:
            return None
        version, state = found
        if version != row.version:
            raise StoreConflict(f"{row.key} has version {version}, the move was made for {row.version}")
        return type(row.state)(state)

    def measured(self, row: Row, event: str, stages: Sequence[Stage], error: str = "") -> None:
        """Journal what an effect reported: its stages, in seconds, or its error."""
        self._begin()
        detail = {"stages": [[stage.name, round(stage.seconds, 6)] for stage in stages]} if stages else {}
        self._journal(row, event, None, None, said(error), detail)

    def _journal(
        self, row: Row, event: str, source: object, target: object, reason: Reason | None, detail: dict[str, Any]
    ) -> None:
        s = self._store
        attempt = row.id if isinstance(row, Attempt) else row.attempt if isinstance(row, Vm) else None
        s._run(
            _NOTE,
            {
                "boot": s._clock.boot_id(),
                "mono": s._clock.now(),
                "wall": s._clock.wall(),
                "kind": row.key.kind,
                "id": row.id,
                "attempt": attempt,
                "event": event,
                "source": str(source) if source else None,
                "target": str(target) if target else None,
                "reason": _JSON.encode(reason) if reason else "",
                "detail": _JSON.encode(detail) if detail else "{}",
            },
        )


def _numbers(seconds: float) -> int:
    """How many numbers may have been given in this time; 0 if the clock is wrong."""
    count = int(seconds * NUMBERS_A_SECOND)
    return count if 0 <= count <= LAST_SERIAL // 2 else 0


def _new_site() -> str:
    """Five characters that look alike to nobody: 28 million sites before two meet by chance."""
    return "".join(secrets.choice("abcdefghjkmnpqrstvwxyz0123456789") for _ in range(5))


def _configure(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def open_store(state_dir: Path, clock: Clock, sites: Sequence[str] = ()) -> Store:
    """The store in a state directory, made if need be. If VMs of one site exist, a new database goes on with that site:
    its own was lost. Raises `Refused` if the directory cannot be used."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o711)
    except OSError as error:
        raise Refused(f"cannot use {state_dir}: {error.strerror}", hint="set state_dir in the settings") from error
    lost = sites[0] if len(sites) == 1 else None
    return Store(state_dir / "multiverse.db", clock, site=lost, recovered=lost is not None)
