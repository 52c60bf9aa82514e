"""Jobs whose VMs sleep while they are suspended: each step fails, hangs, acts late or twice, and all is lost beside."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tests.sampled import one_in
from tests.simulation.test_saves import faults, scenario

from multiverse.config import SaveSettings
from multiverse.core.model.basics import Size
from multiverse_lab.simulation.faults import ControllerCrash, Incident, IncidentKind
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction

SUSPENDED = (UserAction(12.0, "suspend"), UserAction(30.0, "resume"), UserAction(300.0, "resume"))


def sleeps(*actions: UserAction, batch: Batch | None = None, hosts: tuple[str, ...] = ("h0",)) -> Scenario:
    """A job of 20 s, which runs from second 8 or so on and is suspended from 12 to 30. VMs sleep after 3 s."""
    one = scenario(*(actions or SUSPENDED), batch=batch, hosts=hosts)
    settings = replace(one.settings, save=SaveSettings(enabled=True, sleep_after=3.0))
    return replace(one, settings=settings)


def goes_well(one: Scenario, *results: str) -> Outcome:
    outcome = simulate(one)
    assert not outcome.violations, outcome.story()
    assert set(outcome.results.values()) <= {"COMPLETED", *results}, outcome.story()
    return outcome


def slept(outcome: Outcome) -> int:
    """How often a VM slept and went on."""
    return outcome.transitions["vm: waking - woke -> serving"]


def test_a_job_goes_on_in_its_one_run() -> None:
    outcome = goes_well(sleeps())
    assert slept(outcome) == 1
    assert len(outcome.runs) == 1


def test_it_sleeps_each_time() -> None:
    times = (
        (10.0, "suspend"),
        (20.0, "resume"),
        (22.0, "suspend"),
        (35.0, "resume"),
        (37.0, "suspend"),
        (50.0, "resume"),
    )
    actions = tuple(UserAction(at, kind) for at, kind in times)  # type: ignore[arg-type]
    assert slept(goes_well(sleeps(*actions, batch=Batch(seconds=30.0)))) == 3


def test_another_job_gets_its_memory_and_it_waits_for_that() -> None:
    """Both take all of the host. The first one is resumed while the second one runs."""
    batch = Batch(seconds=20.0, size=Size(2, 1000), limit=60.0)
    one = sleeps(*SUSPENDED, batch=batch)
    second = Arrival(14.0, replace(batch, seconds=60.0, limit=90.0))
    outcome = goes_well(replace(one, arrivals=(*one.arrivals, second)))
    assert slept(outcome) == 1
    assert outcome.transitions["vm: delayed - wake -> waking"] == 1
    (first, other) = sorted(outcome.runs, key=lambda run: run[1])
    assert other[2] < first[2], "the second one ended while the first one waited"


def test_the_time_limit_of_a_job_that_waits_grows() -> None:
    """It has 26 s of its 30 left as it is suspended, needs 16, and waits for 60."""
    batch = Batch(seconds=20.0, size=Size(2, 1000), limit=30.0)
    one = sleeps(*SUSPENDED, batch=batch)
    second = Arrival(14.0, replace(batch, seconds=80.0, limit=100.0))
    outcome = goes_well(replace(one, arrivals=(*one.arrivals, second)))
    assert set(outcome.results.values()) == {"COMPLETED"}


def test_a_job_can_be_cancelled_asleep() -> None:
    goes_well(sleeps(UserAction(12.0, "suspend"), UserAction(25.0, "cancel")), "CANCELLED")


CALLS = ("hypervisor.sleep mvsimul-1 #1", "hypervisor.wake mvsimul-1 #1", "scheduler.stand_in mvsimul-1 #1")


@pytest.mark.parametrize("call", CALLS)
def test_each_step_fails_hangs_acts_late_or_twice(call: str) -> None:
    for fault in faults(call):
        outcome = goes_well(replace(sleeps(), faults=(fault,)))
        assert fault in outcome.faults, fault


@pytest.mark.parametrize("part", one_in(4, range(4)))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_the_controller_crashes_at_each_commit(after: bool, part: int) -> None:
    one = sleeps()
    for commit in range(8 + part, goes_well(one).commits + 1, 4):
        outcome = goes_well(replace(one, crashes=(ControllerCrash(commit, after),)))
        assert outcome.crash_count == 1


@cache
def moments() -> list[float]:
    """Shortly after each event since the VM began to fall asleep."""
    outcome = goes_well(sleeps())
    began = next(at for at, text in outcome.events if "falling_asleep" in text)
    return sorted({round(at, 2) + 0.002 for at, _ in outcome.events if began - 0.1 <= at})


LOST = (
    (IncidentKind.VM_DIES, 0.0), (IncidentKind.CONTROLLER_CRASH, 0.5), (IncidentKind.CLUSTER_RESTARTS, 8.0),
    (IncidentKind.HOST_AWAY, 30.0), (IncidentKind.HOST_FENCED, 30.0), (IncidentKind.STORAGE_AWAY, 30.0),
    (IncidentKind.STORAGE_FULL, 30.0), (IncidentKind.HOST_DISK_FULL, 20.0), (IncidentKind.CLUSTER_AWAY, 20.0),
    (IncidentKind.GUEST_FLOODS, 0.0),
)  # fmt: skip


@pytest.mark.parametrize("part", one_in(4, range(4)))
@pytest.mark.parametrize("lost", LOST)
def test_something_else_is_lost_between_all_steps(lost: tuple[IncidentKind, float], part: int) -> None:
    for at in moments()[part::4]:
        goes_well(replace(sleeps(hosts=("h0", "h1")), incidents=(Incident(at, *lost),)))


@pytest.mark.parametrize("part", one_in(4, range(4)))
@pytest.mark.parametrize("kinds", [("cancel",), ("requeue",), ("resume", "suspend"), ("save",)])
def test_a_user_acts_between_all_steps(kinds: tuple[str, ...], part: int) -> None:
    for at in moments()[part::4]:
        more = [UserAction(at - 0.5 + 0.3 * place, kind) for place, kind in enumerate(kinds)]  # type: ignore[arg-type]
        actions = sorted((*SUSPENDED, *more), key=lambda one: one.after)
        goes_well(sleeps(*actions), "CANCELLED")
