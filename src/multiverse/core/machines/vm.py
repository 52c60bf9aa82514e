"""VMs: from before they exist until they are seen gone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from multiverse.core.avoidance import blame, joined
from multiverse.core.machines.saved import is_kept_in_memory
from multiverse.core.machines.sleep import find_asleep, step_sleep, wake_vm
from multiverse.core.model.basics import ClaimKey, Depth
from multiverse.core.model.host import Claim, HypervisorView
from multiverse.core.model.job import ENDING_STATES, PINNED_STATES, Attempt, AttemptState, JobState, NodeState, went_on
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.saved import WAITS_FOR_RUN
from multiverse.core.model.vm import (
    LEAVING_STATES,
    MOVING_STATES,
    SLEEPING_STATES,
    UPCOMING_STATES,
    OfferState,
    Place,
    Vm,
    VmCondition,
    VmState,
)
from multiverse.core.model.world import Seen, World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Awaiting, Change, EffectKind, Event, Transition, transitions, unchanged

V = VmState

# --- table -----------------------------------------------------------------------------------------

_AT_ONE_PLACE = (*UPCOMING_STATES, V.JOINED, V.SERVING, *SLEEPING_STATES, V.RETIRING, V.DEAD)
_LIVE = (*_AT_ONE_PLACE, *MOVING_STATES)

VM: tuple[Transition, ...] = (
    *transitions([None], Event.PLANNED, V.PLANNED),
    *transitions([None, V.PARKED, V.JOINED, V.RETIRING], Event.FOUND, V.ORPHAN),
    *transitions([V.PLANNED], Event.EXISTS, V.PARKED),
    *transitions([V.PARKED], Event.START, V.STARTING),
    *transitions([V.STARTING], Event.REGISTERED, V.JOINED),
    *transitions([V.JOINED], Event.RUNS, V.SERVING),
    *transitions([V.PLANNED, V.STARTING], Event.FAILED, V.ENDING),
    *transitions([V.JOINED, V.SERVING], Event.DIED, V.DEAD),
    *transitions(
        [V.PARKED, V.STARTING, V.JOINED, V.SERVING, *SLEEPING_STATES, V.RETIRING, V.DEAD], Event.DIED, V.ENDING
    ),
    *transitions([V.JOINED], Event.RETIRED, V.RETIRING),
    *transitions([V.RETIRING], Event.TAKEN, V.JOINED),
    *transitions([V.SERVING], Event.MOVE, V.MOVING),
    *transitions([V.MOVING], Event.MOVED, V.SERVING, V.SETTLING),
    *transitions([V.MOVING], Event.STAYED, V.SERVING, V.SETTLING),
    *unchanged([V.SETTLING], Event.MOVED),
    *transitions([V.SETTLING], Event.PLACE_LEFT, V.SERVING),
    *transitions([V.SERVING], Event.SLEEP, V.FALLING_ASLEEP),
    *transitions([V.FALLING_ASLEEP], Event.SLEPT, V.ASLEEP),
    *transitions([V.SERVING], Event.FOUND, V.ASLEEP),
    *transitions([V.DELAYED], Event.SLEEP, V.ASLEEP),
    *transitions([V.ASLEEP], Event.DELAY, V.DELAYED),
    *transitions([V.FALLING_ASLEEP, V.ASLEEP, V.DELAYED, V.LOST], Event.WAKE, V.WAKING),
    *unchanged([V.WAKING], Event.WAKE),
    *transitions([V.WAKING], Event.WOKE, V.SERVING),
    *transitions(
        [*UPCOMING_STATES, V.JOINED, V.SERVING, *SLEEPING_STATES, *MOVING_STATES, V.RETIRING],
        Event.RELEASED,
        V.RELEASING,
    ),
    *transitions([V.ORPHAN], Event.RELEASED, V.RELEASING, V.ENDING),
    *transitions([V.ORPHAN], Event.DIED, V.ENDING),
    *transitions([V.DEAD], Event.RELEASED, V.REMOVING),
    *transitions(_LIVE, Event.RELEASED, V.ENDING),
    *transitions([*_LIVE, *LEAVING_STATES], Event.LOST, V.LOST),
    *transitions([V.LOST], Event.FOUND, V.SERVING, V.ASLEEP, V.SETTLING, V.ENDING),
    *transitions([*_AT_ONE_PLACE, V.ORPHAN, V.LOST], Event.FENCED, V.ENDING),
    *transitions([V.ENDING], Event.NODE_FREE, V.REMOVING),
    *transitions(LEAVING_STATES, Event.ABSENT, V.GONE),
    *transitions([V.REMOVING, V.RELEASING], Event.NODE_LEFT, V.DELETING),
    *transitions([V.DELETING], Event.ABSENT, V.GONE),
    *unchanged([V.PARKED, V.JOINED], Event.TAKEN),
    *unchanged([V.ORPHAN], Event.NOTED),
    *unchanged([V.LOST, *LEAVING_STATES], Event.PLACE_LEFT),
    *unchanged([*_LIVE, V.ORPHAN, V.LOST, *LEAVING_STATES, V.DELETING], Event.QUARANTINED, Event.RETRIED),
)

OFFER_TERM = 15.0  # seconds for which a job may still take an idle orphan, by an earlier controller's offer

AWAITED_VMS = {
    V.WAKING: Awaiting.AFTER_EFFECT,
    **dict.fromkeys((V.STARTING, V.ENDING, V.REMOVING, V.RELEASING), Awaiting.AFTER_EFFECT),
    V.RETIRING: Awaiting.UNHURRIED,
}
"""In which states the scheduler is read for the VM's node."""

