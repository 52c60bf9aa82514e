"""What is counted and logged of committed moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from multiverse.core.model.basics import Key
from multiverse.core.model.job import AttemptState, LeaseState
from multiverse.core.model.reason import said
from multiverse.core.model.vm import Stage, TemplateState, VmState
from multiverse.core.transition import Change, Done, EffectKind, Event, Move
from multiverse.service.statistics import KEPT, STEP, Histogram, MoveLog, Statistics
from tests.unit.rows import attempt, lease, rows, template, vm


def moved(state: AttemptState, event: Event, reason: str = "") -> Move:
    return Move((Change(attempt(state), event, reason),))


def life(statistics: Statistics, *steps: tuple[float, AttemptState, Event]) -> None:
    for now, state, event in steps:
        statistics.moved([moved(state, event)], now)


A = AttemptState
WHOLE_LIFE = (
    (100.0, A.QUEUED, Event.SUBMITTED),
    (103.0, A.CLAIMED, Event.ADMITTED),
    (103.2, A.SPAWNING, Event.CREATED),
    (104.2, A.SPAWNED, Event.ALL_JOINED),
    (104.7, A.ALLOCATED, Event.RUNS),
    (164.7, A.RECLAIMING, Event.ENDED),
    (165.7, A.DONE, Event.RECLAIMED),
)


def test_each_phase_of_a_life_is_measured_once() -> None:
    statistics = Statistics()
    life(statistics, *WHOLE_LIFE)
    found = {name: (sum(one.counts), round(one.total, 3)) for name, one in statistics.phases.items()}
    assert found == {
        "queued": (1, 3.0), "clone": (1, 0.2), "join": (1, 1.0), "launch": (1, 0.5), "start": (1, 4.7),
        "provision": (1, 1.7), "run": (1, 60.0), "reclaim": (1, 1.0),
    }  # fmt: skip
    assert statistics.outcomes == {"done": 1}


def test_of_an_attempt_that_is_older_than_the_daemon_only_later_phases_are_measured() -> None:
    statistics = Statistics()
    life(statistics, *WHOLE_LIFE[3:])
    assert {name for name, one in statistics.phases.items() if sum(one.counts)} == {"launch", "run", "reclaim"}


def test_an_event_that_is_repeated_ends_no_phase_again() -> None:
    statistics = Statistics()
    life(statistics, *WHOLE_LIFE[:4], (104.4, A.SPAWNED, Event.ALL_JOINED), *WHOLE_LIFE[4:])
    assert sum(statistics.phases["join"].counts) == 1
    assert statistics.phases["launch"].total == pytest.approx(0.5)


def test_a_spare_that_a_job_took_had_been_cloned_before() -> None:
    statistics = Statistics()
    life(statistics, (10.0, A.UNGATED, Event.SUBMITTED), (10.0, A.ADDING_USER, Event.TOOK),
         (10.4, A.ALLOCATED, Event.RUNS))  # fmt: skip
    assert statistics.phases["start"].total == pytest.approx(0.4)
    assert statistics.phases["launch"].total == pytest.approx(0.4)
    assert sum(statistics.phases["clone"].counts) == 0, "nothing was cloned for it"


def test_nothing_is_kept_of_attempts_that_have_ended() -> None:
    statistics = Statistics()
    life(statistics, *WHOLE_LIFE)
    assert statistics._moments == {}


def test_failures_are_counted_by_their_cause_and_vms_by_what_they_are() -> None:
    statistics = Statistics()
    statistics.moved([Move((Change(vm(VmState.PARKED), Event.EXISTS),))], 1.0)
    statistics.moved(
        [Move((Change(vm(VmState.DEAD), Event.DIED), Change(template(TemplateState.BROKEN), Event.BROKE)))], 2.0
    )
    assert statistics.failures == {("vm", "died"): 1, ("template", "broke"): 1}
    assert statistics.clones == {("slim", "instant", "h1"): 1}


def test_the_stages_of_effects_are_measured() -> None:
    statistics = Statistics()
    statistics.ended(
        Done(Key("vm", 1), EffectKind.CREATE, "planned", None, (Stage("overlay", 0.004), Stage("exec", 0.05)))
    )
    assert {key: sum(one.counts) for key, one in statistics.stages.items()} == {
        ("create", "overlay"): 1,
        ("create", "exec"): 1,
    }


def test_a_series_has_an_entry_for_each_quarter_of_a_minute_and_forgets() -> None:
    statistics = Statistics()
    for job, now in enumerate((0.0, 1.0, STEP + 1, 3 * STEP)):
        statistics.moved([Move((Change(attempt(A.QUEUED, id=job), Event.SUBMITTED),))], now)
    submitted = statistics.rates(3 * STEP + 1).series["submitted"]
    assert submitted[-4:] == (2, 1, 0, 1)
    assert len(submitted) == KEPT
    assert sum(statistics.rates(3 * STEP + KEPT * STEP).series["submitted"]) == 0, "all of it is too old"


def test_latencies_are_of_the_last_quarter_of_an_hour() -> None:
    statistics = Statistics()
    life(statistics, *WHOLE_LIFE)
    assert statistics.rates(170.0).latencies["start"].p50 == pytest.approx(4.7)
    assert statistics.rates(170.0 + KEPT * STEP).latencies["start"].count == 0


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram()
    for seconds in (0.001, 0.2, 0.21, 1e6):
        histogram.observe(seconds)
    found = dict(histogram.cumulative())
    assert (found["0.005"], found["0.2"], found["0.3"], found["86400.0"], found["+Inf"]) == (1, 2, 3, 3, 4)


def test_a_line_is_logged_for_each_row_that_a_move_changes() -> None:
    queued = attempt(A.QUEUED)
    log = MoveLog(rows(queued))
    with capture_logs() as lines:
        move = Move(
            (
                Change(replace(queued, state=A.CLAIMED), Event.ADMITTED, said("fits")),
                Change(vm(VmState.PLANNED, attempt=1), Event.PLANNED),
            )
        )
        log.moved([move], 5.0)
        log.moved([Move((Change(replace(queued, state=A.SPAWNING), Event.CREATED),))], 6.0)
    assert lines == [
        {"event": "moved", "log_level": "info", "row": "attempt 1", "old": "queued", "new": "claimed", "by": "admitted",
         "attempt": 1, "job": "7", "reason": "fits"},
        {"event": "moved", "log_level": "info", "row": "vm 1", "old": "", "new": "planned", "by": "planned",
         "attempt": 1, "vm": "mvtest0-1", "host": "h1", "reason": ""},
        {"event": "moved", "log_level": "info", "row": "attempt 1", "old": "claimed", "new": "spawning",
         "by": "created", "attempt": 1, "job": "7", "reason": ""},
    ]  # fmt: skip


def test_the_log_knows_what_a_lease_was_before_it_began() -> None:
    one = lease(LeaseState.IDLE)
    log = MoveLog(rows(one))
    with capture_logs() as lines:
        log.moved([Move((Change(replace(one, state=LeaseState.HELD), Event.TAKEN, said("for a VM")),))], 5.0)
    assert (lines[0]["row"], lines[0]["old"], lines[0]["new"]) == ("lease 1", "idle", "held")


def test_the_log_remembers_no_row_that_has_ended() -> None:
    log = MoveLog(rows(attempt(A.RECLAIMING)))
    with capture_logs() as lines:
        log.moved([moved(A.DONE, Event.RECLAIMED)], 5.0)
    assert (lines[0]["old"], lines[0]["new"], log._states.keys() & {Key("attempt", 1)}) == ("reclaiming", "done", set())
