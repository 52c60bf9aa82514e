"""Keeping the warm pools: what is spent is released, what is lacking is made, after all that jobs need."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from multiverse.core.admission import Crowd, make_vms, makers_of, room_of, template_on_its_way
from multiverse.core.lifecycle import Event
from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    Host,
    HypervisorView,
    NodeState,
    Offer,
    TemplateKey,
    TemplateState,
    Vm,
    VmState,
    World,
)
from multiverse.core.pacing import Policy, Pool, wait_for
from multiverse.core.placement import parent_size, short_of_memory
from multiverse.core.pool import (
    is_of,
    is_offered,
    is_spare,
    may_offer,
    offer,
    release,
    spare_claim,
    spare_size,
    spares,
    too_old,
    withdraw,
)
from multiverse.core.rows import Change, Draft, Rows

_MAKING = (VmState.PLANNED, VmState.STARTING)

LAUNCH = 1.0
"""Seconds from a job's running, as Slurm shows it, until its script has begun."""


def keep(draft: Draft, world: World, policy: Policy, crowd: Crowd) -> None:
    """Release the spares that are of no use any more, and plan what the pools lack; nothing while jobs wait for room or
    for a turn. Of those that are there, none is on offer to others while jobs wait for room."""
    if world.scheduler is None or world.hypervisor is None:
        return
    hosts = world.hypervisor.value.hosts
    for vm in [vm for _, vm in sorted(draft.vms.items()) if is_spare(vm) and vm.unwanted]:
        if vm.state is VmState.JOINED and vm.offer is Offer.CLOSED:
            release(draft, vm, vm.unwanted)
    for vm in spares(draft):
        if vm.host in hosts and short_of_memory(hosts[vm.host], policy):
            release(draft, vm, f"host {vm.host} is short of memory")
    unwanted = {vm.id: vm for vm in spares(draft)}
    for pool in policy.pools:
        mine = [vm for vm in unwanted.values() if is_of(vm, pool)]
        for vm in mine:
            del unwanted[vm.id]
        mine = [vm for vm in mine if not _spent(draft, vm, pool, world)]
        wanted = wanted_of(pool, world, policy)
        for vm in mine[: max(0, len(mine) - wanted)]:  # the oldest
            release(draft, vm, f"its pool keeps {wanted} now")
        if not crowd and len(mine) < wanted and _may_make(draft, pool, world):
            _refill(draft, pool, wanted - len(mine), world.hypervisor.value, policy)
    for vm in unwanted.values():
        release(draft, vm, "no pool of the settings wants it")
    _see_to_offers(draft, world, policy, crowd)


def _see_to_offers(draft: Draft, world: World, policy: Policy, crowd: Crowd) -> None:
    for vm in spares(draft):
        if vm.offer is Offer.OPEN and crowd is Crowd.ROOM:
            withdraw(draft, vm, "jobs wait for room")
        elif vm.offer is Offer.OPEN and not is_offered(vm, policy):
            withdraw(draft, vm, "its pool offers none")
        elif vm.offer is Offer.CLOSED and is_offered(vm, policy) and not crowd and not _in_change(draft, vm):
            release(draft, vm, "it was withdrawn, and nobody took it")  # and another is made and offered
        elif not crowd and may_offer(vm, draft, world, policy):
            offer(draft, vm)


def _in_change(draft: Draft, spare: Vm) -> bool:
    """Whether another such spare is being made, or on its way out: they are replaced one after the other."""
    changing = (*_MAKING, VmState.PARKED, VmState.RELEASING)
    return any(
        vm.state in changing and vm.attempt is None and (vm.pool, vm.image) == (spare.pool, spare.image)
        for vm in draft.vms.values()
    )


def wanted_of(pool: Pool, world: World, policy: Policy) -> int:
    """How many spares the pool is to have now."""
    seconds = policy.takes(pool.image, CloneKind.INSTANT, world.forecast)
    return pool.wanted(world.forecast.arrivals.get(pool.image, 0.0), seconds)


@dataclass(frozen=True, slots=True)
class Standing:
    """A pool as it stands: how many spares it is to have now, has ready, of these on offer to jobs as they come, and
    has in the making."""

    pool: Pool
    wanted: int
    ready: int
    making: int
    offered: int


def standing(rows: Rows, world: World, policy: Policy) -> list[Standing]:
    """Every pool of the settings, in their order."""
    shown = world.scheduler.value.offers if world.scheduler else {}
    found = []
    for pool in policy.pools:
        mine = [vm for vm in spares(Draft(rows, 0.0)) if is_of(vm, pool)]
        ready = sum(vm.state.value == pool.depth.value for vm in mine)
        offered = sum(vm.offer is Offer.OPEN and shown.get(vm.name) is False for vm in mine)
        found.append(Standing(pool, wanted_of(pool, world, policy), ready, len(mine) - ready, offered))
    return found


