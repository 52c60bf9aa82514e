"""Spares of the warm pools: VMs made before any job asks for them, each taken by one job and never given back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from multiverse.core.model.job import Attempt, NodeSpec, NodeState
from multiverse.core.model.sizes import CloneKind, Depth, Size
from multiverse.core.model.vm import Offer, Vm, VmCondition, VmState, is_spare
from multiverse.core.model.world import World
from multiverse.core.policy import Policy, Pool
from multiverse.core.provisioning.capacity import Room
from multiverse.core.provisioning.sizes import vm_claim, vm_size
from multiverse.core.state import PlanState, Rows
from multiverse.core.transition import Change, Event

Taken = tuple[Vm, Size]
"""A spare as it serves, and what it claims more than before."""


WITHDRAWN = 2.0
"""Seconds that a job waits for a spare to be withdrawn from others; then it is given another VM."""


_LIVE = (VmState.PLANNED, VmState.PARKED, VmState.STARTING, VmState.JOINED)


def spares(state: PlanState | Rows, depth: Depth | None = None) -> list[Vm]:
    """The pool's VMs that serve nobody yet, are not on their way out, and were not taken by a job on its way, by
    serial."""
    return [
        vm
        for _, vm in sorted(state.vms.items())
        if is_spare(vm) and depth in (None, vm.pool) and vm.state in _LIVE
        if not vm.unwanted and vm.offer is not Offer.TAKEN
    ]


def spare_size(pool: Pool, parent: Size, policy: Policy) -> Size:
    """The size that a pool's VM is made with, forked from a template of the size `parent`."""
    return parent if pool.depth is Depth.PARKED else vm_size(pool.size, parent, policy)


def spare_claim(depth: Depth, size: Size, policy: Policy) -> Size:
    """What a spare of `size` holds. A parked one is paused: it writes to none of its memory, and needs what QEMU
    itself does."""
    return vm_claim(Size(0, 0, 0) if depth is Depth.PARKED else size, policy)


def joined_for(
    state: PlanState, attempt: Attempt, image: str, world: World, policy: Policy, promised: Collection[int] = ()
) -> Vm | None:
    """The joined spare that fits best: as many CPUs as asked for, no more memory than must be, and not on offer to
    others if there is another. None of those that are `promised` to jobs before this."""
    assert world.scheduler is not None
    request, nodes = attempt.request, world.scheduler.value.nodes
    if request.nodes != 1:
        return None  # VMs of one job are tied to it by one feature, and know each other from their start
    fit = [
        vm
        for vm in spares(state, Depth.JOINED)
        if vm.state is VmState.JOINED and vm.image == image and vm.account == request.account
        if vm.id not in promised and not (vm.offer is Offer.CLOSING and state.now - vm.offered > WITHDRAWN)
        if vm.told.cpus == request.size.cpus and vm.told.memory >= request.size.memory
        if vm.told.disk >= request.size.disk and set(request.features) <= {image, CloneKind.INSTANT, CloneKind.AUTO}
        if vm.name in nodes and nodes[vm.name].state is NodeState.IDLE and fit_to_serve(vm, state, world, policy)
    ]
    return min(fit, key=lambda vm: (vm.told.memory, vm.offer is Offer.OPEN, vm.id), default=None)


def parked_for(state: PlanState, attempt: Attempt, image: str, parents: Mapping[str, Size], room: Room, world: World,
               policy: Policy) -> list[Taken]:  # fmt: skip
    """Parked spares that can become the attempt's VMs where they are, on the emptiest hosts first, and no more than it
    needs. Takes the room that they come to need."""
    found: list[Taken] = []
    if not policy.pools:
        return found
    left = [vm for vm in spares(state, Depth.PARKED) if vm.state is VmState.PARKED and vm.image == image]
    left = [vm for vm in left if vm.account == attempt.request.account and vm.parent == parents.get(vm.host)]
    left = [vm for vm in left if vm.host in room.free and fit_to_serve(vm, state, world, policy)]
    while left and len(found) < attempt.request.nodes:
        left.sort(key=lambda vm: (-room.free[vm.host][0], -room.free[vm.host][1], vm.id))
        vm = left.pop(0)
        size = vm_size(attempt.request.size, parents[vm.host], policy)
        more = _less(vm_claim(size, policy), spare_claim(Depth.PARKED, size, policy))
        if room.fits(vm.host, more):
            room.take(vm.host, more)
            found.append((replace(vm, attempt=attempt.id, size=size, told=attempt.request.size), more))
    return found


