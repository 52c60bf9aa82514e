"""What is concluded from a part of the scheduler's view that was read later than the whole."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from multiverse.core.model.basics import Depth, Size
from multiverse.core.model.job import AttemptState, JobState, NodeState, SchedulerView
from multiverse.core.model.vm import VmCondition, VmState
from multiverse.core.model.world import Seen
from multiverse.core.policy import Pool
from multiverse.core.transition import Move
from tests.unit.planner_harness import POLICY, PlannerHarness
from tests.unit.scheduler_parts import part_of

A, V = AttemptState, VmState


class PartsHarness(PlannerHarness):
    """`run` observes the whole, `read` only some jobs and nodes, which are merged into what was known."""

    known: Seen[SchedulerView] | None = None
    wanted: tuple[Collection[str], Collection[str]] | None = None

    def observe(self) -> None:
        super().observe()
        fresh = self.world.scheduler
        if self.wanted is not None and fresh is not None and self.known is not None:
            jobs, nodes = self.wanted
            merged = self.known.value.merged(part_of(fresh.value, jobs, (), nodes), fresh.began)
            self.world = replace(self.world, scheduler=Seen(merged, self.known.began))
        self.known = self.world.scheduler

    def read(self, *jobs: str, nodes: Collection[str] = ()) -> list[Move]:
        """Let time pass, read these jobs and nodes alone, plan one pass and commit it."""
        self.wanted = (jobs, nodes)
        moves = self.run()
        self.wanted = None
        return moves


def test_a_job_is_gone_when_a_reading_of_that_job_does_not_show_it() -> None:
    harness = PartsHarness()
    harness.to_allocated()
    del harness.jobs["7"]
    assert harness.read("8") == [] and harness.attempt().state is A.ALLOCATED, "another job was read"
    harness.read("7")
    assert harness.attempt().state is A.RECLAIMING


def test_a_job_that_ended_is_reclaimed_without_a_whole_observation() -> None:
    harness = PartsHarness()
    harness.to_allocated()
    (vm,) = harness.all_vms()
    harness.job(state=JobState.ENDED, result="COMPLETED")
    harness.node(vm.name)
    harness.read("7")
    harness.read("7", nodes=[vm.name])
    assert harness.attempt().state is A.RECLAIMING and harness.all_vms()[0].state is V.RELEASING
    harness.clear()
    harness.read("7", nodes=["mvtest0-99"])
    assert harness.all_vms(), "its own node was not read"
    harness.read("7", nodes=[vm.name])
    assert not harness.rows.vms
    harness.read("7")
    assert harness.attempt().state is A.DONE


def test_a_vm_joins_when_its_node_is_read() -> None:
    harness = PartsHarness()
    harness.to_spawning()
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.RUNNING)
    harness.node(vm.name)
    harness.ended(vm.key)
    harness.read("7")
    assert harness.all_vms()[0].state is V.STARTING
    harness.read(nodes=[vm.name])
    assert harness.all_vms()[0].state is V.JOINED and harness.attempt().state is A.SPAWNED


def test_a_node_did_not_register_in_time_only_if_it_was_read_after_that_time() -> None:
    harness = PartsHarness()
    harness.to_spawning()
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.RUNNING)
    harness.pass_time(POLICY.spawn_timeout + 1)
    harness.read("7")
    assert harness.all_vms()[0].state is V.STARTING
    harness.read(nodes=[vm.name])
    assert harness.all_vms()[0].state is not V.STARTING


def test_the_node_of_an_attempts_vm_is_free_when_its_job_is_read() -> None:
    harness = PartsHarness()
    harness.to_allocated()
    (vm,) = harness.all_vms()
    harness.seen(vm.name, VmCondition.DEAD)
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING
    harness.ended(vm.key)
    harness.node(vm.name, NodeState.DOWN)
    harness.job(state=JobState.PENDING, nodes=(), gated=True, pinned=None)
    harness.read(nodes=[vm.name])
    assert harness.all_vms()[0].state is V.ENDING, "the job may be on it still"
    harness.read("7")
    assert harness.all_vms()[0].state is V.REMOVING


def test_the_node_of_a_spare_is_free_only_when_all_jobs_were_observed() -> None:
    harness = PartsHarness(replace(POLICY, pools=(Pool("slim", Depth.JOINED, 1, 1, Size(1, 100)),)))
    harness.template()
    harness.fill()
    (spare,) = harness.rows.vms.values()
    assert spare.state is V.JOINED
    harness.seen(spare.name, VmCondition.DEAD)
    harness.run()
    assert harness.rows.vms[spare.id].state is V.ENDING
    harness.ended(spare.key)
    harness.read("7", nodes=[spare.name])
    assert harness.rows.vms[spare.id].state is V.ENDING, "any job may have taken it"
    harness.run()
    assert harness.rows.vms[spare.id].state is V.REMOVING
