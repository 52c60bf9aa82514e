"""What is told of a request is what the planner does with it, and asking changes nothing."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from math import inf

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from multiverse.core.explanation import immediate_capacity, sizes_to_show, usage, what_if
from multiverse.core.model.basics import Depth, Size
from multiverse.core.model.job import AttemptState, Job, JobRef, JobState, Request
from multiverse.core.model.vm import TemplateState, Vm, VmState
from multiverse.core.planner import plan
from multiverse.core.policy import Pool
from multiverse.core.rows import Index
from multiverse.core.state import State
from multiverse.core.transition import Change
from tests.unit.rows import changes_of, indexes_of, template, vm
from tests.unit.test_admission_cases import claim_of, host
from tests.unit.test_backfill import FILLING, NOW, UNIX, Cluster, admitted

A, V, T = AttemptState, VmState, TemplateState

runs = st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from((60.0, 300.0, None)))
waiting = st.tuples(st.integers(1, 4), st.integers(1, 2), st.sampled_from((10.0, 200.0, 1e6)))
Running, Waiting = list[tuple[int, int, float | None]], list[tuple[int, int, float]]


def cluster_of(hosts: int, running: Running, queue: Waiting) -> Cluster:
    cluster, used = Cluster(hosts=hosts), dict.fromkeys(range(1, hosts + 1), 0)
    for number, (on, cpus, ends) in enumerate(running, 1):
        name = (on - 1) % hosts + 1
        if used[name] + cpus <= 4:
            used[name] += cpus
            cluster.runs(number, cpus, ends=ends, on=f"h{name}")
    for number, (cpus, nodes, limit) in enumerate(queue, 21):
        cluster.waits(number, cpus, limit=limit, nodes=min(nodes, hosts * (4 // cpus)))
    return cluster


DERIVED = {
    "queue", "free", "slots", "touched", "compared", "unserved", "dirty", "claims", "numbers", "_indexes",
    "moves", "missing", "learned", "refusals", "wanted", "_undo", "_perhaps_idle", "_idle_templates",
}  # fmt: skip
"""Of a state: what is derived from the rest, what says where to look again, and what a pass begins anew."""


def all_else(state: State) -> dict[str, object]:
    """Every other attribute, also one that a later release adds."""
    return {name: copy(value) for name, value in vars(state).items() if name not in DERIVED}


def kept(state: State) -> tuple[object, ...]:
    """All that a trial must leave as it was."""
    queue = state.queue
    return (
        state.rows(), indexes_of(state), dict(state.reasons), dict(state.promised), state.looked, state.blocking,
        state.now, dict(state.paced), state.waiting.copy(), dict(state.users_asked), dict(state.placement_faults),
        set(state.lacking), state.entropy, dict(state.claims.used), state.numbers.next_serial,
        queue.candidates.entries(), queue.unfit.entries(),
        dict(queue.wanted), dict(queue._shape_uses), dict(queue.jobs), {k: list(v) for k, v in state.free.free.items()},
    )  # fmt: skip


def submitted(cluster: Cluster, request: Request, limit: float | None) -> list[Change]:
    """The changes of the pass that follows, in which a job 99 waits behind the others."""
    state = cluster.state
    assert state is not None and cluster.world.scheduler is not None
    job = Job(JobRef("99", 1), "hello", 1000, JobState.PENDING, request, limit=limit, rank=99)
    scheduler = cluster.world.scheduler
    jobs = {**scheduler.value.jobs, "99": job}
    world = replace(cluster.world, scheduler=replace(scheduler, value=replace(scheduler.value, jobs=jobs)))
    return changes_of(plan(state, world, [], NOW, cluster.policy))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    hosts=st.integers(1, 3), running=st.lists(runs, max_size=6), queue=st.lists(waiting, max_size=4), asked=waiting,
    unlimited=st.booleans(),
)  # fmt: skip
# A pass that also admits others may choose another host: what it keeps for the first job that waits is decided before
# it admits those that go ahead of that job. So the next pass is what the answer is compared with.
@example(
    hosts=3, running=[(2, 1, 60.0), (2, 2, 60.0)], queue=[(1, 1, 10.0), (2, 2, 10.0), (2, 2, 10.0), (1, 1, 10.0)],
    asked=(1, 1, 200.0), unlimited=False,
)  # fmt: skip
def test_a_request_would_start_exactly_if_the_planner_starts_the_job(
    hosts: int, running: Running, queue: Waiting, asked: tuple[int, int, float], unlimited: bool
) -> None:
    cpus, nodes, length = asked
    limit = None if unlimited else length
    cluster = cluster_of(hosts, running, queue)
    cluster.run()
    request = Request(nodes, Size(cpus, 100))
    found = what_if(cluster.context(), request, limit, NOW)

    changes = submitted(cluster, request, limit)
    assert cluster.state is not None
    (really,) = (one for one in cluster.state.attempts.values() if one.job.job_id == "99")
    if found.never:
        assert really.state is A.REVOKING
        return
    assert found.starts == (really.id in admitted(changes))
    if found.starts:
        assert sorted(found.hosts) == sorted(
            one.row.host for one in changes if isinstance(one.row, Vm) and one.row.attempt == really.id
        )
    else:
        assert found.expected == cluster.state.promised.get(really.id, inf)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(hosts=st.integers(1, 3), running=st.lists(runs, max_size=6), queue=st.lists(waiting, max_size=4), asked=waiting)
def test_asking_changes_nothing(hosts: int, running: Running, queue: Waiting, asked: tuple[int, int, float]) -> None:
    cluster = cluster_of(hosts, running, queue)
    cluster.run()
    state = cluster.state
    assert state is not None
    immediate_capacity(cluster.context(), Size(1, 100))  # what is free is computed when it is first asked for
    before, rest = kept(state), all_else(state)
    indexes = {name for name, value in rest.items() if isinstance(value, Index)}  # compared in `kept`
    for _ in range(2):
        what_if(cluster.context(), Request(asked[1], Size(asked[0], 100)), asked[2], NOW)
        immediate_capacity(cluster.context(), Size(1, 100))
        assert kept(state) == before
        assert {k: v for k, v in all_else(state).items() if k not in indexes} == {
            k: v for k, v in rest.items() if k not in indexes
        }
    assert not state.moves


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(hosts=st.integers(1, 3), running=st.lists(runs, max_size=6), cpus=st.integers(1, 4))
def test_as_many_would_start_at_once_as_the_planner_starts(hosts: int, running: Running, cpus: int) -> None:
    cluster = cluster_of(hosts, running, [])
    cluster.run()
    found = immediate_capacity(cluster.context(), Size(cpus, 100))
    really = cluster_of(hosts, running, [])
    for number in range(50, 51 + found.now):
        really.waits(number, cpus)
    assert len(admitted(really.run())) == found.now


def test_a_joined_spare_is_one_more_that_would_start() -> None:
    pool = Pool("slim", Depth.JOINED, 1, 1, Size(1, 100), offer=False)
    cluster = Cluster(policy=replace(FILLING, pools=(pool,)))
    cluster.runs(1, 3, ends=500.0)
    spare = vm(V.JOINED, id=2, pool=Depth.JOINED, since=NOW - 5, template_id=1)
    cluster.rows.append(spare)
    cluster.claims.append(claim_of(spare))
    cluster.run()
    assert immediate_capacity(cluster.context(), Size(1, 100)).now == 1
    assert immediate_capacity(cluster.context(), Size(2, 100)).now == 0
    assert what_if(cluster.context(), Request(1, Size(1, 100)), None, NOW).starts
    assert usage(cluster.context()).spares.cpus == 1


def test_hosts_without_the_template_count_for_later() -> None:
    cluster = Cluster(hosts=2)
    cluster.rows, cluster.claims = cluster.rows[:1], cluster.claims[:1]
    cluster.run()
    found = immediate_capacity(cluster.context(), Size(2, 100))
    assert (found.now, found.with_template) == (2, 2)


def test_a_job_that_waits_is_told_behind_whom_and_until_when_alone() -> None:
    cluster = Cluster()
    cluster.runs(1, 3, ends=500.0)
    cluster.waits(2, 4)
    cluster.run()
    found = what_if(cluster.context(), Request(1, Size(2, 100)), None, NOW)
    assert not found.starts and (found.ahead, found.behind, found.expected) == (1, "2", inf)
    assert found.alone == UNIX + 500.0 + FILLING.reclaim
    first = Cluster()
    first.runs(1, 3, ends=500.0)
    first.run()
    alone = what_if(first.context(), Request(1, Size(2, 100)), None, NOW)
    assert alone.expected == UNIX + 500.0 + FILLING.reclaim and not alone.behind


def test_what_no_host_could_hold_would_be_cancelled_and_what_a_host_lacks_would_wait() -> None:
    cluster = Cluster()
    cluster.run()
    assert what_if(cluster.context(), Request(1, Size(9, 100)), None, NOW).never
    found = what_if(cluster.context(), Request(1, Size(1, 100), image="nowhere"), None, NOW)
    assert not found.starts and not found.never and "no host has image nowhere" in str(found.why)


def test_a_template_that_is_missing_is_not_built_for_a_question() -> None:
    cluster = Cluster()
    cluster.rows, cluster.claims = [], []
    cluster.run()
    found = what_if(cluster.context(), Request(1, Size(1, 100)), None, NOW)
    assert not found.starts and "is being built" in str(found.why)
    assert cluster.state is not None and not cluster.state.templates


def test_usage_adds_up() -> None:
    cluster = Cluster(hosts=2)
    cluster.runs(1, 3, ends=500.0)
    cluster.run()
    found = usage(cluster.context())
    assert found.hosts == 2 and found.closed_hosts == 0
    assert found.jobs.cpus == 3 and found.free.cpus == 5 and found.total.cpus == 8
    parts = (found.jobs, found.spares, found.templates, found.free, found.closed)
    assert sum(one.memory for one in parts) == found.total.memory


def test_sizes_are_those_of_the_ladder_and_those_that_jobs_ask_for() -> None:
    cluster = Cluster(others={"h1": host("h1", cpus=4, memory=8192)})
    cluster.runs(1, 4, ends=500.0)
    cluster.waits(2, 3)
    cluster.run()
    assert sizes_to_show(cluster.context()) == [
        Size(1, 1024), Size(2, 2048), Size(3, 100), Size(4, 4096),
    ]  # fmt: skip
    nothing = Cluster(hosts=0)
    nothing.run()
    assert sizes_to_show(nothing.context()) == []


@pytest.mark.parametrize("state", [T.BUILDING, T.BROKEN])
def test_a_template_that_is_not_ready_lets_nothing_start(state: TemplateState) -> None:
    cluster = Cluster()
    cluster.rows = [template(state, id=1, host="h1", since=NOW, tries=1)]
    cluster.run()
    assert immediate_capacity(cluster.context(), Size(1, 100)).now == 0
