"""Files that pass between the controller and multiverse.lua while jobs are submitted.

Hints come from slurmctld: empty files that multiverse.lua and the epilog create in a directory, the inbox. A hint makes
the controller observe sooner. Nothing else depends on hints: a lost hint costs one poll interval. The controller tells
multiverse.lua the largest sizes of jobs (`SubmissionFile`), and which idle nodes a job may take as it is submitted
(`OfferFiles`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from asyncinotify import Inotify, Mask

from multiverse.config import Settings
from multiverse.core.errors import Exhausted, Unknown
from multiverse.core.model.basics import CloneKind
from multiverse.core.model.host import OTHER_IMAGES, JobLimit, JobLimits
from multiverse.core.model.identity import SERIAL, vm_prefix
from multiverse.core.model.job import NodeSpec
from multiverse.drivers.slurm.site.bootstrap import may_be_offered
from multiverse.system import files

_NAME = re.compile(r"submit\.(?P<uid>\d{1,10})|(?:end|change)\.(?P<job_id>\d{1,10}(?:_\d{1,10})?)")
_AT_ONCE = 1000  # files that are read in one go; the others are read at the next event
_ARRIVED = Mask.CLOSE_WRITE | Mask.MOVED_TO
_LOST = Mask.DELETE_SELF | Mask.MOVE_SELF


class Hint(NamedTuple):
    # `submit`: a job of the user `uid` was submitted or changed. `end`: the job `job_id` is ending. `change`: the job
    # or array `job_id` was changed in a way that the table of jobs does not show (see `reading.jobs`).
    kind: str
    job_id: str = ""
    uid: int | None = None


async def hints(inbox: Path, owner: int | None = None) -> AsyncIterator[Hint]:
    """All hints, beginning with those that exist already; never ends. The file of a hint is deleted; other files stay.
    A directory that was removed is created again. It gets the `owner` (uid): slurmctld's user; None: it keeps its
    owner. Raises OSError if the directory cannot be created or read."""
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


_VERSION = 1
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # a name that cannot break the format


class SubmissionFile:
    """`ports.SubmissionLimits` by a file beside `inbox`, which multiverse.lua reads at each submission. The file is
    valid for `term` seconds; `renew` extends that.

    It is named `INBOX.limits`. Its first line holds the version of the format and the Unix time in seconds until which
    the file is valid. Each other line is a number of equal hosts:

    - the image, and 1 for the default image or else 0;
    - the number of a limit, and the kinds of clones that this limit is for (`default`: jobs that name no kind). A job
      has to keep one of the limits that are for its kind. All lines of one limit together tell how many nodes fit;
    - how many hosts;
    - the CPUs of all nodes of a host together, and the most of one node;
    - disk in MiB: of the host, the least of a node, and the overhead of a node beside its request; and the bandwidth of
      the host in Mbit/s;
    - the most memory in MiB of one node, of each of two nodes, and so on. No node fits if there is none.

    The image `*` stands for all images that no line names. Example, of three hosts that could hold two nodes each:

        1 1795254668
        slim 1 1 auto,default,instant,linked 3 2/2 65084/2048/452/0 15395 7555
        slim 1 2 full 3 2/2 65084/16388/0/0 15395 7555
        * 0 1 auto,default,full,instant,linked 3 2/2 65536/2048/0/0 15395 7555

    multiverse.lua refuses nothing by a file that is missing, that is no longer valid, or that has another version.
    """

    def __init__(self, inbox: Path, term: float) -> None:
        self._path = inbox.with_name(f"{inbox.name}.limits")
        self._term = term
        self._lines: tuple[str, ...] | None = None  # None: this process has published nothing
        self._valid_until = 0.0

    async def publish(self, limits: JobLimits) -> None:
        """Raises `Exhausted` if the file cannot be written; `renew` tries again."""
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
        """Extend the validity of the file, if half of the term has passed. After an error the file expires, and jobs of
        any size are accepted."""
        if self._lines is None or self._valid_until - time.time() > self._term / 2:
            return
        with suppress(OSError):
            self._write()

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
    # If an image is left out, its jobs must not be measured as jobs of an unknown image.
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


DIRECTORY = "spares"
_LIST = "list"
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class SlurmOffers:
    """`ports.Offers` by the files of an inbox."""

    def __init__(self, settings: Settings, files: OfferFiles) -> None:
        self._settings = settings
        self._files = files

    async def offer(self, node: NodeSpec) -> None:
        """Nothing is done for a node that cannot make its job wait for the user."""
        if await asyncio.to_thread(may_be_offered, self._settings, node):
            image = self._settings.image
            any_kind = image.kind in (CloneKind.INSTANT, CloneKind.AUTO)
            self._files.offer(node, any_image=node.image == image.default, any_kind=any_kind)

    async def withdraw(self, node: str) -> None:
        self._files.withdraw(node)

    async def exclude(self, users: Collection[int]) -> None:
        self._files.exclude(users)


class OffersSeen(NamedTuple):
    offers: dict[str, bool]  # by node; True: it was taken
    takers: dict[str, int]  # the user (uid) who took a node


class OfferFiles:
    """The offered nodes of `site` in `inbox`: multiverse.lua takes one by renaming a file.

    A directory of the inbox holds empty files for each such node: `open.NODE` while the node is offered,
    `taken.NODE.UID` after a submission of that user took it, and `made.NODE` from before the offer until the node is
    deleted, so that a node is offered once. Of two processes that rename the same file one succeeds, and has the node.

    The file `list` describes the offered nodes. Its first line is the Unix time in seconds until which the list is
    valid: for `term` seconds; `renew` extends that. The second line is the word `excluded` with the uids of the users
    whose jobs may take no node. Each other line holds a node's name, its tag, its image, whether jobs that name no
    image (1 or 0) and jobs that name no kind of clone (1 or 0) may take it, CPUs, memory in MiB and disk in MiB.
    multiverse.lua ignores an expired list, because no controller would add the job's user to the guest.

    The directory belongs to slurmctld's user and this process is root. Therefore only names are read from the
    directory, and no symbolic link is followed. The files are few and tiny, so they are read and written on the event
    loop's thread, which also keeps the steps of one operation together.
    """

    def __init__(self, inbox: Path, site: str, term: float) -> None:
        self._inbox = inbox
        node = rf"(?P<node>{re.escape(vm_prefix(site))}{SERIAL})"
        self._open = re.compile(rf"open\.{node}")
        self._taken = re.compile(rf"taken\.{node}\.(?P<uid>[0-9]{{1,10}})")
        self._term = term
        self._lines: dict[str, str] = {}  # by node, of those that this process offered
        self._observed: OffersSeen | None = None
        self._excluded: tuple[int, ...] = ()
        self._listed: tuple[list[str], float] = ([], 0.0)  # the lines of nodes, and until when they are valid

    def offer(self, node: NodeSpec, *, any_image: bool, any_kind: bool) -> None:
        """Offer a node, unless it was offered or withdrawn before; with `any_image` and `any_kind` also to jobs that
        name no image and no kind of clone. Raises `Exhausted` if the files cannot be written."""
        with self._writing(make=True) as directory:
            size = node.size
            accepts = f"{node.image} {int(any_image)} {int(any_kind)}"
            self._lines[node.name] = f"{node.name} {node.tag} {accepts} {size.cpus} {size.memory} {size.disk}\n"
            if self._first_time(directory, node.name):
                os.close(os.open(f"open.{node.name}", _CREATE, 0o600, dir_fd=directory))
                self._write_list(directory, [*self._listed[0], self._lines[node.name]])
                offers, takers = self._observed or OffersSeen({}, {})
                self._observed = OffersSeen({**offers, node.name: False}, takers)

    def withdraw(self, node: str) -> None:
        """End an offer that nobody took, and prevent a later one. Raises `Exhausted` if the files cannot be written."""
        with self._writing(make=True) as directory:
            self._first_time(directory, node)
            _unlink(directory, f"open.{node}")

    def withdraw_if_possible(self, node: str) -> None:
        """End an offer that nobody took. Errors are ignored, so that a node can always be set down or deleted."""
        self._remove(f"open.{node}")

    def forget(self, node: str) -> None:
        """Remove all files of a deleted node. Errors are ignored."""
        self._lines.pop(node, None)
        self._remove(f"open.{node}", f"made.{node}")
        with suppress(OSError), self._directory() as directory:
            for name in os.listdir(directory):  # noqa: PTH208 — of the opened directory
                if (match := self._taken.fullmatch(name)) and match["node"] == node:
                    _unlink(directory, name)

    def exclude(self, users: Collection[int]) -> None:
        """Let no job of these users take a node. Raises `Exhausted` if the list cannot be written; the next has it."""
        self._excluded = tuple(sorted(users))
        if lines := self._listed[0]:
            with self._writing() as directory:
                self._write_list(directory, lines)

    def observe(self) -> OffersSeen:
        """The nodes that are offered or taken; the previous answer, or `Unknown`, if the directory cannot be read."""
        try:
            with self._directory() as directory:
                names = os.listdir(directory)  # noqa: PTH208 — of the opened directory, even if it was renamed
        except FileNotFoundError:
            names = []
        except OSError as error:
            if self._observed is None:
                text = f"cannot read {self._inbox / DIRECTORY}: {error.strerror}"
                raise Unknown(text, hint="check slurm.inbox in the settings") from error
            return self._observed
        names.sort()
        offered = [match["node"] for name in names if (match := self._open.fullmatch(name))]
        takers = {match["node"]: int(match["uid"]) for name in names if (match := self._taken.fullmatch(name))}
        self._observed = OffersSeen({**dict.fromkeys(offered, False), **dict.fromkeys(takers, True)}, takers)
        return self._observed

    def renew(self, nodes: Collection[str]) -> None:
        """Write the list of offered nodes, if it has changed or half of its term has passed. `nodes` are the idle nodes
        that Slurm knows: it refuses a job with the tag of any other node."""
        offered = [node for node, taken in self._observed.offers.items() if not taken] if self._observed else []
        lines = [self._lines[node] for node in offered if node in nodes and node in self._lines]
        listed, valid_until = self._listed
        if lines == listed and (not lines or valid_until - time.time() > self._term / 2):
            return
        with suppress(OSError), self._directory() as directory:  # or the list expires, and all jobs wait at the gate
            self._write_list(directory, lines)

    def close(self) -> None:
        """Remove the list: without a controller nobody adds users to guests, so all jobs have to wait at the gate."""
        self._remove(_LIST)

    @contextmanager
    def _directory(self, *, make: bool = False) -> Iterator[int]:
        """The opened directory, which belongs to the owner of the inbox: slurmctld's user."""
        path = self._inbox / DIRECTORY
        if make and not path.exists():
            path.mkdir(mode=0o700)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            owner = self._inbox.stat()
            if make and os.fstat(directory).st_uid != owner.st_uid:
                os.fchown(directory, owner.st_uid, owner.st_gid)
            yield directory
        finally:
            os.close(directory)

    @contextmanager
    def _writing(self, *, make: bool = False) -> Iterator[int]:
        """The same. Raises `Exhausted` if a file there cannot be written."""
        try:
            with self._directory(make=make) as directory:
                yield directory
        except OSError as error:
            text = f"cannot offer spares in {self._inbox / DIRECTORY}: {error.strerror}"
            raise Exhausted(text, hint="check slurm.inbox in the settings") from error

    def _first_time(self, directory: int, node: str) -> bool:
        """Record that this node was offered or withdrawn; False if that had been recorded before."""
        try:
            os.close(os.open(f"made.{node}", _CREATE, 0o600, dir_fd=directory))
        except FileExistsError:
            return False
        return True

    def _write_list(self, directory: int, lines: list[str]) -> None:
        valid_until = time.time() + self._term
        excluded = " ".join(["excluded", *map(str, self._excluded)])
        content = "".join([f"{int(valid_until)}\n{excluded}\n", *lines])
        files.replace(Path(_LIST), content, mode=0o644, dir_fd=directory)  # slurmctld's user reads it
        self._listed = (lines, valid_until)

    def _remove(self, *names: str) -> None:
        with suppress(OSError), self._directory() as directory:
            for name in names:
                _unlink(directory, name)


def _unlink(directory: int, name: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
