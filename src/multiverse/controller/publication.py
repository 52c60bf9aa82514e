"""Tells the scheduler and the hosts what they are to know: once for each change, and again after a failure.

The scheduler is told values, such as where nodes are (`Publication`, `AddressBook`). Each host is told of the VMs in
the groups of its own VMs (`GroupBook`): what has changed, or all when it may have forgotten. No start waits for that.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Generic, TypeVar

import structlog

from multiverse.core.errors import MultiverseError
from multiverse.core.model.identity import Member, Reach, group_of, without_prefix_length
from multiverse.core.model.vm import MOVING_STATES, SLEEPING_STATES, UPCOMING_STATES, Vm, VmState
from multiverse.core.state import State
from multiverse.core.transition import Move
from multiverse.ports import Addresses, Clock, Groups

T = TypeVar("T")
log = structlog.get_logger()

TIMEOUT = 60.0  # seconds
AGAIN, AGAIN_LIMIT = 2.0, 60.0  # seconds before the first repetition, doubled for each further one up to the limit
JITTER = 0.5  # a pause is longer by up to this share: what began together is not repeated together


def pause(runs: int, rng: Random) -> float:
    """Seconds until something that was done so many times is done again."""
    shortest = min(AGAIN_LIMIT, AGAIN * 2.0 ** min(runs - 1, 16))
    return shortest * (1.0 + JITTER * rng.random())


async def end_tasks(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set. After so many seconds it is set by a timer: `asyncio.timeout` raises two exceptions
    for that, and observers wait ten times for each job."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()


class Publication(Generic[T]):
    """`what` names the value in the log. `known` is what the scheduler knows before anything was published."""

    def __init__(self, what: str, clock: Clock, rng: Random, known: T | None = None) -> None:
        self._what, self._known = what, known
        self._clock, self._rng = clock, rng
        self._task: asyncio.Task[None] | None = None
        self._failures = 0  # in a row
        self._again_at = 0.0

    def ensure(self, value: T, publish: Callable[[T], Awaitable[None]]) -> None:
        """Publish the value if it has changed. Awaits nothing: a later `ensure` repeats what failed."""
        busy = self._task is not None and not self._task.done()
        if value == self._known or busy or self._clock.now() < self._again_at:
            return
        self._task = asyncio.create_task(self._publish(value, publish), name=f"publish the {self._what}")

    async def _publish(self, value: T, publish: Callable[[T], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                await publish(value)
        except (MultiverseError, TimeoutError) as error:
            self._failures += 1
            self._again_at = self._clock.now() + pause(self._failures, self._rng)
            reason = str(error) or f"it did not end within {TIMEOUT:g} s"
            log.warning(f"{self._what} not published", reason=reason)
        else:
            self._known, self._failures = value, 0

    async def close(self) -> None:
        await end_tasks([self._task])


_HAS_JOBS = (VmState.STARTING, VmState.JOINED, VmState.SERVING, *SLEEPING_STATES, *MOVING_STATES,
             VmState.RETIRING, VmState.ORPHAN, VmState.LOST)  # fmt: skip
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
        await self._told.close()


_MEMBERS = (
    *UPCOMING_STATES,
    VmState.JOINED,
    VmState.SERVING,
    *SLEEPING_STATES,
    *MOVING_STATES,
    VmState.RETIRING,
    VmState.LOST,
)
"""A VM in one of these states is reached, or will be. Its address is known before it runs, so hosts know it in time."""


@dataclass
class _ToldHost:
    """What is to be told to one host."""

    run: str | None = None  # the run of the agent that knows all but `changed`; None: no run does
    changed: dict[str, None] = field(default_factory=dict)  # names, in the order of their changes
    task: asyncio.Task[None] | None = None
    failures: int = 0  # in a row
    again_at: float = 0.0

    @property
    def is_busy(self) -> bool:
        return self.task is not None and not self.task.done()


class GroupBook:
    """Follows the moves that were committed, at the cost of what they change."""

    def __init__(self, state: State, reach: Reach, clock: Clock, rng: Random) -> None:
        self._state, self._reach, self._clock, self._rng = state, reach, clock, rng
        self._members: dict[str, Member] = {}
        self._places: dict[str, tuple[str, ...]] = {}  # the hosts of each member: a VM that moves has two
        self._of_group: dict[int, dict[str, None]] = {}  # names
        self._hosts_of: dict[int, Counter[str]] = {}  # how many VMs of a group each host has
        self._groups_on: dict[str, dict[int, None]] = {}
        self._hosts: defaultdict[str, _ToldHost] = defaultdict(_ToldHost)
        for vm in state.vms.values():
            self._note(vm)

    def group(self, vm: Vm) -> int:
        return group_of(self._state.attempt_of(vm), self._reach)

    def note(self, moves: Iterable[Move]) -> None:
        for change in (change for move in moves for change in move.changes):
            if isinstance(change.row, Vm):
                self._note(change.row)

    def _note(self, vm: Vm) -> None:
        """Hosts are told that a VM that moves is still at its first place; its second is told of the group, too."""
        new, old = self._member(vm), self._members.get(vm.name)
        hosts = tuple(place.host for place in vm.places) if new is not None else ()
        if new == old and hosts == self._places.get(vm.name, ()):
            return
        if old is not None:
            self._remove(old)
        if new is not None:
            self._add(new, hosts)

    def _member(self, vm: Vm) -> Member | None:
        group = self.group(vm) if vm.state in _MEMBERS and vm.address else 0
        return Member(vm.name, without_prefix_length(vm.address), vm.mac, vm.host, group) if group else None

    def _add(self, member: Member, places: tuple[str, ...]) -> None:
        names, hosts = self._of_group.setdefault(member.group, {}), self._hosts_of.setdefault(member.group, Counter())
        self._members[member.name], self._places[member.name] = member, places
        names[member.name] = None
        for place in places:
            hosts[place] += 1
            self._groups_on.setdefault(place, {})[member.group] = None
        # With its second VM the group is something to tell.
        self._changed(hosts, [member.name] if len(names) > 2 else names)
        self._changed((place for place in places if hosts[place] == 1), names)

    def _remove(self, member: Member) -> None:
        names, hosts = self._of_group[member.group], self._hosts_of[member.group]
        self._changed(hosts, [member.name] if len(names) > 2 else names)
        del self._members[member.name], names[member.name]
        for place in self._places.pop(member.name):
            hosts[place] -= 1
            if not hosts[place]:
                del hosts[place]
                self._changed([place], names)
                groups = self._groups_on[place]
                del groups[member.group]
                if not groups:
                    del self._groups_on[place]
        if not names:
            del self._of_group[member.group], self._hosts_of[member.group]

    def _changed(self, hosts: Iterable[str], names: Iterable[str]) -> None:
        """A host that knows nothing yet is told all anyway. At the start of a controller that is every host: then
        nothing is kept for each pair of a VM and a host of its user."""
        for host in hosts if self._hosts else ():
            known = self._hosts.get(host)
            if known is not None and (known.run is not None or known.is_busy):
                known.changed.update(dict.fromkeys(names))

    def _told_of(self, host: str, name: str) -> Member | None:
        member = self._members.get(name)
        if member is None or len(self._of_group[member.group]) < 2 or host not in self._hosts_of[member.group]:
            return None
        return member

    def ensure(self, groups: Groups | None) -> None:
        """Tell what is to be told. Awaits nothing: what fails is told by a later call."""
        if groups is None:
            return
        listening, now = groups.listening, self._clock.now()
        for gone in [name for name, host in self._hosts.items() if name not in listening and not host.is_busy]:
            del self._hosts[gone]  # it is told all once it listens
        for name, run in listening.items():
            host = self._hosts[name]
            if host.is_busy or now < host.again_at or (host.run == run and not host.changed):
                continue
            host.task = asyncio.create_task(self._tell(groups, name, host, run), name=f"tell {name} of groups")

    async def _tell(self, groups: Groups, name: str, host: _ToldHost, run: str) -> None:
        try:
            while host.run != run or host.changed:
                whole = host.run != run
                if whole:
                    names = [one for group in self._groups_on.get(name, ()) for one in self._of_group[group]]
                else:
                    names = list(host.changed)
                host.changed.clear()
                host.run = None  # until it has answered
                told = {one: self._told_of(name, one) for one in names}
                members = [one for one in told.values() if one is not None]
                gone = [] if whole else [one for one, member in told.items() if member is None]
                async with asyncio.timeout(TIMEOUT):
                    await groups.tell(name, members, gone, whole=whole)
                host.run, host.failures = run, 0
        except (MultiverseError, TimeoutError) as error:
            host.failures += 1
            host.again_at = self._clock.now() + pause(host.failures, self._rng)
            reason = str(error) or f"it did not answer within {TIMEOUT:g} s"
            log.warning("a host was not told which VMs reach each other", host=name, reason=reason)

    async def close(self) -> None:
        await end_tasks(host.task for host in self._hosts.values())
