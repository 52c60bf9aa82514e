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
from tests.unit.planner_harness import ManualClock, PlannerHarness


def test_rows_claims_and_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    harness = PlannerHarness()
    harness.store = Store(tmp_path / "db", harness.clock)
    harness.to_spawning()
    before = harness.rows
    harness.store.close()
    again = Store(tmp_path / "db", harness.clock)
    assert again.rows() == before and again.site == before.site
    assert before.next_serial == 2 and before.next_attempt == 2


def test_an_exception_in_a_transaction_keeps_nothing() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    before, lines = harness.rows, len(harness.store.journal())
    attempt = harness.attempt()
    move = Move(
        (Change(replace(attempt, state=AttemptState.SPAWNING), Event.MADE),),
        make=(Claim(attempt.key, "h1", Size(1, 1)),),
    )
    with pytest.raises(RuntimeError), harness.store.transaction() as tx:
        tx.apply(move)
        raise RuntimeError("the machine died here")
    assert harness.rows == before and len(harness.store.journal()) == lines


def test_a_move_made_for_an_older_version_is_refused() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    stale = replace(harness.attempt(), version=harness.attempt().version - 1, state=AttemptState.SPAWNING)
    with pytest.raises(StoreConflict, match="version"), harness.store.transaction() as tx:
        tx.apply(Move((Change(stale, Event.MADE),)))


def test_an_arrow_that_no_table_has_is_refused() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    leap = replace(harness.attempt(), state=AttemptState.ALLOCATED)
    with pytest.raises(StoreConflict, match="no arrow"), harness.store.transaction() as tx:
        tx.apply(Move((Change(leap, Event.RUNS),)))


def test_ended_attempts_are_found_by_job_and_by_array() -> None:
    harness = PlannerHarness()
    harness.template()
    for job_id in ("12_0", "12_1", "123", "12"):
        harness.job(job_id)
    harness.run()
    assert sorted(a.job.job_id for a in harness.store.attempts(job_id="12")) == ["12", "12_0", "12_1"]
    assert [a.job.job_id for a in harness.store.attempts(job_id="12_1")] == ["12_1"]


def test_the_journal_tells_the_story_in_order_with_its_stages() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    with harness.store.transaction() as tx:
        tx.measured(harness.all_vms()[0], "create", [Stage("overlay", 0.0016)])
    story = [(e.kind, e.event, e.target) for e in harness.store.journal(attempts=[1])]
    assert story[0] == ("attempt", "submitted", "queued")
    assert ("vm", "exists", "parked") in story
    assert harness.store.journal()[-1].detail == {"stages": [["overlay", 0.0016]]}


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "multiverse.db").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(Broken, match="cannot open"):
        open_store(tmp_path, ManualClock())


def test_a_commit_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    harness = PlannerHarness()
    harness.store = Store(tmp_path / "db", harness.clock)
    harness.to_claimed()
    other = sqlite3.connect(tmp_path / "db")
    assert other.execute("select state from attempts").fetchall() == [("claimed",)]
    assert other.execute("pragma journal_mode").fetchone() == ("wal",)
    other.close()


def test_hosts_once_seen_are_known_ever_after(tmp_path: Path) -> None:
    clock = ManualClock()
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
