"""Single steps of VMs: from which moment an observation counts, what the row keeps, and the reason that is given."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import pytest

from multiverse.core.machines.vm import (
    adopt_vm,
    end_vm,
    is_occupied,
    keep_vm_there,
    may_take_job,
    move_vm,
    plan_vm,
    release_vm,
    retire_vm,
    step_vm,
    take_vm,
    vm_is_settled,
)
from multiverse.core.model.basics import ClaimKey, Depth, Key, Size
from multiverse.core.model.host import Claim, Host, HostState, HypervisorView, KnownHost
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    Eviction,
    Job,
    JobState,
    Node,
    NodeState,
    SchedulerView,
)
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Row, Seen, World
from multiverse.core.transition import Change, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import attempt, changes_of, place, saved, state, vm

A, C, J, N, V = AttemptState, VmCondition, JobState, NodeState, VmState
NOW, SINCE = 1000.0, 900.0
NAME = "mvtest0-1"
TWO = (place("h1", "h1"), place("h2", "h2"))
GONE, AWAY = "gone", "away"  # a host that does not show the VM, and one that is not shown


class Sight:
    """What is shown of VM 1, its node and its job, and one step of it. `at` says how each host shows the VM, and
    `began` when each observation began, the scheduler's under its own name."""

    def __init__(
        self,
        at: Mapping[str, VmCondition | VmSeen | str] | None = None,
        *,
        node: NodeState | Node | None = None,
        job: Job | None = None,
        began: Mapping[str, float] | None = None,
        ended: float | None = None,
        fenced: tuple[str, ...] = (),
        known: bool = True,
        silent: Mapping[str, float] | None = None,
        nodes: Mapping[str, Node] | None = None,
    ) -> None:
        began, self.fenced = began or {}, fenced
        shown: dict[str, Observation] = {}
        for host, what in ({"h1": C.RUNNING} if at is None else at).items():
            seen = VmSeen(NAME, host, what) if isinstance(what, VmCondition) else what
            hosts = {} if what == AWAY else {host: Host(host, Size(8, 8192, 65536))}
            vms = {NAME: seen} if isinstance(seen, VmSeen) else {}
            shown[host] = Observation(Seen(HypervisorView(hosts, vms), began.get(host, NOW)), 0.0)
        shown |= {host: Observation(None, since) for host, since in (silent or {}).items()}
        own = {NAME: Node(NAME, node) if isinstance(node, NodeState) else node} if node else {}
        view = SchedulerView({job.ref.job_id: job} if job else {}, {**own, **(nodes or {})})
        scheduler = Seen(view, began.get("scheduler", NOW)) if known else None
        ends = {} if ended is None else {Key("vm", 1): ended}
        self.world = World(scheduler, shown, effect_ended_at=ends)

    def step(self, row: Vm, *others: Row) -> Stepped:
        hosts = [KnownHost(name, name, HostState.FENCED, id=9, version=1) for name in self.fenced]
        claims = [Claim(row.key, one.host, Size(1, 256)) for one in row.places]
        here = state(row, *others, *hosts, now=NOW, claims=claims)
        step_vm(here, row.id, self.world, POLICY)
        freed, made = [key for move in here.moves for key in move.free], [c for move in here.moves for c in move.make]
        return Stepped(changes_of(here.moves), freed, made)


class Stepped:
    def __init__(self, changes: list[Change], freed: list[ClaimKey], made: list[Claim]) -> None:
        self.changes, self.freed, self.made = changes, [key.domain for key in freed], made

    @property
    def row(self) -> Vm:
        (found,) = (change.row for change in self.changes if isinstance(change.row, Vm))
        return found

    @property
    def what(self) -> tuple[Event, VmState, object, object] | None:
        """Event and new state of the VM, the kind of the reason that is given, and of that which its row keeps."""
        for change in self.changes:
            if isinstance(change.row, Vm):
                return change.event, change.row.state, _kind(change.reason), _kind(change.row.reason)
        return None


def _kind(reason: Reason | None) -> object:
    return None if reason is None else reason.kind


def one(in_state: VmState, **more: Any) -> Vm:
    return vm(in_state, **{"source": "h1", "since": SINCE, **more})


