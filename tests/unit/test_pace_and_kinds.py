"""How many spares pools want, what the controller remembers, the pace of clones, and the choice of their kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from multiverse.controller.learned import SMOOTHING, ForecastRecorder
from multiverse.core.capacity.room import every_host
from multiverse.core.clones.kinds import Choice, choose_kind
from multiverse.core.context import Context
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.job import AttemptState
from multiverse.core.model.reason import Why, text_of
from multiverse.core.model.vm import Template, TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Forecast, World
from multiverse.core.policy import ARRIVALS_FADE, Policy, Pool, wait_for
from multiverse.core.pools import wanted_of
from multiverse.core.transition import Change, Event, Move
from tests.unit import rows as hand
from tests.unit.planner_harness import POLICY

A, V, T = AttemptState, VmState, TemplateState
INSTANT, LINKED, FULL = CloneKind.INSTANT, CloneKind.LINKED, CloneKind.FULL
PARKED = Pool("slim", Depth.PARKED, 0, 10, Size(1, 100))
PARENT = ("h1", "slim", INSTANT)


def note(recorder: ForecastRecorder, row: object, event: Event, now: float) -> None:
    recorder.note([Move((Change(row, event),))], now)  # type: ignore[arg-type]


# --- how many are wanted ----------------------------------------------------------------------------


def test_a_pool_with_hardly_any_arrivals_keeps_its_minimum() -> None:
    assert [PARKED.wanted(rate, 1.0) for rate in (0.0, 0.01, 0.05, 0.06)] == [0, 0, 0, 1]


def test_a_pools_size_follows_the_arrivals_and_durations_of_its_own_image() -> None:
    seconds = {("slim", INSTANT): 4.0, ("slim", LINKED): 100.0, ("other", INSTANT): 100.0}
    world = World(forecast=Forecast(arrivals={"slim": 1.0, "other": 9.0}, seconds=seconds))
    assert wanted_of(Context(hand.state(), world, POLICY), PARKED) == 8, "4 while one is made, and 4 for chance"
    others = World(forecast=Forecast(arrivals={"other": 9.0}, seconds=seconds))
    assert wanted_of(Context(hand.state(), others, POLICY), PARKED) == 0


# --- what is remembered -----------------------------------------------------------------------------


def test_an_unmeasured_kind_is_slower_by_the_mean_of_the_others_and_an_unknown_kind_takes_no_time() -> None:
    assert replace(POLICY, seconds={}).takes("slim", FULL, Forecast()) == 0.0
    usual = replace(POLICY, seconds={INSTANT: 1.0, LINKED: 10.0, FULL: 20.0})
    seen = Forecast(seconds={("slim", INSTANT): 2.0, ("slim", LINKED): 40.0})
    assert usual.takes("slim", FULL, seen) == 60.0


def test_how_long_vms_take_is_a_moving_mean() -> None:
    recorder = ForecastRecorder(POLICY)
    for serial, began, joined in ((1, 0.0, 10.0), (2, 20.0, 40.0)):
        note(recorder, hand.vm(V.PLANNED, id=serial, attempt=1), Event.PLANNED, began)
        note(recorder, hand.vm(V.JOINED, id=serial, attempt=1), Event.REGISTERED, joined)
    assert recorder.forecast(40.0).seconds["slim", INSTANT] == pytest.approx(10.0 + SMOOTHING * 10.0)


def test_a_job_arrives_once_and_counts_for_a_while() -> None:
    recorder = ForecastRecorder(POLICY)
    note(recorder, hand.attempt(A.QUEUED), Event.SUBMITTED, 0.0)
    assert not recorder.forecast(0.0).arrivals, "it may be held, or wait for others of its array"
    note(recorder, hand.attempt(A.CLAIMED), Event.ADMITTED, 0.0)
    once = recorder.forecast(0.0).arrivals
    note(recorder, hand.attempt(A.CLAIMED), Event.REPLACED, 0.0)
    assert recorder.forecast(0.0).arrivals == once == {"slim": 1 / ARRIVALS_FADE}
    note(recorder, hand.attempt(A.SPAWNED, id=2), Event.TOOK, 0.0)
    assert recorder.forecast(0.0).arrivals == {"slim": 2 / ARRIVALS_FADE}
    assert "slim" in recorder.forecast(4 * ARRIVALS_FADE).arrivals, "faded to a fiftieth"


def test_a_pace_is_remembered_until_its_clones_are_paid_for() -> None:
    recorder = ForecastRecorder(replace(POLICY, rates={INSTANT: 0.25}))
    note(recorder, hand.vm(V.PLANNED), Event.PLANNED, 10.0)
    assert recorder.forecast(13.0).paced == {PARENT: 14.0} and recorder.forecast(15.0).paced == {}


# --- a pool's rest ----------------------------------------------------------------------------------


def spare(state: V, serial: int = 1, depth: Depth = Depth.PARKED, attempt: int | None = None) -> Vm:
    return hand.vm(state, id=serial, pool=depth, attempt=attempt)


def test_a_pool_rests_twice_as_long_after_a_second_failure() -> None:
    recorder = ForecastRecorder(POLICY)
    note(recorder, spare(V.RELEASING), Event.FAILED, 100.0)
    assert recorder.forecast(100.0).rest == {"slim": 100.0 + POLICY.backoff(1)}
    note(recorder, spare(V.RELEASING, 2), Event.DIED, 200.0)
    assert recorder.forecast(200.0).rest == {"slim": 200.0 + POLICY.backoff(2)}


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
    recorder = ForecastRecorder(POLICY)
    note(recorder, spare(V.RELEASING, 1, depth), Event.FAILED, 100.0)
    note(recorder, spare(state, 2, depth), event, 101.0)
    assert ("slim" in recorder.forecast(101.0).rest) is not rested


def test_the_death_of_a_spare_that_a_job_took_is_no_failure_of_the_pool() -> None:
    recorder = ForecastRecorder(POLICY)
    note(recorder, spare(V.RELEASING, attempt=1), Event.DIED, 100.0)
    assert recorder.forecast(100.0).rest == {}


# --- pace -------------------------------------------------------------------------------------------


def test_the_first_clone_waits_for_nothing_and_neither_does_a_kind_without_a_pace() -> None:
    assert wait_for(PARENT, {}, 0.0, replace(POLICY, rates={INSTANT: 0.25})) == 0.0
    assert wait_for(PARENT, {PARENT: 50.0}, 10.0, POLICY) == 0.0, "it had one when that was noted"


# --- kinds ------------------------------------------------------------------------------------------


def chosen(*templates: Template | None, spares: Iterable[Vm] = (), hosts: str = "instant linked",
           policy: Policy = POLICY, waiting: int = 0, **forecast: object) -> Choice:  # fmt: skip
    """The choice for a job that asks for no kind of clone. The time is 100."""
    seen = {vm.name: VmSeen(vm.name, vm.host, VmCondition.PARKED) for vm in spares}
    names = [f"h{n + 1}" for n in range(max(1, len(templates)))]
    here = {n: Host(n, Size(4, 4096, 65536), frozenset(hosts.split()), images=hand.IMAGES) for n in names}
    remembered = Forecast(**forecast)  # type: ignore[arg-type]
    world = hand.world_of(None, HypervisorView(here, seen, {}), 99.0, forecast=remembered)
    state = hand.state(*spares, *filter(None, templates), now=100.0)
    state.paced = dict(remembered.paced)
    state.waiting[PARENT] = waiting
    context = Context(state, world, replace(policy, kind=CloneKind.AUTO))
    forking = every_host(context, hand.template(T.READY).size, lambda _: bool(templates))
    return choose_kind(context, hand.attempt(A.QUEUED), forking)


def seconds(fork: float, boot: float) -> dict[tuple[str, CloneKind], float]:
    return {("slim", INSTANT): fork, ("slim", LINKED): boot}


POOLED = replace(POLICY, pools=(PARKED,))


def test_a_parked_spare_decides_only_if_this_job_can_take_it() -> None:
    assert chosen(None, spares=[spare(V.PARKED)], policy=POOLED) == Choice(INSTANT, Why.PARKED())
    others = [
        spare(V.PLANNED),
        hand.mapping(spare(V.PARKED, 2), image="other"),
        spare(V.PARKED, 3, Depth.JOINED),
        hand.mapping(spare(V.PARKED, 4), size=Size(2, 512)),
        hand.mapping(spare(V.PARKED, 5), account="other"),
        replace(spare(V.PARKED, 6), since=100.0 - PARKED.max_age - 1),
    ]
    for some in ([], *([one] for one in others), others):
        assert chosen(None, spares=some, policy=POOLED) == chosen(None), some
    assert chosen(None, spares=[spare(V.PARKED)]) == chosen(None), "no pool of the settings wants it any more"
    assert chosen(spares=[spare(V.PARKED)], policy=POOLED) == Choice(LINKED, Why.IMAGE_NOT_FORKED())


def test_a_clone_waits_for_those_before_it_that_wait_for_the_same_pace() -> None:
    ready, pace = hand.template(T.READY), replace(POLICY, rates={INSTANT: 2.0})
    choices = [chosen(ready, policy=pace, waiting=count, seconds=seconds(1.0, 5.0)) for count in (7, 8, 9)]
    assert [choice.kind for choice in choices] == [INSTANT, INSTANT, LINKED]
    assert text_of(choices[2].why) == "clones queued on its template take 4.5 s more, a boot 5.0 s"


def test_the_choice_of_a_kind_says_why() -> None:
    assert chosen(None, hosts="instant full") == Choice(INSTANT, Why.NONE_BOOTS())
    ready = hand.template(T.READY)
    waits = replace(POLICY, rates={INSTANT: 0.5})
    assert chosen(ready, policy=waits, paced={PARENT: 102.0}, seconds=seconds(1.0, 9.0)) == Choice(
        INSTANT, Why.FORK_SOONER(fork=3.0, boot=9.0)
    )
    assert chosen(None) == Choice(LINKED, Why.RARE())


def test_where_both_kinds_take_as_long_a_ready_template_is_used_and_a_building_one_is_not() -> None:
    assert chosen(hand.template(T.READY), seconds=seconds(5.0, 5.0)).kind is INSTANT
    policy = replace(POLICY, template_seconds=4.0)
    building = hand.template(T.BUILDING, since=100.0)
    assert chosen(building, policy=policy, seconds=seconds(1.0, 5.0)).kind is LINKED
    assert chosen(building, policy=policy, seconds=seconds(1.0, 5.5)).kind is INSTANT


def test_a_template_that_is_overdue_is_expected_to_take_as_long_again() -> None:
    on_time, late = (hand.template(T.BUILDING, since=100.0 - POLICY.template_seconds - late) for late in (0, 4))
    assert chosen(on_time, seconds=seconds(1.5, 5.0)) == Choice(INSTANT, Why.TEMPLATE_SOONER(wait=0.0, boot=5.0))
    assert chosen(late, seconds=seconds(1.5, 5.0)) == Choice(LINKED, Why.BOOT_SOONER(wait=4.0, boot=5.0))


def test_a_retiring_template_does_not_count_as_being_built() -> None:
    retiring = hand.template(T.RETIRING, since=99.0)
    assert text_of(chosen(retiring).why) == "no other job wants this image of late: not worth a template"
    assert chosen(retiring, arrivals={"slim": 1.0}) == chosen(None, arrivals={"slim": 1.0})


@pytest.mark.parametrize(("arrived", "worth"), [(0.0, False), (0.9, False), (1.0, True), (1.5, True)])
def test_one_other_recent_job_makes_a_template_worth_building(arrived: float, worth: bool) -> None:
    assert chosen(None, arrivals={"slim": arrived / ARRIVALS_FADE}).prepare is worth
