"""What the known hosts could hold of one job, were nothing else on them: what a scheduler refuses jobs by."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from multiverse.core.model.host import DiskCost
from multiverse.core.model.sizes import CloneKind, Size

MOST_NODES = 256
"""Jobs with more nodes are not refused for the sum of their nodes: the lists of memory sizes have to end somewhere. The
largest job of Slurm's driver has 250 nodes (`install.GATE_NODES`)."""

OTHER_IMAGES = "*"
"""Stands for all images that no host has."""


@dataclass(frozen=True, slots=True, order=True)
class EqualHosts:
    """`count` hosts, each of which could hold the same. CPUs, memory and disk are those of nodes, not of VMs. One node
    has at most `node_cpus` (0: all `cpus`).

    `memory[k - 1]` is the most memory in MiB that each of `k` nodes could have on one of these hosts. The list ends
    where not even nodes of 1 CPU and 1 MiB fit, and after `MOST_NODES`. `disk` in MiB is shared by all nodes of a host,
    each of which takes what `cost` says, and so are `net` Mbit/s by those that request bandwidth.
    """

    count: int
    cpus: int
    disk: int
    memory: tuple[int, ...]
    cost: DiskCost = DiskCost()
    node_cpus: int = 0
    net: int = 0

    @property
    def cpus_of_a_node(self) -> int:
        """The most CPUs of one node."""
        return self.node_cpus or self.cpus

    def nodes_held(self, size: Size, per_host: int = 0) -> int:
        """How many nodes of that size these hosts could hold together, at most `per_host` (0: any number) on each;
        never less than is true, up to `MOST_NODES`."""
        if size.cpus > self.cpus_of_a_node:
            return 0
        by_memory = bisect_right(self.memory, -size.memory, key=lambda most: -most)
        each = self.cost.of(size.disk)
        by_disk = self.disk // each if each else by_memory
        by_net = self.net // size.net if size.net else by_memory
        held = min(by_memory, self.cpus // size.cpus, by_disk, by_net)
        return self.count * (min(held, per_host) if per_host else held)


@dataclass(frozen=True, slots=True)
class JobLimit:
    """What a job that accepts one of `kinds` could have at most, if its VMs are made in one way."""

    kinds: frozenset[CloneKind]
    hosts: tuple[EqualHosts, ...]


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What jobs must not exceed, by image.

    A job has to keep one of the `limits` of its image and kind. Jobs that name no image or no kind get the default one.
    An image that is not listed has the limits of `OTHER_IMAGES`; where these are missing, too, nothing is limited.
    """

    image: str
    kind: CloneKind
    limits: Mapping[str, tuple[JobLimit, ...]]

    def allow(self, image: str | None, kind: CloneKind | None, nodes: int, size: Size, per_host: int = 0) -> bool:
        """Whether the hosts could ever hold a job of `nodes` nodes of that size, at most `per_host` (0: any number) on
        each host."""
        limits = self.limits.get(image or self.image, self.limits.get(OTHER_IMAGES, ()))
        mine = [limit for limit in limits if (kind or self.kind) in limit.kinds]
        held = (sum(hosts.nodes_held(size, per_host) for hosts in limit.hosts) for limit in mine)
        return not mine or nodes > MOST_NODES or any(count >= nodes for count in held)
