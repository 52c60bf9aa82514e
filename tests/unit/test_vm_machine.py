"""How observations move VMs and templates: limits in time, deaths, hosts out of reach, fencing, claims."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from multiverse.core.errors import Broken
from multiverse.core.machines.tables import effect_of
from multiverse.core.machines.vm import step_vm, vm_is_settled
from multiverse.core.model.basics import Depth, Key, Size
from multiverse.core.model.host import Host, HostState, HypervisorView, KnownHost
from multiverse.core.model.job import Attempt, AttemptState, Job, JobState, Node, NodeState, SchedulerView
from multiverse.core.model.reason import said, text_of
from multiverse.core.model.vm import (
    Template,
    TemplateCondition,
    TemplateSeen,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
)
from multiverse.core.model.world import Observation, Row, Seen, World
from multiverse.core.planner import plan
from multiverse.core.rows import Rows
from multiverse.core.transition import Change, Command, Done, EffectKind, Event
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.rows import IMAGES, SOURCE, attempt, changes_of, state, template, vm, world_of

A, V, T = AttemptState, VmState, TemplateState
NOW = 1000.0
H1 = Host("h1", Size(4, 8192, 65536), frozenset({"instant"}), images=IMAGES)
DEAD, RUNNING = VmCondition.DEAD, VmCondition.RUNNING


@dataclass(frozen=True)
class Shown:
    """What both sides show of the first VM, its node and its template, observed at `at`. `seen` None: no VM."""

    seen: VmCondition | None = None
    why: str = ""
    node: Node | None = None
    at: float = NOW
    scheduler: bool = True
    built: bool = True


def decided(
    *some: Row, jobs: tuple[Job, ...] = (), effect_ended_at: dict[Key, float] | None = None, **shown: Any
) -> list[Change]:
    """The changes of one pass on these rows. The other arguments are those of `Shown`."""
    one = Shown(**shown)
    name = "mvtest0-1"
    vms = {name: VmSeen(name, "h1", one.seen, one.why)} if one.seen else {}
    frozen = TemplateSeen("t", "h1", "slim", TemplateCondition.READY, Size(1, 256))
    view = SchedulerView({job.ref.job_id: job for job in jobs}, {name: one.node} if one.node else {})
    hypervisor = HypervisorView({"h1": H1}, vms, {frozen.which: frozen} if one.built else {})
    if one.built and not any(isinstance(row, Template) for row in some):
        ready = template(TemplateState.READY, id=100, size=frozen.size)
        some = (*some, ready)
    world = world_of(view if one.scheduler else None, hypervisor, one.at, effect_ended_at=effect_ended_at or {})
    return changes_of(plan(state(*some, now=NOW), world, [], NOW, POLICY))


def of_vm(changes: list[Change]) -> list[tuple[Event, str, str]]:
    """Of each change of a VM the event, the state after it and the reason that the row keeps."""
    return [(c.event, str(c.row.state), text_of(c.row.reason)) for c in changes if isinstance(c.row, Vm)]


def job(of: Attempt, state: JobState = JobState.PENDING, *, pinned: bool = False, **more: object) -> Job:
    feature = of.feature if pinned else None
    made = Job(of.job, of.job_name, of.uid, state, of.request, gated=not pinned, pinned=feature)
    return made._replace(**more)  # type: ignore[arg-type]


def only(harness: PlannerHarness) -> str:
    """The name of the attempt's one VM."""
    (vm,) = harness.all_vms()
    return vm.name


# --- observations -----------------------------------------------------------------------------------


def test_absence_does_not_count_in_an_observation_that_began_as_the_vm_was_started() -> None:
    one, starting = attempt(A.SPAWNING), vm(V.STARTING, attempt=1, since=NOW - 5)
    effect_ended_at = {starting.key: NOW - 6}
    assert of_vm(decided(one, starting, jobs=(job(one),), effect_ended_at=effect_ended_at, at=NOW - 5)) == []
    died = (Event.DIED, "ending", "the VM died")
    assert died in of_vm(decided(one, starting, jobs=(job(one),), effect_ended_at=effect_ended_at, at=NOW - 4))


