"""What operators write: sizes, points in time, and requests as sbatch takes them."""

from __future__ import annotations

import argparse
import re
import shlex
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from multiverse.core.errors import Refused

DEFAULT_CONFIG = Path("/etc/multiverse/multiverse.toml")

Config = Annotated[Path, typer.Option("--config", "-c", help="The settings, a TOML file.")]

_KIB = {"K": 1, "": 1024, "M": 1024, "G": 1024**2, "T": 1024**3}


def mebibytes(text: str) -> int:
    """A size in MiB, rounded up: a number with K, M (the default), G or T, as for sbatch, or as `16GiB`. Raises
    `Refused`."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(?:I?B)?", text.strip().upper(), re.ASCII)
    if match is None:
        raise Refused(f"{text!r} is no size", hint="give a number with a unit: 800M, 8G")
    return -(-int(match[1]) * _KIB[match[2]] // 1024)


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


_HINT = 'as for sbatch: "-N 2 -c 4 --mem=8G -t 1:00:00"; known: -N, -n, -c, --mem, --mem-per-cpu, --tmp, -t, -C'
_KINDS = ("instant", "linked", "full", "auto")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"--for: {message}", hint=_HINT)


def parse_request(text: str) -> dict[str, Any]:
    """The fields of an `api.TrialRequest`. Raises `Refused`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=_count, default=None)
    parser.add_argument("-n", "--ntasks", type=_count, default=None)
    parser.add_argument("-c", "--cpus-per-task", type=_count, default=1)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--mem", type=_size)
    either.add_argument("--mem-per-cpu", type=_size)
    parser.add_argument("--tmp", type=_size, default=0)
    parser.add_argument("-t", "--time", type=time_limit)
    parser.add_argument("-C", "--constraint", default="")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise Refused(f"--for: {error}", hint=_HINT) from error
    found = parser.parse_args(words)
    nodes = found.nodes or 1
    tasks = found.ntasks or nodes
    cpus = found.cpus_per_task * -(-tasks // nodes)
    memory = found.mem if found.mem is not None else (found.mem_per_cpu or 0) * cpus
    if not memory:
        raise Refused("--for: name the memory, with --mem or --mem-per-cpu", hint=_HINT)
    asked: dict[str, Any] = {
        "nodes": nodes, "cpus": cpus, "memory": memory, "disk": found.tmp, "limit": found.time,
    }  # fmt: skip
    for word in filter(None, found.constraint.split("&")):
        asked["kind" if word in _KINDS else "image"] = word
    return asked


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of one or more")
    return int(text)


def _size(text: str) -> int:
    try:
        return mebibytes(text)
    except Refused as error:
        raise argparse.ArgumentTypeError(error.message) from error


def time_limit(text: str) -> float | None:
    """Seconds of a time limit as Slurm takes it: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS; None if unlimited."""
    if text.lower() in ("infinite", "unlimited"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no time limit, as 30, 1:00:00 or 1-12")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, more = [*parts, 0, 0][:3]
    else:
        hours, minutes, more = ([0, *parts, 0] if len(parts) < 3 else parts)[:3]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + more)
