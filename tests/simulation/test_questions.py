"""Questions in the middle of whole simulations: whoever asks, and however often, every history is what it would be."""

from __future__ import annotations

import pytest
from tests.sampled import one_in

from multiverse.controller.loop import Controller
from multiverse.core.explanation import explain, immediate_capacity, sizes_to_show, usage, what_if
from multiverse.core.model.basics import Size
from multiverse.core.model.job import AttemptState, Request
from multiverse.core.model.reason import text_of
from multiverse.core.queue import reason_of
from multiverse_lab.simulation.generate import crowded, operated, with_faults
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Scenario

ASKED = (Request(1, Size(1, 100)), Request(2, Size(2, 500)), Request(1, Size(1, 100), image="nowhere"))


REPEATED = [*map(crowded, range(2)), *map(with_faults, range(3))]
"""Scenarios without simulated agents, whose tasks end in an order that differs from run to run."""


@pytest.mark.parametrize("scenario", one_in(2, [*REPEATED, operated(0)]))
def test_questions_change_no_history(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = simulate(scenario)
    asked, run_pass = [0, 0], Controller.run_pass

    def asking(self: Controller) -> bool:
        committed = run_pass(self)
        context, now = self.context(), self.state.now  # a reading of the simulated clock would advance it
        if context.world.scheduler is None or not context.world.sees_hosts or not committed:
            return committed
        for attempt in list(self.state.attempts.values()):
            found = explain(context, attempt, now)
            assert 1 <= len(found.sentences) <= 3
            if attempt.state is AttemptState.QUEUED:
                job = context.scheduler.jobs.get(attempt.job.job_id)
                if job is not None and job.eligible and job.ref == attempt.job and not text_of(attempt.quarantined):
                    assert found.short == reason_of(attempt, job, self.state.reasons, now)
                    asked[0] += 1
        for request in ASKED:
            answer = what_if(context, request, 60.0, now)
            assert answer.starts or answer.why
            asked[1] += answer.starts
        usage(context)
        for size in sizes_to_show(context):
            immediate_capacity(context, size)
        return committed

    monkeypatch.setattr(Controller, "run_pass", asking)
    curious = simulate(scenario)
    assert asked[0] + asked[1] > 0
    assert curious.violations == quiet.violations == []
    if scenario in REPEATED:
        assert curious.journal == quiet.journal
        assert curious.told == quiet.told and curious.runs == quiet.runs
