"""Begins what the methods propose, within the limits; and says what would be begun."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from multiverse.core.capacity.room import Blockage, room_of
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.reason import Reason, Why
from multiverse.core.moving import search_for
from multiverse.core.rebalance.drains import plan_drains
from multiverse.core.rebalance.leases import plan_lease_ends, plan_packing
from multiverse.core.rebalance.limits import EvictionLimits
from multiverse.core.rebalance.maintenance import follow_maintenance
from multiverse.core.rebalance.preemption import CONSIDERED, end_run, may_give_way, plan_preemption
from multiverse.core.saving import save

LOOK_AGAIN = 5.0  # seconds after which a job is looked at again that no eviction helped
_PER_JOB = 0.001  # seconds between two plans for each running job that they look at
_SHOWN = 100  # steps of a method that are shown


def leave_hosts(context: Context) -> None:
    """Off those that are drained, and off leased ones that end, or that others replace."""
    _leave_drained(context)
    _leave_leased(context)


def _leave_drained(context: Context) -> None:
    held = list[Step]()
    if context.world.scheduler is not None:
        follow_maintenance(context)
        if context.policy.evict_drains and context.state.drains:
            held = _begin(context, EvictionLimits(context), plan_drains(context, room_of(context).copy()))
    context.state.held_back[Method.DRAIN] = held


def _leave_leased(context: Context) -> None:
    state, ends, packed = context.state, list[Step](), list[Step]()
    if context.policy.evict_leases and state.leases and context.world.scheduler is not None:
        limits = EvictionLimits(context)
        ends = _begin(context, limits, plan_lease_ends(context, room_of(context).copy()))
        packed = _begin(context, limits, plan_packing(context, room_of(context).copy()))
    state.held_back |= {Method.LEASE_END: ends, Method.PACKING: packed}


def preempt(context: Context, blockage: Blockage) -> Blockage:
    """Make room for the first job that waits for it, as admission has found. What keeps jobs waiting stays the same. If
    nothing helps that job, that is looked at again after a while: the running jobs may be many."""
    state = context.state
    if not context.policy.evict_preemption or blockage is not Blockage.ROOM:
        state.held_back[Method.PREEMPTION] = []
        return blockage
    attempt, until, passed_over = state.looked_for_room
    if attempt != state.blocking or state.now >= until:
        passed_over = passed_over if attempt == state.blocking else 0
        limits = EvictionLimits(context)
        steps = plan_preemption(context, limits, passed_over)
        state.held_back[Method.PREEMPTION] = held = _begin(context, limits, steps)
        pause, passed_over = _next_look(context, passed_over, found=bool(steps), begun=len(steps) > len(held))
        state.looked_for_room = (state.blocking, state.now + pause, passed_over)
    return blockage


def _next_look(context: Context, passed_over: int, *, found: bool, begun: bool) -> tuple[float, int]:
    """After how many seconds the same job is looked at again, and which running jobs are passed over then. Where these
    are many a plan takes long, so that plans follow each other the less often."""
    waiting = context.state.attempts.get(context.state.blocking or 0)
    job = context.state.queue.jobs.get(waiting.job.job_id) if waiting is not None else None
    running = len(may_give_way(context, job.preempt_class)) if job is not None else 0
    soon = min(running, CONSIDERED) * _PER_JOB
    if found:
        return soon if begun else LOOK_AGAIN, passed_over
    return (soon, passed_over + CONSIDERED) if passed_over + CONSIDERED < running else (LOOK_AGAIN, 0)


def proposals(context: Context) -> list[Step]:
    """What would be begun now, and what the limits hold back. Nothing is changed."""
    if context.world.scheduler is None:
        return []
    limits, steps = EvictionLimits(context), list[Step]()
    if context.policy.evict_drains and context.state.drains:
        steps += list(plan_drains(context, room_of(context).copy()))[:_SHOWN]
    if context.policy.evict_leases and context.state.leases:
        steps += list(plan_lease_ends(context, room_of(context).copy()))[:_SHOWN]
        steps += list(plan_packing(context, room_of(context).copy()))[:_SHOWN]
    if context.policy.evict_preemption:
        steps += plan_preemption(context, limits, context.state.looked_for_room[2])[:_SHOWN]
    shown, since = [], _held_since(context)
    for step in steps:
        held = limits.why_held(step)
        if held is None:
            limits.take(step)
        shown.append(_held(step, held, since) if held else step)
    return shown


def _begin(context: Context, limits: EvictionLimits, steps: Iterable[Step]) -> list[Step]:
    """Begin steps as far as the limits allow, and return the others. Each is checked again: an earlier one may have
    changed what it needs."""
    held_back, since = [], _held_since(context)
    for step in steps:
        if (held := limits.why_held(step)) is not None:
            held_back.append(_held(step, held, since))
            continue
        with suppress(Refused):
            if step.ends:
                end_run(context, step)
            elif not step.to:
                lost = step.method is Method.LEASE_END  # it would begin anew
                save(context, context.state.attempts[step.attempt.id], step.why, evicts=True, restarts=lost)
            elif not search_for(context, step.vm).begin(step.to, step.why):
                continue
            limits.take(step)
    return held_back


_Since = defaultdict[tuple[Reason, Why | None], float]


def _held_since(context: Context) -> _Since:
    """Since when steps are held, by the reason for which they are to be done and by the limit; others since now."""
    before = (step for steps in context.state.held_back.values() for step in steps)
    known = {(one.why, one.held.kind if one.held else None): one.held_since for one in before}
    return defaultdict(lambda: context.state.now, known)


def _held(step: Step, held: Reason, since: _Since) -> Step:
    return replace(step, held=held, held_since=since[step.why, held.kind])
