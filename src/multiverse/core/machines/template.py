"""Templates: frozen parents of instant clones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.vm import Template, TemplateCondition, TemplateState
from multiverse.core.model.world import World
from multiverse.core.state import State
from multiverse.core.transition import Change, EffectKind, Event, Transition, transitions, unchanged

T = TemplateState

# --- table -----------------------------------------------------------------------------------------

TEMPLATE: tuple[Transition, ...] = (
    *transitions([None, T.BROKEN], Event.NEEDED, T.BUILDING),
    *transitions([None], Event.FOUND, T.READY, T.BUILDING),
    *transitions([T.BUILDING], Event.BUILT, T.READY),
    *transitions([T.BUILDING], Event.BROKE, T.BROKEN),
    *transitions([T.READY], Event.VANISHED, T.ABSENT),
    *transitions([T.BUILDING, T.READY, T.BROKEN], Event.DROPPED, T.RETIRING),
    *transitions([T.RETIRING], Event.ABSENT, T.ABSENT),
    *transitions([T.BUILDING, T.READY, T.BROKEN, T.RETIRING], Event.REMOVED, T.ABSENT),
    *unchanged([T.BUILDING, T.READY, T.BROKEN, T.RETIRING], Event.QUARANTINED, Event.RETRIED),
)


def need_template(template: Template, why: Reason) -> Change:
    return Change(replace(template, state=T.BUILDING, reason=None), Event.NEEDED, why)


def adopt_template(template: Template, why: Reason, *, ready: bool) -> Change:
    """A template was found without a row. If it is being built, that goes on."""
    return Change(replace(template, state=T.READY if ready else T.BUILDING), Event.FOUND, why)


def break_template(template: Template, why: Reason) -> Change:
    return Change(replace(template, state=T.BROKEN, reason=why, tries=template.tries + 1), Event.BROKE, why)


def is_present(template: Template) -> bool:
    return template.state in (T.READY, T.BROKEN, T.BUILDING)


def drop_template(template: Template, why: Reason) -> Change:
    return Change(replace(template, state=T.RETIRING), Event.DROPPED, why)


def lose_template(template: Template, why: Reason) -> Change:
    """It is no longer there, or another build has taken its place. Its claim is to be released with it."""
    return Change(replace(template, state=T.ABSENT), Event.VANISHED, why)


def remove_templates(templates: Iterable[Template], why: Reason) -> list[Change]:
    """Their host belongs to the site no more. Their claims are to be released with them."""
    return [Change(replace(one, state=T.ABSENT), Event.REMOVED, why) for one in templates]


# --- step ------------------------------------------------------------------------------------------


def step_template(state: State, template_id: int, world: World) -> None:
    row = state.templates.get(template_id)
    if row is None or row.quarantined:
        return
    latest, ended = world.latest(row.source), world.effect_ended_at.get(row.key)
    if latest is None or row.host not in latest.value.hosts or latest.began <= max(ended or 0.0, row.since):
        return
    seen = latest.value.templates.get(row.which)
    if row.state is T.BUILDING and row.key in state.unconfirmed:
        if seen is None:  # it is asked for anew if it is needed, and if there is still room
            state.move(drop_template(row, Why.UNBUILT()))
            return
        state.unconfirmed.discard(row.key)
    ready = seen is not None and seen.condition is TemplateCondition.READY
    if row.state is T.BUILDING and seen is not None and ready:
        state.move(Change(replace(row, state=T.READY, tries=0, build=seen.build), Event.BUILT))
    elif row.state is T.READY and not ready:
        why = (said(seen.reason) if seen else None) or Why.NO_LONGER_THERE()
        state.move(lose_template(row, why), free=[row.claim_key])
    elif row.state is T.RETIRING and ended is not None and seen is None:
        state.move(Change(replace(row, state=T.ABSENT), Event.ABSENT), free=[row.claim_key])


def template_is_settled(template: Template) -> bool:
    """Whether neither time nor another effect can move the row before its source is observed anew."""
    return bool(template.quarantined) or template.state in (T.READY, T.BROKEN)


TEMPLATE_EFFECTS = {T.BUILDING: EffectKind.BUILD, T.RETIRING: EffectKind.DROP}
