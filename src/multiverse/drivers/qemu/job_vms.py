"""VMs inside jobs with QEMU on this machine: `agent.jobs.JobHost`, and the network of each job.

The network has names, addresses, a bridge on this machine, and a VXLAN between the nodes of the job. Names and
addresses follow from the settings and the job, so that the agents of a job's nodes agree on them without a word. The
lower half of `job_vms.subnet` is each host's own: a VM has an address there by which its host reaches it, and by which
it reaches what its host routes to. The upper half is the network of a job: its VMs have the first addresses, in the
order of its nodes. Each job has all of it, because its network is connected to no other one."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path

from pyroute2 import IPRoute, NetlinkError

from multiverse.agent.job_protocol import MOST_VMS
from multiverse.agent.jobs import MOST_JOBS, RUNS, JobVm
from multiverse.config import VXLAN_PORTS, Settings, vxlan_address
from multiverse.core.errors import Broken, Gone, Refused, Unknown
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.identity import Identity, Neighbour, User, mac_of_address, machine_id, vm_name, vm_prefix
from multiverse.core.model.vm import TemplateKey
from multiverse.drivers.qemu.driver import JOB_SITE, host_config
from multiverse.guest.protocol import TASKS_PORT, JobGuest
from multiverse.host.cgroups import find_job, find_job_groups, has_steps
from multiverse.host.manifest import Specification
from multiverse.host.network import Nft
from multiverse.host.qemu.library import QemuHost
from multiverse.host.vxlan import Vxlan, VxlanConfig
from multiverse.system.kernel import SharedMemory

MOST_OF_A_JOB = 1 << 16  # VMs of one job, at most, on all its nodes: see `guest_mac`
_BLOCK = 2 * MOST_VMS  # addresses of a job on its host: a power of two, for its route
_FIRST_BLOCK = 256  # before it, the host has an address for each job
_CONNECT_TIMEOUT = 20.0  # seconds: a guest may be busy
_PLUGGED = 128  # MiB: memory is plugged in blocks of this size, see `host.qemu.hotplug`


@dataclass(frozen=True, slots=True)
class JobAddresses:
    """The addresses in `job_vms.subnet`."""

    subnet: IPv4Network

    def __post_init__(self) -> None:
        assert self.subnet.num_addresses // 2 >= _FIRST_BLOCK + MOST_JOBS * _BLOCK, "the settings are checked"

    @property
    def prefix(self) -> int:
        """The prefix length of each half."""
        return self.subnet.prefixlen + 1

    @property
    def guests(self) -> tuple[str, str]:
        """The first and the last address that a VM can have."""
        return str(self.subnet[_FIRST_BLOCK]), str(self.subnet[-2])

    def host(self, number: int) -> str:
        """The host's address in the network of a job."""
        return str(self.subnet[1 + number])

    def block(self, number: int) -> str:
        """The network of a job's VMs on their host."""
        first = self.subnet[_FIRST_BLOCK + number * _BLOCK]
        return f"{first}/{32 - (_BLOCK - 1).bit_length()}"

    def local(self, vm: JobVm) -> str:
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
    """The name of a VM in the guests of its job."""
    return f"mvjob-{job}-{rank}"


def guest_mac(job: int, rank: int) -> str:
    """The MAC of a job's VM, with 26 bits of the job's id and 16 of the VM. It is locally administered, and differs
    from the MACs of VMs outside of jobs: their first octet is below 0x80."""
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
_EVERY_VM = "job"  # the owner of all entries of a VXLAN


def make_bridge(name: str, address: str, guests: str) -> None:
    """Ensure a bridge. `address` is the host's on it, `guests` the network that is reached by it. Blocks for
    milliseconds. Raises `Broken` if it cannot be made; then a part of it may remain."""
    # Only root reaches the port of tasks in the guests. The table is replaced in one transaction.
    rules = _RULES.format(table=_table(name), bridge=name, port=TASKS_PORT)
    try:
        with IPRoute() as ip:
            found = ip.link_lookup(ifname=name)
            if not found:
                ip.link("add", ifname=name, kind="bridge", address=mac_of_address(address))
                found = ip.link_lookup(ifname=name)
            ip.addr("replace", index=found[0], address=address, prefixlen=32)
            ip.link("set", index=found[0], state="up")
            if problem := _change(_absent(name) + rules):
                raise Broken(f"cannot guard the bridge {name}: {problem}", hint="see `nft list ruleset`")
            ip.route("replace", dst=guests, oif=found[0], prefsrc=address, scope="link")
    except (NetlinkError, OSError) as error:
        raise Broken(f"cannot make the bridge {name}: {error}", hint="see job_vms in the settings") from error


