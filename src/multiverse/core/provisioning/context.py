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
    sight: Mapping[str, Host] | None = None

    @property
    def hosts(self) -> Mapping[str, Host]:
        """The hosts in sight, by name: in a pass those that are kept from pass to pass (`changes.mark_changes`)."""
        return self.world.hosts if self.sight is None else self.sight

    @property
    def scheduler(self) -> SchedulerView:
        """The scheduler's view. Only asked for where the scheduler is known."""
        assert self.world.scheduler is not None, "provisioning begins only when the scheduler is known"
        return self.world.scheduler.value

    def image_of(self, attempt: Attempt) -> str:
        """The image of the attempt's VMs."""
        return attempt.request.image or self.policy.image
