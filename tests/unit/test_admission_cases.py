"""Admission, case by case (see the docstring of `core.admission.admit`), and the order of the cases."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations

import pytest

from multiverse.core.admission.admit import Admission, admit
from multiverse.core.capacity.room import Blockage
from multiverse.core.capacity.sizes import largest_on, template_claim, vm_claim, vm_size
from multiverse.core.changes import mark_changes
from multiverse.core.clones.spares import WITHDRAWAL
from multiverse.core.context import Context
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import CloneKind, Depth, Key, Size
from multiverse.core.model.host import Claim, Host, HostState, HypervisorView, KnownHost, Overcommitment
from multiverse.core.model.identity import UserSeen
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    Job,
    JobRef,
    JobState,
    Node,
    NodeState,
    Request,
    SchedulerView,
)
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import OfferState, Template, TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Forecast, Row
from multiverse.core.planner import plan
from multiverse.core.policy import Parent, Policy, Pool
from multiverse.core.queue import PASSED_OVER
from multiverse.core.state import State
from multiverse.core.transition import Change, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import (
    IMAGES,
    SOURCE,
    Decided,
    as_ready,
    attempt,
    changes_of,
    offer,
    rows,
    state,
    template,
    vm,
    world_of,
)

A, V, T = AttemptState, VmState, TemplateState
NOW = 1000.0
TOO_LITTLE = "and others there leave too little of it"
SMALL = Size(1, 100)
READY = template(T.READY)
PARKED = Pool("slim", Depth.PARKED, 1, 9, SMALL, 1e9)
EAGER = replace(POLICY, patience=0.0)


def host(name: str = "h1", *, cpus: int = 64, memory: int = 65536, can: str | None = None, **more: object) -> Host:
    images = IMAGES if can is None else {"slim": frozenset(can.split())}
    abilities = frozenset({"instant", "full", "linked"})
    return Host(name, Size(cpus, memory, 65536), abilities, images=images, **more)  # type: ignore[arg-type]


def queued(number: int, size: Size = SMALL, *, nodes: int = 1, **request: object) -> Attempt:
    asked = Request(nodes, size, **request)  # type: ignore[arg-type]
    return attempt(A.QUEUED, id=number, job=str(number), request=asked)


def decided(*some: Row, hosts: Collection[Host] = (), policy: Policy = EAGER, claims: Iterable[Claim] = (),
            known: Collection[str] = (), change: dict[int, dict[str, object]] | None = None,
            gone: Collection[int] = (), limits: dict[str, int] | None = None, unseen: Collection[int] = (),
            began: float = NOW, **forecast: object) -> Decided:  # fmt: skip
    """The changes of one pass when the jobs of all attempts that do not run wait at the gate, in the order of their
    numbers, and all VMs and templates are observed as their rows say."""
    here = rows(*some, claims=claims, known=known)
    jobs = {}
    for a in here.attempts.values():
        status = JobState.RUNNING if a.state is A.ALLOCATED else JobState.PENDING
        nodes = tuple(one.name for one in here.vms.values() if one.attempt == a.id)
        job = Job(a.job, a.job_name, a.uid, status, a.request, rank=a.id, nodes=nodes)
        if a.id not in gone:
            jobs[a.job.job_id] = job._replace(**(change or {}).get(a.id, {}))  # type: ignore[arg-type]
    vms = {
        one.name: VmSeen(
            one.name,
            one.host,
            VmCondition.PARKED if one.state is V.PARKED else VmCondition.RUNNING,
            private=1.0,
        )
        for one in here.vms.values()
        if one.state is not V.PLANNED and one.id not in unseen
    }
    nodes_ = {one.name: Node(one.name, NodeState.IDLE) for one in here.vms.values() if one.state is V.JOINED}
    world = world_of(
        SchedulerView(jobs, nodes_, limits or {}),
        HypervisorView({one.name: one for one in hosts}, vms, as_ready(some)),
        began,
        effect_ended_at={Key("attempt", number): float("inf") for number in gone},
        forecast=Forecast(**forecast),  # type: ignore[arg-type]
    )
    pass_ = State(here, TABLES, NOW)
    changes = Decided(changes_of(plan(pass_, world, [], NOW, policy)), pass_)
    assert not [c for c in changes if c.event is Event.QUARANTINED]
    return changes


def admitted(changes: list[Change]) -> set[int]:
    return {c.row.id for c in changes if c.event is Event.ADMITTED}


def notes(changes: Decided) -> dict[int, str]:
    return changes.reasons


def made(changes: list[Change]) -> list[Vm]:
    return [c.row for c in changes if isinstance(c.row, Vm) and c.event is Event.PLANNED]


def templates(changes: list[Change]) -> list[tuple[Event, Template]]:
    return [(c.event, c.row) for c in changes if isinstance(c.row, Template)]


def claim_of(one: Vm | Template) -> Claim:
    size = (
        vm_claim(one.size, host(), "slim", CloneKind.INSTANT)
        if isinstance(one, Vm)
        else template_claim(one.size, host(), "slim")
    )
    return Claim(one.key, one.host, size)


# --- the thirteen cases ------------------------------------------------------------------------------


@dataclass
class Scenario:
    """A job, number 5, that can be admitted at once; each function below makes one case apply to it as well."""

    request: Request = Request(1, SMALL)
    attempt: dict[str, object] = field(default_factory=dict)
    job: dict[str, object] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    templates: list[Row] = field(default_factory=lambda: [READY])
    claims: list[Claim] = field(default_factory=list)
    known: list[str] = field(default_factory=lambda: ["h1"])
    limits: dict[str, int] = field(default_factory=dict)
    policy: dict[str, object] = field(default_factory=dict)
    paced: dict[tuple[str, str, CloneKind], float] = field(default_factory=dict)
    behind: list[Attempt] = field(default_factory=list)
    off: dict[str, HostState] = field(default_factory=dict)
    next_job: dict[str, object] = field(default_factory=dict)  # what the scheduler shows of job 6
    users: dict[int, UserSeen] | None = None
    asked: dict[int, float] = field(default_factory=lambda: {1000: NOW - 60})  # so the name service is slow

    def admit(self) -> Outcomes:
        values: dict[str, object] = {"request": self.request, "since": NOW - 50, **self.attempt}
        asks = attempt(values.pop("state", A.QUEUED), id=5, job="5", **values)  # type: ignore[arg-type]
        some = [*self.rows, asks, *self.behind]
        here = state(*some, *self.templates, claims=self.claims, known=self.known, now=NOW)
        here.paced, here.users_asked = dict(self.paced), dict(self.asked)
        for name, why in self.off.items():
            here.know_host(KnownHost(name, SOURCE, why))
        waiting = [one for one in some if isinstance(one, Attempt) and one.state is not A.RECLAIMING]
        jobs = {one.job.job_id: Job(one.job, "hello", 1000, JobState.PENDING, one.request, rank=one.id)
                for one in waiting}  # fmt: skip
        jobs["5"] = jobs["5"]._replace(**self.job)  # type: ignore[arg-type]
        if "6" in jobs:
            jobs["6"] = jobs["6"]._replace(**self.next_job)  # type: ignore[arg-type]
        joined = [one for one in self.rows if isinstance(one, Vm) and one.state is V.JOINED]
        world = world_of(
            SchedulerView(jobs, {one.name: Node(one.name, NodeState.IDLE) for one in joined}, self.limits),
            HypervisorView(
                {"h1": host()},
                {one.name: VmSeen(one.name, "h1", VmCondition.RUNNING) for one in joined},
                as_ready(self.templates),
            ),
            NOW,
            users=self.users,
        )
        policy = replace(EAGER, **self.policy)  # type: ignore[arg-type]
        mark_changes(here, world, policy)
        blockage = admit(Context(here, world, policy))
        return Outcomes(
            changes_of(here.moves), blockage, {n: str(why) for n, why in here.reasons.items()}, here.waiting
        )


WAITS = "waits"


@dataclass(frozen=True)
class Outcomes:
    """What one round of admission decided."""

    changes: list[Change]
    blockage: Blockage
    reasons: dict[int, str]
    waiting: Mapping[Parent, int]

    def of(self, number: int) -> tuple[Event | str | None, str]:
        """The event of an attempt, or that it waits, and its reason; None if nothing was decided about it."""
        found = [(c.event, text_of(c.reason)) for c in self.changes if c.row.key == Key("attempt", number)]
        assert len(found) <= 1, "one decision in a round"
        assert not found or number not in self.reasons
        return found[0] if found else (WAITS, self.reasons[number]) if number in self.reasons else (None, "")


def job_has_changed(s: Scenario) -> None:
    s.job["ref"] = JobRef("5", 999)


def job_cannot_be_served(s: Scenario) -> None:
    s.job["problem"] = "two partitions"


def job_is_too_large(s: Scenario) -> None:
    s.request = replace(s.request, size=Size(99, 100))


def job_is_held(s: Scenario) -> None:
    s.job["eligible"] = False


def job_is_not_at_the_gate(s: Scenario) -> None:
    s.attempt["state"] = A.UNGATED


def job_is_in_its_back_off(s: Scenario) -> None:
    s.attempt["not_before"] = NOW + 0.5


def earlier_run_is_lost(s: Scenario) -> None:
    s.attempt["restarts"] = 1
    s.rows += [attempt(A.RECLAIMING, id=1, job="5", outcome="requeued"), vm(V.LOST, id=1, attempt=1, host="h2")]


def limit_is_used_up(s: Scenario) -> None:
    s.job["uses"] = (("cpu", 1),)
    s.limits["cpu"] = 0


def earlier_job_waits_for_room(s: Scenario) -> None:
    """It boots and is for the whole host, of which one CPU is in use."""
    s.rows.append(queued(2, Size(64, 100), kind=CloneKind.FULL))
    s.claims.append(Claim(Key("vm", 90), "h1", Size(1, 0)))


def joined_spare_fits(s: Scenario) -> None:
    s.rows.append(vm(V.JOINED, id=8, pool=Depth.JOINED, since=NOW - 50))
    s.policy["pools"] = (replace(PARKED, depth=Depth.JOINED),)


def turn_is_over(s: Scenario) -> None:
    s.rows += [attempt(A.SPAWNING, id=3, job="3"), vm(V.STARTING, id=3, attempt=3)]
    s.policy["provisioning"] = 1


def template_is_missing(s: Scenario) -> None:
    s.templates = []


def pace_is_used_up(s: Scenario) -> None:
    s.policy["rates"] = {CloneKind.INSTANT: 0.25}
    s.paced["h1", "slim", CloneKind.INSTANT] = NOW + 60


def host_is_full(s: Scenario) -> None:
    s.claims.append(Claim(Key("vm", 91), "h1", Size(64, 0)))


def addresses_are_used_up(s: Scenario) -> None:
    s.policy |= {"subnet": ipaddress.IPv4Network("10.9.0.0/30"), "first_address": 2, "gateway": "10.9.0.2"}


Case = Callable[[Scenario], None]
Expected = tuple[Event | str | None, str]

CASES: list[tuple[int, Case, Expected]] = [
    (0, job_has_changed, (None, "")),
    (1, job_cannot_be_served, (Event.IMPOSSIBLE, "two partitions")),
    (2, job_is_too_large, (Event.IMPOSSIBLE, "fits on no host")),
    (3, job_is_held, (None, "")),
    (3, job_is_not_at_the_gate, (None, "")),
    (3, job_is_in_its_back_off, (None, "")),
    (4, earlier_run_is_lost, (WAITS, "its earlier run may go on in mvtest0-1")),
    (5, limit_is_used_up, (WAITS, "held back by cpu")),
    (6, earlier_job_waits_for_room, (WAITS, "waiting for capacity: the hosts are full")),
    (7, joined_spare_fits, (Event.ADMITTED, "joined before")),
    (8, turn_is_over, (WAITS, "as many VMs as may be made at once")),
    (9, template_is_missing, (WAITS, "the template of image slim is being built on h1")),
    (10, pace_is_used_up, (WAITS, "0.25 a second")),
    (11, host_is_full, (WAITS, "waiting for capacity: the hosts are full")),
    (11, addresses_are_used_up, (WAITS, "waiting for a free address")),
    (12, lambda _: None, (Event.ADMITTED, "instant on h1")),
]
NAMES = [f"{number}-{case.__name__}" for number, case, _ in CASES]


@pytest.mark.parametrize(("number", "case", "expected"), CASES, ids=NAMES)
def test_each_case_decides(number: int, case: Case, expected: Expected) -> None:
    scenario = Scenario()
    case(scenario)
    event, reason = scenario.admit().of(5)
    assert event is expected[0] and expected[1] in reason


PAIRS = [
    pytest.param(first, second, expected, id=f"{first.__name__}-{second.__name__}")
    for (n, first, expected), (m, second, _) in combinations(CASES[:-1], 2)
    if n < m
    # Where the turn is over the earlier job waits for it too, and so its reason is that.
    if (first, second) != (earlier_job_waits_for_room, turn_is_over)
]


@pytest.mark.parametrize(("first", "second", "expected"), PAIRS)
def test_of_two_cases_that_apply_the_first_decides(first: Case, second: Case, expected: Expected) -> None:
    scenario = Scenario()
    for case in (first, second):
        case(scenario)
    event, reason = scenario.admit().of(5)
    assert event is expected[0] and expected[1] in reason


def test_a_job_behind_one_that_waits_for_a_turn_waits_for_the_same() -> None:
    scenario = Scenario()
    earlier_job_waits_for_room(scenario)
    turn_is_over(scenario)
    outcomes = scenario.admit()
    assert outcomes.of(5) == outcomes.of(2) and "turn" in outcomes.of(5)[1]


def test_a_revoked_attempt_ends_as_revoked() -> None:
    scenario = Scenario()
    job_cannot_be_served(scenario)
    (change,) = scenario.admit().changes
    assert isinstance(change.row, Attempt)
    assert (change.row.state, change.row.outcome, text_of(change.row.reason)) == (
        A.REVOKING,
        "revoked",
        "two partitions",
    )


def test_an_admitted_attempt_keeps_no_reason_for_waiting() -> None:
    outcomes = Scenario(attempt={"note": "the attempt before failed"}).admit()
    (admitted_,) = [c.row for c in outcomes.changes if isinstance(c.row, Attempt)]
    assert not outcomes.reasons
    assert (admitted_.state, text_of(admitted_.note)) == (A.CLAIMED, "") and text_of(admitted_.choice).startswith(
        "instant on h1"
    )


def test_a_job_too_large_for_hosts_in_sight_waits_for_one_that_is_fenced_and_not_for_one_that_is_removed() -> None:
    scenario = Scenario(known=["h1", "h2"], off={"h2": HostState.REMOVED})
    job_is_too_large(scenario)
    event, reason = scenario.admit().of(5)
    assert event is Event.IMPOSSIBLE and "out of reach" not in reason
    scenario.known.append("h3")
    scenario.off["h3"] = HostState.FENCED
    event, reason = scenario.admit().of(5)
    assert event is WAITS and reason.endswith("; out of reach now: h3")


@pytest.mark.parametrize(("eligible", "event"), [(True, WAITS), (False, None)])
def test_a_job_too_large_for_hosts_in_sight_waits_for_the_others_and_has_a_reason_if_it_is_not_held(
    eligible: bool, event: Event | str | None
) -> None:
    scenario = Scenario(known=["h1", "h2"])
    job_is_too_large(scenario)
    scenario.job["eligible"] = eligible
    outcomes = scenario.admit()
    assert outcomes.of(5)[0] is event and ("out of reach now: h2" in outcomes.of(5)[1]) is eligible
    assert outcomes.blockage is Blockage.NONE


# Another job, of one booted VM with one CPU, is next in the queue.
NEXT = queued(6, kind=CloneKind.FULL)


@pytest.mark.parametrize(
    "case",
    [case for number, case, _ in CASES if number in (0, 1, 2, 3, 4, 5, 7, 9, 10, 12)],
    ids=lambda case: case.__name__,
)
def test_these_cases_block_no_job_behind(case: Case) -> None:
    scenario = Scenario(behind=[NEXT])
    case(scenario)
    outcomes = scenario.admit()
    assert outcomes.of(6)[0] is Event.ADMITTED and outcomes.blockage is Blockage.NONE


def two_vms(s: Scenario) -> None:
    s.request = replace(s.request, nodes=2)


def turn_lacks_one(s: Scenario) -> None:
    """One VM more may be made, and the job needs two."""
    two_vms(s)
    turn_is_over(s)
    s.policy["provisioning"] = 2


def host_lacks_one_cpu(s: Scenario) -> None:
    two_vms(s)
    s.claims.append(Claim(Key("vm", 91), "h1", Size(63, 0)))


def subnet_lacks_one_address(s: Scenario) -> None:
    two_vms(s)
    s.policy |= {"subnet": ipaddress.IPv4Network("10.9.0.0/29"), "first_address": 5}
    s.policy["gateway"] = "10.9.0.5"


def template_lacks_room(s: Scenario) -> None:
    template_is_missing(s)
    s.claims.append(Claim(Key("vm", 91), "h1", Size(0, 65536 - 255)))


BLOCKING = [
    (turn_lacks_one, Blockage.TURN),
    (host_lacks_one_cpu, Blockage.ROOM),
    (subnet_lacks_one_address, Blockage.ROOM),
    (template_lacks_room, Blockage.ROOM),
]


@pytest.mark.parametrize(("case", "blockage"), BLOCKING, ids=lambda value: getattr(value, "__name__", value))
def test_these_cases_block_the_jobs_behind(case: Case, blockage: Blockage) -> None:
    scenario = Scenario(behind=[NEXT])
    case(scenario)
    outcomes = scenario.admit()
    assert outcomes.blockage is blockage
    assert outcomes.of(6) == outcomes.of(5) and outcomes.of(5)[0] is WAITS
    alone = Scenario(behind=[NEXT])
    case(alone)
    job_is_held(alone)
    without = alone.admit().of(6)
    assert without != outcomes.of(6), "while the first job is held, the other one is considered for itself"
    assert without[0] is Event.ADMITTED or case is template_lacks_room


@pytest.mark.parametrize("case", [template_is_missing, pace_is_used_up, host_lacks_one_cpu, subnet_lacks_one_address])
def test_a_job_that_waits_uses_up_no_limit(case: Case) -> None:
    scenario = Scenario(behind=[NEXT], limits={"jobs": 1})
    scenario.job["uses"] = scenario.next_job["uses"] = (("jobs", 1),)
    case(scenario)
    assert "held back" not in scenario.admit().of(6)[1]
    job_is_held(scenario)
    scenario.limits["jobs"] = 0
    assert scenario.admit().of(6) == (WAITS, "held back by jobs")


def test_a_broken_template_in_its_back_off_is_named_with_its_reason() -> None:
    broken = template(T.BROKEN, tries=1, since=NOW, reason="the image does not boot")
    outcomes = Scenario(templates=[broken], behind=[NEXT]).admit()
    assert outcomes.of(5) == (
        WAITS, "the template of image slim is broken on h1: the image does not boot"
    )  # fmt: skip
    assert outcomes.of(6)[0] is Event.ADMITTED


def test_an_earlier_run_counts_whatever_the_number_of_its_attempt() -> None:
    scenario = Scenario(attempt={"restarts": 1})
    scenario.rows += [attempt(A.RECLAIMING, id=9, job="5", outcome="requeued"), vm(V.LOST, attempt=9, host="h2")]
    assert "its earlier run may go on" in scenario.admit().of(5)[1]


@pytest.mark.parametrize("state_", [V.ORPHAN, V.RELEASING, V.ENDING, V.REMOVING])
def test_a_job_waits_while_a_vm_that_no_record_explained_may_run_it(state_: VmState) -> None:
    assert Scenario(rows=[vm(state_, id=9, host="h2", job_id="6")]).admit().of(5)[0] is Event.ADMITTED
    outcomes = Scenario(rows=[vm(state_, id=9, host="h2", job_id="5")], behind=[NEXT]).admit()
    event, reason = outcomes.of(5)
    assert event is WAITS and "its earlier run may go on in mvtest0-9" in reason
    assert outcomes.of(6)[0] is Event.ADMITTED, "it blocks no job behind"


@pytest.mark.parametrize("ended", ["3", "5"])
def test_an_attempt_whose_job_is_not_shown_any_more_uses_up_no_limit(ended: str) -> None:
    """Job 3 is gone, and job 5 is shown as its next run."""
    scenario = Scenario(attempt={"restarts": 1}, limits={"jobs": 1})
    scenario.job["uses"] = (("jobs", 1),)
    scenario.rows.append(attempt(A.RECLAIMING, id=3, job=ended, outcome="requeued"))
    assert scenario.admit().of(5)[0] is Event.ADMITTED


@pytest.mark.parametrize(
    ("since", "revoked"), [(NOW - 51, False), (NOW - 50, False), (NOW - 49.9, True)], ids=["older", "as old", "newer"]
)
def test_only_an_answer_that_began_after_the_job_was_queued_says_that_there_is_no_such_user(
    since: float, revoked: bool
) -> None:
    scenario = Scenario(behind=[replace(NEXT, uid=1001)])
    scenario.users = {1000: UserSeen(False, since, since, "no user has uid 1000"), 1001: UserSeen(True, NOW, 0.0)}
    outcomes = scenario.admit()
    event, reason = outcomes.of(5)
    assert event is (Event.IMPOSSIBLE if revoked else WAITS) and "uid 1000" in reason
    assert outcomes.of(6)[0] is Event.ADMITTED


def test_a_job_waits_for_the_pace_of_the_host_that_is_free_first() -> None:
    both = [template(T.READY, id=n, host=f"h{n}") for n in (1, 2)]
    asks = queued(5, nodes=2)
    here = state(asks, *both, known=["h1", "h2"], now=NOW)
    here.paced = {("h1", "slim", CloneKind.INSTANT): NOW + 60, ("h2", "slim", CloneKind.INSTANT): NOW + 30}
    view = HypervisorView({"h1": host(), "h2": host("h2")}, {}, as_ready(both))
    job = Job(asks.job, "hello", 1000, JobState.PENDING, asks.request)
    policy = replace(EAGER, rates={CloneKind.INSTANT: 0.25})
    world = world_of(SchedulerView({"5": job}), view, NOW)
    mark_changes(here, world, policy)
    admit(Context(here, world, policy))
    assert dict(here.waiting) == {("h2", "slim", CloneKind.INSTANT): 2}


PARENT = ("h1", "slim", CloneKind.INSTANT)


def test_all_vms_that_jobs_alike_need_wait_for_the_pace_and_no_other_job_does() -> None:
    alike = [queued(6, nodes=2), queued(7, nodes=2)]
    scenario = Scenario(behind=[*alike, replace(NEXT, id=8, job=JobRef("8", 500))])
    two_vms(scenario)
    pace_is_used_up(scenario)
    outcomes = scenario.admit()
    assert outcomes.waiting == {PARENT: 6}
    assert outcomes.of(5) == outcomes.of(6) == outcomes.of(7) and outcomes.of(7)[0] is WAITS
    assert outcomes.of(8)[0] is Event.ADMITTED


def test_of_jobs_alike_that_wait_one_is_considered(monkeypatch: pytest.MonkeyPatch) -> None:
    considered: list[int] = []
    consider = Admission.consider

    def counted(self: Admission, one: Attempt) -> None:
        considered.append(one.id)
        consider(self, one)

    monkeypatch.setattr(Admission, "consider", counted)
    scenario = Scenario(behind=[queued(6), queued(7)])
    pace_is_used_up(scenario)
    scenario.admit()
    assert considered == [5]


def test_a_job_alike_one_that_waits_waits_for_capacity_behind_one_that_does() -> None:
    whole_host = queued(6, Size(64, 100), kind=CloneKind.FULL)
    scenario = Scenario(behind=[whole_host, queued(7)], claims=[Claim(Key("vm", 90), "h1", Size(1, 0))])
    pace_is_used_up(scenario)
    outcomes = scenario.admit()
    assert outcomes.of(7) == outcomes.of(6) == (WAITS, "waiting for capacity: the hosts are full")
    assert "0.25 a second" in outcomes.of(5)[1]


def test_where_no_kind_is_asked_for_jobs_alike_wait_for_the_pace_until_a_boot_is_quicker() -> None:
    """A fork takes 1 s and waits 15 s for the pace, and 4 s more for each job before it. A boot takes 20 s."""
    policy = replace(EAGER, kind=CloneKind.AUTO, rates={CloneKind.INSTANT: 0.25})
    takes = {("slim", CloneKind.INSTANT): 1.0, ("slim", CloneKind.LINKED): 20.0}
    jobs = [queued(number) for number in (1, 2, 3)]
    changes = decided(READY, *jobs, hosts=[host()], policy=policy, paced={PARENT: NOW + 15}, seconds=takes)
    assert admitted(changes) == {3} and [one.kind for one in made(changes)] == [CloneKind.LINKED]
    assert set(notes(changes)) == {1, 2} and all("0.25 a second" in why for why in notes(changes).values())


def test_a_gang_without_room_leaves_to_others_what_it_would_have_taken() -> None:
    """It waits for memory that other processes have, and so it blocks no job behind."""
    need = template_claim(READY.size, host(), "slim").memory + 2 * claim_of(vm(V.PLANNED)).size.memory
    hosts = [bold(available=1000 + need - 1)]
    gang = queued(1, nodes=2)
    changes = decided(READY, gang, queued(2), hosts=hosts, claims=[claim_of(READY)])
    assert admitted(changes) == {2} and notes(changes)[1].endswith(TOO_LITTLE)


def test_why_jobs_wait_is_said_of_so_many_behind_the_one_that_blocks() -> None:
    """An array counts once among the reasons, and each of its jobs is passed over."""
    first, last = 2, 1 + PASSED_OVER
    jobs = [queued(1, Size(64, 100), kind=CloneKind.FULL), *(queued(number) for number in range(first, last + 2))]
    array: dict[int, dict[str, object]] = {number: {"array": "2"} for number in range(first, last)}
    full = Claim(Key("vm", 90), "h1", Size(1, 0))
    assert set(notes(decided(READY, *jobs, hosts=[host()], claims=[full], change=array))) == {1, first, last}


def test_jobs_are_considered_in_the_schedulers_order_and_not_in_that_of_their_attempts() -> None:
    ranks: dict[int, dict[str, object]] = {1: {"rank": 3}, 2: {"rank": 2}, 3: {"rank": 1}}
    some = [queued(number, Size(2, 100)) for number in (1, 2, 3)]
    assert admitted(decided(READY, *some, hosts=[host(cpus=4)], change=ranks)) == {2, 3}


@pytest.mark.parametrize("state_", [A.QUEUED, A.UNGATED, A.STRAY])
def test_a_job_that_cannot_be_served_is_revoked_wherever_it_waits(state_: AttemptState) -> None:
    scenario = Scenario(attempt={"state": state_})
    job_cannot_be_served(scenario)
    assert scenario.admit().of(5)[0] is Event.IMPOSSIBLE


def test_a_fault_in_considering_one_attempt_quarantines_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    consider = Admission.consider

    def faulty(self: Admission, one: Attempt) -> None:
        if one.id == 5:
            raise ZeroDivisionError
        consider(self, one)

    monkeypatch.setattr(Admission, "consider", faulty)
    outcomes = Scenario(behind=[NEXT]).admit()
    assert outcomes.of(5)[0] is Event.QUARANTINED and outcomes.of(6)[0] is Event.ADMITTED


# --- case 8: joined spares that are on offer --------------------------------------------------------


def spare_on_offer(offered: OfferState | None, since: float = NOW - 50, *behind: Attempt) -> Outcomes:
    scenario = Scenario(behind=list(behind))
    joined_spare_fits(scenario)
    if offered is not None:
        scenario.rows.append(offer(offered, id=8, since=since))
    return scenario.admit()


def test_an_offered_spare_is_withdrawn_from_other_jobs_before_it_is_given_to_one() -> None:
    outcomes = spare_on_offer(OfferState.OPEN)
    ((key, event, reason),) = [(c.row.key, c.event, text_of(c.reason)) for c in outcomes.changes]
    assert (key, event) == (Key("offer", 8), Event.WITHDRAWN) and "job 5" in reason
    assert outcomes.of(5) == (None, "") and outcomes.blockage is Blockage.NONE


@pytest.mark.parametrize("offered", [OfferState.OPEN, OfferState.CLOSING])
def test_a_spare_that_one_job_waits_for_is_given_to_no_other(offered: OfferState) -> None:
    outcomes = spare_on_offer(offered, NOW, queued(6))
    assert outcomes.of(5) == (None, "")
    assert outcomes.of(6) == (Event.ADMITTED, "instant on h1"), "it gets a new VM"


@pytest.mark.parametrize(
    ("offered", "since", "taken"),
    [
        (None, NOW, True),
        (OfferState.CLOSED, NOW, True),
        (OfferState.TAKEN, NOW, False),
        (OfferState.CLOSING, NOW - WITHDRAWAL - 0.1, False),
    ],
)
def test_a_spare_is_taken_at_once_unless_it_is_another_jobs_or_its_withdrawal_takes_long(
    offered: OfferState | None, since: float, taken: bool
) -> None:
    event, reason = spare_on_offer(offered, since).of(5)
    assert event is Event.ADMITTED and ("joined before" in reason) is taken


def test_a_job_waits_for_a_withdrawal_until_it_has_taken_too_long() -> None:
    assert spare_on_offer(OfferState.CLOSING, NOW - WITHDRAWAL).changes == []


# --- which jobs do not wait -------------------------------------------------------------------------


def test_a_job_that_is_not_shown_is_skipped() -> None:
    assert admitted(decided(READY, queued(1), queued(2), gone=[1], hosts=[host()])) == {2}


def test_a_new_job_with_the_id_of_one_that_is_not_over_yet_is_admitted() -> None:
    old = replace(queued(1), job=JobRef("2", 400))
    assert admitted(decided(READY, old, queued(2), gone=[1], hosts=[host()])) == {2}


def test_however_many_jobs_are_revoked_the_next_is_admitted_in_the_same_pass() -> None:
    refused = [queued(number) for number in range(1, 31)]
    problem: dict[int, dict[str, object]] = {one.id: {"problem": "what is this?"} for one in refused}
    assert admitted(decided(READY, *refused, queued(50), change=problem, hosts=[host()])) == {50}
    large = [queued(number, Size(999, 100)) for number in range(1, 31)]
    assert admitted(decided(READY, *large, queued(50), hosts=[host()])) == {50}


def test_a_job_that_fits_on_no_host_in_sight_waits_for_hosts_out_of_reach_and_blocks_no_other() -> None:
    changes = decided(READY, queued(1, Size(99, 100)), queued(2), hosts=[host()], known=["h1", "h2", "h3"])
    (why,) = notes(changes).values()
    assert why.startswith("a VM of 99 CPUs, 100 MiB fits on no host;") and why.endswith("; out of reach now: h2, h3")
    assert admitted(changes) == {2}


@pytest.mark.parametrize("lacks", ["the ability", "an image that forks"])
def test_a_job_that_fits_only_on_a_host_that_cannot_make_its_clones_waits_and_blocks_no_other(lacks: str) -> None:
    """A regression: such a job waited for capacity, and all behind it did."""
    small, large = host("h1", cpus=4), host("h2", can="plug_cpus plug_memory" if lacks != "the ability" else None)
    if lacks == "the ability":
        large = replace(large, abilities=frozenset({"linked", "full"}))
    jobs = [queued(1, Size(8, 100)), queued(2), queued(3, Size(8, 100), kind=CloneKind.LINKED)]
    changes = decided(READY, *jobs, hosts=[small, large])
    why = "a VM of 8 CPUs, 100 MiB fits on no host; the largest that fits is 4 CPUs"
    assert admitted(changes) == {2, 3}
    assert notes(changes)[1].startswith(why) and notes(changes)[1].endswith("; unable to make instant clones: h2")
    able = replace(large, abilities=small.abilities, images=small.images)
    assert "template" in notes(decided(READY, *jobs, hosts=[small, able]))[1]
    fits = decided(READY, queued(1, Size(8, 100)), hosts=[small, large], policy=replace(EAGER, kind=CloneKind.AUTO))
    assert [(one.host, one.kind) for one in made(fits)] == [("h2", CloneKind.LINKED)]


def test_a_job_too_large_for_every_host_is_revoked_though_one_cannot_make_its_clones() -> None:
    unable = replace(host("h2"), abilities=frozenset({"linked"}))
    (change,) = decided(queued(1, Size(99, 100)), hosts=[host(), unable])
    assert change.event is Event.IMPOSSIBLE and "unable" not in text_of(change.reason)


def test_the_hosts_that_cannot_make_each_kind_of_clone_are_named() -> None:
    """On the second host the job fits without a template beside it, and the host boots no clones."""
    small = host("h1", cpus=4, memory=1024)
    large = replace(host("h2", memory=8192, can="fork"), abilities=frozenset({"instant"}))
    neither = replace(host("h3", memory=1024), abilities=frozenset({"full"}))
    policy = replace(EAGER, kind=CloneKind.AUTO)
    noted = notes(decided(queued(1, Size(1, 5000)), hosts=[small, large, neither], policy=policy))
    assert noted[1].endswith("; unable to make instant clones: h3; unable to make linked clones: h2, h3")


def test_a_job_that_is_too_large_for_the_hosts_that_boot_is_forked() -> None:
    """A regression: it was to boot on a host that is too small, and all behind it waited for capacity."""
    small = replace(host("h1", cpus=4), abilities=frozenset({"linked"}))
    large = replace(host("h2"), abilities=frozenset({"instant"}))
    policy = replace(EAGER, kind=CloneKind.AUTO)
    changes = decided(queued(1, Size(8, 100)), queued(2), hosts=[small, large], policy=policy)
    assert [row.host for _, row in templates(changes)] == ["h2"] and admitted(changes) == {2}


@pytest.mark.parametrize("kind", [CloneKind.INSTANT, CloneKind.FULL, CloneKind.AUTO])
def test_a_job_whose_clones_no_host_makes_waits_for_that_and_blocks_no_other(kind: CloneKind) -> None:
    """Nobody says "too large" while it is not known which host may come to make them."""
    able = replace(host(), abilities=frozenset({"linked"}))
    unable = replace(host(), abilities=frozenset())
    jobs = [queued(1, kind=kind), queued(2, kind=CloneKind.LINKED)]
    changes = decided(READY, *jobs, hosts=[unable if kind is CloneKind.AUTO else able])
    assert "no host can make" in notes(changes)[1]
    assert admitted(changes) == (set() if kind is CloneKind.AUTO else {2})


def test_the_reason_says_that_no_host_is_in_sight() -> None:
    assert notes(decided(queued(1), known=["h2"])) == {1: "no host is in sight; out of reach now: h2"}


def test_a_back_off_that_ends_now_is_over() -> None:
    assert admitted(decided(READY, replace(queued(1), not_before=NOW), hosts=[host()])) == {1}
    assert admitted(decided(READY, replace(queued(1), not_before=NOW + 0.1), hosts=[host()])) == set()


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_the_reason_names_what_did_not_fit_and_the_largest_that_does(nodes: int) -> None:
    stiff = host(cpus=4, memory=4096, can="fork")
    (refused,) = [c for c in decided(queued(1, Size(9, 100), nodes=nodes), hosts=[stiff]) if c.event == "impossible"]
    many, what = ("a VM", "fits on no host") if nodes == 1 else (f"{nodes} VMs", "do not fit on all hosts together")
    fit = "4 CPUs, 1804 MiB, 65536 MiB disk"
    assert text_of(refused.reason) == f"{many} of 9 CPUs, 100 MiB {what}; the largest that fits is {fit} per node"


def test_the_reason_names_the_host_with_the_most_memory_and_then_the_most_cpus() -> None:
    small, roomy, many = host("h1", cpus=16, memory=4096), host("h2", cpus=2), host("h3", cpus=4)
    for hosts in ((small, roomy, many), (many, roomy, small)):
        (refused,) = [c for c in decided(queued(1, Size(99, 100)), hosts=hosts) if c.event is Event.IMPOSSIBLE]
        fit = largest_on(many, "slim", EAGER)
        assert f"; the largest that fits is {fit} per node" in text_of(refused.reason)
        assert fit.cpus == 4 and fit.memory > 4096


def test_the_largest_that_fits_depends_on_whether_the_vm_boots() -> None:
    """Beside a booted VM there is only a template of the base size."""
    rigid = host(memory=4096, can="fork")
    for kind in (CloneKind.FULL, CloneKind.INSTANT):
        (refused,) = [c for c in decided(queued(1, Size(1, 9000), kind=kind), hosts=[rigid])
                      if c.event is Event.IMPOSSIBLE]  # fmt: skip
        fit = largest_on(rigid, "slim", EAGER, kind)
        assert f"the largest that fits is {fit} per node" in text_of(refused.reason)
    assert largest_on(rigid, "slim", EAGER, CloneKind.LINKED).memory > largest_on(rigid, "slim", EAGER).memory


def test_all_hosts_without_the_image_are_named() -> None:
    hosts = [replace(host("h1", memory=1024), images={"mine": IMAGES["slim"]}), host("h2"), host("h3")]
    noted = notes(decided(queued(1, Size(1, 3000), image="mine"), hosts=hosts))
    assert noted[1].endswith("; without image mine: h2, h3")


# --- which jobs wait --------------------------------------------------------------------------------


def test_all_jobs_behind_one_that_waits_for_room_get_its_reason() -> None:
    busy = Claim(Key("vm", 90), "h1", Size(4, 0))
    waiting = [queued(number) for number in range(1, 5)]
    noted = notes(decided(READY, *waiting, hosts=[host(cpus=4)], claims=[claim_of(READY), busy]))
    assert noted == dict.fromkeys(range(1, 5), "waiting for capacity: the hosts are full")


def test_all_jobs_behind_one_that_waits_for_a_turn_get_its_reason() -> None:
    making = vm(V.PLANNED, id=9, attempt=9, since=NOW)
    waiting = [queued(number) for number in range(1, 5)]
    noted = notes(
        decided(
            READY,
            attempt(A.CLAIMED, id=9, job="9"),
            making,
            *waiting,
            hosts=[host()],
            policy=replace(EAGER, provisioning=1),
            began=NOW - 1,
        )
    )
    assert set(noted) == {1, 2, 3, 4} and {text.split(":")[0] for text in noted.values()} == {"waiting for a turn"}


def test_serving_vms_and_parked_spares_do_not_count_as_being_made() -> None:
    runs = [attempt(A.ALLOCATED, id=n, job=str(n)) for n in range(11, 15)]
    serving = [vm(V.SERVING, id=a.id, attempt=a.id) for a in runs]
    parked = [vm(V.PARKED, id=n, pool=Depth.PARKED) for n in range(21, 25)]
    policy = replace(EAGER, pools=(replace(PARKED, least=4),), provisioning=2)
    changes = decided(READY, *runs, *serving, *parked, queued(1, kind=CloneKind.FULL), hosts=[host()], policy=policy)
    assert admitted(changes) == {1}


@pytest.mark.parametrize("state", [V.PLANNED, V.PARKED, V.STARTING])
def test_new_spares_and_the_parked_vms_of_a_job_count_as_being_made(state: V) -> None:
    gang = attempt(A.CLAIMED, id=9, job="9", request=Request(3, SMALL))
    some = [vm(state if n == 1 else V.PLANNED, id=n, attempt=9, since=NOW - 5) for n in (1, 2, 3)]
    policy = replace(EAGER, provisioning=3, pools=(replace(PARKED, least=3),))
    assert admitted(decided(READY, gang, *some, queued(1), hosts=[host()], policy=policy)) == set()
    spares = [vm(V.PLANNED, id=n, pool=Depth.PARKED, since=NOW) for n in (1, 2, 3)]
    assert admitted(decided(READY, *spares, queued(1), hosts=[host()], policy=policy)) == set()


def test_a_job_that_takes_a_joined_spare_counts_for_a_limit() -> None:
    joined = [vm(V.JOINED, id=n, pool=Depth.JOINED) for n in (1, 2)]
    uses: dict[int, dict[str, object]] = {n: {"uses": (("two jobs", 1),)} for n in (1, 2)}
    policy = replace(EAGER, pools=(replace(PARKED, depth=Depth.JOINED, least=2),))
    changes = decided(
        READY, *joined, queued(1), queued(2), change=uses, limits={"two jobs": 1}, policy=policy, hosts=[host()]
    )
    assert admitted(changes) == {1}


def test_any_number_of_joined_spares_is_taken_in_one_pass() -> None:
    joined = [vm(V.JOINED, id=n, pool=Depth.JOINED) for n in range(1, 31)]
    policy = replace(EAGER, pools=(replace(PARKED, depth=Depth.JOINED, least=30, most=30),))
    jobs = [queued(n) for n in range(1, 31)]
    assert admitted(decided(READY, *joined, *jobs, policy=policy, hosts=[host()])) == set(range(1, 31))


# --- what an admission says -------------------------------------------------------------------------


def test_the_admission_says_where_the_vms_are_and_why() -> None:
    both = [READY, template(T.READY, id=2, host="h2")]
    hosts = [host("h1", cpus=8), host("h2", cpus=8)]
    parked = [vm(V.PARKED, id=n, host=f"h{n}", pool=Depth.PARKED) for n in (1, 2)]
    policy = replace(EAGER, pools=(PARKED,), kind=CloneKind.AUTO)
    (change,) = [
        c for c in decided(*both, *parked, queued(1, nodes=2), hosts=hosts, policy=policy) if c.event == "admitted"
    ]
    assert text_of(change.reason) == "instant on h1, h2, parked before, one is parked"


def test_the_admission_names_a_host_of_several_vms_once() -> None:
    changes = decided(READY, queued(1, nodes=2), hosts=[host(cpus=8)])
    assert [text_of(c.reason) for c in changes if c.event == "admitted"] == ["instant on h1"]


def test_the_admission_to_a_joined_spare_says_so() -> None:
    policy = replace(EAGER, pools=(replace(PARKED, depth=Depth.JOINED),))
    changes = decided(READY, vm(V.JOINED, pool=Depth.JOINED), queued(1), hosts=[host()], policy=policy)
    reasons = {c.event: text_of(c.reason) for c in changes}
    assert reasons[Event.ADMITTED] == "instant on h1, joined before" and reasons[Event.TAKEN] == "by job 1"


# --- spares and templates ---------------------------------------------------------------------------


def test_a_parked_spare_is_taken_whatever_the_pace() -> None:
    policy = replace(EAGER, pools=(PARKED,), rates={CloneKind.INSTANT: 0.25})
    paid = {("h1", "slim", CloneKind.INSTANT): NOW + 60}
    parked = vm(V.PARKED, pool=Depth.PARKED)
    assert admitted(decided(READY, parked, queued(1), hosts=[host()], policy=policy, paced=paid)) == {1}
    gang = decided(READY, parked, queued(1, nodes=2), queued(2), hosts=[host(cpus=2)], policy=policy, paced=paid)
    assert admitted(gang) == {2}, "one that waits for the pace leaves to others what is parked, and its room"


def test_spares_are_released_for_a_template_that_a_job_needs() -> None:
    spare = replace(vm(V.JOINED, pool=Depth.JOINED), size=Size(1, 512))
    held = [claim_of(READY), claim_of(spare)]
    policy = replace(EAGER, pools=(replace(PARKED, depth=Depth.JOINED),))
    small = host(memory=256 + 544)
    changes = decided(READY, spare, queued(1, image="other"), hosts=[small], claims=held, policy=policy)
    assert [(c.row.key, text_of(c.reason)) for c in changes if c.event is Event.RELEASED] == [
        (spare.key, "its memory is needed")
    ]
    # Room for one such template, not for two, nor for one that is kept twice.
    tight = replace(small, capacity=Size(64, 256 + 300, 65536))
    lean = replace(spare, size=Size(1, 256))
    held = [claim_of(READY), claim_of(lean)]
    changes = decided(READY, lean, queued(1, Size(1, 50), image="other"), hosts=[tight], claims=held, policy=policy)
    assert [(c.row.key, text_of(c.reason)) for c in changes if c.event is Event.RELEASED] == [
        (lean.key, "its memory is needed")
    ]


def test_parked_spares_of_the_jobs_own_image_are_released_last() -> None:
    ready = [READY, template(T.READY, id=2, image="other")]
    parked = [vm(V.PARKED, id=n, pool=Depth.PARKED, image="slim" if n == 1 else "other") for n in (1, 2, 3)]
    claims = [*map(claim_of, ready), *(Claim(one.key, "h1", Size(0, 32)) for one in parked)]
    pools = (replace(PARKED, most=1), replace(PARKED, image="other", least=2))
    room = sum(claim.size.memory for claim in claims) + 288 - 2 * 32  # for one VM, once two spares have gone
    policy = replace(EAGER, pools=pools)
    changes = decided(*ready, *parked, queued(1), hosts=[host(memory=room)], claims=claims, policy=policy)
    assert [c.row.id for c in changes if c.event is Event.RELEASED] == [2, 3]


def test_of_two_templates_only_one_is_built_where_there_is_room_for_one() -> None:
    other = Claim(Key("vm", 90), "h1", Size(0, 100))
    changes = decided(queued(1, image="one"), queued(2, image="two"), hosts=[host(memory=600)], claims=[other])
    assert [row.image for _, row in templates(changes)] == ["one"]
    assert notes(changes)[2] == "waiting for capacity: no host has room for the template of image two"


def test_a_template_that_broke_on_another_host_is_tried_again_when_the_first_is_full() -> None:
    full = Claim(Key("vm", 90), "h1", Size(64, 0))
    broken = template(T.BROKEN, id=2, host="h2", tries=1, since=NOW - POLICY.backoff(1))
    (change,) = [
        c
        for c in decided(READY, broken, queued(1), hosts=[host("h1"), host("h2")], claims=[claim_of(READY), full])
        if isinstance(c.row, Template)
    ]
    assert (change.row.id, change.event, text_of(change.reason)) == (2, Event.NEEDED, "job 1 needs it")


def test_of_templates_of_the_same_age_the_one_with_the_lower_id_is_retired() -> None:
    idle = [template(T.READY, id=n, image=f"idle{n}", since=5.0) for n in (3, 2)]
    full = Claim(Key("vm", 90), "h1", Size(64, 0))
    changes = decided(READY, *idle, queued(1), hosts=[host()], claims=[full])
    assert [(event, row.id) for event, row in templates(changes)] == [(Event.DROPPED, 2)]
    assert [text_of(c.reason) for c in changes if c.event is Event.DROPPED] == ["its memory is needed"]


@pytest.mark.parametrize(
    ("can", "ready"), [("fork plug_cpus", Size(1, 512)), ("fork plug_memory", Size(2, 256)), ("fork", Size(2, 512))]
)
def test_a_larger_template_serves_where_the_image_cannot_plug_what_it_has_more_of(can: str, ready: Size) -> None:
    """On the first host the image can plug all, and there is no room."""
    here = template(T.READY, host="h2", size=ready)
    hosts = [host("h1", cpus=1), replace(host("h2"), images={"slim": frozenset(can.split())})]
    full = Claim(Key("vm", 90), "h1", Size(1, 0))
    (one,) = made(decided(here, queued(1), hosts=hosts, claims=[full]))
    assert one.place.template and (one.host, one.place.template.size) == ("h2", ready)


def test_of_larger_templates_the_one_with_the_least_memory_serves() -> None:
    lean, fat = template(T.READY, id=1, size=Size(2, 512)), template(T.READY, id=2, size=Size(1, 1024))
    stiff = host(can="fork")
    (one,) = made(decided(fat, lean, queued(1, Size(1, 400)), hosts=[stiff]))
    assert one.place.template and one.place.template.size == Size(2, 512)


def test_a_template_for_later_jobs_is_as_large_as_what_cannot_be_plugged() -> None:
    often = {"slim": 1.0}
    policy = replace(EAGER, kind=CloneKind.AUTO)
    changes = decided(queued(1, Size(1, 400)), hosts=[host(can="fork")], policy=policy, arrivals=often)
    assert [row.size for _, row in templates(changes)] == [Size(1, 512)]
    assert [one.kind for one in made(changes)] == [CloneKind.LINKED]


# --- addresses --------------------------------------------------------------------------------------


def test_the_vms_of_a_gang_get_different_addresses() -> None:
    other = replace(vm(V.SERVING, id=9, attempt=9), address="10.9.1.100/16")
    runs = attempt(A.ALLOCATED, id=9, job="9")
    gang = made(decided(READY, runs, other, queued(1, nodes=2), hosts=[host()]))
    assert [one.address for one in gang] == ["10.9.1.101/16", "10.9.1.102/16"]


# --- more claimed than declared ---------------------------------------------------------------------

OVERCOMMITTED = Overcommitment(memory=1.5, floor=1000)
bold = partial(host, overcommit=OVERCOMMITTED)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
@pytest.mark.parametrize("state", [V.PLANNED, V.SERVING])
def test_an_unobserved_vm_counts_as_all_that_it_claims(state: V, spare: int, fits: bool) -> None:
    runs = attempt(A.ALLOCATED if state is V.SERVING else A.CLAIMED, id=9, job="9")
    other = replace(vm(state, id=9, attempt=9, since=NOW - 40), size=Size(1, 1000))
    mine = vm_claim(vm_size(SMALL, POLICY.base, host(), POLICY), host(), "slim", CloneKind.INSTANT).memory
    claims = [claim_of(READY), claim_of(other)]
    coming = 256 + (
        1 if state is V.SERVING else 1032
    )  # a VM that serves has settled at the MiB that it was seen to have
    h1 = bold(memory=sum(claim.size.memory for claim in claims), available=1000 + mine + coming + spare)
    changes = decided(READY, runs, other, queued(1), hosts=[h1], claims=claims, began=NOW - 1)
    assert (admitted(changes) == {1}) is fits


def test_hosts_that_lack_memory_are_named() -> None:
    both = [READY, template(T.READY, id=2, host="h2")]
    hosts = [bold(name, available=1100) for name in ("h1", "h2")]
    noted = notes(decided(*both, queued(1), hosts=hosts, claims=[claim_of(one) for one in both]))
    why = "waiting for memory: h1, h2 must keep 1000 MiB available, and others there leave too little of it"
    assert noted == {1: why}


def test_a_job_without_a_template_waits_for_memory_of_other_processes_and_blocks_no_other() -> None:
    """Neither the template nor its VM would fit if nothing of ours were on the host."""
    full = Claim(Key("vm", 90), "h1", Size(0, 200))
    hosts = [bold("h1", memory=1024, available=1100), host("h2", memory=1024, can="fork")]
    hosts[1] = replace(hosts[1], images={"next": frozenset({"fork", "plug_cpus", "plug_memory"})})
    behind = queued(2, image="next", kind=CloneKind.FULL)
    changes = decided(queued(1), behind, hosts=hosts, claims=[full])
    assert admitted(changes) == {2} and not templates(changes)
    (note,) = notes(changes).values()
    assert "h1 must keep 1000 MiB available" in note and note.endswith(TOO_LITTLE)


def test_memory_of_a_host_that_cannot_make_a_jobs_clones_does_not_count() -> None:
    """A regression: a job without memory on the host that forks blocked the queue for that of the other host."""
    forks, boots = (
        bold("h1", available=1100),
        replace(bold("h2", available=60000), abilities=frozenset({"full"})),
    )
    changes = decided(READY, queued(1), replace(NEXT, id=2, job=JobRef("2", 500)), hosts=[forks, boots],
                      claims=[claim_of(READY)])  # fmt: skip
    assert notes(changes)[1] == f"waiting for memory: h1 must keep 1000 MiB available, {TOO_LITTLE}"
    assert admitted(changes) == {2}


def test_a_job_that_lacked_memory_is_told_so_until_there_is_an_eighth_of_the_floor_more_than_it_needs() -> None:
    """Its host has no free CPU, so that it waits whatever the memory."""
    overcommit = replace(OVERCOMMITTED, floor=1001)
    need = (
        template_claim(READY.size, host(), "slim").memory
        + vm_claim(vm_size(SMALL, READY.size, host(), EAGER), host(), "slim", CloneKind.INSTANT).memory
    )
    asks, full = queued(1), Claim(Key("vm", 90), "h1", Size(64, 0))
    here = state(asks, READY, claims=[claim_of(READY), full], now=NOW)

    def lacks(more: int) -> bool:
        """Whether it is told so when its host's machine has so much more than is needed."""
        job = Job(asks.job, "hello", 1000, JobState.PENDING, asks.request)
        view = HypervisorView(
            {"h1": host(available=overcommit.floor + need + more, overcommit=overcommit)}, {}, as_ready([READY])
        )
        world = world_of(SchedulerView({"1": job}), view, NOW)
        here.begin(NOW, {}, "test")
        mark_changes(here, world, EAGER)
        admit(Context(here, world, EAGER))
        return str(here.reasons[1]).endswith(TOO_LITTLE)

    assert [lacks(more) for more in (0, -1, 0, 124, 125, 124, 0, -1)] == [
        False,
        True,
        True,
        True,
        False,
        False,
        False,
        True,
    ]