def remove_bridge(name: str) -> None:
    """Remove a bridge and its rules. Absent is success."""
    with suppress(NetlinkError, OSError), IPRoute() as ip:
        for index in ip.link_lookup(ifname=name):
            ip.link("del", index=index)
    _change(_absent(name))


def _table(bridge: str) -> str:
    return f"tasks-{bridge}"


def _absent(bridge: str) -> str:
    return f"add table inet {_table(bridge)}\ndelete table inet {_table(bridge)}\n"


def _change(commands: str) -> str:
    """Run these as one transaction. Returns the problem; without nftables none: the host's firewall tells of that."""
    with _one_at_a_time:
        try:
            return Nft().run(commands)
        except OSError:
            return ""


class JobVxlan:
    """The VXLAN of the job of `vm` on this host; a job of one node has none. Calls *ensure*, and block for
    milliseconds."""

    def __init__(self, settings: Settings, addresses: JobAddresses, vm: JobVm, bridge: str) -> None:
        self._settings, self._addresses, self._vm, self._bridge = settings, addresses, vm, bridge

    @property
    def mtu(self) -> int:
        """The MTU of guests; 0: nothing limits it."""
        return self._settings.vxlan.mtu if self._exists else 0

    @property
    def _exists(self) -> bool:
        return len(self._vm.nodes) > 1

    def make(self) -> None:
        """Raises `Refused` if there is no nftables, if an address is unknown, or if another job has the port here, and
        `Broken` if the kernel refuses it; then a part of it may remain."""
        vm = self._vm
        if not self._exists:
            return
        machines = [vxlan_address(self._settings, name) for name in vm.nodes]
        vxlan = self._vxlan()
        try:
            vxlan.restore()
        except Refused as error:
            hint = f"{error.hint}; if the VXLAN of a job has the port, submit this job again, and it gets another one"
            raise Refused(error.message, hint=hint) from error
        elsewhere = [
            Neighbour(self._addresses.shared(rank), guest_mac(vm.job, rank), machine)
            for node, machine in enumerate(machines)
            if node != vm.node
            for rank in range(node * vm.vms, (node + 1) * vm.vms)
        ]
        vxlan.add(_EVERY_VM, elsewhere)

    def remove(self) -> None:
        if self._exists:
            with suppress(Refused):  # there is no nftables, so it was never made
                self._vxlan().remove()
            shutil.rmtree(self._records, ignore_errors=True)

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


def job_vm_name(vm: JobVm) -> str:
    """The name of a job's VM on its host. A job that is requeued often may get an earlier name again, long after the
    end of that VM. The token tells the two apart."""
    return vm_name(JOB_SITE, vm.job * RUNS + vm.run)


