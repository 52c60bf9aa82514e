"""Which VMs and pilots are to be removed because no record explains them: those that two observations have shown."""

from __future__ import annotations

from multiverse.controller.effects import PilotRef
from multiverse.core.machines.lease import unexplained_pilots
from multiverse.core.model import VmRef, World
from multiverse.core.planner import orphans
from multiverse.core.state import State


class OrphanConfirmation:
    """Confirms orphans by a second observation: a single one destroys nothing."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._orphans: dict[tuple[str, str], float] = {}  # name and source, with the observation that showed it first
        self._pilots: dict[tuple[str, str], float] = {}  # pilots that no lease explains: name and id, and the same
        self.confirmed: list[VmRef | PilotRef] = []
        """Those that are to be removed, as of the latest commit."""

    def names(self) -> list[str]:
        """Names of our site that no row explained at the last pass."""
        return sorted({name for name, _ in self._orphans})

    def committed(self, world: World) -> None:
        """A pass with this world is committed: look again at what no row explains."""
        self.confirmed = [*self._confirmed_vms(world), *self._confirmed_pilots(world)]

    def _confirmed_vms(self, world: World) -> list[VmRef]:
        if world.scheduler is None:
            return []
        confirmed, first = [], {}
        for name, source in orphans(self._state, world):
            latest = world.latest(source)
            # A source that is unknown may hold the VM of a node that only the scheduler shows.
            if source == "" and any(one.latest is None for one in world.sources.values()):
                continue
            began = min([world.node_began(name), *([latest.began] if latest else [])])
            first[name, source] = self._orphans.get((name, source), began)
            if first[name, source] < began:
                confirmed.append(VmRef(name, source))
        self._orphans = first
        return confirmed

    def _confirmed_pilots(self, world: World) -> list[PilotRef]:
        if world.scheduler is None:
            return []
        began = world.scheduler.began
        unexplained = unexplained_pilots(self._state.leases, world.scheduler.value)
        self._pilots = {one: self._pilots.get(one, began) for one in unexplained}
        return [PilotRef(*one) for one, first in self._pilots.items() if first < began]
