"""The scheduler's contract (tests/contract), kept by a real slurmctld. Nodes are slurmds in namespaces of their own."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from typing import Any

import pytest

from multiverse.core.errors import Refused
from multiverse.core.model import Attempt, Vm
from multiverse.drivers.slurm.driver import SlurmScheduler
from tests.contract.test_scheduler_contract import SUITE, Check, Harness
from tests.integration.fake_guest import SITE, FakeGuest

pytestmark = pytest.mark.integration


class Real(Harness):
    site = SITE
    base = 5000

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.uid = lab.user.uid
        self.scheduler = SlurmScheduler(lab.settings, SITE, images=lambda: ["slim"])
        self.guests: list[FakeGuest] = []

    async def submit(self, seconds: float = 3600.0, *, held: bool = False, priority: int = 1000) -> str:
        options = ["--cpus-per-task=1", "--mem=64", "--requeue", *(["--hold"] if held else [])]
        job_id: str = await asyncio.to_thread(self.lab.sbatch, f"sleep {seconds:g}", *options)
        if not held:
            await asyncio.to_thread(self.lab.run, "scontrol", "update", f"JobId={job_id}", f"Priority={priority}")
        return job_id

    def address(self, number: int) -> str:
        network = ipaddress.IPv4Network(self.lab.settings.network.subnet)
        return f"{network[number]}/{network.prefixlen}"

    async def join(self, vm: Vm, attempt: Attempt) -> None:
        guest = FakeGuest(self.lab.settings, vm, self.lab.where.run / "fake")
        self.guests.append(guest)
        membership = await self.scheduler.membership(vm, attempt)
        await guest.start(membership, ((vm.name, vm.address.partition("/")[0]),))

    async def clean(self) -> None:
        for partition in ("vm", "vmrun"):
            self.lab.run("scancel", f"--partition={partition}", check=False)
        for guest in self.guests:
            await self.scheduler.fail(guest.name, "the test has ended")
            await guest.stop()
            async with asyncio.timeout(30):
                while True:
                    try:
                        await self.scheduler.remove(guest.name)
                        break
                    except Refused:
                        await asyncio.sleep(0.2)  # its job is completing
        Real.base += len(self.guests) + 1


@pytest.fixture
async def harness(lab: Any) -> AsyncIterator[Real]:
    real = Real(lab)
    yield real
    await real.clean()


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
async def test_slurm(check: Check, harness: Real) -> None:
    await check(harness)
