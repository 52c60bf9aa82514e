"""A scenario: all that determines one simulation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from multiverse.config import Settings
from multiverse.core.model.basics import Size
from multiverse_lab.simulation.faults import ControllerCrash, Incident, Odds, PlannedFault
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.world import WorldSettings


@dataclass(frozen=True)
class UserAction:
    """What a user does to a job `after` seconds. `kind` is a method of `Cluster` that takes a job id; `change` changes
    the job's size and number of nodes. `save` has it saved as soon as it runs; `save_held` too, and then it is held
    until `resume_saved`."""

    after: float
    kind: Literal["cancel", "hold", "release", "requeue", "suspend", "resume", "change", "save", "save_held",
                  "resume_saved"]  # fmt: skip
    size: Size | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class Arrival:
    """A job, or an array of `tasks`, that is submitted at virtual second `at`, and its user's later actions."""

    at: float
    batch: Batch
    tasks: int = 0
    actions: tuple[UserAction, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """One simulation. The same scenario always gives the same journal.

    Faults of calls are drawn from `scheduler_odds` and `hypervisor_odds`, unless `faults` lists them. `hints` is the
    share of the scheduler's hints that arrive at once; of the others, one half arrives late and the other half never,
    and one hint in ten arrives twice. `limit` is the longest duration in virtual seconds. At the virtual seconds of
    `reloads` the controller reads other settings, which differ in keys alone that reload applies.
    """

    seed: int
    arrivals: tuple[Arrival, ...]
    world: WorldSettings = field(default_factory=WorldSettings)
    settings: Settings = field(default_factory=Settings)
    scheduler_odds: Odds = field(default_factory=Odds)
    hypervisor_odds: Odds = field(default_factory=Odds)
    faults: tuple[PlannedFault, ...] | None = None
    incidents: tuple[Incident, ...] = ()
    crashes: tuple[ControllerCrash, ...] = ()
    reloads: tuple[tuple[float, Settings], ...] = ()
    hints: float = 0.9
    limit: float = 4000.0
    database: str = ":memory:"
