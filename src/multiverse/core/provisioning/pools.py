"""The warm pools: release spent spares and create missing ones after all queued jobs have been considered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from multiverse.core.model.host import Claim, Host, HypervisorView
from multiverse.core.model.job import Attempt, AttemptState, NodeState
from multiverse.core.model.sizes import CloneKind
from multiverse.core.model.template import TemplateKey, TemplateState
from multiverse.core.model.vm import Offer, Vm, VmState, is_spare
from multiverse.core.model.world import World
from multiverse.core.policy import Policy, Pool
from multiverse.core.provisioning.capacity import Blockage, room_of
from multiverse.core.provisioning.clones import make_vms, makers_of, template_on_its_way
from multiverse.core.provisioning.pacing import wait_for
from multiverse.core.provisioning.sizes import parent_size, short_of_memory
from multiverse.core.provisioning.spares import (
    is_of,
    is_offered,
    may_offer,
    offer,
    release,
    spare_claim,
    spare_size,
    spares,
    too_old,
    withdraw,
)
from multiverse.core.state import PlanState, Rows
from multiverse.core.transition import Change, Event

_MAKING = (VmState.PLANNED, VmState.STARTING)


LAUNCH = 1.0
"""Seconds from a job's running, as Slurm shows it, until its script has begun."""


def reconcile_pools(state: PlanState, world: World, policy: Policy, blockage: Blockage) -> None:
    """Release the spares that are of no use any more, and plan what the pools lack; nothing while jobs wait for room or
    for a turn. Of those that are there, none is on offer to others while jobs wait for room."""
    if world.scheduler is None or world.hypervisor is None:
        return
    hosts = world.hypervisor.value.hosts
    for vm in [vm for _, vm in sorted(state.vms.items()) if is_spare(vm) and vm.unwanted]:
        if vm.state is VmState.JOINED and vm.offer is Offer.CLOSED:
            release(state, vm, vm.unwanted)
    for vm in spares(state):
        if vm.host in hosts and short_of_memory(hosts[vm.host], policy):
            release(state, vm, f"host {vm.host} is short of memory")
    unwanted = {vm.id: vm for vm in spares(state)}
    for pool in policy.pools:
        mine = [vm for vm in unwanted.values() if is_of(vm, pool)]
        for vm in mine:
            del unwanted[vm.id]
        mine = [vm for vm in mine if not _spent(state, vm, pool, world)]
        wanted = wanted_of(pool, world, policy)
        for vm in mine[: max(0, len(mine) - wanted)]:  # the oldest
            release(state, vm, f"its pool keeps {wanted} now")
        if not blockage and len(mine) < wanted and _may_make(state, pool, world):
            _refill(state, pool, wanted - len(mine), world.hypervisor.value, policy)
    for vm in unwanted.values():
        release(state, vm, "no pool of the settings wants it")
    reconcile_offers(state, world, policy, blockage)


def reconcile_offers(state: PlanState, world: World, policy: Policy, blockage: Blockage) -> None:
    for vm in spares(state):
        if vm.offer is Offer.OPEN and blockage is Blockage.ROOM:
            withdraw(state, vm, "jobs wait for room")
        elif vm.offer is Offer.OPEN and not is_offered(vm, policy):
            withdraw(state, vm, "its pool offers none")
        elif vm.offer is Offer.CLOSED and is_offered(vm, policy) and not blockage and not _in_change(state, vm):
            release(state, vm, "it was withdrawn, and nobody took it")  # and another is made and offered
        elif not blockage and may_offer(vm, state, world, policy):
            offer(state, vm)


def _in_change(state: PlanState, spare: Vm) -> bool:
    """Whether another such spare is being made, or on its way out: they are replaced one after the other."""
    changing = (*_MAKING, VmState.PARKED, VmState.RELEASING)
    return any(
        vm.state in changing and vm.attempt is None and (vm.pool, vm.image) == (spare.pool, spare.image)
        for vm in state.vms.values()
    )


