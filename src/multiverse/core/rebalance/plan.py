"""Begins what the methods propose, within the limits; and says what would be begun."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from multiverse.core.capacity.room import Blockage, room_of
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.moving import search_for
from multiverse.core.rebalance.drains import plan_drains
from multiverse.core.rebalance.limits import Limits, Step
from multiverse.core.rebalance.maintenance import follow_maintenance
from multiverse.core.rebalance.preemption import plan_preemption
from multiverse.core.saving import save

LOOK_AGAIN = 5.0  # seconds after which a job is looked at again that no eviction helped
_SHOWN = 100  # steps of a method that are shown


def leave_drained(context: Context) -> None:
    if context.world.scheduler is not None:
        follow_maintenance(context)
    if context.policy.evict_drains and context.state.drains and context.world.scheduler is not None:
        _begin(context, Limits(context), plan_drains(context, room_of(context).copy()))


def preempt(context: Context, blockage: Blockage) -> Blockage:
    """Make room for the first job that waits for it, as admission has found. What keeps jobs waiting stays the same. If
    nothing helps that job, that is looked at again after a while: the running jobs may be many."""
    state, limits = context.state, Limits(context)
    if not context.policy.evict_preemption or blockage is not Blockage.ROOM or not limits.left:
        return blockage
    attempt, until = state.not_helped
    if attempt != state.blocking or state.now >= until:
        steps = plan_preemption(context, limits)
        _begin(context, limits, steps)
        state.not_helped = (state.blocking, state.now if steps else state.now + LOOK_AGAIN)
    return blockage


def proposals(context: Context) -> list[Step]:
    """What would be begun now, and what the limits hold back. Nothing is changed."""
    if context.world.scheduler is None:
        return []
    limits, steps = Limits(context), list[Step]()
    if context.policy.evict_drains and context.state.drains:
        steps += list(plan_drains(context, room_of(context).copy()))[:_SHOWN]
    if context.policy.evict_preemption:
        steps += plan_preemption(context, limits)[:_SHOWN]
    shown = []
    for step in steps:
        held = limits.why_held(step.attempt, step.memory)
        if held is None:
            limits.take(step.memory)
        shown.append(replace(step, held=held))
    return shown


def _begin(context: Context, limits: Limits, steps: Iterable[Step]) -> None:
    """Begin steps as far as the limits allow. Each is checked again: an earlier one may have changed what it needs."""
    for step in steps:
        if limits.why_held(step.attempt, step.memory) is not None:
            continue
        with suppress(Refused):
            if not step.to:
                save(context, context.state.attempts[step.attempt.id], step.why, evicts=True)
            elif not search_for(context, step.vm).begin(step.to, step.why):
                continue
            limits.take(step.memory)
