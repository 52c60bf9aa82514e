"""Names and addresses of VMs inside jobs."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network

import pytest

from multiverse.agent.jobs import MOST_JOBS, JobVm
from multiverse.config import JobVmSettings
from multiverse.core.errors import Refused
from multiverse.core.model.identity import mac_of, mac_of_address
from multiverse.drivers.qemu.job_vms import JobAddresses, guest_mac, guest_name

ADDRESSES = JobAddresses(IPv4Network(JobVmSettings().subnet))
VM = JobVm(7, 0, 0, 1000, 0, "slim", 1, 256, 0, "t", "s", (), vms=2, nodes=("a", "b"))


def vms(number: int = 0) -> list[JobVm]:
    """All VMs of a job that has this number on each of its hosts."""
    return [replace(VM, number=number, node=node, index=index) for node in (0, 1) for index in (0, 1)]


def test_the_agents_of_a_jobs_nodes_agree_on_names_and_addresses_whatever_the_job_is_on_their_host() -> None:
    known = {ADDRESSES.peers(replace(vm, number=number)) for number, vm in enumerate(vms())}
    assert known == {tuple((guest_name(7, vm.rank), ADDRESSES.shared(vm.rank)) for vm in vms())}
    assert len({address for _, address in ADDRESSES.peers(VM)}) == 4


def test_no_two_vms_of_a_host_have_an_address_of_it_and_none_has_that_of_the_host() -> None:
    full = [replace(VM, number=number, index=index) for number in range(MOST_JOBS) for index in (0, 63)]
    local = {ADDRESSES.local(vm) for vm in full}
    hosts = {ADDRESSES.host(number) for number in range(MOST_JOBS)}
    assert len(local) == len(full) and len(hosts) == MOST_JOBS
    first, last = map(IPv4Address, ADDRESSES.guests)
    given = [*local, ADDRESSES.shared(0), ADDRESSES.shared(32000)]
    assert all(first <= IPv4Address(address) <= last for address in given)
    assert not any(first <= IPv4Address(address) <= last for address in hosts), (
        "the firewall lets VMs answer their host"
    )
    for vm in full:
        assert IPv4Address(ADDRESSES.local(vm)) in IPv4Network(ADDRESSES.block(vm.number))


def test_both_networks_of_a_vm_are_apart() -> None:
    local = IPv4Network(f"{ADDRESSES.local(VM)}/{ADDRESSES.prefix}", strict=False)
    assert IPv4Address(ADDRESSES.host(MOST_JOBS - 1)) in local and IPv4Address(ADDRESSES.shared(0)) not in local


def test_no_two_vms_have_the_same_mac() -> None:
    found = [guest_mac(job, place) for job in (1, 2, 1 << 16, 0x03FF_FFFF) for place in (0, 1, 0xFFFF)]
    assert len(set(found)) == len(found) and guest_mac(0x03FF_FFFF, 0xFFFF) == "8e:ff:ff:ff:ff:ff"
    others = (mac_of("ab12c", 1 << 28), mac_of_address("10.214.0.2"))
    for mac in found:
        assert int(mac[:2], 16) & 3 == 2, "unicast, and locally administered"
        assert int(mac[:2], 16) > max(int(other[:2], 16) for other in others)


def test_a_job_has_as_many_vms_as_its_network_has_addresses() -> None:
    small = JobAddresses(IPv4Network("10.214.0.0/16"))
    assert small.shared(32765) == "10.214.255.254"
    with pytest.raises(Refused):
        small.shared(32766)
