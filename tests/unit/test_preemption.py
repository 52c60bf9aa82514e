"""Which running jobs give way to an urgent one, and how: by moves, by saves, or as the scheduler would end them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from multiverse.core.capacity.room import Blockage
from multiverse.core.context import Context
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import CloneKind, Depth, Key, Size
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.host import Claim, Drain, Host, HypervisorView, ImageDisk, Overcommitment
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    Eviction,
    Job,
    JobRef,
    JobState,
    Preemption,
    Request,
    SchedulerView,
)
from multiverse.core.model.machine import MachineKind
from multiverse.core.model.reason import Why
from multiverse.core.model.saved import SavedState, Storage
from multiverse.core.model.vm import Place, Template, TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Row
from multiverse.core.planner import plan
from multiverse.core.policy import Policy
from multiverse.core.rebalance import plan as begun_by
from multiverse.core.rebalance import preemption
from multiverse.core.rebalance.limits import EvictionLimits
from multiverse.core.rebalance.plan import LOOK_AGAIN, preempt, proposals
from multiverse.core.rebalance.preemption import SOON, plan_preemption
from multiverse.core.state import State
from tests.unit.planner_harness import POLICY
from tests.unit.rows import IMAGES, SOURCE, as_ready, attempt, rows, saved, template, vm, world_of

A, V, T = AttemptState, VmState, TemplateState
NOW, EPOCH = 1000.0, 1_700_000_000.0
UNIX = NOW + EPOCH
RAN = 50.0  # seconds that a job has run, unless a test says otherwise
URGENT = 90  # the number of the job that waits
KIND = MachineKind("kvm", "Haswell", frozenset({"avx"}), "7.2", "pc-q35-7.2")
STORAGE = Storage("shared", "qemu")
RULES = Preemption(
    takes={"high": frozenset({"low", "normal"}), "normal": frozenset({"low"})},
    exempt={"normal": 100.0},
    modes={"low": "requeue", "normal": "cancel"},
    grace={},
)
CROWDED = replace(POLICY, patience=0.0, provisioning=99, reclaim=10.0)


def host(name: str, cpus: int = 2, *, memory: int = 65536, moves: bool = False, stores: bool = True) -> Host:
    return Host(
        name, Size(cpus, memory, 65536), frozenset({"instant", "full"}), images=IMAGES,
        storage=STORAGE if stores else None, moves=KIND if moves else None,
    )  # fmt: skip


@dataclass
class Crowd:
    """Hosts with a ready template each, jobs that run there, and an urgent one that waits. Jobs have numbers: those
    with higher ones were submitted later. VMs have ten times the number of their job, and more for further ones."""

    hosts: list[Host] = field(default_factory=lambda: [host("h1")])
    rules: Preemption | None = RULES
    policy: Policy = CROWDED
    rows: list[Row] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    away: set[str] = field(default_factory=set)  # hosts out of sight
    private: float = 0.0  # MiB that each VM is measured to use
    promised: dict[int, float] = field(default_factory=dict)  # Unix times by which jobs start anyway
    sent: dict[int, int] = field(default_factory=dict)  # MiB that evictions are to send, by VM
    state: State | None = None

    def __post_init__(self) -> None:
        for number, one in enumerate(self.hosts, 1):
            self.rows.append(template(T.READY, id=number, host=one.name))
            self.claims.append(Claim(self.rows[-1].key, one.name, Size(0, 256, 0)))

    def claim(self, one: Vm, where: str = "") -> None:
        self.claims.append(Claim(one.key, where or one.host, Size(one.size.cpus, one.size.memory + 32, 0)))

    def moves(self, number: int, on: str, to: str, cpus: int = 1) -> None:
        """The VM of a job moves."""
        self.runs(number, on, cpus=cpus, vms=V.MOVING)
        row = self.rows.pop()
        assert isinstance(row, Vm)
        self.rows.append(replace(row, places=(row.place, Place(to, SOURCE))))
        self.claim(row, to)

    def change(self, back: int, **values: Any) -> None:
        """Change one of the latest rows; 1: the last one."""
        row: Any = self.rows[-back]
        self.rows[-back] = replace(row, **values)

    def without_templates(self) -> None:
        """The VMs were booted."""
        owners = {one.key for one in self.rows if isinstance(one, Template)}
        here = [one for one in self.rows if one.key not in owners]
        self.rows = [replace(one, places=(Place(one.host, SOURCE),)) if isinstance(one, Vm) else one for one in here]
        self.claims = [one for one in self.claims if one.owner not in owners]

    def makes(self, number: int, on: str, cpus: int, memory: int, state: VmState, **more: Any) -> Vm:
        id_ = int(on[1:]) if on[1:].isdigit() else None
        values = {"host": on, "node_size": Size(cpus, 100), "template_id": id_, "since": NOW - RAN, **more}
        one = replace(vm(state, id=number, **values), size=Size(cpus, memory))
        self.rows.append(one)
        self.claim(one)
        return one

    def runs(
        self, number: int, *on: str, cpus: int = 1, memory: int = 256, state: AttemptState = A.ALLOCATED,
        vms: VmState = V.SERVING, ran: float = RAN, nodes: int = 0, evictions: tuple[Eviction, ...] = (), **job: Any,
    ) -> Attempt:  # fmt: skip
        """A job runs in a VM on each of these hosts."""
        on = on or ("h1",)
        ref, request = JobRef(str(number), 500 + number), Request(nodes or len(on), Size(cpus, 100))
        row = attempt(state, id=number, job=str(number), request=request, since=NOW - ran, evictions=evictions)
        self.rows.append(row := replace(row, job=ref))
        made = [self.makes(10 * number + n, name, cpus, memory, vms, attempt=number) for n, name in enumerate(on)]
        shown = {"nodes": tuple(one.name for one in made), "gated": False, "preempt_class": "low", **job}
        self.jobs[str(number)] = Job(
            ref, "hello", 1000, shown.pop("shown", JobState.RUNNING), request, script_node=made[0].name, **shown
        )
        return row

    def waits(
        self, cpus: int = 1, nodes: int = 1, by: str = "high", number: int = URGENT, restarts: int = 0, **request: Any
    ) -> None:
        """A job of that class waits."""
        ref, asked = JobRef(str(number), 500 + number, restarts), Request(nodes, Size(cpus, 100), **request)
        row = attempt(A.QUEUED, id=number, job=str(number), request=asked, since=NOW - 20)
        self.rows.append(replace(row, job=ref))
        self.jobs[str(number)] = Job(
            ref, "urgent", 1000, JobState.PENDING, asked, limit=600.0, preempt_class=by, rank=number
        )

    def world(self, now: float = NOW) -> Any:
        here = [one for one in self.rows if isinstance(one, Vm)]
        shown = {one.name: VmSeen(one.name, one.host, VmCondition.RUNNING, private=self.private) for one in here}
        known = {one.name: one for one in self.hosts if one.name not in self.away}
        view = HypervisorView(known, shown, as_ready(self.rows))
        return world_of(SchedulerView(dict(self.jobs), preemption=self.rules), view, now, epoch=EPOCH)

    def run(self, now: float = NOW) -> dict[int, str]:
        """One pass, and how the jobs that are evicted in it leave, by number."""
        if self.state is None:
            self.state = State(rows(*self.rows, claims=self.claims, known=sorted(self.names)), TABLES, now)
        before = {id_: len(one.evictions) for id_, one in self.state.attempts.items()}
        plan(self.state, self.world(now), [], now, self.policy)
        assert not any(one.quarantined for one in self.state.attempts.values())
        assert not any(one.quarantined for one in self.state.vms.values())
        found = {}
        for id_, one in sorted(self.state.attempts.items()):
            if len(one.evictions) > before.get(id_, 0):
                moving = [v.places[-1].host for v in self.state.vms_of(one) if v.state is V.MOVING]
                found[id_] = " to ".join([one.evictions[-1].way, *moving])
        return found

    def plans(self, passed_over: int = 0, now: float = NOW) -> dict[int, str]:
        """How jobs are to leave for the urgent one, by number: what is planned on these rows as they are."""
        return {
            one.attempt.id: one.ends or (f"move to {one.to}" if one.to else "save")
            for one in self.steps(passed_over, now)
        }

    def steps(self, passed_over: int = 0, now: float = NOW) -> list[Step]:
        state = self.decide(now)
        state.blocking, state.promised = URGENT, dict(self.promised)
        return plan_preemption(self.context, EvictionLimits(self.context), passed_over)

    def decide(self, now: float = NOW) -> State:
        """The rows as a state, in which nothing was decided yet."""
        state = self.state = State(rows(*self.rows, claims=self.claims, known=sorted(self.names)), TABLES, now)
        state.begin(now, {}, "test")
        state.queue.jobs = self.jobs
        for one in state.attempts.values():
            state.queue.put(one)
        return state

    @property
    def names(self) -> set[str]:
        return {one.name for one in self.hosts}

    @property
    def context(self) -> Context:
        assert self.state is not None
        return Context(self.state, self.world(self.state.now), self.policy)

    def last(self, number: int) -> Eviction:
        assert self.state is not None
        return self.state.attempts[number].evictions[-1]


def full(*hosts: Host, memory: int = 256, **job: Any) -> Crowd:
    """Two jobs of one CPU each fill the first host; `job` says more of the later one."""
    crowd = Crowd(list(hosts or [host("h1")]))
    crowd.runs(1, memory=memory)
    crowd.runs(2, memory=memory, **job)
    return crowd


# --- who is served, and who gives way ----------------------------------------------------------------


def test_a_job_is_saved_for_the_first_one_that_waits_and_told_why() -> None:
    crowd = full()
    crowd.waits()
    assert crowd.run() == {2: "save"}, "the one that was submitted last"
    assert crowd.last(2).why == Why.PREEMPTED(job="90", by="high")
    assert (crowd.last(2).host, crowd.last(2).memory, crowd.last(2).at) == ("h1", 256, UNIX)
    (made,) = crowd.context.state.saved.values()
    assert (made.asked, made.may_restart) == (crowd.last(2).why, False)


@pytest.mark.parametrize(
    ("waiting", "running", "gives_way"),
    [("high", "low", True), ("normal", "low", True), ("low", "low", False), ("normal", "high", False), ("", "", False)],
)
def test_jobs_give_way_to_the_classes_that_the_scheduler_says(waiting: str, running: str, gives_way: bool) -> None:
    crowd = full(preempt_class=running)
    crowd.jobs["1"] = crowd.jobs["1"]._replace(preempt_class=running)
    crowd.waits(by=waiting)
    assert bool(crowd.run()) is gives_way


def test_nobody_gives_way_where_the_scheduler_preempts_no_jobs_or_the_site_does_not_want_it() -> None:
    plain, off = full(), full()
    plain.rules, off.policy = None, replace(CROWDED, evict_preemption=False)
    for crowd in (plain, off):
        crowd.waits()
        assert not crowd.run() and not proposals(crowd.context)


@pytest.mark.parametrize(("within", "evicted"), [(SOON - 0.5, {}), (SOON, {2: "save"})])
def test_nobody_is_evicted_for_a_job_that_is_to_start_soon_anyway(within: float, evicted: dict[int, str]) -> None:
    crowd = full()
    crowd.waits()
    crowd.promised[URGENT] = UNIX + within
    assert crowd.plans() == evicted


def test_nobody_is_evicted_while_no_job_waits_for_room_or_the_first_one_may_not_start_now() -> None:
    crowd = full()
    crowd.waits()
    crowd.jobs[str(URGENT)] = crowd.jobs[str(URGENT)]._replace(eligible=False)
    assert not crowd.plans()
    crowd = full()
    assert not crowd.plans(), "there is no such job"


def test_nobody_is_evicted_for_a_job_that_has_room_or_that_could_not_start_even_then() -> None:
    roomy = full(host("h1", 3))
    roomy.waits()
    assert not roomy.plans()
    crowded = full(host("h1", 3))
    crowded.runs(3, preempt_class="high")
    crowded.waits(3)
    assert not crowded.plans()


def test_the_waiting_job_also_takes_its_template_where_there_is_none() -> None:
    """Two jobs have 544 MiB each. The urgent one takes 288, and its template 512."""
    crowd = full(replace(host("h1", memory=2 * 544), template_copies=2), memory=512)
    crowd.without_templates()
    crowd.waits()
    assert crowd.plans() == {1: "save", 2: "save"}
    crowd.jobs[str(URGENT)] = crowd.jobs[str(URGENT)]._replace(request=Request(1, Size(1, 100), kind=CloneKind.FULL))
    crowd.change(1, request=crowd.jobs[str(URGENT)].request)
    assert crowd.plans() == {2: "save"}, "a full clone needs none"


def test_the_waiting_job_takes_no_template_where_there_is_one() -> None:
    crowd = full(host("h1", memory=256 + 2 * 544), memory=512)
    crowd.waits()
    assert crowd.plans() == {2: "save"}


@pytest.mark.parametrize(
    ("state", "kept", "evicted"),
    [
        (SavedState.STORED, "", {1: "save", 2: "save"}),
        (SavedState.COPYING, "", {1: "save", 2: "save"}),
        (SavedState.STORED, "h1", {}),
        (SavedState.QUEUEING, "", {}),
    ],
)
def test_a_saved_job_is_made_room_for_once_it_can_be_restored(
    state: SavedState, kept: str, evicted: dict[int, str]
) -> None:
    """It is as large as both others together. h2, which has no storage, cannot restore it."""
    crowd = full(host("h1", memory=2 * 1056), host("h2", 1, stores=False), memory=1024)
    crowd.without_templates()
    crowd.runs(3, "h2")
    crowd.waits(restarts=1)
    job = JobRef(str(URGENT), 500 + URGENT)
    crowd.rows.append(saved(state, id=7, job=job, vm=905, vm_name="mvtest0-905", size=Size(1, 2080), kept=kept))
    assert crowd.plans() == evicted


# --- what already counts as free ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "vms"),
    [
        (A.RECLAIMING, V.SERVING),
        (A.PREEMPTING, V.SERVING),
        (A.WARNED, V.SERVING),
        (A.ALLOCATED, V.ENDING),
        (A.ALLOCATED, V.RELEASING),
        (A.ALLOCATED, V.REMOVING),
        (A.ALLOCATED, V.RETIRING),
    ],
)
def test_nobody_is_evicted_while_the_room_that_others_leave_is_enough(state: AttemptState, vms: VmState) -> None:
    crowd = full(state=state, vms=vms)
    crowd.waits()
    assert not crowd.plans()
    crowd = full(state=state, vms=vms)
    crowd.waits(2)
    assert crowd.plans() == {1: "save"}, "and no more are evicted than it needs beside that"


@pytest.mark.parametrize("state", [SavedState.PREPARING, SavedState.FREEZING, SavedState.CUTTING, SavedState.WRITING])
def test_of_a_job_that_is_being_saved_the_room_counts_as_free(state: SavedState) -> None:
    crowd = full()
    crowd.rows.append(saved(state, id=7, job=JobRef("2", 502), vm=20, vm_name="mvtest0-20"))
    crowd.waits()
    assert not crowd.plans()


def test_a_spare_counts_as_free_because_it_gives_way() -> None:
    crowd = Crowd([host("h1")])
    crowd.runs(1)
    crowd.makes(50, "h1", 1, 256, V.JOINED, pool=Depth.JOINED, attempt=None)
    crowd.waits()
    assert not crowd.plans()


def test_a_move_that_is_under_way_makes_room_on_one_host_and_takes_it_on_the_other() -> None:
    crowd = Crowd([host("h1", moves=True), host("h2", moves=True)])
    crowd.runs(1, "h1")
    crowd.runs(2, "h2")
    crowd.moves(3, "h1", "h2")
    crowd.waits()
    assert not crowd.plans()
    crowd.claims.append(Claim(Key("vm", 77), "h1", Size(1, 100)))
    assert crowd.plans() == {2: "save"}, "of both hosts the later job leaves"


def test_a_vm_that_moves_and_is_of_a_job_that_ends_gives_its_room_once() -> None:
    crowd = Crowd([host("h1", 3, moves=True), host("h2", 1, moves=True)])
    crowd.runs(1, "h1", cpus=2)
    crowd.moves(2, "h1", "h2")
    crowd.change(2, state=A.RECLAIMING)
    crowd.waits(2)
    assert crowd.plans() == {1: "save"}


# --- who may be evicted -------------------------------------------------------------------------------


@pytest.mark.parametrize(("ran", "evicted"), [(99.0, {1: "save"}), (100.0, {2: "save"})])
def test_a_job_is_left_alone_for_its_exempt_time(ran: float, evicted: dict[int, str]) -> None:
    crowd = full(preempt_class="normal", ran=ran)
    crowd.waits()
    assert crowd.plans() == evicted


def test_a_class_without_an_exempt_time_gives_way_as_soon_as_it_runs() -> None:
    crowd = full(ran=0.0)
    crowd.waits()
    assert crowd.plans() == {2: "save"}


def test_one_that_was_evicted_too_often_is_left_alone() -> None:
    once = Eviction(UNIX - 600, "move", "h1", Why.OPERATOR(), 256, took=1.0)
    crowd = full(evictions=(once, once))
    crowd.policy = replace(CROWDED, evict_per_job=2)
    crowd.waits()
    assert crowd.plans() == {1: "save"}


@pytest.mark.parametrize(
    ("state", "vms"), [(A.SPAWNED, V.SERVING), (A.ALLOCATED, V.FALLING_ASLEEP), (A.ALLOCATED, V.SETTLING)]
)
def test_one_that_does_not_run_undisturbed_is_left_alone(state: AttemptState, vms: VmState) -> None:
    crowd = Crowd([host("h1", 3)])
    crowd.runs(1, cpus=2)
    crowd.runs(2, state=state, vms=vms)
    crowd.waits(2)
    assert crowd.plans() == {1: "save"}


def test_a_job_of_which_a_vm_is_not_there_yet_is_left_alone() -> None:
    crowd = Crowd([host("h1"), host("h2")])
    crowd.runs(1, "h1", cpus=2)
    crowd.runs(2, "h2", "h2")
    crowd.change(1, state=V.JOINED)
    crowd.waits()
    assert crowd.plans() == {1: "save"}


def test_one_that_the_scheduler_shows_and_we_have_not_made_is_passed_over() -> None:
    crowd = full()
    crowd.jobs["3"] = crowd.jobs["2"]._replace(ref=JobRef("3", 700), nodes=())
    crowd.jobs["2"] = crowd.jobs["2"]._replace(ref=JobRef("2", 502, 1))
    crowd.waits()
    assert crowd.plans() == {1: "save"}


def test_a_job_is_evicted_only_where_the_waiting_one_could_run() -> None:
    crowd = Crowd([replace(host("h1", 1), images={}), host("h2", 1)])
    crowd.runs(1, "h2")
    crowd.runs(2, "h1")
    crowd.waits()
    assert crowd.plans() == {1: "save"}, "the first host has not the image"


def test_of_many_jobs_some_are_looked_at_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were submitted last come first."""
    crowd = Crowd([host("h1", 4)])
    for number in (1, 2, 3, 4):
        crowd.runs(number)
    crowd.waits(2)
    monkeypatch.setattr(preemption, "CONSIDERED", 2)
    assert [set(crowd.plans(passed_over)) for passed_over in (0, 1, 2, 3)] == [{3, 4}, {2, 3}, {1, 2}, set()]


