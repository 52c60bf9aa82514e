"""The site's programs that slurmd and srun run around jobs, steps and tasks, as guests run them. Pure.

slurm.conf names programs of bare-metal nodes. A guest has some of them: in its image, or on a file system that it
shares with them. slurmd takes its node out of service if a prolog is missing. So a guest's slurm.conf names programs of
our own, which run the site's if they are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from multiverse.core.model import GuestFile
from multiverse.drivers.slurm.site import conf

RUN_IN_GUESTS = ("Prolog", "Epilog", "TaskProlog", "TaskEpilog", "SrunProlog", "SrunEpilog")
"""The keys of slurm.conf whose programs run in guests."""

_WAIT = """\
# A job that took this node as it was submitted waits here until the guest knows the job's user.
read -r _ < {user_added}
"""

_RUN = """\
# Each program that slurm.conf names and that is here.
for program in {patterns}; do
    if [ -f "$program" ] && [ -x "$program" ]; then "$program" "$@" || exit; fi
done
"""


def programs(slurm_conf: str, user_added: str = "") -> Iterator[tuple[str, GuestFile]]:
    """Keys of slurm.conf with the program in the guest to which each is set.

    `user_added` is what to read in the guest's prolog until the guest knows the job's user; empty if there is no need.
    Slurm accepts patterns of file names, and from 24.05 on several lines of one key.
    """
    for key in RUN_IN_GUESTS:
        found = [value.strip('"') for name, value in conf.settings(slurm_conf) if name.lower() == key.lower()]
        patterns = [_quoted(value) for value in dict.fromkeys(found) if value.startswith("/")]
        text = _WAIT.format(user_added=user_added) if user_added and key == "Prolog" else ""
        if patterns:
            text += _RUN.format(patterns=" ".join(patterns))
        if text:
            yield key, GuestFile(f"/etc/slurm/multiverse-{key.lower()}", f"#!/bin/sh\n{text}".encode(), 0o755)


def _quoted(pattern: str) -> str:
    """A pattern of file names for the shell, in which only `*`, `?`, `[` and `]` have a meaning."""
    return re.sub(r"([^\w/.,:+@%*?\[\]-])", r"\\\1", pattern, flags=re.ASCII)
