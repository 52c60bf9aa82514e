"""A `ports.Hypervisor` over the simulated hosts: every step takes time, and may be cut short between any two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from multiverse.core.model import HypervisorView, Identity, Size, Stage, TemplateKey, User, VmRef, VmSpec
from multiverse.simulation.world import World


@dataclass(frozen=True)
class HostPace:
    """How long things take, in seconds, as ranges that are drawn from (DESIGN 5 measured the middle ones)."""

    observe: tuple[float, float] = (0.001, 0.02)
    command: tuple[float, float] = (0.001, 0.01)
    template: tuple[float, float] = (3.0, 5.0)
    instant: tuple[float, float] = (0.08, 0.2)
    full: tuple[float, float] = (1.0, 3.0)
    start: tuple[float, float] = (0.03, 0.3)
    stop: tuple[float, float] = (0.01, 0.2)


class SimulatedHypervisor:
    """See `ports.Hypervisor`: this is its contract's plainest reading."""

    def __init__(self, world: World, rng: Random, pace: HostPace | None = None) -> None:
        self._machines = world.machines
        self._rng = rng
        self._pace = pace or HostPace()

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
        await self._take("look", self._pace.observe)
        view = self._machines.view()
        await self._take("reply", self._pace.observe)
        return view

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        await self._take("command", self._pace.command)
        if not self._machines.begin_template(template):
            return ()
        boot = await self._take("boot", self._pace.template)
        self._machines.finish_template(template)
        return (boot,)

    async def delete_template(self, template: TemplateKey) -> None:
        await self._take("command", self._pace.command)
        self._machines.drop_template(template)
        await self._take("reply", self._pace.command)

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        command = await self._take("command", self._pace.command)
        self._machines.begin(vm)
        clone = await self._take("clone", self._pace.full if vm.kind == "full" else self._pace.instant)
        self._machines.park(vm.name)
        return (command, clone)

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        plug = await self._take("plug", self._pace.command)
        self._machines.start(vm.name, size, identity)
        identity_sent = await self._take("identity", self._pace.start)
        self._machines.started(vm.name)
        return (plug, identity_sent)

    async def add_user(self, vm: VmRef, user: User) -> None:
        await self._take("command", self._pace.command)
        self._machines.introduce(vm.name, user)
        await self._take("reply", self._pace.command)

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self._take("command", self._pace.command)
        if grace > 0:
            await self._take("flush", (0.0, min(grace, 0.5)))
            self._machines.write_back(vm.name)
        self._machines.destroy(vm.name)
        await self._take("stop", self._pace.stop)

    async def _take(self, name: str, pace: tuple[float, float]) -> Stage:
        seconds = self._rng.uniform(*pace)
        await asyncio.sleep(seconds)
        return Stage(name, seconds)
