"""`ports.Hypervisor` for any number of hosts, each reached through its agent, and the VXLAN that connects their VMs."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import structlog

from multiverse.agent import protocol
from multiverse.agent.connection import AgentConnection
from multiverse.agent.protocol import AgentCall, HypervisorAnswer, R
from multiverse.core.errors import Gone, MultiverseError, Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import Identity, Member, Neighbour, User, without_prefix_length
from multiverse.core.model.job import LeasedHost
from multiverse.core.model.usage import HostUsage
from multiverse.core.model.vm import Stage, TemplateKey, Vm, VmRef, VmSpec, VmState
from multiverse.ports.hypervisor import NOT_LEASED

log = structlog.get_logger()

NOT_STARTED = (VmState.PLANNED, VmState.PARKED)  # a VM in one of these states learns of its peers when it is started
ConnectVm = Callable[[VmRef, tuple[Neighbour, ...]], Awaitable[None]]
"""Let a VM reach these addresses, as `VmConnections` does on the VM's host."""


class VxlanMachines(Protocol):
    """The machines that the VXLAN connects."""

    @property
    def own(self) -> str: ...  # the name of the controller's machine, which may be a host

    async def address_of(self, host: str) -> str:
        """The address of a host, or of the controller's machine, in the network of the hosts. Leased hosts of one node
        have the same address. Raises `Refused` if it is unknown."""

    async def gateway(self) -> Neighbour:
        """How VMs on other machines reach the controller's machine."""

    async def reach(self, vm: str, neighbour: Neighbour) -> None:
        """Let the controller's machine reach a VM on another machine."""


class VxlanDirectory:
    """The controller's part of a VXLAN: it tells each host on which machines its VMs find what they need.

    A VM needs the other VMs of its job and the controller's machine, which needs the VM. A VM that is started learns of
    all of them; VMs that were started before it learn of the VM before it runs. `find` gives the row of a VM by name.
    """

    def __init__(self, machines: VxlanMachines, find: Callable[[str], Vm | None], connect: ConnectVm) -> None:
        self._machines, self._find, self._connect = machines, find, connect

    async def introduce(self, vm: VmRef, identity: Identity) -> tuple[Neighbour, ...]:
        """The neighbours of a VM of `vm.source` on other machines, just before it is started. They reach the VM when
        this returns. May be repeated. Raises `Refused` if an address is unknown, and errors of the peers' agents."""
        machines, host = self._machines, vm.source
        address = without_prefix_length(identity.address)
        itself = Neighbour(address, identity.mac, await machines.address_of(host))
        peers, neighbours = [], []
        for name, _ in identity.peers:
            peer = self._find(name)
            if peer is None or peer.host == host:
                continue
            machine = await machines.address_of(peer.host)
            if machine != itself.machine:  # the bridge of a node connects its leases
                peers.append(peer)
                neighbours.append(Neighbour(without_prefix_length(peer.address), peer.mac, machine))
        if host != machines.own:
            neighbours.append(await machines.gateway())
            await machines.reach(vm.name, itself)
        await asyncio.gather(*(self._tell(peer, itself) for peer in peers if peer.state not in NOT_STARTED))
        return tuple(neighbours)

    async def neighbours_on(self, host: str) -> tuple[Neighbour, ...]:
        """What any VM of a host needs on other machines, beside its group. Raises `Refused` as `introduce`."""
        return (await self._machines.gateway(),) if host != self._machines.own else ()

    async def follow(self, vm: VmSpec) -> None:
        """The controller's machine reaches a VM where it is now. Others learn that with its group."""
        if vm.source == self._machines.own:
            return
        try:
            machine = await self._machines.address_of(vm.source)
            await self._machines.reach(vm.name, Neighbour(without_prefix_length(vm.address), vm.mac, machine))
        except MultiverseError as error:  # it is tried again regularly
            log.warning("a VM that has moved is not reached yet", vm=vm.name, reason=str(error))

    async def located(self, host: str, members: Sequence[Member]) -> list[Member]:
        """These members with their machines, as `host` needs them. Members on a machine of unknown address are left
        out: they do not start either. Raises `Refused` if the address of `host` itself is unknown."""
        found, machine_of = list[Member](), {host: await self._machines.address_of(host)}
        for member in members:
            if member.host not in machine_of:
                try:
                    machine_of[member.host] = await self._machines.address_of(member.host)
                except Refused as error:
                    log.warning("VMs of a host are not reached", host=member.host, reason=str(error))
                    machine_of[member.host] = ""
            machine = machine_of[member.host]
            if machine:
                # The bridge of a node connects its leases.
                found.append(replace(member, machine="" if machine == machine_of[host] else machine))
        return found

    async def _tell(self, peer: Vm, neighbour: Neighbour) -> None:
        with suppress(Gone):  # its own end will be seen
            await self._connect(peer.ref, (neighbour,))


