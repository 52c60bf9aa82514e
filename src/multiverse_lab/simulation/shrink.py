"""Make a scenario that breaks a promise smaller, as long as it still breaks one.

A scenario is a value: jobs, actions of users, incidents, crashes, and faults of calls. First the faults that were drawn
are written as a list. Then ever smaller parts of each list are left out (delta debugging: Zeller and Hildebrandt,
"Simplifying and Isolating Failure-Inducing Input", 2002). Then what is left is replaced by simpler values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from multiverse.config import ImageSettings
from multiverse.core.model.basics import Size
from multiverse_lab.simulation.faults import Odds
from multiverse_lab.simulation.guests import GuestBehaviour
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.loop import Livelock
from multiverse_lab.simulation.outcome import Outcome
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Scenario

Failing = Callable[[Scenario], bool]
PARTS = ("incidents", "faults", "crashes", "arrivals")


def breaks_the_same(outcome: Outcome) -> Failing:
    """Whether a promise is broken that the outcome's history breaks: without its numbers and names of VMs, a violation
    is the same text. A smaller scenario may break another promise, for example because its end is left out."""
    wanted = {_kind(text) for text in outcome.violations}

    def failing(scenario: Scenario) -> bool:
        try:
            return any(_kind(text) in wanted for text in simulate(scenario).violations)
        except (Exception, Livelock):
            return False

    return failing


def _kind(violation: str) -> str:
    return re.sub(r"\b[a-z]+-[0-9a-z]+\b|\b[a-z]?[0-9][0-9_.]*", "#", violation)


def explicit(outcome: Outcome) -> Scenario:
    """The same scenario, with the faults that its calls had as a list in place of odds."""
    return replace(outcome.scenario, faults=outcome.faults, scheduler_odds=Odds(), hypervisor_odds=Odds())


def shrink(scenario: Scenario, failing: Failing, *, tries: int = 2000) -> Scenario:
    """The smallest scenario that still fails, found within `tries` simulations. `scenario` itself must fail."""
    left = tries

    def still(candidate: Scenario) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and failing(candidate)

    before = None
    while before != scenario and left > 0:
        before = scenario
        for part in PARTS:
            scenario = _leave_out(scenario, part, still)
        for candidate in _simplifications(scenario):
            if candidate(scenario) != scenario and still(candidate(scenario)):
                scenario = candidate(scenario)
    return scenario


def _leave_out(scenario: Scenario, part: str, still: Failing) -> Scenario:
    """Leave out ever smaller parts of one list."""
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


def _simplifications(scenario: Scenario) -> Iterator[Callable[[Scenario], Scenario]]:
    """Changes that make a scenario simpler. Each is tried by itself."""
    yield lambda s: replace(s, hints=1.0)
    yield lambda s: replace(s, world=replace(s.world, guests=GuestBehaviour()))
    yield lambda s: replace(s, world=replace(s.world, hosts=s.world.hosts[:1]))
    yield lambda s: replace(s, world=replace(s.world, cluster=replace(s.world.cluster, tester=0)))
    yield lambda s: replace(s, settings=replace(s.settings, image=ImageSettings()))
    for index in range(len(scenario.settings.pool)):
        yield _without_pool(index)
    for index, arrival in enumerate(scenario.arrivals):
        yield _arrival(index, actions=())
        for nth in range(len(arrival.actions)):
            yield _arrival(index, actions=(*arrival.actions[:nth], *arrival.actions[nth + 1 :]))
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
