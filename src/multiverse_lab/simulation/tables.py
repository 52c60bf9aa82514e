"""What a simulated cluster keeps, so that a look at a part costs what that part has, however much there is."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection
from typing import TypeVar

from multiverse.core.model.job import JobState
from multiverse_lab.simulation.jobs import JobRecord, NodeRecord

T = TypeVar("T")


class KeptNodes(dict[str, NodeRecord]):
    """The nodes by name, and by feature, with the places that are free in the scheduler's table."""

    def __init__(self) -> None:
        super().__init__()
        self._having: dict[str, dict[str, NodeRecord]] = {}
        self._free: list[int] = []  # a heap: places below `_next` without a node
        self._next = 0

    def add(self, node: NodeRecord) -> None:
        """A new node takes the first place that is free."""
        node.place = heapq.heappop(self._free) if self._free else self._next
        self._next = max(self._next, node.place + 1)
        self[node.name] = node
        for feature in node.features:
            self._having.setdefault(feature, {})[node.name] = node

    def remove(self, name: str) -> None:
        node = self.pop(name)
        heapq.heappush(self._free, node.place)
        for feature in node.features:
            of_feature = self._having[feature]
            del of_feature[name]
            if not of_feature:
                del self._having[feature]

    def having(self, feature: str) -> Collection[NodeRecord]:
        """The nodes with a feature."""
        return self._having.get(feature, {}).values()


class KeptGroups:
    """The jobs that slurmctld looks at again and again, by number. Thousands that only wait are not looked at."""

    def __init__(self) -> None:
        self.changed: dict[int, JobRecord] = {}  # since they were last sorted
        self.limited, self.pinned, self.at_origin, self.ended = (dict[int, JobRecord]() for _ in range(4))
        """Of arrays of which not all tasks may run; pending ones with a pin, and of physical nodes; and ended ones."""
        self._running: dict[int, JobRecord] = {}  # with a time limit
        self._until: list[tuple[float, int]] = []  # a heap: until when these run, and some that run no more

    def sort(self) -> KeptGroups:
        """Put the jobs that have changed where they belong now."""
        for number, job in self.changed.items():
            pending = job.state is JobState.PENDING
            belongs = (
                (self.limited, job.batch.at_most > 0),
                (self.pinned, pending and job.pin is not None),
                (self.at_origin, pending and job.at_origin),
                (self.ended, job.state is JobState.ENDED),
                (self._running, job.state is JobState.RUNNING and job.batch.limit is not None),
            )
            for group, is_in in belongs:
                if is_in:
                    group[number] = job
                else:
                    group.pop(number, None)
            if number in self._running:
                heapq.heappush(self._until, (job.runs_until, number))
        self.changed.clear()
        return self

    def overdue(self, now: float) -> list[JobRecord]:
        """The jobs that have run for longer than they may, in the order in which they were submitted. A job that was
        suspended may run until later than was noted."""
        found = list[int]()
        while self._until and self._until[0][0] < now:
            job = self._running.get(number := heapq.heappop(self._until)[1])
            if job is not None and job.runs_until < now:
                found.append(number)
            elif job is not None:
                heapq.heappush(self._until, (job.runs_until, number))
        return [self._running[number] for number in sorted({*found})]

    def forget(self, job: JobRecord) -> None:
        for group in (self.changed, self.limited, self.pinned, self.at_origin, self.ended, self._running):
            group.pop(job.number, None)


class KeptJobs(dict[str, JobRecord]):
    """The jobs that slurmctld remembers, by id, and by user; and which ids have jobs."""

    def __init__(self, separator: str) -> None:
        super().__init__()
        self._separator = separator
        self._bases: Counter[str] = Counter()
        self._of_user: dict[int, dict[str, JobRecord]] = {}
        self._groups = KeptGroups()

    def __setitem__(self, job_id: str, job: JobRecord) -> None:
        super().__setitem__(job_id, job)
        self._bases[job_id.partition(self._separator)[0]] += 1
        self._of_user.setdefault(job.batch.uid, {})[job_id] = job
        job.changes = self._groups.changed
        job.changes[job.number] = job

    def __delitem__(self, job_id: str) -> None:
        job, base = self[job_id], job_id.partition(self._separator)[0]
        super().__delitem__(job_id)
        self._bases[base] -= 1
        if not self._bases[base]:
            del self._bases[base]
        del self._of_user[job.batch.uid][job_id]
        job.changes = None
        self._groups.forget(job)

    @property
    def groups(self) -> KeptGroups:
        """The groups as the jobs are now."""
        return self._groups.sort()

    def has_base(self, base: int) -> bool:
        """Whether a job, or a task of an array, has this number."""
        return str(base) in self._bases

    def of_user(self, uid: int) -> Collection[JobRecord]:
        return self._of_user.get(uid, {}).values()


class Forgotten(list[T]):
    """A list of what is over, in a simulation that remembers nothing of it."""

    def append(self, _: T) -> None:
        pass
