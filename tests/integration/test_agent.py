"""The agent as a process: the hypervisor's contract through its socket, and what outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import pytest

import multiverse
from multiverse.agent.connection import (
    AgentConnection,
    CommandTransport,
    ControllerEpoch,
    ControllerIdentity,
    Transport,
    UnixTransport,
)
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.config import Settings
from multiverse.core.errors import Unknown
from multiverse.core.model.vm import VmCondition, VmRef
from tests.contract.test_hypervisor_contract import SUITE, Check
from tests.contract.test_hypervisor_troubles import TROUBLES
from tests.integration.test_contract_qemu import LONG, Real
from tests.integration.watch import kill

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="taps and images need root")]

# What the connection could change: repeated, late and lost calls, errors, and how results are read. The rest of the
# suite concerns the driver alone, and is slow here.
THROUGH_THE_AGENT = {
    "an_observation_is_complete",
    "every_host_belongs_to_one_source",
    "a_template_of_a_missing_image_is_refused",
    "creating_twice_is_like_once",
    "a_start_whose_reply_was_lost_is_repeated",
    "a_destroy_whose_reply_was_lost_is_repeated",
    "a_vm_does_not_become_another",
    "a_vm_is_destroyed_while_it_starts",
    "a_cancelled_create_may_be_repeated",
    "two_equal_calls_at_once_are_like_one",
}
CHECKS = [check for check in (*SUITE, *TROUBLES) if check.__name__ in THROUGH_THE_AGENT]
OTHERS = [check for check in (*SUITE, *TROUBLES) if check not in CHECKS and check.__name__ not in LONG]


class Agent:
    """An agent in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        place = settings.state_dir
        self.socket = place / "agent.sock"
        self.config = place / "agent.toml"
        qemu = settings.qemu
        self.config.write_text(
            f'[host]\nname = "{settings.host.name}"\ncores = {settings.host.cores}\nmemory = {settings.host.memory}\n'
            f'[agent]\nsocket = "{self.socket}"\nstate_dir = "{place}/agent"\n'
            f'[qemu]\nimages = "{qemu.images}"\ntemplates = "{qemu.templates}"\nvms = "{qemu.vms}"\n'
            f'run = "{qemu.run}"\nbridge = "{qemu.bridge}"\n[image]\nscratch = {settings.image.scratch}\n'
        )
        self.log = place / "agent.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def command(self) -> list[str]:
        return [
            sys.executable,
            "-c",
            "import multiverse.cli.main as m; m.main()",
            "agent",
            "--config",
            str(self.config),
        ]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stderr=log)

    def stop(self) -> int:
        """The exit status after SIGTERM."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(20)

    def killed(self) -> None:
        kill(self.pid)
        assert self._process is not None
        self._process.wait()


@pytest.fixture(scope="module")
def agent(settings: Settings) -> Iterator[Agent]:
    one = Agent(settings)
    one.start()
    try:
        yield one
    finally:
        one.stop()


class Controller:
    """The connection of a controller to the agent."""

    kept = 0

    def __init__(self, transport: Transport, site: str, host: str = "h") -> None:
        who = ControllerIdentity(multiverse.__version__, secrets.token_hex(4), site)
        epoch = ControllerEpoch(0, lambda _: None, [host], 30.0)
        self.connection = AgentConnection(host, transport, who, epoch, Random(1))
        self.hypervisor = AgentHypervisor([host], lambda _: self.connection)

    async def connected(self) -> None:
        for _ in range(600):
            if self.connection.welcome is not None and not self.connection.reason:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(self.connection.reason)


@contextlib.asynccontextmanager
async def connected(transport: Transport, site: str, host: str = "h") -> AsyncIterator[Controller]:
    controller = Controller(transport, site, host)
    running = asyncio.create_task(controller.hypervisor.run())
    try:
        await controller.connected()
        yield controller
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class Behind(Real):
    """The real driver in the agent's process."""

    def __init__(self, settings: Settings, controller: Controller) -> None:
        self.settings = settings
        self.controller = controller
        self.hypervisor = controller.hypervisor


@pytest.fixture
async def harness(settings: Settings, agent: Agent) -> AsyncIterator[Behind]:
    async with connected(UnixTransport(agent.socket), Real.site) as controller:
        yield Behind(settings, controller)
    async with connected(UnixTransport(agent.socket), Real.site) as controller:  # a test may have superseded the first
        real = Behind(settings, controller)
        for name in (await real.observe()).vms:
            await real.hypervisor.destroy(real.ref(name), 0)
            assert not real.remains(name)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_qemu_behind_its_agent(check: Check, harness: Behind) -> None:
    await check(harness)


@pytest.mark.slow
@pytest.mark.parametrize("check", OTHERS, ids=lambda check: check.__name__)
async def test_the_rest_of_the_contract_behind_the_agent(check: Check, harness: Behind) -> None:
    await check(harness)


async def test_vms_outlive_the_agent_which_finds_them_again(harness: Behind, agent: Agent) -> None:
    spec = await harness.created()
    await harness.hypervisor.start(harness.ref(spec.name), spec.size, harness.identity(spec))
    agent.killed()
    with pytest.raises(Unknown):
        for _ in range(100):  # until the connection's end is noticed
            await harness.observe()
            await asyncio.sleep(0.05)
    agent.start()
    await asyncio.sleep(0.1)
    await harness.controller.connected()
    assert await harness.condition(spec.name) is VmCondition.RUNNING
    await harness.hypervisor.destroy(harness.ref(spec.name), 0)
    assert not harness.remains(spec.name)


async def test_an_agent_that_hangs_and_goes_on_answers_late_and_nothing_is_lost(harness: Behind, agent: Agent) -> None:
    spec = await harness.created()
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        asking = asyncio.create_task(harness.observe())
        await asyncio.sleep(2.0)
        assert not asking.done()
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    assert spec.name in (await asking).vms


async def test_an_agent_is_reached_through_a_command(harness: Behind, agent: Agent) -> None:
    """As by ssh, whose place the command itself takes here."""
    spec = await harness.created()
    bridge = CommandTransport([*agent.command, "dial-stdio"])
    async with connected(bridge, Real.site) as other:
        assert spec.name in (await other.hypervisor.sources[0].observe()).vms
        with pytest.raises(Unknown, match="another controller"):
            await harness.observe()
        await other.hypervisor.destroy(VmRef(spec.name, "h"), 0)
    assert not harness.remains(spec.name)


async def test_a_command_that_cannot_reach_an_agent_says_why(agent: Agent, tmp_path: Path) -> None:
    missing = CommandTransport([*agent.command, "dial-stdio", "--socket", str(tmp_path / "none")])
    for transport, words in ((missing, "no agent answers"), (CommandTransport(["/no/such/command"]), "cannot start")):
        controller = Controller(transport, Real.site)
        running = asyncio.create_task(controller.hypervisor.run())
        try:
            for _ in range(200):
                if words in controller.connection.reason:
                    break
                await asyncio.sleep(0.05)
            assert words in controller.connection.reason
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def test_a_second_agent_is_refused(agent: Agent) -> None:
    done = subprocess.run(agent.command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "another agent" in done.stderr and "next:" in done.stderr


async def test_the_socket_is_its_owners_alone(agent: Agent) -> None:
    assert agent.socket.stat().st_mode & 0o777 == 0o600
