"""Nothing wrong is concluded from what does not answer, with the real controller and store in the simulated world."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.sampled import one_in

from multiverse.config import PoolSettings, Settings
from multiverse.core import planner
from multiverse.core.machines import attempt, tables
from multiverse.core.model.basics import Depth, Key, Size
from multiverse.core.model.job import SchedulerView
from multiverse.store import Store
from multiverse_lab.simulation.faults import FaultKind, Incident, IncidentKind, PlannedFault
from multiverse_lab.simulation.generate import with_pair
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario
from multiverse_lab.simulation.world import Pair, WorldSettings


def keeps_its_promises(scenario: Scenario) -> Outcome:
    outcome = simulate(scenario)
    assert not outcome.violations, outcome.story()
    return outcome


# --- databases --------------------------------------------------------------------------------------

LOST, RESTORED = IncidentKind.DATABASE_LOST, IncidentKind.DATABASE_RESTORED
JOBS = tuple(Arrival(1.0 + 3 * n, Batch(uid=1000 + n % 2, nodes=1 + n % 2, seconds=12.0)) for n in range(6))


def replaced(kind: IncidentKind, at: float, seconds: float, pair: Pair, **more: object) -> Outcome:
    scenario = Scenario(7, JOBS, incidents=(Incident(at, kind, seconds),))
    return keeps_its_promises(with_pair(replace(scenario, **more), pair))  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", Pair)
@pytest.mark.parametrize("at", one_in(3, [0.5, 4.0, 5.5, 6.2, 7.3, 9.0, 12.5, 20.0, 33.0]))
def test_a_lost_database_costs_no_job(pair: Pair, at: float) -> None:
    """Running jobs go on in VMs of which no row tells, and their room is not given to others."""
    outcome = replaced(IncidentKind.DATABASE_LOST, at, 0.0, pair)
    assert set(outcome.results.values()) == {"COMPLETED"}


@pytest.mark.parametrize("pair", Pair)
@pytest.mark.parametrize("at", one_in(2, [0.5, 4.1, 5.5, 6.2, 9.0, 60.0]))
@pytest.mark.parametrize("seconds", one_in(2, [1.0, 4.0, 12.0, 60.0]))
def test_a_restored_database_costs_no_job(pair: Pair, at: float, seconds: float) -> None:
    outcome = replaced(IncidentKind.DATABASE_RESTORED, at, seconds, pair)
    assert set(outcome.results.values()) == {"COMPLETED"}


@pytest.mark.parametrize("dies", [11.5, 11.8, 11.95])
def test_a_vm_that_died_before_an_older_database_is_restored_quarantines_no_job(dies: float) -> None:
    """The restored row is older than the start of the job that ran on the VM."""
    incidents = (
        Incident(6.2, IncidentKind.DATABASE_RESTORED, 12.0 - 6.2),
        Incident(dies, IncidentKind.VM_DIES),
    )
    outcome = keeps_its_promises(Scenario(7, JOBS, incidents=incidents))
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert not any("quarantined" in line for line in outcome.journal)


@pytest.mark.parametrize("away", [7.1, 7.5])
def test_a_job_that_an_older_database_has_not_pinned_yet_gets_no_other_vm_beside_the_lost_one(away: float) -> None:
    """Its host is out of reach until its VM counts as lost. The job starts there as soon as the host is back."""
    world = WorldSettings(hosts=WorldSettings().hosts[:1])
    incidents = (
        Incident(6.6, IncidentKind.DATABASE_RESTORED, 40.0),
        Incident(away, IncidentKind.HOST_AWAY, 150.0),
    )
    outcome = keeps_its_promises(Scenario(7, (Arrival(1.0, Batch(seconds=30.0)),), world=world, incidents=incidents))
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert outcome.transitions["vm: starting - lost -> lost"] == 1


def test_a_template_is_found_that_an_older_database_does_not_know_once_its_source_answers() -> None:
    """The source is silent from before the database is restored until all jobs have ended."""
    incidents = (
        Incident(0.5, IncidentKind.DATABASE_RESTORED, 60.0),
        Incident(50.0, IncidentKind.SOURCE_SLOW, 150.0),
    )
    outcome = keeps_its_promises(Scenario(7, (Arrival(1.0, Batch()),), incidents=incidents))
    assert outcome.transitions["template: nothing - found -> ready"] == 1


@pytest.mark.parametrize(("copied", "building"), [(1.5, 0), (4.0, 1)])
def test_a_restored_database_gives_the_room_of_templates_to_nobody_else(copied: float, building: int) -> None:
    """The copy is made before the first job's template is asked for, or while it is being built. When it is restored,
    that template has been dropped, and the host is full of the second job's VM and of the template that it maps."""
    jobs = (
        Arrival(1.0, Batch(seconds=0.0)),
        Arrival(20.0, Batch(image="stiff", size=Size(1, 860), seconds=300.0)),
        Arrival(60.0, Batch()),
    )
    world = WorldSettings(hosts=(replace(WorldSettings().hosts[0], capacity=Size(4, 2150, 65536)),))
    incidents = (Incident(copied, IncidentKind.DATABASE_RESTORED, 65.0 - copied),)
    outcome = keeps_its_promises(Scenario(7, jobs, world=world, incidents=incidents))
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert any("the daemon was restarted before it was built" in line for line in outcome.journal) == bool(building)


