"""What every decision of provisioning looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from multiverse.core.model import Attempt, Host, SchedulerView, World
from multiverse.core.policy import Policy
from multiverse.core.state import State


@dataclass(frozen=True, slots=True)
class Context:
    """The state of a pass, what was observed, and the settings. `without` are hosts that count as closed, too; with
    `drained`, drained hosts count as open."""

    state: State
    world: World
    policy: Policy
    without: frozenset[str] = frozenset()
    drained: bool = False
    _open: dict[frozenset[str], Mapping[str, Host]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def hosts(self) -> Mapping[str, Host]:
        """The hosts in sight that take new VMs, by name."""
        closed = self.state.closed | self.without if self.without else self.state.closed
        if self.drained:
            closed = frozenset(name for name in closed if self.state.is_fenced(name))
        if not closed:
            return self.world.hosts
        if closed not in self._open:
            self._open[closed] = {name: host for name, host in self.world.hosts.items() if name not in closed}
        return self._open[closed]

    def with_drained(self) -> Context:
        """As if all hosts that are drained, or are to be, were resumed."""
        return replace(self, without=frozenset(), drained=True) if self.without or self.state.drains else self

    @property
    def scheduler(self) -> SchedulerView:
        """The scheduler's view. Only asked for where the scheduler is known."""
        assert self.world.scheduler is not None, "provisioning begins only when the scheduler is known"
        return self.world.scheduler.value

    @property
    def now(self) -> float:
        """Now, in Unix time."""
        return self.unix(self.state.now)

    def unix(self, monotonic: float) -> float:
        """A monotonic time in Unix time."""
        return monotonic + self.world.epoch

    def image_of(self, attempt: Attempt) -> str:
        """The image of the attempt's VMs."""
        return attempt.request.image or self.policy.image
