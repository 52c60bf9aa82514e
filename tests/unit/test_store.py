"""The store: what is committed is whole, what is not leaves no trace."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.core.errors import Broken
from multiverse.core.model import AttemptState, Claim, Size, Stage
from multiverse.core.transition import Change, Event, Move
from multiverse.store import Store, StoreConflict, open_store
from tests.unit.scene import HandClock, Scene


def test_rows_claims_and_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    scene = Scene()
    scene.store = Store(tmp_path / "db", scene.clock)
    scene.to_spawning()
    before = scene.rows
    scene.store.close()
    again = Store(tmp_path / "db", scene.clock)
    assert again.rows() == before and again.site == before.site
    assert before.next_serial == 2 and before.next_attempt == 2


def test_an_exception_in_a_transaction_keeps_nothing() -> None:
    scene = Scene()
    scene.to_claimed()
    before, lines = scene.rows, len(scene.store.journal())
    attempt = scene.attempt()
    move = Move(
        (Change(replace(attempt, state=AttemptState.SPAWNING), Event.MADE),),
        make=(Claim(attempt.key, "h1", Size(1, 1)),),
    )
    with pytest.raises(RuntimeError), scene.store.transaction() as tx:
        tx.apply(move)
        raise RuntimeError("the machine died here")
    assert scene.rows == before and len(scene.store.journal()) == lines


def test_a_move_made_for_an_older_version_is_refused() -> None:
    scene = Scene()
    scene.to_claimed()
    stale = replace(scene.attempt(), version=scene.attempt().version - 1, state=AttemptState.SPAWNING)
    with pytest.raises(StoreConflict, match="version"), scene.store.transaction() as tx:
        tx.apply(Move((Change(stale, Event.MADE),)))


def test_an_arrow_that_no_table_has_is_refused() -> None:
    scene = Scene()
    scene.to_claimed()
    leap = replace(scene.attempt(), state=AttemptState.ALLOCATED)
    with pytest.raises(StoreConflict, match="no arrow"), scene.store.transaction() as tx:
        tx.apply(Move((Change(leap, Event.RUNS),)))


def test_ended_attempts_are_found_by_job_and_by_array() -> None:
    scene = Scene()
    scene.template()
    for job_id in ("12_0", "12_1", "123", "12"):
        scene.job(job_id)
    scene.run()
    assert sorted(a.job.job_id for a in scene.store.attempts(job_id="12")) == ["12", "12_0", "12_1"]
    assert [a.job.job_id for a in scene.store.attempts(job_id="12_1")] == ["12_1"]


def test_the_journal_tells_the_story_in_order_with_its_stages() -> None:
    scene = Scene()
    scene.to_spawning()
    with scene.store.transaction() as tx:
        tx.measured(scene.all_vms()[0], "create", [Stage("overlay", 0.0016)])
    story = [(e.kind, e.event, e.target) for e in scene.store.journal(attempts=[1])]
    assert story[0] == ("attempt", "submitted", "queued")
    assert ("vm", "exists", "parked") in story
    assert scene.store.journal()[-1].detail == {"stages": [["overlay", 0.0016]]}


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "multiverse.db").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(Broken, match="cannot open"):
        open_store(tmp_path, HandClock())


def test_a_commit_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    scene = Scene()
    scene.store = Store(tmp_path / "db", scene.clock)
    scene.to_claimed()
    other = sqlite3.connect(tmp_path / "db")
    assert other.execute("select state from attempts").fetchall() == [("claimed",)]
    assert other.execute("pragma journal_mode").fetchone() == ("wal",)
    other.close()


def test_hosts_once_seen_are_known_ever_after(tmp_path: Path) -> None:
    clock = HandClock()
    store = Store(tmp_path / "db", clock)
    assert store.rows().hosts == frozenset()
    for hosts in ({"h1"}, {"h1", "h2"}):
        with store.transaction() as tx:
            tx.keep_hosts(frozenset(hosts))
    with pytest.raises(RuntimeError), store.transaction() as tx:
        tx.keep_hosts(frozenset())
        raise RuntimeError("the machine died here")
    commits = store.commits
    with store.transaction() as tx:
        tx.keep_hosts(frozenset({"h1", "h2"}))
    assert store.commits == commits, "what is known is not written again"
    store.close()
    assert Store(tmp_path / "db", clock).rows().hosts == {"h1", "h2"}
