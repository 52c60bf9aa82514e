"""Whether slurmctld's user can write hints. Nothing else would tell: a hint that cannot be written is lost silently."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from multiverse.core.model import User

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
