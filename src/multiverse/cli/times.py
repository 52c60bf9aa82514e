"""Points in time as operators write them: in the formats of Slurm's --begin."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta

from multiverse.core.errors import Refused

_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_LATER = re.compile(r"now(?:\+(\d+)(second|minute|hour|day|week)?s?)?")
_NAMED = {"today": (0, 0), "midnight": (1, 0), "noon": (0, 12), "teatime": (0, 16), "tomorrow": (1, None)}
"""Days from today and the hour; None: the hour that it is now."""


def unix_time(text: str, now: datetime) -> float:
    """Unix time of `text`, read at local time `now`. A time of day means its next occurrence. Raises `Refused`."""
    word = text.strip()
    if found := _LATER.fullmatch(word.lower()):
        count, unit = found.groups()
        return (now + timedelta(seconds=int(count or 0) * _UNITS[unit or "second"])).timestamp()
    if named := _NAMED.get(word.lower()):
        days, hour = named
        moment = now + timedelta(days=days)
        if hour is not None:
            moment = _at(moment, time(hour))
        return (moment + timedelta(days=moment < now and word.lower() != "today")).timestamp()
    try:
        if "-" in word:
            return datetime.fromisoformat(word).timestamp()
        moment = _at(now, time.fromisoformat(word))
        return (moment + timedelta(days=moment < now)).timestamp()
    except ValueError as error:
        hint = "as for sbatch --begin: now+2hours, 18:30, tomorrow, 2026-12-24T18:00"
        raise Refused(f"{text!r} is no time", hint=hint) from error


def _at(day: datetime, moment: time) -> datetime:
    return datetime.combine(day.date(), moment, day.tzinfo)
