"""Jobs of partitions of physical nodes: which may be moved to VMs, and what becomes of those that are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.api import JobView
from multiverse.cli.jobs import _reason as reason_shown
from multiverse.controller.comments import CommentPlan
from multiverse.core.context import Context
from multiverse.core.explanation import explain, explain_ended, explain_new
from multiverse.core.machines.tables import effect_of
from multiverse.core.model.basics import Size
from multiverse.core.model.job import AttemptState, Job, JobRef, JobState, NodeState, Request
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import VmCondition, VmState
from multiverse.core.policy import OverflowPolicy, why_stays
from multiverse.core.transition import EffectKind, Event
from tests.unit.planner_harness import POLICY, PlannerHarness

A = AttemptState
OVERFLOWING = replace(POLICY, overflows=(OverflowPolicy("batch"),))
AT_ORIGIN = {"origin": "batch", "at_origin": True, "gated": False}
BY_RULE = replace(POLICY, overflows=(OverflowPolicy("batch", "any", ("physics", "chemistry")),))


def waiting(**more: object) -> Job:
    request = Request(1, Size(1, 100), features=("any",))
    job = Job(JobRef("7", 500), "hello", 1000, JobState.PENDING, request, account="physics", **AT_ORIGIN)  # type: ignore[arg-type]
    return job._replace(**more)  # type: ignore[arg-type]


def runs_on(harness: PlannerHarness, node: str, **more: object) -> None:
    """The job runs on that node."""
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.RUNNING, nodes=(node,), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (waiting(), ""),
        (waiting(origin="other"), "jobs of partition other do not overflow into VMs"),
        (waiting(request=None, problem="it asks for whole nodes"), "it asks for whole nodes"),
        (waiting(account="biology"), "only jobs of the accounts physics, chemistry are moved"),
        (waiting(request=Request(1, Size(1, 100))), "only jobs with --constraint=any are moved"),
        (waiting(request=Request(2, Size(1, 100), features=("any",))), "it needs 2 nodes"),
        (waiting(requeues=False), "--no-requeue are not moved"),
        (waiting(eligible=False), "has not waited for nodes of partition batch long enough"),
    ],
)
def test_the_sites_rule_and_what_a_vm_can_be_decide_which_jobs_are_moved(job: Job, why: str) -> None:
    assert why in text_of(why_stays(job, BY_RULE)) and bool(why) == bool(why_stays(job, BY_RULE))


def test_all_jobs_are_moved_where_the_site_has_no_rule() -> None:
    plain = waiting(request=Request(1, Size(1, 100)), account="")
    assert why_stays(plain, OVERFLOWING) is None


def test_a_job_that_waits_for_nodes_is_moved_by_its_pin_once_its_vm_has_joined() -> None:
    harness = PlannerHarness(OVERFLOWING)
    attempt = harness.to_spawned(**AT_ORIGIN)
    found = effect_of(attempt)
    assert (attempt.origin, found and found.kind) == ("batch", EffectKind.PIN)
    harness.node("mvtest0-1", NodeState.BUSY)
    runs_on(harness, "mvtest0-1", at_origin=False, pinned=attempt.feature)
    harness.run()
    assert harness.attempt().state is A.ALLOCATED


@pytest.mark.parametrize("why", [{"requeues": False}, {"eligible": False}, {"request": None, "problem": "no"}])
def test_a_job_that_stays_has_no_attempt_and_costs_a_pass_nothing(why: dict[str, object]) -> None:
    harness = PlannerHarness(OVERFLOWING)
    harness.job(**AT_ORIGIN, **why)  # type: ignore[arg-type]
    harness.run()
    assert not harness.rows.attempts and not harness.state.unserved
    assert "is not moved to a VM" in str(explain_new(harness.jobs["7"], OVERFLOWING).sentences[0])
    harness.job(requeues=True, eligible=True, request=Request(1, Size(1, 100)), problem="")
    harness.run()
    assert harness.attempt().state is A.QUEUED, "it may be moved now"


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("came", ["queued", "claimed", "spawning", "spawned"])
def test_a_job_that_starts_on_a_physical_node_first_needs_its_vm_no_more(came: str, cancelled: bool) -> None:
    """Also one that was cancelled there before it was seen to run."""
    harness = PlannerHarness(OVERFLOWING)
    if came == "queued":
        harness.job(**AT_ORIGIN)  # type: ignore[arg-type]
        harness.run()
    else:
        getattr(harness, f"to_{came}")(**AT_ORIGIN)
    assert str(harness.attempt().state) == came
    runs_on(harness, "p1")
    if cancelled:
        harness.job(state=JobState.COMPLETING, result="CANCELLED")
    harness.run()
    harness.clear()
    harness.run()
    harness.run()
    ended = harness.attempt()
    assert (ended.state, text_of(ended.reason)) == (A.CANCELLED, "it has started on a physical node of partition batch")
    assert not harness.rows.attempts and not harness.rows.vms, "and no other attempt is opened"
    assert str(explain_ended(ended, 5.0).sentences[0]).startswith(
        "Its attempt ended 5 s ago: it has started on a physical"
    )
    assert tuple(map(str, explain_new(harness.jobs["7"], OVERFLOWING).sentences)) == (
        "It runs in partition batch on a physical node, or has run there.",
    )


def test_a_job_that_its_user_cancels_before_it_is_moved_is_cancelled() -> None:
    harness = PlannerHarness(OVERFLOWING)
    harness.to_claimed(**AT_ORIGIN)
    harness.job(state=JobState.ENDED, result="CANCELLED")
    harness.run()
    assert text_of(harness.attempt().reason) == "CANCELLED"


def test_a_job_whose_pin_expires_goes_back_through_the_gate_to_its_partition() -> None:
    """Another controller may find it at any moment of this: the scheduler shows where it belongs."""
    harness = PlannerHarness(OVERFLOWING)
    attempt = harness.to_spawned(**AT_ORIGIN)
    harness.job(at_origin=False, pinned=attempt.feature)
    harness.pass_time(OVERFLOWING.pin_timeout + 1)
    harness.run()
    found = effect_of(harness.attempt())
    assert harness.attempt().state is A.RETURNING and found and found.kind is EffectKind.GATE
    harness.job(gated=True, pinned=None)
    harness.ended(attempt.key)
    harness.run()
    harness.clear()
    for _ in range(3):
        harness.run()
    again = harness.attempt(2)
    found = effect_of(again)
    assert (again.state, again.origin, again.tries) == (A.RESTORING, "batch", 1)
    assert found and found.kind is EffectKind.RESTORE
    assert explain(Context(harness.state, harness.world, OVERFLOWING, harness.state.free.hosts), again, 0.0).sentences
    harness.job(**AT_ORIGIN, eligible=False)  # type: ignore[arg-type]
    harness.run()
    assert harness.attempt(2).state is A.QUEUED and harness.attempt(2).not_before > 0, "its next try backs off"


def test_a_job_whose_earlier_run_may_go_on_waits_at_the_gate() -> None:
    """In its own partition it would start on a physical node beside that run."""
    harness = PlannerHarness(OVERFLOWING)
    attempt = harness.to_spawned(**AT_ORIGIN)
    runs_on(harness, "mvtest0-1", at_origin=False, pinned=attempt.feature)
    harness.run()
    harness.hypervisor_known, harness.unknown_since = False, harness.clock.time
    harness.pass_time(OVERFLOWING.silence + 1)
    harness.run()
    assert harness.all_vms()[0].state is VmState.LOST
    harness.job(ref=JobRef("7", 600, 1), state=JobState.PENDING, pinned=attempt.feature)
    harness.run()
    found = effect_of(harness.attempt(2))
    assert harness.attempt(2).state is A.UNGATED and found and found.kind is EffectKind.GATE
    harness.job(gated=True, pinned=None)
    for _ in range(3):
        harness.run()
    assert harness.attempt(2).state is A.QUEUED, "its VM may still run it"
    harness.hypervisor_known = True
    harness.clear()
    for _ in range(4):
        harness.run()
    assert harness.attempt(1).state is A.REQUEUED and harness.attempt(2).state is A.RESTORING


@pytest.mark.parametrize(
    ("shown", "event", "target"),
    [
        ({"gated": False, "pinned": "mv_9"}, Event.LEFT_GATE, A.UNGATED),
        ({"gated": False, "pinned": "mv_9", "state": JobState.RUNNING}, Event.STRAYED, A.STRAY),
        ({"request": Request(1, Size(2, 100))}, Event.NOTED, A.RESTORING),
        ({"state": JobState.ENDED, "result": "CANCELLED"}, Event.CANCELLED, A.RECLAIMING),
        ({"ref": JobRef("7", 600, 1)}, Event.RESTARTED, A.RECLAIMING),
        ({"gated": False, "at_origin": True}, Event.AT_GATE, A.QUEUED),
    ],
)
def test_an_attempt_on_its_way_back_follows_its_job(shown: dict[str, object], event: Event, target: A) -> None:
    harness = PlannerHarness(OVERFLOWING)
    harness.job(origin="batch")
    harness.run()
    harness.run()
    assert harness.attempt().state is A.RESTORING
    harness.job(**shown)  # type: ignore[arg-type]
    moves = harness.run()
    changes = [change for move in moves for change in move.changes if change.row.id == 1]
    assert (changes[0].event, harness.attempt().state) == (event, target)


@pytest.mark.parametrize("state", [A.UNGATED, A.STRAY])
def test_a_job_that_comes_back_to_the_gate_by_itself_is_sent_back(state: A) -> None:
    harness = PlannerHarness(OVERFLOWING)
    harness.job(origin="batch", gated=False, pinned="mv_9")
    harness.run()
    if state is A.STRAY:
        harness.vms.clear()
        harness.job(state=JobState.RUNNING)
        harness.run()
    assert harness.attempt().state is state
    harness.job(state=JobState.PENDING, gated=True, pinned=None)
    harness.run()
    assert harness.attempt().state is A.RESTORING


def test_a_job_that_no_host_could_hold_or_that_ceases_to_qualify_waits_and_is_never_cancelled() -> None:
    harness = PlannerHarness(OVERFLOWING)
    harness.job(size=Size(64, 100), **AT_ORIGIN)  # type: ignore[arg-type]
    harness.run()
    context = Context(harness.state, harness.world, OVERFLOWING, harness.state.free.hosts)
    assert harness.attempt().state is A.QUEUED
    said = [str(one) for one in explain(context, harness.attempt(), harness.clock.time).sentences]
    assert "fits on no host" in said[0] and "whichever has room first" in said[1]
    harness.job(request=None, problem="it asks for whole nodes")
    harness.run()
    context = Context(harness.state, harness.world, OVERFLOWING, harness.state.free.hosts)
    assert harness.attempt().state is A.QUEUED and not harness.rows.vms
    assert "whole nodes" in str(explain(context, harness.attempt(), harness.clock.time).sentences[0])


def test_a_job_whose_vms_cannot_be_made_is_not_cancelled() -> None:
    policy = replace(OVERFLOWING, attempts=1, replacements=0)
    harness = PlannerHarness(policy)
    harness.to_spawning(**AT_ORIGIN)
    for vm in harness.all_vms():
        harness.seen(vm.name, VmCondition.DEAD)
    harness.run()
    harness.run()
    assert harness.attempt().state in (A.RETURNING, A.RECLAIMING) and harness.attempt().outcome == "requeued"


def test_a_mark_that_the_scheduler_lost_is_remembered() -> None:
    """Slurm may change the partition of a job and refuse its features: then only the row tells that it is no job of the
    gate, whose request could be impossible."""
    harness = PlannerHarness(OVERFLOWING)
    harness.job(**AT_ORIGIN)  # type: ignore[arg-type]
    harness.run()
    harness.job(origin="", at_origin=False, request=None, problem="there is no image any")
    harness.run()
    found = effect_of(harness.attempt())
    assert (harness.attempt().state, harness.attempt().origin) == (A.UNGATED, "batch")
    assert found and found.kind is EffectKind.GATE


def test_the_user_of_a_job_that_waits_for_nodes_is_told_nothing_in_the_scheduler() -> None:
    harness = PlannerHarness(OVERFLOWING)
    harness.job(**AT_ORIGIN)  # type: ignore[arg-type]
    harness.job("8")
    harness.run()
    plan = CommentPlan(OVERFLOWING, harness.rows.attempts.values())
    plan.explained(dict.fromkeys(harness.rows.attempts, "the hosts are full"))
    telling = plan.next_call(harness.jobs, harness.clock.time + 60)
    assert telling is not None and [job.job_id for job in telling.jobs] == ["8"]


@pytest.mark.parametrize(
    ("state", "told", "said"),
    [
        ("queued", {"waiting": "the hosts are full"}, "in partition batch: the hosts are full"),
        ("cancelled", {"reason": "it has started there"}, "in partition batch: it has started there"),
        ("allocated", {}, "moved from partition batch, which was full"),
        ("done", {"reason": "COMPLETED"}, "moved from partition batch, which was full: COMPLETED"),
    ],
)
def test_the_list_of_jobs_says_whether_a_job_was_moved(state: str, told: dict[str, str], said: str) -> None:
    size = {"nodes": 1, "cpus": 1, "memory": 100, "image": "slim", "kind": "instant", "since": 1.0, "restarts": 0}
    texts = {"waiting": "", "reason": "", "quarantined": ""} | told
    view = JobView("7", "hello", 1000, 1, state, vms=(), origin="batch", **size, **texts)  # type: ignore[arg-type]
    assert reason_shown(view) == said and reason_shown(replace(view, origin="")) == next(iter(told.values()), "")
