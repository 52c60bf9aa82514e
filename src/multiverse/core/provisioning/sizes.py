"""The sizes of VMs and templates, and what they claim of a host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multiverse.core.model.host import Host
from multiverse.core.model.sizes import Size
from multiverse.core.policy import Policy

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
    room = empty_host(host, policy).capacity.memory - policy.vm_overhead
    return room // (1 + host.template_copies) // BLOCK * BLOCK


def vm_size(told: Size, parent: Size, policy: Policy) -> Size:
    """The size of a VM whose node is told to have `told`, forked from a template of that size, or as if."""
    plugged = -(-max(0, _memory(told, policy) - parent.memory) // BLOCK) * BLOCK
    return Size(max(told.cpus, parent.cpus), parent.memory + plugged, told.disk)


def empty_host(host: Host, policy: Policy) -> Host:
    """The host as what it can carry at once with nothing on it: where more is claimed than is declared, VMs that start
    have to fit into the machine all the same."""
    if policy.overcommit <= 1 or not host.machine:
        return host
    most = min(host.capacity.memory, host.machine.memory - policy.floor)
    return replace(host, capacity=replace(host.capacity, memory=most))


def vm_claim(size: Size, policy: Policy) -> Size:
    """What a VM of `size` holds on its host."""
    return Size(size.cpus, size.memory + policy.vm_overhead, size.disk)


def template_claim(size: Size, host: Host | None) -> Size:
    """What a template of `size` holds on that host: its frozen memory, as often as it is kept there, and no CPU. Of a
    host that is not in sight the worst is assumed."""
    return Size(0, size.memory * (host.template_copies if host else 2), 0)


def vm_claims(told: Size, parents: Mapping[str, Size], policy: Policy) -> dict[str, Size]:
    """What a VM for `told` would hold on each of these hosts, by the size of its template there."""
    return {host: vm_claim(vm_size(told, parent, policy), policy) for host, parent in parents.items()}


def short_of_memory(host: Host, policy: Policy) -> bool:
    """Whether more may be claimed there than is declared, and its machine has less left than it must keep: nobody new
    starts there then, and what nobody needs now gives way."""
    return policy.overcommit > 1 and 0 < host.available < policy.floor
