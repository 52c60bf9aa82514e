"""Hosts: what was observed of them, what is held on them, and what empty hosts could hold of one job."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from multiverse.core.model.basics import ClaimKey, CloneKind, Key, Size
from multiverse.core.model.machine import MachineKind
from multiverse.core.model.reason import Reason
from multiverse.core.model.saved import Saved, SavedSeen, Storage
from multiverse.core.model.usage import Load
from multiverse.core.model.vm import TemplateKey, TemplateSeen, VmSeen


class DiskCost(NamedTuple):
    """What a VM claims of its host's disk, in MiB: its allowance, `least` at least, and `overhead` beside it."""

    least: int = 0
    overhead: int = 0

    def of(self, allowance: int) -> int:
        """The claim of a VM whose guest may write `allowance` MiB."""
        return max(self.least, allowance) + self.overhead


@dataclass(frozen=True, slots=True)
class ImageDisk:
    """How large the files of an image's VMs can become on a host, in MiB."""

    whole: int = 0  # of a VM whose guest can write to all of its disk
    overhead: int = 0  # of a VM beside its allowance, of a template, and of a parked VM

    def cost(self, *, limited: bool) -> DiskCost:
        """What a VM claims whose guest is limited to its allowance, or is not."""
        return DiskCost(0, self.overhead) if limited else DiskCost(self.whole, 0)


@dataclass(frozen=True, slots=True)
class Overcommitment:
    """How much more VMs may claim on a host than it declares, and what its machine must keep all the same."""

    cpus: float = 1.0  # times the declared capacity, for all VMs; one VM has the declared CPUs at most
    memory: float = 1.0  # above 1, a VM that has run for a while counts as what it uses
    disk: float = 1.0
    floor: int = 1024  # MiB of memory that the machine must have available for a VM to be added
    disk_floor: int = 1024  # the same of disk


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node of a host, as numactl(8) shows it."""

    number: int
    cpus: tuple[int, ...]  # by number
    memory: int  # MiB
    free: int = 0  # of it, MiB
    taken: Size = Size(0, 0)  # what VMs have of it
    distances: tuple[int, ...] = ()  # of the host's nodes from it, in their order


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that runs VMs, or a cloud's quota: what it has for VMs, what it can do, what things cost. In MiB."""

    name: str
    capacity: Size
    abilities: frozenset[str] = frozenset()  # instant, linked, full (clones), plug_memory, plug_cpus, assigns_addresses
    machine: Size | None = None  # what the machine itself has; None: unknown
    accelerator: str = ""
    template_copies: int = 1  # how often a template's memory is held while it has clones
    available: int = 0  # what the machine could give to new processes when observed; 0: unknown
    images: Mapping[str, frozenset[str]] = field(default_factory=dict)  # fork, plug_cpus, plug_memory, limit_disk
    memory_block: int = 128  # granularity of plugged memory
    vm_overhead: int = 32  # what a VM needs beside its guest's memory
    available_disk: int | None = None  # how much more VMs could write; None: unknown
    disks: Mapping[str, ImageDisk] = field(default_factory=dict)  # of images; of others VMs take their allowance
    self_fence: float = 0.0  # seconds without the site after which its agent ends its VMs; 0: never
    overcommit: Overcommitment = Overcommitment()
    features: frozenset[str] = frozenset()  # what its VMs have because this host can do it
    features_off: Mapping[str, str] = field(default_factory=dict)  # what they do without, and why; for operators alone
    load: Load | None = None  # of the last minute; None: not measured
    numa: tuple[NumaNode, ...] = ()  # the host's own concern
    storage: Storage | None = None  # of saved VMs; None: it saves none
    storage_free: int | None = None  # bytes that can still be written there; None: unknown
    copies: Storage | None = None  # to which it copies what it has written; None: to none
    moves: MachineKind | None = None  # of VMs that move from and to it while they run; None: none do
    refuses: str = ""  # why its agent takes no VM any more, and ends those there: its lease ends
    holds_until: float = 0.0  # Unix time until which such an agent leaves its VMs alone, so that they can leave

    def lasting(self) -> Host:
        """It without what changes all the time."""
        return replace(self, available=0, available_disk=None, storage_free=None, load=None, numa=())

    def lasts_as(self, other: Host) -> bool:
        """Whether nothing differs but what changes all the time."""
        return bool(_LASTING(self) == _LASTING(other))

    def storage_of(self, saved: Saved) -> str:
        """The storage from which it can restore a saved VM; empty if there is none."""
        reached = (self.storage, self.copies)
        return next((name for name in saved.storages if Storage(name, saved.machine) in reached), "")

    def reaches(self, storages: Collection[str]) -> bool:
        return any(one is not None and one.name in storages for one in (self.storage, self.copies))

    def image_can(self, image: str, ability: str) -> bool:
        return ability in self.images.get(image, ())

    def disk_of(self, image: str) -> ImageDisk:
        """How large the files of the image's VMs can become there. Of an image that is not there nobody knows."""
        return self.disks.get(image, ImageDisk()) if image in self.images else ImageDisk()

    def disk_cost(self, image: str, kind: CloneKind) -> DiskCost:
        """What a VM of the image claims of the disk there. The disk of a full clone is a copy, of any content."""
        return self.disk_of(image).cost(limited=kind is not CloneKind.FULL and self.image_can(image, "limit_disk"))


