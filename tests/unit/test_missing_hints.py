"""Submissions without hints are noticed, and those that need none are not counted."""

from __future__ import annotations

from dataclasses import replace

import structlog

from multiverse.controller.learned import SKEW, UNTIL_MISSING, MissingHints
from multiverse.core.model.job import AttemptState, JobRef
from multiverse.core.model.vm import VmState
from multiverse.core.transition import Change, Event, Move
from tests.unit.planner_harness import ManualClock
from tests.unit.rows import attempt, vm


class Scene:
    """A daemon that listens to hints, and jobs that are submitted."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.missing = MissingHints(self.clock)
        self.clock.time += 60.0

    def submit(self, *, hint: bool, ago: float = 0.0, restarts: int = 0, tasks: int = 1) -> None:
        """A job is submitted, and an observation shows it a second later."""
        if hint:
            self.missing.hint_came()
        ref = JobRef("7", int(self.clock.wall() - ago), restarts)
        self.clock.time += 1.0
        rows = [replace(attempt(AttemptState.QUEUED, id=id_), job=ref) for id_ in range(tasks)]
        self.missing.note([Move(tuple(Change(row, Event.SUBMITTED) for row in rows))])
        self.clock.time += 10.0


def test_submissions_without_hints_are_reported_once_until_a_hint_comes() -> None:
    scene = Scene()
    with structlog.testing.capture_logs() as logs:
        for _ in range(UNTIL_MISSING - 1):
            scene.submit(hint=False)
        assert scene.missing.since is None
        scene.submit(hint=False)
        noticed = scene.missing.since
        assert noticed is not None
        scene.submit(hint=False)
        assert scene.missing.since == noticed
        scene.submit(hint=True)
        assert scene.missing.since is None
    assert [one["event"] for one in logs] == ["hints missing", "hints arrive again"]


def test_a_hint_in_between_shows_that_hints_arrive() -> None:
    scene = Scene()
    for _ in range(5):
        for _ in range(UNTIL_MISSING - 1):
            scene.submit(hint=False)
        scene.submit(hint=True)
    assert scene.missing.since is None


def test_a_job_array_is_one_submission() -> None:
    scene = Scene()
    scene.submit(hint=False, tasks=100)
    assert scene.missing.since is None


def test_jobs_that_come_without_hints_anyway_do_not_count() -> None:
    """Jobs that were submitted before the daemon started, and jobs that are queued again."""
    scene = Scene()
    for _ in range(2 * UNTIL_MISSING):
        scene.submit(hint=False, ago=3600.0)
        scene.submit(hint=False, restarts=1)
        other = Change(vm(VmState.PLANNED), Event.PLANNED)
        scene.missing.note([Move((other,))])
    assert scene.missing.since is None


def test_the_clocks_of_two_machines_may_differ_a_little() -> None:
    scene = Scene()
    for _ in range(2 * UNTIL_MISSING):
        scene.submit(hint=True, ago=-(SKEW - 1))
    assert scene.missing.since is None