CancelMove = Callable[[VmRef, bool], Awaitable[protocol.MoveHolds]]
"""End a move at one host: see `VmExchange.cancel_move`. The second argument says whether the VM is `absent`."""


async def settle_move(vm: VmRef, other: VmRef, cancel: CancelMove, destroy: Callable[[VmRef], Awaitable[None]]) -> None:
    """End a move between two hosts, both of which are asked: see `ports.Moves.settle`."""
    here, there = await asyncio.gather(cancel(vm, False), cancel(other, False), return_exceptions=True)
    for result in (here, there):
        if isinstance(result, BaseException):
            raise result
    for one, has, otherwise in ((vm, here, there), (other, there, here)):
        if has == "handed_over" and otherwise == "received":
            await destroy(one)
        elif has == "handed_over" and otherwise == "absent":  # the hosts may not reach each other
            await cancel(one, True)


class AgentSource:
    """`ports.Source`: the agent of one host, by the host's name."""

    def __init__(self, connection: AgentConnection) -> None:
        self.connection = connection
        self._shown: tuple[HypervisorAnswer, HypervisorView] | None = None

    @property
    def name(self) -> str:
        return self.connection.host

    @property
    def hosts(self) -> Sequence[str]:
        return [self.connection.host]

    @property
    def silence(self) -> float:
        """An agent answers a ping also while an observation of it fails."""
        return asyncio.get_running_loop().time() - self.connection.heard

    async def observe(self) -> HypervisorView:
        """An observation that equals the one before it is the same object."""
        view = await self.connection.call(protocol.Observe())
        if self._shown is None or self._shown[0] is not view:
            self._shown = view, view.view()
        return self._shown[1]


