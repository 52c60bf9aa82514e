"""The controller's part of a VXLAN: it tells each host on which machines there is what the host's VMs may need.

A VM needs the other VMs of its job, and the controller's machine, which needs the VM. A VM that is started learns of
all of them; those that were started before it learn of the VM before it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from multiverse.core.errors import Gone, Refused
from multiverse.core.model import Identity, Member, Neighbour, Vm, VmRef, VmState
from multiverse.core.model.identity import without_prefix_length

log = structlog.get_logger()

NOT_STARTED = (VmState.PLANNED, VmState.PARKED)
"""A VM in one of these states learns of its peers when it is started."""

Connect = Callable[[VmRef, tuple[Neighbour, ...]], Awaitable[None]]
"""Let a VM reach these addresses, as `agent.calls.VmConnections` does on the VM's host."""


class VxlanMachines(Protocol):
    """The machines that the VXLAN connects."""

    @property
    def own(self) -> str:
        """The name of the controller's machine, which may be a host."""
        ...

    async def address_of(self, host: str) -> str:
        """The address of a host, or of the controller's machine, in the network of the hosts. Leased hosts of one node
        have the same. Raises `Refused` if nobody knows it."""
        ...

    async def gateway(self) -> Neighbour:
        """How the VMs of other machines reach the controller's."""
        ...

    async def reach(self, vm: str, neighbour: Neighbour) -> None:
        """Let the controller's machine reach a VM of another one."""
        ...


class VxlanDirectory:
    """Where the VMs of a site are. `find` gives the row of the VM of that name, if there is one."""

    def __init__(self, machines: VxlanMachines, find: Callable[[str], Vm | None], connect: Connect) -> None:
        self._machines, self._find, self._connect = machines, find, connect

    async def introduce(self, vm: VmRef, identity: Identity) -> tuple[Neighbour, ...]:
        """What a VM of `vm.source` that is about to be started has to reach on other machines. All that is there
        reaches the VM when this returns. Again is success. Raises `Refused` if an address of a machine is not known,
        and what the agents of its peers raise."""
        machines, host = self._machines, vm.source
        address = without_prefix_length(identity.address)
        itself = Neighbour(address, identity.mac, await machines.address_of(host))
        peers, neighbours = [], []
        for name, _ in identity.peers:
            peer = self._find(name)
            if peer is None or peer.host == host:
                continue
            machine = await machines.address_of(peer.host)
            if machine != itself.machine:  # the bridge of a node connects its leases
                peers.append(peer)
                neighbours.append(Neighbour(without_prefix_length(peer.address), peer.mac, machine))
        if host != machines.own:
            neighbours.append(await machines.gateway())
            await machines.reach(vm.name, itself)
        await asyncio.gather(*(self._tell(peer, itself) for peer in peers if peer.state not in NOT_STARTED))
        return tuple(neighbours)

    async def located(self, host: str, members: Sequence[Member]) -> list[Member]:
        """These members with their machines, as `host` needs them, without those on a machine whose address is not
        known: none of these starts, either. Raises `Refused` if that of `host` itself is not known."""
        found, machine_of = list[Member](), {host: await self._machines.address_of(host)}
        for member in members:
            if member.host not in machine_of:
                try:
                    machine_of[member.host] = await self._machines.address_of(member.host)
                except Refused as error:
                    log.warning("VMs of a host are not reached", host=member.host, reason=str(error))
                    machine_of[member.host] = ""
            machine = machine_of[member.host]
            if machine:
                # The bridge of a node connects its leases.
                found.append(replace(member, machine="" if machine == machine_of[host] else machine))
        return found

    async def _tell(self, peer: Vm, neighbour: Neighbour) -> None:
        try:
            await self._connect(peer.ref, (neighbour,))
        except Gone:  # its own end will be seen
            return
