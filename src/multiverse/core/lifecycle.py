"""The three machines as tables: which event leads from which state to which.

The tables are data. The store refuses a move that is not in them, the documentation's diagrams are
drawn from them, and the tests walk them. What is done in a state follows from the row alone
(`effect_of`): entering a state permits its effect, an observed result leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from multiverse.core.model import (
    Attempt,
    AttemptState,
    Key,
    Offer,
    Row,
    RowKind,
    Template,
    TemplateState,
    Vm,
    VmState,
)

A, V, T = AttemptState, VmState, TemplateState
State = AttemptState | VmState | TemplateState


class Event(StrEnum):
    """Why a row moves. The words are what `multiverse timeline` prints."""

    # attempt
    SUBMITTED = "submitted"
    NOTED = "noted"  # same state, something about it was learnt
    ADMITTED = "admitted"
    TOOK = "took a spare"  # by itself, as it was submitted
    IMPOSSIBLE = "impossible"
    MADE = "made"
    REPLACED = "replaced"
    ALL_JOINED = "all joined"
    RUNS = "runs"
    PIN_EXPIRED = "pin expired"
    GAVE_UP = "gave up"
    ENDED = "ended"
    CANCELLED = "cancelled"
    CHANGED = "changed"
    RESTARTED = "restarted"
    RECLAIMED = "reclaimed"
    # vm
    PLANNED = "planned"
    EXISTS = "exists"
    TAKEN = "taken"  # out of the pool, by an attempt
    START = "start"
    REGISTERED = "registered"
    FAILED = "failed"
    DIED = "died"
    RELEASED = "released"
    LOST = "lost"
    FOUND = "found"
    FENCED = "fenced"
    ABSENT = "absent"
    # template
    NEEDED = "needed"
    BUILT = "built"
    BROKE = "broke"
    VANISHED = "vanished"
    DROPPED = "dropped"
    # any
    QUARANTINED = "quarantined"
    RETRIED = "retried"  # an operator's word that its quarantine or its back-off is over


@dataclass(frozen=True, slots=True)
class Transition:
    """One arrow. `source` None is the row's making."""

    source: State | None
    event: Event
    target: State


def _arrows(sources: Iterable[State | None], event: Event, *targets: State) -> list[Transition]:
    return [Transition(source, event, target) for source in sources for target in targets]


_OF_ANY = (Event.QUARANTINED, Event.RETRIED)
_EARLY = (A.QUEUED, A.CLAIMED, A.SPAWNING, A.SPAWNED)
_LIVE = (*_EARLY, A.ALLOCATED)

ATTEMPT: tuple[Transition, ...] = (
    *_arrows([None], Event.SUBMITTED, A.QUEUED),
    *_arrows([A.QUEUED], Event.ADMITTED, A.CLAIMED),
    *_arrows([A.QUEUED], Event.TOOK, A.SPAWNED),
    *_arrows([A.CLAIMED], Event.MADE, A.SPAWNING),
    *_arrows([A.SPAWNING], Event.ALL_JOINED, A.SPAWNED),
    *_arrows([A.SPAWNED], Event.RUNS, A.ALLOCATED),
    *_arrows([A.QUEUED], Event.IMPOSSIBLE, A.RECLAIMING),
    *_arrows([A.SPAWNED], Event.PIN_EXPIRED, A.RECLAIMING),
    *_arrows([A.CLAIMED, A.SPAWNING, A.SPAWNED], Event.GAVE_UP, A.RECLAIMING),
    *_arrows([A.SPAWNED, A.ALLOCATED], Event.ENDED, A.RECLAIMING),
    *_arrows(_EARLY, Event.CANCELLED, A.RECLAIMING),
    *_arrows(_LIVE, Event.RESTARTED, A.RECLAIMING),
    *_arrows([A.CLAIMED, A.SPAWNING, A.SPAWNED, A.ALLOCATED], Event.CHANGED, A.RECLAIMING),
    *_arrows([A.RECLAIMING], Event.RECLAIMED, A.DONE, A.CANCELLED, A.REQUEUED, A.REVOKED, A.FAILED),
    *(Transition(s, Event.REPLACED, s) for s in (A.CLAIMED, A.SPAWNING)),
    *(Transition(s, Event.NOTED, s) for s in (A.QUEUED, A.SPAWNED, A.RECLAIMING)),
    *(Transition(s, event, s) for s in (*_LIVE, A.RECLAIMING) for event in _OF_ANY),
)

_VM_LIVE = (V.PLANNED, V.PARKED, V.STARTING, V.JOINED, V.SERVING)

