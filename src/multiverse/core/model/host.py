"""Hosts: what was observed of them, what is held on them, and what empty hosts could hold of one job."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from multiverse.core.model.basics import ClaimKey, CloneKind, Key, Size
from multiverse.core.model.reason import Reason
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
    """How large the files of an image's VMs can become on a host, in MiB.

    `whole` is the size of a VM whose guest can write to all of its disk. `overhead` is what a VM takes beside its
    allowance where the guest is limited to that, and what a template and a parked VM take.
    """

    whole: int = 0
    overhead: int = 0

    def cost(self, *, limited: bool) -> DiskCost:
        """What a VM claims whose guest is limited to its allowance, or is not."""
        return DiskCost(0, self.overhead) if limited else DiskCost(self.whole, 0)


@dataclass(frozen=True, slots=True)
class Overcommitment:
    """How much more VMs may claim on a host than it declares, and what its machine must keep all the same.

    `cpus`, `memory` and `disk` are times the declared capacity, 1 or more. One VM has no more CPUs than the host
    declares, however many all VMs together may claim. With `memory` above 1 a VM that has run for a while counts as
    the memory that it uses, and no VM is added while the machine has less than `floor` MiB available. While less than
    `disk_floor` MiB of disk are available, no VM is added either.
    """

    cpus: float = 1.0
    memory: float = 1.0
    disk: float = 1.0
    floor: int = 1024
    disk_floor: int = 1024


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node of a host, as numactl(8) shows it: its CPUs by number, its memory and what of it is `free` in MiB,
    and how far the host's nodes are from it, in their order. `taken` is what VMs have of it."""

    number: int
    cpus: tuple[int, ...]
    memory: int
    free: int = 0
    taken: Size = Size(0, 0)
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that runs VMs, or a cloud's quota: what it declares to have for VMs, what it can do, what things cost.

    `abilities` are names such as `instant`, `linked`, `full` (kinds of clone), `plug_memory`, `plug_cpus`, and
    `assigns_addresses` where the hypervisor gives VMs their addresses and MACs. `machine` is what the machine itself
    has, shown beside the declared capacity; None if the platform does not tell. `template_copies` is how often the
    memory of a template is held while it has clones. `available` is what the machine could give to new processes when
    it was observed; 0 if that is unknown. `available_disk` is how much more VMs could write then, None if that is
    unknown. `images` are those that are there, each with what it can do: `fork`, `plug_cpus`, `plug_memory`,
    `limit_disk` (its guests keep to an allowance). `memory_block` is the granularity of plugged memory, `vm_overhead`
    what a VM needs beside its guest's memory. `disks` says of images how large the files of their VMs can become; of an
    image that it does not name, VMs take their allowance. `self_fence` is after how many seconds without the controller
    and the scheduler its agent ends its VMs; 0: never. `overcommit` says how much more may be claimed than is declared.
    `features` are what its VMs
    have because this host can do it, and `features_off` what they do without, each with the reason: shown to operators,
    and of no consequence for decisions; and so are its NUMA nodes (`numa`), which are the host's own concern. `load` is
    what all its processes have used in the last minute, None if that is not measured. `refuses` is why its agent takes
    no VM any more, and ends those that are there: its lease ends. Empty: it takes VMs. Memory and disk are in MiB.
    """

    name: str
    capacity: Size
    abilities: frozenset[str] = frozenset()
    machine: Size | None = None
    accelerator: str = ""
    template_copies: int = 1
    available: int = 0
    images: Mapping[str, frozenset[str]] = field(default_factory=dict)
    memory_block: int = 128
    vm_overhead: int = 32
    available_disk: int | None = None
    disks: Mapping[str, ImageDisk] = field(default_factory=dict)
    self_fence: float = 0.0
    overcommit: Overcommitment = Overcommitment()
    features: frozenset[str] = frozenset()
    features_off: Mapping[str, str] = field(default_factory=dict)
    load: Load | None = None
    numa: tuple[NumaNode, ...] = ()
    refuses: str = ""

    def image_can(self, image: str, ability: str) -> bool:
        """Whether the image is there and has that ability."""
        return ability in self.images.get(image, ())

    def disk_of(self, image: str) -> ImageDisk:
        """How large the files of the image's VMs can become there. Of an image that is not there nobody knows."""
        return self.disks.get(image, ImageDisk()) if image in self.images else ImageDisk()

    def disk_cost(self, image: str, kind: CloneKind) -> DiskCost:
        """What a VM of the image claims of the disk there. The disk of a full clone is a copy, of any content."""
        return self.disk_of(image).cost(limited=kind is not CloneKind.FULL and self.image_can(image, "limit_disk"))


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
    """An operator's word that a host is to get no new VM from `begins` on (Unix time), and why. Before that, it gets
    VMs for jobs that surely end by then."""

    begins: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HostFault:
    """VMs of an image do not come up on a host: it gets none before `until` (Unix time), and then one at a time until
    one has joined. So many `failures` there were in a row, the last one for that `reason`."""

    image: str
    failures: int
    until: float
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class KnownHost:
    """A host of the site: one that was observed, that the settings name, or that an operator added. `value` is as last
    observed; None if it never was. A drained host stays drained, whatever its state, until an operator resumes it.
    `faults` say for which images it is avoided, each for one."""

    name: str
    source: str
    state: HostState = HostState.KNOWN
    value: Host | None = None
    id: int = 0
    version: int = 0
    since: float = 0.0
    reason: Reason | None = None
    quarantined: Reason | None = None
    drain: Drain | None = None
    faults: tuple[HostFault, ...] = ()

    @property
    def key(self) -> Key:
        return Key("host", self.id)

    def fault_of(self, image: str) -> HostFault | None:
        """How VMs of an image fail there, if they do."""
        return next((one for one in self.faults if one.image == image), None)

    def without_fault(self, image: str) -> KnownHost:
        """Itself as good for the image."""
        return replace(self, faults=tuple(one for one in self.faults if one.image != image))

    def with_fault(self, fault: HostFault) -> KnownHost:
        """Itself with that fault in place of what was known of its image."""
        return replace(self, faults=(*self.without_fault(fault.image).faults, fault))

    @property
    def is_off(self) -> bool:
        """Whether nothing of what was on it goes on. Derived from its state."""
        return self.state in OFF_STATES

    @property
    def is_member(self) -> bool:
        """Whether it may hold VMs of the site, now or later. One that is fenced comes back when it is repaired."""
        return self.state not in (HostState.REMOVED, HostState.RETURNED)


@dataclass(frozen=True, slots=True)
class HypervisorView:
    """One observation of one source: VMs and hosts by name, templates by key."""

    hosts: Mapping[str, Host] = field(default_factory=lambda: MappingProxyType({}))
    vms: Mapping[str, VmSeen] = field(default_factory=lambda: MappingProxyType({}))
    templates: Mapping[TemplateKey, TemplateSeen] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Claim:
    """Capacity that one row holds in one capacity domain."""

    owner: Key
    domain: str
    size: Size

    @property
    def key(self) -> ClaimKey:
        return ClaimKey(self.owner, self.domain)


# --- what a scheduler refuses jobs by ---------------------------------------------------------------


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