def wanted_of(pool: Pool, world: World, policy: Policy) -> int:
    """How many spares the pool is to have now."""
    seconds = policy.takes(pool.image, CloneKind.INSTANT, world.forecast)
    return pool.wanted(world.forecast.arrivals.get(pool.image, 0.0), seconds)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A pool as it stands: how many spares it is to have now, has ready, of these on offer to jobs as they come, and
    has in the making."""

    pool: Pool
    wanted: int
    ready: int
    making: int
    offered: int


def pool_status(rows: Rows, world: World, policy: Policy) -> list[PoolStatus]:
    """Every pool of the settings, in their order."""
    shown = world.scheduler.value.offers if world.scheduler else {}
    found = []
    for pool in policy.pools:
        mine = [vm for vm in spares(rows) if is_of(vm, pool)]
        ready = sum(vm.state.value == pool.depth.value for vm in mine)
        offered = sum(vm.offer is Offer.OPEN and shown.get(vm.name) is False for vm in mine)
        found.append(PoolStatus(pool, wanted_of(pool, world, policy), ready, len(mine) - ready, offered))
    return found


def has_idle_cpus(state: PlanState, host: Host) -> bool:
    """Whether another spare may be made there: not at the cost of jobs that are starting. Half of the machine's CPUs
    are enough for both together, and one of a single pair."""
    cpus = (host.machine or host.capacity).cpus
    at_work = 0
    for vm in state.vms.values():
        attempt = state.attempt_of(vm)
        if vm.host == host.name:
            at_work += _is_starting(attempt, state.now) if attempt is not None else vm.state in _MAKING
    return at_work < max(1, cpus // 2)


def _is_starting(attempt: Attempt, now: float) -> bool:
    """From its admission until its script has begun, which nobody tells us: some time after the job runs."""
    if attempt.state is AttemptState.ALLOCATED:
        return now - attempt.since < LAUNCH
    return attempt.state in (AttemptState.CLAIMED, AttemptState.SPAWNING, AttemptState.SPAWNED)


def _may_make(state: PlanState, pool: Pool, world: World) -> bool:
    """Not while one that failed is on its way out, and then not before its image's rest is over.

    One whose host is out of reach has not failed to come up, and may be there for long."""
    failed = any(
        vm.pool and vm.attempt is None and vm.failed and vm.state is not VmState.LOST and vm.image == pool.image
        for vm in state.vms.values()
    )
    return not failed and state.now >= world.forecast.rest.get(pool.image, 0.0)


def _spent(state: PlanState, vm: Vm, pool: Pool, world: World) -> bool:
    """Release the spare if it is of no use any more, saying why."""
    assert world.scheduler is not None and world.hypervisor is not None
    template = state.template_for(vm.template) if vm.template else None
    node, seen = world.scheduler.value.nodes.get(vm.name), world.hypervisor.value.vms.get(vm.name)
    why = ""
    host = world.hypervisor.value.hosts.get(vm.host)
    if host is not None and vm.image not in host.images:
        why = "its image is gone"
    elif template is None or template.state is not TemplateState.READY:
        why = "its template is gone"
    elif too_old(vm, pool, state.now):
        why = f"it is older than {pool.max_age:g} s"
    elif vm.state in (VmState.PARKED, VmState.JOINED) and seen is not None and seen.reason:
        why = seen.reason  # a daemon has ended in it
    elif vm.state is VmState.JOINED and world.scheduler.began > vm.since and (not node or node.state is NodeState.DOWN):
        why = f"its node is down: {node.reason}" if node else "its node is gone"
    if why:
        release(state, vm, why)
    return bool(why)


def _refill(state: PlanState, pool: Pool, lacking: int, view: HypervisorView, policy: Policy) -> None:
    """Plan as many spares as may be made beside what is being made for jobs: half of a turn, one at least."""
    kind, hosts = CloneKind.INSTANT, view.hosts
    parents = {
        name: parent_size(pool.size, hosts[name], pool.image, policy) for name in makers_of(pool.image, kind, hosts)
    }
    keys = [TemplateKey(name, pool.image, size) for name, size in parents.items()]
    rows = {key: state.template_for(key) for key in keys}
    room = room_of(state, view, policy)
    ready = [key.host for key, row in rows.items() if row is not None and row.state is TemplateState.READY]
    if not ready:
        template_on_its_way(state, rows, hosts, policy, room, "its pool needs it")
        return
    being_made = Counter(vm.attempt is None for vm in state.vms.values() if vm.state in _MAKING)
    turns = policy.provisioning - being_made[False]  # jobs' come first
    may = max(1, turns // 2) - being_made[True] if turns > 0 else 0
    sizes = {name: spare_size(pool, parents[name], policy) for name in ready}
    claims = {name: spare_claim(pool.depth, size, policy) for name, size in sizes.items()}
    for _ in range(min(lacking, may)):
        turn = [
            name
            for name in ready
            if has_idle_cpus(state, hosts[name])
            and not wait_for((name, pool.image, kind), state.paced, state.now, policy)
        ]
        chosen = room.place(1, {name: claims[name] for name in turn})
        vms = make_vms(state, chosen, pool.image, kind, sizes, pool.size, parents, "", policy) if chosen else None
        if vms is None:
            return
        vms = [replace(vm, pool=pool.depth) for vm in vms]
        state.move(
            *(Change(vm, Event.PLANNED, f"for the {pool.depth} pool of {pool.image}") for vm in vms),
            make=(Claim(vm.key, vm.host, claims[vm.host]) for vm in vms),
        )
