"""Simulated hosts behind agents: the real agent server and the real connections, over simulated streams of bytes.

Agents may be of another release, answer late or twice, and end their VMs by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from async_solipsism import socket as simulated_sockets

from multiverse.agent.protocol import LONGEST_LINE, OLDEST, PING, PROTOCOL, MoveHolds, MoveOffer
from multiverse.agent.self_fence import Contacts, FenceTimer, SelfFence
from multiverse.agent.server import AgentIdentity, AgentServer, Epoch, Epochs
from multiverse.core.errors import MultiverseError, Refused, Unknown
from multiverse.core.model.basics import Size
from multiverse.core.model.host import HypervisorView
from multiverse.core.model.identity import Identity, Member, Neighbour, User, site_of
from multiverse.core.model.vm import Stage, TemplateKey, VmRef, VmSpec
from multiverse.host.firewall import changed
from multiverse_lab.simulation.hypervisor import HostSource, SimulatedHosts, SimulatedSaves
from multiverse_lab.simulation.moving import SimulatedMoves
from multiverse_lab.simulation.sleeping import SimulatedSleeps

T = TypeVar("T")
Reached = Callable[[str], Awaitable[Collection[str]]]

LATENCY = (0.0001, 0.002)
"""How long a piece of a stream is on its way; seconds."""


LATE = (1.0, 100.0)
"""How late an agent is that answers late; seconds."""


@dataclass(frozen=True)
class ProtocolRelease:
    """A release: what it speaks, fields of lines and of hosts that it does not send yet, and whether it sends fields
    that nobody else knows."""

    name: str
    protocol: int = PROTOCOL
    oldest: int = OLDEST
    lacks: tuple[str, ...] = ()
    adds: bool = False

    def speaks(self, line: bytes) -> bytes:
        """The line, as this release sends it."""
        if not (self.lacks or self.adds):
            return line
        whole = json.loads(line)
        hosts = whole.get("result", {}).get("hosts", {}).values()
        for part in (whole, *hosts):
            for name in self.lacks:
                part.pop(name, None)
        if self.adds:
            for part in (whole, *(one for one in whole.values() if isinstance(one, dict)), *hosts):
                part["of a later release"] = {"unknown": [1]}
        return json.dumps(whole).encode() + b"\n"


THIS = ProtocolRelease("1.0")
NEIGHBOURS = (
    ProtocolRelease("0.9", OLDEST, OLDEST - 1, lacks=("overcommit", "load")),
    ProtocolRelease("1.1", PROTOCOL + 1, PROTOCOL, adds=True),
)
STRANGERS = (ProtocolRelease("0.8", OLDEST - 1, OLDEST - 1), ProtocolRelease("2.0", PROTOCOL + 2, PROTOCOL + 1))
"""Releases with which this one does not work together."""


@dataclass(frozen=True)
class AgentBehaviour:
    """`self_fence` is as in `AgentSettings`. `late` and `twice` are the shares of calls whose answers come late, and of
    lines with an id that come twice."""

    self_fence: float = 0.0
    late: float = 0.0
    twice: float = 0.0


class OneHost:
    """One of the simulated hosts as the hypervisor of its agent."""

    def __init__(self, hosts: SimulatedHosts, source: HostSource, late: float = 0.0) -> None:
        self._hosts, self._source, self._late = hosts, source, late
        self.asked: set[str] = set()  # the names of all VMs that were to be created
        self.members: dict[str, Member] = {}  # that it was told of
        self.moves = None
        self.exchange = self if hosts.moves is not None else None
        self.saves = self if hosts.saves is not None else None
        self.sleeps = self if hosts.sleeps is not None else None

    async def _answer(self, call: Awaitable[T]) -> T:
        """What a call returns or raises, perhaps late."""
        try:
            result = await call
        except MultiverseError:
            await self._wait()
            raise
        await self._wait()
        return result

    async def _wait(self) -> None:
        if self._late and self._hosts.rng.random() < self._late:
            await asyncio.sleep(self._hosts.rng.uniform(*LATE))

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
    def groups(self) -> OneHost:
        return self

    @property
    def listening(self) -> Mapping[str, str]:
        return {self.name: ""}

    @property
    def silence(self) -> None:
        return None

    async def observe(self) -> HypervisorView:
        return await self._answer(self._source.observe())

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        self.asked.add(vm.name)
        return await self._answer(self._hosts.create(vm))

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        return await self._answer(self._hosts.start(vm, size, identity))

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self._answer(self._hosts.destroy(vm, grace))

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        await self._answer(self._hosts.add_user(vm, user, group))

    async def tell(self, host: str, members: Sequence[Member], gone: Sequence[str], *, whole: bool) -> None:
        self.members = changed(self.members, members, gone, whole=whole)
        await self._wait()

    async def freeze(self, vm: VmRef, *, script: bool = True) -> None:
        await self._answer(self._saves.freeze(vm, script=script))

    async def cut(self, vm: VmRef) -> None:
        await self._answer(self._saves.cut(vm))

    async def copy(self, source: str, name: str, key: str = "") -> None:
        await self._answer(self._saves.copy(source, name, key))

    async def checkpoint(self, vm: VmRef, name: str, key: str = "", *, shared_files: bool = False) -> Sequence[Stage]:
        return await self._answer(self._saves.checkpoint(vm, name, shared_files=shared_files))

    async def keep_in_memory(self, vm: VmRef, name: str) -> None:
        await self._answer(self._saves.keep_in_memory(vm, name))

    async def save(self, vm: VmRef, name: str, key: str = "") -> Sequence[Stage]:
        return await self._answer(self._saves.save(vm, name))

    async def thaw(self, vm: VmRef) -> None:
        await self._answer(self._saves.thaw(vm))

    async def discard(self, source: str, name: str) -> None:
        await self._answer(self._saves.discard(source, name))

    @property
    def _saves(self) -> SimulatedSaves:
        if self._hosts.saves is None:
            raise Refused("no host saves VMs", hint="set save.enabled")
        return self._hosts.saves

    async def sleep(self, vm: VmRef, number: int, identity: Identity, key: str = "") -> Sequence[Stage]:
        return await self._answer(self._sleeps.sleep(vm, number, identity))

    async def wake(self, vm: VmRef, number: int, *, runs: bool, key: str = "") -> Sequence[Stage]:
        return await self._answer(self._sleeps.wake(vm, number, runs=runs))

    @property
    def _sleeps(self) -> SimulatedSleeps:
        if self._hosts.sleeps is None:
            raise Refused("no VM sleeps", hint="set save.enabled")
        return self._hosts.sleeps

    async def receive_move(self, vm: VmSpec, number: int, secret: str, neighbours: Sequence[Neighbour]) -> MoveOffer:
        self._moves.receive(vm, number)
        await self._wait()
        return MoveOffer(address=self.name, port=0)

    async def send_move(self, vm: VmRef, number: int, secret: str, offer: MoveOffer) -> Sequence[Stage]:
        return await self._answer(self._moves.send(vm, number, offer.address))

    async def cancel_move(self, vm: VmRef, number: int, *, absent: bool) -> MoveHolds:
        has = self._moves.end(vm, number, absent=absent)
        await self._wait()
        return has

    @property
    def _moves(self) -> SimulatedMoves:
        if self._hosts.moves is None:
            raise Refused("no VM moves", hint="set move.enabled")
        return self._hosts.moves

    def end_calls(self) -> None:
        """The process of the agent has ended, with what it was doing."""
        if self._hosts.saves is not None:
            self._hosts.saves.calls.end(self.name)
        if self._hosts.sleeps is not None:
            self._hosts.sleeps.calls.end(self.name)
        if self._hosts.moves is not None:
            self._hosts.moves.end_calls(self.name)

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        return await self._answer(self._hosts.build_template(template))

    async def delete_template(self, template: TemplateKey) -> None:
        await self._answer(self._hosts.delete_template(template))

    @property
    def vxlan(self) -> None:
        return None

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        return {}

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        return {}


class UnreachedVms:
    """The VMs of a host, as its agent ends them by itself. To end one that the controller or the scheduler reaches
    breaks a promise."""

    def __init__(self, hosts: SimulatedHosts, source: HostSource, seconds: float) -> None:
        self._machines, self._source, self._seconds = hosts.machines, source, seconds
        self.contact = 0.0
        """When the answer to a ping was sent that the controller has got last."""

    @property
    def sites(self) -> set[str]:
        return {site_of(name) for name in self._machines.vms_on(self._source.name)}

    async def list_vms(self) -> Collection[str]:
        return self._machines.vms_on(self._source.name)

    async def kill(self, vms: Collection[str]) -> None:
        """`destroy` does all."""

    async def destroy(self, vm: VmRef, grace: float) -> None:
        machine = self._machines.find(vm._replace(source=self._source.name))
        if machine is None:
            return
        guest, silent = machine.guest, asyncio.get_running_loop().time() - self.contact
        if silent < self._seconds - 3 * PING:  # the latest answers are not confirmed yet
            self._machines.violations.append(f"{vm.name} was ended, {silent:.0f} s after its controller was in contact")
        if guest is not None and guest.reachable and guest.cluster.up and guest.serves() is not None:
            self._machines.violations.append(f"{vm.name} was ended, which the scheduler reached")
        if guest is not None:
            guest.log(f"the agent of {self._source.name} ends {vm.name} by itself")
        if self._machines.copies.pop((vm.name, self._source.name), None) is None:
            self._machines.remove(vm.name)


class NotedEpochs(Epochs):
    """Epochs that say when a controller takes a new one, and which one does."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: Callable[[str], None] = lambda run: None

    def _keep(self, highest: Mapping[str, Epoch]) -> None:
        for site, epoch in highest.items():
            if epoch != self.highest(site):
                self.taken(epoch.holder)


