"""Hosts that are avoided because VMs fail there, and who is at fault."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from multiverse.core.avoidance import avoided, blame, forget_hosts, is_tried, joined, tried_at_once, whose_fault
from multiverse.core.context import Context
from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.core.explanation import explain, host_verdicts
from multiverse.core.model.basics import CloneKind, Key
from multiverse.core.model.host import HostFault, HostState, KnownHost
from multiverse.core.model.job import Attempt, AttemptState
from multiverse.core.model.reason import Why, text_of
from multiverse.core.model.vm import Fault, Template, TemplateState, Vm, VmCondition, VmState
from multiverse.core.policy import AVOIDED_LIMIT
from multiverse.core.transition import Change, Command, Done, EffectKind, Event
from multiverse.service.alerts import findings, repair_command
from tests.unit.planner_harness import POLICY, PlannerHarness, failed
from tests.unit.rows import attempt, known_host, state, vm, world_of

A, V = AttemptState, VmState
FIRST = POLICY.retry_base
"""Seconds for which a host is avoided after the first failure that came at once."""


def two_hosts() -> PlannerHarness:
    """A job on the first of two hosts that are alike."""
    harness = PlannerHarness()
    harness.second_host()
    harness.to_claimed()
    assert [vm.host for vm in harness.all_vms()] == ["h1"]
    return harness


def fails(harness: PlannerHarness, attempt: int = 1, error: Exception | None = None) -> None:
    """The creation of the attempt's newest VM fails."""
    harness.run(failed(harness.all_vms(attempt)[-1], EffectKind.CREATE, error or Broken("read-only")))


def until_queued(harness: PlannerHarness) -> int:
    """The job is at the gate again. Its new attempt."""
    harness.clear()
    for _ in range(2):
        harness.run()
    return max(harness.rows.attempts)


def comes_up(harness: PlannerHarness, attempt: int) -> None:
    """The attempt's VM is created, and its node registers."""
    for condition in (VmCondition.PARKED, VmCondition.RUNNING):
        vm = harness.all_vms(attempt)[-1]
        harness.seen(vm.name, condition)
        harness.ended(vm.key)
        if condition is VmCondition.RUNNING:
            harness.node(vm.name)
        harness.run()


@pytest.mark.parametrize("error", [Broken("no"), Exhausted("no"), Refused("no")])
def test_a_host_is_avoided_after_the_first_failure_and_the_job_goes_on_elsewhere(error: Exception) -> None:
    harness = two_hosts()
    fails(harness, error=error)
    attempt = harness.attempt()
    assert [vm.host for vm in harness.all_vms()] == ["h1", "h2"] and attempt.state is A.CLAIMED
    assert (attempt.tries, attempt.replaced, attempt.failed_on) == (0, 0, ("h1",)), "that costs it nothing"
    (fault,) = harness.rows.hosts["h1"].faults
    assert (fault.image, fault.failures, text_of(fault.reason)) == ("slim", 1, "no") and not harness.rows.hosts[
        "h2"
    ].faults
    harness.job("8")
    harness.run()
    assert [vm.host for vm in harness.all_vms(2)] == ["h2"], "though h1 is emptier"


def test_what_is_gone_is_no_fault_of_the_host() -> None:
    harness = two_hosts()
    fails(harness, error=Gone("the template was deleted"))
    assert not harness.rows.hosts["h1"].faults and harness.attempt().replaced == 1


def test_where_no_other_host_could_serve_it_the_job_waits_and_is_charged_no_attempt() -> None:
    harness = PlannerHarness(replace(POLICY, attempts=1, replacements=0))
    harness.to_claimed()
    tried = []
    for _ in range(400):
        newest = max(harness.rows.attempts)
        vms = [vm for vm in harness.all_vms(newest) if vm.state is V.PLANNED]
        if vms:
            tried.append(harness.clock.time)
            fails(harness, newest)
            until_queued(harness)
        else:
            harness.run()
            harness.pass_time(20.0)
    attempt = harness.rows.attempts[max(harness.rows.attempts)]
    assert attempt.state is A.QUEUED and attempt.tries == 0, "though one attempt is all that it has"
    pauses = [later - before for before, later in pairwise(tried)]
    assert len(tried) < 20 and pauses[-1] >= AVOIDED_LIMIT and pauses == sorted(pauses)
    assert harness.reasons["7"].startswith("waiting for a host that is avoided: h1 until ")
    assert harness.reasons["7"].endswith("because VMs of slim fail there: read-only")


