"""The schema of the store: an older database is upgraded whole, a newer one refused, and a failure changes nothing."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from pydantic import TypeAdapter

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.core.machines.tables import TABLES
from multiverse.core.model import (
    Attempt,
    AttemptState,
    ClaimKey,
    Drain,
    Host,
    HostState,
    HypervisorView,
    Job,
    JobState,
    Key,
    KnownHost,
    Observation,
    Offer,
    OfferState,
    SchedulerView,
    Seen,
    Size,
    Template,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
    Why,
    World,
    said,
    text_of,
)
from multiverse.core.planner import plan
from multiverse.core.state import State
from multiverse.core.transition import Change, Event, Move
from multiverse.store import Store, schema, upgrade
from tests.unit.planner_harness import POLICY, ManualClock
from tests.unit.rows import IMAGES

BEFORE = (Path(__file__).parent / "before_alembic.sql").read_text()
"""A database as it was written before Alembic: one job runs, another is being given its VM."""

SCHEMA_0003 = (Path(__file__).parent / "schema_0003.sql").read_text()
"""A database that the release with schema 0003 wrote and reads: rows in every mixture of the flags that it had."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.executescript(BEFORE)
    return tmp_path / "db"


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "previous")) as connection:
        connection.executescript(SCHEMA_0003)
    return tmp_path / "previous"


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


def test_a_database_from_before_alembic_is_upgraded_with_all_its_rows(old: Path) -> None:
    before = dump(old)
    store = Store(old, ManualClock())
    rows = store.rows()
    assert rows.site == "test0" and (rows.next_attempt, rows.next_serial, rows.next_template) == (3, 3, 2)
    assert [a.state for a in rows.attempts.values()] == [AttemptState.ALLOCATED, AttemptState.CLAIMED]
    assert [vm.state for vm in rows.vms.values()] == [VmState.SERVING, VmState.PLANNED]
    (template,) = rows.templates.values()
    assert {vm.place.template for vm in rows.vms.values()} == {template.which}
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
    with pytest.raises(Broken, match=f"could not be upgraded from schema 0001 to {schema.HEAD}"):
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


# --- from 0003 to 0004: flags become states ----------------------------------------------------------

A, V, T, O = AttemptState, VmState, TemplateState, OfferState  # noqa: E741

ATTEMPTS = {
    1: A.QUEUED, 2: A.UNGATED, 3: A.STRAY, 4: A.CLAIMED, 5: A.SPAWNING, 6: A.SPAWNED,
    7: A.ADDING_USER,  # the offer of its VM was taken
    8: A.ALLOCATED, 9: A.RECLAIMING, 10: A.RECLAIMING,
    11: A.RETURNING,  # requeued, and not at the gate yet
    12: A.RECLAIMING,  # requeued, and at the gate
    13: A.REVOKING, 14: A.REVOKING, 15: A.ALLOCATED,
}  # fmt: skip

VMS = {
    1: V.PLANNED, 2: V.PARKED, 3: V.STARTING, 4: V.JOINED, 5: V.JOINED, 6: V.SERVING,
    7: V.DEAD, 8: V.DEAD,  # failed while joined, and while serving
    9: V.JOINED,
    10: V.RETIRING,  # unwanted
    11: V.JOINED, 12: V.JOINED, 13: V.JOINED, 14: V.JOINED,
    15: V.LOST, 16: V.LOST,
    17: V.RELEASING,  # an orderly end
    18: V.ENDING,  # failed, and a job may be on its node
    19: V.REMOVING,  # failed, and no job is on its node
    20: V.ENDING, 21: V.REMOVING,  # fenced
    22: V.JOINED, 25: V.SERVING,
    26: V.ENDING,  # not failed, and a job may be on its node
    27: V.STARTING,
}  # fmt: skip

OFFERS = {
    5: (O.TAKEN, 980.5), 6: (O.CLOSED, 970.0), 9: (O.OPEN, 981.0), 10: (O.CLOSING, 982.0), 11: (O.CLOSED, 983.0),
    12: (O.CLOSING, 984.0), 14: (O.TAKEN, 985.0), 16: (O.OPEN, 986.0), 22: (O.OPEN, 987.0),
}  # fmt: skip


