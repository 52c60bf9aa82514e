"""The controller's connections to the agents of its hosts."""

from __future__ import annotations

import secrets
import socket
from functools import partial
from random import Random

import multiverse
from multiverse.agent.connection import AgentConnection, ControllerIdentity
from multiverse.agent.controller_epoch import ControllerEpoch
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.agent.transport import CommandTransport, Stream, Transport, UnixTransport, command_of
from multiverse.bundles.contract import LeasedTransport, PlatformContext
from multiverse.config import Settings, host_names, host_settings, uplink_of
from multiverse.core.errors import Refused, Unknown
from multiverse.core.model import CloneKind, Host, HostState, LeasedHost, Overcommitment, Size

EPOCH_WAIT = 5.0
"""Seconds that the agents have, as the controller starts, to say which epochs they have seen."""


def connect_agents(context: PlatformContext) -> AgentHypervisor:
    """The hypervisor behind the agents of the site's hosts: those of the settings, unless an operator removed them, and
    those that have rows beside them, with those that are leased. Its `run` makes the connections."""
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


_FASTEST_UPLINK = 800_000
"""Mbit/s that no Ethernet port exceeds."""


def declared(settings: Settings, name: str) -> Host | None:
    """A host as the settings declare it, if they name it: what its agent, which has the same settings, will report at
    most."""
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
        overcommit=Overcommitment(
            host.cpu_overcommit, host.overcommit, host.disk_overcommit, host.floor, host.disk_floor
        ),
    )


class PilotTransport:
    """The agent of a leased host, by a step in its pilot."""

    def __init__(self, leased: LeasedTransport | None, host: LeasedHost) -> None:
        self._leased, self._host = leased, host

    async def open(self) -> Stream:
        """See `Transport`. A step that runs goes on without slurmctld; to start one, slurmctld is needed."""
        if self._leased is None:
            raise Unknown(f"the scheduler does not lead to {self._host.lease.name}", hint="it leases no hosts now")
        try:
            command = self._leased.dial(self._host)
        except Refused as error:
            raise Unknown(error.message, hint=error.hint) from error
        return await CommandTransport(command).open()


def transport_to(host: str, settings: Settings) -> Transport:
    """The way to the agent of a host: its Unix socket on this machine, and for others the command of the settings."""
    if host == settings.host.name:
        return UnixTransport(settings.agent.socket)
    return CommandTransport(command_of(settings.agent.connect, host))
