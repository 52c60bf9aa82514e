"""Running jobs give way to an urgent one that waits for room and may preempt them by the scheduler's own rules. They
move to other hosts, or are saved and go on once there is room. Where a batch job can do neither, its run ends as the
scheduler would end it.

Only the first job that waits for room is served: those behind it have their turn when it has started. The cheapest set
of jobs that makes room for it is evicted: by the CPU seconds of the runs that end, then by the memory that is to be
sent; among equals those that were submitted last. What is leaving already counts as free, so no more jobs are evicted
than it needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from multiverse.core.capacity.room import HostLimits, Room, others_on, room_of
from multiverse.core.capacity.sizes import template_claim, vm_claims
from multiverse.core.capacity.usable_hosts import for_attempt
from multiverse.core.capacity_index import HostMap, changed, fits
from multiverse.core.clones.kinds import choose_clones, node_request, on_hosts_making, wish_of
from multiverse.core.clones.spares import spares
from multiverse.core.clones.supply import claims_to_restore
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.machines.attempt import preempt_job
from multiverse.core.machines.saved import vms_of_saved
from multiverse.core.model.basics import ClaimKey, Key, Size
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.job import ENDING_STATES, Attempt, AttemptState, Eviction, Job
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import COMPLETE, SAVING
from multiverse.core.model.vm import LEAVING_STATES, MOVING_STATES, Vm, VmState
from multiverse.core.moving import search_for, why_busy
from multiverse.core.rebalance.limits import EvictionLimits
from multiverse.core.saving import is_busy, what_to_save

CONSIDERED = 1000  # running jobs that one plan looks at
_TRIES = 4  # sets that are tried in a pass. The last one is of jobs that can leave whatever room the waiting one takes
_Cost = tuple[int, int, int]

SOON = 30.0  # seconds: a job that is to start within them by the time limits of others has nobody evicted for it


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A running job that may be evicted."""

    attempt: Attempt
    vms: list[Vm]
    claims: Mapping[str, Size]  # what it gives back, by host
    moves: bool  # another host would take its VM now
    saves: bool  # it can be saved
    size: int  # MiB of its VMs
    lost: int = 0  # CPU seconds that its run has had, at least 1; 0: it may not be ended, or need not
    way: Literal["requeue", "cancel"] = "cancel"  # how it would be ended

    @property
    def memory(self) -> int:
        """MiB that are to be sent."""
        return 0 if self.ends else self.size

    @property
    def ends(self) -> bool:
        return not self.moves and not self.saves

    @property
    def cost(self) -> tuple[int, int]:
        """CPU seconds that are lost, and MiB that are sent: what is saved is also read again."""
        return self.lost if self.ends else 0, self.memory if self.moves else 2 * self.memory

    @property
    def order(self) -> tuple[tuple[int, int], int, int]:
        return self.cost, -self.attempt.job.submitted, -self.attempt.id


def plan_preemption(context: Context, limits: EvictionLimits, passed_over: int = 0) -> list[Step]:
    """Which jobs give way to the first one that waits for room. Empty if it could not start even then. Of the running
    jobs `CONSIDERED` are looked at, those that were submitted last, after so many that are passed over."""
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
    why = Why.PREEMPTED(job=job.ref.job_id, by=job.preempt_class)
    running = [context.scheduler.jobs[job_id] for job_id in may_give_way(context, job.preempt_class)]
    running.sort(key=lambda one: -one.ref.submitted)
    running = running[passed_over : passed_over + CONSIDERED]
    candidates = _candidates(context, running, needs, limits)
    for tries in range(1, _TRIES + 1):
        if not (chosen := _cheapest(room.copy(), waiting, needs, candidates)):
            break
        evicted = {vm.key for one in chosen for vm in one.vms}
        after = _room_without(context, leaving | evicted)
        if after.place(waiting.request.nodes, needs, hosts=may) is None:
            break
        steps = [(one, _step(context, one, after, why)) for one in chosen]
        if stays := {one.attempt.id for one, step in steps if step is None}:
            # They only move, and the waiting job takes the room.
            if tries == _TRIES - 1:
                stays = {one.attempt.id for one in candidates if not one.saves}
            candidates = sorted(_without_moves(candidates, stays), key=lambda one: one.order)
            continue
        return [step for _, step in steps if step is not None]
    return []


def _without_moves(candidates: Iterable[_Candidate], stays: Set[int]) -> Iterator[_Candidate]:
    """The candidates; of those attempts only the ones that may be ended, as such."""
    for one in candidates:
        if one.attempt.id not in stays:
            yield one
        elif one.lost:
            yield replace(one, moves=False)


