"""The store's schema: older databases come along whole, newer ones are refused, failures leave no trace."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.core.model import AttemptState, VmState
from multiverse.store import Store, schema, upgrade
from tests.unit.planner_harness import ManualClock

BEFORE = (Path(__file__).parent / "before_alembic.sql").read_text()
"""A database as it was written before Alembic: one job runs, another is being given its VM."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.executescript(BEFORE)
    return tmp_path / "db"


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


def test_a_database_from_before_alembic_comes_along_with_all_its_rows(old: Path) -> None:
    before = dump(old)
    store = Store(old, ManualClock())
    rows = store.rows()
    assert rows.site == "test0" and (rows.next_attempt, rows.next_serial, rows.next_template) == (3, 3, 2)
    assert [a.state for a in rows.attempts.values()] == [AttemptState.ALLOCATED, AttemptState.CLAIMED]
    assert [vm.state for vm in rows.vms.values()] == [VmState.SERVING, VmState.PLANNED]
    (template,) = rows.templates.values()
    assert {vm.template for vm in rows.vms.values()} == {template.which}, "they hold the one that they came from"
    assert len(rows.claims) == 3 and len(store.journal()) == 15
    store.close()
    assert dump(old.with_name("db.schema-0001")) == before, "the copy is what there was"


def test_an_upgraded_database_and_a_fresh_one_are_the_same_and_as_the_tables_say(old: Path, tmp_path: Path) -> None:
    Store(old, ManualClock()).close()
    Store(tmp_path / "fresh", ManualClock()).close()
    assert form(old) == form(tmp_path / "fresh")
    engine = sa.create_engine(f"sqlite:///{old}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []
    engine.dispose()


def test_the_revisions_lead_from_the_baseline_to_the_head() -> None:
    scripts = ScriptDirectory(upgrade.VERSIONS.parent, version_locations=[upgrade.VERSIONS])
    assert scripts.get_heads() == [schema.HEAD] and scripts.get_bases() == [upgrade.BASELINE]


def test_the_baseline_revision_makes_what_there_was_before_alembic(old: Path, tmp_path: Path) -> None:
    scripts = ScriptDirectory(upgrade.VERSIONS.parent, version_locations=[upgrade.VERSIONS])
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'base'}")
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"fn": lambda revisions, _: scripts._upgrade_revs(upgrade.BASELINE, revisions)}
        )
        with Operations.context(context):
            context.run_migrations()
    engine.dispose()
    assert {one for one in form(tmp_path / "base") if one[0] != "alembic_version"} == form(old)


def test_opening_again_changes_nothing(old: Path) -> None:
    Store(old, ManualClock()).close()
    copy = old.with_name("db.schema-0001")
    copy.unlink()
    before = dump(old)
    Store(old, ManualClock()).close()
    assert dump(old) == before and not copy.exists()


def test_a_database_of_newer_software_is_refused_and_not_touched(old: Path) -> None:
    Store(old, ManualClock()).close()
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    before = dump(old)
    with pytest.raises(Refused, match="newer Multiverse: it has schema 9999"):
        Store(old, ManualClock(boot="another"))
    assert dump(old) == before


def test_a_failed_upgrade_leaves_the_database_as_it_was(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("DROP INDEX ix_templates_live")  # so the last step of the revision fails
    before = dump(old)
    with pytest.raises(Broken, match="could not be upgraded from schema 0001 to 0003"):
        Store(old, ManualClock(boot="another"))
    assert dump(old) == before


def test_without_a_copy_nothing_is_upgraded(old: Path) -> None:
    before = dump(old)
    old.with_name("db.schema-0001").mkdir()  # in the way
    with pytest.raises(Exhausted, match="cannot keep a copy"):
        Store(old, ManualClock())
    assert dump(old) == before and not old.with_name("db.schema-0001.new").exists()


def test_a_database_of_something_else_is_named_and_not_touched(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.execute("CREATE TABLE music (title)")
    with pytest.raises(Broken, match="something else"):
        Store(tmp_path / "db", ManualClock())
    assert [name for name, _ in form(tmp_path / "db")] == ["music"]


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
