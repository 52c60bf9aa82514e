"""What a state machine consists of: events, transitions, changes, moves and effects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from multiverse.core.errors import MultiverseError
from multiverse.core.model.host import Claim
from multiverse.core.model.job import AttemptState
from multiverse.core.model.keys import Key, RowKind
from multiverse.core.model.sizes import Size
from multiverse.core.model.template import TemplateState
from multiverse.core.model.vm import Stage, VmState
from multiverse.core.model.world import Row

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


class Tables(dict[RowKind, tuple[Transition, ...]]):
    """The tables of all state machines, by kind of row."""

    def __init__(self, tables: Mapping[RowKind, tuple[Transition, ...]]) -> None:
        super().__init__(tables)
        self._allowed = {kind: frozenset(table) for kind, table in tables.items()}

    def allowed(self, kind: RowKind, source: State | None, event: Event, target: State) -> bool:
        """Whether the table has this transition."""
        return Transition(source, event, target) in self._allowed[kind]


def _arrows(sources: Iterable[State | None], event: Event, *targets: State) -> list[Transition]:
    return [Transition(source, event, target) for source in sources for target in targets]


_OF_ANY = (Event.QUARANTINED, Event.RETRIED)


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


@dataclass(frozen=True, slots=True)
class Change:
    """One row's part of a move: its new value, whose `version` is still the one it replaces (0: new)."""

    row: Row
    event: Event
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """Rows that change together, with the claims that go and come with them, in this order: one decision,
    all or nothing. A gang's admission is one move."""

    changes: tuple[Change, ...]
    make: tuple[Claim, ...] = ()
    free: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """An effect ended. `error` None: it reported success. `state` is the row's when it began, so that
    a late message about a state since left is known for what it is."""

    key: Key
    kind: EffectKind
    state: str
    error: MultiverseError | None = None
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """What an operator asks for. Of templates (`host`, `image`): `build` one, of the base size and for all unless
    `size` and `account` say otherwise, or `drop` all that these describe. Of a record: `retry` (`key`), that its
    quarantine or back-off be over. Of a host out of reach: `fence` (`host`), which is the operator's word that the
    host is off, and nothing of it runs."""

    verb: str
    host: str = ""
    image: str = ""
    key: Key | None = None
    size: Size | None = None
    account: str | None = None


Message = Done | Command


TERMINAL: frozenset[State] = frozenset(
    {
        AttemptState.DONE,
        AttemptState.CANCELLED,
        AttemptState.REQUEUED,
        AttemptState.REVOKED,
        AttemptState.FAILED,
        VmState.GONE,
        TemplateState.ABSENT,
    }
)
