"""What every `ports.Scheduler` keeps to in trouble: replies that are lost, calls that come twice, late or at once.

A call that is cut short is one whose reply is lost: it may have been done. The same call, said again, comes to
the one right end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from tests.contract.test_scheduler_contract import Check, Harness, Simulated, later, next_run

from multiverse.core.errors import Gone, MultiverseError, Refused, Stale, Unknown
from multiverse.core.model import Job, JobRef, JobState, NodeState
from multiverse.simulation.loop import run

CUTS = (0.0, 0.008, 0.016, 0.03, 0.06)  # seconds; a command of Slurm's takes some 0.01


async def cut(call: Awaitable[None], after: float) -> None:
    """Make a call whose caller goes away."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def at_once(*calls: Awaitable[None]) -> list[BaseException | None]:
    """Make calls at the same time; what came of each. Nothing but our own errors may come."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(result is None or isinstance(result, MultiverseError) for result in results), results
    return results


def calls_of(h: Harness, ref: JobRef, feature: str) -> dict[str, Callable[[], Awaitable[None]]]:
    return {
        "pin": lambda: h.scheduler.pin(ref, feature, ()),
        "unpin": lambda: h.scheduler.unpin(ref),
        "requeue": lambda: h.scheduler.requeue(ref),
        "revoke": lambda: h.scheduler.revoke(ref, "test"),
        "explain": lambda: h.scheduler.explain(ref, "test"),
    }


async def waiting_on_a_node(h: Harness) -> tuple[Job, str, str]:
    """A job, and a node of its that is DOWN, so that a pinned job stays pending; the node and the feature."""
    job = await h.job(await h.submit())
    name, feature = await h.node(job)
    await h.scheduler.set_down(name, "so that the pinned job stays pending")
    return job, name, feature


async def still(h: Harness, job: Job) -> Job:
    """It is as it was: the same run, pending, at the gate."""
    same = await h.job(job.ref.job_id)
    assert same.ref == job.ref and same.state is JobState.PENDING and same.gated and same.pinned is None
    return same


# --- lost replies ----------------------------------------------------------------------------------


async def a_pin_or_an_unpin_whose_reply_is_lost_is_said_again(h: Harness) -> None:
    job, _, feature = await waiting_on_a_node(h)
    for after in CUTS:
        await cut(h.scheduler.pin(job.ref, feature, ()), after)
        await h.scheduler.pin(job.ref, feature, ())
        pinned = await h.job(job.ref.job_id)
        assert pinned.pinned == feature and not pinned.gated and pinned.ref == job.ref
        await cut(h.scheduler.unpin(job.ref), after)
        await h.scheduler.unpin(job.ref)
        assert (await still(h, job)).eligible
    for after in CUTS:  # and the opposite undoes what may have been done in part
        await cut(h.scheduler.pin(job.ref, feature, ()), after)
        await h.scheduler.unpin(job.ref)
        assert (await still(h, job)).eligible


async def a_requeue_whose_reply_is_lost_is_done_once(h: Harness) -> None:
    job, _ = await h.running()
    for after in (0.0, 0.012, 0.03):
        await cut(h.scheduler.requeue(job.ref), after)
        try:
            await h.scheduler.requeue(job.ref)
        except Stale:
            pass  # the first was done, and the job is another run by now
        back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING)
        assert next_run(back.ref, job.ref)
        await h.scheduler.unpin(back.ref)
        assert (await still(h, back)).eligible
        _, feature = await h.node(back)  # each run has nodes of its own
        await h.scheduler.pin(back.ref, feature, ())  # in spite of the begin time that Slurm gives to what it requeues
        job = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
        assert job.ref == back.ref


async def a_revoke_whose_reply_is_lost_is_said_again(h: Harness) -> None:
    for after in CUTS:
        job = await h.job(await h.submit())
        await cut(h.scheduler.explain(job.ref, "no host could ever hold it"), after)
        await still(h, job)
        await cut(h.scheduler.revoke(job.ref, "no host could ever hold it"), after)
        await h.scheduler.revoke(job.ref, "no host could ever hold it")
        ended = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
        assert ended.result == "CANCELLED"


async def a_node_goes_whatever_replies_are_lost(h: Harness) -> None:
    job = await h.job(await h.submit())
    for after in (0.0, 0.008, 0.02):
        name, _ = await h.node(job)
        await cut(h.scheduler.set_down(name, "test"), after)
        await h.scheduler.set_down(name, "test")
        assert (await h.scheduler.observe()).nodes[name].state is NodeState.DOWN
        await cut(h.scheduler.delete_node(name), after)
        await h.scheduler.delete_node(name)
        assert name not in (await h.scheduler.observe()).nodes


# --- repeats ---------------------------------------------------------------------------------------


async def calls_said_twice_at_once_are_as_good_as_once(h: Harness) -> None:
    job, name, feature = await waiting_on_a_node(h)
    pins = await at_once(h.scheduler.pin(job.ref, feature, ()), h.scheduler.pin(job.ref, feature, ()))
    assert pins == [None, None] and (await h.job(job.ref.job_id)).pinned == feature
    unpins = await at_once(h.scheduler.unpin(job.ref), h.scheduler.unpin(job.ref))
    assert unpins == [None, None] and (await still(h, job)).eligible
    words = await at_once(h.scheduler.explain(job.ref, "one"), h.scheduler.explain(job.ref, "two"))
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
        await at_once(h.scheduler.pin(job.ref, feature, ()), h.scheduler.unpin(job.ref))
        seen = await h.job(job.ref.job_id)
        assert seen.gated == (seen.pinned is None) and seen.state is JobState.PENDING
        await h.scheduler.unpin(job.ref)
        assert (await still(h, job)).eligible


async def a_pin_said_again_to_one_that_has_started_is_done(h: Harness) -> None:
    job, _ = await h.running()
    await h.scheduler.pin(job.ref, job.pinned or "", ())
    with pytest.raises(Stale):
        await h.scheduler.pin(job.ref, "mv_987654", ())
    assert (await h.job(job.ref.job_id)).state is JobState.RUNNING


async def a_refused_pin_leaves_the_job_at_the_gate(h: Harness) -> None:
    """A refused update is not undone in whole by Slurm: the partition stays changed."""
    job, _, feature = await waiting_on_a_node(h)
    for _ in range(2):
        with pytest.raises(Refused):
            await h.scheduler.pin(job.ref, "mv_987654", ())
        assert (await still(h, job)).eligible
        await h.scheduler.pin(job.ref, feature, ())  # the second time it is pinned elsewhere already


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
    await h.scheduler.pin(job.ref, feature, ())
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
    await h.scheduler.pin(back.ref, feature, ())
    again = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    for call in calls_of(h, job.ref, feature).values():
        with pytest.raises(Stale):
            await call()
    same = await h.job(job.ref.job_id)
    assert (same.state, same.ref) == (JobState.RUNNING, again.ref)


async def a_job_that_has_ended_is_left_alone(h: Harness) -> None:
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
    await h.scheduler.delete_node(name)


async def a_job_that_completes_is_left_alone_and_its_node_stays(h: Harness) -> None:
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


async def a_failed_node_stays_until_its_job_has_left_it(h: Harness) -> None:
    """slurmctld 22.05 deletes a DOWN node under a job that completes, and dies of it (decision 7)."""
    job, name = await h.running(lingers=4.0)
    await h.cancel(job.ref.job_id)
    await h.job(job.ref.job_id, lambda job: job.state is JobState.COMPLETING)
    await h.scheduler.set_down(name, "its VM was lost")
    for _ in range(int(h.patience / 0.1)):
        seen = (await h.scheduler.observe()).jobs[job.ref.job_id]
        try:
            await h.scheduler.delete_node(name)
        except Refused:
            await asyncio.sleep(0.1)
        else:
            break
    assert name not in (await h.scheduler.observe()).nodes
    seen = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
    assert seen.ref == job.ref


async def a_failed_node_stays_down(h: Harness) -> None:
    """With ReturnToService=2 a node that was set DOWN comes back as soon as its slurmd says a word."""
    _, name, _ = await waiting_on_a_node(h)
    for _ in range(5):
        assert (await h.scheduler.observe()).nodes[name].state is NodeState.DOWN
        await asyncio.sleep(0.3)


# --- what users do meanwhile -----------------------------------------------------------------------


async def a_hold_is_kept_on_the_way_back_to_the_gate(h: Harness) -> None:
    job, _, feature = await waiting_on_a_node(h)
    await h.scheduler.pin(job.ref, feature, ())
    await h.hold(job.ref.job_id)
    held = await h.job(job.ref.job_id)
    assert held.held and not held.eligible and held.pinned == feature
    with pytest.raises(Stale):
        await h.scheduler.pin(job.ref, feature, ())
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
    for what in ("unpin", "revoke"):
        with pytest.raises(Stale):
            await calls_of(h, job.ref, "")[what]()
    await h.resume(job.ref.job_id)
    await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    await h.suspend(job.ref.job_id)
    await h.job(job.ref.job_id, lambda job: job.state is JobState.SUSPENDED)
    await h.scheduler.requeue(job.ref)
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING and job.gated)
    assert next_run(back.ref, job.ref)


async def a_pinned_job_is_cancelled(h: Harness) -> None:
    job, _, feature = await waiting_on_a_node(h)
    await h.scheduler.pin(job.ref, feature, ())
    await h.cancel(job.ref.job_id)
    ended = await h.job(job.ref.job_id, lambda job: job.state is JobState.ENDED)
    assert ended.ref == job.ref and ended.result == "CANCELLED"
    with pytest.raises(Stale):
        await h.scheduler.unpin(job.ref)


async def a_job_whose_feature_no_node_has_comes_back(h: Harness) -> None:
    """It may become BadConstraints, with priority 0, which is nobody's hold."""
    job, name, feature = await waiting_on_a_node(h)
    await h.scheduler.pin(job.ref, feature, ())
    await h.scheduler.delete_node(name)
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
    assert one.partition("_")[2] and one.partition("_")[0] == three.partition("_")[0]
    job = await h.job(two)
    _, feature = await h.node(job)
    await h.scheduler.pin(job.ref, feature, ())
    running = await h.job(two, lambda job: job.state is JobState.RUNNING)
    assert running.ref == job.ref
    await h.scheduler.explain((await h.job(one)).ref, "waiting for capacity")
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
    await h.scheduler.pin(job.ref, feature, ())
    await asyncio.sleep(1.5)
    assert (await h.job(job.ref.job_id)).state is JobState.PENDING, "one node is not enough"
    await h.scheduler.unpin(job.ref)
    two, _ = await h.node(job, feature)
    await h.scheduler.pin(job.ref, feature, ())
    running = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    assert sorted(running.nodes) == sorted((one, two))
    await h.scheduler.set_down(two, "its VM was lost")
    back = await h.job(job.ref.job_id, lambda job: job.state is JobState.PENDING)
    assert next_run(back.ref, job.ref)
    view = await h.view(lambda view: view.nodes[one].state is NodeState.IDLE)
    assert view.nodes[two].state is NodeState.DOWN
    await h.scheduler.unpin(back.ref)
    assert (await still(h, back)).eligible


