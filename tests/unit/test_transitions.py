"""Transitions that the stories of the other tests do not take: of each the rows, what is observed, and the change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from multiverse.core import planner
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import Depth, Key, RowKind, Size
from multiverse.core.model.host import Host, HostState, HypervisorView
from multiverse.core.model.job import Attempt, AttemptState, Job, JobState, Node, NodeState, Request, SchedulerView
from multiverse.core.model.reason import said
from multiverse.core.model.vm import OfferState, TemplateState, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Row
from multiverse.core.planner import plan
from multiverse.core.policy import Policy, Pool
from multiverse.core.transition import TERMINAL, Command, Event, Message, RowState
from tests.unit.planner_harness import POLICY
from tests.unit.rows import IMAGES, as_ready, attempt, known_host, lease, offer, saved, state, template, vm, world_of

A, V, T, O = AttemptState, VmState, TemplateState, OfferState  # noqa: E741
NOW = 1000.0
NAME = "mvtest0-1"
H1 = Host("h1", Size(4, 8192, 65536), frozenset({"instant"}), images=IMAGES)


@dataclass(frozen=True)
class Shown:
    """What both sides show. `seen` and `node` are of the first VM; `ended` are the rows whose effects ended before."""

    jobs: tuple[Job, ...] = ()
    seen: VmCondition | None = VmCondition.RUNNING
    users_added: tuple[int, ...] = ()
    node: NodeState | None = None
    offers: dict[str, bool] = field(default_factory=dict)
    hosts: tuple[Host, ...] = (H1,)
    ended: tuple[Key, ...] = ()


def taken(*rows: Row, shown: Shown, messages: tuple[Message, ...] = (), policy: Policy = POLICY) -> list[
    tuple[Key, RowState | None, Event, RowState]
]:  # fmt: skip
    """The transitions that one pass takes."""
    held = state(*rows, now=NOW)
    before: dict[Key, RowState] = {row.key: row.state for row in rows}
    vms = {NAME: VmSeen(NAME, "h1", shown.seen, users_added=shown.users_added)} if shown.seen else {}
    nodes = {NAME: Node(NAME, shown.node)} if shown.node else {}
    scheduler = SchedulerView({job.ref.job_id: job for job in shown.jobs}, nodes, offers=shown.offers)
    built = as_ready(rows) if shown.hosts else {}
    hypervisor = HypervisorView({host.name: host for host in shown.hosts}, vms if shown.hosts else {}, built)
    world = world_of(scheduler, hypervisor, NOW, effect_ended_at=dict.fromkeys(shown.ended, NOW - 10))
    found = []
    for move in plan(held, world, list(messages), NOW, policy):
        for change in move.changes:
            found.append((change.row.key, before.get(change.row.key), change.event, change.row.state))
            before[change.row.key] = change.row.state
    return found


def job(of: Attempt, state: JobState = JobState.PENDING, **more: object) -> Job:
    made = Job(of.job, of.job_name, of.uid, state, of.request, gated=False, pinned="mv_9")
    return made._replace(**more)  # type: ignore[arg-type]


def on_it(of: Attempt, state: JobState = JobState.RUNNING, **more: object) -> Job:
    return job(of, state, nodes=(NAME,), pinned=of.feature, **more)


def again(of: Attempt) -> Job:
    """The job's next run, which waits."""
    return job(of, ref=replace(of.job, restarts=of.job.restarts + 1))


# --- attempts ---------------------------------------------------------------------------------------

UNGATED, STRAY, QUEUED = attempt(A.UNGATED), attempt(A.STRAY), attempt(A.QUEUED)
ADDING_USER = attempt(A.ADDING_USER, pin="mv_v1")
SPARE = vm(V.JOINED, pool=Depth.JOINED, attempt=1)
TAKEN = offer(O.TAKEN)
OTHER = Request(1, Size(2, 100))