def bodies(path: Path, table: str) -> dict[int, dict[str, Any]]:
    """The decoded bodies of a table, those of ended rows too."""
    with closing(sqlite3.connect(path)) as connection:
        return {id_: json.loads(body) for id_, body in connection.execute(f"SELECT id, body FROM {table}")}


def test_the_flags_of_schema_0003_become_states(previous: Path) -> None:
    store = Store(previous, ManualClock())
    rows = store.rows()
    assert {id_: row.state for id_, row in rows.attempts.items()} == ATTEMPTS
    assert {id_: row.state for id_, row in rows.vms.items()} == VMS
    assert {id_: row.state for id_, row in rows.templates.items()} == {
        1: T.READY, 2: T.BUILDING, 3: T.BROKEN, 4: T.RETIRING,
    }  # fmt: skip
    assert (rows.site, rows.next_template) == ("test0", 6)
    assert rows.next_serial >= 28 and rows.next_attempt >= 21
    store.close()


def test_the_columns_of_an_upgraded_row_agree_with_its_body(previous: Path) -> None:
    Store(previous, ManualClock()).close()
    with closing(sqlite3.connect(previous)) as connection:
        for table in ("attempts", "vms", "templates", "offers"):
            rows = connection.execute(f"SELECT id, version, state, body FROM {table}").fetchall()
            assert rows
            for id_, version, state, body in rows:
                found = json.loads(body)
                assert (found["id"], found["version"], found["state"]) == (id_, version, state)


def test_the_offers_of_schema_0003_have_rows_of_their_own(previous: Path) -> None:
    rows = Store(previous, ManualClock()).rows()
    assert {id_: (row.state, row.since) for id_, row in rows.offers.items()} == OFFERS
    assert not any(text_of(row.quarantined) for row in rows.offers.values())
    assert text_of(rows.vms[10].reason) == "it is older than 3600 s", "why it is to go is kept"


def size(value: Size) -> dict[str, int]:
    """A size as an earlier release wrote it, whose VMs had no bandwidth of their own."""
    assert not value.net
    return {"cpus": value.cpus, "memory": value.memory, "disk": value.disk}


def test_what_a_vm_was_keeps_its_value_under_its_new_name(previous: Path) -> None:
    before = bodies(previous, "vms")
    rows = Store(previous, ManualClock()).rows()
    for id_, vm in rows.vms.items():
        old = before[id_]
        assert (size(vm.node_size), vm.place.template_id) == (old["told"], old["origin"])
        assert (size(vm.place.template.size) if vm.place.template else None) == old["parent"]
        assert (len(vm.places), vm.place.source, vm.token) == (1, vm.host, "")
        assert vm.place.template is None or vm.place.template[:2] == (vm.host, vm.image)
        same = ("id", "version", "since", "name", "host", "mac", "address", "attempt", "account", "pool")
        assert {name: getattr(vm, name) for name in same} == {name: old[name] for name in same}
        assert vm.quarantined == said(old["quarantined"])
        if vm.state is not V.RETIRING:
            assert vm.reason == said(old["reason"])
    assert all(template.source == template.host for template in rows.templates.values())


def test_what_an_attempt_was_keeps_its_value(previous: Path) -> None:
    before = bodies(previous, "attempts")
    for id_, attempt in Store(previous, ManualClock()).rows().attempts.items():
        old = {name: value for name, value in before[id_].items() if name not in ("gated", "stray", "state")}
        new = json.loads(json.dumps(asdict(attempt), default=str))
        assert new["request"].pop("placement") is None, "no attempt of an earlier release named a policy"
        assert (new["request"].pop("per_host"), new["request"].pop("sockets")) == (0, 1)
        assert new["request"]["size"].pop("net") == 0
        assert (new.pop("caused"), new.pop("short_runs"), new.pop("failed_on")) == (0, 0, [])
        reasons = ("reason", "note", "quarantined", "choice")
        assert [getattr(attempt, name) for name in reasons] == [said(old.pop(name)) for name in reasons], "as text"
        left = ("state", "overtaken", "origin", *reasons)
        assert {name: value for name, value in new.items() if name not in left} == old


