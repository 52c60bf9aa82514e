"""Spares of the warm pools: VMs made before any job asks for them, each taken by one job and never given back.

A *parked* spare is restored and paused: it takes any size and identity later, and uses hardly any memory until then. A
*joined* spare is an idle node of one size: a job that fits is tied to it at once, by the VM's own tag. Spares give way
to whatever needs their memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from multiverse.core.capacity.room import Room
from multiverse.core.capacity.sizes import parked_claim, vm_claim, vm_size
from multiverse.core.context import Context
from multiverse.core.machines.offer import withdraw_offer
from multiverse.core.machines.vm import release_vm, retire_vm
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import Attempt, NodeSpec, NodeState
from multiverse.core.model.reason import Reason
from multiverse.core.model.vm import OfferState, Vm, VmCondition, VmState
from multiverse.core.policy import Policy, Pool
from multiverse.core.state import State

Taken = tuple[Vm, Size]  # a spare as it serves, and what it claims more than before

WITHDRAWAL = 2.0  # seconds that a job waits for a spare to be withdrawn from other jobs

_LIVE = (VmState.PLANNED, VmState.PARKED, VmState.STARTING, VmState.JOINED)


def spares(state: State, depth: Depth | None = None) -> list[Vm]:
    """The spares that serve nobody yet, are not on their way out, and were not taken by a job on its way, by serial."""
    return [
        vm
        for vm in state.vms_in(*_LIVE)
        if vm.is_spare and depth in (None, vm.pool) and state.offer_of(vm) is not OfferState.TAKEN
    ]


def awaiting_job(state: State) -> list[Vm]:
    """The spares that a submission took and whose job has not come, until they are gone; by serial."""
    taken = [id_ for id_ in sorted(state.offers) if state.offers[id_].state is OfferState.TAKEN]
    return [vm for id_ in taken if (vm := state.vms.get(id_)) and vm.attempt is None]


def spare_size(pool: Pool, template: Size, host: Host, policy: Policy) -> Size:
    """The size that a pool's VM is made with, forked from a template of the size `template`."""
    return template if pool.depth is Depth.PARKED else vm_size(pool.size, template, host, policy)


def spare_claim(pool: Pool, size: Size, host: Host) -> Size:
    if pool.depth is Depth.PARKED:
        return parked_claim(host, pool.image)
    return vm_claim(size, host, pool.image, CloneKind.INSTANT)


# --- taking ----------------------------------------------------------------------------------------


def joined_for(context: Context, attempt: Attempt, promised: Collection[int] = ()) -> Vm | None:
    """The joined spare that fits best: with little memory, and rather not on offer."""
    request, state, nodes, image = attempt.request, context.state, context.scheduler.nodes, context.image_of(attempt)
    context = context.with_avoided()  # whatever fails there: these have joined
    if request.nodes != 1:
        return None  # the VMs of one job are tied to it by one tag, and know each other from their start

    # A joined spare has no limit of bandwidth, and claims none.
    if (
        request.size.net
        or request.sockets != 1
        or not set(request.features) <= {image, CloneKind.INSTANT, CloneKind.AUTO}
    ):
        return None

    def fits(vm: Vm) -> bool:
        node, size = vm.node_size, request.size
        large = node.cpus == size.cpus and node.memory >= size.memory and node.disk >= size.disk
        return large and (vm.image, vm.account) == (image, request.account)

    def is_idle(vm: Vm) -> bool:
        return vm.name in nodes and nodes[vm.name].state is NodeState.IDLE and not nodes[vm.name].reserved

    def is_late(vm: Vm) -> bool:
        offer = state.offers.get(vm.id)
        return offer is not None and offer.state is OfferState.CLOSING and state.now - offer.since > WITHDRAWAL

    fit = [
        vm
        for vm in spares(state, Depth.JOINED)
        if vm.state is VmState.JOINED and vm.id not in promised and not is_late(vm) and vm.host in context.hosts
        if fits(vm) and is_idle(vm) and fit_to_serve(context, vm)
    ]
    return min(fit, key=lambda vm: (vm.node_size.memory, state.offer_of(vm) is OfferState.OPEN, vm.id), default=None)


