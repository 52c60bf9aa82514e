"""Pruning deletes what ended long ago with its journal, in small steps, and nothing that is needed."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from multiverse.cli import status as command
from multiverse.client import Client
from multiverse.config import Settings, parse
from multiverse.controller import history as pruning
from multiverse.core.errors import Exhausted, MultiverseError, Refused
from multiverse.core.model.job import Attempt, AttemptState
from multiverse.core.model.vm import OfferState, TemplateState, Vm, VmState
from multiverse.core.model.world import Row
from multiverse.service.api import make_api
from multiverse.service.backend import Backend
from multiverse.store import Pruned, Pruning, Store
from multiverse.store.history import ENTRIES, ROWS
from tests.unit.planner_harness import ManualClock, PlannerHarness
from tests.unit.rows import attempt, offer, template, vm

DAY = 86400.0
TABLES = {"attempt": "attempts", "vm": "vms", "template": "templates", "offer": "offers"}
OVER = {
    "attempt": AttemptState.DONE,
    "vm": VmState.GONE,
    "template": TemplateState.ABSENT,
    "offer": OfferState.ENDED,
}


class History:
    """A store with rows that ended some days ago. `days` is the age of their end; None: they are live."""

    def __init__(self, path: Path | str = ":memory:") -> None:
        self.clock = ManualClock(now=1000 * DAY)
        self.store = Store(path, self.clock, site="test0")

    def add(self, *rows: tuple[Row, float | None], entries: int = 2, empty: bool = False) -> None:
        """Add rows, each with as many entries in the journal. `empty`: without bodies, which is faster."""
        with self.store.maintenance():
            connection = self.store._connection.connection.dbapi_connection
            assert isinstance(connection, sqlite3.Connection)
            for table, values in self._values(rows, entries, empty):
                marks = ", ".join("?" * len(values[0]))
                connection.executemany(f"INSERT INTO {table} VALUES ({marks})", values)

    def _values(
        self, rows: Iterable[tuple[Row, float | None]], entries: int, empty: bool
    ) -> Iterable[tuple[str, list[tuple[object, ...]]]]:
        found: dict[str, list[tuple[object, ...]]] = {}
        for row, days in rows:
            kind = row.key.kind
            state = row.state if days is None else OVER[kind]
            wall = self.clock.wall() - (days or 0.0) * DAY
            body = "{}" if empty else json.dumps(asdict(replace(row, state=state)), default=str)
            more: tuple[object, ...] = ()
            serves = None
            if isinstance(row, Attempt):
                more, serves = (row.job.job_id,), row.id
            elif isinstance(row, Vm):
                more, serves = (row.attempt,), row.attempt
            found.setdefault(TABLES[kind], []).append((row.id, 1, str(state), days is None, body, *more))
            if days is not None:
                found.setdefault("ended", []).append((kind, row.id, wall))
            entry = ("boot-1", 0.0, wall, kind, row.id, serves, "e", None, None, "", "{}")
            if entries:
                found.setdefault("journal", []).extend([(None, *entry)] * entries)
        return found.items()

    def prune(self, days: float = 30.0, **more: bool) -> Pruned:
        found = Pruning(self.store, self.clock.wall() - days * DAY, **more)
        while found.step():
            pass
        return found.removed

    def ids(self, kind: str) -> set[int]:
        """The rows that are left."""
        with self.store.maintenance():
            return set(self.store._connection.exec_driver_sql(f"SELECT id FROM {TABLES[kind]}").scalars())

    def noted(self) -> set[tuple[str, int]]:
        """The rows of which the journal has entries."""
        return {(entry.kind, entry.id) for entry in self.store.journal()}


def job(id: int, job_id: str) -> Attempt:
    return attempt(AttemptState.ALLOCATED, id=id, job=job_id)


def machine(id: int, of: int | None) -> Vm:
    return vm(VmState.SERVING, id=id, attempt=of)


# --- what goes, and what stays ----------------------------------------------------------------------


def test_rows_that_ended_long_ago_go_with_their_journal_and_younger_ones_stay() -> None:
    history = History()
    history.add((job(1, "7"), 31.0), (job(2, "8"), 29.0), (machine(1, 1), 31.0), (machine(2, 2), 31.0))
    history.add((template(TemplateState.READY, id=1), 31.0), (template(TemplateState.READY, id=2), None))
    history.add((offer(OfferState.OPEN, id=5), 31.0), (offer(OfferState.OPEN, id=6), 29.0))
    assert history.prune() == Pruned(attempts=1, vms=1, templates=1, offers=1, journal=8)
    left = {("attempt", 2), ("vm", 2), ("template", 2), ("offer", 6)}
    assert history.noted() == left
    assert {(kind, id_) for kind in TABLES for id_ in history.ids(kind)} == left
    assert history.prune() == Pruned()


def test_live_rows_and_their_journal_stay_however_old_they_are() -> None:
    history = History()
    history.add((job(1, "7"), None), (machine(1, 1), None), (template(TemplateState.READY), None))
    history.add((offer(OfferState.OPEN), None))
    history.clock.time += 1000 * DAY
    assert history.prune(0.0) == Pruned()
    assert len(history.noted()) == 4


def test_the_timeline_of_a_live_job_stays_whole() -> None:
    """The earlier attempts of the job, with the VMs that they had, and the VMs that were replaced."""
    history = History()
    history.add((job(1, "7"), 90.0), (job(2, "7"), None), (job(3, "70"), 90.0))
    history.add((machine(1, 1), 90.0), (machine(2, 2), 60.0), (machine(3, 3), 90.0), (machine(4, 2), None))
    before = history.store.journal(attempts=[1, 2])
    assert history.prune() == Pruned(attempts=1, vms=1, journal=4)
    assert history.store.journal(attempts=[1, 2]) == before and len(before) == 10
    assert [one.id for one in history.store.attempts(job_id="7")] == [2, 1]
    assert [one.id for one in history.store.vms_of([1, 2])] == [1, 2, 4]


def test_a_vm_that_served_an_attempt_only_for_a_while_stays_as_long_as_that() -> None:
    history = History()
    history.add((job(1, "7"), None), (machine(1, 1), 90.0), (machine(2, None), 90.0))
    with history.store.maintenance():
        history.store._connection.exec_driver_sql("UPDATE vms SET attempt = NULL")
    assert history.prune() == Pruned(vms=1, journal=2)
    assert history.ids("vm") == {1}


@pytest.mark.parametrize(
    ("live", "kept"),
    [("12_3", {1, 2, 3}), ("12", {1, 2, 3}), ("1", {9}), ("123", {4}), ("12_30", {1, 2, 3}), ("13", set())],
)
def test_the_tasks_of_an_array_stay_while_one_of_them_is_live(live: str, kept: set[int]) -> None:
    history = History()
    history.add((job(1, "12_0"), 90.0), (job(2, "12_3"), 90.0), (job(3, "12"), 90.0), (job(4, "123"), 90.0))
    history.add((job(9, "1"), 90.0), (job(10, live), None))
    history.prune()
    assert history.ids("attempt") == kept | {10}


def test_names_do_not_recur_after_everything_was_pruned() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    before = harness.rows
    numbers = (before.next_serial, before.next_attempt, before.next_template)
    with harness.store.maintenance():
        for table in TABLES.values():
            harness.store._connection.exec_driver_sql(f"DELETE FROM {table}")
    harness.store._forget()
    rows = harness.store.rows()
    assert (rows.next_serial, rows.next_attempt, rows.next_template) == numbers


def test_the_age_counts_from_the_end_of_a_row_that_the_store_has_written() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.pass_time(50 * DAY)
    harness.jobs.clear()
    for _ in range(6):
        harness.run()
        harness.clear()
    assert not harness.rows.attempts and not harness.rows.vms
    ended = max(entry.wall for entry in harness.store.journal(attempts=[1]) if entry.kind == "attempt")
    assert ended > harness.clock.wall() - DAY
    for before, removed in ((ended, 0), (ended + 1, 1)):
        one_round = Pruning(harness.store, before)
        while one_round.step():
            pass
        assert one_round.removed.attempts == removed
    assert harness.store.attempts() == [] and harness.store.journal(attempts=[1]) == []


# --- steps ------------------------------------------------------------------------------------------


def test_each_step_touches_few_rows_among_many_that_have_ended() -> None:
    history, count = History(), 15_000
    one, other, age = job(1, "x"), machine(1, 1), random.Random(7).uniform
    history.add(
        *((replace(one, id=id_, job=replace(one.job, job_id=str(id_))), age(0.0, 60.0)) for id_ in range(1, count + 1)),
        *((replace(other, id=id_, attempt=id_), age(0.0, 60.0)) for id_ in range(1, count + 1)),
        empty=True,
    )
    history.add((job(count + 1, "x"), 45.0), entries=10 * ENTRIES)
    connection = history.store._connection.connection.dbapi_connection
    assert isinstance(connection, sqlite3.Connection)
    instructions = 0

    def executed() -> int:
        nonlocal instructions
        instructions += 500
        return 0

    connection.set_progress_handler(executed, 500)
    one_round, more = Pruning(history.store, history.clock.wall() - 30 * DAY), True
    while more:
        instructions, before = 0, connection.total_changes
        more = one_round.step()
        assert connection.total_changes - before <= ENTRIES + 2 * ROWS
        assert instructions < 30_000, "a scan of 30,000 rows takes 60,000 instructions of SQLite's virtual machine"
    connection.set_progress_handler(None, 0)
    removed = one_round.removed
    assert 7_200 < removed.attempts < 7_800 and 3_600 < removed.vms < 4_050
    assert removed.journal == 2 * (removed.rows - 1) + 10 * ENTRIES
    assert len(history.ids("attempt")) + len(history.ids("vm")) == 2 * count + 1 - removed.rows


def test_a_dry_run_counts_what_a_round_then_deletes() -> None:
    history, chance = History(), random.Random(1)
    states = (None, 10.0, 40.0, 50.0)
    for id_ in range(1, 200):
        of = chance.randint(1, 200)
        history.add((job(id_, f"{chance.randint(1, 40)}_{id_}"), chance.choice(states)))
        history.add((machine(id_, of), chance.choice(states)), entries=chance.randint(0, 5))
    counted = history.prune(dry_run=True)
    assert counted == history.prune(dry_run=True) == history.prune()
    assert counted.attempts and counted.vms and history.prune() == Pruned()


def test_freed_space_is_used_again(tmp_path: Path) -> None:
    history = History(tmp_path / "db")
    sizes = []
    for turn in range(4):
        first = turn * 600
        history.add(*((job(first + id_, str(first + id_)), 40.0) for id_ in range(600)))
        history.prune()
        with history.store.maintenance():
            sizes.append(history.store._connection.exec_driver_sql("PRAGMA page_count").scalar_one())
    assert sizes[3] <= sizes[0] * 1.1


def test_a_step_that_is_not_committed_keeps_nothing_and_is_repeated() -> None:
    history = History()
    history.add(*((job(id_, str(id_)), 40.0) for id_ in range(1, 11)))
    one_round = Pruning(history.store, history.clock.wall())
    connection = history.store._connection.connection.dbapi_connection
    assert connection is not None
    connection.execute("PRAGMA query_only = 1")
    with pytest.raises(Exhausted):
        one_round.step()
    connection.execute("PRAGMA query_only = 0")
    assert one_round.removed == Pruned() and len(history.ids("attempt")) == 10
    while one_round.step():
        pass
    assert one_round.removed.attempts == 10


def test_a_round_goes_on_where_another_one_stopped() -> None:
    history = History()
    history.add(*((job(id_, str(id_)), 40.0) for id_ in range(1, 250)), *((machine(id_, 7), 40.0) for id_ in range(9)))
    total, position = 0, ""
    for _ in range(100):
        one_round = Pruning(history.store, history.clock.wall(), after=position, dry_run=True)
        one_round.step()
        total, position = total + one_round.removed.rows, one_round.position
        if not position:
            break
    assert (position, total) == ("", 258)
    for wrong in ("x", "vm 1", "meta 1.0 2", "vm a b"):
        with pytest.raises(Refused, match="position"):
            Pruning(history.store, 0.0, after=wrong)


# --- the daemon -------------------------------------------------------------------------------------


async def test_the_daemon_prunes_at_once_and_then_every_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    history, slept = History(), []
    history.add((job(1, "7"), 31.0), (job(2, "8"), 29.99))

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if seconds == pruning.PRUNE_INTERVAL:
            if len(history.ids("attempt")) == 0:
                raise asyncio.CancelledError
            history.clock.time += seconds

    monkeypatch.setattr(pruning.asyncio, "sleep", sleep)
    with structlog.testing.capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        await pruning.prune_regularly(history.store, history.clock, 30.0)
    assert slept.count(pruning.PRUNE_INTERVAL) == 2
    assert [(one["event"], one["rows"]) for one in logs] == [("history pruned", 1)] * 2
    assert min(slept) >= pruning.LEAST_PAUSE, "passes of the controller run between two steps"


async def test_with_zero_days_nothing_is_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    history.add((job(1, "7"), 9999.0))

    async def sleep(seconds: float) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(pruning.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await pruning.prune_regularly(history.store, history.clock, 0.0)
    assert history.ids("attempt") == {1}


async def test_a_full_disk_is_logged_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    history, rounds = History(), []

    async def prune(one_round: Pruning, clock: object) -> None:
        rounds.append(one_round)
        raise Exhausted("the disk is full")

    async def sleep(seconds: float) -> None:
        if len(rounds) == 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(pruning, "prune", prune)
    monkeypatch.setattr(pruning.asyncio, "sleep", sleep)
    with structlog.testing.capture_logs() as logs, pytest.raises(asyncio.CancelledError):
        await pruning.prune_regularly(history.store, history.clock, 30.0)
    events = ["history not pruned", "history of utilization not pruned"]
    assert [(one["event"], one["reason"]) for one in logs] == [(event, "the disk is full") for event in events * 2]


@pytest.mark.parametrize("days", [-1.0, float("nan"), float("inf")])
def test_a_wrong_number_of_days_is_refused(days: float) -> None:
    with pytest.raises(Refused, match="history_days"):
        parse({"history_days": days}, "test")
    assert Settings().history_days == 30.0


# --- the API and the command line -------------------------------------------------------------------


class LocalClient(Client):
    """A client whose requests go to an API in this process, which keeps records for `days`."""

    def __init__(self, history: History, days: float = 30.0) -> None:
        nobody: Any = None
        backend = Backend(nobody, history.store, history.clock, None, nobody, history_days=days)
        self.asked = 0
        self._api = make_api(backend)

    def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._api)
            async with httpx.AsyncClient(transport=transport, base_url="http://multiverse") as client:
                return await client.request(method, path, **more)

        self.asked += 1
        response = asyncio.run(ask())
        if response.status_code >= 400:
            raise MultiverseError(response.text)
        return response

    def close(self) -> None:
        """There is no connection."""


@pytest.fixture
def three() -> History:
    """Three jobs that ended 100, 40 and 10 days ago."""
    history = History()
    history.add(*((job(id_, str(id_)), days) for id_, days in ((1, 100.0), (2, 40.0), (3, 10.0))))
    return history


def test_a_client_prunes_by_the_settings_or_by_an_age_of_its_own(three: History) -> None:
    client = LocalClient(three)
    counted = client.prune(dry_run=True)
    assert (counted["attempts"], counted["journal"], counted["dry_run"], counted["next"]) == (2, 4, True, "")
    assert three.ids("attempt") == {1, 2, 3}
    assert client.prune(90 * DAY)["attempts"] == 1 and three.ids("attempt") == {2, 3}
    assert client.prune()["attempts"] == 1 and three.ids("attempt") == {3}


def test_a_long_round_takes_several_requests_whose_counts_are_added(
    three: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    three.add(*((job(id_, str(id_)), 50.0) for id_ in range(10, 200)))
    monkeypatch.setattr(three.clock, "now", itertools.count().__next__)  # each request has time for one step
    monkeypatch.setattr(pruning, "SHARE", 1.0)
    client = LocalClient(three)
    assert client.prune()["attempts"] == 192 and client.asked > 5
    assert three.ids("attempt") == {3}


def test_without_an_age_nothing_is_pruned_where_the_settings_keep_everything(three: History) -> None:
    client = LocalClient(three, days=0.0)
    with pytest.raises(MultiverseError, match="history_days"):
        client.prune()
    with pytest.raises(MultiverseError, match="position"):
        client._ask("POST", "/prune", json={"older_than": 1.0, "after": "nonsense"})
    assert three.ids("attempt") == {1, 2, 3}
    assert client.prune(50 * DAY)["attempts"] == 1


def test_the_command_says_what_it_deletes(
    three: History, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Client", lambda: LocalClient(three))
    command.prune("2w", dry_run=True)
    assert "would be deleted, ended more than 14d ago: 2 attempts, 0 VMs" in capsys.readouterr().out
    command.prune(None, dry_run=False)
    assert "deleted, ended more than 30d ago: 2 attempts" in capsys.readouterr().out
    assert three.ids("attempt") == {3}


@pytest.mark.parametrize(("text", "seconds"), [("30d", 30 * DAY), ("12h", 43200), ("1.5w", 10.5 * DAY), ("0s", 0)])
def test_an_age_has_a_unit(text: str, seconds: float) -> None:
    assert command.age_in_seconds(text) == seconds
    assert command.age_in_seconds(command.span(seconds)) == seconds
    for wrong in ("30", "d", "-1d", "1 month", ""):
        with pytest.raises(Refused, match="not an age"):
            command.age_in_seconds(wrong)
