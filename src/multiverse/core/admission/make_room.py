"""What gives way to jobs that have no room: spares first, then templates that nothing uses. On drained hosts, which are
free when their jobs have ended, all spares and templates give way at once."""

from __future__ import annotations

from collections.abc import Mapping

from multiverse.core.capacity.host_limits import HostLimits, Limit, any_number
from multiverse.core.capacity.room import room_of
from multiverse.core.clones.kinds import may_fork
from multiverse.core.clones.spares import release_spare, spares
from multiverse.core.clones.templates import TemplateWish, could_hold, template_sizes, wish_of
from multiverse.core.context import Context
from multiverse.core.machines.template import drop_template, is_present
from multiverse.core.model import (
    LEAVING_STATES,
    Attempt,
    CloneKind,
    Depth,
    Size,
    Template,
    TemplateState,
    Vm,
    VmState,
    Why,
)


def release_spares(
    context: Context, image: str, count: int, claims: Mapping[str, Size], limit: Limit = any_number
) -> bool:
    """Release as many spares as it takes for `count` such claims, by host and within the limit, to have room: joined
    spares first, for they hold the most, and parked spares of `image` last. What is being released already counts as
    free. False if there are no spares, or all of them would not be enough: then they stay."""
    state = context.state
    leaving = {vm.key for vm in state.vms_in(*LEAVING_STATES, VmState.RETIRING)}
    here = (vm for vm in spares(state) if vm.host in claims)
    order = sorted(here, key=lambda vm: (vm.pool is Depth.PARKED, vm.image == image, vm.id))
    if not order and not leaving:
        return False
    for going in range(len(order) + 1):
        without = leaving | {vm.key for vm in order[:going]}
        if room_of(context, without=without).place(count, claims, hosts=HostLimits(limit=limit)) is not None:
            for vm in order[:going]:
                release_spare(state, vm, Why.MEMORY_NEEDED())
            return True
    return False


def retire_a_template(context: Context, attempt: Attempt) -> None:
    """Retire one template that nothing uses, so that the attempt may have its memory.

    First one that no attempt in the queue needs; such templates are kept only while they fit. Otherwise one that this
    attempt does not need, on a host where only templates are in its way. One at a time: its memory may be enough.
    """
    state, hosts = context.state, context.hosts
    if any(template.host in hosts for template in state.templates_in(TemplateState.RETIRING)):
        return
    image = context.image_of(attempt)
    # Nobody knows which template an adopted VM maps, and one that is mapped gives no memory back.
    unknown = (vm for vm in state.vms_in(VmState.ORPHAN, *LEAVING_STATES) if not vm.image)
    adopted = {place.host for vm in unknown for place in vm.places}
    idle = sorted(
        (
            template
            for template in state.idle_templates()
            if template.host in hosts and template.host not in adopted and image in hosts[template.host].images
        ),
        key=lambda template: (template.since, template.id),
    )
    if not idle:
        return
    # Jobs that ask for the same need the same templates: one of each request is enough to look at.
    wanted = [wish for one in state.queue.one_of_each_request() if (wish := wanted_templates(context, one))]
    mine = wanted_templates(context, attempt)

    def is_wanted(template: Template) -> bool:
        return any(wish.is_for(template.which) for wish in wanted)

    def is_busy(host: str) -> bool:  # spares go with their template
        rows = (state.get(claim.owner) for claim in state.claims.on(host) if claim.owner.kind == "vm")
        return any(not (isinstance(row, Vm) and row.is_spare) for row in rows)

    unwanted = (t for t in idle if t.state is TemplateState.READY and not is_wanted(t))
    in_the_way = (t for t in idle if not (mine and mine.is_for(t.which)) and not is_busy(t.host))
    spare = next(unwanted, None) or next(in_the_way, None)
    if spare:
        state.move(drop_template(spare, Why.MEMORY_NEEDED()))


def wanted_templates(context: Context, attempt: Attempt) -> TemplateWish | None:
    """The templates that the attempt's VMs would be forked from, if they could be."""
    if not may_fork(context, attempt):
        return None
    sizes = template_sizes(context, attempt)
    if not could_hold(context, attempt, CloneKind.INSTANT, sizes):
        return None  # such a job runs by booting if at all, perhaps where such a template is now
    return wish_of(context, attempt, sizes)


def empty_drained(context: Context) -> None:
    """Release the spares of hosts that are drained, or are to be drained, and retire the templates of those that are.
    A host out of sight is emptied when it is back."""
    state, shown = context.state, context.in_sight
    leaving = {name for name in (state.closed | state.closing) if name in state.drains and name in shown}
    if not leaving:
        return
    for vm in spares(state):
        if vm.host in leaving:
            release_spare(state, vm, Why.HOST_DRAINED(host=vm.host))
    for template in [one for name in sorted(leaving & state.closed) for one in state.templates_on(name)]:
        # A VM that was planned before is still to be forked from it.
        needed = any(vm.state is VmState.PLANNED for vm in state.vms_of_template(template.id))
        if is_present(template) and not needed:
            state.move(drop_template(template, Why.HOST_DRAINED(host=template.host)))
