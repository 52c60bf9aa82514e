"""From the journal to the timeline of an attempt. Nothing else of the service reads journal entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multiverse.api import PhaseView, TimelineEntry, TimelineView
from multiverse.core.model import Reason, text_of
from multiverse.core.transition import Event
from multiverse.store import Entry

_PHASES: tuple[tuple[str, Event, Event], ...] = (
    ("queued", Event.SUBMITTED, Event.ADMITTED),
    ("clone", Event.ADMITTED, Event.CREATED),
    ("join", Event.CREATED, Event.ALL_JOINED),
    ("launch", Event.ALL_JOINED, Event.RUNS),
    ("run", Event.RUNS, Event.ENDED),
    ("reclaim", Event.ENDED, Event.RECLAIMED),
)
"""Each phase with the events of the attempt that begin and end it."""

Tell = Callable[[Reason | None], str]
"""Words a reason, as far as whoever asks may be told of it."""

_PHASE_OF_EFFECT = {"create": "clone", "start": "join"}
"""The phases whose stages are known, by the effect that reports them."""


def timeline(
    job_id: str,
    attempt: int,
    state: str,
    entries: Sequence[Entry],
    now: float,
    tell: Tell = text_of,
) -> TimelineView:
    """The timeline of one attempt, from the journal entries of the attempt and its VMs, in order. `now` is the present
    monotonic time: a phase that has not ended lasts until then. `tell` words reasons."""
    first = entries[0].mono if entries else 0.0
    return TimelineView(
        job_id=job_id,
        attempt=attempt,
        state=state,
        wall=entries[0].wall if entries else 0.0,
        phases=phases(entries, now),
        entries=tuple(
            TimelineEntry(
                at=entry.mono - first,
                subject=f"{entry.kind} {entry.id}",
                event=entry.event,
                state=entry.target or "",
                reason=tell(entry.reason)
                or ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in entry.detail.get("stages", ())),
            )
            for entry in entries
        ),
    )


def phases(entries: Sequence[Entry], now: float) -> tuple[PhaseView, ...]:
    """The phases of an attempt, in order. A phase that has not ended lasts until `now`. A phase that was interrupted
    ends when the reclaim begins, whatever caused the reclaim."""
    moments, reclaiming = _moments(entries)
    stages = _stages(entries)
    found: list[PhaseView] = []
    for name, first, last in _PHASES:
        began = reclaiming if name == "reclaim" else moments.get(first)
        if began is None:
            continue
        ended = moments.get(last)
        if name != "reclaim" and ended is None:
            ended = reclaiming
        found.append(PhaseView(name, began, (ended if ended is not None else now) - began, stages.get(name, ())))
    return tuple(found)


def _moments(entries: Sequence[Entry]) -> tuple[dict[str, float], float | None]:
    """When each event of the attempt first happened, and when the reclaim began (None: it has not)."""
    moments: dict[str, float] = {}
    reclaiming = None
    for entry in entries:
        if entry.kind != "attempt":
            continue
        moments.setdefault(entry.event, entry.mono)
        if entry.target == "reclaiming" and entry.source != "reclaiming":
            reclaiming = entry.mono
    if (took := moments.get(Event.TOOK)) is not None:  # the spare had been cloned and had joined before
        moments |= dict.fromkeys((Event.ADMITTED, Event.CREATED, Event.ALL_JOINED), took)
    return moments, reclaiming


def _stages(entries: Sequence[Entry]) -> dict[str, tuple[tuple[str, float], ...]]:
    """The stages of the first effect of each phase, by phase."""
    stages: dict[str, tuple[tuple[str, float], ...]] = {}
    for entry in entries:
        phase = _PHASE_OF_EFFECT.get(entry.event)
        if phase and phase not in stages and "stages" in entry.detail:
            stages[phase] = tuple((str(name), float(seconds)) for name, seconds in entry.detail["stages"])
    return stages
