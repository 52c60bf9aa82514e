"""What the site itself provides: time, and a way to switch machines off; what an examination of it finds, and what an
installation changes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from multiverse.system.files import SiteFile


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
    """Something that is missing or different. `name` is the object: a key of slurm.conf, a file, a service. `line` is
    what a line more in slurm.conf would say to mend it; empty if no line would."""

    level: Level
    name: str
    message: str
    remedy: str
    line: str = ""


class Addition(NamedTuple):
    """Lines for a file of the site's own, above its line number `at` (from 0)."""

    path: Path
    lines: tuple[str, ...]
    at: int
    comment: str = "#"


class InstallationPlan(NamedTuple):
    """What an installation does, and what it leaves to an administrator."""

    files: tuple[SiteFile, ...]
    additions: tuple[Addition, ...]
    by_hand: tuple[Finding, ...] = ()  # without these nothing is installed: a line of the site's has to change
    left: tuple[Finding, ...] = ()


class Removal(NamedTuple):
    """What becomes of a file: its lines of ours go (`lines`), or all of it (no lines), or it is kept, and `why`."""

    path: Path
    lines: tuple[str, ...] = ()
    why: str = ""
