"""VMs inside jobs with QEMU on this machine: `agent.jobs.JobHost`."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from pyroute2 import IPRoute, NetlinkError

from multiverse.agent.jobs import RUNS, JobVm
from multiverse.config import Settings
from multiverse.core.errors import Broken, Gone, Unknown
from multiverse.core.model import CloneKind, Identity, Size, TemplateKey, User, machine_id, vm_name
from multiverse.core.model.names import mac_of_address
from multiverse.drivers.qemu.driver import JOB_SITE, host_config
from multiverse.guest.protocol import TASKS_PORT
from multiverse.host.job_groups import find_job_groups
from multiverse.host.qemu.library import QemuHost
from multiverse.host.specification import Specification

_CONNECT_TIMEOUT = 20.0  # seconds: a guest may be busy
_FIRST_ADDRESS = 2  # the first one after the network's is the host's
_BLOCK = 128  # MiB that memory is plugged in: see `host.qemu.hotplug`


def job_vm_name(vm: JobVm) -> str:
    """The name of a job's VM, and of its guest. A job that is requeued often may have an earlier name again, when the
    VM of that name is long gone; what tells the two apart is the token."""
    return vm_name(JOB_SITE, vm.job * RUNS + vm.run)


class QemuJobVms:
    """See `agent.jobs.JobHost`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._network = ipaddress.IPv4Network(settings.job_vms.subnet)
        guests = (str(self._network[_FIRST_ADDRESS]), str(self._network[-2]))
        self._host = QemuHost(replace(host_config(settings, JOB_SITE), guests=guests))
        self._bridge = _Bridge(settings.job_vms.bridge, str(self._network[1]), self._network.prefixlen)

    def close(self) -> None:
        self._host.close()

    def find_groups(self, job: int, pid: int) -> tuple[str, ...]:
        """See `JobHost`."""
        return find_job_groups(str(job), pid)

    def make(self, vm: JobVm, user: User) -> list[str]:
        """See `JobHost`. The template is built if there is none."""
        spec = self._specification(vm)
        with self._bridge.used():
            self._create(spec)
        self._host.start(spec.name, self._plugged(vm), self._identity(spec, user))
        self._host.serve_tasks(spec.name, vm.task_token)
        return self._host.control_groups(spec.name)

    def _create(self, spec: Specification) -> None:
        try:
            self._host.create(spec)
        except Gone:
            if spec.template_size is None:
                raise
            self._host.build_template(TemplateKey(self._host.config.host, spec.image, spec.template_size))
            self._host.create(spec)

    def is_alive(self, vm: JobVm) -> bool:
        """See `JobHost`."""
        with suppress(Gone):
            os.close(self._host.open_process(job_vm_name(vm)))
            return True
        return False

    def connect(self, vm: JobVm) -> tuple[socket.socket, int]:
        """See `JobHost`."""
        process = self._host.open_process(job_vm_name(vm))
        try:
            connection = socket.create_connection((self._address(vm), TASKS_PORT), _CONNECT_TIMEOUT)
        except OSError as error:
            os.close(process)
            raise Unknown(f"the guest does not answer: {error}", hint="see its console beside its manifest") from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        return connection, process

    def kill(self, vm: JobVm) -> None:
        """See `JobHost`."""
        self._host.kill([job_vm_name(vm)])

    def remove(self, vm: JobVm) -> None:
        """See `JobHost`."""
        self._host.destroy(job_vm_name(vm), self._settings.pacing.reclaim_grace, vm.token)
        self._bridge.remove_unless(self._host.list_vms)

    def _address(self, vm: JobVm) -> str:
        return str(self._network[_FIRST_ADDRESS + vm.number])

    def _specification(self, vm: JobVm) -> Specification:
        qemu, abilities = self._settings.qemu, self._host.image_abilities(vm.image)
        instant = {"plug_cpus", "plug_memory"} <= abilities
        base = Size(qemu.base_cpus, qemu.base_memory)
        name, address = job_vm_name(vm), self._address(vm)
        return Specification(
            name=name,
            token=vm.token,
            image=vm.image,
            kind=CloneKind.INSTANT if instant else CloneKind.LINKED,
            size=vm.size,
            mac=mac_of_address(address),
            address=f"{address}/{self._network.prefixlen}",
            bridge=self._bridge.name,
            template_size=base if instant else None,
            job_groups=vm.groups,
        )

    def _plugged(self, vm: JobVm) -> Size:
        """The size to which the VM is plugged: whole blocks of memory, and not more than was asked for."""
        base = self._settings.qemu.base_memory
        return replace(vm.size, memory=base + (vm.memory - base) // _BLOCK * _BLOCK)

    def _identity(self, spec: Specification, user: User) -> Identity:
        return Identity(
            hostname=spec.name,
            mac=spec.mac,
            address=spec.address,
            gateway=str(self._network[1]),
            machine_id=machine_id(f"{spec.name} {spec.token}"),
            users=(user,),
            mounts=self._settings.mounts,
            peers=self._settings.network.hosts,
        )


class _Bridge:
    """The bridge of these VMs, which has the host's address. It exists as long as there is a VM."""

    def __init__(self, name: str, address: str, prefix: int) -> None:
        self.name, self._address, self._prefix = name, address, prefix
        self._lock = threading.Lock()
        self._users = 0  # that make a VM now

    @contextmanager
    def used(self) -> Iterator[None]:
        """The bridge exists, and is not removed meanwhile. Raises `Broken` if it cannot be made."""
        with self._lock:
            self._ensure()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1

    def _ensure(self) -> None:
        try:
            with IPRoute() as ip:
                found = ip.link_lookup(ifname=self.name)
                if not found:
                    ip.link("add", ifname=self.name, kind="bridge", address=mac_of_address(self._address))
                    found = ip.link_lookup(ifname=self.name)
                    ip.addr("add", index=found[0], address=self._address, prefixlen=self._prefix)
                ip.link("set", index=found[0], state="up")
        except (NetlinkError, OSError) as error:
            raise Broken(f"cannot make the bridge {self.name}: {error}", hint="see job_vms in the settings") from error

    def remove_unless(self, vms: Callable[[], Collection[str]]) -> None:
        """Remove it, if it is there and nobody needs it."""
        with self._lock, suppress(NetlinkError, OSError), IPRoute() as ip:
            if not self._users and not vms():
                for index in ip.link_lookup(ifname=self.name):
                    ip.link("del", index=index)