# --- changes ---------------------------------------------------------------------------------------


def plan_vm(vm: Vm, why: Reason | None = None) -> Change:
    return Change(vm, Event.PLANNED, why)


def adopt_vm(vm: Vm, why: Reason) -> Change:
    """A VM was found that no record explains, or that serves what no record tells of."""
    return Change(replace(vm, state=V.ORPHAN), Event.FOUND, why)


def start_vm(vm: Vm) -> Change:
    return Change(replace(vm, state=V.STARTING), Event.START)


def take_vm(vm: Vm, attempt: Attempt, why: Reason) -> Change:
    state = V.JOINED if vm.state is V.RETIRING else vm.state
    return Change(replace(vm, state=state, attempt=attempt.id, reason=None), Event.TAKEN, why)


def run_job_on_vm(vm: Vm) -> Change:
    return Change(replace(vm, state=V.SERVING), Event.RUNS)


def move_vm(vm: Vm, target: Place, why: Reason) -> Change:
    """Let a VM go to another host while its job runs."""
    moving = replace(vm, state=V.MOVING, places=(vm.place, target), moves=vm.moves + 1)
    return Change(moving, Event.MOVE, Why.MOVES(why, hosts=[vm.host, target.host]))


def keep_vm_there(vm: Vm, why: Reason) -> Change:
    """Its move has failed. What has come to the target is to be removed."""
    return Change(replace(vm, state=V.SETTLING), Event.STAYED, why)


def retire_vm(vm: Vm, why: Reason) -> Change:
    return Change(replace(vm, state=V.RETIRING, reason=why), Event.RETIRED, why)


def release_vm(vm: Vm, why: Reason | None, *, occupied: bool = False) -> Change:
    """It is needed no more, nor is its quarantine. The node goes DOWN first if a job is on it (`occupied`)."""
    target = V.REMOVING if vm.state is V.DEAD else V.RELEASING
    return Change(replace(vm, state=V.ENDING if occupied else target, quarantined=None), Event.RELEASED, why)


def end_vm(vm: Vm, event: Event, why: Reason) -> Change:
    return Change(replace(vm, state=V.ENDING, quarantined=None, reason=why), event, why)


def end_vms(state: State, vms: Iterable[Vm], event: Event, why: Reason) -> None:
    """End the VMs that are not ending yet and are at one place. An earlier reason stays."""
    for vm in vms:
        if not vm.leaving and len(vm.places) == 1:
            state.move(replace(end_vm(vm, event, vm.reason or why), reason=why))


def fail_vm(state: State, vm: Vm, event: Event, why: Reason, world: World, policy: Policy) -> list[Change]:
    """It did not come up: it is ended, and its host is avoided or its job is at fault."""
    fault, changes = blame(state, vm, why, world, policy)
    return [end_vm(replace(vm, fault=fault), event, why), *changes]


