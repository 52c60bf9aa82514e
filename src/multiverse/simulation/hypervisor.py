"""A `ports.Hypervisor` over the simulated hosts. Every call takes time and can be cancelled between any two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from multiverse.core.model import HypervisorView, Identity, Size, Stage, TemplateKey, User, VmRef, VmSpec
from multiverse.simulation.world import World


@dataclass(frozen=True)
class HostLatencies:
    """How long the steps of calls take: ranges in seconds that are drawn from. Measurements are in DESIGN 5."""

    observe: tuple[float, float] = (0.001, 0.02)
    command: tuple[float, float] = (0.001, 0.01)
    template: tuple[float, float] = (3.0, 5.0)
    instant: tuple[float, float] = (0.08, 0.2)
    full: tuple[float, float] = (1.0, 3.0)
    start: tuple[float, float] = (0.03, 0.3)
    stop: tuple[float, float] = (0.01, 0.2)


class SimulatedHypervisor:
    """The simplest hypervisor that keeps the contract of `ports.Hypervisor`."""

    def __init__(self, world: World, rng: Random, latencies: HostLatencies | None = None) -> None:
        self._machines = world.machines
        self._rng = rng
        self._latencies = latencies or HostLatencies()

    @property
    def name(self) -> str:
        return "simulated"

    @property
    def sources(self) -> Sequence[SimulatedHypervisor]:
        return (self,)

    @property
    def templates(self) -> SimulatedHypervisor:
        return self

    @property
    def users(self) -> SimulatedHypervisor:
        return self

    @property
    def hosts(self) -> Sequence[str]:
        return list(self._machines.hosts)

    async def observe(self) -> HypervisorView:
        await self._take("look", self._latencies.observe)
        view = self._machines.view()
        await self._take("reply", self._latencies.observe)
        return view

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        await self._take("command", self._latencies.command)
        if not self._machines.begin_template(template):
            return ()
        boot = await self._take("boot", self._latencies.template)
        self._machines.finish_template(template)
        return (boot,)

    async def delete_template(self, template: TemplateKey) -> None:
        await self._take("command", self._latencies.command)
        self._machines.delete_template(template)
        await self._take("reply", self._latencies.command)

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        command = await self._take("command", self._latencies.command)
        self._machines.begin(vm)
        clone = await self._take("clone", self._latencies.full if vm.kind == "full" else self._latencies.instant)
        self._machines.park(vm.name)
        return (command, clone)

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        plug = await self._take("plug", self._latencies.command)
        self._machines.start(vm.name, size, identity)
        identity_sent = await self._take("identity", self._latencies.start)
        self._machines.started(vm.name)
        return (plug, identity_sent)

    async def add_user(self, vm: VmRef, user: User) -> None:
        await self._take("command", self._latencies.command)
        self._machines.add_user(vm.name, user)
        await self._take("reply", self._latencies.command)

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self._take("command", self._latencies.command)
        if grace > 0:
            await self._take("flush", (0.0, min(grace, 0.5)))
            self._machines.write_back(vm.name)
        self._machines.destroy(vm.name)
        await self._take("stop", self._latencies.stop)

    async def _take(self, name: str, bounds: tuple[float, float]) -> Stage:
        seconds = self._rng.uniform(*bounds)
        await asyncio.sleep(seconds)
        return Stage(name, seconds)
