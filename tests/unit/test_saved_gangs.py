"""Saving and resuming a job of several VMs, as the planner decides it: all of them pass a step together, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.errors import Broken, Damaged, Exhausted
from multiverse.core.machines.saved import MOST_TRIES
from multiverse.core.model.basics import Size
from multiverse.core.model.job import AttemptState, JobRef, JobState, NodeState, Request, SaveWish
from multiverse.core.model.saved import SavedSeen, SavedState, Storage
from multiverse.core.model.vm import Stage, Vm, VmCondition, VmState
from multiverse.core.transition import Command, Done, EffectKind
from tests.unit.saved_site import SavedSite
from tests.unit.test_saved_jobs import STORAGE

S, A, V = SavedState, AttemptState, VmState


class Gang(SavedSite):
    """Two hosts that share a storage, and job 7, which runs in two VMs there. Its script runs in the second one."""

    def __init__(self, **job: object) -> None:
        super().__init__()
        self.hosts["h1"] = replace(self.hosts["h1"], storage=STORAGE)
        self.second_host()
        self.to_allocated(**({"nodes": 2} | job))
        self.first = self.serving()
        self.names = [vm.name for vm in self.first]
        self.script = self.names[1]
        self.job(script_node=self.script)
        self.run()

    def serving(self) -> list[Vm]:
        return [vm for vm in self.rows.vms.values() if not vm.leaving]

    def freeze(self, *names: str, frozen: bool = True) -> None:
        for name in names or self.names:
            self.vms[name] = replace(self.vms[name], frozen=frozen)

    def restart(self, number: int) -> None:
        ref = JobRef("7", 500, number)
        self.job(state=JobState.PENDING, ref=ref, nodes=(), script_node="", gated=True, pinned=None)

    def done(self) -> None:
        self.ended(self.saved.key)

    def failed(self, kind: EffectKind, error: Exception) -> None:
        self.run(Done(self.saved.key, kind, str(self.saved.state), error))  # type: ignore[arg-type]

    def write(self, *names: str) -> None:
        for part in self.saved.parts:
            if part.vm_name in (names or self.names):
                name = self.saved.name_of(part)
                self.files[name] = SavedSeen(name, part.token, 40 << 20, STORAGE.name)

    # --- the way of a job that is saved

    def to_preparing(self) -> None:
        self.run(Command("save", job="7"))

    def to_freezing(self) -> None:
        self.to_preparing()
        for name in self.names:
            self.node(name, NodeState.DRAINED)
        self.done()
        self.run()

    def to_cutting(self) -> None:
        self.to_freezing()
        self.freeze()
        self.done()
        self.run()

    def to_writing(self) -> None:
        self.to_cutting()
        self.restart(1)
        self.done()
        self.run()

    def to_stored(self) -> None:
        self.to_writing()
        self.write()
        self.done()
        self.run()

    def to_restored(self) -> None:
        """The rows of the new VMs are planned."""
        self.to_stored()
        for _ in range(4):
            self.run()
            self.clear()
        for _ in range(3):
            self.run()

    def wake(self, vm: Vm) -> None:
        self.seen(vm.name, VmCondition.RUNNING)
        self.freeze(vm.name)
        self.node(vm.name)
        self.ended(vm.key)
        self.run()

    def to_joined(self) -> None:
        self.to_restored()
        for vm in self.serving():
            self.seen(vm.name, VmCondition.PARKED)
            self.ended(vm.key)
        self.run()
        for vm in sorted(self.serving(), key=lambda vm: vm.name != self.script):
            self.wake(vm)
        self.run()

    def to_thawing(self) -> None:
        self.to_joined()
        attempt = self.rows.attempts[max(self.rows.attempts)]
        for name in self.names:
            self.node(name, NodeState.BUSY)
        self.job(state=JobState.RUNNING, nodes=tuple(self.names), gated=False, pinned=attempt.feature)
        self.ended(attempt.key)
        self.run()
        self.run()


@pytest.fixture
def gang() -> Gang:
    return Gang()


def test_all_vms_pass_each_step_together(gang: Gang) -> None:
    gang.to_preparing()
    assert [part.vm_name for part in gang.saved.parts] == [gang.script, gang.names[0]], "the one with the script first"
    one, other = gang.names
    gang.node(one, NodeState.DRAINED)
    gang.run()
    assert gang.saved.state is S.PREPARING
    gang.node(other, NodeState.DRAINED)
    gang.run()
    assert gang.saved.state is S.FREEZING
    gang.freeze(one)
    gang.run()
    assert gang.saved.state is S.FREEZING
    gang.freeze(other)
    gang.run()
    assert gang.saved.state is S.CUTTING
    gang.restart(1)
    gang.run()
    assert gang.saved.state is S.WRITING
    gang.write(one)
    gang.done()
    gang.run()
    assert gang.saved.state is S.WRITING, "one part is nothing"
    assert all(gang.rows.vms[vm.id].state is V.SERVING for vm in gang.first)
    gang.write()
    gang.run()
    assert (gang.saved.state, gang.saved.bytes) == (S.STORED, 80 << 20)
    gang.run()
    assert all(gang.rows.vms[vm.id].state is V.RELEASING for vm in gang.first)


def test_a_vm_that_does_not_freeze_lets_all_go_on(gang: Gang) -> None:
    gang.to_freezing()
    gang.freeze(gang.names[0])
    gang.failed(EffectKind.FREEZE, Broken("it does not stop"))
    assert gang.saved.state is S.UNDOING
    for name in gang.names:
        gang.node(name, NodeState.BUSY)
    gang.done()
    gang.run()
    assert gang.saved.state is S.UNDOING, "one is still frozen"
    gang.freeze(frozen=False)
    gang.run()
    assert not gang.rows.saved and gang.attempt().state is A.ALLOCATED


@pytest.mark.parametrize("lost", [0, 1])
def test_a_vm_that_is_lost_while_the_others_are_written_costs_the_whole_state(gang: Gang, lost: int) -> None:
    gang.to_writing()
    gang.write(gang.names[1 - lost])
    gang.seen(gang.names[lost], VmCondition.DEAD)
    for _ in range(2):
        gang.run()
    assert gang.saved.state is S.HOLDING and gang.saved.ends
    assert f"VM {gang.names[lost]} was lost" in str(gang.saved.reason)


def test_what_cannot_be_written_is_tried_again_and_not_kept_in_memory(gang: Gang) -> None:
    gang.to_writing()
    for number in range(MOST_TRIES + 2):
        gang.failed(EffectKind.SAVE, Exhausted("no space left on device"))
        assert (gang.saved.state, gang.saved.tries) == (S.WRITING, number + 1)
    gang.write()
    gang.done()
    gang.run()
    assert gang.saved.state is S.STORED


def test_a_guest_that_does_not_answer_any_more_costs_the_whole_state(gang: Gang) -> None:
    gang.to_writing()
    for _ in range(MOST_TRIES):
        assert gang.saved.state is S.WRITING
        gang.failed(EffectKind.SAVE, Broken("its guest does not answer"))
    assert gang.saved.state is S.HOLDING and gang.saved.ends


def test_each_vm_is_restored_from_its_part_under_its_name(gang: Gang) -> None:
    gang.to_restored()
    again = {vm.name: vm for vm in gang.serving()}
    assert again.keys() == set(gang.names)
    for vm in gang.first:
        other = again[vm.name]
        assert (other.mac, other.address, other.saved) == (vm.mac, vm.address, f"{vm.name}-{gang.saved.id}")
        assert other.id != vm.id and other.token != vm.token
    assert {vm.attempt for vm in again.values()} == {max(gang.rows.attempts)}


def test_they_are_restored_together_or_not_at_all(gang: Gang) -> None:
    gang.to_stored()
    gang.hosts["h1"] = replace(gang.hosts["h1"], storage=Storage("another", STORAGE.machine))
    gang.hosts["h2"] = replace(gang.hosts["h2"], capacity=Size(1, 8192, 65536))
    for _ in range(7):
        gang.run()
        gang.clear()
    assert gang.rows.attempts[max(gang.rows.attempts)].state is A.QUEUED
    assert not any(vm.saved for vm in gang.rows.vms.values())


def test_the_vm_with_the_script_joins_before_the_others(gang: Gang) -> None:
    """The scheduler starts a script on the node that it has known for longest."""
    gang.to_restored()
    by_name = {vm.name: vm.id for vm in gang.serving()}
    for vm in gang.serving():
        gang.seen(vm.name, VmCondition.PARKED)
        gang.ended(vm.key)
    for _ in range(3):
        gang.run()
    first, other = by_name[gang.script], by_name[gang.names[0]]
    assert (gang.rows.vms[first].state, gang.rows.vms[other].state) == (V.STARTING, V.PARKED)
    gang.wake(gang.rows.vms[first])
    gang.run()
    assert (gang.rows.vms[first].state, gang.rows.vms[other].state) == (V.JOINED, V.STARTING)


def test_the_thaw_is_recorded_once_and_ends_when_all_go_on(gang: Gang) -> None:
    gang.to_thawing()
    assert gang.saved.state is S.THAWING
    gang.done()
    gang.freeze(gang.script, frozen=False)
    gang.run()
    assert gang.saved.state is S.THAWING, "the other one is frozen"
    gang.done()
    gang.freeze(frozen=False)
    gang.run()
    gang.run()
    assert gang.saved.state is S.DISCARDING
    gang.files.popitem()
    gang.done()
    gang.run()
    assert gang.rows.saved, "there are files of one of them"
    gang.files.clear()
    gang.run()
    assert not gang.rows.saved


def test_restored_vms_of_which_one_does_not_go_on_are_all_ended(gang: Gang) -> None:
    gang.to_thawing()
    gang.freeze(gang.script, frozen=False)
    gang.failed(EffectKind.THAW, Broken("its guest does not answer"))
    assert gang.saved.state is S.DISCARDING
    assert all(vm.leaving for vm in gang.rows.vms.values())


def test_a_restored_vm_that_is_lost_before_the_thaw_lets_all_be_restored_once_more(gang: Gang) -> None:
    gang.to_joined()
    gang.seen(gang.names[0], VmCondition.DEAD)
    gang.run()
    gang.run()
    assert gang.saved.state is S.STORED
    assert gang.rows.attempts[max(gang.rows.attempts)].state in (A.RETURNING, A.RECLAIMING)


def test_damage_of_one_part_holds_the_job(gang: Gang) -> None:
    gang.to_restored()
    vm = gang.serving()[1]
    gang.run(Done(vm.key, EffectKind.CREATE, str(vm.state), Damaged("its digest is another")))
    assert gang.saved.state is S.HOLDING and not gang.saved.ends


def test_it_is_refused_while_a_vm_of_it_is_out_of_sight_or_writes_elsewhere(gang: Gang) -> None:
    gang.job(script_node="")
    gang.run(Command("save", job="7"))
    assert "not all of its VMs" in str(gang.state.refusals[-1][1])
    gang.job(script_node=gang.script)
    assert {vm.host for vm in gang.first} <= set(gang.hosts)
    for name in gang.hosts:
        gang.hosts[name] = replace(gang.hosts[name], storage=Storage(f"of {name}", STORAGE.machine))
    gang.run(Command("save", job="7"))
    shared = len({vm.host for vm in gang.first}) == 1
    assert bool(gang.rows.saved) == shared


def test_checkpoints_are_made_of_jobs_of_one_vm(gang: Gang) -> None:
    gang.run(Command("checkpoint", job="7"))
    assert "has 2 VMs" in str(gang.state.refusals[-1][1]) and not gang.rows.saved


def test_it_is_saved_at_its_time_limit() -> None:
    gang = Gang(request=Request(2, Size(1, 100), save=SaveWish(60.0)))
    gang.job(deadline=gang.clock.wall() + 100.0)
    gang.pass_time(60.0)
    gang.run()
    assert gang.saved.state is S.PREPARING and len(gang.saved.parts) == 2


def test_how_far_apart_its_vms_were_frozen_is_kept(gang: Gang) -> None:
    gang.to_freezing()
    key, state = gang.saved.key, str(gang.saved.state)
    gang.freeze()
    gang.run(Done(key, EffectKind.FREEZE, state, stages=(Stage("spread", 0.02),)))
    assert (gang.saved.state, gang.saved.spread) == (S.CUTTING, 0.02)
