"""The simulated world: a cluster, hosts, VMs and guests. It checks what the controller does to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise
from random import Random

from multiverse.config import ImageSettings
from multiverse.core.errors import Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import Host
from multiverse.core.model.identity import Identity, User
from multiverse.core.model.job import JobState
from multiverse.ports import Hypervisor, Scheduler
from multiverse_lab.simulation.cloud import CloudMachines, SimulatedCloud
from multiverse_lab.simulation.cluster import Cluster, ClusterSettings
from multiverse_lab.simulation.grid import GridCluster, SimulatedGrid
from multiverse_lab.simulation.guests import Guest, GuestBehaviour, Registration, Run
from multiverse_lab.simulation.hypervisor import ClonePace, HostLatencies, PacedHosts, SimulatedHosts
from multiverse_lab.simulation.jobs import NodeRecord
from multiverse_lab.simulation.machines import ABILITIES, Machines, SimulatedImage
from multiverse_lab.simulation.network import AgentBehaviour
from multiverse_lab.simulation.pilots import PhysicalNodes, Pilots
from multiverse_lab.simulation.scheduler import CommandLatencies, SimulatedSlurm
from multiverse_lab.simulation.sites import SimulatedSite
from multiverse_lab.simulation.tables import Forgotten


class Pair(StrEnum):
    """Which scheduler and which hypervisor a world has."""

    SLURM_HOSTS = "slurm-hosts"
    GRID_HOSTS = "grid-hosts"
    SLURM_CLOUD = "slurm-cloud"
    GRID_CLOUD = "grid-cloud"

    @property
    def has_grid(self) -> bool:
        return self in (Pair.GRID_HOSTS, Pair.GRID_CLOUD)

    @property
    def has_cloud(self) -> bool:
        return self in (Pair.SLURM_CLOUD, Pair.GRID_CLOUD)


@dataclass(frozen=True)
class WorldSettings:
    """What exists. `users` are the uids that the site knows. With `overcommit` above 1, hosts may carry that many times
    the memory that they declare; then their machines must keep `floor` MiB available beside the `others` MiB that
    processes of others hold on each of them."""

    hosts: tuple[Host, ...] = (Host("h1", Size(8, 8192, 65536), ABILITIES, Size(2, 4096, 65536), "tcg"),)
    images: tuple[SimulatedImage, ...] = (
        SimulatedImage("slim"),
        SimulatedImage("stiff", abilities=frozenset({"fork"})),
        SimulatedImage("dud", boots=False),
    )
    users: tuple[int, ...] = (1000, 1001)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    guests: GuestBehaviour = field(default_factory=GuestBehaviour)
    overcommit: float = 1.0
    floor: int = 0
    others: int = 0
    pair: Pair = Pair.SLURM_HOSTS
    agents: AgentBehaviour | None = None  # through which hosts are reached, over streams of bytes
    physical: PhysicalNodes = field(default_factory=PhysicalNodes)  # that may be leased
    overflowing: int = 0  # physical nodes of the partition that overflows into VMs
    slow_sources: Mapping[str, float] = field(default_factory=dict)  # seconds that their observations take longer
    links_cut: float = 0.0  # the share of messages between hosts that are lost
    guests_of: Mapping[CloneKind, GuestBehaviour] = field(default_factory=dict)  # of kinds that behave otherwise
    latencies: HostLatencies | None = None  # None: as measured here
    paces: Mapping[CloneKind, ClonePace] = field(default_factory=dict)
    commands: CommandLatencies | None = None  # of the scheduler; None: as measured here
    pass_takes: float = 0.0  # virtual seconds that a pass of the controller takes, in `simulation.workload`
    threads: float = 0.0  # that compute at full speed on each CPU of a host; 0: any number
    remembers: bool = True  # what is over, for the checks at the end


class SimulatedWorld:
    """Created inside a running virtual loop. It outlives the crashes of the controller."""

    def __init__(self, seed: int, settings: WorldSettings | None = None) -> None:
        self.settings = settings or WorldSettings()
        self.runs: list[Run] = []
        self.guests: list[Guest] = []
        self.silent_name_services = 0  # how many outages of it go on at the moment
        self.log: Callable[[str], None] = lambda _: None
        self._rng = Random(f"{seed}/guests")
        pair = self.settings.pair
        cluster = GridCluster if pair.has_grid else Cluster
        self.cluster = cluster(Random(f"{seed}/cluster"), self.settings.cluster)
        if not self.settings.remembers:
            self.runs, self.guests, self.cluster.history, self.cluster.ledger.every = (Forgotten() for _ in range(4))
        limits = (self.settings.overcommit, self.settings.floor, self.settings.others)
        machines = CloudMachines if pair.has_cloud else Machines
        self.machines = machines(self.settings.hosts, self.settings.images, self._boot, *limits)
        if not self.settings.remembers:
            self.machines.created = Forgotten()
        self.machines.delays.update(self.settings.slow_sources)
        self.machines.links_cut = self.settings.links_cut
        self.cluster.host_of = self.machines.host_of
        self.static = tuple(self.machines.hosts)
        for number in range(self.settings.overflowing):
            self._add_physical(f"p{number + 1}")
        self.pilots = Pilots(self.machines, self.settings.physical, Random(f"{seed}/pilots"))
        self.pilots.log = lambda text: self.log(text)
        local = SimulatedHosts(self.machines, Random(f"{seed}/agents")) if self.settings.agents else None
        behaviour = self.settings.agents
        self.site = SimulatedSite(self.machines, self.cluster, seed, lambda text: self.log(text), local, behaviour)

    def scheduler(self, rng: Random, image: ImageSettings | None = None) -> Scheduler:
        """The port of this world's scheduler."""
        if isinstance(self.cluster, GridCluster):
            return SimulatedGrid(self.cluster, self.user, rng)
        pilots = self.pilots if self.settings.physical.count else None
        slurm = SimulatedSlurm(self.cluster, self.user, rng, self.settings.commands, image=image, pilots=pilots)
        slurm.exact = not self.settings.remembers
        return slurm

    def hypervisor(self, rng: Random) -> Hypervisor:
        """The port of this world's hypervisor."""
        if isinstance(self.machines, CloudMachines):
            return SimulatedCloud(self.machines, rng)
        settings = self.settings
        paced = PacedHosts if settings.paces else SimulatedHosts
        hosts = paced(self.machines, rng, settings.latencies, scheduler_answers=lambda: self.cluster.up)
        if isinstance(hosts, PacedHosts):
            hosts.pace_by(settings.paces)
        return hosts

    def user(self, uid: int) -> User | None:
        """The user, or None if there is none. Raises `Unknown` while the name service is silent."""
        if self.silent_name_services:
            raise Unknown(f"nobody says who uid {uid} is", hint="see whether the name service runs")
        if uid not in self.settings.users:
            return None
        return User(f"u{uid}", uid, uid, f"/home/u{uid}", "/bin/sh", ((f"u{uid}", uid),))

    def kill_vm(self, name: str, reason: str = "its process was killed") -> None:
        self.machines.die(name, reason)

    def host(self, pick: float) -> str:
        names = sorted(self.static)
        return names[int(pick * len(names))]

    def vm(self, pick: float) -> str | None:
        """One of the existing VMs, chosen by a number from 0 to 1."""
        names = sorted(self.machines.vms)
        return names[int(pick * len(names))] if names else None

    def guest(self, pick: float) -> Guest | None:
        """One of all guests that ever existed, chosen by a number from 0 to 1; recent ones are more likely."""
        return self.guests[-1 - int(pick * pick * len(self.guests))] if self.guests else None

    # --- checks

    def unfinished(self) -> list[str]:
        """Jobs that have not ended, each with its state."""
        return [f"job {job.job_id} is {job.state}" for job in self.cluster.history if job.state is not JobState.ENDED]

    def leftovers(self) -> list[str]:
        """VMs and nodes that exist. Templates may remain."""
        return (
            [f"vm {name}" for name in self.machines.vms]
            + [f"copy of {name} on {host}" for name, host in self.machines.copies]
            + [f"node {name}" for name in self.cluster.nodes]
            + self.machines.left_in_storages()
            + self.pilots.alive
        )

    def violations(self) -> list[str]:
        """What happened although it must never: shared identities, oversubscribed hosts, jobs that ran twice."""
        found = self.machines.violations + self.cluster.violations + self.site.violations
        found = found + self.cluster.ledger.violations
        return found + self._reused_vms() + self._wrong_runs()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _reused_vms(self) -> list[str]:
        return [
            f"VM {guest.name} served {len(guest.served)} jobs: {guest.served}"
            for guest in self.guests
            if len(guest.served) > 1
        ] + [f"VM name {name} was used again" for name, times in Counter(self.machines.created).items() if times > 1]

    def _wrong_runs(self) -> list[str]:
        found: list[str] = []
        for job in self.cluster.history:
            runs = [run for run in self.runs if run.job == job.number]
            reported = [run for run in runs if run.reported]
            starts = Counter(run.restarts for run in runs)
            name = f"job {job.job_id}"
            found += [f"{name} started {n} times as restart {restart}" for restart, n in starts.items() if n > 1]
            ran = int(job.result in ("COMPLETED", "FAILED"))
            if len(reported) != ran and job.state is JobState.ENDED:
                found.append(f"{name} is {job.result}, and its script ended {len(reported)} times")
            ends = [(run.began, self._now() if run.ended is None else run.ended, run) for run in runs]
            for (_, ended, one), (began, _, other) in pairwise(sorted(ends, key=lambda end: end[0])):
                if began < ended:
                    found.append(f"{name} ran in {other.node} while it still ran in {one.node}")
        return found

    def _add_physical(self, name: str) -> None:
        """A physical node that runs jobs without VMs, one at a time, and never fails."""
        users = tuple(user for uid in self.settings.users if (user := self.user(uid)) is not None)
        bootstrap = Registration(name, (), Size(64, 1 << 20)).pack()
        identity = Identity(name, "", "", "", "", users=users, mounts=(), peers=(), bootstrap=bootstrap)
        guest = Guest(name, identity, self.cluster, self.runs, self._rng, GuestBehaviour(), lambda text: self.log(text))
        self.cluster.physical[name] = NodeRecord(name, (), Size(64, 1 << 20), guest)

    def _share_cpus(self, host: str) -> None:
        """The CPUs of a host are divided evenly among those of the VMs that compute."""
        computing = [one for one in self.machines.vms.on[host].values() if one.guest and one.guest.is_computing]
        wanted = sum((one.size or one.spec.size).cpus for one in computing)
        speed = min(1.0, self.machines.hosts[host].capacity.cpus * self.settings.threads / max(1, wanted))
        for one in computing:
            if one.guest is not None:
                one.guest.run_at(speed)

    def _boot(self, name: str, identity: Identity) -> Guest:
        kind, log = self.machines.vms[name].spec.kind, lambda text: self.log(text)
        behaviour = self.settings.guests_of.get(kind, self.settings.guests)
        guest = Guest(name, identity, self.cluster, self.runs, self._rng, behaviour, log)
        self.guests.append(guest)
        if self.settings.threads:
            guest.share_cpus = partial(self._share_cpus, self.machines.host_of(name))
        guest.boot()
        return guest
