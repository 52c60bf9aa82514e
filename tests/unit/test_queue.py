"""The queue: in which order jobs are admitted, which of them block others, and what their users are told."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.model.basics import Size
from multiverse.core.model.job import AttemptState
from tests.unit.planner_harness import POLICY, PlannerHarness

A = AttemptState


def admitted(harness: PlannerHarness) -> set[str]:
    return {a.job.job_id for a in harness.store.attempts() if a.state is not A.QUEUED}


def test_jobs_that_wait_for_something_of_their_own_do_not_block_those_behind_them() -> None:
    harness = PlannerHarness(cpus=8)
    harness.template()
    harness.job("0", rank=0, problem="it cannot be served", request=None)
    harness.job("1", rank=1, eligible=False)
    harness.job("2", rank=2, size=Size(99, 100))
    harness.job("3", rank=3, gated=False)
    harness.job("9", rank=9)
    for _ in range(3):
        harness.run()
    outcomes = {a.job.job_id: (str(a.state), a.outcome) for a in harness.store.attempts()}
    assert outcomes["0"] == outcomes["2"] == ("revoking", "revoked")
    assert (outcomes["1"], outcomes["3"]) == (("queued", None), ("ungated", None))
    assert outcomes["9"][0] == "claimed"


def test_a_job_that_is_no_longer_shown_blocks_no_other() -> None:
    harness = PlannerHarness()
    harness.job("1", rank=1)
    harness.run()
    del harness.jobs["1"]
    harness.effect_ended_at[harness.attempt().key] = float("inf")  # its last effect runs: it may not have ended
    harness.template()
    harness.job("2", rank=2)
    for _ in range(3):
        harness.run()
    assert admitted(harness) == {"2"}


def test_jobs_are_admitted_in_the_schedulers_order_not_in_that_of_their_submission() -> None:
    harness = PlannerHarness(cpus=2)
    harness.job("1", rank=2, size=Size(2, 100))
    harness.run()
    harness.job("2", rank=1, size=Size(2, 100))
    harness.template()
    for _ in range(3):
        harness.run()
    assert admitted(harness) == {"2"}


def test_a_job_that_finds_the_hosts_full_blocks_smaller_jobs_behind_it() -> None:
    harness = PlannerHarness(cpus=2)
    harness.template()
    harness.job("1", rank=1, size=Size(2, 100))
    for _ in range(3):
        harness.run()
    harness.job("2", rank=2, size=Size(2, 100))
    harness.job("3", rank=3)
    harness.run()
    harness.pass_time(POLICY.patience)
    harness.run()
    assert admitted(harness) == {"1"}
    notes = harness.reasons
    assert notes["2"] == notes["3"] == "waiting for capacity: the hosts are full"


def test_an_admitted_job_has_no_note() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    harness.pass_time(POLICY.patience)
    harness.run()
    assert harness.reasons["7"], "its template is being built"
    harness.template()
    harness.ended(next(iter(harness.rows.templates.values())).key)
    harness.run()
    assert harness.attempt().state is A.CLAIMED and not harness.reasons


def test_when_addresses_have_run_out_jobs_wait_and_are_told_so() -> None:
    small = replace(POLICY, subnet=type(POLICY.subnet)("10.9.0.0/30"), gateway="10.9.0.1", first_address=2)
    harness = PlannerHarness(small, cpus=8)
    harness.template()
    for number in "123":
        harness.job(number, rank=int(number))
    for _ in range(3):
        harness.run()
    harness.pass_time(POLICY.patience)
    harness.run()
    assert admitted(harness) == {"1"}
    notes = harness.reasons
    assert notes["2"] == notes["3"] == "waiting for a free address"
