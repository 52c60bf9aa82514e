"""The real daemon with schedulers and platforms that are neither Slurm nor QEMU, through the life of jobs.

Scheduler and platform are simulated, in real time; the daemon, its store, its API and its commands are as on any site.
The module needs neither root nor a lab.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multiverse.api import ExplanationsView, HostView, JobView, StatusView, VmView, decode
from multiverse.client import Client
from multiverse.config import ImageSettings, Settings, UsersSettings, WebSettings
from multiverse.core.errors import Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.job import JobState
from multiverse.service.daemon import serve
from multiverse_lab.simulation.bundles import WORLDS, world_of
from multiverse_lab.simulation.jobs import Batch
from multiverse_lab.simulation.world import Pair, SimulatedWorld

pytestmark = pytest.mark.integration

PATIENCE = 60.0


class Daemon:
    """A daemon in this process, and the world of its drivers."""

    def __init__(self, settings: Settings, world: SimulatedWorld) -> None:
        self.settings, self.world = settings, world

    async def ask(self, question: Callable[[Client], Any]) -> Any:
        """An answer of its API, as a command gets it."""

        def asked() -> Any:
            with Client(self.settings.socket) as client:
                return question(client)

        return await asyncio.to_thread(asked)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until it is true."""
        async with asyncio.timeout(PATIENCE):
            while not true():  # noqa: ASYNC110 - the world has no event for this
                await asyncio.sleep(0.05)

    def state(self, job_id: str) -> JobState:
        return next(job.state for job in self.world.cluster.history if job.job_id == job_id)


def settings_of(pair: Pair, where: Path) -> Settings:
    scheduler, platform = pair.split("-")
    kind = CloneKind.FULL if pair.has_cloud else CloneKind.INSTANT  # a cloud forks nothing
    return replace(
        Settings(),
        image=ImageSettings(kind=kind),
        scheduler=f"simulated-{scheduler}",
        platforms=(f"simulated-{platform}",),
        state_dir=where / "state",
        socket=where / "api.sock",
        poll=0.3,
        users=UsersSettings(enabled=False),
        web=WebSettings(listen=""),
    )


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Daemon]:
    """A daemon that serves, until it has ended by SIGTERM."""
    world = world_of(settings)
    serving = asyncio.create_task(serve(settings))
    try:
        daemon = Daemon(settings, world)
        async with asyncio.timeout(PATIENCE):
            while not settings.socket.exists():
                await asyncio.sleep(0.05)
                if serving.done():
                    serving.result()
        yield daemon
    finally:
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([serving], timeout=PATIENCE)
        serving.result()


@pytest.fixture
def settings(tmp_path: Path, request: pytest.FixtureRequest) -> Settings:
    return settings_of(request.param, tmp_path)


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    yield
    WORLDS.clear()


@pytest.mark.parametrize("settings", list(Pair), indirect=True, ids=str)
async def test_jobs_run_and_leave_nothing(settings: Settings) -> None:
    async with running(settings) as daemon:
        world, cluster = daemon.world, daemon.world.cluster
        short = cluster.submit(Batch("short", 1000, 1.0, size=Size(1, 512)))
        gang = cluster.submit(Batch("gang", 1001, 1.0, nodes=2, size=Size(1, 512)))
        long = cluster.submit(Batch("long", 1000, 600.0, size=Size(2, 512), limit=3600))
        await daemon.until(lambda: daemon.state(long) is JobState.RUNNING)
        jobs = decode(list[JobView], await daemon.ask(lambda client: client.jobs()))
        assert long in {job.job_id for job in jobs}
        (said,) = decode(ExplanationsView, await daemon.ask(lambda client: client.explain(long))).jobs
        assert any(f" on {host}" in said.text for host in world.machines.hosts)
        await daemon.until(lambda: {daemon.state(short), daemon.state(gang)} == {JobState.ENDED})
        cluster.cancel(long)
        await daemon.until(lambda: not world.machines.vms and not cluster.nodes)
        async with asyncio.timeout(PATIENCE):
            while decode(list[VmView], await daemon.ask(lambda client: client.vms())):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        hosts = decode(list[HostView], await daemon.ask(lambda client: client.hosts()))
        assert [(host.name, host.vms) for host in hosts] == [(name, 0) for name in world.machines.hosts]
        status = decode(StatusView, await daemon.ask(lambda client: client.status()))
        assert not status.alerts and not world.machines.violations and not cluster.violations


@pytest.mark.parametrize("settings", [Pair.GRID_CLOUD], indirect=True, ids=str)
async def test_a_daemon_that_starts_again_takes_over_what_runs(settings: Settings) -> None:
    async with running(settings) as daemon:
        job = daemon.world.cluster.submit(Batch("long", 1000, 600.0, size=Size(1, 512), limit=3600))
        await daemon.until(lambda: daemon.state(job) is JobState.RUNNING)
        vms = set(daemon.world.machines.vms)
    async with running(settings) as daemon:
        await asyncio.sleep(3 * settings.poll)
        assert set(daemon.world.machines.vms) == vms and daemon.state(job) is JobState.RUNNING
        daemon.world.cluster.cancel(job)
        await daemon.until(lambda: not daemon.world.machines.vms)


async def test_what_is_not_installed_is_refused_with_what_is(tmp_path: Path) -> None:
    settings = settings_of(Pair.SLURM_HOSTS, tmp_path)
    for wrong in (replace(settings, platforms=("vsphere",)), replace(settings, scheduler="pbs")):
        with pytest.raises(Refused, match=r"'(vsphere|pbs)'") as caught:
            await serve(wrong)
        assert "qemu" in caught.value.hint or "slurm" in caught.value.hint
