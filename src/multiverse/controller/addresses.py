"""Where the nodes are, for the scheduler's users: told anew when a VM becomes a node or leaves."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from multiverse.controller.publication import Publication
from multiverse.core.model import Vm, VmState
from multiverse.core.transition import Move
from multiverse.ports import Addresses, Clock

_HAS_JOBS = (VmState.STARTING, VmState.JOINED, VmState.SERVING, VmState.RETIRING, VmState.ORPHAN, VmState.LOST)
"""A VM in one of these states runs a job or may get one. That of a lost VM goes on if its host comes back."""


class AddressBook:
    """Follows the moves that were committed, at the cost of what they change."""

    def __init__(self, vms: Iterable[Vm], clock: Clock, rng: Random) -> None:
        self._of_node: dict[str, str] = {}
        self._changes = 0
        self._told = Publication[int]("addresses of nodes", clock, rng)
        for vm in vms:
            self._note(vm)

    def note(self, moves: Iterable[Move]) -> None:
        """Learn from moves that were committed."""
        for change in (change for move in moves for change in move.changes):
            if isinstance(change.row, Vm):
                self._note(change.row)

    def _note(self, vm: Vm) -> None:
        address = vm.address.partition("/")[0] if vm.state in _HAS_JOBS else ""
        if address != self._of_node.get(vm.name, ""):
            self._changes += 1
            if address:
                self._of_node[vm.name] = address
            else:
                del self._of_node[vm.name]

    def ensure(self, addresses: Addresses | None) -> None:
        """Tell what has changed, and everything once. Awaits nothing."""
        if addresses is not None:
            told = addresses
            self._told.ensure(self._changes, lambda _: told.tell(dict(self._of_node)))

    async def close(self) -> None:
        """Stop a call that runs."""
        await self._told.close()
