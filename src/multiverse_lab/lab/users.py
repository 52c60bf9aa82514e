"""Users that exist only for this process and its children, for tests and demonstrations.

They are in an /etc of this mount namespace's own (`own_etc`); the machine's is not changed, and what changes there does
not concern them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from multiverse.core.errors import Broken
from multiverse.system import files, kernel
from multiverse_lab.lab.own_etc import ETC, mount_own_etc

_FILES = ("passwd", "group")
_replaced: dict[tuple[str, str], list[str]] = {}
"""By file and the name of a private user: the lines that its line has replaced."""


class PrivateUser(NamedTuple):
    """A user with a group of the same name and number."""

    name: str
    uid: int
    home: Path


def enter_private_namespace() -> None:
    """Give this process a mount namespace of its own, with an /etc of its own. Its mounts disappear when it and its
    children have ended.

    Needs root, and a process with one thread.
    """
    with _as_root():
        kernel.unshare(kernel.CLONE_NEWNS)
        # Below a shared mount, new mounts would appear in the parent's namespace, too.
        kernel.mount(None, Path("/"), kernel.MS_REC | kernel.MS_PRIVATE)
        mount_own_etc()


def private_users(users: Sequence[tuple[str, int, Path]]) -> list[PrivateUser]:
    """Add users, given as (name, uid, home), to /etc/passwd and /etc/group of this mount namespace, in place of others
    of these names and numbers. The homes are created. Call `enter_private_namespace` first."""
    made = [PrivateUser(name, uid, Path(home)) for name, uid, home in users]
    names, uids = {user.name for user in made}, {str(user.uid) for user in made}
    lines = {
        "passwd": [f"{user.name}:x:{user.uid}:{user.uid}::{user.home}:/bin/sh" for user in made],
        "group": [f"{user.name}:x:{user.uid}:" for user in made],
    }
    for file, added in lines.items():
        before = (ETC / file).read_text().splitlines()
        gone = [line for line in before if _clashes(line, names, uids)]
        for user in made:
            _replaced[file, user.name] = [line for line in gone if _clashes(line, {user.name}, {str(user.uid)})]
        _write(file, [*(line for line in before if line not in gone), *added])
    for user in made:
        user.home.mkdir(parents=True, exist_ok=True)
        user.home.chmod(0o755)
        os.chown(user.home, user.uid, user.uid)
    return made


def remove_private_users(users: Collection[PrivateUser]) -> None:
    """Take users away again, and put back those whom they replaced."""
    names = {user.name for user in users}
    for file in _FILES if users else ():
        kept = [line for line in (ETC / file).read_text().splitlines() if line.partition(":")[0] not in names]
        back = (line for user in users for line in _replaced.pop((file, user.name), []))
        _write(file, [*kept, *dict.fromkeys(back)])


def _write(file: str, lines: Sequence[str]) -> None:
    with _as_root():
        files.replace(ETC / file, "\n".join(lines) + "\n", mode=0o644)


def _clashes(line: str, names: set[str], uids: set[str]) -> bool:
    fields = line.split(":")
    return fields[0] in names or (len(fields) > 2 and fields[2] in uids)


@contextmanager
def _as_root() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Broken(f"{error.filename}: {error.strerror}", hint="this needs root") from error
