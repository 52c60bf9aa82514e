"""Ends whatever VMs and templates a controller has left, be it stopped, killed or never heard of again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from multiverse import config
from multiverse.config import Settings
from multiverse.drivers.qemu.driver import QemuHypervisor
from multiverse.lab.layout import Layout

_ENOUGH = 8  # at the same time


async def destroy_all(where: Layout) -> int:
    """End every VM and template of the lab, whichever site they belong to; how many VMs there were."""
    if not where.settings.exists():
        return 0
    settings = config.load(where.settings)
    # The accelerator does not matter to the end of a VM, and probing it takes its time.
    settings = replace(settings, qemu=replace(settings.qemu, accel="tcg"))
    count = 0
    for site in _sites(settings):
        count += await _destroy(QemuHypervisor(settings, site))
    return count


def _sites(settings: Settings) -> list[str]:
    """The sites that VMs here are named after; one at least, since templates have no site."""
    names = [name for place in (settings.qemu.vms, settings.qemu.run) for name in _entries(place)]
    found = {name[2:].partition("-")[0] for name in names if name.startswith("mv") and "-" in name}
    return sorted(found) or ["lab"]


def _entries(place: Path) -> list[str]:
    return [path.name for path in place.iterdir()] if place.is_dir() else []


async def _destroy(hypervisor: QemuHypervisor) -> int:
    view = await hypervisor.observe()
    limit = asyncio.Semaphore(_ENOUGH)

    async def end(name: str) -> None:
        async with limit:
            await hypervisor.destroy(name, 0)

    await asyncio.gather(*(end(name) for name in sorted(view.vms)))
    await hypervisor.delete_all_templates()
    return len(view.vms)
