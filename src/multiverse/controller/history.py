"""What is learnt and kept beside the passes: what hosts, VMs and jobs use, and the pruning of what is old.

No pass waits for any of this, and none uses it. A host that does not answer, or a database without room, leaves a gap.
A restart needs nothing of its own: the rows say which jobs run, and the database has their baselines.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import structlog

from multiverse.core.errors import Exhausted, MultiverseError, Unknown
from multiverse.core.model.job import PREEMPTED_STATES, Attempt, AttemptState
from multiverse.core.model.usage import LONG_ENOUGH, Baseline, HostUsage, JobUsage, Usage, VmUsage, combined
from multiverse.core.state import State
from multiverse.ports import Clock, Measurements, Reports
from multiverse.store import Pruned, Pruning, Store
from multiverse.store.history import (
    ADDED,
    MINUTE,
    JobUsagePruning,
    UsagePruning,
    UsageRecord,
    UsedBy,
    add_usage,
    put_job_usage,
    read_job_usage,
)

INTERVAL = 10.0  # seconds between two questions to a host, and the span that each answer covers
TIMEOUT = 10.0  # seconds that a host has to answer
AT_ONCE = 32  # hosts that are asked at the same time
STALE = 60.0  # seconds after which the figures of a host that does not answer are unknown
PAUSE = 0.02  # seconds between two steps that add rows

log = structlog.get_logger()


class UtilizationRecorder:
    """What the hosts of these sources use, as of a few seconds ago, and its history."""

    def __init__(
        self, store: Store, measurements: Measurements, sources: Callable[[], Collection[str]], clock: Clock
    ) -> None:
        self.store = store
        self._measurements, self._sources, self._clock = measurements, sources, clock
        self._latest: dict[str, tuple[float, HostUsage]] = {}
        self._minute = 0  # the Unix time of its beginning
        self._in_minute: dict[tuple[UsedBy, str], list[Usage]] = {}
        self._failures: dict[str, str] = {}  # as logged

    def current(self) -> Mapping[str, HostUsage]:
        """What each host, by name, has used lately, if that is known."""
        fresh = self._clock.now() - STALE
        return {name: usage for name, (at, usage) in sorted(self._latest.items()) if at >= fresh}

    async def run(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(INTERVAL)

    async def ask(self) -> None:
        """Ask all hosts once, and keep the last minute if it is over."""
        turns, sources = asyncio.Semaphore(AT_ONCE), list(self._sources())
        for gone in self._failures.keys() - {"", *sources}:
            del self._failures[gone]
        for gone in self._latest.keys() - self.current().keys():
            del self._latest[gone]
        minute, before = int(self._clock.wall()) // MINUTE * MINUTE, self._in_minute
        if minute != self._minute:
            await self._add(self._minute, before)
            self._minute, self._in_minute = minute, {}
        await asyncio.gather(*(self._ask(source, turns) for source in sources))

    async def _ask(self, source: str, turns: asyncio.Semaphore) -> None:
        reason = ""
        try:
            async with turns, asyncio.timeout(TIMEOUT):
                found = await self._measurements.used(source, INTERVAL)
        except (MultiverseError, TimeoutError) as error:
            reason = str(error) or f"no answer within {TIMEOUT:g} s"
        except Exception as error:  # a defect of a driver leaves a gap
            reason = f"{type(error).__name__}: {error}"
        else:
            for host, usage in found.items():
                self._note(host, usage)
        if reason and self._failures.get(source) != reason:
            log.info("utilization not known", source=source, reason=reason)
        self._failures[source] = reason

    def _note(self, host: str, usage: HostUsage) -> None:
        self._latest[host] = self._clock.now(), usage
        if usage.usage is not None:
            self._in_minute.setdefault(("host", host), []).append(usage.usage)
        for name, vm in usage.vms.items():
            if vm.usage is not None:
                self._in_minute.setdefault(("vm", name), []).append(vm.usage)

    async def _add(self, minute: int, used: Mapping[tuple[UsedBy, str], list[Usage]]) -> None:
        records = [UsageRecord(kind, name, minute, MINUTE, combined(all_)) for (kind, name), all_ in used.items()]
        reason = ""
        for first in range(0, len(records), ADDED):
            try:
                add_usage(self.store, records[first : first + ADDED])
            except MultiverseError as error:
                reason = str(error)
                break
            await asyncio.sleep(PAUSE)
        if reason and self._failures.get("") != reason:
            log.info("history of utilization not kept", reason=reason)
        self._failures[""] = reason


# --- what jobs use ----------------------------------------------------------------------------------


LOOK_INTERVAL = 1.0  # seconds between two looks at which jobs run, as often as agents sample
SPAN = 2.0  # seconds that an answer of a host covers
TELL_TIMEOUT = 60.0  # seconds that telling one user may take: the scheduler's commands wait for their turns
FRESH = 5.0  # seconds after which a job that has begun is not new any more: what its VM has used by then is its own
SETTLED = 3.0  # seconds after a job's end: the scheduler's own record has been written then
MOST_TOLD = 1000  # users who wait to be told; beyond that the oldest are not told
TELLING = 2  # how many are told at the same time
TRIES, TRY_PAUSE = 3, 5.0  # how often, and after how many seconds, a scheduler is asked again that cannot take it now
ROWS = 50  # rows that are written at once
MOVES_INTERVAL = 10.0  # seconds between two looks at where VMs are: hosts remember for minutes those that have left


_Used = dict[tuple[str, str], VmUsage]  # by source and name: another VM of the same name may have ended elsewhere


class JobUsageRecorder:
    """Follows the jobs that run, as committed in `state`."""

    def __init__(
        self, store: Store, state: State, measurements: Measurements, reports: Reports | None, clock: Clock
    ) -> None:
        """`reports` is None where users cannot be told."""
        self._store, self._state, self._clock = store, state, clock
        self._measurements, self._reports = measurements, reports
        self._running: dict[int, JobUsage] = {}
        self._look_for_moves = 0.0
        self._to_tell: deque[tuple[float, JobUsage]] = deque(maxlen=MOST_TOLD)  # with when
        self._more = asyncio.Event()
        self._failed = ""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(TELLING):
                group.create_task(self._tell_users())
            while True:
                try:
                    await self.look()
                except MultiverseError as error:
                    self._log("use of jobs not kept", str(error))
                except Exception as error:  # a defect leaves a gap
                    self._log("use of jobs not learnt", f"{type(error).__name__}: {error}")
                await asyncio.sleep(LOOK_INTERVAL)

    async def look(self) -> None:
        """Learn which jobs have begun, moved or ended since the last time, and what they used."""
        now = {attempt.id: attempt for attempt in self._state.attempts_in(AttemptState.ALLOCATED, *PREEMPTED_STATES)}
        begun = [attempt for id_, attempt in now.items() if id_ not in self._running]
        ended = [usage for id_, usage in self._running.items() if id_ not in now]
        moved = self._moved(now)
        if not begun and not ended and not moved:
            return
        known = read_job_usage(self._store, [attempt.id for attempt in begun])
        self._running.update(known)
        begun = [attempt for attempt in begun if attempt.id not in known]
        begins = {attempt.id: self._clock.now() - attempt.since < FRESH for attempt in begun}
        sources = {vm.place.source for attempt in begun for vm in self._state.vms_of(attempt)}
        sources |= {one.source for usage in (*moved, *ended) for one in usage.baselines}
        used = await self._used(sources)
        changed = [self._begun(attempt, used if begins[attempt.id] else {}) for attempt in begun]
        changed += [self._at_new_hosts(usage, used) for usage in moved]
        self._running.update({usage.attempt: usage for usage in changed})
        for usage in ended:
            del self._running[usage.attempt]
            changed.append(done := self._ended(usage, used))
            if done.text:
                self._to_tell.append((self._clock.now() + SETTLED, done))
                self._more.set()
        for first in range(0, len(changed), ROWS):
            put_job_usage(self._store, changed[first : first + ROWS], self._clock.wall())
            await asyncio.sleep(0)

    def _begun(self, attempt: Attempt, used: _Used) -> JobUsage:
        request, baselines = attempt.request, []
        for vm in self._state.vms_of(attempt):
            seen = used.get((vm.place.source, vm.name))
            # An earlier VM of that name, which a restored one has, may have ended a short while ago.
            known = (seen.cpu_s, seen.memory) if seen is not None and seen.lives else (0.0, 0.0)
            baselines.append(Baseline(vm.name, vm.place.source, *known))
        began = self._clock.wall() - (self._clock.now() - attempt.since)
        size = request.size
        usage = JobUsage(attempt.id, attempt.job, request.nodes, size.cpus, size.memory, began, tuple(baselines))
        return self._with_earlier_runs(usage, attempt.runs) if attempt.runs > 1 else usage

    def _with_earlier_runs(self, usage: JobUsage, runs: int) -> JobUsage:
        """The usage of a job that goes on after it was saved. An attempt that did not come to run has used nothing."""
        attempts = [one.id for one in self._store.attempts(job_id=usage.job.job_id) if one.id < usage.attempt]
        found = sorted(read_job_usage(self._store, attempts).items())[1 - runs :]
        return replace(
            usage,
            runs=runs,
            earlier_s=sum(one.seconds or 0.0 for _, one in found),
            earlier_cpu_s=sum(max(one.cpu_s, one.counted_s) for _, one in found),
        )

    def _moved(self, running: Mapping[int, Attempt]) -> list[JobUsage]:
        """The jobs with a VM that is not where it was at the last look."""
        if self._clock.now() < self._look_for_moves:
            return []
        self._look_for_moves = self._clock.now() + MOVES_INTERVAL
        have_moved = {vm.attempt for vm in self._state.vms.values() if vm.moves}
        usages = (usage for id_, usage in self._running.items() if id_ in have_moved and id_ in running)
        return [usage for usage in usages if not self._places(usage).items() <= {one[:2] for one in usage.baselines}]

    def _places(self, usage: JobUsage) -> dict[str, str]:
        """The sources of the job's VMs, by name."""
        attempt = self._state.attempts.get(usage.attempt)
        return {} if attempt is None else {vm.name: vm.place.source for vm in self._state.vms_of(attempt)}

    def _at_new_hosts(self, usage: JobUsage, used: _Used) -> JobUsage:
        """The same with what VMs have used at the hosts that they left, which forget it soon."""
        places, left, baselines = self._places(usage), 0.0, []
        for one in usage.baselines:
            if (source := places.get(one.vm, one.source)) != one.source:
                seen = used.get((one.source, one.vm))
                left += max(0.0, seen.cpu_s - one.cpu_s) if seen is not None else 0.0
                one = one._replace(source=source, cpu_s=0.0)
            baselines.append(one)
        return replace(usage, baselines=tuple(baselines), moved_s=usage.moved_s + left)

    def _ended(self, usage: JobUsage, used: _Used) -> JobUsage:
        attempt, now = self._state.attempts.get(usage.attempt), self._clock.now()
        late = now - attempt.since if attempt is not None else 0.0  # it is in another state since then
        known = [(one, used[at]) for one in usage.baselines if (at := (one.source, one.vm)) in used]
        eviction = attempt.preempted if attempt is not None else None
        return replace(
            usage,
            ended_for=str(eviction.why) if eviction is not None else "",
            seconds=max(0.0, self._clock.wall() - usage.began - late),
            cpu_s=usage.moved_s + sum(max(0.0, seen.cpu_s - one.cpu_s) for one, seen in known),
            peak=max((max(0.0, seen.peak - one.memory) for one, seen in known), default=0.0),
            known=len(known),
        )

    async def _used(self, sources: Collection[str]) -> _Used:
        found: _Used = {}

        async def ask(source: str) -> None:
            try:
                async with asyncio.timeout(TIMEOUT):
                    hosts = await self._measurements.used(source, SPAN)
            except (MultiverseError, TimeoutError) as error:
                self._log("use of jobs not known", f"{source}: {error}")
                return
            for host in hosts.values():
                found.update(((source, name), vm) for name, vm in host.vms.items())

        await asyncio.gather(*map(ask, sources))
        return found

    async def _tell_users(self) -> None:
        while True:
            while self._to_tell:
                due, usage = self._to_tell.popleft()
                await asyncio.sleep(max(0.0, due - self._clock.now()))
                await self._tell(usage)
            self._more.clear()
            await self._more.wait()

    async def _tell(self, usage: JobUsage) -> None:
        reports = self._reports
        if reports is None:
            return
        usage = await self._counted(usage, reports)
        for _ in range(TRIES):
            try:
                async with asyncio.timeout(TELL_TIMEOUT):
                    await reports.report(usage.job, usage.text)
                return
            except (Exhausted, Unknown, TimeoutError):
                await asyncio.sleep(TRY_PAUSE)
            except MultiverseError as error:  # the job was queued again, or is known no more
                log.debug("user not told what a job used", job=usage.job.job_id, reason=str(error))
                return
            except Exception as error:
                self._log("users not told what jobs used", f"{type(error).__name__}: {error}")
                return

    async def _counted(self, usage: JobUsage, reports: Reports) -> JobUsage:
        """The same with what the scheduler's accounting has, for a run that was long enough for it to matter."""
        if not usage.text or usage.seconds is None or usage.seconds < LONG_ENOUGH:
            return usage
        try:
            async with asyncio.timeout(TELL_TIMEOUT):
                seconds = await reports.cpu_seconds(usage.job)
        except (MultiverseError, TimeoutError) as error:
            log.debug("use of a job not known to the accounting", job=usage.job.job_id, reason=str(error))
            return usage
        usage = replace(usage, counted_s=seconds)
        try:
            put_job_usage(self._store, [usage], self._clock.wall())
        except MultiverseError as error:
            self._log("use of jobs not kept", str(error))
        return usage

    def _log(self, event: str, reason: str) -> None:
        """A failure is logged once for as long as it repeats."""
        if self._failed != f"{event}{reason}":
            log.info(event, reason=reason)
        self._failed = f"{event}{reason}"

    @property
    def running(self) -> Iterable[JobUsage]:
        return self._running.values()


