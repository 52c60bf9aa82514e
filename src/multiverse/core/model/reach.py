"""Which VMs reach each other: those of one group, which is a number. A VM of group 0 reaches only what its job says.

A host compares these numbers as marks of frames, which have 32 bits. So the groups of users are their uids, and those
of jobs and of the whole site are numbers that no user has: after the site's choice was changed, VMs of both kinds run
beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from multiverse.core.model.job import Attempt

_NO_USERS = 1 << 31
"""From here on there are no uids. Linux has them, but they are the same as negative numbers to many programs."""

OF_SITE = (1 << 32) - 1
"""The group of all VMs, if all of them reach each other."""


class Reach(StrEnum):
    """Which other VMs a VM reaches."""

    JOB = "job"  # those of its job
    USER = "user"  # those of its user
    SITE = "site"  # all of the site


@dataclass(frozen=True, slots=True)
class Member:
    """A VM of a group. `address` is without prefix length. `machine` is where its host is, by its address in the
    network of the hosts; empty where no VXLAN leads to it."""

    name: str
    address: str
    mac: str
    host: str
    group: int
    machine: str = ""


def group_of(attempt: Attempt | None, reach: Reach) -> int:
    """The group of a VM that serves an attempt, or none yet. A VM that is alone in its group by the site's choice has
    none."""
    if reach is Reach.SITE:
        return OF_SITE
    if attempt is None:
        return 0
    if reach is Reach.USER and 0 < attempt.uid < _NO_USERS:
        return attempt.uid
    # Two attempts with the same number would have to be four thousand million attempts apart.
    return _NO_USERS + attempt.id % (_NO_USERS - 1) if attempt.request.nodes > 1 else 0
