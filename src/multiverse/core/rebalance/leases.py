"""Jobs leave leased hosts.

Where a pilot is told to end, its agent holds the VMs until shortly before the scheduler kills the pilot
(`Host.holds_until`). Until then they move to other hosts, or their jobs are saved. If there is not time for all, those
leave first that lose the most work for each MiB that is to be sent; the others run until the agent ends them, and begin
anew.

A leased host whose jobs all have room elsewhere is emptied, so that its node goes back sooner. Leases with less on them
are emptied into those with more, and a job is moved for that once an hour: so a host that has taken jobs is not emptied
next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from multiverse.core.capacity.room import Room, room_of
from multiverse.core.capacity.usable_hosts import ends_by
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.leases import waiting_for_room
from multiverse.core.machines.lease import may_leave
from multiverse.core.model.basics import Size
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.job import COMING_LEASES, Attempt, AttemptState, Lease, LeaseState
from multiverse.core.model.reason import Why
from multiverse.core.model.saved import UNWRITTEN
from multiverse.core.model.vm import MOVING_STATES, Vm, VmState
from multiverse.core.moving import TargetSearch, search_for, why_busy
from multiverse.core.saving import is_busy, what_to_save

_HOUR = 3600.0
OVERHEAD = 3.0  # seconds that a save or a move takes beside sending


# --- leases that end ---------------------------------------------------------------------------------


def plan_lease_ends(context: Context, room: Room) -> Iterator[Step]:
    """What leaves the leased hosts whose pilots end, in time. Takes the room of VMs that move."""
    for lease in context.state.leases_in(LeaseState.ENDING):
        host = context.in_sight.get(lease.name)
        held = host is not None and host.holds_until and may_leave(context.state, lease, context.world, context.policy)
        if host is not None and held and not lease.quarantined:
            yield from _leaving(context, lease, host.holds_until - context.now, room)


def _leaving(context: Context, lease: Lease, left: float, room: Room) -> Iterator[Step]:
    """What leaves a host within the seconds that are left."""
    fits = (left - OVERHEAD) * context.policy.evict_host_rate - _under_way(context, lease.name)
    jobs = _running_on(context, lease.name)
    needed = sum(vm.size.memory for vms in jobs.values() for vm in vms)
    attempts = [context.state.attempts[number] for number in jobs]
    for attempt in sorted(attempts, key=lambda one: (-_worth(context, one), one.id)):
        if is_busy(context.state, attempt):
            continue
        try:
            step = _step_off(context, lease, attempt, jobs[attempt.id], room, in_time=fits > 2 * needed)
        except Refused:
            continue
        here = step.vm.size.memory if step and step.to else sum(vm.size.memory for vm in jobs[attempt.id])
        if step is not None and here <= fits:
            fits -= here
            yield step


def _running_on(context: Context, host: str) -> dict[int, list[Vm]]:
    """The VMs on a host in which jobs run, by attempt."""
    found = defaultdict[int, list[Vm]](list)
    for vm in context.state.vms_on(host):
        attempt = context.state.attempt_of(vm)
        if vm.state is VmState.SERVING and attempt is not None and attempt.state is AttemptState.ALLOCATED:
            found[attempt.id].append(vm)
    return found


def _under_way(context: Context, host: str) -> float:
    """MiB that are still to be sent of what is leaving a host."""
    state, total, since = context.state, 0, context.now
    for vm in state.vms_on(host):
        began = [one.begun for one in state.saved_of(vm) if one.state in UNWRITTEN and not one.checkpoint]
        if vm.state in MOVING_STATES and vm.host == host:
            began.append(context.unix(vm.since))
        if began:
            total, since = total + vm.size.memory, min(since, *began)
    return max(0.0, total - (context.now - since) * context.policy.evict_host_rate)


def _worth(context: Context, attempt: Attempt) -> float:
    """CPU-seconds that a job loses if it begins anew, for each MiB that is to be sent to prevent that."""
    state = context.state
    kept = [one.begun for one in state.saved_of_job(attempt.job.job_id) if one.checkpoint and one.stands]
    runs_for = context.now - max([context.unix(attempt.since), *kept])
    vms = state.serving_vms_of(attempt)
    cpus, memory = sum(vm.size.cpus for vm in vms), sum(vm.size.memory for vm in vms)
    return runs_for * cpus / max(1, memory)


def _step_off(
    context: Context, lease: Lease, attempt: Attempt, vms: list[Vm], room: Room, *, in_time: bool
) -> Step | None:
    """How a job leaves: by moves, or else by a save; each is tried once. None if a move is worth waiting for
    (`in_time`). Raises `Refused` if it cannot leave."""
    why = Why.LEAVES_LEASE(lease.reason, host=lease.name)
    if not any(vm.moves and vm.since >= lease.since for vm in vms) and (len(vms) == 1 or in_time):
        try:
            if (to := _first_move(context, vms, room)) is not None:
                return Step(Method.LEASE_END, attempt, vms[0], to, why, vms[0].size.memory)
            if in_time and _first_move(context, vms, room_of(context).copy(), busy=True) is not None:
                return None
        except Refused:
            if in_time and why_busy(context, lease.name):
                return None
    if any(one.way == "save" and one.at >= context.unix(lease.since) for one in attempt.evictions):
        return None
    if _saves_for_itself(context, lease.name):
        raise Refused(f"host {lease.name} saves where no other host restores", hint="see save.directory")
    saved = what_to_save(context, attempt).vms
    return Step(Method.LEASE_END, attempt, saved[0], "", why, sum(vm.size.memory for vm in saved))


def _saves_for_itself(context: Context, lease: str) -> bool:
    """Whether hosts have storages, and none that of a lease: with its node the states there are out of reach."""
    here = context.in_sight[lease]
    own = [one.name for one in (here.storage, here.copies) if one is not None]
    others = [host for host in context.in_sight.values() if host.name != lease and host.storage is not None]
    return bool(others) and not any(host.reaches(own) for host in others)


def _first_move(context: Context, vms: list[Vm], room: Room, *, busy: bool = False) -> str | None:
    """Where the first VM of a job moves, if the others on its host have room elsewhere, too. Takes the room of all.
    Raises `Refused` if one cannot move."""
    searches, trial, taken = [search_for(context, vm) for vm in vms], room.copy(), list[tuple[str, Size]]()
    for search in searches:
        if (found := search.find("", trial, busy=busy or bool(taken))) is None:
            return None
        taken.append(found)
    for host, claim in taken:
        room.take(host, claim)
    return taken[0][0]


# --- leases that others replace ----------------------------------------------------------------------


def plan_packing(context: Context, room: Room) -> Iterator[Step]:
    """What empties leased hosts by moves alone. Nothing, while jobs wait for room that it would free or take. Takes the
    room of those that move."""
    state = context.state
    leases = [one for one in state.leases_in(LeaseState.HELD) if not one.quarantined]
    if not leases or state.leases_in(*COMING_LEASES) or any(True for _ in waiting_for_room(context)):
        return
    leases.sort(key=lambda one: (sum(vm.size.memory for vm in state.vms_on(one.name)), one.id))
    taking = set[str]()  # leases that jobs move to
    for number, lease in enumerate(leases):
        if lease.name in taking or lease.name in state.drains or not _is_worth_emptying(context, lease):
            continue
        fuller = [one.name for one in reversed(leases[number + 1 :])]
        trial = room.copy()
        steps = _emptying(context, lease, fuller, trial)
        if steps:
            room = trial
            taking.update(step.to for step in steps)
            yield from steps


def _is_worth_emptying(context: Context, lease: Lease) -> bool:
    """Whether jobs alone hold a host, for longer than the policy says, and none of them was moved for this lately."""
    state, vms = context.state, context.state.vms_on(lease.name)
    jobs = _running_on(context, lease.name)
    if (
        not jobs
        or sum(map(len, jobs.values())) < len(vms)
        or any(one.kept == lease.name for one in state.saved.values())
    ):
        return False
    attempts = [state.attempts[number] for number in jobs]
    if any(_was_packed(context, one) for one in attempts):
        return False
    ends = max(ends_by(context, one) for one in attempts)
    return min(ends, lease.host.ends) - context.now > context.policy.lease_keeps


def _was_packed(context: Context, attempt: Attempt) -> bool:
    return any(one.why.kind is Why.LEASE_EMPTIED and context.now - one.at < _HOUR for one in attempt.evictions)


def _emptying(context: Context, lease: Lease, fuller: list[str], room: Room) -> list[Step]:
    """The moves that empty a host, to hosts of the site or else to fuller leases; none if one VM has no room."""
    steps, why = list[Step](), Why.LEASE_EMPTIED(host=lease.name)
    for vm in context.state.vms_on(lease.name):
        try:
            search = search_for(context, vm)
        except Refused:
            return []
        to = _target(context, search, fuller, room)
        if to is None:
            return []
        steps.append(Step(Method.PACKING, search.attempt, vm, to, why, vm.size.memory))
    return steps


def _target(context: Context, search: TargetSearch, fuller: list[str], room: Room) -> str | None:
    """Where a VM goes off a lease. Takes the room there."""
    leased = frozenset(one.name for one in context.state.leases.values())
    own = replace(search, context=replace(search.context, without=search.context.without | leased))
    tries = ((own, ""), *((search, name) for name in fuller))
    found = (one.find(name, room, busy=True) for one, name in tries)
    return next((host[0] for host in found if host is not None), None)
