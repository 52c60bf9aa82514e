"""Which host: sizes, free capacity, and the choice among the hosts that fit."""

from __future__ import annotations

import ipaddress
import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from multiverse.core.model import Claim, Host, Key, Size, Template, Vm
from multiverse.core.pacing import Policy

BLOCK = 128
"""MiB: x86 Linux plugs memory in blocks of this size (DESIGN, section 5)."""


def _memory(told: Size, policy: Policy) -> int:
    """What a VM needs whose node is told to have `told`: with room for the guest's kernel and daemons, and for the
    page structures of plugged memory (64 bytes for each page of 4096: 1/64)."""
    return told.memory + policy.guest_reserve + told.memory // 50


def parent_size(told: Size, host: Host, image: str, policy: Policy) -> Size:
    """The size of the template that a VM for `told` is forked from. What the image can plug is the base's, and
    plugged later. What it cannot, the template has from the start: CPUs as asked; memory as the next power of two,
    so that templates are shared, or as much as the host holds for the template and for a VM beside it."""
    cpus = policy.base.cpus if host.image_can(image, "plug_cpus") else max(told.cpus, policy.base.cpus)
    if host.image_can(image, "plug_memory"):
        return Size(cpus, policy.base.memory)
    wanted, most = _memory(told, policy), _most_memory(host, policy)
    shared = max(policy.base.memory, 1 << (wanted - 1).bit_length())
    return Size(cpus, most if wanted <= most < shared else shared)


def serves_as(other: Size, own: Size, host: Host, image: str, policy: Policy) -> bool:
    """Whether a template of the size `other` will do where one of the size `own` is meant: of what the image cannot
    plug it may have up to twice as much, while the host holds it and a VM of it."""

    def enough(have: int, need: int, ability: str) -> bool:
        return have == need if host.image_can(image, ability) else need <= have <= 2 * need

    return (
        enough(other.cpus, own.cpus, "plug_cpus")
        and enough(other.memory, own.memory, "plug_memory")
        and other.cpus <= host.capacity.cpus
        and other.memory <= max(own.memory, _most_memory(host, policy))
    )


def _most_memory(host: Host, policy: Policy) -> int:
    """The most that a template, and a VM of the same size beside it, can have on this host."""
    room = _empty(host, policy).capacity.memory - policy.vm_overhead
    return room // (1 + host.template_copies) // BLOCK * BLOCK


