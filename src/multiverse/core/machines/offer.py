"""Offers: joined spares that jobs may take by themselves, as they are submitted."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.machines.vm import release_vm
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import Offer, OfferState, Vm, VmState
from multiverse.core.model.world import World
from multiverse.core.state import State
from multiverse.core.transition import Change, EffectKind, Event, Transition, transitions, unchanged

O = OfferState  # noqa: E741
ARRIVAL = 30.0  # seconds for a job to appear that took a spare: slurmctld lets others go first
UNSERVED = 5.0  # seconds, if the job that took it was seen and cannot be served

# --- table -----------------------------------------------------------------------------------------

_LIVE = (O.OPEN, O.TAKEN, O.CLOSING, O.CLOSED)

OFFER: tuple[Transition, ...] = (
    *transitions([None], Event.OFFERED, O.OPEN),
    *transitions([O.OPEN, O.CLOSING, O.CLOSED], Event.TAKEN, O.TAKEN),
    *transitions([O.OPEN], Event.WITHDRAWN, O.CLOSING),
    *transitions([O.CLOSING], Event.CLOSED, O.CLOSED),
    *transitions(_LIVE, Event.ABSENT, O.ENDED),
    *unchanged([O.TAKEN], Event.MISSED),
    *unchanged(_LIVE, Event.QUARANTINED, Event.RETRIED),
)


def open_offer(vm: Vm, now: float) -> Change:
    return Change(Offer(vm.id, now), Event.OFFERED, Why.OFFERED())


def take_offer(offer: Offer, why: Reason) -> Change:
    return Change(replace(offer, state=O.TAKEN), Event.TAKEN, why)


def withdraw_offer(offer: Offer, why: Reason) -> Change:
    """No job may take the spare by itself any more. It counts as withdrawn when an observation shows it."""
    return Change(replace(offer, state=O.CLOSING, reason=why), Event.WITHDRAWN, why)


# --- step ------------------------------------------------------------------------------------------


def step_offer(state: State, offer_id: int, world: World) -> None:
    """Move one offer by what the scheduler has shown since the last effect in the matter ended."""
    offer, vm = state.offers.get(offer_id), state.vms.get(offer_id)
    if offer is None:
        return
    if vm is None or vm.state is VmState.DELETING:
        state.move(Change(replace(offer, state=O.ENDED), Event.ABSENT))
        return
    if offer.quarantined:
        return
    if offer.state is O.OPEN and (vm.quarantined or vm.state not in (VmState.JOINED, VmState.RETIRING)):
        state.move(withdraw_offer(offer, Why.SERVES_NONE()))
        return
    serves_nobody = vm.is_spare and vm.state in (VmState.JOINED, VmState.RETIRING)
    if world.scheduler is None or not serves_nobody:
        return
    # Each reading of the scheduler, whole or in part, shows all offers. A job that took one may be in no part.
    shown, whole = world.scheduler.value.offers, world.scheduler.began
    if shown is None or world.node_began(vm.name) <= max(world.ended_at(vm.key), offer.since):
        return
    taken = shown.get(vm.name)
    if offer.state is O.TAKEN:
        _step_taken(state, offer, vm, whole, occupied=vm.name in world.scheduler.value.occupied)
    elif taken:
        uid = world.scheduler.value.takers.get(vm.name)
        by = Why.SUBMITTED(uid=uid)
        state.move(take_offer(replace(offer, uid=uid), by))
    elif offer.state is O.CLOSING and taken is None and vm.key in world.effect_ended_at:
        state.move(Change(replace(offer, state=O.CLOSED), Event.CLOSED, offer.reason))


def _step_taken(state: State, offer: Offer, vm: Vm, began: float, *, occupied: bool) -> None:
    """The job that took the VM must appear soon. A job that cannot be served occupies it: its node goes DOWN then."""
    if began - offer.since > (UNSERVED if occupied else ARRIVAL):
        why = Why.DID_NOT_COME()
        gone = release_vm(replace(vm, reason=why), why, occupied=occupied)
        state.move(gone, Change(offer, Event.MISSED, why))


OFFER_EFFECTS = {O.OPEN: EffectKind.OFFER, O.CLOSING: EffectKind.WITHDRAW}
