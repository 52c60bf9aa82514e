"""Hints from slurmctld: empty files that multiverse.lua and the epilog create in a directory.

A hint makes the controller observe sooner. Nothing else depends on hints: a lost hint costs one poll interval.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from asyncinotify import Inotify, Mask

_NAME = re.compile(r"submit\.(?P<uid>\d{1,10})|(?:end|change)\.(?P<job_id>\d{1,10}(?:_\d{1,10})?)")
_AT_ONCE = 1000  # files that are read in one go; the others are read at the next event
_ARRIVED = Mask.CLOSE_WRITE | Mask.MOVED_TO
_LOST = Mask.DELETE_SELF | Mask.MOVE_SELF


class Hint(NamedTuple):
    """`submit`: a job of the user `uid` was submitted or changed. `end`: the job `job_id` is ending. `change`: what the
    table of jobs does not show of the job or array `job_id` was changed (`details`)."""

    kind: str
    job_id: str = ""
    uid: int | None = None


async def hints(inbox: Path, owner: int | None = None) -> AsyncIterator[Hint]:
    """All hints, beginning with those that exist already; never ends.

    The file of a hint is deleted; files with other names stay. A directory that was removed is created again. `owner`
    is the uid of slurmctld's user, who gets the directory if it is not his; None: it keeps its owner. Raises OSError if
    the directory cannot be created or read.
    """
    if owner is None:
        owner = inbox.stat().st_uid if inbox.exists() else os.geteuid()
    while True:
        if not inbox.exists():
            inbox.mkdir(mode=0o700, parents=True)
        if inbox.stat().st_uid != owner:
            with suppress(PermissionError):  # of a file server; the daemon warns if slurmctld's user cannot write there
                os.chown(inbox, owner, -1)
        with Inotify() as notify:
            notify.add_watch(inbox, _ARRIVED | _LOST)
            for hint in take(inbox):
                yield hint
            async for event in notify:
                if event.mask & (_LOST | Mask.IGNORED):
                    break
                # The first event handles all files that exist by now; the events of the others find none.
                for hint in take(inbox):
                    yield hint


def take(inbox: Path) -> Iterator[Hint]:
    """Delete the files of hints that exist, and return the hints."""
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
            continue  # another process deleted it, or it is a directory
        yield Hint(name.partition(".")[0], match["job_id"] or "", int(match["uid"]) if match["uid"] else None)
