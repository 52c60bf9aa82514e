"""Explanations as the API and users get them: of which jobs, with which names, and for how many tasks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from multiverse.api import TrialRequest
from multiverse.bundles.slurm.scheduler import SlurmWords
from multiverse.core.errors import Refused
from multiverse.core.model.job import Attempt, AttemptState, Eviction
from multiverse.core.model.reason import Why
from multiverse.service.api import make_api
from multiverse.service.explanations import OPERATOR, TASKS, Explanations, Viewer
from tests.unit.planner_harness import ManualClock
from tests.unit.rows import attempt
from tests.unit.test_backfill import EPOCH, NOW, Cluster

A = AttemptState
CLOCK = ManualClock(NOW + 20)


class Store:
    """All attempts, the ended ones too."""

    def __init__(self, cluster: Cluster, ended: list[Attempt]) -> None:
        self._cluster, self._ended = cluster, ended

    def attempts(self, *, job_id: str, limit: int) -> list[Attempt]:
        assert self._cluster.state is not None
        every = [*self._cluster.state.attempts.values(), *self._ended]
        found = [one for one in every if one.job.job_id == job_id or one.job.job_id.startswith(f"{job_id}_")]
        return sorted(found, key=lambda one: -one.id)[:limit]

    def journal(self, *, attempts: list[int]) -> list[Any]:
        return [SimpleNamespace(wall=CLOCK.wall() - 7200.0)]


def explanations(cluster: Cluster, *ended: Attempt) -> Explanations:
    controller = SimpleNamespace(context=cluster.context, state=cluster.state)
    return Explanations(controller, Store(cluster, list(ended)), CLOCK, SlurmWords())  # type: ignore[arg-type]


def crowded() -> Cluster:
    cluster = Cluster(hosts=2)
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4, nodes=2)
    cluster.waits(3, 3, uid=2000)
    cluster.run()
    return cluster


def test_an_operator_is_told_of_any_job_with_all_names() -> None:
    (one,) = explanations(crowded()).of_job("3", OPERATOR).jobs
    assert (one.job_id, one.uid, one.state, one.ahead, one.behind) == ("3", 2000, "queued", 1, "2")
    assert "job 2 keeps them waiting" in one.text and one.waiting_since == EPOCH
    assert {group.hosts for group in one.hosts} == {"h1", "h2"}


def test_a_user_is_told_of_no_other_users_job() -> None:
    found = explanations(crowded())
    assert found.of_job("3", Viewer(2000)).jobs and found.of_job("2", Viewer(1000)).jobs
    for uid in (1000, 0, 65534):
        assert not found.of_job("3", Viewer(uid)).jobs


def test_what_is_private_is_left_out_of_every_field() -> None:
    (one,) = explanations(crowded()).of_job("3", Viewer(2000, others=False, hosts=False)).jobs
    said = repr(replace(one, expected=None, waiting_since=None))
    assert "job 2" not in said and one.behind == "" and "another job keeps them waiting" in one.text
    assert "h1" not in said and "h2" not in said and sum(group.count for group in one.hosts) == 2


def test_a_user_is_told_of_their_job_s_evictions_without_names_that_are_private() -> None:
    why = Why.PREEMPTED(job="2", by="high")
    moved = attempt(A.DONE, id=9, job="5", evictions=(Eviction(1.0, "move", "h1", why, 100, 2.0),))
    for viewer, host, reason in (
        (OPERATOR, "h1", "job 2 (high) takes its place"),
        (Viewer(1000, others=False, hosts=False), "", "another job (high) takes its place"),
    ):
        (one,) = explanations(crowded(), moved).of_job("5", viewer).jobs
        assert [(each.host, each.reason, each.took) for each in one.evictions] == [(host, reason, 2.0)]


def test_a_job_that_began_anew_because_its_vm_was_lost_says_so() -> None:
    cluster = crowded()
    assert cluster.state is not None
    (running,) = (one for one in cluster.state.attempts.values() if one.state is A.ALLOCATED)
    job = running.job.job_id
    cluster.state.attempts[running.id] = replace(running, job=replace(running.job, restarts=1))
    for reason, said in (
        (Why.REQUEUED(Why.RESULT(word="its QEMU has ended")), True),
        (Why.REQUEUED(), False),
    ):
        lost = replace(attempt(A.REQUEUED, id=running.id - 1, job=job), outcome="requeued", reason=reason)
        (one,) = explanations(cluster, lost).of_job(job, OPERATOR).jobs
        words = "Its earlier run ended with its VM: its QEMU has ended. It began anew."
        assert (words in one.text) is said and ("began anew" in one.text) is said


def test_a_job_whose_files_could_not_be_opened_says_so_and_what_to_do() -> None:
    unopened = replace(attempt(A.DONE, id=9, job="5"), reason=Why.UNOPENED(word="FAILED"))
    (one,) = explanations(crowded(), unopened).of_job("5", Viewer(1000)).jobs
    assert "FAILED: the scheduler could not open its input, output or error file in its VM" in one.text
    assert one.todo.startswith("submit it again from a directory that VMs have")
    failed = replace(attempt(A.DONE, id=9, job="5"), reason=Why.RESULT(word="FAILED"))
    (one,) = explanations(crowded(), failed).of_job("5", Viewer(1000)).jobs
    assert one.text == "It ended 2 h ago: FAILED." and not one.todo


def test_the_latest_attempt_of_a_job_is_told() -> None:
    older = attempt(A.REQUEUED, id=1, job="5", reason="no VM joined")
    newer = attempt(A.FAILED, id=9, job="5", reason="no VM could be created")
    (one,) = explanations(crowded(), older, newer).of_job("5", OPERATOR).jobs
    assert one.attempt == 9 and one.text == "It failed 2 h ago: no VM could be created." and one.todo
    assert not one.hosts and one.waiting_since is None


def test_of_an_array_the_first_tasks_are_told_and_hosts_once() -> None:
    cluster = Cluster()
    cluster.runs(1, 4, ends=500.0)
    for number in range(2, 2 + TASKS + 5):
        cluster.waits(number, 1, array="40")
        ref = replace(cluster.jobs[str(number)].ref, job_id=f"40_{number}")
        cluster.jobs[ref.job_id] = cluster.jobs.pop(str(number))._replace(ref=ref)
        cluster.rows[-1] = replace(cluster.rows[-1], job=ref)  # type: ignore[call-arg]
    cluster.run()
    found = explanations(cluster).of_job("40", OPERATOR)
    assert len(found.jobs) == TASKS and found.more == 5
    assert [bool(one.hosts) for one in found.jobs] == [True] + [False] * (TASKS - 1)
    (one,) = explanations(cluster).of_job("40_5", OPERATOR).jobs
    assert one.job_id == "40_5" and one.hosts


def test_a_task_is_found_by_the_number_by_which_the_scheduler_shows_it_too() -> None:
    cluster = Cluster()
    cluster.runs(1, 4, ends=500.0)
    cluster.waits(2, 1, array="40")
    ref = replace(cluster.jobs["2"].ref, job_id="40_2")
    cluster.jobs["40_2"] = cluster.jobs.pop("2")._replace(ref=ref, other_id="46")
    cluster.rows[-1] = replace(cluster.rows[-1], job=ref)  # type: ignore[call-arg]
    cluster.run()
    (one,) = explanations(cluster).of_job("46", Viewer(1000)).jobs
    assert one.job_id == "40_2" and not explanations(cluster).of_job("46", Viewer(2000)).jobs


def test_a_job_that_slurm_has_shown_and_no_pass_has_seen_is_told() -> None:
    cluster = crowded()
    cluster.jobs["77"] = cluster.jobs["2"]._replace(ref=replace(cluster.jobs["2"].ref, job_id="77"))
    (one,) = explanations(cluster).of_job("77", OPERATOR).jobs
    assert one.attempt is None and "next pass" in one.text
    assert not explanations(cluster).of_job("77", Viewer(65534)).jobs
    assert not explanations(cluster).of_job("78", OPERATOR).jobs


@pytest.mark.parametrize(
    ("reason", "held", "todo"),
    [
        ("JobHeldUser", True, "scontrol release 9"),
        ("JobHeldAdmin", True, "ask the administrators"),
        ("Dependency", False, "Format=Dependency"),
        ("BeginTime", False, "Format=StartTime"),
        ("QOSMaxJobsPerUserLimit", False, "scontrol show job 9"),
    ],
)
def test_what_slurm_itself_holds_back_has_a_next_step_in_slurms_words(reason: str, held: bool, todo: str) -> None:
    cluster = Cluster()
    cluster.waits(9, 1)
    cluster.jobs["9"] = cluster.jobs["9"]._replace(eligible=False, held=held, reason=reason)
    cluster.run()
    (one,) = explanations(cluster).of_job("9", OPERATOR).jobs
    assert reason in one.text and todo in one.todo


def test_capacity_names_the_job_that_blocks_to_those_who_may_know() -> None:
    found = explanations(crowded())
    shown = found.capacity(OPERATOR)
    assert shown.blocked and shown.blocked_by == "2" and shown.waiting == 2
    assert found.capacity(Viewer(2000, others=False)).blocked_by == ""
    assert found.capacity(Viewer(1000, others=False)).blocked_by == "2", "it is theirs"
    assert {(one.cpus, one.now) for one in shown.sizes} >= {(1, 5), (4, 1)}
    trial = found.trial(TrialRequest(cpus=4, memory=100, nodes=2), Viewer(2000, others=False, hosts=False))
    assert not trial.starts and trial.behind == "" and trial.ahead == 2 and trial.alone is not None
    assert all(group.hosts == "" and group.count for group in trial.groups)


async def test_the_routes_answer_with_what_is_wrong() -> None:
    cluster = crowded()
    found = explanations(cluster)
    backend = SimpleNamespace(explanations=found, utilization=None)
    transport = httpx.ASGITransport(app=make_api(backend))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://multiverse") as client:
        assert (await client.get("/explain/3")).json()["jobs"][0]["job_id"] == "3"
        assert (await client.get("/explain/99")).status_code == 404
        assert (await client.get("/capacity")).json()["blocked_by"] == "2"
        asked = await client.post("/capacity", json={"cpus": 1, "memory": 100, "limit": 10})
        assert asked.json()["starts"] is True and asked.json()["hosts"] in ("h1", "h2")
        assert (await client.post("/capacity", json={"cpus": 0})).status_code == 422
        cluster.world = replace(cluster.world, scheduler=None)
        assert (await client.get("/capacity")).status_code == 503
        assert (await client.post("/capacity", json={})).status_code == 503
    with pytest.raises(Refused, match="out of reach"):
        found.capacity(OPERATOR)


def test_what_the_schedulers_own_words_mean_is_told_beside_them() -> None:
    cluster = crowded()
    cluster.jobs["2"] = cluster.jobs["2"]._replace(eligible=False, reason="Dependency")
    cluster.jobs["3"] = cluster.jobs["3"]._replace(eligible=False, held=True, reason="JobHeldUser")
    cluster.run()
    found = explanations(cluster)
    (kept,), (held,) = (found.of_job(job, OPERATOR).jobs for job in ("2", "3"))
    assert (
        "the scheduler itself keeps it waiting: it depends on jobs that have not ended as it asks (Dependency)."
        in kept.text
    )
    assert "it is held: its user holds it (JobHeldUser)." in held.text