def test_reasons_of_earlier_releases_are_text_also_in_the_journal(previous: Path) -> None:
    with closing(sqlite3.connect(previous)) as connection:
        connection.execute("UPDATE journal SET reason = 'no luck on h1' WHERE seq = (SELECT max(seq) FROM journal)")
        connection.commit()
        texts = [text for (text,) in connection.execute("SELECT reason FROM journal ORDER BY seq")]
    store = Store(previous, ManualClock())
    assert texts[-1] and [entry.reason for entry in store.journal()] == [said(text) for text in texts]
    attempt = min(store.rows().attempts.values(), key=lambda one: one.id)
    why = Why.REQUEUED(Why.EARLIER_RUN_AWAY(vm="mvtest0-1", host="h1"), job="7", limit=2.5, number=3)
    with store.transaction() as tx:
        tx.apply(Move((Change(replace(attempt, quarantined=why), Event.QUARANTINED, why),)))
    again = Store(previous, ManualClock())
    assert again.rows().attempts[attempt.id].quarantined == why and again.journal()[-1].reason == why


def test_claims_are_held_in_the_domain_of_their_host(previous: Path) -> None:
    rows = Store(previous, ManualClock()).rows()
    owners: list[Vm | Template] = [*rows.vms.values(), *rows.templates.values()]
    held = {claim.key: claim.size for claim in rows.claims}
    assert held == {ClaimKey(row.key, row.host): Size(1, 416 if row.key.kind == "vm" else 256) for row in owners}


def test_the_hosts_of_schema_0003_are_known_and_that_of_a_fenced_vm_is_fenced(previous: Path) -> None:
    store = Store(previous, ManualClock())
    states = {"h1": HostState.KNOWN, "h2": HostState.KNOWN, "h3": HostState.FENCED, "h4": HostState.KNOWN}
    known = {name: KnownHost(name, name, state, id=n) for n, (name, state) in enumerate(states.items(), 1)}
    assert store.rows().hosts == known
    with store.transaction() as tx:  # and they can be moved
        drained = replace(known["h2"], drain=Drain(1.0, "a fan"))
        tx.apply(Move((Change(drained, Event.DRAINED),)))
    assert store.rows().hosts["h2"] == replace(drained, version=1)
    store.close()
    assert Store(previous, ManualClock()).rows().hosts["h2"].drain == Drain(1.0, "a fan")


def test_the_next_host_after_the_upgrade_has_a_number_of_its_own(previous: Path) -> None:
    state = State(Store(previous, ManualClock()).rows(), TABLES)
    state.know_host(KnownHost("h9", "h9"))
    assert sorted(host.id for host in state.hosts.values()) == [1, 2, 3, 4, 5]


def test_hosts_of_schema_0003_are_no_longer_in_meta(previous: Path) -> None:
    store = Store(previous, ManualClock())
    assert store._connection.exec_driver_sql("SELECT count(*) FROM meta WHERE key = 'hosts'").scalar() == 0


