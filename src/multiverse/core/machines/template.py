"""Templates: frozen parents of instant clones."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.model.template import TemplateCondition, TemplateState
from multiverse.core.model.world import World
from multiverse.core.state import PlanState
from multiverse.core.transition import _OF_ANY, Change, Event, Transition, _arrows

TEMPLATE: tuple[Transition, ...] = (
    *_arrows([None, TemplateState.BROKEN], Event.NEEDED, TemplateState.BUILDING),
    *_arrows([TemplateState.BUILDING], Event.BUILT, TemplateState.READY),
    *_arrows([TemplateState.BUILDING], Event.BROKE, TemplateState.BROKEN),
    *_arrows([TemplateState.READY], Event.VANISHED, TemplateState.ABSENT),
    *_arrows(
        [TemplateState.BUILDING, TemplateState.READY, TemplateState.BROKEN], Event.DROPPED, TemplateState.RETIRING
    ),
    *_arrows([TemplateState.RETIRING], Event.ABSENT, TemplateState.ABSENT),
    *(
        Transition(s, event, s)
        for s in (TemplateState.BUILDING, TemplateState.READY, TemplateState.BROKEN, TemplateState.RETIRING)
        for event in _OF_ANY
    ),
)


def step_template(state: PlanState, template_id: int, world: World) -> None:
    row = state.templates.get(template_id)
    if row is None or row.quarantined or world.hypervisor is None:
        return
    ended = world.effect_ended_at.get(row.key)
    if world.hypervisor.began <= max(ended or 0.0, row.since) or row.host not in world.hypervisor.value.hosts:
        return
    seen = world.hypervisor.value.templates.get(row.which)
    ready = seen is not None and seen.condition is TemplateCondition.READY
    if row.state is TemplateState.BUILDING and ready:
        state.move(Change(replace(row, state=TemplateState.READY, tries=0), Event.BUILT))
    elif row.state is TemplateState.READY and not ready:
        why = seen.reason if seen else "it is no longer there"
        state.move(Change(replace(row, state=TemplateState.ABSENT), Event.VANISHED, why), free=[row.key])
    elif row.state is TemplateState.RETIRING and ended is not None and seen is None:
        state.move(Change(replace(row, state=TemplateState.ABSENT), Event.ABSENT), free=[row.key])
