"""What an examination of a site's Slurm finds."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    PROBLEM = "problem"  # jobs in VMs, or other jobs of the site, do not work as they should
    NOTE = "note"  # what an administrator should know


class Finding(NamedTuple):
    """Something that is missing or different. `name` is the object: a key of slurm.conf, a file, a service."""

    level: Level
    name: str
    message: str
    remedy: str