# --- how they leave -----------------------------------------------------------------------------------


def stuck(mode: str = "requeue", **job: Any) -> Crowd:
    """Two jobs fill a host, and can neither move nor be saved. `job` says more of both."""
    crowd = Crowd([host("h1", stores=False)], rules=replace(RULES, modes={"low": mode}))
    crowd.runs(1, **job)
    crowd.runs(2, **job)
    crowd.waits()
    return crowd


@pytest.mark.parametrize(
    ("mode", "job", "way"),
    [
        ("requeue", {}, "requeue"),
        ("cancel", {}, "cancel"),
        ("requeue", {"requeues": False}, "cancel"),
        ("cancel", {"requeues": False}, "cancel"),
        ("suspend", {}, ""),
        ("requeue", {"batch": False, "requeues": False}, ""),
    ],
)
def test_a_job_that_can_neither_move_nor_be_saved_ends_by_the_schedulers_mode(
    mode: str, job: dict[str, Any], way: str
) -> None:
    crowd = stuck(mode, **job)
    assert crowd.run() == ({2: way} if way else {})
    if way:
        assert crowd.state is not None
        assert (crowd.state.attempts[2].state, crowd.state.attempts[2].grace) == (A.PREEMPTING, 0.0)
        assert (crowd.last(2).host, crowd.last(2).memory, crowd.last(2).at) == ("h1", 0, UNIX)
        assert crowd.last(2).why == Why.PREEMPTED(job="90", by="high").also(
            Why.ENDS_BY_MODE(
                way="queued again" if way == "requeue" else "cancelled", at=None, mode=mode.upper(), name="low",
                word=None if mode == way else "it cannot be queued again",
            )
        )  # fmt: skip


