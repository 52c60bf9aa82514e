"""The simulated hypervisors and schedulers as bundles, in real time: the daemon runs with them as with any others.

They show that nothing of the daemon depends on QEMU or Slurm. Platform and scheduler of a daemon share a world, which
is named by the daemon's state directory, and lives in the event loop of the daemon's process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from random import Random

from multiverse.bundles.contract import (
    UNKNOWN_WORDS,
    DaemonTask,
    Examination,
    Followed,
    Notice,
    PlatformContext,
    Privacy,
    ReachedNodes,
    Tell,
)
from multiverse.config import Settings
from multiverse.core.errors import Refused
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import LeaseSpec
from multiverse_lab.simulation.cloud import CLOUD_ABILITIES, QUOTA, CloudMachines, SimulatedCloud
from multiverse_lab.simulation.hypervisor import HostLatencies
from multiverse_lab.simulation.world import Pair, SimulatedWorld, WorldSettings

QUICK_CLOUD = HostLatencies(observe=(0.01, 0.05), command=(0.01, 0.05), full=(0.5, 1.0), start=(0.1, 0.3))
"""A cloud that builds a VM within a second."""

_QUOTA = Host(QUOTA, Size(8, 8192, 65536), CLOUD_ABILITIES, template_copies=0, vm_overhead=0)

WORLDS: dict[Path, SimulatedWorld] = {}
"""The worlds of the daemons of this process, by their state directories."""


def world_of(settings: Settings) -> SimulatedWorld:
    """The world of a daemon, which begins when it is first asked for. Raises `Refused` if its platform or its scheduler
    is not simulated."""
    if settings.state_dir not in WORLDS:
        scheduler, platform = (
            name.removeprefix("simulated-") for name in (settings.scheduler, " and ".join(settings.platforms))
        )
        try:
            pair = Pair(f"{scheduler}-{platform}")
        except ValueError as error:
            raise Refused(
                f"{settings.scheduler} and {platform} share no simulated world",
                hint="set one simulated scheduler and one simulated platform",
            ) from error
        hosts = (_QUOTA,) if pair.has_cloud else WorldSettings().hosts
        WORLDS[settings.state_dir] = world = SimulatedWorld(1, WorldSettings(hosts=hosts, pair=pair))
        world.cluster.epoch = time.time() - time.monotonic()
    return WORLDS[settings.state_dir]


class SimulatedPlatform:
    """`bundles.contract.Platform`, of the world's hosts or cloud. Nothing is sampled, and no guest can be asked."""

    measurements = None
    guests = None

    def __init__(self, world: SimulatedWorld) -> None:
        machines = world.machines
        self.hypervisor = (
            SimulatedCloud(machines, Random(1), QUICK_CLOUD)
            if isinstance(machines, CloudMachines)
            else world.hypervisor(Random(1))
        )

    async def follow(self, controller: Followed) -> Sequence[DaemonTask]:
        """See `Platform`."""
        return []

    async def programs(self) -> Counter[str]:
        """See `Platform`."""
        return Counter()


class SimulatedPlatformBundle:
    """`bundles.contract.PlatformBundle`."""

    host = None

    def open(self, context: PlatformContext) -> SimulatedPlatform:
        """See `PlatformBundle`."""
        return SimulatedPlatform(world_of(context.settings))

    def sites(self, settings: Settings) -> Sequence[str]:
        """See `PlatformBundle`."""
        return []

    def examine(self, settings: Settings, *, run_guests: bool) -> Iterator[Examination]:
        """See `PlatformBundle`."""
        yield Examination("simulated machines", skipped="there is nothing to examine")


class SimulatedSystem:
    """`bundles.contract.SchedulerSystem`, with the world's cluster."""

    reports = leased = identities = None
    notices: Sequence[Notice] = ()
    hints_from = ""
    words = UNKNOWN_WORDS

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world
        self.scheduler = world.scheduler(Random(2))

    def lack_of_nodes(self, cpus: int) -> Sequence[Notice]:
        """See `SchedulerSystem`."""
        return ()

    def privacy(self, uid: int) -> Privacy:
        """See `SchedulerSystem`."""
        return Privacy()

    def work(self, tell: Tell) -> Sequence[DaemonTask]:
        """See `SchedulerSystem`. The cluster gives its hints at once."""
        self._world.cluster.hint = lambda uid, job_id: tell(submitted=not job_id, uid=uid, job_id=job_id)
        return []

    def close(self) -> None:
        """See `SchedulerSystem`."""
        self._world.cluster.hint = lambda uid, job_id: None


class SimulatedSchedulerBundle:
    """`bundles.contract.SchedulerBundle`."""

    files = None

    def open(self, settings: Settings, site: str, leased: Collection[LeaseSpec]) -> SimulatedSystem:
        """See `SchedulerBundle`."""
        return SimulatedSystem(world_of(settings))

    def reached(self, settings: Settings) -> ReachedNodes:
        """See `SchedulerBundle`. Raises `Refused`: simulated hosts have no agents that could ask."""
        raise Refused("a simulated scheduler cannot be asked", hint="set agent.self_fence = 0")

    def examine(self, settings: Settings, config: Path, source: Path) -> Iterator[Examination]:
        """See `SchedulerBundle`."""
        yield Examination("simulated scheduler", skipped="there is nothing to examine")


PLATFORM, SCHEDULER = SimulatedPlatformBundle(), SimulatedSchedulerBundle()