def test_each_request_has_its_own_reason_for_waiting_for_memory() -> None:
    """The first job would not fit on the empty host, and the second one would: the third one waits behind it."""
    held = Claim(Key("vm", 90), "h1", Size(0, 1500))
    large, small, third = queued(1, Size(1, 3000)), queued(2, Size(1, 1000)), queued(3, Size(1, 100))
    other = replace(vm(V.SERVING, id=90, attempt=9, since=NOW), size=Size(1, 1468))
    runs = attempt(A.ALLOCATED, id=9, job="9")
    h1 = bold(memory=8192, available=3000)
    changes = decided(READY, runs, other, large, small, third, hosts=[h1], claims=[held, claim_of(READY)],
                      began=NOW - 1)  # fmt: skip
    noted = notes(changes)
    assert noted[1].endswith(TOO_LITTLE)
    assert noted[2] == noted[3] == "waiting for memory: h1 must keep 1000 MiB available"


def test_all_hosts_that_lack_memory_for_now_are_named() -> None:
    others = [vm(V.PLANNED, id=n, attempt=9, host=f"h{n}", since=NOW) for n in (1, 2)]
    both = [READY, template(T.READY, id=2, host="h2")]
    hosts = [bold(name, available=1000 + 600) for name in ("h1", "h2")]
    gang = attempt(A.CLAIMED, id=9, job="9", request=Request(2, SMALL))
    changes = decided(*both, gang, *others, queued(1), hosts=hosts, claims=map(claim_of, [*both, *others]),
                      policy=replace(EAGER, provisioning=9))  # fmt: skip
    assert notes(changes)[1] == "waiting for memory: h1, h2 must keep 1000 MiB available"


