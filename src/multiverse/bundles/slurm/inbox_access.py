"""Warns when slurmctld's user cannot write to the inbox: hints and offers would fail silently."""

from __future__ import annotations

import asyncio

import structlog

from multiverse.config import Settings
from multiverse.core.errors import MultiverseError
from multiverse.drivers.slurm.site import slurm_user
from multiverse.drivers.slurm.site.bootstrap import read
from multiverse.drivers.slurm.site.slurm_user import why_not_writable

log = structlog.get_logger()

INTERVAL = 300.0
"""Seconds between two checks: each starts a process."""


async def warn_of_closed_inbox(settings: Settings, interval: float = INTERVAL) -> None:
    """Check now and then, and log each change. Never ends."""
    known = None
    await asyncio.sleep(settings.poll)  # the daemon has created the directory by then
    while True:
        reason = await asyncio.to_thread(_reason, settings)
        if reason is not None and reason != known:
            log.warning("inbox not writable", reason=reason, remedy="run multiverse site check")
        elif reason is None and known is not None:
            log.info("inbox writable again")
        known = reason
        await asyncio.sleep(interval)


def _reason(settings: Settings) -> str | None:
    try:
        return why_not_writable(settings.slurm.inbox, slurm_user.of(read(settings.slurm.conf)))
    except MultiverseError as error:
        return error.message
