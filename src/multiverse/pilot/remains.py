"""Removes what is left of leases whose pilots have ended, also of those that were killed, or whose node crashed."""

from __future__ import annotations

import shutil
from pathlib import Path

import structlog

from multiverse.host import process
from multiverse.pilot import network
from multiverse.pilot.groups import remove_groups
from multiverse.pilot.place import LeasePlace, PilotRecord, group_paths, places
from multiverse.system.locks import is_locked, try_locked_directory

log = structlog.get_logger()


def sweep(leases: Path, job: str = "") -> list[str]:
    """Remove what is left of leases whose pilots have ended; of the lease of that job also if its pilot lives: the
    scheduler has ended the job. Returns what could not be removed, for the operator."""
    left = []
    for place in places(leases):
        known = place.recorded()
        if known is not None and job and known.job == job:
            if not process.kill(known.process):
                left.append(f"process {known.pid} of {place.name} does not end")
                continue
        elif is_locked(place.lock):
            continue
        left += remove_place(place, known)
    return left


def remove_place(place: LeasePlace, known: PilotRecord | None) -> list[str]:
    """Remove all of a lease whose pilot has ended. Returns what is left."""
    with try_locked_directory(place.root) as ours:
        if not ours:  # another sweep does it
            return []
        left = remove_groups(group_paths(known)) if known is not None else []
        try:
            network.unplug(place.name)
            shutil.rmtree(place.root)
        except OSError as error:
            left.append(str(error))
    log.info("lease removed", lease=place.name, left=left)
    return left
