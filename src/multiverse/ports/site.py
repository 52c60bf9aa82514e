"""What the site itself provides: time, and a way to switch machines off; and what an examination of it finds."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic seconds. The clock runs on while the machine sleeps and starts anew at boot."""

    def wall(self) -> float:
        """Unix time in seconds."""

    def boot_id(self) -> str:
        """Tells one boot's monotonic times from another's."""


class Fencing(Protocol):
    """The site's fence command."""

    async def fence(self, host: str) -> None:
        """Make sure that the machine is off. Returns only if it surely is; else raises `Unknown`, and is repeated."""


class Level(StrEnum):
    PROBLEM = "problem"  # jobs in VMs, or other jobs of the site, do not work as they should
    NOTE = "note"  # what an administrator should know


class Finding(NamedTuple):
    """Something that is missing or different. `name` is the object: a key of slurm.conf, a file, a service."""

    level: Level
    name: str
    message: str
    remedy: str