WAITING: list[tuple[Attempt, Job | None, Event, A]] = [
    (STRAY, job(STRAY), Event.LEFT_GATE, A.UNGATED),
    (UNGATED, job(UNGATED, JobState.RUNNING, nodes=("mvtest0-9",)), Event.STRAYED, A.STRAY),
    (STRAY, job(STRAY, JobState.RUNNING, problem="what is this?", request=None), Event.IMPOSSIBLE, A.REVOKING),
    (UNGATED, None, Event.CANCELLED, A.RECLAIMING),
    (STRAY, None, Event.CANCELLED, A.RECLAIMING),
    (QUEUED, again(QUEUED), Event.RESTARTED, A.RECLAIMING),
    (UNGATED, again(UNGATED), Event.RESTARTED, A.RECLAIMING),
    (STRAY, again(STRAY), Event.RESTARTED, A.RECLAIMING),
    (UNGATED, job(UNGATED, request=OTHER), Event.NOTED, A.UNGATED),
]


@pytest.mark.parametrize(("row", "shown", "event", "target"), WAITING)
def test_a_waiting_attempt_follows_its_job(row: Attempt, shown: Job | None, event: Event, target: A) -> None:
    earlier = vm(V.RELEASING, id=9)  # of an earlier attempt
    found = taken(row, earlier, shown=Shown(jobs=(shown,) if shown else ()))
    assert next(one for one in found if one[0] == row.key) == (row.key, row.state, event, target)


PINNED: list[tuple[Job, Event, A]] = [
    (on_it(ADDING_USER, JobState.PENDING), Event.PIN_EXPIRED, A.RETURNING),
    (on_it(ADDING_USER, JobState.PENDING, held=True), Event.CHANGED, A.RETURNING),
    (on_it(ADDING_USER, JobState.PENDING, request=OTHER), Event.CHANGED, A.RETURNING),
    (on_it(ADDING_USER, JobState.ENDED, result="COMPLETED"), Event.ENDED, A.RECLAIMING),
    (on_it(ADDING_USER, JobState.ENDED, result="CANCELLED"), Event.CANCELLED, A.RECLAIMING),
    (again(ADDING_USER), Event.RESTARTED, A.RECLAIMING),
]


@pytest.mark.parametrize(("shown", "event", "target"), PINNED)
def test_an_attempt_that_adds_a_user_follows_its_job(shown: Job, event: Event, target: A) -> None:
    found = taken(ADDING_USER, SPARE, TAKEN, shown=Shown(jobs=(shown,), users_added=(1000,), node=NodeState.IDLE))
    first = next(one for one in found if one[0] == ADDING_USER.key)
    assert first == (ADDING_USER.key, A.ADDING_USER, event, target)


def test_an_attempt_that_adds_a_user_is_allocated_when_the_guest_knows_the_user() -> None:
    shown = Shown(jobs=(on_it(ADDING_USER),), node=NodeState.BUSY)
    fresh = replace(ADDING_USER, since=NOW - 1)
    assert taken(fresh, SPARE, TAKEN, shown=shown) == []
    assert taken(fresh, SPARE, TAKEN, shown=replace(shown, users_added=(1000,))) == [
        (ADDING_USER.key, A.ADDING_USER, Event.RUNS, A.ALLOCATED),
        (SPARE.key, V.JOINED, Event.RUNS, V.SERVING),
    ]


@pytest.mark.parametrize("making", [A.CLAIMED, A.SPAWNING])
def test_an_attempt_whose_vms_failed_too_often_has_its_job_cancelled(making: A) -> None:
    row = attempt(making, replaced=POLICY.replacements, tries=POLICY.attempts - 1)
    dead = vm(V.ENDING, attempt=1, reason="no luck")
    waits = job(row, gated=True, pinned=None)
    assert taken(row, dead, shown=Shown(jobs=(waits,)))[0] == (row.key, making, Event.GAVE_UP, A.REVOKING)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("pinned", []),
        ("at the gate", [(Event.RETURNED, A.RECLAIMING)]),
        ("running", [(Event.STARTED_LATE, A.RECLAIMING)]),
    ],
)
def test_a_returning_attempt_waits_until_its_job_is_off_its_nodes(shown: str, expected: list[tuple[Event, A]]) -> None:
    row = attempt(A.RETURNING, outcome="requeued")
    jobs = {
        "pinned": on_it(row, JobState.PENDING),
        "at the gate": job(row, gated=True, pinned=None),
        "running": on_it(row),
    }
    found = taken(row, vm(V.JOINED, attempt=1), shown=Shown(jobs=(jobs[shown],), node=NodeState.IDLE))
    assert [(event, target) for key, _, event, target in found if key == row.key] == expected
    released = [target for key, _, event, target in found if event is Event.RELEASED]
    assert released == ([V.RELEASING] if shown == "at the gate" else [])


