"""The observer of the scheduler: when it loads everything, when a part, and what is known afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from itertools import pairwise
from typing import Any

import pytest

from multiverse.controller.observers import BURST, WHOLE_SHARE, Awaited, SchedulerObserver
from multiverse.core.errors import Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.job import (
    Job,
    JobRef,
    JobState,
    Node,
    NodeState,
    Preemption,
    Request,
    SchedulerPart,
    SchedulerView,
)
from multiverse.core.model.world import Seen, World
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.loop import run
from tests.unit.scheduler_parts import part_of

POLL = 2.0


def job(job_id: str, uid: int = 1, **changes: Any) -> Job:
    one = Job(JobRef(job_id, 100), "job", uid, JobState.PENDING, Request(1, Size(1, 64)))
    return one._replace(**changes)


class Slurm:
    """A scheduler whose answers take time. It records when each of its calls began."""

    def __init__(self, *jobs: Job, whole: float = 0.1, part: float = 0.01) -> None:
        self.jobs = {one.ref.job_id: one for one in jobs}
        self.nodes: dict[str, Node] = {}
        self.clock: VirtualClock
        self.whole, self.part, self.away = whole, part, False
        self.wholes: list[float] = []
        self.reads: list[tuple[float, set[str], set[int], set[str]]] = []
        self.parts: Slurm | None = self
        self.most = 9  # users that one part reads

    async def observe(self) -> SchedulerView:
        self.wholes.append(self.clock.now())
        await self._answer(self.whole)
        return SchedulerView(dict(self.jobs), dict(self.nodes))

    async def read(
        self, jobs: Mapping[str, int | None], users: Collection[int], nodes: Collection[str]
    ) -> SchedulerPart:
        self.reads.append((self.clock.now(), set(jobs), set(users), set(nodes)))
        await self._answer(self.part)
        return part_of(SchedulerView(dict(self.jobs), dict(self.nodes)), jobs, sorted(users)[: self.most], nodes)

    async def _answer(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.away:
            raise Unknown("it does not answer")


class Setting:
    """An observer that runs. `pace` is its interval, `awaited` what is awaited."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm, self.pace, self.awaited = slurm, POLL, Awaited()
        slurm.clock = VirtualClock()
        scheduler: Any = slurm
        self.observer = SchedulerObserver(
            scheduler, slurm.clock, POLL, lambda: self.pace, lambda: self.awaited, lambda: None
        )

    def shown(self) -> SchedulerView:
        assert self.observer.latest is not None
        return self.observer.latest.value

    def await_(self, *job_ids: str, nodes: Collection[str] = ()) -> None:
        self.pace, self.awaited = 0.1, Awaited(dict.fromkeys(job_ids, 1), frozenset(nodes))
        self.observer.poke()


def play(slurm: Slurm, script: Callable[[Setting], Awaitable[None]]) -> Setting:
    async def main() -> Setting:
        setting = Setting(slurm)
        task = asyncio.create_task(setting.observer.run())
        await asyncio.sleep(1.0)
        await script(setting)
        task.cancel()
        return setting

    return run(main(), 1)


async def nothing_happens(setting: Setting) -> None:
    await asyncio.sleep(59.0)


def test_what_is_awaited_after_an_observation_is_read_before_the_next_poll() -> None:
    async def script(setting: Setting) -> None:
        setting.slurm.jobs["1"] = job("1", state=JobState.RUNNING)
        await asyncio.sleep(POLL)
        setting.pace, setting.awaited = 0.1, Awaited({"1": 1})
        before = setting.slurm.clock.now()
        setting.observer.reconsider()
        await asyncio.sleep(1.0)
        readings = [at for at, *_ in setting.slurm.reads if at >= before]
        assert len(readings) >= 9 and readings[0] - before <= 0.1

    play(Slurm(job("1")), script)


@pytest.mark.parametrize(("seconds", "interval"), [(0.01, POLL), (0.05, POLL), (0.5, 10.0), (1.0, 20.0)])
def test_whole_loads_are_as_rare_as_they_are_long(seconds: float, interval: float) -> None:
    wholes = play(Slurm(whole=seconds), nothing_happens).slurm.wholes
    first, *gaps = [after - before for before, after in pairwise(wholes)]
    assert first == pytest.approx(POLL, abs=0.01), "one duration alone tells nothing"
    assert gaps and min(gaps) == pytest.approx(interval, abs=0.01) and max(gaps) == pytest.approx(interval, abs=0.01)


def test_a_whole_load_that_had_to_wait_once_puts_off_no_other() -> None:
    async def script(setting: Setting) -> None:
        await asyncio.sleep(4.0)
        setting.slurm.whole = 14.0  # the backup slurmctld takes over
        await asyncio.sleep(POLL)
        setting.slurm.whole = 0.1
        setting.slurm.jobs["1"] = job("1", state=JobState.RUNNING)
        await asyncio.sleep(14.0 + POLL)
        assert setting.shown().jobs["1"].state is JobState.RUNNING

    gaps = [after - before for before, after in pairwise(play(Slurm(job("1")), script).slurm.wholes)]
    assert max(gaps) == pytest.approx(14.0, abs=0.01)


