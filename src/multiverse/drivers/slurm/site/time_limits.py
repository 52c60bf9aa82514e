"""How long Slurm lets a job run at most. Pure.

slurmctld ends a job that exceeds its time limit by more than OverTimeLimit, sends SIGTERM first and SIGKILL after
KillWait. It looks at the limits of running jobs every 30 s (PERIODIC_TIMEOUT in slurmctld/controller.c).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from multiverse.core.model import YEAR
from multiverse.drivers.slurm.site import conf, site_conf

CHECKED_EVERY = 30
"""Seconds between two looks of slurmctld at the limits of running jobs."""

NEVER = 0xFFFFFFFF
"""Stands for the Unix time of an end that is not limited, which squeue prints as NONE."""

_KILL_WAIT = 30  # seconds: Slurm's default
_UNLIMITED = ("infinite", "unlimited", "-1")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """`most` is the most seconds that the partitions allow. `beyond` is how many seconds a job may take longer than its
    limit says, until slurmctld has ended it."""

    most: float = YEAR
    beyond: float = CHECKED_EVERY + _KILL_WAIT

    def of(self, minutes: int | None) -> float:
        """The most seconds of a run with that time limit (None: none, or an unlimited one)."""
        own = YEAR if minutes is None else minutes * 60
        return min(own, self.most) + self.beyond


@lru_cache(maxsize=4)
def time_limits(text: str, *partitions: str) -> TimeLimits:
    """What a slurm.conf with the files that it includes says of jobs in these partitions. What cannot be understood
    counts as unlimited."""
    most, over = float(YEAR), _over(conf.value(text, "OverTimeLimit"))
    defaults: dict[str, str] = {}
    for record in site_conf.records(text, "PartitionName"):
        if record["partitionname"].lower() == "default":
            defaults |= record
        elif record["partitionname"] in partitions:
            found = {**defaults, **record}
            most = min(most, seconds(found.get("maxtime", "")))
            over = max(over, _over(found.get("overtimelimit", "")))
    wait = conf.value(text, "KillWait")
    return TimeLimits(most, min(YEAR, over + CHECKED_EVERY + (int(wait) if wait.isdigit() else _KILL_WAIT)))


def _over(text: str) -> float:
    """OverTimeLimit in seconds."""
    return YEAR if text.lower() in _UNLIMITED else float(text) * 60 if text.isdigit() else 0.0


def seconds(text: str) -> float:
    """A time as slurm.conf and squeue have it, in seconds: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes, days-hours:minutes:seconds (slurm.conf(5), MaxTime). Any other text is unlimited."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return YEAR
    days, *rest = match.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, secs = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:
        hours, (minutes, secs) = 0, [*numbers, 0][:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs


def minutes_of(text: str) -> int | None:
    """A job's time limit as squeue prints it, in whole minutes; None if it has none."""
    return int(seconds(text)) // 60 if re.match(r"\d", text) else None


def seconds_of(text: str) -> float:
    """A span as sacct shows it: `00:01.234`, `01:02:03` or `4-01:02:03`; 0 if it is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text.strip())
    if match is None:
        return 0.0
    days, hours, minutes = (int(match[place] or 0) for place in (1, 2, 3))
    return ((days * 24 + hours) * 60 + minutes) * 60 + float(match[4])