def of(row: Attempt, in_state: JobState = J.PENDING, *, pinned: bool = False, **more: Any) -> Job:
    tag = row.feature if pinned else None
    made = Job(row.job, row.job_name, row.uid, in_state, row.request, gated=not pinned, pinned=tag)
    return made._replace(**more)


def runs(row: Attempt) -> Job:
    return of(row, J.RUNNING, pinned=True, nodes=(NAME,))


ALLOCATED = attempt(A.ALLOCATED)


# --- changes -------------------------------------------------------------------------------------------


def test_what_a_change_makes_of_a_vm_and_what_the_journal_says() -> None:
    odd, target = said("it is odd"), place("h2", "h2")
    row = one(V.JOINED, reason=Why.VM_DIED(), quarantined=odd)
    for change, event, after, reason, quarantined in (
        (plan_vm(one(V.PLANNED), Why.OPERATOR()), Event.PLANNED, V.PLANNED, None, None),
        (adopt_vm(row, Why.OPERATOR()), Event.FOUND, V.ORPHAN, Why.VM_DIED(), odd),
        (retire_vm(row, Why.OPERATOR()), Event.RETIRED, V.RETIRING, Why.OPERATOR(), odd),
        (take_vm(row, ALLOCATED, Why.OPERATOR()), Event.TAKEN, V.JOINED, None, odd),
        (take_vm(one(V.RETIRING), ALLOCATED, Why.OPERATOR()), Event.TAKEN, V.JOINED, None, None),
        (take_vm(one(V.PARKED), ALLOCATED, Why.OPERATOR()), Event.TAKEN, V.PARKED, None, None),
        (release_vm(row, Why.OPERATOR()), Event.RELEASED, V.RELEASING, Why.VM_DIED(), None),
        (release_vm(row, Why.OPERATOR(), occupied=True), Event.RELEASED, V.ENDING, Why.VM_DIED(), None),
        (release_vm(one(V.DEAD), Why.OPERATOR()), Event.RELEASED, V.REMOVING, None, None),
        (end_vm(row, Event.FENCED, Why.OPERATOR()), Event.FENCED, V.ENDING, Why.OPERATOR(), None),
        (keep_vm_there(moving(), Why.OPERATOR()), Event.STAYED, V.SETTLING, None, None),
    ):
        assert isinstance(change.row, Vm) and (change.event, change.reason) == (event, Why.OPERATOR())
        assert (change.row.state, change.row.reason, change.row.quarantined) == (after, reason, quarantined)
        assert change.event is not Event.TAKEN or change.row.attempt == ALLOCATED.id
    moved = move_vm(one(V.SERVING, moves=2), target, Why.OPERATOR())
    assert isinstance(moved.row, Vm) and (moved.event, moved.row.state, moved.row.moves) == (Event.MOVE, V.MOVING, 3)
    assert moved.reason == Why.MOVES(Why.OPERATOR(), hosts=["h1", "h2"]) and moved.row.places[1] == target


# --- at two places -------------------------------------------------------------------------------------


def moving(in_state: VmState = V.MOVING, **more: Any) -> Vm:
    return vm(in_state, **{"since": SINCE, "places": TWO, "attempt": 1, **more})


@pytest.mark.parametrize(
    ("began", "ended", "concluded"),
    [
        ({}, SINCE + 1.0, True),
        ({}, None, False),  # no effect of the move has begun
        ({}, inf, False),  # one runs
        ({}, SINCE - 1.0, False),  # that was an earlier one
        ({"h1": SINCE + 1.0}, SINCE + 1.0, False),
        ({"h2": SINCE + 1.0}, SINCE + 1.0, False),
        ({"h1": SINCE + 1.1, "h2": SINCE + 1.1}, SINCE + 1.0, True),
    ],
)
def test_a_move_is_judged_once_both_hosts_were_observed_after_its_effect(
    began: dict[str, float], ended: float | None, concluded: bool
) -> None:
    stepped = Sight({"h1": GONE, "h2": C.RUNNING}, began=began, ended=ended).step(moving(), ALLOCATED)
    assert stepped.what == ((Event.MOVED, V.SERVING, Why.NOT_THERE, None) if concluded else None)
    assert stepped.freed == (["h1"] if concluded else [])