def test_between_whole_loads_the_awaited_jobs_and_nodes_are_read() -> None:
    async def script(setting: Setting) -> None:
        setting.await_("1", nodes=["mv-1"])
        await asyncio.sleep(0.35)
        setting.slurm.jobs["1"] = job("1", state=JobState.RUNNING)
        setting.slurm.nodes["mv-1"] = Node("mv-1", NodeState.BUSY)
        setting.slurm.jobs["2"] = job("2", uid=2, state=JobState.RUNNING)
        await asyncio.sleep(0.25)
        shown = setting.shown()
        assert shown.jobs["1"].state is JobState.RUNNING and shown.nodes["mv-1"].state is NodeState.BUSY
        assert shown.jobs["2"].state is JobState.PENDING, "it was not read"
        assert len(setting.slurm.wholes) == 1
        assert 4 <= len(setting.slurm.reads) <= 7
        assert all(read[1:] == ({"1"}, set(), {"mv-1"}) for read in setting.slurm.reads)

    play(Slurm(job("1"), job("2", uid=2), whole=1.0 / WHOLE_SHARE * 10), script)


def test_readings_of_parts_leave_the_scheduler_time() -> None:
    async def script(setting: Setting) -> None:
        setting.await_("1")
        await asyncio.sleep(5.0)
        times = [read[0] for read in setting.slurm.reads]
        assert min(b - a for a, b in pairwise(times)) == pytest.approx(1.5, abs=0.01)

    play(Slurm(job("1"), whole=0.5, part=0.5), script)


def test_parts_are_read_again_after_one_has_taken_longer_than_whole_loads_are_apart() -> None:
    async def script(setting: Setting) -> None:
        setting.await_("1")
        await asyncio.sleep(3.5)
        assert len(setting.slurm.reads) == 1, "which took three seconds"
        setting.slurm.part = 0.01
        await asyncio.sleep(POLL + 8.0)
        assert len(setting.slurm.wholes) > 4, "whole loads do not wait for parts"
        began = len(setting.slurm.reads)
        assert began >= 2
        await asyncio.sleep(1.0)
        assert len(setting.slurm.reads) >= began + 5
        setting.slurm.jobs["1"] = job("1", state=JobState.RUNNING)
        await asyncio.sleep(0.25)
        assert setting.shown().jobs["1"].state is JobState.RUNNING

    play(Slurm(job("1"), whole=0.01, part=3.0), script)


def test_a_hint_of_a_user_is_followed_by_readings_until_a_change_is_seen() -> None:
    async def script(setting: Setting) -> None:
        setting.observer.hint(uid=7)
        began = setting.slurm.clock.now()
        await asyncio.sleep(0.1)
        setting.slurm.jobs["5"] = job("5", uid=7)
        await asyncio.sleep(0.9)
        times = [round(read[0] - began, 2) for read in setting.slurm.reads if 7 in read[2]]
        assert times == [0.0, 0.05, 0.15], "the last of the burst is not needed"
        assert setting.shown().jobs["5"].uid == 7
        assert len(setting.slurm.wholes) == 1

    play(Slurm(whole=0.3), script)


def test_a_hint_of_a_job_that_changes_late_is_followed_by_the_whole_burst() -> None:
    async def script(setting: Setting) -> None:
        setting.observer.hint(job_id="1")
        await asyncio.sleep(1.0)
        assert len([read for read in setting.slurm.reads if "1" in read[1]]) == len(BURST)

    play(Slurm(job("1"), whole=0.3), script)


def test_what_a_part_did_not_read_is_left_to_a_whole_load() -> None:
    async def script(setting: Setting) -> None:
        await asyncio.sleep(1.5)
        setting.slurm.most = 1
        for uid in (7, 8):
            setting.observer.hint(uid=uid)
        await asyncio.sleep(5.0)
        first, second = setting.slurm.wholes[1:3]
        assert second - first == pytest.approx(WHOLE_SHARE * 0.07, abs=0.01)

    play(Slurm(whole=0.07), script)


def test_a_hint_without_a_name_hastens_the_whole_load_and_not_beyond_its_share() -> None:
    async def script(setting: Setting) -> None:
        await asyncio.sleep(1.5)
        setting.observer.hint()
        await asyncio.sleep(5.0)
        first, second = setting.slurm.wholes[1:3]
        assert second - first == pytest.approx(WHOLE_SHARE * 0.07, abs=0.01)

    play(Slurm(whole=0.07), script)


