"""Clones over several hosts of a lab, by their agents alone, without Slurm: one at a time and all at once; and the same
clones on one host by ssh and by the agent's Unix socket in turns.

A clone counts from the call that creates it until its guest has taken its identity on and says so. Slurm-V compares the
same (Zhang et al., 2016): VMs launched one after the other and in parallel, over 1 to 32 hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

import multiverse
from multiverse.agent.connection import (
    AgentConnection,
    CommandTransport,
    ControllerEpoch,
    ControllerIdentity,
    Transport,
    UnixTransport,
    command_of,
)
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.config import Settings
from multiverse.core.errors import Broken
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Identity, mac_of, vm_name
from multiverse.core.model.vm import TemplateKey, VmRef, VmSpec
from multiverse_lab.bench.stats import median
from multiverse_lab.lab.layout import Layout

PAPER = {"sequential": 260.0, "parallel": 35.0}
"""Seconds of Slurm-V for 32 VMs, on hardware virtualization."""

_CONNECTED = 30.0  # seconds for the first connections
_serials = count(1)


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """`clones` in each round, over each number of `hosts`; at most `at_once` of them on one host at the same time.
    `turns` are the clones by ssh and by the socket."""

    clones: int
    hosts: Sequence[int]
    at_once: int
    turns: int
    image: str


@dataclass
class ScaleSamples:
    """Seconds of each clone; `took` is the time of all."""

    clones: list[float] = field(default_factory=list)
    took: float = 0.0


@dataclass
class ScaleResult:
    """The samples by (number of hosts, whether all at once), and those of clones on one host by transport."""

    rounds: dict[tuple[int, bool], ScaleSamples] = field(default_factory=dict)
    local: list[float] = field(default_factory=list)
    remote: list[float] = field(default_factory=list)
    round_trip: dict[str, float] = field(default_factory=dict)


class _Agents:
    """A controller of its own for some hosts, without a store."""

    def __init__(self, settings: Settings, ways: Mapping[str, Transport], image: str) -> None:
        self.site = f"b{secrets.token_hex(2)}"
        self._settings, self._image, self._hosts = settings, image, tuple(ways)
        who = ControllerIdentity(multiverse.__version__, secrets.token_hex(8), self.site)
        epoch = ControllerEpoch(0, lambda number: None, self._hosts, 5.0)
        self._connections = {
            host: AgentConnection(host, transport, who, epoch, Random()) for host, transport in ways.items()
        }
        self.hypervisor = AgentHypervisor(self._hosts, self._connections.__getitem__)

    async def connected(self) -> None:
        deadline = time.monotonic() + _CONNECTED
        for host, one in self._connections.items():
            while one.welcome is None or one.reason:
                if time.monotonic() > deadline:
                    raise Broken(f"no connection to {host}: {one.reason}", hint="see the lab's log")
                await asyncio.sleep(0.02)

    async def build_templates(self) -> None:
        await asyncio.gather(*(self.hypervisor.templates.build_template(self._template(host)) for host in self._hosts))

    async def clone(self, host: str) -> tuple[VmRef, float]:
        """Make one clone, and return it with the seconds that it took."""
        serial = next(_serials)
        name, address = vm_name(self.site, serial), self._address(serial)
        template = self._template(host)
        began = time.monotonic()
        await self.hypervisor.create(
            VmSpec(
                name=name,
                host=host,
                image=self._image,
                kind=CloneKind.INSTANT,
                size=template.size,
                mac=mac_of(self.site, serial),
                template=template,
                token=secrets.token_hex(8),
                address=address,
                source=host,
            )
        )
        identity = Identity(name, mac_of(self.site, serial), address, self._settings.network.gateway, f"{serial:032x}")
        await self.hypervisor.start(VmRef(name, host), template.size, identity)
        return VmRef(name, host), time.monotonic() - began

    async def round(self, clones: int, at_once: int | None) -> ScaleSamples:
        """Make clones over all hosts in turn, `at_once` on each host at the same time or one after the other (None).
        They are destroyed afterwards."""
        samples, made = ScaleSamples(), list[VmRef]()
        limits = {host: asyncio.Semaphore(at_once or 1) for host in self._hosts}

        async def one(number: int) -> None:
            host = self._hosts[number % len(self._hosts)]
            async with limits[host]:
                vm, seconds = await self.clone(host)
            made.append(vm)
            samples.clones.append(seconds)

        began = time.monotonic()
        try:
            if at_once is None:
                for number in range(clones):
                    await one(number)
            else:
                await asyncio.gather(*map(one, range(clones)))
            samples.took = time.monotonic() - began
        finally:
            await asyncio.gather(*(self.hypervisor.destroy(vm, 0.0) for vm in made))
        return samples

    async def round_trip(self, repetitions: int = 200) -> float:
        """The median of seconds that an observation takes whose result is the one before."""
        (source,) = self.hypervisor.sources
        samples = []
        for _ in range(repetitions):
            began = time.monotonic()
            await source.observe()
            samples.append(time.monotonic() - began)
        return median(samples)

    def _template(self, host: str) -> TemplateKey:
        qemu = self._settings.qemu
        return TemplateKey(host, self._image, Size(qemu.base_cpus, qemu.base_memory))

    def _address(self, serial: int) -> str:
        network = ipaddress.IPv4Network(self._settings.network.subnet)
        return f"{network[self._settings.network.first + serial]}/{network.prefixlen}"


@contextlib.asynccontextmanager
async def _agents(settings: Settings, ways: Mapping[str, Transport], image: str) -> AsyncIterator[_Agents]:
    agents = _Agents(settings, ways, image)
    running = asyncio.create_task(agents.hypervisor.run())
    try:
        await agents.connected()
        yield agents
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def run(
    where: Layout, settings: Settings, names: Sequence[str], plan: ScalePlan, progress: Callable[[str], None]
) -> ScaleResult:
    """Measure on the hosts `names` of a lab, which run, and have no other work."""
    found = ScaleResult()

    def by_ssh(hosts: Sequence[str]) -> dict[str, Transport]:
        return {host: CommandTransport(command_of(settings.agent.connect, host)) for host in hosts}

    async with _agents(settings, by_ssh(names), plan.image) as agents:
        await agents.build_templates()
        await agents.round(len(names), None)  # not counted
    for hosts in plan.hosts:
        async with _agents(settings, by_ssh(names[:hosts]), plan.image) as agents:
            for parallel in (False, True):
                samples = await agents.round(plan.clones, plan.at_once if parallel else None)
                found.rounds[hosts, parallel] = samples
                progress(f"{hosts} hosts, {'at once' if parallel else 'one at a time'}: {samples.took:.1f} s")
    first = names[0]
    local = UnixTransport(where.host(first).agent_socket)  # the very agent that the other connection reaches by ssh
    async with (
        _agents(settings, {first: local}, plan.image) as near,
        _agents(settings, by_ssh([first]), plan.image) as far,
    ):
        for _ in range(plan.turns):
            for agents, samples_of in ((near, found.local), (far, found.remote)):
                samples_of += (await agents.round(1, None)).clones
        found.round_trip = {"local": await near.round_trip(), "remote": await far.round_trip()}
    return found
