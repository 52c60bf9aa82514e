"""The daemon's counters, and the number of calls and commits that a job needs in virtual time."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from random import Random
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.core.model.job import AttemptState
from multiverse.core.model.reason import Why
from multiverse.core.queue import BEHIND
from multiverse.service.backend import Backend
from multiverse.service.convert import counted
from multiverse.service.startup import ProcessCounter, Processes
from multiverse.service.statistics import Statistics
from multiverse.store import Store
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.world import SimulatedWorld
from tests.unit.rows import attempt

_PARTS = ("observe", "users", "sources", "templates", "offers", "submission", "membership", "addresses", "groups")
"""What is asked for without being an effect."""


class Counted:
    """A port that counts its calls, except observations, whose number depends on the time and not on jobs."""

    def __init__(self, port: Any, calls: Counter[str]) -> None:
        self._port, self._calls = port, calls

    def __getattr__(self, name: str) -> Any:
        if name not in _PARTS:
            self._calls[name] += 1
        return getattr(self._port, name)


async def _nothing() -> dict[str, Any]:
    return {}


async def _serve(jobs: int) -> tuple[Counter[str], int, str]:
    """Serve that many jobs with an existing template. Returns the calls, the commits and the metrics."""
    world, clock, calls = SimulatedWorld(1), VirtualClock(), Counter[str]()
    store = Store(":memory:", clock, site="count")
    scheduler: Any = Counted(world.scheduler(Random(1)), calls)
    hypervisor: Any = Counted(world.hypervisor(Random(2)), calls)
    controller = Controller(store, scheduler, hypervisor, clock, Settings(), Random(3))
    world.cluster.hint = controller.hint
    statistics = Statistics()
    controller.watch(statistics)
    work = asyncio.create_task(controller.run())
    commits = 0
    for batch in (1, jobs):
        calls.clear()
        commits = store.commits
        for _ in range(batch):
            world.cluster.submit(Batch())
        while world.unfinished() or world.leftovers() or store.rows().attempts or store.rows().vms:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
    work.cancel()
    assert world.violations() == []
    backend = Backend(controller, store, clock, None, _PROCESSES, statistics=statistics)
    return calls, store.commits - commits, (await backend.metrics()).decode()


async def _of_agents() -> Counter[str]:
    return Counter({"qemu-system-x86_64": 3})


_OWN = ProcessCounter()
_PROCESSES = Processes(_OWN, _of_agents)


def test_a_job_needs_each_call_once() -> None:
    calls, commits, _ = run(_serve(1), 1)
    assert calls == {"create": 1, "bootstrap": 1, "start": 1, "pin": 1, "destroy": 1, "delete_node": 1}, "a known user"
    assert commits <= 10


def test_concurrent_jobs_need_no_more_calls_and_fewer_commits_each() -> None:
    calls, commits, _ = run(_serve(4), 1)
    assert {name: times for name, times in calls.items() if times != 4} == {}
    assert commits <= 4 * 8


def test_processes_are_counted_by_program() -> None:
    before = _OWN.programs.copy()
    subprocess.run(["/bin/true", "7"], check=True)
    subprocess.run(["/bin/true", "8"], check=True)
    assert _OWN.programs - before == {"true": 2}
    subprocess.run(["setpriv", "--no-new-privs", "--", "/bin/true"], check=True)
    subprocess.run(["unshare", "--", "/bin/true"], check=True)
    assert _OWN.programs - before == {"true": 4}, "what becomes the program is not counted itself"


def test_the_metrics_have_every_counter() -> None:
    _, _, text = run(_serve(1), 1)
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    counted = {s.labels["program"]: s.value for s in found["multiverse_processes"] if s.name.endswith("_total")}
    own = _OWN.programs["qemu-system-x86_64"]  # other tests in this process may have started some
    assert counted["qemu-system-x86_64"] == 3 + own, "the agents have started these"
    assert set(found) >= {"multiverse_commits", "multiverse_observations", "multiverse_effects", "multiverse_rows"}
    effects = {tuple(sorted(s.labels.items())): s.value for s in found["multiverse_effects"]}
    assert effects[("kind", "pin"), ("outcome", "done")] == 2
    rows = [s.labels for s in found["multiverse_rows"]]
    assert rows == [{"of": "host", "state": "known"}, {"of": "template", "state": "ready"}]
    phases = {(s.name, s.labels["phase"]): s.value for s in found["multiverse_phase_seconds"] if "le" not in s.labels}
    assert phases["multiverse_phase_seconds_count", "start"] == 2
    assert phases["multiverse_phase_seconds_sum", "start"] > 0
    stages = {s.labels["stage"] for s in found["multiverse_stage_seconds"]}
    assert {"clone", "identity"} <= stages
    ended = found["multiverse_attempts_ended"]
    assert {s.labels["outcome"]: s.value for s in ended if s.name.endswith("_total")} == {"done": 2}
    assert sum(s.value for s in found["multiverse_clones"] if s.name.endswith("_total")) == 2
    waiting = {s.labels["reason"]: s.value for s in found["multiverse_jobs_waiting"]}
    assert set(waiting) >= {"behind", "capacity", "limit", "scheduler", "other"}
    assert not any(waiting.values()), "all words are there, so that a query finds them"
    usable = {(s.labels["host"], s.labels["resource"]): s.value for s in found["multiverse_host_usable"]}
    assert usable["h1", "memory_bytes"] == 8192 * 1024 * 1024


def test_waiting_jobs_are_counted_by_the_kinds_of_their_reasons() -> None:
    attempts = [attempt(AttemptState.QUEUED, id=number, job=str(number)) for number in range(1, 7)]
    running = attempt(AttemptState.ALLOCATED, id=9, job="9")
    reasons = {1: BEHIND, 2: BEHIND, 3: Why.CAPACITY(), 4: Why.SAID(text="something new"), 5: Why.NO_ADDRESS()}
    found = counted([*attempts, running], reasons)
    assert +found == {"behind": 2, "capacity": 1, "other": 1, "address": 1, "scheduler": 1}
    assert found.keys() >= {"turn", "limit", "earlier run"}, "each word is there, also with none"


def test_a_transaction_that_changes_nothing_is_not_counted() -> None:
    async def quiet() -> tuple[int, int]:
        store = Store(":memory:", VirtualClock(), site="count")
        before = store.commits
        store.rows()
        return before, store.commits

    before, after = run(quiet(), 1)
    assert before == after == 1
