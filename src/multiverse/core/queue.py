"""The queue: attempts that wait, in the scheduler's order, what admission found out, and what their users are told.

It is kept while rows and jobs change, so that a pass visits only attempts about which something is to be decided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType

from sortedcontainers import SortedList

from multiverse.core.model.job import WAITING_STATES, Attempt, AttemptState, Job, Request
from multiverse.core.model.reason import Reason, Why

Shape = tuple[Request, tuple[tuple[str, int], ...]]  # what admission decides by, beside the turn: request and limits


class Order:
    """Ids in ascending order of their ranks; equal ranks by id."""

    def __init__(self) -> None:
        self._entries = SortedList[tuple[int, int]]()
        self._ranks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._ranks

    def __iter__(self) -> Iterator[int]:
        return (id_ for _, id_ in self._entries)

    def entries(self) -> list[tuple[int, int]]:
        return list(self._entries)

    def first(self, count: int) -> list[tuple[int, int]]:
        return list(self._entries[:count])

    def before(self, entry: tuple[int, int]) -> int:
        """How many are before this pair of rank and id, which need not be among them."""
        return int(self._entries.bisect_left(entry))

    def put(self, id_: int, rank: int) -> None:
        self.drop(id_)
        self._ranks[id_] = rank
        self._entries.add((rank, id_))

    def drop(self, id_: int) -> None:
        rank = self._ranks.pop(id_, None)
        if rank is not None:
            self._entries.remove((rank, id_))


class Queue:
    """The attempts that wait and whose jobs are shown as they were, unless they are quarantined.

    An attempt is *checked* when it, its job or the known hosts change: whether any host could ever hold it.
    `candidates` may be admitted in their turn. `unfit` wait for other hosts, or until their users are known
    (`unknown_users`).
    """

    def __init__(self) -> None:
        self.jobs: Mapping[str, Job] = MappingProxyType({})  # as observed last
        self.candidates = Order()
        self.unfit = Order()
        self.why_unfit: dict[int, Reason] = {}
        self.unchecked: set[int] = set()
        self.unknown_users: Counter[int] = Counter()  # uids of the attempts that wait for that
        self._awaiting: dict[int, int] = {}  # these attempts, with their uids
        self.wanted: Counter[str | None] = Counter()  # VMs that the candidates and the unfit want, by image
        self._waiting: dict[int, tuple[Attempt, Job, int]] = {}  # with the number of its shape
        self._shapes: dict[Shape, int] = {}
        self._shape_uses: Counter[Shape] = Counter()
        self._shapes_ever = 0

    def put(self, attempt: Attempt) -> None:
        self.drop(attempt.id)
        if attempt.state not in WAITING_STATES or attempt.quarantined:
            return
        job = self.jobs.get(attempt.job.job_id)
        if job is None or job.ref != attempt.job:
            return
        self._waiting[attempt.id] = (attempt, job, self._use_shape((attempt.request, job.uses)))
        self.unchecked.add(attempt.id)
        if attempt.state is AttemptState.QUEUED and job.eligible and not attempt.waits_for_delay(job):
            self.candidates.put(attempt.id, job.rank)
            self.wanted[attempt.request.image] += attempt.request.nodes

    def drop(self, id_: int) -> None:
        old = self._waiting.pop(id_, None)
        if old is None:
            return
        attempt, job, _ = old
        self._release_shape((attempt.request, job.uses))
        if self.wants(id_):
            image = attempt.request.image
            self.wanted[image] -= attempt.request.nodes
            if not self.wanted[image]:
                del self.wanted[image]
        self.candidates.drop(id_)
        self._put_back(id_)
        self.unchecked.discard(id_)

    def _put_back(self, id_: int) -> None:
        self.unfit.drop(id_)
        self.why_unfit.pop(id_, None)
        uid = self._awaiting.pop(id_, None)
        if uid is not None:
            self.unknown_users[uid] -= 1
            if not self.unknown_users[uid]:
                del self.unknown_users[uid]

    def set_aside(self, id_: int, reason: Reason) -> None:
        """No host in sight could ever hold the attempt, and others may: it waits for those."""
        if id_ in self.candidates:
            self.candidates.drop(id_)
            self.unfit.put(id_, self._waiting[id_][1].rank)
            self.why_unfit[id_] = reason

    def await_user(self, id_: int, reason: Reason) -> None:
        """It is not known who the attempt's user is: it waits for that."""
        if id_ in self.candidates:
            self.set_aside(id_, reason)
            uid = self._waiting[id_][0].uid
            self._awaiting[id_] = uid
            self.unknown_users[uid] += 1

    def consider_users_again(self) -> None:
        """More is known of users: the attempts that wait for that are candidates again."""
        self._consider_again(list(self._awaiting))

    def check_all(self) -> None:
        self._consider_again(list(self.unfit))
        self.unchecked.update(self._waiting)

    def _consider_again(self, ids: list[int]) -> None:
        for id_ in ids:
            self._put_back(id_)
            self.candidates.put(id_, self._waiting[id_][1].rank)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to decide and nobody to be told why."""
        return not (self.candidates or self.unfit or self.unchecked or self.unknown_users)

    def take_unchecked(self) -> list[int]:
        """The attempts that are to be checked, by number. They count as checked from here on."""
        ids = sorted(self.unchecked)
        self.unchecked.clear()
        return ids

    def wants(self, id_: int) -> bool:
        return id_ in self.candidates or id_ in self.unfit

    def job_of(self, id_: int) -> Job:
        return self._waiting[id_][1]

    def shape_of(self, id_: int) -> int:
        return self._waiting[id_][2]

    def one_of_each_request(self) -> list[Attempt]:
        """Waiting attempts, one of each request, in the order of their first appearance."""
        first: dict[int, Attempt] = {}
        for attempt, _, shape in self._waiting.values():
            first.setdefault(shape, attempt)
        return list({attempt.request: attempt for attempt in first.values()}.values())

    def _use_shape(self, shape: Shape) -> int:
        self._shape_uses[shape] += 1
        if shape not in self._shapes:
            self._shapes[shape] = self._shapes_ever
            self._shapes_ever += 1
        return self._shapes[shape]

    def _release_shape(self, shape: Shape) -> None:
        self._shape_uses[shape] -= 1
        if not self._shape_uses[shape]:
            del self._shape_uses[shape], self._shapes[shape]


# --- what the user of a waiting job is told ---------------------------------------------------------


FIRST = 10  # so many first jobs of the queue are told why they wait; an array counts once
PASSED_OVER = 100  # attempts behind the one that blocks that are looked at: a long array may be in between
BEHIND = Why.BEHIND()  # what is said of all other jobs; it has no figures, so it does not change


def reason_of(attempt: Attempt, job: Job | None, reasons: Mapping[int, Reason], now: float) -> Reason | None:
    """Why an attempt waits. None if the scheduler keeps its job, or nothing was decided. `job`: as observed last."""
    if attempt.state is not AttemptState.QUEUED or attempt.quarantined:
        return None
    if attempt.id in reasons:
        return reasons[attempt.id]
    if job is None or job.ref != attempt.job or not job.eligible or attempt.waits_for_delay(job):
        return None
    if now < attempt.not_before:
        return attempt.note
    return BEHIND if reasons else None


class FirstReasons:
    """Collects, in one round of admission, why the first jobs of the queue wait: one attempt for each job or array."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._found: list[tuple[int, int, Reason]] = []  # rank, attempt, reason
        self._jobs: set[str] = set()  # these jobs and arrays

    @property
    def full(self) -> bool:
        return len(self._found) >= FIRST

    def add(self, rank: int, attempt_id: int, why: Reason) -> None:
        if not self.full:
            self._add(rank, attempt_id, why)

    def _add(self, rank: int, attempt_id: int, why: Reason) -> None:
        job = self._queue.job_of(attempt_id)
        if (job_or_array := job.array or job.ref.job_id) not in self._jobs:
            self._jobs.add(job_or_array)
            self._found.append((rank, attempt_id, why))

    def of(self, attempts: Container[int]) -> dict[int, Reason]:
        """The reasons of attempts that still wait or fit on no host in sight, in the queue's order."""
        for rank, attempt_id in self._queue.unfit.first(FIRST):
            self._add(rank, attempt_id, self._queue.why_unfit[attempt_id])
        first = sorted(self._found, key=lambda one: one[:2])[:FIRST]
        return {attempt_id: why for _, attempt_id, why in first if attempt_id in attempts}
