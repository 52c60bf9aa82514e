"""All that was observed and is remembered: what the planner decides upon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from multiverse.core.model.host import HypervisorView
from multiverse.core.model.job import Attempt, SchedulerView
from multiverse.core.model.keys import Key
from multiverse.core.model.sizes import CloneKind
from multiverse.core.model.template import Template
from multiverse.core.model.vm import Vm

Row = Attempt | Vm | Template


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """A value that was looked at; the look began at `began` (monotonic). Anything newer is not in it."""

    value: T
    began: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the controller remembers of what went before, and a restart forgets: nothing but the pace hangs on it.

    `arrivals` is how many VMs a second jobs are given, by image. `seconds` is how long VMs lately took from claim to
    node, by image and kind. `paced` says until when the making of clones is paid for, by (host, image, kind): see
    `pacing.ForecastRecorder`. `rest` says before when the pool of an image makes no more, for its VMs failed.
    """

    arrivals: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    seconds: Mapping[tuple[str, CloneKind], float] = field(default_factory=lambda: MappingProxyType({}))
    paced: Mapping[tuple[str, str, CloneKind], float] = field(default_factory=lambda: MappingProxyType({}))
    rest: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class World:
    """All that was seen, and when effects last ended. A source that is None is unknown, never empty.

    `effect_ended_at` maps a row to the time its last effect ended, infinity while one runs: absence counts
    only in a look that began later.
    """

    scheduler: Seen[SchedulerView] | None = None
    hypervisor: Seen[HypervisorView] | None = None
    effect_ended_at: Mapping[Key, float] = field(default_factory=lambda: MappingProxyType({}))
    forecast: Forecast = Forecast()


Detail = Mapping[str, Any]
