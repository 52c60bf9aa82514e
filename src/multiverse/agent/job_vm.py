"""A VM inside the allocation of a job, and what makes such VMs."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

from multiverse.core.model import Size, User
from multiverse.system.kernel import SharedMemory

RUNS = 512
"""How many names the VMs of one job can have on a host."""

MOST_JOBS = 250
"""Jobs with VMs on one host, at most."""


@dataclass(frozen=True, slots=True)
class JobVm:
    """A VM of one run of a job. `run` is random, for its name; `record` is when the plugin recorded the run (Unix time
    in nanoseconds), 0 if it did not. `number` is the job's on this host, and chooses its addresses here; `token` is the
    VM's, `task_token` what its guest knows the agent of the host by. `groups` are the job's control groups. The job has
    `vms` on each of its `nodes`, of which this host is number `node`, and this VM is number `index` here. It has
    `functions` of this host's devices; `function_groups` are the IOMMU groups whose device files the job may open.
    `regions` are the ids of the regions of memory that the job's VMs on this host share; no other job ever has one.
    Where no plugin records the job's runs and tells their ends, it is `watched`, and `record` is when slurmctld started
    the run (Unix time)."""

    job: int
    run: int
    record: int
    uid: int
    number: int
    image: str
    cpus: int
    memory: int
    disk: int
    token: str
    task_token: str
    groups: tuple[str, ...]
    index: int = 0
    vms: int = 1
    nodes: tuple[str, ...] = ("",)
    node: int = 0
    functions: int = 0
    function_groups: tuple[int, ...] = ()
    regions: tuple[str, ...] = ()
    watched: bool = False

    @property
    def rank(self) -> int:
        """Which one of all the job's VMs it is, from 0 on."""
        return self.node * self.vms + self.index

    @property
    def size(self) -> Size:
        return Size(self.cpus, self.memory, self.disk)


class JobHost(Protocol):
    """What makes these VMs. All calls block."""

    def find_groups(self, job: int, pid: int) -> tuple[str, ...]:
        """The directories of the job's control groups, which the process `pid` is in one of; none if it has none."""
        ...

    def find_job(self, pid: int) -> int:
        """The job in whose control groups the process `pid` is; 0 if there is none. Raises `Refused` if it has
        ended."""
        ...

    def has_steps(self, vm: JobVm) -> bool:
        """Whether a step of the VM's job is on this host, as far as control groups tell."""
        ...

    def known_as(self, vm: JobVm) -> tuple[str, str]:
        """The VM's name and address in the network of its job."""
        ...

    def connect_network(self, vms: tuple[JobVm, ...]) -> None:
        """Make the network of these VMs, which are all that their job has here. Raises what `make` raises; then a part
        of it may remain."""
        ...

    def control_groups(self, vm: JobVm) -> list[str]:
        """The directories of the control groups that the VM will have, or has."""
        ...

    def share_memory(self, vms: tuple[JobVm, ...]) -> SharedMemory:
        """The regions of memory that these VMs share, which are all that their job has here. Raises what the host
        library raises."""
        ...

    def make(self, vm: JobVm, vms: tuple[JobVm, ...], user: User, memory: SharedMemory) -> None:
        """Make the VM, one of these, until its guest accepts tasks. Raises what the host library raises; then a part of
        the VM may remain."""
        ...

    def is_alive(self, vm: JobVm) -> bool: ...

    def connect(self, vm: JobVm) -> tuple[socket.socket, int]:
        """A new connection to the guest, and a pidfd that ends with the VM. Raises `Gone` and `Unknown`."""
        ...

    def kill(self, vm: JobVm) -> None:
        """End the VM at once. What waits for its guest gets an error."""
        ...

    def remove(self, vm: JobVm) -> None:
        """Let the guest write back, end the VM and remove all of it. Absent is success."""
        ...

    def return_rest(self) -> None:
        """Take back what VMs had that do not exist any more."""
        ...

    def remove_network(self, vms: tuple[JobVm, ...]) -> None:
        """Remove the network of these VMs, which have been removed. Absent is success."""
        ...
