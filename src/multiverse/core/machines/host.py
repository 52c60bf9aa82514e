"""Hosts of the site: whether they belong to it, and whether what was on them has surely ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from multiverse.core.avoidance import tried_at_once
from multiverse.core.machines.vm import end_vms
from multiverse.core.model.host import Drain, HostState, KnownHost
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import State, is_waited_for
from multiverse.core.transition import Change, EffectKind, Event, Transition, transitions, unchanged

H = HostState

# --- table -----------------------------------------------------------------------------------------

_ON = (H.KNOWN, H.SILENT, H.FENCING)
_MEMBERS = (*_ON, H.FENCED)

HOST: tuple[Transition, ...] = (
    *transitions([None, H.REMOVED], Event.ADDED, H.KNOWN),
    *transitions([H.KNOWN], Event.SILENT, H.SILENT),
    *transitions([H.SILENT], Event.FENCE, H.FENCING),
    *transitions([H.FENCING], Event.HELD_BACK, H.SILENT),
    *transitions(_ON, Event.FENCED, H.FENCED),
    *transitions([H.SILENT, H.FENCING, H.FENCED], Event.FOUND, H.KNOWN),
    *transitions(_MEMBERS, Event.RESUMED, H.KNOWN),
    *transitions(_MEMBERS, Event.REMOVED, H.REMOVED),
    *transitions(_MEMBERS, Event.GIVEN_BACK, H.RETURNED),
    *unchanged(_MEMBERS, Event.DRAINED, Event.AVOIDED, Event.CLEARED, Event.QUARANTINED, Event.RETRIED),
)


def fence(state: State, host: KnownHost, why: Reason) -> None:
    """The host is surely off, or nothing of its VMs goes on: they count as ended."""
    state.move(Change(replace(host, state=H.FENCED, reason=why), Event.FENCED, why))
    end_vms(state, state.vms_on(host.name), Event.FENCED, why)


def add_host(host: KnownHost, why: Reason) -> Change:
    """It belongs to the site again. Its agent is its source."""
    again = replace(host, state=H.KNOWN, source=host.name, reason=None, drain=None, faults=())
    return Change(again, Event.ADDED, why)


def drain_host(host: KnownHost, drain: Drain, why: Reason) -> Change:
    return Change(replace(host, drain=drain), Event.DRAINED, said(drain.reason) or why)


def end_drain(host: KnownHost, why: Reason) -> Change:
    return Change(replace(host, drain=None), Event.DRAINED, why)


def resume_host(host: KnownHost, why: Reason) -> Change:
    """It is on, may get VMs, and all that failed there may be tried at once."""
    return Change(tried_at_once(replace(host, state=H.KNOWN, reason=None, drain=None)), Event.RESUMED, why)


def remove_host(host: KnownHost, why: Reason) -> Change:
    return Change(replace(host, state=H.REMOVED, reason=None, drain=None), Event.REMOVED, why)


def return_host(host: KnownHost, why: Reason | None) -> Change:
    return Change(replace(host, state=H.RETURNED, drain=None), Event.GIVEN_BACK, why)


# --- step ------------------------------------------------------------------------------------------


def hosts_to_step(state: State) -> list[str]:
    silent = state.compared.silent
    unusual = [host.name for host in state.hosts_in(H.SILENT, H.FENCING, H.FENCED)]
    of_silent = [host.name for host in state.hosts.values() if host.source in silent] if silent else []
    return sorted({*unusual, *of_silent})


def step_host(state: State, name: str, world: World, policy: Policy, hold: Hold) -> None:
    """Move one host by what is heard of it, and by whether the scheduler reaches its VMs and jobs wait for it."""
    host = state.hosts.get(name)
    if host is None or host.quarantined or host.state is H.REMOVED:
        return
    latest = world.latest(host.source)
    # A late answer may be older than the host's end.
    if latest is not None and name in latest.value.hosts:
        if host.state is not H.KNOWN and latest.began > host.since:
            _find(state, host, Why.IS_BACK())
        return
    if host.state is H.FENCED:
        return
    since = silent_since(host, world)
    if host.state is H.KNOWN:
        if state.now - since > policy.silence and is_given_up(state, host, world):
            why = Why.IS_SILENT()
            state.move(Change(replace(host, state=H.SILENT), Event.SILENT, why))
    elif state.now - since <= policy.silence or not is_given_up(state, host, world):
        _find(state, host, Why.NOT_SILENT())
    else:
        _step_silent(state, host, since, policy, hold)


def _find(state: State, host: KnownHost, why: Reason) -> None:
    state.move(Change(replace(host, state=H.KNOWN, reason=None), Event.FOUND, why))


def _step_silent(state: State, host: KnownHost, since: float, policy: Policy, hold: Hold) -> None:
    alone = max(since, host.since)  # neither the controller nor the scheduler has reached it since then
    limit = host.value.self_fence if host.value else 0.0
    held = hold(host)
    if limit and state.now - alone > limit + max(policy.fence_margin, limit / 5):
        fence(state, host, Why.SELF_FENCED(host=host.name, limit=limit))
    elif host.state is H.FENCING and held:
        state.move(Change(replace(host, state=H.SILENT), Event.HELD_BACK, held))
    elif host.state is H.SILENT and fences(state, host, policy) and not held and state.now - since > policy.fence_after:
        why = Why.HEARD_NOTHING(time=state.now - since)
        state.move(Change(replace(host, state=H.FENCING), Event.FENCE, why))


def fences(state: State, host: KnownHost, policy: Policy) -> bool:
    """Whether the fence command may switch the host off. A leased one may run other jobs of the scheduler."""
    lease = state.lease_of(host.name)
    return policy.fences and (lease is None or policy.lease_from(lease.spec.partition).fence)


def silent_since(host: KnownHost, world: World) -> float:
    """Since when nothing was heard of a host (monotonic); infinity while it is shown, or while nobody listens."""
    observation = world.sources.get(host.source)
    return observation.silent_since(host.name) if observation else float("inf")


def is_given_up(state: State, host: KnownHost, world: World) -> bool:
    """Whether the scheduler reaches none of the host's VMs, has given one up, and a job waits for the host. While a
    node answers, the host is on. We set nodes DOWN ourselves when VMs end: mostly no job waits then. VMs at two places,
    and an unknown scheduler, tell nothing."""
    if world.scheduler is None:
        return False
    shown = world.scheduler.value.nodes
    vms = [vm for vm in state.vms_on(host.name) if len(vm.places) == 1]
    nodes = [shown[vm.name] for vm in vms if vm.name in shown]
    if not any(node.is_given_up for node in nodes) or any(node.answers for node in nodes):
        return False
    return any(is_waited_for(state, vm) for vm in vms)


Hold = Callable[[KnownHost], Reason | None]
"""Says why a silent host is not fenced by the site's command; None if it may be."""


def hold_fencing(state: State, world: World, policy: Policy) -> Hold:
    """While most hosts are silent, none is fenced: then the controller itself is probably cut off."""

    @cache
    def lack() -> Reason | None:
        if not policy.quorum:
            return None
        # Leased hosts are out of sight whenever the scheduler is.
        apart = {policy.here, *state.leased}
        others = [one for one in state.hosts.values() if one.name not in apart and one.value and not one.is_off]
        shown = sum(one.name in world.hosts for one in others)
        total = shown + sum(one.name not in world.hosts and one.drain is None for one in others)
        few = not shown or shown < policy.quorum * total
        return Why.FEW_IN_SIGHT(shown=shown, total=total) if few else None

    return lambda host: Why.CONTROLLER_THERE() if host.name == policy.here else lack()


def held_back(state: State, world: World, policy: Policy) -> dict[str, Reason]:
    """Why silent hosts are not fenced by the site's command though they could be, by host."""
    hold, silent = hold_fencing(state, world, policy), state.hosts_in(H.SILENT)
    found = {host.name: hold(host) for host in silent if fences(state, host, policy)}
    return {name: why for name, why in found.items() if why}


HOST_EFFECTS = {H.FENCING: EffectKind.FENCE}
