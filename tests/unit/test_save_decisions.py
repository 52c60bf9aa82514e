"""Which jobs are saved, and when, on rows and a world that a test sets: what is begun, refused, and swept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from multiverse.core.checkpoints import capture_due, next_checkpoint
from multiverse.core.checkpoints import follow_command as follow_checkpoint
from multiverse.core.context import Context
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Claim
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    CheckpointWish,
    Eviction,
    Job,
    JobRef,
    JobState,
    Request,
    SaveWish,
)
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.saved import Saved, SavedPart, SavedSeen, SavedState, Storage
from multiverse.core.model.vm import VmState
from multiverse.core.model.world import Row, World
from multiverse.core.policy import Policy
from multiverse.core.saving import (
    follow_command,
    is_busy,
    let_frozen_jobs_go_on,
    save,
    save_at_limits,
    saved_at,
    unexplained_states,
    what_to_save,
    why_no_room,
    with_its_state,
)
from multiverse.core.transition import Command, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE, attempt, on_host, state, vm
from tests.unit.test_saved_steps import (
    EPOCH,
    HOST,
    NEXT,
    NOW,
    PENDING,
    RUN,
    WHY,
    file,
    job,
    restored,
    row,
    shown,
    told,
    world,
)

S, A, V, J = SavedState, AttemptState, VmState, JobState
MIB = 1 << 20
BEFORE = Eviction(EPOCH, "move", "h0", WHY, 100)
SERVING = vm(
    V.SERVING, attempt=1, token="token", account="physics", node_size=Size(1, 200), image="stock", template_size=None
)
SERVING = replace(SERVING, mac="02:00:00:00:00:07", size=Size(1, 256, 10))
SECOND = replace(SERVING, id=2, name="mvtest0-2", mac="02:00:00:00:00:08", address="10.9.1.2/16", size=Size(2, 512))
SCRIPT_ON_SECOND = job(nodes=("mvtest0-1", "mvtest0-2"), script_node="mvtest0-2")


def running(nodes: int = 1, **more: Any) -> Attempt:
    wishes = {name: more.pop(name) for name in ("save", "checkpoint") if name in more}
    values: dict[str, Any] = {"runs": 3, "evictions": (BEFORE,), "since": NOW - 3600.0}
    return attempt(A.ALLOCATED, **(values | {"request": Request(nodes, Size(1, 100), **wishes)} | more))


def context(*rows: Row, seen: World | None = None, policy: Policy = POLICY, claims: tuple[Claim, ...] = ()) -> Context:
    here = state(*rows, now=NOW, claims=claims, known=("h1", "h2"))
    here.numbers.next_saved = 100
    seen = world(job()) if seen is None else seen
    here.queue.jobs = dict(seen.scheduler.value.jobs) if seen.scheduler is not None else {}
    return Context(here, seen, policy)


def refusal(context: Context) -> str:
    ((_, error),) = context.state.refusals
    assert error.hint, "the next step"
    return str(error)


# --- what is begun ----------------------------------------------------------------------------------

WHOLE_ROW = Saved(
    id=100, since=NOW, job=RUN, uid=1000, vm=1, vm_name="mvtest0-1", token="token", mac="02:00:00:00:00:07",
    address="10.9.1.1/16", image="stock", kind=CloneKind.INSTANT, size=Size(1, 256, 10), node_size=Size(1, 200),
    account="physics", source=SOURCE, storage="shared", machine="qemu", asked=Why.SAVE_ASKED(), begun=EPOCH + NOW,
    requeues=True, runs=3, bound=266 * MIB, evictions=(BEFORE,), version=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("mine", "policy", "hold", "more"),
    [
        (running(), POLICY, False, {}),
        (running(), POLICY, True, {"hold": True}),
        (running(), replace(POLICY, save_encrypt=True), False, {"encrypted": True}),
        (running(save=SaveWish()), POLICY, False, {}),
        (running(save=SaveWish(restart=True)), POLICY, False, {"may_restart": True}),
    ],
)
def test_what_is_saved_at_the_wish_of_its_user(
    mine: Attempt, policy: Policy, hold: bool, more: dict[str, object]
) -> None:
    found = context(mine, SERVING, policy=policy)
    follow_command(found, Command("save", job="7", uid=1000, hold=hold))
    assert found.state.saved == {100: replace(WHOLE_ROW, **more)}  # type: ignore[arg-type]
    assert told(found.state) == [(Event.ASKED, S.PREPARING, Why.SAVE_ASKED())], "it is no eviction"


def test_what_an_operator_has_saved_was_evicted() -> None:
    seen = world(SCRIPT_ON_SECOND)
    found = context(running(2), SERVING, SECOND, seen=seen)
    follow_command(found, Command("save", job="7"))
    why = Why.SAVE_ORDERED()
    evictions = (BEFORE, Eviction(EPOCH + NOW, "save", "h1", why, 768))
    first = {
        name: getattr(SECOND, name)
        for name in ("token", "mac", "address", "image", "kind", "size", "node_size", "account")
    }
    other = SavedPart(1, "mvtest0-1", "token", SERVING.mac, SERVING.address, SERVING.size, SOURCE)
    of_script: dict[str, Any] = {"vm": 2, "vm_name": "mvtest0-2", "others": (other,), "bound": 778 * MIB} | first
    assert found.state.saved == {100: replace(WHOLE_ROW, asked=why, evictions=evictions, **of_script)}
    assert told(found.state) == [(Event.ASKED, S.PREPARING, why), (Event.NOTED, A.ALLOCATED, why)]
    assert found.state.attempts[1].evictions == evictions


@pytest.mark.parametrize(
    ("restarts", "requeues", "agreed"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_an_evicted_job_begins_anew_only_if_it_may_be_queued_again(
    restarts: bool, requeues: bool, agreed: bool
) -> None:
    found = context(
        running(), SERVING, seen=world(job(requeues=requeues)), policy=replace(POLICY, save_no_requeue=True)
    )
    save(found, found.state.attempts[1], WHY, restarts=restarts)
    (made,) = found.state.saved.values()
    assert (made.may_restart, made.requeues, made.hold) == (agreed, requeues, False)
    assert told(found.state) == [(Event.ASKED, S.PREPARING, WHY)]


def test_a_state_may_take_what_the_disk_of_its_vm_can_grow_to() -> None:
    claims = (Claim(SERVING.key, "h1", Size(1, 256, 90)), Claim(SERVING.key, "h2", Size(1, 256, 7)))
    found = context(running(), SERVING, claims=claims)
    assert what_to_save(found, found.state.attempts[1]).bound == (256 + 90) * MIB


# --- what is refused --------------------------------------------------------------------------------

ELSEWHERE = replace(HOST, name="h2", storage=Storage("another", "qemu"))
MOVED = on_host(SECOND, "h2")


@pytest.mark.parametrize(
    ("rows", "seen", "why"),
    [
        ([running(), SERVING], replace(world(job()), scheduler=None), "does not show this run of job 7"),
        ([running(), SERVING], world(None), "does not show this run of job 7"),
        ([running(), SERVING], world(PENDING), "does not show this run of job 7"),
        ([running(), SERVING], world(job(batch=False)), "job 7 is of srun or salloc"),
        ([running(), SERVING], world(job(requeues=False)), "(--no-requeue)"),
        ([running(), replace(SERVING, state=V.MOVING)], world(job()), "its VM moves"),
        ([running(), replace(SERVING, state=V.SETTLING)], world(job()), "its VM moves"),
        ([running(), replace(SERVING, state=V.ASLEEP)], world(job()), "its VM sleeps"),
        ([running()], world(job()), "not all of its VMs are in sight"),
        ([running(), replace(SERVING, state=V.LOST)], world(job()), "not all of its VMs are in sight"),
        ([running(2), SERVING], world(job(script_node="mvtest0-1")), "not all of its VMs are in sight"),
        ([running(2), SERVING, SECOND], world(job()), "not all of its VMs are in sight"),
        ([running(), SERVING, SECOND], world(job()), "not all of its VMs are in sight"),
        ([running(), SERVING], world(job(), hosts=[]), "cannot be saved on host h1: no storage is in reach"),
        ([running(), SERVING], world(job(), hosts=[replace(HOST, storage=None)]), "on host h1: no storage is in reach"),
        ([running(2), SERVING, MOVED], world(SCRIPT_ON_SECOND, hosts=[HOST]), "on host h2: no storage is in reach"),
        (
            [running(2), SERVING, MOVED],
            world(SCRIPT_ON_SECOND, hosts=[HOST, ELSEWHERE]),
            "hosts h2 and h1 of its VMs share no storage",
        ),
        ([running(), SERVING, row(S.CAPTURING, checkpoint=True)], world(job()), "a checkpoint of job 7 is being made"),
        ([running(), SERVING, row(S.UNDOING)], world(job()), "job 7 is being saved already"),
        ([running(), SERVING, row(S.THAWING, job=JobRef("7", 500, -1))], world(job()), "is being saved already"),
        ([running(), SERVING], world(job(), vms=[shown(mute=True)]), "the guest of its VM mvtest0-1 sent too much"),
        (
            [running(), SERVING],
            world(job(), hosts=[replace(HOST, storage_free=5)]),
            "the storage shared has room for 0",
        ),
    ],
)
def test_a_job_that_cannot_be_saved_is_refused_with_the_reason(rows: list[Row], seen: World, why: str) -> None:
    found = context(*rows, seen=seen)
    before = dict(found.state.saved)
    follow_command(found, Command("save", job="7"))
    assert why in refusal(found) and found.state.saved == before and not found.state.moves


def test_the_states_of_its_user_count_for_a_job_that_is_to_be_saved() -> None:
    theirs = row(S.STORED, id=1, uid=1001, job=JobRef("8", 500), bytes=900 * MIB)
    mine = row(S.STORED, id=2, job=JobRef("9", 500), bytes=50 * MIB)
    for quota, refused in ((316, False), (315, True)):
        found = context(running(), SERVING, theirs, mine, policy=replace(POLICY, save_user_quota=quota * MIB))
        follow_command(found, Command("save", job="7"))
        assert bool(found.state.refusals) is refused


@pytest.mark.parametrize(
    "rows",
    [
        [row(S.STORED, checkpoint=True)],
        [row(S.DISCARDING, job=JobRef("7", 400))],
        [row(S.STORED, job=JobRef("8", 500))],
    ],
)
def test_states_of_other_runs_and_complete_checkpoints_are_in_nobodys_way(rows: list[Row]) -> None:
    found = context(running(), SERVING, *rows)
    follow_command(found, Command("save", job="7"))
    assert not found.state.refusals and told(found.state)[0][0] is Event.ASKED


def test_the_vms_of_a_job_may_be_on_hosts_that_share_a_storage() -> None:
    found = context(running(2), SERVING, MOVED, seen=world(SCRIPT_ON_SECOND, hosts=[HOST, replace(HOST, name="h2")]))
    what = what_to_save(found, found.state.attempts[1])
    assert ([one.name for one in what.vms], what.storage) == (["mvtest0-2", "mvtest0-1"], HOST.storage)


def test_a_site_may_have_jobs_saved_that_are_not_queued_again() -> None:
    found = context(running(), SERVING, seen=world(job(requeues=False)), policy=replace(POLICY, save_no_requeue=True))
    assert not what_to_save(found, found.state.attempts[1]).job.requeues


INSIDE = " of its own (VMs inside a job are neither saved nor moved)"


@pytest.mark.parametrize(
    ("mine", "now", "uid", "inside", "hint"),
    [
        ([], None, None, INSIDE, "multiverse jobs"),
        ([], None, 1000, INSIDE, "squeue --me"),
        ([running()], job(), 1001, INSIDE, "squeue --me"),
        ([attempt(A.CLAIMED)], job(), 1000, "", "squeue --me"),
        ([attempt(A.CLAIMED)], job(), None, "", "multiverse jobs"),
        ([], job(at_origin=True), 1000, INSIDE, "squeue --me"),
        ([], job(at_origin=True), None, INSIDE, "multiverse jobs"),
    ],
)
def test_a_user_is_told_the_same_of_jobs_of_others_as_of_those_that_do_not_exist(
    mine: list[Row], now: Job | None, uid: int | None, inside: str, hint: str
) -> None:
    for follow, verb in ((follow_command, "save"), (follow_checkpoint, "checkpoint")):
        found = context(*mine, seen=world(now))
        follow(found, Command(verb, job="7", uid=uid))
        assert refusal(found).startswith(f"job 7 runs in no VM{inside} (") and hint in refusal(found)


# --- room -------------------------------------------------------------------------------------------

ROOM = [
    row(S.STORED, id=1, bytes=10 * MIB),
    row(S.WRITING, id=2, bytes=0, bound=20 * MIB, uid=1001),
    row(S.STORED, id=3, kept="h1", bytes=0, bound=40 * MIB),
    row(S.CAPTURING, id=4, bytes=0, bound=80 * MIB, checkpoint=True),
    row(S.WRITING, id=5, bytes=0, bound=160 * MIB, storage="another"),
    row(S.KEEPING, id=6, bytes=0, bound=320 * MIB),
]
MINE, ALL, AWAITED = 570, 590, 100  # MiB that count for the user and the site, and that are still to be written


@pytest.mark.parametrize(
    ("limits", "free", "size", "why"),
    [
        ({}, None, 1 << 50, None),
        ({"save_user_quota": MINE * MIB + 5 * MIB}, None, 5 * MIB, None),
        (
            {"save_user_quota": MINE * MIB + 5 * MIB},
            None,
            5 * MIB + 1,
            Why.SAVE_USER_QUOTA(need=5, taken=MINE, quota=MINE + 5),
        ),
        ({"save_site_quota": ALL * MIB + 5 * MIB}, None, 5 * MIB, None),
        (
            {"save_site_quota": ALL * MIB + 5 * MIB},
            None,
            6 * MIB,
            Why.SAVE_SITE_QUOTA(need=6, taken=ALL, quota=ALL + 5),
        ),
        ({}, AWAITED + 5, 5 * MIB, None),
        ({}, AWAITED + 5, 6 * MIB, Why.STORAGE_FULL(need=6, free=5, storage="shared")),
        ({}, AWAITED - 5, 6 * MIB, Why.STORAGE_FULL(need=6, free=0, storage="shared")),
    ],
)
def test_each_state_counts_for_quotas_and_for_what_is_free(
    limits: dict[str, Any], free: int | None, size: int, why: Reason | None
) -> None:
    found = context(*ROOM, policy=replace(POLICY, **limits))
    host = replace(HOST, storage_free=None if free is None else free * MIB)
    assert why_no_room(found, 1000, host, size) == why
    assert why_no_room(found, 1000, replace(host, storage=None), 1) is None, "where there is none"


# --- what a user reads ------------------------------------------------------------------------------

AT = EPOCH + 5.0
CAPACITY = Why.CAPACITY()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, Why.SAVED_SINCE(CAPACITY, at=AT, size=1, storage="shared")),
        ({"bytes": 5}, Why.SAVED_SINCE(CAPACITY, at=AT, storage="shared")),
        ({"bytes": 3 * MIB - 1}, Why.SAVED_SINCE(CAPACITY, at=AT, size=2, storage="shared")),
        ({"kept": "h1"}, Why.SAVED_SINCE(CAPACITY, at=AT, host="h1")),
        (
            {"asked": Why.HOST_DRAINED(host="h1")},
            Why.SAVED_SINCE(Why.HOST_DRAINED(host="h1"), CAPACITY, at=AT, size=1, storage="shared"),
        ),
        (
            {"asked": Why.HOST_DRAINED(host="h1"), "kept": "h1"},
            Why.SAVED_SINCE(Why.HOST_DRAINED(host="h1"), CAPACITY, at=AT, host="h1"),
        ),
        (
            {"asked": Why.PREEMPTED(job="12", by="high")},
            Why.SAVED_SINCE(CAPACITY, at=AT, size=1, storage="shared", job="12", by="high"),
        ),
        (
            {"asked": Why.PREEMPTED(job="12", by="high"), "kept": "h1"},
            Why.SAVED_SINCE(CAPACITY, at=AT, host="h1", job="12", by="high"),
        ),
        (
            {"asked": Why.HOST_DRAINED(host="h1"), "checkpoint": True},
            Why.SAVED_SINCE(CAPACITY, at=AT, size=1, storage="shared"),
        ),
    ],
)
def test_a_job_that_waits_with_its_state_is_told_since_when_why_and_where(
    more: dict[str, Any], expected: Reason
) -> None:
    waiting = attempt(A.QUEUED, restarts=1)
    here = state(waiting, row(S.STORED, begun=AT, **{"asked": Why.SAVE_ASKED()} | more))
    assert with_its_state(here, waiting, CAPACITY) == expected
    assert with_its_state(here, waiting, None) is None


def test_a_job_that_was_queued_again_for_another_is_told_so() -> None:
    out = Eviction(AT, "requeue", "h1", WHY, 100)
    here = state()
    for eviction, expected in (
        (out, Why.REQUEUED_SINCE(WHY, at=AT).also(CAPACITY)),
        (replace(out, took=4.0), CAPACITY),
        (replace(out, way="save"), CAPACITY),
    ):
        assert with_its_state(here, attempt(A.QUEUED, evictions=(eviction,)), CAPACITY) == expected
    assert with_its_state(here, attempt(A.QUEUED, evictions=(out,)), None) is None
    waiting = attempt(A.QUEUED, restarts=1, evictions=(out,))
    saved_too = with_its_state(state(row(S.STORED, begun=AT)), waiting, CAPACITY)
    assert saved_too is not None and saved_too.kind is Why.SAVED_SINCE


# --- what no row explains ---------------------------------------------------------------------------

ON_IT: dict[str, Any] = {"nodes": ("mvtest0-1",)}


@pytest.mark.parametrize(
    ("rows", "now", "how", "goes_on"),
    [
        ([running(), SERVING], job(**ON_IT), {"frozen": True}, True),
        ([running(), SERVING], job(**ON_IT), {"freezing": True}, True),
        ([running(), SERVING], job(state=J.COMPLETING, **ON_IT), {"frozen": True}, True),
        ([attempt(A.RECLAIMING), SERVING], job(state=J.COMPLETING, **ON_IT), {"frozen": True}, True),
        ([vm(V.ORPHAN, job_id="7")], job(**ON_IT), {"frozen": True}, True),
        ([running(), SERVING], job(**ON_IT), {}, False),
        ([running(), SERVING], job(state=J.SUSPENDED, **ON_IT), {"frozen": True}, False),
        ([running(), SERVING], job(nodes=("mvtest0-2",)), {"frozen": True}, False),
        ([running(), SERVING], job(NEXT, **ON_IT), {"frozen": True}, False),
        ([running(), SERVING], None, {"frozen": True}, False),
        ([attempt(A.CLAIMED), SERVING], job(**ON_IT), {"frozen": True}, False),
        ([running(), replace(SERVING, state=V.ENDING)], job(**ON_IT), {"frozen": True}, False),
        ([vm(V.ORPHAN, job_id="8")], job(**ON_IT), {"frozen": True}, False),
        ([running(), SERVING, row(S.FREEZING)], job(**ON_IT), {"frozen": True}, False),
        (
            [running(restarts=1), replace(SERVING, saved="mvtest0-1-1"), row(S.THAWING, vm=9)],
            job(NEXT, **ON_IT),
            {"frozen": True},
            False,
        ),
        ([running(restarts=1), replace(SERVING, saved="mvtest0-1-9")], job(NEXT, **ON_IT), {"frozen": True}, True),
        ([running()], job(**ON_IT), {"frozen": True}, False),
        ([running(), SERVING], job(**ON_IT), {"frozen": True, "token": "of another VM"}, False),
    ],
)
def test_a_job_that_no_row_explains_goes_on(
    rows: list[Row], now: Job | None, how: dict[str, Any], goes_on: bool
) -> None:
    found = context(*rows, seen=world(now, vms=[shown(**how)]))
    found.state.compared.frozen = {SOURCE: ("mvtest0-0", "mvtest0-1"), "another": ("mvtest0-1",)}
    let_frozen_jobs_go_on(found)
    why = Why.FOUND_FROZEN()
    assert told(found.state) == ([(Event.FOUND, S.UNDOING, why)] if goes_on else [])
    if goes_on:
        made = found.state.saved[100]
        assert now is not None and (made.vm, made.vm_name, made.job) == (1, "mvtest0-1", now.ref)
        assert (made.storage, made.machine, made.asked) == ("", "", why), "nothing of it is written"


def test_no_stopped_job_is_found_by_the_name_of_a_stranger_or_while_the_scheduler_is_unknown() -> None:
    known = world(job(**ON_IT), vms=[shown(frozen=True)])
    for seen, name in ((known, "mvtest0-2"), (replace(known, scheduler=None), "mvtest0-1")):
        found = context(running(), SERVING, seen=seen)
        found.state.compared.frozen = {SOURCE: (name,)}
        let_frozen_jobs_go_on(found)
        assert not found.state.moves


@pytest.mark.parametrize(
    ("name", "seen", "days", "swept"),
    [
        ("mvtest0-1-3", {}, 0, True),  # the number was given, and its row has ended
        ("mvtest0-1-200", {}, 0, False),
        ("mvtest0-1-x", {}, 0, False),
        ("mvtest0-1-200", {"complete": False}, 0, True),
        ("mvtest0-1-200", {"kept": True}, 0, True),
        ("mvtest0-1-200", {"written": EPOCH + NOW - 86400.0}, 1, False),
        ("mvtest0-1-200", {"written": EPOCH + NOW - 86400.5}, 1, True),
        ("mvtest0-1-200", {"written": EPOCH + NOW - 86400.5}, 0, False),
        ("mvtest0-1-200", {}, 1, False),  # nobody knows when it was written
        ("mvtest0-1-1", {}, 0, False),  # of a row
    ],
)
def test_only_states_that_nobody_can_need_are_swept(name: str, seen: dict[str, Any], days: float, swept: bool) -> None:
    shown_too: list[SavedSeen] = [file("mvtest0-9-2"), file(name, **seen)]
    found = context(row(S.STORED), seen=world(job(), files=shown_too))
    found.state.compared.stray = {SOURCE: ("mvtest0-8-2", name, "mvtest0-9-2"), "unknown": (name,)}
    expected = sorted([("mvtest0-9-2", SOURCE), *([(name, SOURCE)] if swept else [])])
    policy = replace(POLICY, save_keep=days * 86400.0)
    assert unexplained_states(found.state, found.world, policy) == expected, "the others are looked at all the same"


# --- ahead of their time limits ---------------------------------------------------------------------


NO_BATCH = "job 6 is of srun or salloc, which the scheduler cannot queue again (submit it with sbatch)"


def until(seconds: float, **more: Any) -> Job:
    """The job, whose time limit is over in so many seconds."""
    return job(deadline=EPOCH + NOW + seconds, **more)


@pytest.mark.parametrize(
    ("mine", "left", "before"),
    [
        (running(save=SaveWish()), 120.0, 0.0),
        (running(save=SaveWish(before=600.0)), 120.0, 480.0),
        (running(save=SaveWish(before=3600.0), since=NOW - 1000.0), 120.0, 440.0),  # half of its time passes first
        (running(save=SaveWish(), runs=7), 120.0, None),
        (running(save=SaveWish(), runs=6), 120.0, 0.0),
        (running(), 120.0, None),
        (running(save=SaveWish()), None, None),
    ],
)
def test_when_a_job_is_saved_ahead_of_its_time_limit(mine: Attempt, left: float | None, before: float | None) -> None:
    found = context(mine, SERVING)
    at = saved_at(found, mine, job() if left is None else until(left))
    assert at == (None if before is None else EPOCH + NOW - before)


@pytest.mark.parametrize(
    ("rows", "now", "begun"),
    [
        ([], until(120.0), True),
        ([], until(120.5), False),
        ([], until(10.5), True),
        ([], until(10.0), False),  # the scheduler may end it meanwhile
        ([], until(120.0, ref=NEXT), False),
        ([], None, False),
        ([], job(), False),
        ([row(S.CAPTURING, checkpoint=True)], until(120.0), False),
        ([row(S.STORED, checkpoint=True)], until(120.0), True),
        ([row(S.UNDOING)], until(120.0), False),
    ],
)
def test_a_job_is_saved_in_the_time_before_its_limit(rows: list[Row], now: Job | None, begun: bool) -> None:
    mine = running(save=SaveWish())
    found = context(mine, SERVING, *rows, seen=world(now))
    save_at_limits(found)
    why = Why.SAVE_AT_LIMIT()
    assert told(found.state) == ([(Event.ASKED, S.PREPARING, why)] if begun else []), "and is not evicted by that"


def test_a_job_that_is_not_saved_at_its_limit_is_told_so_once_and_the_others_are_saved() -> None:
    ref = JobRef("6", 500)
    first = replace(running(save=SaveWish(), id=3, job="6"), job=ref)
    for note, told_so in ((None, True), (WHY, True), (Why.NOT_SAVED(WHY), False)):
        seen = world(until(60.0))
        assert seen.scheduler is not None
        jobs = {"6": until(60.0, ref=ref, batch=False), "7": until(60.0)}
        seen = replace(seen, scheduler=replace(seen.scheduler, value=replace(seen.scheduler.value, jobs=jobs)))
        unseen, second = running(save=SaveWish(), id=2, job="5"), running(save=SaveWish(), id=4)
        found = context(unseen, replace(first, note=note), second, replace(SERVING, attempt=4), seen=seen)
        save_at_limits(found)
        why = Why.NOT_SAVED(said(NO_BATCH))
        noted = [(Event.NOTED, A.ALLOCATED, why)] if told_so else []
        assert told(found.state) == [*noted, (Event.ASKED, S.PREPARING, Why.SAVE_AT_LIMIT())]


def test_nothing_is_begun_while_the_scheduler_is_unknown() -> None:
    unknown = replace(world(job()), scheduler=None)
    found = context(running(save=SaveWish(), checkpoint=CheckpointWish(1.0)), SERVING, seen=unknown)
    save_at_limits(found)
    capture_due(found)
    assert not found.state.moves


@pytest.mark.parametrize(
    ("rows", "busy"),
    [
        ([SERVING], False),
        ([replace(SERVING, state=V.SETTLING)], True),
        ([replace(SERVING, state=V.ASLEEP)], True),
        ([SERVING, replace(SECOND, state=V.MOVING)], True),
        ([SERVING, row(S.COPYING, checkpoint=True)], False),
        ([SERVING, row(S.STORED)], True),
        ([SERVING, row(S.STORED, checkpoint=True), row(S.CAPTURING, id=2, checkpoint=True)], True),
    ],
)
def test_a_job_is_saved_moved_or_asleep_one_at_a_time(rows: list[Row], busy: bool) -> None:
    mine = running()
    assert is_busy(state(mine, *rows), mine) is busy


# --- what is resumed --------------------------------------------------------------------------------

OPERATOR, USER = Why.OPERATOR(), Why.RESUME_ASKED()
HELD: dict[str, Any] = {"hold": True, "asked": Why.SAVE_ASKED()}
BY_OPERATOR = HELD | {"asked": Why.SAVE_ORDERED()}


@pytest.mark.parametrize(
    ("one", "command", "outcome"),
    [
        (row(S.STORED, **HELD), {"uid": 1000}, (USER, False)),
        (row(S.STORED, **HELD), {}, (OPERATOR, False)),
        (row(S.COPYING, **HELD), {"uid": 1000}, (USER, False)),
        (row(S.HOLDING, **HELD, reason="lost"), {"uid": 1000}, (USER, False)),
        (row(S.HOLDING, **HELD, ends=True), {}, None),  # it is to begin anew as soon as it is held
        (row(S.STORED), {}, None),  # it is not held
        (row(S.STORED), {"anew": True}, (OPERATOR, True)),
        (row(S.STORED), {"anew": True, "uid": 1000}, (USER, True)),
        (row(S.WRITING, **HELD), {}, None),  # it goes on as soon as it is written
        (row(S.WRITING), {"anew": True}, "job 7 cannot begin anew while it is saved or restored"),
        (row(S.RESUMING), {"anew": True}, "job 7 cannot begin anew while it is saved or restored"),
        (row(S.STORED, **BY_OPERATOR), {"uid": 1000}, "job 7 was saved and is held by an operator"),
        (row(S.STORED, **BY_OPERATOR), {"uid": 1000, "anew": True}, "job 7 was saved and is held by an operator"),
        (row(S.STORED, **BY_OPERATOR), {}, (OPERATOR, False)),
        (row(S.STORED, **BY_OPERATOR, reason="lost"), {"uid": 1000}, (USER, False)),  # held as it cannot go on
        (row(S.STORED, **HELD), {"uid": 1001}, "job 7 is not saved"),
        (row(S.STORED, **HELD, job=JobRef("8", 500)), {}, "job 7 is not saved"),
        (row(S.DISCARDING, **HELD), {}, "job 7 is not saved"),
        (row(S.STORED, checkpoint=True), {}, "job 7 is not saved"),
        (row(S.STORED, checkpoint=True), {"uid": 1000}, "job 7 is not saved"),
    ],
)
def test_a_saved_job_goes_on_or_begins_anew_as_it_may(one: Saved, command: dict[str, Any], outcome: object) -> None:
    found = context(one, seen=world(PENDING))
    follow_command(found, Command("resume_saved", job="7", **command))
    if isinstance(outcome, str):
        assert refusal(found).startswith(outcome) and not found.state.moves
    else:
        assert not found.state.refusals
        assert told(found.state) == ([] if outcome is None else [(Event.RESUMED, S.RESUMING, outcome[0])])  # type: ignore[index]
        assert found.state.saved[1].ends is (one.ends if outcome is None else outcome[1])  # type: ignore[index]


def test_a_job_whose_vm_is_being_restored_does_not_begin_anew() -> None:
    for others, begins in (([], True), ([restored(V.PLANNED)], False)):
        found = context(row(S.STORED), *others, seen=world(PENDING))
        follow_command(found, Command("resume_saved", job="7", anew=True))
        assert bool(found.state.moves) is begins and bool(found.state.refusals) is not begins


@pytest.mark.parametrize(
    ("more", "command", "now", "given_up"),
    [
        ({}, {}, PENDING, [1, 2]),
        ({}, {"uid": 1000}, PENDING, [1, 2]),
        ({}, {"uid": 1001}, PENDING, []),
        ({}, {}, job(NEXT), []),
        ({}, {}, None, []),
        ({"state": S.CAPTURING}, {}, PENDING, [2]),
        ({"vm_name": "mvtest0-5"}, {}, PENDING, [2]),  # a VM is being restored from it
        ({"quarantined": WHY}, {}, PENDING, [1, 2]),
    ],
)
def test_a_job_that_waits_with_its_checkpoints_can_begin_anew(
    more: dict[str, Any], command: dict[str, Any], now: Job | None, given_up: list[int]
) -> None:
    two = [replace(row(S.STORED, checkpoint=True), **more), row(S.STORED, id=2, checkpoint=True)]
    found = context(*two, restored(name="mvtest0-5"), seen=world(now))
    follow_command(found, Command("resume_saved", job="7", anew=True, **command))
    assert told(found.state) == [(Event.ABANDONED, S.DISCARDING, Why.SAVED_GIVEN_UP())] * len(given_up)
    assert [one.id for one in found.state.saved.values() if one.state is S.DISCARDING] == given_up
    assert bool(found.state.refusals) is not bool(given_up)


# --- checkpoints ------------------------------------------------------------------------------------

EVERY = CheckpointWish(600.0)


@pytest.mark.parametrize(("uid", "shared"), [(None, True), (1000, False)])
def test_a_checkpoint_is_made_as_somebody_asks(uid: int | None, shared: bool) -> None:
    found = context(running(), SERVING)
    follow_checkpoint(found, Command("checkpoint", job="7", uid=uid, shared_files=shared))
    why = Why.SAVE_ORDERED() if uid is None else Why.SAVE_ASKED()
    assert told(found.state) == [(Event.CHECKPOINT_DUE, S.CAPTURING, why), (Event.NOTED, A.ALLOCATED, why)]
    begun = {"state": S.CAPTURING, "checkpoint": True, "froze": True, "evictions": (), "asked": why}
    assert found.state.saved == {100: replace(WHOLE_ROW, shared_files=shared, **begun)}  # type: ignore[arg-type]
    assert found.state.attempts[1].captured == EPOCH + NOW


def test_a_checkpoint_of_a_job_of_several_vms_is_refused() -> None:
    found = context(running(2), SERVING, SECOND, seen=world(SCRIPT_ON_SECOND))
    follow_checkpoint(found, Command("checkpoint", job="7"))
    assert refusal(found).startswith("job 7 has 2 VMs") and not found.state.moves


@pytest.mark.parametrize(
    ("wish", "captured", "at_least", "due"),
    [
        (EVERY, 0.0, 60.0, NOW - 3600.0 + 600.0),
        (EVERY, NOW - 100.0, 60.0, NOW + 500.0),
        (EVERY, 0.0, 900.0, NOW - 3600.0 + 900.0),
        (None, 0.0, 60.0, None),
    ],
)
def test_when_the_next_checkpoint_is_due(
    wish: CheckpointWish | None, captured: float, at_least: float, due: float | None
) -> None:
    mine = running(checkpoint=wish, captured=captured + EPOCH if captured else 0.0)
    found = context(mine, policy=replace(POLICY, save_checkpoint_every=at_least))
    assert next_checkpoint(found, mine) == (None if due is None else due + EPOCH)


@pytest.mark.parametrize(
    ("mine", "rows", "now", "begun"),
    [
        ({"since": NOW - 600.0}, [], job(), True),
        ({"since": NOW - 599.5}, [], job(), False),
        ({}, [], job(state=J.SUSPENDED), False),
        ({}, [], PENDING, False),
        ({}, [], job(NEXT), False),
        ({}, [], None, False),
        ({}, [row(S.CAPTURING, checkpoint=True)], job(), False),
        ({}, [row(S.PREPARING)], job(), False),
        ({}, [row(S.STORED, checkpoint=True)], job(), True),
        ({"checkpoint": None, "save": SaveWish()}, [], job(), False),
    ],
)
def test_a_checkpoint_that_is_due_is_made_of_a_job_that_runs(
    mine: dict[str, Any], rows: list[Row], now: Job | None, begun: bool
) -> None:
    wish = {"checkpoint": CheckpointWish(600.0, shared_files=True)} | mine
    found = context(running(**wish), SERVING, *rows, seen=world(now))
    capture_due(found)
    why = Why.CHECKPOINT_DUE(pause=600.0)
    expected = [(Event.CHECKPOINT_DUE, S.CAPTURING, why), (Event.NOTED, A.ALLOCATED, why)]
    assert told(found.state) == (expected if begun else [])
    if begun:
        assert found.state.saved[100].shared_files


def test_a_checkpoint_that_is_refused_is_told_and_tried_when_the_next_is_due_and_the_others_are_made() -> None:
    others = {"id": 3, "job": "6"}
    first, second = running(checkpoint=EVERY, **others), running(checkpoint=EVERY, id=4)
    third = running(checkpoint=EVERY, id=5, job="5")  # the scheduler does not show it
    seen = world(job())
    assert seen.scheduler is not None
    jobs = {"6": job(JobRef("6", 500), batch=False), "7": job()}
    seen = replace(seen, scheduler=replace(seen.scheduler, value=replace(seen.scheduler.value, jobs=jobs)))
    for order in ((first, second, third), (replace(third, id=2), first, second)):
        early = running(checkpoint=EVERY, id=1, job="4", since=NOW)
        found = context(early, *order, replace(SERVING, attempt=4), seen=seen)
        capture_due(found)
        why = Why.NO_CHECKPOINT(said(NO_BATCH))
        assert [event for event, _, _ in told(found.state)] == [Event.NOTED, Event.CHECKPOINT_DUE, Event.NOTED]
        assert found.state.attempts[3].note == why == told(found.state)[0][2]
        assert found.state.attempts[3].captured == EPOCH + NOW, "so it is not tried in each pass"
