"""The way to leased hosts: steps in the jobs of their pilots.

An archive is brought by sbcast(1): the input of a step is half as fast.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Sequence
from pathlib import Path

from multiverse.config import Settings
from multiverse.core.errors import Broken
from multiverse.core.model import LeasedHost
from multiverse.drivers.slurm.leases.lease_jobs import bring_command, dial_command, receive_command, user_of

BROADCAST = 1800.0
"""Seconds that sbcast may take."""


class PilotSteps:
    """`bundles.contract.LeasedTransport`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def dial(self, host: LeasedHost) -> Sequence[str]:
        """See `LeasedTransport`."""
        return dial_command(self._settings, host)

    def receive(self, host: LeasedHost) -> Sequence[str]:
        """See `LeasedTransport`."""
        return receive_command(self._settings, host)

    def bring(self, host: LeasedHost, image: str, archive: Path) -> None:
        """See `LeasedTransport`. As the user of the pilot."""
        os.chown(archive, pwd.getpwnam(user_of(host.lease.user)).pw_uid, -1)
        argv = bring_command(self._settings, host, str(archive), image)
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=BROADCAST, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Broken(f"sbcast of image {image} failed: {error}", hint="it is repeated") from error
        if done.returncode:
            raise Broken(f"sbcast of image {image} failed: {done.stderr.strip()[-300:]}", hint="it is repeated")
