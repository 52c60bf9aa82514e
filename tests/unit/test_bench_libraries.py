"""The comparison of our own code with libraries: how rounds are interleaved, and what a missing library does."""

from __future__ import annotations

import itertools

import pytest

from multiverse_lab.bench.libraries import Case, compare, optional


def test_rounds_alternate_and_each_action_is_followed_by_the_restoring() -> None:
    calls: list[str] = []
    pair = Case("x", lambda: calls.append("ours"), lambda: calls.append("theirs"), lambda: calls.append("restore"), 10)
    row = compare(pair, scale=1.0)
    assert row.rounds == 10
    assert calls[1::2] == ["restore"] * (len(calls) // 2)
    actions = calls[::2]
    assert actions.count("ours") == actions.count("theirs") == 12  # two rounds of warming up
    firsts = actions[::2]
    assert all(one != other for one, other in itertools.pairwise(firsts))


def test_the_restoring_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0

    def spend(nanoseconds: int) -> None:
        nonlocal now
        now += nanoseconds

    monkeypatch.setattr("time.perf_counter_ns", lambda: now)
    row = compare(Case("x", lambda: spend(2000), lambda: spend(6000), lambda: spend(10**9), 5), scale=1.0)
    assert (row.ours, row.theirs, row.ratio) == (2.0, 6.0, 3.0)


def test_an_action_may_time_itself() -> None:
    row = compare(Case("x", lambda: 0.5, lambda: 1.0, rounds=5), scale=1.0)
    assert (row.ours, row.theirs, row.ratio) == (500_000, 1_000_000, 2.0)


def test_a_library_that_is_not_installed_is_none() -> None:
    assert optional("no_library_has_this_name") is None
