"""Simulated hosts behind agents: the real agent server and the real connections, over simulated streams of bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from async_solipsism import socket as simulated_sockets

from multiverse.agent.epochs import Epochs
from multiverse.agent.protocol import LONGEST_LINE
from multiverse.agent.server import AgentIdentity, AgentServer
from multiverse.core.errors import Unknown
from multiverse.core.model import HypervisorView, Identity, Size, Stage, TemplateKey, User, VmRef, VmSpec
from multiverse.simulation.hypervisor import HostSource, SimulatedHosts

LATENCY = (0.0001, 0.002)
"""How long a piece of a stream is on its way; seconds."""


class OneHost:
    """One of the simulated hosts as the hypervisor of its agent."""

    def __init__(self, hosts: SimulatedHosts, source: HostSource) -> None:
        self._hosts, self._source = hosts, source

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def hosts(self) -> Sequence[str]:
        return self._source.hosts

    @property
    def sources(self) -> Sequence[OneHost]:
        return (self,)

    @property
    def membership(self) -> None:
        return None

    @property
    def templates(self) -> OneHost:
        return self

    @property
    def users(self) -> OneHost:
        return self

    @property
    def silence(self) -> None:
        return None

    async def observe(self) -> HypervisorView:
        return await self._source.observe()

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        return await self._hosts.create(vm)

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        return await self._hosts.start(vm, size, identity)

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self._hosts.destroy(vm, grace)

    async def add_user(self, vm: VmRef, user: User) -> None:
        await self._hosts.add_user(vm, user)

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        return await self._hosts.build_template(template)

    async def delete_template(self, template: TemplateKey) -> None:
        await self._hosts.delete_template(template)

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        return {}

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        return {}


class Link:
    """The network between the controller and one host. While it is cut, what was sent waits, as TCP repeats it."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.up.set()


class SimulatedStream:
    """The controller's end of a stream. What both ends send crosses a link."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def close(self) -> str:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        return ""


@dataclass
class SimulatedAgent:
    """The agent of one host, which can be stopped, and started again with the epochs that it knew. It is the
    `Transport` to itself."""

    local: OneHost
    release: str
    random: Random
    link: Link = field(default_factory=Link)
    epochs: Epochs = field(default_factory=Epochs)
    running: AgentServer | None = None
    starts: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # that carry and serve its streams

    def start(self) -> None:
        self.starts += 1
        who = AgentIdentity(self.release, self.local.name, f"boot-{self.local.name}", f"run-{self.starts}")
        self.running = AgentServer(who, self.epochs, lambda _: self.local)

    async def stop(self) -> None:
        """End the agent as SIGKILL does: its streams end, and what it was doing stops where it is."""
        server, self.running = self.running, None
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if server is not None:
            await server.close()

    async def open(self) -> SimulatedStream:
        """See `Transport`."""
        if self.running is None or not self.link.up.is_set():
            await asyncio.sleep(self.random.uniform(0.1, 3.0))
            raise Unknown(f"{self.local.name} does not answer")
        near, relay_near = await _pair()
        relay_far, far = await _pair()
        self._task(self._carry(relay_near[0], relay_far[1]))
        self._task(self._carry(relay_far[0], relay_near[1]))
        self._task(self.running.serve(*far))
        return SimulatedStream(*near)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self.random.uniform(*LATENCY))
                await self.link.up.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other side has closed its end
        finally:
            writer.close()


async def _pair() -> tuple[
    tuple[asyncio.StreamReader, asyncio.StreamWriter], tuple[asyncio.StreamReader, asyncio.StreamWriter]
]:
    one, two = simulated_sockets.socketpair()
    near = await asyncio.open_connection(sock=one, limit=LONGEST_LINE)
    return near, await asyncio.open_connection(sock=two, limit=LONGEST_LINE)
