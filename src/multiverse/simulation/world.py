"""The simulated world: a cluster, hosts, VMs and guests. It checks what the controller does to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from multiverse.core.model import Host, Identity, JobState, Size, User
from multiverse.simulation.cluster import Cluster, ClusterSettings
from multiverse.simulation.guests import Guest, GuestBehaviour, Run
from multiverse.simulation.machines import ABILITIES, Image, Machines


@dataclass(frozen=True)
class WorldSettings:
    """What exists. `users` are the uids that the site knows. With `overcommit` above 1, hosts may carry that many times
    the memory that they declare; then their machines must keep `floor` MiB available beside the `others` MiB that
    processes of others hold on each of them."""

    hosts: tuple[Host, ...] = (Host("h1", Size(8, 8192, 65536), ABILITIES, Size(2, 4096, 65536), "tcg"),)
    images: tuple[Image, ...] = (
        Image("slim"),
        Image("stiff", abilities=frozenset({"fork"})),
        Image("dud", boots=False),
    )
    users: tuple[int, ...] = (1000, 1001)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    guests: GuestBehaviour = field(default_factory=GuestBehaviour)
    overcommit: float = 1.0
    floor: int = 0
    others: int = 0


class World:
    """Created inside a running virtual loop. It outlives the crashes of the controller."""

    def __init__(self, seed: int, settings: WorldSettings | None = None) -> None:
        self.settings = settings or WorldSettings()
        self.runs: list[Run] = []
        self.guests: list[Guest] = []
        self.log: Callable[[str], None] = lambda _: None
        self._rng = Random(f"{seed}/guests")
        self.cluster = Cluster(Random(f"{seed}/cluster"), self.settings.cluster)
        limits = (self.settings.overcommit, self.settings.floor, self.settings.others)
        self.machines = Machines(self.settings.hosts, self.settings.images, self._boot, *limits)

    def user(self, uid: int) -> User | None:
        if uid not in self.settings.users:
            return None
        return User(f"u{uid}", uid, uid, f"/home/u{uid}", "/bin/sh", ((f"u{uid}", uid),))

    def kill_vm(self, name: str, reason: str = "its process was killed") -> None:
        self.machines.die(name, reason)

    def host(self, pick: float) -> str:
        names = sorted(self.machines.hosts)
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
        return [f"vm {name}" for name in self.machines.vms] + [f"node {name}" for name in self.cluster.nodes]

    def violations(self) -> list[str]:
        """What happened although it must never: shared identities, oversubscribed hosts, jobs that ran twice."""
        return self.machines.violations + self.cluster.violations + self._reused_vms() + self._wrong_runs()

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

    def _boot(self, name: str, identity: Identity) -> Guest:
        behaviour, log = self.settings.guests, lambda text: self.log(text)
        guest = Guest(name, identity, self.cluster, self.runs, self._rng, behaviour, log)
        self.guests.append(guest)
        guest.boot()
        return guest