def test_vms_that_were_on_their_way_when_one_failed_are_the_same_failure() -> None:
    harness = PlannerHarness(cpus=64)
    harness.job("8")
    harness.to_claimed()
    first, second = (harness.all_vms(number)[0] for number in (1, 2))
    harness.run(failed(first, EffectKind.CREATE, Broken("no")), failed(second, EffectKind.CREATE, Broken("no")))
    assert [one.failures for one in harness.rows.hosts["h1"].faults] == [1]


def test_one_job_at_a_time_is_tried_and_a_vm_that_joins_clears_the_host() -> None:
    harness = PlannerHarness(cpus=64)
    harness.to_claimed()
    fails(harness)
    until_queued(harness)
    harness.job("8")
    harness.pass_time(FIRST)
    harness.run()
    states = [(one.job.job_id, one.state) for one in harness.rows.attempts.values()]
    assert sorted(state for _, state in states) == [A.CLAIMED, A.QUEUED], "the other waits for the outcome"
    waits = next(job for job, state in states if state is A.QUEUED)
    assert harness.reasons[waits].startswith("waiting for a host that is avoided: h1 while one job is tried there")
    tried = next(one.id for one in harness.rows.attempts.values() if one.state is A.CLAIMED)
    comes_up(harness, tried)
    assert not harness.rows.hosts["h1"].faults
    harness.run()
    assert A.QUEUED not in [one.state for one in harness.rows.attempts.values()]


def test_a_failure_where_vms_of_others_have_joined_since_is_the_jobs_own() -> None:
    """A request that no VM can serve ends all the same, and keeps nobody from the host."""
    harness = PlannerHarness(replace(POLICY, attempts=1), cpus=64)
    harness.to_claimed()
    fails(harness)
    harness.job(held=True, eligible=False)
    until_queued(harness)
    harness.job("8")
    harness.pass_time(FIRST)
    harness.run()
    other = next(one.id for one in harness.rows.attempts.values() if one.job.job_id == "8")
    comes_up(harness, other)
    assert not harness.rows.hosts["h1"].faults
    harness.job(held=False, eligible=True)
    harness.run()
    mine = max(one.id for one in harness.rows.attempts.values() if one.job.job_id == "7")
    fails(harness, mine)
    assert harness.attempt(mine).outcome == "failed" and "1 attempt: read-only" in text_of(harness.attempt(mine).reason)
    assert not harness.rows.hosts["h1"].faults, "others go on there"


def test_another_image_is_not_avoided() -> None:
    harness = PlannerHarness(replace(POLICY, kind=CloneKind.FULL))
    harness.hosts["h1"] = replace(harness.hosts["h1"], images={**harness.hosts["h1"].images, "other": frozenset()})
    harness.job()
    harness.run()
    fails(harness)
    request = harness.jobs["7"].request
    assert request is not None
    harness.job("8", request=replace(request, image="other"))
    harness.run()
    assert [one.state for one in harness.rows.attempts.values() if one.job.job_id == "8"] == [A.CLAIMED]


def test_it_is_a_row_that_outlives_the_controller() -> None:
    harness = two_hosts()
    fails(harness)
    again = PlannerHarness()
    again.store, again.clock = harness.store, harness.clock
    assert again.store.rows().hosts["h1"].faults == harness.rows.hosts["h1"].faults
    assert [entry.event for entry in harness.store.journal() if entry.kind == "host"] == [Event.AVOIDED]


@pytest.mark.parametrize("verb", ["resume", "retry"])
def test_an_operator_has_the_host_tried_at_once(verb: str) -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    fails(harness)
    until_queued(harness)
    key = harness.rows.hosts["h1"].key
    harness.run(Command(verb, host="h1") if verb == "resume" else Command(verb, key=key))
    assert A.CLAIMED in [one.state for one in harness.rows.attempts.values()]
    fails(harness, max(harness.rows.attempts))
    assert [one.failures for one in harness.rows.hosts["h1"].faults] == [1], "it is the host's fault as before"
    assert not [one for one in harness.rows.attempts.values() if one.tries]


