"""QEMU on hosts with agents, as a platform."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.agent.vxlan import VxlanDirectory
from multiverse.bundles.contract import DaemonTask, Examination, Followed, PlatformContext
from multiverse.bundles.qemu.agents import connect_agents
from multiverse.bundles.qemu.image_copies import copy_regularly
from multiverse.bundles.qemu.vxlan import MachineVxlan, follow_regularly
from multiverse.config import Settings
from multiverse.core.model import Vm
from multiverse.core.state import State
from multiverse.drivers.qemu.driver import QemuHypervisor, sites, vxlan_config
from multiverse.host.vxlan import VxlanConfig
from multiverse.site import machine


class QemuPlatform:
    """`bundles.contract.Platform`: any number of hosts, each reached through its agent."""

    def __init__(self, context: PlatformContext) -> None:
        self._context = context
        self.hypervisor = connect_agents(context)

    @property
    def measurements(self) -> AgentHypervisor:
        """See `Platform`."""
        return self.hypervisor

    @property
    def guests(self) -> AgentHypervisor:
        """See `Platform`."""
        return self.hypervisor

    async def programs(self) -> Counter[str]:
        """See `Platform`."""
        return await self.hypervisor.count_processes()

    async def follow(self, controller: Followed) -> Sequence[DaemonTask]:
        """See `Platform`: the connections to agents, the controller's machine in the VXLAN, and copies of images."""
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
    """The machine that a host is on, by what the settings call it: a leased host has a name of its own."""
    lease = state.lease_of(host)
    return lease.node if lease else host


class QemuHostSide:
    """`bundles.contract.HostSide`."""

    def local(self, settings: Settings, site: str, vxlan: VxlanConfig | None = None) -> QemuHypervisor:
        """See `HostSide`."""
        return QemuHypervisor(settings, site, vxlan)

    def sites(self, settings: Settings) -> Sequence[str]:
        """See `HostSide`."""
        return sites(settings)


class QemuBundle:
    """`bundles.contract.PlatformBundle`."""

    host = QemuHostSide()

    def open(self, context: PlatformContext) -> QemuPlatform:
        """See `PlatformBundle`."""
        return QemuPlatform(context)

    def sites(self, settings: Settings) -> Sequence[str]:
        """See `PlatformBundle`: those on this machine."""
        return sites(settings)

    def examine(self, settings: Settings, *, run_guests: bool) -> Iterator[Examination]:
        """See `PlatformBundle`: this machine as a host."""
        facts = machine.of_machine(settings, kvm=run_guests)
        for name, found in machine.examine(settings, facts):
            skipped = "not tried" if name == "KVM runs guests" and facts.kvm is None else ""
            yield Examination(name, tuple(found), skipped)


QEMU = QemuBundle()
