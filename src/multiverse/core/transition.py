"""What a state machine consists of: events, transitions, tables, changes, moves and effects.

A table is data: the store refuses a move that is not in it, the diagrams in the documentation are drawn from it, and
the tests walk it. Entering a state permits its effect; an observed result leaves the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, Flag, StrEnum, auto

from multiverse.core.errors import MultiverseError
from multiverse.core.model.basics import ClaimKey, Key, RowKind, Size
from multiverse.core.model.host import Claim, Drain, HostState
from multiverse.core.model.job import AttemptState, LeaseState
from multiverse.core.model.reason import Reason
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import OfferState, Stage, TemplateState, VmState
from multiverse.core.model.world import Row

RowState = AttemptState | VmState | TemplateState | OfferState | HostState | LeaseState | SavedState

_ENDED = (AttemptState.DONE, AttemptState.CANCELLED, AttemptState.REQUEUED, AttemptState.REVOKED, AttemptState.FAILED)
_GONE = (VmState.GONE, TemplateState.ABSENT, OfferState.ENDED, HostState.RETURNED, LeaseState.GONE,
         SavedState.GONE)  # fmt: skip
TERMINAL: frozenset[RowState] = frozenset({*_ENDED, *_GONE})
"""A row that enters one of these states has ended, and changes no more."""


class Event(StrEnum):
    """Why a row changes. The words are what `multiverse timeline` prints."""

    # attempt
    SUBMITTED = "submitted"
    NOTED = "noted"  # the state is the same; what the row says for people, or of its job, has changed
    AT_GATE = "at the gate"
    LEFT_GATE = "left the gate"
    SENT_BACK = "sent back"  # its job is to go back to the partition that it was moved from
    HELD = "held"  # its job is held, as was to be done; also of a saved job
    STRAYED = "strayed"  # its job runs on a VM of an earlier attempt
    ADMITTED = "admitted"
    OVERTAKEN = "overtaken"  # a later job started ahead of it, and nobody could tell when it would start itself
    TOOK = "took a spare"  # its job took a joined spare by itself, as it was submitted
    IMPOSSIBLE = "impossible"
    CREATED = "created"
    REPLACED = "replaced"
    ALL_JOINED = "all joined"
    RUNS = "runs"
    PREEMPTED = "preempted"  # the run of its job is to end for another job
    GRACE_OVER = "grace over"
    PIN_EXPIRED = "pin expired"
    GAVE_UP = "gave up"
    ENDED = "ended"
    CANCELLED = "cancelled"
    CHANGED = "changed"
    RESTARTED = "restarted"
    RETURNED = "returned"  # its job is off its nodes
    STARTED_LATE = "started late"  # its job started on its nodes after the attempt had given up on it
    RECLAIMED = "reclaimed"
    # vm
    PLANNED = "planned"
    EXISTS = "exists"
    TAKEN = "taken"  # by an attempt, out of its pool
    START = "start"
    REGISTERED = "registered"
    FAILED = "failed"
    DIED = "died"
    RETIRED = "retired"
    RELEASED = "released"
    LOST = "lost"
    FOUND = "found"
    FENCED = "fenced"
    NODE_FREE = "node free"  # no job is on its node any more
    ABSENT = "absent"
    NODE_LEFT = "node left"  # the VM is absent, and its node is not
    PLACE_LEFT = "place left"  # it surely is at one of its places no more
    MOVE = "move"  # it is to go to another host
    MOVED = "moved"  # it goes on there
    STAYED = "stayed"  # it goes on where it was
    SLEEP = "sleep"  # its memory is to be written to a file
    SLEPT = "slept"  # it is there
    DELAY = "delay"  # it is to go on, and there is no room
    WAKE = "wake"  # it is to go on
    WOKE = "woke"
    # offer
    OFFERED = "offered"
    WITHDRAWN = "withdrawn"
    CLOSED = "closed"
    MISSED = "missed"  # the job that took its VM did not come
    # template
    NEEDED = "needed"
    BUILT = "built"
    BROKE = "broke"
    VANISHED = "vanished"
    DROPPED = "dropped"
    # host
    ADDED = "added"
    DRAINED = "drained"
    RESUMED = "resumed"  # also of a saved job that is held: it is to be released, or was
    REMOVED = "removed"
    SILENT = "silent"
    FENCE = "fence"
    HELD_BACK = "held back"  # also of a saved job that cannot go on: it is to be held
    AVOIDED = "avoided"  # VMs of an image do not come up there
    CLEARED = "cleared"  # a VM of that image has joined
    GIVEN_BACK = "given back"  # its lease has ended
    # lease
    GRANTED = "granted"
    EMPTIED = "emptied"
    # saved
    ASKED = "asked"
    READY = "ready"  # its node takes no other job, and the scheduler can queue it again
    FROZEN = "frozen"
    CHECKPOINT_DUE = "checkpoint due"
    KEPT = "kept"  # a checkpoint, for the run that may follow
    QUEUED_AGAIN = "queued again"
    FORGOTTEN = "forgotten"  # the scheduler shows a run again that had ended
    STORED = "stored"
    COPY_DUE = "copy due"
    COPIED = "copied"
    UNCOPIED = "uncopied"  # it could not be copied
    UNWRITTEN = "unwritten"  # it could not be written
    THAWED = "thawed"  # its processes go on
    ABANDONED = "abandoned"  # it is not saved, or the state is of no use any more
    # any
    QUARANTINED = "quarantined"
    RETRIED = "retried"  # an operator ended its quarantine or its back-off


@dataclass(frozen=True, slots=True)
class Transition:
    """One transition of a table. `source` None is the creation of the row."""

    source: RowState | None
    event: Event
    target: RowState


def transitions(sources: Iterable[RowState | None], event: Event, *targets: RowState) -> list[Transition]:
    return [Transition(source, event, target) for source in sources for target in targets]


def unchanged(states: Iterable[RowState], *events: Event) -> list[Transition]:
    return [Transition(state, event, state) for state in states for event in events]


class Tables(dict[RowKind, tuple[Transition, ...]]):
    """The tables of all state machines, by kind of row."""

    def __init__(self, tables: Mapping[RowKind, tuple[Transition, ...]]) -> None:
        super().__init__(tables)
        self._allowed = {kind: frozenset(table) for kind, table in tables.items()}

    def allowed(self, kind: RowKind, source: RowState | None, event: Event, target: RowState) -> bool:
        return Transition(source, event, target) in self._allowed[kind]


@dataclass(frozen=True, slots=True)
class Change:
    """One row's part of a move: its new value, whose `version` is still the one it replaces (0: new)."""

    row: Row
    event: Event
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Rows and claims that change together, all or nothing. A gang's admission is one move."""

    changes: tuple[Change, ...]
    make: tuple[Claim, ...] = ()
    free: tuple[ClaimKey, ...] = ()


