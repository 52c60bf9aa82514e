"""Observers: one polling task for each source, quicker when a hint says that something may have changed.

Each observer waits for its own source alone. A whole load of the scheduler takes time that grows with the cluster, so
whole loads are rare. In between, awaited jobs and nodes and hinted jobs are read alone (`ports.Parts`), if possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Generic, TypeVar

import structlog

from multiverse.controller.publication import end_tasks, wait_at_most
from multiverse.core.capacity.sizes import job_limits
from multiverse.core.errors import MultiverseError
from multiverse.core.leases import leasable_hosts
from multiverse.core.model.basics import Size
from multiverse.core.model.host import HypervisorView, JobLimits, KnownHost
from multiverse.core.model.job import SchedulerPart, SchedulerView
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.ports import Clock, Hypervisor, Scheduler, Source

T = TypeVar("T")
K = TypeVar("K")
log = structlog.get_logger()

CanWait = Callable[[str, Observation | None, Seen[HypervisorView] | None], bool]
"""Whether an observation of a source needs no pass of its own, by what the last pass was told and what is known."""

BURST = (0.0, 0.05, 0.15, 0.4)  # seconds after a hint: the change may not be visible at once

TIMEOUT = 60.0

WHOLE_SHARE = 20.0  # whole loads begin at intervals of so many times the shorter of the last two durations
PART_SHARE = 3.0  # the same for readings of a part


class Observer(Generic[T]):
    """Keeps the latest whole view of one source. After a failed observation the source is unknown."""

    def __init__(
        self,
        name: str,
        observe: Callable[[], Awaitable[T]],
        clock: Clock,
        interval: Callable[[], float],
        seen: Callable[[], None],
    ) -> None:
        self.name = name
        self.latest: Seen[T] | None = None
        self.failure = ""
        self.observations = 0
        self.since = clock.now()  # since when it is known, or unknown
        self.asked: float | None = None  # since when an observation waits for its answer
        self._observe, self._clock, self._interval, self._seen = observe, clock, interval, seen
        self._began = clock.now()
        self._due: list[float] = []
        self._poked = asyncio.Event()

    def poke(self, *, burst: bool = False) -> None:
        """Observe soon: once, or several times when the change may take a moment to be visible."""
        now = self._clock.now()
        self._due = sorted({*self._due, *(now + wait for wait in (BURST if burst else BURST[:1]))})
        self._poked.set()

    def reconsider(self) -> None:
        """The interval has changed: the next observation may be due sooner than it was when this one ended."""
        self._poked.set()

    async def run(self) -> None:
        """Observe until cancelled. Any failure makes the source unknown."""
        while True:
            self._began = self.asked = self._clock.now()
            self._due = [due for due in self._due if due > self._began]
            try:
                async with asyncio.timeout(TIMEOUT):
                    latest = await self._load()
            except (MultiverseError, TimeoutError) as error:
                self._unknown(str(error) or f"no answer within {TIMEOUT:g} s")
            except Exception as error:  # a defect of a driver: its source is unknown, and the others go on
                self._unknown(f"{type(error).__name__}: {error}", traceback=True)
            else:
                self.answered(latest)
            self.observations, self.asked = self.observations + 1, None
            await self._wait()

    def answered(self, latest: Seen[T]) -> None:
        if self.failure:
            log.info("source is back", source=self.name)
        self._turn(self.latest is None)
        self.latest, self.failure = latest, ""
        self._seen()

    async def _load(self) -> Seen[T]:
        return Seen(await self._observe(), self._began)

    def _unknown(self, reason: str, *, traceback: bool = False) -> None:
        """The observation failed. A failure is logged once for as long as it repeats."""
        if reason != self.failure:
            log.warning("source is unknown", source=self.name, reason=reason, exc_info=traceback)
        self._turn(self.latest is not None)
        self.latest, self.failure = None, reason
        self._seen()

    def _turn(self, turned: bool) -> None:
        if turned:
            self.since = self._clock.now()

    def _next(self) -> float:
        """When the next observation is due: a hint's time, or the interval since the last observation began."""
        return min([self._began + self._interval(), *self._due])

    async def _wait(self) -> None:
        while True:
            left = self._next() - self._clock.now()
            if left <= 0:
                return
            self._poked.clear()
            await wait_at_most(self._poked, left)  # a timer may fire a little early


def _due(hints: dict[K, list[float]], now: float) -> dict[K, list[float]]:
    due = {key: times for key, times in hints.items() if times[0] <= now}
    for key in due:
        del hints[key]
    return due


def _keep(hints: dict[K, list[float]], unseen: Mapping[K, list[float]], now: float) -> None:
    for key in unseen:
        later = sorted({*hints.get(key, ()), *(time for time in unseen[key] if time > now)})
        if later:
            hints[key] = later


@dataclass(frozen=True, slots=True)
class Awaited:
    """What is to be read again soon."""

    jobs: Mapping[str, int | None] = field(default_factory=dict)  # by id, with the uid of each
    nodes: frozenset[str] = frozenset()  # by name


