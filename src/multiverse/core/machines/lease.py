"""Leases: hosts that are borrowed from the scheduler, each by a pilot job. `core.leases` decides about them.

The host of a lease is a row of its own, from when its pilot was seen running until the lease is gone. Its number is
that of the lease, made negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from multiverse.core.machines.host import fence, return_host
from multiverse.core.machines.saved import is_held_for_saving
from multiverse.core.machines.template import remove_templates
from multiverse.core.machines.vm import end_vms
from multiverse.core.model.host import Host, HostState, KnownHost
from multiverse.core.model.job import GIVEN_UP_LEASES, Lease, LeaseState, PilotSeen, PilotState, SchedulerView
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.vm import SLEEPING_STATES, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Change, EffectKind, Event, Transition, transitions, unchanged

L = LeaseState

# --- table -----------------------------------------------------------------------------------------

_ASKED = (L.PLANNED, L.WAITING)
_RUNS = (L.STARTING, L.IDLE, L.HELD)
_LIVE = tuple(state for state in L if state is not L.GONE)

LEASE: tuple[Transition, ...] = (
    *transitions([None], Event.PLANNED, L.PLANNED),
    *transitions([L.PLANNED], Event.EXISTS, L.WAITING),
    *transitions(_ASKED, Event.GRANTED, L.STARTING),
    *transitions([L.STARTING], Event.FOUND, L.IDLE),
    *transitions([L.IDLE], Event.TAKEN, L.HELD),
    *transitions([L.HELD], Event.EMPTIED, L.IDLE),
    *transitions(_RUNS, Event.ENDED, L.ENDING),
    *transitions([*_RUNS, L.ENDING, L.RELEASING], Event.LOST, L.LOST),
    *transitions([*_ASKED, *_RUNS], Event.FAILED, L.RELEASING),
    *transitions([L.WAITING, *_RUNS, L.ENDING], Event.VANISHED, L.RELEASING),
    *transitions([*_ASKED, L.IDLE, L.ENDING], Event.RELEASED, L.RELEASING),
    *transitions([L.LOST], Event.FENCED, L.RELEASING),
    *transitions([L.RELEASING], Event.ABSENT, L.GONE),
    *unchanged([L.WAITING, L.IDLE, L.HELD], Event.NOTED),
    *unchanged(_LIVE, Event.QUARANTINED, Event.RETRIED),
)


def plan_lease(lease: Lease, why: Reason) -> Change:
    return Change(lease, Event.PLANNED, why)


def release_lease(lease: Lease, event: Event, why: Reason | None) -> Change:
    """Its pilot is to be cancelled."""
    return Change(replace(lease, state=L.RELEASING, reason=why, quarantined=None), event, why)


def _lose(lease: Lease, why: Reason) -> Change:
    return Change(replace(lease, state=L.LOST, reason=why), Event.LOST, why)


# --- step ------------------------------------------------------------------------------------------


def step_lease(state: State, number: int, world: World, policy: Policy) -> None:
    """Move one lease by what the scheduler shows of its pilots. While it is unknown, nothing is concluded."""
    lease = state.leases.get(number)
    if lease is None or lease.quarantined or world.scheduler is None:
        return
    view = world.scheduler.value
    match lease.state:
        case L.PLANNED | L.WAITING:
            _step_asked(state, lease, view, world)
        case L.STARTING | L.IDLE | L.HELD:
            _step_running(state, lease, _pilot_of(lease, view), world, policy)
        case L.ENDING:
            _step_ending(state, lease, _pilot_of(lease, view), world, policy)
        case L.LOST:
            _step_lost(state, lease, _pilot_of(lease, view))
        case L.RELEASING:
            _step_releasing(state, lease, view, world)


def pilots_of(lease: Lease, view: SchedulerView) -> dict[str, PilotSeen]:
    """The pilots of a lease, by the scheduler's id. One of its name with another token is another's."""
    return {id_: one for id_, one in view.pilots.items() if (one.name, one.token) == (lease.name, lease.spec.token)}


def _pilot_of(lease: Lease, view: SchedulerView) -> PilotSeen | None:
    """Its pilot, by name and token: the scheduler's ids come again."""
    pilot = view.pilots.get(lease.pilot)
    mine = pilot is not None and (pilot.name, pilot.token) == (lease.name, lease.spec.token)
    return pilot if mine else None


