"""A simulated cloud: one source for all its hosts. It only boots VMs, and assigns addresses, MACs and places itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

from multiverse.core.errors import Broken, Exhausted, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import HypervisorView, ImageDisk
from multiverse.core.model.identity import Identity
from multiverse.core.model.vm import Stage, VmCondition, VmRef, VmSpec
from multiverse_lab.simulation.hypervisor import HostLatencies, SimulatedHypervisor
from multiverse_lab.simulation.machines import Machine, Machines

QUOTA = "cloud"
"""The name of the one `Host` that the cloud shows. Its capacity is the site's quota."""

SOURCE = "region-1"
CLOUD_ABILITIES = frozenset({"full", "assigns_addresses"})
POLL = 1.0  # seconds between two questions whether a VM has been built
RACKS = ("rack-1", "rack-2", "rack-3")

LATENCIES = HostLatencies(
    observe=(0.05, 0.5), command=(0.05, 0.5), full=(40.0, 80.0), start=(0.2, 2.0), stop=(0.5, 5.0)
)


class CloudMachines(Machines):
    """The VMs of the cloud. `hosts` has one entry, the quota. There are no templates."""

    def source_of(self, host: str) -> str:
        return SOURCE

    def hosts_of(self, source: str) -> Sequence[str]:
        return list(self.hosts) if source == SOURCE else []

    def _disks(self) -> dict[str, ImageDisk]:
        """A VM's disk counts as what was asked for."""
        return {}

    def _written(self, machine: Machine) -> int:
        return machine.takes.disk

    def _admit(self, spec: VmSpec) -> Machine:
        if spec.kind is not CloneKind.FULL:
            raise Refused(f"the cloud makes no {spec.kind} clones", hint="ask for a full clone")
        if spec.mac or spec.address:
            raise Refused(f"{spec.name}: the cloud assigns addresses itself", hint="leave MAC and address empty")
        used, quota = self.used(spec.host), self.hosts[spec.host].capacity
        if used.cpus + spec.size.cpus > quota.cpus or used.memory + spec.size.memory > quota.memory:
            self.violations.append(f"{spec.name} of {spec.size} exceeds the quota {quota}, of which {used} is used")
            raise Exhausted(f"{spec.name} exceeds the quota", hint="ask the cloud's operator for more")
        number = len(self.created) + 1
        load = Counter(vm.placed_on for vm in self.vms.values())
        return Machine(
            spec,
            mac=f"fa:16:3e:00:{number >> 8 & 255:02x}:{number & 255:02x}",
            address=f"10.77.{number >> 8 & 255}.{number & 255}/16",
            placed_on=min(RACKS, key=lambda rack: load[rack]),
        )

    @staticmethod
    def _owns(machine: Machine, identity: Identity) -> bool:
        own = identity.mac in ("", machine.mac) and identity.address in ("", machine.address)
        return own and identity.hostname == machine.spec.name

    def build(self, name: str) -> None:
        """The cloud has built a VM, whether or not the caller still waits. Nothing to do if the VM was destroyed."""
        machine = self.vms.get(name)
        if machine is not None and machine.condition is VmCondition.CREATING:
            if self.images[machine.spec.image].boots:
                machine.condition = VmCondition.PARKED
            else:
                self.die(name, "the image does not boot")

    def condition(self, vm: VmRef) -> VmCondition:
        """The condition of a VM. Raises `Gone` if there is none, `Broken` if it is dead."""
        machine = self._get(vm)
        if machine.condition is VmCondition.DEAD:
            raise Broken(f"{vm.name} is dead: {machine.reason}", hint="destroy it")
        return machine.condition

    def go_away(self, host: str) -> None:
        """The cloud's API stops answering. Its VMs keep their network."""
        self.away.add(host)

    def come_back(self, host: str) -> None:
        self.away.discard(host)

    def switch_off(self, host: str) -> None:
        """The rack with the most VMs fails: its VMs die, and the cloud shows them as dead."""
        load = Counter(vm.placed_on for vm in self.vms.values())
        rack = max(RACKS, key=lambda rack: load[rack])
        for name in [name for name, machine in self.vms.items() if machine.placed_on == rack]:
            self.die(name, f"{rack} failed")

    def used(self, host: str) -> Size:
        """What the VMs take of the quota: their nominal sizes, from the request to create them until they are gone."""
        sizes = [machine.size or machine.spec.size for machine in self.vms.values()]
        return Size(sum(s.cpus for s in sizes), sum(s.memory for s in sizes), sum(s.disk for s in sizes))


class SimulatedCloud(SimulatedHypervisor):
    """See `ports.Hypervisor`. A VM that the cloud was asked to create is built even if the caller has gone."""

    templates = None
    users = None
    saves = None
    moves = None
    sleeps = None

    def __init__(self, machines: CloudMachines, rng: Random, latencies: HostLatencies = LATENCIES) -> None:
        super().__init__(machines, rng, latencies)
        self._cloud = machines

    @property
    def name(self) -> str:
        return SOURCE

    @property
    def hosts(self) -> Sequence[str]:
        return list(self._cloud.hosts)

    @property
    def sources(self) -> Sequence[SimulatedCloud]:
        return (self,)

    @property
    def silence(self) -> None:
        return None

    async def observe(self) -> HypervisorView:
        return await self.observe_host(QUOTA)

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        command = await self.take("command", self.latencies.command)
        known = vm.name in self._cloud.vms
        self._cloud.begin(vm)
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not known:
            loop.call_later(self.rng.uniform(*self.latencies.full), self._cloud.build, vm.name)
        ref = VmRef(vm.name, SOURCE)
        while self._cloud.condition(ref) is VmCondition.CREATING:  # noqa: ASYNC110 - a cloud is polled
            await asyncio.sleep(POLL)
        return (command, Stage("build", loop.time() - began))
