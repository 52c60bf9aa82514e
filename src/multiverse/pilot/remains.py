"""Removes what is left of leases whose pilots have ended, also of those that were killed, or whose node crashed."""

from __future__ import annotations

import shutil
from pathlib import Path

import structlog

from multiverse.core.errors import MultiverseError
from multiverse.host import process
from multiverse.pilot import network, vxlan
from multiverse.pilot.groups import remove_groups
from multiverse.pilot.lease_directory import LeaseDirectory, PilotRecord, group_paths, lease_directories
from multiverse.system.locks import is_locked, try_locked_directory

log = structlog.get_logger()


def sweep(leases: Path, job: str = "") -> list[str]:
    """Remove what is left of leases whose pilots have ended; of the lease of that job also if its pilot lives: the
    scheduler has ended the job. Returns what could not be removed, for the operator."""
    left = []
    for place in lease_directories(leases):
        known = place.recorded()
        over = known is not None and bool(job) and known.job == job
        if over and known is not None and not process.kill(known.process):
            left.append(f"process {known.pid} of {place.name} does not end")
            continue
        left += remove_place(place, known, over=over)
    return left


def remove_place(place: LeaseDirectory, known: PilotRecord | None, *, over: bool = True) -> list[str]:
    """Remove all of a lease. Unless it is known to be over, that is done only if its pilot has ended. Returns what is
    left."""
    with try_locked_directory(place.root) as ours:
        if not ours or (not over and is_locked(place.lock)):  # another sweep does it, or a pilot starts or lives
            return []
        left = remove_groups(group_paths(known)) if known is not None else []
        try:
            network.unplug(place.name)
            vxlan.leave(place.root.parent, place)
            shutil.rmtree(place.root)
        except (OSError, MultiverseError) as error:
            left.append(str(error))
    log.info("lease removed", lease=place.name, left=left)
    return left
