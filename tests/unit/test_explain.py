"""Why a job waits, in words: the short form is what its user reads in Slurm, and hosts are told in groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multiverse.controller.comments import CommentPlan
from multiverse.core.explanation import (
    Explanation,
    HostVerdict,
    explain,
    explain_ended,
    explain_new,
    host_verdicts,
)
from multiverse.core.machines.vm import keep_vm_there, move_vm
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Drain, HostState, KnownHost, Overcommitment
from multiverse.core.model.job import AttemptState, JobState
from multiverse.core.model.reason import Why, for_long, said
from multiverse.core.model.vm import Place, TemplateState
from multiverse.core.queue import BEHIND, FIRST
from tests.unit.planner_harness import POLICY
from tests.unit.rows import SOURCE, attempt, indexes_of, template
from tests.unit.test_admission_cases import host
from tests.unit.test_backfill import FILLING, NOW, UNIX, Cluster

A, T = AttemptState, TemplateState


def words(found: Explanation) -> tuple[str, ...]:
    return tuple(map(str, found.sentences))


def told(cluster: Cluster, number: int) -> str:
    assert cluster.state is not None
    return " ".join(words(explain(cluster.context(), cluster.state.attempts[number], NOW + 20)))


def verdicts(cluster: Cluster, number: int) -> dict[str, tuple[str, ...]]:
    assert cluster.state is not None
    return {str(one.why): one.hosts for one in host_verdicts(cluster.context(), cluster.state.attempts[number])}


def crowded() -> Cluster:
    cluster = Cluster(hosts=3)
    cluster.runs(1, 3, ends=500.0)
    cluster.runs(2, 4, ends=900.0, on="h2")
    cluster.waits(3, 4, nodes=2)
    for number in range(4, 20):
        cluster.waits(number, 3)
    cluster.run()
    return cluster


# --- what is said ------------------------------------------------------------------------------------


def test_the_first_job_is_told_since_when_and_until_when_it_waits() -> None:
    cluster = crowded()
    assert cluster.state is not None
    found = explain(cluster.context(), cluster.state.attempts[3], NOW + 20)
    assert words(found) == (f"It has waited for 17 min: {cluster.reason(3)}.",)
    assert found.expected == cluster.state.promised[3] and not found.behind and found.ahead == 0


def test_any_job_behind_it_is_told_behind_whom_and_why_that_one_waits() -> None:
    cluster = crowded()
    assert cluster.state is not None
    last = max(cluster.state.attempts)
    assert last not in cluster.state.reasons, "it is beyond those that get a reason of their own"
    found = explain(cluster.context(), cluster.state.attempts[last], NOW + 20)
    assert (found.short, found.behind) == (BEHIND, "3")
    queued = [one for one in cluster.state.attempts.values() if one.state is A.QUEUED]
    assert found.ahead == len(queued) - 1
    assert f"{found.ahead} jobs are ahead of it; job 3 keeps them waiting: waiting for capacity" in words(found)[1]


def test_any_job_that_a_limit_holds_back_is_told_so_wherever_it_is_in_the_queue() -> None:
    cluster = Cluster(limits={"jobs": 1, "seats": 0})
    for number in range(1, FIRST + 4):
        cluster.waits(number, 1, uses=(("seats", 1),))
    cluster.waits(99, 1, uses=(("jobs", 2),))
    cluster.waits(100, 4, uses=(("jobs", 1),))
    cluster.run()
    assert cluster.state is not None
    for number, limit in ((1, "seats"), (FIRST + 3, "seats"), (99, "jobs")):
        assert f": held back by {limit}." in told(cluster, number)
    found = explain(cluster.context(), cluster.state.attempts[FIRST + 3], NOW + 20)
    assert (found.short, found.ahead) == (BEHIND, FIRST + 2)
    assert "held back" not in told(cluster, 100)


def test_what_the_scheduler_shows_users_is_the_short_form_of_the_same() -> None:
    cluster = crowded()
    state = cluster.state
    assert state is not None
    plan = CommentPlan(replace(FILLING, patience=0.0), state.attempts.values())
    plan.explained(state.reasons)
    told: dict[str, str] = {}
    now = NOW + 20
    while (telling := plan.next_call(cluster.jobs, now)) is not None:
        plan.ended(telling, now, failed=False)
        told.update({ref.job_id: telling.text for ref in telling.jobs})
        now += 10.0
    assert len(told) > FIRST
    for job_id, text in told.items():
        found = explain(cluster.context(), state.attempts[int(job_id)], now)
        assert str(found.short) == text
        assert text in words(found)[0], "and the whole explanation begins with it"


def test_a_job_that_slurm_keeps_waiting_is_told_so() -> None:
    cluster = Cluster()
    cluster.waits(1, 1)
    cluster.waits(2, 1)
    cluster.jobs["1"] = cluster.jobs["1"]._replace(eligible=False, reason="Dependency")
    cluster.jobs["2"] = cluster.jobs["2"]._replace(eligible=False, held=True, reason="JobHeldUser")
    cluster.run()
    assert told(cluster, 1).endswith("the scheduler itself keeps it waiting (Dependency).")
    assert told(cluster, 2).endswith("it is held (JobHeldUser).")


def test_a_job_in_its_back_off_is_told_what_failed_and_when_it_is_tried_again() -> None:
    cluster = Cluster()
    cluster.waits(1, 1, note=said("no VM joined"), not_before=NOW + 80, tries=3)
    cluster.run()
    assert (
        "It has waited for 17 min: no VM joined. It is considered again in 1 min. It failed 3 times in a row."
        in told(cluster, 1)
    )


def test_a_job_whose_attempt_was_given_up_has_waited_since_it_was_submitted() -> None:
    cluster = Cluster()
    cluster.waits(1, 1, image="nowhere", since=NOW - 3, note=said("no VM joined"))
    cluster.run()
    assert told(cluster, 1).startswith("It has waited for 17 min: ")


def test_a_job_that_was_queued_again_is_told_why() -> None:
    cluster = Cluster()
    cluster.waits(1, 1, image="nowhere", note=said("the scheduler requeued the job: host h1: it is gone"))
    cluster.run()
    assert "Its previous attempt was given up: the scheduler requeued the job: host h1: it is gone." in told(cluster, 1)


def test_a_job_that_fits_on_no_host_is_told_that_and_not_who_is_ahead() -> None:
    cluster = Cluster(hosts=2)
    cluster.waits(1, 1)
    cluster.waits(2, 1, image="nowhere")
    cluster.run()
    assert "no host has image nowhere" in told(cluster, 2)
    assert explained(cluster, 2).todo.startswith("request an image of multiverse images")


def test_a_job_is_not_told_to_ask_for_less_while_all_hosts_are_drained() -> None:
    for drained, todo in ((["h3"], "wait for such hosts, or ask"), (["h1", "h2", "h3"], "it goes on by itself")):
        cluster = Cluster(hosts=2)
        cluster.others = {"h3": host("h3", cpus=16)}
        for number, name in enumerate(drained, 9):
            cluster.rows.append(KnownHost(name, SOURCE, drain=Drain(0.0, "new fans"), id=number, version=1))
        cluster.waits(1, 12)
        cluster.run()
        assert "waiting for a host that is drained" in told(cluster, 1)
        assert explained(cluster, 1).todo.startswith(todo)


def test_each_stage_has_a_sentence_of_its_own() -> None:
    seen = set()
    for state in A:
        row = attempt(state, id=1, since=NOW - 5, reason="the reason")
        cluster = Cluster()
        cluster.waits(2, 1)
        cluster.run()
        found = (
            explain_ended(row, 60.0)
            if state in (A.DONE, A.CANCELLED, A.REQUEUED, A.REVOKED, A.FAILED)
            else explain(cluster.context(), row, NOW)
        )
        text = " ".join(words(found))
        assert 1 <= len(words(found)) <= 3 and text[0].isupper() and text.endswith(".")
        seen.add(text)
    assert len(seen) == len(A)


def test_what_failed_says_why_and_what_to_do() -> None:
    found = explain_ended(attempt(A.FAILED, job="9", reason="no VM could be created for it"), 7200.0)
    assert words(found) == ("It failed 2 h ago: no VM could be created for it.",)
    assert "multiverse timeline 9 --events" in found.todo


def test_a_quarantined_record_says_who_decides() -> None:
    row = attempt(A.QUEUED, quarantined=said("it is odd"))
    cluster = Cluster()
    cluster.run()
    found = explain(cluster.context(), row, NOW)
    assert "quarantined" in words(found)[0] and "it is odd" in words(found)[0] and "repair" in found.todo


def test_a_running_job_is_told_where_and_until_when() -> None:
    cluster = Cluster()
    cluster.runs(1, 3, ends=500.0)
    cluster.run()
    text = told(cluster, 1)
    assert "It has run for 1 min 10 s (mvtest0-1 on h1)." in text and "at the latest" in text
    cluster.jobs["1"] = cluster.jobs["1"]._replace(state=JobState.SUSPENDED)
    cluster.run()
    assert "suspended" in told(cluster, 1)


def test_a_job_whose_vm_moves_is_told_so_until_one_host_keeps_the_vm() -> None:
    cluster = Cluster(hosts=2)
    cluster.runs(1, 3, ends=500.0)
    cluster.run()
    state = cluster.state
    assert state is not None
    (vm,) = state.vms.values()
    state.attempts[1] = replace(state.attempts[1], choice=said("instant on h1"))
    assert "Chosen for it: instant on h1." in told(cluster, 1)
    state.begin(NOW, {})
    state.move(move_vm(vm, Place("h2", SOURCE), Why.OPERATOR()))
    text = told(cluster, 1)
    assert "Its VM mvtest0-1 moves from h1 to h2, and goes on meanwhile." in text
    assert "Chosen for it at first: instant on h1." in text
    state.move(keep_vm_there(state.vms[vm.id], said("the cable was cut")))
    assert "Hosts h1 and h2 settle which of them keeps its VM mvtest0-1 after a move." in told(cluster, 1)


def test_a_job_without_an_attempt_is_told_that_it_is_seen() -> None:
    cluster = Cluster()
    cluster.waits(1, 1)
    assert "next pass" in words(explain_new(cluster.jobs["1"], POLICY))[0]
    wrong = cluster.jobs["1"]._replace(problem="it is heterogeneous")
    assert "it is heterogeneous" in words(explain_new(wrong, POLICY))[0]


def test_lengths_of_time_are_for_people() -> None:
    assert [for_long(s) for s in (-1, 0.4, 59, 60, 3599, 3600, 90000)] == [
        "0 s", "0 s", "59 s", "1 min", "59 min 59 s", "1 h", "1 d 1 h",
    ]  # fmt: skip


# --- hosts -------------------------------------------------------------------------------------------


def test_each_host_is_passed_over_for_its_own_reason() -> None:
    cluster = Cluster(hosts=9)
    cluster.runs(1, 3, ends=500.0)  # h1: full
    small = host("h3", cpus=1)
    cluster.others = {
        "h3": small,
        "h4": replace(host("h4", cpus=4), images={}),
        "h5": replace(host("h5", cpus=4), abilities=frozenset({"full"})),
        "h6": replace(host("h6", cpus=4), available_disk=100),
    }
    cluster.rows = [row for row in cluster.rows if not (row.key.kind == "template" and row.id in (7, 8))]
    cluster.claims = [one for one in cluster.claims if one.owner.id not in (7, 8) or one.owner.kind != "template"]
    cluster.rows.append(template(T.BROKEN, id=108, host="h8", reason="no kernel", since=NOW))
    cluster.rows.append(KnownHost("h9", SOURCE, drain=Drain(0.0, "new fans"), id=9, version=1))
    cluster.rows.append(KnownHost("gone", SOURCE, state=HostState.FENCED, id=10, version=1))
    cluster.rows.append(KnownHost("away", SOURCE, id=11, version=1))
    cluster.rows.append(KnownHost("removed", SOURCE, state=HostState.REMOVED, id=12, version=1))
    cluster.waits(2, 2, nodes=3)
    cluster.run()
    found = {hosts: why for why, hosts in verdicts(cluster, 2).items()}
    of = {name: why for hosts, why in found.items() for name in hosts}
    assert of["h1"] == "full: 2 CPUs needed, 1 free"
    assert of["h2"] == "has room for 2 of its VMs"
    assert of["h3"].startswith("too small: 1 CPU")
    assert of["h4"] == "has no image slim"
    assert of["h5"] == "cannot make instant clones of image slim"
    assert of["h6"] == "less than 1024 MiB of disk are available there"
    assert of["h7"] in ("the template of image slim is not there yet", "the template of image slim is being built")
    assert of["h8"] == "the template of image slim is broken: no kernel"
    assert of["h9"] == "drained (new fans)"
    assert of["gone"] == "fenced: it counts as off"
    assert of["away"] == "out of reach"
    assert "removed" not in of


def unknown(cluster: Cluster, *, scheduler: bool = False, hosts: bool = False) -> Cluster:
    """The same as observed since NOW without the scheduler, or without the hosts."""
    sources = {name: replace(one, latest=None, since=NOW) for name, one in cluster.world.sources.items()}
    seen = None if scheduler else cluster.world.scheduler
    more = {"sources": sources} if hosts else {}
    cluster.world = replace(cluster.world, scheduler=seen, scheduler_since=NOW - 280, **more)
    return cluster


def explained(cluster: Cluster, number: int) -> Explanation:
    assert cluster.state is not None
    return explain(cluster.context(), cluster.state.attempts[number], NOW + 20)


def test_a_scheduler_that_does_not_answer_is_named_with_since_when_and_what_to_do() -> None:
    away = "The scheduler has not answered for 5 min: until it does, no job is started and none is given up."
    for number, before in ((3, "It has waited for 17 min."), (1, "It has run for 1 min 10 s (mvtest0-1 on h1).")):
        found = explained(unknown(crowded(), scheduler=True), number)
        assert words(found) == (before, away) and "multiverse status" in found.todo


def test_hosts_that_are_out_of_reach_are_named_with_since_when_and_what_to_do() -> None:
    for number, before, hosts in ((4, "It has waited for 17 min: no host is in reach.", "h1, h2, h3"), (1, "", "h1")):
        found = explained(unknown(crowded(), hosts=True), number)
        assert words(found)[0].startswith(before or "It has run for")
        assert words(found)[-1] == f"Nothing has been heard of {hosts} for 20 s."
        assert "multiverse status" in found.todo
        hidden = found.sentences[-1].hidden("4", others=True, hosts=False)
        assert f"heard of {'3 hosts' if number == 4 else 'a host'} for" in str(hidden)
    assert "no host" not in told(crowded(), 4) and "heard" not in told(crowded(), 1)


def test_hosts_for_which_the_same_is_true_are_one_group() -> None:
    cluster = Cluster(hosts=6)
    for n in range(1, 5):
        cluster.runs(n, 1 + n % 2 + 1, ends=500.0, on=f"h{n}")
    cluster.waits(9, 3, nodes=3)
    cluster.run()
    assert host_verdicts(cluster.context(), cluster.state.attempts[9]) == [  # type: ignore[union-attr]
        HostVerdict(("h5", "h6"), Why.HAS_ROOM(least=1), fits=True),
        HostVerdict(("h1", "h2", "h3", "h4"), Why.LACKS(need=3, what="CPUs", beside=0, held=0, least=1, most=2)),
    ]


def test_memory_that_others_hold_is_said_to_be_theirs() -> None:
    bold = replace(
        host("h1", cpus=4, memory=4096), overcommit=Overcommitment(memory=2.0, floor=1000), available=1200,
        machine=Size(4, 8192),
    )  # fmt: skip
    cluster = Cluster(others={"h1": bold})
    cluster.waits(1, 1)
    cluster.jobs["1"] = cluster.jobs["1"]._replace(request=replace(cluster.jobs["1"].request, size=Size(1, 900)))
    cluster.rows[-1] = replace(cluster.rows[-1], request=cluster.jobs["1"].request)  # type: ignore[call-arg]
    cluster.run()
    assert any("others on its machine hold memory" in why for why in verdicts(cluster, 1))


def test_a_host_that_closes_before_the_job_ends_is_passed_over_for_that() -> None:
    cluster = Cluster(hosts=2)
    cluster.rows.append(KnownHost("h1", SOURCE, drain=Drain(UNIX + 600.0, "a new kernel"), id=1, version=1))
    cluster.runs(1, 4, ends=500.0, on="h2")
    cluster.waits(2, 2, limit=3600.0)
    cluster.waits(3, 2, limit=10.0)
    cluster.run()
    assert verdicts(cluster, 2)["to be drained before the job has surely ended (a new kernel)"] == ("h1",)


def test_a_host_that_is_closed_without_an_operators_word_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(hosts=3)
    cluster.runs(1, 4, ends=500.0, on="h3")
    cluster.waits(2, 2, nodes=9)
    cluster.run()
    assert cluster.state is not None
    without = replace(cluster.context(), without=frozenset({"h1"}))
    monkeypatch.setattr("multiverse.core.explanation.for_attempt", lambda *_: without)
    cluster.state.close_hosts(frozenset({"h2"}), frozenset())
    row = attempt(A.QUEUED, id=3, job="3")
    found = {one.hosts: str(one.why) for one in host_verdicts(cluster.context(), row)}
    assert found["h1",] == "leased, and the lease may end before the job"
    assert found["h2",] == "takes no new VM"


runs = st.tuples(st.integers(1, 3), st.integers(1, 4))


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(hosts=st.integers(1, 3), running=st.lists(runs, max_size=6), cpus=st.integers(1, 4), nodes=st.integers(1, 4))
def test_a_job_waits_for_room_exactly_if_too_few_of_its_vms_have_room(
    hosts: int, running: list[tuple[int, int]], cpus: int, nodes: int
) -> None:
    cluster, used = Cluster(hosts=hosts), dict.fromkeys(range(1, hosts + 1), 0)
    for number, (on, taken) in enumerate(running, 1):
        name = (on - 1) % hosts + 1
        if used[name] + taken <= 4:
            used[name] += taken
            cluster.runs(number, taken, ends=500.0, on=f"h{name}")
    cluster.waits(99, cpus, nodes=min(nodes, hosts * (4 // cpus)))
    cluster.run()
    state = cluster.state
    assert state is not None
    if state.attempts[99].state is not A.QUEUED:
        return
    fitting = [one for one in host_verdicts(cluster.context(), state.attempts[99]) if one.fits]
    room = sum((4 - taken) // cpus for taken in used.values())
    assert {name for one in fitting for name in one.hosts} == {
        f"h{n}" for n, taken in used.items() if 4 - taken >= cpus
    }
    assert room < state.attempts[99].request.nodes


def test_explaining_changes_nothing() -> None:
    cluster = crowded()
    state = cluster.state
    assert state is not None
    before = (state.rows(), indexes_of(state), dict(state.reasons), dict(state.promised), state.looked)
    for one in list(state.attempts.values()):
        explain(cluster.context(), one, NOW + 20)
    assert before == (state.rows(), indexes_of(state), dict(state.reasons), dict(state.promised), state.looked)
