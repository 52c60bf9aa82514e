"""Hosts that are leased from the lab's Slurm: pilots on real bare-metal nodes, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from multiverse.config import LEASE_RESERVE, LeaseSettings, Settings
from multiverse.core.errors import Unknown
from multiverse.core.model import CloneKind, HypervisorView, LeasedHost, LeaseSpec, PilotSeen, PilotState, Size
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.host import manifest
from multiverse.lab.layout import Layout
from multiverse.lab.plan import LabOptions
from multiverse.service.agents import PilotTransport
from multiverse.system.processes import ProcessIdentity, stat_fields
from tests.integration.conftest import LabUnderTest, new_lab
from tests.integration.images import slim
from tests.integration.test_agent import Behind, Controller, connected
from tests.integration.test_contract_qemu import Real
from tests.integration.watch import kill

pytestmark = [pytest.mark.integration, pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")]

NODE = "mvp1"
SITE = Real.site


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
    partition: str = "physical"

    @classmethod
    def of(cls, lab: LabUnderTest, partition: str = "physical", **lease: Any) -> Pilots:
        settings = replace(lab.settings, lease=(LeaseSettings(partition, **lease),))
        return cls(lab, settings, SlurmScheduler(settings, SITE), partition)

    @property
    def own(self) -> Layout:
        """What the node has, as this machine sees it."""
        return self.lab.where.host(NODE)

    def spec(self, **more: Any) -> LeaseSpec:
        name, token = f"lease-{SITE}-{secrets.token_hex(3)}", secrets.token_hex(8)
        return replace(LeaseSpec(name, token, self.partition, time_limit=600.0), **more)

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

    def init(self, spec: LeaseSpec) -> int:
        """The first process of a lease, as this machine sees it."""
        (found,) = (pid for pid in self.processes(spec) if _numbers(pid)[-1] == "1")
        return found

    def agent(self, spec: LeaseSpec) -> int:
        init = self.init(spec)
        (found,) = (pid for pid in self.processes(spec) if (stat_fields(pid) or "00")[1] == str(init))
        return found

    def qemus(self, name: str) -> list[int]:
        """The QEMUs of a VM."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if b"qemu" in words[0] and any(name.encode() in word for word in words):
                    found.append(int(entry.parent.name))
        return found

    @contextlib.asynccontextmanager
    async def reached(self, host: LeasedHost) -> AsyncIterator[Controller]:
        """A controller that is connected with the agent of a leased host."""
        async with connected(PilotTransport(self.settings, host), SITE, host.lease.name) as controller:
            yield controller


def _numbers(pid: int) -> list[str]:
    """The pids of a process in its own PID namespace and in those above, the own last."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("NSpid:")).split()[1:]


async def observed(controller: Controller) -> HypervisorView:
    deadline = time.monotonic() + 60
    while True:
        try:
            return await controller.hypervisor.sources[0].observe()
        except Unknown:
            assert time.monotonic() < deadline
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
        (own,) = view.hosts.values()
        assert (own.name, own.capacity.cpus, own.capacity.memory) == (spec.name, 4, 6144 - LEASE_RESERVE)
    assert len((await pilots.scheduler.observe()).pilots) == 1
    assert pilots.scheduler.leases is not None
    await pilots.scheduler.leases.release("lease-of-others", [host.pilot])
    assert (await pilots.held(spec)).pilot == host.pilot, "a pilot of another name is left alone"
    await pilots.scheduler.leases.release(spec.name, [])
    await pilots.ended(spec)
    await pilots.scheduler.leases.release(spec.name, [host.pilot])


# --- with VMs ------------------------------------------------------------------------------------------


class OnLease(Behind):
    """The real driver in the agent of a lease, with the lease's files as this machine sees them."""

    def __init__(self, pilots: Pilots, host: LeasedHost, controller: Controller) -> None:
        self._init = pilots.init(host.lease)
        root, qemu = Path(f"/proc/{self._init}/root"), pilots.settings.qemu
        outside = replace(qemu, vms=root / qemu.vms.relative_to("/"), run=root / qemu.run.relative_to("/"))
        super().__init__(replace(pilots.settings, qemu=outside), controller)
        self.host, self._inside = host.lease.name, qemu

    async def kill(self, name: str) -> None:
        known = manifest.read(self.settings.qemu.vms / name)
        assert known is not None
        script = f"kill -9 {known.pid}; while kill -0 {known.pid}; do sleep 0.01; done 2>/dev/null"
        subprocess.run(["nsenter", f"--target={self._init}", "--pid", "--mount", "sh", "-c", script], check=True)

    def remains(self, name: str) -> list[str]:
        tap = Path(f"/proc/{self._init}/root/sys/class/net/{name}")
        inner = Behind(replace(self.settings, qemu=self._inside), self.controller)
        return [*super().remains(name), *([str(tap)] if tap.exists() else []), *Real.remains(inner, name)]


@contextlib.asynccontextmanager
async def with_a_vm(pilots: Pilots, spec: LeaseSpec) -> AsyncIterator[tuple[OnLease, LeasedHost, int]]:
    """A lease with a VM; gives the pid of its QEMU, as this machine sees it, too."""
    await pilots.request(spec)
    try:
        host = await pilots.held(spec)
        async with pilots.reached(host) as controller:
            await observed(controller)
            real = OnLease(pilots, host, controller)
            vm = real.spec(CloneKind.FULL)
            await real.hypervisor.create(vm)
            (qemu,) = await asyncio.to_thread(pilots.qemus, vm.name)
            yield real, host, qemu
    finally:
        pilots.lab.run("scancel", f"--name={spec.name}")


def alive(pid: int) -> bool:
    return ProcessIdentity.of(pid).is_alive()


@pytest.mark.slow
async def test_the_end_of_an_agent_ends_no_vm_and_the_end_of_its_pilot_ends_all(physical: LabUnderTest) -> None:
    pilots = Pilots.of(physical)
    spec = pilots.spec()
    async with with_a_vm(pilots, spec) as (real, _, qemu):
        group = Path(f"/proc/{qemu}/cgroup").read_text()
        assert f"/{spec.name}/multiverse/" in group and "/job_" in group, "a control group of its own, in the job's"
        kill(pilots.agent(spec))
        deadline = time.monotonic() + 60
        while True:  # until the pilot has started another one, which finds the VM
            with contextlib.suppress(Unknown):
                if list((await real.observe()).vms):
                    break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert alive(qemu)
        os.kill(pilots.init(spec), signal.SIGKILL)
        await pilots.ended(spec)
        assert not alive(qemu)


@pytest.mark.slow
@pytest.mark.parametrize("signal_of_slurm", [(), ("--signal=KILL",)], ids=["cancelled", "killed"])
async def test_nothing_is_left_of_a_lease_that_slurm_ends(
    physical: LabUnderTest, signal_of_slurm: tuple[str, ...]
) -> None:
    pilots = Pilots.of(physical)
    spec = pilots.spec()
    async with with_a_vm(pilots, spec) as (_, host, qemu):
        physical.run("scancel", *signal_of_slurm, host.pilot)
        await pilots.ended(spec)
        assert not alive(qemu)
