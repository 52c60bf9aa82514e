"""Running jobs give way to an urgent one that waits for room and may preempt them by the scheduler's own rules. They
move to other hosts, or are saved and go on once there is room.

Only the first job that waits for room is served: those behind it have their turn when it has started. The cheapest set
of jobs that makes room for it is evicted, by the memory that is to be sent; among equals those that were submitted
last. What is leaving already counts as free, so no more jobs are evicted than it needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from multiverse.core.capacity.room import HostLimits, Room, others_on, room_of
from multiverse.core.capacity.sizes import template_claim, vm_claims
from multiverse.core.capacity.usable_hosts import for_attempt
from multiverse.core.capacity_index import changed, fits
from multiverse.core.clones.kinds import choose_clones, node_request, on_hosts_making, template_key
from multiverse.core.clones.spares import spares
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.model.basics import ClaimKey, Key, Size
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.job import ENDING_STATES, Attempt, AttemptState, Job, JobState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import UNWRITTEN
from multiverse.core.model.vm import LEAVING_STATES, MOVING_STATES, TemplateState, Vm, VmState
from multiverse.core.moving import search_for
from multiverse.core.rebalance.limits import Limits
from multiverse.core.saving import is_busy, what_to_save

SOON = 30.0  # seconds: a job that is to start within them by the time limits of others has nobody evicted for it


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A running job that may be evicted."""

    attempt: Attempt
    vms: list[Vm]
    claims: Mapping[str, Size]  # what it gives back, by host
    saves: bool  # it can be saved; else it only moves

    @property
    def memory(self) -> int:
        return sum(vm.size.memory for vm in self.vms)

    @property
    def order(self) -> tuple[int, int, int]:
        return self.memory, -self.attempt.job.submitted, -self.attempt.id


def plan_preemption(context: Context, limits: Limits) -> list[Step]:
    """Which jobs give way to the first one that waits for room. Empty if it could not start even then."""
    state, rules = context.state, context.scheduler.preemption
    waiting = state.attempts.get(state.blocking) if state.blocking is not None else None
    if rules is None or waiting is None or waiting.id not in state.queue.candidates:
        return []
    job = state.queue.job_of(waiting.id)
    if not rules.takes.get(job.preempt_class) or state.promised.get(waiting.id, float("inf")) < context.now + SOON:
        return []
    context = for_attempt(context, waiting)
    needs = _needs(context, waiting)
    leaving = _leaving(context)
    room = _room_without(context, leaving)
    may = HostLimits(limit=others_on(state, waiting))
    if not needs or room.copy().place(waiting.request.nodes, needs, hosts=may) is not None:
        return []
    candidates = _candidates(context, job, needs, limits)
    chosen = _cheapest(room, waiting, needs, candidates)
    evicted = {vm.key for one in chosen for vm in one.vms}
    room = _room_without(context, leaving | evicted)
    if not chosen or room.place(waiting.request.nodes, needs, hosts=may) is None:
        return []
    why = Why.PREEMPTED(job=job.ref.job_id, by=job.preempt_class)
    return [_step(context, one, room, why) for one in chosen]


def _needs(context: Context, attempt: Attempt) -> dict[str, Size]:
    """What each VM of a waiting job takes on each host that can make it; with its template where there is none yet."""
    choice = choose_clones(context, attempt)
    wanted = node_request(context, attempt, choice.kind)
    able = on_hosts_making(wanted.image, choice.kind, choice.sizes)
    needs = dict(vm_claims(wanted, able, context.hosts, context.policy)) if able else {}
    for name in needs if choice.forks else ():
        row = context.state.template_for(template_key(context, attempt, name, choice.sizes[name]))
        if row is None or row.state not in (TemplateState.READY, TemplateState.BUILDING):
            needs[name] += template_claim(choice.sizes[name], context.hosts[name], wanted.image)
    return needs


def _leaving(context: Context) -> set[Key]:
    """The VMs that give their room back by themselves: of jobs that end or are saved, and spares."""
    state = context.state
    ending = [vm for attempt in state.attempts_in(*ENDING_STATES) for vm in state.vms_of(attempt)]
    going = state.vms_in(*LEAVING_STATES, VmState.RETIRING)
    saves = [one for one in state.saved.values() if one.state in UNWRITTEN and not one.checkpoint]
    saved = [state.vms[part.vm] for one in saves for part in one.parts if part.vm in state.vms]
    return {vm.key for vm in (*ending, *going, *spares(state), *saved)}


def _room_without(context: Context, gone: set[Key]) -> Room:
    """What is free once those VMs are gone, and those that move have moved."""
    room = room_of(context, without=gone) if gone else room_of(context).copy()
    for vm in context.state.vms_in(*MOVING_STATES):
        claim = context.state.claims.get(ClaimKey(vm.key, vm.host))
        if claim is not None and vm.key not in gone:
            room.give(vm.host, claim.size)
    return room


