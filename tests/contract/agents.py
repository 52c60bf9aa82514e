"""Simulated hosts behind agents, as the harness of the hypervisor's contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random

from multiverse.agent.connection import AgentConnection, ControllerEpoch, ControllerIdentity
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse_lab.simulation.hypervisor import SimulatedHosts
from multiverse_lab.simulation.network import SimulatedAgent
from multiverse_lab.simulation.world import SimulatedWorld


def agents_of(world: SimulatedWorld, seed: int) -> list[SimulatedAgent]:
    """An agent for each host of the world. They run."""
    hosts = world.hypervisor(Random(seed))
    assert isinstance(hosts, SimulatedHosts)
    agents = [SimulatedAgent(hosts, source, Random(f"{seed}/{source.name}")) for source in hosts.sources]
    for agent in agents:
        agent.start()
    return agents


class TestedController:
    """The controller's side: connections to the agents, with an epoch of its own. `kept` is what its store keeps."""

    __test__ = False

    def __init__(self, agents: Sequence[SimulatedAgent], run: str, kept: int = 0, wait: float = 5.0) -> None:
        self.kept = kept
        who = ControllerIdentity("1.0", run, "test0", f"machine-{run}")
        epoch = ControllerEpoch(kept, self._keep, [agent.local.name for agent in agents], wait)
        by_name = {agent.local.name: agent for agent in agents}
        self.hypervisor = AgentHypervisor(
            list(by_name), lambda host: AgentConnection(host, by_name[host], who, epoch, Random(f"{run}/{host}"))
        )
        self.connections = [source.connection for source in self.hypervisor.sources]
        self._running: asyncio.Task[None] | None = None

    def _keep(self, epoch: int) -> None:
        self.kept = epoch

    def start(self) -> None:
        self._running = asyncio.create_task(self.hypervisor.run())

    async def ended(self) -> None:
        """Wait until it ends by itself. Raises why."""
        assert self._running is not None
        await asyncio.wait_for(asyncio.shield(self._running), 60.0)

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def connected(self, *hosts: str) -> None:
        """Wait until the agents of these hosts, or of all, are connected."""
        for _ in range(6000):
            wanted = [one for one in self.connections if not hosts or one.host in hosts]
            if all(one.welcome is not None and one.reason == "" for one in wanted):
                return
            await asyncio.sleep(0.01)
        raise AssertionError({one.host: one.reason for one in self.connections})


@asynccontextmanager
async def controller(
    agents: Sequence[SimulatedAgent], run: str = "first", kept: int = 0, wait: float = 5.0
) -> AsyncIterator[TestedController]:
    """A controller whose connections are being made."""
    one = TestedController(agents, run, kept, wait)
    one.start()
    try:
        yield one
    finally:
        await one.stop()
