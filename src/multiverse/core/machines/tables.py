"""All state machines together."""

from __future__ import annotations

from collections.abc import Iterator

from multiverse.core.machines.attempt import ATTEMPT, attempt_effect
from multiverse.core.machines.offer import OFFER, offer_effect
from multiverse.core.machines.template import TEMPLATE, template_effect
from multiverse.core.machines.vm import VM, vm_effect
from multiverse.core.model import Attempt, Offer, Row, Template, Vm
from multiverse.core.state import LiveRows
from multiverse.core.transition import Effect, Tables

TABLES = Tables({"attempt": ATTEMPT, "vm": VM, "offer": OFFER, "template": TEMPLATE})


def effect_of(row: Row) -> Effect | None:
    """What the row's state permits. Derived from the row, never stored."""
    match row:
        case Attempt():
            return attempt_effect(row)
        case Vm():
            return vm_effect(row)
        case Offer():
            return offer_effect(row)
        case Template():
            return template_effect(row)


def effects_of(rows: LiveRows) -> Iterator[tuple[Row, Effect]]:
    """The effects that the live rows permit, at most one under each key: an offer's gives way to its VM's."""
    for attempt in rows.attempts.values():
        if effect := attempt_effect(attempt):
            yield attempt, effect
    for vm in rows.vms.values():
        if (effect := vm_effect(vm)) or ((offer := rows.offers.get(vm.id)) and (effect := offer_effect(offer))):
            yield vm, effect
    for template in rows.templates.values():
        if effect := template_effect(template):
            yield template, effect