def test_a_vm_that_runs_at_its_second_place_alone_has_moved_and_its_job_went_on_meanwhile() -> None:
    eviction = Eviction(1.0, "move", "h1", Why.OPERATOR(), 500)
    row = attempt(A.ALLOCATED, evictions=(eviction,))
    stepped = Sight({"h1": C.DEAD, "h2": C.RUNNING}, ended=NOW - 1.0).step(moving(), row)
    assert stepped.what == (Event.MOVED, V.SETTLING, Why.GOES_ON, None)
    assert [one.host for one in stepped.row.places] == ["h2", "h1"]
    (noted,) = (change for change in stepped.changes if isinstance(change.row, Attempt))
    assert isinstance(noted.row, Attempt) and (noted.event, noted.row.evictions[-1].took) == (Event.NOTED, NOW - SINCE)
    left = Sight({"h1": GONE, "h2": C.RUNNING}, ended=NOW - 1.0).step(moving(), row)
    assert [change.event for change in left.changes] == [Event.MOVED, Event.NOTED]
    for other in (ALLOCATED, attempt(A.RECLAIMING, evictions=(eviction,))):
        alone = Sight({"h1": C.DEAD, "h2": C.RUNNING}, ended=NOW - 1.0).step(moving(), other)
        assert [change.event for change in alone.changes] == [Event.MOVED]


@pytest.mark.parametrize("at", [{"h1": C.RUNNING, "h2": C.CREATING}, {"h1": C.RUNNING, "h2": C.RUNNING}])
def test_a_move_that_has_not_ended_in_time_is_given_up(at: dict[str, VmCondition]) -> None:
    since = NOW - POLICY.move_timeout
    late = Sight(at, ended=since + 1.0).step(moving(since=since - 0.1), ALLOCATED)
    assert late.what == (Event.STAYED, V.SETTLING, Why.MOVE_LATE, None)
    assert Sight(at, ended=since + 1.0).step(moving(since=since), ALLOCATED).what is None
    assert Sight(at, ended=since + 1.0).step(moving(V.SETTLING, since=since - 0.1), ALLOCATED).what is None


@pytest.mark.parametrize(
    ("row", "at", "expected"),
    [
        (moving(reason=Why.MOVE_LATE()), {"h1": C.RUNNING, "h2": GONE}, (Event.STAYED, V.SERVING, Why.NOT_THERE, None)),
        (moving(V.SETTLING), {"h1": C.RUNNING, "h2": GONE}, (Event.PLACE_LEFT, V.SERVING, Why.NOT_THERE, None)),
        (moving(V.SETTLING), {"h1": GONE, "h2": C.RUNNING}, (Event.PLACE_LEFT, V.SERVING, Why.NOT_THERE, None)),
        (moving(), {"h1": GONE, "h2": C.DEAD}, (Event.LOST, V.LOST, Why.NOT_THERE, Why.VM_DIED)),
        (moving(), {"h1": GONE, "h2": AWAY}, (Event.LOST, V.LOST, Why.NOT_THERE, None)),
        (moving(), {"h1": GONE, "h2": GONE}, (Event.LOST, V.LOST, Why.NOT_THERE, Why.NOT_THERE)),
        (moving(V.ENDING), {"h1": GONE, "h2": C.RUNNING}, (Event.PLACE_LEFT, V.ENDING, Why.NOT_THERE, None)),
        (moving(V.LOST), {"h1": GONE, "h2": AWAY}, (Event.PLACE_LEFT, V.LOST, Why.NOT_THERE, None)),
    ],
)
def test_a_vm_that_is_no_more_at_one_place_keeps_the_other(row: Vm, at: Any, expected: object) -> None:
    stepped = Sight(at, ended=NOW - 1.0).step(row, ALLOCATED)
    left = next(host for host, how in at.items() if how == GONE)
    assert stepped.what == expected and stepped.freed == [left]
    assert [one.host for one in stepped.row.places] == [host for host in ("h1", "h2") if host != left]


def test_a_place_on_a_fenced_host_is_left_at_once_with_that_reason() -> None:
    world = Sight({"h1": AWAY, "h2": C.RUNNING}, ended=inf, fenced=("h1",))
    assert world.step(moving(), ALLOCATED).what == (Event.MOVED, V.SERVING, Why.HOST_OFF, None)
    dead = Sight({"h1": AWAY, "h2": C.DEAD}, ended=inf, fenced=("h1",)).step(moving(), ALLOCATED)
    assert dead.what == (Event.LOST, V.LOST, Why.HOST_OFF, Why.HOST_OFF)


