"""`ports.Hypervisor` for any number of hosts, each reached through its agent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from multiverse.agent.calls import (
    AddUser,
    AgentCall,
    BuildTemplate,
    Connect,
    CountProcesses,
    Create,
    DeleteTemplate,
    Destroy,
    Examine,
    HypervisorAnswer,
    Measure,
    Observe,
    R,
    Start,
    TellMembers,
    Utilization,
)
from multiverse.agent.connection import AgentConnection
from multiverse.agent.vxlan import VxlanDirectory
from multiverse.core.errors import Gone, MultiverseError
from multiverse.core.model import (
    Host,
    HostUsage,
    HypervisorView,
    Identity,
    LeasedHost,
    Member,
    Neighbour,
    Size,
    Stage,
    TemplateKey,
    User,
    VmRef,
    VmSpec,
)
from multiverse.ports.hypervisor import NOT_LEASED


class AgentSource:
    """`ports.Source`: the agent of one host, by the host's name."""

    def __init__(self, connection: AgentConnection) -> None:
        self.connection = connection
        self._shown: tuple[HypervisorAnswer, HypervisorView] | None = None

    @property
    def name(self) -> str:
        """See `ports.Source`."""
        return self.connection.host

    @property
    def hosts(self) -> Sequence[str]:
        """See `ports.Source`."""
        return [self.connection.host]

    @property
    def silence(self) -> float:
        """See `ports.Source`. An agent answers a ping also while an observation of it fails."""
        return asyncio.get_running_loop().time() - self.connection.heard

    async def observe(self) -> HypervisorView:
        """See `ports.Source`. An observation that shows what the one before it showed is the same object."""
        view = await self.connection.call(Observe())
        if self._shown is None or self._shown[0] is not view:
            self._shown = view, view.view()
        return self._shown[1]


class AgentHypervisor:
    """`ports.Hypervisor`, of these hosts at first. `run` keeps the connections up, which `connect` makes by name, and
    `connect_leased` for a host that is reached by its pilot. `declare` says what the settings know of a host."""

    def __init__(
        self,
        hosts: Collection[str],
        connect: Callable[[str], AgentConnection],
        declare: Callable[[str], Host | None] = lambda _: None,
        connect_leased: Callable[[LeasedHost], AgentConnection] | None = None,
        leased: Mapping[str, LeasedHost] = NOT_LEASED,
    ) -> None:
        self.membership = self.templates = self.users = self.groups = self
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
        """See `ports.Membership`."""
        for name in [name for name in self._sources if name not in hosts]:
            del self._sources[name]
            if task := self._tasks.pop(name, None):
                task.cancel()
        for name in hosts:
            if name not in self._sources:
                self._sources[name] = AgentSource(self._connection(name, leased.get(name)))
                self._keep_up(name)

    def _connection(self, name: str, leased: LeasedHost | None) -> AgentConnection:
        return self._connect(name) if leased is None else self._connect_leased(leased)

    def declared(self, host: str) -> Host | None:
        """See `ports.Membership`."""
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
        """See `ports.Hypervisor`."""
        return tuple(self._sources.values())

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        """See `ports.Hypervisor`."""
        return (await self._agent(vm.host).call(Create(vm=vm))).stages

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> Sequence[Stage]:
        """See `ports.Hypervisor`. With a VXLAN, its peers and the controller's machine can reach the VM before
        it runs; raises what `VxlanDirectory.introduce` raises."""
        if self.vxlan is not None:
            identity = replace(identity, neighbours=await self.vxlan.introduce(vm, identity))
        return (await self._agent(vm.source).call(Start(vm=vm, size=size, identity=identity))).stages

    async def connect(self, vm: VmRef, neighbours: tuple[Neighbour, ...]) -> None:
        """See `agent.calls.VmConnections`."""
        await self._agent(vm.source).call(Connect(vm=vm, neighbours=neighbours))

    async def destroy(self, vm: VmRef, grace: float) -> None:
        """See `ports.Hypervisor`."""
        await self._agent(vm.source).call(Destroy(vm=vm, grace=grace))

    async def add_user(self, vm: VmRef, user: User, group: int = 0) -> None:
        """See `ports.GuestUsers`."""
        await self._agent(vm.source).call(AddUser(vm=vm, user=user, group=group))

    @property
    def listening(self) -> Mapping[str, str]:
        """See `ports.Groups`."""
        welcomes = ((name, source.connection.welcome) for name, source in self._sources.items())
        return {name: one.agent for name, one in welcomes if one is not None}

    async def tell(self, host: str, members: Sequence[Member], gone: Sequence[str], *, whole: bool) -> None:
        """See `ports.Groups`. With a VXLAN, what is told says to which machines it leads."""
        if self.vxlan is not None:
            members = await self.vxlan.located(host, members)
        await self._agent(host).call(TellMembers(members=tuple(members), gone=tuple(gone), whole=whole))

    async def build_template(self, template: TemplateKey) -> Sequence[Stage]:
        """See `ports.Templates`."""
        return (await self._agent(template.host).call(BuildTemplate(template=template))).stages

    async def delete_template(self, template: TemplateKey) -> None:
        """See `ports.Templates`."""
        await self._agent(template.host).call(DeleteTemplate(template=template))

    async def used(self, source: str, span: float) -> Mapping[str, HostUsage]:
        """See `ports.Measurements`."""
        return {source: (await self._agent(source).call(Utilization(span=span))).host}

    async def measure(self) -> Mapping[str, tuple[float, float, float]]:
        """(CPU seconds, unique MiB, proportional MiB) of each VM that lives, on the hosts that answer."""
        found: dict[str, tuple[float, float, float]] = {}
        for result in await self._ask_all(Measure()):
            found.update(result.vms)
        return found

    async def examine(self) -> Mapping[str, Mapping[str, str | int]]:
        """What each running guest says of itself now, on the hosts that answer; `error` if a guest does not."""
        found: dict[str, Mapping[str, str | int]] = {}
        for result in await self._ask_all(Examine()):
            found.update(result.vms)
        return found

    async def count_processes(self) -> Counter[str]:
        """How many processes the agents have started, by program; those that answer."""
        found: Counter[str] = Counter()
        for result in await self._ask_all(CountProcesses()):
            found.update(result.programs)
        return found

    async def _ask_all(self, call: AgentCall[R]) -> list[R]:
        """The results of the hosts that answer."""
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
