"""Destroys the VMs and templates of a controller that does not run any more."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from multiverse import config
from multiverse.config import Settings
from multiverse.core.model import VmRef, site_of
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.lab.layout import Layout

_CONCURRENT = 8  # VMs that are destroyed at the same time


async def destroy_all(where: Layout) -> int:
    """Destroy all VMs and templates of the lab, of any site; the number of VMs."""
    if not where.settings.exists():
        return 0
    settings = config.load(where.settings)
    # Destroying a VM does not depend on the accelerator, and the probe for one would take seconds.
    settings = replace(settings, qemu=replace(settings.qemu, accel="tcg"))
    count = 0
    for site in _sites(settings):
        count += await _destroy(QemuHypervisor(settings, site))
    return count


def _sites(settings: Settings) -> list[str]:
    """The sites in the names of the lab's VMs; at least one, because templates have no site."""
    names = [name for place in (settings.qemu.vms, settings.qemu.run) for name in _entries(place)]
    return sorted({site_of(name) for name in names} - {""}) or ["lab"]


def _entries(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()] if place.is_dir() else []


async def _destroy(hypervisor: QemuHypervisor) -> int:
    view = await hypervisor.observe()
    limit = asyncio.Semaphore(_CONCURRENT)

    async def end(name: str) -> None:
        async with limit:
            await hypervisor.destroy(VmRef(name), 0)

    await asyncio.gather(*(end(name) for name in sorted(view.vms)))
    await hypervisor.delete_all_templates()
    return len(view.vms)
