"""Make a scenario that goes wrong smaller, for as long as it still goes wrong.

A scenario is a value: jobs, what users do, mishaps, deaths, and the faults that calls meet. First the faults
that were drawn become a list; then ever smaller parts of each list are left out (delta debugging: Zeller and
Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002), and what is left is made plainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from multiverse.config import ImageSettings
from multiverse.core.model import Size
from multiverse.simulation.faults import Odds
from multiverse.simulation.guests import GuestPace
from multiverse.simulation.jobs import Batch
from multiverse.simulation.loop import Livelock
from multiverse.simulation.run import Outcome, Scenario, simulate

Wrong = Callable[[Scenario], bool]
PARTS = ("mishaps", "blows", "deaths", "arrivals")


def goes_wrong(scenario: Scenario) -> bool:
    """Whether a promise is broken, or the simulation itself breaks down or never ends."""
    try:
        return bool(simulate(scenario).wrongs)
    except (Exception, Livelock):
        return True


def explicit(outcome: Outcome) -> Scenario:
    """The same scenario, with what its calls met as a list in place of odds."""
    return replace(outcome.scenario, blows=outcome.blows, scheduler_odds=Odds(), hypervisor_odds=Odds())


def shrink(scenario: Scenario, wrong: Wrong = goes_wrong, *, tries: int = 2000) -> Scenario:
    """The smallest scenario found, within so many simulations, that still goes wrong. `scenario` itself must."""
    left = tries

    def still(candidate: Scenario) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and wrong(candidate)

    before = None
    while before != scenario and left > 0:
        before = scenario
        for part in PARTS:
            scenario = _fewer(scenario, part, still)
        for candidate in _plainer(scenario):
            if candidate(scenario) != scenario and still(candidate(scenario)):
                scenario = candidate(scenario)
    return scenario


def _fewer(scenario: Scenario, part: str, still: Wrong) -> Scenario:
    """Leave out ever smaller runs of one list."""
    size = len(getattr(scenario, part) or ())
    while size >= 1:
        at = 0
        while at < len(items := getattr(scenario, part) or ()):
            fewer: dict[str, Any] = {part: (*items[:at], *items[at + size :])}
            candidate = replace(scenario, **fewer)
            if (part != "arrivals" or candidate.arrivals) and still(candidate):
                scenario = candidate
            else:
                at += size
        size //= 2
    return scenario


def _plainer(scenario: Scenario) -> Iterator[Callable[[Scenario], Scenario]]:
    """Changes that make a scenario plainer, each tried by itself."""
    yield lambda s: replace(s, hints=1.0)
    yield lambda s: replace(s, world=replace(s.world, guests=GuestPace()))
    yield lambda s: replace(s, world=replace(s.world, hosts=s.world.hosts[:1]))
    yield lambda s: replace(s, settings=replace(s.settings, image=ImageSettings()))
    for index in range(len(scenario.settings.pool)):
        yield _without_pool(index)
    for index, arrival in enumerate(scenario.arrivals):
        yield _arrival(index, deeds=())
        for nth in range(len(arrival.deeds)):
            yield _arrival(index, deeds=(*arrival.deeds[:nth], *arrival.deeds[nth + 1 :]))
        yield _arrival(index, tasks=0)
        plain = Batch(name=arrival.batch.name, seconds=arrival.batch.seconds, size=Size(1, 64))
        for name in (field.name for field in fields(Batch)):
            if getattr(plain, name) != getattr(arrival.batch, name):
                yield _batch(index, name, getattr(plain, name))


def _without_pool(index: int) -> Callable[[Scenario], Scenario]:
    def fewer(s: Scenario) -> Scenario:
        return replace(s, settings=replace(s.settings, pool=(*s.settings.pool[:index], *s.settings.pool[index + 1 :])))

    return fewer


def _arrival(index: int, **changes: Any) -> Callable[[Scenario], Scenario]:
    return lambda s: replace(s, arrivals=_with(s.arrivals, index, lambda arrival: replace(arrival, **changes)))


def _batch(index: int, name: str, value: object) -> Callable[[Scenario], Scenario]:
    def change(arrival: Any) -> Any:
        return replace(arrival, batch=replace(arrival.batch, **{name: value}))

    return lambda s: replace(s, arrivals=_with(s.arrivals, index, change))


def _with(items: Sequence[Any], index: int, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(change(item) if at == index else item for at, item in enumerate(items))
