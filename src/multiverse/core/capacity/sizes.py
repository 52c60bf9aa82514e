"""The sizes of VMs and templates, and what they claim of a host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from multiverse.core.capacity_index import HostMap
from multiverse.core.model import CloneKind, Host, Size
from multiverse.core.policy import Policy


class NodeRequest(NamedTuple):
    """A node that is asked for: what it is to declare, and the image and the kind of clone of its VM."""

    size: Size
    image: str
    kind: CloneKind


def allowance(node: Size, policy: Policy) -> int:
    """MiB that a job may write to the disk of a VM whose node declares `node`: what its host is made to hold, and what
    its guest's file system shows as available."""
    return max(policy.scratch, node.disk)


def guest_memory(node: Size, policy: Policy) -> int:
    """MiB that a guest needs whose node declares `node`: with room for its kernel and daemons, and for the page
    structures of plugged memory (64 bytes for each page of 4096: 1/64)."""
    return node.memory + policy.guest_reserve + node.memory // 50


def template_size(node: Size, host: Host, image: str, policy: Policy) -> Size:
    """The size of the template that a VM for a node of size `node` is forked from.

    What the image can plug is the base's, and is plugged later. What it cannot plug, the template has from the start:
    CPUs as asked for; memory as the next power of two, so that templates are shared, or as much as the host holds for
    the template and a VM beside it.
    """
    cpus = policy.base.cpus if host.image_can(image, "plug_cpus") else max(node.cpus, policy.base.cpus)
    if host.image_can(image, "plug_memory"):
        return Size(cpus, policy.base.memory)
    wanted, most = guest_memory(node, policy), _most_memory(host)
    shared = max(policy.base.memory, 1 << (wanted - 1).bit_length())
    return Size(cpus, most if wanted <= most < shared else shared)


def serves_as(other: Size, own: Size, host: Host, image: str) -> bool:
    """Whether a template of the size `other` serves where one of the size `own` is meant: of what the image cannot plug
    it may have up to twice as much, as long as the host holds it and a VM of it."""

    def enough(have: int, need: int, ability: str) -> bool:
        return have == need if host.image_can(image, ability) else need <= have <= 2 * need

    return (
        enough(other.cpus, own.cpus, "plug_cpus")
        and enough(other.memory, own.memory, "plug_memory")
        and other.cpus <= host.capacity.cpus
        and other.memory <= max(own.memory, _most_memory(host))
    )


def _most_memory(host: Host) -> int:
    """The most MiB that a template, and a VM of the same size beside it, can have on this host."""
    room = empty_capacity(host).memory - host.vm_overhead
    return room // (1 + host.template_copies) // host.memory_block * host.memory_block


def vm_size(node: Size, template: Size, host: Host, policy: Policy) -> Size:
    """The size of a VM whose node declares `node`: memory that its template lacks is plugged in whole blocks; its disk
    is the job's allowance."""
    block = host.memory_block
    plugged = -(-max(0, guest_memory(node, policy) - template.memory) // block) * block
    return Size(max(node.cpus, template.cpus), template.memory + plugged, allowance(node, policy), node.net)


def empty_capacity(host: Host) -> Size:
    """What the host can carry at once with nothing on it. Where more memory may be claimed than is declared, VMs that
    start have to fit into the machine all the same."""
    memory, times = host.capacity.memory, host.overcommit
    if times.memory > 1 and host.machine:
        memory = min(memory, host.machine.memory - times.floor)
    return Size(claimable_cpus(host), memory, claimable_disk(host), host.capacity.net)


def claimable_cpus(host: Host) -> int:
    """CPUs that may be claimed there in all; one VM has `host.capacity.cpus` at most."""
    return int(host.capacity.cpus * host.overcommit.cpus)


def claimable_disk(host: Host) -> int:
    """MiB of disk that may be claimed there in all."""
    return int(host.capacity.disk * host.overcommit.disk)


def vm_claim(size: Size, host: Host, image: str, kind: CloneKind) -> Size:
    """What a VM of `size` claims on its host: bandwidth too, as if all its peers were on other hosts."""
    return Size(size.cpus, size.memory + host.vm_overhead, host.disk_cost(image, kind).of(size.disk), size.net)


def parked_claim(host: Host, image: str) -> Size:
    """What a parked VM claims on its host. It is paused: it writes to none of its memory and to hardly any of its disk,
    and needs what its hypervisor's process does."""
    return Size(0, host.vm_overhead, host.disk_of(image).overhead)


def template_claim(size: Size, host: Host | None, image: str) -> Size:
    """What a template of `size` claims on its host: its frozen memory, as often as it is held there, what it writes to
    its disk until it is frozen, and no CPU. Of a host that is not in sight the worst is assumed of the memory."""
    return Size(0, size.memory * (host.template_copies if host else 2), host.disk_of(image).overhead if host else 0)


def vm_claims(
    wanted: NodeRequest, templates: Mapping[str, Size], hosts: Mapping[str, Host], policy: Policy
) -> Mapping[str, Size]:
    """What a VM for the node would claim on each host, by the size of its template there."""
    node, image, kind = wanted

    def claim(host: Host, template: Size) -> Size:
        return vm_claim(vm_size(node, template, host, policy), host, image, kind)

    if isinstance(templates, HostMap):
        return templates.map(claim)
    return {name: claim(hosts[name], template) for name, template in templates.items()}


def short_of_disk(host: Host) -> bool:
    """Whether less disk is available there than must be for a VM to be added."""
    return host.available_disk is not None and host.available_disk < host.overcommit.disk_floor


def short_of_memory(host: Host) -> bool:
    """Whether more may be claimed there than is declared, and its machine has less available than it must keep: then no
    VM is added there, and spares are released."""
    return host.overcommit.memory > 1 and 0 < host.available < host.overcommit.floor
