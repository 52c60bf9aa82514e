"""The sizes of VMs and templates, what they claim of a host, and what empty hosts could hold.

Admission cancels a job that no hosts could ever hold (`could_ever_fit`). A scheduler refuses the same jobs at once and
while no controller runs, by `job_limits`, which are computed in advance. Hosts do not depend on each other: their
numbers of nodes are added up. CPUs, memory and disk each limit the number of a host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from ipaddress import IPv4Network
from typing import NamedTuple

from multiverse.core.capacity_index import HostMap, changed, how_many
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import (
    MOST_NODES,
    OTHER_IMAGES,
    DiskCost,
    EqualHosts,
    Host,
    JobLimit,
    JobLimits,
    KnownHost,
)
from multiverse.core.model.job import Request
from multiverse.core.policy import Policy


class NodeRequest(NamedTuple):
    """A node that is asked for: what it is to declare, and the image and the kind of clone of its VM."""

    size: Size
    image: str
    kind: CloneKind


def allowance(node: Size, policy: Policy) -> int:
    """MiB that a job may write to the disk of a VM whose node declares `node`."""
    return max(policy.scratch, node.disk)


def guest_memory(node: Size, policy: Policy) -> int:
    """MiB for a guest: its node, kernel and daemons, and the page structures of plugged memory (64 bytes a page)."""
    return node.memory + policy.guest_reserve + node.memory // 50


def template_size(node: Size, host: Host, image: str, policy: Policy) -> Size:
    """The size of the template for a node. What the image can plug, the template has as the base. What it cannot plug,
    it has from the start: CPUs as asked for, memory as the next power of two or as much as the host holds."""
    cpus = policy.base.cpus if host.image_can(image, "plug_cpus") else max(node.cpus, policy.base.cpus)
    if host.image_can(image, "plug_memory"):
        return Size(cpus, policy.base.memory)
    wanted, most = guest_memory(node, policy), _most_memory(host)
    shared = max(policy.base.memory, 1 << (wanted - 1).bit_length())
    return Size(cpus, most if wanted <= most < shared else shared)


def serves_as(other: Size, own: Size, host: Host, image: str) -> bool:
    """Whether a template of size `other` serves instead of `own`: up to twice of what the image cannot plug."""

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
    """The size of a VM: memory that its template lacks is plugged in whole blocks; its disk is the allowance."""
    block = host.memory_block
    plugged = -(-max(0, guest_memory(node, policy) - template.memory) // block) * block
    return Size(max(node.cpus, template.cpus), template.memory + plugged, allowance(node, policy), node.net)


def empty_capacity(host: Host) -> Size:
    """What the host can carry at once with nothing on it; no more memory than its machine has."""
    memory, times = host.capacity.memory, host.overcommit
    if times.memory > 1 and host.machine:
        memory = min(memory, host.machine.memory - times.floor)
    return Size(claimable_cpus(host), memory, claimable_disk(host), host.capacity.net)


def claimable_cpus(host: Host) -> int:
    """CPUs that may be claimed there in all; one VM has `host.capacity.cpus` at most."""
    return int(host.capacity.cpus * host.overcommit.cpus)


def claimable_disk(host: Host) -> int:
    return int(host.capacity.disk * host.overcommit.disk)


def claimable(host: Host) -> Size:
    """What may be claimed there in all."""
    memory = int(host.capacity.memory * host.overcommit.memory)
    return Size(claimable_cpus(host), memory, claimable_disk(host), host.capacity.net)


def vm_claim(size: Size, host: Host, image: str, kind: CloneKind) -> Size:
    """What a VM of `size` claims on its host: bandwidth too, as if all its peers were on other hosts."""
    return Size(size.cpus, size.memory + host.vm_overhead, host.disk_cost(image, kind).of(size.disk), size.net)


def parked_claim(host: Host, image: str) -> Size:
    """What a parked VM claims: it is paused, so only what its hypervisor's process needs."""
    return Size(0, host.vm_overhead, host.disk_of(image).overhead)


def template_claim(size: Size, host: Host | None, image: str) -> Size:
    """What a template claims: its memory, as often as it is held there (unknown host: twice), and its disk."""
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
    return host.available_disk is not None and host.available_disk < host.overcommit.disk_floor


def short_of_memory(host: Host) -> bool:
    """Whether memory is over-committed there and the machine has less available than it must keep."""
    return host.overcommit.memory > 1 and 0 < host.available < host.overcommit.floor


# --- what empty hosts could hold --------------------------------------------------------------------


def could_ever_fit(
    wanted: NodeRequest, request: Request, templates: Mapping[str, Size], hosts: Mapping[str, Host], policy: Policy
) -> bool:
    """Whether empty hosts, with the template alone on them, could hold all VMs that are requested."""
    held, count = 0, request.nodes
    if isinstance(templates, HostMap):
        for part in templates.parts:
            if held < count and (each := _held_empty(wanted, part.value, part.kind.host, policy)):
                held += request.most_on_a_host(each) * len(part)
        return held >= count
    each_holds = (_held_empty(wanted, template, hosts[name], policy) for name, template in templates.items())
    return sum(map(request.most_on_a_host, each_holds)) >= count


def _held_empty(wanted: NodeRequest, template: Size, host: Host, policy: Policy) -> int:
    """How many VMs for the node the host could hold with nothing on it but the template."""
    claim = vm_claim(vm_size(wanted.size, template, host, policy), host, wanted.image, wanted.kind)
    if claim.cpus > host.capacity.cpus:
        return 0
    empty, frozen = empty_capacity(host), template_claim(template, host, wanted.image)
    return how_many(claim, changed(empty.amounts, frozen, -1))


