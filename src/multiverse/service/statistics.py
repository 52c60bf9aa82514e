"""How much happened, and how long it took, counted from committed moves; and a line of the log for each of them.

A restart begins anew, as Prometheus expects of counters. What each move costs is a few additions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from multiverse.api import EvictionCounts, Quantiles, RatesView
from multiverse.core.model.basics import Key
from multiverse.core.model.eviction import cause_of
from multiverse.core.model.job import Attempt
from multiverse.core.model.reason import Why, text_of
from multiverse.core.model.saved import UNWRITTEN, Saved
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.model.world import Row
from multiverse.core.rows import LiveRows
from multiverse.core.transition import TERMINAL, Change, Done, Event, Move

log = structlog.get_logger()


BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0,
           120.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)  # fmt: skip
"""Upper bounds of the histograms' buckets, in seconds; there is one more without a bound."""

STEP = 15.0  # seconds of one entry of a series
KEPT = 60  # entries of a series that are kept: a quarter of an hour
SERIES = ("submitted", "started", "ended", "vms", "failures")

PHASES: Mapping[str, tuple[Event, Event]] = {
    "queued": (Event.SUBMITTED, Event.ADMITTED),
    "clone": (Event.ADMITTED, Event.CREATED),
    "join": (Event.CREATED, Event.ALL_JOINED),
    "launch": (Event.ALL_JOINED, Event.RUNS),
    "start": (Event.SUBMITTED, Event.RUNS),
    "provision": (Event.ADMITTED, Event.RUNS),
    "run": (Event.RUNS, Event.ENDED),
    "reclaim": (Event.ENDED, Event.RECLAIMED),
}
"""The phases of an attempt that are measured, each with the events that begin and end it: those of its timeline, with
`start` and `provision`, which consist of several."""

_FAILURES = frozenset(
    {Event.FAILED, Event.DIED, Event.LOST, Event.GAVE_UP, Event.PIN_EXPIRED, Event.BROKE, Event.QUARANTINED,
     Event.RESTARTED, Event.REPLACED, Event.FENCED, Event.SILENT}
)  # fmt: skip
"""Events that are failures. The event is the cause."""

_COUNTED = {Event.SUBMITTED: "submitted", Event.RUNS: "started", Event.ENDED: "ended"}


@dataclass(slots=True)
class Histogram:
    """How often something took how long: counts by bucket, the last one without an upper bound, and the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Upper bound and count up to it, as Prometheus has them."""
        found, below = [], 0
        for bound, count in zip((*BUCKETS, math.inf), self.counts, strict=True):
            below += count
            found.append(("+Inf" if bound == math.inf else repr(bound), float(below)))
        return found


MOST_TIMES = 500
"""Durations of a phase that are kept for one entry of a series, at most: of more, the first tell enough."""


@dataclass(slots=True)
class _Step:
    """One entry of all series. `number` is its time in units of `STEP`."""

    number: int
    counts: Counter[str] = field(default_factory=Counter)
    times: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


EVICTION_STEP = 600.0  # seconds of one entry of a series of evictions
EVICTIONS_KEPT = 36  # entries: six hours

_GIVEN_UP = frozenset({Event.STAYED, Event.LOST, Event.DIED, Event.ABANDONED, Event.HELD_BACK, Event.UNWRITTEN})
"""Events of a VM that moves, or of a job that is being saved, by which it does not leave its host as it should."""

_JOB_OVER = frozenset({Why.SAVED_JOB_OVER, Why.SAVED_RUN_OVER})


