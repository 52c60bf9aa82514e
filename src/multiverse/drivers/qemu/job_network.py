"""The network of a job's VMs: names, addresses, its bridge on this machine, and the VXLAN between its nodes.

Names and addresses follow from the settings and the job, so that the agents of a job's nodes agree on them without a
word. The lower half of `job_vms.subnet` is each host's own: a VM has an address there by which its host reaches it, and
by which it reaches what its host routes to. The upper half is the network of a job: its VMs have the first addresses,
in the order of its nodes. Each job has all of it, because its network is connected to no other one.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path

from pyroute2 import IPRoute, NetlinkError

from multiverse.agent.job_protocol import MOST_VMS
from multiverse.agent.jobs import MOST_JOBS, JobVm
from multiverse.config import VXLAN_PORTS, Settings, vxlan_address
from multiverse.core.errors import Broken, Refused
from multiverse.core.model import Neighbour
from multiverse.core.model.names import mac_of_address
from multiverse.guest.protocol import TASKS_PORT
from multiverse.host.nft import Nft
from multiverse.host.vxlan import Vxlan, VxlanConfig

MOST_OF_A_JOB = 1 << 16  # VMs of one job, at most, on all its nodes: see `guest_mac`
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


# Only the agent connects to guests' port of tasks. A guest tells others by the token, but its queue of connections that
# have sent nothing yet has an end, and each user of the node could fill it.
_RULES = """
table inet {table} {{
    chain leaving {{
        type filter hook output priority 0; policy accept;
        oifname "{bridge}" tcp dport {port} meta skuid != 0 reject with tcp reset
    }}
}}
"""

_one_at_a_time = threading.Lock()


class JobBridge:
    """One bridge. Calls block for milliseconds, and mean *ensure*."""

    def __init__(self, name: str, address: str, guests: str) -> None:
        """`address` is the host's on it, and `guests` the network of the addresses that are reached by it."""
        self.name, self._address, self._guests = name, address, guests

    def make(self) -> None:
        """Raises `Broken` if it cannot be made; then a part of it may remain."""
        try:
            with IPRoute() as ip:
                found = ip.link_lookup(ifname=self.name)
                if not found:
                    ip.link("add", ifname=self.name, kind="bridge", address=mac_of_address(self._address))
                    found = ip.link_lookup(ifname=self.name)
                ip.addr("replace", index=found[0], address=self._address, prefixlen=32)
                ip.link("set", index=found[0], state="up")
                self._guard()
                ip.route("replace", dst=self._guests, oif=found[0], prefsrc=self._address, scope="link")
        except (NetlinkError, OSError) as error:
            raise Broken(f"cannot make the bridge {self.name}: {error}", hint="see job_vms in the settings") from error

    def remove(self) -> None:
        """Absent is success."""
        remove_bridge(self.name)

    def _guard(self) -> None:
        """Let only root reach the port of tasks in the guests. The table is replaced in one transaction."""
        rules = _RULES.format(table=_table(self.name), bridge=self.name, port=TASKS_PORT)
        if problem := _change(_absent(self.name) + rules):
            raise Broken(f"cannot guard the bridge {self.name}: {problem}", hint="see `nft list ruleset`")


def remove_bridge(name: str) -> None:
    """Remove a bridge, and what guards it. Absent is success."""
    with suppress(NetlinkError, OSError), IPRoute() as ip:
        for index in ip.link_lookup(ifname=name):
            ip.link("del", index=index)
    _change(_absent(name))


def _table(bridge: str) -> str:
    return f"tasks-{bridge}"


def _absent(bridge: str) -> str:
    """Deletes the table, whether there is one or not."""
    return f"add table inet {_table(bridge)}\ndelete table inet {_table(bridge)}\n"


def _change(commands: str) -> str:
    """Run these as one transaction. Returns the problem; none where there is no nftables, as the host's firewall says
    then."""
    with _one_at_a_time:
        try:
            return Nft().run(commands)
        except OSError:
            return ""


_EVERY_VM = "job"  # who owns all entries


class JobVxlan:
    """The VXLAN of the job of `vm`, for all VMs of that job on this host. A job of one node has none, and needs none.
    Calls block for milliseconds, and mean *ensure*."""

    def __init__(self, settings: Settings, addresses: JobAddresses, vm: JobVm, bridge: str) -> None:
        self._settings, self._addresses, self._vm, self._bridge = settings, addresses, vm, bridge

    @property
    def mtu(self) -> int:
        """That of guests; 0 if nothing limits it."""
        return self._settings.vxlan.mtu if self._exists else 0

    @property
    def _exists(self) -> bool:
        return len(self._vm.nodes) > 1

    def make(self) -> None:
        """Raises `Refused` if there is no nftables, if an address is unknown, or if another job has the port here, and
        `Broken` if the kernel refuses it; then a part of it may remain."""
        vm = self._vm
        if self._exists:
            machines = [vxlan_address(self._settings, name) for name in vm.nodes]
            vxlan = self._vxlan()
            try:
                vxlan.restore()
            except Refused as error:
                hint = (
                    f"{error.hint}; if the VXLAN of a job has the port, submit this job again, and it gets another one"
                )
                raise Refused(error.message, hint=hint) from error
            vxlan.add(_EVERY_VM, self._elsewhere(machines))

    def remove(self) -> None:
        """Absent is success."""
        if self._exists:
            with suppress(Refused):  # there is no nftables, so it was never made
                self._vxlan().remove()
            shutil.rmtree(self._records, ignore_errors=True)

    def _elsewhere(self, machines: list[str]) -> list[Neighbour]:
        """The VMs of the job on its other nodes."""
        vm = self._vm
        return [
            Neighbour(self._addresses.shared(rank), guest_mac(vm.job, rank), machine)
            for node, machine in enumerate(machines)
            if node != vm.node
            for rank in range(node * vm.vms, (node + 1) * vm.vms)
        ]

    @property
    def _records(self) -> Path:
        return self._settings.agent.state_dir / "job-vxlans" / str(self._vm.number)

    def _vxlan(self) -> Vxlan:
        vm = self._vm
        return Vxlan(
            VxlanConfig(
                site=f"job{vm.number}",
                network=vm.job % (1 << 24) or 1,
                port=self._settings.job_vms.port + vm.job % VXLAN_PORTS,
                find_address=partial(vxlan_address, self._settings, vm.nodes[vm.node]),
                mtu=self._settings.vxlan.mtu,
                bridge=self._bridge,
                records=self._records,
            )
        )