def _has_leisure(draft: Draft, host: Host) -> bool:
    """Whether another spare may be made there: not at the cost of jobs that are starting. Half of the machine's CPUs
    are enough for both together, and one of a single pair."""
    cpus = (host.machine or host.capacity).cpus
    at_work = 0
    for vm in draft.vms.values():
        attempt = draft.attempt_of(vm)
        if vm.host == host.name:
            at_work += _is_starting(attempt, draft.now) if attempt is not None else vm.state in _MAKING
    return at_work < max(1, cpus // 2)


def _is_starting(attempt: Attempt, now: float) -> bool:
    """From its admission until its script has begun, which nobody tells us: some time after the job runs."""
    if attempt.state is AttemptState.ALLOCATED:
        return now - attempt.since < LAUNCH
    return attempt.state in (AttemptState.CLAIMED, AttemptState.SPAWNING, AttemptState.SPAWNED)


def _may_make(draft: Draft, pool: Pool, world: World) -> bool:
    """Not while one that failed is on its way out, and then not before its image's rest is over.

    One whose host is out of reach has not failed to come up, and may be there for long."""
    failed = any(
        vm.pool and vm.attempt is None and vm.failed and vm.state is not VmState.LOST and vm.image == pool.image
        for vm in draft.vms.values()
    )
    return not failed and draft.now >= world.forecast.rest.get(pool.image, 0.0)


def _spent(draft: Draft, vm: Vm, pool: Pool, world: World) -> bool:
    """Release the spare if it is of no use any more, saying why."""
    assert world.scheduler is not None and world.hypervisor is not None
    template = draft.template_for(vm.template) if vm.template else None
    node, seen = world.scheduler.value.nodes.get(vm.name), world.hypervisor.value.vms.get(vm.name)
    why = ""
    host = world.hypervisor.value.hosts.get(vm.host)
    if host is not None and vm.image not in host.images:
        why = "its image is gone"
    elif template is None or template.state is not TemplateState.READY:
        why = "its template is gone"
    elif too_old(vm, pool, draft.now):
        why = f"it is older than {pool.max_age:g} s"
    elif vm.state in (VmState.PARKED, VmState.JOINED) and seen is not None and seen.reason:
        why = seen.reason  # a daemon has ended in it
    elif vm.state is VmState.JOINED and world.scheduler.began > vm.since and (not node or node.state is NodeState.DOWN):
        why = f"its node is down: {node.reason}" if node else "its node is gone"
    if why:
        release(draft, vm, why)
    return bool(why)


def _refill(draft: Draft, pool: Pool, lacking: int, view: HypervisorView, policy: Policy) -> None:
    """Plan as many spares as may be made beside what is being made for jobs: half of a turn, one at least."""
    kind, hosts = CloneKind.INSTANT, view.hosts
    parents = {
        name: parent_size(pool.size, hosts[name], pool.image, policy) for name in makers_of(pool.image, kind, hosts)
    }
    keys = [TemplateKey(name, pool.image, size) for name, size in parents.items()]
    rows = {key: draft.template_for(key) for key in keys}
    room = room_of(draft, view, policy)
    ready = [key.host for key, row in rows.items() if row is not None and row.state is TemplateState.READY]
    if not ready:
        template_on_its_way(draft, rows, hosts, policy, room, "its pool needs it")
        return
    being_made = Counter(vm.attempt is None for vm in draft.vms.values() if vm.state in _MAKING)
    turns = policy.provisioning - being_made[False]  # jobs' come first
    may = max(1, turns // 2) - being_made[True] if turns > 0 else 0
    sizes = {name: spare_size(pool, parents[name], policy) for name in ready}
    claims = {name: spare_claim(pool.depth, size, policy) for name, size in sizes.items()}
    for _ in range(min(lacking, may)):
        turn = [
            name
            for name in ready
            if _has_leisure(draft, hosts[name])
            and not wait_for((name, pool.image, kind), draft.paced, draft.now, policy)
        ]
        chosen = room.place(1, {name: claims[name] for name in turn})
        vms = make_vms(draft, chosen, pool.image, kind, sizes, pool.size, parents, "", policy) if chosen else None
        if vms is None:
            return
        vms = [replace(vm, pool=pool.depth) for vm in vms]
        draft.move(
            *(Change(vm, Event.PLANNED, f"for the {pool.depth} pool of {pool.image}") for vm in vms),
            make=(Claim(vm.key, vm.host, claims[vm.host]) for vm in vms),
        )
