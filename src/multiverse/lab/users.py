"""Users that exist only for this process and its children, for tests and demonstrations. /etc is not changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from multiverse.core.errors import Broken
from multiverse.system import kernel


class PrivateUser(NamedTuple):
    """A user with a group of the same name and number."""

    name: str
    uid: int
    home: Path


def enter_private_namespace() -> None:
    """Give this process a mount namespace of its own. Its mounts disappear when it and its children have ended.

    Needs root, and a process with one thread.
    """
    with _as_root():
        kernel.unshare(kernel.CLONE_NEWNS)
        # Below a shared mount, new mounts would appear in the parent's namespace, too.
        kernel.mount(None, Path("/"), kernel.MS_REC | kernel.MS_PRIVATE)


def private_users(directory: Path, users: Sequence[tuple[str, int, Path]]) -> list[PrivateUser]:
    """Add users, given as (name, uid, home), to /etc/passwd and /etc/group in this mount namespace.

    Extended copies of both files are kept in `directory` and mounted over them. The homes are created. Call
    `enter_private_namespace` first.
    """
    made = [PrivateUser(name, uid, Path(home)) for name, uid, home in users]
    names, uids = {user.name for user in made}, {str(user.uid) for user in made}
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    lines = {
        "passwd": [f"{user.name}:x:{user.uid}:{user.uid}::{user.home}:/bin/sh" for user in made],
        "group": [f"{user.name}:x:{user.uid}:" for user in made],
    }
    for file, added in lines.items():
        known = [line for line in Path("/etc", file).read_text().splitlines() if not _clashes(line, names, uids)]
        copy = directory / file
        copy.write_text("\n".join([*known, *added]) + "\n")
        copy.chmod(0o644)
        with _as_root():
            kernel.mount(str(copy), Path("/etc", file), kernel.MS_BIND)
    for user in made:
        user.home.mkdir(parents=True, exist_ok=True)
        user.home.chmod(0o755)
        os.chown(user.home, user.uid, user.uid)
    return made


def _clashes(line: str, names: set[str], uids: set[str]) -> bool:
    fields = line.split(":")
    return fields[0] in names or (len(fields) > 2 and fields[2] in uids)


@contextmanager
def _as_root() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Broken(f"{error.filename}: {error.strerror}", hint="this needs root") from error
