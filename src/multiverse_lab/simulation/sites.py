"""What happens to hosts and their agents, what operators do to them, and a fence command that works, fails or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from random import Random

from multiverse.agent.connection import AgentConnection, ControllerEpoch, ControllerIdentity
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.core.errors import Unknown
from multiverse.core.model.host import Drain, HostState
from multiverse.core.rows import Rows
from multiverse.core.transition import Command
from multiverse.store import Store
from multiverse_lab.simulation.cluster import Cluster
from multiverse_lab.simulation.faults import Incident, IncidentKind
from multiverse_lab.simulation.hypervisor import SimulatedHosts
from multiverse_lab.simulation.machines import Machines
from multiverse_lab.simulation.network import NEIGHBOURS, STRANGERS, THIS, AgentBehaviour, Reached, SimulatedAgent

BY_OPERATORS = (IncidentKind.HOST_DRAINED, IncidentKind.HOST_CLOSING, IncidentKind.HOST_REMOVED)
"""What operators do to hosts."""

OF_SITES = (
    *BY_OPERATORS,
    IncidentKind.HOST_CRASHES,
    IncidentKind.AGENT_DIES,
    IncidentKind.AGENT_REPLACED,
    IncidentKind.LINK_HANGS,
    IncidentKind.CONTROLLER_CUT_OFF,
)
"""What happens only where hosts have agents behind links."""

RECONNECTION = 45.0
"""Seconds within which a controller reaches a host that is back: the longest pause before it connects, and more."""

ASKING = (0.1, 20.0)
"""For how many seconds the scheduler's commands try to reach it."""

TRIED_AGAIN = 1.0
"""Seconds between two of their tries (`slurm_open_controller_conn`)."""

POWERED_OFF = 20.0
"""Seconds that a host is off which was fenced though it was back."""

PATIENCE = 300.0
"""Seconds that an operator tries to remove a host."""

Log = Callable[[str], None]
Give = Callable[[Command], None]
"""Gives a command to the controller, if one runs."""


