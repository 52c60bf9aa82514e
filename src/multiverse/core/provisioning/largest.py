"""What empty hosts could hold, and the largest job that they could."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multiverse.core.free import ByHost, changed, how_many
from multiverse.core.model import CloneKind, Host, Request, Size
from multiverse.core.policy import Policy
from multiverse.core.provisioning.sizes import (
    NodeRequest,
    empty_capacity,
    template_claim,
    template_size,
    vm_claim,
    vm_size,
)


def could_ever_fit(
    wanted: NodeRequest,
    request: Request,
    templates: Mapping[str, Size],
    hosts: Mapping[str, Host],
    policy: Policy,
) -> bool:
    """Whether empty hosts, with nothing on them but the template of that size, could hold all VMs that are requested,
    each for the node that is wanted."""
    held, count = 0, request.nodes
    if isinstance(templates, ByHost):
        for part in templates.parts:
            if held < count and (each := _held_empty(wanted, part.value, part.kind.host, policy)):
                held += request.most_on_a_host(each) * len(part)
        return held >= count
    each_holds = (_held_empty(wanted, template, hosts[name], policy) for name, template in templates.items())
    return sum(map(request.most_on_a_host, each_holds)) >= count


def _held_empty(wanted: NodeRequest, template: Size, host: Host, policy: Policy) -> int:
    """How many VMs for the node the host could hold with nothing on it but the template of that size."""
    claim = vm_claim(vm_size(wanted.size, template, host, policy), host, wanted.image, wanted.kind)
    if claim.cpus > host.capacity.cpus:
        return 0
    empty, frozen = empty_capacity(host), template_claim(template, host, wanted.image)
    return how_many(claim, changed(empty.amounts, frozen, -1))


def largest_on(host: Host, image: str, policy: Policy, kind: CloneKind = CloneKind.INSTANT) -> Size:
    """The largest node that the host could ever hold, with nothing on it but the template that it is forked from or, if
    it boots, a template of the base size. However many CPUs may be claimed together, one node has no more than are
    declared. What an image can do that is not there yet is taken to be everything. Zero memory if not even the smallest
    fits."""
    plugs = {image: frozenset({"plug_cpus", "plug_memory"})}
    able = host if image in host.images else replace(host, images=plugs, disks={})
    capacity = empty_capacity(host)
    disk = capacity.disk - template_claim(policy.base, able, image).disk

    def fits_empty(memory: int) -> bool:
        node = Size(1, memory)
        template = template_size(node, able, image, policy) if kind is CloneKind.INSTANT else policy.base
        claim = vm_claim(vm_size(node, template, able, policy), able, image, kind)
        together = claim.memory + template_claim(template, able, image).memory
        return claim.cpus <= host.capacity.cpus and together <= capacity.memory and claim.disk <= disk

    # What is needed grows with the node's memory, so the largest that fits is found by halving.
    least, most = 0, capacity.memory + 1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits_empty(middle) else (least, middle)
    return Size(host.capacity.cpus, least, max(0, disk - able.disk_cost(image, kind).overhead), capacity.net)