class QemuJobVms:
    """`agent.jobs.JobHost` with QEMU on this machine."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.mounts = settings.mounts  # of VMs that are made from here on
        self._addresses = JobAddresses(ipaddress.IPv4Network(settings.job_vms.subnet))
        config = host_config(settings, JOB_SITE)
        self._host = QemuHost(replace(config, guests=self._addresses.guests, functions=settings.job_vms.sriov))

    def close(self) -> None:
        self._host.close()

    def find_groups(self, job: int, pid: int) -> tuple[str, ...]:
        return find_job_groups(str(job), pid)

    def find_job(self, pid: int) -> int:
        return find_job(pid)

    def has_steps(self, vm: JobVm) -> bool:
        return has_steps(vm.groups)

    def known_as(self, vm: JobVm) -> tuple[str, str]:
        return guest_name(vm.job, vm.rank), self._addresses.shared(vm.rank)

    def connect_network(self, vms: tuple[JobVm, ...]) -> None:
        addresses, number = self._addresses, vms[0].number
        make_bridge(self._bridge_name(vms[0]), addresses.host(number), addresses.block(number))
        self._vxlan(vms[0]).make()

    def control_groups(self, vm: JobVm) -> list[str]:
        return self._host.control_groups(job_vm_name(vm), vm.groups)

    def share_memory(self, vms: tuple[JobVm, ...]) -> SharedMemory:
        size = self._settings.job_vms.ivshmem_size
        if not vms[0].regions:
            return SharedMemory((), size)
        return self._host.share_memory(self._specification(vms[0]), vms[0].regions, size)

    def make(self, vm: JobVm, vms: tuple[JobVm, ...], user: User, memory: SharedMemory) -> None:
        """The template is built if there is none."""
        spec = self._specification(vm)
        guest = JobGuest(
            hostname=guest_name(vm.job, vm.rank),
            address=spec.job_address,
            hosts=self._settings.network.hosts,
            vms=self._addresses.peers(vm),
            nodes=vm.nodes,
            mtu=self._vxlan(vm).mtu,
        )
        self._create(spec, memory)
        self._host.start(spec.name, self._plugged(vm), self._identity(spec, vm, vms, user))
        if spec.functions:
            self._host.plug_functions(spec.name, vm.uid)
        self._host.join_job(spec.name, guest)
        if memory.fds:
            self._host.plug_regions(spec.name, memory, user.uid)
        self._host.serve_tasks(spec.name, vm.task_token, str(self._settings.slurm.directory()))

    def _create(self, spec: Specification, memory: SharedMemory) -> None:
        try:
            self._host.create(spec, memory)
        except Gone:
            if spec.template is None:
                raise
            self._host.build_template(spec.template)
            self._host.create(spec, memory)

    def is_alive(self, vm: JobVm) -> bool:
        with suppress(Gone):
            os.close(self._host.open_process(job_vm_name(vm)))
            return True
        return False

    def connect(self, vm: JobVm) -> tuple[socket.socket, int]:
        process = self._host.open_process(job_vm_name(vm))
        try:
            connection = socket.create_connection((self._addresses.local(vm), TASKS_PORT), _CONNECT_TIMEOUT)
        except OSError as error:
            os.close(process)
            raise Unknown(f"the guest does not answer: {error}", hint="see its console beside its manifest") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        return connection, process

    def kill(self, vm: JobVm) -> None:
        self._host.kill([job_vm_name(vm)])

    def remove(self, vm: JobVm) -> None:
        self._host.destroy(job_vm_name(vm), self._settings.pacing.reclaim_grace, vm.token)
        if vm.regions and vm.index == 0:
            self._host.forget_sharing(job_vm_name(vm), vm.groups)

    def return_rest(self) -> None:
        self._host.return_functions()

    def remove_network(self, vms: tuple[JobVm, ...]) -> None:
        self._vxlan(vms[0]).remove()
        remove_bridge(self._bridge_name(vms[0]))

    def _vxlan(self, vm: JobVm) -> JobVxlan:
        return JobVxlan(self._settings, self._addresses, vm, self._bridge_name(vm))

    def _bridge_name(self, vm: JobVm) -> str:
        return f"{self._settings.job_vms.bridge}.{vm.number}"

    def _specification(self, vm: JobVm) -> Specification:
        qemu, abilities = self._settings.qemu, self._host.image_abilities(vm.image)
        instant = {"plug_cpus", "plug_memory"} <= abilities
        base = Size(qemu.base_cpus, qemu.base_memory)
        prefix = self._addresses.prefix
        host = self._host.config.host
        return Specification(
            name=job_vm_name(vm),
            host=host,
            token=vm.token,
            image=vm.image,
            kind=CloneKind.INSTANT if instant else CloneKind.LINKED,
            size=vm.size,
            mac=guest_mac(vm.job, vm.rank),
            address=f"{self._addresses.local(vm)}/{prefix}",
            bridge=self._bridge_name(vm),
            template=TemplateKey(host, vm.image, base) if instant else None,
            job_groups=vm.groups,
            job_address=f"{self._addresses.shared(vm.rank)}/{prefix}",
            functions=vm.functions,
            # Where Slurm knows the functions, those that it did not give to the job cannot be opened by it.
            function_groups=vm.function_groups if self._settings.job_vms.sriov_gres else None,
        )

    def _plugged(self, vm: JobVm) -> Size:
        """The size after plugging: whole blocks of memory, no more than was asked for."""
        base = self._settings.qemu.base_memory
        return replace(vm.size, memory=base + (vm.memory - base) // _PLUGGED * _PLUGGED)

    def _identity(self, spec: Specification, vm: JobVm, vms: tuple[JobVm, ...], user: User) -> Identity:
        # The firewall knows the VM's peers by these names: peers on this host by their taps.
        taps = {one.rank: job_vm_name(one) for one in vms}
        peers = [
            (taps.get(rank, f"{vm_prefix(JOB_SITE)}of-{rank}"), address)
            for rank, (_, address) in enumerate(self._addresses.peers(vm))
            if rank != vm.rank
        ]
        return Identity(
            hostname=spec.name,
            mac=spec.mac,
            address=spec.address,
            gateway=self._addresses.host(vm.number),
            machine_id=machine_id(f"{spec.name} {spec.token}"),
            users=(user,),
            mounts=self.mounts,
            peers=(*self._settings.network.hosts, *peers),
        )