class Awaiting(Enum):
    """When a row in a state may go on by what the scheduler shows, which is then read often."""

    AT_ONCE = auto()
    AFTER_EFFECT = auto()  # not before the effect of the state has ended
    UNHURRIED = auto()  # it is read whenever another one is, and never for its own sake


class ShownBy(Flag):
    """Who is observed as soon as an effect has ended, because its result shows there."""

    SOURCE = auto()  # that of its row; all sources if its row has none
    SCHEDULER = auto()
    SCHEDULER_SOON = auto()  # several times: it may take a moment
    WHOLE_SCHEDULER = auto()  # the same, and all of it, because no part of it shows that


_SOURCE, _SOON, _WHOLE = ShownBy.SOURCE, ShownBy.SCHEDULER_SOON, ShownBy.WHOLE_SCHEDULER
_BOTH = ShownBy.SOURCE | ShownBy.SCHEDULER


class EffectKind(StrEnum):
    """The effects, each with who shows its result."""

    shown_by: ShownBy

    def __new__(cls, value: str, shown_by: ShownBy) -> EffectKind:
        kind = str.__new__(cls, value)
        kind._value_, kind.shown_by = value, shown_by
        return kind

    GATE = "gate", _SOON  # put the job back at the gate
    PIN = "pin", _SOON | _SOURCE
    REQUEUE = "requeue", _SOON
    REVOKE = "revoke", _SOON
    HOLD = "hold", _SOON  # hold the job, which its user may release
    WARN = "warn", _SOON  # tell the processes of the job to end
    PREEMPT = "preempt", _SOON  # end the run of the job, and queue it again or cancel it
    RESTORE = "restore", _SOON  # put the job back into the partition that it was moved from
    CREATE = "create", _SOURCE
    START = "start", _SOON | _SOURCE
    OFFER = "offer", _SOURCE
    WITHDRAW = "withdraw", _BOTH
    END = "end", _BOTH  # set the node DOWN and destroy the VM
    REMOVE = "remove", _BOTH  # set the node DOWN, destroy the VM, and delete the node
    RELEASE = "release", _BOTH  # let the guest write back, destroy the VM, and delete the node
    DELETE = "delete", _BOTH  # delete the node
    SWEEP = "sweep", _BOTH  # set the node DOWN, destroy the VM, and delete the node, of a name that no row explains
    BUILD = "build", _SOURCE
    DROP = "drop", _SOURCE
    FENCE = "fence", _SOURCE  # make sure that the host is off
    REQUEST = "request", _WHOLE  # submit the lease's pilot
    GIVE_BACK = "give back", _WHOLE  # cancel the lease's pilot
    PREPARE = "prepare", _SOON  # drain the node of a job that is to be saved, and let the scheduler queue it again
    FREEZE = "freeze", _SOURCE  # freeze the processes of the VM's job
    CUT = "cut", _SOON  # cut the frozen job off from the scheduler, and have it queued again
    SAVE = "save", _SOURCE  # write the VM to the storage
    CAPTURE = "capture", _SOURCE  # the same, while its job goes on
    COPY = "copy", _SOURCE  # copy its files to another storage
    KEEP = "keep", _SOURCE  # keep the VM in the memory of its host, because it cannot be written
    QUEUE = "queue", _SOON  # have a job queued again of which the scheduler has forgotten that
    RESUME = "resume", _SOON  # release the held job that was saved
    THAW = "thaw", _SOURCE  # let the processes go on within the next run of their job
    UNDO = "undo", _SOON | _SOURCE  # let the processes go on in the run that was not saved
    DISCARD = "discard", _SOURCE  # remove the files
    MOVE = "move", _SOURCE  # move the VM from its first place to its second
    SETTLE = "settle", _SOURCE  # end the VM's move: it is at one of its places then
    SLEEP = "sleep", _SOURCE  # write the VM's memory to a file, and let something stand in for its node
    DELAY = "delay", ShownBy.SCHEDULER  # let the time limit of its job grow by the wait
    WAKE = "wake", _SOON | _SOURCE  # let the VM go on
    CANCEL = "cancel", _WHOLE  # cancel a pilot that no lease explains


