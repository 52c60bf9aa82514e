"""Hosts of the site: whether they belong to it, and whether what was on them has surely ended.

In this order: the table, the step by which observations move a host, and the effect that each state permits.
"""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.model import HostState, KnownHost, World
from multiverse.core.state import State
from multiverse.core.transition import Change, Effect, Event, Transition, transitions, unchanged

H = HostState

# --- table -----------------------------------------------------------------------------------------

_MEMBERS = (H.KNOWN, H.FENCED)

HOST: tuple[Transition, ...] = (
    *transitions([None, H.REMOVED], Event.ADDED, H.KNOWN),
    *transitions([H.KNOWN], Event.FENCED, H.FENCED),
    *transitions([H.FENCED], Event.FOUND, H.KNOWN),
    *transitions(_MEMBERS, Event.RESUMED, H.KNOWN),
    *transitions(_MEMBERS, Event.REMOVED, H.REMOVED),
    *unchanged(_MEMBERS, Event.DRAINED, Event.QUARANTINED, Event.RETRIED),
)

# --- step ------------------------------------------------------------------------------------------


def step_host(state: State, name: str, world: World) -> None:
    """Move one host by what its source shows."""
    host = state.hosts.get(name)
    if host is None or host.quarantined:
        return
    latest = world.latest(host.source)
    # An answer that was on its way for long may be older than the moment from which on the host was off.
    shown = latest is not None and name in latest.value.hosts and latest.began > host.since
    if host.state is H.FENCED and shown:
        state.move(Change(replace(host, state=H.KNOWN, reason=""), Event.FOUND, "it is back"))


# --- effect ----------------------------------------------------------------------------------------


def host_effect(host: KnownHost) -> Effect | None:
    """What the state of a host permits."""
    return None
