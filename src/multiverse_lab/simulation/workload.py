"""Jobs through the controller in virtual time, without faults, in memory that does not grow with jobs that have ended.

`simulation.run` checks the promises at each commit and remembers all. Here nothing is checked but that each job ends,
and what is known of a job is handed on as it ends. The controller, its store and its pruning are those of the daemon.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from multiverse.config import Settings
from multiverse.controller.history import prune
from multiverse.controller.loop import Controller
from multiverse.core.errors import Broken, Refused
from multiverse.core.model.job import Attempt
from multiverse.core.transition import Done, Event, Move
from multiverse.store import Pruning, Store
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.jobs import JobRecord
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.scenario import Arrival
from multiverse_lab.simulation.world import SimulatedWorld, WorldSettings

_ENDLESS = 1 << 60  # turns of the loop
_KEPT = 600.0  # virtual seconds for which the store keeps what has ended
_STUCK = 40 * 86400.0  # virtual seconds in which no job has ended although some are there


@dataclass(slots=True)
class JobTimes:
    """What happened to a job, in virtual seconds; of several attempts or VMs the last. `seconds` is how long its script
    computes on CPUs of its own."""

    name: str
    uid: int
    cpus: int
    seconds: float
    submitted: float
    opened: float = 0.0  # the controller has an attempt for it
    admitted: float = 0.0  # hosts were found
    created: float = 0.0  # its VMs exist
    started: float = 0.0  # they have an identity, and run
    network: float = 0.0
    daemon: float = 0.0
    node: float = 0.0  # the scheduler knows its nodes
    began: float = -1.0  # the scheduler has started it; below 0: it never ran
    ended: float = 0.0
    result: str = ""

    @property
    def waited(self) -> float:
        return self.began - self.submitted


@dataclass
class WorkloadTotals:
    """What a simulation came to."""

    jobs: int = 0
    refused: int = 0
    ended: int = 0
    commits: int = 0
    most_live: int = 0  # jobs at one moment
    seconds: float = 0.0  # virtual ones, until the last job has ended


Tell = Callable[[JobTimes], None]


def simulate_workload(
    arrivals: Iterable[Arrival],
    world: WorldSettings,
    settings: Settings,
    seed: int,
    ended: Tell,
    advanced: Callable[[WorkloadTotals], None] = lambda totals: None,
) -> WorkloadTotals:
    """Run jobs, which come in the order of their times, through the controller. `ended` is told of each one as it ends.
    Raises `Broken` if jobs are left that never end."""
    with _collecting_seldom():
        return run(_Workload.whole(arrivals, world, settings, seed, ended, advanced), seed, _ENDLESS)


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Look for garbage seldom, and never among what was there before. Most of what a pass makes lives until the next
    one, so that collections find little: a tenth of the time at a thousand hosts."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


_NAMES = {Event.SUBMITTED: "opened", Event.ADMITTED: "admitted", Event.CREATED: "created"}


@dataclass
class AttemptWatch:
    """Notes the moves of attempts, as they are committed. See `controller.loop.Watcher`."""

    live: dict[str, JobTimes] = field(default_factory=dict)  # by job id
    ahead: float = 0.0

    def moved(self, moves: Sequence[Move], now: float) -> None:
        for change in (change for move in moves for change in move.changes):
            name, row = _NAMES.get(change.event), change.row
            times = self.live.get(row.job.job_id) if name and isinstance(row, Attempt) else None
            if name and times is not None:
                setattr(times, name, now - self.ahead)

    def ended(self, done: Done) -> None:
        pass


class _PacedController(Controller):
    """The controller, whose passes take time: what comes meanwhile is looked at in the next one."""

    pass_takes = 0.0

    async def _sleep(self) -> None:
        await asyncio.sleep(self.pass_takes)
        await super()._sleep()


class _Workload:
    def __init__(
        self,
        world: WorldSettings,
        settings: Settings,
        seed: int,
        ended: Tell,
        advanced: Callable[[WorkloadTotals], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = VirtualClock()
        self.world = SimulatedWorld(seed, world)
        self.store = Store(":memory:", self.clock, site="simul")
        ports = self.world.scheduler(Random(f"{seed}/scheduler"), settings.image), self.world.hypervisor(Random(seed))
        self.controller = _PacedController(self.store, *ports, self.clock, settings, Random(f"{seed}/controller"))
        self.controller.pass_takes = world.pass_takes
        self.watch = AttemptWatch(ahead=self.clock.now() - self.loop.time())
        self.controller.watch(self.watch)
        self.world.cluster.hint = self.controller.hint
        self.world.cluster.ended = self._job_ended
        self.totals, self._tell, self._advanced = WorkloadTotals(), ended, advanced
        self._over = asyncio.Event()
        self._all_came = False

    @classmethod
    async def whole(
        cls,
        arrivals: Iterable[Arrival],
        world: WorldSettings,
        settings: Settings,
        seed: int,
        ended: Tell,
        advanced: Callable[[WorkloadTotals], None],
    ) -> WorkloadTotals:
        self = cls(world, settings, seed, ended, advanced)
        tasks = [asyncio.create_task(work) for work in (self._submit(arrivals), self._prune(), self.controller.run())]
        over = asyncio.create_task(self._wait())
        try:
            await asyncio.wait([over, *tasks[1:]], return_when=asyncio.FIRST_COMPLETED)
            for task in (tasks[0], over, *tasks[1:]):
                if task.done():
                    task.result()
        finally:
            for task in (over, *tasks):
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)
            self.totals.commits = self.store.commits
            self.store.close()
        return self.totals

    async def _wait(self) -> None:
        while not self._over.is_set():
            before = self.totals.ended
            try:
                async with asyncio.timeout(_STUCK):
                    await self._over.wait()
            except TimeoutError:
                if self.watch.live and self.totals.ended == before:
                    left = ", ".join(list(self.watch.live)[:3])
                    raise Broken(f"jobs never end: {left}", hint="do they fit on the hosts?") from None

    async def _submit(self, arrivals: Iterable[Arrival]) -> None:
        cluster = self.world.cluster
        for arrival in arrivals:
            if (left := arrival.at - self.loop.time()) > 0:
                await asyncio.sleep(left)
            batch, now = arrival.batch, self.loop.time()
            self.totals.jobs += 1
            try:
                job_id = cluster.submit(batch)
            except Refused:
                self.totals.refused += 1
                continue
            cpus = batch.nodes * batch.size.cpus
            self.watch.live[job_id] = JobTimes(batch.name, batch.uid, cpus, batch.seconds, now)
            self.totals.most_live = max(self.totals.most_live, len(self.watch.live))
        self._all_came = True
        self._check_over()

    def _job_ended(self, job: JobRecord) -> None:
        times = self.watch.live.pop(job.job_id)
        times.ended, times.result = self.loop.time(), job.result
        times.began = job.started if job.placed else -1.0
        for guest in job.placed:
            for name, at in getattr(guest, "times", {}).items():
                setattr(times, name, max(at, getattr(times, name)))
        self.totals.ended += 1
        self.totals.seconds = self.loop.time()
        self._tell(times)
        self._advanced(self.totals)
        self._check_over()

    def _check_over(self) -> None:
        if self._all_came and not self.watch.live:
            self._over.set()

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_KEPT / 4)
            await prune(Pruning(self.store, self.clock.wall() - _KEPT), self.clock)
