"""What connects the bridges of a job that has several nodes: a VXLAN of the job's own."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from multiverse.agent.job_vm import JobVm
from multiverse.config import VXLAN_PORTS, Settings, vxlan_address
from multiverse.core.errors import Refused
from multiverse.core.model import Neighbour
from multiverse.drivers.qemu.job_network import JobAddresses, guest_mac
from multiverse.host.vxlan import Vxlan, VxlanConfig

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
