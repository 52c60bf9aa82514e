"""Run the real controller and store against the simulated world, through faults and crashes, by seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.simulation.clock import VirtualClock
from multiverse.simulation.faults import FaultyHypervisor, FaultyScheduler, Mishaps, Odds, Wire, befall
from multiverse.simulation.hypervisor import SimulatedHypervisor
from multiverse.simulation.jobs import Batch
from multiverse.simulation.loop import run
from multiverse.simulation.scheduler import SimulatedScheduler
from multiverse.simulation.world import World, WorldSettings
from multiverse.store import Store

SITE = "simul"


@dataclass(frozen=True)
class Deed:
    """What a user does to a job `after` seconds: `what` is a method of `Cluster` that takes a job id."""

    after: float
    what: str
    changes: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Arrival:
    """A job, or an array of `tasks`, submitted `at` seconds, and what its user does to it later."""

    at: float
    batch: Batch
    tasks: int = 0
    deeds: tuple[Deed, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """One simulation: the same scenario gives the same journal. `crashes` is the mean time in seconds
    between two deaths of the controller (0: never) until `mishaps.until`, `down` for how long it then
    stays away. `limit` is how long, in virtual seconds, all may take. `hints` is the share of hints that
    arrive."""

    seed: int
    arrivals: tuple[Arrival, ...]
    world: WorldSettings = field(default_factory=WorldSettings)
    settings: Settings = field(default_factory=Settings)
    scheduler_odds: Odds = field(default_factory=Odds)
    hypervisor_odds: Odds = field(default_factory=Odds)
    mishaps: Mishaps = field(default_factory=Mishaps)
    crashes: float = 0.0
    down: tuple[float, float] = (0.1, 20.0)
    hints: float = 0.9
    limit: float = 4000.0
    database: Path | str = ":memory:"


@dataclass(frozen=True)
class Outcome:
    """What became of it. `wrongs` is empty if all promises were kept."""

    scenario: Scenario
    seconds: float
    crashes: int
    faults: dict[str, int]
    results: dict[str, str]  # by the world's number and the job id
    journal: list[str]
    wrongs: list[str]

    def story(self, lines: int = 60) -> str:
        """The wrongs and the journal's end, for people."""
        told = [f"seed {self.scenario.seed}, {self.seconds:.1f} s, {self.crashes} crashes", *self.wrongs, "..."]
        return "\n".join([*told, *self.journal[-lines:]])


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario in virtual time, from the first submission until nothing is left to do."""
    return run(_Simulation.whole(scenario), scenario.seed)


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.loop = asyncio.get_running_loop()
        self.clock = VirtualClock()
        self.world = World(scenario.seed, scenario.world)
        self.rng = Random(f"{scenario.seed}/run")
        self.scheduler = SimulatedScheduler(self.world, self._random("scheduler"))
        self.hypervisor = SimulatedHypervisor(self.world, self._random("hypervisor"))
        self.store = Store(scenario.database, self.clock, site=SITE)
        self.controller: Controller | None = None
        self.crashes = 0
        self.wires: list[Wire] = []
        self.world.cluster.hint = self._hint

    @classmethod
    async def whole(cls, scenario: Scenario) -> Outcome:
        self = cls(scenario)
        tasks = [asyncio.create_task(self._live(arrival)) for arrival in scenario.arrivals]
        mishaps = befall(self.world, self._random("mishaps"), scenario.mishaps)
        reign = asyncio.create_task(self._reign())
        try:
            await self._until(lambda: all(task.done() for task in tasks) and self._at_rest(), reign)
            for task in (*tasks, *mishaps):
                if task.done():
                    task.result()
        finally:
            for task in (reign, *mishaps):
                task.cancel()
        return self._judge()

    def _random(self, name: str) -> Random:
        return Random(f"{self.scenario.seed}/{name}")

    # --- users

    async def _live(self, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at)
        cluster = self.world.cluster
        batch, tasks = arrival.batch, arrival.tasks
        ids = cluster.submit_array(batch, tasks) if tasks else [cluster.submit(batch)]
        records = [cluster.jobs[job_id] for job_id in ids]
        passed = 0.0
        for deed in sorted(arrival.deeds, key=lambda deed: deed.after):
            await asyncio.sleep(deed.after - passed)
            passed = deed.after
            await cluster.answers()  # whoever gets no answer tries again
            for record in records:
                if cluster.jobs.get(record.job_id) is record:
                    getattr(cluster, deed.what)(record.job_id, **dict(deed.changes))

    # --- the controller, again and again

    async def _reign(self) -> None:
        while True:
            wires = [
                Wire(self._random(f"wire-s-{self.crashes}"), self.scenario.scheduler_odds),
                Wire(self._random(f"wire-h-{self.crashes}"), self.scenario.hypervisor_odds, outlives=False),
            ]
            self.wires += wires
            scheduler = FaultyScheduler(self.scheduler, wires[0])
            hypervisor = FaultyHypervisor(self.hypervisor, wires[1])
            self.controller = Controller(self.store, scheduler, hypervisor, self.clock, self.scenario.settings)
            task = asyncio.create_task(self.controller.run())
            done, _ = await asyncio.wait([task], timeout=self._life())
            if done:
                task.result()
            self.crashes += 1
            self.controller = None
            for wire in wires:
                wire.sever()
            task.cancel()  # never awaited: the dead do not tidy up, their calls just never return
            await asyncio.sleep(self.rng.uniform(*self.scenario.down))
            if self.scenario.database != ":memory:":
                self.store.close()
                self.store = Store(self.scenario.database, self.clock)

    def _life(self) -> float | None:
        if self.scenario.crashes <= 0:
            return None
        life = self.rng.expovariate(1.0 / self.scenario.crashes)
        return life if self.loop.time() + life < self.scenario.mishaps.until else None

    def _hint(self) -> None:
        if self.controller is not None and self.rng.random() < self.scenario.hints:
            self.controller.hint()

    # --- the end

    def _at_rest(self) -> bool:
        if self.world.unfinished() or self.world.leftovers() or self.controller is None:
            return False
        rows = self.store.rows()
        return not rows.attempts and not rows.vms

    async def _until(self, met: Callable[[], bool], reign: asyncio.Task[None]) -> None:
        while not met() and self.loop.time() < self.scenario.limit:
            if reign.done():
                reign.result()
            await asyncio.sleep(1.0)  # virtual: rest is a state of many parts, and none of them announces it

    def _judge(self) -> Outcome:
        rows = self.store.rows()
        wrongs = [*self.world.violations(), *self.world.unfinished(), *self.world.leftovers(), *self._unreasoned()]
        wrongs += [f"{row.key} is still {row.state}: {row.reason}" for row in rows.attempts.values()]
        wrongs += [f"{row.key} is still {row.state}: {row.reason}" for row in rows.vms.values()]
        wrongs += [f"claim of {claim.owner} is left" for claim in rows.claims if claim.owner.kind != "template"]
        faults: dict[str, int] = {}
        for wire in self.wires:
            for what, times in wire.met.items():
                faults[what] = faults.get(what, 0) + times
        entries = self.store.journal()
        return Outcome(
            scenario=self.scenario,
            seconds=self.loop.time(),
            crashes=self.crashes,
            faults=faults,
            results={f"{job.number}: {job.job_id}": job.result for job in self.world.cluster.history},
            journal=[
                f"{e.mono:10.3f} {e.kind} {e.id} {e.event}: {e.source} -> {e.target} {e.reason} {e.detail or ''}"
                for e in entries
            ],
            wrongs=wrongs + [f"{e.kind} {e.id} quarantined: {e.reason}" for e in entries if e.event == "quarantined"],
        )

    def _unreasoned(self) -> list[str]:
        """Jobs that ended without having run, and neither their user nor a reason explains it."""
        return [
            f"job {job.job_id} ended as {job.result} without a reason"
            for job in self.world.cluster.history
            if job.result == "CANCELLED" and not job.by_user and not job.comment
        ]
