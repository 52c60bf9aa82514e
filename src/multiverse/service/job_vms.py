"""The part of the agent that serves VMs inside jobs, where the settings enable it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from multiverse.agent.job_protocol import LONGEST_REQUEST, PROTOCOL
from multiverse.agent.jobs import JobVmService, JobVmSizes
from multiverse.config import Settings
from multiverse.core.errors import MultiverseError, Refused, Unknown
from multiverse.drivers.qemu.job_vms import QemuJobVms
from multiverse.drivers.slurm.account import NameService
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.job_feature import set_feature, why_not
from multiverse.drivers.slurm.task_prolog import TaskProlog
from multiverse.service.startup import bind

log = structlog.get_logger()


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
    host = await asyncio.to_thread(QemuJobVms, settings)
    image, least, overhead = settings.image.default, settings.qemu.base_memory, settings.job_vms.overhead
    prolog = TaskProlog(SlurmCommands(settings.slurm))
    sizes = JobVmSizes(image, least, overhead, settings.slurm.directory(), prolog.path, settings.job_vms.ivshmem_size)
    service = JobVmService(host, NameService().user, settings.agent.state_dir / "jobs", records, sizes)
    # Before the VMs of earlier agents are looked at: the epilog of a job that ends meanwhile waits for its turn. Tasks
    # run as users; who may do what is decided by their uids.
    sock = bind(path, "job_vms.socket", all_users=True)
    try:
        await service.start()
        listening = await asyncio.start_unix_server(service.serve, sock=sock, limit=LONGEST_REQUEST)
        testing = asyncio.create_task(NodeFeature(settings).keep(), name="plugin-test")
        try:
            yield
        finally:
            testing.cancel()
            await asyncio.gather(testing, return_exceptions=True)
            listening.close()
    finally:
        path.unlink(missing_ok=True)
        await service.close()
        host.close()


class NodeFeature:
    """Keeps the feature of jobs with VMs on this node as long as the plugin works here. It stays when the agent ends:
    another takes over soon, and without any agent these jobs fail with that reason."""

    def __init__(self, settings: Settings) -> None:
        self._commands, self._jobs = SlurmCommands(settings.slurm), settings.job_vms
        self._node = settings.job_vms.node or settings.host.name
        self._told = ""  # the reason that was logged last

    async def keep(self) -> None:
        """Test the plugin again and again."""
        while True:
            await self.test()
            await asyncio.sleep(self._jobs.check)

    async def test(self) -> None:
        """Test the plugin, and tell slurmctld, which forgets it when it reads its configuration again."""
        jobs = self._jobs
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
