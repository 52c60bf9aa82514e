"""What keeps a job from being admitted whatever is free, and what gives way to jobs that have no room.

Spares give way first, then unused templates. On drained hosts all spares and templates give way at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from multiverse.core.capacity.room import NO_LIMITS, HostLimits, every_host, index_of, memory_beyond, must_keep, room_of
from multiverse.core.capacity.sizes import empty_capacity, largest_on, template_claim, vm_claims
from multiverse.core.capacity.usable_hosts import avoided_hosts, drained_hosts
from multiverse.core.capacity_index import HostMap, how_many
from multiverse.core.clones.kinds import (
    Choice,
    TemplateWish,
    Way,
    could_hold,
    may_fork,
    node_request,
    on_hosts_making,
    template_sizes,
    unable_to_make,
    ways_now,
    ways_to_make,
    wish_of,
)
from multiverse.core.clones.spares import release_spare, spares
from multiverse.core.clones.supply import claims_to_restore
from multiverse.core.context import Context
from multiverse.core.leases import fits_on_leases
from multiverse.core.machines.template import drop_template, is_present
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.job import Attempt, Request
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import LEAVING_STATES, Template, TemplateState, Vm, VmState


def why_unfit(context: Context, attempt: Attempt) -> tuple[Reason | None, bool]:
    """Why no host that takes VMs could hold the job, were it empty (None: one could), and whether others may yet:
    drained or unable hosts, hosts to be leased or without the image, and those out of reach, of unknown size."""
    if _fits_now(context, attempt):
        return None, True
    if context.avoided and _fits_now(context.with_avoided(), attempt):
        return Why.ALL_AVOIDED(*avoided_hosts(context, context.image_of(attempt))), True
    if context.policy.leases and fits_on_leases(context, attempt):
        return Why.TO_BE_LEASED(), True
    resumed = context.with_drained()
    if len(resumed.hosts) > len(context.hosts) and _fits_now(resumed, attempt):
        return Why.ALL_DRAINED(*drained_hosts(context)), True
    return _why_unfit(resumed, attempt)


def why_not_restored_anywhere(context: Context, attempt: Attempt, saved: Saved) -> Reason | None:
    """Why no host that takes VMs could hold a saved job, were it empty. None: one could, or none reaches its state."""
    if saved.kept:  # it has its room
        return None
    held, claims = 0, claims_to_restore(context, saved)
    for part in claims.parts:  # equal hosts are looked at once
        host, claim = part.kind.host, part.value
        if claim.cpus <= host.capacity.cpus:
            held += attempt.request.most_on_a_host(how_many(claim, empty_capacity(host).amounts)) * len(part)
    if not claims or held >= len(saved.parts):
        return None
    if context.policy.leases and fits_on_leases(context, attempt):
        return Why.TO_BE_LEASED()
    return Why.SAVED_FITS_NOWHERE(vms=len(saved.parts), node=str(saved.node_size))


def _fits_now(context: Context, attempt: Attempt) -> bool:
    ways = ways_to_make(context, attempt)
    return _fits_one_way(context, attempt, ways_now(context, attempt, ways) or ways)


def _why_unfit(context: Context, attempt: Attempt) -> tuple[Reason, bool]:
    image, hosts, state = context.image_of(attempt), context.hosts, context.state
    ways = ways_to_make(context, attempt)
    now = ways_now(context, attempt, ways) or ways
    kind, templates = ways[0]
    unable = unable_to_make(image, ways) if _fits_one_way(context, attempt, ways) else []
    without = every_host(context, context.policy.base, lambda host: image not in host.images)
    anywhere = HostMap((*templates.parts, *without.parts))
    hope = bool(unable) or could_hold(context, attempt, kind, anywhere)
    if not hosts:
        why = Why.NO_HOST()
    elif hope and not templates:
        why = Why.NO_IMAGE(image=image)
    else:
        lacking = Why.WITHOUT_IMAGE(image=image, hosts=without) if hope and without else None
        why = _largest(context, attempt, *now[0]).also(*unable, lacking)
    away = sorted(name for name, known in state.hosts.items() if name not in hosts and known.is_member)
    return why.also(Why.AWAY_NOW(hosts=away) if away else None), hope or bool(away) or not hosts


def _fits_one_way(context: Context, attempt: Attempt, ways: Sequence[Way]) -> bool:
    return any(could_hold(context, attempt, kind, sizes) for kind, sizes in ways)


def _largest(context: Context, attempt: Attempt, kind: CloneKind, templates: HostMap[Size]) -> Reason:
    node, nodes, image = attempt.request.size, attempt.request.nodes, context.image_of(attempt)
    parts = (templates or every_host(context, context.policy.base)).parts
    most = (largest_on(part.kind.host, image, context.policy, kind) for part in parts if part)
    fit = max(most, key=lambda size: (size.memory, size.cpus))
    return Why.TOO_LARGE(vms=nodes, node=str(node), per_host=attempt.request.per_host, fit=str(fit))


class ForeignMemory:
    """Says in one round of admission whether others hold the memory that attempts need."""

    def __init__(self) -> None:
        self._said: dict[tuple[Request, CloneKind, frozenset[str], bool], Reason | None] = {}

    def why(self, context: Context, attempt: Attempt, choice: Choice) -> Reason | None:
        """Why the job would not fit even without our VMs: other processes hold the memory. None where memory is not
        over-committed. What others hold varies, so who was told this is told again until there is some more than
        enough."""
        if all(kind.host.overcommit.memory <= 1 for kind in index_of(context).classes.values()):
            return None
        lacking = context.state.lacking
        known = (attempt.request, choice.kind) in lacking
        alike = (attempt.request, choice.kind, context.without, known)
        if alike not in self._said:
            self._said[alike] = _why(context, attempt, choice, margin=known)
            (lacking.add if self._said[alike] else lacking.discard)(alike[:2])
        return self._said[alike]


def _why(context: Context, attempt: Attempt, choice: Choice, *, margin: bool) -> Reason | None:
    wanted = node_request(context, attempt, choice.kind)
    sizes = on_hosts_making(wanted.image, choice.kind, choice.sizes)
    frozen: Mapping[str, Size] = {}
    if choice.forks:
        frozen = sizes.map(lambda host, size: template_claim(size, host, wanted.image))
    claims = vm_claims(wanted, sizes, context.hosts, context.policy)
    floors = memory_beyond(context, claims, frozen, attempt.request, margin=margin)
    return Why.MEMORY(*must_keep(floors), others=1) if floors is not None else None


# --- what gives way ---------------------------------------------------------------------------------


def release_spares(
    context: Context, image: str, count: int, claims: Mapping[str, Size], hosts: HostLimits = NO_LIMITS
) -> bool:
    """Release as many spares as `count` claims need: joined ones first, parked ones of `image` last. What is being
    released already counts as free. False, and nothing is released, if all of them would not be enough."""
    state = context.state
    leaving = {vm.key for vm in state.vms_in(*LEAVING_STATES, VmState.RETIRING)}
    here = (vm for vm in spares(state) if vm.host in claims)
    order = sorted(here, key=lambda vm: (vm.pool is Depth.PARKED, vm.image == image, vm.id))
    if not order and not leaving:
        return False
    for going in range(len(order) + 1):
        without = leaving | {vm.key for vm in order[:going]}
        if room_of(context, without=without).place(count, claims, hosts=hosts) is not None:
            for vm in order[:going]:
                release_spare(state, vm, Why.MEMORY_NEEDED())
            return True
    return False


def retire_a_template(context: Context, attempt: Attempt) -> None:
    """Retire one unused template for the attempt's sake: one that no queued attempt needs, or else one that this
    attempt does not need, on a host where only templates are in its way. One at a time: it may be enough."""
    state, hosts = context.state, context.hosts
    if any(template.host in hosts for template in state.templates_in(TemplateState.RETIRING)):
        return
    image = context.image_of(attempt)
    # Nobody knows which template an adopted VM maps, and a mapped template gives no memory back.
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
    if not may_fork(context, attempt):
        return None
    sizes = template_sizes(context, attempt)
    if not could_hold(context, attempt, CloneKind.INSTANT, sizes):
        return None  # such a job runs by booting if at all, perhaps where such a template is now
    return wish_of(context, attempt, sizes)


def empty_drained(context: Context) -> None:
    """Release the spares, and retire the templates, of hosts in sight that are drained or are to be."""
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