def _step_asked(state: State, lease: Lease, view: SchedulerView, world: World) -> None:
    """Its pilot waits to be started. After a lost reply there may be several: the farthest one counts."""
    order = [PilotState.RUNNING, PilotState.PENDING, PilotState.ENDING, PilotState.ENDED]
    known = sorted((order.index(one.state), len(id_), id_) for id_, one in pilots_of(lease, view).items())
    if not known:
        assert world.scheduler is not None
        # One that is planned is submitted again.
        if lease.state is L.WAITING and world.scheduler.began > max(lease.since, world.ended_at(lease.key)):
            state.move(release_lease(lease, Event.VANISHED, Why.PILOT_GONE()))
        return
    id_ = known[0][2]
    pilot = view.pilots[id_]
    seen = replace(lease, pilot=id_)
    if pilot.restarts or pilot.state in (PilotState.ENDING, PilotState.ENDED):
        state.move(release_lease(seen, Event.FAILED, _why(id_, pilot)))
    elif pilot.state is PilotState.RUNNING:
        state.know_host(KnownHost(lease.name, lease.name, id=-lease.id))
        granted = replace(seen, state=L.STARTING, node=pilot.node, ends=_ends(pilot))
        state.move(Change(granted, Event.GRANTED, Why.PILOT_RUNS(pilot=id_, node=pilot.node)))
    elif lease.state is L.PLANNED:
        state.move(Change(replace(seen, state=L.WAITING, reason=said(pilot.reason)), Event.EXISTS))
    elif (seen.pilot, said(pilot.reason)) != (lease.pilot, lease.reason):
        state.move(Change(replace(seen, reason=said(pilot.reason)), Event.NOTED, said(pilot.reason)))


def _ends(pilot: PilotSeen) -> float | None:
    return None if pilot.ends == inf else pilot.ends


def _why(id_: str, pilot: PilotSeen | None) -> Reason:
    if pilot is None:
        return Why.PILOT_GONE(pilot=id_)
    return Why.PILOT_QUEUED(pilot=id_) if pilot.restarts else Why.PILOT_ENDED(said(pilot.reason), pilot=id_)


def _step_running(state: State, lease: Lease, pilot: PilotSeen | None, world: World, policy: Policy) -> None:
    if pilot is None or pilot.restarts or pilot.state in (PilotState.PENDING, PilotState.ENDED):
        _over(state, lease, pilot)
        return
    shown = world.hosts.get(lease.name)
    if ending := _ending(pilot, shown):
        why = Why.PILOT_ENDS(ending, pilot=lease.pilot)
        state.move(Change(replace(lease, state=L.ENDING, reason=why), Event.ENDED, why))
        _end_vms(state, state.leases[lease.id], world, policy)
        return
    host = state.hosts.get(lease.name)
    if host is not None and host.state in (HostState.SILENT, HostState.FENCING):
        # What is heard of its pilot when that has ended fences it.
        state.move(release_lease(lease, Event.FAILED, Why.AGENT_SILENT()))
        return
    in_sight, vms = shown is not None, state.vms_on(lease.name)
    if lease.state is L.STARTING:
        limit = policy.lease_from(lease.spec.partition).start_timeout
        if in_sight:
            state.move(Change(replace(lease, state=L.IDLE), Event.FOUND, Why.AGENT_ANSWERS()))
        elif world.scheduler is not None and world.scheduler.began - lease.since > limit:
            state.move(release_lease(lease, Event.FAILED, Why.AGENT_LATE(limit=limit)))
    elif lease.state is L.IDLE and vms:
        state.move(Change(replace(lease, state=L.HELD, used=lease.used + 1), Event.TAKEN, Why.FOR_VM(vm=vms[0].name)))
    elif lease.state is L.HELD and not vms:
        state.move(Change(replace(lease, state=L.IDLE), Event.EMPTIED, Why.NO_VM_LEFT()))
    elif (ends := _ends(pilot)) != lease.ends:
        state.move(Change(replace(lease, ends=ends), Event.NOTED, Why.LIMIT_CHANGED()))


def _ending(pilot: PilotSeen, host: Host | None) -> Reason | None:
    """Why a pilot is ending, by the scheduler or by its agent; None if it is not."""
    if pilot.state is PilotState.ENDING:
        return said(pilot.reason or "no reason given")
    return Why.AGENT_SAYS(said(host.refuses)) if host is not None and host.refuses else None


TOLD_WITHIN = 10.0
"""Seconds for which a pilot that the scheduler shows as ending is given to say until when it holds its VMs."""


def may_leave(state: State, lease: Lease, world: World, policy: Policy) -> bool:
    """Whether the VMs of a lease that ends are still held by its agent, so that they can go elsewhere. Nobody knows
    that while it is out of sight, as when its pilot's steps have just ended, or after a restart of this controller."""
    if not policy.evict_leases or (host := world.hosts.get(lease.name)) is None:
        return policy.evict_leases
    if host.storage is None and host.moves is None:
        return False
    if host.refuses:
        return state.now + world.epoch < host.holds_until
    return state.now - lease.since < TOLD_WITHIN


