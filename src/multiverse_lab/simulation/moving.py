"""VMs that move between simulated hosts, which hand them over between themselves. The links may be cut at any step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from multiverse.agent.hypervisor import settle_move
from multiverse.agent.protocol import MoveHolds
from multiverse.core.errors import Broken, Gone, Refused, Unknown
from multiverse.core.model.vm import Stage, VmCondition, VmRef, VmSpec
from multiverse_lab.simulation.machines import Machine, Machines

FORGOTTEN = 30.0  # seconds after which a host removes what nobody sends any more


@dataclass
class _HandOver:
    number: int
    source: str
    target: str
    machine: Machine
    task: asyncio.Task[Sequence[Stage]] | None = None


class SimulatedMoves:
    """`ports.Moves`, and what each host does for it. What hosts have begun goes on whoever has asked for it."""

    def __init__(self, machines: Machines, rng: Random) -> None:
        self._machines, self._rng = machines, rng
        self._under_way: dict[str, _HandOver] = {}  # by the name of the VM
        self._over: dict[tuple[str, str], int] = {}  # by host and name: moves up to this number are not begun any more
        self._received: set[tuple[str, str, int]] = set()  # which host has taken which VM over, and by which move
        self._tasks: set[asyncio.Task[Any]] = set()

    async def move(self, vm: VmRef, number: int, target: VmSpec) -> Sequence[Stage]:
        await self._command()
        self.receive(target, number)
        await self._command()
        return await self.send(vm, number, target.host)

    async def settle(self, vm: VmRef, number: int, other: VmRef) -> None:
        async def cancel(one: VmRef, absent: bool) -> MoveHolds:
            await self._command()
            return self.end(one, number, absent=absent)

        async def destroy(one: VmRef) -> None:
            await self._command()
            self._machines.destroy(one)

        await settle_move(vm, other, cancel, destroy)

    # --- what one host does

    def receive(self, target: VmSpec, number: int) -> None:
        """Expect a VM, unless it has come by that move already. Raises what the creation of a VM raises, and `Refused`
        if that move is over."""
        if (target.host, target.name, number) in self._received:
            return
        if number <= self._over.get((target.host, target.name), 0):
            raise Refused(f"move {number} of {target.name} is over", hint="begin another one")
        if self._machines.expect(target):
            self._spawn(self._forget(target, number))

    async def send(self, vm: VmRef, number: int, target: str) -> Sequence[Stage]:
        """Move a VM to a host that expects it; the same again waits for it. Raises the errors of `ports.Moves`."""
        if (target, vm.name, number) in self._received and vm.name not in self._under_way:
            return ()
        machine, source = self._machines.find(vm), self._machines.host_of(vm.name)
        if machine is None or machine.handed or machine is not self._machines.vms.get(vm.name):
            under_way = self._under_way.get(vm.name)
            if under_way is None or under_way.number != number:
                raise Gone(f"no VM {vm.name} at {vm.source}")
        found = self._under_way.get(vm.name)
        if found is None:
            if number <= self._over.get((source, vm.name), 0):
                raise Refused(f"move {number} of {vm.name} is over", hint="begin another one")
            if machine is None or machine.condition is not VmCondition.RUNNING:
                raise Broken(f"{vm.name} does not run")
            found = self._under_way[vm.name] = _HandOver(number, source, target, machine)
            found.task = self._spawn(self._hand_over(vm.name, found))
        elif found.number != number:
            raise Refused(f"{vm.name} is moved already, by move {found.number}", hint="end that first")
        assert found.task is not None
        try:
            return await asyncio.shield(found.task)
        except asyncio.CancelledError:
            if found.task.cancelled():
                raise Unknown(f"the agent of {source} has ended") from None
            raise

    def end(self, vm: VmRef, number: int, *, absent: bool = False) -> MoveHolds:
        """End a move at one host, where that is possible. `absent`: the other host does not have the VM, and takes it
        no more by this move."""
        return self._end(self._machines.host_at(vm.source), vm, self._machines.find(vm), number, absent=absent)

    def _end(self, host: str, vm: VmRef, machine: Machine | None, number: int, *, absent: bool = False) -> MoveHolds:
        machines = self._machines
        self._over[host, vm.name] = max(number, self._over.get((host, vm.name), 0))
        if (host, vm.name, number) in self._received:
            return "received"
        if machine is None:
            return "absent"
        if machine is not machines.vms.get(vm.name):
            if machine.condition is VmCondition.DEAD:
                return "handed_over"
            del machines.copies[vm.name, host]
            return "absent"
        under_way = self._under_way.get(vm.name)
        if machine.handed and not absent:
            return "handed_over"
        if machine.handed:
            if any((name, by) == (vm.name, number) for _, name, by in self._received):
                machines.violations.append(f"{vm.name} goes on on {host}, and another host has received it")
            self._go_on(machine)
        if under_way is not None and under_way.task is not None:
            under_way.task.cancel()
        return "kept"

    def end_calls(self, source: str) -> None:
        """The agent of a host has ended. The next one goes on with VMs that were handed over."""
        for move in [one for one in self._under_way.values() if one.source == source and not one.machine.handed]:
            if move.task is not None:
                move.task.cancel()

    # --- between hosts

    async def _hand_over(self, name: str, move: _HandOver) -> Sequence[Stage]:
        machines, machine = self._machines, move.machine
        try:
            sent = await self._take("memory", self._rng.choice(((0.2, 1.0), (0.2, 1.0), (1.0, 30.0))))
            if self._is_cut(move):
                raise Broken(f"{name} did not move: the link to {move.target} was cut")
            self._check(name, move)
            if machine.condition is not VmCondition.RUNNING or (name, move.target) not in machines.copies:
                raise Broken(f"{name} did not move: {move.target} does not expect it")
            self._pause(machine, move.target)
            stopped = await self._until_answered(name, move)
            machines.copies.pop((name, move.source), None)
            return sent, stopped
        finally:
            if self._under_way.get(name) is move:
                del self._under_way[name]

    async def _until_answered(self, name: str, move: _HandOver) -> Stage:
        """Tell the target that the VM was handed over, until it has answered. Raises `Broken` if it does not have it:
        then the VM goes on here."""
        while True:
            stage = await self._take("handed over", (0.001, 0.05))
            if not self._is_cut(move):
                answer = self._take_over(name, move)
                if answer == "absent":
                    self._check(name, move)
                    self._go_on(move.machine)
                    raise Broken(f"{name} did not move: {move.target} does not have it")
                if not self._is_cut(move):  # or the answer is lost
                    return stage
            await asyncio.sleep(self._rng.uniform(0.5, 10.0))

    def _take_over(self, name: str, move: _HandOver) -> MoveHolds:
        which = (move.target, name, move.number)
        if which in self._received:
            return "received"
        copied = self._machines.copies.get((name, move.target))
        if copied is None or move.number <= self._over.get((move.target, name), 0):
            return "absent"
        self._check(name, move)
        self._received.add(which)
        self._machines.switch(name, move.target)
        self._go_on(move.machine)
        return "received"

    def _check(self, name: str, move: _HandOver) -> None:
        """Raise `Gone` if the VM has ended at its source."""
        machine = self._machines.vms.get(name)
        if machine is not move.machine or machine.condition is VmCondition.DEAD or machine.spec.host != move.source:
            raise Gone(f"{name} has ended")

    @staticmethod
    def _pause(machine: Machine, target: str) -> None:
        machine.handed = target
        if machine.guest is not None:
            machine.guest.pause()

    @staticmethod
    def _go_on(machine: Machine) -> None:
        machine.handed = ""
        if machine.guest is not None:
            machine.guest.stranded = False
            machine.guest.unpause()

    def _is_cut(self, move: _HandOver) -> bool:
        away = {move.source, move.target} & self._machines.away
        return bool(away) or self._rng.random() < self._machines.links_cut

    async def _forget(self, target: VmSpec, number: int) -> None:
        """Remove what nobody sends any more."""
        which = (target.name, target.host)
        while which in self._machines.copies and (target.host, target.name, number) not in self._received:
            await asyncio.sleep(FORGOTTEN)
            move = self._under_way.get(target.name)
            if move is None or move.number != number or self._is_cut(move):
                if (copied := self._machines.copies.get(which)) is not None:
                    self._end(target.host, target.ref, copied, number)
                return

    async def _command(self) -> None:
        await self._take("command", (0.001, 0.01))

    async def _take(self, name: str, bounds: tuple[float, float]) -> Stage:
        seconds = self._rng.uniform(*bounds)
        await asyncio.sleep(seconds)
        return Stage(name, seconds)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # of which nobody may have waited
