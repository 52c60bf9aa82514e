"""Slurm, as the daemon, agents and the commands of a site use it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Collection, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

from multiverse.bundles.contract import DaemonTask, Examination, Notice, Privacy, Tell
from multiverse.bundles.slurm import examine
from multiverse.bundles.slurm.credentials import Credentials
from multiverse.bundles.slurm.inbox_access import warn_of_closed_inbox
from multiverse.bundles.slurm.leased import PilotSteps
from multiverse.bundles.slurm.slurm_conf import NodeCount, PrivateData
from multiverse.bundles.slurm.words import SlurmWords
from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.core.model import LeaseSpec
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.driver import SlurmScheduler
from multiverse.drivers.slurm.reading.nodes import reached_nodes
from multiverse.drivers.slurm.site import site_conf
from multiverse.drivers.slurm.site.bootstrap import slurm_uid
from multiverse.drivers.slurm.site.site_conf import munge_socket
from multiverse.drivers.slurm.submission.inbox import Hint, hints, take
from multiverse.ports.site import Finding
from multiverse.site import checking, rendering
from multiverse.system.rendered import SiteFile

NAME_SERVICE_TIMEOUT = 10.0
"""Seconds that the daemon waits, once it has started, to learn who slurmctld's user is."""


class SlurmSystem:
    """`bundles.contract.SchedulerSystem`."""

    words = SlurmWords()

    def __init__(self, settings: Settings, site: str, leased: Collection[LeaseSpec]) -> None:
        """Raises `Refused` if the site's Slurm is not set up for us."""
        self._settings = settings
        _make_passable(settings.slurm.inbox.parent)
        self.scheduler = SlurmScheduler(settings, site, leased=leased)
        self.scheduler.check_leases()
        self.scheduler.check_overflow()
        self.leased = PilotSteps(settings)
        self._node_count, self._private = NodeCount(settings.slurm.conf), PrivateData(settings.slurm.conf)

    @property
    def reports(self) -> SlurmScheduler:
        """See `SchedulerSystem`."""
        return self.scheduler

    @cached_property
    def identities(self) -> Credentials:
        """See `SchedulerSystem`: munge credentials."""
        return Credentials(munge_socket(self._settings.slurm.conf))

    @cached_property
    def notices(self) -> Sequence[Notice]:
        """See `SchedulerSystem`."""
        return [Notice("unserved", *each) for each in self.scheduler.unserved()]

    @property
    def hints_from(self) -> str:
        """See `SchedulerSystem`."""
        return str(self._settings.slurm.inbox)

    def lack_of_nodes(self, cpus: int) -> Sequence[Notice]:
        """See `SchedulerSystem`."""
        return self._node_count.lack(cpus)

    def privacy(self, uid: int) -> Privacy:
        """See `SchedulerSystem`: by PrivateData, which is the same for all users."""
        return self._private.privacy()

    def work(self, tell: Tell) -> Sequence[DaemonTask]:
        """See `SchedulerSystem`."""
        return [
            DaemonTask("inbox", partial(_forward_hints, self._settings, tell)),
            DaemonTask("shared inbox", partial(_poll_inbox, self._settings, tell)),
            DaemonTask("access to the inbox", partial(warn_of_closed_inbox, self._settings)),
        ]

    def close(self) -> None:
        """See `SchedulerSystem`."""
        self.scheduler.close()


def _make_passable(directory: Path) -> None:
    """Make a directory through which slurmctld's user passes to what is theirs. Raises `Refused`."""
    try:
        for path in reversed((directory, *directory.parents)):
            if not path.exists():
                path.mkdir()
                path.chmod(0o755)  # whatever the umask is
    except OSError as error:
        raise Refused(
            f"cannot use {error.filename}: {error.strerror}",
            hint="run the daemon as root, or see slurm.inbox in its settings",
        ) from error


async def _forward_hints(settings: Settings, tell: Tell) -> None:
    owner = None  # as it is now
    with contextlib.suppress(TimeoutError):  # of a name service that does not answer
        owner = await asyncio.wait_for(asyncio.to_thread(slurm_uid, settings), NAME_SERVICE_TIMEOUT)
    async for hint in hints(settings.slurm.inbox, owner):
        _tell(hint, tell)


async def _poll_inbox(settings: Settings, tell: Tell) -> None:
    """Hints that another machine wrote into a shared directory: inotify does not report these."""
    while True:
        await asyncio.sleep(settings.poll)
        for hint in await asyncio.to_thread(lambda: list(take(settings.slurm.inbox))):
            _tell(hint, tell)


def _tell(hint: Hint, tell: Tell) -> None:
    tell(submitted=hint.kind == "submit", uid=hint.uid, job_id=hint.job_id)


class SlurmFiles:
    """`bundles.contract.SiteFiles`, beside slurm.conf and for systemd."""

    def render(self, settings: Settings, config: Path, source: Path) -> list[SiteFile]:
        """See `SiteFiles`."""
        site = site_conf.read(source)
        return rendering.render(settings, config, site)

    def check(self, settings: Settings, config: Path, source: Path) -> list[Finding]:
        """See `SiteFiles`."""
        return checking.check(settings, config, source)


class SlurmReach:
    """`bundles.contract.ReachedNodes`, by Slurm's commands on this machine."""

    def __init__(self, settings: Settings) -> None:
        self._commands = SlurmCommands(settings.slurm)

    async def check(self) -> None:
        """See `ReachedNodes`."""
        await self._commands.run("scontrol", "--version")

    def of(self, site: str) -> Awaitable[Collection[str]]:
        """See `ReachedNodes`."""
        return reached_nodes(self._commands, site)


class SlurmBundle:
    """`bundles.contract.SchedulerBundle`."""

    files = SlurmFiles()

    def open(self, settings: Settings, site: str, leased: Collection[LeaseSpec]) -> SlurmSystem:
        """See `SchedulerBundle`."""
        return SlurmSystem(settings, site, leased)

    def reached(self, settings: Settings) -> SlurmReach:
        """See `SchedulerBundle`."""
        return SlurmReach(settings)

    def examine(self, settings: Settings, config: Path, source: Path) -> Iterator[Examination]:
        """See `SchedulerBundle`."""
        return examine.examine(settings, config, source)


SLURM = SlurmBundle()