def test_a_restored_database_gives_the_room_of_a_template_that_was_built_again_to_nobody_else() -> None:
    """Seed 10,310,100. After the copy was made, a job begins in a VM of the template, an operator deletes the
    template, and the next job has it built again. When the copy is restored, the first job's VM keeps the first
    build's memory, so that there is no room for a third VM."""
    jobs = (
        Arrival(1.0, Batch(seconds=0.0)),
        Arrival(20.0, Batch(seconds=300.0)),
        Arrival(35.0, Batch(seconds=300.0)),
        *(Arrival(90.0 + n, Batch(seconds=100.0)) for n in range(3)),
    )
    world = WorldSettings(hosts=(replace(WorldSettings().hosts[0], capacity=Size(8, 1300, 65536)),))
    incidents = (
        Incident(15.0, IncidentKind.DATABASE_RESTORED, 60.0),
        Incident(30.0, IncidentKind.TEMPLATE_DELETED),
    )
    outcome = keeps_its_promises(Scenario(7, jobs, world=world, incidents=incidents))
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert outcome.transitions["template: ready - vanished -> absent"] == 1


@pytest.mark.parametrize("offer", [False, True])
@pytest.mark.parametrize("pair", [Pair.SLURM_HOSTS, Pair.GRID_HOSTS])
@pytest.mark.parametrize("copied", [7.5, 35.0])
@pytest.mark.parametrize("restored", one_in(3, [40.9, 41.6, 42.3]))
def test_a_restored_database_gives_no_job_a_vm_in_which_another_job_ran(
    offer: bool, pair: Pair, copied: float, restored: float
) -> None:
    """Seed 10,290,285. The copy is made while the VM is a joined spare, or becomes one. It is restored once the first
    job, which took the spare, has ended, and before the spare is gone."""
    jobs = (Arrival(40.0, Batch(uid=1000, seconds=0.0)), Arrival(43.0, Batch(uid=1001, seconds=5.0)))
    pool = PoolSettings(depth=Depth.JOINED, min=1, memory=500, offer=offer)
    incidents = (Incident(copied, RESTORED, restored - copied),)
    outcome = keeps_its_promises(
        with_pair(Scenario(7, jobs, settings=Settings(pool=(pool,)), incidents=incidents), pair)
    )
    assert set(outcome.results.values()) == {"COMPLETED"}