# --- out of sight, and back ----------------------------------------------------------------------------


def test_a_vm_is_lost_when_its_source_is_silent_for_long_or_lacks_its_host() -> None:
    limit = NOW - POLICY.silence
    lost = (Event.LOST, V.LOST, Why.HOST_AWAY, None)
    assert Sight({}, silent={"h1": limit}).step(one(V.SERVING)).what is None
    assert Sight({}, silent={"h1": limit - 0.1}).step(one(V.SERVING)).what == lost
    assert Sight({"h1": AWAY}).step(one(V.SERVING)).what == lost
    assert Sight({"h1": AWAY}).step(one(V.LOST)).what is None
    assert Sight({}).step(one(V.SERVING)).what is None, "there is no such source yet"


def test_a_vm_on_a_fenced_host_ends_and_keeps_an_earlier_reason() -> None:
    world = Sight({"h1": AWAY}, fenced=("h1",))
    assert world.step(one(V.SERVING)).what == (Event.FENCED, V.ENDING, Why.HOST_OFF, Why.HOST_OFF)
    kept = world.step(one(V.LOST, reason=Why.VM_DIED()))
    assert kept.what == (Event.FENCED, V.ENDING, Why.VM_DIED, Why.VM_DIED)


@pytest.mark.parametrize("how", [C.RUNNING, C.PAUSED])
def test_a_lost_vm_is_found_again_in_an_observation_that_began_after_it_was_lost(how: VmCondition) -> None:
    found = (Event.FOUND, V.SERVING, Why.RUNS_ON, None)
    row = one(V.LOST, attempt=1, reason=Why.HOST_AWAY())
    assert Sight({"h1": how}, began={"h1": SINCE}).step(row, ALLOCATED).what is None
    assert Sight({"h1": how}, began={"h1": SINCE + 0.1}).step(row, ALLOCATED).what == found


@pytest.mark.parametrize(
    ("attempts", "how", "reason", "expected"),
    [
        ((), C.RUNNING, None, Why.HOST_WAS_AWAY),  # of no job
        ((ALLOCATED,), C.DEAD, None, Why.HOST_WAS_AWAY),
        ((ALLOCATED,), GONE, None, Why.HOST_WAS_AWAY),
        ((ALLOCATED,), C.DEAD, Why.VM_DIED(), Why.VM_DIED),
        ((attempt(A.RECLAIMING, outcome="done"),), C.RUNNING, None, Why.HOST_WAS_AWAY),
    ],
)
def test_a_lost_vm_without_a_job_ends_when_its_host_is_back(
    attempts: tuple[Attempt, ...], how: VmCondition | str, reason: Reason | None, expected: Why
) -> None:
    row = one(V.LOST, attempt=1 if attempts else None, reason=reason)
    assert Sight({"h1": how}).step(row, *attempts).what == (Event.FOUND, V.ENDING, expected, expected)


def test_a_lost_vm_whose_guest_was_to_learn_of_the_user_goes_on_if_it_has() -> None:
    adding, row = attempt(A.ADDING_USER), one(V.LOST, attempt=1)
    told = VmSeen(NAME, "h1", C.RUNNING, users_added=(1000,))
    assert Sight({"h1": told}).step(row, adding).what == (Event.FOUND, V.SERVING, Why.RUNS_ON, None)
    untold = Sight({"h1": C.RUNNING}).step(row, adding).what
    assert untold == (Event.FOUND, V.ENDING, Why.HOST_WAS_AWAY, Why.HOST_WAS_AWAY)


def test_a_vm_that_was_lost_at_two_places_goes_on_first_where_it_runs() -> None:
    lost = moving(V.LOST, reason=Why.HOST_AWAY())
    found = Sight({"h1": C.CREATING, "h2": C.RUNNING}, ended=NOW - 1.0).step(lost, ALLOCATED)
    assert found.what == (Event.FOUND, V.SETTLING, Why.RUNS_ON, None)
    assert [one.host for one in found.row.places] == ["h2", "h1"]


