"""A request as sbatch takes it, in one string: "-N 2 -c 4 --mem=8G -t 1:00:00"."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any, NoReturn

from multiverse.cli.sizes import mebibytes
from multiverse.core.errors import Refused

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
    parser.add_argument("-t", "--time", type=seconds)
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


def seconds(text: str) -> float | None:
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
