"""The contract of the hypervisor, with agents that are reached through commands, as by ssh."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from random import Random

import pytest
from tests.contract.test_hypervisor_contract import SUITE, Check, Simulated

from multiverse.agent.connection import AgentConnection, CommandTransport, ControllerEpoch, ControllerIdentity
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.agent.protocol import LONGEST_LINE
from multiverse.agent.server import AgentIdentity, AgentServer, Epochs
from multiverse_lab.simulation.hypervisor import HostLatencies, HostSource, SimulatedHosts
from multiverse_lab.simulation.network import OneHost
from multiverse_lab.simulation.world import Pair

QUICK = HostLatencies(
    (0.0, 0.001), (0.0, 0.001), (0.05, 0.1), (0.01, 0.02), (0.02, 0.05), (0.01, 0.02), (0.0, 0.01), (0.1, 0.2)
)
DIAL = (
    "import sys; from pathlib import Path; from multiverse.agent.dial import dial_stdio; dial_stdio(Path(sys.argv[1]))"
)


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
async def test_simulated_behind_commands(check: Check, tmp_path: Path) -> None:
    """The same hosts in real time, each reached through a process that carries the bytes, as ssh does."""
    harness = Simulated(1, Pair.SLURM_HOSTS)
    hosts = SimulatedHosts(harness.world.machines, Random(1), QUICK)
    servers = []
    for source in hosts.sources:
        agent = AgentServer(AgentIdentity("1.0", source.name, "boot", "run"), Epochs(), partial(_local, hosts, source))
        path = tmp_path / f"{source.name}.sock"
        servers.append((agent, await asyncio.start_unix_server(agent.serve, path, limit=LONGEST_LINE)))
    epoch = ControllerEpoch(0, lambda _: None, [source.name for source in hosts.sources], 5.0)
    who = ControllerIdentity("1.0", "first", "test0")

    def connect(host: str) -> AgentConnection:
        command = CommandTransport([sys.executable, "-c", DIAL, str(tmp_path / f"{host}.sock")])
        return AgentConnection(host, command, who, epoch, Random(1))

    harness.hypervisor = hypervisor = AgentHypervisor([source.name for source in hosts.sources], connect)
    running = asyncio.create_task(hypervisor.run())
    try:
        await asyncio.sleep(0.001)  # the connections are begun; calls wait for them
        for source in hypervisor.sources:
            await source.observe()
        await check(harness)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for agent, server in servers:
            server.close()
            await agent.close()
    assert not harness.world.violations()


def _local(hosts: SimulatedHosts, source: HostSource, _site: str) -> OneHost:
    return OneHost(hosts, source)
