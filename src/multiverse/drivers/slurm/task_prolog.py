"""The site's TaskProlog, which tasks in VMs run there."""

from __future__ import annotations

import re
import time

from multiverse.core.errors import MultiverseError
from multiverse.drivers.slurm.command import SlurmCommands

_AGE = 60.0  # seconds until Slurm is asked again


class TaskProlog:
    """TaskProlog of slurm.conf, as slurmctld says; asked for at most once a minute."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: str | None = None
        self._asked = -_AGE

    async def path(self) -> str:
        """Its path on this host; empty if there is none. What was known before if Slurm does not answer, and if nothing
        was, raises what the command raised: a task must not run without the site's prolog."""
        if time.monotonic() - self._asked >= _AGE:
            try:
                self._known = task_prolog(await self._commands.run("scontrol", "show", "config"))
                self._asked = time.monotonic()
            except MultiverseError:
                if self._known is None:
                    raise
        return self._known or ""


def task_prolog(shown: str) -> str:
    """TaskProlog in what `scontrol show config` prints; empty if there is none."""
    found = re.search(r"^TaskProlog\s*=\s(.*)$", shown, re.MULTILINE)
    return found[1].strip() if found and found[1].strip() != "(null)" else ""
