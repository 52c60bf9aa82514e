"""The controller's machine in the VXLAN: slurmctld, and all that guests reach through it, is behind its bridge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from multiverse.agent.vxlan import NOT_STARTED
from multiverse.config import Settings, vxlan_address
from multiverse.core.errors import Broken, MultiverseError
from multiverse.core.model import Neighbour, Vm
from multiverse.core.model.identity import without_prefix_length
from multiverse.host.vxlan import Vxlan, VxlanConfig, is_of_machine, machine_owner

log = structlog.get_logger()

LiveVms = Callable[[], Mapping[int, Vm]]
"""Gives the rows of the VMs that there are now, by number."""


class MachineVxlan:
    """`agent.vxlan.VxlanMachines`. The VMs of other machines are reached from here as long as their rows live."""

    def __init__(self, settings: Settings, config: VxlanConfig, node_of: Callable[[str], str] = str) -> None:
        """`node_of` gives the machine that a host is on, by what the settings call it: a leased host has a name of its
        own. Raises what `Vxlan` and `Vxlan.restore` raise."""
        self._settings, self._config, self._node_of = settings, config, node_of
        self._vxlan = Vxlan(config)
        self._vxlan.restore()

    @property
    def own(self) -> str:
        """See `VxlanMachines`."""
        return self._settings.host.name

    async def address_of(self, host: str) -> str:
        """See `VxlanMachines`."""
        return await asyncio.to_thread(vxlan_address, self._settings, self._node_of(host))

    async def gateway(self) -> Neighbour:
        """See `VxlanMachines`."""
        try:
            mac = Path(f"/sys/class/net/{self._config.bridge}/address").read_text().strip()
        except OSError as error:
            raise Broken(
                f"there is no bridge {self._config.bridge}", hint="start it: systemctl start multiverse-bridge"
            ) from error
        return Neighbour(self._settings.network.gateway, mac, await self.address_of(self.own))

    async def reach(self, vm: str, neighbour: Neighbour) -> None:
        """See `VxlanMachines`."""
        await asyncio.to_thread(self._vxlan.add, machine_owner(vm), (neighbour,))

    async def follow(self, vms: LiveVms) -> None:
        """Forget the VMs that have no row any more, and reach those that run: also after this machine has lost its
        records. What fails is repeated by the next call."""
        # The rows are read after the records: a VM has its row before this machine reaches it.
        known = {owner for owner in await asyncio.to_thread(self._vxlan.owners) if is_of_machine(owner)}
        there = {vm.name: vm for vm in vms().values() if vm.host != self.own and vm.address}
        for owner in known - {machine_owner(name) for name in there}:
            await asyncio.to_thread(self._vxlan.drop, owner)
        for name, vm in there.items():
            if machine_owner(name) not in known and vm.state not in NOT_STARTED:
                machine = await self.address_of(vm.host)
                await self.reach(name, Neighbour(without_prefix_length(vm.address), vm.mac, machine))


async def follow_regularly(vxlan: MachineVxlan, vms: LiveVms, interval: float) -> None:
    """Let this machine follow the rows that `vms` gives, each `interval` seconds."""
    while True:
        try:
            await vxlan.follow(vms)
        except MultiverseError as error:
            log.warning("the VXLAN does not follow", reason=str(error))
        await asyncio.sleep(interval)
