"""What the hosts can hold of one job, in a file that multiverse.lua reads at each submission.

The file lies beside the inbox and is named `INBOX.limits`. Its first line holds the version of the format and the Unix
time in seconds until which the file is valid. Each other line begins with the image and 1 for the default image or
else 0. Lines of two forms follow that. The first form is the size of a largest node: CPUs, memory in MiB, disk in MiB
(0: not limited); the previous release reads only these lines. The second form is a number of equal hosts:

- the number of the limit that the line belongs to, and the kinds of clones that this limit is for (`default`: jobs that
  name no kind). A job has to keep one of the limits that are for its kind;
- how many hosts, and for each of them CPUs, disk, and the most memory in MiB of one node, of each of two nodes, and
  so on. Where CPUs are over-committed, the CPUs are two figures, separated by a slash: those of all nodes together,
  and the most of one node; the file then has version 2. The disk is three figures in MiB, separated by slashes:
  that of the host, the least that a node takes of it, and what a node takes beside what it asks for. A fourth figure is
  the bandwidth of the host in Mbit/s, if it has any; the file then has version 3. All lines of one limit together tell
  how many nodes of a job fit. All zero: no node fits.

The image `*` stands for all images that no line names. Example, of three hosts that could hold two nodes each:

    1 1795254668
    slim 1 2 15395 65084
    slim 1 1 auto,default,instant,linked 3 2 65084/2048/452 15395 7555
    slim 1 2 full 3 2 65084/16388/0 15395 7555
    * 0 1 auto,default,full,instant,linked 3 2 65536/2048/0 15395 7555

multiverse.lua refuses nothing by a file that is missing, that is no longer valid, or that has another version. That of
the previous release does not know version 3.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from multiverse.core.errors import Exhausted
from multiverse.core.model import OTHER_IMAGES, JobLimit, JobLimits, Size
from multiverse.system import files

_VERSION, _WITH_NODE_CPUS, _WITH_NET = 1, 2, 3
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # a name that cannot break the format


class SubmissionFile:
    """`ports.SubmissionLimits` by a file beside `inbox`. The file is valid for `term` seconds; `renew` extends that."""

    def __init__(self, inbox: Path, term: float) -> None:
        self._path = inbox.with_name(f"{inbox.name}.limits")
        self._term = term
        self._lines: tuple[str, ...] | None = None  # None: this process has published nothing
        self._version = _VERSION
        self._valid_until = 0.0

    async def publish(self, limits: JobLimits) -> None:
        """See `ports.SubmissionLimits`. Raises `Exhausted` if the file cannot be written; `renew` tries again."""
        self._lines = tuple(_lines(limits))
        every = {hosts for some in limits.limits.values() for limit in some for hosts in limit.hosts}
        self._version = _WITH_NODE_CPUS if any(one.cpus_of_a_node != one.cpus for one in every) else _VERSION
        if any(one.net for one in every):
            self._version = _WITH_NET
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
        content = "\n".join([f"{self._version} {int(valid_until)}", *self._lines]) + "\n"
        files.replace(self._path, content, mode=0o644)  # slurmctld's user reads it
        self._valid_until = valid_until


def _lines(limits: JobLimits) -> Iterator[str]:
    """The sizes come first: the previous release reads only the first 64 KiB."""
    named = [image for image in sorted(limits.largest) if _IMAGE.fullmatch(image)]
    for image in named:
        yield from (f"{image} {int(image == limits.image)} {size}" for size in _sizes(limits.largest[image]))
    # If an image is left out, its jobs must not be measured as those of an unknown image.
    others = [OTHER_IMAGES] if OTHER_IMAGES in limits.limits and len(named) == len(limits.largest) else []
    for image in (*named, *others):
        for number, limit in enumerate(limits.limits.get(image, ()), 1):
            head = f"{image} {int(image == limits.image)} {number} {_kinds(limit, limits)}"
            yield from (f"{head} {hosts}" for hosts in _hosts(limit))


def _sizes(sizes: Sequence[Size]) -> Iterator[str]:
    # A size of zero holds no job. The largest one comes first in messages.
    usable = [size for size in sizes if size.cpus > 0 and size.memory > 0]
    for size in sorted(usable, key=lambda size: (size.memory, size.cpus), reverse=True):
        yield f"{size.cpus} {size.memory} {size.disk}"


def _kinds(limit: JobLimit, limits: JobLimits) -> str:
    words = [kind.value for kind in limit.kinds] + (["default"] if limits.kind in limit.kinds else [])
    return ",".join(sorted(words))


def _hosts(limit: JobLimit) -> Iterator[str]:
    for hosts in limit.hosts:
        disk = "/".join(map(str, (hosts.disk, *hosts.cost, *([hosts.net] if hosts.net else []))))
        cpus = f"{hosts.cpus}" if hosts.cpus_of_a_node == hosts.cpus else f"{hosts.cpus}/{hosts.cpus_of_a_node}"
        yield " ".join(map(str, (hosts.count, cpus, disk, *hosts.memory)))
    if not limit.hosts:
        yield "0 0 0/0/0"
