"""Several platforms of one site as one: each source belongs to one of them, and each host to a source."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from multiverse.bundles.contract import DaemonTask, Followed, GuestFacts, Platform
from multiverse.core.errors import Gone, Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.identity import Identity, Member, User
from multiverse.core.model.usage import HostUsage
from multiverse.core.model.vm import Stage, TemplateKey, VmRef, VmSpec
from multiverse.ports import (
    Groups,
    GuestUsers,
    Hypervisor,
    Measurements,
    Membership,
    Moves,
    Saves,
    Sleeps,
    Source,
    Templates,
)


def together(platforms: Mapping[str, Platform]) -> Platform:
    """One platform of these, by name. Raises `Refused` if they do not go together."""
    return next(iter(platforms.values())) if len(platforms) == 1 else CompositePlatform(platforms)


class CompositeSource:
    """A source of one of the platforms, which remembers its hosts."""

    def __init__(self, source: Source, platform: Platform) -> None:
        self.source, self.platform = source, platform
        self.shown: frozenset[str] = frozenset(source.hosts)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def hosts(self) -> Sequence[str]:
        return self.source.hosts

    @property
    def silence(self) -> float | None:
        return self.source.silence

    async def observe(self) -> HypervisorView:
        view = await self.source.observe()
        self.shown = frozenset((*view.hosts, *self.source.hosts))
        return view


class CompositeHypervisor:
    """`ports.Hypervisor`: a VM is its source's, a template its host's."""

    def __init__(self, platforms: Mapping[str, Platform]) -> None:
        """Raises `Refused` if operators could add hosts to more than one platform: nobody would know to which."""
        self._platforms = tuple(platforms.values())
        members = [name for name, one in platforms.items() if one.hypervisor.membership is not None]
        if len(members) > 1:
            raise Refused(
                f"the platforms {' and '.join(members)} both have hosts that operators add",
                hint="name only one of them in platforms",
            )
        self._sources: dict[str, CompositeSource] = {}

    @property
    def sources(self) -> Sequence[CompositeSource]:
        """Raises `Refused` if two platforms have a source of the same name."""
        found: dict[str, CompositeSource] = {}
        for platform in self._platforms:
            for source in platform.hypervisor.sources:
                known = self._sources.get(source.name)
                if source.name in found:
                    text = f"two platforms have a source named {source.name}"
                    raise Refused(text, hint="rename a host or an account")
                same = known is not None and known.source is source
                found[source.name] = known if known and same else CompositeSource(source, platform)
        self._sources = found
        return tuple(found.values())

    def of_source(self, name: str) -> Platform:
        """The platform whose source this is. Raises `Gone` if there is none."""
        if name not in self._sources:
            _ = self.sources
        if name not in self._sources:
            raise Gone(f"there is no source {name}", hint="multiverse hosts lists the hosts")
        return self._sources[name].platform

    def of_host(self, host: str) -> Platform:
        """The platform that has this host. Raises `Gone` if none shows it."""
        found = next((one for one in self.sources if host in one.shown), None)
        if found is None:
            raise Gone(f"there is no host {host}", hint="multiverse hosts lists the hosts")
        return found.platform

    @property
    def membership(self) -> Membership | None:
        return next((one.hypervisor.membership for one in self._platforms if one.hypervisor.membership), None)

    @property
    def templates(self) -> Templates | None:
        """The hosts of a platform without templates cannot fork, so none is built there."""
        return self if any(one.hypervisor.templates for one in self._platforms) else None

    @property
    def users(self) -> GuestUsers | None:
        return self if any(one.hypervisor.users for one in self._platforms) else None

    @property
    def groups(self) -> Groups | None:
        return self if any(one.hypervisor.groups for one in self._platforms) else None

    @property
    def saves(self) -> Saves | None:
        return self if any(one.hypervisor.saves for one in self._platforms) else None

    async def freeze(self, vm: VmRef, *, script: bool = True) -> None:
        await self._saves(vm.source).freeze(vm, script=script)

    async def cut(self, vm: VmRef) -> None:
        await self._saves(vm.source).cut(vm)

    async def save(self, vm: VmRef, name: str, key: str = "") -> Sequence[Stage]:
        return await self._saves(vm.source).save(vm, name, key)

    async def copy(self, source: str, name: str, key: str = "") -> None:
        await self._saves(source).copy(source, name, key)

    async def checkpoint(self, vm: VmRef, name: str, key: str = "", *, shared_files: bool = False) -> Sequence[Stage]:
        return await self._saves(vm.source).checkpoint(vm, name, key, shared_files=shared_files)

    async def keep_in_memory(self, vm: VmRef, name: str) -> None:
        await self._saves(vm.source).keep_in_memory(vm, name)

    async def thaw(self, vm: VmRef) -> None:
        await self._saves(vm.source).thaw(vm)

    async def discard(self, source: str, name: str) -> None:
        await self._saves(source).discard(source, name)

    def _saves(self, source: str) -> Saves:
        """Raises `Refused` where VMs cannot be saved."""
        found = self.of_source(source).hypervisor.saves
        if found is None:
            raise Refused(f"VMs of {source} cannot be saved", hint="multiverse hosts shows which hosts save VMs")
        return found

    @property
    def sleeps(self) -> Sleeps | None:
        return self if any(one.hypervisor.sleeps for one in self._platforms) else None

    async def sleep(self, vm: VmRef, number: int, identity: Identity, key: str = "") -> Sequence[Stage]:
        return await self._sleeps(vm.source).sleep(vm, number, identity, key)

    async def wake(self, vm: VmRef, number: int, *, runs: bool, key: str = "") -> Sequence[Stage]:
        return await self._sleeps(vm.source).wake(vm, number, runs=runs, key=key)

    def _sleeps(self, source: str) -> Sleeps:
        """Raises `Refused` where VMs do not sleep."""
        found = self.of_source(source).hypervisor.sleeps
        if found is None:
            raise Refused(f"VMs of {source} do not sleep", hint="set save.enabled for it")
        return found

    @property
    def moves(self) -> Moves | None:
        return self if any(one.hypervisor.moves for one in self._platforms) else None

    async def move(self, vm: VmRef, number: int, target: VmSpec) -> Sequence[Stage]:
        return await self._moves(vm.source, target.source).move(vm, number, target)

    async def settle(self, vm: VmRef, number: int, other: VmRef) -> None:
        await self._moves(vm.source, other.source).settle(vm, number, other)

    def _moves(self, source: str, target: str) -> Moves:
        """Raises `Refused` if no VM moves between the two."""
        found, other = self.of_source(source).hypervisor.moves, self.of_source(target).hypervisor.moves
        if found is None or found is not other:
            raise Refused(f"VMs of {source} cannot move to {target}", hint="multiverse hosts shows where VMs move")
        return found

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        return await self._hypervisor(vm.ref).create(vm)

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        return await self._hypervisor(vm).start(vm, size, identity)

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self._hypervisor(vm).destroy(vm, grace)

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        """Raises `Refused` where guests know only the users that they were started with."""
        users = self._hypervisor(vm).users
        if users is None:
            raise Refused(f"users cannot be added to the VMs of {vm.source}", hint="set offer = false for its pools")
        await users.add_user(vm, user, group)

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        """Raises `Refused` where clones only boot."""
        return await self._templates(template).build_template(template)

    async def delete_template(self, template: TemplateKey) -> None:
        await self._templates(template).delete_template(template)

    @property
    def listening(self) -> Mapping[str, str]:
        all_groups = (one.hypervisor.groups for one in self._platforms)
        return {host: word for groups in all_groups if groups for host, word in groups.listening.items()}

    async def tell(self, host: str, members: Sequence[Member], gone: Sequence[str], *, whole: bool) -> None:
        groups = self.of_host(host).hypervisor.groups
        if groups is not None:  # a host that does not listen is told nothing
            await groups.tell(host, members, gone, whole=whole)

    def _hypervisor(self, vm: VmRef) -> Hypervisor:
        return self.of_source(vm.source).hypervisor

    def _templates(self, template: TemplateKey) -> Templates:
        found = self.of_host(template.host).hypervisor.templates
        if found is None:
            raise Refused(f"host {template.host} forks no clones", hint="its jobs boot from images")
        return found


class CompositePlatform:
    """`bundles.contract.Platform` of several."""

    def __init__(self, platforms: Mapping[str, Platform]) -> None:
        self._platforms = tuple(platforms.values())
        self.hypervisor = CompositeHypervisor(platforms)

    @property
    def measurements(self) -> Measurements | None:
        return self if any(one.measurements for one in self._platforms) else None

    async def used(self, source: str, span: float) -> Mapping[str, HostUsage]:
        measurements = self.hypervisor.of_source(source).measurements
        if measurements is None:
            raise Refused(f"nothing is sampled at {source}", hint="its platform measures nothing")
        return await measurements.used(source, span)

    @property
    def guests(self) -> GuestFacts | None:
        return self if any(one.guests for one in self._platforms) else None

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        found = await asyncio.gather(*(one.guests.measure() for one in self._platforms if one.guests))
        return {name: figures for one in found for name, figures in one.items()}

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        found = await asyncio.gather(*(one.guests.examine() for one in self._platforms if one.guests))
        return {name: facts for one in found for name, facts in one.items()}

    async def follow(self, controller: Followed) -> Sequence[DaemonTask]:
        return [work for one in self._platforms for work in await one.follow(controller)]

    async def programs(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for one in await asyncio.gather(*(platform.programs() for platform in self._platforms)):
            total.update(one)
        return total