def _candidates(context: Context, waiting: Job, needs: Mapping[str, Size], limits: Limits) -> list[_Candidate]:
    """The running jobs that may be evicted for a waiting one, the cheapest first."""
    state, rules, found = context.state, context.scheduler.preemption, []
    assert rules is not None, "asked for only where the scheduler has preemption"
    for job_id in context.scheduler.running_in(rules.takes[waiting.preempt_class]):
        job = context.scheduler.jobs[job_id]
        attempt = next((one for one in state.attempts_of_job(job.ref) if one.state is AttemptState.ALLOCATED), None)
        if attempt is None or job.state is not JobState.RUNNING or not rules.may_take(waiting, job):
            continue
        if state.now - attempt.since < rules.exempt.get(job.preempt_class, 0.0):
            continue
        if is_busy(state, attempt) or limits.why_too_often(attempt):
            continue
        vms = state.serving_vms_of(attempt)
        if not any(vm.host in needs for vm in vms) or not all(vm.state is VmState.SERVING for vm in vms):
            continue
        if (one := _candidate(context, attempt, vms)) is not None:
            found.append(one)
    return sorted(found, key=lambda one: one.order)


def _candidate(context: Context, attempt: Attempt, vms: list[Vm]) -> _Candidate | None:
    """A job as one that may be evicted; None if it can neither be saved nor move now."""
    claims = defaultdict[str, Size](lambda: Size(0, 0))
    for vm in vms:
        if (claim := context.state.claims.get(ClaimKey(vm.key, vm.host))) is not None:
            claims[vm.host] += claim.size
    try:
        what_to_save(context, attempt)
    except Refused:
        try:
            if len(vms) > 1 or search_for(context, vms[0]).find("", room_of(context).copy()) is None:
                return None
        except Refused:
            return None
        return _Candidate(attempt, vms, claims, saves=False)
    return _Candidate(attempt, vms, claims, saves=True)


def _cheapest(
    room: Room, waiting: Attempt, needs: Mapping[str, Size], candidates: Iterable[_Candidate]
) -> list[_Candidate]:
    """The jobs to evict, so that all VMs of the waiting one have room: host by host, each time where that costs the
    least. Empty if that does not do. Changes the room."""
    by_host = defaultdict[str, list[_Candidate]](list)
    for one in candidates:
        for host in one.claims.keys() & needs.keys():
            by_host[host].append(one)
    chosen, placed = dict[int, _Candidate](), Counter[str]()
    while placed.total() < waiting.request.nodes:
        open_hosts = [host for host in needs if waiting.request.most_on_a_host(placed[host] + 1) > placed[host]]
        if free := [one for one in open_hosts if room.fits(one, needs[one])]:
            host = free[0]
        else:
            sets = [(_makes_room(room, host, needs[host], by_host[host], chosen), host) for host in open_hosts]
            able = [(found, host) for found, host in sets if found]
            if not able:
                return []
            best, host = min(able, key=lambda pair: (_cost(pair[0]), pair[1]))
            for one in best:
                chosen[one.attempt.id] = one
                for name, claim in one.claims.items():
                    room.give(name, claim)
        room.take(host, needs[host])
        placed[host] += 1
    return list(chosen.values())


def _cost(evicted: Iterable[_Candidate]) -> tuple[int, int]:
    """MiB to be sent, and how early the earliest of the jobs was submitted."""
    return sum(one.memory for one in evicted), -min(one.attempt.job.submitted for one in evicted)


def _makes_room(
    room: Room, host: str, need: Size, candidates: list[_Candidate], chosen: Mapping[int, _Candidate]
) -> list[_Candidate]:
    """The cheapest jobs on a host without which there is room: the cheapest ones together, or a single one."""
    left = [one for one in candidates if one.attempt.id not in chosen]
    free, several = list(room.free[host]), list[_Candidate]()
    for one in left:
        several.append(one)
        free = changed(free, one.claims[host], 1)
        if fits(need, free):
            break
    else:
        return []
    for one in reversed(several[:-1]):
        without = changed(free, one.claims[host], -1)
        if fits(need, without):
            several.remove(one)
            free = without
    alone = next((one for one in left if fits(need, changed(list(room.free[host]), one.claims[host], 1))), None)
    return min((several, [alone]), key=_cost) if alone is not None else several


def _step(context: Context, one: _Candidate, room: Room, why: Reason) -> Step:
    """A single VM moves if another host has room beside the waiting job; else the job is saved. Takes that room."""
    if len(one.vms) == 1:
        try:
            found = search_for(context, one.vms[0]).find("", room)
        except Refused:
            found = None
        if found is not None:
            return Step(Method.PREEMPTION, one.attempt, one.vms[0], found[0], why, one.memory)
    return Step(Method.PREEMPTION, one.attempt, one.vms[0], "", why, one.memory)
