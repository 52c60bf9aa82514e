"""What a reservation of all nodes does to jobs, spares and VMs that have ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.context import Context
from multiverse.core.explanation import explain
from multiverse.core.machines.tables import effect_of
from multiverse.core.machines.vm import vm_is_settled
from multiverse.core.model.basics import Depth, Size
from multiverse.core.model.host import Claim
from multiverse.core.model.job import YEAR, AttemptState, JobState, Node, NodeReservation, NodeState
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import OfferState, Vm, VmState
from multiverse.core.policy import Pool
from multiverse.core.transition import EffectKind
from tests.unit.planner_harness import POLICY, PlannerHarness

A, V = AttemptState, VmState
POOLED = replace(POLICY, pools=(Pool("slim", Depth.JOINED, 1, 1, Size(1, 512)),))


@pytest.fixture
def harness() -> PlannerHarness:
    return PlannerHarness()


def sentences(harness: PlannerHarness, attempt_id: int = 1) -> str:
    context = Context(harness.state, harness.world, harness.policy)
    return " ".join(map(str, explain(context, harness.state.attempts[attempt_id], harness.clock.time).sentences))


@pytest.mark.parametrize(
    ("begins", "ends", "limit", "kept"),
    [
        (-10.0, 50.0, 60.0, True),
        (-60.0, -10.0, 60.0, False),
        (50.0, 90.0, 60.0, True),
        (70.0, 90.0, 60.0, False),
        (70.0, 90.0, YEAR, True),
        (70.0, 90.0, None, False),
        (-10.0, 50.0, None, True),
    ],
)
def test_a_job_is_kept_that_would_run_within_the_reservation(
    begins: float, ends: float, limit: float | None, kept: bool
) -> None:
    assert NodeReservation("all", 1000 + begins, 1000 + ends).keeps(1000.0, limit) is kept


# --- jobs --------------------------------------------------------------------------------------------


def test_no_vm_is_made_for_a_job_that_cannot_start_and_its_user_is_told_why(harness: PlannerHarness) -> None:
    harness.template()
    kept = harness.reserve()
    harness.job()
    for _ in range(3):
        harness.run()
    assert harness.attempt().state is A.QUEUED and not harness.rows.vms
    assert harness.reasons["7"] == str(kept.why()) and "maintenance" in str(kept.why())
    assert str(kept.why()) in sentences(harness)
    harness.reservations = ()
    harness.run()
    assert harness.attempt().state is A.CLAIMED


def test_jobs_that_end_before_it_begins_start_beside_others_of_the_same_size(harness: PlannerHarness) -> None:
    harness.template()
    harness.reserve(begins=3600.0)
    harness.job("7", limit=7200.0, rank=1)
    harness.job("8", limit=600.0, rank=2)
    harness.job("9", limit=7200.0, rank=3)
    for _ in range(3):
        harness.run()
    states = {attempt.job.job_id: attempt.state for attempt in harness.rows.attempts.values()}
    assert states == {"7": A.QUEUED, "8": A.CLAIMED, "9": A.QUEUED}
    assert harness.reasons["7"] == harness.reasons["9"] == str(harness.reservations[0].why())


def test_a_job_that_the_scheduler_keeps_for_another_reason_is_told_of_both(harness: PlannerHarness) -> None:
    harness.template()
    kept = harness.reserve()
    harness.job(eligible=False, reason="Dependency")
    harness.run()
    assert "Dependency" in sentences(harness) and str(kept.why()) in sentences(harness)


@pytest.mark.parametrize("stage", ["claimed", "spawning", "spawned"])
def test_a_job_whose_vm_is_on_its_way_goes_back_without_a_failure(harness: PlannerHarness, stage: str) -> None:
    getattr(harness, f"to_{stage}")()
    kept = harness.reserve()
    harness.run()
    attempt = harness.attempt()
    assert attempt.state is A.RETURNING and text_of(attempt.reason) == str(kept.why()) and attempt.tries == 0


def test_a_job_that_runs_goes_on(harness: PlannerHarness) -> None:
    harness.to_allocated()
    harness.reserve()
    harness.run()
    assert harness.attempt().state is A.ALLOCATED and harness.all_vms()[0].state is V.SERVING


# --- spares ------------------------------------------------------------------------------------------


def test_no_spare_is_made_while_it_lasts() -> None:
    harness = PlannerHarness(POOLED)
    harness.template()
    harness.reserve()
    harness.fill()
    assert not harness.rows.vms
    harness.reservations = ()
    harness.fill()
    assert [vm.state for vm in harness.rows.vms.values()] == [V.JOINED]


def test_a_spare_is_taken_off_offer_as_it_begins_and_is_kept() -> None:
    harness = PlannerHarness(POOLED)
    harness.template()
    harness.fill()
    assert [offer.state for offer in harness.rows.offers.values()] == [OfferState.OPEN]
    harness.reserve()
    harness.run()
    assert [offer.state for offer in harness.rows.offers.values()] == [OfferState.CLOSING]
    assert [vm.state for vm in harness.rows.vms.values()] == [V.JOINED]


# --- VMs that have ended -----------------------------------------------------------------------------


def to_released(harness: PlannerHarness) -> Vm:
    """The VM of a job that has ended is gone, and its node is left, as an observation shows after the effect."""
    harness.to_allocated()
    (vm,) = harness.all_vms()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED", nodes=())
    harness.nodes[vm.name] = Node(vm.name, NodeState.IDLE, reserved=True)
    harness.run()
    harness.run()
    assert harness.all_vms()[0].state is V.RELEASING
    harness.ended(vm.key)
    harness.vms.clear()
    return vm


def claims(harness: PlannerHarness, vm: Vm) -> list[Claim]:
    return [claim for claim in harness.rows.claims if claim.owner == vm.key]


def test_a_vm_that_is_gone_claims_nothing_while_its_node_is_left(harness: PlannerHarness) -> None:
    vm = to_released(harness)
    harness.run()
    left = harness.rows.vms[vm.id]
    assert left.state is V.DELETING and effect_of(left).kind is EffectKind.DELETE  # type: ignore[union-attr]
    assert not claims(harness, vm) and not harness.state.vms_on(vm.host)
    harness.run()
    assert harness.attempt().state is A.DONE, "it waits for no node"
    assert vm_is_settled(harness.state, left, harness.world), "only what is shown of its node moves it"
    del harness.nodes[vm.name]
    harness.ended(vm.key)
    harness.run()
    assert vm.id not in harness.rows.vms


def test_a_node_that_is_deleted_at_once_takes_no_step_in_between(harness: PlannerHarness) -> None:
    vm = to_released(harness)
    harness.nodes.clear()
    moves = harness.run()
    assert [c.row.state for m in moves for c in m.changes if c.row.key == vm.key] == [V.GONE]


def test_claims_stay_until_the_vm_is_seen_gone(harness: PlannerHarness) -> None:
    vm = to_released(harness)
    harness.hypervisor_known = False
    harness.run()
    assert harness.rows.vms[vm.id].state in (V.RELEASING, V.LOST) and claims(harness, vm)


def test_a_node_that_is_shown_by_an_older_observation_only_is_waited_for(harness: PlannerHarness) -> None:
    vm = to_released(harness)
    harness.observe()
    harness.ended(vm.key)
    harness.commit()
    assert harness.rows.vms[vm.id].state is V.RELEASING


def test_a_node_on_which_the_job_could_start_keeps_its_vm(harness: PlannerHarness) -> None:
    """A VM that failed has the tag of those that replace it: its job must not be pinned while it may start there."""
    harness.second_host()
    harness.to_spawning()
    (vm,) = harness.all_vms()
    harness.node(vm.name)
    harness.vms.clear()
    harness.run()
    harness.ended(vm.key)
    harness.run()
    harness.ended(vm.key)
    harness.run()
    assert harness.rows.vms[vm.id].state is V.REMOVING
    harness.nodes[vm.name] = Node(vm.name, NodeState.DOWN)
    harness.run()
    assert harness.rows.vms[vm.id].state is V.DELETING