def test_a_vm_is_gone_when_both_sides_were_observed_after_its_destruction_ended() -> None:
    leaving = vm(V.RELEASING, since=NOW - 5)
    for ended in (NOW - 7, NOW - 3):
        least = max(ended, leaving.since)
        for scheduler, hypervisor, gone in (
            (least, NOW, False),
            (NOW, least, False),
            (least + 0.1, least + 0.1, True),
        ):
            held = state(leaving, now=NOW)
            world = World(
                scheduler=Seen(SchedulerView(), scheduler),
                sources={SOURCE: Observation(Seen(HypervisorView({"h1": H1}), hypervisor), 0.0)},
                effect_ended_at={leaving.key: ended},
            )
            step_vm(held, 1, world, POLICY)
            assert (not held.vms) is gone, (ended, scheduler, hypervisor)


def test_a_dead_vm_that_was_observed_before_its_creation_is_another_one() -> None:
    one, planned = attempt(A.CLAIMED, since=NOW - 9), vm(V.PLANNED, attempt=1, since=NOW - 5)
    assert of_vm(decided(one, planned, jobs=(job(one),), seen=DEAD, at=NOW - 5)) == []
    found = of_vm(decided(one, planned, jobs=(job(one),), seen=DEAD, why="it broke", at=NOW - 4))
    assert [change for change in found if change[0] is not Event.PLANNED] == [(Event.FAILED, "ending", "it broke")]


def test_a_vm_is_not_made_in_time_if_an_observation_after_the_limit_and_after_its_creation_does_not_show_it() -> None:
    limit = POLICY.spawn_timeout
    one, planned = attempt(A.CLAIMED, since=NOW - 500), vm(V.PLANNED, attempt=1, since=NOW - limit - 5)
    late = [(Event.FAILED, "ending", "it was not created within 60 s")]
    for at, ended, expected in (
        (NOW - 5, NOW - 20, []),
        (NOW - 4, NOW - 20, late),
        (NOW, NOW, []),
        (NOW, NOW - 1, late),
        (NOW, float("inf"), []),
    ):
        found = of_vm(decided(one, planned, jobs=(job(one),), at=at, effect_ended_at={planned.key: ended}))
        assert [change for change in found if change[0] is not Event.PLANNED] == expected, (at, ended)


def test_a_vm_in_quarantine_is_left_alone() -> None:
    one = attempt(A.ALLOCATED)
    runs = job(one, JobState.RUNNING, pinned=True, nodes=("mvtest0-1",))
    quarantined = vm(V.SERVING, attempt=1, quarantined=said("it cannot be"))
    assert of_vm(decided(one, quarantined, jobs=(runs,), seen=DEAD)) == []
    assert of_vm(decided(one, replace(quarantined, quarantined=None), jobs=(runs,), seen=DEAD, why="it broke")) == [
        (Event.DIED, "ending", "it broke")
    ]


def test_nothing_is_gone_while_the_scheduler_is_not_known() -> None:
    leaving = vm(V.RELEASING)
    assert decided(leaving, effect_ended_at={leaving.key: NOW - 5}, scheduler=False) == []


# --- a dead VM and its job's pin --------------------------------------------------------------------


def test_a_joined_spare_that_dies_is_ended_at_once() -> None:
    spare = vm(V.JOINED, pool=Depth.JOINED)
    assert of_vm(decided(spare, template(T.READY), seen=DEAD))[0] == (Event.DIED, "ending", "the VM died")


def test_a_dead_vm_of_a_gang_that_is_not_complete_is_ended_at_once() -> None:
    one = attempt(A.SPAWNING)
    assert of_vm(decided(one, vm(V.JOINED, attempt=1), jobs=(job(one),), seen=DEAD))[0][:2] == (
        Event.DIED,
        "ending",
    )


def kept(one: Attempt, before: V, *jobs: Job, scheduler: bool = True, effect_ended_at: float = 0.0) -> bool:
    """Whether a VM of the attempt that is found dead stays until its job is off it."""
    changes = decided(
        one,
        vm(before, attempt=1),
        jobs=jobs,
        seen=DEAD,
        why="it broke",
        scheduler=scheduler,
        effect_ended_at={one.key: effect_ended_at},
    )
    (first, *_) = of_vm(changes)
    assert first[2] == "it broke" and not any(text_of(c.row.quarantined) for c in changes)
    assert next(text_of(c.reason) for c in changes if isinstance(c.row, Vm)) == "it broke"
    return first == (Event.DIED, "dead", "it broke")


def test_a_dead_vm_stays_while_its_job_may_be_tied_to_it() -> None:
    spawned, leaving = attempt(A.SPAWNED), attempt(A.RETURNING, outcome="requeued")
    assert kept(spawned, V.JOINED, job(spawned)), "its pin is on its way"
    assert kept(leaving, V.JOINED, job(leaving), effect_ended_at=float("inf")), "its pin may yet arrive"
    assert kept(attempt(A.ALLOCATED), V.SERVING, scheduler=False), "the scheduler is unknown"
    ran = attempt(A.ALLOCATED)
    assert kept(ran, V.SERVING, job(ran, pinned=True)), "its launch was taken back"