@pytest.mark.parametrize("left", [None, 33.0])
def test_a_lost_vm_that_was_to_wake_wakes_again(left: float | None) -> None:
    row = one(V.LOST, attempt=1, runs=True, left=left)
    found = Sight().step(row, ALLOCATED)
    assert found.what is not None and found.what[:3] == (Event.WAKE, V.WAKING, Why.RUNS_ON)
    assert (found.row.runs, found.row.left) == (True, left)


# --- coming up -----------------------------------------------------------------------------------------


def test_a_vm_that_exists_is_parked_and_takes_the_addresses_that_its_hypervisor_gave_it() -> None:
    seen = VmSeen(NAME, "h1", C.PARKED, address="10.1.0.5/16", mac="02:00:00:00:00:05")
    known = Sight({"h1": seen}).step(one(V.PLANNED))
    assert known.what == (Event.EXISTS, V.PARKED, None, None) and known.row.mac == "02:00:00:00:00:05"
    assert known.row.address == "10.9.1.1/16", "it had an address"


@pytest.mark.parametrize(("at", "late"), [(NOW, False), (NOW + 0.1, True)])
def test_a_node_has_its_time_to_register_from_the_start_or_from_when_its_user_is_known(at: float, late: bool) -> None:
    row, since = attempt(A.SPAWNING), NOW - POLICY.spawn_timeout
    world = Sight(began={"scheduler": at})
    stepped = world.step(one(V.STARTING, attempt=1, since=since), row)
    assert (stepped.what is not None) is late
    assert not late or stepped.what == (Event.FAILED, V.ENDING, Why.NOT_REGISTERED, Why.NOT_REGISTERED)


@pytest.mark.parametrize(
    ("how", "node", "joined"),
    [
        (C.RUNNING, N.IDLE, True),
        (C.RUNNING, N.BUSY, True),
        (C.RUNNING, N.JOINING, False),
        (C.RUNNING, None, False),
        (C.PARKED, N.IDLE, False),
        (C.PAUSED, N.IDLE, False),
    ],
)
def test_a_vm_has_joined_when_its_node_is_registered_and_its_guest_complete(
    how: VmCondition, node: NodeState | None, joined: bool
) -> None:
    stepped = Sight({"h1": how}, node=node).step(one(V.STARTING, attempt=1, since=NOW - 9.0), attempt(A.SPAWNING))
    assert stepped.what == ((Event.REGISTERED, V.JOINED, None, None) if joined else None)


@pytest.mark.parametrize("how", [C.RUNNING, C.PAUSED])
@pytest.mark.parametrize(
    ("node", "began", "expected"),
    [
        (N.DRAINED, SINCE + 0.1, Event.REGISTERED),
        (N.SILENT, SINCE + 0.1, Event.REGISTERED),
        (N.DOWN, SINCE + 0.1, Event.FAILED),
        (N.DRAINED, SINCE, Event.FAILED),
    ],
)
def test_a_vm_with_a_job_on_its_node_had_joined_unless_the_scheduler_gave_the_node_up(
    how: VmCondition, node: NodeState, began: float, expected: Event
) -> None:
    row = attempt(A.SPAWNING)
    world = Sight({"h1": how}, node=node, job=runs(row), began={"scheduler": began})
    stepped = world.step(one(V.STARTING, attempt=1), row)
    assert stepped.what is not None and stepped.what[0] is expected
    idle = Sight({"h1": how}, node=node, began={"scheduler": began}).step(one(V.STARTING, attempt=1), row)
    assert idle.what is not None and idle.what[:3] == (Event.FAILED, V.ENDING, Why.CAME_UP)


def test_a_parked_vm_starts_for_its_attempt_or_its_pool() -> None:
    started = (Event.START, V.STARTING, None, None)
    parked = Sight({"h1": C.PARKED})
    assert parked.step(one(V.PARKED, attempt=1), attempt(A.SPAWNING)).what == started
    assert parked.step(one(V.PARKED, attempt=1), attempt(A.CLAIMED)).what is None
    assert parked.step(one(V.PARKED, pool=Depth.JOINED)).what == started
    assert parked.step(one(V.PARKED, pool=Depth.PARKED)).what is None
    assert parked.step(one(V.PARKED, pool=Depth.JOINED, attempt=1), attempt(A.CLAIMED)).what is None, "no spare"


