"""The benchmark of submissions: all jobs are taken in or served, whatever that takes."""

from __future__ import annotations

import json

import pytest

from multiverse.cli.commands import build
from multiverse_lab.bench.submissions import Plan, TimedController, measure


def test_jobs_that_wait_are_all_taken_in() -> None:
    found = measure(Plan(rate=1000.0, seconds=0.3, hosts=1, ends=False))
    assert (found.jobs, found.lag.n, found.served) == (300, 300, False)
    assert 0 < found.commits <= 300 + 4 * 64, "jobs that come together share a commit; 64 of them get VMs"
    assert min(found.done, found.lag.p50, found.passes, found.committing, found.alone) > 0


def test_a_store_that_leaves_out_numbers_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverse.store.database.NUMBERS_A_SECOND", 1e6)  # as if the machine had stood still
    assert measure(Plan(rate=100.0, seconds=0.1, hosts=1, ends=False)).jobs == 10


def test_what_ends_the_controller_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_pass(_self: TimedController) -> bool:
        raise LookupError("a bug")

    monkeypatch.setattr(TimedController, "run_pass", run_pass)
    with pytest.raises(LookupError, match="a bug"):
        measure(Plan(rate=100.0, seconds=0.1, hosts=1, ends=False))


def test_jobs_that_are_served_leave_nothing_and_the_table_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    build()(["bench", "submissions", "--served", "100", "--seconds", "0.2", "--hosts", "2"], standalone_mode=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["end", "100", "20"] in [row[:3] for row in rows]
    build()(["bench", "submissions", "--rate", "100", "--seconds", "0.1", "--json"], standalone_mode=False)
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["jobs"], one["served"]) == (10, False)
