"""Evictions as operators and users see them: counted, held back by a limit, and of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multiverse.config import RebalanceSettings, Settings
from multiverse.controller.policy import policy_of
from multiverse.core.context import Context
from multiverse.core.explanation import is_being_evicted
from multiverse.core.model.eviction import CAUSES, LIMITS, Method, Step, cause_of
from multiverse.core.model.host import Drain
from multiverse.core.model.job import Attempt, AttemptState, Eviction
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import VmCondition, VmState
from multiverse.core.rebalance.plan import proposals
from multiverse.core.state import State
from multiverse.core.transition import Change, Command, Event, Move
from multiverse.service import alerts, metrics
from multiverse.service.convert import job_evictions
from multiverse.service.explanations import OPERATOR, Viewer
from multiverse.service.hosts import eviction_view
from multiverse.service.statistics import EVICTION_STEP, EVICTIONS_KEPT, Statistics
from tests.unit.rows import attempt, saved, vm
from tests.unit.rows import state as state_of
from tests.unit.test_moving import order, ready
from tests.unit.test_places import Site

A, S, V = AttemptState, SavedState, VmState
DRAINED = Why.HOST_DRAINED(host="h1")
URGENT = Why.PREEMPTED(job="12", by="high")


def test_each_method_has_a_reason_and_each_limit_a_setting() -> None:
    assert set(CAUSES.values()) == {*Method, "operator"}
    assert set(LIMITS.values()) <= vars(RebalanceSettings()).keys()
    assert [cause_of(why) for why in (DRAINED, URGENT, Why.OPERATOR(), Why.SAVE_ASKED(), Why.SAVE_AT_LIMIT())] == [
        "drain", "preemption", "operator", "", "",
    ]  # fmt: skip


# --- counted ----------------------------------------------------------------------------------------


def committed(statistics: Statistics, now: float, *changes: Change) -> None:
    statistics.moved([Move(changes)], now)


def begin_move(statistics: Statistics, why: Reason, now: float = 0.0, id: int = 1) -> None:
    committed(statistics, now, Change(vm(V.MOVING, id=id), Event.MOVE, Why.MOVES(why, hosts=["h1", "h2"])))


def begin_save(statistics: Statistics, asked: Reason, now: float = 0.0) -> None:
    committed(statistics, now, Change(saved(S.PREPARING, asked=asked), Event.ASKED, asked))


def test_evictions_are_counted_by_way_and_cause() -> None:
    statistics = Statistics()
    for number, why in enumerate((DRAINED, DRAINED, Why.OPERATOR())):
        begin_move(statistics, why, id=number)
    begin_save(statistics, URGENT)
    assert statistics.evictions.begun == {("move", "drain"): 2, ("move", "operator"): 1, ("save", "preemption"): 1}


@pytest.mark.parametrize("asked", [Why.SAVE_ASKED(), Why.SAVE_AT_LIMIT()])
def test_what_a_user_wished_is_no_eviction(asked: Reason) -> None:
    statistics = Statistics()
    begin_save(statistics, asked)
    committed(statistics, 1.0, Change(saved(S.UNDOING, asked=asked), Event.ABANDONED, Why.SAVE_LATE(limit=9.0)))
    assert not statistics.evictions.begun and not statistics.evictions.failed


@pytest.mark.parametrize(
    ("state", "event", "failed"),
    [
        (V.SETTLING, Event.STAYED, 1),
        (V.SETTLING, Event.MOVED, 0),
        (V.LOST, Event.LOST, 1),
        (V.ENDING, Event.RELEASED, 0),
    ],
)
def test_a_move_fails_once_unless_the_vm_goes_on_there_or_its_job_is_over(
    state: VmState, event: Event, failed: int
) -> None:
    statistics = Statistics()
    begin_move(statistics, DRAINED)
    committed(statistics, 1.0, Change(vm(state), event))
    committed(statistics, 2.0, Change(vm(V.SERVING), Event.STAYED))
    assert statistics.evictions.failed == ({("move", "drain"): 1} if failed else {})


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        (Change(saved(S.STORED), Event.STORED), 0),
        (Change(saved(S.UNDOING), Event.ABANDONED, Why.SAVE_LATE(limit=9.0)), 1),
        (Change(saved(S.KEEPING), Event.UNWRITTEN), 1),
        (Change(saved(S.DISCARDING), Event.ABANDONED, Why.SAVED_JOB_OVER(job="7")), 0),
    ],
)
def test_a_save_fails_if_the_job_stays_though_it_is_not_over(end: Change, failed: int) -> None:
    statistics = Statistics()
    begin_save(statistics, URGENT)
    for state, event in ((S.FREEZING, Event.READY), (S.CUTTING, Event.FROZEN)):
        committed(statistics, 1.0, Change(saved(state), event))
    committed(statistics, 2.0, end)
    assert statistics.evictions.failed == ({("save", "preemption"): 1} if failed else {})


def test_the_page_gets_those_of_the_last_hours_only() -> None:
    statistics = Statistics()
    begin_move(statistics, DRAINED, 0.0)
    committed(statistics, 1.0, Change(vm(V.SETTLING), Event.STAYED))
    begin_move(statistics, DRAINED, 2 * EVICTION_STEP)
    (one,) = statistics.evictions.lately(2 * EVICTION_STEP + 1)
    assert (one.way, one.cause, one.begun[-3:], one.failed) == ("move", "drain", (1, 0, 1), 1)
    assert len(one.begun) == EVICTIONS_KEPT
    (later,) = statistics.evictions.lately((EVICTIONS_KEPT + 1) * EVICTION_STEP)
    assert (sum(later.begun), later.failed) == (1, 0)
    assert not statistics.evictions.lately((EVICTIONS_KEPT + 2) * EVICTION_STEP)


# --- held back --------------------------------------------------------------------------------------


@pytest.fixture
def held() -> Site:
    """Job 7 was moved to h2, which is to be emptied, and may not be evicted again in this hour."""
    site = ready()
    site.policy = replace(site.policy, evict_per_job=1, evict_alert=100.0)
    order(site)
    site.there = {"h2": VmCondition.RUNNING}
    site.act()
    site.run()
    assert (site.vm.state, site.vm.host) == (V.SERVING, "h2")
    site.pass_time(site.policy.move_again + 1)
    site.run(Command("drain", "h2", drain=Drain(moves=True)))
    return site


def steps(site: Site) -> list[Step]:
    return [step for found in site.state.held_back.values() for step in found]


def alerts_of(site: Site) -> list[tuple[str, str, str, tuple[str, ...], str]]:
    found = list(alerts.evictions_held_back(steps(site), site.policy, site.clock.time))
    return [(one.kind, one.name, one.message, one.jobs, alerts.command_of(one)) for one in found]


def test_what_a_limit_holds_back_is_known_with_since_when(held: Site) -> None:
    began = held.clock.time
    held.pass_time(50.0)
    held.run()
    (step,) = steps(held)
    assert held.vm.state is V.SERVING and step.held is not None and step.held.kind is Why.EVICTED_OFTEN
    view = eviction_view(step, epoch=1000.0)
    assert (view.job_id, view.host, view.target, view.held_since) == ("7", "h2", "h1", round(1000.0 + began, 1))
    assert "once in the last hour" in view.held
    assert proposals(Context(held.state, held.world, held.policy, held.state.free.hosts)) == [step]


def test_what_is_not_held_back_any_more_is_forgotten(held: Site) -> None:
    held.run(Command("resume", "h2"))
    assert steps(held) == []
    held.pass_time(150.0)
    held.run(Command("drain", "h2", drain=Drain(moves=True)))
    assert [step.held_since for step in steps(held)] == [held.clock.time] and not alerts_of(held)


def test_a_limit_that_holds_something_up_for_long_is_an_alert_with_the_next_step(held: Site) -> None:
    held.pass_time(90.0)
    held.run()
    assert alerts_of(held) == []
    held.pass_time(30.0)
    held.run()
    ((kind, name, message, jobs, command),) = alerts_of(held)
    assert (kind, name, jobs, command) == ("eviction", "per_job-h2", ("7",), "multiverse rebalance --dry-run")
    assert message.startswith("host h2 is not emptied: for 2 min a limit has held back the eviction of job 7: it was")


def test_an_alert_names_the_urgent_job_that_gets_no_room_once_for_all_that_are_held_back() -> None:
    limit = Why.EVICTIONS_AT_ONCE(limit=2)
    running = [(attempt(A.ALLOCATED, id=n, job=str(n)), vm(V.SERVING, id=n)) for n in (3, 4)]
    many = [Step(Method.PREEMPTION, *one, "", URGENT, 256, limit, 5.0) for one in running]
    (one,) = alerts.evictions_held_back(many, policy_of(Settings()), 606.0)
    assert one.name == "at_once-12" and one.jobs == ("3", "4")
    assert one.message.startswith("job 12 gets no room: for 10 min a limit has held back the eviction of job 3, 4: as")
    assert not list(alerts.evictions_held_back(many, policy_of(Settings()), 604.0)), "ten minutes, unless it is set"


def test_prometheus_gets_what_has_begun_has_failed_and_is_held_back(held: Site) -> None:
    statistics = Statistics()
    begin_move(statistics, DRAINED)
    committed(statistics, 1.0, Change(vm(V.SETTLING), Event.STAYED))
    text = metrics.text(metrics.of_evictions(statistics, steps(held))).decode()
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    assert [(one.name, one.labels, one.value) for one in samples if not one.name.endswith("_created")] == [
        ("multiverse_evictions_total", {"way": "move", "cause": "drain"}, 1),
        ("multiverse_evictions_failed_total", {"way": "move", "cause": "drain"}, 1),
        ("multiverse_evictions_held", {"limit": "at_once"}, 0),
        ("multiverse_evictions_held", {"limit": "bandwidth"}, 0),
        ("multiverse_evictions_held", {"limit": "per_job"}, 1),
    ]


# --- of a job ---------------------------------------------------------------------------------------

EVICTIONS = (Eviction(100.0, "save", "h1", URGENT, 512, 33.33), Eviction(900.0, "move", "h2", DRAINED, 512))


def evicted(state: AttemptState = A.ALLOCATED, *evictions: Eviction) -> Attempt:
    return attempt(state, evictions=evictions or EVICTIONS)


def test_a_job_s_evictions_tell_what_each_cost_and_whether_the_last_one_goes_on() -> None:
    first, last = job_evictions(evicted(), True)
    assert (first.way, first.host, first.memory, first.took, first.under_way) == ("save", "h1", 512, 33.3, False)
    assert first.reason == "job 12 (high) takes its place"
    assert (last.way, last.took, last.under_way) == ("move", None, True)


@pytest.mark.parametrize(
    ("viewer", "hosts", "reasons"),
    [
        (OPERATOR, ["h1", "h2"], ["job 12 (high) takes its place", "host h1 is drained"]),
        (
            Viewer(1000, others=False, hosts=True),
            ["h1", "h2"],
            ["another job (high) takes its place", "host h1 is drained"],
        ),
        (
            Viewer(1000, others=False, hosts=False),
            ["", ""],
            ["another job (high) takes its place", "a host is drained"],
        ),
    ],
)
def test_a_user_is_told_of_other_jobs_and_of_hosts_what_they_are_told_elsewhere(
    viewer: Viewer, hosts: list[str], reasons: list[str]
) -> None:
    found = job_evictions(evicted(), False, viewer.teller("7"), hosts=viewer.hosts)
    assert [one.host for one in found] == hosts and [one.reason for one in found] == reasons


def known(one: Attempt, *more: object) -> State:
    return state_of(one, *more)  # type: ignore[arg-type]


def test_an_eviction_goes_on_while_its_vm_moves_or_its_state_is_there() -> None:
    moves, saves = evicted(), evicted(A.QUEUED, Eviction(1.0, "save", "h1", URGENT, 512))
    moving = vm(V.MOVING, attempt=1)
    ends = evicted(A.WARNED, Eviction(1.0, "cancel", "h1", URGENT, 0))
    for one, row, expected in (
        (moves, moving, True),
        (moves, replace(moving, state=V.SERVING), False),
        (moves, saved(S.STORED), False),
        (saves, saved(S.STORED), True),
        (saves, saved(S.STORED, checkpoint=True), False),
        (evicted(A.ALLOCATED, EVICTIONS[0]), moving, False),
        (ends, moving, True),
        (replace(ends, state=A.RECLAIMING, outcome="done"), moving, False),
    ):
        assert is_being_evicted(known(one, row), one) is expected