def test_a_dead_vm_keeps_the_reason_of_its_death() -> None:
    ran = attempt(A.ALLOCATED)
    dead = vm(V.DEAD, attempt=1, reason="it broke")
    for seen in (DEAD, None):
        assert of_vm(decided(ran, dead, jobs=(job(ran),), seen=seen, why="its guest has stopped"))[0] == (
            Event.DIED,
            "ending",
            "it broke",
        )


def test_a_dead_vm_is_ended_when_its_job_is_not_tied_to_it() -> None:
    ran = attempt(A.ALLOCATED)
    assert not kept(ran, V.SERVING, job(ran))
    over = attempt(A.RECLAIMING, outcome="done")
    completing = job(over, JobState.COMPLETING, nodes=("mvtest0-1",))
    assert not kept(over, V.SERVING, completing), "its job has ended"
    waits = attempt(A.RECLAIMING, outcome="requeued")
    assert not kept(waits, V.JOINED, job(waits), effect_ended_at=float("inf")), "its job is at the gate"


# --- hosts out of reach -----------------------------------------------------------------------------


def test_a_vm_that_is_out_of_reach_has_failed_until_its_job_is_seen_to_run_on() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    host = harness.hosts.pop("h1")
    harness.run()
    assert harness.all_vms()[0].state is V.LOST and harness.all_vms()[0].failed
    harness.hosts["h1"] = host
    harness.run()
    (vm,) = harness.all_vms()
    assert (vm.state, vm.failed, text_of(vm.reason)) == (V.SERVING, False, "")
    events = ("lost", "found")
    assert [
        text_of(entry.reason) for entry in harness.store.journal() if entry.kind == "vm" and entry.event in events
    ] == [
        "host h1 is out of reach",
        "its job runs on",
    ]


def test_a_vm_that_is_found_again_serves_or_ends_with_the_reason() -> None:
    ran = attempt(A.ALLOCATED)
    runs = job(ran, JobState.RUNNING, pinned=True, nodes=("mvtest0-1",))
    for reason, why in (("it broke", "it broke"), ("", "host h1 was out of reach")):
        lost = vm(V.LOST, attempt=1, reason=reason)
        assert of_vm(decided(ran, lost, jobs=(runs,), seen=RUNNING)) == [(Event.FOUND, "serving", "")]
        (gone,) = of_vm(decided(ran, lost, jobs=(runs,), seen=DEAD))
        assert gone == (Event.FOUND, "ending", why)


def test_a_vm_that_is_found_again_with_a_later_run_of_its_job_serves_it() -> None:
    ended = attempt(A.RECLAIMING, outcome="requeued", since=NOW - 5)
    again = job(ended, JobState.RUNNING, pinned=True, nodes=("mvtest0-1",))._replace(ref=replace(ended.job, restarts=1))
    found = decided(ended, vm(V.LOST, attempt=1), jobs=(again,), seen=RUNNING)
    assert of_vm(found) == [(Event.FOUND, "serving", "")]


@pytest.mark.parametrize("began", [True, False])
def test_a_vm_that_is_found_again_is_not_ended_while_its_job_may_have_begun_there(began: bool) -> None:
    """Found by seed 10102398: a controller began anew, the scheduler answered late, and the node on which the job had
    begun meanwhile was set DOWN."""
    harness = PlannerHarness()
    one = harness.to_spawned()
    host = harness.hosts.pop("h1")
    harness.scheduler_known = False
    harness.run()
    assert harness.all_vms()[0].state is V.LOST
    harness.hosts["h1"] = host
    harness.run()
    assert harness.all_vms()[0].state is V.LOST, "nobody knows whether the job has begun"
    harness.scheduler_known = True
    if began:
        runs = JobState.RUNNING
        harness.jobs[one.job.job_id] = harness.jobs[one.job.job_id]._replace(state=runs, nodes=(only(harness),))
    harness.run()
    harness.run()
    assert harness.all_vms()[0].state is (V.SERVING if began else V.ENDING)
    assert harness.attempt().state is (A.ALLOCATED if began else A.RECLAIMING)


