"""The result of a soak test in figures: jobs by kind and ending, and how long until jobs started after an incident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiverse_lab.soak.judge import Ending, HappenedIncident, Verdict
from multiverse_lab.soak.run import SoakResult

EXPLAINED = (Ending.AGAIN, Ending.EXPLAINED, Ending.REFUSED)
"""Endings that an incident excuses."""


@dataclass(frozen=True, slots=True)
class IncidentSummary:
    """The incidents of a kind. `lasted` and `until_start` are the longest: from the beginning of an incident until it
    was mended, and from then until a job started. None if no job started any more."""

    count: int
    lasted: float
    until_start: float | None


def by_kind(verdicts: Sequence[Verdict]) -> dict[str, Counter[Ending]]:
    """How many jobs of each kind ended how."""
    found: dict[str, Counter[Ending]] = {}
    for one in verdicts:
        found.setdefault(one.facts.kind.name, Counter())[one.ending] += 1
    return found


def incidents(happened: Sequence[HappenedIncident], verdicts: Sequence[Verdict]) -> dict[str, IncidentSummary]:
    starts = sorted(run.began for one in verdicts for run in one.facts.runs)
    found: dict[str, IncidentSummary] = {}
    for kind in dict.fromkeys(one.kind.name for one in happened):
        same = [one for one in happened if one.kind.name == kind]
        waits = [wait for one in same if (wait := _until_start(one, starts)) is not None]
        found[kind] = IncidentSummary(len(same), max(one.mended - one.began for one in same), max(waits, default=None))
    return found


def _until_start(one: HappenedIncident, starts: Sequence[float]) -> float | None:
    return next((at - one.mended for at in starts if at >= one.mended), None)


def document(result: SoakResult, seed: int, minutes: float) -> dict[str, Any]:
    """The result as JSON."""
    return {
        "seed": seed,
        "minutes": minutes,
        "stopped": result.stopped,
        "not_submitted": result.put_off,
        "jobs": {kind: dict(endings) for kind, endings in by_kind(result.verdicts).items()},
        "incidents": {
            kind: {"count": one.count, "longest": one.lasted, "longest_until_a_start": one.until_start}
            for kind, one in incidents(result.incidents, result.verdicts).items()
        },
        "explained": [
            _job(one) | {"explanation": one.explanation} for one in result.verdicts if one.ending in EXPLAINED
        ],
        "violations": [
            _job(one) | {"violations": list(one.violations), "timeline": result.timelines.get(one.facts.name, [])}
            for one in result.verdicts
            if one.violations
        ],
        "died": result.died,
        "left": result.leftovers,
    }


def _job(one: Verdict) -> dict[str, Any]:
    facts = one.facts
    return {"job": facts.job_id, "name": facts.name, "kind": facts.kind.name, "hits": hits(one)}


def hits(one: Verdict) -> list[str]:
    """The kinds of incidents that may have hit the job."""
    return list(dict.fromkeys(hit.kind.name for hit in one.hits))
