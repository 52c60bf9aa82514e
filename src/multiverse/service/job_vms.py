"""The part of the agent that serves VMs inside jobs, where the settings enable it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager

import structlog

from multiverse.agent.job_protocol import LONGEST_REQUEST, PROTOCOL
from multiverse.agent.job_tasks import JobTasks
from multiverse.agent.jobs import JobVmService, JobVmSizes
from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Refused, Unknown
from multiverse.drivers.qemu.job_vms import QemuJobVms
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.job_vms import SlurmJobRuns, TaskProlog, set_feature, why_not
from multiverse.drivers.slurm.reading.name_service import NameService
from multiverse.service.job_platform import PlatformJobVms, connected_platform
from multiverse.service.startup import bind

log = structlog.get_logger()

_AGAIN = 10.0  # seconds until what has failed is tried again


@asynccontextmanager
async def serve_jobs(settings: Settings) -> AsyncIterator[None]:
    """Serve the plugin and the tasks of users while the context lasts. Raises `Refused` if the socket cannot be made
    where users reach it."""
    path, records = settings.job_vms.socket, settings.job_vms.records
    for directory in (path.parent, records):
        if not directory.exists():
            directory.mkdir(parents=True)
            directory.chmod(0o755)
    if not path.parent.stat().st_mode & 0o001:
        raise Refused(
            f"users cannot pass through {path.parent} to the socket of job_vms",
            hint=f"chmod o+x {path.parent}, or set job_vms.socket",
        )
    # Before the VMs of earlier agents are looked at: the epilog of a job that ends meanwhile waits for its turn. Tasks
    # run as users; who may do what is decided by their uids.
    async with _job_host(settings) as host:
        sock = bind(path, "job_vms.socket", all_users=True)
        service = _service(settings, host)
        try:
            await service.start()
            listening = await asyncio.start_unix_server(service.serve, sock=sock, limit=LONGEST_REQUEST)
            running = [asyncio.create_task(each) for each in _attended(settings, host, service)]
            try:
                yield
            finally:
                for each in running:
                    each.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                listening.close()
        finally:
            path.unlink(missing_ok=True)
            await service.close()


@asynccontextmanager
async def _job_host(settings: Settings) -> AsyncIterator[QemuJobVms | PlatformJobVms]:
    """What makes the VMs."""
    if settings.job_vms.platform == "agent":
        async with connected_platform(settings, node_name(settings)) as platform:
            yield platform
        return
    host = await asyncio.to_thread(QemuJobVms, settings)
    try:
        yield host
    finally:
        host.close()


def _service(settings: Settings, host: QemuJobVms | PlatformJobVms) -> JobVmService:
    # A platform's QEMU is not in the job.
    overhead = settings.job_vms.overhead if settings.job_vms.platform == "host" else 0
    prolog = TaskProlog(SlurmCommands(settings.slurm))
    image, least, commands = settings.image.default, settings.qemu.base_memory, settings.slurm.directory()
    sizes = JobVmSizes(image, least, overhead, commands, prolog.path, settings.job_vms.ivshmem_size)
    state, records = settings.agent.state_dir / "jobs", settings.job_vms.records
    return JobVmService(host, NameService().user, state, records, sizes)


def _attended(
    settings: Settings, host: QemuJobVms | PlatformJobVms, service: JobVmService
) -> Iterator[Coroutine[None, None, None]]:
    """What goes on beside the requests."""
    yield NodeFeature(settings).keep()
    tasks = JobTasks(service, host, SlurmJobRuns(SlurmCommands(settings.slurm)), node_name(settings))
    if settings.job_vms.design == "tasks":
        service.steps = tasks.answer
    yield tasks.watch()  # also with the plugin: what steps launched before the design was changed is released
    yield _release_again(service)
    if isinstance(host, PlatformJobVms):
        yield _remove_unknown(host, service)


async def _release_again(service: JobVmService) -> None:
    """What could not be removed when its job ended, as while the platform was away."""
    while True:
        await asyncio.sleep(_AGAIN)
        await service.release_again()


async def _remove_unknown(host: PlatformJobVms, service: JobVmService) -> None:
    """What an earlier agent of this node has left on the platform and is known no more."""
    while True:
        try:
            await host.remove_unknown(service.known)
            return
        except MultiverseError as error:
            log.warning("the VMs of this node on the platform are unknown", reason=str(error))
        await asyncio.sleep(_AGAIN)


def node_name(settings: Settings) -> str:
    """What Slurm calls this host."""
    return settings.job_vms.node or settings.host.name


class NodeFeature:
    """Keeps the feature of jobs with VMs on this node as long as the plugin works here, or what steps use without a
    plugin. It stays when the agent ends: another takes over soon, and without any agent these jobs fail with that
    reason."""

    def __init__(self, settings: Settings) -> None:
        self._commands, self._jobs = SlurmCommands(settings.slurm), settings.job_vms
        self._node = node_name(settings)
        self._told = ""  # the reason that was logged last

    async def keep(self) -> None:
        """Test the plugin again and again."""
        while True:
            await self.test()
            await asyncio.sleep(self._jobs.check)

    async def test(self) -> None:
        """Test the plugin, and tell slurmctld, which forgets it when it reads its configuration again."""
        jobs = self._jobs
        if jobs.design == "tasks":
            reason: MultiverseError | None = None
            if not os.access(jobs.enter, os.X_OK):
                reason = Refused(f"{jobs.enter} cannot be executed", hint="make -C spank install, or set job_vms.enter")
        else:
            expected = {"protocol": str(PROTOCOL), "feature": jobs.feature, "records": str(jobs.records)}
            reason = await why_not(self._commands, expected)
        try:
            if isinstance(reason, Unknown):
                raise reason  # the last test counts
            if await set_feature(self._commands, self._node, jobs.feature, reason is None) and reason is None:
                log.info("this node takes jobs with VMs", node=self._node, feature=jobs.feature)
        except MultiverseError as error:
            reason = reason or error
        if (told := str(reason or "")) and told != self._told:
            log.warning("this node takes no jobs with VMs", node=self._node, feature=jobs.feature, reason=told)
        self._told = told
