"""The queue of waiting attempts as a data structure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from multiverse.core.model.basics import Size
from multiverse.core.model.job import Attempt, AttemptState, Job, JobState, Request
from multiverse.core.model.reason import said
from multiverse.core.queue import Order, Queue
from tests.unit.rows import attempt

A = AttemptState
SIZES = (Request(1, Size(1, 100)), Request(2, Size(1, 100), image="other"))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans())))
def test_an_order_has_each_id_once_by_rank_and_then_by_number(script: list[tuple[int, int, bool]]) -> None:
    order, naive = Order(), dict[int, int]()
    for id_, rank, put in script:
        if put:
            order.put(id_, rank)
            naive[id_] = rank
        else:
            order.drop(id_)
            naive.pop(id_, None)
    expected = sorted((rank, id_) for id_, rank in naive.items())
    assert order.entries() == expected and list(order) == [id_ for _, id_ in expected]
    assert len(order) == len(naive) and order.first(2) == expected[:2]
    assert all((id_ in order) == (id_ in naive) for id_ in range(8))


def waiting(number: int, request: Request = SIZES[0], **more: object) -> Attempt:
    return attempt(A.QUEUED, id=number, job=str(number), request=request, **more)


def shown(one: Attempt, **more: object) -> Job:
    job = Job(one.job, "hello", 1000, JobState.PENDING, one.request, rank=one.id)
    return job._replace(**more)  # type: ignore[arg-type]


def queue_of(*attempts: Attempt, **more: object) -> Queue:
    queue = Queue()
    queue.jobs = {one.job.job_id: shown(one, **more) for one in attempts}
    for one in attempts:
        queue.put(one)
    return queue


def test_only_eligible_jobs_at_the_gate_are_candidates_and_all_are_checked() -> None:
    ungated = replace(waiting(3), state=A.UNGATED)
    queue = queue_of(waiting(1), ungated)
    held = waiting(2)
    queue.jobs = {**queue.jobs, "2": shown(held, eligible=False)}
    queue.put(held)
    assert list(queue.candidates) == [1] and queue.take_unchecked() == [1, 2, 3] and queue.take_unchecked() == []
    assert queue.wanted == Counter({None: 1})


def test_attempts_in_quarantine_with_vms_or_whose_job_is_another_run_do_not_wait() -> None:
    one = waiting(1)
    for other in (replace(one, quarantined=said("broken")), replace(one, state=A.CLAIMED),
                  replace(one, job=replace(one.job, restarts=1))):  # fmt: skip
        queue = queue_of(one)
        queue.put(other)
        assert (list(queue.candidates), queue.unchecked, dict(queue._shape_uses), queue.wanted) == (
            [],
            set(),
            {},
            Counter(),
        )


def test_an_attempt_that_is_set_aside_keeps_its_place_and_its_vms_are_still_wanted() -> None:
    queue = queue_of(waiting(1), waiting(2, SIZES[1]))
    queue.take_unchecked()
    queue.set_aside(2, "no host has image other")
    assert list(queue.candidates) == [1] and queue.unfit.entries() == [(2, 2)] and queue.wants(2)
    assert queue.why_unfit == {2: "no host has image other"} and queue.wanted == Counter({None: 1, "other": 2})
    queue.check_all()
    assert list(queue.candidates) == [1, 2] and not queue.why_unfit and len(queue.unfit) == 0
    assert queue.take_unchecked() == [1, 2]
    queue.set_aside(2, "no host has image other")
    queue.drop(2)
    assert len(queue.unfit) == 0 and not queue.why_unfit and queue.wanted == Counter({None: 1})


def test_a_held_attempt_is_not_set_aside() -> None:
    queue = queue_of(waiting(1), eligible=False)
    queue.set_aside(1, "no host has image other")
    assert len(queue.unfit) == 0 and not queue.why_unfit


def test_attempts_of_one_request_and_the_same_limits_have_one_shape() -> None:
    queue = queue_of(waiting(1), waiting(2), waiting(3, SIZES[1]))
    assert queue.shape_of(1) == queue.shape_of(2) != queue.shape_of(3)
    assert {one.id for one in queue.one_of_each_request()} in ({1, 3}, {2, 3})
    limited = waiting(4)
    queue.jobs = {**queue.jobs, "4": shown(limited, uses=(("cpu", 1),))}
    queue.put(limited)
    assert queue.shape_of(4) != queue.shape_of(1) and len(queue.one_of_each_request()) == 2
    gone = queue.shape_of(3)
    queue.drop(3)
    queue.put(waiting(3, SIZES[1]))
    assert queue.shape_of(3) != gone, "the number of a shape that nobody has is not given to another"
    assert queue.job_of(4).uses == (("cpu", 1),)


def test_attempts_wait_until_their_user_is_known() -> None:
    users = [replace(waiting(number), uid=1000 + number // 3) for number in (1, 2, 3)]
    queue = queue_of(*users)
    assert queue.unknown_users == Counter()
    for row in users:
        queue.await_user(row.id, f"waiting for user {row.uid}")
    queue.await_user(1, "twice")
    assert queue.unknown_users == Counter({1000: 2, 1001: 1}) and list(queue.candidates) == []
    assert queue.why_unfit == {1: "waiting for user 1000", 2: "waiting for user 1000", 3: "waiting for user 1001"}
    queue.drop(1)
    queue.drop(3)
    assert queue.unknown_users == Counter({1000: 1}) and set(queue.unknown_users) == {1000}
    queue.consider_users_again()
    assert list(queue.candidates) == [2] and dict(queue.unknown_users) == {} and queue.why_unfit == {}