# --- step ------------------------------------------------------------------------------------------


def step_vm(state: State, vm_id: int, world: World, policy: Policy) -> None:
    vm = state.vms.get(vm_id)
    if vm is None or vm.quarantined:
        return
    at_two = len(vm.places) > 1
    place = _place_to_go_by(vm, world) if at_two else vm.places[0]
    latest = world.latest(place.source)
    if vm.state is V.DELETING:
        _step_deleting(state, vm, world)
    elif vm.state is V.ORPHAN:
        _step_orphan(state, vm, world)
    elif vm.state in MOVING_STATES and _is_under_way(state, vm, world):
        pass
    elif at_two and (left := _place_left(state, vm, world)):
        _leave(state, vm, left, world)
    elif latest is None or place.host not in latest.value.hosts:
        _step_out_of_sight(state, vm, place, world, policy)
    elif vm.state is V.LOST:
        if _is_shown_since(vm, vm.since, world):
            _find_again(state, vm, world)
    elif vm.leaving:
        _step_leaving(state, vm, world)
    elif at_two:
        _step_moving(state, vm, world, policy)
    else:
        _step_in_sight(state, vm, latest, world, policy)


def _place_to_go_by(vm: Vm, world: World) -> Place:
    """Where a VM at two places goes on, or may go on out of sight; where it can be ended, if it is to end."""

    return min(vm.places, key=lambda place: (not _runs_at(vm, place, world), world.shows(place) is not vm.leaving))


def _runs_at(vm: Vm, place: Place, world: World) -> bool:
    seen = world.at(vm, place)
    return seen is not None and seen.runs


def _place_left(state: State, vm: Vm, world: World) -> Place | None:
    """Where a VM at two places surely is no more, after the effects that concern it."""
    never = inf if vm.state in VM_EFFECTS else vm.since
    since = max(world.ended_at(vm.key, never), vm.since)
    return next((place for place in vm.places if _is_off(state, vm, place, since, world)), None)


def _leave(state: State, vm: Vm, left: Place, world: World) -> None:
    """It keeps its other place and claim. It is lost if it is not shown to go on there."""
    why = (Why.HOST_OFF if state.is_fenced(left.host) else Why.NOT_THERE)(host=left.host)
    there = replace(vm, places=tuple(place for place in vm.places if place is not left))
    free = [ClaimKey(vm.key, left.host)]
    if vm.leaving or vm.state is V.LOST:
        state.move(Change(there, Event.PLACE_LEFT, why), free=free)
    elif _runs_at(there, there.place, world):
        ended = Event.MOVED if left is vm.places[0] else Event.STAYED
        event = Event.PLACE_LEFT if vm.state is V.SETTLING else ended
        more = _went_on(state, vm) if event is Event.MOVED else []
        state.move(Change(replace(there, state=V.SERVING, reason=None), event, why), *more, free=free)
    else:
        lost = replace(there, state=V.LOST, reason=_why_ended(state, there, left, world))
        state.move(Change(lost, Event.LOST, why), free=free)


def _why_ended(state: State, vm: Vm, left: Place, world: World) -> Reason | None:
    """Why a VM does not go on at the place that it has kept. None if that is out of sight: it may go on there."""
    if not world.shows(vm.place):
        return None
    if state.is_fenced(left.host):
        return Why.HOST_OFF(host=left.host)
    seen = world.vm(vm)
    return (said(seen.reason) or Why.VM_DIED()) if seen is not None else Why.NOT_THERE(host=vm.host)


def _is_under_way(state: State, vm: Vm, world: World) -> bool:
    """Whether an effect of the move runs, or has ended and one of its places that is in sight was not observed since.
    Nothing is concluded meanwhile, unless a host is off: the VM may go on at either place, and for a moment at
    neither."""
    if any(state.is_fenced(place.host) for place in vm.places):
        return False
    ended = world.ended_at(vm.key, inf)
    return ended < vm.since or not _is_shown_since(vm, ended, world)  # an earlier effect says nothing of this move


