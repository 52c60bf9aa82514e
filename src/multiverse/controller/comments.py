"""Tells the users of waiting jobs why their jobs wait, where the scheduler shows such lines.

The text is derived from the latest pass and not stored. The first jobs are told their own reason, the others once that
they wait behind. It takes few resources: few calls at a time, one text a minute for each job, and groups. `CommentPlan`
decides and `CommentWriter` acts; the scheduler's driver reads jobs and texts again before it writes.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import structlog

from multiverse.controller.publication import end_tasks
from multiverse.core.errors import MultiverseError
from multiverse.core.model.job import Attempt, AttemptState, Job, JobRef
from multiverse.core.model.reason import Reason, text_of
from multiverse.core.policy import Policy
from multiverse.core.queue import BEHIND, reason_of
from multiverse.core.transition import Move
from multiverse.ports import Clock, Scheduler

log = structlog.get_logger()

CALLS_AT_ONCE = 2  # calls that run at the same time
PAUSE = 0.1  # seconds at least between two looks at what is due
TEXT_INTERVAL = 60.0  # seconds between two texts of a job or array, and until it is considered again
CONSIDERED_AT_ONCE = 200  # jobs in one go of about 1 ms, so that a long queue delays nothing else
GO_INTERVAL = 1.0  # seconds between two goes
GROUP = 100  # the most jobs that one call tells that they wait behind others
GROUP_INTERVAL = 5.0  # seconds between two such calls: asked for several jobs, slurmctld answers with all jobs
CALL_TIMEOUT = 60.0  # seconds
RETRY_PAUSE, RETRY_LIMIT = 2.0, 300.0  # seconds until a failed call is repeated; doubled up to the limit

_BEHIND = str(BEHIND)

Jobs = Mapping[str, Job]  # the jobs as observed last, by id
Told = Callable[[Attempt, Reason | None], Reason | None]


@dataclass(frozen=True, slots=True)
class Telling:
    """A call that is due."""

    subjects: tuple[str, ...]  # the jobs, or their arrays, in the same order
    jobs: tuple[JobRef, ...]
    text: str


@dataclass(slots=True)
class _Subject:
    """A job or an array with attempts that wait."""

    attempts: set[int] = field(default_factory=set)
    told: str = ""  # the text written last; empty: unknown
    at: float = -math.inf  # when that was
    began: float = -math.inf  # when the call for it began
    newest: float = -math.inf  # when the last of the attempts came
    failures: int = 0
    not_before: float = -math.inf
    calling: bool = False  # a call for it runs
    calling_since: float = -math.inf

    def knows(self, text: str) -> bool:
        """Whether all its attempts were told this last. A task that came after the call had begun was not."""
        return self.told == text and self.newest <= self.began

    @property
    def free_at(self) -> float:
        return math.inf if self.calling else max(self.not_before, self.at + TEXT_INTERVAL)


class CommentPlan:
    """Which jobs are to be told what, and when. Pure, and the cost of each method is bounded. `told` completes what a
    job is told by why it waits."""

    def __init__(self, policy: Policy, attempts: Iterable[Attempt] = (), told: Told = lambda _, why: why) -> None:
        self._policy, self._told = policy, told
        self._waiting: dict[int, Attempt] = {}
        self._subjects: dict[str, _Subject] = {}
        self._subject_of: dict[int, str] = {}  # by attempt, once its job was observed
        self._reasons: Mapping[int, Reason] = {}
        self._texts: Mapping[int, str] = {}  # the same in words
        self._queue: list[tuple[float, int]] = []  # a heap: when to consider which attempt, which may be gone by then
        self._queued: set[int] = set()  # the attempts that are in it
        self._next_go = -math.inf
        for attempt in attempts:
            self._follow(attempt)

    def note(self, moves: Iterable[Move]) -> bool:
        """Learn from moves that were committed. Whether something is to be considered that was not before."""
        before = len(self._queue)
        for move in moves:
            for change in move.changes:
                if isinstance(change.row, Attempt):
                    self._follow(change.row)
        return len(self._queue) > before

    def explained(self, reasons: Mapping[int, Reason]) -> bool:
        """Take what the latest admission says of the first jobs. Whether it differs from before."""
        if reasons == self._reasons:
            return False
        self._reasons = dict(reasons)
        waiting = {attempt_id: self._waiting[attempt_id] for attempt_id in reasons if attempt_id in self._waiting}
        self._texts = {attempt_id: text_of(self._told(one, reasons[attempt_id])) for attempt_id, one in waiting.items()}
        return True

    def ended(self, telling: Telling, now: float, *, failed: bool) -> None:
        for key in telling.subjects:
            subject = self._subjects.get(key)
            if subject is None:
                continue  # none of its attempts waits any more
            subject.calling = False
            if failed:
                subject.failures += 1
                subject.not_before = now + min(RETRY_LIMIT, RETRY_PAUSE * 2.0 ** min(subject.failures - 1, 16))
            else:
                subject.failures, subject.told, subject.at = 0, telling.text, now
                subject.began = subject.calling_since

    def _follow(self, attempt: Attempt) -> None:
        if attempt.state is not AttemptState.QUEUED or attempt.quarantined or attempt.origin:
            # A job that may be moved waits for physical nodes: it is told once it is moved.
            self._forget(attempt.id)
            return
        self._waiting[attempt.id] = attempt
        self._consider_at(attempt.since + self._policy.patience, attempt.id)

    def _consider_at(self, time: float, attempt_id: int) -> None:
        if attempt_id not in self._queued:
            self._queued.add(attempt_id)
            heapq.heappush(self._queue, (time, attempt_id))

    def _forget(self, attempt_id: int) -> None:
        self._waiting.pop(attempt_id, None)
        key = self._subject_of.pop(attempt_id, "")
        if subject := self._subjects.get(key):
            subject.attempts.discard(attempt_id)
            if not subject.attempts:
                del self._subjects[key]

    def next_call(self, jobs: Jobs, now: float) -> Telling | None:
        """The call that is due now, if any. Its end has to be reported to `ended`."""
        telling = self._of_the_first(jobs, now) or self._of_the_others(jobs, now)
        for key in telling.subjects if telling else ():
            self._subjects[key].calling, self._subjects[key].calling_since = True, now
        return telling

    def next_due(self) -> float:
        """When a call may be due again, unless something happens before; infinity if none will be."""
        times = [max(self._queue[0][0], self._next_go)] if self._queue else []
        for attempt_id, text in self._texts.items():
            attempt, subject = self._waiting.get(attempt_id), self._subjects.get(self._subject_of.get(attempt_id, ""))
            if attempt is None or (subject and subject.knows(text)):
                continue
            times.append(max(attempt.since + self._policy.patience, subject.free_at if subject else self._next_go))
        return min(times, default=math.inf)

    def _of_the_first(self, jobs: Jobs, now: float) -> Telling | None:
        for attempt_id, text in self._texts.items():
            attempt = self._waiting.get(attempt_id)
            if attempt is None or attempt.since + self._policy.patience > now:
                continue
            found = self._subject(attempt, jobs)
            if found and not found[1].knows(text) and found[1].free_at <= now:
                return Telling((found[0],), (attempt.job,), text)
        return None

    def _of_the_others(self, jobs: Jobs, now: float) -> Telling | None:
        """Tell those behind the first in a group, and each whose last attempt failed why, during its back-off."""
        if now < self._next_go:
            return None
        self._next_go = now + GO_INTERVAL
        first = (self._waiting.get(attempt_id) for attempt_id in self._reasons)
        told = {found[0] for attempt in first if attempt and (found := self._subject(attempt, jobs))}
        group: dict[str, JobRef] = {}
        for attempt in self._due(now):
            found = self._subject(attempt, jobs)
            if found is None or found[0] in told or found[1].free_at > now:
                continue
            why = reason_of(attempt, jobs.get(attempt.job.job_id), self._reasons, now)
            text = text_of(self._told(attempt, why))
            if not text or found[1].knows(text):
                continue
            if text != _BEHIND and not group:
                return Telling((found[0],), (attempt.job,), text)
            if text == _BEHIND:
                group[found[0]] = attempt.job
                told.add(found[0])
                if len(group) >= GROUP:
                    break
        if not group:
            return None
        self._next_go = now + GROUP_INTERVAL
        return Telling(tuple(group), tuple(group.values()), _BEHIND)

    def _due(self, now: float) -> Iterator[Attempt]:
        for _ in range(CONSIDERED_AT_ONCE):
            if not self._queue or self._queue[0][0] > now:
                return
            attempt_id = heapq.heappop(self._queue)[1]
            self._queued.discard(attempt_id)
            if (attempt := self._waiting.get(attempt_id)) is not None:
                self._consider_at(now + TEXT_INTERVAL, attempt_id)
                yield attempt

    def _subject(self, attempt: Attempt, jobs: Jobs) -> tuple[str, _Subject] | None:
        """The job or array of an attempt. None as long as the job was not observed: it may be a task of an array."""
        key = self._subject_of.get(attempt.id)
        if key is None:
            job = jobs.get(attempt.job.job_id)
            if job is None or job.ref != attempt.job:
                return None
            key = self._subject_of[attempt.id] = job.array or attempt.job.job_id
            subject = self._subjects.setdefault(key, _Subject())
            subject.attempts.add(attempt.id)
            subject.newest = max(subject.newest, attempt.since)
        return key, self._subjects[key]


class CommentWriter:
    """Makes the calls that a `CommentPlan` finds due. `jobs` gives the jobs as observed last."""

    def __init__(self, scheduler: Scheduler, clock: Clock, plan: CommentPlan, jobs: Callable[[], Jobs]) -> None:
        self._scheduler, self._clock, self._plan, self._jobs = scheduler, clock, plan, jobs
        self._calls: dict[asyncio.Task[None], None] = {}
        self._wake = asyncio.Event()

    def passed(self, moves: Iterable[Move], reasons: Mapping[int, Reason]) -> None:
        more, other = self._plan.note(moves), self._plan.explained(reasons)
        if more or other:
            self._wake.set()

    async def run(self) -> None:
        try:
            while True:
                self._wake.clear()
                while len(self._calls) < CALLS_AT_ONCE:
                    telling = self._plan.next_call(self._jobs(), self._clock.now())
                    if telling is None:
                        break
                    self._begin(telling)
                await self._sleep()
        finally:
            await end_tasks(list(self._calls))

    async def _sleep(self) -> None:
        """Until something may be due, and `PAUSE` at least."""
        await asyncio.sleep(PAUSE)
        free = len(self._calls) < CALLS_AT_ONCE
        left = min(self._plan.next_due() - self._clock.now(), GO_INTERVAL * 60) if free else None
        try:
            async with asyncio.timeout(left):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _begin(self, telling: Telling) -> None:
        call = asyncio.create_task(self._call(telling), name=f"explain to {len(telling.jobs)} jobs")
        self._calls[call] = None
        call.add_done_callback(self._calls.pop)
        call.add_done_callback(lambda _: self._wake.set())

    async def _call(self, telling: Telling) -> None:
        reason = ""
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                await self._scheduler.explain(telling.jobs, telling.text)
        except MultiverseError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"it did not end within {CALL_TIMEOUT:g} s"
        except Exception as error:  # a bug in a driver must not stop this, and is never lost
            log.exception("jobs not told why they wait", jobs=len(telling.jobs))
            reason = f"{type(error).__name__}: {error}"
        if reason:
            log.warning("jobs not told why they wait", jobs=len(telling.jobs), reason=reason)
        self._plan.ended(telling, self._clock.now(), failed=bool(reason))
