"""The user that slurmctld runs as: SlurmUser of slurm.conf. Guests have to know the user, and the inbox belongs to it.

Whether the user can write hints is tried: a hint that cannot be written is lost silently.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from functools import lru_cache
from pathlib import Path

from multiverse.core.errors import Unknown
from multiverse.core.model import User
from multiverse.drivers.slurm.site import conf


def of(text: str) -> User:
    """SlurmUser of this slurm.conf, by name or number, with his own group. Blocks while the name service answers.
    `Unknown` if it does not know him, or does not answer."""
    return _lookup(conf.value(text, "SlurmUser", "root"))


@lru_cache(maxsize=8)
def _lookup(name: str) -> User:
    """Kept for this process, because each VM asks; errors are not kept."""
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError as error:
        raise Unknown(
            f"the name service does not know SlurmUser={name}", hint="check getent passwd on the daemon's machine"
        ) from error
    group = (f"gid{entry.pw_gid}", entry.pw_gid)
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_shell or "/bin/sh", (group,))


_SCRIPT = 'for each do test -x "$each" || { printf %s "$each"; exit 1; }; done; test -w "$each" || exit 2'
_TIMEOUT = 10.0  # seconds; a network file system may not answer


def why_not_writable(inbox: Path, user: User) -> str | None:
    """Why this user cannot create files in the inbox; None if the user can. Needs root. Blocks briefly.

    A process of that user tries, so that access lists and network file systems count, too.
    """
    if not inbox.is_dir():
        return f"the directory {inbox} does not exist"
    try:
        tried = subprocess.run(
            ["/bin/sh", "-c", _SCRIPT, "sh", *map(str, reversed(inbox.parents)), str(inbox)],
            user=user.uid,
            group=user.gid,
            extra_groups=os.getgrouplist(user.name, user.gid),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"it cannot be examined as {user.name}: {error}"
    if tried.returncode == 0:
        return None
    if tried.returncode == 1:
        return f"{user.name} cannot pass through {tried.stdout}"
    return f"{user.name} cannot write to {inbox}"
