"""The user that slurmctld runs as: SlurmUser of slurm.conf. Guests have to know him, and the inbox is his."""

from __future__ import annotations

import pwd
from functools import lru_cache

from multiverse.core.errors import Unknown
from multiverse.core.model import User
from multiverse.drivers.slurm import conf


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