def largest_on(host: Host, image: str, policy: Policy, kind: CloneKind = CloneKind.INSTANT) -> Size:
    """The largest node that the host could hold with nothing on it but its template; a template of the base size if it
    boots. An image that is not there is taken to be able to plug everything. Zero memory: not even the smallest."""
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


_PLUG = frozenset({"plug_cpus", "plug_memory"})
_ANY = "any"  # an image's name is not of importance here
_NO_SUBNET = IPv4Network("0.0.0.0/32")  # nor is an address


def job_limits(hosts: Mapping[str, KnownHost], policy: Policy) -> JobLimits | None:
    """What jobs must not exceed, by all known hosts as last observed; None while nothing is known of one."""
    members = [one.value for _, one in sorted(hosts.items()) if one.is_member]
    known = [value for value in members if value is not None]
    if not known or len(known) < len(members):
        return None
    images = sorted({policy.image, *(image for host in known for image in host.images)})
    limits = {image: _limits_of(image, known, policy) for image in (*images, OTHER_IMAGES)}
    return JobLimits(policy.image, policy.kind, limits)


def _limits_of(image: str, all_hosts: Sequence[Host], policy: Policy) -> tuple[JobLimit, ...]:
    """The limits of jobs of an image, by the ways of `kinds.ways_to_make`. An image that is not on a host yet is taken
    to be able to plug everything there, as in admission."""
    instant, linked, full = CloneKind.INSTANT, CloneKind.LINKED, CloneKind.FULL
    ways = {kind: [_hosts_for(kind, image, all_hosts, policy)] for kind in (instant, linked, full)}
    having = [host for host in all_hosts if image in host.images]
    boots = any(linked.value in host.abilities for host in all_hosts)
    if not any(instant.value in host.abilities for host in all_hosts):
        ways[CloneKind.AUTO] = ways[linked if boots else full]
    else:
        booted_now = [_hosts_for(linked, image, having, policy)] if boots and having else []
        ways[CloneKind.AUTO] = [*ways[instant], *booted_now]
    distinct = dict.fromkeys(way for some in ways.values() for way in some)
    return tuple(JobLimit(frozenset(kind for kind in ways if way in ways[kind]), way) for way in distinct)


def _hosts_for(kind: CloneKind, image: str, hosts: Iterable[Host], policy: Policy) -> tuple[EqualHosts, ...]:
    """What hosts could hold of a job in that kind of clones: equal hosts counted, the largest nodes first."""
    counted = Counter(_capacity(host, image, policy, kind) for host in hosts)
    found = [replace(one, count=count) for one, count in counted.items() if one.memory]
    return tuple(sorted(found, key=lambda one: (one.memory[0], one), reverse=True))


class _Shape(NamedTuple):
    """All that decides how much memory each of the nodes of a job could have on an empty host."""

    capacity: Size
    template_copies: int
    memory_block: int
    vm_overhead: int
    plug: frozenset[str]
    forks: bool
    base: Size
    guest_reserve: int


def _capacity(host: Host, image: str, policy: Policy, kind: CloneKind) -> EqualHosts:
    able = host.images.get(image, _PLUG) & _PLUG
    empty = empty_capacity(host)
    costs = (host.template_copies, host.memory_block, host.vm_overhead)
    shape = _Shape(replace(empty, net=0), *costs, able, kind is CloneKind.INSTANT, policy.base, policy.guest_reserve)
    disk = empty.disk - template_claim(policy.base, host, image).disk
    least, overhead = host.disk_cost(image, kind)
    cost = DiskCost(max(least, allowance(Size(0, 0), policy)), overhead)
    smallest = cost.of(0)
    most = 0 if disk < 0 or policy.base.cpus > host.capacity.cpus else disk // smallest if smallest else MOST_NODES
    memory = _memory_of_each(shape)[:most]
    return EqualHosts(1, empty.cpus, max(0, disk), memory, cost, host.capacity.cpus, empty.net)


@lru_cache(maxsize=4096)
def _memory_of_each(shape: _Shape) -> tuple[int, ...]:
    """`EqualHosts.memory` of a host. Cached: it takes 0.1 ms for each number of nodes, and hosts are mostly equal."""
    host = Host(
        "",
        shape.capacity,
        template_copies=shape.template_copies,
        images={_ANY: shape.plug},
        memory_block=shape.memory_block,
        vm_overhead=shape.vm_overhead,
    )
    policy = Policy(_NO_SUBNET, "", base=shape.base, guest_reserve=shape.guest_reserve)

    def fits(memory: int, nodes: int) -> bool:
        node = Size(1, memory)
        template = template_size(node, host, _ANY, policy) if shape.forks else policy.base
        claim = vm_size(node, template, host, policy).memory + host.vm_overhead
        return nodes * claim + template_claim(template, host, _ANY).memory <= shape.capacity.memory

    found: list[int] = []
    above = shape.capacity.memory + 1
    for nodes in range(1, min(shape.capacity.cpus // max(1, shape.base.cpus), MOST_NODES) + 1):
        # What is needed grows with the memory of each node, so the most that fits is found by halving.
        least = 0
        while above - least > 1:
            middle = (least + above) // 2
            least, above = (middle, above) if fits(middle, nodes) else (least, middle)
        if not least:
            break
        found.append(least)
    return tuple(found)