# --- its end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "node", "event"),
    [
        (attempt(A.RECLAIMING, outcome="done"), N.IDLE, Event.NODE_LEFT),
        (attempt(A.SPAWNING), N.IDLE, None),  # its job may start there
        (attempt(A.SPAWNING), N.DOWN, Event.NODE_LEFT),
    ],
)
@pytest.mark.parametrize("leaving", [V.REMOVING, V.RELEASING])
def test_a_vm_of_which_only_a_node_is_left_claims_nothing(
    row: Attempt, node: NodeState, event: Event | None, leaving: VmState
) -> None:
    stepped = Sight({"h1": GONE}, node=node, ended=SINCE + 1.0).step(one(leaving, attempt=1), row)
    assert (stepped.what[:3] if stepped.what else None) == ((event, V.DELETING, Why.NODE_LEFT) if event else None)
    assert stepped.freed == (["h1"] if event else [])
    early = Sight({"h1": GONE}, node=node, ended=SINCE + 1.0, began={"scheduler": SINCE + 1.0})
    assert early.step(one(leaving, attempt=1), row).what is None


@pytest.mark.parametrize("node", [None, N.DOWN])
@pytest.mark.parametrize(("kept", "claimed"), [("h1", True), ("", False)])
def test_a_vm_that_was_to_go_on_as_it_is_kept_in_memory_leaves_its_claim_to_the_saved_job(
    node: NodeState | None, kept: str, claimed: bool
) -> None:
    its_state = saved(SavedState.STORED, kept=kept)
    sight = Sight({"h1": GONE}, node=node, ended=SINCE + 1.0)
    stepped = sight.step(one(V.RELEASING, saved=its_state.name), its_state)
    assert stepped.what is not None and stepped.freed == ["h1"]
    assert stepped.made == ([Claim(its_state.key, "h1", Size(1, 256))] if claimed else [])


def test_the_node_of_a_spare_is_left_alone_while_a_job_is_tied_to_it() -> None:
    spare = one(V.REMOVING)
    node = Node(NAME, N.IDLE, ("tag",))

    def left(job: Job | None, shown: Node = node) -> bool:
        return Sight({"h1": GONE}, node=shown, job=job, ended=SINCE + 1.0).step(spare).what is not None

    waiting = attempt(A.QUEUED)
    tied = of(waiting, pinned=True)._replace(pinned="tag")
    assert left(None) and not left(tied) and left(tied._replace(pinned="other"))
    assert left(of(waiting)) and left(tied._replace(state=J.RUNNING))
    assert left(tied, Node(NAME, N.DOWN, ("tag",)))


@pytest.mark.parametrize(
    ("job", "began", "free"),
    [
        (None, SINCE + 1.1, True),
        (None, SINCE + 1.0, False),
        (of(ALLOCATED, J.COMPLETING), SINCE + 1.1, False),
        (of(ALLOCATED, J.PENDING), SINCE + 1.1, True),
        (of(ALLOCATED, J.RUNNING, nodes=(NAME,)), SINCE + 1.1, False),
    ],
)
def test_the_node_of_a_vm_that_ends_is_removed_once_no_job_needs_it(job: Job | None, began: float, free: bool) -> None:
    world = Sight({"h1": C.RUNNING}, node=N.DOWN, job=job, ended=SINCE + 1.0, began={"scheduler": began})
    stepped = world.step(one(V.ENDING, attempt=1), attempt(A.RECLAIMING, outcome="done"))
    assert stepped.what == ((Event.NODE_FREE, V.REMOVING, Why.NODE_FREE, None) if free else None)


@pytest.mark.parametrize(
    ("began", "ended", "node", "gone"),
    [
        (SINCE + 1.1, SINCE + 1.0, None, True),
        (SINCE + 1.0, SINCE + 1.0, None, False),
        (SINCE, None, None, False),
        (SINCE + 0.1, None, None, True),
        (NOW, None, N.DOWN, False),
    ],
)
def test_a_node_that_is_deleted_is_gone_once_it_is_not_shown_after_that(
    began: float, ended: float | None, node: NodeState | None, gone: bool
) -> None:
    world = Sight({"h1": GONE}, node=node, ended=ended, began={"scheduler": began})
    assert world.step(one(V.DELETING)).what == ((Event.ABSENT, V.GONE, None, None) if gone else None)
    assert Sight({"h1": GONE}, known=False).step(one(V.DELETING)).what is None


