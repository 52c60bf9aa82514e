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
from multiverse.core.rebalance.preemption import plan_preemption
from multiverse.core.saving import save

_SHOWN = 100  # steps of a method that are shown


def leave_drained(context: Context) -> None:
    if context.policy.evict_drains and context.state.drains and context.world.scheduler is not None:
        _begin(context, Limits(context), plan_drains(context, room_of(context).copy()))


def preempt(context: Context, blockage: Blockage) -> Blockage:
    """Make room for the first job that waits for it, as admission has found. What keeps jobs waiting stays the same."""
    if context.policy.evict_preemption and blockage is Blockage.ROOM:
        limits = Limits(context)
        _begin(context, limits, plan_preemption(context, limits))
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
