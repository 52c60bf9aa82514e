"""Offers of joined spares to jobs as they are submitted: which spares are on offer, and when an offer is withdrawn."""

from __future__ import annotations

from multiverse.core.capacity.room import Blockage
from multiverse.core.clones.spares import fit_to_serve, is_of, release_spare, spares
from multiverse.core.context import Context
from multiverse.core.machines.offer import open_offer, withdraw_offer
from multiverse.core.model import LEAVING_STATES, NodeState, OfferState, Vm, VmState, Why, first_on
from multiverse.core.policy import Policy


def may_offer(context: Context, vm: Vm) -> bool:
    """Whether a joined spare may be offered to jobs as they come: the scheduler can, it never was offered, is an idle
    node, and is fit to serve."""
    node = context.scheduler.nodes.get(vm.name)
    fresh = vm.state is VmState.JOINED and context.state.offer_of(vm) is None
    idle = node is not None and node.state is NodeState.IDLE and not node.reserved
    can = context.scheduler.offers is not None
    return can and fresh and idle and is_offered(vm, context.policy) and fit_to_serve(context, vm)


def is_offered(vm: Vm, policy: Policy) -> bool:
    """Whether a pool of the settings offers such spares."""
    return any(pool.offer for pool in policy.pools if is_of(vm, pool))


BEING_CREATED = (VmState.PLANNED, VmState.STARTING)


def reconcile_offers(context: Context, blockage: Blockage) -> None:
    state, kept = context.state, first_on(context.scheduler.reservations, context.now)
    for vm in spares(state):
        offer = state.offers.get(vm.id)
        offered = is_offered(vm, context.policy)
        if offer is not None and offer.state is OfferState.OPEN:
            if kept or blockage is Blockage.ROOM:
                state.move(withdraw_offer(offer, kept.why() if kept else Why.JOBS_WAIT()))
            elif not offered:
                state.move(withdraw_offer(offer, Why.POOL_OFFERS_NONE()))
        elif offer is not None and offer.state is OfferState.CLOSED and offered and not blockage and not kept:
            if not _is_another_changing(context, vm):
                release_spare(state, vm, Why.UNTAKEN())  # another is made and offered
        elif not blockage and not kept and may_offer(context, vm):
            state.move(open_offer(vm, state.now))


def _is_another_changing(context: Context, spare: Vm) -> bool:
    """Whether another such spare is being made or released: they are replaced one after the other."""
    changing = (*BEING_CREATED, VmState.PARKED, *LEAVING_STATES, VmState.RETIRING)
    return any(
        vm.attempt is None and (vm.pool, vm.image) == (spare.pool, spare.image)
        for vm in context.state.vms_in(*changing)
    )