def _step_moving(state: State, vm: Vm, world: World, policy: Policy) -> None:
    """Something of it is at both its places. It is handed over between the hosts, which know better than this
    controller for how long that is worth trying: until a time limit the move is asked for again."""
    first, second = vm.places
    if _runs_at(vm, second, world) and not _runs_at(vm, first, world):
        moved = replace(vm, state=V.SETTLING, places=(second, first))
        state.move(Change(moved, Event.MOVED, Why.GOES_ON(host=second.host)), *_went_on(state, vm))
    elif vm.state is V.MOVING and state.now - vm.since > policy.move_timeout:
        state.move(keep_vm_there(vm, Why.MOVE_LATE(limit=policy.move_timeout)))


def _went_on(state: State, vm: Vm) -> list[Change]:
    """Its job has left a host."""
    attempt = state.attempt_of(vm)
    if attempt is None or attempt.state is not AttemptState.ALLOCATED:
        return []
    evictions = went_on(attempt.evictions, state.now - vm.since)
    return [Change(replace(attempt, evictions=evictions), Event.NOTED)] if evictions != attempt.evictions else []


def vm_is_settled(state: State, vm: Vm, world: World) -> bool:
    """Whether neither time nor an equal observation moves the VM."""
    place = vm.places[0]
    latest = world.latest(place.source)
    if vm.quarantined:
        return True
    if vm.state is V.DELETING:  # that its node is shown no more is a change of the VM
        return world.scheduler is None or world.node_of(vm) is not None
    if len(vm.places) > 1:
        return False
    if latest is None or place.host not in latest.value.hosts:
        # That a source has been silent for long is a change of the source.
        return not state.is_fenced(place.host) and (latest is None or vm.state is V.LOST)
    seen = world.vm(vm)
    asleep = vm.state in (V.ASLEEP, V.DELAYED)
    settled = (VmCondition.ASLEEP,) if asleep else (VmCondition.RUNNING, VmCondition.PAUSED)
    return (asleep or vm.state is V.SERVING) and seen is not None and seen.condition in settled


def _step_out_of_sight(state: State, vm: Vm, place: Place, world: World, policy: Policy) -> None:
    """Conclude nothing but that it no longer counts for its job: its source is silent for long, or lacks its host. It
    ends if its host is off, as both are at which it was while it moved."""
    if state.is_fenced(place.host):
        if vm.leaving:
            _step_leaving(state, vm, world)
        else:
            state.move(end_vm(vm, Event.FENCED, vm.reason or Why.HOST_OFF(host=place.host)))
        return
    observation = world.sources.get(place.source)
    if vm.state is V.LOST or observation is None:
        return
    if observation.latest is not None or state.now - observation.since > policy.silence:
        why = Why.HOST_AWAY(host=place.host)
        state.move(Change(replace(vm, state=V.LOST), Event.LOST, why))


def _is_shown_since(vm: Vm, since: float, world: World) -> bool:
    """Whether each of its places that is in sight was observed after that. A VM may have gone on at one place after
    that was observed and before the other one was."""
    latest = [(place, one) for place in vm.places if (one := world.latest(place.source)) is not None]
    return all(one.began > since for place, one in latest if place.host in one.value.hosts)


_ALIVE = (VmCondition.RUNNING, VmCondition.PAUSED, VmCondition.ASLEEP)


def _find_again(state: State, vm: Vm, world: World) -> None:
    """Its host is back. A VM with a job goes on. Any other is ended once no job is, or may begin, on its node."""
    attempt, seen = state.attempt_of(vm), world.vm(vm)
    if attempt is None or seen is None or seen.condition not in _ALIVE:
        goes_on = tied = False
    elif attempt.state is AttemptState.ADDING_USER:
        goes_on, tied = attempt.uid in seen.users_added, False
    else:
        goes_on = attempt.state is AttemptState.ALLOCATED or is_occupied(vm, world)
        tied = _job_is_pinned(state, vm, world)
    if goes_on and len(vm.places) > 1:
        running_first = tuple(sorted(vm.places, key=lambda place: not _runs_at(vm, place, world)))
        back = replace(vm, state=V.SETTLING, places=running_first, reason=None)
        state.move(Change(back, Event.FOUND, Why.RUNS_ON()))
    elif goes_on and seen is not None and seen.condition is VmCondition.ASLEEP:
        find_asleep(state, vm)
    elif goes_on and vm.runs is not None:  # it was to wake, and may not have been told whether its job runs
        state.move(wake_vm(vm, vm.runs, vm.left, Why.RUNS_ON()))
    elif goes_on:
        state.move(Change(replace(vm, state=V.SERVING, reason=None), Event.FOUND, Why.RUNS_ON()))
    elif not tied:
        state.move(end_vm(vm, Event.FOUND, vm.reason or Why.HOST_WAS_AWAY(host=vm.host)))


