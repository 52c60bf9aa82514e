"""Hosts that are leased from the lab's Slurm: pilots on real bare-metal nodes, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from multiverse.config import LEASE_RESERVE, LeaseSettings, Settings
from multiverse.core.model import LeasedHost, LeaseSpec, PilotSeen, PilotState, Size
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.lab.layout import Layout
from multiverse.lab.plan import LabOptions
from multiverse.service.agents import PilotTransport
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.test_agent import Controller, connected

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]

NODE = "mvp1"
SITE = "lt123"


@pytest.fixture(scope="module")
def physical(accelerator: Path) -> Iterator[LabUnderTest]:
    """A lab with a bare-metal node of four cores, and without a controller."""
    slim()
    with new_lab(accelerator, LabOptions(cores=4, memory=6144, physical=1), controller=False) as made:
        yield made


@dataclass
class Pilots:
    """Leases of a lab without a controller."""

    lab: LabUnderTest
    settings: Settings
    scheduler: SlurmScheduler

    @classmethod
    def of(cls, lab: LabUnderTest, **lease: object) -> Pilots:
        settings = replace(lab.settings, lease=(LeaseSettings("physical", **lease),))  # type: ignore[arg-type]
        return cls(lab, settings, SlurmScheduler(settings, SITE))

    @property
    def own(self) -> Layout:
        """What the node has, as this machine sees it."""
        return self.lab.where.host(NODE)

    def spec(self, **more: object) -> LeaseSpec:
        number = secrets.token_hex(3)
        return replace(LeaseSpec(f"lease-{SITE}-{number}", secrets.token_hex(8), "physical", time_limit=600.0), **more)  # type: ignore[arg-type]

    async def request(self, spec: LeaseSpec) -> None:
        assert self.scheduler.leases is not None
        await self.scheduler.leases.request(spec)

    async def seen(self, spec: LeaseSpec, reached: Callable[[PilotSeen], bool]) -> tuple[str, PilotSeen]:
        """The pilot of a lease, once it is seen as wanted."""
        deadline, found = time.monotonic() + 60, {}
        while time.monotonic() < deadline:
            pilots = (await self.scheduler.observe()).pilots
            found = {job: pilot for job, pilot in pilots.items() if pilot.name == spec.name}
            for job, pilot in found.items():
                if reached(pilot):
                    assert pilot.token == spec.token
                    return job, pilot
            await asyncio.sleep(0.2)
        raise AssertionError(f"{spec.name} is {found}; {self.said(spec)}")

    async def held(self, spec: LeaseSpec) -> LeasedHost:
        """The host of a lease whose pilot runs."""
        job, pilot = await self.seen(spec, lambda pilot: pilot.state is PilotState.RUNNING)
        assert pilot.node == NODE and time.time() < pilot.ends <= time.time() + spec.time_limit + 60
        return LeasedHost(spec, job, pilot.node, pilot.ends)

    async def ended(self, spec: LeaseSpec) -> PilotSeen:
        """The pilot of a lease once it has ended; nothing of it is left on the node then."""
        _, pilot = await self.seen(spec, lambda pilot: pilot.state is PilotState.ENDED)
        assert pilot.clean
        assert self.remains(spec) == []
        return pilot

    def said(self, spec: LeaseSpec) -> str:
        with contextlib.suppress(OSError):
            return (self.own.leases / ".logs" / f"{spec.name}.log").read_text()[-2000:]
        return "it has said nothing"

    def remains(self, spec: LeaseSpec) -> list[str]:
        """What is on the node that belongs to a lease: files, control groups, interfaces, processes."""
        groups = Path("/sys/fs/cgroup").glob(f"*/{self.lab.where.control_group}/**/{spec.name}")
        found = [*self.own.leases.glob(spec.name), *groups]
        for pid in self.processes(spec):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}"))
        return [str(path) for path in found]

    def processes(self, spec: LeaseSpec) -> list[int]:
        """The pilot's processes, from the outermost inwards, as this machine sees them."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if (
                    b"pilot" in words
                    and spec.name.encode() in words
                    and b"srun" not in Path(words[0].decode()).name.encode()
                ):
                    found.append(int(entry.parent.name))
        return sorted(found)

    @contextlib.asynccontextmanager
    async def reached(self, host: LeasedHost) -> AsyncIterator[Controller]:
        """A controller that is connected with the agent of a leased host."""
        async with connected(PilotTransport(self.settings, host), SITE, host.lease.name) as controller:
            yield controller


async def observed(controller: Controller) -> object:
    deadline = time.monotonic() + 60
    while True:
        try:
            return await controller.hypervisor.sources[0].observe()
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def test_a_pilot_makes_a_node_a_host_until_it_is_released(physical: LabUnderTest) -> None:
    pilots = Pilots.of(physical)
    spec = pilots.spec()
    before = await pilots.scheduler.observe()
    assert before.leasable == {"physical": Size(4, 6144 - LEASE_RESERVE)} and not before.pilots
    for _ in range(2):  # the first reply may have been lost
        await pilots.request(spec)
    host = await pilots.held(spec)
    async with pilots.reached(host) as controller:
        view = await observed(controller)
        (own,) = view.hosts.values()  # type: ignore[attr-defined]
        assert (own.name, own.capacity.cpus, own.capacity.memory) == (spec.name, 4, 6144 - LEASE_RESERVE)
    assert len((await pilots.scheduler.observe()).pilots) == 1
    assert pilots.scheduler.leases is not None
    await pilots.scheduler.leases.release("lease-of-others", [host.pilot])
    assert (await pilots.held(spec)).pilot == host.pilot, "a pilot of another name is left alone"
    await pilots.scheduler.leases.release(spec.name, [])
    await pilots.ended(spec)
    await pilots.scheduler.leases.release(spec.name, [host.pilot])
