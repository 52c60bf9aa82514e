"""What operators do to hosts: add, drain, resume and remove them, whatever is on them and whether they are in sight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.capacity.sizes import job_limits
from multiverse.core.model.basics import Depth, Size
from multiverse.core.model.host import Drain, HostState, KnownHost
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import TemplateState, VmCondition, VmState
from multiverse.core.policy import Pool
from multiverse.core.transition import Command, Event
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.rows import SOURCE, changes_of

H, V, T = HostState, VmState, TemplateState
DRAIN = Command("drain", "h1", drain=Drain(0.0, "a fan"))


def two_hosts(**options: object) -> PlannerHarness:
    """Two hosts, each with a template that is ready."""
    harness = PlannerHarness(**options)  # type: ignore[arg-type]
    harness.hosts["h2"] = replace(harness.hosts["h1"], name="h2")
    for host in harness.hosts:
        harness.template(host=host)
    harness.run()
    return harness


def host(harness: PlannerHarness, name: str = "h1") -> KnownHost:
    return harness.rows.hosts[name]


def refused(harness: PlannerHarness, command: Command) -> str:
    """Why a command is refused; nothing moves."""
    assert harness.run(command) == []
    ((which, why),) = harness.state.refusals
    assert which is command and why.hint
    return str(why)


def hosts_of_vms(harness: PlannerHarness) -> set[str]:
    return {vm.host for vm in harness.rows.vms.values()}


def drop_retiring_templates(harness: PlannerHarness) -> None:
    """The hosts have forgotten the templates that were to go."""
    for row in harness.rows.templates.values():
        if row.state is T.RETIRING:
            harness.templates.pop(row.which, None)
            harness.ended(row.key)
    harness.run()


# --- draining --------------------------------------------------------------------------------------


def test_a_drained_host_gets_no_vm_and_its_templates_go() -> None:
    harness = two_hosts()
    harness.run(DRAIN)
    assert [(t.host, t.state) for t in harness.rows.templates.values()] == [("h1", T.RETIRING), ("h2", T.READY)]
    for job in range(1, 4):
        harness.job(str(job))
    harness.run()
    assert len(harness.rows.vms) == 3 and hosts_of_vms(harness) == {"h2"}
    assert host(harness).drain == Drain(0.0, "a fan") and host(harness).state is H.KNOWN


def test_a_job_on_a_drained_host_runs_on_and_its_vm_is_released_as_ever() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.run(DRAIN)
    harness.run()
    assert [vm.state for vm in harness.rows.vms.values()] == [V.SERVING]
    harness.jobs.clear()
    harness.run()
    harness.run()
    assert [vm.state for vm in harness.rows.vms.values()] == [V.RELEASING]


def test_a_vm_that_was_planned_before_the_drain_keeps_its_template_until_it_is_made() -> None:
    harness = PlannerHarness()
    harness.to_claimed()
    harness.run(DRAIN)
    assert [t.state for t in harness.rows.templates.values()] == [T.READY]
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.PARKED)
    harness.ended(vm.key)
    harness.run()
    assert [t.state for t in harness.rows.templates.values()] == [T.RETIRING]


@pytest.mark.parametrize("begins", [0.0, 1e12], ids=["drained", "to be drained"])
def test_spares_of_a_host_that_is_drained_or_will_be_are_released_and_none_is_made(begins: float) -> None:
    pool = Pool("slim", Depth.PARKED, 2, 2, Size(1, 256))
    harness = PlannerHarness(policy=replace(POLICY, pools=(pool,)))
    harness.template()
    harness.fill()
    assert [vm.state for vm in harness.rows.vms.values()] == [V.PARKED, V.PARKED]
    harness.run(Command("drain", "h1", drain=Drain(begins)))
    assert {vm.state for vm in harness.rows.vms.values()} == {V.RELEASING}
    harness.clear()
    harness.run()
    harness.run()
    assert harness.rows.vms == {}
    kept = T.READY if begins else T.RETIRING
    assert [t.state for t in harness.rows.templates.values()] == [kept]


def test_a_job_that_fits_only_on_a_drained_host_waits_and_its_reason_names_the_host() -> None:
    harness = two_hosts()
    harness.hosts["h1"] = replace(harness.hosts["h1"], capacity=Size(16, 32768, 65536))
    harness.run(DRAIN)
    harness.job("7", size=Size(12, 1000))
    harness.job("8", size=Size(99, 1000))
    harness.run()
    assert harness.reasons == {"7": "waiting for a host that is drained: h1 (a fan)"}
    assert {a.job.job_id: a.state for a in harness.rows.attempts.values()} == {"7": "queued", "8": "revoking"}
    limits = job_limits(harness.rows.hosts, POLICY)
    assert limits is not None and limits.allow(None, None, 1, Size(16, 1000)), "drained hosts count"
    drop_retiring_templates(harness)
    harness.run(Command("resume", "h1"))
    harness.template(host="h1")  # it is built again
    harness.run()
    harness.run()
    assert hosts_of_vms(harness) == {"h1"} and host(harness).drain is None


def test_a_drain_that_is_repeated_with_another_reason_replaces_it() -> None:
    harness = two_hosts()
    harness.run(DRAIN)
    (again,) = changes_of(harness.run(Command("drain", "h1", drain=Drain(0.0, "a disk"))))
    assert (again.event, text_of(again.reason)) == (Event.DRAINED, "a disk")
    assert changes_of(harness.run(Command("drain", "h1", drain=Drain(0.0, "a disk")))) == []


def test_a_drained_host_stays_drained_while_it_is_out_of_reach_fenced_and_back() -> None:
    harness = two_hosts()
    harness.run(DRAIN)
    away = harness.hosts.pop("h1")
    harness.run(Command("fence", "h1"))
    assert host(harness).state is H.FENCED and host(harness).drain is not None
    harness.hosts["h1"] = away
    harness.run()
    assert host(harness).state is H.KNOWN and host(harness).drain == Drain(0.0, "a fan")
    harness.job()
    harness.run()
    assert hosts_of_vms(harness) == {"h2"}


def test_a_host_that_is_to_be_drained_gets_no_job_of_which_nobody_knows_when_it_ends() -> None:
    harness = two_hosts()
    begins = harness.clock.wall() + 100
    harness.hosts["h1"] = replace(harness.hosts["h1"], capacity=Size(16, 32768, 65536))
    harness.run(Command("drain", "h1", drain=Drain(begins)))
    assert [t.state for t in harness.rows.templates.values()] == [T.READY, T.READY], "jobs may still come"
    harness.job("7", size=Size(12, 1000))
    harness.job("8")
    harness.run()
    assert hosts_of_vms(harness) == {"h2"}, "the job that waits for the host blocks no other"
    assert harness.reasons == {"7": "waiting for a host that is drained: h1"}
    harness.pass_time(100)
    harness.run()
    assert T.RETIRING in [t.state for t in harness.rows.templates.values() if t.host == "h1"]


def test_until_then_a_host_gets_jobs_that_surely_end_by_then_and_no_others() -> None:
    harness = two_hosts()
    begins = harness.clock.wall() + 1000
    harness.hosts["h2"] = replace(harness.hosts["h2"], capacity=Size(1, 2048, 65536))
    harness.run(Command("drain", "h1", drain=Drain(begins, "a fan")))
    sizes = {"7": 900.0, "8": 1000.0, "9": None}
    for job, limit in sizes.items():
        harness.job(job, size=Size(2, 100), limit=limit)
    harness.run()
    assert [(vm.host, vm.attempt) for vm in harness.rows.vms.values()] == [("h1", 1)]
    assert harness.reasons == dict.fromkeys(("8", "9"), "waiting for a host that is drained: h1 (a fan)")


# --- adding and removing ---------------------------------------------------------------------------


def test_an_added_host_is_known_before_it_is_observed_and_survives_a_restart() -> None:
    harness = two_hosts()
    harness.run(Command("add", "h7"))
    assert host(harness, "h7") == KnownHost("h7", "h7", id=host(harness, "h7").id)
    assert len({one.id for one in harness.rows.hosts.values()}) == 3
    assert harness.run(Command("add", "h7")) == []


def test_a_host_is_removed_only_when_nothing_is_claimed_on_it() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    remove = Command("remove", "h1")
    why = refused(harness, remove)
    assert "1 VM of job 7 and 1 template" in why and "multiverse hosts drain h1" in why
    harness.run(DRAIN)
    harness.jobs.clear()
    harness.run()
    harness.run()
    assert "host h1 still has 1 VM of" in refused(harness, remove)
    harness.clear()
    drop_retiring_templates(harness)
    harness.run()
    harness.run()
    assert harness.rows.claims == ()
    (change,) = changes_of(harness.run(remove))
    assert (change.event, change.row.state) == (Event.REMOVED, H.REMOVED)
    assert host(harness).drain is None and job_limits(harness.rows.hosts, POLICY) is None


def test_a_removed_host_stays_removed_though_it_is_seen_until_it_is_added_again() -> None:
    harness = two_hosts()
    away = harness.hosts.pop("h1")
    harness.run(Command("fence", "h1"))
    harness.run(Command("remove", "h1"))
    assert host(harness).state is H.REMOVED and [t.host for t in harness.rows.templates.values()] == ["h2"]
    assert [claim.domain for claim in harness.rows.claims] == ["h2"]
    harness.hosts["h1"] = away
    harness.templates = {which: t for which, t in harness.templates.items() if which.host == "h2"}
    harness.job()
    harness.run()
    harness.run()
    assert host(harness).state is H.REMOVED and hosts_of_vms(harness) == {"h2"}
    harness.run(Command("add", "h1"))
    assert host(harness).state is H.KNOWN and host(harness).source == "h1"


def test_a_fenced_host_with_vms_may_be_removed_and_its_vms_end() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.hypervisor_known, harness.unknown_since = False, harness.clock.time
    harness.pass_time(POLICY.silence + 1)
    harness.run()
    assert [vm.state for vm in harness.rows.vms.values()] == [V.LOST]
    assert "multiverse repair h1 --fenced" in refused(harness, Command("remove", "h1"))
    harness.run(Command("fence", "h1"))
    harness.run(Command("remove", "h1"))
    assert host(harness).state is H.REMOVED
    harness.jobs.clear()
    harness.clear()
    harness.run()
    harness.run()
    assert harness.rows.vms == {} and harness.rows.claims == ()


@pytest.mark.parametrize("verb", ["drain", "resume", "remove"])
def test_a_command_for_a_host_that_is_not_there_is_refused(verb: str) -> None:
    harness = two_hosts()
    assert "there is no host h9" in refused(harness, Command(verb, "h9", drain=Drain()))


def test_resume_takes_a_fence_back() -> None:
    harness = two_hosts()
    del harness.hosts["h1"]
    harness.run(Command("fence", "h1"))
    assert harness.state.is_fenced("h1")
    harness.run(Command("resume", "h1"))
    assert host(harness).state is H.KNOWN and not harness.state.is_fenced("h1")
    assert host(harness).source == SOURCE


def test_an_answer_that_is_older_than_the_fence_does_not_end_it() -> None:
    harness = two_hosts()
    away = harness.hosts.pop("h1")
    harness.run()
    late = harness.clock.time - 0.5
    harness.run(Command("fence", "h1"))
    harness.hosts["h1"] = away
    harness.observe()
    ((name, observation),) = harness.world.sources.items()
    assert observation.latest is not None
    harness.world = replace(
        harness.world, sources={name: replace(observation, latest=replace(observation.latest, began=late))}
    )
    harness.commit()
    assert host(harness).state is H.FENCED
    harness.run()
    assert host(harness).state is H.KNOWN