class Link:
    """The network between the controller and one host. While it is cut, what was sent waits, as TCP repeats it."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.up.set()
        self._cuts = 0

    def cut(self) -> None:
        """Carry nothing, until it is mended as often as it was cut."""
        self._cuts += 1
        self.up.clear()

    def mend(self) -> None:
        self._cuts -= 1
        if not self._cuts:
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


class SimulatedAgent:
    """The agent of one host, which can be stopped, and started again with what it has kept. It is the `Transport` to
    itself. `reached` is as in `SelfFence`."""

    def __init__(
        self,
        hosts: SimulatedHosts,
        source: HostSource,
        random: Random,
        behaviour: AgentBehaviour | None = None,
        reached: Reached | None = None,
    ) -> None:
        self.behaviour = behaviour or AgentBehaviour()
        self.local = OneHost(hosts, source, self.behaviour.late)
        self.release, self.random, self.link, self.epochs = THIS, random, Link(), NotedEpochs()
        self.running: AgentServer | None = None
        self._starts = 0
        self._tasks: dict[asyncio.Task[None], None] = {}  # what it does, and what carries and serves its streams
        self._reached, self._violations = reached, hosts.machines.violations
        self._vms = UnreachedVms(hosts, source, self.behaviour.self_fence)
        self._contacts = Contacts()

    def start(self) -> None:
        """Start the agent, unless it runs."""
        if self.running is not None:
            return
        self._starts += 1
        name, release = self.local.name, self.release
        who = AgentIdentity(release.name, name, f"boot-{name}", f"run-{self._starts}", release.protocol, release.oldest)
        self.running = AgentServer(who, self.epochs, lambda _: self.local, fence_timer=self._begin_self_fencing())

    def _begin_self_fencing(self) -> FenceTimer | None:
        if not self.behaviour.self_fence or self._reached is None:
            return None
        timer = FenceTimer(self.behaviour.self_fence, deepcopy(self._contacts), asyncio.get_running_loop().time)
        vms = self._vms
        fence = SelfFence(timer, lambda: vms.sites, lambda _: vms, self._reached, self._keep_contacts)
        self._task(fence.run())
        return timer

    def _keep_contacts(self, contacts: Contacts) -> None:
        self._contacts = deepcopy(contacts)

    async def stop(self) -> None:
        """End the agent as SIGKILL does: its streams end, and what it was doing stops where it is."""
        server, self.running = self.running, None
        for task in self._tasks:
            task.cancel()
        self.local.end_calls()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if server is not None:
            await server.close()

    async def replace(self, release: ProtocolRelease) -> None:
        """Put another release in its place. It runs if this one does."""
        self.release = release
        if self.running is not None:
            await self.stop()
            self.start()

    def boot(self) -> None:
        """The machine starts, on which nothing of the time before goes on."""
        self._contacts = Contacts()
        self.start()

    async def open(self) -> SimulatedStream:
        """See `Transport`."""
        if self.running is None or not self.link.up.is_set():
            await asyncio.sleep(self.random.uniform(0.1, 3.0))
            raise Unknown(f"{self.local.name} does not answer")
        near, relay_near = await _pair()
        relay_far, far = await _pair()
        if self.running is None:  # it has ended meanwhile
            raise Unknown(f"{self.local.name} does not answer")
        self._task(self._carry(relay_near[0], relay_far[1]))
        self._task(self._carry(relay_far[0], relay_near[1], near[1]))
        self._task(self.running.serve(*far))
        return SimulatedStream(*near)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._violations.append(f"the agent of {self.local.name} has failed: {error!r}")

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        controller: asyncio.StreamWriter | None = None,
    ) -> None:
        """Carry lines, to the controller whose end that is, or to the agent. One that comes twice comes again at once,
        or after the next one."""
        taken, again = False, b""
        try:
            while line := await reader.readline():
                sent = asyncio.get_running_loop().time()
                await asyncio.sleep(self.random.uniform(*LATENCY))
                await self.link.up.wait()
                if controller is not None:
                    line = self.release.speaks(line)
                    taken = taken or b'"taken"' in line
                if taken and b'"pong"' in line and controller is not None and not controller.is_closing():
                    self._vms.contact = max(sent, self._vms.contact)
                writer.write(line + again)
                again = line if b'"id"' in line and self.random.random() < self.behaviour.twice else b""
                if again and self.random.random() < 0.5:
                    writer.write(again)
                    again = b""
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
