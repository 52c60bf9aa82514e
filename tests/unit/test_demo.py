"""What the demonstration begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import pytest

from multiverse.api import JobView, LeaseView
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.latency import LatencySamples
from multiverse_lab.cli.demo_first import BARE, VM, lines
from multiverse_lab.cli.demo_jobs import REQUEUE_LIMIT, DemoJob, follow
from multiverse_lab.cli.demo_physical import _given_back


def test_both_are_shown_in_proportion_with_where_the_time_went() -> None:
    found = {
        VM: LatencySamples(submit_to_start=[1.6, 1.4, 1.5], stages={"queued": [0.1], "clone": [0.2], "launch": [0.5]}),
        BARE: LatencySamples(submit_to_start=[0.75, 0.7, 0.8]),
    }
    for width in (80, 140):
        vm, bare, parts, rest = (line.plain for line in lines(found, width))
        assert "1.50 s" in vm
        assert "0.75 s" in bare
        assert abs(vm.count("━") - 2 * bare.count("━")) <= 1
        assert parts.split()[:8] == ["of", "that", "queued", "0.10", "clone", "0.20", "launch", "0.50"]
        assert max(map(len, (vm, bare, parts, rest))) <= width


class _Answers:
    """A controller of which each look shows the next answer, and the last one again and again."""

    def __init__(self, answers: Sequence[list[dict[str, Any]]]) -> None:
        self._answers = list(answers)

    def jobs(self, job: str | None = None, *, ended: bool = False) -> list[dict[str, Any]]:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def leases(self) -> list[dict[str, Any]]:
        return self.jobs()

    def vms(self) -> list[dict[str, Any]]:
        return []


def _client(*answers: list[dict[str, Any]]) -> Client:
    return cast(Client, _Answers(answers))


def _job(job: str, state: str, attempt: int = 1) -> dict[str, Any]:
    view = JobView(job, "x", 1, attempt, state, 1, 1, 100, "slim", "instant", 0.0, "", "why", 0, ("mv-1",), "")
    return asdict(view)


def _lease(state: str) -> dict[str, Any]:
    return asdict(LeaseView("lease-x-1", state, "physical", "", 0, 0, "9", "n1", None, 0.0, ""))


async def test_jobs_are_followed_until_they_have_ended_or_all_run() -> None:
    rows = [DemoJob("one", "1", "COMPLETED"), DemoJob("two", "2", "COMPLETED")]
    running = [_job("1", "allocated"), _job("2", "allocated")]
    await follow(_client([], [_job("1", "allocated"), _job("2", "queued")], running), rows, until="allocated")
    assert [row.state for row in rows] == ["allocated", "allocated"]
    looks = []

    async def each() -> None:
        looks.append([row.state for row in rows])

    await follow(_client(running, [_job("1", "done"), _job("2", "failed")]), rows, each)
    assert looks == [["allocated", "allocated"], ["done", "failed"]]
    again = [_job("1", "requeued", number) for number in range(REQUEUE_LIMIT)]
    with pytest.raises(Broken, match="why"):
        await follow(_client(again), [DemoJob("one", "1", "COMPLETED")])


async def test_a_lease_is_waited_for_and_its_states_are_told_once() -> None:
    said: list[str] = []
    states = ("held", "held", "idle", "releasing", "releasing")
    await _given_back(_client(*([_lease(state)] for state in states), []), said.append)
    assert said == ["lease-x-1 is held", "lease-x-1 is idle", "lease-x-1 is releasing"]
