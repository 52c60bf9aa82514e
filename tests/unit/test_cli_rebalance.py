"""`multiverse rebalance`: what would be done, and what a limit holds back."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from multiverse.cli import rebalance, render

MOVES = {
    "method": "preemption", "job_id": "12", "vm": "mv-12", "host": "n3", "target": "n4", "memory": 2048,
    "reason": "job 15 (urgent) takes its place",
}  # fmt: skip
SAVED = {
    "method": "drain", "job_id": "13", "vm": "mv-13", "host": "n3", "target": "", "memory": 288,
    "reason": "host n3 is drained", "held": "it was evicted 6 times in the last hour",
}  # fmt: skip

ENDS = {
    "method": "preemption", "job_id": "14", "vm": "mv-14", "host": "n3", "target": "", "memory": 0,
    "reason": "job 15 (urgent) takes its place", "ends": "cancel",
}  # fmt: skip


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *found: dict[str, object], **options: bool
) -> str:
    class Daemon:
        def __enter__(self) -> Daemon:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def evictions(self) -> list[dict[str, object]]:
            return list(found)

    monkeypatch.setattr(render, "console", Console(width=200))
    monkeypatch.setattr(rebalance, "Client", Daemon)
    rebalance.rebalance(**options)
    return capsys.readouterr().out


def test_how_each_job_would_leave_its_host_is_shown_with_the_reason_and_with_what_keeps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = printed(monkeypatch, capsys, MOVES, SAVED, ENDS, dry_run=True).splitlines()
    (moves,) = (line for line in lines if line.split()[:2] == ["12", "mv-12"])
    assert "moves to n4" in moves and "2048 MiB" in moves and moves.rstrip().endswith("job 15 (urgent) takes its place")
    (saved,) = (line for line in lines if line.split()[:2] == ["13", "mv-13"])
    assert "is saved" in saved and "host n3 is drained; not now: it was evicted 6 times in the last hour" in saved

    (ends,) = (line for line in lines if line.split()[:2] == ["14", "mv-14"])
    assert "is cancelled" in ends


def test_if_nothing_would_be_done_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No job would leave its host now." in printed(monkeypatch, capsys)
    assert json.loads(printed(monkeypatch, capsys, MOVES, json=True)) == [MOVES]