class AgentHypervisor:
    """`ports.Hypervisor`, of these hosts at first. `run` keeps the connections up, which `connect` makes by a host's
    name, and `connect_leased` by a pilot. `declare` gives a host as the settings declare it."""

    def __init__(
        self,
        hosts: Collection[str],
        connect: Callable[[str], AgentConnection],
        declare: Callable[[str], Host | None] = lambda _: None,
        connect_leased: Callable[[LeasedHost], AgentConnection] | None = None,
        leased: Mapping[str, LeasedHost] = NOT_LEASED,
    ) -> None:
        self.membership = self.templates = self.users = self.groups = self.saves = self.sleeps = self.moves = self
        self._connect, self._declare = connect, declare
        self._connect_leased = connect_leased or (lambda host: connect(host.lease.name))
        self._sources: dict[str, AgentSource] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}  # that keep connections up
        self.vxlan: VxlanDirectory | None = None  # by which hosts reach VMs of other hosts, if they need one
        self._failed: asyncio.Future[None] | None = None  # while `run` runs: gets the first error of a connection
        self.keep(hosts, leased)

    async def run(self) -> None:
        """Keep the connections to all agents up until cancelled. Raises `Superseded` once another controller commands
        one of them: slurmctld and the fence command obey whoever calls, so this one must not go on."""
        failed = self._failed = asyncio.get_running_loop().create_future()
        try:
            for name in self._sources:
                self._keep_up(name)
            await failed
        finally:
            self._failed = None
            failed.cancel()  # nobody waits for it any more
            for task in (tasks := list(self._tasks.values())):  # in this order in each run of a simulation
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def keep(self, hosts: Collection[str], leased: Mapping[str, LeasedHost] = NOT_LEASED) -> None:
        for name in [name for name in self._sources if name not in hosts]:
            del self._sources[name]
            if task := self._tasks.pop(name, None):
                task.cancel()
        for name in hosts:
            if name not in self._sources:
                lease = leased.get(name)
                self._sources[name] = AgentSource(self._connect_leased(lease) if lease else self._connect(name))
                self._keep_up(name)

    def declared(self, host: str) -> Host | None:
        return self._declare(host)

    def _keep_up(self, name: str) -> None:
        if self._failed is not None:
            task = asyncio.create_task(self._sources[name].connection.run(), name=f"agent of {name}")
            task.add_done_callback(partial(self._ended, self._failed))
            self._tasks[name] = task

    @staticmethod
    def _ended(failed: asyncio.Future[None], task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not failed.done():
            failed.set_exception(error)

    @property
    def sources(self) -> Sequence[AgentSource]:
        return tuple(self._sources.values())

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        return (await self._agent(vm.host).call(protocol.Create(vm=vm))).stages

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        """With a VXLAN, peers and the controller's machine can reach the VM before it runs: see `introduce`."""
        if self.vxlan is not None:
            identity = replace(identity, neighbours=await self.vxlan.introduce(vm, identity))
        return (await self._agent(vm.source).call(protocol.Start(vm=vm, size=size, identity=identity))).stages

    async def connect(self, vm: VmRef, neighbours: tuple[Neighbour, ...]) -> None:
        await self._agent(vm.source).call(protocol.Connect(vm=vm, neighbours=neighbours))

    async def destroy(self, vm: VmRef, grace: float) -> None:
        await self._agent(vm.source).call(protocol.Destroy(vm=vm, grace=grace))

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        await self._agent(vm.source).call(protocol.AddUser(vm=vm, user=user, group=group))

    async def freeze(self, vm: VmRef, *, script: bool = True) -> None:
        await self._agent(vm.source).call(protocol.Freeze(vm=vm, script=script))

    async def cut(self, vm: VmRef) -> None:
        await self._agent(vm.source).call(protocol.Cut(vm=vm))

    async def save(self, vm: VmRef, name: str, key: str = "") -> Sequence[Stage]:
        return (await self._agent(vm.source).call(protocol.Save(vm=vm, saved=name, key=key))).stages

    async def checkpoint(self, vm: VmRef, name: str, key: str = "", *, shared_files: bool = False) -> Sequence[Stage]:
        call = protocol.MakeCheckpoint(vm=vm, saved=name, key=key, shared_files=shared_files)
        return (await self._agent(vm.source).call(call)).stages

    async def copy(self, source: str, name: str, key: str = "") -> None:
        await self._agent(source).call(protocol.Copy(saved=name, key=key))

    async def keep_in_memory(self, vm: VmRef, name: str) -> None:
        await self._agent(vm.source).call(protocol.Keep(vm=vm, saved=name))

    async def thaw(self, vm: VmRef) -> None:
        await self._agent(vm.source).call(protocol.Thaw(vm=vm))

    async def discard(self, source: str, name: str) -> None:
        await self._agent(source).call(protocol.Discard(saved=name))

    async def sleep(self, vm: VmRef, number: int, identity: Identity, key: str = "") -> Sequence[Stage]:
        return (
            await self._agent(vm.source).call(protocol.PutToSleep(vm=vm, number=number, identity=identity, key=key))
        ).stages

    async def wake(self, vm: VmRef, number: int, *, runs: bool, key: str = "") -> Sequence[Stage]:
        return (await self._agent(vm.source).call(protocol.Wake(vm=vm, number=number, runs=runs, key=key))).stages

    async def move(self, vm: VmRef, number: int, target: VmSpec) -> Sequence[Stage]:
        secret = secrets.token_hex(16)
        neighbours = await self.vxlan.neighbours_on(target.source) if self.vxlan is not None else ()
        receive = protocol.ReceiveMove(vm=target, number=number, secret=secret, neighbours=neighbours)
        offer = await self._agent(target.source).call(receive)
        send = protocol.SendMove(vm=vm, number=number, secret=secret, offer=offer)
        stages = (await self._agent(vm.source).call(send)).stages
        if self.vxlan is not None:
            await self.vxlan.follow(target)
        return stages

    async def settle(self, vm: VmRef, number: int, other: VmRef) -> None:
        async def cancel(one: VmRef, absent: bool) -> protocol.MoveHolds:
            call = protocol.CancelMove(vm=one, number=number, absent=absent)
            return (await self._agent(one.source).call(call)).has

        await settle_move(vm, other, cancel, lambda one: self.destroy(one, 0.0))

    @property
    def listening(self) -> Mapping[str, str]:
        welcomes = ((name, source.connection.welcome) for name, source in self._sources.items())
        return {name: one.agent for name, one in welcomes if one is not None}

    async def tell(self, host: str, members: Sequence[Member], gone: Sequence[str], *, whole: bool) -> None:
        """With a VXLAN, the members are told with their machines."""
        if self.vxlan is not None:
            members = await self.vxlan.located(host, members)
        await self._agent(host).call(protocol.TellMembers(members=tuple(members), gone=tuple(gone), whole=whole))

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        return (await self._agent(template.host).call(protocol.BuildTemplate(template=template))).stages

    async def delete_template(self, template: TemplateKey) -> None:
        await self._agent(template.host).call(protocol.DeleteTemplate(template=template))

    async def used(self, source: str, span: float) -> Mapping[str, HostUsage]:
        return {source: (await self._agent(source).call(protocol.Utilization(span=span))).host}

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        """See `LocalHypervisor.measure`; of the VMs on hosts that answer."""
        results = await self._ask_all(protocol.Measure())
        return {name: figures for result in results for name, figures in result.vms.items()}

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        """See `LocalHypervisor.examine`; of the VMs on hosts that answer."""
        results = await self._ask_all(protocol.Examine())
        return {name: facts for result in results for name, facts in result.vms.items()}

    async def count_processes(self) -> Counter[str]:
        """How many processes the agents that answer have started, by program."""
        found: Counter[str] = Counter()
        for result in await self._ask_all(protocol.CountProcesses()):
            found.update(result.programs)
        return found

    async def _ask_all(self, call: AgentCall[R]) -> list[R]:
        calls = (source.connection.call(call) for source in self._sources.values())
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, MultiverseError):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    def _agent(self, host: str) -> AgentConnection:
        source = self._sources.get(host)
        if source is None:
            raise Gone(f"there is no host {host}", hint="multiverse hosts lists the hosts")
        return source.connection
