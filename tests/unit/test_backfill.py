"""Which jobs start ahead of the first one that waits for room, and which do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import pytest

from multiverse.core.capacity.usable_hosts import OVERDUE, STARTING, ends_by, frees_by
from multiverse.core.context import Context
from multiverse.core.machines.tables import TABLES
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import Claim, Host, HypervisorView, Overcommitment
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
from multiverse.core.model.reason import said, text_of
from multiverse.core.model.vm import Template, TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Forecast, Row
from multiverse.core.planner import plan
from multiverse.core.policy import Backfill, Policy, Pool
from multiverse.core.state import State
from multiverse.core.transition import Change, Event
from tests.unit.planner_harness import POLICY
from tests.unit.rows import as_ready, attempt, changes_of, rows, template, vm, world_of
from tests.unit.test_admission_cases import claim_of, host

A, V, T = AttemptState, VmState, TemplateState
NOW, EPOCH = 1000.0, 1_700_000_000.0
UNIX = NOW + EPOCH
RECLAIM, MAKING = 10.0, 1.5
LEAD = MAKING + STARTING + RECLAIM
"""From now until a job without any length that is admitted now has left nothing."""

FILLING = replace(POLICY, patience=0.0, provisioning=99, backfill=Backfill(depth=10, overtakes=2), reclaim=RECLAIM)


@dataclass
class Cluster:
    """Hosts with 4 CPUs each and a ready template, what runs there, and a queue of jobs by their numbers."""

    hosts: int = 1
    policy: Policy = FILLING
    cpus: int = 4
    rows: list[Row] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    users: dict[int, UserSeen] | None = None
    forecast: Forecast = Forecast()
    others: dict[str, Host] = field(default_factory=dict)  # hosts that are not as the rest, by name
    state: State | None = None

    def __post_init__(self) -> None:
        ready = [template(T.READY, id=n, host=f"h{n}") for n in range(1, self.hosts + 1)]
        self.rows += ready
        self.claims += [claim_of(one) for one in ready]

    def runs(self, number: int, cpus: int, ends: float | None, on: str = "h1", **job: Any) -> None:
        """A job runs on a host, and ends so many seconds from now at the latest (None: nobody knows)."""
        size = Size(cpus, 100)
        one = attempt(A.ALLOCATED, id=number, job=str(number), request=Request(1, size), since=NOW - 50)
        more = {"attempt": number, "host": on, "node_size": size, "since": NOW - 50, "template_id": int(on[1:])}
        its = replace(vm(V.SERVING, id=number, **more), size=Size(cpus, 256))
        self.rows += [one, its]
        self.claims.append(claim_of(its))
        self.jobs[str(number)] = Job(
            one.job, "hello", 1000, JobState.RUNNING, one.request, nodes=(its.name,), gated=False,
            ends=None if ends is None else UNIX + ends, **job,
        )  # fmt: skip

    def waits(self, number: int, cpus: int, limit: float | None = 3600.0, nodes: int = 1, **more: Any) -> None:
        """A job waits for so many nodes, and would run for `limit` seconds at most."""
        job = {name: more.pop(name) for name in ("uses", "array", "rank") if name in more}
        uid = more.pop("uid", 1000)
        request = Request(nodes, Size(cpus, 100), **{k: more.pop(k) for k in ("image", "kind") if k in more})
        one = attempt(A.QUEUED, id=number, job=str(number), request=request, **more)
        one = replace(one, uid=uid, job=JobRef(str(number), int(EPOCH)))
        self.rows.append(one)
        self.jobs[str(number)] = Job(
            one.job, "hello", uid, JobState.PENDING, request, limit=limit, **{"rank": number, **job}
        )

    def run(self) -> list[Change]:
        """The changes of one pass."""
        here = rows(*self.rows, claims=self.claims, known=[f"h{n}" for n in range(1, self.hosts + 1)])
        vms = {
            one.name: VmSeen(one.name, one.host, VmCondition.PARKED if one.state is V.PARKED else VmCondition.RUNNING)
            for one in here.vms.values()
        }
        nodes = {one.name: Node(one.name, NodeState.IDLE) for one in here.vms.values() if one.state is V.JOINED}
        hosts = {f"h{n}": host(f"h{n}", cpus=self.cpus) for n in range(1, self.hosts + 1)}
        hosts |= self.others
        world = world_of(
            SchedulerView(self.jobs, nodes, self.limits),
            HypervisorView(hosts, vms, as_ready(self.rows)),
            NOW,
            epoch=EPOCH,
            users=self.users,
            forecast=self.forecast,
        )
        self.state = State(here, TABLES, NOW)
        changes = changes_of(plan(self.state, world, [], NOW, self.policy))
        assert not [c for c in changes if c.event is Event.QUARANTINED]
        self.world = world
        return changes

    def reason(self, number: int) -> str:
        assert self.state is not None
        return str(self.state.reasons[number])

    def context(self) -> Context:
        assert self.state is not None
        return Context(self.state, self.world, self.policy)


def admitted(changes: Iterable[Change]) -> dict[int, str]:
    """The attempts that were admitted, and what is said of their VMs."""
    return {c.row.id: text_of(c.reason) for c in changes if c.event is Event.ADMITTED}


def made_on(changes: Iterable[Change]) -> dict[int | None, str]:
    return {c.row.attempt: c.row.host for c in changes if isinstance(c.row, Vm) and c.event is Event.PLANNED}


def test_a_job_that_ends_before_the_first_one_can_start_goes_ahead_of_it() -> None:
    cluster = Cluster()
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    cluster.waits(3, 1, limit=500.0 - LEAD + RECLAIM)
    found = admitted(cluster.run())
    assert set(found) == {3} and "ahead of job 2" in found[3] and "ended by its time limit" in found[3]


def test_a_job_that_may_end_a_moment_later_waits_and_is_told_why() -> None:
    cluster = Cluster()
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    cluster.waits(3, 1, limit=500.0 - LEAD + RECLAIM + 0.5)
    assert not admitted(cluster.run())
    assert cluster.reason(3) == "by its time limit it may delay job 2, which is earlier and waits for room"


def test_no_room_is_reserved_for_a_vm_where_more_cpus_are_free_than_it_may_have_there() -> None:
    bold = replace(host("h1", cpus=4), overcommit=Overcommitment(cpus=2.0))
    cluster = Cluster(hosts=2, others={"h1": bold, "h2": host("h2", cpus=8)})
    cluster.runs(1, 8, ends=500.0, on="h2")
    cluster.waits(2, 6)
    cluster.waits(3, 4)
    changes = cluster.run()
    assert cluster.state is not None and cluster.state.promised == {2: UNIX + 500.0 + RECLAIM}
    assert made_on(changes) == {3: "h1"}, "which the first job leaves free: no VM has more than 4 CPUs there"


def test_a_job_that_waits_for_its_pace_has_no_template_built_where_the_first_one_is_to_start() -> None:
    paced = replace(FILLING, rates={CloneKind.INSTANT: 0.01}, template_seconds=1.0)
    cluster = Cluster(hosts=2, policy=paced, forecast=Forecast(paced={("h1", "slim", CloneKind.INSTANT): NOW + 200}))
    cluster.rows, cluster.claims = cluster.rows[:1], cluster.claims[:1]  # h2 has no template yet
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4, nodes=2, kind=CloneKind.LINKED)
    cluster.waits(3, 1)
    changes = cluster.run()
    assert "waiting for a turn" in cluster.reason(3) and not admitted(changes)
    assert not [c for c in changes if isinstance(c.row, Template) and c.event is Event.NEEDED]
    del cluster.jobs["2"], cluster.rows[-2]
    needed = [c.row for c in cluster.run() if isinstance(c.row, Template) and c.event is Event.NEEDED]
    assert [one.host for one in needed] == ["h2"], "which is built there when no other job is to start there"


def test_the_first_job_is_told_when_it_is_expected_to_start() -> None:
    cluster = Cluster()
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    cluster.run()
    assert cluster.reason(2) == "waiting for capacity: the hosts are full; expected to start by 2023-11-14 22:39 UTC"
    assert cluster.state is not None and cluster.state.promised == {2: UNIX + 500.0 + RECLAIM}


def test_a_job_that_fits_beside_the_first_one_goes_ahead_of_it_however_long_it_is() -> None:
    cluster = Cluster()
    cluster.runs(1, 2, ends=500.0)
    cluster.waits(2, 3)
    cluster.waits(3, 1, limit=1e6)
    cluster.waits(4, 1, limit=1e6)
    found = admitted(cluster.run())
    assert set(found) == {3} and "other room is kept" in found[3]


def test_other_hosts_are_free_for_later_jobs() -> None:
    cluster = Cluster(hosts=2)
    cluster.runs(1, 3, ends=500.0)
    cluster.runs(2, 2, ends=900.0, on="h2")
    cluster.waits(3, 4)
    cluster.waits(4, 1, limit=1e6)
    changes = cluster.run()
    assert set(admitted(changes)) == {4} and made_on(changes) == {4: "h2"}


@pytest.mark.parametrize("resource", ["memory", "disk"])
def test_all_resources_are_kept_for_the_first_job(resource: str) -> None:
    """Beside it there is a CPU left, but not the memory or the disk for the last job."""
    cluster = Cluster()
    cluster.runs(1, 1, ends=500.0)
    cluster.waits(2, 2)
    cluster.waits(3, 1, limit=1e6)
    sizes = {"memory": (Size(2, 60000), Size(1, 20000)), "disk": (Size(2, 100, 60000), Size(1, 100, 20000))}
    for number, size in zip((2, 3), sizes[resource], strict=True):
        cluster.jobs[str(number)] = cluster.jobs[str(number)]._replace(request=Request(1, size))
        cluster.rows = [replace(row, request=Request(1, size)) if isinstance(row, Attempt) and row.id == number else row
                        for row in cluster.rows]  # fmt: skip
    taken = Size(1, 256, 40000) if resource == "disk" else Size(1, 40000, 0)
    cluster.claims[-1] = replace(cluster.claims[-1], size=taken)
    assert not admitted(cluster.run())
    cluster.jobs["3"] = cluster.jobs["3"]._replace(limit=60.0)
    assert set(admitted(cluster.run())) == {3}


def test_the_vms_of_a_gang_are_reserved_on_each_of_their_hosts() -> None:
    cluster = Cluster(hosts=3)
    for number, ends in ((1, 300.0), (2, 600.0), (3, 900.0)):
        cluster.runs(number, 2, ends=ends, on=f"h{number}")
    cluster.waits(4, 4, nodes=2)
    cluster.waits(5, 2, limit=1e6, nodes=2)
    cluster.waits(6, 2, limit=1e6)
    cluster.waits(7, 2, limit=500.0, nodes=2)
    changes = cluster.run()
    assert set(admitted(changes)) == {6, 7} and cluster.state is not None
    assert cluster.state.promised == {4: UNIX + 600.0 + RECLAIM}
    assert {one.host for one in cluster.state.vms.values() if one.attempt == 6} == {"h3"}


def test_jobs_that_were_let_ahead_in_one_pass_leave_the_first_one_its_room() -> None:
    cluster = Cluster(cpus=8)
    cluster.runs(1, 4, ends=500.0)
    cluster.waits(2, 6)
    for number in (3, 4, 5):
        cluster.waits(number, 1, limit=1e6)
    assert set(admitted(cluster.run())) == {3, 4}


@pytest.mark.parametrize("why", ["suspended", "no limit is known"])
def test_where_nobody_knows_when_the_first_job_starts_it_is_overtaken_so_often(why: str) -> None:
    cluster = Cluster(cpus=8)
    cluster.runs(1, 3, ends=None)
    if why == "suspended":
        cluster.jobs["1"] = cluster.jobs["1"]._replace(state=JobState.SUSPENDED, ends=UNIX + 10)
    cluster.waits(2, 8)
    for number in (3, 4, 5):
        cluster.waits(number, 1, limit=60.0)
    changes = cluster.run()
    found = admitted(changes)
    assert set(found) == {3, 4} and "whose start nobody can tell" in found[3]
    told = [text_of(c.reason) for c in changes if c.event is Event.OVERTAKEN]
    assert told == ["by job 3, 1 of 2 times", "by job 4, 2 of 2 times"]
    assert cluster.state is not None and cluster.state.attempts[2].overtaken == 2
    assert cluster.reason(2) == "waiting for capacity: the hosts are full" and not cluster.state.promised


def test_how_often_a_job_was_overtaken_is_in_its_row() -> None:
    cluster = Cluster(cpus=8)
    cluster.runs(1, 3, ends=None)
    cluster.waits(2, 8, overtaken=1)
    cluster.waits(3, 1, limit=60.0)
    cluster.waits(4, 1, limit=60.0)
    assert set(admitted(cluster.run())) == {3}


def test_without_backfill_nothing_goes_ahead() -> None:
    cluster = Cluster(policy=replace(FILLING, backfill=None))
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    cluster.waits(3, 1, limit=1.0)
    assert not admitted(cluster.run())
    assert cluster.reason(3) == cluster.reason(2) == "waiting for capacity: the hosts are full"


def test_a_limit_that_the_first_job_will_use_is_left_to_it() -> None:
    cluster = Cluster(hosts=2, limits={"jobs": 1})
    cluster.runs(1, 3, ends=500.0)
    cluster.runs(2, 2, ends=500.0, on="h2")
    cluster.waits(3, 4, uses=(("jobs", 1),))
    cluster.waits(4, 1, limit=1e6, uses=(("jobs", 1),))
    assert not admitted(cluster.run()) and cluster.reason(4) == "held back by jobs"
    cluster.jobs["4"] = cluster.jobs["4"]._replace(limit=60.0)
    assert set(admitted(cluster.run())) == {4}, "it ends before the first job needs it"


def test_a_job_whose_user_is_not_known_yet_does_not_go_ahead_and_holds_up_nobody() -> None:
    cluster = Cluster(users={1000: UserSeen(True, 0.0, 0.0)})
    cluster.runs(1, 2, ends=500.0)
    cluster.waits(2, 4)
    cluster.waits(3, 1, limit=60.0, uid=1001)
    cluster.waits(4, 1, limit=60.0)
    assert set(admitted(cluster.run())) == {4}
    assert cluster.state is not None and set(cluster.state.users_asked) == {1001}


def test_only_so_many_jobs_are_considered() -> None:
    cluster = Cluster(policy=replace(FILLING, backfill=Backfill(depth=2)))
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    cluster.waits(3, 1, limit=1e6)
    cluster.waits(4, 1, limit=1e6, kind=CloneKind.INSTANT)
    cluster.waits(5, 1, limit=60.0)
    assert not admitted(cluster.run())
    cluster.policy = replace(FILLING, backfill=Backfill(depth=3))
    assert set(admitted(cluster.run())) == {5}


def test_jobs_that_no_host_has_room_for_count_among_these_only_when_they_are_many() -> None:
    cluster = Cluster(policy=replace(FILLING, backfill=Backfill(depth=1)))
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    for number in range(3, 11):
        cluster.waits(number, 2)
    cluster.waits(11, 1, limit=60.0)
    assert set(admitted(cluster.run())) == {11} and cluster.reason(3) == "waiting for capacity: the hosts are full"
    for number in range(100, 190):
        cluster.waits(number, 2, rank=5)
    assert not admitted(cluster.run())


def test_of_jobs_alike_only_shorter_ones_are_considered_again() -> None:
    cluster = Cluster(policy=replace(FILLING, backfill=Backfill(depth=2)))
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    for number in range(3, 12):
        cluster.waits(number, 1, limit=3600.0)
    cluster.waits(12, 1, limit=60.0)
    assert set(admitted(cluster.run())) == {12}


def test_spares_on_the_hosts_of_the_first_job_are_left_to_it() -> None:
    pools = (Pool("slim", Depth.JOINED, 1, 9, Size(1, 100), 1e9),)
    cluster = Cluster(hosts=2, policy=replace(FILLING, pools=pools))
    cluster.runs(1, 3, ends=500.0)
    cluster.runs(2, 3, ends=900.0, on="h2")
    for number, on in ((5, "h1"), (6, "h2")):
        spare = vm(V.JOINED, id=number, host=on, pool=Depth.JOINED, since=NOW - 50, template_id=int(on[1:]))
        cluster.rows.append(spare)
        cluster.claims.append(claim_of(spare))
    cluster.waits(7, 4)
    cluster.waits(8, 1, limit=1e6)
    cluster.waits(9, 1, limit=60.0)
    changes = cluster.run()
    assert set(admitted(changes)) == {8, 9} and cluster.state is not None
    assert {a: v.host for v in cluster.state.vms.values() if (a := v.attempt) in (8, 9)} == {8: "h2", 9: "h1"}


def test_a_template_is_built_for_a_later_job_only_beside_what_is_kept() -> None:
    """The template of the other image would stay, and the first job is to have all memory of its host."""
    cluster = Cluster()
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    cluster.waits(3, 1, limit=60.0, image="other")
    whole = Request(1, Size(4, 63700))
    cluster.jobs["2"] = cluster.jobs["2"]._replace(request=whole)
    cluster.rows = [replace(row, request=whole) if isinstance(row, Attempt) and row.id == 2 else row
                    for row in cluster.rows]  # fmt: skip
    assert not [c for c in cluster.run() if isinstance(c.row, Template)]
    small = Request(1, Size(4, 100))
    cluster.jobs["2"] = cluster.jobs["2"]._replace(request=small)
    cluster.rows = [replace(row, request=small) if isinstance(row, Attempt) and row.id == 2 else row
                    for row in cluster.rows]  # fmt: skip
    changes = cluster.run()
    assert [c.row.image for c in changes if isinstance(c.row, Template)] == ["other"]
    assert cluster.reason(3) == "the template of image other is being built on h1"


def test_a_host_of_which_templates_have_to_go_first_is_kept_empty() -> None:
    cluster = Cluster()
    other = template(T.READY, id=9, image="other")
    cluster.rows.append(other)
    cluster.claims.append(replace(claim_of(other), size=Size(0, 30000)))
    cluster.runs(1, 1, ends=500.0)
    cluster.waits(2, 1)
    whole = Request(1, Size(1, 50000))
    cluster.jobs["2"] = cluster.jobs["2"]._replace(request=whole)
    cluster.rows[-1] = replace(cluster.rows[-1], request=whole)  # type: ignore[call-arg]
    cluster.waits(3, 1, limit=1e6)
    cluster.waits(4, 1, limit=60.0, image="other")
    found = admitted(cluster.run())
    assert set(found) == {4} and cluster.state is not None
    assert cluster.state.promised == {2: UNIX + 500.0 + 2 * RECLAIM}


def test_what_the_user_is_told_does_not_change_while_it_is_nearly_right() -> None:
    cluster = Cluster()
    cluster.runs(1, 3, ends=2000.0)
    cluster.waits(2, 4)
    cluster.run()
    first = cluster.state
    assert first is not None
    for ends, told in ((1800.0, 2000.0), (2050.0, 2000.0), (1000.0, 1000.0), (2100.0, 2100.0)):
        cluster.jobs["1"] = cluster.jobs["1"]._replace(ends=UNIX + ends)
        again = State(first.rows(), TABLES, NOW)
        again.promised = dict(first.promised)
        world = replace(cluster.world, scheduler=replace(cluster.world.scheduler, value=SchedulerView(cluster.jobs)))  # type: ignore[type-var]
        plan(again, world, [], NOW, cluster.policy)
        assert again.promised == {2: UNIX + told + RECLAIM}, ends


# --- when jobs end, and what they hold is free -------------------------------------------------------


def test_a_job_that_is_not_suspended_ends_when_the_scheduler_says() -> None:
    cluster = Cluster()
    cluster.runs(1, 1, ends=100.0, limit=900.0)
    cluster.run()
    (one,) = cluster.context().state.attempts.values()
    assert ends_by(cluster.context(), one) == UNIX + 100.0
    (its,) = cluster.context().state.vms.values()
    assert frees_by(cluster.context(), its) == UNIX + 100.0 + RECLAIM


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"ends": None, "limit": 900.0}, UNIX - 50 + 900.0),
        ({"ends": None, "limit": None}, inf),
        ({"state": JobState.SUSPENDED}, inf),
        ({"state": JobState.COMPLETING}, UNIX),
        ({"ends": UNIX - OVERDUE}, UNIX),
        ({"ends": UNIX - OVERDUE - 1}, inf),
        ({"ref": JobRef("1", 999)}, inf),
    ],
)
def test_when_a_job_ends_depends_on_what_is_known_of_it(job: dict[str, Any], expected: float) -> None:
    cluster = Cluster()
    cluster.runs(1, 1, ends=100.0)
    cluster.run()
    cluster.context().state.queue.jobs = {"1": cluster.jobs["1"]._replace(**job)}
    (one,) = cluster.context().state.attempts.values()
    assert ends_by(cluster.context(), one) == expected


@pytest.mark.parametrize(
    ("state", "since", "start"),
    [
        (A.QUEUED, NOW - 500, NOW + MAKING + STARTING),
        (A.CLAIMED, NOW - 1, NOW - 1 + MAKING + STARTING),
        (A.CLAIMED, NOW - 100, NOW),
        (A.SPAWNED, NOW - 1, NOW - 1 + STARTING),
    ],
)
def test_a_job_whose_vms_are_being_made_runs_from_when_they_are_expected(
    state: AttemptState, since: float, start: float
) -> None:
    cluster = Cluster()
    cluster.waits(1, 1, limit=100.0)
    one = replace(attempt(state), since=since, job=cluster.jobs["1"].ref)
    cluster.run()
    context = cluster.context()
    context.state._put(one)
    assert ends_by(context, one) == EPOCH + start + 100.0


@pytest.mark.parametrize(
    ("its", "expected"),
    [
        (vm(V.RELEASING, since=NOW - 3), UNIX - 3 + RECLAIM),
        (vm(V.RELEASING, since=NOW - RECLAIM - OVERDUE - 1), inf),
        (vm(V.RETIRING, since=NOW, pool=Depth.JOINED), UNIX + RECLAIM),
        (vm(V.PARKED, pool=Depth.PARKED), UNIX + RECLAIM),
        (vm(V.LOST), inf),
        (vm(V.ORPHAN), inf),
        (vm(V.ORPHAN, job_id="7"), UNIX + 70.0 + RECLAIM),
        (vm(V.SERVING, quarantined=said("odd")), inf),
    ],
)
def test_when_a_vm_without_an_attempt_is_gone(its: Vm, expected: float) -> None:
    cluster = Cluster()
    cluster.run()
    context = cluster.context()
    job = Job(JobRef("7", 500), "x", 1000, JobState.RUNNING, None, ends=UNIX + 70.0)
    context.state.queue.jobs = {"7": job}
    context.state._put(its)
    assert frees_by(context, its) == expected


@pytest.mark.parametrize("state", [A.RECLAIMING, A.RETURNING, A.REVOKING])
def test_the_vms_of_an_attempt_that_ends_are_gone_soon(state: AttemptState) -> None:
    cluster = Cluster()
    cluster.run()
    context = cluster.context()
    context.state._put(attempt(state, since=NOW - 1))
    its = vm(V.SERVING, attempt=1)
    context.state._put(its)
    assert frees_by(context, its) == UNIX - 1 + 2 * RECLAIM


def test_what_the_user_is_told_of_the_start_holds_while_others_are_being_made() -> None:
    cluster = Cluster(policy=replace(FILLING, provisioning=1))
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    cluster.waits(3, 1, limit=60.0)
    assert set(admitted(cluster.run())) == {3} and cluster.state is not None
    state = cluster.state
    for _ in range(2):
        assert "expected to start by" in str(state.reasons[2])
        assert state.promised == {2: UNIX + 500.0 + RECLAIM}
        plan(state, cluster.world, [], NOW + 1, cluster.policy)