def test_explain_names_the_host_with_until_when_and_why() -> None:
    harness = PlannerHarness()
    harness.second_host()
    harness.to_claimed()
    fails(harness)
    harness.job("8")
    harness.run()
    context = Context(harness.state, harness.world, harness.policy)
    attempt = harness.state.attempts[2]
    (verdict,) = [one for one in host_verdicts(context, attempt) if "h1" in one.hosts]
    why = str(verdict.why)
    assert why.startswith("avoided until 20") and why.endswith("fail there: read-only")
    assert not verdict.fits


def test_explain_says_why_a_job_waits_for_a_host_that_is_avoided() -> None:
    harness = PlannerHarness(replace(POLICY, retry_base=100.0))
    harness.to_claimed()
    fails(harness)
    waiting = harness.state.attempts[until_queued(harness)]
    told = explain(Context(harness.state, harness.world, harness.policy), waiting, harness.clock.time)
    text = str(told.sentences[0])
    assert "a host that is avoided: h1 until 20" in text and "read-only" in text


def test_the_alert_says_what_is_wrong_and_repairs_it() -> None:
    harness = two_hosts()
    fails(harness)
    found = findings(harness.rows, harness.world, harness.policy, harness.clock.time)
    (alert,) = [one for one in found if one.kind == "avoided"]
    assert alert.message == "VMs of slim do not come up on host h1: read-only"
    command = repair_command(alert)
    assert (command.verb, command.key) == ("retry", harness.rows.hosts["h1"].key)


def test_a_template_is_built_on_a_host_where_it_is_not_known_to_fail() -> None:
    harness = PlannerHarness()
    harness.hosts["h2"] = replace(harness.hosts["h1"], name="h2")
    harness.job()
    harness.run()
    (template,) = harness.rows.templates.values()
    assert template.host == "h1"
    harness.run(failed_build(template))
    harness.pass_time(POLICY.backoff(1) + 1.0)
    harness.run()
    building = [one.host for one in harness.rows.templates.values() if one.state is TemplateState.BUILDING]
    assert building == ["h2"], "though that of h1 is due again"


def failed_build(template: Template) -> Done:
    return Done(Key("template", template.id), EffectKind.BUILD, str(template.state), Broken("no"))


# --- the rules, on single rows ------------------------------------------------------------------------

NOW, EPOCH = 1000.0, 1_700_000_000.0
UNIX = NOW + EPOCH
WHY = Why.OPERATOR()


def fault(until: float, failures: int = 3, image: str = "slim") -> HostFault:
    return HostFault(image, failures, until, Why.NO_ROOM_TO_WAKE(host="h1"))


def blamed(host: KnownHost | None, its: Attempt | None, took: float = 0.0) -> tuple[Fault, list[Change]]:
    """Who is at fault for a VM of attempt 1 on h1, and what follows."""
    row = vm(V.STARTING, attempt=1, since=NOW - took)
    here = state(*(one for one in (host, its, row) if one is not None), now=NOW, known=())
    return blame(here, row, WHY, world_of(None, None, NOW, epoch=EPOCH), POLICY)


MAKING = attempt(A.CLAIMED)
OTHER_FAULT = fault(UNIX + 9, image="other")


@pytest.mark.parametrize(
    ("faults", "took", "expected"),
    [
        ((), 0.0, HostFault("slim", 1, UNIX + FIRST, WHY)),
        ((), 60.0, HostFault("slim", 1, UNIX + 30.0, WHY)),
        ((fault(UNIX),), 0.0, HostFault("slim", 4, UNIX + 8 * FIRST, WHY)),
        ((fault(UNIX + 0.5),), 0.0, None),
        ((OTHER_FAULT,), 0.0, HostFault("slim", 1, UNIX + FIRST, WHY)),
    ],
)
def test_a_host_is_avoided_for_longer_with_each_failure_in_a_row(
    faults: tuple[HostFault, ...], took: float, expected: HostFault | None
) -> None:
    host = known_host(HostState.KNOWN, faults=faults)
    whose, changes = blamed(host, MAKING, took)
    others = tuple(one for one in faults if one.image != "slim")
    of_host = [Change(replace(host, faults=(*others, expected)), Event.AVOIDED, WHY)] if expected else []
    noted = Change(replace(MAKING, failed_on=("h1",)), Event.NOTED, WHY)
    assert (whose, changes) == ("host", [*of_host, noted])