def _needs(context: Context, attempt: Attempt) -> HostMap[Size]:
    """What each VM of a waiting job takes on each host that can make it, or restore it if it was saved; with its
    template where there is none."""
    if (saved := context.state.saved_for(attempt.job)) is not None:
        usable = saved.state in COMPLETE and not saved.kept
        return claims_to_restore(context, saved) if usable else HostMap(())
    choice = choose_clones(context, attempt)
    wanted = node_request(context, attempt, choice.kind)
    able = on_hosts_making(wanted.image, choice.kind, choice.sizes)

    def claims(sizes: HostMap[Size]) -> HostMap[Size]:
        found = vm_claims(wanted, sizes, context.hosts, context.policy)
        assert isinstance(found, HostMap), "as the sizes are"
        return found

    if not choice.forks:
        return claims(able)
    wish = wish_of(context, attempt, able)
    lacking = wish.lacking().sizes
    templates = lacking.map(lambda host, size: template_claim(size, host, wanted.image))
    return HostMap((*claims(wish.ready()).parts, *claims(lacking).plus(templates).parts))


def _leaving(context: Context) -> set[Key]:
    """The VMs that give their room back by themselves: of jobs that end or are saved, and spares."""
    state = context.state
    ending = [vm for attempt in state.attempts_in(*ENDING_STATES) for vm in state.vms_of(attempt)]
    going = state.vms_in(*LEAVING_STATES, VmState.RETIRING)
    saved = [vm for one in state.saved_in(*SAVING) for vm in vms_of_saved(state, one)]
    return {vm.key for vm in (*ending, *going, *spares(state), *saved)}


def _room_without(context: Context, gone: set[Key]) -> Room:
    """What is free once those VMs are gone, and those that move have moved."""
    room = room_of(context, without=gone) if gone else room_of(context).copy()
    for vm in context.state.vms_in(*MOVING_STATES):
        claim = context.state.claims.get(ClaimKey(vm.key, vm.host))
        if claim is not None and vm.key not in gone:
            room.give(vm.host, claim.size)
    return room


def may_give_way(context: Context, urgent: str) -> list[str]:
    """The running jobs that may be preempted by a job of this class, by id."""
    rules = context.scheduler.preemption
    return context.scheduler.running_in(rules.takes.get(urgent, ())) if rules is not None else []


def _candidates(
    context: Context, running: Iterable[Job], needs: Mapping[str, Size], limits: EvictionLimits
) -> list[_Candidate]:
    """Those of the jobs that may be evicted, the cheapest first."""
    state, rules, found = context.state, context.scheduler.preemption, []
    assert rules is not None, "asked for only where the scheduler has preemption"
    for job in running:
        attempt = next((one for one in state.attempts_of_job(job.ref) if one.state is AttemptState.ALLOCATED), None)
        if attempt is None:
            continue
        if state.now - attempt.since < rules.exempt.get(job.preempt_class, 0.0):
            continue
        if is_busy(state, attempt) or limits.why_too_often(attempt):
            continue
        vms = state.serving_vms_of(attempt)
        if not any(vm.host in needs for vm in vms) or not all(vm.state is VmState.SERVING for vm in vms):
            continue
        if (one := _candidate(context, attempt, vms, job)) is not None:
            found.append(one)
    return sorted(found, key=lambda one: one.order)


def _candidate(context: Context, attempt: Attempt, vms: list[Vm], job: Job) -> _Candidate | None:
    """A job as one that may be evicted; None if it can neither be saved nor move now, and may not be ended."""
    claims = defaultdict[str, Size](lambda: Size(0, 0))
    for vm in vms:
        if (claim := context.state.claims.get(ClaimKey(vm.key, vm.host))) is not None:
            claims[vm.host] += claim.size
    moves, saves = len(vms) == 1 and _moves(context, vms[0]), False
    with suppress(Refused):
        saves = bool(what_to_save(context, attempt))
    may_move = not (moves or saves) and len(vms) == 1 and _may_move_later(context, vms[0])
    lost = 0 if saves or may_move else _lost(context, attempt, vms, job)
    way: Literal["requeue", "cancel"] = "requeue" if _mode(context, job) == "requeue" and job.requeues else "cancel"
    size = sum(vm.size.memory for vm in vms)
    return _Candidate(attempt, vms, claims, moves, saves, size, lost, way) if moves or saves or lost else None