@pytest.mark.parametrize(
    ("before", "node", "began", "ended", "how", "may"),
    [
        (V.SERVING, N.IDLE, NOW, SINCE, C.RUNNING, False),  # it is not being ended
        (V.RELEASING, N.IDLE, NOW, SINCE, C.RUNNING, False),
        (V.ENDING, N.IDLE, NOW, SINCE, C.RUNNING, True),
        (V.REMOVING, N.BUSY, NOW, SINCE, GONE, True),
        (V.ENDING, N.DOWN, NOW, SINCE, C.RUNNING, False),
        (V.ENDING, N.DRAINED, SINCE + 0.1, SINCE, C.RUNNING, False),
        (V.ENDING, N.DOWN, SINCE, SINCE, C.RUNNING, True),  # it was DOWN before, and may be back
        (V.ENDING, N.SILENT, NOW, SINCE, C.RUNNING, True),
        (V.ENDING, N.SILENT, NOW, SINCE, GONE, False),
        (V.ENDING, N.JOINING, NOW, SINCE, GONE, False),
        (V.ENDING, None, NOW, SINCE, GONE, False),
        (V.ENDING, None, NOW, NOW, GONE, True),
        (V.ENDING, None, NOW, None, GONE, True),
    ],
)
def test_the_scheduler_may_start_a_job_on_a_vm_that_ends_until_its_node_or_itself_is_out_of_use(
    before: VmState, node: NodeState | None, began: float, ended: float | None, how: VmCondition | str, may: bool
) -> None:
    row = one(before)
    shown = Sight({"h1": how}, node=node, ended=ended, began={"scheduler": began})
    assert may_take_job(state(row, now=NOW), row, shown.world) is may
    assert not may_take_job(state(row, now=NOW), row, Sight({"h1": how}, known=False).world)


def test_a_job_is_on_a_node_unless_that_is_of_another_vm_of_the_name() -> None:
    row, busy = one(V.SERVING, token="abc"), runs(ALLOCATED)
    assert is_occupied(row, Sight(job=busy).world), "its node may be hidden"
    assert not is_occupied(row, Sight(job=of(ALLOCATED)).world)
    assert not is_occupied(row, Sight(job=busy, known=False).world)


# --- orphans -------------------------------------------------------------------------------------------


def test_what_becomes_of_an_orphan() -> None:
    orphan, waiting = one(V.ORPHAN), attempt(A.QUEUED)
    busy = of(waiting, J.RUNNING, nodes=(NAME,))
    died = (Event.DIED, V.ENDING, Why.VM_DIED, Why.VM_DIED)
    assert Sight({"h1": GONE}, began={"h1": SINCE}).step(orphan).what is None, "it was found in this observation"
    assert Sight({"h1": GONE}, began={"h1": SINCE + 0.1}).step(orphan).what == died
    assert Sight({"h1": C.DEAD}).step(orphan).what == died
    why = Sight({"h1": VmSeen(NAME, "h1", C.DEAD, "it broke")}).step(orphan)
    assert why.row.reason == said("it broke")
    assert Sight({"h1": AWAY}).step(orphan).what is None and Sight({}).step(orphan).what is None
    released = (Event.RELEASED, V.RELEASING, Why.NO_JOB_ON_IT, None)
    assert Sight(began={"scheduler": SINCE + 15.0}).step(orphan).what is None, "a job may take it still"
    assert Sight(began={"scheduler": SINCE + 15.1}).step(orphan).what == released
    assert Sight(known=False).step(orphan).what is None
    noted = Sight(job=busy, node=N.BUSY).step(orphan)
    assert noted.what == (Event.NOTED, V.ORPHAN, Why.JOB_ON_IT, None) and noted.row.job_id == "7"
    assert Sight(job=busy, node=N.BUSY).step(one(V.ORPHAN, job_id="7")).what is None
    for over in (J.PENDING, J.ENDED):
        assert Sight(job=busy._replace(state=over), node=N.BUSY).step(orphan).what is None
    elsewhere = busy._replace(nodes=("mvtest0-9",))
    assert Sight(job=elsewhere, node=N.BUSY).step(orphan).what is None
    asleep = Sight({"h1": C.ASLEEP}, job=busy, node=N.BUSY).step(orphan)
    assert asleep.what == (Event.DIED, V.ENDING, Why.FOUND_ASLEEP, Why.FOUND_ASLEEP)
    for other in (busy._replace(state=J.SUSPENDED), elsewhere):
        found = Sight({"h1": C.ASLEEP}, job=other, node=N.BUSY).step(one(V.ORPHAN, job_id="7"))
        assert found.what is None


