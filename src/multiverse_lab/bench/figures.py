"""The figures of any benchmark's JSON by name, and what changed between those of two checkouts.

No figure is listed here. A figure's name is its path in the JSON: `latency.instant.stages.reclaim`. Of a summary there
is the median with its interval, because the others are few samples in short runs; of a list of samples the median. Left
out are what was asked for (the numbers at the top), and what is computed from other figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from multiverse_lab.bench.stats import Summary, median

Better = Literal["less", "more", "neither"]
Verdict = Literal["", "better", "worse", "changed"]

_ASKED = frozenset({"machine", "declared", "host", "paper", "beside", "ratios", "plugging"})
"""What is at the top beside figures: the machine, and what is computed from figures or published."""
_LEVELS = frozenset({"kinds", "phases", "steps"})
"""Keys that only say that figures of several kinds follow."""
_IDENTITIES = ("name", "kind")
_COUNTS = frozenset({"jobs", "vms", "hosts", "tasks"})
"""Numbers within a figure's path that say what was measured: they name it where several were."""
_SUMMARY = frozenset(Summary.__slots__)
_ESTIMATE = frozenset({"value", "low", "high"})

MORE_IS_BETTER = frozenset({"tasks_per_minute", "computing", "spares", "available", "done", "alone"})
NEITHER = frozenset({"machine", "shared", "daemons", "task", "free"})
"""Figures, and parents of figures, of which it does not matter whether they are large: shares of time that depend on
how much was done in it."""

THRESHOLD = 0.10
"""The share of the older median by which a figure must differ."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one run, and its 95 % interval, or the figure twice if the benchmark gives none."""

    value: float
    low: float
    high: float


def flatten(benchmark: str, document: Any) -> dict[str, Figure]:
    """All figures in what `multiverse bench BENCHMARK --json` printed, by name."""
    if isinstance(document, Mapping):
        document = {
            key: value
            for key, value in document.items()
            if key not in _ASKED and isinstance(value, Mapping | list)
        }  # fmt: skip
    return dict(_walk(benchmark, document))


def _walk(name: str, value: Any) -> Iterator[tuple[str, Figure]]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        yield name, Figure(value, value, value)
    elif isinstance(value, list):
        yield from _walk_list(name, value)
    elif value.keys() >= _SUMMARY:
        yield f"{name}.p50", Figure(value["p50"], value["low"], value["high"])
    elif not value.keys() >= _ESTIMATE:
        for key, one in value.items():
            if key not in _COUNTS or not isinstance(one, int):
                yield from _walk(name if key in _LEVELS else f"{name}.{_word(key)}", one)


def _walk_list(name: str, values: Sequence[Any]) -> Iterator[tuple[str, Figure]]:
    if values and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        middle = median(values)
        yield f"{name}.p50", Figure(middle, middle, middle)
        return
    for number, one in enumerate(values):
        if isinstance(one, Mapping):
            yield from _walk(f"{name}.{_identity(one) or number}", one)


def _identity(one: Mapping[str, Any]) -> str:
    """What names one of several: its name, or what was counted."""
    for key in _IDENTITIES:
        if isinstance(one.get(key), str):
            return _word(one[key])
    return "_".join(f"{one[key]}_{key}" for key in sorted(_COUNTS) if isinstance(one.get(key), int))


def _word(text: str) -> str:
    return text.replace(" ", "_").replace(".", "_")


def better(name: str) -> Better:
    """Whether less or more of a figure is better. Times, CPU and memory are to be small."""
    words = name.split(".")
    if NEITHER & set(words[1:]):
        return "neither"
    return "more" if MORE_IS_BETTER & set(words[1:]) else "less"


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A figure of two checkouts: the values of their turns, and the bounds within which each lies. `verdict` is empty
    if the figure has not changed beyond its interval."""

    name: str
    old: tuple[float, ...]
    new: tuple[float, ...]
    old_bounds: tuple[float, float]
    new_bounds: tuple[float, float]
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """The newer median by the older one; None if that is zero."""
        return median(self.new) / median(self.old) if median(self.old) else None


def compare(
    old: Sequence[Mapping[str, Figure]], new: Sequence[Mapping[str, Figure]], threshold: float = THRESHOLD
) -> list[ComparedFigure]:
    """Compare all figures that both have in any turn, one mapping for each turn. Figures that are the same number in
    all turns of both are left out: they were asked for."""
    names = dict.fromkeys(name for turn in old for name in turn)
    found = []
    for name in names:
        before = [turn[name] for turn in old if name in turn]
        after = [turn[name] for turn in new if name in turn]
        if before and after and len({one.value for one in (*before, *after)}) > 1:
            found.append(_compared(name, before, after, threshold))
    return found


def _compared(name: str, before: Sequence[Figure], after: Sequence[Figure], threshold: float) -> ComparedFigure:
    old, new = tuple(one.value for one in before), tuple(one.value for one in after)
    bounds = [(min(one.low for one in some), max(one.high for one in some)) for some in (before, after)]
    return ComparedFigure(name, old, new, bounds[0], bounds[1], _verdict(name, (before, after), bounds, threshold))


def _verdict(
    name: str,
    runs: tuple[Sequence[Figure], Sequence[Figure]],
    bounds: Sequence[tuple[float, float]],
    threshold: float,
) -> Verdict:
    """The medians differ by more than the threshold, and the bounds do not overlap: all turns of one checkout, with the
    intervals that the benchmark gives, lie on one side of all turns of the other. One turn tells nothing, not even with
    an interval: what differs from run to run, such as the machine's other work, is not in it."""
    if any(len(some) == 1 for some in runs):
        return ""
    was, now = (Figure(median([one.value for one in some]), *bound) for some, bound in zip(runs, bounds, strict=True))
    if not differ(was, now, threshold):
        return ""
    wanted = better(name)
    if wanted == "neither":
        return "changed"
    return "better" if (now.value < was.value) is (wanted == "less") else "worse"


def differ(was: Figure, now: Figure, threshold: float = THRESHOLD) -> bool:
    """Whether the values differ by more than that share of the older one, and the intervals do not overlap."""
    overlap = was.low <= now.high and now.low <= was.high
    return not overlap and abs(now.value - was.value) > threshold * abs(was.value)


def only_in(some: Sequence[Mapping[str, Figure]], other: Sequence[Mapping[str, Figure]]) -> list[str]:
    """The names of figures that only the first ones have."""
    there = {name for turn in other for name in turn}
    return [name for name in dict.fromkeys(name for turn in some for name in turn) if name not in there]