_CHANGING = ("available", "available_disk", "storage_free", "load", "numa")
_LASTING = attrgetter(*(one.name for one in fields(Host) if one.name not in _CHANGING))


class HostState(StrEnum):
    KNOWN = "known"  # it belongs to the site; whether it is in reach, its source tells
    SILENT = "silent"  # nothing is heard of it, the scheduler does not reach its VMs, and a job waits for it
    FENCING = "fencing"  # the same, and the site's fence command is to make sure that it is off
    FENCED = "fenced"  # it is surely off, and it has not been seen since
    REMOVED = "removed"  # an operator took it out of the site; the settings do not bring it back
    RETURNED = "returned"  # its lease has ended; it never comes back


OFF_STATES = (HostState.FENCED, HostState.REMOVED, HostState.RETURNED)
"""Nothing of what was on a host in one of these states goes on."""


@dataclass(frozen=True, slots=True)
class Drain:
    """A host gets no new VM, as an operator or a reservation says. Before `begins` it gets VMs for jobs that surely end
    by then."""

    begins: float = 0.0  # Unix time
    reason: str = ""
    moves: bool = False  # the VMs of its running jobs are to go to other hosts
    saves: bool = False  # its running jobs that no other host takes are to be saved
    reservation: str = ""  # of the scheduler, with which the drain ends; empty: an operator's, who ends it


@dataclass(frozen=True, slots=True)
class HostFault:
    """VMs of an image do not come up on a host: none is made there for a while, then one at a time until one joins."""

    image: str
    failures: int  # in a row
    until: float  # Unix time
    reason: Reason | None  # of the last one


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A host of the site. It was observed, or the settings name it, or an operator added it."""

    name: str
    source: str
    state: HostState = HostState.KNOWN
    value: Host | None = None  # as last observed; None: never
    id: int = 0
    version: int = 0
    since: float = 0.0
    reason: Reason | None = None
    quarantined: Reason | None = None
    drain: Drain | None = None  # stays, whatever its state, until an operator resumes it
    faults: tuple[HostFault, ...] = ()  # for which images it is avoided

    @property
    def key(self) -> Key:
        return Key("host", self.id)

    def fault_of(self, image: str) -> HostFault | None:
        return next((one for one in self.faults if one.image == image), None)

    def without_fault(self, image: str) -> KnownHost:
        return replace(self, faults=tuple(one for one in self.faults if one.image != image))

    @property
    def is_off(self) -> bool:
        return self.state in OFF_STATES

    @property
    def is_member(self) -> bool:
        """Whether it may hold VMs of the site, now or later. One that is fenced comes back when it is repaired."""
        return self.state not in (HostState.REMOVED, HostState.RETURNED)


@dataclass(frozen=True, slots=True)
class HypervisorView:
    """One observation of one source: VMs and hosts by name, templates by key."""

    hosts: Mapping[str, Host] = field(default_factory=dict)
    vms: Mapping[str, VmSeen] = field(default_factory=dict)
    templates: Mapping[TemplateKey, TemplateSeen] = field(default_factory=dict)
    saved: Mapping[str, SavedSeen] = field(default_factory=dict)  # by name


@dataclass(frozen=True, slots=True)
class Claim:
    """Capacity that one row holds in one capacity domain."""

    owner: Key
    domain: str
    size: Size

    @property
    def key(self) -> ClaimKey:
        return ClaimKey(self.owner, self.domain)


MOST_NODES = 256  # larger jobs are not refused for the sum of their nodes: lists of memory sizes have to end
OTHER_IMAGES = "*"  # stands for all images that no host has


@dataclass(frozen=True, slots=True, order=True)
class EqualHosts:
    """Hosts that could each hold the same of a job. Amounts are those of nodes, in MiB and Mbit/s."""

    count: int
    cpus: int
    disk: int
    memory: tuple[int, ...]  # `memory[k - 1]`: the most of each of `k` nodes; up to `MOST_NODES`
    cost: DiskCost = DiskCost()  # what a node takes of the disk
    node_cpus: int = 0  # the most of one node; 0: all
    net: int = 0

    @property
    def cpus_of_a_node(self) -> int:
        return self.node_cpus or self.cpus

    def nodes_held(self, size: Size, per_host: int = 0) -> int:
        """How many such nodes these hosts could hold, `per_host` on each at most (0: any); exact up to `MOST_NODES`."""
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
    """What jobs must not exceed: one of the limits of their image and kind."""

    image: str  # of jobs that name none, as is the kind
    kind: CloneKind
    limits: Mapping[str, tuple[JobLimit, ...]]  # by image; `OTHER_IMAGES`: of those not listed; empty: no limit

    def allow(self, image: str | None, kind: CloneKind | None, nodes: int, size: Size, per_host: int = 0) -> bool:
        """Whether the hosts could ever hold so many such nodes, `per_host` on each host at most (0: any)."""
        limits = self.limits.get(image or self.image, self.limits.get(OTHER_IMAGES, ()))
        mine = [limit for limit in limits if (kind or self.kind) in limit.kinds]
        held = (sum(hosts.nodes_held(size, per_host) for hosts in limit.hosts) for limit in mine)
        return not mine or nodes > MOST_NODES or any(count >= nodes for count in held)