RELEASING_EFFECTS = frozenset(set(EffectKind) - {EffectKind.CREATE, EffectKind.START, EffectKind.BUILD,
                                                 EffectKind.OFFER, EffectKind.PIN,
                                                 EffectKind.REQUEST, EffectKind.PREPARE, EffectKind.FREEZE,
                                                 EffectKind.CUT, EffectKind.SAVE, EffectKind.CAPTURE, EffectKind.KEEP,
                                                 EffectKind.COPY, EffectKind.MOVE, EffectKind.SLEEP,
                                                 EffectKind.WAKE})  # fmt: skip
"""The effects that only release: they take nothing of a disk, and no job starts by them."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a row's state permits. Effects with the same key run one after another: an offer's have the key of its VM,
    so that the end of a node never overtakes its offer. An effect is not begun again beside an equal one."""

    kind: EffectKind
    key: Key
    text: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """An effect ended."""

    key: Key
    kind: EffectKind
    state: str  # of the row when the effect began: it may have left that since
    error: MultiverseError | None = None  # None: it reported success
    stages: tuple[Stage, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """What an operator asks for, or a user (`uid`) for an own job.

    Of templates (`host`, `image`): `build` one, or `drop` those of the size and account, if given. Of a record (`key`):
    `retry` ends its quarantine or back-off, `end` ends an orphan with its job. Of a host: `add`, `drain`, `resume`
    (after a drain or fence), `remove`; `fence`: it is off, and nothing of it runs. Of a job (`job`): `save` it, and
    `hold` it until `resume_saved` lets it go on, or begin `anew`; make a `checkpoint` of it."""

    verb: str
    host: str = ""
    image: str = ""
    key: Key | None = None
    size: Size | None = None
    account: str | None = None
    drain: Drain | None = None
    job: str = ""
    hold: bool = False
    uid: int | None = None
    anew: bool = False
    shared_files: bool = False  # a checkpoint may be of a job that writes to shared files


Message = Done | Command
