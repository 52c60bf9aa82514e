"""What differs between two observations, and which rows that concerns."""

from __future__ import annotations

from dataclasses import replace
from operator import ne

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.changes import changed, mark_changes
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView, KnownHost
from multiverse.core.model.job import AttemptState, Job, JobRef, JobState, Request, SchedulerView
from multiverse.core.model.vm import VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.state import State
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE, attempt, state, vm

A, V = AttemptState, VmState
NOW = 1000.0
H1 = Host("h1", Size(4, 4096, 65536))
MAPS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2).map(lambda n: (n,)))


@given(MAPS, MAPS)
def test_the_keys_that_differ_are_found(before: dict[str, tuple[int]], after: dict[str, tuple[int]]) -> None:
    found = changed(before, after, ne)
    assert set(found) == {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert len(found) == len(set(found))


@given(MAPS)
def test_equal_observations_in_any_order_do_not_differ(before: dict[str, tuple[int]]) -> None:
    assert changed(before, dict(before), ne) == []
    assert changed(before, {key: (*before[key],) for key in reversed(before)}, ne) == []


def world(
    jobs: tuple[Job, ...] = (), vms: tuple[VmSeen, ...] = (), hosts: tuple[Host, ...] = (H1,), *, began: float = NOW,
    known: bool = True, since: float = 0.0,
) -> World:  # fmt: skip
    view = HypervisorView({host.name: host for host in hosts}, {one.name: one for one in vms})
    seen = Seen(view, began) if known else None
    scheduler = Seen(SchedulerView({job.ref.job_id: job for job in jobs}), began)
    return World(scheduler=scheduler, sources={SOURCE: Observation(seen, since)})


def job(number: int, **more: object) -> Job:
    fresh = Job(JobRef(str(number), 500), "hello", 1000, JobState.PENDING, Request(1, Size(1, 100)), rank=number)
    return fresh._replace(**more)  # type: ignore[arg-type]


def settled(*worlds: World) -> State:
    """Two attempts with a VM each, on two hosts, that have been looked at with these observations."""
    here = state(
        attempt(A.ALLOCATED, id=1, job="1"), vm(V.SERVING, id=1, attempt=1),
        attempt(A.ALLOCATED, id=2, job="2"), vm(V.SERVING, id=2, attempt=2, host="h2", source="other"),
        known=["h1"], now=NOW,
    )  # fmt: skip
    for one in worlds:
        mark_changes(here, one, POLICY)
    here.dirty.attempts.clear()
    here.dirty.vms.clear()
    here.unserved.clear()
    return here


def marked(here: State, seen: World) -> tuple[set[int], set[int], set[str]]:
    mark_changes(here, seen, POLICY)
    return here.dirty.attempts, here.dirty.vms, here.unserved


def running(name: str = "mvtest0-1", **more: object) -> VmSeen:
    return replace(VmSeen(name, "h1", VmCondition.RUNNING), **more)  # type: ignore[arg-type]


def test_a_job_that_changes_marks_its_attempt_and_vms_and_may_need_an_attempt() -> None:
    here = settled(world((job(1), job(2))))
    assert marked(here, world((job(1), job(2)), began=NOW + 1)) == (set(), set(), set())
    assert marked(here, world((job(1, name="other"), job(2)))) == ({1}, {1}, {"1"})


def test_an_attempt_that_is_newer_than_the_reading_of_its_job_waits_for_a_later_one() -> None:
    here = settled(world((job(1), job(2))))
    here.dirty.unread = {1, 2, 99}  # 99 has ended since
    here.attempts[2] = replace(here.attempts[2], since=NOW + 5)
    assert marked(here, world((job(1), job(2)), began=NOW + 1))[0] == {1}
    assert here.dirty.unread == {2}
    assert marked(here, world((job(1), job(2)), began=NOW + 5))[0] == {1, 2}
    assert not here.dirty.unread


def test_a_later_look_that_shows_the_same_object_marks_nothing() -> None:
    first = world(vms=(running(),))
    here, view = settled(first), first.views[SOURCE]
    here.compared.unadopted.clear()
    for again, anew in ((view, set()), (replace(view), {SOURCE})):
        mark_changes(here, World(sources={SOURCE: Observation(Seen(again, NOW + 1))}), POLICY)
        assert here.compared.unadopted == anew


@pytest.mark.parametrize("jobs", [(job(1),), (job(1), job(2), job(3))])
def test_a_job_that_comes_or_goes_is_a_change(jobs: tuple[Job, ...]) -> None:
    here = settled(world((job(1), job(2))))
    _, _, unserved = marked(here, world(jobs))
    assert unserved == ({"2"} if len(jobs) == 1 else {"3"})


@pytest.mark.parametrize(
    ("change", "marks"),
    [
        ({"cpu_s": 99.0}, False), ({"private": 50.0, "shared": 1.0}, False), ({"condition": VmCondition.DEAD}, True),
        ({"token": "another"}, True), ({"users_added": (1000,)}, True), ({"host": "h2"}, True),
    ],
)  # fmt: skip
def test_a_vm_is_marked_by_what_moves_it_and_not_by_what_it_uses(change: dict[str, object], marks: bool) -> None:
    here = settled(world(vms=(running(),)))
    assert marked(here, world(vms=(running(**change),)))[:2] == (({1}, {1}) if marks else (set(), set()))


def test_a_vm_that_is_shown_no_more_is_marked() -> None:
    here = settled(world(vms=(running(), running("mvtest0-77"))))
    assert marked(here, world())[:2] == ({1}, {1})


def test_a_source_that_turns_unknown_known_or_silent_marks_its_own_vms_once() -> None:
    here = settled(world(vms=(running(),)))
    unknown = world(known=False, since=NOW)
    assert marked(here, unknown)[1] == {1}
    for elapsed, marks in ((POLICY.silence, False), (POLICY.silence + 1, True), (POLICY.silence + 2, False)):
        here.dirty.vms.clear()
        here.now = NOW + elapsed
        assert bool(marked(here, world(known=False, since=NOW))[1]) is marks, elapsed
    here.dirty.vms.clear()
    assert marked(here, world(vms=(running(),)))[1] == {1}, "it is known again"


def test_a_host_that_its_source_shows_no_more_marks_the_vms_of_the_source() -> None:
    here = settled(world(vms=(running(),)))
    assert marked(here, world(vms=(running(),), hosts=()))[1] == {1}


def test_hosts_are_known_without_what_they_have_available_and_a_new_size_checks_the_queue_again() -> None:
    here = settled(world((job(1),)))
    waiting = attempt(A.QUEUED, id=5, job="5")
    here.queue.jobs = {"5": job(5)._replace(ref=waiting.job)}
    here.queue.put(waiting)
    here.queue.take_unchecked()
    seen = world(hosts=(replace(H1, available=512),))
    here.queue.jobs = seen.scheduler.value.jobs if seen.scheduler else {}
    mark_changes(here, replace(seen, scheduler=None), POLICY)
    assert here.hosts["h1"] == KnownHost("h1", SOURCE, value=H1, id=1) and not here.queue.unchecked
    mark_changes(here, replace(world(hosts=(replace(H1, capacity=Size(8, 4096, 65536)),)), scheduler=None), POLICY)
    assert here.queue.unchecked == {5}
    here.queue.take_unchecked()
    mark_changes(here, replace(world(hosts=()), scheduler=None), POLICY)
    assert here.queue.unchecked == {5}, "a host less is in sight"


def test_a_scheduler_that_is_unknown_for_a_while_and_shows_the_same_again_changes_nothing() -> None:
    same = world((job(1), job(2)))
    here = settled(same)
    mark_changes(here, replace(same, scheduler=None), POLICY)
    assert marked(here, same) == (set(), set(), set())