@pytest.mark.parametrize("depth", list(Depth))
def test_a_spare_that_an_attempt_takes_keeps_its_state(depth: Depth) -> None:
    pool = Pool("slim", depth, 1, 1, Size(1, 100))
    before = V.PARKED if depth is Depth.PARKED else V.JOINED
    spare = vm(before, pool=depth, since=NOW)
    waits = job(QUEUED, gated=True, pinned=None)
    condition = VmCondition.PARKED if depth is Depth.PARKED else VmCondition.RUNNING
    shown = Shown(jobs=(waits,), seen=condition, node=NodeState.IDLE if depth is Depth.JOINED else None)
    found = taken(QUEUED, spare, template(T.READY), shown=shown, policy=replace(POLICY, pools=(pool,)))
    assert found[:2] == [
        (QUEUED.key, A.QUEUED, Event.ADMITTED, A.CLAIMED),
        (spare.key, before, Event.TAKEN, before),
    ]


@pytest.mark.parametrize("shown", [JobState.PENDING, JobState.RUNNING])
def test_a_revoking_attempt_keeps_its_vms_until_its_job_is_cancelled(shown: JobState) -> None:
    row = attempt(A.REVOKING, outcome="failed", reason="no luck")
    serving = vm(V.JOINED, attempt=1)
    assert taken(row, serving, shown=Shown(jobs=(job(row, shown),), node=NodeState.IDLE)) == []
    ended = job(row, JobState.ENDED, result="CANCELLED")
    assert taken(row, serving, shown=Shown(jobs=(ended,), node=NodeState.IDLE)) == [
        (row.key, A.REVOKING, Event.CANCELLED, A.RECLAIMING),
        (serving.key, V.JOINED, Event.RELEASED, V.RELEASING),
    ]


@pytest.mark.parametrize(
    ("outcome", "changed", "expected"),
    [
        ("revoked", JobState.PENDING, [A.RETURNING]),
        ("revoked", JobState.RUNNING, []),
        ("failed", JobState.PENDING, []),
    ],
)
def test_only_a_pending_job_that_was_impossible_is_given_another_attempt_when_it_asks_for_something_else(
    outcome: str, changed: JobState, expected: list[A]
) -> None:
    row = attempt(A.REVOKING, outcome=outcome, reason="no luck")
    found = taken(
        row, vm(V.JOINED, attempt=1), shown=Shown(jobs=(job(row, changed, request=OTHER, pinned=row.feature),))
    )
    assert [target for key, _, _, target in found if key == row.key] == expected


# --- VMs --------------------------------------------------------------------------------------------

ALL_VMS = (V.PLANNED, V.PARKED, V.STARTING, V.JOINED, V.SERVING, V.RETIRING, V.DEAD)
LEAVING = (V.ENDING, V.REMOVING, V.RELEASING)


@pytest.mark.parametrize("before", [*ALL_VMS, *LEAVING])
def test_a_vm_of_any_state_is_lost_with_its_host(before: V) -> None:
    found = taken(vm(before), shown=Shown(hosts=(replace(H1, name="h2"),)))
    assert found == [(Key("vm", 1), before, Event.LOST, V.LOST)]


HOST_FENCED = (Key("host", 1), None, Event.FENCED, HostState.FENCED)


@pytest.mark.parametrize("before", [*ALL_VMS, V.LOST])
def test_a_vm_of_any_state_ends_when_its_host_is_fenced(before: V) -> None:
    away = Shown(hosts=(replace(H1, name="h2"),))
    found = taken(vm(before, quarantined=said("x")), shown=away, messages=(Command("fence", "h1"),))
    assert found == [HOST_FENCED, (Key("vm", 1), before, Event.FENCED, V.ENDING)]


