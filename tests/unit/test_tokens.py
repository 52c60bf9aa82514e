"""Tokens of VMs: a VM that another database made under the same name is never taken for the row's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.model.identity import token_of
from multiverse.core.model.job import AttemptState
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from tests.unit.planner_harness import PlannerHarness
from tests.unit.rows import SOURCE

A, V = AttemptState, VmState


class EntropyHarness(PlannerHarness):
    """A harness whose passes have entropy of their own, as the controller's have."""

    def __init__(self, entropy: str) -> None:
        super().__init__()
        self.entropy = entropy

    def observe(self) -> None:
        super().observe()
        self.world = replace(self.world, entropy=f"{self.entropy}/{self.clock.time}")


def planned(entropy: str) -> tuple[EntropyHarness, Vm]:
    harness = EntropyHarness(entropy)
    harness.to_claimed()
    (vm,) = harness.all_vms()
    return harness, vm


def test_two_databases_with_the_same_serials_make_different_tokens() -> None:
    (_, one), (_, other) = planned("one"), planned("other")
    assert (one.id, one.name, one.mac, one.address) == (other.id, other.name, other.mac, other.address)
    assert one.token != other.token
    assert len(one.token) == 32 and int(one.token, 16)


def test_the_vms_of_one_pass_have_different_tokens_and_a_vm_keeps_its_token() -> None:
    harness = EntropyHarness("one")
    harness.to_claimed(nodes=3)
    before = [vm.token for vm in harness.all_vms()]
    assert len(set(before)) == 3
    for vm in harness.all_vms():
        harness.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.PARKED, token=vm.token)
    harness.run()
    assert [vm.state for vm in harness.all_vms()] == [V.STARTING] * 3
    assert [vm.token for vm in harness.all_vms()] == before


def test_a_token_is_a_function_of_the_entropy_and_the_serial() -> None:
    tokens = {token_of(entropy, serial) for entropy in ("a", "b", "a/1") for serial in (1, 2, 11)}
    assert len(tokens) == 9 and token_of("a", 1) == token_of("a", 1)


@pytest.mark.parametrize("token", ["another", None])
def test_a_vm_with_another_token_is_not_taken_for_the_rows(token: str | None) -> None:
    """None: the VM that was shown has the row's token."""
    harness, vm = planned("one")
    shown = vm.token if token is None else token
    harness.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.PARKED, token=shown)
    harness.run()
    (after,) = harness.all_vms()
    assert after.state is (V.STARTING if token is None else V.PLANNED)
    assert (harness.world.vm(after) is not None) is (token is None)


def test_a_serving_vm_of_which_only_one_with_another_token_is_shown_is_absent() -> None:
    harness = EntropyHarness("one")
    harness.to_allocated()
    (vm,) = harness.all_vms()
    harness.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.RUNNING, token="another")
    harness.run()
    assert harness.all_vms()[0].state is V.ENDING and text_of(harness.all_vms()[0].reason) == "the VM died"
    assert harness.attempt().state is A.ALLOCATED, "the scheduler decides about the job"


def test_the_row_of_a_vm_gives_way_to_that_of_another_vm_of_its_name() -> None:
    """Its name and address are in use, and memory of its host is claimed, until the other VM is gone too."""
    harness, vm = planned("one")
    del harness.jobs["7"]
    harness.run()
    harness.run()
    other = VmSeen(vm.name, "h1", VmCondition.RUNNING, token="another", address=vm.address, mac=vm.mac)
    harness.vms[vm.name] = other
    harness.ended(vm.key)
    harness.run()
    assert harness.all_vms()[0].state is V.GONE
    (found,) = harness.rows.vms.values()
    assert (found.name, found.token, found.state) == (vm.name, "another", V.ORPHAN)
    assert vm.address in harness.state.addresses and found.key in [one.owner for one in harness.rows.claims]
    for _ in range(3):
        harness.clear()
        harness.run()
    assert not harness.rows.vms and vm.address not in harness.state.addresses


def test_a_vm_without_a_token_is_of_a_release_that_had_none() -> None:
    harness, vm = planned("one")
    harness.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.PARKED)
    harness.run()
    assert harness.all_vms()[0].state is V.STARTING


def test_a_vm_is_shown_by_its_own_source_only() -> None:
    harness, vm = planned("one")
    harness.vms[vm.name] = VmSeen(vm.name, "h1", VmCondition.PARKED, token=vm.token)
    harness.observe()
    assert vm.place.source == SOURCE and harness.world.vm(vm) is not None
    assert harness.world.vm(replace(vm, places=(replace(vm.place, source="another"),))) is None
