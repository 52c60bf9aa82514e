"""What the hosts can hold of one job, in a file that multiverse.lua reads at each submission.

The file lies beside the inbox and is named `INBOX.limits`. Its first line holds the version of the format and the Unix
time in seconds until which the file is valid. Each other line is a number of equal hosts:

- the image, and 1 for the default image or else 0;
- the number of the limit that the line belongs to, and the kinds of clones that this limit is for (`default`: jobs that
  name no kind). A job has to keep one of the limits that are for its kind. All lines of one limit together tell how
  many nodes of a job fit;
- how many hosts;
- the CPUs of all nodes of a host together, and the most of one node;
- the disk in MiB: that of the host, the least that a node takes of it, and what a node takes beside what it asks for;
  and the bandwidth of the host in Mbit/s;
- the most memory in MiB of one node, of each of two nodes, and so on. No node fits if there is none.

The image `*` stands for all images that no line names. Example, of three hosts that could hold two nodes each:

    1 1795254668
    slim 1 1 auto,default,instant,linked 3 2/2 65084/2048/452/0 15395 7555
    slim 1 2 full 3 2/2 65084/16388/0/0 15395 7555
    * 0 1 auto,default,full,instant,linked 3 2/2 65536/2048/0/0 15395 7555

multiverse.lua refuses nothing by a file that is missing, that is no longer valid, or that has another version.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from multiverse.core.errors import Exhausted
from multiverse.core.model import OTHER_IMAGES, JobLimit, JobLimits
from multiverse.system import files

_VERSION = 1
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # a name that cannot break the format


class SubmissionFile:
    """`ports.SubmissionLimits` by a file beside `inbox`. The file is valid for `term` seconds; `renew` extends that."""

    def __init__(self, inbox: Path, term: float) -> None:
        self._path = inbox.with_name(f"{inbox.name}.limits")
        self._term = term
        self._lines: tuple[str, ...] | None = None  # None: this process has published nothing
        self._valid_until = 0.0

    async def publish(self, limits: JobLimits) -> None:
        """See `ports.SubmissionLimits`. Raises `Exhausted` if the file cannot be written; `renew` tries again."""
        self._lines = tuple(_lines(limits))
        self._valid_until = 0.0
        try:
            self._write()
        except OSError as error:
            raise Exhausted(
                f"cannot write {self._path}: {error.strerror}",
                hint="check the directory of slurm.inbox in the settings; too large jobs are not refused at submission",
            ) from error

    def renew(self) -> None:
        """Extend the validity of what was published, if half of the term has passed.

        After an error the file expires, and jobs of any size are accepted.
        """
        if self._lines is None or self._valid_until - time.time() > self._term / 2:
            return
        try:
            self._write()
        except OSError:
            return

    def close(self) -> None:
        """Remove the file: while no daemon runs, the hosts and the settings may change."""
        self._lines = None
        with suppress(OSError):  # it expires all the same
            self._path.unlink()

    def _write(self) -> None:
        assert self._lines is not None, "nothing is written before something was published"
        valid_until = time.time() + self._term
        content = "\n".join([f"{_VERSION} {int(valid_until)}", *self._lines]) + "\n"
        files.replace(self._path, content, mode=0o644)  # slurmctld's user reads it
        self._valid_until = valid_until


def _lines(limits: JobLimits) -> Iterator[str]:
    named = {image: some for image, some in sorted(limits.limits.items()) if _IMAGE.fullmatch(image)}
    # If an image is left out, its jobs must not be measured as those of an unknown image.
    if OTHER_IMAGES in limits.limits and len(named) == len(limits.limits) - 1:
        named[OTHER_IMAGES] = limits.limits[OTHER_IMAGES]
    for image, some in named.items():
        for number, limit in enumerate(some, 1):
            head = f"{image} {int(image == limits.image)} {number} {_kinds(limit, limits)}"
            yield from (f"{head} {hosts}" for hosts in _hosts(limit))


def _kinds(limit: JobLimit, limits: JobLimits) -> str:
    words = [kind.value for kind in limit.kinds] + (["default"] if limits.kind in limit.kinds else [])
    return ",".join(sorted(words))


def _hosts(limit: JobLimit) -> Iterator[str]:
    for hosts in limit.hosts:
        room = f"{hosts.cpus}/{hosts.cpus_of_a_node} {'/'.join(map(str, (hosts.disk, *hosts.cost, hosts.net)))}"
        yield " ".join(map(str, (hosts.count, room, *hosts.memory)))
    if not limit.hosts:
        yield "0 0/0 0/0/0/0"