def test_ended_rows_are_read_after_the_upgrade_too(previous: Path) -> None:
    store = Store(previous, ManualClock())
    ended = {a.id: a.state for a in store.attempts() if a.id > 15}
    assert ended == {16: A.DONE, 17: A.CANCELLED, 18: A.REQUEUED, 19: A.REVOKED, 20: A.FAILED}
    assert [(vm.id, vm.state, vm.node_size) for vm in store.vms_of([16, 17])] == [
        (23, V.GONE, Size(1, 300)),
        (24, V.GONE, Size(1, 300)),
    ]
    assert len(store.journal()) == 52
    # They are pruned by the age of their end, which is their last entry in the journal.
    last = {(entry.kind, entry.id): entry.wall for entry in store.journal()}
    ends = store._connection.exec_driver_sql("SELECT kind, id, wall FROM ended").all()
    assert {(kind, id_) for kind, id_, _ in ends} >= {("attempt", 16), ("attempt", 20), ("vm", 23), ("vm", 24)}
    live = store.rows()
    for kind, id_, wall in ends:
        assert id_ not in getattr(live, f"{kind}s")
        assert wall == last.get((kind, id_), wall) and wall > 0
    store.close()
    adapters: dict[str, type] = {"attempts": Attempt, "vms": Vm, "templates": Template, "offers": Offer}
    attempts = {"overtaken", "origin", "caused", "short_runs", "failed_on"}
    later = {"offers": {"uid"}, "attempts": attempts, "vms": {"fault"}, "templates": {"build"}}
    for table, kind in adapters.items():
        fields = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
        for id_, body in bodies(previous, table).items():
            TypeAdapter(kind).validate_python({**body})
            expected = fields - {"job_id"} - later.get(table, set())
            assert expected <= set(body) <= fields, (table, id_)  # what came later has a default


def test_an_upgraded_0003_database_has_the_form_of_a_fresh_one_and_its_copy_is_kept(
    previous: Path, tmp_path: Path
) -> None:
    before = dump(previous)
    Store(previous, ManualClock()).close()
    Store(tmp_path / "fresh", ManualClock()).close()
    assert form(previous) == form(tmp_path / "fresh")
    assert dump(previous.with_name("previous.schema-0003")) == before


def test_the_planner_goes_on_with_upgraded_rows(previous: Path) -> None:
    """A first pass that shows all VMs, then one that shows none of them: no record becomes impossible."""
    store = Store(previous, ManualClock())
    state, before = State(store.rows(), TABLES), store.rows()
    assert state.indexes() == State(state.rows(), TABLES).indexes()
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


def test_a_database_from_before_leases_has_none_and_gives_them_numbers_that_never_recur(previous: Path) -> None:
    store = Store(previous, ManualClock())
    assert dict(store.rows().leases) == {} and store.leases() == []
    before = store.rows().next_lease
    store.close()
    clock = ManualClock()
    clock.time += 100.0
    later = Store(previous, clock)
    assert later.rows().next_lease > before, "numbers that a later state of the database may have given are left out"
    later.close()


def test_a_downgrade_is_refused_and_says_where_the_earlier_database_is(previous: Path) -> None:
    Store(previous, ManualClock()).close()
    scripts = ScriptDirectory(upgrade.VERSIONS.parent, version_locations=[upgrade.VERSIONS])
    engine = sa.create_engine(f"sqlite:///{previous}")
    before = dump(previous)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"fn": lambda revisions, _: scripts._downgrade_revs("0003", revisions)}
        )
        with Operations.context(context), pytest.raises(NotImplementedError, match="kept beside"):
            context.run_migrations()
    engine.dispose()
    assert dump(previous) == before


def test_software_of_schema_0003_refuses_a_database_of_0004(
    previous: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(previous, ManualClock()).close()
    older = tmp_path / "store" / "versions"
    older.mkdir(parents=True)
    for revision in upgrade.VERSIONS.glob("r000[123]_*.py"):
        (older / revision.name).write_text(revision.read_text())
    monkeypatch.setattr(upgrade, "VERSIONS", older)
    monkeypatch.setattr(schema, "HEAD", "0003")
    before = dump(previous)
    with pytest.raises(Refused, match="newer Multiverse") as caught:
        Store(previous, ManualClock())
    assert caught.value.hint and "copy" in caught.value.hint
    assert dump(previous) == before


def test_a_release_without_tokens_left_vms_that_are_found_again(previous: Path) -> None:
    vm = Store(previous, ManualClock()).rows().vms[6]
    shown = VmSeen(vm.name, "h1", VmCondition.RUNNING)
    view = HypervisorView(vms={vm.name: shown})
    assert World(sources={"h1": Observation(Seen(view, 1.0))}).vm(vm) == shown
