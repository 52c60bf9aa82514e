"""What a host reports of its costs and habits decides: the granularity of memory, a VM's overhead, the copies of a
template, and who assigns addresses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multiverse.core.capacity.sizes import template_claim, vm_claim, vm_size
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import ImageDisk
from multiverse.core.model.job import AttemptState, Request
from multiverse.core.model.reason import text_of
from multiverse.core.model.vm import TemplateState, Vm, VmCondition, VmSeen, VmState
from multiverse.core.policy import Pool
from tests.unit.planner_harness import POLICY, PlannerHarness

BOOTS = Request(1, Size(1, 500), kind=CloneKind.FULL)


def harness(**costs: object) -> PlannerHarness:
    """A harness whose host reports these costs."""
    made = PlannerHarness()
    made.hosts["h1"] = replace(made.hosts["h1"], **costs)  # type: ignore[arg-type]
    return made


def cloud() -> PlannerHarness:
    """A host as a cloud shows its quota: it boots VMs, has no templates, and assigns addresses."""
    return harness(abilities=frozenset({"full", "assigns_addresses"}), template_copies=0)


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "memory"), [(128, 640), (512, 768), (1, 590), (1024, 1280)])
def test_memory_is_plugged_in_the_blocks_of_the_host(block: int, memory: int) -> None:
    h = harness(memory_block=block)
    assert vm_size(Size(1, 500), POLICY.base, h.hosts["h1"], POLICY) == Size(1, memory)
    h.to_claimed(size=Size(1, 500))
    (made,) = h.all_vms()
    assert made.size.memory == memory and (memory - POLICY.base.memory) % block == 0


@pytest.mark.parametrize("overhead", [0, 32, 700])
def test_a_vm_claims_the_overhead_of_its_host(overhead: int) -> None:
    h = harness(vm_overhead=overhead)
    h.to_claimed(size=Size(1, 500))
    (made,) = h.all_vms()
    (claim,) = [claim for claim in h.rows.claims if claim.owner == made.key]
    assert (
        claim.size
        == Size(1, made.size.memory + overhead)
        == vm_claim(made.size, h.hosts["h1"], "slim", CloneKind.INSTANT)
    )
    assert claim.domain == "h1"


def test_hosts_beside_each_other_each_have_their_own_costs() -> None:
    h = harness(vm_overhead=0, memory_block=1)
    h.hosts["h2"] = replace(h.hosts["h1"], name="h2", vm_overhead=500, memory_block=1024)
    h.job(request=Request(2, Size(3, 500), kind=CloneKind.FULL))
    h.run()
    claims = {claim.domain: claim.size.memory for claim in h.rows.claims if claim.owner.kind == "vm"}
    assert claims == {"h1": 590, "h2": 1280 + 500}


@pytest.mark.parametrize("overhead", [0, 700])
def test_a_parked_spare_claims_the_overhead_alone(overhead: int) -> None:
    h = harness(vm_overhead=overhead)
    h.policy = replace(POLICY, pools=(Pool("slim", Depth.PARKED, 1, 1, Size(1, 500)),))
    h.template()
    h.fill()
    assert [claim.size for claim in h.rows.claims if claim.owner.kind == "vm"] == [Size(0, overhead)]


@pytest.mark.parametrize(("copies", "claimed"), [(0, 0), (1, 256), (2, 512)])
def test_a_template_claims_each_of_its_copies(copies: int, claimed: int) -> None:
    h = harness(template_copies=copies)
    h.job()
    h.run()
    (template,) = h.rows.templates.values()
    assert template.state is TemplateState.BUILDING
    (claim,) = [claim for claim in h.rows.claims if claim.owner == template.key]
    assert claim.size == Size(0, claimed) == template_claim(template.size, h.hosts["h1"], "slim")


@pytest.mark.parametrize(("copies", "state"), [(0, AttemptState.CLAIMED), (1, AttemptState.REVOKING)])
def test_a_host_without_templates_is_used_to_the_last_mib(copies: int, state: AttemptState) -> None:
    h = cloud()
    whole = vm_claim(vm_size(BOOTS.size, POLICY.base, h.hosts["h1"], POLICY), h.hosts["h1"], "slim", CloneKind.INSTANT)
    h.hosts["h1"] = replace(h.hosts["h1"], capacity=replace(whole, disk=65536), template_copies=copies)
    h.job(request=BOOTS)
    h.run()
    assert h.attempt().state is state


# --- disk -------------------------------------------------------------------------------------------

LIMITED = {"images": {"slim": frozenset({"fork", "plug_cpus", "plug_memory", "limit_disk"})},
           "disks": {"slim": ImageDisk(16388, 400)}}  # fmt: skip


def disk_claims(h: PlannerHarness) -> dict[str, list[int]]:
    """What VMs and templates claim of the disk."""
    return {
        kind: [claim.size.disk for claim in h.rows.claims if claim.owner.kind == kind] for kind in ("vm", "template")
    }


def test_a_job_waits_for_disk_that_other_vms_can_still_write() -> None:
    h = harness(**LIMITED)
    h.policy = replace(POLICY, scratch=2000)
    h.hosts["h1"] = replace(h.hosts["h1"], capacity=Size(8, 16384, 400 + 2400 + 3400 + 2399))
    h.template()
    h.job("7", request=Request(1, Size(1, 100)))
    h.job("8", request=Request(1, Size(1, 100, 3000)))
    h.job("9", request=Request(1, Size(1, 100)))
    h.run()
    assert disk_claims(h) == {"vm": [2400, 3400], "template": [400]}
    assert [h.attempt(n).state for n in (1, 2, 3)] == [*[AttemptState.CLAIMED] * 2, AttemptState.QUEUED]
    assert "the hosts are full" in str(h.state.reasons[3])
    h.hosts["h1"] = replace(h.hosts["h1"], capacity=Size(8, 16384, 400 + 2400 + 3400 + 2400))
    h.run()
    assert h.attempt(3).state is AttemptState.CLAIMED


def test_a_job_that_no_disk_could_hold_is_cancelled_and_told_the_largest() -> None:
    h = harness(**LIMITED)
    h.job(request=Request(1, Size(1, 100, 65536 - 799)))
    h.run()
    assert h.attempt().state is AttemptState.REVOKING
    assert "64736 MiB disk per node" in text_of(h.attempt().reason)


def test_a_parked_spare_claims_disk_of_its_own_size_once_a_job_takes_it() -> None:
    h = harness(**LIMITED)
    h.policy = replace(POLICY, scratch=2000, pools=(Pool("slim", Depth.PARKED, 1, 1, Size(1, 500)),))
    h.template()
    h.fill()
    assert disk_claims(h)["vm"] == [400]
    h.job(request=Request(1, Size(1, 100, 3000)))
    h.run()
    (taken,) = h.all_vms()
    assert taken.size.disk == 3000 and 3400 in disk_claims(h)["vm"]


@pytest.mark.parametrize(("shown", "claimed"), [(16388, 16388), (0, 0)])
def test_a_vm_that_no_record_explains_claims_what_its_host_lets_it_write(shown: int, claimed: int) -> None:
    h = harness(**LIMITED)
    h.vms["mvtest0-900"] = VmSeen(
        "mvtest0-900", "h1", VmCondition.RUNNING, address="10.9.9.9/16", size=Size(1, 512), disk=shown
    )
    h.run()
    assert disk_claims(h)["vm"] == [claimed]


# --- addresses --------------------------------------------------------------------------------------


def test_where_the_hypervisor_assigns_addresses_a_vm_learns_its_own_when_it_exists() -> None:
    h = cloud()
    h.job(request=BOOTS)
    h.run()
    (planned,) = h.all_vms()
    assert planned.state is VmState.PLANNED and (planned.mac, planned.address) == ("", "")
    assert planned.token and planned.place.source == "hosts"
    shown = VmSeen(planned.name, "h1", VmCondition.CREATING, token=planned.token)
    h.vms[planned.name] = shown
    h.run()
    assert h.all_vms() == [planned], "it is still being made"
    h.vms[planned.name] = replace(
        shown, condition=VmCondition.PARKED, address="10.9.1.77/16", mac="fa:16:3e:00:00:01", placed_on="rack-7"
    )
    h.run()
    (made,) = h.all_vms()
    assert made.state is VmState.STARTING
    assert (made.address, made.mac) == ("10.9.1.77/16", "fa:16:3e:00:00:01")
    assert made.host == "h1", "what it claims stays claimed of the quota"


def test_where_the_controller_assigns_addresses_an_observed_one_changes_nothing() -> None:
    h = harness()
    h.job(request=BOOTS)
    h.run()
    (planned,) = h.all_vms()
    assert planned.mac and planned.address
    h.vms[planned.name] = VmSeen(
        planned.name, "h1", VmCondition.PARKED, address="10.9.9.9/16", mac="fa:16:3e:00:00:01", token=planned.token
    )
    h.run()
    (made,) = h.all_vms()
    assert made.state is VmState.STARTING
    assert (made.address, made.mac) == (planned.address, planned.mac)


def test_an_address_that_a_hypervisor_assigned_is_given_to_no_other_vm() -> None:
    h = cloud()
    h.hosts["h2"] = replace(h.hosts["h1"], name="h2", abilities=frozenset({"linked"}))
    h.job(request=BOOTS)
    h.run()
    (first,) = h.all_vms()
    following = f"10.9.1.{first.id + 1}/16"
    h.vms[first.name] = VmSeen(first.name, "h1", VmCondition.PARKED, address=following, token=first.token)
    h.run()
    h.job("8", request=replace(BOOTS, kind=CloneKind.LINKED))
    h.run()
    (second,) = h.all_vms(2)
    assert (second.host, second.address) == ("h2", f"10.9.1.{first.id + 2}/16")


def test_vms_of_a_gang_need_no_free_address_where_the_hypervisor_assigns_them() -> None:
    import ipaddress

    h = cloud()
    h.policy = replace(POLICY, subnet=ipaddress.IPv4Network("10.9.0.0/30"), gateway="10.9.0.1", first_address=2)
    h.job(request=replace(BOOTS, nodes=3))
    h.run()
    assert [(vm.address, vm.state) for vm in h.all_vms()] == [("", VmState.PLANNED)] * 3


def test_a_vm_with_another_token_is_another_vm() -> None:
    h = cloud()
    h.job(request=BOOTS)
    h.run()
    (planned,) = h.all_vms()
    foreign = VmSeen(planned.name, "h1", VmCondition.PARKED, address="10.9.1.77/16", token="0" * 32)
    h.vms[planned.name] = foreign
    h.run()
    assert h.all_vms() == [planned]
    h.vms[planned.name] = replace(foreign, token="")  # its hypervisor keeps none
    h.run()
    (made,) = h.all_vms()
    assert isinstance(made, Vm) and made.address == "10.9.1.77/16"