class SimulatedSite:
    """The hosts as machines in a network. With `hosts`, each has an agent behind a link of its own."""

    def __init__(
        self,
        machines: Machines,
        cluster: Cluster,
        seed: int,
        log: Log,
        hosts: SimulatedHosts | None = None,
        behaviour: AgentBehaviour | None = None,
    ) -> None:
        self.machines, self._log, self._rng = machines, log, Random(f"{seed}/network")
        self._seed, self._cluster = seed, cluster
        self._back: dict[str, float] = {}
        self._off: set[str] = set()  # hosts without power
        self.agents: Mapping[str, SimulatedAgent] = {}
        self.violations: list[str] = []
        if hosts is not None:
            machines.has_agents = True
            self.agents = {
                source.name: SimulatedAgent(
                    hosts, source, Random(f"{seed}/{source.name}"), behaviour, self._reached_from(source.name)
                )
                for source in hosts.all_sources
            }
            for agent in self.agents.values():
                agent.start()

    def connect(self, store: Store, run: str) -> AgentHypervisor:
        """The hypervisor of a controller that starts now."""
        removed = {host.name for host in store.rows().hosts.values() if host.state is HostState.REMOVED}
        hosts = [name for name in self.agents if name not in removed]
        epoch = ControllerEpoch(store.epoch, store.keep_epoch, hosts, 5.0)
        who = ControllerIdentity(THIS.name, run, store.site)

        def connection(host: str) -> AgentConnection:
            return AgentConnection(host, self.agents[host], who, epoch, Random(f"{self._seed}/{run}/{host}"))

        return AgentHypervisor(hosts, connection, self.machines.hosts.get)

    @property
    def is_settled(self) -> bool:
        """Whether the controller has had the time to find what is on hosts that have come back."""
        return all(_now() - back > RECONNECTION for back in self._back.values())

    def _reached_from(self, host: str) -> Reached:
        """Which nodes the scheduler reaches, as its commands say on the host."""

        async def reached(_: str) -> list[str]:
            until = _now() + self._rng.uniform(*ASKING)
            while host in self.machines.away or not self._cluster.up:
                if _now() >= until:
                    raise Unknown("the scheduler does not answer")
                await asyncio.sleep(min(TRIED_AGAIN, until - _now()))
            nodes = self._cluster.view().nodes
            return [name for name, node in nodes.items() if node.answers]

        return reached

    # --- what happens to hosts

    def cut_off(self, host: str) -> None:
        """Nobody reaches the host any more: neither the controller nor the scheduler."""
        self.machines.go_away(host)
        if agent := self.agents.get(host):
            agent.link.cut()

    def reconnect(self, host: str) -> None:
        """The opposite, also of `switch_off`."""
        self.machines.come_back(host)
        self._back[host] = _now()
        if agent := self.agents.get(host):
            agent.link.mend()
            if host in self._off:
                agent.boot()
        self._off.discard(host)

    async def switch_off(self, host: str) -> None:
        """A host that is cut off loses its power. Nothing on it remains."""
        self._off.add(host)
        self.machines.switch_off(host)
        if agent := self.agents.get(host):
            await agent.stop()

    async def crash(self, host: str, seconds: float) -> None:
        """The host loses its power for a while."""
        self.cut_off(host)
        await self.switch_off(host)
        await asyncio.sleep(seconds)
        self.reconnect(host)

    async def stop_agent(self, host: str, seconds: float) -> None:
        """The agent ends, in the middle of whatever it does. VMs and their jobs go on."""
        agent = self.agents[host]
        if agent.running is not None:
            await agent.stop()
            await asyncio.sleep(seconds)
            if host not in self._off:
                agent.start()

    async def replace_agent(self, host: str, seconds: float) -> None:
        """An agent of another release runs for a while, which understands the controller or not."""
        agent, release = self.agents[host], self._rng.choice((*NEIGHBOURS, *STRANGERS))
        self._log(f"the agent of {host} is of release {release.name}")
        await agent.replace(release)
        await asyncio.sleep(seconds)
        await agent.replace(THIS)

    async def hang_link(self, hosts: list[str], seconds: float) -> None:
        """The controller's connections carry nothing for a while; the scheduler reaches the nodes all the same."""
        links = [self.agents[host].link for host in hosts]
        for link in links:
            link.cut()
        await asyncio.sleep(seconds)
        for link in links:
            link.mend()

    # --- `ports.Fencing`

    async def fence(self, host: str) -> None:
        """The site's fence command: it works, fails or hangs, by chance. Whoever calls it for a host that is in reach,
        and on which a job runs, breaks a promise."""
        back = host not in self.machines.away and _now() - self._back.get(host, -inf) > RECONNECTION
        if back and self.machines.serves(host):
            self.violations.append(f"host {host} was fenced while it was in reach")
        point = self._rng.random()
        await asyncio.sleep(self._rng.uniform(0.5, 10.0))
        if point < 0.3:
            self._log(f"the fence command fails for {host}")
            raise Unknown("the BMC does not answer")
        if point < 0.4:
            self._log(f"the fence command hangs for {host}")
            await asyncio.sleep(self._rng.uniform(60.0, 600.0))
            raise Unknown("it did not end")
        self._log(f"the fence command switches {host} off")
        if host not in self.machines.away:  # it came back meanwhile
            asyncio.get_running_loop().call_later(POWERED_OFF, self.reconnect, host)
            self.cut_off(host)
        await self.switch_off(host)