@pytest.mark.parametrize("before", LEAVING)
def test_a_vm_that_is_being_destroyed_goes_on_so_when_its_host_is_fenced(before: V) -> None:
    away = Shown(hosts=(replace(H1, name="h2"),))
    assert taken(vm(before), shown=away, messages=(Command("fence", "h1"),)) == [HOST_FENCED]
    found = taken(vm(before), shown=replace(away, ended=(Key("vm", 1),)), messages=(Command("fence", "h1"),))
    gone = (Key("vm", 1), before, Event.ABSENT, V.GONE)
    assert found == [HOST_FENCED, gone], "no observation of the host is needed"


@pytest.mark.parametrize("before", [V.PARKED, V.STARTING, V.JOINED, V.RETIRING])
def test_a_spare_that_dies_is_ended(before: V) -> None:
    found = taken(vm(before, pool=Depth.JOINED), shown=Shown(seen=VmCondition.DEAD))
    assert found[0] == (Key("vm", 1), before, Event.DIED, V.ENDING)


def test_a_parked_spare_that_no_pool_wants_is_released() -> None:
    found = taken(vm(V.PARKED, pool=Depth.PARKED), shown=Shown(seen=VmCondition.PARKED))
    assert found == [(Key("vm", 1), V.PARKED, Event.RELEASED, V.RELEASING)]


@pytest.mark.parametrize("before", [V.PLANNED, V.PARKED, V.STARTING, V.JOINED, V.SERVING])
def test_the_node_of_a_vm_that_a_job_does_not_leave_goes_down_after_a_limit(before: V) -> None:
    row = attempt(A.RECLAIMING, outcome="done", since=NOW - POLICY.complete_timeout - 1)
    shown = Shown(jobs=(on_it(row, JobState.COMPLETING),), seen=None if before is V.PLANNED else VmCondition.RUNNING)
    found = taken(row, vm(before, attempt=1, since=NOW - 1), shown=shown)
    assert found == [(Key("vm", 1), before, Event.RELEASED, V.ENDING)]


def test_the_node_of_a_dead_vm_that_a_job_does_not_leave_goes_down_after_a_limit() -> None:
    row = attempt(A.RETURNING, outcome="requeued", since=NOW - POLICY.complete_timeout - 1)
    found = taken(
        row, vm(V.DEAD, attempt=1), shown=Shown(jobs=(on_it(row, JobState.COMPLETING),), seen=VmCondition.DEAD)
    )
    assert found[:2] == [
        (row.key, A.RETURNING, Event.RETURNED, A.RECLAIMING),
        (Key("vm", 1), V.DEAD, Event.RELEASED, V.ENDING),
    ]


def test_a_dead_vm_is_removed_when_its_job_is_at_the_gate() -> None:
    row = attempt(A.RETURNING, outcome="requeued")
    pinned, waits = on_it(row, JobState.PENDING), job(row, gated=True, pinned=None)
    dead = vm(V.DEAD, attempt=1)
    assert taken(row, dead, shown=Shown(jobs=(pinned,), seen=VmCondition.DEAD)) == []
    found = taken(row, dead, shown=Shown(jobs=(waits,), seen=VmCondition.DEAD))
    assert found == [
        (row.key, A.RETURNING, Event.RETURNED, A.RECLAIMING),
        (dead.key, V.DEAD, Event.RELEASED, V.REMOVING),
    ]


def test_a_retiring_spare_is_released_when_its_offer_is_closed_and_not_before() -> None:
    spare = vm(V.RETIRING, pool=Depth.JOINED, reason="it is too old")
    open_ = Shown(node=NodeState.IDLE, offers={NAME: False}, ended=(spare.key,))
    assert taken(spare, offer(O.CLOSING), shown=open_) == []
    assert taken(spare, offer(O.CLOSING), shown=replace(open_, offers={})) == [
        (Key("offer", 1), O.CLOSING, Event.CLOSED, O.CLOSED),
        (spare.key, V.RETIRING, Event.RELEASED, V.RELEASING),
    ]


