"""The schema of the store: an older database is upgraded whole, a newer one refused, and a failure changes nothing.

There is one released schema so far, so the newer one is made up.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.job import Job, JobState, SchedulerView
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import VmCondition, VmSeen
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.planner import plan
from multiverse.core.state import State
from multiverse.store import Store, schema
from tests.newer_schema import NEWER, make_newer
from tests.unit.planner_harness import POLICY, ManualClock
from tests.unit.rows import IMAGES, indexes_of

SCHEMA_0001 = (Path(__file__).parent / "schema_0001.sql").read_text()
"""A database of the first release, with rows in every state."""


@pytest.fixture
def released(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.executescript(SCHEMA_0001)
    return tmp_path / "db"


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This software has a newer schema, by one revision."""
    monkeypatch.setattr(schema, "VERSIONS", schema.VERSIONS)  # both are put back at the end
    monkeypatch.setattr(schema, "HEAD", schema.HEAD)
    make_newer(tmp_path / "versions")


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return sorted(connection.iterdump())


def form(path: Path) -> set[tuple[str, str]]:
    """Every table and index, as SQLite keeps it."""
    with closing(sqlite3.connect(path)) as connection:
        return {
            (name, " ".join(sql.split()))
            for name, sql in connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        }


def test_a_database_of_the_first_release_is_opened_with_all_its_rows(released: Path) -> None:
    with closing(sqlite3.connect(released)) as connection:
        tables = ("attempts", "vms", "templates", "offers", "hosts")
        states = {
            table: dict(connection.execute(f"SELECT id, state FROM {table} WHERE live").fetchall()) for table in tables
        }
    store = Store(released, ManualClock())
    rows = store.rows()
    assert {len(kind) for kind in states.values()} == {4, 9, 15, 25}
    for table, known in states.items():
        assert {row.id: str(row.state) for row in getattr(rows, table).values()} == known
    assert (rows.site, len(rows.claims), len(store.journal())) == ("test0", 29, 52)
    assert len(store.attempts()) == 20 and [vm.id for vm in store.vms_of([16, 17])] == [23, 24], "ended ones, too"
    store.close()


