"""VMs, templates and hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SizeView:
    """A size. `disk` 0 means the image's own size. `net` is in Mbit/s; 0 of a VM: it has no limit, and claims none."""

    cpus: int
    memory: int
    disk: int
    net: int = 0


@dataclass(frozen=True, slots=True)
class VmView:
    """A live VM. `private` is memory that no other process maps, and is freed when the VM ends. `shared` is memory of
    the template and of programs that the VM maps, counted whole in every VM that maps it. `pss` is the private memory
    with a proportional part of the shared memory (proportional set size); it is 0 unless exact figures were asked for.
    `age` is the time since the VM entered its state, `cpu_s` the CPU seconds of its process."""

    name: str
    state: str
    host: str
    image: str
    kind: str
    cpus: int
    memory: int
    address: str
    attempt: int | None
    job_id: str
    age: float
    cpu_s: float
    private: float
    shared: float
    pss: float
    reason: str
    quarantined: str


@dataclass(frozen=True, slots=True)
class TemplateView:
    """A template. `account` is the only account whose jobs are served from it (empty: every account). `references` is
    the number of live VMs that were, or are about to be, forked from it. `age` is the time since it entered its
    state."""

    host: str
    image: str
    state: str
    cpus: int
    memory: int
    account: str
    age: float
    references: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A host that is borrowed from the scheduler. `state` is planned, waiting (its pilot job waits), starting (its
    agent is awaited), idle, held (VMs are on it), ending (its pilot is), lost or releasing. `pilot` is the id of its
    pilot job, `node` the physical node that it runs on, both empty if there is none yet. `ends` is the Unix time by
    which it has ended, None if that is not known. `cpus` and `memory` (MiB) are what is asked for, 0: a whole node.
    `age` is the time since it entered its state."""

    name: str
    state: str
    partition: str
    account: str
    cpus: int
    memory: int
    pilot: str
    node: str
    ends: float | None
    age: float
    reason: str


@dataclass(frozen=True, slots=True)
class NumaView:
    """A NUMA node of a host: its CPUs, its memory and what of it is free in MiB, and how far the host's nodes are from
    it. `taken` is what the VMs have of it that are kept there; 0 on a host with one node."""

    number: int
    cpus: tuple[int, ...]
    memory: int
    free: int
    taken: SizeView
    distances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostFaultView:
    """VMs of an image do not come up on a host: it gets none until then (Unix time), and after that one job at a time
    until a VM of that image has joined. `failures` in a row there were; 0 if an operator had it tried at once."""

    image: str
    failures: int
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class HostView:
    """A host. `declared` is its capacity for VMs, `claimed` the part of it that is claimed, `machine` the size of the
    machine itself (None: unknown). `available` is the memory that the machine could give to new processes (0: unknown).
    `private` and `shared` are sums over its VMs, so shared memory is counted once for each VM that maps it.
    `templates` is the memory that templates take, with all their copies; `template_copies` is the number of copies.
    Claims may reach `overcommit` times the declared memory; above 1, only while the machine keeps `floor` MiB
    available. They may reach `cpu_overcommit` times the declared CPUs and `disk_overcommit` times the declared disk.
    `images` maps each image on the host to what it can do there. `features` are what the host can do for its VMs beyond
    that, such as vhost-net, and `features_off` what it does without, each with the reason. `numa` are its NUMA nodes,
    as far as it is reachable.

    `state` is up, avoided (VMs fail there: see `faults`), closing (drained from `drain_from` on, in Unix time),
    draining, drained, away, silent, fencing or fenced, and `reason` why it is avoided, drained or fenced. While it is
    not `reachable`, its figures are as last observed (0 if it never was); `away_for` is how long nothing was heard of
    it, and `why` what reaching it fails of. `todo` is what an operator can do, empty if nothing. `lease` is set of a
    host that is leased."""

    name: str
    reachable: bool
    declared: SizeView
    claimed: SizeView
    machine: SizeView | None
    accelerator: str
    abilities: tuple[str, ...]
    images: Mapping[str, tuple[str, ...]]
    vms: int
    available: int
    private: float
    shared: float
    templates: float
    template_copies: int
    overcommit: float
    floor: int
    cpu_overcommit: float = 1.0
    disk_overcommit: float = 1.0
    state: str = "up"
    reason: str = ""
    drain_from: float | None = None
    away_for: float = 0.0
    why: str = ""
    jobs: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    todo: str = ""
    features_off: Mapping[str, str] = field(default_factory=dict)
    lease: LeaseView | None = None
    numa: tuple[NumaView, ...] = ()
    faults: tuple[HostFaultView, ...] = ()


@dataclass(frozen=True, slots=True)
class HostsChanged:
    """The hosts for which a change was committed, and those for which it was refused, each with why."""

    done: tuple[str, ...]
    refused: Mapping[str, str]
