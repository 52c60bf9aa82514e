"""What this host was told of the groups of VMs that reach each other: a file, which all processes of the host share.

It is what the controller has told last, of this host's own VMs too, and outlives agents, controllers and their
connections.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path

from multiverse.core.errors import Exhausted
from multiverse.core.model import Member
from multiverse.system import files

_Signature = tuple[int, int, int]


class MemberRecord:
    """The members of one site. Whoever changes them holds the host's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signature: _Signature | None = None  # of the file as it was read last
        self._members: Mapping[str, Member] = {}

    def read(self) -> Mapping[str, Member]:
        """All members, by name. A file that cannot be read says nothing, as after a crash of the machine."""
        found = _signature(self._path)
        if found is None or found != self._signature:
            self._members = _parsed(self._path) if found is not None else {}
            self._signature = found
        return self._members

    def write(self, members: Mapping[str, Member]) -> None:
        """Replace all members. Raises `Exhausted`, and then the old ones stay."""
        try:
            if not members:
                self._path.unlink(missing_ok=True)
            else:
                files.replace(self._path, json.dumps([asdict(one) for one in members.values()]))
        except OSError as error:
            hint = f"is there room in {self._path.parent}?"
            raise Exhausted(f"cannot record which VMs reach each other: {error}", hint=hint) from error
        self._members, self._signature = dict(members), _signature(self._path)


def changed(
    known: Mapping[str, Member], members: Collection[Member], gone: Collection[str], *, whole: bool
) -> dict[str, Member]:
    """The members after a call of `ports.Groups.tell`."""
    left = {} if whole else {name: one for name, one in known.items() if name not in gone}
    return left | {one.name: one for one in members}


def _signature(path: Path) -> _Signature | None:
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size


def _parsed(path: Path) -> dict[str, Member]:
    try:
        return {each["name"]: Member(**each) for each in json.loads(path.read_text())}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
