"""Jobs that are saved and go on: each step fails, hangs, acts late or twice, and everything is lost beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from tests.sampled import one_in

from multiverse.config import PacingSettings, SaveSettings, Settings
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host
from multiverse.core.model.identity import Identity
from multiverse.core.model.job import SaveWish
from multiverse.core.model.saved import Storage
from multiverse.core.model.vm import VmSpec
from multiverse.core.state import State
from multiverse_lab.simulation.cluster import ClusterSettings
from multiverse_lab.simulation.faults import ControllerCrash, FaultKind, Incident, IncidentKind, PlannedFault, possible
from multiverse_lab.simulation.generate_saving import saving
from multiverse_lab.simulation.guests import Guest
from multiverse_lab.simulation.jobs import Batch, JobRecord
from multiverse_lab.simulation.machines import ABILITIES
from multiverse_lab.simulation.network import AgentBehaviour
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.processes import FrozenProcesses, Ledger, SavedFiles
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.world import WorldSettings

SHARED = Storage("shared", "qemu")
SAVE = UserAction(12.0, "save")
HELD = (UserAction(12.0, "save_held"), UserAction(20.0, "resume_saved"))


def host(name: str) -> Host:
    return Host(name, Size(2, 4096, 65536), ABILITIES, Size(2, 4096, 65536), "tcg", storage=SHARED)


def scenario(*actions: UserAction, batch: Batch | None = None, hosts: tuple[str, ...] = ("h0", "h1")) -> Scenario:
    """A job of 20 s, which runs from second 8 or so on, and what is done with it."""
    cluster = ClusterSettings(node_timeout=20.0, min_job_age=(2.0, 3.0), requeue_delay=5.0)
    return Scenario(
        3,
        (Arrival(0.5, batch or Batch(seconds=20.0), actions=actions),),
        WorldSettings(tuple(map(host, hosts)), cluster=cluster),
        Settings(pacing=PacingSettings(silence=5.0), save=SaveSettings(enabled=True, no_requeue=True)),
        limit=2000.0,
    )


def goes_well(one: Scenario, *results: str) -> Outcome:
    outcome = simulate(one)
    assert not outcome.violations, outcome.story()
    assert set(outcome.results.values()) <= {"COMPLETED", *results}, outcome.story()
    return outcome


def saved(outcome: Outcome) -> int:
    """How often processes went on in a restored VM."""
    return outcome.transitions["saved: stored - runs -> thawing"]


@pytest.mark.parametrize("actions", [(SAVE,), HELD, (SAVE, UserAction(20.0, "save"), UserAction(31.0, "save"))])
def test_a_saved_job_goes_on_where_it_stopped(actions: tuple[UserAction, ...]) -> None:
    assert saved(goes_well(scenario(*actions))) == sum(action.kind != "resume_saved" for action in actions)


def test_a_job_that_asks_for_it_is_saved_before_each_time_limit() -> None:
    batch = Batch(seconds=60.0, limit=30.0, save=SaveWish(12.0))
    assert saved(goes_well(scenario(batch=batch))) >= 3


def test_a_job_that_is_not_to_be_queued_again_is_not_after_its_save() -> None:
    lost = Incident(25.0, IncidentKind.VM_DIES)
    one = scenario(SAVE, batch=Batch(seconds=40.0, requeue=False))
    assert saved(outcome := goes_well(replace(one, incidents=(lost,)), "NODE_FAIL")) == 1
    assert set(outcome.results.values()) == {"NODE_FAIL"}


def test_a_requeue_that_slurmctld_has_forgotten_is_made_again_before_the_time_limit() -> None:
    one = scenario(SAVE, batch=Batch(seconds=60.0, limit=80.0))
    cluster = replace(one.world.cluster, forgets=1.0, node_timeout=300.0)
    outcome = goes_well(replace(one, world=replace(one.world, cluster=cluster)))
    assert outcome.transitions["saved: stored - forgotten -> queueing"] == saved(outcome) == 1


CALLS = (
    "scheduler.prepare 1 #1", "scheduler.requeue 1 #1", "scheduler.release 1 #1", "scheduler.forbid_requeue 1 #1",
    "scheduler.undo 1 #1", *(f"hypervisor.{what} mvsimul-1 #1" for what in ("freeze", "cut", "save", "thaw")),
    "hypervisor.create mvsimul-1 #2", "hypervisor.start mvsimul-1 #2", "hypervisor.discard mvsimul-1-1 #1",
)  # fmt: skip
"""Each step. What is undone has failed before."""


def faults(call: str) -> Iterator[PlannedFault]:
    port, _, rest = call.partition(".")
    for kind in FaultKind:
        if possible("scheduler" if port == "scheduler" else "hypervisor", rest.partition(" ")[0], kind):
            for seconds in {FaultKind.CUT: (0.005, 0.03, 0.5), FaultKind.LATE: (1.0, 15.0)}.get(kind, (8.0,)):
                yield PlannedFault(call, kind, seconds)


@pytest.mark.parametrize("part", one_in(6, range(6)))
@pytest.mark.parametrize("call", CALLS)
def test_each_step_fails_hangs_acts_late_or_twice(call: str, part: int) -> None:
    one = scenario(*HELD, batch=Batch(seconds=20.0, requeue="forbid" not in call))
    before = (PlannedFault("hypervisor.freeze mvsimul-1 #1", FaultKind.FAILED),) if ".undo" in call else ()
    for fault in list(faults(call))[part::6]:
        outcome = goes_well(replace(one, faults=(*before, fault)))
        assert fault in outcome.faults, fault


@pytest.mark.parametrize("part", one_in(6, range(6)))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_the_controller_crashes_at_each_commit(after: bool, part: int) -> None:
    one = scenario(*HELD)
    for commit in range(8 + part, goes_well(one).commits + 1, 6):
        outcome = goes_well(replace(one, crashes=(ControllerCrash(commit, after),)))
        assert outcome.crash_count == 1 and saved(outcome), outcome.story()


ONE = scenario(SAVE)


@cache
def moments(*actions: UserAction, seconds: float = 20.0) -> list[float]:
    """Shortly after each event since the job was saved: between all steps."""
    outcome = goes_well(scenario(*(actions or (SAVE,)), batch=Batch(seconds=seconds)))
    began = next(at for at, text in outcome.events if text.startswith("saved 1:"))
    last = max(at for at, text in outcome.events if "discarding -> gone" in text)
    return sorted({round(at, 2) + 0.002 for at, _ in outcome.events if began - 0.1 <= at <= last})


LOST = (
    (IncidentKind.VM_DIES, 0.0, 0.0),
    (IncidentKind.CLUSTER_RESTARTS, 8.0, 0.0),
    (IncidentKind.CONTROLLER_CRASH, 0.5, 0.0),
    *((kind, 30.0, pick) for pick in (0.0, 0.9) for kind in (
        IncidentKind.HOST_AWAY, IncidentKind.HOST_FENCED, IncidentKind.STORAGE_AWAY, IncidentKind.STORAGE_FULL)),
)  # fmt: skip


@pytest.mark.parametrize("part", one_in(9, range(9)))
@pytest.mark.parametrize("lost", one_in(2, LOST))
def test_something_is_lost_between_all_steps(lost: tuple[IncidentKind, float, float], part: int) -> None:
    kind, seconds, pick = lost
    for at in moments()[part::9]:
        goes_well(replace(ONE, incidents=(Incident(at, kind, seconds, pick),)))


@pytest.mark.parametrize("part", one_in(8, range(8)))
@pytest.mark.parametrize(
    "kinds", [("cancel",), ("requeue",), ("hold", "release"), ("suspend", "resume"), ("change", "change")]
)
def test_a_user_acts_between_all_steps(kinds: tuple[str, ...], part: int) -> None:
    sizes = (Size(1, 300), Batch().size)
    for at in moments()[part::8]:
        done = (UserAction(at - 0.5 + 10 * nth, kind, sizes[nth]) for nth, kind in enumerate(kinds))  # type: ignore[arg-type]
        goes_well(replace(ONE, arrivals=(replace(ONE.arrivals[0], actions=(SAVE, *done)),)), "CANCELLED")


@pytest.mark.parametrize("part", one_in(8, range(8)))
def test_a_time_limit_ends_between_all_steps(part: int) -> None:
    began = goes_well(ONE).runs[0][1]
    for at in moments()[part::8]:
        batch = Batch(seconds=20.0, limit=at - began)
        goes_well(replace(ONE, arrivals=(replace(ONE.arrivals[0], batch=batch),)), "TIMEOUT")


THRICE = (SAVE, UserAction(18.0, "save"), UserAction(24.0, "save"))


@pytest.mark.parametrize("part", one_in(9, range(9)))
@pytest.mark.parametrize("seconds", [0.3, 2.0, 9.0])
def test_the_database_is_restored_from_a_copy_of_each_moment(seconds: float, part: int) -> None:
    """Its rows know VMs that were saved and restored meanwhile, under the same names."""
    one = scenario(*THRICE, batch=Batch(seconds=25.0))
    soon = replace(one.settings.save, keep_days=0.005)  # what no row explains goes when it is older than any state
    for at in moments(*THRICE, seconds=25.0)[part::9]:
        restored = Incident(at, IncidentKind.DATABASE_RESTORED, seconds)
        outcome = goes_well(replace(one, settings=replace(one.settings, save=soon), incidents=(restored,)))
        assert outcome.crash_count == 1


@pytest.mark.parametrize("part", one_in(9, range(9)))
@pytest.mark.parametrize("lost", [True, False])
def test_a_database_that_knows_of_no_save_lets_the_job_go_on(lost: bool, part: int) -> None:
    """It is lost at each moment; or then a copy takes its place that was made before."""
    soon = replace(ONE.settings.save, keep_days=0.005)
    for at in moments()[part::9]:
        before = Incident(11.0, IncidentKind.DATABASE_RESTORED, at - 11.0)
        incident = Incident(at, IncidentKind.DATABASE_LOST) if lost else before
        outcome = goes_well(replace(ONE, settings=replace(ONE.settings, save=soon), incidents=(incident,)))
        assert outcome.crash_count == 1


# --- copies ------------------------------------------------------------------------------------------


def with_copies(*actions: UserAction, **more: object) -> Scenario:
    """The same job, on hosts that have a storage each, and a common one for copies."""
    one = scenario(*actions)
    copies = Storage("copies", SHARED.machine)
    hosts = tuple(
        replace(host, storage=Storage(f"of {host.name}", SHARED.machine), copies=copies) for host in one.world.hosts
    )
    return replace(one, world=replace(one.world, hosts=hosts), **more)  # type: ignore[arg-type]


COPIED = with_copies(UserAction(12.0, "save_held"), UserAction(60.0, "resume_saved"))


def test_each_state_is_copied_once() -> None:
    outcome = goes_well(with_copies(*HELD))
    assert outcome.transitions["saved: stored - copy due -> copying"] == saved(outcome) == 1


def test_a_job_goes_on_before_its_state_is_copied() -> None:
    fault = PlannedFault("hypervisor.copy mvsimul-1-1 #1", FaultKind.SLOW, 30.0)
    outcome = goes_well(with_copies(SAVE, faults=(fault,)))
    assert outcome.transitions["saved: copying - runs -> thawing"] == 1


@pytest.mark.parametrize("part", one_in(6, range(6)))
def test_each_copy_fails_hangs_acts_late_or_twice(part: int) -> None:
    for fault in list(faults("hypervisor.copy mvsimul-1-1 #1"))[part::6]:
        outcome = goes_well(replace(COPIED, faults=(fault,)))
        assert fault in outcome.faults, fault


@pytest.mark.parametrize("agents", [False, True])
def test_a_job_whose_host_is_lost_for_long_goes_on_from_the_copy(agents: bool) -> None:
    """It ends long before the host is back, whose own files are removed then."""
    one = replace(COPIED, incidents=(Incident(40.0, IncidentKind.HOST_FENCED, 600.0, pick=0.0),))
    if agents:
        one = replace(one, world=replace(one.world, agents=AgentBehaviour()))
    outcome = goes_well(one)
    story = outcome.story()
    assert "instant on h0" in story and "restored on h1 from its state" in story
    assert saved(outcome) == 1 and outcome.runs[-1][2] < 200.0 < 600.0 < outcome.seconds, story


# --- several VMs -------------------------------------------------------------------------------------

PAIR = Batch(seconds=20.0, nodes=2)


def test_a_saved_job_of_several_vms_goes_on_where_it_stopped() -> None:
    assert saved(goes_well(scenario(*HELD, batch=PAIR))) == 1


OF_ONE_VM = tuple(
    call.replace("mvsimul-1 ", f"mvsimul-{number} ").replace("mvsimul-1-1", f"mvsimul-{number}-1")
    for call in CALLS
    for number in (1, 2)
    if call.startswith("hypervisor")
)


@pytest.mark.parametrize("part", one_in(6, range(6)))
@pytest.mark.parametrize("call", one_in(2, (*OF_ONE_VM, "scheduler.prepare 1 #1", "scheduler.check_script #1")))
def test_each_step_of_one_vm_of_several_fails_hangs_acts_late_or_twice(call: str, part: int) -> None:
    one = scenario(*HELD, batch=PAIR)
    for fault in list(faults(call))[part::6]:
        outcome = goes_well(replace(one, faults=(fault,)))
        assert fault in outcome.faults, fault


@pytest.mark.parametrize("part", one_in(6, range(6)))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_the_controller_crashes_at_each_commit_of_a_job_of_several_vms(after: bool, part: int) -> None:
    one = scenario(*HELD, batch=PAIR)
    for commit in range(8 + part, goes_well(one).commits + 1, 6):
        outcome = goes_well(replace(one, crashes=(ControllerCrash(commit, after),)))
        assert outcome.crash_count == 1 and saved(outcome), outcome.story()


@pytest.mark.parametrize("part", one_in(9, range(9)))
@pytest.mark.parametrize("lost", one_in(2, LOST))
def test_something_of_a_job_of_several_vms_is_lost_between_all_steps(
    lost: tuple[IncidentKind, float, float], part: int
) -> None:
    one, (kind, seconds, pick) = scenario(SAVE, batch=PAIR), lost
    for at in moments()[part::9]:
        goes_well(replace(one, incidents=(Incident(at, kind, seconds, pick),)))


def test_the_world_notices_a_vm_that_goes_on_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = Guest.restore

    def forgetting(self: Guest, files: SavedFiles) -> None:
        other = files.frozen is not None and files.frozen.which is None
        restored(self, replace(files, name="another-9") if other else files)

    monkeypatch.setattr(Guest, "restore", forgetting)
    assert ", and in mvsimul-" in noticed(scenario(SAVE, batch=PAIR))


@pytest.mark.parametrize("seed", one_in(6, range(6)))
def test_promises_are_kept_with_saves(seed: int) -> None:
    outcome = simulate(saving(seed))
    assert not outcome.violations, outcome.story()


# --- what the world notices --------------------------------------------------------------------------


def noticed(one: Scenario) -> str:
    return "\n".join(simulate(replace(one, limit=300.0)).violations)


def test_the_world_notices_processes_that_go_on_after_they_were_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Guest.cut

    def leaking(self: Guest) -> None:
        computed, processes = self._computed, self._processes
        cut(self)
        if processes is not None:
            self.cluster.ledger.go_on(processes, computed, self.name, self)

    monkeypatch.setattr(Guest, "cut", leaking)
    assert "and in another VM" in noticed(scenario(SAVE))


def test_the_world_notices_work_that_is_executed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = Ledger.attach
    monkeypatch.setattr(
        Ledger, "attach", lambda *args: (found := attach(*args)) and replace(found, computed=found.computed - 1.0)
    )
    assert "of the script, and had come to" in noticed(scenario(SAVE))


def test_the_world_notices_a_state_that_attaches_to_another_run_or_a_second_time() -> None:
    ledger, job = Ledger(), JobRecord(0, "1", 0, Batch(), 0.0)
    spec = VmSpec("vm", "h0", "slim", CloneKind.INSTANT, Size(1, 64), "")
    frozen = FrozenProcesses(ledger.begin(job), 3.0, cut=True)
    one = SavedFiles("state", spec, Identity("", "", "", "", ""), frozen, 1, 0.0)
    job.restarts = 1
    assert ledger.attach(one, job, "vm", "its guest") and not ledger.violations
    frozen.which.run = 0
    assert ledger.attach(one, job, "vm", "another guest") and "a second time" in ledger.violations[0]
    job.restarts = 3
    assert ledger.attach(one, job, "vm", "another guest") and "attached to 1, 3" in ledger.violations[1]


def test_the_world_notices_a_saved_job_that_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "saved_for", lambda *_: None)
    assert "begins anew though it is saved" in (found := noticed(scenario(SAVE))), found


def test_the_world_notices_files_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiverse_lab.simulation.machines.Machines.discard", lambda *_: None)
    assert "the files mvsimul-1-1 in shared" in noticed(scenario(SAVE))
