"""Hosts that the scheduler reserves for maintenance are drained ahead of that: jobs move away, or are saved."""

from __future__ import annotations

from collections.abc import Iterator

from multiverse.core.context import Context
from multiverse.core.machines.host import drain_host, end_drain
from multiverse.core.model.host import Drain
from multiverse.core.model.job import Maintenance
from multiverse.core.model.reason import Why


def follow_maintenance(context: Context) -> None:
    """Drain hosts before the scheduler's reservations of their machines, and end such drains with them. A drain of an
    operator stays. A host that jobs can leave takes all jobs until then, and any other one those that surely end."""
    state, wanted = context.state, dict(_wanted(context))
    for name, maintenance in wanted.items():
        host = state.hosts[name]
        why = Why.MAINTENANCE(name=maintenance.name, begins=maintenance.begins)
        begins = maintenance.begins - context.policy.maintenance_notice
        drain = Drain(begins, str(why), moves=True, saves=True, reservation=maintenance.name)
        if host.is_member and host.drain != drain and (host.drain is None or host.drain.reservation):
            state.move(drain_host(host, drain, why))
    over = [name for name, drain in sorted(state.drains.items()) if drain.reservation and name not in wanted]
    for name in over:
        ended = state.drains[name].reservation
        state.move(end_drain(state.hosts[name], Why.MAINTENANCE_OVER(name=ended)))


def _wanted(context: Context) -> Iterator[tuple[str, Maintenance]]:
    """The hosts whose machines are reserved, each with the reservation that begins first: hosts of the same name, and
    those that are leased on these machines."""
    state = context.state
    if not context.policy.evict_maintenance or not context.scheduler.maintenance:
        return
    leased = {lease.node: lease.name for lease in state.leases.values() if lease.node}
    for one in sorted(context.scheduler.maintenance, key=lambda one: -one.begins):
        if context.now < one.ends:
            soon = one.begins - context.policy.maintenance_notice <= context.now
            for node in one.nodes:
                host = state.hosts.get(leased.get(node, node))
                if host is not None and (soon or not (host.value and (host.value.moves or host.value.storage))):
                    yield host.name, one
