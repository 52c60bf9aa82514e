"""VMs that sleep on simulated hosts while their jobs are suspended, and what must hold of them at each commit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from multiverse.core.errors import Broken, Gone, Refused, Unknown
from multiverse.core.machines.sleep import STAND_IN
from multiverse.core.model.identity import Identity
from multiverse.core.model.vm import Stage, VmCondition, VmRef, VmState
from multiverse.core.rows import Rows
from multiverse_lab.simulation.guests import Guest
from multiverse_lab.simulation.host_calls import HostCalls
from multiverse_lab.simulation.machines import Machine

if TYPE_CHECKING:
    from multiverse_lab.simulation.hypervisor import SimulatedHosts


class SimulatedSleeps:
    """`ports.Sleeps`. Calls about one VM follow each other. An interrupted one is undone by the next agent."""

    def __init__(self, hypervisor: SimulatedHosts) -> None:
        self._hypervisor, self._machines, self._latencies = hypervisor, hypervisor.machines, hypervisor.latencies
        self.calls = HostCalls(hypervisor.machines)
        self._locks: dict[str, asyncio.Lock] = {}  # by VM

    async def sleep(self, vm: VmRef, number: int, identity: Identity, key: str = "") -> Sequence[Stage]:
        return await self.calls.run(vm.source, self._in_turn(vm.name, self._sleep(vm, number)))

    async def wake(self, vm: VmRef, number: int, *, runs: bool, key: str = "") -> Sequence[Stage]:
        return await self.calls.run(vm.source, self._in_turn(vm.name, self._wake(vm, number, runs=runs)))

    async def _sleep(self, vm: VmRef, number: int) -> Sequence[Stage]:
        await self._hypervisor.take("command", self._latencies.command)
        machine, guest = self._running(vm)
        if number < machine.slept + (not machine.asleep):
            raise Refused(f"sleep {number} of {vm.name} is over")
        if machine.asleep:
            return ()
        if machine.channel_closed:
            raise Broken(f"{vm.name} does not answer", hint="destroy it")
        if not guest.is_suspended:
            raise Refused(f"{vm.name} does not sleep: a process of its job has not stopped")
        self._machines.check_writable(machine.spec.host)
        guest.fall_asleep()
        machine.slept = number
        try:
            written = await self._hypervisor.take("write", self._latencies.save)
            self._running(vm)
            self._machines.check_writable(machine.spec.host)
        except BaseException:
            guest.wake_up()  # of an interrupted call: by the next agent
            raise
        machine.condition, machine.asleep = VmCondition.ASLEEP, True
        guest.sleep()
        return (written,)

    async def _wake(self, vm: VmRef, number: int, *, runs: bool) -> Sequence[Stage]:
        await self._hypervisor.take("command", self._latencies.command)
        machine, guest = self._running(vm)
        if number < machine.slept:
            raise Refused(f"sleep {number} of {vm.name} is over")
        has_heard = not machine.asleep and (machine.slept < number or machine.told is not None)
        machine.slept, machine.told = number, runs if has_heard and machine.channel_closed else None
        stages: Sequence[Stage] = ()
        if machine.asleep:
            machine.asleep = False
            self._machines.check_capacity(machine.spec.host)
            guest.fall_asleep()
            try:
                stages = (await self._hypervisor.take("read", self._latencies.save),)
            except BaseException:  # the next agent lets it sleep on
                machine.asleep = True
                guest.sleep()
                raise
            machine.condition = VmCondition.RUNNING
            guest.wake_up()
        if machine.channel_closed:
            if has_heard:
                return stages
            raise Broken(f"{vm.name} does not answer", hint="destroy it")
        if machine.condition is not VmCondition.RUNNING:
            raise Unknown(f"{vm.name} does not answer")
        guest.settle(runs=runs)
        machine.told = runs
        return stages

    def _running(self, vm: VmRef) -> tuple[Machine, Guest]:
        machine = self._machines.find(vm)
        if machine is None or machine.guest is None:
            raise Gone(f"no VM {vm.name} runs at {vm.source}")
        return machine, machine.guest

    async def _in_turn(self, name: str, work: Coroutine[Any, Any, Sequence[Stage]]) -> Sequence[Stage]:
        try:
            async with self._locks.setdefault(name, asyncio.Lock()):
                return await work
        finally:
            work.close()


class SleepWatch:
    """Checks at each commit that VMs that sleep claim no memory, and that only they do not."""

    def __init__(self) -> None:
        self._broken: set[str] = set()
        self.slept = 0  # VMs that have slept, as rows show it

    def look(self, rows: Rows) -> None:
        asleep = {vm.key: vm for vm in rows.vms.values() if vm.state in (VmState.ASLEEP, VmState.DELAYED)}
        self.slept += len(asleep)
        for claim in rows.claims if asleep else ():
            vm = asleep.get(claim.owner)
            if vm is not None and (claim.size.memory > STAND_IN or claim.size.cpus):
                self._broken.add(f"{vm.name} sleeps, and claims {claim.size} of {claim.domain}")
        for vm in rows.vms.values():
            if vm.state in (VmState.SERVING, VmState.WAKING) and vm.attempt is not None:
                claims = [one.size.memory for one in rows.claims if one.owner == vm.key]
                if claims and max(claims) < vm.size.memory:
                    self._broken.add(f"{vm.name} is {vm.state}, and claims {max(claims)} of {vm.size.memory} MiB")

    def violations(self) -> list[str]:
        return sorted(self._broken)
