"""Leases: hosts that are borrowed from the scheduler, each by a pilot job.

In this order: the table, the changes, the step by which observations move a lease, and the effect that each state
permits. When one is asked for or given back, `provisioning.leases` decides.

The host of a lease is a row of its own, from when its pilot was seen running until the lease is gone. Its number is
that of the lease, made negative: no number of a host that is not leased is, and none recurs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from multiverse.core.machines.host import fence, return_host
from multiverse.core.machines.template import remove_templates
from multiverse.core.machines.vm import end_vms
from multiverse.core.model import (
    GIVEN_UP_LEASES,
    Host,
    HostState,
    KnownHost,
    Lease,
    LeaseState,
    PilotSeen,
    PilotState,
    SchedulerView,
    VmState,
    World,
)
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Change, Effect, EffectKind, Event, Transition, transitions, unchanged

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

# --- changes ---------------------------------------------------------------------------------------


def plan_lease(lease: Lease, why: str) -> Change:
    """A new lease is asked for."""
    return Change(lease, Event.PLANNED, why)


def release_lease(lease: Lease, event: Event, why: str) -> Change:
    """Its pilot is to be cancelled."""
    return Change(replace(lease, state=L.RELEASING, reason=why, quarantined=""), event, why)


def _lose(lease: Lease, why: str) -> Change:
    """Its pilot is over, and VMs may go on."""
    return Change(replace(lease, state=L.LOST, reason=why), Event.LOST, why)


# --- step ------------------------------------------------------------------------------------------


def step_lease(state: State, number: int, world: World, policy: Policy) -> None:
    """Move one lease by what the scheduler shows of its pilots. While the scheduler is unknown, nothing is concluded:
    its pilots go on meanwhile."""
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
            _step_ending(state, lease, _pilot_of(lease, view))
        case L.LOST:
            _step_lost(state, lease, _pilot_of(lease, view))
        case L.RELEASING:
            _step_releasing(state, lease, view, world)


def pilots_of(lease: Lease, view: SchedulerView) -> dict[str, PilotSeen]:
    """The pilots of a lease, by the scheduler's id. One of its name with another token is another's."""
    return {id_: one for id_, one in view.pilots.items() if (one.name, one.token) == (lease.name, lease.spec.token)}


def _pilot_of(lease: Lease, view: SchedulerView) -> PilotSeen | None:
    """Its pilot. The scheduler's ids come again, also as that of another lease's pilot."""
    pilot = view.pilots.get(lease.pilot)
    mine = pilot is not None and (pilot.name, pilot.token) == (lease.name, lease.spec.token)
    return pilot if mine else None


def _step_asked(state: State, lease: Lease, view: SchedulerView, world: World) -> None:
    """Its pilot is submitted, and waits until the scheduler starts it. Of several that were submitted because a reply
    was lost, the one that has come farthest is its pilot; the others are cancelled (`unexplained_pilots`)."""
    order = [PilotState.RUNNING, PilotState.PENDING, PilotState.ENDING, PilotState.ENDED]
    known = sorted((order.index(one.state), len(id_), id_) for id_, one in pilots_of(lease, view).items())
    if not known:
        assert world.scheduler is not None
        # One that is planned is submitted again.
        if lease.state is L.WAITING and world.scheduler.began > max(lease.since, world.ended_at(lease.key)):
            _give_up(state, lease, Event.VANISHED, "its pilot is gone")
        return
    id_ = known[0][2]
    pilot = view.pilots[id_]
    seen = replace(lease, pilot=id_)
    if pilot.restarts or pilot.state in (PilotState.ENDING, PilotState.ENDED):
        _give_up(state, seen, Event.FAILED, f"its pilot {id_} {_why(pilot)}")
    elif pilot.state is PilotState.RUNNING:
        state.know_host(KnownHost(lease.name, lease.name, id=-lease.id))
        granted = replace(seen, state=L.STARTING, node=pilot.node, ends=_ends(pilot))
        state.move(Change(granted, Event.GRANTED, f"pilot {id_} runs on {pilot.node}"))
    elif lease.state is L.PLANNED:
        state.move(Change(replace(seen, state=L.WAITING, reason=pilot.reason), Event.EXISTS))
    elif (seen.pilot, pilot.reason) != (lease.pilot, lease.reason):
        state.move(Change(replace(seen, reason=pilot.reason), Event.NOTED, pilot.reason))


def _ends(pilot: PilotSeen) -> float | None:
    return None if pilot.ends == inf else pilot.ends


def _why(pilot: PilotSeen) -> str:
    if pilot.restarts:
        return "was queued again"
    return f"ended: {pilot.reason}" if pilot.reason else "ended"


def _step_running(state: State, lease: Lease, pilot: PilotSeen | None, world: World, policy: Policy) -> None:
    if pilot is None or pilot.restarts or pilot.state in (PilotState.PENDING, PilotState.ENDED):
        _over(state, lease, pilot)
        return
    shown = world.hosts.get(lease.name)
    if said := _ending(pilot, shown):
        why = f"its pilot {lease.pilot} is ending: {said}"
        state.move(Change(replace(lease, state=L.ENDING, reason=why), Event.ENDED, why))
        _end_vms(state, lease, f"host {lease.name}: {why}")
        return
    host = state.hosts.get(lease.name)
    if host is not None and host.state in (HostState.SILENT, HostState.FENCING):
        # What is heard of its pilot when that has ended fences it.
        _give_up(state, lease, Event.FAILED, "nothing is heard of its agent, and a job waits for it")
        return
    in_sight, vms = shown is not None, state.vms_on(lease.name)
    if lease.state is L.STARTING:
        limit = policy.lease_from(lease.spec.partition).start_timeout
        if in_sight:
            state.move(Change(replace(lease, state=L.IDLE), Event.FOUND, "its agent answers"))
        elif world.scheduler is not None and world.scheduler.began - lease.since > limit:
            _give_up(state, lease, Event.FAILED, f"its agent did not answer within {limit:g} s")
    elif lease.state is L.IDLE and vms:
        state.move(Change(replace(lease, state=L.HELD, used=lease.used + 1), Event.TAKEN, f"for {vms[0].name}"))
    elif lease.state is L.HELD and not vms:
        state.move(Change(replace(lease, state=L.IDLE), Event.EMPTIED, "no VM is left on it"))
    elif (ends := _ends(pilot)) != lease.ends:
        state.move(Change(replace(lease, ends=ends), Event.NOTED, "its time limit was changed"))


def _ending(pilot: PilotSeen, host: Host | None) -> str:
    """Why a pilot is ending; empty if it is not. Its agent, which ends its VMs then, may say so before the scheduler
    does."""
    if pilot.state is PilotState.ENDING:
        return pilot.reason or "no reason given"
    return f"its agent says that {host.refuses}" if host is not None and host.refuses else ""


def _end_vms(state: State, lease: Lease, why: str) -> None:
    """Its agent ends the VMs by itself. Their nodes are set DOWN, so that the scheduler queues their jobs again."""
    in_reach = [vm for vm in state.vms_on(lease.name) if vm.state is not VmState.LOST]
    end_vms(state, in_reach, Event.RELEASED, why)


def _step_ending(state: State, lease: Lease, pilot: PilotSeen | None) -> None:
    """Its pilot is given up once nothing is left on its host, or it has ended."""
    if pilot is None or pilot.state is PilotState.ENDED:
        _over(state, lease, pilot)
    elif not state.vms_on(lease.name):
        _give_up(state, lease, Event.RELEASED, lease.reason)


def _over(state: State, lease: Lease, pilot: PilotSeen | None) -> None:
    """Its pilot does not run any more. Its end is that of its VMs only if its node is known to be clean of it."""
    why = f"its pilot {lease.pilot} {_why(pilot) if pilot is not None else 'is gone'}"
    if pilot is not None and pilot.state is PilotState.ENDED and pilot.clean:
        _fence_host(state, lease, f"host {lease.name}: {why}")
    elif _may_go_on(state, lease):
        state.move(_lose(lease, f"{why}, and whether its node {lease.node} has ended its VMs is not known"))
        return
    _give_up(state, lease, Event.VANISHED, why)


def _fence_host(state: State, lease: Lease, why: str) -> None:
    host = state.hosts.get(lease.name)
    if host is not None and not host.is_off:
        fence(state, host, why)


def _may_go_on(state: State, lease: Lease) -> bool:
    """Whether something may go on in VMs on its host."""
    return not state.is_fenced(lease.name) and bool(state.vms_on(lease.name))


def _step_lost(state: State, lease: Lease, pilot: PilotSeen | None) -> None:
    """Its host is fenced like any other: by the scheduler's word that its node is clean after all, by command, or by an
    operator."""
    if pilot is not None and pilot.state is PilotState.ENDED and pilot.clean:
        _fence_host(state, lease, f"host {lease.name}: its node {lease.node} is clean of pilot {lease.pilot}")
    if not _may_go_on(state, lease):
        _give_up(state, lease, Event.FENCED, "nothing of its VMs goes on")


def _step_releasing(state: State, lease: Lease, view: SchedulerView, world: World) -> None:
    """It is gone once no pilot of it is left, in an observation that began after its last cancellation had ended, and
    nothing is claimed on its host. A pilot that is granted after that is cancelled, as none that a lease explains."""
    assert world.scheduler is not None
    pilots = pilots_of(lease, view)
    left = [id_ for id_, one in pilots.items() if one.state is not PilotState.ENDED]
    if left or world.scheduler.began <= max(world.ended_at(lease.key, inf), lease.since):
        return
    last = pilots.get(lease.pilot)
    if last is not None and last.clean:
        _fence_host(state, lease, f"host {lease.name}: its pilot {lease.pilot} has ended")
    if _may_go_on(state, lease):
        state.move(_lose(lease, f"its pilot is gone, and whether its node {lease.node} has ended its VMs is not known"))
    elif not state.vms_on(lease.name):
        templates = state.templates_on(lease.name)
        gone = remove_templates(templates, "its host is given back")
        host = state.hosts.get(lease.name)
        if host is not None:
            gone.append(return_host(host, lease.reason))
        over = Change(replace(lease, state=L.GONE), Event.ABSENT, lease.reason)
        state.move(over, *gone, free=[row.claim_key for row in templates])


def _give_up(state: State, lease: Lease, event: Event, why: str) -> None:
    state.move(release_lease(lease, event, why))


def unexplained_pilots(leases: Mapping[int, Lease], view: SchedulerView) -> list[tuple[str, str]]:
    """Name and id of each pilot that is no lease's: that of a lease that is gone, of another database, or a second one.
    The effect of a lease that is given up concerns all of its name."""
    named = {lease.name: lease for lease in leases.values()}
    found = []
    for id_, pilot in sorted(view.pilots.items()):
        lease = named.get(pilot.name)
        mine = lease is not None and pilot.token == lease.spec.token and lease.pilot in ("", id_)
        given_up = lease is not None and lease.state in GIVEN_UP_LEASES
        if pilot.state in (PilotState.PENDING, PilotState.RUNNING) and not mine and not given_up:
            found.append((pilot.name, id_))
    return found


# --- effect ----------------------------------------------------------------------------------------

ACTING_LEASES = (L.PLANNED, L.LOST, L.RELEASING)
"""The states that permit an effect."""


def lease_effect(lease: Lease) -> Effect | None:
    """What the state of a lease permits."""
    if lease.quarantined:
        return None
    match lease.state:
        case L.PLANNED:
            return Effect(EffectKind.REQUEST, lease.key)
        case L.LOST | L.RELEASING:
            return Effect(EffectKind.GIVE_BACK, lease.key)
        case _:
            return None