def test_a_step_that_ends_a_run_goes_nowhere_and_sends_nothing() -> None:
    (step,) = stuck().steps()
    assert (step.method, step.vm.id, step.to, step.memory, step.ends) == (Method.PREEMPTION, 20, "", 0, "requeue")


def test_a_class_for_which_the_scheduler_names_no_mode_is_not_ended() -> None:
    crowd = stuck()
    crowd.rules = replace(RULES, modes={})
    assert not crowd.plans()


def test_it_has_the_grace_time_of_its_class_and_is_told_until_when() -> None:
    crowd = stuck()
    crowd.rules = replace(RULES, grace={"low": 15.0})
    assert crowd.run() == {2: "requeue"} and crowd.state is not None
    assert (crowd.state.attempts[2].state, crowd.state.attempts[2].grace) == (A.WARNED, 15.0)
    (how,) = crowd.last(2).why.because
    assert dict(how.figures)["at"] == UNIX + 15.0


def test_a_job_with_a_vm_out_of_sight_is_not_ended() -> None:
    crowd = Crowd([host("h1", 1, stores=False), host("h2", 1, stores=False)])
    crowd.runs(1, "h1", "h2")
    crowd.waits()
    assert crowd.plans() == {1: "requeue"}
    crowd.away = {"h1"}
    assert not crowd.plans(), "its host may store its state"