def _step_in_sight(state: State, vm: Vm, latest: Seen[HypervisorView], world: World, policy: Policy) -> None:
    seen, began = world.vm(vm), latest.began
    if vm.state is V.PLANNED:
        _step_planned(state, vm, began, world, policy)
        return
    absent = seen is None and began > world.ended_at(vm.key, vm.since) and began > vm.since
    if absent and is_kept_in_memory(state, vm, world):
        return
    dead = seen is not None and seen.condition is VmCondition.DEAD
    if dead or absent or vm.state is V.DEAD:
        why = (vm.reason if vm.state is V.DEAD else said(seen.reason if seen else "")) or Why.VM_DIED()
        _step_dead(state, vm, why, world, policy)
        return
    if seen is not None and vm.state in (V.SERVING, *SLEEPING_STATES):
        step_sleep(state, vm, seen, began, world)
        return
    attempt = state.attempt_of(vm)
    to_join = vm.pool is Depth.JOINED and vm.is_spare
    spawns = attempt is not None and attempt.state is AttemptState.SPAWNING and not state.waits_to_join(vm)
    if vm.state is V.PARKED and (to_join or spawns):
        state.move(start_vm(vm))
    elif vm.state is V.STARTING:
        _step_starting(state, vm, world, policy)
    elif vm.state is V.RETIRING and state.offer_of(vm) in (OfferState.CLOSED, None):
        state.move(release_vm(vm, vm.reason))


def _step_planned(state: State, vm: Vm, began: float, world: World, policy: Policy) -> None:
    seen, ended = world.vm(vm), world.ended_at(vm.key, vm.since)
    if seen is None and vm.key in state.unconfirmed:
        why = Why.UNCONFIRMED()  # no failure of its image
        state.move(end_vm(vm, Event.RELEASED, why))
        return
    state.unconfirmed.discard(vm.key)
    if seen is not None and seen.condition not in (VmCondition.CREATING, VmCondition.DEAD):
        # Where the hypervisor assigns addresses, they are known from here on.
        known = replace(vm, state=V.PARKED, address=vm.address or seen.address, mac=vm.mac or seen.mac)
        state.move(Change(known, Event.EXISTS))
    elif seen is not None and seen.condition is VmCondition.DEAD and began > ended:
        state.move(*fail_vm(state, vm, Event.FAILED, said(seen.reason) or Why.DIED_CREATING(), world, policy))
    elif began - vm.since > policy.spawn_timeout and began > world.ended_at(vm.key):
        # Not while its creation is under way: that has a time limit of its own, and copying a large disk takes long.
        state.move(*fail_vm(state, vm, Event.FAILED, Why.NOT_CREATED(limit=policy.spawn_timeout), world, policy))


def _step_dead(state: State, vm: Vm, why: Reason, world: World, policy: Policy) -> None:
    """The job is unpinned first: while it may be tied to the node, the node stays."""
    if vm.state is V.STARTING:
        state.move(*fail_vm(state, vm, Event.DIED, why, world, policy))
    elif vm.state not in (V.JOINED, V.SERVING, V.DEAD) or not _job_is_pinned(state, vm, world):
        state.move(end_vm(vm, Event.DIED, why))
    elif vm.state is not V.DEAD:
        state.move(Change(replace(vm, state=V.DEAD, reason=why), Event.DIED, why))


def _job_is_pinned(state: State, vm: Vm, world: World) -> bool:
    """Whether its attempt's job is pending and tied to it, or may be: a pin may be on its way."""
    attempt = state.attempt_of(vm)
    if attempt is None:
        return False
    if world.scheduler is None or attempt.state in PINNED_STATES or attempt.state is AttemptState.RETURNING:
        return True
    job = world.scheduler.value.jobs.get(attempt.job.job_id)
    return job is not None and job.state is JobState.PENDING and job.pinned == attempt.feature