def test_a_restored_database_may_say_of_a_host_that_has_come_back_that_it_is_off() -> None:
    """Seed 10,225,524. The copy is made while the host counts as fenced. The job's VM is made there later. The first
    pass with the restored database is committed before the host's answer has come: the second job fits on no host then,
    and has to wait."""
    (host,) = WorldSettings().hosts
    world = WorldSettings(hosts=(replace(host, name="h0"), replace(host, name="h1", capacity=Size(1, 256, 65536))))
    incidents = (
        Incident(2.0, IncidentKind.HOST_FENCED, 40.0),
        Incident(35.0, IncidentKind.DATABASE_RESTORED, 65.0),
        Incident(95.0, IncidentKind.SOURCE_SLOW, 30.0),
    )
    jobs = (
        Arrival(60.0, Batch(size=Size(2, 512), seconds=100.0)),
        Arrival(99.0, Batch(size=Size(2, 512), seconds=5.0)),
    )
    outcome = keeps_its_promises(Scenario(7, jobs, world=world, incidents=incidents))
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert outcome.transitions["host: fenced - found -> known"] == 1


@pytest.mark.parametrize(("kind", "at", "seconds"), [(LOST, 90.0, 0.0), (RESTORED, 0.5, 89.5), (RESTORED, 3.0, 87.0)])
def test_a_job_that_was_queued_again_waits_for_a_host_out_of_reach_that_no_record_names(
    kind: IncidentKind, at: float, seconds: float
) -> None:
    """Seed 10,232,252. The job runs on a host that is out of reach, so the scheduler queues it again. Only the
    scheduler still shows the node of its first run."""
    (host,) = WorldSettings().hosts
    world = WorldSettings(hosts=(replace(host, name="h0"), replace(host, name="h1", capacity=Size(2, 1024, 65536))))
    incidents = (Incident(15.0, IncidentKind.HOST_AWAY, 200.0), Incident(at, kind, seconds))
    outcome = keeps_its_promises(Scenario(7, (Arrival(1.0, Batch(seconds=170.0)),), world=world, incidents=incidents))
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert any("its earlier run may go on in mvsimul-1, which has no record" in line for line in outcome.told)


@pytest.mark.parametrize("late", [2.0, 2.3, 2.6])
def test_a_job_starts_on_no_vm_that_was_replaced_and_is_to_be_set_down(late: float) -> None:
    """Seed 10,249,772. The start of the first VM gets no answer, the second try fails, and the VM is replaced. The
    first start takes effect all the same, and the node registers with the tag that the job is pinned to. The job
    started there, and was ended as the node was set DOWN. Now a node that is not shown is not set DOWN, and no job is
    pinned while another node has its tag."""
    faults = (
        PlannedFault("hypervisor.start mvsimul-1 #1", FaultKind.LATE, late),
        PlannedFault("hypervisor.start mvsimul-1 #2", FaultKind.FAILED),
    )
    outcome = keeps_its_promises(Scenario(7, (Arrival(1.0, Batch(seconds=40.0)),), faults=faults))
    assert outcome.faults == faults
    assert set(outcome.results.values()) == {"COMPLETED"}


def test_a_job_that_fits_on_no_host_in_sight_waits_for_those_that_only_the_settings_name() -> None:
    """The database is lost while the host that could hold the job is out of reach. The first pass that can be committed
    is one that sees the job."""
    big = WorldSettings().hosts[0]
    world = WorldSettings(hosts=(replace(big, name="h0", capacity=Size(2, 1024, 65536)), big))
    jobs = (Arrival(40.0, Batch(size=Size(4, 2048))),)
    incidents = (
        Incident(20.0, IncidentKind.HOST_AWAY, 150.0, pick=0.9),
        Incident(20.0, IncidentKind.DISK_FULL, 50.0),
        Incident(30.0, IncidentKind.DATABASE_LOST),
    )
    outcome = keeps_its_promises(Scenario(7, jobs, world=world, incidents=incidents))
    assert set(outcome.results.values()) == {"COMPLETED"}


def test_names_do_not_recur_after_their_vms_are_gone() -> None:
    arrivals = (Arrival(1.0, Batch()), Arrival(60.0, Batch()))
    incidents = (Incident(0.5, IncidentKind.DATABASE_RESTORED, 50.0),)
    outcome = keeps_its_promises(Scenario(7, arrivals, incidents=incidents))
    assert set(outcome.results.values()) == {"COMPLETED"}