def test_a_job_of_which_a_vm_is_missing_is_not_ended() -> None:
    crowd = Crowd([host("h1", 1, stores=False)])
    crowd.runs(1, "h1", nodes=2)
    crowd.waits()
    assert not crowd.plans()


def test_a_job_moves_if_another_host_takes_it_and_is_saved_if_none_does() -> None:
    hosts = [host("h1", moves=True), host("h2", 1, moves=True)]
    crowd = Crowd(hosts)
    crowd.runs(1, cpus=2, memory=512)
    crowd.waits(2)
    (step,) = crowd.steps()
    assert (step.to, step.ends, step.memory, step.vm.id) == ("", "", 512, 10), "the other host is too small"
    assert (step.method, step.why) == (Method.PREEMPTION, Why.PREEMPTED(job="90", by="high"))
    crowd = Crowd(hosts)
    crowd.runs(1, memory=512)
    crowd.waits(2)
    (step,) = crowd.steps()
    assert (step.to, step.ends, step.memory, step.vm.id) == ("h2", "", 512, 10)
    assert (step.method, step.why) == (Method.PREEMPTION, Why.PREEMPTED(job="90", by="high"))


def test_two_jobs_do_not_move_to_the_same_place() -> None:
    crowd = full(host("h1", moves=True), host("h2", 1, moves=True))
    crowd.waits(2)
    assert crowd.plans() == {1: "save", 2: "move to h2"} or crowd.plans() == {1: "move to h2", 2: "save"}


