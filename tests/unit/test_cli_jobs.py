"""`multiverse jobs`: waiting tasks of an array are one row, rows are in the order of numbers, and filters choose."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest

from multiverse.api import JobView
from multiverse.cli import render
from multiverse.cli.commands import build
from multiverse.client import Client
from multiverse.core.errors import Refused

NO_ROOM, BEHIND = "waiting for capacity: the hosts are full", "waiting behind earlier jobs"


def job(job_id: str, state: str = "queued", **more: Any) -> JobView:
    one = JobView(
        job_id, "hello", 1000, 1, state, 1, 2, 700, "slim", "instant", 0.0, BEHIND if state == "queued" else "", "", 0,
        (), "", stage="waiting" if state == "queued" else "running", user="alice",
    )  # fmt: skip
    return replace(one, **more)


ARRAY = [job(f"30_{task}", attempt=100 + task) for task in range(5, 75)]
JOBS = [
    job("100", attempt=3, user="bob", uid=1001),
    replace(ARRAY[0], waiting=NO_ROOM),
    *sorted(ARRAY[1:], key=lambda one: one.job_id),
    job("30_4", "allocated", attempt=2),
    job("9", "spawning", attempt=1, stage="provisioning", user="bob", uid=1001),
]


def printed(capsys: pytest.CaptureFixture[str], words: str, found: list[JobView], width: int = 160) -> str:
    def answer(_: Client, asked: str | None, *, ended: bool, limit: int) -> list[dict[str, Any]]:
        return [asdict(one) for one in found]

    with mock.patch.object(Client, "jobs", answer), mock.patch.object(render.console, "_width", width):
        build()(words.split(), prog_name="multiverse", standalone_mode=False)
    return capsys.readouterr().out


def ids(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line[1:2].isdigit()]


@pytest.mark.parametrize("width", [80, 160])
def test_waiting_tasks_of_an_array_are_one_row_and_rows_are_in_the_order_of_numbers(
    capsys: pytest.CaptureFixture[str], width: int
) -> None:
    text = printed(capsys, "jobs", JOBS, width)
    assert ids(text)[:4] == ["9", "30_4", "30_[5-74]", "100"]
    assert f"{NO_ROOM}; {BEHIND}" in " ".join(text.split())


def test_tasks_that_are_not_alike_are_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = [job("2_1"), job("2_2", attempt=2, cpus=4), job("2_3", attempt=3, quarantined="odd"), job("3_1", attempt=4)]
    assert ids(printed(capsys, "jobs", found)) == ["2_1", "2_2", "2_3", "3_1"]


def test_a_long_set_of_tasks_is_cut_between_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = [job(f"2_{task}", attempt=task) for task in range(1, 60, 2)]
    assert ids(printed(capsys, "jobs", found)) == ["2_[1,3,5,7,9,11,…]"]


def test_json_has_each_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["job_id"] for one in json.loads(printed(capsys, "jobs --json", JOBS))] == [one.job_id for one in JOBS]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--user bob", ["9", "100"]),
        ("-u alice,1001 -t Running", ["30_4"]),
        ("--user 1000 --user bob --state spawning --state waiting", ["9", "30_[5-74]", "100"]),
    ],
)
def test_users_and_states_choose(capsys: pytest.CaptureFixture[str], words: str, left: list[str]) -> None:
    assert ids(printed(capsys, f"jobs {words}", JOBS)) == left


def test_nobody_is_chosen_and_an_unknown_state_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys, "jobs --user carol", JOBS) == "No such jobs.\n"
    with pytest.raises(Refused, match="pending: there is no such state") as refused:
        printed(capsys, "jobs --state pending", JOBS)
    assert "waiting, provisioning, running, ending, queued" in refused.value.hint
