"""The one simulated world: a cluster, hosts with VMs, guests in them. It judges what was done to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from multiverse.core.model import Host, Identity, JobState, Size, User
from multiverse.simulation.cluster import Cluster, ClusterSettings
from multiverse.simulation.guests import Guest, GuestPace, Run
from multiverse.simulation.machines import ABILITIES, Image, Machines


@dataclass(frozen=True)
class WorldSettings:
    """What there is. `users` are the uids that the site knows. With `overcommit` above 1, hosts may be made to carry
    that many times what they declare, and are watched: their machines must keep `floor` MiB available, beside what
    `others` on each of them hold (MiB)."""

    hosts: tuple[Host, ...] = (Host("h1", Size(8, 8192, 65536), ABILITIES, Size(2, 4096, 65536), "tcg"),)
    images: tuple[Image, ...] = (
        Image("slim"),
        Image("stiff", abilities=frozenset({"fork"})),
        Image("dud", boots=False),
    )
    users: tuple[int, ...] = (1000, 1001)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    guests: GuestPace = field(default_factory=GuestPace)
    overcommit: float = 1.0
    floor: int = 0
    others: int = 0


class World:
    """Made inside a running virtual loop; lives as long as that loop, whoever controls it meanwhile."""

    def __init__(self, seed: int, settings: WorldSettings | None = None) -> None:
        self.settings = settings or WorldSettings()
        self.runs: list[Run] = []
        self.guests: list[Guest] = []
        self.ran: Callable[[str], None] = lambda _: None  # told what scripts do
        self._rng = Random(f"{seed}/guests")
        self.cluster = Cluster(Random(f"{seed}/cluster"), self.settings.cluster)
        watched = (self.settings.overcommit, self.settings.floor, self.settings.others)
        self.machines = Machines(self.settings.hosts, self.settings.images, self._boot, *watched)

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
        """One of the VMs there are, by a number from 0 to 1."""
        names = sorted(self.machines.vms)
        return names[int(pick * len(names))] if names else None

    def guest(self, pick: float) -> Guest | None:
        """One of the guests there are or were, the latest the likeliest."""
        return self.guests[-1 - int(pick * pick * len(self.guests))] if self.guests else None

    # --- judgement

    def unfinished(self) -> list[str]:
        """Jobs that have not ended, each with its state."""
        return [f"job {job.job_id} is {job.state}" for job in self.cluster.history if job.state is not JobState.ENDED]

    def leftovers(self) -> list[str]:
        """VMs and nodes that exist; templates may stay."""
        return [f"vm {name}" for name in self.machines.vms] + [f"node {name}" for name in self.cluster.nodes]

    def violations(self) -> list[str]:
        """What must never happen and did: shared identities, oversubscribed hosts, jobs run wrongly."""
        return self.machines.violations + self.cluster.violations + self._strangers() + self._once()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _strangers(self) -> list[str]:
        return [
            f"VM {guest.name} served {len(guest.served)} jobs: {guest.served}"
            for guest in self.guests
            if len(guest.served) > 1
        ] + [f"VM name {name} came again" for name, times in Counter(self.machines.made).items() if times > 1]

    def _once(self) -> list[str]:
        wrong: list[str] = []
        for job in self.cluster.history:
            runs = [run for run in self.runs if run.job == job.number]
            whole = [run for run in runs if run.heard]
            starts = Counter(run.restarts for run in runs)
            told = f"job {job.job_id}"
            wrong += [f"{told} started {n} times as restart {restart}" for restart, n in starts.items() if n > 1]
            ran = int(job.result in ("COMPLETED", "FAILED"))
            if len(whole) != ran and job.state is JobState.ENDED:
                wrong.append(f"{told} is {job.result}, and its script came to its end {len(whole)} times")
            ends = [(run.began, self._now() if run.ended is None else run.ended, run) for run in runs]
            for (_, ended, one), (began, _, other) in pairwise(sorted(ends, key=lambda end: end[0])):
                if began < ended:
                    wrong.append(f"{told} ran in {other.node} while it still ran in {one.node}")
        return wrong

    def _boot(self, name: str, identity: Identity) -> Guest:
        guest = Guest(name, identity, self.cluster, self.runs, self._rng, self.settings.guests, lambda w: self.ran(w))
        self.guests.append(guest)
        guest.boot()
        return guest