# --- at rest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "shown", "rests"),
    [
        (one(V.SERVING), Sight(), True),
        (one(V.SERVING), Sight({"h1": C.PAUSED}), True),
        (one(V.SERVING), Sight({"h1": C.ASLEEP}), False),
        (one(V.SERVING), Sight({"h1": C.DEAD}), False),
        (one(V.SERVING), Sight({"h1": GONE}), False),
        (one(V.ASLEEP), Sight({"h1": C.ASLEEP}), True),
        (one(V.DELAYED), Sight({"h1": C.ASLEEP}), True),
        (one(V.ASLEEP), Sight(), False),
        (one(V.JOINED), Sight(), False),
        (one(V.SERVING, quarantined="it is odd"), Sight({"h1": C.DEAD}), True),
        (one(V.DELETING), Sight(node=N.DOWN), True),
        (one(V.DELETING), Sight(), False),
        (one(V.DELETING), Sight(known=False), True),
        (moving(), Sight({"h1": C.RUNNING, "h2": C.RUNNING}), False),
        (one(V.SERVING), Sight({}, silent={"h1": 0.0}), True),
        (one(V.SERVING), Sight({"h1": AWAY}), False),
        (one(V.LOST), Sight({"h1": AWAY}), True),
        (one(V.LOST), Sight({"h1": AWAY}, fenced=("h1",)), False),
        (moving(V.LOST), Sight({"h1": AWAY, "h2": AWAY}), False),
    ],
)
def test_a_vm_rests_where_neither_time_nor_an_equal_observation_moves_it(row: Vm, shown: Sight, rests: bool) -> None:
    hosts = [KnownHost(name, name, HostState.FENCED, id=9, version=1) for name in shown.fenced]
    assert vm_is_settled(state(row, *hosts, now=NOW), row, shown.world) is rests


@pytest.mark.parametrize(
    ("before", "began", "ended", "left"),
    [
        (V.ENDING, NOW, None, False),  # its destruction has not begun, as far as this controller knows
        (V.LOST, NOW, None, True),  # it has no effect
        (V.ENDING, SINCE + 1.0, SINCE + 1.0, False),
        (V.ENDING, SINCE + 1.1, SINCE + 1.0, True),
        (V.LOST, SINCE, None, False),
    ],
)
def test_a_vm_leaves_a_place_only_by_an_observation_after_its_effects(
    before: VmState, began: float, ended: float | None, left: bool
) -> None:
    sight = Sight({"h1": GONE, "h2": C.CREATING}, began={"h1": began}, ended=ended, known=False)
    assert sight.step(moving(before, attempt=None)).freed == (["h1"] if left else [])


def test_a_vm_goes_by_the_place_where_it_runs_and_one_that_ends_by_the_host_that_can_end_it() -> None:
    """Its hosts: one is out of sight, the other one shows it."""
    silent = Sight({"h2": C.RUNNING}, silent={"h1": 0.0}, ended=NOW - 1.0)
    assert silent.step(moving(V.SETTLING), ALLOCATED).what == (Event.MOVED, V.SETTLING, Why.GOES_ON, None)
    nowhere = Sight({"h2": C.CREATING}, silent={"h1": 0.0}, ended=NOW - 1.0)
    assert nowhere.step(moving(V.SETTLING), ALLOCATED).what == (Event.LOST, V.LOST, Why.HOST_AWAY, None)
    ending = moving(V.ENDING, attempt=None)
    assert Sight({"h2": C.CREATING}, silent={"h1": 0.0}, ended=NOW - 1.0).step(ending).what == (
        Event.NODE_FREE, V.REMOVING, Why.NODE_FREE, None,
    )  # fmt: skip
