"""The store keeps a transaction as a whole, or nothing of it."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.core.errors import Broken
from multiverse.core.model.basics import ClaimKey, Size
from multiverse.core.model.host import Claim, Drain, Host, HostState, KnownHost
from multiverse.core.model.job import AttemptState
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import Stage
from multiverse.core.rows import Numbers, Rows
from multiverse.core.transition import Change, Event, Move
from multiverse.store import Store, StoreConflict, open_store
from multiverse.store.database import NUMBERS_A_SECOND
from tests.unit.planner_harness import ManualClock, PlannerHarness
from tests.unit.rows import IMAGES, saved


def with_numbers_of(before: Rows, rows: Rows) -> Rows:
    """The rows with the numbers that came next before: some are left out at each opening."""
    names = ("next_serial", "next_attempt", "next_lease", "next_saved", "skipped_saved")
    return replace(rows, **{name: getattr(before, name) for name in names})


def test_rows_claims_and_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    harness = PlannerHarness(path=tmp_path / "db")
    harness.to_spawning()
    before = harness.rows
    harness.store.close()
    again = Store(tmp_path / "db", harness.clock)
    rows = again.rows()
    assert with_numbers_of(before, rows) == before and again.site == before.site
    assert before.next_serial == 2 and before.next_attempt == 2 and rows.next_template == before.next_template


def test_an_exception_in_a_transaction_keeps_nothing() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    before, lines = harness.rows, len(harness.store.journal())
    attempt = harness.attempt()
    move = Move(
        (Change(replace(attempt, state=AttemptState.SPAWNING), Event.CREATED),),
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
        tx.apply(Move((Change(stale, Event.CREATED),)))


def test_a_transition_that_no_table_has_is_refused() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    leap = replace(harness.attempt(), state=AttemptState.ALLOCATED)
    with pytest.raises(StoreConflict, match="no transition"), harness.store.transaction() as tx:
        tx.apply(Move((Change(leap, Event.RUNS),)))


def test_ended_attempts_are_found_by_job_and_by_array() -> None:
    harness = PlannerHarness()
    harness.template()
    for job_id in ("12_0", "12_1", "123", "12"):
        harness.job(job_id)
    harness.run()
    assert sorted(a.job.job_id for a in harness.store.attempts(job_id="12")) == ["12", "12_0", "12_1"]
    assert [a.job.job_id for a in harness.store.attempts(job_id="12_1")] == ["12_1"]


def test_the_journal_keeps_events_in_order_with_the_stages_of_effects() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    with harness.store.transaction() as tx:
        tx.measured(harness.all_vms()[0], "create", [Stage("overlay", 0.0016)])
    events = [(e.kind, e.event, e.target) for e in harness.store.journal(attempts=[1])]
    assert events[0] == ("attempt", "submitted", "queued")
    assert ("vm", "exists", "parked") in events
    assert harness.store.journal()[-1].detail == {"stages": [["overlay", 0.0016]]}


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "multiverse.db").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(Broken, match="cannot open"):
        open_store(tmp_path, ManualClock())


def test_a_commit_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    harness = PlannerHarness(path=tmp_path / "db")
    harness.to_claimed()
    other = sqlite3.connect(tmp_path / "db")
    assert other.execute("select state from attempts").fetchall() == [("claimed",)]
    assert other.execute("pragma journal_mode").fetchone() == ("wal",)
    other.close()


def test_a_host_is_kept_as_it_was_known_last(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store(tmp_path / "db", clock)
    assert store.rows().hosts == {}
    h1 = KnownHost("h1", "agent of h1", value=Host("h1", Size(4, 8192), frozenset({"instant"}), images=IMAGES), id=1)
    h2 = KnownHost("h2", "agent of h2", id=2, drain=Drain(5.0, "memory"))
    with store.transaction() as tx:
        tx.keep_host(h1)
        tx.keep_host(h2)
    with pytest.raises(RuntimeError), store.transaction() as tx:
        tx.keep_host(replace(h2, source="nobody"))
        raise RuntimeError("the machine died here")
    assert store.rows().hosts == {"h1": h1, "h2": h2}
    fenced = replace(h1, state=HostState.FENCED)
    with store.transaction() as tx:
        tx.keep_host(fenced)
    store.close()
    assert Store(tmp_path / "db", clock).rows().hosts == {"h1": fenced, "h2": h2}


def test_a_pass_without_news_of_hosts_writes_nothing() -> None:
    harness = PlannerHarness()
    harness.run()
    assert set(harness.rows.hosts) == {"h1"}
    commits = harness.store.commits
    harness.run()
    harness.hosts["h1"] = replace(harness.hosts["h1"], available=4711)  # changes all the time, and is not kept
    harness.run()
    assert harness.store.commits == commits and harness.state.learned == {}
    harness.hosts["h1"] = replace(harness.hosts["h1"], capacity=Size(8, 8192, 65536))
    harness.run()
    assert harness.store.commits == commits + 1
    kept = harness.rows.hosts["h1"].value
    assert kept is not None and kept.capacity.cpus == 8


def test_a_vm_may_hold_claims_in_two_domains_and_each_is_released_by_its_own_key(tmp_path: Path) -> None:
    harness = PlannerHarness(path=tmp_path / "db")
    harness.to_claimed()
    (vm,) = harness.all_vms()
    other = Claim(vm.key, "h2", Size(1, 256))
    with harness.store.transaction() as tx:
        tx.keep_host(KnownHost("h2", "agent of h2", id=2))
        tx.apply(Move((), make=(other,)))
    assert [c.domain for c in harness.rows.claims if c.owner == vm.key] == ["h1", "h2"]
    with harness.store.transaction() as tx:
        tx.apply(Move((), free=(ClaimKey(vm.key, "h1"),)))
    assert [c for c in harness.rows.claims if c.owner == vm.key] == [other]
    harness.store.close()
    again = Store(tmp_path / "db", harness.clock)
    assert [c for c in again.rows().claims if c.owner == vm.key] == [other]


def test_a_restored_database_gives_no_number_of_a_saved_job_again_and_counts_none_of_them_as_ended(
    tmp_path: Path,
) -> None:
    """A minute after the copy was made it takes the place of the database, in which more jobs were saved meanwhile."""
    clock = ManualClock()
    store = Store(tmp_path / "db", clock)
    with store.transaction() as tx:
        tx.apply(Move((Change(replace(saved(SavedState.PREPARING), version=0), Event.ASKED),)))
    assert store.rows().next_saved == 2
    store.close()
    clock.time += 60.0
    rows = Store(tmp_path / "db", clock).rows()
    numbers = Numbers(rows)
    assert rows.next_saved == 2 + 60 * NUMBERS_A_SECOND
    given = [numbers.has_given_saved(number) for number in (1, 2, rows.next_saved - 1, rows.next_saved)]
    assert given == [True, False, False, False]
    mine = numbers.new_saved_id()
    assert numbers.has_given_saved(mine) and not numbers.has_given_saved(mine + 1)


def test_numbers_that_were_left_out_by_two_openings_in_a_row_are_kept_as_one_range(tmp_path: Path) -> None:
    clock = ManualClock()
    for _ in range(3):
        store = Store(tmp_path / "db", clock)
        store.close()
        clock.time += 1.0
    assert Store(tmp_path / "db", clock).rows().skipped_saved == ((1, 1 + 3 * NUMBERS_A_SECOND),)


def test_the_rows_of_an_earlier_boot_enter_their_states_anew(tmp_path: Path) -> None:
    harness = PlannerHarness(path=tmp_path / "db")
    harness.to_claimed()
    before = harness.rows
    harness.store.close()
    same = Store(tmp_path / "db", ManualClock(2000.0, "boot-1"))
    rows = same.rows()
    assert with_numbers_of(before, rows) == before
    same.close()
    after = Store(tmp_path / "db", ManualClock(5.0, "boot-2")).rows()
    for old, new in ((before.vms[1], after.vms[1]), (before.templates[1], after.templates[1])):
        assert new == replace(old, since=5.0)
    assert after.attempts[1] == replace(before.attempts[1], since=5.0, not_before=0.0)
