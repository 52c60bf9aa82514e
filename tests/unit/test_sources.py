"""Sources that are silent, hosts that are out of sight, and fencing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.machines.vm import step_vm
from multiverse.core.model.host import Host, HostState, HypervisorView
from multiverse.core.model.job import AttemptState, JobState
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import TemplateKey, TemplateSeen, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.transition import Command
from tests.unit import rows
from tests.unit.planner_harness import POLICY, PlannerHarness

A, V = AttemptState, VmState


class AgentsHarness(PlannerHarness):
    """Each host is a source of its own, which `silent` names with the time since when it is unknown."""

    def __init__(self, *hosts: str) -> None:
        super().__init__()
        one = self.hosts["h1"]
        self.hosts = {name: replace(one, name=name) for name in hosts}
        self.silent: dict[str, float] = {}
        for name in hosts:
            self.template(host=name)

    def view(self, host: Host) -> HypervisorView:
        vms = {name: vm for name, vm in self.vms.items() if vm.host == host.name}
        built: dict[TemplateKey, TemplateSeen] = {key: t for key, t in self.templates.items() if t.host == host.name}
        return HypervisorView({host.name: host}, vms, built)

    def observe(self) -> None:
        super().observe()
        sources = {}
        for name, host in self.hosts.items():
            agent = f"agent of {name}"
            if name in self.silent:
                sources[agent] = Observation(None, self.silent[name])
            else:
                sources[agent] = Observation(Seen(self.view(host), self.clock.time), 0.0)
        self.world = replace(self.world, sources=sources)

    def silence(self, host: str) -> None:
        self.silent[host] = self.clock.time

    def allocated(self) -> str:
        """A job runs; returns the host of its VM."""
        self.job()
        for _ in range(3):
            self.run()
        for condition in (VmCondition.PARKED, VmCondition.RUNNING):
            (vm,) = self.all_vms()
            self.vms[vm.name] = VmSeen(vm.name, vm.host, condition)
            self.ended(vm.key)
            if condition is VmCondition.RUNNING:
                self.node(vm.name)
            self.run()
        attempt = self.attempt()
        self.job(state=JobState.RUNNING, nodes=(vm.name,), gated=False, pinned=attempt.feature)
        self.ended(attempt.key)
        self.run()
        assert self.attempt().state is A.ALLOCATED
        return vm.host

    def vm_state(self) -> V:
        (vm,) = self.all_vms()
        return vm.state


def test_the_vms_of_a_silent_source_are_lost_after_a_time_and_those_of_others_are_not() -> None:
    harness = AgentsHarness("h1", "h2")
    host = harness.allocated()
    other = "h2" if host == "h1" else "h1"
    harness.silence(other)
    harness.pass_time(10 * POLICY.silence)
    assert harness.run() == [] and harness.vm_state() is V.SERVING
    harness.silent.clear()
    harness.silence(host)
    harness.pass_time(POLICY.silence - 2)
    assert harness.run() == [] and harness.vm_state() is V.SERVING, "silent for less than the limit"
    harness.pass_time(2)
    harness.run()
    assert harness.vm_state() is V.LOST
    assert harness.attempt().state is A.ALLOCATED and len(harness.rows.claims) >= 1
    harness.silent.clear()
    harness.run()
    assert harness.vm_state() is V.SERVING, "its job runs on"


def test_a_source_that_answers_without_a_host_loses_the_vms_of_that_host_at_once() -> None:
    harness = PlannerHarness()
    harness.to_allocated()
    harness.hosts["h2"] = replace(harness.hosts.pop("h1"), name="h2")
    harness.run()
    assert harness.all_vms()[0].state is V.LOST


def test_a_source_that_has_just_become_known_tells_of_a_missing_host_at_once() -> None:
    for hosts, expected in (({}, V.LOST), ({"h1": PlannerHarness().hosts["h1"]}, V.SERVING)):
        held = rows.state(rows.vm(V.SERVING), now=1000.0)
        view = HypervisorView(hosts, {"mvtest0-1": VmSeen("mvtest0-1", "h1", VmCondition.RUNNING)})
        step_vm(held, 1, World(sources={rows.SOURCE: Observation(Seen(view, 1000.0), 1000.0)}), POLICY)
        assert held.vms[1].state is expected


def test_nothing_is_placed_on_a_host_whose_source_is_silent() -> None:
    harness = AgentsHarness("h1", "h2")
    harness.run()
    harness.silence("h1")
    for job_id in ("7", "8"):
        harness.job(job_id)
    for _ in range(4):
        harness.run()
    assert {vm.host for vm in harness.rows.vms.values()} == {"h2"}


def test_a_host_in_sight_cannot_be_fenced() -> None:
    harness = AgentsHarness("h1")
    harness.allocated()
    assert harness.run(Command("fence", "h1")) == []
    assert harness.vm_state() is V.SERVING and not harness.state.is_fenced("h1")
    assert harness.rows.hosts["h1"].state is HostState.KNOWN


@pytest.mark.parametrize("lost", [False, True])
def test_fencing_the_host_of_a_silent_source_ends_its_vms_and_releases_their_claims(lost: bool) -> None:
    harness = AgentsHarness("h1", "h2")
    host = harness.allocated()
    (vm,) = harness.all_vms()
    harness.silence(host)
    harness.pass_time(2 * POLICY.silence if lost else 1.0)
    harness.run()
    assert harness.vm_state() is (V.LOST if lost else V.SERVING)
    harness.run(Command("fence", host))
    assert harness.vm_state() is V.ENDING and "operator" in text_of(harness.all_vms()[0].reason)
    assert harness.rows.hosts[host].state is HostState.FENCED
    assert harness.state.claims.of(vm.key), "no observation has shown yet that its node is gone"
    harness.jobs.clear()
    harness.ended(harness.attempt().key)
    harness.ended(vm.key)
    del harness.nodes[vm.name]
    moves = harness.run()
    assert harness.vm_state() is V.GONE
    (ending,) = [m for m in moves for c in m.changes if c.row.key == vm.key and c.row.state is V.GONE]
    assert [key.owner for key in ending.free] == [vm.key], "released in the move that records the end"
    assert not harness.state.claims.of(vm.key)
    assert not harness.rows.vms


def test_a_fenced_vm_claims_nothing_and_its_node_is_deleted() -> None:
    harness = AgentsHarness("h1")
    harness.allocated()
    (vm,) = harness.all_vms()
    harness.silence("h1")
    harness.run(Command("fence", "h1"))
    harness.ended(vm.key)
    harness.jobs.clear()
    for _ in range(3):
        harness.run()
    assert harness.vm_state() is V.DELETING and not harness.state.claims.of(vm.key)
    harness.scheduler_known = False
    harness.nodes.clear()
    harness.run()
    assert harness.vm_state() is V.DELETING, "an unknown scheduler does not show that a node is gone"
    harness.scheduler_known = True
    harness.run()
    harness.ended(vm.key)
    harness.run()
    assert harness.vm_state() is V.GONE


def test_a_fenced_host_that_is_observed_again_is_not_fenced_and_what_is_left_there_is_waited_for() -> None:
    harness = AgentsHarness("h1")
    harness.allocated()
    (vm,) = harness.all_vms()
    harness.silence("h1")
    harness.run(Command("fence", "h1"))
    harness.silent.clear()
    harness.jobs.clear()
    harness.nodes.clear()
    harness.ended(vm.key)
    harness.run()
    assert harness.rows.hosts["h1"].state is HostState.KNOWN
    assert harness.vm_state() is not V.GONE and harness.state.claims.of(vm.key), "its host still shows it"
    harness.vms.clear()
    harness.run()
    assert harness.vm_state() is V.GONE and not harness.state.claims.of(vm.key)


def test_a_host_that_no_row_and_no_setting_knows_cannot_be_fenced() -> None:
    harness = AgentsHarness("h1")
    harness.run()
    assert harness.run(Command("fence", "h9")) == [] and set(harness.rows.hosts) == {"h1"}
