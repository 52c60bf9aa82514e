"""Which users get no offered nodes for a while, because no jobs came for those that they took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.controller.learned import EXCLUSION, EXCLUSION_LIMIT, FORGOTTEN, Exclusions
from multiverse.core.model.job import AttemptState
from multiverse.core.model.vm import OfferState
from multiverse.core.transition import Change, Event, Move
from tests.unit.rows import attempt, offer


def of(uid: int | None, event: Event = Event.MISSED) -> Move:
    return Move((Change(replace(offer(OfferState.TAKEN), uid=uid), event),))


def test_a_user_is_excluded_for_a_while_after_a_job_did_not_come() -> None:
    exclusions = Exclusions()
    exclusions.note([of(1000, Event.TAKEN), of(None), of(1001)], 100.0)
    assert exclusions.excluded(100.0) == exclusions.excluded(100.0 + EXCLUSION - 0.1) == {1001}
    assert exclusions.excluded(100.0 + EXCLUSION) == frozenset()


@pytest.mark.parametrize(("pin", "event", "excluded"), [
    ("mv_v7", Event.PIN_EXPIRED, True),
    ("mv_v7", Event.CHANGED, False),
    ("", Event.PIN_EXPIRED, False),
])  # fmt: skip
def test_a_user_whose_job_took_a_spare_and_may_not_start_is_excluded(pin: str, event: Event, excluded: bool) -> None:
    """The job may exceed a limit. Without a tag of the spare's own, the job had come through the gate."""
    exclusions = Exclusions()
    exclusions.note([Move((Change(attempt(AttemptState.RETURNING, pin=pin), event, "AssocMaxJobsLimit"),))], 100.0)
    assert (exclusions.excluded(101.0) == {1000}) is excluded


def test_each_further_time_doubles_the_exclusion_up_to_the_limit() -> None:
    exclusions, now = Exclusions(), 0.0
    for times in range(12):
        exclusions.note([of(1000)], now)
        lasts = min(EXCLUSION_LIMIT, EXCLUSION * 2**times)
        assert exclusions.excluded(now + lasts - 1) == {1000}
        now += lasts + 1
        assert exclusions.excluded(now) == frozenset()


def test_several_at_the_same_time_count_each() -> None:
    exclusions = Exclusions()
    exclusions.note([of(1000), of(1000), of(1000)], 0.0)
    assert exclusions.excluded(4 * EXCLUSION - 1) == {1000} and not exclusions.excluded(4 * EXCLUSION)


def test_an_exclusion_is_forgotten_some_time_after_its_end() -> None:
    exclusions = Exclusions()
    exclusions.note([of(1000)], 0.0)
    again = EXCLUSION + FORGOTTEN
    assert not exclusions.excluded(again - 1)
    exclusions.note([of(1000)], again - 1)
    assert exclusions.excluded(again - 1 + 2 * EXCLUSION - 1) == {1000}
    later = again - 1 + 2 * EXCLUSION + FORGOTTEN
    assert not exclusions.excluded(later)
    exclusions.note([of(1000)], later)
    assert exclusions.excluded(later + EXCLUSION - 1) == {1000} and not exclusions.excluded(later + EXCLUSION)
