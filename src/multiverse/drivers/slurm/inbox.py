"""Hints from slurmctld: small files that job_submit.lua and the epilog drop into a directory.

A hint makes the controller look sooner, and nothing depends on one: a lost hint costs a poll interval.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from asyncinotify import Inotify, Mask

_NAME = re.compile(r"(?P<kind>submit|end)(?:\.(?P<job_id>\d{1,10}(?:_\d{1,10})?))?")
_AT_ONCE = 1000  # files looked at in one go; what is left over is seen with the next event or look
_ARRIVED = Mask.CLOSE_WRITE | Mask.MOVED_TO
_LOST = Mask.DELETE_SELF | Mask.MOVE_SELF


class Hint(NamedTuple):
    """`kind` is `submit` (a job was submitted or changed) or `end` (it is ending); `job_id` may be empty."""

    kind: str
    job_id: str


async def hints(inbox: Path) -> AsyncIterator[Hint]:
    """Hints for ever, those that wait already first. Consumed files are deleted; files of other names stay.
    If the directory goes away, it is made again. Raises OSError if it cannot be made or read."""
    owner = inbox.stat().st_uid if inbox.exists() else os.geteuid()
    while True:
        if not inbox.exists():
            inbox.mkdir(mode=0o700, parents=True)
            os.chown(inbox, owner, -1)  # slurmctld's user must be able to write to it
        with Inotify() as notify:
            notify.add_watch(inbox, _ARRIVED | _LOST)
            for hint in take(inbox):
                yield hint
            async for event in notify:
                if event.mask & (_LOST | Mask.IGNORED):
                    break
                # One event stands for all files that are there by now; the events of the others find nothing.
                for hint in take(inbox):
                    yield hint


def take(inbox: Path) -> Iterator[Hint]:
    """Read and delete what waits."""
    try:
        with os.scandir(inbox) as entries:
            names = [entry.name for entry in itertools.islice(entries, _AT_ONCE)]
    except FileNotFoundError:
        return
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        try:
            (inbox / name).unlink()
        except OSError:
            continue  # taken by another, or not a file
        yield Hint(match["kind"], match["job_id"] or "")
