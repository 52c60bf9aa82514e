"""Checkpoints of jobs whose VMs are lost: each step fails, hangs, acts twice, and everything is lost beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tests.sampled import one_in
from tests.simulation.test_saves import faults, goes_well, scenario

from multiverse.config import SaveSettings
from multiverse.core.model.job import CheckpointWish
from multiverse_lab.simulation.faults import ControllerCrash, FaultKind, Incident, IncidentKind, PlannedFault
from multiverse_lab.simulation.jobs import Batch, JobRecord
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.processes import FrozenProcesses, Ledger, SavedFiles
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Scenario, UserAction

DIES = Incident(22.0, IncidentKind.VM_DIES)


def checkpointed(*actions: UserAction, **more: object) -> Scenario:
    """A job of 30 s, which runs from second 8 or so on, with a checkpoint every 4 s. Its VM dies at second 22."""
    one = scenario(*actions, batch=Batch(seconds=30.0, checkpoint=CheckpointWish(4.0)))
    settings = replace(one.settings, save=SaveSettings(enabled=True, checkpoint_every=1.0))
    return replace(one, settings=settings, incidents=(DIES,), **more)  # type: ignore[arg-type]


def kept(outcome: Outcome) -> int:
    """How often a run went on from a checkpoint."""
    return outcome.transitions["saved: thawing - kept -> stored"]


def test_a_lost_job_computes_little_again() -> None:
    outcome = goes_well(checkpointed())
    assert kept(outcome) == 1
    (first, second) = outcome.runs
    computed = [ended - began for _, began, ended in (first, second)]
    assert sum(computed) < 30.0 + 4.0 + 3.0, outcome.story()


def test_a_job_that_is_lost_again_and_again_comes_to_its_end() -> None:
    deaths = tuple(Incident(at, IncidentKind.VM_DIES) for at in (16.0, 30.0, 44.0, 58.0))
    outcome = goes_well(replace(checkpointed(), incidents=deaths))
    assert kept(outcome) >= 2, outcome.story()


def test_a_job_that_its_user_queues_again_waits_as_long_as_without_a_checkpoint() -> None:
    one = checkpointed(UserAction(18.0, "requeue"))
    world = replace(one.world, cluster=replace(one.world.cluster, requeue_delay=60.0))
    outcome = goes_well(replace(one, incidents=(), world=world))
    assert kept(outcome) == 1
    (_, second) = outcome.runs
    assert second[1] > 18.0 + 60.0, outcome.story()


def test_without_checkpoints_all_is_computed_again() -> None:
    """So that the tests above would notice a planner that makes none."""
    one = scenario(batch=Batch(seconds=30.0))
    outcome = goes_well(replace(one, incidents=(DIES,)))
    assert sum(ended - began for _, began, ended in outcome.runs) > 40.0


CALLS = (
    "scheduler.check 1 #1", *(f"hypervisor.checkpoint mvsimul-1 #{nth}" for nth in (1, 2, 3)),
    "hypervisor.thaw mvsimul-1 #1", "hypervisor.create mvsimul-1 #2", "hypervisor.start mvsimul-1 #2",
    "hypervisor.discard mvsimul-1-1 #1",
)  # fmt: skip


@pytest.mark.parametrize("part", one_in(3, range(3)))
@pytest.mark.parametrize("call", CALLS)
def test_each_step_fails_hangs_acts_late_or_twice(call: str, part: int) -> None:
    for fault in list(faults(call))[part::3]:
        outcome = goes_well(replace(checkpointed(), faults=(fault,)))
        assert fault in outcome.faults, fault


@pytest.mark.parametrize("part", one_in(8, range(8)))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_the_controller_crashes_at_each_commit(after: bool, part: int) -> None:
    one = checkpointed()
    for commit in range(8 + part, goes_well(one).commits + 1, 8):
        outcome = goes_well(replace(one, crashes=(ControllerCrash(commit, after),)))
        assert outcome.crash_count == 1


@cache
def moments() -> list[float]:
    """Shortly after each event since the first checkpoint was begun."""
    outcome = goes_well(checkpointed())
    began = next(at for at, text in outcome.events if text.startswith("saved 1:"))
    return sorted({round(at, 2) + 0.002 for at, _ in outcome.events if began - 0.1 <= at})


LOST = (
    (IncidentKind.VM_DIES, 0.0, 0.0), (IncidentKind.CONTROLLER_CRASH, 0.5, 0.0),
    (IncidentKind.CLUSTER_RESTARTS, 8.0, 0.0),
    *((kind, 30.0, 0.0) for kind in (
        IncidentKind.HOST_AWAY, IncidentKind.HOST_FENCED, IncidentKind.STORAGE_AWAY, IncidentKind.STORAGE_FULL,
        IncidentKind.STORAGE_LOST)),
)  # fmt: skip


@pytest.mark.parametrize("part", one_in(9, range(9)))
@pytest.mark.parametrize("lost", one_in(2, LOST))
def test_something_else_is_lost_between_all_steps(lost: tuple[IncidentKind, float, float], part: int) -> None:
    kind, seconds, pick = lost
    for at in moments()[part::9]:
        incidents = tuple(sorted((DIES, Incident(at, kind, seconds, pick)), key=lambda one: one.at))
        goes_well(replace(checkpointed(), incidents=incidents))


@pytest.mark.parametrize("part", one_in(8, range(8)))
@pytest.mark.parametrize("kinds", [("cancel",), ("requeue",), ("save",), ("suspend", "resume"), ("hold", "release")])
def test_a_user_acts_between_all_steps(kinds: tuple[str, ...], part: int) -> None:
    for at in moments()[part::8]:
        done = tuple(UserAction(at - 0.5 + 10 * nth, kind) for nth, kind in enumerate(kinds))
        goes_well(checkpointed(*done), "CANCELLED")


def test_a_checkpoint_that_goes_on_beside_the_earlier_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world in which the processes of the VM that died go on."""
    monkeypatch.setattr(Ledger, "stop", lambda *_: None)
    assert any("in another VM" in text for text in simulate(checkpointed()).violations)


def test_work_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = Ledger.attach

    def forgetful(self: Ledger, files: SavedFiles, job: JobRecord, vm: str, place: object) -> FrozenProcesses | None:
        found = attach(self, files, job, vm, place)
        return found and replace(found, computed=found.computed + 1.0)

    monkeypatch.setattr(Ledger, "attach", forgetful)
    assert any("of the script, and had come to" in text for text in simulate(checkpointed()).violations)


def test_an_interrupted_call_leaves_no_job_frozen() -> None:
    """The host's process is cut off while the job is frozen; the same call is made again."""
    cut = tuple(
        PlannedFault("hypervisor.checkpoint mvsimul-1 #1", FaultKind.CUT, seconds) for seconds in (0.3, 0.8, 1.3)
    )
    for fault in cut:
        goes_well(replace(checkpointed(), incidents=(), faults=(fault,)))