# --- pruning ----------------------------------------------------------------------------------------


PRUNE_INTERVAL = 3600.0  # seconds between two rounds
SHARE, LEAST_PAUSE = 0.1, 0.005  # the steps take this share of the time at most; a pause takes so many seconds at least

DAY = 86400.0


async def prune(one_round: Pruning | UsagePruning | JobUsagePruning, clock: Clock, *, limit: float = math.inf) -> None:
    """Carry out a round, for `limit` seconds at most. Raises `Exhausted`; earlier steps are kept."""
    more, until = True, clock.now() + limit
    while more and clock.now() < until:
        began = clock.now()
        more = one_round.step()
        await asyncio.sleep(max(LEAST_PAUSE, (clock.now() - began) * (1 / SHARE - 1)))


async def prune_regularly(store: Store, clock: Clock, days: float) -> None:
    """Prune once an hour what is older than `days` (0: delete nothing); never ends."""
    while True:
        if days > 0:
            one_round = Pruning(store, clock.wall() - days * DAY)
            try:
                await prune(one_round, clock)
            except MultiverseError as error:
                log.warning("history not pruned", reason=str(error))
            if (removed := one_round.removed) != Pruned():
                log.info("history pruned", days=days, rows=removed.rows, journal=removed.journal)
        before = clock.wall() - days * DAY if days > 0 else -math.inf
        try:
            await prune(UsagePruning(store, clock.wall(), before), clock)
            await prune(JobUsagePruning(store, before), clock)
        except MultiverseError as error:
            log.warning("history of utilization not pruned", reason=str(error))
        await asyncio.sleep(PRUNE_INTERVAL)
