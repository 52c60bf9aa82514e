"""Hypervisors over the simulated hosts. Every call takes time and can be cancelled between any two steps."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from multiverse.core.errors import Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import Identity, User
from multiverse.core.model.job import LeasedHost
from multiverse.core.model.vm import Stage, TemplateKey, VmRef, VmSpec
from multiverse.ports import GuestUsers, Membership, Source, Templates
from multiverse.ports.hypervisor import NOT_LEASED
from multiverse_lab.simulation.host_calls import HostCalls
from multiverse_lab.simulation.machines import Machines
from multiverse_lab.simulation.moving import SimulatedMoves
from multiverse_lab.simulation.sleeping import SimulatedSleeps

T = TypeVar("T")


@dataclass(frozen=True)
class HostLatencies:
    """How long the steps of calls take: ranges in seconds that are drawn from. Measurements are in DESIGN 5."""

    observe: tuple[float, float] = (0.001, 0.02)
    command: tuple[float, float] = (0.001, 0.01)
    template: tuple[float, float] = (3.0, 5.0)
    instant: tuple[float, float] = (0.08, 0.2)
    full: tuple[float, float] = (1.0, 3.0)
    linked: tuple[float, float] | None = None  # None: as instant ones
    start: tuple[float, float] = (0.03, 0.3)
    stop: tuple[float, float] = (0.01, 0.2)
    unreachable: tuple[float, float] = (1.0, 5.0)  # until a call to a source that does not answer fails
    freeze: tuple[float, float] = (0.02, 0.3)
    save: tuple[float, float] = (0.3, 2.0)


@dataclass(frozen=True)
class ClonePace:
    """How clones of one kind are limited at the platform, as a virtualization manager limits them on all of its hosts.
    0: no limit."""

    rate: float = 0.0  # clones that begin in a second
    at_once: int = 0


class SimulatedHypervisor(ABC):
    """What the simulated hypervisors have in common."""

    def __init__(self, machines: Machines, rng: Random, latencies: HostLatencies) -> None:
        self.machines, self.rng, self.latencies = machines, rng, latencies

    @property
    @abstractmethod
    def sources(self) -> Sequence[Source]: ...

    @property
    def membership(self) -> Membership | None:
        return None

    @property
    @abstractmethod
    def templates(self) -> Templates | None: ...

    @property
    @abstractmethod
    def users(self) -> GuestUsers | None: ...

    @property
    def groups(self) -> None:
        return None

    @abstractmethod
    async def create(self, vm: VmSpec) -> Sequence[Stage]: ...

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        plug = await self.take("plug", self.latencies.command)
        self.machines.start(vm, size, identity)
        identity_sent = await self.take("identity", self.latencies.start)
        self.machines.started(vm)
        return (plug, identity_sent)

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self.take("command", self.latencies.command)
        if grace > 0:
            await self.take("flush", (0.0, min(grace, 0.5)))
            self.machines.write_back(vm)
        self.machines.destroy(vm)
        await self.take("stop", self.latencies.stop)

    async def observe_host(self, host: str) -> HypervisorView:
        """What the source of a host answers. Raises `Unknown` if the host cannot be reached."""
        await self.take("request", self.latencies.observe)
        if delay := self.machines.delays.get(self.machines.source_of(host), 0.0):
            await asyncio.sleep(delay)
        try:
            view = self.machines.view(host)
        except Unknown:
            await self.take("timeout", self.latencies.unreachable)
            raise
        await self.take("reply", self.latencies.observe)
        return view

    async def take(self, name: str, bounds: tuple[float, float]) -> Stage:
        """Let a step take its time, which is drawn from a range in seconds."""
        seconds = self.rng.uniform(*bounds)
        await asyncio.sleep(seconds)
        return Stage(name, seconds)


class SimulatedHosts(SimulatedHypervisor):
    """Hosts like those of the QEMU driver: each is a source of its own, with templates, and addresses are given."""

    def __init__(
        self,
        machines: Machines,
        rng: Random,
        latencies: HostLatencies | None = None,
        scheduler_answers: Callable[[], bool] = lambda: True,
    ) -> None:
        """`scheduler_answers` says whether leased hosts can be reached, by steps of their pilots."""
        super().__init__(machines, rng, latencies or HostLatencies())
        self.all_sources = [HostSource(self, host) for host in machines.hosts]
        self._leased: dict[str, LeasedSource] = {}
        self._scheduler_answers = scheduler_answers
        self._members = set(machines.hosts)
        self.moves = SimulatedMoves(machines, rng) if any(one.moves for one in machines.hosts.values()) else None
        storages = any(one.storage for one in machines.hosts.values())
        self.saves = SimulatedSaves(self) if storages else None
        self.sleeps = SimulatedSleeps(self) if storages else None

    @property
    def sources(self) -> Sequence[HostSource]:
        return [*(source for source in self.all_sources if source.name in self._members), *self._leased.values()]

    @property
    def membership(self) -> SimulatedHosts:
        return self

    def keep(self, hosts: Collection[str], leased: Mapping[str, LeasedHost] = NOT_LEASED) -> None:
        self._members = set(hosts)
        self._leased = {
            name: self._leased.get(name) or LeasedSource(self, name, self._scheduler_answers) for name in leased
        }

    def declared(self, host: str) -> Host | None:
        return self.machines.hosts.get(host)

    @property
    def templates(self) -> SimulatedHosts:
        return self

    @property
    def users(self) -> SimulatedHosts:
        return self

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        await self.take("command", self.latencies.command)
        if not self.machines.begin_template(template):
            return ()
        boot = await self.take("boot", self.latencies.template)
        self.machines.finish_template(template)
        return (boot,)

    async def delete_template(self, template: TemplateKey) -> None:
        await self.take("command", self.latencies.command)
        self.machines.delete_template(template)
        await self.take("reply", self.latencies.command)

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        command = await self.take("command", self.latencies.command)
        self.machines.begin(vm)
        clone = await self.take("clone", self._clone_time(vm.kind))
        self.machines.park(VmRef(vm.name, vm.host))
        return (command, clone)

    def _clone_time(self, kind: CloneKind) -> tuple[float, float]:
        times, instant = self.latencies, self.latencies.instant
        return {CloneKind.FULL: times.full, CloneKind.LINKED: times.linked or instant}.get(kind, instant)

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        await self.take("command", self.latencies.command)
        self.machines.add_user(vm, user)
        await self.take("reply", self.latencies.command)


class PacedHosts(SimulatedHosts):
    """Hosts whose clones wait for their turn at the platform. A clone that was asked for is made even if the caller has
    gone, who may ask again."""

    def pace_by(self, paces: Mapping[CloneKind, ClonePace]) -> None:
        self._paces = paces
        self._turns = {kind: asyncio.Semaphore(pace.at_once) for kind, pace in paces.items() if pace.at_once}
        self._next = dict.fromkeys(paces, 0.0)  # when the next clone of a kind may begin
        self._cloning: dict[str, asyncio.Task[Sequence[Stage]]] = {}

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        task = self._cloning.get(vm.name)
        if task is None:
            self.machines.begin(vm)
            task = self._cloning[vm.name] = asyncio.create_task(self._clone(vm))
            task.add_done_callback(lambda task: self._made(vm.name, task))
        return await asyncio.shield(task)

    def _made(self, name: str, task: asyncio.Task[Sequence[Stage]]) -> None:
        self._cloning.pop(name, None)
        if not task.cancelled():
            task.exception()  # which nobody may have waited for

    async def _clone(self, vm: VmSpec) -> Sequence[Stage]:
        turns: AbstractAsyncContextManager[Any] = self._turns.get(vm.kind) or nullcontext()
        async with turns:
            pace, now = self._paces.get(vm.kind, ClonePace()), asyncio.get_running_loop().time()
            if pace.rate:
                begins = max(now, self._next[vm.kind])
                self._next[vm.kind] = begins + 1 / pace.rate
                await asyncio.sleep(begins - now)
            return await super().create(vm)


class SimulatedSaves:
    """`ports.Saves`."""

    def __init__(self, hypervisor: SimulatedHosts) -> None:
        self._hypervisor, self._machines, self._latencies = hypervisor, hypervisor.machines, hypervisor.latencies
        self.calls = HostCalls(hypervisor.machines)
        self._saving: dict[str, asyncio.Task[Sequence[Stage]]] = {}  # by the name of the files

    async def freeze(self, vm: VmRef, *, script: bool = True) -> None:
        await self.calls.run(vm.source, self._freeze(vm, script=script))

    async def _freeze(self, vm: VmRef, *, script: bool) -> None:
        await self._take("command", self._latencies.command)
        self._machines.freeze(vm, script=script)
        await self._take("sync", self._latencies.freeze)
        self._machines.note_frozen(vm, frozen=True)

    async def cut(self, vm: VmRef) -> None:
        await self.calls.run(vm.source, self._cut(vm))

    async def _cut(self, vm: VmRef) -> None:
        await self._take("command", self._latencies.command)
        self._machines.cut(vm)
        await self._take("reply", self._latencies.command)

    async def _once(
        self, vm: VmRef, name: str, work: Callable[[VmRef, str], Coroutine[Any, Any, Sequence[Stage]]]
    ) -> Sequence[Stage]:
        """Wait for the work at a state, which is begun unless it is under way."""
        task = self._saving.get(name)
        if task is None or task.done():
            task = self._saving[name] = self.calls.begin(vm.source, work(vm, name))
        return await self.calls.wait_for(task)

    async def save(self, vm: VmRef, name: str, key: str = "") -> Sequence[Stage]:
        return await self._once(vm, name, self._save)

    async def _save(self, vm: VmRef, name: str) -> Sequence[Stage]:
        await self._take("command", self._latencies.command)
        if not self._machines.begin_save(vm, name):
            return ()
        written = await self._take("write", self._latencies.save)
        self._machines.finish_save(vm, name)
        return (written,)

    async def checkpoint(self, vm: VmRef, name: str, key: str = "", *, shared_files: bool = False) -> Sequence[Stage]:
        return await self._once(vm, name, self._checkpoint)

    async def _checkpoint(self, vm: VmRef, name: str) -> Sequence[Stage]:
        await self._take("command", self._latencies.command)
        if not self._machines.begin_checkpoint(vm, name):
            return ()
        written = await self._take("write", self._latencies.save)
        self._machines.freeze(vm)
        self._machines.note_frozen(vm, frozen=True)
        pause = await self._take("pause", self._latencies.freeze)
        self._machines.capture(vm, name)
        await self._take("sync", self._latencies.command)
        self._machines.finish_checkpoint(vm, name)
        return (written, pause)

    async def copy(self, source: str, name: str, key: str = "") -> None:
        await self.calls.run(source, self._copy(source, name))

    async def _copy(self, source: str, name: str) -> None:
        await self._take("command", self._latencies.command)
        if self._machines.begin_copy(source, name):
            await self._take("write", self._latencies.save)
            self._machines.finish_copy(source, name)

    async def keep_in_memory(self, vm: VmRef, name: str) -> None:
        await self.calls.run(vm.source, self._keep_in_memory(vm, name))

    async def _keep_in_memory(self, vm: VmRef, name: str) -> None:
        await self._take("command", self._latencies.command)
        self._machines.keep(vm, name)
        await self._take("reply", self._latencies.command)

    async def thaw(self, vm: VmRef) -> None:
        await self.calls.run(vm.source, self._thaw(vm))

    async def _thaw(self, vm: VmRef) -> None:
        await self._take("command", self._latencies.command)
        while not self._machines.thaw(vm):
            await self._take("run", self._latencies.unreachable)
            if not self._machines.thaw(vm):
                raise Unknown(f"the next run of its job has not begun in {vm.name}")
        await self._take("reply", self._latencies.command)
        self._machines.note_frozen(vm, frozen=False)

    async def discard(self, source: str, name: str) -> None:
        await self.calls.run(source, self._discard(source, name))

    async def _discard(self, source: str, name: str) -> None:
        await self._take("command", self._latencies.command)
        self._machines.discard(source, name)
        await self._take("reply", self._latencies.command)

    async def _take(self, name: str, bounds: tuple[float, float]) -> Stage:
        return await self._hypervisor.take(name, bounds)


class HostSource:
    """One host as a `ports.Source`, named like the host."""

    def __init__(self, hypervisor: SimulatedHosts, host: str) -> None:
        self._hypervisor, self._host = hypervisor, host

    @property
    def name(self) -> str:
        return self._host

    @property
    def hosts(self) -> Sequence[str]:
        return (self._host,)

    @property
    def silence(self) -> None:
        return None

    async def observe(self) -> HypervisorView:
        return await self._hypervisor.observe_host(self._host)


class LeasedSource(HostSource):
    """A leased host: it answers once its agent runs, and while the scheduler does."""

    def __init__(self, hypervisor: SimulatedHosts, host: str, scheduler_answers: Callable[[], bool]) -> None:
        super().__init__(hypervisor, host)
        self._scheduler_answers = scheduler_answers

    @property
    def hosts(self) -> Sequence[str]:
        return ()  # no settings name it

    async def observe(self) -> HypervisorView:
        if not self._scheduler_answers() or self._host not in self._hypervisor.machines.hosts:
            await self._hypervisor.take("connect", self._hypervisor.latencies.unreachable)
            raise Unknown(f"the pilot of {self._host} is not reached")
        return await super().observe()