@pytest.mark.parametrize(
    "its", [None, attempt(A.SPAWNED), attempt(A.RECLAIMING), attempt(A.SPAWNING, failed_on=("h1",))]
)
def test_only_an_attempt_whose_vms_are_being_made_notes_a_host_and_once(its: Attempt | None) -> None:
    host = known_host(HostState.KNOWN, faults=(fault(UNIX - 1),))
    whose, changes = blamed(host, its)
    assert (whose, [change.event for change in changes]) == ("host", [Event.AVOIDED])


@pytest.mark.parametrize("host", [None, known_host(HostState.REMOVED), known_host(HostState.RETURNED)])
def test_a_host_that_is_not_of_the_site_is_at_fault_and_not_avoided(host: KnownHost | None) -> None:
    assert blamed(host, MAKING) == ("host", [])


def test_a_job_is_at_fault_where_it_failed_before_and_others_have_joined_since() -> None:
    again = attempt(A.CLAIMED, failed_on=("h1",))
    assert blamed(known_host(HostState.KNOWN), again) == ("job", [])
    assert blamed(known_host(HostState.KNOWN, faults=(OTHER_FAULT,)), again) == ("job", [])
    assert blamed(known_host(HostState.KNOWN), attempt(A.CLAIMED, failed_on=("h2",)))[0] == "host"


@pytest.mark.parametrize(
    ("host", "cleared"),
    [
        (known_host(HostState.KNOWN, faults=(fault(UNIX), OTHER_FAULT)), True),
        (known_host(HostState.KNOWN, faults=(OTHER_FAULT,)), False),
        (known_host(HostState.REMOVED, faults=(fault(UNIX),)), False),
        (None, False),
    ],
)
def test_a_vm_that_joins_clears_its_host_for_its_image_alone(host: KnownHost | None, cleared: bool) -> None:
    row = vm(V.JOINED)
    here = state(*([host] if host else []), row, now=NOW, known=())
    expected = Change(replace(host, faults=(OTHER_FAULT,)), Event.CLEARED, Why.JOINED(vm=row.name)) if host else None
    assert joined(here, row) == ([expected] if cleared else [])


@pytest.mark.parametrize(
    ("until", "rows", "expected"),
    [
        (UNIX + 1, [], {"h1"}),
        (UNIX, [], set()),
        (UNIX, [vm(V.STARTING, attempt=1)], {"h1"}),
        (UNIX, [vm(V.PARKED, attempt=1)], {"h1"}),
        (UNIX, [vm(V.PLANNED)], {"h1"}),
        (UNIX, [vm(V.PARKED)], set()),
        (UNIX, [vm(V.SERVING, attempt=1)], set()),
        (UNIX, [vm(V.STARTING, attempt=1, image="other")], set()),
        (UNIX, [vm(V.STARTING, attempt=1, host="h2")], set()),
    ],
)
def test_a_host_is_avoided_until_its_time_and_while_one_vm_is_tried(
    until: float, rows: list[Vm], expected: set[str]
) -> None:
    here = state(known_host(HostState.KNOWN, faults=(fault(until),)), *rows, now=NOW)
    assert avoided(here, "slim", UNIX) == expected and not avoided(here, "other", UNIX)
    assert is_tried(here, "h1", "slim") is bool(rows and expected)


def test_a_host_that_is_tried_at_once_has_no_pause_and_no_failures_for_any_image() -> None:
    host = known_host(HostState.KNOWN, faults=(fault(UNIX), OTHER_FAULT))
    assert [(one.failures, one.until, one.image) for one in tried_at_once(host).faults] == [
        (0, 0.0, "slim"), (0, 0.0, "other")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("faults", "whose"),
    [((), ""), (("host",), "host"), (("host", "job"), "job"), (("host", ""), ""), (("", ""), "")],
)
def test_failed_vms_are_their_hosts_fault_if_all_are_and_the_jobs_if_one_is(
    faults: tuple[Fault, ...], whose: str
) -> None:
    assert whose_fault([vm(V.GONE, id=n, fault=one) for n, one in enumerate(faults, 1)]) == whose


def test_an_attempt_whose_vms_have_come_up_forgets_what_has_failed() -> None:
    assert forget_hosts(attempt(A.SPAWNED, failed_on=("h1",), tries=2)) == attempt(A.SPAWNED)