def _step_starting(state: State, vm: Vm, world: World, policy: Policy) -> None:
    """A VM has joined when both sides say so: its node is registered, and its guest is complete."""
    if world.scheduler is None:
        return
    node, attempt, seen = world.node_of(vm), state.attempt_of(vm), world.vm(vm)
    startable_since = max(vm.since, world.user_known_since(attempt.uid)) if attempt else vm.since
    registered = node is not None and node.state in (NodeState.IDLE, NodeState.BUSY)
    complete = seen is not None and seen.condition is VmCondition.RUNNING
    if (registered and complete) or _had_joined(vm, world):
        state.move(Change(replace(vm, state=V.JOINED), Event.REGISTERED), *joined(state, vm))
    elif node is not None and node.is_unusable:
        state.move(
            *fail_vm(
                state,
                vm,
                Event.FAILED,
                Why.CAME_UP(said(node.reason or "no reason given"), found=node.state),
                world,
                policy,
            )
        )
    elif world.node_began(vm.name) - startable_since > policy.spawn_timeout:
        state.move(*fail_vm(state, vm, Event.FAILED, Why.NOT_REGISTERED(limit=policy.spawn_timeout), world, policy))


def _had_joined(vm: Vm, world: World) -> bool:
    """Whether a job is on its node, as a database that was restored from an older copy does not tell. The node may be
    drained or silent since, and the guest may stand still."""
    node, seen = world.node_of(vm), world.vm(vm)
    lives = seen is not None and seen.condition in (VmCondition.RUNNING, VmCondition.PAUSED)
    kept = node is not None and not node.is_given_up and world.node_began(vm.name) > vm.since
    return lives and kept and is_occupied(vm, world)


def _left_in_memory(state: State, vm: Vm) -> list[Claim]:
    """What a VM that was to go on as it is kept in memory leaves to the saved job, whose state may still be there."""
    kept = (one for one in state.saved_named(vm.saved) if one.kept and one.state in WAITS_FOR_RUN)
    sizes = [claim.size for key in vm.claim_keys if (claim := state.claims.get(key))]
    return [Claim(one.key, one.kept, size) for one in kept for size in sizes]


def _step_leaving(state: State, vm: Vm, world: World) -> None:
    """A VM is gone when its destruction has ended and neither side shows it later; on a fenced host without an
    observation. If only its node is left, it claims nothing any more: the scheduler may keep the node for hours."""
    ended = world.effect_ended_at.get(vm.key)
    if ended is None or world.scheduler is None:
        return
    since, attempt = max(ended, vm.since), state.attempt_of(vm)
    jobs_began = world.job_began(attempt.job.job_id) if attempt else world.scheduler.began  # on a spare any job may be
    node_is_gone = world.node_of(vm) is None and world.node_began(vm.name) > since
    off = _is_off(state, vm, vm.place, since, world)
    if off and node_is_gone:
        gone = Change(replace(vm, state=V.GONE), Event.ABSENT)
        state.move(gone, make=_left_in_memory(state, vm), free=vm.claim_keys)
    elif off and vm.state in (V.REMOVING, V.RELEASING) and _only_its_node_is_left(state, vm, since, world):
        left = Change(replace(vm, state=V.DELETING), Event.NODE_LEFT, Why.NODE_LEFT())
        state.move(left, make=_left_in_memory(state, vm), free=vm.claim_keys)
    elif vm.state is V.ENDING and jobs_began > since and not _may_be_needed(state, vm, world):
        state.move(Change(replace(vm, state=V.REMOVING), Event.NODE_FREE, Why.NODE_FREE()))


def _only_its_node_is_left(state: State, vm: Vm, since: float, world: World) -> bool:
    """Whether only the node of a VM that is gone is left, and no job can start there."""
    assert world.scheduler is not None
    view, attempt = world.scheduler.value, state.attempt_of(vm)
    node = world.node_of(vm)
    if node is None or world.node_began(vm.name) <= since:
        return False
    if attempt is not None and attempt.state not in ENDING_STATES:
        return node.is_unusable
    tied = (job.pinned in node.features for job in view.jobs.values() if job.state is JobState.PENDING and job.pinned)
    return node.is_unusable or attempt is not None or not any(tied)