@dataclass
class Operators:
    """What operators do to hosts, until the controller has done it or they give up."""

    give: Give
    rows: Callable[[], Rows]
    log: Log
    wall: Callable[[], float]
    busy: set[str] = field(default_factory=set)  # hosts that one of them works on

    async def apply(self, host: str, incident: Incident) -> None:
        """Carry out an incident of operators, unless one of them works on that host."""
        if host not in self.busy:
            self.busy.add(host)
            await self._apply(host, incident)
            self.busy.discard(host)

    async def _apply(self, host: str, incident: Incident) -> None:
        match incident.kind:
            case IncidentKind.HOST_DRAINED:
                moves, saves = incident.pick * 13 % 1 < 0.8, incident.pick * 7 % 1 < 0.6
                drain = Drain(self.wall(), "a fan", moves, saves)
                await self._until(Command("drain", host, drain=drain), host, drained=True)
                await asyncio.sleep(incident.seconds)
                await self._until(Command("resume", host), host, drained=False)
            case IncidentKind.HOST_CLOSING:
                begins = self.wall() + incident.seconds / 2
                await self._until(Command("drain", host, drain=Drain(begins, "soon")), host, drained=True)
                await asyncio.sleep(incident.seconds)
                await self._until(Command("resume", host), host, drained=False)
            case _:
                await self._remove(host, incident.seconds)

    async def _remove(self, host: str, seconds: float) -> None:
        self.log(f"operator drains {host}, and removes it when it is free")
        self.give(Command("drain", host, drain=Drain(self.wall(), "it goes")))
        deadline = _now() + PATIENCE
        while _now() < deadline and self._state(host) is not HostState.REMOVED:
            self.give(Command("remove", host))
            await asyncio.sleep(5.0)
        if self._state(host) is HostState.REMOVED:
            self.log(f"operator has removed {host}")
            await asyncio.sleep(seconds)
        while self._state(host) is HostState.REMOVED:
            self.give(Command("add", host))
            await asyncio.sleep(1.0)
        await self._until(Command("resume", host), host, drained=False)

    async def _until(self, command: Command, host: str, *, drained: bool) -> None:
        """Repeat a command until the rows show it: a controller that crashes loses it."""
        self.log(f"operator: {command.verb} {host}")
        while (known := self.rows().hosts.get(host)) is None or (known.drain is not None) is not drained:
            self.give(command)
            await asyncio.sleep(1.0)

    def _state(self, host: str) -> HostState | None:
        known = self.rows().hosts.get(host)
        return known.state if known else None


class HostWatch:
    """Checks at each commit that no VM is planned on a host that takes none, that no attempt is admitted whose job
    may still run on a host that is neither back nor fenced, and that nothing goes on on a host as it counts as
    fenced."""

    def __init__(self, machines: Machines) -> None:
        self.broken: set[str] = set()
        self._machines = machines
        self._fenced: set[str] = set()
        self._last_vm = 0
        self._claimed: set[int] = set()

    def take_over(self, rows: Rows) -> None:
        """The rows were restored from a copy. That a host counts as fenced there was concluded before: it is said of
        the VMs of that time only, and others may have been made since on a host that is back."""
        self._fenced = _fenced(rows)

    def look(self, rows: Rows, now: float) -> None:
        """`now` is the Unix time of the commit."""
        fenced = _fenced(rows)
        self.broken.update(f"host {name} counts as fenced, and VMs go on there" for name in fenced - self._fenced
                           if self._machines.vms_on(name))  # fmt: skip
        self._fenced = fenced
        for vm in rows.vms.values():
            host = rows.hosts.get(vm.host)
            if vm.id > self._last_vm and vm.state == "planned" and host is not None:
                kept = any(one.name == vm.saved and one.kept == vm.host for one in rows.saved.values())
                drained = host.drain is not None and host.drain.begins <= now and not kept  # goes on where it is
                if drained or host.is_off:
                    self.broken.add(f"VM {vm.name} was planned on {vm.host}, which takes no VM")
        self._last_vm = max([self._last_vm, *rows.vms])
        for attempt in rows.attempts.values():
            if attempt.state == "claimed" and attempt.id not in self._claimed:
                self._claimed.add(attempt.id)
                lost = [vm for vm in rows.vms.values() if vm.state == "lost" and vm.attempt is not None]
                runs = (rows.attempts.get(vm.attempt) for vm in lost if vm.attempt is not None)
                if any(one and one.job.job_id == attempt.job.job_id and one.job.restarts < attempt.job.restarts
                       for one in runs):  # fmt: skip
                    self.broken.add(f"job {attempt.job.job_id} was admitted while its earlier run may go on")


def _fenced(rows: Rows) -> set[str]:
    return {host.name for host in rows.hosts.values() if host.state is HostState.FENCED}


def _now() -> float:
    return asyncio.get_running_loop().time()
