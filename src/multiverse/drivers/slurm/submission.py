"""The sizes of the largest jobs that hosts can hold, in a file that multiverse.lua reads at each submission.

The file lies beside the inbox and is named `INBOX.limits`. Its first line holds the version of the format and the Unix
time in seconds until which the file is valid. Each other line holds one size: the image, 1 for the default image or
else 0, CPUs, memory in MiB, disk in MiB (0: not limited). Example:

    1 1795254668
    slim 1 8 15395 65536

multiverse.lua refuses nothing by a file that is missing, that is no longer valid, or that has another version.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from multiverse.core.errors import Exhausted
from multiverse.core.model import Size
from multiverse.system import files

_VERSION = 1
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # a name that cannot break the format


class SubmissionFile:
    """`ports.SubmissionLimits` by a file beside `inbox`. The file is valid for `term` seconds; `renew` extends that."""

    def __init__(self, inbox: Path, default_image: str, term: float) -> None:
        self._path = inbox.with_name(f"{inbox.name}.limits")
        self._default_image = default_image
        self._term = term
        self._lines: tuple[str, ...] | None = None  # None: this process has published nothing
        self._valid_until = 0.0

    async def publish(self, largest: Mapping[str, Sequence[Size]]) -> None:
        """See `ports.SubmissionLimits`. Raises `Exhausted` if the file cannot be written; `renew` tries again."""
        self._lines = tuple(self._format(largest))
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

    def _format(self, largest: Mapping[str, Sequence[Size]]) -> Iterator[str]:
        for image, sizes in sorted(largest.items()):
            if not _IMAGE.fullmatch(image):
                continue
            # A size of zero holds no job. The largest one comes first in messages.
            usable = [size for size in sizes if size.cpus > 0 and size.memory > 0]
            for size in sorted(usable, key=lambda size: (size.memory, size.cpus), reverse=True):
                yield f"{image} {int(image == self._default_image)} {size.cpus} {size.memory} {size.disk}"

    def _write(self) -> None:
        assert self._lines is not None, "nothing is written before something was published"
        valid_until = time.time() + self._term
        content = "\n".join([f"{_VERSION} {int(valid_until)}", *self._lines]) + "\n"
        files.replace(self._path, content, mode=0o644)  # slurmctld's user reads it
        self._valid_until = valid_until
