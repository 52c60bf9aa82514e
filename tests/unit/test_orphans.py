"""VMs and templates that no record explains, numbers that do not recur, and the database that replaces a lost one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from multiverse.cli import status
from multiverse.controller.users import LookupFailure
from multiverse.core.capacity.room import left_behind
from multiverse.core.errors import Refused
from multiverse.core.machines.tables import permitted_effects
from multiverse.core.machines.vm import OFFER_TERM
from multiverse.core.model.basics import Depth, Size
from multiverse.core.model.job import AttemptState, Job, JobRef, JobState, Node, NodeState
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import TemplateCondition, TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.planner import plan
from multiverse.core.transition import Change, Command, EffectKind, Event, Move
from multiverse.service.alerts import findings, repair_command, unknown_user
from multiverse.store import Store, open_store
from multiverse.store.database import NUMBERS_A_SECOND
from tests.unit.planner_harness import POLICY, ManualClock, PlannerHarness
from tests.unit.rows import attempt, vm

A, V = AttemptState, VmState
OLD = "mvtest0-150"
BIG = Size(2, 6000)


def found(**job: object) -> PlannerHarness:
    """A harness whose database knows nothing of the VM `OLD`, on whose node job 7 runs."""
    harness = PlannerHarness()
    harness.template()
    harness.vms[OLD] = VmSeen(OLD, "h1", VmCondition.RUNNING, address="10.9.1.77", mac="02:1", token="t", size=BIG)
    harness.nodes[OLD] = Node(OLD, NodeState.BUSY, ("vm", "mv_77"))
    harness.job(state=JobState.RUNNING, gated=False, pinned="mv_77")
    harness.jobs["7"] = harness.jobs["7"]._replace(nodes=(OLD,), **job)  # type: ignore[arg-type]
    harness.run()
    return harness


def orphan(harness: PlannerHarness) -> Vm:
    return next(vm for vm in harness.rows.vms.values() if vm.name == OLD)


def free(harness: PlannerHarness) -> None:
    """The job has left the node."""
    del harness.jobs["7"]
    harness.node(OLD)


def test_a_vm_that_no_record_explains_gets_a_row_and_a_claim_of_its_size_and_keeps_its_address() -> None:
    harness = found()
    vm = orphan(harness)
    assert (vm.state, vm.token, vm.size, vm.attempt) == (V.ORPHAN, "t", BIG, None)
    (claim,) = (claim for claim in harness.rows.claims if claim.owner == vm.key)
    assert (claim.domain, claim.size.memory) == ("h1", BIG.memory + harness.hosts["h1"].vm_overhead)
    assert "10.9.1.77/16" in harness.state.addresses
    assert not any(row.key == vm.key for row, _ in permitted_effects(harness.state)), "nothing is done to it"
    harness.job("8", size=Size(1, 3000))
    for _ in range(3):
        harness.run()
    assert harness.attempt().state is A.QUEUED, "its room is not given to others"


def test_serials_jump_past_what_is_shown() -> None:
    harness = found()
    harness.node("mvtest0-152", NodeState.BUSY)
    harness.job("8", size=Size(1, 100))
    for _ in range(2):
        harness.run()
    (vm,) = harness.all_vms()
    assert vm.id > 152 and vm.name == f"mvtest0-{vm.id}" and harness.rows.next_serial == vm.id + 1


def test_an_orphan_is_kept_while_its_job_runs_and_released_when_the_job_has_left() -> None:
    harness = found()
    harness.run()
    assert orphan(harness).job_id == "7"
    for _ in range(5):
        harness.pass_time(100_000)
        harness.run()
    assert orphan(harness).state is V.ORPHAN
    free(harness)
    harness.run()
    assert orphan(harness).state is V.RELEASING
    (effect,) = (effect.kind for row, effect in permitted_effects(harness.state) if row.key == orphan(harness).key)
    assert effect is EffectKind.RELEASE, "its guest writes back"


def test_an_idle_orphan_is_released_after_a_second_observation() -> None:
    harness = found()
    harness.run()
    free(harness)
    first = PlannerHarness()
    first.vms, first.nodes = dict(harness.vms), dict(harness.nodes)
    first.run()
    assert orphan(first).state is V.ORPHAN
    first.pass_time(OFFER_TERM)
    first.run()
    assert orphan(first).state is V.RELEASING


def test_an_orphan_is_kept_while_a_job_is_tied_to_its_tag() -> None:
    """The job may start there at any moment. It is put back to the gate first."""
    harness = found()
    harness.node(OLD)
    harness.nodes[OLD] = Node(OLD, NodeState.IDLE, ("vm", "mv_77"))
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.PENDING, nodes=())
    harness.pass_time(10 * OFFER_TERM)
    harness.run()
    assert orphan(harness).state is V.ORPHAN and harness.attempt().state is A.UNGATED
    harness.job(gated=True, pinned=None)
    harness.run()
    assert orphan(harness).state is V.RELEASING


def test_nothing_is_concluded_of_an_orphan_whose_host_is_out_of_reach_and_its_job_does_not_run_twice() -> None:
    harness = found()
    harness.run()
    harness.hypervisor_known, harness.unknown_since = False, harness.clock.time
    harness.jobs["7"] = harness.jobs["7"]._replace(
        ref=JobRef("7", 900, 1), state=JobState.PENDING, gated=True, pinned=None, nodes=()
    )
    harness.pass_time(100 * POLICY.silence)
    harness.run()
    assert orphan(harness).state is V.ORPHAN
    host = harness.hosts.pop("h1")
    harness.hosts["h2"] = replace(host, name="h2")
    harness.template(host="h2")
    harness.hypervisor_known = True
    for _ in range(3):
        harness.run()
    assert orphan(harness).state is V.ORPHAN and harness.attempt().state is A.QUEUED
    assert OLD in harness.reasons["7"]
    harness.run(Command("fence", "h1"))
    assert orphan(harness).state is V.ENDING


def test_a_job_does_not_run_twice_when_its_orphan_cannot_be_ended() -> None:
    harness = found()
    harness.run()
    harness.run(Command("end", key=orphan(harness).key))
    host = harness.hosts.pop("h1")  # before the VM's destruction has begun
    harness.hosts["h2"] = replace(host, name="h2")
    harness.template(host="h2")
    harness.jobs["7"] = harness.jobs["7"]._replace(
        ref=JobRef("7", 900, 1), state=JobState.PENDING, gated=True, pinned=None, nodes=()
    )
    for _ in range(3):
        harness.run()
    assert orphan(harness).state is V.LOST and harness.attempt().state is A.QUEUED
    assert OLD in harness.reasons["7"]


def test_an_orphan_that_has_died_is_ended() -> None:
    harness = found()
    harness.vms[OLD] = replace(harness.vms[OLD], condition=VmCondition.DEAD, reason="its QEMU has ended")
    harness.run()
    assert (orphan(harness).state, text_of(orphan(harness).reason)) == (V.ENDING, "its QEMU has ended")


def test_an_operator_ends_an_orphan_and_nothing_else() -> None:
    harness = found()
    harness.run(Command("end", key=orphan(harness).key))
    assert orphan(harness).state is V.ENDING
    other = PlannerHarness()
    other.to_allocated()
    (vm,) = other.all_vms()
    assert other.run(Command("end", key=vm.key)) == []


def test_an_orphan_is_shown_with_its_job_and_the_command_that_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    harness = found()
    harness.run()
    vm = orphan(harness)
    (one,) = findings(harness.rows, harness.world, harness.policy, harness.clock.time)
    assert one.kind == "orphan" and one.name == f"vm-{vm.id}" and one.jobs == ("7",)
    assert OLD in one.message and "job 7" in one.message and f"multiverse repair {one.name}" in one.remedy
    assert repair_command(one) == Command("end", key=vm.key)
    assert status._choose([one], [], fenced=False) == [], "a repair of everything ends no job"
    assert one.name in capsys.readouterr().out
    assert status._choose([one], [one.name], fenced=False) == [one]
    free(harness)
    idle = PlannerHarness()
    idle.vms = dict(harness.vms)
    idle.run()
    (two,) = findings(idle.rows, idle.world, idle.policy, idle.clock.time)
    assert not two.repair and OLD in two.message
    with pytest.raises(Refused):
        status._choose([two], [two.name], fenced=False)


def test_a_user_who_is_unknown_is_shown_with_the_jobs_that_wait() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.job("8", uid=1001)
    harness.run()
    failure = LookupFailure(1000, harness.clock.time - 90, "no answer")
    one = unknown_user(failure, harness.rows, harness.clock.time)
    assert one.kind == "user" and one.jobs == ("7",) and "1000" in one.message and "no answer" in one.message


# --- rows of an older database ------------------------------------------------------------------------


def test_a_waiting_job_that_runs_in_an_orphan_is_left_alone() -> None:
    harness = PlannerHarness()
    harness.template()
    harness.job(eligible=False)
    harness.run()
    harness.vms[OLD] = VmSeen(OLD, "h1", VmCondition.RUNNING)
    harness.node(OLD, NodeState.BUSY)
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.RUNNING, gated=False, pinned="mv_77", nodes=(OLD,))
    for _ in range(3):
        harness.run()
    assert harness.attempt().state is A.CANCELLED and orphan(harness).state is V.ORPHAN
    assert not any(entry.event == "strayed" for entry in harness.store.journal())


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning", "to_spawned"])
@pytest.mark.parametrize("tag", ["mv_77", "mv_1"])
def test_a_job_that_runs_in_other_vms_than_its_attempt_has_is_left_alone(stage: str, tag: str) -> None:
    harness = PlannerHarness()
    getattr(harness, stage)()
    harness.vms[OLD] = VmSeen(OLD, "h1", VmCondition.RUNNING)
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.RUNNING, gated=False, pinned=tag, nodes=(OLD,))
    harness.run()
    assert harness.attempt().state is A.RECLAIMING and not text_of(harness.attempt().quarantined)
    assert orphan(harness).state is V.ORPHAN
    harness.run()
    assert all(vm.state in (V.RELEASING, V.ENDING) for vm in harness.all_vms()), "its own are not needed"


@pytest.mark.parametrize("stage", ["to_claimed", "to_spawning"])
def test_an_attempt_whose_row_is_older_than_its_jobs_start_catches_up(stage: str) -> None:
    harness = PlannerHarness()
    getattr(harness, stage)()
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.RUNNING)
    harness.node(vm.name, NodeState.BUSY)
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.RUNNING, gated=False, pinned="mv_1", nodes=(vm.name,))
    for _ in range(3):
        harness.run()
    assert harness.attempt().state is A.ALLOCATED and harness.all_vms()[0].state is V.SERVING


@pytest.mark.parametrize("depth", [Depth.PARKED, Depth.JOINED])
def test_a_spare_that_is_in_use_becomes_an_orphan(depth: Depth) -> None:
    harness = PlannerHarness()
    harness.to_spawned()
    (vm,) = harness.all_vms()
    spare = replace(vm, attempt=None, pool=depth, state=V.PARKED if depth is Depth.PARKED else V.JOINED)
    harness.state._put(spare)
    harness.seen(vm.name, VmCondition.RUNNING)
    harness.node(vm.name, NodeState.BUSY)
    other = Job(JobRef("9", 700), "old", 1000, JobState.RUNNING, None, gated=False, pinned="mv_55", nodes=(vm.name,))
    harness.jobs["9"] = other
    harness.pass_time(1.0)
    harness.observe()
    moves = plan(harness.state, harness.world, [], harness.clock.time, harness.policy)
    changes = [change for move in moves for change in move.changes if change.row.key == vm.key]
    assert (changes[0].event, changes[0].row.state) == (Event.FOUND, V.ORPHAN)


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        (TemplateCondition.READY, TemplateState.READY),
        (TemplateCondition.BUILDING, TemplateState.BUILDING),
        (TemplateCondition.BROKEN, None),
    ],
)
def test_a_template_that_no_record_explains_gets_a_row_and_a_claim_unless_it_is_broken(
    condition: TemplateCondition, state: TemplateState | None
) -> None:
    """Seed 5316: the database was restored from a copy while a template was being built."""
    harness = PlannerHarness()
    which = harness.template()
    harness.templates[which] = replace(harness.templates[which], condition=condition)
    harness.run()
    found = [(row.which, row.state) for row in harness.rows.templates.values()]
    assert found == ([(which, state)] if state else [])
    assert [claim.owner.kind for claim in harness.rows.claims] == ["template"] * len(found)
    building = [effect.kind for _, effect in permitted_effects(harness.state)]
    assert building == ([EffectKind.BUILD] if state is TemplateState.BUILDING else []), "a build is finished"


def memory_of_templates(harness: PlannerHarness) -> int:
    """MiB that templates take on h1, those included whose rows have ended and whose VMs live."""
    claims = [
        *harness.rows.claims,
        *left_behind((vm.place for vm in harness.rows.vms.values()), harness.rows.templates),
    ]
    return sum(claim.size.memory for claim in claims if claim.owner.kind == "template")


def test_the_memory_of_a_template_is_counted_for_its_vms_though_it_was_built_again() -> None:
    """Seed 10,310,100: an operator deleted a template, it was built again, and then an older database was restored."""
    harness = PlannerHarness()
    which = harness.template()
    harness.templates[which] = replace(harness.templates[which], build="first")
    harness.job()
    for _ in range(3):
        harness.run()
    once = memory_of_templates(harness)
    (vm,) = harness.all_vms()
    harness.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.PARKED, token=vm.token, template_build="first")
    harness.templates[which] = replace(harness.templates[which], build="second")
    harness.run()
    assert memory_of_templates(harness) == 2 * once, "both builds are in memory"
    (row,) = harness.rows.templates.values()
    assert (row.build, row.state) == ("second", TemplateState.READY) and row.id != vm.place.template_id


@pytest.mark.parametrize(("builds", "times"), [(("first",), 1), (("second",), 2), (("second", "second"), 2)])
def test_an_orphans_template_is_counted_once_whichever_build_it_maps(builds: tuple[str, ...], times: int) -> None:
    harness = PlannerHarness()
    which = harness.template()
    harness.templates[which] = replace(harness.templates[which], build="first")
    for number, build in enumerate(builds):
        name, memory = f"mvtest0-{150 + number}", which.size.memory
        harness.vms[name] = VmSeen(
            name, "h1", VmCondition.RUNNING, token=f"t{number}", size=BIG, template_build=build, template_memory=memory
        )
        harness.nodes[name] = Node(name, NodeState.BUSY)
        harness.run()
    assert memory_of_templates(harness) == times * which.size.memory
    del harness.templates[which]
    harness.run()
    assert memory_of_templates(harness) == which.size.memory, "a VM keeps the memory of a template that was deleted"


def test_a_vm_that_an_earlier_run_planned_is_not_created_unless_it_is_there() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (vm,) = harness.all_vms()
    harness.state.unconfirmed.add(vm.key)
    assert not any(row.key == vm.key for row, _ in permitted_effects(harness.state))
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING and harness.all_vms()[1].state is V.PLANNED
    assert any(effect.kind is EffectKind.CREATE for _, effect in permitted_effects(harness.state))


# --- numbers and sites --------------------------------------------------------------------------------


def given(store: Store, numbers: int) -> None:
    """So many VMs are made, and as many attempts."""
    rows = store.rows()
    with store.transaction() as tx:
        for number in range(numbers):
            attempt_id, serial = rows.next_attempt + number, rows.next_serial + number
            one = replace(attempt(A.QUEUED, id=attempt_id), version=0)
            tx.apply(Move((Change(one, Event.SUBMITTED),)))
            made = replace(vm(V.PLANNED, id=serial, attempt=attempt_id), version=0)
            tx.apply(Move((Change(made, Event.PLANNED),)))


def test_a_restart_leaves_few_numbers_out(tmp_path: Path) -> None:
    """Whether the daemon was stopped, or killed when nothing had changed for long."""
    clock = ManualClock()
    store = Store(tmp_path / "db", clock, site="test0")
    given(store, 5)
    for stopped in (True, False):
        clock.time += 86400
        if stopped:
            store.close()
        else:
            store.note_use()
        clock.time += 3
        store = Store(tmp_path / "db", clock)
        number = store.rows().next_serial
        assert 6 <= number <= 6 + 2 * 3 * NUMBERS_A_SECOND
        assert store.rows().next_attempt == number and store.rows().next_template == 1


def test_a_copy_of_a_database_gives_no_number_that_was_given_after_it(tmp_path: Path) -> None:
    clock = ManualClock()
    store = Store(tmp_path / "db", clock, site="test0")
    given(store, 5)
    store.close()
    copied = (tmp_path / "db").read_bytes()
    for seconds in (30, 3600):
        clock.time += seconds
        later = Store(tmp_path / "db", clock)
        given(later, 50)
        highest = later.rows().next_serial
        later.close()
    clock.time += 60
    (tmp_path / "copy").write_bytes(copied)
    restored = Store(tmp_path / "copy", clock).rows()
    assert restored.next_serial == restored.next_attempt >= highest and restored.next_template == 1


def test_a_database_that_comes_to_another_machine_leaves_as_many_out_as_a_site_may_have_given(tmp_path: Path) -> None:
    """Its controller may go on where it comes from."""
    clock = ManualClock()
    store = Store(tmp_path / "db", clock, site="test0")
    clock.time += 3600
    store.close()
    clock.time, clock.boot = clock.time + 1, "another"
    assert Store(tmp_path / "db", clock).rows().next_serial >= 3600 * NUMBERS_A_SECOND


def test_a_clock_that_is_wrong_takes_no_numbers_back_and_not_all_of_them(tmp_path: Path) -> None:
    clock = ManualClock()
    Store(tmp_path / "db", clock, site="test0").close()
    clock.time += 3600
    before = Store(tmp_path / "db", clock).rows().next_serial
    assert before >= 3600 * NUMBERS_A_SECOND
    for boot in ("boot-1", "another"):
        clock.boot = boot
        for change in (-7200, 1e10, 7200 - 1e10):
            clock.time += change
            assert Store(tmp_path / "db", clock).rows().next_serial == before


def test_an_empty_database_goes_on_with_the_site_of_the_vms_that_are_there(tmp_path: Path) -> None:
    clock = ManualClock()
    first = open_store(tmp_path / "a", clock, ["abcde"])
    assert first.site == "abcde" and first.rows().next_serial > 10**9, "beyond all that was given"
    first.close()
    assert open_store(tmp_path / "a", clock, ["other"]).site == "abcde", "it is not empty any more"
    for sites in ([], ["abcde", "fghij"]):
        fresh = open_store(tmp_path / str(len(sites)), clock, sites)
        assert fresh.site not in sites and fresh.rows().next_serial == 1