def test_a_job_does_not_move_to_where_the_waiting_one_goes() -> None:
    """Each of two hosts has a CPU free. One of the jobs moves, and the urgent one takes its host."""
    crowd = Crowd([host("h1", moves=True), host("h2", moves=True)])
    crowd.runs(1, "h1")
    crowd.runs(2, "h2")
    crowd.waits(2)
    assert crowd.plans() == {2: "move to h1"}


@pytest.mark.parametrize(("job", "evicted"), [({"batch": False, "requeues": False}, {}), ({}, {1: "requeue"})])
def test_where_the_waiting_job_takes_the_room_a_job_that_cannot_be_saved_ends_or_if_interactive_stays(
    job: dict[str, Any], evicted: dict[int, str]
) -> None:
    crowd = Crowd([host(name, moves=True, stores=False) for name in ("h1", "h2")])
    crowd.runs(1, "h1", **job)
    crowd.waits(2, nodes=2)
    assert crowd.plans() == evicted


def test_jobs_that_stay_are_left_out_and_others_leave_instead() -> None:
    """The interactive ones could move to h2, which the waiting job takes, too. That of h3 is dearer, and can leave."""
    hosts = [host("h1", 1, moves=True, stores=False), host("h2", 1, moves=True, stores=False), host("h3", 1)]
    crowd = Crowd(hosts)
    crowd.runs(1, "h3", memory=4096)
    crowd.runs(2, "h1", batch=False, requeues=False)
    crowd.waits(nodes=2)
    assert crowd.plans() == {1: "save"}


@pytest.mark.parametrize(("at_once", "evicted"), [(1, {}), (2, {1: "move to h2"})])
def test_a_job_that_waits_for_other_moves_alone_is_not_ended(at_once: int, evicted: dict[int, str]) -> None:
    hosts = [host(name, 3, moves=True, stores=False) for name in ("h1", "h2")]
    crowd = Crowd(hosts, policy=replace(CROWDED, moves_at_once=at_once))
    crowd.runs(1, cpus=2)
    crowd.moves(3, "h1", "h2")
    crowd.waits(3)
    assert crowd.plans() == evicted


@pytest.mark.parametrize(("at_once", "evicted"), [(1, {}), (2, {1: "move to h2"})])
def test_nor_is_one_that_waits_for_moves_to_the_other_host(at_once: int, evicted: dict[int, str]) -> None:
    """On h2 there is no room for the urgent job, which is larger. Something else fills h3."""
    hosts = [
        host("h1", 1, moves=True, stores=False),
        host("h2", 3, memory=256 + 288 + 100, moves=True, stores=False),
        host("h3", 1, moves=True),
    ]
    crowd = Crowd(hosts, policy=replace(CROWDED, moves_at_once=at_once))
    crowd.runs(1, "h1", memory=64)
    crowd.moves(3, "h3", "h2")
    crowd.claims.append(Claim(Key("vm", 77), "h3", Size(1, 100)))
    crowd.waits()
    assert crowd.plans() == evicted


