"""QEMU on hosts with agents, as a platform."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

import structlog

import multiverse
from multiverse.agent.connection import (
    AgentConnection,
    CommandTransport,
    ControllerEpoch,
    ControllerIdentity,
    Stream,
    Transport,
    UnixTransport,
    command_of,
)
from multiverse.agent.hypervisor import NOT_STARTED, AgentHypervisor, VxlanDirectory
from multiverse.bundles.contract import DaemonTask, Examination, Followed, LeasedTransport, PlatformContext
from multiverse.bundles.qemu.image_copies import copy_regularly
from multiverse.config import Settings, host_names, host_settings, uplink_of, vxlan_address
from multiverse.core.errors import Broken, MultiverseError, Refused, Unknown
from multiverse.core.model import CloneKind, Host, HostState, LeasedHost, Neighbour, Size, Vm
from multiverse.core.model.names import without_prefix_length
from multiverse.core.state import State
from multiverse.drivers.qemu.driver import QemuHypervisor, sites, vxlan_config
from multiverse.host.vxlan import Vxlan, VxlanConfig, is_of_machine, machine_owner
from multiverse.site import examine_machine, machine_facts

EPOCH_WAIT = 5.0  # seconds that the agents have, as the controller starts, to say which epochs they have seen


def connect_agents(context: PlatformContext) -> AgentHypervisor:
    """The hypervisor behind the agents of all hosts of the site: of the settings, of rows and of leases, without hosts
    that an operator removed. Its `run` makes the connections."""
    settings = context.settings
    who = ControllerIdentity(multiverse.__version__, secrets.token_hex(8), context.site, socket.gethostname())
    known, leased = context.rows.hosts, context.rows.leased_hosts()
    removed = {host.name for host in known.values() if host.state is HostState.REMOVED}
    hosts = [
        name for name in dict.fromkeys((*host_names(settings), *known)) if name not in removed and name not in leased
    ]
    epoch = ControllerEpoch(context.epoch, context.keep_epoch, hosts, EPOCH_WAIT)

    def connect(host: str) -> AgentConnection:
        return AgentConnection(host, transport_to(host, settings), who, epoch, Random())

    def connect_leased(host: LeasedHost) -> AgentConnection:
        return AgentConnection(host.lease.name, PilotTransport(context.leased, host), who, epoch, Random())

    return AgentHypervisor([*hosts, *leased], connect, partial(declared, settings), connect_leased, leased)


_FASTEST_UPLINK = 800_000  # Mbit/s that no Ethernet port exceeds


def declared(settings: Settings, name: str) -> Host | None:
    """A host as the settings declare it; None if they do not name it. Its agent, which has the same settings, will
    report no more."""
    host = host_settings(settings, name)
    if host is None:
        return None
    # Only the host itself knows what its uplink reports.
    net = host.net or (_FASTEST_UPLINK if uplink_of(settings, name) else 0)
    return Host(
        name,
        Size(host.cores, host.memory, host.disk, net),
        frozenset(kind.value for kind in CloneKind),
        memory_block=1,
        vm_overhead=0,
        overcommit=host.overcommitment,
    )


class PilotTransport:
    """The agent of a leased host, by a step in its pilot."""

    def __init__(self, leased: LeasedTransport | None, host: LeasedHost) -> None:
        self._leased, self._host = leased, host

    async def open(self) -> Stream:
        """A new step needs slurmctld; a step that runs does not."""
        if self._leased is None:
            raise Unknown(f"the scheduler does not lead to {self._host.lease.name}", hint="it leases no hosts now")
        try:
            command = self._leased.dial(self._host)
        except Refused as error:
            raise Unknown(error.message, hint=error.hint) from error
        return await CommandTransport(command).open()


def transport_to(host: str, settings: Settings) -> Transport:
    """The way to the agent of a host: the Unix socket on this machine, for other machines the command of the
    settings."""
    if host == settings.host.name:
        return UnixTransport(settings.agent.socket)
    return CommandTransport(command_of(settings.agent.connect, host))


log = structlog.get_logger()

LiveVms = Callable[[], Mapping[int, Vm]]  # gives the rows of the VMs that there are now, by number


class MachineVxlan:
    """`agent.hypervisor.VxlanMachines`: the controller's machine in the VXLAN. slurmctld, and all that guests reach
    through it, is behind its bridge. VMs on other machines are reached from here as long as their rows live."""

    def __init__(self, settings: Settings, config: VxlanConfig, node_of: Callable[[str], str] = str) -> None:
        """`node_of` gives the name that the settings have for a host's machine: a leased host has a name of its own.
        Raises the errors of `Vxlan` and `Vxlan.restore`."""
        self._settings, self._config, self._node_of = settings, config, node_of
        self._vxlan = Vxlan(config)
        self._vxlan.restore()

    @property
    def own(self) -> str:
        return self._settings.host.name

    async def address_of(self, host: str) -> str:
        return await asyncio.to_thread(vxlan_address, self._settings, self._node_of(host))

    async def gateway(self) -> Neighbour:
        try:
            mac = Path(f"/sys/class/net/{self._config.bridge}/address").read_text().strip()
        except OSError as error:
            raise Broken(
                f"there is no bridge {self._config.bridge}", hint="start it: systemctl start multiverse-bridge"
            ) from error
        return Neighbour(self._settings.network.gateway, mac, await self.address_of(self.own))

    async def reach(self, vm: str, neighbour: Neighbour) -> None:
        await asyncio.to_thread(self._vxlan.add, machine_owner(vm), (neighbour,))

    async def follow(self, vms: LiveVms) -> None:
        """Forget the VMs that have no row any more, and reach those that run, also if this machine has lost its
        records. The next call repeats what fails."""
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
    while True:
        try:
            await vxlan.follow(vms)
        except MultiverseError as error:
            log.warning("the VXLAN does not follow", reason=str(error))
        await asyncio.sleep(interval)


class QemuPlatform:
    """`bundles.contract.Platform`: any number of hosts, each reached through its agent."""

    def __init__(self, context: PlatformContext) -> None:
        self._context = context
        self.hypervisor = self.measurements = self.guests = connect_agents(context)

    async def programs(self) -> Counter[str]:
        return await self.hypervisor.count_processes()

    async def follow(self, controller: Followed) -> Sequence[DaemonTask]:
        """The connections to agents, the controller's machine in the VXLAN, and copies of images."""
        context, settings = self._context, self._context.settings
        work = [DaemonTask("agents", self.hypervisor.run)]
        config = vxlan_config(settings, context.site)
        if config is not None:
            state = controller.state
            machine = await asyncio.to_thread(MachineVxlan, settings, config, partial(_node_of, state))
            self.hypervisor.vxlan = VxlanDirectory(machine, partial(_find, state), self.hypervisor.connect)
            work.append(DaemonTask("vxlan", partial(follow_regularly, machine, lambda: state.vms, settings.poll)))
        if settings.image.source is None:  # or else hosts copy by themselves
            copying = partial(copy_regularly, settings, controller, context.clock, context.leased)
            work.append(DaemonTask("images", copying))
        return work


def _find(state: State, name: str) -> Vm | None:
    return state.vms[state.vm_named[name]] if name in state.vm_named else None


def _node_of(state: State, host: str) -> str:
    lease = state.lease_of(host)
    return lease.node if lease else host


class QemuBundle:
    """`bundles.contract.PlatformBundle` and `HostSide`, for this machine as a host."""

    def __init__(self) -> None:
        self.host = self

    def local(self, settings: Settings, site: str, vxlan: VxlanConfig | None = None) -> QemuHypervisor:
        return QemuHypervisor(settings, site, vxlan)

    def open(self, context: PlatformContext) -> QemuPlatform:
        return QemuPlatform(context)

    def sites(self, settings: Settings) -> Sequence[str]:
        return sites(settings)

    def examine(self, settings: Settings, *, run_guests: bool) -> Iterator[Examination]:
        facts = machine_facts.of_machine(settings, kvm=run_guests)
        for name, found in examine_machine.examine(settings, facts):
            skipped = "not tried" if name == "KVM runs guests" and facts.kvm is None else ""
            yield Examination(name, tuple(found), skipped)


QEMU = QemuBundle()