def vm_size(told: Size, parent: Size, policy: Policy) -> Size:
    """The size of a VM whose node is told to have `told`, forked from a template of that size, or as if."""
    plugged = -(-max(0, _memory(told, policy) - parent.memory) // BLOCK) * BLOCK
    return Size(max(told.cpus, parent.cpus), parent.memory + plugged, told.disk)


def vm_claim(size: Size, policy: Policy) -> Size:
    """What a VM of `size` holds on its host."""
    return Size(size.cpus, size.memory + policy.vm_overhead, size.disk)


def template_claim(size: Size, host: Host | None) -> Size:
    """What a template of `size` holds on that host: its frozen memory, as often as it is kept there, and no CPU. Of a
    host that is not in sight the worst is assumed."""
    return Size(0, size.memory * (host.template_copies if host else 2), 0)


def left_behind(vms: Iterable[Vm], templates: Mapping[int, Template]) -> list[Claim]:
    """What templates hold whose rows are gone, for they were dropped or their image was built anew: their VMs map
    their memory to the end, which is there once then, however often a template is held."""
    gone = {
        vm.origin: Claim(Key("template", vm.origin), vm.host, Size(0, vm.parent.memory, 0))
        for vm in vms
        if vm.origin is not None and vm.parent and vm.origin not in templates
    }
    return [claim for _, claim in sorted(gone.items())]


def short_of_memory(host: Host, policy: Policy) -> bool:
    """Whether more may be claimed there than is declared, and its machine has less left than it must keep: nobody new
    starts there then, and what nobody needs now gives way."""
    return policy.overcommit > 1 and 0 < host.available < policy.floor


def yet_to_come(claim: Size, held: float, policy: Policy, *, settled: bool) -> int:
    """MiB that whoever holds a claim may yet take, beside the `held` that he has: the rest of it; one that has settled
    is taken to stay as he is, within a quarter."""
    rest = max(0, math.ceil(claim.memory - held))
    return min(rest, math.ceil(held / 4)) if settled else rest


class Room:
    """What is free on each host, while one pass takes from it and gives back. `tight` are the hosts whose machine has
    less left than could be claimed."""

    def __init__(self, hosts: Mapping[str, Host], claims: Iterable[Claim]) -> None:
        self.free = {name: [h.capacity.cpus, h.capacity.memory, h.capacity.disk] for name, h in hosts.items()}
        self.tight: set[str] = set()
        for claim in claims:
            self.take(claim.host, claim.size)

    def overcommit(self, host: Host, coming: int, policy: Policy) -> None:
        """Let more be claimed there than is declared, while its machine has it, when all has come that is yet to come
        and above what it must keep. Not where nobody knows what the machine has."""
        if policy.overcommit > 1 and host.available > 0:
            free = self.free[host.name]
            free[1] += int(host.capacity.memory * (policy.overcommit - 1))
            left = host.available - policy.floor - coming
            if left < free[1]:
                free[1] = left
                self.tight.add(host.name)

    def lack_memory(self, claims: Mapping[str, Size]) -> list[str]:
        """Hosts that would fit what is to be claimed there, but for the memory that their machine has left."""
        return [
            name
            for name, claim in claims.items()
            if name in self.tight
            and claim.memory > self.free[name][1]
            and self.fits(name, replace(claim, memory=self.free[name][1]))
        ]

    def take(self, host: str, size: Size) -> None:
        self._add(host, size, -1)

    def give(self, host: str, size: Size) -> None:
        self._add(host, size, 1)

    def _add(self, host: str, size: Size, sign: int) -> None:
        if host in self.free:
            free = self.free[host]
            free[0] += sign * size.cpus
            free[1] += sign * size.memory
            free[2] += sign * size.disk

    def fits(self, host: str, size: Size) -> bool:
        cpus, memory, disk = self.free[host]
        return size.cpus <= cpus and size.memory <= memory and size.disk <= disk

    def place(self, count: int, claims: Mapping[str, Size]) -> list[str] | None:
        """Hosts for `count` VMs, each with what it would claim there, all or none; takes the room. The emptiest
        host first, by free CPUs, then memory, then name, so that equals are decided alike in every run."""
        chosen: list[str] = []
        for _ in range(count):
            fitting = [h for h, claim in claims.items() if h in self.free and self.fits(h, claim)]
            if not fitting:
                for host in chosen:
                    self.give(host, claims[host])
                return None
            best = min(fitting, key=lambda h: (-self.free[h][0], -self.free[h][1], h))
            self.take(best, claims[best])
            chosen.append(best)
        return chosen


def largest(hosts: Mapping[str, Host], image: str, policy: Policy) -> Size:
    """The largest request that an empty host could serve: what to tell whoever asked for more. Zero
    without hosts. The host with the most memory is named, then the one with the most CPUs."""
    if not hosts:
        return Size(0, 0)
    empty = (_empty(host, policy) for host in hosts.values())
    host = max(empty, key=lambda h: (h.capacity.memory, h.capacity.cpus))
    best = host.capacity
    # vm_size() backwards: blocks of memory that fit, less the reserve and the page structures.
    room = best.memory - policy.vm_overhead - template_claim(policy.base, host).memory
    whole = policy.base.memory + (room - policy.base.memory) // BLOCK * BLOCK
    if image in host.images and not host.image_can(image, "plug_memory"):
        whole = _most_memory(host, policy)
    told = max(0, (whole - policy.guest_reserve) * 50 // 51)
    return Size(best.cpus, told, best.disk)


def _empty(host: Host, policy: Policy) -> Host:
    """The host as what it can carry at once with nothing on it: where more is claimed than is declared, VMs that start
    have to fit into the machine all the same."""
    if policy.overcommit <= 1 or not host.machine:
        return host
    most = min(host.capacity.memory, host.machine.memory - policy.floor)
    return replace(host, capacity=replace(host.capacity, memory=most))


def could_ever_fit(
    told: Size, count: int, parents: Mapping[str, Size], hosts: Mapping[str, Host], policy: Policy
) -> bool:
    """Whether empty hosts, with nothing on them but the template of that size, could hold the request."""
    room = Room({name: _empty(host, policy) for name, host in hosts.items()}, ())
    for name, parent in parents.items():
        room.take(name, template_claim(parent, hosts[name]))
    return room.place(count, vm_claims(told, parents, policy)) is not None


def vm_claims(told: Size, parents: Mapping[str, Size], policy: Policy) -> dict[str, Size]:
    """What a VM for `told` would hold on each of these hosts, by the size of its template there."""
    return {host: vm_claim(vm_size(told, parent, policy), policy) for host, parent in parents.items()}


def mac_of(site: str, serial: int) -> str:
    """A locally administered MAC address of this site's own: 16 bits of the site, 24 of the serial."""
    tail = (zlib.crc32(site.encode()) & 0xFFFF).to_bytes(2, "big") + (serial & 0xFFFFFF).to_bytes(3, "big")
    return ":".join(f"{byte:02x}" for byte in (0x02, *tail))


def address_of(serial: int, used: Collection[str], policy: Policy) -> str | None:
    """An address with its prefix length for the VM `serial`; None if all are in use. Neighbouring
    serials get neighbouring addresses, and one comes back only after all others: a peer's stale
    ARP entry for it has long expired by then."""
    net = policy.subnet
    span = net.num_addresses - 1 - policy.first_address
    for step in range(span):
        candidate = net.network_address + policy.first_address + (serial + step) % span
        text = f"{candidate}/{net.prefixlen}"
        if text not in used and candidate != ipaddress.IPv4Address(policy.gateway):
            return text
    return None
