"""What gives way to jobs that have no room: spares first, then templates that nothing uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multiverse.core.model import LEAVING_STATES, Attempt, CloneKind, Depth, Size, TemplateKey, TemplateState, VmState
from multiverse.core.provisioning.capacity import room_of
from multiverse.core.provisioning.clones import could_hold, may_fork, template_key, template_sizes
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.spares import release_spare, spares
from multiverse.core.transition import Change, Event


def release_spares(context: Context, image: str, count: int, claims: Mapping[str, Size]) -> bool:
    """Release as many spares as it takes for `count` such claims, by host, to have room: joined spares first, for they
    hold the most, and parked spares of `image` last. What is being released already counts as free. False if there are
    no spares, or all of them would not be enough: then they stay."""
    state = context.state
    leaving = {vm.key for vm in state.vms_in(*LEAVING_STATES, VmState.RETIRING)}
    here = (vm for vm in spares(state) if vm.host in claims)
    order = sorted(here, key=lambda vm: (vm.pool is Depth.PARKED, vm.image == image, vm.id))
    if not order and not leaving:
        return False
    for going in range(len(order) + 1):
        without = leaving | {vm.key for vm in order[:going]}
        if room_of(context, without=without).place(count, claims) is not None:
            for vm in order[:going]:
                release_spare(state, vm, "its memory is needed")
            return True
    return False


def retire_a_template(context: Context, attempt: Attempt) -> None:
    """Retire one template that nothing uses, so that the attempt may have its memory.

    First one that no attempt in the queue needs; such templates are kept only while they fit. Otherwise one that this
    attempt does not need, on a host where only templates are in its way. One at a time: its memory may be enough.
    """
    state, hosts = context.state, context.hosts
    templates = [template for _, template in sorted(state.templates.items())]
    if any(template.state is TemplateState.RETIRING and template.host in hosts for template in templates):
        return
    image = context.image_of(attempt)
    having = {name for name, host in hosts.items() if image in host.images}
    idle = [
        template
        for template in sorted(templates, key=lambda template: (template.since, template.id))
        if template.state in (TemplateState.READY, TemplateState.BROKEN)
        and template.host in having
        and not state.serves_from(template.which)
    ]
    if not idle:
        return
    spare_keys = {vm.key for vm in state.vms.values() if vm.is_spare}  # spares go with their template
    busy = {key.domain for key in state.claims if key.owner.kind == "vm" and key.owner not in spare_keys}
    # Jobs that ask for the same need the same templates: one of each request is enough to look at.
    wanted = {key for one in state.queue.one_of_each_request() for key in wanted_templates(context, one)}
    mine = set(wanted_templates(context, attempt))
    unwanted = (t for t in idle if t.which not in wanted and t.state is TemplateState.READY)
    in_the_way = (t for t in idle if t.which not in mine and t.host not in busy)
    spare = next(unwanted, None) or next(in_the_way, None)
    if spare:
        state.move(Change(replace(spare, state=TemplateState.RETIRING), Event.DROPPED, "its memory is needed"))


def wanted_templates(context: Context, attempt: Attempt) -> list[TemplateKey]:
    """The templates that the attempt's VMs would be forked from."""
    if not may_fork(context, attempt):
        return []
    sizes = template_sizes(context, attempt)
    if not could_hold(context, attempt, CloneKind.INSTANT, sizes):
        return []  # such a job runs by booting if at all, perhaps where such a template is now
    return [template_key(context, attempt, name, size) for name, size in sizes.items()]