async def odd_characters_are_only_characters(h: Harness) -> None:
    name = 'it\'s "odd" = JobId=1 Käse\t(null),|&\nJobId=1 Priority=0'
    job = await h.job(await h.submit(name=name))
    assert job.name == name
    _, feature = await h.node(job)
    await h.scheduler.explain(job.ref, 'a "quote", it\'s\nPriority=0 Käse \x1b[1m %s ;')
    assert (await still(h, job)).eligible
    await h.scheduler.pin(job.ref, feature, ())
    running = await h.job(job.ref.job_id, lambda job: job.state is JobState.RUNNING)
    assert running.ref == job.ref
    for node in running.nodes:
        await h.scheduler.set_down(node, 'a "reason", it\'s\nState=RESUME Käse')
        assert (await h.scheduler.observe()).nodes[node].state is NodeState.DOWN


# --- no answer -------------------------------------------------------------------------------------


async def unknown_and_said_again(h: Harness, *, gone: bool) -> None:
    job, name, feature = await waiting_on_a_node(h)
    other, _ = await h.running()
    node = other.nodes[0]
    async with h.away(gone=gone):
        attempts = [
            h.scheduler.observe(),
            h.scheduler.pin(job.ref, feature, ()),
            h.scheduler.requeue(other.ref),
            h.scheduler.revoke(job.ref, "test"),
            h.scheduler.explain(job.ref, "test"),
            h.scheduler.unpin(job.ref),
            h.scheduler.set_down(node, "test"),
            h.scheduler.delete_node(name),
        ]
        results = await asyncio.gather(*attempts, return_exceptions=True)
        assert all(isinstance(result, Unknown) for result in results), results
        assert (await h.scheduler.user(h.uid)).uid == h.uid
    # What was asked for may be done by now, or not: the node that was to fail took its job with it, or did not.
    await h.scheduler.set_down(node, "test")
    await h.scheduler.delete_node(name)
    view = await h.view(lambda view: name not in view.nodes and view.nodes[node].state is NodeState.DOWN)
    assert view.jobs[job.ref.job_id].ref == job.ref and view.jobs[job.ref.job_id].state is JobState.PENDING
    back = await h.job(other.ref.job_id, lambda job: job.state is JobState.PENDING)
    assert next_run(back.ref, other.ref)
    await h.scheduler.unpin(back.ref)
    assert (await still(h, back)).eligible