def test_only_hosts_that_lack_memory_are_named() -> None:
    """The second host declares too little for the job, and its machine has enough."""
    both = [READY, template(T.READY, id=2, host="h2")]
    hosts = [
        bold("h1", available=1100),
        bold("h2", memory=400, available=60000),
    ]
    changes = decided(*both, queued(1, Size(1, 2000)), hosts=hosts, claims=map(claim_of, both))
    assert "waiting for memory: h1 must keep" in notes(changes)[1]


def test_a_job_for_all_cpus_and_the_whole_disk_would_fit_on_the_empty_host() -> None:
    """It waits for the CPU that a VM has, and not for memory."""
    held = Claim(Key("vm", 90), "h1", Size(1, 0))
    whole = queued(1, Size(64, 100, 65536))
    changes = decided(READY, whole, hosts=[bold(available=60000)], claims=[held])
    assert notes(changes) == {1: "waiting for capacity: the hosts are full"}


def test_a_template_beside_which_its_own_job_has_no_room_is_retired() -> None:
    """A regression: the template was kept for the very job that had no room beside it."""
    large, gang = template(T.READY, size=Size(1, 896)), queued(1, Size(1, 500), nodes=2, kind=CloneKind.AUTO)
    small = host(memory=2048, can="fork", template_copies=1)
    held = [Claim(large.key, "h1", template_claim(large.size, small, "slim"))]
    assert (Event.DROPPED, large.id) in [
        (event, row.id) for event, row in templates(decided(large, gang, hosts=[small], claims=held))
    ]
    (alone, _) = made(decided(gang, hosts=[small]))
    assert alone.kind is CloneKind.LINKED