def test_what_a_part_does_not_find_is_gone_and_the_rest_is_as_old_as_the_whole() -> None:
    async def script(setting: Setting) -> None:
        del setting.slurm.jobs["1"], setting.slurm.jobs["2"], setting.slurm.nodes["mv-1"], setting.slurm.nodes["mv-2"]
        setting.await_("1", "9", nodes=["mv-1", "mv-9"])
        await asyncio.sleep(0.05)
        latest = setting.observer.latest
        assert latest is not None
        (read, *_), whole = setting.slurm.reads, setting.slurm.wholes[0]
        world = World(scheduler=latest)
        assert latest.value.jobs.keys() == {"2"} and latest.value.nodes.keys() == {"mv-2"}
        jobs = [world.job_began(name) for name in ("1", "9", "2", "8")]
        nodes = [world.node_began(name) for name in ("mv-1", "mv-9", "mv-2")]
        assert jobs == pytest.approx([read[0], read[0], whole, whole], rel=0, abs=1e-3)
        assert nodes == pytest.approx([read[0], read[0], whole], rel=0, abs=1e-3)
        assert latest.began == jobs[-1] < jobs[0]

    slurm = Slurm(job("1"), job("2", uid=2), whole=0.3)
    slurm.nodes = {name: Node(name, NodeState.IDLE) for name in ("mv-1", "mv-2")}
    play(slurm, script)


def test_a_whole_load_is_newer_than_the_parts_before_it() -> None:
    async def script(setting: Setting) -> None:
        setting.await_("1")
        await asyncio.sleep(8.0)
        latest = setting.observer.latest
        assert latest is not None
        assert latest.began == pytest.approx(setting.slurm.wholes[-1], rel=0, abs=1e-3)
        assert latest.began > setting.slurm.wholes[0] + 5
        assert World(scheduler=latest).job_began("1") >= latest.began

    play(Slurm(job("1"), whole=0.3), script)


def test_after_a_failed_reading_the_scheduler_is_unknown_until_a_whole_load() -> None:
    async def script(setting: Setting) -> None:
        setting.await_("1")
        setting.slurm.away = True
        await asyncio.sleep(0.3)
        assert setting.observer.latest is None and setting.observer.failure
        wholes = len(setting.slurm.wholes)
        setting.slurm.away = False
        await asyncio.sleep(1.0)
        assert setting.shown().jobs and len(setting.slurm.wholes) > wholes

    play(Slurm(job("1"), whole=0.05), script)


def test_a_bug_in_a_driver_makes_the_source_unknown_and_does_not_end_the_observer() -> None:
    async def script(setting: Setting) -> None:
        async def broken(*_: object) -> SchedulerPart:
            raise KeyError("jobs")

        usual: Any = setting.slurm.read
        setting.slurm.__dict__["read"] = broken
        setting.await_("1")
        await asyncio.sleep(0.05)
        assert setting.observer.latest is None and "KeyError" in setting.observer.failure
        setting.slurm.__dict__["read"] = usual
        await asyncio.sleep(1.0)
        assert setting.shown().jobs and not setting.observer.failure

    play(Slurm(job("1"), whole=0.05), script)


def test_a_scheduler_that_reads_no_parts_is_loaded_whole_at_every_hint() -> None:
    async def script(setting: Setting) -> None:
        before = len(setting.slurm.wholes)
        setting.observer.hint(uid=7)
        await asyncio.sleep(0.6)
        assert len(setting.slurm.wholes) == before + len(BURST)
        setting.pace = 0.1
        setting.observer.poke()
        await asyncio.sleep(1.0)
        assert len(setting.slurm.wholes) >= before + len(BURST) + 9

    slurm = Slurm(whole=0.01)
    slurm.parts = None
    play(slurm, script)


def test_an_unread_view_of_the_scheduler_is_older_than_anything() -> None:
    assert World().job_began("1") == World().node_began("mv-1") == float("-inf")


def test_a_part_that_was_read_of_a_user_replaces_all_jobs_of_that_user() -> None:
    rules = Preemption({"urgent": frozenset(["low"])}, {}, {"low": "requeue"}, {})
    jobs = {"1": job("1"), "2": job("2"), "3": job("3", uid=2)}
    view = SchedulerView(jobs, limits={"a": 1, "b": 2}, preemption=rules)
    part = SchedulerPart({"2": job("2", held=True), "4": job("4")}, users=frozenset([1]), limits={"b": 0})
    merged = view.merged(part, 5.0)
    assert list(merged.jobs) == ["2", "3", "4"] and merged.jobs["2"].held and merged.jobs["3"] is view.jobs["3"]
    assert merged.jobs_began == {"1": 5.0, "2": 5.0, "4": 5.0} and merged.limits == {"a": 1, "b": 0}
    assert merged.preemption is rules, "a part says nothing of it"
    assert World(scheduler=Seen(merged, 1.0)).job_began("1") == 5.0


def test_how_long_an_answer_is_awaited_is_known_until_it_comes() -> None:
    async def script(setting: Setting) -> None:
        setting.slurm.whole = 30.0
        setting.slurm.parts = None
        setting.observer.poke()
        await asyncio.sleep(20.0)
        asked = setting.observer.asked
        assert setting.observer.latest is not None
        assert asked is not None and setting.slurm.clock.now() - asked == pytest.approx(20.0, abs=3.0)
        await asyncio.sleep(29.0)
        setting.slurm.whole = 0.01
        setting.pace = 1000.0
        await asyncio.sleep(31.0)
        assert setting.observer.asked is None

    play(Slurm(job("1")), script)