VM: tuple[Transition, ...] = (
    *_arrows([None], Event.PLANNED, V.PLANNED),
    *_arrows([V.PLANNED], Event.EXISTS, V.PARKED),
    *_arrows([V.PARKED], Event.START, V.STARTING),
    *_arrows([V.STARTING], Event.REGISTERED, V.JOINED),
    *_arrows([V.JOINED], Event.RUNS, V.SERVING),
    *_arrows([V.PLANNED, V.STARTING], Event.FAILED, V.RELEASING),
    *_arrows([V.PARKED, V.STARTING, V.JOINED, V.SERVING], Event.DIED, V.RELEASING),
    *_arrows(_VM_LIVE, Event.RELEASED, V.RELEASING),
    *_arrows([*_VM_LIVE, V.RELEASING], Event.LOST, V.LOST),
    *_arrows([V.LOST], Event.FOUND, V.SERVING, V.RELEASING),
    *_arrows([V.LOST], Event.FENCED, V.RELEASING),
    *_arrows([V.RELEASING], Event.ABSENT, V.GONE),
    *(Transition(s, Event.TAKEN, s) for s in (V.PARKED, V.JOINED)),
    *(Transition(s, Event.NOTED, s) for s in (V.JOINED, V.SERVING, V.RELEASING)),
    *(Transition(s, event, s) for s in (*_VM_LIVE, V.LOST, V.RELEASING) for event in _OF_ANY),
)

TEMPLATE: tuple[Transition, ...] = (
    *_arrows([None, T.BROKEN], Event.NEEDED, T.BUILDING),
    *_arrows([T.BUILDING], Event.BUILT, T.READY),
    *_arrows([T.BUILDING], Event.BROKE, T.BROKEN),
    *_arrows([T.READY], Event.VANISHED, T.ABSENT),
    *_arrows([T.BUILDING, T.READY, T.BROKEN], Event.DROPPED, T.RETIRING),
    *_arrows([T.RETIRING], Event.ABSENT, T.ABSENT),
    *(Transition(s, event, s) for s in (T.BUILDING, T.READY, T.BROKEN, T.RETIRING) for event in _OF_ANY),
)

TABLES: dict[RowKind, tuple[Transition, ...]] = {"attempt": ATTEMPT, "vm": VM, "template": TEMPLATE}
_ALLOWED: dict[RowKind, frozenset[Transition]] = {kind: frozenset(table) for kind, table in TABLES.items()}

TERMINAL: frozenset[State] = frozenset({A.DONE, A.CANCELLED, A.REQUEUED, A.REVOKED, A.FAILED, V.GONE, T.ABSENT})


def allowed(kind: RowKind, source: State | None, event: Event, target: State) -> bool:
    """Whether the table has this arrow."""
    return Transition(source, event, target) in _ALLOWED[kind]


class EffectKind(StrEnum):
    GATE = "gate"  # put the job back at the gate
    EXPLAIN = "explain"
    PIN = "pin"
    REQUEUE = "requeue"
    REVOKE = "revoke"
    CREATE = "create"
    START = "start"
    OFFER = "offer"
    WITHDRAW = "withdraw"
    END = "end"  # set the node DOWN if it must be, and destroy the VM
    RELEASE = "release"  # the same, and delete the node
    BUILD = "build"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Effect:
    """What a row wants done. Two equal effects are the same one: it is not begun again beside itself."""

    kind: EffectKind
    key: Key
    text: str = ""


def _on_offer(row: Row) -> bool:
    """Whether a job may come and take it by itself."""
    match row:
        case Vm(state=V.JOINED | V.LOST, attempt=None, offer=Offer.OPEN | Offer.CLOSING):
            return True
        case _:
            return False


def effect_of(row: Row) -> Effect | None:
    """What the row's state permits. Derived, never stored."""
    if row.quarantined:
        return Effect(EffectKind.WITHDRAW, row.key) if _on_offer(row) else None  # no job may come to it either
    match row:
        case Attempt(state=A.QUEUED, stray=True):
            return Effect(EffectKind.REQUEUE, row.key)
        case Attempt(state=A.QUEUED, gated=False):
            return Effect(EffectKind.GATE, row.key)
        case Attempt(state=A.QUEUED, note=note) if note:
            return Effect(EffectKind.EXPLAIN, row.key, note)
        case Attempt(state=A.SPAWNED, choice=choice):
            return Effect(EffectKind.PIN, row.key, choice)
        case Attempt(state=A.RECLAIMING, outcome="revoked" | "failed"):
            return Effect(EffectKind.REVOKE, row.key, row.reason)
        case Attempt(state=A.RECLAIMING, outcome="requeued", gated=False):
            return Effect(EffectKind.GATE, row.key)
        case Vm(state=V.PLANNED):
            return Effect(EffectKind.CREATE, row.key)
        case Vm(state=V.STARTING):
            return Effect(EffectKind.START, row.key)
        case Vm(state=V.JOINED, attempt=None, offer=Offer.OPEN):
            return Effect(EffectKind.OFFER, row.key)
        case Vm() if _on_offer(row):
            return Effect(EffectKind.WITHDRAW, row.key)
        case Vm(state=V.RELEASING, forget=forget):
            return Effect(EffectKind.RELEASE if forget else EffectKind.END, row.key)
        case Template(state=T.BUILDING):
            return Effect(EffectKind.BUILD, row.key)
        case Template(state=T.RETIRING):
            return Effect(EffectKind.DROP, row.key)
        case _:
            return None
