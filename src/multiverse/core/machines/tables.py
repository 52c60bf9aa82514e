"""All state machines together."""

from __future__ import annotations

from multiverse.core.machines.attempt import ATTEMPT
from multiverse.core.machines.template import TEMPLATE
from multiverse.core.machines.vm import VM
from multiverse.core.model.job import Attempt, AttemptState
from multiverse.core.model.template import Template, TemplateState
from multiverse.core.model.vm import Offer, Vm, VmState
from multiverse.core.model.world import Row
from multiverse.core.transition import Effect, EffectKind, Tables

TABLES = Tables({"attempt": ATTEMPT, "vm": VM, "template": TEMPLATE})


def on_offer(row: Row) -> bool:
    """Whether a job may come and take it by itself."""
    match row:
        case Vm(state=VmState.JOINED | VmState.LOST, attempt=None, offer=Offer.OPEN | Offer.CLOSING):
            return True
        case _:
            return False


def effect_of(row: Row) -> Effect | None:
    """What the row's state permits. Derived, never stored."""
    if row.quarantined:
        return Effect(EffectKind.WITHDRAW, row.key) if on_offer(row) else None  # no job may come to it either
    match row:
        case Attempt(state=AttemptState.QUEUED, stray=True):
            return Effect(EffectKind.REQUEUE, row.key)
        case Attempt(state=AttemptState.QUEUED, gated=False):
            return Effect(EffectKind.GATE, row.key)
        case Attempt(state=AttemptState.QUEUED, note=note) if note:
            return Effect(EffectKind.EXPLAIN, row.key, note)
        case Attempt(state=AttemptState.SPAWNED, choice=choice):
            return Effect(EffectKind.PIN, row.key, choice)
        case Attempt(state=AttemptState.RECLAIMING, outcome="revoked" | "failed"):
            return Effect(EffectKind.REVOKE, row.key, row.reason)
        case Attempt(state=AttemptState.RECLAIMING, outcome="requeued", gated=False):
            return Effect(EffectKind.GATE, row.key)
        case Vm(state=VmState.PLANNED):
            return Effect(EffectKind.CREATE, row.key)
        case Vm(state=VmState.STARTING):
            return Effect(EffectKind.START, row.key)
        case Vm(state=VmState.JOINED, attempt=None, offer=Offer.OPEN):
            return Effect(EffectKind.OFFER, row.key)
        case Vm() if on_offer(row):
            return Effect(EffectKind.WITHDRAW, row.key)
        case Vm(state=VmState.RELEASING, forget=forget):
            return Effect(EffectKind.RELEASE if forget else EffectKind.END, row.key)
        case Template(state=TemplateState.BUILDING):
            return Effect(EffectKind.BUILD, row.key)
        case Template(state=TemplateState.RETIRING):
            return Effect(EffectKind.DROP, row.key)
        case _:
            return None
