"""Names and addresses of VMs inside jobs. Everything follows from the settings and the job, so that the agents of a
job's nodes agree on it without a word.

The lower half of `job_vms.subnet` is each host's own: a VM has an address there by which its host reaches it, and by
which it reaches what its host routes to. The upper half is the network of a job: its VMs have the first addresses, in
the order of its nodes. Each job has all of it, because its network is connected to no other one.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Network

from multiverse.agent.job_protocol import MOST_VMS
from multiverse.agent.job_vm import MOST_JOBS, JobVm
from multiverse.core.errors import Refused

MOST_OF_A_JOB = 1 << 16
"""VMs of one job, at most, on all its nodes: see `guest_mac`."""

_BLOCK = 2 * MOST_VMS  # addresses of a job on its host: a power of two, for its route
_FIRST_BLOCK = 256  # before it, the host has an address for each job


@dataclass(frozen=True, slots=True)
class JobAddresses:
    """The addresses in `job_vms.subnet`."""

    subnet: IPv4Network

    def __post_init__(self) -> None:
        assert self.subnet.num_addresses // 2 >= _FIRST_BLOCK + MOST_JOBS * _BLOCK, "the settings are checked"

    @property
    def prefix(self) -> int:
        """Of all addresses here: that of each half."""
        return self.subnet.prefixlen + 1

    @property
    def guests(self) -> tuple[str, str]:
        """The first and the last address that a VM can have."""
        return str(self.subnet[_FIRST_BLOCK]), str(self.subnet[-2])

    def host(self, number: int) -> str:
        """The host's address in the network of the job with this number here."""
        return str(self.subnet[1 + number])

    def block(self, number: int) -> str:
        """The addresses of a job's VMs on their host, as a network."""
        first = self.subnet[_FIRST_BLOCK + number * _BLOCK]
        return f"{first}/{32 - (_BLOCK - 1).bit_length()}"

    def local(self, vm: JobVm) -> str:
        """A VM's address on its host."""
        return str(self.subnet[_FIRST_BLOCK + vm.number * _BLOCK + vm.index])

    def shared(self, rank: int) -> str:
        """The address of a job's VM in the network of the job. Raises `Refused` if the job has too many."""
        half = self.subnet.num_addresses // 2
        if rank >= (most := min(half - 2, MOST_OF_A_JOB)):
            raise Refused(f"the job has more than {most} VMs", hint="submit it for fewer, or enlarge job_vms.subnet")
        return str(self.subnet[half + 1 + rank])

    def peers(self, vm: JobVm) -> tuple[tuple[str, str], ...]:
        """Names and addresses of all VMs of its job, in the network of the job."""
        return tuple((guest_name(vm.job, rank), self.shared(rank)) for rank in range(len(vm.nodes) * vm.vms))


def guest_name(job: int, rank: int) -> str:
    """What a VM is called in its guest, and in those of the job's other VMs."""
    return f"mvjob-{job}-{rank}"


def guest_mac(job: int, rank: int) -> str:
    """The MAC of a job's VM: locally administered, and one that no VM outside of jobs has, whose first octet is below
    0x80. It has 26 bits of the job, as Slurm's job ids have, and 16 of the VM."""
    number = job << 16 | rank
    octets = number.to_bytes(6, "big")
    return f"{0x82 | octets[0] << 2:02x}:{octets[1:].hex(':')}"
