"""A planner with a storage of saved VMs, whose files a test sets."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.model.host import HypervisorView
from multiverse.core.model.saved import Saved, SavedSeen
from multiverse.core.model.world import Observation, Seen
from tests.unit.planner_harness import PlannerHarness
from tests.unit.rows import SOURCE


class SavedSite(PlannerHarness):
    """`files` is what the storage holds, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, SavedSeen] = {}

    @property
    def saved(self) -> Saved:
        return self.rows.saved[max(self.rows.saved)]

    def observe(self) -> None:
        super().observe()
        latest = self.world.sources[SOURCE].latest
        if latest is not None:
            view = replace(latest.value, saved=dict(self.files))
            assert isinstance(view, HypervisorView)
            self.world = replace(self.world, sources={SOURCE: Observation(Seen(view, latest.began), 0.0)})
