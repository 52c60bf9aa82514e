"""The scheduler's contract (tests/contract) with a real slurmctld. Nodes are slurmds in namespaces of their own."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from multiverse.core.clones.spares import node_spec
from multiverse.core.errors import Refused
from multiverse.core.model.job import Attempt, JobRef
from multiverse.core.model.vm import Vm
from multiverse.drivers.slurm.command import Completed, execute
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse_lab.lab import lifecycle
from multiverse_lab.lab.plan import LabOptions
from multiverse_lab.lab.services import SERVICES
from tests.contract.test_scheduler_contract import SUITE, Check, Harness
from tests.contract.test_scheduler_troubles import TROUBLES
from tests.integration.fake_guest import SITE, FakeGuest

pytestmark = pytest.mark.integration

_OPTIONS = ("--ntasks-per-node=1", "--mem=64", "--requeue", "--output=/dev/null")


class RealSlurm(Harness):
    site = SITE
    base = 5000

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.uid = lab.user.uid
        self.scheduler = SlurmScheduler(lab.settings, SITE)
        self.guests: list[FakeGuest] = []

    async def submit(
        self,
        seconds: float = 3600.0,
        *,
        held: bool = False,
        priority: int | None = None,
        nodes: int = 1,
        name: str = "job",
        lingers: float = 0.0,
    ) -> str:
        script = f"sleep {seconds:g}"
        if lingers:  # the job ignores SIGTERM until KillWait has passed
            script = f"trap '' TERM; {script} & while :; do wait; sleep 1; done"
        options = [f"--job-name={name}", f"--nodes={nodes}", *_OPTIONS, *(["--hold"] if held else [])]
        job_id: str = await asyncio.to_thread(self.lab.sbatch, script, *options)
        if priority is not None and not held:
            await self._run("scontrol", "update", f"JobId={job_id}", f"Priority={priority}")
        return job_id

    async def submit_array(self, tasks: int) -> list[str]:
        base = await asyncio.to_thread(self.lab.sbatch, "sleep 3600", f"--array=1-{tasks}", *_OPTIONS)
        return [f"{base}_{task}" for task in range(1, tasks + 1)]

    async def cancel(self, job_id: str) -> None:
        await self._run("scancel", job_id, user=self.lab.user)

    async def comment(self, job_id: str) -> str:
        listing = ("squeue", "-h", "-a", "-r", "-t", "all", "-j", job_id, "-O", "admin_comment:0")
        done = await asyncio.to_thread(self.lab.run, *listing)
        return str(done.stdout.strip())

    async def write(self, job_id: str, text: str) -> None:
        await self._run("scontrol", "update", f"JobId={job_id.partition('_')[0]}", f"AdminComment={text}")

    async def hold(self, job_id: str) -> None:
        await self._run("scontrol", "hold", job_id, user=self.lab.user)

    async def release(self, job_id: str) -> None:
        await self._run("scontrol", "release", job_id, user=self.lab.user)

    async def requeue_late(self, job: JobRef, meanwhile: Callable[[], Awaitable[None]]) -> None:
        async def late(argv: Sequence[str], env: Mapping[str, str], timeout: float) -> Completed:
            if "requeue" in argv:
                await meanwhile()
            return await execute(argv, env, timeout)

        await SlurmScheduler(self.lab.settings, SITE, execute=late).requeue(job)

    async def suspend(self, job_id: str) -> None:
        await self._run("scontrol", "suspend", job_id)

    async def resume(self, job_id: str) -> None:
        await self._run("scontrol", "resume", job_id)

    @asynccontextmanager
    async def away(self, *, gone: bool = False) -> AsyncIterator[None]:
        usual = self.scheduler
        brief = replace(self.lab.settings.slurm, command_timeout=2.0)
        self.scheduler = SlurmScheduler(replace(self.lab.settings, slurm=brief), SITE)
        try:
            async with self._without_slurmctld() if gone else self._silent_slurmctld():
                yield
        finally:
            self.scheduler = usual

    @asynccontextmanager
    async def _silent_slurmctld(self) -> AsyncIterator[None]:
        pid = lifecycle.status(self.lab.where)["slurmctld"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @asynccontextmanager
    async def _without_slurmctld(self) -> AsyncIterator[None]:
        """slurmctld writes its whole state before it ends."""
        await next(service for service in SERVICES if service.name == "slurmctld").stop(self.lab.where)
        try:
            yield
        finally:
            await lifecycle.up(self.lab.where, LabOptions(), controller=False)

    async def reserve(self) -> None:
        options = ("nodes=ALL", "users=root", "flags=maint,ignore_jobs", "starttime=now", "duration=10")
        await self._run("scontrol", "create", "reservation", "reservationname=maintenance", *options)

    async def include_in_reservations(self, node: str) -> None:
        await self._run("scontrol", "update", f"nodename={node}", "comment=seen")

    async def open_again(self) -> None:
        await self._run("scontrol", "delete", "reservationname=maintenance")

    async def reconfigure(self) -> None:
        await self._run("scontrol", "reconfigure")

    @asynccontextmanager
    async def forgetting(self) -> AsyncIterator[None]:
        """Restore slurmctld's state from a copy."""
        state, kept = self.lab.where.slurmctld, self.lab.where.root / "kept"
        async with self._without_slurmctld():
            await self._run("cp", "-a", str(state), str(kept))
        yield
        async with self._without_slurmctld():
            shutil.rmtree(state)
            kept.rename(state)
            # A job with the same id and the same submit time, in whole seconds, could not be told from the first one.
            await asyncio.sleep(1.0 - time.time() % 1.0)

    async def _run(self, *command: str, user: Any = None) -> None:
        await asyncio.to_thread(self.lab.run, *command, user=user)

    def address(self, number: int) -> str:
        network = ipaddress.IPv4Network(self.lab.settings.network.subnet)
        return f"{network[number]}/{network.prefixlen}"

    async def add_user(self, node: str) -> None:
        next(guest for guest in self.guests if guest.name == node).add_user()

    async def join(self, vm: Vm, attempt: Attempt | None) -> None:
        guest = FakeGuest(self.lab.settings, vm.name, vm.address, self.lab.where.root.parent / "fake")
        self.guests.append(guest)
        bootstrap = await self.scheduler.bootstrap(node_spec(vm, attempt))
        await guest.start(bootstrap, ((vm.name, vm.address.partition("/")[0]),))

    async def clean(self) -> None:
        self.lab.run("scancel", "--partition=vm", check=False)
        for guest in self.guests:  # first: whatever fails below, no process outlives the test
            await guest.stop()
        for guest in self.guests:
            await self.scheduler.set_down(guest.name, "the test has ended")
            async with asyncio.timeout(30):
                while True:
                    try:
                        await self.scheduler.delete_node(guest.name)
                        break
                    except Refused:
                        await asyncio.sleep(0.2)  # its job is completing
        RealSlurm.base += len(self.guests) + 1


@pytest.fixture
async def harness(lab: Any, no_controller: None) -> AsyncIterator[RealSlurm]:
    real = RealSlurm(lab)
    yield real
    await real.clean()


@pytest.mark.parametrize("check", (*SUITE, *TROUBLES), ids=lambda check: check.__name__)
async def test_slurm(check: Check, harness: RealSlurm) -> None:
    await check(harness)
