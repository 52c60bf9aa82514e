"""Pilot jobs in the simulated Slurm: physical nodes that are leased, and what happens to them.

A pilot waits for a node, runs, and is told to end by preemption, an operator, its time limit or the controller; then
its agent says that it ends, takes no VM any more, holds those that it has for as long as its notice permits, and ends
them within KillWait. Slurm shows the end of some pilots later than their agents do. A node that is set DOWN ends its
pilot in Slurm at once, while its VMs go on until the node is rebooted. All that happens whether or not slurmctld
answers; only its answers are missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from random import Random
from zlib import crc32

from multiverse.core.errors import Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import LeaseSpec, PilotSeen, PilotState
from multiverse.core.model.machine import MachineKind
from multiverse.core.model.saved import Storage
from multiverse_lab.simulation.clock import EPOCH
from multiverse_lab.simulation.machines import ABILITIES, Machines

PARTITION = "physical"

SHOWN_WITHIN = 3
"""Seconds, at most, until Slurm shows that a pilot ends, in whole seconds that depend on the lease."""

HELD_LOOKS = 1.0  # seconds between two looks of an agent at the VMs that it holds

LAST_WORD = 3.0
"""Seconds that an agent goes on after it has ended all VMs, so that its controller sees that they are gone."""


@dataclass(frozen=True)
class PhysicalNodes:
    """The partition of physical nodes. Ranges, in seconds, are drawn from. `count` 0: there is none."""

    count: int = 0
    size: Size = field(default=Size(6, 8192, 65536))
    wait: tuple[float, float] = (0.5, 20.0)  # until a pilot gets a node that is free
    start: tuple[float, float] = (0.5, 3.0)  # until its agent answers
    notice: tuple[float, float] = (0.0, 0.0)  # for which its agent holds its VMs, so that they leave
    drain: tuple[float, float] = (0.1, 25.0)  # until its agent has ended all VMs, within KillWait
    reboot: tuple[float, float] = (30.0, 300.0)  # until a node that was set DOWN has been rebooted
    min_job_age: tuple[float, float] = (2.0, 300.0)
    storage: Storage | None = None  # as of the hosts that are made of them, like the next one
    moves: MachineKind | None = None


@dataclass(eq=False)
class Pilot:
    """A pilot job. `clean` says that nothing of it is left on a node. One that ends is shown as running until
    `ends_from`."""

    id: str
    spec: LeaseSpec
    state: PilotState = PilotState.PENDING
    node: str = ""
    began: float = 0.0
    ends_from: float = 0.0
    restarts: int = 0
    reason: str = ""
    clean: bool = True
    shown: bool = True

    def seen(self, now: float) -> PilotSeen:
        """As the scheduler shows it."""
        early = self.state is PilotState.ENDING and now < self.ends_from
        state, reason = (PilotState.RUNNING, "") if early else (self.state, self.reason)
        ends = EPOCH + self.began + self.spec.time_limit if state is PilotState.RUNNING else inf
        clean = self.clean and state is PilotState.ENDED
        return PilotSeen(self.spec.name, self.spec.token, state, self.node, ends, reason, self.restarts, clean)


class Pilots:
    """All pilots that were ever submitted, and the nodes that they run on."""

    def __init__(self, machines: Machines, nodes: PhysicalNodes, rng: Random) -> None:
        self._machines, self.nodes, self._rng = machines, nodes, rng
        self._loop = asyncio.get_running_loop()
        self.pilots: dict[str, Pilot] = {}
        self.free = [f"p{number}" for number in range(1, nodes.count + 1)]
        self.log: Callable[[str], None] = lambda _: None
        self.taken: list[tuple[float, float]] = []  # from when to when each node was taken, for what it cost
        self.overran: list[str] = []  # hosts on which a job ran when their time was over

    # --- the scheduler

    def request(self, lease: LeaseSpec) -> None:
        """Submit a pilot, unless one of that name and token is shown."""
        if lease.partition != PARTITION or not self.nodes.count:
            raise Refused(f"there is no partition {lease.partition}", hint="correct lease.partition")
        if lease.size.cpus > self.nodes.size.cpus or lease.size.memory > self.nodes.size.memory:
            raise Refused(f"no node has {lease.size}", hint="reduce lease.cpus and lease.memory")
        if any((one.spec.name, one.spec.token) == (lease.name, lease.token) for one in self._shown().values()):
            return
        pilot = Pilot(str(9_000_001 + len(self.pilots)), lease)
        self.pilots[pilot.id] = pilot
        self._later(self.nodes.wait, lambda: self._start(pilot))

    def release(self, name: str, ids: tuple[str, ...]) -> None:
        """Cancel these pilots of that name, or all of it."""
        for pilot in list(self.pilots.values()):
            if pilot.spec.name == name and (not ids or pilot.id in ids):
                self.end(pilot, "CANCELLED")

    def view(self) -> dict[str, PilotSeen]:
        """All pilots that are shown."""
        return {id_: pilot.seen(self._loop.time()) for id_, pilot in self._shown().items()}

    def leasable(self) -> Mapping[str, Size]:
        """What a whole node has."""
        return {PARTITION: self.nodes.size} if self.nodes.count else {}

    def _shown(self) -> dict[str, Pilot]:
        return {id_: pilot for id_, pilot in self.pilots.items() if pilot.shown}

    def _later(self, bounds: tuple[float, float], act: Callable[[], None]) -> None:
        self._loop.call_later(self._rng.uniform(*bounds), act)

    def _start(self, pilot: Pilot) -> None:
        if pilot.state is not PilotState.PENDING:
            return
        if not self.free:
            pilot.reason = "Resources"
            self._later(self.nodes.wait, lambda: self._start(pilot))
            return
        pilot.node, pilot.state, pilot.began = self.free.pop(0), PilotState.RUNNING, self._loop.time()
        pilot.reason, pilot.clean = "", False
        self.log(f"pilot {pilot.id} of {pilot.spec.name} starts on {pilot.node}")
        restarts = pilot.restarts
        self._loop.call_later(pilot.spec.time_limit, lambda: self._time_out(pilot, restarts))
        if not restarts:  # the controller never uses one that was queued again
            self._later(self.nodes.start, lambda: self._boot(pilot))

    def _boot(self, pilot: Pilot) -> None:
        if pilot.state is PilotState.RUNNING:
            nodes, name = self.nodes, pilot.spec.name
            made = Host(name, nodes.size, ABILITIES, nodes.size, "tcg", storage=nodes.storage, moves=nodes.moves)
            self._machines.hosts[name] = made

    def _time_out(self, pilot: Pilot, restarts: int) -> None:
        if pilot.state is PilotState.RUNNING and pilot.restarts == restarts:
            if self._machines.serves(pilot.spec.name):
                self.overran.append(pilot.spec.name)
            self.end(pilot, "TIMEOUT")

    def end(self, pilot: Pilot, reason: str) -> None:
        """Tell a pilot to end: its agent ends the VMs, and then the node is free."""
        if pilot.state is PilotState.PENDING:
            pilot.reason = reason
            self._ended(pilot)
        elif pilot.state is PilotState.RUNNING:
            pilot.state, pilot.reason = PilotState.ENDING, reason
            pilot.ends_from = self._loop.time() + crc32(pilot.spec.token.encode()) % (SHOWN_WITHIN + 1)
            until = self._loop.time() + (self._rng.uniform(*self.nodes.notice) if any(self.nodes.notice) else 0.0)
            self._machines.refuse(pilot.spec.name, "the lease ends", EPOCH + until)
            self._hold(pilot, until)

    def _hold(self, pilot: Pilot, until: float) -> None:
        """Its agent holds its VMs until then, or until all have left."""
        if self._loop.time() < until and self._machines.vms_on(pilot.spec.name):
            self._loop.call_later(HELD_LOOKS, lambda: self._hold(pilot, until))
        else:
            self._later(self.nodes.drain, lambda: self._drain(pilot))

    def _drain(self, pilot: Pilot) -> None:
        if pilot.state is PilotState.ENDING:
            self._machines.switch_off(pilot.spec.name)
            self._loop.call_later(LAST_WORD, lambda: self._drained(pilot))

    def _drained(self, pilot: Pilot) -> None:
        if pilot.state is PilotState.ENDING:
            self._switch_off(pilot)
            self._give_back(pilot)
            self._ended(pilot)

    def _switch_off(self, pilot: Pilot) -> None:
        self._machines.switch_off(pilot.spec.name)
        self._machines.away.add(pilot.spec.name)
        pilot.clean = True

    def _give_back(self, pilot: Pilot) -> None:
        self.taken.append((pilot.began, self._loop.time()))
        self.free.append(pilot.node)

    def _ended(self, pilot: Pilot) -> None:
        self.log(f"pilot {pilot.id} of {pilot.spec.name} has ended: {pilot.reason}")
        pilot.state = PilotState.ENDED
        self._later(self.nodes.min_job_age, lambda: self._forget(pilot))

    def _forget(self, pilot: Pilot) -> None:
        pilot.shown = False

    # --- what happens to them

    def running(self, pick: float) -> Pilot | None:
        """A pilot that waits or runs, chosen by a number from 0 to 1; None if there is none."""
        alive = [one for one in self.pilots.values() if one.state in (PilotState.PENDING, PilotState.RUNNING)]
        return alive[int(pick * len(alive))] if alive else None

    def requeue(self, pilot: Pilot) -> None:
        """An operator queues a pilot again. Its VMs end, and it waits for another node."""
        if pilot.state is PilotState.RUNNING:
            self._switch_off(pilot)
            self._give_back(pilot)
            pilot.state, pilot.restarts = PilotState.PENDING, pilot.restarts + 1
            self._later(self.nodes.wait, lambda: self._start(pilot))

    def fail_node(self, pilot: Pilot) -> None:
        """The node of a pilot does not answer any more, and is set DOWN. Its VMs go on until it is rebooted."""
        if pilot.state in (PilotState.RUNNING, PilotState.ENDING):
            self._machines.go_away(pilot.spec.name)
            pilot.reason = "NODE_FAIL"
            self._ended(pilot)
            self._later(self.nodes.reboot, lambda: self._rebooted(pilot))

    def _rebooted(self, pilot: Pilot) -> None:
        self.log(f"node {pilot.node} has been rebooted")
        self._switch_off(pilot)
        self._give_back(pilot)

    def lose(self, pilot: Pilot) -> None:
        """Slurm forgets a pilot that has ended, before anybody sees that it has."""
        if pilot.state in (PilotState.RUNNING, PilotState.ENDING):
            self._switch_off(pilot)
            self._give_back(pilot)
            pilot.state = PilotState.ENDED
            self._forget(pilot)

    @property
    def alive(self) -> list[str]:
        """Pilots that have not ended."""
        return [f"pilot {one.id} of {one.spec.name} is {one.state}" for one in self.pilots.values()
                if one.state is not PilotState.ENDED]  # fmt: skip

    def is_off(self, host: str) -> bool:
        """Whether nothing of a leased host goes on."""
        return all(one.clean for one in self.pilots.values() if one.spec.name == host)

    def take_away(self, vm: str) -> bool:
        """Whether a VM is on a leased host whose pilot does not simply run."""
        machine = self._machines.vms.get(vm)
        mine = [one for one in self.pilots.values() if machine is not None and one.spec.name == machine.spec.host]
        return bool(mine) and not any(one.state is PilotState.RUNNING and not one.restarts for one in mine)
