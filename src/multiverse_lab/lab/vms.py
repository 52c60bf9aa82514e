"""Destroys the VMs and templates of a controller that does not run any more."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from multiverse import config
from multiverse.core.model.vm import VmRef
from multiverse.drivers.qemu.driver import JOB_SITE, QemuHypervisor, sites
from multiverse_lab.lab.layout import Layout

_CONCURRENT = 8  # VMs that are destroyed at the same time


async def destroy_all(where: Layout) -> int:
    """Destroy all VMs and templates of the lab, of any site; the number of VMs."""
    if not where.settings.exists():
        return 0
    settings = config.load(where.settings)
    # Destroying a VM depends neither on the accelerator nor on features, and to try these would take seconds.
    settings = replace(settings, qemu=replace(settings.qemu, accel="tcg"))
    count = 0
    for site in (*sites(settings), JOB_SITE):
        count += await _destroy(QemuHypervisor(settings, site))
    return count


async def _destroy(hypervisor: QemuHypervisor) -> int:
    names = await hypervisor.list_vms()
    limit = asyncio.Semaphore(_CONCURRENT)

    async def end(name: str) -> None:
        async with limit:
            await hypervisor.destroy(VmRef(name), 0)

    await asyncio.gather(*(end(name) for name in names))
    await hypervisor.delete_all_templates()
    return len(names)