# --- nodes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [NodeState.DOWN, NodeState.SILENT, NodeState.DRAINED])
@pytest.mark.parametrize(("reason", "said"), [("Low RealMemory", "Low RealMemory"), ("", "no reason given")])
def test_a_node_that_comes_up_unusable_says_why(state: NodeState, reason: str, said: str) -> None:
    one, node = attempt(A.SPAWNING), Node("mvtest0-1", state, (), reason)
    changes = decided(one, vm(V.STARTING, attempt=1), jobs=(job(one),), seen=RUNNING, node=node)
    assert of_vm(changes)[0] == (Event.FAILED, "ending", f"its node came up {state}: {said}")
    assert text_of(changes[0].reason) == text_of(changes[0].row.reason)


@pytest.mark.parametrize("condition", [RUNNING, VmCondition.PAUSED])
@pytest.mark.parametrize("state", [NodeState.BUSY, NodeState.DRAINED, NodeState.SILENT, NodeState.DOWN])
@pytest.mark.parametrize("after", [1.0, 1000.0])
def test_a_vm_whose_job_runs_had_joined_before_the_database_was_restored(
    state: NodeState, condition: VmCondition, after: float
) -> None:
    """An older copy tells of a VM that starts. The scheduler has given up a node only if it is DOWN."""
    one, node = attempt(A.SPAWNING), Node("mvtest0-1", state, (), "low")
    runs = job(one, JobState.RUNNING, pinned=True, nodes=(node.name,))
    starting = vm(V.STARTING, attempt=1, since=NOW - after)
    found = of_vm(decided(one, starting, jobs=(runs,), seen=condition, node=node))
    assert found[0][1] == ("ending" if state is NodeState.DOWN else "joined")


@pytest.mark.parametrize(("where", "kind"), [(V.PLANNED, EffectKind.CREATE), (V.STARTING, EffectKind.START)])
@pytest.mark.parametrize("serves", [True, False])
def test_a_failed_effect_ends_no_vm_with_a_job_on_it(where: VmState, kind: EffectKind, serves: bool) -> None:
    """An older copy of the database tells of a VM that is made. To make it again fails, perhaps because it serves."""
    one, made = attempt(A.SPAWNING), vm(where, attempt=1)
    runs = job(one, JobState.RUNNING, pinned=True, nodes=(made.name,)) if serves else job(one)
    node, seen = Node(made.name, NodeState.BUSY), VmSeen(made.name, "h1", VmCondition.PAUSED)
    view = SchedulerView({one.job.job_id: runs}, {node.name: node} if serves else {})
    world = world_of(view, HypervisorView({"h1": H1}, {made.name: seen}), NOW)
    done = Done(made.key, kind, str(where), Broken("it cannot be started"))
    changes = changes_of(plan(state(one, made, now=NOW), world, [done], NOW, POLICY))
    assert any(event is Event.FAILED for event, _, _ in of_vm(changes)) != serves


def test_a_node_is_deleted_once_no_job_is_on_it() -> None:
    leaving = vm(V.ENDING)
    (change,) = decided(leaving, node=Node("mvtest0-1", NodeState.DOWN), effect_ended_at={leaving.key: NOW - 5})
    assert change.row.state is V.REMOVING and text_of(change.reason) == "no job is on its node"
    found = effect_of(change.row)
    assert found and found.kind is EffectKind.REMOVE


@pytest.mark.parametrize("state", [JobState.COMPLETING, JobState.PENDING])
def test_a_node_stays_until_its_job_has_left_all_its_nodes(state: JobState) -> None:
    """Of a job that is completing the scheduler shows only the nodes that have not released it."""
    one, leaving = attempt(A.RECLAIMING), vm(V.ENDING, attempt=1)
    nodes = ("mvtest0-2",) if state is JobState.COMPLETING else ()
    known = {"node": Node("mvtest0-1", NodeState.DOWN), "effect_ended_at": {leaving.key: NOW - 5}}
    changes = decided(one, leaving, jobs=(job(one)._replace(state=state, nodes=nodes),), **known)
    assert (V.REMOVING in [change.row.state for change in changes]) is (state is JobState.PENDING)


# --- templates --------------------------------------------------------------------------------------


def test_a_template_in_quarantine_is_left_alone() -> None:
    assert decided(template(T.BUILDING, quarantined=said("it cannot be"))) == []
    assert decided(template(T.READY, quarantined=said("it cannot be")), built=False) == []


def test_a_template_that_is_built_has_forgotten_its_failures() -> None:
    (change,) = decided(template(T.BUILDING, tries=3))
    assert isinstance(change.row, Template) and (change.row.state, change.row.tries) == (T.READY, 0)


