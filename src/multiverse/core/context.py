"""What every decision of provisioning looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from multiverse.core.avoidance import avoided
from multiverse.core.model.host import OFF_STATES, Host
from multiverse.core.model.job import Attempt, Job, NodeReservation, SchedulerView, first_keeping
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import State


class OpenHosts(Mapping[str, Host]):
    """Open hosts by name. Making this mapping costs nothing, however many hosts there are."""

    def __init__(self, hosts: Mapping[str, Host], closed: frozenset[str]) -> None:
        self._hosts, self._closed = hosts, closed

    def __getitem__(self, name: str) -> Host:
        if name in self._closed:
            raise KeyError(name)
        return self._hosts[name]

    def __contains__(self, name: object) -> bool:
        return name in self._hosts and name not in self._closed

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._hosts if name not in self._closed)

    def __len__(self) -> int:
        return len(self._hosts) - sum(name in self._hosts for name in self._closed)


@dataclass(frozen=True, slots=True)
class Context:
    """What every decision looks at: the state of a pass, what was observed, and the settings."""

    state: State
    world: World
    policy: Policy
    sight: Mapping[str, Host] | None = None  # hosts in sight, kept from pass to pass; None: the world's
    without: frozenset[str] = frozenset()  # hosts that count as closed, too
    drained: bool = False  # drained hosts count as open
    avoided: frozenset[str] = frozenset()  # of `without`: VMs of the image fail there

    @property
    def in_sight(self) -> Mapping[str, Host]:
        return self.world.hosts if self.sight is None else self.sight

    @property
    def closed(self) -> frozenset[str]:
        if self.drained:
            return frozenset(host.name for host in self.state.hosts_in(*OFF_STATES))
        return self.state.closed | self.without if self.without else self.state.closed

    @property
    def hosts(self) -> Mapping[str, Host]:
        return OpenHosts(self.in_sight, closed) if (closed := self.closed) else self.in_sight

    def with_drained(self) -> Context:
        """As if all hosts that are drained, or are to be, were resumed."""
        if not self.without and not self.state.drains:
            return self
        return replace(self, without=frozenset(), avoided=frozenset(), drained=True)

    def without_avoided(self, image: str) -> Context:
        found = avoided(self.state, image, self.now) if self.state.faults else frozenset[str]()
        return replace(self, without=self.without | found, avoided=found) if found else self

    def with_avoided(self) -> Context:
        return replace(self, without=self.without - self.avoided, avoided=frozenset()) if self.avoided else self

    @property
    def scheduler(self) -> SchedulerView:
        """The scheduler's view. Only asked for where the scheduler is known."""
        assert self.world.scheduler is not None, "provisioning begins only when the scheduler is known"
        return self.world.scheduler.value

    @property
    def now(self) -> float:
        return self.unix(self.state.now)

    def unix(self, monotonic: float) -> float:
        return monotonic + self.world.epoch

    def job_of(self, attempt: Attempt) -> Job | None:
        """The attempt's job as the scheduler shows it; None while it shows none, or another one of that id."""
        job = self.scheduler.jobs.get(attempt.job.job_id) if self.world.scheduler is not None else None
        return job if job is not None and job.ref == attempt.job else None

    def kept_by(self, job: Job) -> NodeReservation | None:
        """The scheduler's reservation that keeps a job from starting now."""
        found = self.scheduler.reservations
        return first_keeping(found, self.now, job.limit) if found else None

    def image_of(self, attempt: Attempt) -> str:
        return attempt.request.image or self.policy.image