def test_the_schema_of_a_release_does_not_change_but_by_a_revision(released: Path, tmp_path: Path) -> None:
    """If this fails, add a revision, and do not edit what has been released."""
    Store(released, ManualClock()).close()
    Store(tmp_path / "fresh", ManualClock()).close()
    assert form(released) == form(tmp_path / "fresh")
    engine = sa.create_engine(f"sqlite:///{released}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    engine.dispose()


def test_the_revisions_lead_from_the_first_release_to_the_head() -> None:
    scripts = ScriptDirectory(schema.VERSIONS.parent, version_locations=[schema.VERSIONS])
    assert scripts.get_heads() == [schema.HEAD] and scripts.get_bases() == ["0001"]


@pytest.mark.usefixtures("newer")
def test_an_older_database_is_upgraded_with_all_its_rows_and_its_copy_is_kept(released: Path) -> None:
    before = dump(released)
    store = Store(released, ManualClock())
    assert len(store.rows().vms) == 25 and len(store.journal()) == 52
    assert store._connection.exec_driver_sql("SELECT DISTINCT made_up FROM vms").scalars().all() == [7]
    store.close()
    assert dump(released.with_name("db.schema-0001")) == before, "the copy is what there was"


@pytest.mark.parametrize("upgraded", [False, True])
def test_opening_again_changes_nothing(released: Path, upgraded: bool, request: pytest.FixtureRequest) -> None:
    if upgraded:
        request.getfixturevalue("newer")
    Store(released, ManualClock()).close()
    copy = released.with_name("db.schema-0001")
    copy.unlink(missing_ok=not upgraded)
    before = dump(released)
    Store(released, ManualClock()).close()
    assert dump(released) == before and not copy.exists()


def test_a_database_of_newer_software_is_refused_and_not_touched(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(schema, "VERSIONS", schema.VERSIONS)
        later.setattr(schema, "HEAD", schema.HEAD)
        make_newer(tmp_path / "versions")
        Store(released, ManualClock()).close()
    before = dump(released)
    with pytest.raises(Refused, match=f"newer Multiverse: it has schema {NEWER}") as caught:
        Store(released, ManualClock(boot="another"))
    assert caught.value.hint and "copy" in caught.value.hint
    assert dump(released) == before


@pytest.mark.usefixtures("newer")
def test_a_failed_upgrade_leaves_the_database_as_it_was(released: Path) -> None:
    with closing(sqlite3.connect(released)) as connection:
        connection.execute("DROP INDEX ix_templates_live")  # so the last step of the revision fails
    before = dump(released)
    with pytest.raises(Broken, match=f"could not be upgraded from schema 0001 to {NEWER}"):
        Store(released, ManualClock(boot="another"))
    assert dump(released) == before


@pytest.mark.usefixtures("newer")
def test_without_a_copy_nothing_is_upgraded(released: Path) -> None:
    before = dump(released)
    released.with_name("db.schema-0001").mkdir()  # in the way
    with pytest.raises(Exhausted, match="cannot keep a copy"):
        Store(released, ManualClock())
    assert dump(released) == before and not released.with_name("db.schema-0001.new").exists()


@pytest.mark.parametrize("table", ["music (title)", "alembic_version (version_num)"])
def test_a_database_of_something_else_is_named_and_not_touched(tmp_path: Path, table: str) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.execute(f"CREATE TABLE {table}")
    with pytest.raises(Broken, match="something else"):
        Store(tmp_path / "db", ManualClock())
    assert [name for name, _ in form(tmp_path / "db")] == [table.split()[0]]


def test_what_is_asked_often_reads_an_index(tmp_path: Path) -> None:
    Store(tmp_path / "db", ManualClock()).close()
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'db'}")
    asked: list[str] = []
    store = Store(tmp_path / "db", ManualClock())
    sa.event.listen(
        store._connection,
        "before_cursor_execute",
        lambda c, k, sql, args, *_: asked.append((sql, args)),  # type: ignore[arg-type]
    )
    store._active = None
    store.rows()
    store.attempts(job_id="12")
    store.vms_of([1])
    store.journal(attempts=[1])
    with engine.connect() as connection:
        for sql, args in asked:
            if sql.startswith("SELECT") and "FROM meta" not in sql and "FROM claims" not in sql:
                steps = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", args)]
                assert not [s for s in steps if s.startswith("SCAN") and "INDEX" not in s], (sql, steps)
    engine.dispose()
    store.close()


def test_the_planner_goes_on_with_rows_of_the_first_release(released: Path) -> None:
    """A first pass that shows all VMs, then one that shows none of them: no record becomes impossible."""
    store = Store(released, ManualClock())
    state, before = State(store.rows(), TABLES), store.rows()
    assert indexes_of(state) == indexes_of(State(state.rows(), TABLES))
    hosts = {name: Host(name, Size(64, 65536, 65536), frozenset({"instant"}), images=IMAGES) for name in ("h1", "h2")}
    for shown in (True, False):
        live = [vm for vm in state.vms.values() if shown]
        sources = {
            name: Observation(
                Seen(
                    HypervisorView(
                        {name: host},
                        {vm.name: VmSeen(vm.name, vm.host, VmCondition.RUNNING) for vm in live if vm.host == name},
                    ),
                    2000.0,
                )
            )
            for name, host in hosts.items()
        }
        attempts = list(state.attempts.values()) if shown else []
        jobs = {a.job.job_id: Job(a.job, "hello", 1000, JobState.PENDING, a.request) for a in attempts}
        ended = {row.key: 1500.0 for row in (*state.vms.values(), *state.attempts.values())}
        world = World(Seen(SchedulerView(jobs), 2000.0), sources, ended, entropy="x")
        with store.transaction() as tx:
            moves = plan(state, world, [], 2001.0, POLICY)
            for host in state.learned.values():
                tx.keep_host(host)
            for move in moves:
                tx.apply(move)
        assert moves and state.rows() == store.rows()
        faulty = [
            row.key for row in (*state.vms.values(), *state.attempts.values()) if "a fault" in text_of(row.quarantined)
        ]
        assert faulty in ([], [Key("vm", 22)]), "none but the one that was in quarantine before"
    gone = {id_ for id_ in before.vms if id_ not in state.vms}
    assert {20, 21} <= gone, "the VMs of the fenced host end without an observation of it"
    assert not [claim for claim in state.claims.values() if claim.domain == "h3"]
