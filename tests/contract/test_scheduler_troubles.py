"""The contract of `ports.Scheduler` when replies are lost, and when calls are repeated, late, or made at once.

A call that is cancelled has lost its reply and may have been executed. The same call, repeated, has the one right
result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.contract.test_scheduler_contract import PAIRS, Check, Harness, Simulated, later, next_run

from multiverse.core.errors import Gone, MultiverseError, NotYet, Refused, Stale, Unknown
from multiverse.core.model.job import Job, JobRef, JobState, NodeState
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.world import Pair

CUTS = (0.0, 0.008, 0.016, 0.03, 0.06)  # seconds; a command of Slurm's takes some 0.01


async def cut(call: Awaitable[None], after: float) -> None:
    """Make a call and cancel it: its reply is lost, and it may have been executed."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def at_once(*calls: Awaitable[None]) -> list[BaseException | None]:
    """Make calls at the same time and return their results. Only errors of our own may be raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(result is None or isinstance(result, MultiverseError) for result in results), results
    return results


def calls_of(h: Harness, ref: JobRef, feature: str) -> dict[str, Callable[[], Awaitable[None]]]:
    return {
        "pin": lambda: h.pin(ref, feature),
        "unpin": lambda: h.scheduler.unpin(ref),
        "requeue": lambda: h.scheduler.requeue(ref),
        "revoke": lambda: h.scheduler.revoke(ref, "test"),
    }


async def waiting_on_a_node(h: Harness) -> tuple[Job, str, str]:
    """A job, the name of its node, and the tag. The node is DOWN, so that the job stays pending once it is pinned."""
    job = await h.job(await h.submit())
    name, feature = await h.node(job)
    await h.scheduler.set_down(name, "so that the pinned job stays pending")
    return job, name, feature


async def still(h: Harness, job: Job) -> Job:
    """The job has not changed: it is the same run, pending at the gate."""
    same = await h.job(job.ref.job_id)
    assert same.ref == job.ref and same.state is JobState.PENDING and same.gated and same.pinned is None
    return same


# --- lost replies ----------------------------------------------------------------------------------


async def a_pin_or_an_unpin_whose_reply_was_lost_is_repeated(h: Harness) -> None:
    job, _, feature = await waiting_on_a_node(h)
    for after in CUTS:
        await cut(h.pin(job.ref, feature), after)
        await h.pin(job.ref, feature)
        pinned = await h.job(job.ref.job_id)
        assert pinned.pinned == feature and not pinned.gated and pinned.ref == job.ref
        await cut(h.scheduler.unpin(job.ref), after)
        await h.scheduler.unpin(job.ref)
        assert (await still(h, job)).eligible
    for after in CUTS:  # the opposite call undoes what may have been done in part
        await cut(h.pin(job.ref, feature), after)
        await h.scheduler.unpin(job.ref)
        assert (await still(h, job)).eligible


async def a_requeue_whose_reply_was_lost_is_executed_once(h: Harness) -> None:
    job, _ = await h.running()
    for after in (0.0, 0.012, 0.03):
        await cut(h.scheduler.requeue(job.ref), after)
        try:
            await h.scheduler.requeue(job.ref)
        except Stale:
            pass  # the first call was executed, and the job is another run now
        back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING)
        assert next_run(back.ref, job.ref)
        await h.scheduler.unpin(back.ref)
        assert (await still(h, back)).eligible
        _, feature = await h.node(back)  # each run has nodes of its own
        await h.pin(back.ref, feature, at_once=True)  # in spite of the begin time that Slurm gives to requeued jobs
        job = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
        assert job.ref == back.ref


async def a_revoke_whose_reply_was_lost_is_repeated(h: Harness) -> None:
    for after in CUTS:
        job = await h.job(await h.submit())
        await cut(h.scheduler.explain([job.ref], "no host could ever hold it"), after)
        await still(h, job)
        await cut(h.scheduler.revoke(job.ref, "no host could ever hold it"), after)
        await h.scheduler.revoke(job.ref, "no host could ever hold it")
        ended = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
        assert ended.result == "CANCELLED"


async def a_node_is_deleted_whatever_replies_are_lost(h: Harness) -> None:
    job = await h.job(await h.submit())
    for after in (0.0, 0.008, 0.02):
        name, _ = await h.node(job)
        await cut(h.scheduler.set_down(name, "test"), after)
        await h.scheduler.set_down(name, "test")
        assert (await h.scheduler.observe()).nodes[name].is_unusable
        await cut(h.scheduler.delete_node(name), after)
        await h.delete(name)
        assert name not in (await h.scheduler.observe()).nodes


# --- repeats ---------------------------------------------------------------------------------------


async def two_equal_calls_at_once_are_like_one(h: Harness) -> None:
    job, name, feature = await waiting_on_a_node(h)
    pins = await at_once(h.pin(job.ref, feature), h.pin(job.ref, feature))
    assert pins == [None, None] and (await h.job(job.ref.job_id)).pinned == feature
    unpins = await at_once(h.scheduler.unpin(job.ref), h.scheduler.unpin(job.ref))
    assert unpins == [None, None] and (await still(h, job)).eligible
    words = await at_once(h.scheduler.explain([job.ref], "one"), h.scheduler.explain([job.ref], "two"))
    assert words == [None, None]
    assert await at_once(h.scheduler.set_down(name, "one"), h.scheduler.set_down(name, "two")) == [None, None]
    assert await at_once(h.scheduler.delete_node(name), h.scheduler.delete_node(name)) == [None, None]
    assert name not in (await h.scheduler.observe()).nodes
    await at_once(h.scheduler.revoke(job.ref, "one"), h.scheduler.revoke(job.ref, "two"))
    assert (await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)).result == "CANCELLED"
    await h.scheduler.revoke(job.ref, "three")


async def two_requeues_at_once_are_one(h: Harness) -> None:
    job, _ = await h.running()
    results = await at_once(h.scheduler.requeue(job.ref), h.scheduler.requeue(job.ref))
    assert all(result is None or isinstance(result, Stale) for result in results)
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING)
    assert next_run(back.ref, job.ref)


async def a_pin_and_an_unpin_at_once_leave_one_of_the_two(h: Harness) -> None:
    job, _, feature = await waiting_on_a_node(h)
    for _ in range(3):
        await at_once(h.pin(job.ref, feature), h.scheduler.unpin(job.ref))
        seen = await h.job(job.ref.job_id)
        assert seen.gated == (seen.pinned is None) and seen.state is JobState.PENDING
        await h.scheduler.unpin(job.ref)
        assert (await still(h, job)).eligible


async def a_repeated_pin_of_a_started_job_succeeds(h: Harness) -> None:
    job, _ = await h.running()
    await h.pin(job.ref, job.pinned or "")
    with pytest.raises(Stale):
        await h.pin(job.ref, "mv_987654")
    assert (await h.job(job.ref.job_id)).state is JobState.RUNNING


async def a_refused_pin_leaves_the_job_at_the_gate(h: Harness) -> None:
    """Slurm does not undo a refused update completely: the partition stays changed."""
    job, _, feature = await waiting_on_a_node(h)
    for _ in range(2):
        with pytest.raises(Refused):
            await h.pin(job.ref, "mv_987654")
        assert (await still(h, job)).eligible
        await h.pin(job.ref, feature)  # the second time the job is pinned elsewhere already


# --- stale calls -----------------------------------------------------------------------------------


async def a_call_to_another_run_changes_nothing(h: Harness) -> None:
    job, _, feature = await waiting_on_a_node(h)
    for ref in (later(job.ref), replace(job.ref, submitted=job.ref.submitted - 100)):
        for name, call in calls_of(h, ref, feature).items():
            with pytest.raises(Stale):
                await call()
            assert (await still(h, job)).eligible, name
    for name, call in calls_of(h, replace(job.ref, job_id="59998"), feature).items():
        with pytest.raises(Gone):
            await call()
        assert (await still(h, job)).eligible, name


async def an_explanation_to_another_run_is_given_to_nobody(h: Harness) -> None:
    job, _, _ = await waiting_on_a_node(h)
    before = await h.comment(job.ref.job_id)
    for ref in (later(job.ref), replace(job.ref, submitted=job.ref.submitted - 100), replace(job.ref, job_id="59998")):
        await h.scheduler.explain([ref], "this is for another run")
        assert (await still(h, job)).eligible
        assert await h.comment(job.ref.job_id) == before


async def a_call_to_another_job_of_that_id_changes_nothing(h: Harness) -> None:
    async with h.forgetting():
        before = await h.job(await h.submit())
        await h.cancel(before.ref.job_id)
        await h.job(before.ref.job_id, lambda job: job.state is JobState.ENDED)
    job, _, feature = await waiting_on_a_node(h)
    assert job.ref.job_id == before.ref.job_id and job.ref != before.ref
    for name, call in calls_of(h, before.ref, feature).items():
        with pytest.raises(Stale):
            await call()
        assert (await still(h, job)).eligible, name
    await h.pin(job.ref, feature)
    assert (await h.job(job.ref.job_id)).pinned == feature


async def a_call_to_the_run_before_changes_nothing(h: Harness) -> None:
    job, name = await h.running()
    feature = job.pinned or ""
    await h.scheduler.requeue(job.ref)
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING and job.gated)
    for call in calls_of(h, job.ref, feature).values():
        with pytest.raises(Stale):
            await call()
    assert (await still(h, back)).eligible
    await h.view(lambda view: view.nodes[name].state is NodeState.IDLE)
    _, feature = await h.node(back)  # each run has nodes of its own
    await h.pin(back.ref, feature, at_once=True)
    again = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    for call in calls_of(h, job.ref, feature).values():
        with pytest.raises(Stale):
            await call()
    same = await h.job(job.ref.job_id)
    assert (same.state, same.ref) == (JobState.RUNNING, again.ref)


async def an_ended_job_is_not_changed(h: Harness) -> None:
    job, name = await h.running()
    await h.cancel(job.ref.job_id)
    ended = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
    assert ended.ref == job.ref and ended.result == "CANCELLED"
    for what in ("pin", "unpin", "requeue"):
        with pytest.raises(Stale):
            await calls_of(h, job.ref, job.pinned or "")[what]()
    await h.scheduler.revoke(job.ref, "it has ended as revoked would")
    assert (await h.job(job.ref.job_id)).state is JobState.ENDED
    await h.view(lambda view: view.nodes[name].state is NodeState.IDLE)
    await h.delete(name)


async def a_job_that_has_ended_meanwhile_is_not_queued_again(h: Harness) -> None:
    (task,) = await h.submit_array(1)
    for job_id, until in (
        (await h.submit(), JobState.ENDED),
        (await h.submit(lingers=4.0), JobState.COMPLETING),
        (task, JobState.ENDED),
    ):
        job, _ = await h.start(job_id)

        async def end(job: Job = job, until: JobState = until) -> None:
            await h.cancel(job.ref.job_id)
            await h.job(job.ref.job_id, lambda job: job.state is until)

        with suppress(Stale):
            await h.requeue_late(job.ref, end)
        ended = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
        assert ended.ref == job.ref and ended.result == "CANCELLED"


async def a_completing_job_is_not_changed_and_keeps_its_node(h: Harness) -> None:
    job, name = await h.running(lingers=4.0)
    await h.cancel(job.ref.job_id)
    ending = await h.job(job.ref.job_id, lambda job: job.state is JobState.COMPLETING)
    assert ending.ref == job.ref and ending.nodes == (name,)
    for what in ("pin", "unpin", "requeue", "revoke"):
        with pytest.raises(Stale):
            await calls_of(h, job.ref, job.pinned or "")[what]()
    with pytest.raises(Refused):
        await h.scheduler.delete_node(name)
    view = await h.scheduler.observe()
    assert view.jobs[job.ref.job_id].state is JobState.COMPLETING and view.nodes[name].state is NodeState.BUSY
    ended = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
    assert ended.ref == job.ref and ended.result == "CANCELLED"


async def a_node_that_was_set_down_is_not_deleted_under_its_job(h: Harness) -> None:
    """slurmctld 22.05 deletes a DOWN node under a completing job, and crashes (decision 7)."""
    job, name = await h.running(lingers=4.0)
    await h.cancel(job.ref.job_id)
    await h.job(job.ref.job_id, lambda job: job.state is JobState.COMPLETING)
    await h.scheduler.set_down(name, "its VM was lost")
    for _ in range(int(h.patience / 0.1)):
        seen = (await h.scheduler.observe()).jobs[job.ref.job_id]
        try:
            await h.scheduler.delete_node(name)
        except (Refused, NotYet):
            await asyncio.sleep(0.1)
        else:
            break
    assert name not in (await h.scheduler.observe()).nodes
    seen = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
    assert seen.ref == job.ref


async def a_node_that_was_set_down_stays_down(h: Harness) -> None:
    """With ReturnToService=2 a node that was set DOWN comes back as soon as its slurmd sends a message."""
    _, name, _ = await waiting_on_a_node(h)
    for _ in range(5):
        assert (await h.scheduler.observe()).nodes[name].is_unusable
        await asyncio.sleep(0.3)


async def a_node_is_deleted_though_its_job_was_counted_twice(h: Harness) -> None:
    """After `scontrol reconfigure` slurmctld 22.05 counts the jobs on dynamic nodes once more (read_config.c,
    _sync_nodes_to_active_job), and takes a node for busy that its job has left."""
    job, name = await h.running()
    await h.reconfigure()
    await h.cancel(job.ref.job_id)
    await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
    await h.view(lambda view: view.nodes[name].state is not NodeState.BUSY)
    await h.delete(name)
    assert name not in (await h.scheduler.observe()).nodes


async def a_reservation_of_all_nodes_is_shown_and_keeps_jobs_and_nodes(h: Harness) -> None:
    """Nodes that join later belong to it, too, and a job that could start waits."""
    await h.reserve()
    try:
        job = await h.job(await h.submit())
        name, feature = await h.node(job)
        await h.include_in_reservations(name)
        view = await h.view(lambda view: view.nodes[name].reserved)
        assert [one.name for one in view.reservations] == ["maintenance"]
        kept = view.reservations[0]
        assert 0 < kept.ends - kept.begins <= 600
        assert kept.is_on(kept.begins) and not kept.is_on(kept.ends)
        await h.pin(job.ref, feature)
        for _ in range(3):
            await asyncio.sleep(1.0)
            assert (await h.job(job.ref.job_id)).state is JobState.PENDING
        await h.scheduler.unpin(job.ref)
        assert (await h.job(job.ref.job_id)).eligible, "whether it is to have a VM is the planner's decision"
        with pytest.raises(NotYet):
            await h.scheduler.delete_node(name)
    finally:
        await h.open_again()
    await h.view(lambda view: not view.reservations and not view.nodes[name].reserved)
    await h.delete(name)
    assert name not in (await h.scheduler.observe()).nodes


# --- what users do meanwhile -----------------------------------------------------------------------


async def a_hold_is_kept_on_the_way_back_to_the_gate(h: Harness) -> None:
    job, _, feature = await waiting_on_a_node(h)
    await h.pin(job.ref, feature)
    await h.hold(job.ref.job_id)
    held = await h.job(job.ref.job_id)
    assert held.held and not held.eligible and held.pinned == feature
    with pytest.raises(Stale):
        await h.pin(job.ref, feature)
    for _ in range(2):
        await h.scheduler.unpin(job.ref)
        back = await still(h, job)
        assert back.held and not back.eligible
    await h.release(job.ref.job_id)
    free = await h.job(job.ref.job_id, lambda job: job.eligible)
    assert not free.held and free.gated


async def a_suspended_job_is_requeued_or_goes_on(h: Harness) -> None:
    job, _ = await h.running()
    await h.suspend(job.ref.job_id)
    stopped = await h.job(job.ref.job_id, lambda job: job.state is JobState.SUSPENDED)
    assert stopped.ref == job.ref and stopped.nodes == job.nodes
    assert job.limit == stopped.limit and stopped.ends is None, "nobody knows when it will have ended"
    for what in ("unpin", "revoke"):
        with pytest.raises(Stale):
            await calls_of(h, job.ref, "")[what]()
    await h.resume(job.ref.job_id)
    resumed = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    assert job.ends is None or (resumed.ends is not None and resumed.ends >= job.ends)
    await h.suspend(job.ref.job_id)
    await h.job(job.ref.job_id, lambda job: job.state is JobState.SUSPENDED)
    await h.scheduler.requeue(job.ref)
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING and job.gated)
    assert next_run(back.ref, job.ref)


async def a_pinned_job_is_cancelled(h: Harness) -> None:
    job, _, feature = await waiting_on_a_node(h)
    await h.pin(job.ref, feature)
    await h.cancel(job.ref.job_id)
    ended = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
    assert ended.ref == job.ref and ended.result == "CANCELLED"
    with pytest.raises(Stale):
        await h.scheduler.unpin(job.ref)


async def a_job_whose_node_was_deleted_returns_to_the_gate(h: Harness) -> None:
    """The job may become BadConstraints, with priority 0, which is not a hold."""
    job, name, feature = await waiting_on_a_node(h)
    await h.pin(job.ref, feature)
    await h.delete(name)
    for _ in range(15):
        seen = await h.job(job.ref.job_id)
        assert seen.pinned == feature and not seen.held
        if seen.reason == "BadConstraints" and not seen.eligible:
            break
        await asyncio.sleep(0.2)
    await h.scheduler.unpin(job.ref)
    back = await still(h, job)
    assert back.eligible and not back.held


# --- jobs of other shapes --------------------------------------------------------------------------


async def each_task_of_an_array_is_a_job_of_its_own(h: Harness) -> None:
    one, two, three = await h.submit_array(3)
    assert len({one, two, three}) == 3
    job = await h.job(two)
    _, feature = await h.node(job)
    await h.pin(job.ref, feature)
    running = await h.job(two, lambda job: job.state is JobState.RUNNING)
    assert running.ref == job.ref
    await h.scheduler.explain([(await h.job(one)).ref], "waiting for capacity")
    assert all([(await h.job(task)).gated for task in (one, three)])
    await h.scheduler.revoke((await h.job(three)).ref, "test")
    assert (await h.job(three, lambda job: job.state is JobState.ENDED)).result == "CANCELLED"
    assert (await h.job(one)).eligible and (await h.job(two)).state is JobState.RUNNING
    await h.scheduler.requeue(running.ref)
    back = await h.job(two, lambda job: job.state is JobState.PENDING and job.gated)
    assert next_run(back.ref, job.ref) and (await h.job(one)).ref.restarts == 0


async def a_gang_waits_for_all_its_nodes_and_loses_them_together(h: Harness) -> None:
    job = await h.job(await h.submit(nodes=2))
    assert job.request is not None and job.request.nodes == 2
    one, feature = await h.node(job)
    await h.pin(job.ref, feature)
    await asyncio.sleep(1.5)
    assert (await h.job(job.ref.job_id)).state is JobState.PENDING, "one node is not enough"
    await h.scheduler.unpin(job.ref)
    two, _ = await h.node(job, feature)
    await h.pin(job.ref, feature)
    running = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    assert sorted(running.nodes) == sorted((one, two))
    await h.scheduler.set_down(two, "its VM was lost")
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING)
    assert next_run(back.ref, job.ref)
    view = await h.view(lambda view: view.nodes[one].state is NodeState.IDLE)
    assert view.nodes[two].is_unusable
    await h.scheduler.unpin(back.ref)
    assert (await still(h, back)).eligible


async def special_characters_have_no_effect(h: Harness) -> None:
    name = 'it\'s "odd" = JobId=1 Käse\t(null),|&\nJobId=1 Priority=0'
    job = await h.job(await h.submit(name=name))
    assert job.name == name
    _, feature = await h.node(job)
    await h.scheduler.explain([job.ref], 'a "quote", it\'s\nPriority=0 Käse \x1b[1m %s ;')
    assert (await still(h, job)).eligible
    await h.pin(job.ref, feature)
    running = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    assert running.ref == job.ref
    for node in running.nodes:
        await h.scheduler.set_down(node, 'a "reason", it\'s\nState=RESUME Käse')
        assert (await h.scheduler.observe()).nodes[node].is_unusable


# --- no answer -------------------------------------------------------------------------------------


async def unknown_and_repeated(h: Harness, *, gone: bool) -> None:
    job, name, feature = await waiting_on_a_node(h)
    other, _ = await h.running()
    node = other.nodes[0]
    async with h.away(gone=gone):
        attempts = [
            h.scheduler.observe(),
            *([parts.read({job.ref.job_id: None}, (), [name])] if (parts := h.scheduler.parts) else []),
            h.pin(job.ref, feature),
            h.scheduler.requeue(other.ref),
            h.scheduler.revoke(job.ref, "test"),
            h.scheduler.explain([other.ref], "test"),
            h.scheduler.unpin(job.ref),
            h.scheduler.set_down(node, "test"),
            h.scheduler.delete_node(name),
        ]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        assert all(isinstance(result, Unknown) for result in results), results
        assert (await h.scheduler.user(h.uid)).uid == h.uid
    # The calls may have been executed or not: the node may be DOWN already, and its job requeued.
    await h.scheduler.set_down(node, "test")
    await h.delete(name)
    view = await h.view(lambda view: name not in view.nodes and view.nodes[node].is_unusable)
    assert view.jobs[job.ref.job_id].ref == job.ref and view.jobs[job.ref.job_id].state is JobState.PENDING
    back = await h.job(other.ref.job_id, lambda job: job.state is JobState.PENDING)
    assert next_run(back.ref, other.ref)
    await h.scheduler.unpin(back.ref)
    assert (await still(h, back)).eligible


async def no_answer_is_unknown_and_calls_may_be_repeated(h: Harness) -> None:
    await unknown_and_repeated(h, gone=False)


async def a_missing_scheduler_is_unknown_and_calls_may_be_repeated(h: Harness) -> None:
    await unknown_and_repeated(h, gone=True)


TROUBLES: tuple[Check, ...] = (
    a_pin_or_an_unpin_whose_reply_was_lost_is_repeated,
    a_requeue_whose_reply_was_lost_is_executed_once,
    a_revoke_whose_reply_was_lost_is_repeated,
    a_node_is_deleted_whatever_replies_are_lost,
    two_equal_calls_at_once_are_like_one,
    two_requeues_at_once_are_one,
    a_pin_and_an_unpin_at_once_leave_one_of_the_two,
    a_repeated_pin_of_a_started_job_succeeds,
    a_refused_pin_leaves_the_job_at_the_gate,
    a_call_to_another_run_changes_nothing,
    an_explanation_to_another_run_is_given_to_nobody,
    a_call_to_another_job_of_that_id_changes_nothing,
    a_call_to_the_run_before_changes_nothing,
    an_ended_job_is_not_changed,
    a_job_that_has_ended_meanwhile_is_not_queued_again,
    a_completing_job_is_not_changed_and_keeps_its_node,
    a_node_that_was_set_down_is_not_deleted_under_its_job,
    a_node_that_was_set_down_stays_down,
    a_node_is_deleted_though_its_job_was_counted_twice,
    a_reservation_of_all_nodes_is_shown_and_keeps_jobs_and_nodes,
    a_hold_is_kept_on_the_way_back_to_the_gate,
    a_suspended_job_is_requeued_or_goes_on,
    a_pinned_job_is_cancelled,
    a_job_whose_node_was_deleted_returns_to_the_gate,
    each_task_of_an_array_is_a_job_of_its_own,
    a_gang_waits_for_all_its_nodes_and_loses_them_together,
    special_characters_have_no_effect,
    no_answer_is_unknown_and_calls_may_be_repeated,
    a_missing_scheduler_is_unknown_and_calls_may_be_repeated,
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("check", TROUBLES, ids=lambda check: check.__name__)
def test_simulated(check: Check, pair: Pair, seed: int) -> None:
    async def main() -> None:
        harness = Simulated(seed, pair)
        await check(harness)
        assert not harness.world.machines.violations
        assert not [one for one in harness.world.cluster.violations if "crashes" in one]

    run(main(), seed)