class Evictions:
    """How many evictions there were, by way and cause. One that fails is known as such if it began in this process."""

    def __init__(self) -> None:
        self.begun: Counter[tuple[str, str]] = Counter()
        self.failed: Counter[tuple[str, str]] = Counter()
        self._under_way: dict[Key, tuple[str, str]] = {}  # by VM, or saved job
        self._steps: deque[tuple[int, Counter[tuple[str, str]], Counter[tuple[str, str]]]] = deque(
            maxlen=EVICTIONS_KEPT
        )  # each with its time in units of EVICTION_STEP

    def moved(self, change: Change, now: float) -> None:
        row, event = change.row, change.event
        if event is Event.MOVE and change.reason is not None and change.reason.because:
            self._begin(row.key, "move", cause_of(change.reason.because[0]), now)
        elif event is Event.ASKED and isinstance(row, Saved):
            self._begin(row.key, "save", cause_of(row.asked), now)
        elif event is Event.PREEMPTED and isinstance(row, Attempt) and row.preempted is not None:
            self._begin(row.key, row.preempted.way, cause_of(row.preempted.why), now)
        elif row.key in self._under_way and row.state not in (VmState.MOVING, *UNWRITTEN):
            kind = self._under_way.pop(row.key)
            if event in _GIVEN_UP and (change.reason is None or change.reason.kind not in _JOB_OVER):
                self.failed[kind] += 1
                self._step(now)[2][kind] += 1

    def lately(self, now: float) -> tuple[EvictionCounts, ...]:
        newest = int(now // EVICTION_STEP)
        numbers = range(newest - EVICTIONS_KEPT + 1, newest + 1)
        steps = {number: (begun, failed) for number, begun, failed in self._steps if number in numbers}
        none = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        return tuple(
            EvictionCounts(
                *kind,
                EVICTION_STEP,
                tuple(steps.get(number, none)[0][kind] for number in numbers),
                sum(failed[kind] for _, failed in steps.values()),
            )
            for kind in sorted({kind for counts in steps.values() for one in counts for kind in one})
        )

    def _begin(self, key: Key, way: str, cause: str, now: float) -> None:
        if cause:
            self._under_way[key] = (way, cause)
            self.begun[way, cause] += 1
            self._step(now)[1][way, cause] += 1

    def _step(self, now: float) -> tuple[int, Counter[tuple[str, str]], Counter[tuple[str, str]]]:
        number = int(now // EVICTION_STEP)
        if not self._steps or self._steps[-1][0] != number:
            self._steps.append((number, Counter(), Counter()))
        return self._steps[-1]


class Statistics:
    """A watcher of the controller."""

    def __init__(self) -> None:
        self.viewers = 0
        """Viewers of the snapshot, now."""
        self.phases: dict[str, Histogram] = {name: Histogram() for name in PHASES}
        self.stages: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        """By kind of effect and stage."""
        self.events: Counter[tuple[str, str]] = Counter()
        """By kind of row and event."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """By kind of row and cause."""
        self.outcomes: Counter[str] = Counter()
        """Attempts that ended, by how."""
        self.clones: Counter[tuple[str, str, str]] = Counter()
        """VMs that were made, by image, kind and host."""
        self.evictions = Evictions()
        self._moments: dict[int, dict[Event, float]] = {}  # of live attempts
        self._steps: deque[_Step] = deque(maxlen=KEPT)

    def moved(self, moves: Sequence[Move], now: float) -> None:
        step = self._step(now)
        for move in moves:
            for change in move.changes:
                self._count(step, change.row, change.event)
                self.evictions.moved(change, now)
                if isinstance(change.row, Attempt):
                    self._measure(step, change.row, change.event, now)

    def ended(self, done: Done) -> None:
        for stage in done.stages:
            self.stages[str(done.kind), stage.name].observe(stage.seconds)

    def rates(self, now: float) -> RatesView:
        """What happened lately, as of `now` (monotonic)."""
        newest = int(now // STEP)
        counts = {step.number: step.counts for step in self._steps}
        numbers = range(newest - KEPT + 1, newest + 1)
        none = Counter[str]()
        return RatesView(
            STEP,
            {name: tuple(counts.get(number, none)[name] for number in numbers) for name in SERIES},
            {name: self._quantiles(name, numbers) for name in PHASES},
        )

    def _quantiles(self, phase: str, numbers: range) -> Quantiles:
        steps = (step for step in self._steps if step.number in numbers and phase in step.times)
        values = sorted(value for step in steps for value in step.times[phase])
        if not values:
            return Quantiles(0, 0.0, 0.0)
        return Quantiles(len(values), values[len(values) // 2], values[min(len(values) - 1, int(len(values) * 0.95))])

    def _step(self, now: float) -> _Step:
        number = int(now // STEP)
        if not self._steps or self._steps[-1].number != number:
            self._steps.append(_Step(number))
        return self._steps[-1]

    def _count(self, step: _Step, row: Row, event: Event) -> None:
        kind = row.key.kind
        self.events[kind, str(event)] += 1
        if event in _FAILURES:
            self.failures[kind, str(event)] += 1
            step.counts["failures"] += 1
        elif kind == "attempt" and (name := _COUNTED.get(event)):
            step.counts[name] += 1
        if isinstance(row, Vm) and row.state is VmState.PARKED and event is Event.EXISTS:
            self.clones[row.image, str(row.kind), row.host] += 1
            step.counts["vms"] += 1

    def _measure(self, step: _Step, attempt: Attempt, event: Event, now: float) -> None:
        """Note when the event first happened to the attempt, and the phases that end with it. A phase is unknown if it
        began before this process."""
        moments = self._moments.setdefault(attempt.id, {})
        moments.setdefault(event, now)
        if event is Event.TOOK:  # the spare had been cloned and had joined before
            for implied in (Event.ADMITTED, Event.CREATED, Event.ALL_JOINED):
                moments.setdefault(implied, now)
        for name, (first, last) in PHASES.items():
            if event is last and first in moments and moments[event] == now:
                self.phases[name].observe(now - moments[first])
                if len(step.times[name]) < MOST_TIMES:
                    step.times[name].append(now - moments[first])
        if attempt.state in TERMINAL:
            self.outcomes[str(attempt.state)] += 1
            del self._moments[attempt.id]


# --- the log of moves -------------------------------------------------------------------------------


class MoveLog:
    """A watcher of the controller. It keeps the state of each row, because a move does not tell the state before it."""

    def __init__(self, rows: LiveRows) -> None:
        tables = (rows.attempts, rows.vms, rows.templates, rows.offers, rows.leases)
        self._states = {row.key: str(row.state) for table in tables for row in table.values()}
        self._states |= {host.key: str(host.state) for host in rows.hosts.values()}

    def moved(self, moves: Sequence[Move], now: float) -> None:
        for move in moves:
            for change in move.changes:
                self._log(change)

    def ended(self, done: Done) -> None:
        """Effects are logged where they fail, and measured in the journal."""

    def _log(self, change: Change) -> None:
        row = change.row
        old = self._states.pop(row.key, "")
        if row.state not in TERMINAL:
            self._states[row.key] = str(row.state)
        own = row.reason if old != row.state else None  # it tells of the state that has just begun
        log.info(
            "moved", row=str(row.key), old=old, new=str(row.state), by=str(change.event), **_whose(row),
            reason=text_of(change.reason or own),
        )  # fmt: skip


def _whose(row: Row) -> dict[str, Any]:
    if isinstance(row, Attempt):
        return {"attempt": row.id, "job": row.job.job_id}
    if isinstance(row, Vm):
        return {"attempt": row.attempt, "vm": row.name, "host": row.host}
    return {}