@pytest.mark.parametrize(("occupied", "target"), [(True, V.ENDING), (False, V.RELEASING)])
def test_a_retiring_spare_that_was_taken_goes_if_its_job_cannot_be_served(occupied: bool, target: V) -> None:
    spare = vm(V.RETIRING, pool=Depth.JOINED)
    strange = Job(attempt(A.QUEUED).job, "x", 1, JobState.RUNNING, None, problem="no", nodes=(NAME,))
    found = taken(spare, TAKEN, shown=Shown(jobs=(strange,) if occupied else (), offers={NAME: True}))
    assert found[0] == (spare.key, V.RETIRING, Event.RELEASED, target)


# --- offers and templates ---------------------------------------------------------------------------


@pytest.mark.parametrize("before", [O.OPEN, O.CLOSING, O.CLOSED])
def test_an_offer_of_any_state_is_taken_when_the_scheduler_shows_it(before: O) -> None:
    spare = vm(V.RETIRING, pool=Depth.JOINED)
    found = taken(spare, offer(before), shown=Shown(node=NodeState.IDLE, offers={NAME: True}))
    assert found[0] == (Key("offer", 1), before, Event.TAKEN, O.TAKEN)


@pytest.mark.parametrize("before", [O.OPEN, O.TAKEN, O.CLOSING, O.CLOSED])
def test_an_offer_of_any_state_ends_with_its_vm(before: O) -> None:
    gone = vm(V.REMOVING, pool=Depth.JOINED)
    quarantined = replace(offer(before), quarantined=said("x"))
    found = taken(gone, quarantined, shown=Shown(seen=None, ended=(gone.key,)))
    assert found == [
        (gone.key, V.REMOVING, Event.ABSENT, V.GONE),
        (Key("offer", 1), before, Event.ABSENT, O.ENDED),
    ]


@pytest.mark.parametrize("before", [T.BUILDING, T.READY, T.BROKEN])
def test_a_template_of_any_state_is_dropped_by_an_operator(before: T) -> None:
    found = taken(template(before), shown=Shown(hosts=()), messages=(Command("drop", "h1", "slim"),))
    assert found == [(Key("template", 1), before, Event.DROPPED, T.RETIRING)]


# --- quarantine -------------------------------------------------------------------------------------

LIVE: list[tuple[RowKind, RowState]] = sorted(
    {(kind, one.target) for kind, table in TABLES.items() for one in table if one.target not in TERMINAL}
)
LIVE.remove(("host", HostState.KNOWN))  # it is looked at only while its source is silent
LIVE.remove(("host", HostState.REMOVED))  # nothing moves it but an operator
STEPS = {
    "attempt": "step_attempt",
    "vm": "step_vm",
    "template": "step_template",
    "offer": "step_offer",
    "host": "step_host",
    "lease": "step_lease",
    "saved": "step_state",
}
MAKERS = {"attempt": attempt, "vm": vm, "template": template, "offer": offer, "host": known_host, "lease": lease,
          "saved": saved}  # fmt: skip


@pytest.mark.parametrize(("kind", "before"), LIVE)
def test_a_row_of_any_state_is_quarantined_by_a_fault_and_released_by_an_operator(
    monkeypatch: pytest.MonkeyPatch, kind: RowKind, before: RowState
) -> None:
    row = MAKERS[kind](before)  # type: ignore[operator]
    rows: tuple[Row, ...] = (row, vm(V.JOINED)) if kind == "offer" else (row,)
    unknown = Shown(hosts=())
    with monkeypatch.context() as patch:
        patch.setattr(planner, STEPS[kind], lambda *_: {}["x"])
        found = taken(*rows, shown=unknown)
    assert (row.key, before, Event.QUARANTINED, before) in found
    held = tuple(replace(one, quarantined=said("x")) if one is row else one for one in rows)
    found = taken(*held, shown=unknown, messages=(Command("retry", key=row.key),))
    assert found[0] == (row.key, before, Event.RETRIED, before)
