"""VMs inside jobs with QEMU on this machine: `agent.job_vm.JobHost`."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from dataclasses import replace

from multiverse.agent.jobs import RUNS, JobVm
from multiverse.config import Settings
from multiverse.core.errors import Gone, Unknown
from multiverse.core.model import CloneKind, Identity, Size, TemplateKey, User, machine_id, vm_name, vm_prefix
from multiverse.drivers.qemu.driver import JOB_SITE, host_config
from multiverse.drivers.qemu.job_network import (
    JobAddresses,
    JobVxlan,
    guest_mac,
    guest_name,
    make_bridge,
    remove_bridge,
)
from multiverse.guest.protocol import TASKS_PORT, JobGuest
from multiverse.host.job_groups import find_job, find_job_groups, has_steps
from multiverse.host.qemu.library import QemuHost
from multiverse.host.specification import Specification
from multiverse.system.shared_memory import SharedMemory

_CONNECT_TIMEOUT = 20.0  # seconds: a guest may be busy
_BLOCK = 128  # MiB that memory is plugged in: see `host.qemu.hotplug`


def job_vm_name(vm: JobVm) -> str:
    """The name of a job's VM on its host. A job that is requeued often may get an earlier name again, long after the
    end of that VM. The token tells the two apart."""
    return vm_name(JOB_SITE, vm.job * RUNS + vm.run)


class QemuJobVms:
    """`agent.jobs.JobHost` with QEMU on this machine."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
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
        return replace(vm.size, memory=base + (vm.memory - base) // _BLOCK * _BLOCK)

    def _identity(self, spec: Specification, vm: JobVm, vms: tuple[JobVm, ...], user: User) -> Identity:
        # By these names the firewall knows the VM's peers: those of this host by their taps.
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
            mounts=self._settings.mounts,
            peers=(*self._settings.network.hosts, *peers),
        )
