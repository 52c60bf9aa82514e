"""All state machines together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from multiverse.core.machines.attempt import ATTEMPT, ATTEMPT_EFFECTS, AWAITED_ATTEMPTS, effect_text
from multiverse.core.machines.host import HOST, HOST_EFFECTS
from multiverse.core.machines.lease import LEASE, LEASE_EFFECTS
from multiverse.core.machines.offer import OFFER, OFFER_EFFECTS
from multiverse.core.machines.saved import AWAITED_SAVED, SAVED, SAVED_EFFECTS, text_of_saved
from multiverse.core.machines.template import TEMPLATE, TEMPLATE_EFFECTS
from multiverse.core.machines.vm import AWAITED_VMS, VM, VM_EFFECTS
from multiverse.core.model.basics import Key, RowKind
from multiverse.core.model.host import KnownHost
from multiverse.core.model.job import Attempt
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import Offer, TemplateState, Vm, VmState
from multiverse.core.model.world import Row
from multiverse.core.state import State
from multiverse.core.transition import Awaiting, Effect, EffectKind, Tables

TABLES = Tables({"attempt": ATTEMPT, "vm": VM, "offer": OFFER, "template": TEMPLATE, "host": HOST,
                 "lease": LEASE, "saved": SAVED})  # fmt: skip
EFFECTS: Mapping[RowKind, Mapping[Any, EffectKind]] = {
    "attempt": ATTEMPT_EFFECTS,
    "vm": VM_EFFECTS,
    "offer": OFFER_EFFECTS,
    "template": TEMPLATE_EFFECTS,
    "host": HOST_EFFECTS,
    "lease": LEASE_EFFECTS,
    "saved": SAVED_EFFECTS,
}
"""The effect that each state permits; states that are missing permit none."""


def effect_of(row: Row) -> Effect | None:
    """What the row's state permits: derived from the row, never stored. An offer's effect has the key of its VM."""
    kind = EFFECTS[row.key.kind].get(row.state)
    if kind is None or row.quarantined:
        return None
    match row:
        case Attempt():
            text = effect_text(row)
        case Saved():
            text = text_of_saved(row)
        case KnownHost():
            text = row.name
        case _:
            text = ""
    return Effect(kind, Key("vm", row.id) if isinstance(row, Offer) else row.key, text)


def awaited_rows(state: State) -> list[tuple[Vm | Attempt | Saved, Awaiting]]:
    """The rows for whose sake the scheduler is read, each with when it may go on."""
    vms = [(vm, AWAITED_VMS[vm.state]) for vm in state.vms_in(*AWAITED_VMS)]
    saved = [(one, AWAITED_SAVED[one.state]) for _, one in sorted(state.saved.items()) if one.state in AWAITED_SAVED]
    return [*vms, *saved, *((one, AWAITED_ATTEMPTS[one.state]) for one in state.attempts_in(*AWAITED_ATTEMPTS))]


def note_unconfirmed(state: State) -> None:
    """What an earlier daemon planned is made only if it is seen: its names are not given again."""
    state.unconfirmed.update(vm.key for vm in state.vms_in(VmState.PLANNED))
    state.unconfirmed.update(template.key for template in state.templates_in(TemplateState.BUILDING))


def permitted_effects(state: State) -> Iterator[tuple[Row, Effect]]:
    """At most one effect under each key: an offer's gives way to its VM's. What is unconfirmed is not made."""
    offered = [vm for id_ in sorted(state.offers) if (vm := state.vms.get(id_))]
    acting = {vm.id: vm for vm in [*state.vms_in(*VM_EFFECTS), *offered]}
    rows: list[Row] = [*state.attempts_in(*ATTEMPT_EFFECTS), *(vm for _, vm in sorted(acting.items()))]
    rows += [row for _, row in sorted(state.saved.items()) if row.state in SAVED_EFFECTS]
    rows += [*state.hosts_in(*HOST_EFFECTS), *state.leases_in(*LEASE_EFFECTS), *state.templates_in(*TEMPLATE_EFFECTS)]
    for row in rows:
        if row.state in (VmState.PLANNED, TemplateState.BUILDING) and row.key in state.unconfirmed:
            continue
        offer = state.offers.get(row.id) if isinstance(row, Vm) else None
        if effect := effect_of(row) or (effect_of(offer) if offer else None):
            yield row, effect
