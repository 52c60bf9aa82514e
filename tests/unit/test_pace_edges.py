"""Paces, rests and the choice of a kind at their edges: what mutation testing found that no other test would have
noticed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from multiverse.core.provisioning.forecast import ARRIVALS_FADE, SMOOTHING, ForecastRecorder

from multiverse.core.machines.tables import TABLES
from multiverse.core.model import (
    AttemptState,
    CloneKind,
    Depth,
    Forecast,
    Host,
    HypervisorView,
    Seen,
    Size,
    Template,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
    World,
)
from multiverse.core.policy import Policy, Pool
from multiverse.core.provisioning.clones import Choice, choose
from multiverse.core.provisioning.pacing import wait_for
from multiverse.core.provisioning.pools import wanted_of
from multiverse.core.state import Rows, State
from multiverse.core.transition import Change, Event, Move
from tests.unit import rows as hand
from tests.unit.planner_harness import POLICY

A, V, T = AttemptState, VmState, TemplateState
INSTANT, LINKED, FULL = CloneKind.INSTANT, CloneKind.LINKED, CloneKind.FULL
PARKED = Pool("slim", Depth.PARKED, 0, 10, Size(1, 100))
PARENT = ("h1", "slim", INSTANT)


def note(meter: ForecastRecorder, row: object, event: Event, now: float) -> None:
    meter.note([Move((Change(row, event),))], now)  # type: ignore[arg-type]


# --- how many are wanted ----------------------------------------------------------------------------


def test_hardly_any_arrivals_want_nothing_beyond_the_least() -> None:
    assert [PARKED.wanted(rate, 1.0) for rate in (0.0, 0.01, 0.05, 0.06)] == [0, 0, 0, 1]


def test_a_pool_goes_by_the_arrivals_and_the_forks_of_its_own_image() -> None:
    seconds = {("slim", INSTANT): 4.0, ("slim", LINKED): 100.0, ("other", INSTANT): 100.0}
    world = World(forecast=Forecast(arrivals={"slim": 1.0, "other": 9.0}, seconds=seconds))
    assert wanted_of(PARKED, world, POLICY) == 8, "4 while one is made, and 4 for chance"
    others = World(forecast=Forecast(arrivals={"other": 9.0}, seconds=seconds))
    assert wanted_of(PARKED, others, POLICY) == 0


# --- what is remembered -----------------------------------------------------------------------------


def test_a_kind_that_nobody_knows_takes_no_time_and_one_not_seen_is_slower_by_the_mean_of_the_others() -> None:
    assert replace(POLICY, seconds={}).takes("slim", FULL, Forecast()) == 0.0
    usual = replace(POLICY, seconds={INSTANT: 1.0, LINKED: 10.0, FULL: 20.0})
    seen = Forecast(seconds={("slim", INSTANT): 2.0, ("slim", LINKED): 40.0})
    assert usual.takes("slim", FULL, seen) == 60.0


def test_how_long_vms_take_is_a_moving_mean() -> None:
    meter = ForecastRecorder(POLICY)
    for serial, began, joined in ((1, 0.0, 10.0), (2, 20.0, 40.0)):
        note(meter, hand.vm(V.PLANNED, id=serial, attempt=1), Event.PLANNED, began)
        note(meter, hand.vm(V.JOINED, id=serial, attempt=1), Event.REGISTERED, joined)
    assert meter.forecast(40.0).seconds["slim", INSTANT] == pytest.approx(10.0 + SMOOTHING * 10.0)


def test_a_job_arrives_once_and_counts_for_a_while() -> None:
    meter = ForecastRecorder(POLICY)
    note(meter, hand.attempt(A.QUEUED), Event.SUBMITTED, 0.0)
    assert not meter.forecast(0.0).arrivals, "it may be held, or wait for others of its array"
    note(meter, hand.attempt(A.CLAIMED), Event.ADMITTED, 0.0)
    once = meter.forecast(0.0).arrivals
    note(meter, hand.attempt(A.CLAIMED), Event.REPLACED, 0.0)
    assert meter.forecast(0.0).arrivals == once == {"slim": 1 / ARRIVALS_FADE}
    note(meter, hand.attempt(A.SPAWNED, id=2), Event.TOOK, 0.0)
    assert meter.forecast(0.0).arrivals == {"slim": 2 / ARRIVALS_FADE}
    assert "slim" in meter.forecast(4 * ARRIVALS_FADE).arrivals, "faded to a fiftieth"


def test_what_the_pace_has_given_out_is_remembered_until_it_is_paid_for() -> None:
    meter = ForecastRecorder(replace(POLICY, rates={INSTANT: 0.25}))
    note(meter, hand.vm(V.PLANNED), Event.PLANNED, 10.0)
    assert meter.forecast(13.0).paced == {PARENT: 14.0} and meter.forecast(15.0).paced == {}


# --- a pool's rest ----------------------------------------------------------------------------------


def spare(state: V, serial: int = 1, depth: Depth = Depth.PARKED, attempt: int | None = None) -> Vm:
    return hand.vm(state, id=serial, pool=depth, attempt=attempt)


def test_a_pool_rests_twice_as_long_after_a_second_failure() -> None:
    meter = ForecastRecorder(POLICY)
    note(meter, spare(V.RELEASING), Event.FAILED, 100.0)
    assert meter.forecast(100.0).rest == {"slim": 100.0 + POLICY.backoff(1)}
    note(meter, spare(V.RELEASING, 2), Event.DIED, 200.0)
    assert meter.forecast(200.0).rest == {"slim": 200.0 + POLICY.backoff(2)}


@pytest.mark.parametrize(
    ("depth", "state", "event", "rested"),
    [
        (Depth.PARKED, V.PARKED, Event.EXISTS, True),
        (Depth.JOINED, V.PARKED, Event.EXISTS, False),
        (Depth.JOINED, V.STARTING, Event.START, False),
        (Depth.JOINED, V.JOINED, Event.REGISTERED, True),
    ],
)
def test_a_rest_is_over_when_a_spare_has_come_as_far_as_its_pool(
    depth: Depth, state: V, event: Event, rested: bool
) -> None:
    meter = ForecastRecorder(POLICY)
    note(meter, spare(V.RELEASING, 1, depth), Event.FAILED, 100.0)
    note(meter, spare(state, 2, depth), event, 101.0)
    assert ("slim" in meter.forecast(101.0).rest) is not rested


def test_a_vm_that_a_job_has_taken_is_no_failure_of_the_pool() -> None:
    meter = ForecastRecorder(POLICY)
    note(meter, spare(V.RELEASING, attempt=1), Event.DIED, 100.0)
    assert meter.forecast(100.0).rest == {}


# --- pace -------------------------------------------------------------------------------------------


def test_the_first_clone_waits_for_nothing_and_neither_does_a_kind_without_a_pace() -> None:
    assert wait_for(PARENT, {}, 0.0, replace(POLICY, rates={INSTANT: 0.25})) == 0.0
    assert wait_for(PARENT, {PARENT: 50.0}, 10.0, POLICY) == 0.0, "it had one when that was noted"


# --- kinds ------------------------------------------------------------------------------------------


def chosen(*templates: Template | None, spares: Iterable[Vm] = (), hosts: str = "instant linked",
           policy: Policy = POLICY, waiting: int = 0, **forecast: object) -> Choice:  # fmt: skip
    """For a job that leaves the kind to us, now being 100."""
    seen = {vm.name: VmSeen(vm.name, vm.host, VmCondition.PARKED) for vm in spares}
    world = World(
        hypervisor=Seen(HypervisorView({}, seen, {}), 99.0),
        forecast=Forecast(**forecast),  # type: ignore[arg-type]
    )
    draft = State(Rows("test0", vms={vm.id: vm for vm in spares}), 100.0, TABLES, world.forecast.paced)
    draft.waiting[PARENT] = waiting
    found = {hand.template(T.READY, id=n + 1, host=f"h{n + 1}").which: row for n, row in enumerate(templates)}
    here = {"h1": Host("h1", Size(4, 4096, 65536), frozenset(hosts.split()), images=hand.IMAGES)}
    return choose(draft, hand.attempt(A.QUEUED), found, here, world, replace(policy, kind=CloneKind.AUTO))


def seconds(fork: float, boot: float) -> dict[tuple[str, CloneKind], float]:
    return {("slim", INSTANT): fork, ("slim", LINKED): boot}


POOLED = replace(POLICY, pools=(PARKED,))


def test_what_is_parked_decides_only_if_this_job_can_have_it() -> None:
    assert chosen(None, spares=[spare(V.PARKED)], policy=POOLED) == Choice(INSTANT, "one is parked")
    others = [
        spare(V.PLANNED),
        replace(spare(V.PARKED, 2), image="other"),
        spare(V.PARKED, 3, Depth.JOINED),
        replace(spare(V.PARKED, 4), template_size=Size(2, 512)),
        replace(spare(V.PARKED, 5), account="other"),
        replace(spare(V.PARKED, 6), since=100.0 - PARKED.max_age - 1),
    ]
    for some in ([], *([one] for one in others), others):
        assert chosen(None, spares=some, policy=POOLED) == chosen(None), some
    assert chosen(None, spares=[spare(V.PARKED)]) == chosen(None), "no pool of the settings wants it any more"
    assert chosen(spares=[spare(V.PARKED)], policy=POOLED) == Choice(LINKED, "no host can fork its image")


def test_a_clone_waits_for_those_before_it_that_wait_for_the_same_pace() -> None:
    ready, pace = hand.template(T.READY), replace(POLICY, rates={INSTANT: 2.0})
    told = [chosen(ready, policy=pace, waiting=count, seconds=seconds(1.0, 5.0)) for count in (7, 8, 9)]
    assert [choice.kind for choice in told] == [INSTANT, INSTANT, LINKED]
    assert told[2].why == "clones queued on its template take 4.5 s more, a boot 5.0 s"


def test_a_user_is_told_why_his_vms_are_what_they_are() -> None:
    assert chosen(None, hosts="instant full") == Choice(INSTANT, "no host boots clones")
    ready = hand.template(T.READY)
    waits = replace(POLICY, rates={INSTANT: 0.5})
    assert chosen(ready, policy=waits, paced={PARENT: 102.0}, seconds=seconds(1.0, 9.0)) == Choice(
        INSTANT, "its template is ready: 3.0 s, a boot 9.0 s"
    )
    assert chosen(None) == Choice(LINKED, "no other job wants this image of late: not worth a template")


def test_of_two_that_take_as_long_a_ready_template_wins_and_one_in_the_making_loses() -> None:
    assert chosen(hand.template(T.READY), seconds=seconds(5.0, 5.0)).kind is INSTANT
    policy = replace(POLICY, template_seconds=4.0)
    building = hand.template(T.BUILDING, since=100.0)
    assert chosen(building, policy=policy, seconds=seconds(1.0, 5.0)).kind is LINKED
    assert chosen(building, policy=policy, seconds=seconds(1.0, 5.5)).kind is INSTANT


def test_a_template_that_is_overdue_is_expected_to_take_as_long_again() -> None:
    on_time, late = (hand.template(T.BUILDING, since=100.0 - POLICY.template_seconds - late) for late in (0, 4))
    assert chosen(on_time, seconds=seconds(1.5, 5.0)) == Choice(
        INSTANT, "its template is ready in 0 s, sooner than a boot of 5.0 s"
    )
    assert chosen(late, seconds=seconds(1.5, 5.0)) == Choice(LINKED, "a boot takes 5.0 s, its template 4 s more")


def test_a_template_on_its_way_out_is_none_in_the_making() -> None:
    retiring = hand.template(T.RETIRING, since=99.0)
    assert chosen(retiring).why == "no other job wants this image of late: not worth a template"
    assert chosen(retiring, arrivals={"slim": 1.0}) == chosen(None, arrivals={"slim": 1.0})


@pytest.mark.parametrize(("arrived", "worth"), [(0.0, False), (0.9, False), (1.0, True), (1.5, True)])
def test_one_other_job_of_late_makes_a_template_worth_while(arrived: float, worth: bool) -> None:
    assert chosen(None, arrivals={"slim": arrived / ARRIVALS_FADE}).prepare is worth
