"""Simulate many seeds on all cores, and save scenarios as files."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
from pydantic import TypeAdapter, ValidationError

from multiverse.core.errors import Refused
from multiverse_lab.simulation.generate import crowded, failing, leasing, operated, overflowing, requesting, with_faults
from multiverse_lab.simulation.generate_checkpoints import checkpointing
from multiverse_lab.simulation.generate_evicting import evicting
from multiverse_lab.simulation.generate_leaving import leaving
from multiverse_lab.simulation.generate_moving import moving
from multiverse_lab.simulation.generate_saving import saving
from multiverse_lab.simulation.generate_sleeping import sleeping
from multiverse_lab.simulation.run import simulate
from multiverse_lab.simulation.scenario import Scenario
from multiverse_lab.simulation.world import Pair

OPERATED = 32
"""Of every so many seeds, one is also simulated with hosts behind agents that come, go and are operated."""

CROWDED = 16
"""Of every so many seeds, one is also simulated with more jobs than the hosts hold, and without faults."""


LEASING = 8
"""Of every so many seeds, one is also simulated with hosts that are leased."""

REQUESTING = 16
"""Of every so many seeds, one is also simulated with jobs that request a bandwidth, VMs per host or sockets."""


OVERFLOWING = 8
"""Of every so many seeds, another one than the above is also simulated with a partition that overflows into VMs."""


FAILING = 16
"""Of every so many seeds, one is also simulated with hosts on which VMs fail, and launches that fail."""


MOVING = 8
"""Of every so many seeds, one is also simulated with VMs that move between hosts."""


CHECKPOINTING = 16
"""Of every so many seeds, one is also simulated with jobs of which checkpoints are made."""


SLEEPING = 16
"""Of every so many seeds, one is also simulated with jobs that are suspended for long."""


EVICTING = 16
"""Of every so many seeds, one is also simulated with jobs that leave their hosts for urgent ones, and off drained
hosts."""


LEAVING = 16
"""Of every so many seeds, one is also simulated with jobs that leave leased hosts."""


SAVING = 8
"""Of every so many seeds, one is also simulated with jobs that are saved and resumed."""


class SeedHistory(NamedTuple):
    """A history that of every so many seeds one has, that with this rest, beside the one with faults."""

    scenario: Callable[[int], Scenario]
    every: int
    rest: int = 0


HISTORIES = {
    "crowded": SeedHistory(crowded, CROWDED),
    "operated": SeedHistory(operated, OPERATED),
    "leasing": SeedHistory(leasing, LEASING),
    "requesting": SeedHistory(requesting, REQUESTING),
    "overflowing": SeedHistory(overflowing, OVERFLOWING, OVERFLOWING // 2),
    "failing": SeedHistory(failing, FAILING, FAILING // 2 + 1),
    "saving": SeedHistory(saving, SAVING, 2),
    "moving": SeedHistory(moving, MOVING, 6),
    "sleeping": SeedHistory(sleeping, SLEEPING, 13),
    "checkpointing": SeedHistory(checkpointing, CHECKPOINTING, 10),
    "evicting": SeedHistory(evicting, EVICTING, 3),
    "leaving": SeedHistory(leaving, LEAVING, 7),
}


@dataclass(frozen=True)
class SeedResult:
    """The result of one seed. `violations` is empty if all promises were kept."""

    seed: int
    violations: tuple[str, ...] = ()
    seconds: float = 0.0  # of virtual time
    jobs: int = 0
    commits: int = 0
    crashes: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    transitions: dict[str, int] = field(default_factory=dict)


def silence_logs() -> None:
    """Switch the controller's log off. It has thousands of lines for each seed; an outcome's story says more."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


@contextmanager
def silent_logs() -> Iterator[None]:
    """The same for a while."""
    before = structlog.get_config()
    silence_logs()
    try:
        yield
    finally:
        structlog.configure(**before)


def run_seed(seed: int, pair: Pair | None = None, history: str = "") -> SeedResult:
    """Simulate the scenario with faults of one seed, and the others that it has; or only one history of it. A failure
    of the simulation itself is returned as a violation."""
    silence_logs()
    try:
        outcome = simulate(HISTORIES[history].scenario(seed) if history else with_faults(seed, pair=pair))
        chosen = {} if history else {name: one for name, one in HISTORIES.items() if seed % one.every == one.rest}
        others = {name: simulate(one.scenario(seed)) for name, one in chosen.items()}
    except Exception:
        return SeedResult(seed, (traceback.format_exc(limit=-4),))
    transitions = sum((one.transitions for one in others.values()), outcome.transitions)
    faults = sum((one.fault_counts() for one in others.values()), outcome.fault_counts())
    return SeedResult(
        seed,
        (
            *outcome.violations,
            *(f"--history {name}: {text}" for name, one in others.items() for text in one.violations),
        ),
        outcome.seconds,
        len(outcome.results),
        outcome.commits,
        outcome.crash_count,
        dict(faults),
        dict(transitions),
    )


def fuzz(
    seeds: Iterable[int], processes: int | None = None, pair: Pair | None = None, history: str = ""
) -> Iterator[SeedResult]:
    """The results in the order in which they become available. Uses one process per core unless `processes` is
    given. `history`: only that one of each seed."""
    processes = processes or len(os.sched_getaffinity(0))
    run = partial(run_seed, pair=pair, history=history)
    if processes == 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=4)


_SCENARIO = TypeAdapter(Scenario)


def save(scenario: Scenario, path: Path) -> None:
    """Write a scenario as JSON, for `load`."""
    path.write_bytes(_SCENARIO.dump_json(scenario, indent=1) + b"\n")


def load(path: Path) -> Scenario:
    """Read what `save` wrote. Raises `Refused` for anything else, also for a field that this release does not know."""
    try:
        scenario = _SCENARIO.validate_json(path.read_bytes())
        if unknown := _unknown(json.loads(path.read_bytes()), json.loads(_SCENARIO.dump_json(scenario))):
            raise Refused(f"{path} has fields of another release: {', '.join(unknown)}", hint="shrink its seed again")
        return scenario
    except (OSError, ValidationError) as error:
        raise Refused(f"{path} is no scenario: {error}", hint="multiverse simulate shrink writes one") from error


def _unknown(raw: object, known: object) -> list[str]:
    """The fields of a JSON document that another one does not have, at any depth."""
    match raw, known:
        case dict(), dict():
            lost = [str(key) for key in raw if key not in known]
            return lost + [name for key in raw if key in known for name in _unknown(raw[key], known[key])]
        case list(), list():
            return [name for one, other in zip(raw, known, strict=False) for name in _unknown(one, other)]
        case _:
            return []
