"""What every decision of provisioning looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from multiverse.core.model import Attempt, Host, SchedulerView, World
from multiverse.core.policy import Policy
from multiverse.core.state import State


@dataclass(frozen=True, slots=True)
class Context:
    """The state of a pass, what was observed, and the settings."""

    state: State
    world: World
    policy: Policy

    @property
    def hosts(self) -> Mapping[str, Host]:
        """The hosts in sight, by name."""
        return self.world.hosts

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