def _step_deleting(state: State, vm: Vm, world: World) -> None:
    if world.scheduler is None or world.node_of(vm) is not None:
        return
    if world.node_began(vm.name) > max(vm.since, world.ended_at(vm.key)):
        state.move(Change(replace(vm, state=V.GONE), Event.ABSENT))


def _may_be_needed(state: State, vm: Vm, world: World) -> bool:
    """Whether the scheduler needs its node: Slurm 22.05 crashes if one of a COMPLETING job's nodes is deleted."""
    attempt = state.attempt_of(vm)
    job = world.scheduler.value.jobs.get(attempt.job.job_id) if attempt and world.scheduler is not None else None
    return is_occupied(vm, world) or (job is not None and job.state is JobState.COMPLETING)


def may_take_job(state: State, vm: Vm, world: World) -> bool:
    """Whether the scheduler may start the attempt's job on a VM that is being ended. It does not once the node is DOWN
    or drained, or once the VM is off its host and its node neither answers nor is registered."""
    if world.scheduler is None or vm.state not in (V.ENDING, V.REMOVING):
        return False
    node = world.node_of(vm)
    if node is not None and node.state not in (NodeState.SILENT, NodeState.JOINING):
        return not node.is_unusable or world.node_began(vm.name) <= vm.since
    since = world.ended_at(vm.key, inf)
    return not all(_is_off(state, vm, place, since, world) for place in vm.places)


def is_occupied(vm: Vm, world: World) -> bool:
    """Whether a job is on its node."""
    if world.scheduler is None or vm.name not in world.scheduler.value.occupied:
        return False
    return world.node_of(vm) is not None or vm.name not in world.scheduler.value.nodes


def _is_off(state: State, vm: Vm, place: Place, since: float, world: World) -> bool:
    latest = world.latest(place.source)
    if latest is None or place.host not in latest.value.hosts:
        return state.is_fenced(place.host)
    return latest.began > since and world.at(vm, place) is None


def _step_orphan(state: State, vm: Vm, world: World) -> None:
    """Keep an orphan while a job is, or may be, on its node; release an idle one after a second observation. While its
    host is out of sight nothing is concluded."""
    latest = world.latest(vm.place.source)
    if latest is None or vm.host not in latest.value.hosts or latest.began <= vm.since:
        return
    seen = world.vm(vm)
    if seen is None or seen.condition is VmCondition.DEAD:
        why = said(seen.reason if seen else "") or Why.VM_DIED()
        state.move(end_vm(vm, Event.DIED, why))
        return
    if world.scheduler is None:
        return
    view, began = world.scheduler.value, world.scheduler.began
    if seen.condition is VmCondition.ASLEEP and _runs_a_job(vm, world):  # nothing tells whose memory it would take
        state.move(end_vm(vm, Event.DIED, Why.FOUND_ASLEEP()))
        return
    if view.may_have_a_job(vm.name):
        over = (JobState.PENDING, JobState.ENDED)
        on_it = (id_ for id_, job in sorted(view.jobs.items()) if vm.name in job.nodes and job.state not in over)
        job_id = next(on_it, "")
        if job_id not in ("", vm.job_id):
            state.move(Change(replace(vm, job_id=job_id), Event.NOTED, Why.JOB_ON_IT(job=job_id)))
    elif began > vm.since + OFFER_TERM:
        state.move(release_vm(vm, Why.NO_JOB_ON_IT()))


def _runs_a_job(vm: Vm, world: World) -> bool:
    jobs = world.scheduler.value.jobs.values() if world.scheduler is not None else ()
    return any(vm.name in job.nodes and job.state is JobState.RUNNING for job in jobs)


VM_EFFECTS = {
    V.FALLING_ASLEEP: EffectKind.SLEEP,
    V.DELAYED: EffectKind.DELAY,
    V.WAKING: EffectKind.WAKE,
    V.MOVING: EffectKind.MOVE,
    V.SETTLING: EffectKind.SETTLE,
    V.PLANNED: EffectKind.CREATE,
    V.STARTING: EffectKind.START,
    V.ENDING: EffectKind.END,
    V.REMOVING: EffectKind.REMOVE,
    V.RELEASING: EffectKind.RELEASE,
    V.DELETING: EffectKind.DELETE,
}