def _lost(context: Context, attempt: Attempt, vms: list[Vm], job: Job) -> int:
    """CPU seconds that are lost if a job that cannot be saved is ended; 0 if it may not be: by the scheduler's mode,
    because it is interactive and only moves, or because its hosts are out of sight, which may store its state."""
    if not job.batch or _mode(context, job) not in ("requeue", "cancel"):
        return 0
    if len(vms) != attempt.request.nodes or any(vm.host not in context.in_sight for vm in vms):
        return 0
    return 1 + int((context.state.now - attempt.since) * sum(vm.size.cpus for vm in vms))


def _mode(context: Context, job: Job) -> str:
    """What the scheduler does itself to a job that it preempts."""
    rules = context.scheduler.preemption
    return rules.modes.get(job.preempt_class, "") if rules is not None else ""


def _may_move_later(context: Context, vm: Vm) -> bool:
    """Whether nothing but other moves keeps a VM from moving now."""
    return bool(why_busy(context, vm.host)) or _moves(context, vm, busy=True)


def _moves(context: Context, vm: Vm, *, busy: bool = False) -> bool:
    try:
        return search_for(context, vm).find("", room_of(context).copy(), busy=busy) is not None
    except Refused:
        return False


def _cheapest(
    room: Room, waiting: Attempt, needs: Mapping[str, Size], candidates: Iterable[_Candidate]
) -> list[_Candidate]:
    """The jobs to evict, so that all VMs of the waiting one have room: host by host, each time where that costs the
    least. Empty if that does not do. Changes the room."""
    by_host = defaultdict[str, list[_Candidate]](list)
    for one in candidates:
        for host in one.claims:
            if host in needs:
                by_host[host].append(one)
    chosen, placed = dict[int, _Candidate](), Counter[str]()

    def left_on(host: str) -> int:
        return waiting.request.most_on_a_host(placed[host] + 1) - placed[host]

    sets, stale = dict[str, tuple[_Cost, str, list[_Candidate]]](), set(by_host)
    while placed.total() < waiting.request.nodes:
        if found := room.place(1, needs, hosts=HostLimits(limit=left_on)):
            placed[found[0]] += 1
            stale.update(found)
            continue
        for host in sorted(stale & by_host.keys()):
            best = _makes_room(room, host, needs[host], by_host[host], chosen)
            sets[host] = (_cost(best), host, best)
        stale.clear()
        able = [one for host, one in sets.items() if one[2] and left_on(host)]
        if not able:
            return []
        _, host, best = min(able)
        for one in best:
            chosen[one.attempt.id] = one
            stale.update(one.claims)
            for name, claim in one.claims.items():
                room.give(name, claim)
        room.take(host, needs[host])
        placed[host] += 1
    return list(chosen.values())


def _cost(evicted: Sequence[_Candidate]) -> _Cost:
    """CPU seconds that are lost, then MiB to be sent; among equals the latest jobs come first."""
    lost, sent = sum(one.cost[0] for one in evicted), sum(one.cost[1] for one in evicted)
    return lost, sent, -min((one.attempt.job.submitted for one in evicted), default=0)


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


def _step(context: Context, one: _Candidate, room: Room, why: Reason) -> Step | None:
    """A single VM moves if another host has room beside the waiting job; else the job is saved. Takes that room. None
    if it can only move, and cannot. A job that can do neither is ended."""
    if one.ends:
        return Step(Method.PREEMPTION, one.attempt, one.vms[0], "", why, 0, ends=one.way)
    if len(one.vms) == 1:
        with suppress(Refused):
            if (found := search_for(context, one.vms[0]).find("", room)) is not None:
                return Step(Method.PREEMPTION, one.attempt, one.vms[0], found[0], why, one.memory)
    return Step(Method.PREEMPTION, one.attempt, one.vms[0], "", why, one.memory) if one.saves else None


def end_run(context: Context, step: Step) -> None:
    """End the run of a job for another one, as the scheduler would: after the grace time of its class."""
    rules, job = context.scheduler.preemption, context.scheduler.jobs[step.attempt.job.job_id]
    assert rules is not None and step.ends, "the step ends a run by these rules"
    grace, mode = rules.grace.get(job.preempt_class, 0.0), rules.modes[job.preempt_class]
    how = Why.ENDS_BY_MODE(
        way="queued again" if step.ends == "requeue" else "cancelled",
        at=context.now + grace if grace else None,
        mode=mode.upper(),
        name=job.preempt_class,
        word="it cannot be queued again" if mode != step.ends else None,
    )
    eviction = Eviction(context.now, step.ends, step.vm.host, step.why.also(how), memory=0)
    context.state.move(preempt_job(context.state.attempts[step.attempt.id], eviction, grace))
