"""Joined spares on offer: job_submit.lua takes one for a job that fits, by renaming a file.

Of each spare there is, in a directory of the inbox, an empty file: `open.NODE` while it is on offer, `taken.NODE` after
a submission took it. To rename is to take: of two who try one succeeds. `made.NODE` is there from before the offer to
the node's end, so that it is offered once. What is on offer Lua reads in `list`, whose first line is until when it
holds, as Unix time in seconds: what is older is not heeded, for then nobody is there to introduce users.

The directory is slurmctld's user's, and we are root: nothing in it is believed but names, and no link is followed. The
files are few and tiny, and are touched on the loop's thread: nothing of ours comes between two steps.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from multiverse.core.errors import Exhausted, Unknown
from multiverse.core.model import NodeSpec

DIRECTORY = "spares"
_LIST = "list"
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class OfferFiles:
    """The spares of `site` on offer in `inbox`; `term` is how many seconds the list holds."""

    def __init__(self, inbox: Path, site: str, term: float) -> None:
        self._inbox = inbox
        self._name = re.compile(rf"(open|taken)\.(mv{re.escape(site)}-\d{{1,18}})")
        self._term = term
        self._lines: dict[str, str] = {}  # what a spare is, in words for Lua; those offered in this process's life
        self._last: dict[str, bool] | None = None
        self._listed: tuple[list[str], float] = ([], 0.0)

    def offer(self, node: NodeSpec, *, any_image: bool, any_kind: bool) -> None:
        """Offer a spare, unless it was offered or withdrawn before. `any_image`, `any_kind`: also to jobs that name
        none. `Exhausted` if that cannot be written."""
        try:
            with self._directory(make=True) as directory:
                told = node.size
                wants = f"{node.image} {int(any_image)} {int(any_kind)}"
                self._lines[node.name] = f"{node.name} {node.tag} {wants} {told.cpus} {told.memory} {told.disk}\n"
                if self._once(directory, node.name):
                    os.close(os.open(f"open.{node.name}", _NEW, 0o600, dir_fd=directory))
                    self._write(directory, [*self._listed[0], self._lines[node.name]])
                    self._last = {**(self._last or {}), node.name: False}
        except OSError as error:
            raise self._unwritable(error) from error

    def withdraw(self, node: str) -> None:
        """End an offer that was not taken, or may yet be made. `Exhausted` if that cannot be written."""
        try:
            with self._directory(make=True) as directory:
                self._once(directory, node)
                _unlink(directory, f"open.{node}")
        except OSError as error:
            raise self._unwritable(error) from error

    def close_to(self, node: str) -> None:
        """Withdraw as far as can be: what becomes of a node on its way out does not hang on this directory."""
        self._remove(f"open.{node}")

    def forget(self, node: str) -> None:
        """Remove all that is left of this node's offer."""
        self._lines.pop(node, None)
        self._remove(f"open.{node}", f"taken.{node}", f"made.{node}")

    def observe(self) -> dict[str, bool]:
        """The nodes on offer, and those that were taken: True. `Unknown` if that cannot be seen, nor ever was."""
        try:
            with self._directory() as directory:
                names = os.listdir(directory)  # noqa: PTH208 — of the directory that was opened, whatever its name is now
        except FileNotFoundError:
            names = []
        except OSError as error:
            if self._last is None:
                raise Unknown(
                    f"cannot read {self._inbox / DIRECTORY}: {error.strerror}", hint="see slurm.inbox"
                ) from error
            return self._last
        matches = [match for name in sorted(names) if (match := self._name.fullmatch(name))]
        found = {match[2]: False for match in matches if match[1] == "open"}
        found |= {match[2]: True for match in matches if match[1] == "taken"}
        self._last = found
        return found

    def keep(self, nodes: Collection[str]) -> None:
        """List, for another term, what is on offer of these nodes: the scheduler must know a node that is taken."""
        lines = [self._lines[node] for node, taken in (self._last or {}).items()
                 if not taken and node in nodes and node in self._lines]  # fmt: skip
        listed, until = self._listed
        if lines == listed and (not lines or until - time.time() > self._term / 2):
            return
        try:
            with self._directory() as directory:
                self._write(directory, lines)
        except OSError:
            return  # it grows old, and then jobs wait at the gate

    def close(self) -> None:
        """Nobody is there any more to introduce users: jobs that come go to the gate."""
        self._remove(_LIST)

    @contextmanager
    def _directory(self, *, make: bool = False) -> Iterator[int]:
        """Opened, and slurmctld's user's as the inbox is: that writes there."""
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

    def _once(self, directory: int, node: str) -> bool:
        """Whether nobody has said this before."""
        try:
            os.close(os.open(f"made.{node}", _NEW, 0o600, dir_fd=directory))
        except FileExistsError:
            return False
        return True

    def _write(self, directory: int, lines: list[str]) -> None:
        until = time.time() + self._term
        _unlink(directory, f".{_LIST}.new")
        with os.fdopen(os.open(f".{_LIST}.new", _NEW, 0o644, dir_fd=directory), "w") as fresh:
            fresh.write("".join([f"{int(until)}\n", *lines]))
            os.fchmod(fresh.fileno(), 0o644)  # whatever our umask
        os.rename(f".{_LIST}.new", _LIST, src_dir_fd=directory, dst_dir_fd=directory)
        self._listed = (lines, until)

    def _remove(self, *names: str) -> None:
        try:
            with self._directory() as directory:
                for name in names:
                    _unlink(directory, name)
        except OSError:
            return

    def _unwritable(self, error: OSError) -> Exhausted:
        place = self._inbox / DIRECTORY
        return Exhausted(f"cannot offer spares in {place}: {error.strerror}", hint="see slurm.inbox in the settings")


def _unlink(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
