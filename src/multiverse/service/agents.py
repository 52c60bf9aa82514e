"""The controller's connections to the agents of its hosts."""

from __future__ import annotations

import secrets
from random import Random

import multiverse
from multiverse.agent.connection import AgentConnection, ControllerIdentity
from multiverse.agent.controller_epoch import ControllerEpoch
from multiverse.agent.hypervisor import AgentHypervisor
from multiverse.agent.transport import UnixTransport
from multiverse.config import Settings
from multiverse.store import Store

EPOCH_WAIT = 5.0
"""Seconds that the agents have, as the controller starts, to say which epochs they have seen."""


def connect_agents(settings: Settings, store: Store) -> AgentHypervisor:
    """The hypervisor behind the agents of the settings' hosts. Its `run` makes the connections."""
    who = ControllerIdentity(multiverse.__version__, secrets.token_hex(8), store.site)
    host = settings.host.name
    epoch = ControllerEpoch(store.epoch, store.keep_epoch, [host], EPOCH_WAIT)
    return AgentHypervisor([AgentConnection(host, UnixTransport(settings.agent.socket), who, epoch, Random())])
