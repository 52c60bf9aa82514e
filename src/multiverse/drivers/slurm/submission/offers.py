"""Idle nodes that a job may take as it is submitted: multiverse.lua takes one by renaming a file.

A directory of the inbox holds empty files for each such node: `open.NODE` while the node is offered, `taken.NODE.UID`
after a submission of that user took it, and `made.NODE` from before the offer until the node is deleted, so that a node
is offered once. Of two processes that rename the same file one succeeds: that one has the node.

The file `list` describes the offered nodes for multiverse.lua. Its first line is the Unix time in seconds until which
the list is valid. The second one is the word `excluded` with the uids of the users whose jobs may take no node. Each
other line holds a node's name, its tag, its image, whether jobs that name no image (1 or 0) and jobs that name no kind
of clone (1 or 0) may take it, CPUs, memory in MiB and disk in MiB. multiverse.lua ignores an expired list, because no
controller would add the job's user to the guest.

The directory belongs to slurmctld's user and this process is root. Therefore only names are read from the directory,
and no symbolic link is followed. The files are few and tiny, so they are read and written on the event loop's thread.
That also keeps the steps of one operation together.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from multiverse.config import Settings
from multiverse.core.errors import Exhausted, Unknown
from multiverse.core.model import SERIAL, CloneKind, NodeSpec, vm_prefix
from multiverse.drivers.slurm.site.bootstrap import may_be_offered
from multiverse.system import files

DIRECTORY = "spares"
_LIST = "list"
_CREATE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class SlurmOffers:
    """`ports.Offers` by the files of an inbox."""

    def __init__(self, settings: Settings, files: OfferFiles) -> None:
        self._settings = settings
        self._files = files

    async def offer(self, node: NodeSpec) -> None:
        """See `ports.Offers`. Nothing is done for a node that cannot make its job wait for the user."""
        if await asyncio.to_thread(may_be_offered, self._settings, node):
            image = self._settings.image
            any_kind = image.kind in (CloneKind.INSTANT, CloneKind.AUTO)
            self._files.offer(node, any_image=node.image == image.default, any_kind=any_kind)

    async def withdraw(self, node: str) -> None:
        """See `ports.Offers`."""
        self._files.withdraw(node)

    async def exclude(self, users: Collection[int]) -> None:
        """See `ports.Offers`."""
        self._files.exclude(users)


class OffersSeen(NamedTuple):
    """The offered nodes (False) and the taken nodes (True), and by which user (uid) nodes were taken."""

    offers: dict[str, bool]
    takers: dict[str, int]


class OfferFiles:
    """The offered nodes of `site` in `inbox`. The list is valid for `term` seconds; `renew` extends that."""

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
        """Offer a node, unless it was offered or withdrawn before.

        `any_image` and `any_kind` offer it also to jobs that name no image and no kind of clone. Raises `Exhausted` if
        the files cannot be written.
        """
        try:
            with self._directory(make=True) as directory:
                size = node.size
                accepts = f"{node.image} {int(any_image)} {int(any_kind)}"
                self._lines[node.name] = f"{node.name} {node.tag} {accepts} {size.cpus} {size.memory} {size.disk}\n"
                if self._first_time(directory, node.name):
                    os.close(os.open(f"open.{node.name}", _CREATE, 0o600, dir_fd=directory))
                    self._write_list(directory, [*self._listed[0], self._lines[node.name]])
                    offers, takers = self._observed or OffersSeen({}, {})
                    self._observed = OffersSeen({**offers, node.name: False}, takers)
        except OSError as error:
            raise self._unwritable(error) from error

    def withdraw(self, node: str) -> None:
        """End an offer that nobody took, and prevent a later one. Raises `Exhausted` if the files cannot be written."""
        try:
            with self._directory(make=True) as directory:
                self._first_time(directory, node)
                _unlink(directory, f"open.{node}")
        except OSError as error:
            raise self._unwritable(error) from error

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
        """Let no job of these users take a node from now on; replaces what was said before. Raises `Exhausted` if the
        list cannot be written; the next list holds it."""
        self._excluded = tuple(sorted(users))
        lines, _ = self._listed
        if not lines:
            return
        try:
            with self._directory() as directory:
                self._write_list(directory, lines)
        except OSError as error:
            raise self._unwritable(error) from error

    def observe(self) -> OffersSeen:
        """The nodes that are offered or taken. If the directory cannot be read, the previous answer; `Unknown` if there
        is none."""
        try:
            with self._directory() as directory:
                names = os.listdir(directory)  # noqa: PTH208 — of the opened directory, even if it was renamed
        except FileNotFoundError:
            names = []
        except OSError as error:
            if self._observed is None:
                raise Unknown(
                    f"cannot read {self._inbox / DIRECTORY}: {error.strerror}", hint="check slurm.inbox in the settings"
                ) from error
            return self._observed
        names.sort()
        offered = [match["node"] for name in names if (match := self._open.fullmatch(name))]
        takers = {match["node"]: int(match["uid"]) for name in names if (match := self._taken.fullmatch(name))}
        self._observed = OffersSeen({**dict.fromkeys(offered, False), **dict.fromkeys(takers, True)}, takers)
        return self._observed

    def renew(self, nodes: Collection[str]) -> None:
        """Write the list of the offered nodes among `nodes`, if the list changed or half of its term has passed.

        `nodes` are the idle nodes that Slurm knows: it refuses a job with the tag of any other node.
        """
        offered = [node for node, taken in self._observed.offers.items() if not taken] if self._observed else []
        lines = [self._lines[node] for node in offered if node in nodes and node in self._lines]
        listed, valid_until = self._listed
        if lines == listed and (not lines or valid_until - time.time() > self._term / 2):
            return
        try:
            with self._directory() as directory:
                self._write_list(directory, lines)
        except OSError:
            return  # the list expires, and then all jobs wait at the gate

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
        try:
            with self._directory() as directory:
                for name in names:
                    _unlink(directory, name)
        except OSError:
            return

    def _unwritable(self, error: OSError) -> Exhausted:
        path = self._inbox / DIRECTORY
        return Exhausted(f"cannot offer spares in {path}: {error.strerror}", hint="check slurm.inbox in the settings")


def _unlink(directory: int, name: str) -> None:
    """Remove a file from the open directory, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