@pytest.mark.parametrize("said", ["", "its file system is gone"])
def test_a_template_that_vanishes_is_absent_and_frees_its_claim(said: str) -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (row,) = harness.rows.templates.values()
    del harness.templates[row.which]
    if said:
        harness.templates[row.which] = TemplateSeen("t", "h1", "slim", TemplateCondition.BROKEN, row.size, said)
    harness.run()
    assert not harness.rows.templates and row.key not in {claim.owner for claim in harness.rows.claims}
    (entry,) = [entry for entry in harness.store.journal() if entry.event == "vanished"]
    assert text_of(entry.reason) == (said or "it is no longer there")


def test_a_template_is_ready_in_an_observation_that_began_after_its_effect() -> None:
    harness = PlannerHarness()
    harness.job()
    harness.run()
    (row,) = harness.rows.templates.values()
    harness.template()
    harness.ended(row.key)
    harness.observe()
    harness.commit()
    assert next(iter(harness.rows.templates.values())).state is TemplateState.BUILDING, (
        "that observation began no later"
    )
    harness.run()
    (row,) = harness.rows.templates.values()
    assert (row.state, row.tries) == (TemplateState.READY, 0)


# --- from the creation of a VM to its death ----------------------------------------------------------


def test_a_vm_that_dies_while_it_is_made_fails_when_its_creation_has_ended() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (vm,) = harness.all_vms()
    harness.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.DEAD, "its QEMU has ended")
    harness.effect_ended_at[vm.key] = float("inf")  # its creation is under way
    harness.run()
    assert harness.all_vms()[0].state is V.PLANNED
    harness.ended(vm.key)
    harness.observe()
    harness.commit()
    assert harness.all_vms()[0].state is V.PLANNED, "an observation that began as the creation ended may be older"
    harness.run()
    dead = harness.all_vms()[0]
    assert (dead.state, text_of(dead.reason)) == (V.ENDING, "its QEMU has ended")


def test_a_vm_that_is_dead_without_a_reason_is_given_one() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.DEAD)
    harness.run()
    assert text_of(harness.all_vms()[0].reason) == "the VM died while it was created"


def test_a_vm_that_is_being_made_stays_planned() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.seen(only(harness), VmCondition.CREATING)
    harness.run()
    assert harness.all_vms()[0].state is V.PLANNED


def test_absence_counts_only_in_an_observation_that_began_after_the_effect_ended() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    (vm,) = harness.all_vms()
    harness.vms.clear()
    harness.effect_ended_at[vm.key] = float("inf")
    harness.run()
    assert harness.all_vms()[0].state is V.STARTING
    harness.ended(vm.key)
    harness.observe()
    harness.commit()
    assert harness.all_vms()[0].state is V.STARTING
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING and text_of(harness.all_vms()[0].reason) == "the VM died"


def test_a_dead_vm_is_kept_while_its_job_is_on_its_way_back_to_the_gate() -> None:
    """Its node is deleted with it, and a job that is pinned to no node may never start."""
    harness = PlannerHarness()
    attempt = harness.to_spawned()
    harness.job(gated=False, pinned=attempt.feature)
    harness.pass_time(POLICY.pin_timeout + 1)
    harness.run()
    assert harness.attempt().state is A.RETURNING
    harness.seen(only(harness), VmCondition.DEAD)
    harness.run()
    harness.run()
    assert harness.all_vms()[0].state is V.DEAD, "still pinned"
    harness.job(gated=True, pinned=None)
    harness.ended(harness.attempt().key)
    harness.run()
    assert harness.all_vms()[0].state is V.REMOVING


@pytest.mark.parametrize("outcome", ["done", "cancelled"])
def test_a_dead_vm_of_a_job_that_is_over_is_ended_at_once(outcome: str) -> None:
    harness = PlannerHarness()
    harness.to_allocated() if outcome == "done" else harness.to_spawned()
    state = JobState.COMPLETING if outcome == "done" else JobState.ENDED
    harness.job(state=state, result="CANCELLED")
    harness.seen(only(harness), VmCondition.DEAD)
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING


def test_a_vm_that_dies_under_its_running_job_is_ended_and_the_scheduler_decides() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.seen(only(harness), VmCondition.DEAD)
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING and harness.attempt().state is A.ALLOCATED