# --- which set is the cheapest ------------------------------------------------------------------------


def test_the_least_memory_is_sent_and_of_equals_the_latest_job_leaves() -> None:
    crowd = Crowd([host("h1", 3)])
    crowd.runs(1, memory=256)
    crowd.runs(2, memory=256)
    crowd.runs(3, memory=512)
    crowd.waits()
    assert crowd.plans() == {2: "save"}


@pytest.mark.parametrize(("memory", "evicted"), [(190, {2: "move to h3"}), (210, {1: "save"})])
def test_a_save_is_twice_as_dear_as_a_move(memory: int, evicted: dict[int, str]) -> None:
    """What is saved is also read again. The urgent job is too large for h3."""
    crowd = Crowd([host("h1", 1), host("h2", 1, moves=True), host("h3", 1, memory=256 + 250, moves=True)])
    crowd.runs(1, "h1", memory=100)
    crowd.runs(2, "h2", memory=memory)
    crowd.waits()
    assert crowd.plans() == evicted


def test_a_save_is_cheaper_than_the_end_of_a_run_however_short() -> None:
    crowd = Crowd([host("h1", 1), host("h2", 1, stores=False)])
    crowd.runs(1, "h1", memory=4096)
    crowd.runs(2, "h2", ran=0.0)
    crowd.waits()
    assert crowd.plans() == {1: "save"}


def test_of_runs_that_end_the_fewest_cpu_seconds_are_lost() -> None:
    hosts = [host("h1", 4, stores=False), host("h2", 4, stores=False)]
    for ran, evicted in ((99.0, {2: "requeue"}), (101.0, {1: "requeue"})):
        crowd = Crowd(hosts)
        crowd.runs(1, "h1", cpus=4, ran=50.0)
        crowd.runs(2, "h2", "h2", cpus=2, ran=ran / 2)
        crowd.waits(4)
        assert crowd.plans() == evicted


def test_several_small_jobs_or_a_large_one_leave_whichever_is_cheaper() -> None:
    for memory, evicted in ((900, {1: "save"}), (1100, {2: "save", 3: "save"})):
        crowd = Crowd([host("h1", 4)])
        crowd.runs(1, cpus=2, memory=memory)
        crowd.runs(2, memory=500)
        crowd.runs(3, memory=500)
        crowd.waits(2)
        assert crowd.plans() == evicted


def test_no_job_leaves_without_which_there_is_room() -> None:
    """Of the two cheapest ones together the smaller is not needed."""
    crowd = Crowd([host("h1", 6)])
    crowd.runs(1, cpus=1, memory=256)
    crowd.runs(2, cpus=2, memory=300)
    crowd.runs(3, cpus=3, memory=2000)
    crowd.waits(4)
    assert crowd.plans() == {1: "save", 3: "save"}
    crowd = Crowd([host("h1", 6)])
    crowd.runs(1, cpus=1, memory=256)
    crowd.runs(2, cpus=2, memory=300)
    crowd.runs(3, cpus=3, memory=2000)
    crowd.waits(5)
    assert crowd.plans() == {2: "save", 3: "save"}


def test_room_is_made_on_several_hosts_for_a_job_of_several_vms() -> None:
    crowd = Crowd([host("h1"), host("h2"), host("h3")])
    for number, name in enumerate(("h1", "h1", "h2", "h2", "h3", "h3"), 1):
        crowd.runs(number, name, memory=256 + number)
    crowd.waits(2, nodes=2)
    assert crowd.plans() == {1: "save", 2: "save", 3: "save", 4: "save"}


def test_room_that_is_free_is_used_and_a_job_that_leaves_frees_room_on_all_its_hosts() -> None:
    crowd = Crowd([host("h1"), host("h2", 1), host("h3", 1)])
    crowd.runs(1, "h1", memory=2000)
    crowd.runs(2, "h2", "h3")
    crowd.waits(nodes=3)
    assert crowd.plans() == {2: "save"}
    (step,) = crowd.steps()
    assert step.memory == 512


def test_several_vms_of_the_job_may_be_on_one_host() -> None:
    crowd = Crowd([host("h1", 4)])
    crowd.runs(1)
    crowd.runs(2)
    crowd.waits(nodes=4)
    assert crowd.plans() == {1: "save", 2: "save"}


def test_no_more_vms_are_placed_on_a_host_than_the_job_wants() -> None:
    for per_host, evicted in ((0, {2: "save", 3: "save"}), (1, {1: "save", 3: "save"})):
        crowd = Crowd([host("h1", 1), host("h2", 2)])
        crowd.runs(1, "h1", memory=1000)
        crowd.runs(2, "h2", memory=300)
        crowd.runs(3, "h2", memory=256)
        crowd.waits(nodes=2, per_host=per_host)
        assert crowd.plans() == evicted


# --- when it is looked at again -----------------------------------------------------------------------


