"""The part of the agent that serves VMs inside jobs, where the settings enable it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from multiverse.agent.job_protocol import LONGEST_REQUEST
from multiverse.agent.jobs import JobVmService, JobVmSizes
from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.drivers.qemu.job_vms import QemuJobVms
from multiverse.drivers.slurm.account import NameService
from multiverse.service.startup import bind


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
    sizes = JobVmSizes(settings.image.default, settings.qemu.base_memory, settings.job_vms.overhead)
    service = JobVmService(host, NameService().user, settings.agent.state_dir / "jobs", records, sizes)
    # Before the VMs of earlier agents are looked at: the epilog of a job that ends meanwhile waits for its turn. Tasks
    # run as users; who may do what is decided by their uids.
    sock = bind(path, "job_vms.socket", all_users=True)
    try:
        await service.start()
        listening = await asyncio.start_unix_server(service.serve, sock=sock, limit=LONGEST_REQUEST)
        yield
        listening.close()
    finally:
        path.unlink(missing_ok=True)
        await service.close()
        host.close()
