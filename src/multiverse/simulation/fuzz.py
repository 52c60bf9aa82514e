"""Many histories, by seed, on all cores; and what is worth keeping of those that go wrong."""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import Refused
from multiverse.simulation.run import Scenario, simulate
from multiverse.simulation.scenarios import troubled


@dataclass(frozen=True)
class Verdict:
    """What one seed's history came to. `wrongs` is empty if it kept its promises."""

    seed: int
    wrongs: tuple[str, ...] = ()
    seconds: float = 0.0  # of virtual time
    jobs: int = 0
    commits: int = 0
    deaths: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    arrows: dict[str, int] = field(default_factory=dict)


def hush() -> None:
    """The controller's log says thousands of lines for each history; its story says it better."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def judge(seed: int) -> Verdict:
    """Simulate one seed's troubled history. Never raises for what the history does."""
    hush()
    try:
        outcome = simulate(troubled(seed))
    except Exception:  # a breakdown of the simulation is a finding like any other
        return Verdict(seed, (traceback.format_exc(limit=-4),))
    return Verdict(
        seed,
        tuple(outcome.wrongs),
        outcome.seconds,
        len(outcome.results),
        outcome.commits,
        outcome.crashes,
        dict(outcome.faults()),
        dict(outcome.arrows),
    )


def fuzz(seeds: Iterable[int], processes: int | None = None) -> Iterator[Verdict]:
    """The verdicts, as they come, from as many processes as there are cores unless told otherwise."""
    processes = processes or len(os.sched_getaffinity(0))
    if processes == 1:
        yield from map(judge, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(judge, seeds, chunksize=4)


_SCENARIO = TypeAdapter(Scenario)


def save(scenario: Scenario, path: Path) -> None:
    """Write a scenario as JSON, to be replayed."""
    path.write_bytes(_SCENARIO.dump_json(scenario, indent=1) + b"\n")


def load(path: Path) -> Scenario:
    """Read what `save` wrote. `Refused` for anything else."""
    try:
        return _SCENARIO.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise Refused(f"{path} is no scenario: {error}", hint="multiverse simulate shrink writes one") from error