class SchedulerObserver(Observer[SchedulerView]):
    """Keeps the latest view of the scheduler: a whole load, and the parts that were read since.

    `poll` is the shortest interval of whole loads and the longest without any reading, in seconds. `interval` is that
    of readings of what is `awaited`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        poll: float,
        interval: Callable[[], float],
        awaited: Callable[[], Awaited],
        seen: Callable[[], None],
    ) -> None:
        super().__init__("scheduler", scheduler.observe, clock, interval, seen)
        self.whole_loads = 0
        self._parts, self._poll, self._awaited = scheduler.parts, poll, awaited
        self._whole_began = self._part_began = self._part_took = 0.0
        self._whole_took = 0.0, 0.0  # the last two durations
        self._unnamed: list[float] = []  # times of whole loads, after hints that name nobody
        self._users: dict[int, list[float]] = {}  # whose jobs are to be read, with the times of the readings
        self._jobs: dict[str, list[float]] = {}  # the same of single jobs

    def hint(self, uid: int | None = None, job_id: str = "") -> None:
        """Something may have changed in the scheduler: a job of this user or this job, or, without both, any job."""
        now = self._clock.now()
        times = [now + wait for wait in BURST]
        if self._parts is None:
            self.poke(burst=True)
            return
        if uid is not None:
            self._users[uid] = sorted([*self._users.get(uid, ()), *times])
        if job_id:
            self._jobs[job_id] = sorted([*self._jobs.get(job_id, ()), *times])
        if uid is None and not job_id:
            self._unnamed = sorted({*self._unnamed, *times})
        self._poked.set()

    async def _load(self) -> Seen[SchedulerView]:
        if self._parts is None or self.latest is None or self._clock.now() >= self._whole_due():
            return await self._load_whole()
        before, began = self.latest, self._began
        users, jobs = _due(self._users, began), _due(self._jobs, began)
        awaited = self._awaited()
        uids = {job_id: job.uid for job_id in jobs if (job := before.value.jobs.get(job_id))}
        part = await self._parts.read({**dict.fromkeys(jobs), **uids, **awaited.jobs}, users, awaited.nodes)
        self._part_began, self._part_took = began, self._clock.now() - began
        self._settle(before.value, part, users, jobs)
        return Seen(before.value.merged(part, began), before.began)

    async def _load_whole(self) -> Seen[SchedulerView]:
        self._whole_began = self._began
        self._unnamed = [time for time in self._unnamed if time > self._began]
        users, jobs = _due(self._users, self._began), _due(self._jobs, self._began)
        view = await self._observe()
        self.whole_loads += 1
        self._whole_took = self._whole_took[1], self._clock.now() - self._began
        _keep(self._users, users, self._began)
        _keep(self._jobs, jobs, self._began)
        return Seen(view, self._began)

    def _settle(
        self,
        before: SchedulerView,
        part: SchedulerPart,
        users: Mapping[int, list[float]],
        jobs: Mapping[str, list[float]],
    ) -> None:
        """Forget hints whose change was seen, repeat the others. What could not be read waits for a whole load."""
        if not (users.keys() <= part.users and jobs.keys() <= part.job_ids):
            self._unnamed = sorted({*self._unnamed, self._began})
        known = before.jobs
        changed = {job_id for job_id, job in part.jobs.items() if job is not known.get(job_id) != job}
        changed |= {job_id for job_id in part.job_ids if job_id in known and job_id not in part.jobs}
        by_user = {part.jobs[job_id].uid for job_id in changed if job_id in part.jobs}
        _keep(self._users, {uid: times for uid, times in users.items() if uid not in by_user}, self._began)
        _keep(self._jobs, {job_id: times for job_id, times in jobs.items() if job_id not in changed}, self._began)

    def _whole_due(self) -> float:
        may = self._whole_began + WHOLE_SHARE * min(self._whole_took)
        return max(may, min([self._whole_began + self._poll, *self._unnamed]))

    def _next(self) -> float:
        if self._parts is None or self.latest is None:
            return super()._next()
        hints = [times[0] for times in (*self._users.values(), *self._jobs.values())]
        # Not after the whole loads in between: parts that took long once would be put off by each of them, for ever.
        part = max(min([super()._next(), *hints]), self._part_began + PART_SHARE * self._part_took)
        return min(self._whole_due(), part)


class ObserverTasks:
    """The tasks of observers. They run from `begin` to `end`, and end before only if they are stopped, or by a bug."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self._running: dict[Observer[SchedulerView] | Observer[HypervisorView], asyncio.Task[None]] = {}
        self._runs = False
        self._ended: list[asyncio.Task[None]] = []  # by a bug

    def begin(self, *observers: Observer[SchedulerView] | Observer[HypervisorView]) -> None:
        """Run these, and from now on what `run` is told."""
        self._runs = True
        for observer in observers:
            self.run(observer)

    def run(self, observer: Observer[SchedulerView] | Observer[HypervisorView]) -> None:
        if self._runs:
            task = asyncio.create_task(observer.run(), name=f"observer of {observer.name}")
            self._running[observer] = self.watched(task)

    def stop(self, observer: Observer[HypervisorView]) -> None:
        if task := self._running.pop(observer, None):
            task.cancel()

    def watched(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """A task that ends only if it is cancelled, or by a bug: then the loop ends."""

        def ended(_: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._ended.append(task)
                self.wake()

        task.add_done_callback(ended)
        return task

    def raise_bugs(self) -> None:
        for task in self._ended:
            task.result()

    async def end(self, *others: asyncio.Task[None]) -> None:
        self._runs = False
        await end_tasks([*others, *self._running.values()])


# --- the hosts of the site --------------------------------------------------------------------------


class FollowedHosts:
    """Gives the hypervisor the hosts of the site, observes each source, and tells passes what was observed."""

    def __init__(
        self,
        hypervisor: Hypervisor,
        state: State,
        clock: Clock,
        poll: float,
        began: float,
        tasks: ObserverTasks,
    ) -> None:
        """`began` is since when sources are unknown that the hypervisor does not have."""
        self._hypervisor, self._state, self._clock = hypervisor, state, clock
        self.can_wait: CanWait = lambda *_: False
        self._poll, self._began, self._tasks = poll, began, tasks
        # A named host that has not answered yet may hold what no other host can.
        # One that is leased is a row, and ends with it.
        named = [(host, source.name) for source in hypervisor.sources for host in source.hosts]
        leased = state.leased
        self.declared = [KnownHost(*one) for one in named if one[0] not in leased]
        """The hosts that the settings name, until a pass is committed: then they are rows."""
        self._followed = -1  # `State.host_changes` when hosts were last followed
        self._listened: dict[str, Source] = {}
        self.sources: dict[str, Observer[HypervisorView]] = {}
        """One observer for each source of the hypervisor, by the source's name."""
        self._told: dict[str, Observation] = {}  # at the last pass, by source, also of sources that only rows refer to
        # Sources that the next pass has to look at: observed since the last one, come, gone, or unknown.
        self.anew: set[str] = state.sources()
        self._follow_sources()

    def observations(self) -> dict[str, Observation]:
        told = {**self._told, **{name: self._observation(name) for name in sorted(self.anew)}}
        return {name: one for name, one in told.items() if one is not None}

    def tell(self) -> Mapping[str, Observation]:
        """The same for a pass, at the cost of the sources in `anew`."""
        for name in sorted(self.anew):
            if (observation := self._observation(name)) is not None:
                self._told[name] = observation
            else:
                self._told.pop(name, None)
        return MappingProxyType(self._told)

    def committed(self, world: World) -> None:
        """A pass with this world is committed: its sources are told, but for unknown ones."""
        self.anew = {name for name in world.anew or () if name in self._told and self._told[name].latest is None}
        self.declared = []

    def _observation(self, name: str) -> Observation | None:
        """What is known of a source. One that only rows refer to is unknown since the controller began."""
        if (one := self.sources.get(name)) is not None:
            return Observation(one.latest, one.since, self._heard(one))
        return Observation(None, self._began) if self._state.has_vms_at(name) else None

    def _heard(self, source: Observer[HypervisorView]) -> float:
        silence = self._listened[source.name].silence if source.latest is None else None
        return -inf if silence is None else self._clock.now() - silence

    def known_hosts(self) -> dict[str, KnownHost]:
        """The hosts as observed last, or as declared; without hosts that only an operator has named."""
        members, found = self._hypervisor.membership, dict[str, KnownHost]()
        for name, host in self._state.hosts.items():
            value = host.value or (members.declared(name) if members else None)
            if host.is_member and (value or members is None):
                found[name] = replace(host, value=value)
        return found

    def job_limits(self, policy: Policy, leasable: Mapping[str, Size]) -> JobLimits | None:
        """What no job must exceed, by the hosts of the site and hosts that can be leased."""
        leased = self._state.leased
        static = {name: one for name, one in self.known_hosts().items() if name not in leased}
        return job_limits({**static, **leasable_hosts(leasable, policy)}, policy)

    @property
    def have_changed(self) -> bool:
        return self._followed != self._state.host_changes

    def follow(self) -> None:
        self._followed = self._state.host_changes
        membership = self._hypervisor.membership
        if membership is not None:
            # Until a pass is committed, the state lacks hosts that it would have added.
            hosts = {host.name: host for host in self.declared} | self._state.hosts
            names = [host.name for host in hosts.values() if host.is_member]
            membership.keep(names, self._state.leased_hosts())
            self._follow_sources()

    def _follow_sources(self) -> None:
        sources = {source.name: source for source in self._hypervisor.sources}
        for name in [name for name in self.sources if name not in sources]:
            del self._listened[name]
            self.anew.add(name)
            self._tasks.stop(self.sources.pop(name))
        for name in [name for name in sources if name not in self.sources]:
            observe, interval = sources[name].observe, lambda: self._poll
            observer = Observer(name, observe, self._clock, interval, partial(self._observed_anew, name))
            self.sources[name], self._listened[name] = observer, sources[name]
            self.anew.add(name)
            self._tasks.run(observer)

    def _observed_anew(self, source: str) -> None:
        self.anew.add(source)
        if not self.can_wait(source, self._told.get(source), self.sources[source].latest):
            self._tasks.wake()