async def no_answer_is_unknown_and_all_can_be_said_again(h: Harness) -> None:
    await unknown_and_said_again(h, gone=False)


async def nobody_there_is_unknown_and_all_can_be_said_again(h: Harness) -> None:
    await unknown_and_said_again(h, gone=True)


TROUBLES: tuple[Check, ...] = (
    a_pin_or_an_unpin_whose_reply_is_lost_is_said_again,
    a_requeue_whose_reply_is_lost_is_done_once,
    a_revoke_whose_reply_is_lost_is_said_again,
    a_node_goes_whatever_replies_are_lost,
    calls_said_twice_at_once_are_as_good_as_once,
    two_requeues_at_once_are_one,
    a_pin_and_an_unpin_at_once_leave_one_of_the_two,
    a_pin_said_again_to_one_that_has_started_is_done,
    a_refused_pin_leaves_the_job_at_the_gate,
    a_call_to_another_run_changes_nothing,
    a_call_to_another_job_of_that_id_changes_nothing,
    a_call_to_the_run_before_changes_nothing,
    a_job_that_has_ended_is_left_alone,
    a_job_that_completes_is_left_alone_and_its_node_stays,
    a_failed_node_stays_until_its_job_has_left_it,
    a_failed_node_stays_down,
    a_hold_is_kept_on_the_way_back_to_the_gate,
    a_suspended_job_is_requeued_or_goes_on,
    a_pinned_job_is_cancelled,
    a_job_whose_feature_no_node_has_comes_back,
    each_task_of_an_array_is_a_job_of_its_own,
    a_gang_waits_for_all_its_nodes_and_loses_them_together,
    odd_characters_are_only_characters,
    no_answer_is_unknown_and_all_can_be_said_again,
    nobody_there_is_unknown_and_all_can_be_said_again,
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check", TROUBLES, ids=lambda check: check.__name__)
def test_simulated(check: Check, seed: int) -> None:
    async def main() -> None:
        harness = Simulated(seed)
        await check(harness)
        assert not harness.world.machines.violations

    run(main(), seed)