def test_what_a_limit_holds_back_is_shown_and_tried_again_after_a_while() -> None:
    crowd = full()
    crowd.policy = replace(CROWDED, evict_at_once=1)
    crowd.waits(2)
    assert crowd.run() == {2: "save"} and crowd.state is not None
    (held,) = crowd.state.held_back["preemption"]
    assert (held.attempt.id, held.held, held.held_since) == (1, Why.EVICTIONS_AT_ONCE(limit=1), NOW)
    (shown,) = proposals(crowd.context)
    assert shown == held


@pytest.mark.parametrize(
    ("running", "looked", "pause", "passed_over"),
    [(2, {}, LOOK_AGAIN, 0), (3, {}, 0.002, 2), (5, {}, 0.002, 2), (5, {2: 1}, 0.002, 4), (5, {4: 1}, LOOK_AGAIN, 0)],
)
def test_where_nothing_helps_the_others_are_looked_at_soon_or_all_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, running: int, looked: dict[int, int], pause: float, passed_over: int
) -> None:
    for module in (preemption, begun_by):
        monkeypatch.setattr(module, "CONSIDERED", 2)
    crowd = Crowd([host("h1", running, stores=False)], rules=replace(RULES, modes={"low": "suspend"}))
    for number in range(1, running + 1):
        crowd.runs(number)
    crowd.waits()
    crowd.state = State(rows(*crowd.rows, claims=crowd.claims, known=sorted(crowd.names)), TABLES, NOW)
    for before in looked:
        crowd.state.looked_for_room = (URGENT, NOW, before)
    assert not crowd.run()
    assert crowd.state.looked_for_room == (URGENT, NOW + pause, passed_over)
    assert not crowd.run(NOW + pause / 2)
    assert crowd.state.looked_for_room == (URGENT, NOW + pause, passed_over), "not yet"


def test_the_jobs_that_were_looked_at_before_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "CONSIDERED", 1)
    crowd = full()
    crowd.waits()
    crowd.state = State(rows(*crowd.rows, claims=crowd.claims, known=["h1"]), TABLES, NOW)
    crowd.state.looked_for_room = (URGENT, NOW, 1)
    assert crowd.run() == {1: "save"}