def give_back(taken: list[Taken], room: Room) -> None:
    """Undo what `parked_for` took of the room."""
    for vm, more in taken:
        room.give(vm.host, more)


def _less(one: Size, other: Size) -> Size:
    return Size(one.cpus - other.cpus, one.memory - other.memory, one.disk - other.disk)


def fit_to_serve(vm: Vm, state: PlanState, world: World, policy: Policy) -> bool:
    """Whether a spare may still become a job's: it lives, nothing in it has failed, and it is not older than its pool
    lets it be, though nobody has had the time to release it."""
    assert world.hypervisor is not None
    seen = world.hypervisor.value.vms.get(vm.name)
    well = seen is not None and seen.condition in (VmCondition.PARKED, VmCondition.RUNNING) and not seen.reason
    return well and not any(too_old(vm, pool, state.now) for pool in policy.pools if is_of(vm, pool))


def is_of(vm: Vm, pool: Pool) -> bool:
    """Whether the VM is such a one as the pool keeps."""
    same = vm.image == pool.image and vm.pool is pool.depth
    return same and (pool.depth is Depth.PARKED or vm.told == pool.size)


def too_old(vm: Vm, pool: Pool, now: float) -> bool:
    return vm.state in (VmState.PARKED, VmState.JOINED) and now - vm.since > pool.max_age


def node_spec(vm: Vm, attempt: Attempt | None) -> NodeSpec:
    """The VM as a node. It offers its features to its attempt's job alone or, as a spare, to whichever job takes it."""
    if attempt is not None:
        features: tuple[str, ...] = (*attempt.request.features, attempt.feature)
    else:
        features = (vm.image, CloneKind.INSTANT.value, CloneKind.AUTO.value, vm.feature)
    return NodeSpec(
        name=vm.name,
        address=vm.address,
        size=vm.told,
        features=features,
        tag=attempt.feature if attempt is not None else vm.feature,
        image=vm.image,
        account=vm.account,
        spare=attempt is None,
    )


def release(state: PlanState, vm: Vm, why: str) -> None:
    """Plan the end of a spare. No job ever had its node, so the node may be deleted at once; but not while one may
    take it yet."""
    if vm.offer in (Offer.OPEN, Offer.CLOSING):
        withdraw(state, replace(vm, unwanted=why), why)
    else:
        state.move(Change(replace(vm, state=VmState.RELEASING, reason=why, forget=True), Event.RELEASED, why))


def may_offer(vm: Vm, state: PlanState, world: World, policy: Policy) -> bool:
    """Whether a joined spare may be offered to jobs as they come: it never was, is an idle node, and fit to serve."""
    assert world.scheduler is not None
    node = world.scheduler.value.nodes.get(vm.name)
    ready = vm.state is VmState.JOINED and vm.offer is None and node is not None and node.state is NodeState.IDLE
    return ready and is_offered(vm, policy) and fit_to_serve(vm, state, world, policy)


def is_offered(vm: Vm, policy: Policy) -> bool:
    """Whether a pool of the settings offers such as this."""
    return any(pool.offer for pool in policy.pools if is_of(vm, pool))


def named_by_none(image: str, default: str, kind: CloneKind) -> tuple[bool, bool]:
    """Whether jobs that name no image, and those that name no kind of clone, are served by an instant clone of `image`,
    where these are the site's defaults."""
    return image == default, kind in (CloneKind.INSTANT, CloneKind.AUTO)


def offer(state: PlanState, vm: Vm) -> None:
    """Let a job that comes take it by itself."""
    state.move(Change(replace(vm, offer=Offer.OPEN, offered=state.now), Event.NOTED, "offered to jobs as they come"))


def withdraw(state: PlanState, vm: Vm, why: str) -> None:
    """Plan that no job may take it by itself any more. It counts as withdrawn only when a look shows it."""
    state.move(Change(replace(vm, offer=Offer.CLOSING, offered=state.now), Event.NOTED, f"no longer offered: {why}"))