def parked_for(context: Context, attempt: Attempt, templates: Mapping[str, Size], room: Room) -> list[Taken]:
    """Parked spares that can become the attempt's VMs, on the emptiest hosts first. Takes the room they need."""
    found: list[Taken] = []
    if not context.policy.pools:
        return found
    image, request = context.image_of(attempt), attempt.request
    mine: Counter[str] = Counter(vm.host for vm in context.state.vms_of(attempt) if not vm.failed)
    left = [
        vm
        for vm in spares(context.state, Depth.PARKED)
        if vm.state is VmState.PARKED and vm.image == image and vm.account == request.account
        if (vm.place.template and vm.place.template.size) == templates.get(vm.host)
        if vm.host in context.hosts and fit_to_serve(context, vm)
    ]
    while left and len(found) < request.nodes:
        left.sort(key=lambda vm: (-room.free[vm.host][0], -room.free[vm.host][1], vm.id))
        vm = left.pop(0)
        host = context.hosts[vm.host]
        size = vm_size(request.size, templates[vm.host], host, context.policy)
        more = vm_claim(size, host, image, vm.kind) - parked_claim(host, image)
        if room.fits(vm.host, more) and mine[vm.host] < request.most_on_a_host(request.nodes):
            mine[vm.host] += 1
            room.take(vm.host, more)
            found.append((replace(vm, size=size, node_size=request.size), more))
    return found


def give_back(taken: list[Taken], room: Room) -> None:
    for vm, more in taken:
        room.give(vm.host, more)


def fit_to_serve(context: Context, vm: Vm) -> bool:
    """Whether a spare may become a job's: it lives, nothing failed in it, it knows no user, and is not too old."""
    seen = context.world.vm(vm)
    if (
        seen is None
        or seen.condition not in (VmCondition.PARKED, VmCondition.RUNNING)
        or seen.reason
        or seen.users_added
    ):
        return False
    return not any(pool.is_too_old(vm, context.state.now) for pool in context.policy.pools if pool.has(vm))


def node_spec(vm: Vm, attempt: Attempt | None, peers: tuple[tuple[str, str], ...] = ()) -> NodeSpec:
    """The VM as a node, for its attempt's job alone or, as a spare, for any job. `peers`: its attempt's other VMs."""
    if attempt is not None:
        features: tuple[str, ...] = (*attempt.request.features, attempt.feature)
    else:
        features = (vm.image, CloneKind.INSTANT.value, CloneKind.AUTO.value, vm.feature)
    return NodeSpec(
        name=vm.name,
        address=vm.address,
        size=vm.node_size,
        features=features,
        tag=attempt.feature if attempt is not None else vm.feature,
        image=vm.image,
        account=vm.account,
        spare=attempt is None,
        sockets=attempt.request.sockets if attempt is not None else 1,
        peers=peers,
        resumed=attempt.job.restarts if attempt is not None and vm.saved else 0,
    )


# --- release ---------------------------------------------------------------------------------------


def release_spare(state: State, vm: Vm, why: Reason, *, unfit: bool = False) -> None:
    """Plan the end of a spare, not while a job may still take it. `unfit`: it counts as a failure of its host."""
    if unfit:
        vm = replace(vm, fault="host")
    offer = state.offers.get(vm.id)
    if offer is not None and offer.state in (OfferState.OPEN, OfferState.CLOSING):
        state.move(retire_vm(vm, why))
        if offer.state is OfferState.OPEN:
            state.move(withdraw_offer(offer, why))
    else:
        state.move(release_vm(replace(vm, reason=why), why))


def named_by_none(image: str, default: str, kind: CloneKind) -> tuple[bool, bool]:
    """Whether an instant clone of `image` serves jobs that name no image, and jobs that name no kind."""
    return image == default, kind in (CloneKind.INSTANT, CloneKind.AUTO)