def _end_vms(state: State, lease: Lease, world: World, policy: Policy) -> None:
    """End the VMs that cannot leave any more, as its agent does by itself. Their nodes are set DOWN, so that the
    scheduler queues their jobs again. What is being written goes on until its agent ends it."""
    ending = [vm for vm in state.vms_on(lease.name) if vm.state is not VmState.LOST]
    if may_leave(state, lease, world, policy):
        ending = [vm for vm in ending if vm.state not in (VmState.SERVING, *SLEEPING_STATES)]
    ending = [vm for vm in ending if not is_held_for_saving(state, vm)]
    end_vms(state, ending, Event.RELEASED, Why.OF_HOST(lease.reason, host=lease.name))


def _step_ending(state: State, lease: Lease, pilot: PilotSeen | None, world: World, policy: Policy) -> None:
    if pilot is None or pilot.state is PilotState.ENDED:
        _over(state, lease, pilot)
    elif not state.vms_on(lease.name):
        state.move(release_lease(lease, Event.RELEASED, lease.reason))
    else:
        _end_vms(state, lease, world, policy)


def _over(state: State, lease: Lease, pilot: PilotSeen | None) -> None:
    """Its pilot is over. Its VMs have ended too only if its node is known to be clean."""
    why = _why(lease.pilot, pilot)
    if pilot is not None and pilot.state is PilotState.ENDED and pilot.clean:
        _fence_host(state, lease, Why.OF_HOST(why, host=lease.name))
    elif _may_go_on(state, lease):
        state.move(_lose(lease, Why.MAY_GO_ON(why, node=lease.node)))
        return
    state.move(release_lease(lease, Event.VANISHED, why))


def _fence_host(state: State, lease: Lease, why: Reason) -> None:
    host = state.hosts.get(lease.name)
    if host is not None and not host.is_off:
        fence(state, host, why)


def _may_go_on(state: State, lease: Lease) -> bool:
    return not state.is_fenced(lease.name) and bool(state.vms_on(lease.name))


def _step_lost(state: State, lease: Lease, pilot: PilotSeen | None) -> None:
    """Its host is fenced: by the scheduler (its node is clean after all), by command, or by an operator."""
    if pilot is not None and pilot.state is PilotState.ENDED and pilot.clean:
        _fence_host(state, lease, Why.NODE_CLEAN(host=lease.name, node=lease.node, pilot=lease.pilot))
    if not _may_go_on(state, lease):
        state.move(release_lease(lease, Event.FENCED, Why.NOTHING_GOES_ON()))


def _step_releasing(state: State, lease: Lease, view: SchedulerView, world: World) -> None:
    """It is gone once its last cancellation has ended, no pilot is left, and nothing is claimed on its host."""
    assert world.scheduler is not None
    pilots = pilots_of(lease, view)
    left = [id_ for id_, one in pilots.items() if one.state is not PilotState.ENDED]
    if left or world.scheduler.began <= max(world.ended_at(lease.key, inf), lease.since):
        return
    last = pilots.get(lease.pilot)
    if last is not None and last.clean:
        _fence_host(state, lease, Why.PILOT_OVER(host=lease.name, pilot=lease.pilot))
    if _may_go_on(state, lease):
        state.move(_lose(lease, Why.MAY_GO_ON(Why.PILOT_GONE(), node=lease.node)))
    elif not state.vms_on(lease.name):
        templates = state.templates_on(lease.name)
        gone = remove_templates(templates, Why.HOST_GIVEN_BACK())
        host = state.hosts.get(lease.name)
        if host is not None:
            gone.append(return_host(host, lease.reason))
        over = Change(replace(lease, state=L.GONE), Event.ABSENT, lease.reason)
        state.move(over, *gone, free=[row.claim_key for row in templates])


def unexplained_pilots(leases: Mapping[int, Lease], view: SchedulerView) -> list[tuple[str, str]]:
    """Name and id of each pilot that belongs to no lease. Leases that are given up cancel their own."""
    named = {lease.name: lease for lease in leases.values()}
    found = []
    for id_, pilot in sorted(view.pilots.items()):
        lease = named.get(pilot.name)
        mine = lease is not None and pilot.token == lease.spec.token and lease.pilot in ("", id_)
        given_up = lease is not None and lease.state in GIVEN_UP_LEASES
        if pilot.state in (PilotState.PENDING, PilotState.RUNNING) and not mine and not given_up:
            found.append((pilot.name, id_))
    return found


LEASE_EFFECTS = {L.PLANNED: EffectKind.REQUEST, L.LOST: EffectKind.GIVE_BACK, L.RELEASING: EffectKind.GIVE_BACK}