def test_where_no_job_is_known_that_waits_for_room_that_is_looked_at_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first job here is of the class for which the others would give way."""
    monkeypatch.setattr(begun_by, "CONSIDERED", 1)
    crowd = Crowd([host("h1", 3)])
    crowd.runs(1, preempt_class="high")
    crowd.runs(2)
    crowd.runs(3)
    state = crowd.decide()
    assert preempt(crowd.context, Blockage.ROOM) is Blockage.ROOM
    assert (state.looked_for_room, state.held_back["preemption"]) == ((None, NOW + LOOK_AGAIN, 0), [])


def test_what_is_shown_passes_over_what_was_looked_at_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "CONSIDERED", 1)
    crowd = full()
    crowd.waits()
    state = crowd.decide()
    state.blocking, state.looked_for_room = URGENT, (URGENT, NOW + 3.0, 1)
    assert [step.attempt.id for step in proposals(crowd.context)] == [1]


def test_another_job_is_looked_at_at_once_and_from_the_first_running_job_on() -> None:
    crowd = full()
    crowd.waits()
    crowd.state = State(rows(*crowd.rows, claims=crowd.claims, known=["h1"]), TABLES, NOW)
    crowd.state.looked_for_room = (55, NOW + 3.0, 2)
    assert crowd.run() == {2: "save"}
    assert crowd.state.looked_for_room == (URGENT, NOW + 0.002, 0), "a step was begun: it is planned on soon"


def test_a_pass_in_which_nobody_waits_for_room_forgets_what_was_held_back() -> None:
    crowd = full()
    crowd.policy = replace(CROWDED, evict_at_once=0)
    crowd.waits()
    assert not crowd.run() and crowd.state is not None and crowd.state.held_back["preemption"]
    assert crowd.state.looked_for_room == (URGENT, NOW + LOOK_AGAIN, 0)
    crowd.jobs[str(URGENT)] = crowd.jobs[str(URGENT)]._replace(eligible=False)
    crowd.run(NOW + 1)
    assert crowd.state.held_back["preemption"] == []


# --- further rules ------------------------------------------------------------------------------------


def test_nobody_is_evicted_off_a_host_that_is_drained_before_the_waiting_job_has_surely_ended() -> None:
    for begins, evicted in ((UNIX + 60, {1: "save"}), (UNIX + 9999, {2: "save"})):
        crowd = Crowd([host("h1", 1), host("h2", 1)])
        crowd.runs(1, "h1")
        crowd.runs(2, "h2")
        crowd.waits()
        state = crowd.decide()
        drain = Drain(begins)
        state.drains["h2"] = drain
        state.close_hosts(frozenset(), frozenset({"h2"}))
        state.blocking = URGENT
        steps = plan_preemption(crowd.context, EvictionLimits(crowd.context))
        assert {one.attempt.id: "save" for one in steps} == evicted


def test_on_a_host_where_the_job_wants_no_more_of_its_vms_free_room_is_of_no_use() -> None:
    """Two VMs, one on a host: there is room for both on h2 alone."""
    crowd = Crowd([host("h1", 1), host("h2", 2)])
    crowd.runs(1, "h1")
    crowd.waits(nodes=2, per_host=1)
    assert crowd.plans() == {1: "save"}
    crowd.runs(2, "h2", preempt_class="high")
    crowd.runs(3, "h2", preempt_class="high")
    assert crowd.plans() == {}


def test_where_many_jobs_only_move_and_have_no_room_one_that_can_be_saved_leaves() -> None:
    """The only room that they could move to is that of the urgent job."""
    names = [f"h{number}" for number in range(1, 8)]
    hosts = [host(name, 1, moves=True, stores=False) for name in names]
    crowd = Crowd([*hosts, host("h8", 1), host("h9", 1, moves=True, stores=False)])
    for number, name in enumerate(names, 1):
        crowd.runs(number, name, memory=300 - number, batch=False, requeues=False)
    crowd.runs(8, "h8", memory=4096)
    crowd.waits(nodes=2)
    assert crowd.plans() == {8: "save"}


@pytest.mark.parametrize(("stay", "evicted"), [(2, {4: "move to h9"}), (3, {5: "save"})])
def test_sets_of_jobs_are_tried_a_few_times_before_only_jobs_that_can_be_saved_are(
    stay: int, evicted: dict[int, str]
) -> None:
    """The first jobs could only move to h8, which the urgent one takes, too. The fourth has room on h9."""
    names = [f"h{number}" for number in range(1, stay + 1)]
    able = {"moves": True, "stores": False}
    large = [host(name, **able) for name in (*names, "h4", "h8")]
    crowd = Crowd([*large, host("h5"), host("h9", 1, **able)])
    for number, name in enumerate(names, 1):
        crowd.runs(number, name, cpus=2, memory=100, batch=False, requeues=False)
    crowd.runs(4, "h4", memory=200, batch=False, requeues=False)
    crowd.runs(5, "h5", cpus=2, memory=4096)
    crowd.waits(2, nodes=2)
    assert crowd.plans() == evicted


def test_a_job_that_would_have_to_end_stays_where_another_one_on_its_host_can_be_saved() -> None:
    """It could move to h2, but the urgent job takes h2, too. It is not queued again, so it has no state to be kept."""
    crowd = Crowd([host("h1", moves=True), host("h2", 1, moves=True)])
    crowd.runs(1, memory=2000)
    crowd.runs(2, memory=100, requeues=False)
    crowd.waits(nodes=2)
    assert crowd.plans() == {1: "save"}


def test_a_job_does_not_move_to_a_host_that_the_waiting_one_takes_because_of_its_limit_there() -> None:
    """There would be room for both VMs of the urgent job on h1, and it wants one on each host."""
    crowd = Crowd([host("h1", memory=256 + 2 * 288, moves=True), host("h2", 1, moves=True)])
    crowd.runs(1, memory=2 * 288 - 32)
    crowd.waits(nodes=2, per_host=1)
    assert crowd.plans() == {1: "save"}


def test_nobody_is_evicted_who_uses_too_little_of_what_the_claim_says() -> None:
    """Memory is over-committed: the jobs claim 4 GiB and use 100 MiB each, and the machine has 300 MiB left."""
    times = Overcommitment(memory=2.0, floor=100)
    for private, evicted in ((100.0, set()), (1000.0, {2})):
        crowd = full(replace(host("h1", 3), overcommit=times, available=300), memory=4000)
        crowd.private = private
        crowd.waits()
        assert set(crowd.plans()) == evicted


def test_a_mebibyte_too_little_is_not_enough() -> None:
    crowd = full(host("h1", 3, memory=256 + 2 * 287), memory=255)
    crowd.waits()
    assert crowd.plans() == {1: "save", 2: "save"}


def test_a_job_of_which_a_vm_does_not_serve_yet_is_not_ended() -> None:
    crowd = Crowd([host("h1", stores=False)])
    crowd.runs(1, "h1", "h1")
    crowd.change(1, state=V.JOINED)
    crowd.waits()
    assert not crowd.plans()


def test_a_full_clone_takes_of_the_disk_what_its_kind_takes() -> None:
    """Its VM may write to the whole disk of the image. That of an instant clone is limited to what it may write."""
    image = {"slim": IMAGES["slim"] | {"limit_disk"}}
    for kind, evicted in ((CloneKind.INSTANT, {2: "save"}), (CloneKind.FULL, {1: "save", 2: "save"})):
        large = replace(host("h1"), images=image, disks={"slim": ImageDisk(whole=1500)}, capacity=Size(2, 9999, 2000))
        crowd = Crowd([large])
        crowd.runs(1)
        crowd.runs(2)
        held = {10: 1000, 20: 1000}
        crowd.claims = [
            replace(one, size=replace(one.size, disk=held.get(one.owner.id, 0))) if one.owner.kind == "vm" else one
            for one in crowd.claims
        ]
        crowd.waits(kind=kind)
        assert crowd.plans() == evicted


def test_the_template_takes_of_the_disk_what_its_image_takes() -> None:
    """And its memory once, as this host holds it."""
    image = {"slim": IMAGES["slim"] | {"limit_disk"}}
    for overhead, evicted in ((100, {2: "save"}), (600, {1: "save", 2: "save"})):
        disks = {"slim": ImageDisk(overhead=overhead)}
        crowd = Crowd([replace(host("h1"), images=image, disks=disks, capacity=Size(2, 2 * 544, 2000))])
        crowd.runs(1, memory=512)
        crowd.runs(2, memory=512)
        crowd.without_templates()
        crowd.claims = [replace(one, size=replace(one.size, disk=1000)) for one in crowd.claims]
        crowd.waits()
        assert crowd.plans() == evicted