def broken_scenario(kind: IncidentKind, at: float, seconds: float, length: float = 12.0) -> Scenario:
    jobs = tuple(replace(one, batch=replace(one.batch, seconds=length)) for one in JOBS)
    return Scenario(7, (*jobs, Arrival(90.0, Batch())), incidents=(Incident(at, kind, seconds),))


@pytest.mark.parametrize(
    ("what", "instead", "scenario", "noticed"),
    [
        ((planner, "adopt_unexplained"), lambda _: None, broken_scenario(LOST, 9.0, 0.0), "was made to carry"),
        ((attempt, "_has_explained_node"), lambda *_: True, broken_scenario(RESTORED, 4.1, 4.0), "were all well"),
        ((SchedulerView, "may_have_a_job"), lambda *_: False, broken_scenario(LOST, 12.5, 0.0, 60.0), "while job"),
        ((tables.State, "unconfirmed"), frozenset(), broken_scenario(RESTORED, 6.2, 60.0), "was used again"),
        ((Store, "_skip_numbers"), lambda _: None, broken_scenario(RESTORED, 0.5, 80.0), "was used again"),
    ],
)
def test_the_world_notices_a_controller_that_concludes_too_much(
    what: tuple[object, str], instead: object, scenario: Scenario, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeps_its_promises(scenario)
    if what[1] == "unconfirmed":  # every State has one of its own
        instead = property(lambda _: NeverUnmade(), lambda *_: None)
        monkeypatch.setattr(*what, instead, raising=False)
    else:
        monkeypatch.setattr(*what, instead)
    violations = simulate(scenario).violations
    assert any(noticed in one for one in violations), violations


class NeverUnmade(set[Key]):
    def update(self, *_: object) -> None:
        """Nothing is ever in it."""


# --- users ------------------------------------------------------------------------------------------

SILENCE = 2000.0  # seconds; longer than all attempts of a job that fails again and again


@pytest.mark.parametrize("pair", Pair)
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("at", one_in(4, [4.5, 0.1, 1.4, 60.0]))
def test_a_silent_name_service_costs_no_job_and_no_vm(pair: Pair, restarts: bool, at: float) -> None:
    """It falls silent before, while and after the VMs of jobs are made."""
    arrivals = tuple(Arrival(1.0 + n, Batch(uid=1000 + n % 2, nodes=1 + n % 2, seconds=20.0)) for n in range(4))
    incidents = [Incident(at, IncidentKind.NAME_SERVICE_SILENT, SILENCE)]
    if restarts:  # and so nothing is remembered
        incidents.append(Incident(at + 0.5, IncidentKind.CONTROLLER_CRASH, 1.0))
    limit = SILENCE + 2000.0
    scenario = with_pair(Scenario(7, arrivals, incidents=tuple(incidents), limit=limit), pair)
    outcome = keeps_its_promises(replace(scenario, limit=limit))
    assert set(outcome.results.values()) == {"COMPLETED"}
    assert not any("-> ending" in line or "gave up" in line for line in outcome.journal), outcome.story()


def test_a_job_whose_user_does_not_exist_is_cancelled_before_a_vm_is_made() -> None:
    outcome = keeps_its_promises(Scenario(7, (Arrival(1.0, Batch(uid=4242)), Arrival(2.0, Batch()))))
    assert sorted(outcome.results.values()) == ["CANCELLED", "COMPLETED"]
    assert sum("planned (planned)" in line for line in outcome.journal) == 1
    assert any("no user has the uid 4242" in line for line in outcome.journal)


def test_a_user_who_is_unknown_holds_up_no_other_job() -> None:
    silent = Incident(3.0, IncidentKind.NAME_SERVICE_SILENT, 500.0)
    arrivals = (Arrival(1.0, Batch()), Arrival(10.0, Batch(uid=1001, priority=5000)), Arrival(11.0, Batch()))
    outcome = keeps_its_promises(Scenario(7, arrivals, incidents=(silent,)))
    ends = [text for at, text in outcome.events if "reclaiming -> done" in text and at < 300.0]
    assert len(ends) == 2 and set(outcome.results.values()) == {"COMPLETED"}
