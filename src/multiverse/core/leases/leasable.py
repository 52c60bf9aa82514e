"""What the hosts would have that could be leased, and which jobs could be on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from multiverse.core.capacity.sizes import empty_capacity, template_claim, template_size, vm_claim, vm_size
from multiverse.core.capacity.usable_hosts import may_be_preempted, surely_ends_by
from multiverse.core.capacity_index import changed, how_many
from multiverse.core.context import Context
from multiverse.core.model import OPEN_LEASES, Attempt, CloneKind, Host, KnownHost, Size
from multiverse.core.policy import LeasePolicy, Policy

STARTUP = 60.0
"""Seconds, beyond the limit of a pilot's start, that a job's first VM on a new host may take: its template is built
first. A job that would not fit into a lease then is no reason to take one."""

ENOUGH = 1 << 30
"""MiB of disk, and Mbit/s of bandwidth, that a host is taken to have of which nobody knows that yet."""


def leasable_host(context: Context, lease: LeasePolicy) -> Host | None:
    """A host as it would be leased. What hosts of that partition have shown is true of the next; before there was one,
    it has the CPUs and the memory of its node, can do everything, and costs nothing beside. None while nobody knows
    what the partition's nodes have."""
    for one in context.state.leases_in(*OPEN_LEASES):
        known = context.state.hosts.get(one.name)
        if one.spec.partition == lease.partition and known is not None and known.value is not None:
            return known.value
    scheduler = context.world.scheduler
    return declared_host(lease, scheduler.value.leasable) if scheduler is not None else None


def declared_host(lease: LeasePolicy, leasable: Mapping[str, Size]) -> Host | None:
    """What a host that would be leased has, by what the scheduler tells of the partition's nodes."""
    node = leasable.get(lease.partition)
    if node is None:
        return None
    cpus, memory = lease.size.cpus or node.cpus, lease.size.memory or node.memory
    kinds = frozenset(kind.value for kind in CloneKind)
    return Host(lease.partition, Size(cpus, memory, ENOUGH, ENOUGH), kinds, memory_block=1, vm_overhead=0)


def leasable_hosts(leasable: Mapping[str, Size], policy: Policy) -> dict[str, KnownHost]:
    """All hosts that could be leased at the same time, by names that no host has, for what is refused at submission."""
    found = {}
    for lease in policy.leases:
        if (host := declared_host(lease, leasable)) is not None:
            for number in range(lease.most):
                name = f"{lease.partition}/{number}"
                found[name] = KnownHost(name, "", value=replace(host, name=name))
    return found


def may_use(context: Context, attempt: Attempt, lease: LeasePolicy) -> bool:
    """Whether the attempt's job would be on a host that was leased now, whatever its size."""
    if not (lease.preemptable_ok or may_be_preempted(context, attempt)):
        return False
    takes = surely_ends_by(context, attempt) - context.now
    return takes + lease.start_timeout + STARTUP <= lease.time_limit


def claims_there(context: Context, attempt: Attempt, host: Host) -> tuple[Size, Size]:
    """What one VM of the attempt claims on the host, and its template beside it: nothing for one that boots."""
    policy, image, node = context.policy, context.image_of(attempt), attempt.request.size
    asked = attempt.request.kind or policy.kind
    kind = CloneKind.INSTANT if asked is CloneKind.AUTO else asked
    able = host
    if image not in host.images:  # it is copied there
        able = replace(host, images={image: frozenset({"fork", "plug_cpus", "plug_memory", "limit_disk"})})
    template = template_size(node, able, image, policy) if kind is CloneKind.INSTANT else policy.base
    claim = vm_claim(vm_size(node, template, able, policy), able, image, kind)
    frozen = template_claim(template, able, image) if kind is CloneKind.INSTANT else Size(0, 0)
    return claim, frozen


def fits_on_leases(context: Context, attempt: Attempt) -> bool:
    """Whether hosts that can be leased could hold the job, were as many leased as may be."""
    held = 0
    for lease, host in usable_leases(context, attempt):
        claim, frozen = claims_there(context, attempt, host)
        if claim.cpus <= host.capacity.cpus:
            each = how_many(claim, changed(empty_capacity(host).amounts, frozen, -1))
            held += lease.most * attempt.request.most_on_a_host(each)
    return held >= attempt.request.nodes


def usable_leases(context: Context, attempt: Attempt) -> Iterator[tuple[LeasePolicy, Host]]:
    """Of what can be leased, what the attempt's job could be on, in the order of the settings."""
    for lease in context.policy.leases:
        if may_use(context, attempt, lease) and (host := leasable_host(context, lease)) is not None:
            yield lease, host