def test_an_attempt_that_is_over_leaves_neither_vm_nor_claim() -> None:
    harness = PlannerHarness()
    attempt = harness.to_allocated()
    (vm,) = harness.all_vms()
    harness.job(state=JobState.ENDED, result="COMPLETED", nodes=())
    harness.ended(attempt.key)
    harness.run()
    harness.run()
    assert harness.all_vms()[0].state is V.RELEASING
    harness.clear()
    harness.run()
    assert harness.all_vms()[0].state is V.GONE and harness.attempt().state is A.DONE
    assert vm.key not in {claim.owner for claim in harness.rows.claims}


def test_a_node_that_is_only_joining_is_not_registered() -> None:
    harness = PlannerHarness()
    harness.to_spawning()
    name = only(harness)
    harness.seen(name, VmCondition.RUNNING)
    harness.node(name, NodeState.JOINING)
    harness.run()
    assert harness.all_vms()[0].state is V.STARTING


# --- claims -----------------------------------------------------------------------------------------


def test_the_room_of_a_vm_that_is_gone_is_free_in_the_same_pass() -> None:
    harness = PlannerHarness(cpus=1)
    harness.to_allocated()
    harness.jobs["7"] = harness.jobs["7"]._replace(state=JobState.ENDED, result="COMPLETED", nodes=())
    harness.run()
    harness.job("8")
    harness.run()
    assert harness.attempt(2).state is A.QUEUED
    harness.clear()
    harness.run()
    assert harness.all_vms()[0].state is V.GONE and harness.attempt(2).state is A.CLAIMED


def test_a_fence_keeps_the_reason_that_a_vm_had_and_the_journal_says_who_spoke() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    del harness.hosts["h1"]
    harness.run()
    harness.run(Command("fence", "h1"))
    host, entry = [entry for entry in harness.store.journal() if entry.event == "fenced"]
    assert (host.kind, host.source, host.target) == ("host", "known", "fenced")
    assert text_of(host.reason) == text_of(entry.reason) == "an operator says that host h1 is off"


# --- rows -------------------------------------------------------------------------------------------


def test_rows_are_found_by_key_and_the_attempt_of_a_vm_by_the_vm() -> None:
    one, serving, frozen = attempt(A.ALLOCATED), vm(V.SERVING, attempt=1), template(T.READY)
    rows = Rows("test0", attempts={1: one}, vms={1: serving}, templates={1: frozen})
    assert [rows.get(row.key) for row in (one, serving, frozen)] == [one, serving, frozen]
    assert rows.get(Key("vm", 2)) is None
    assert rows.attempt_of(serving) == one and rows.attempt_of(vm(V.PARKED)) is None


def test_a_move_that_no_table_has_names_the_transition_and_changes_nothing() -> None:
    held = state(vm(V.RELEASING))
    with pytest.raises(Broken, match=r"vm 1: .* releasing --runs--> serving"):
        held.move(Change(vm(V.SERVING), Event.RUNS))
    assert not held.moves and held.vms[1].state is V.RELEASING
    held.move(Change(vm(V.GONE), Event.ABSENT), free=vm(V.GONE).claim_keys)  # a row that holds no claim releases none
    assert not held.vms and held.moves[0].free == ()


# --- rest -------------------------------------------------------------------------------------------


def resting(view: HypervisorView | None, *, fenced: bool = False, **more: object) -> set[V]:
    """The states in which a VM rests."""
    held = state()
    if fenced:
        held.know_host(KnownHost("h1", SOURCE, HostState.FENCED))
    world = world_of(None, view, NOW)
    return {one for one in V if one is not V.GONE and vm_is_settled(held, vm(one, **more), world)}


def test_a_vm_rests_while_it_serves_and_while_nothing_is_known_of_it() -> None:
    live = set(V) - {V.GONE}

    def shown(*vms: VmSeen) -> HypervisorView:
        return HypervisorView({"h1": H1}, {seen.name: seen for seen in vms})

    running, dead = (VmSeen("mvtest0-1", "h1", condition) for condition in (RUNNING, DEAD))
    assert resting(shown(running)) == {V.SERVING, V.DELETING}
    assert resting(shown(dead)) == resting(shown()) == {V.DELETING}, "which waits for the scheduler only"
    assert resting(None) == live, "that its source has been silent for long marks it"
    assert resting(HypervisorView()) == {V.LOST, V.DELETING}, "its host is not shown"
    for view in (None, HypervisorView()):
        assert resting(view, fenced=True) == {V.DELETING}, "all others end"
    for known in (shown(running), shown(dead), shown(), HypervisorView(), None):
        assert resting(known, quarantined=said("it cannot be")) == live
