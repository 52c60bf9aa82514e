"""VMs that move between hosts while their jobs run, with the real controller and store in the simulated world."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sampled import one_in

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse_lab.simulation.faults import Incident, IncidentKind
from multiverse_lab.simulation.generate_moving import KIND, OLDER, moving
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.sites import SimulatedSite
from multiverse_lab.simulation.world import WorldSettings

HOSTS = tuple(Host(name, Size(8, 8192, 65536), ABILITIES, moves=KIND) for name in ("h1", "h2"))
FIRST, SECOND = 0.2, 0.7  # which of the two hosts an incident picks
MOVE = Incident(20.0, IncidentKind.VM_MOVES, 0.0, 0.0)
JOB = Arrival(1.0, Batch(seconds=120.0))
AWAY, FENCED = IncidentKind.HOST_AWAY, IncidentKind.HOST_FENCED
MOVED = "vm: moving - moved -> serving"


def run(seed: int, *incidents: Incident, hosts: tuple[Host, ...] = HOSTS, cut: float = 0.0) -> Outcome:
    world = WorldSettings(hosts, links_cut=cut)
    found = simulate(Scenario(seed, (JOB,), world, incidents=(MOVE, *incidents)))
    assert not found.violations, found.story()
    return found


def said(outcome: Outcome, text: str) -> bool:
    return any(text in line for _, line in outcome.events)


@pytest.mark.parametrize("seed", range(5))
def test_a_job_goes_on_in_a_vm_that_moves_and_leaves_nothing(seed: int) -> None:
    found = run(seed)
    assert list(found.results.values()) == ["COMPLETED"] and len(found.runs) == 1
    assert found.transitions[MOVED] == 1


def test_a_vm_does_not_move_to_a_host_with_another_machine() -> None:
    found = run(1, hosts=(HOSTS[0], replace(HOSTS[1], moves=OLDER)))
    back = run(1, hosts=(replace(HOSTS[0], moves=OLDER), HOSTS[1]))
    assert sorted(one.transitions[MOVED] for one in (found, back)) == [0, 1], "what lacks nothing takes it"


@pytest.mark.parametrize("seed", range(10))
def test_links_that_are_cut_at_any_step_cost_a_job_nothing(seed: int) -> None:
    found = run(seed, *(replace(MOVE, at=20.0 + 10 * number) for number in range(5)), cut=0.5)
    assert list(found.results.values()) == ["COMPLETED"] and len(found.runs) == 1


@pytest.mark.parametrize("cut", [0.0, 0.5])
@pytest.mark.parametrize("host", [FIRST, SECOND])
@pytest.mark.parametrize("at", [20.1, 20.4, 21.0, 30.0])
@pytest.mark.parametrize("kind", [AWAY, FENCED])
def test_either_host_is_lost_while_a_vm_moves(kind: IncidentKind, at: float, host: float, cut: float) -> None:
    """A job whose VM goes on is not disturbed by the loss of its other place, and any other job is run again."""
    found = run(3, Incident(at, kind, 100.0, host), cut=cut)
    assert list(found.results.values()) == ["COMPLETED"]


@pytest.mark.parametrize("seed", [14, 21, 24, 27])
def test_a_vm_that_was_handed_over_to_a_host_that_is_off_is_run_again(seed: int) -> None:
    """Nobody knows whether it had gone on there. The host is fenced before the scheduler has given the node up."""
    found = run(seed, Incident(20.8, FENCED, 30.0, SECOND), cut=0.5)
    assert list(found.results.values()) == ["COMPLETED"] and len(found.runs) == 2
    assert said(found, "host h2 is off")


def test_the_world_reports_the_end_of_such_a_vm_if_that_host_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave_it_on(_: SimulatedSite, host: str) -> None:
        """The operator fences a host that is only out of reach."""

    monkeypatch.setattr(SimulatedSite, "switch_off", leave_it_on)
    off = Incident(20.8, FENCED, 30.0, SECOND)
    found = simulate(Scenario(14, (JOB,), WorldSettings(HOSTS, links_cut=0.5), incidents=(MOVE, off)))
    assert "job 1 ran on VMs that were all well, and lost mvsimul-1, which we set DOWN" in found.violations


@pytest.mark.parametrize("at", [20.1, 20.6, 22.0, 40.0])
@pytest.mark.parametrize(
    "kind", [IncidentKind.CONTROLLER_CRASH, IncidentKind.CLUSTER_AWAY, IncidentKind.VM_DIES, IncidentKind.DISK_FULL]
)
def test_whatever_is_lost_meanwhile_the_job_is_done(kind: IncidentKind, at: float) -> None:
    found = run(4, Incident(at, kind, 15.0), cut=0.3)
    assert list(found.results.values()) == ["COMPLETED"]


def test_a_host_that_is_to_be_emptied_is_empty_before_its_job_ends() -> None:
    moves = []
    for host in (FIRST, SECOND):
        drain = Incident(20.0, IncidentKind.HOST_DRAINED, 300.0, host)
        found = simulate(Scenario(1, (JOB,), WorldSettings(HOSTS), incidents=(drain,)))
        assert not found.violations, found.story()
        assert len(found.runs) == 1
        moves.append(found.transitions[MOVED])
    assert sorted(moves) == [0, 1], "only a host with a VM is emptied"


@pytest.mark.parametrize("seed", one_in(30, list(range(300))))
def test_drawn_histories_keep_all_promises(seed: int) -> None:
    found = simulate(moving(seed))
    assert not found.violations, found.story()
