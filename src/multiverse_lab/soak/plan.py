"""The plan of a soak test: which jobs are submitted when, and which incidents there are. A function of the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from multiverse_lab.soak.kinds import CONTROLLER_KILLED, INCIDENTS, KINDS, SoakIncident, SoakKind

TWOFOLD = 0.25
"""The share of incidents during which the controller is killed, too."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to submit `at` seconds after the start. Its script runs for `seconds`."""

    at: float
    name: str
    kind: SoakKind
    seconds: int


@dataclass(frozen=True, slots=True)
class PlannedIncident:
    """An incident `after` so many seconds without one, which lasts for `pause` seconds. `pick` (0 to 1) chooses among
    what it can hit. With `twofold` the controller is killed in the middle of it, and starts when all is mended."""

    after: float
    kind: SoakIncident
    pause: float
    pick: float
    twofold: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Mean seconds between two submissions, and from the end of an incident to the next one."""

    submissions: float = 3.0
    incidents: float = 30.0


@dataclass(frozen=True, slots=True)
class SoakPlan:
    seed: int
    seconds: float
    submissions: tuple[Submission, ...]
    incidents: tuple[PlannedIncident, ...]


def make_plan(seed: int, seconds: float, rates: Rates | None = None) -> SoakPlan:
    """The plan for so many seconds. A longer plan of the same seed begins like a shorter one."""
    rates = rates or Rates()
    return SoakPlan(seed, seconds, _submissions(seed, seconds, rates), _incidents(seed, seconds, rates))


def _submissions(seed: int, seconds: float, rates: Rates) -> tuple[Submission, ...]:
    """A Poisson process of jobs."""
    chance = random.Random(f"jobs {seed}")
    weights = [kind.weight for kind in KINDS]
    found: list[Submission] = []
    at = chance.expovariate(1 / rates.submissions)
    while at < seconds:
        (kind,) = chance.choices(KINDS, weights)
        found.append(Submission(at, f"soak-{len(found) + 1}", kind, chance.randint(*kind.seconds)))
        at += chance.expovariate(1 / rates.submissions)
    return tuple(found)


def _incidents(seed: int, seconds: float, rates: Rates) -> tuple[PlannedIncident, ...]:
    """Rounds in which every kind comes as often as its weight says, each round in another order. So a short test, too,
    has met most kinds. The gaps are at least a third of their mean, because jobs shall start between two incidents."""
    chance = random.Random(f"incidents {seed}")
    found: list[PlannedIncident] = []
    at = 0.0
    while at < seconds:
        round_ = [kind for kind in INCIDENTS for _ in range(kind.weight)]
        chance.shuffle(round_)
        for kind in round_:
            after = rates.incidents / 3 + chance.expovariate(1.5 / rates.incidents)
            twofold = chance.random() < TWOFOLD and kind is not CONTROLLER_KILLED
            found.append(PlannedIncident(after, kind, chance.uniform(*kind.pause), chance.random(), twofold))
            at += after + found[-1].pause
    return tuple(found)
