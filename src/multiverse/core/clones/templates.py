"""Templates that VMs could be forked from: of which size on which host, which are ready, and asking for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from multiverse.core.capacity.empty_hosts import could_ever_fit
from multiverse.core.capacity.host_limits import HostLimits
from multiverse.core.capacity.placement_policies import BUILT_IN
from multiverse.core.capacity.room import Room, every_host
from multiverse.core.capacity.sizes import NodeRequest, serves_as, template_claim, template_size, vm_claims
from multiverse.core.capacity_index import HostMap, Part
from multiverse.core.context import Context
from multiverse.core.machines.template import need_template
from multiverse.core.model import (
    Attempt,
    Claim,
    CloneKind,
    Placement,
    Reason,
    Size,
    Template,
    TemplateKey,
    TemplateState,
    Why,
)
from multiverse.core.rows import plus


def could_hold(context: Context, attempt: Attempt, kind: CloneKind, templates: HostMap[Size]) -> bool:
    """Whether the hosts of `templates`, were they empty, could hold the attempt's VMs as clones of that kind."""
    wanted = node_request(context, attempt, kind)
    return could_ever_fit(wanted, attempt.request, templates, context.hosts, context.policy)


def node_request(context: Context, attempt: Attempt, kind: CloneKind) -> NodeRequest:
    """What each of the attempt's VMs is to be."""
    return NodeRequest(attempt.request.size, context.image_of(attempt), kind)


def template_sizes(context: Context, attempt: Attempt) -> HostMap[Size]:
    """The size of the template that the attempt's VMs are forked from, on each host that has their image. Of what the
    image cannot plug, a ready template with more of it is as good as one that would have to be built, unless a gang
    could never have room with it."""
    node, image, policy = attempt.request.size, context.image_of(attempt), context.policy
    own, nearest = [], []
    for part in every_host(context, None, lambda host: image in host.images).parts:
        host, size = part.kind.host, template_size(node, part.kind.host, image, policy)
        ready = []
        if not (host.image_can(image, "plug_cpus") and host.image_can(image, "plug_memory")):
            ready = _ready_parts(part, size, image, attempt.request.account)
        own.append(Part(part.kind, part.hosts, size, (), part.names))
        nearest += [*ready, Part(part.kind, part.hosts, size, tuple(one.hosts for one in ready), part.names)]
    if len(nearest) == len(own) or could_hold(context, attempt, CloneKind.INSTANT, HostMap(nearest)):
        return HostMap(nearest)
    return HostMap(own)


def _ready_parts(part: Part[None], own: Size, image: str, account: str) -> list[Part[Size]]:
    """Of these hosts those with ready templates that serve where one of the size `own` is meant, the smallest of each
    host."""
    ready = part.kind.ready.get((image, account), {})
    serving = [size for size in ready if serves_as(size, own, part.kind.host, image)]
    parts: list[Part[Size]] = []
    for size in sorted(serving, key=lambda size: (size.memory, size.cpus)):
        but = tuple(one.hosts for one in parts)
        parts.append(Part(part.kind, ready[size], size, but, part.names))
    return parts


def template_key(context: Context, attempt: Attempt, host: str, size: Size) -> TemplateKey:
    return TemplateKey(host, context.image_of(attempt), size, attempt.request.account)


@dataclass(frozen=True, slots=True)
class TemplateWish:
    """The templates that VMs of an image could be forked from: on each of some hosts, one of a size."""

    image: str
    account: str
    sizes: HostMap[Size]
    attempt: Attempt | None = None  # whose VMs they are; None for a pool's

    def key(self, host: str) -> TemplateKey:
        """Which template it is there."""
        return TemplateKey(host, self.image, self.sizes[host], self.account)

    def is_for(self, which: TemplateKey | None) -> bool:
        """Whether it is one of these templates."""
        if which is None or (which.image, which.account) != (self.image, self.account):
            return False
        return self.sizes.get(which.host) == which.size

    def ready(self) -> HostMap[Size]:
        """The hosts that have theirs ready."""
        return HostMap(
            Part(
                part.kind, part.kind.ready_with(self.image, self.account, part.value), part.value, part.but, part.names
            )
            for part in self.sizes.parts
        )

    def lacking(self) -> TemplateWish:
        """The same on the hosts that have theirs not ready."""
        parts = []
        for part in self.sizes.parts:
            ready = part.kind.ready_with(self.image, self.account, part.value)
            if len(ready) < len(part.hosts):  # or else all have it: they are hosts of the same class
                parts.append(replace(part, but=(*part.but, ready)))
        return replace(self, sizes=HostMap(parts))

    def rows(self, context: Context, *states: TemplateState) -> list[Template]:
        """The rows of these templates in one of the states, by host."""
        found = [row for row in context.state.templates_in(*states) if self.is_for(row.which)]
        return sorted(found, key=lambda row: row.host)


def wish_of(context: Context, attempt: Attempt, sizes: HostMap[Size]) -> TemplateWish:
    """The templates that the attempt's VMs could be forked from."""
    return TemplateWish(context.image_of(attempt), attempt.request.account, sizes, attempt)


def build_template(context: Context, which: TemplateKey, reason: Reason) -> None:
    """Plan the building of a template, whether it was never there or is broken."""
    state, (host, image, size, account) = context.state, which
    row = state.template_for(which) or Template(
        id=state.numbers.new_template_id(),
        since=state.now,
        host=host,
        image=image,
        size=size,
        account=account,
        source=state.source_of(host),
    )
    claimed = state.claims.of(row.key)
    state.move(
        need_template(row, reason),
        make=[] if claimed else [Claim(row.key, host, template_claim(size, context.hosts.get(host), image))],
    )


ALIKE = 100
"""Of so many jobs at the head of the queue it is counted how many ask for the same."""

MayBuild = Callable[[TemplateKey], bool]
"""Whether a template may be built that is not there."""


def any_template(_which: TemplateKey) -> bool:
    """Every template may be built."""
    return True


def ask_for_template(
    context: Context, wish: TemplateWish, room: Room, wanted: Reason, may: MayBuild = any_template
) -> Reason | None:
    """Ask for one of these templates that may be built, because it is `wanted`, unless those that are being built
    already are enough. Says so, or nothing if none of them can be had now."""
    image = wish.image
    coming = wish.rows(context, TemplateState.BUILDING, TemplateState.RETIRING)
    beside = _vms_beside(context, wish)
    if coming and not _are_too_few(context, wish, coming, room, beside):
        return Why.BEING_BUILT(image=image, host=coming[0].host)
    broken = [row.host for row in wish.rows(context, TemplateState.BROKEN) if _is_due(context, row)]
    name = _where_to_build(context, wish, room, may, beside)
    if coming and not (name and beside and _holds_both(context, wish, room, beside, name)):
        name = ""  # more than one at a time are of use only where VMs have room beside them now
    if broken and not coming and not name:  # a host on which it is not known to fail comes first
        build_template(context, wish.key(broken[0]), wanted)
        return Why.BEING_BUILT(image=image, host=broken[0])
    if name:
        room.take(name, template_claim(wish.sizes[name], context.hosts[name], image))
        build_template(context, wish.key(name), wanted)
    if name or coming:
        return Why.BEING_BUILT(image=image, host=name or coming[0].host)
    return None


def _where_to_build(context: Context, wish: TemplateWish, room: Room, may: MayBuild, beside: Mapping[str, Size]) -> str:
    """The first host by name that has room for the template and a VM beside it, or at least for the template; empty if
    there is none. A template without room for a VM is of use once others have ended."""
    state = context.state

    def accept(name: str) -> bool:
        return state.template_for(wish.key(name)) is None and may(wish.key(name))

    alone = wish.sizes.map(lambda host, size: template_claim(size, host, wish.image))
    both = [alone.plus(beside)] if beside else []
    for claims in (*both, alone):
        if found := room.place(1, claims, hosts=HostLimits(accept), choose=BUILT_IN[Placement.FIRST_FIT]):
            room.give(found[0], claims[found[0]])
            return found[0]
    return ""


def _holds_both(context: Context, wish: TemplateWish, room: Room, beside: Mapping[str, Size], name: str) -> bool:
    alone, vm = template_claim(wish.sizes[name], context.hosts[name], wish.image), beside[name]
    return room.fits(name, plus(alone, vm))


def _vms_beside(context: Context, wish: TemplateWish) -> Mapping[str, Size]:
    """What one of the VMs would claim beside its template; empty if it is not known what they are to be."""
    if wish.attempt is None:
        return {}
    return vm_claims(node_request(context, wish.attempt, CloneKind.INSTANT), wish.sizes, context.hosts, context.policy)


def _are_too_few(
    context: Context, wish: TemplateWish, coming: list[Template], room: Room, beside: Mapping[str, Size]
) -> bool:
    """Whether the hosts on which templates are being built will not hold the VMs that wait for them, of those that may
    be made at once: then others are built at the same time."""
    if wish.attempt is None or any(row.state is TemplateState.RETIRING for row in coming):
        return False
    held = sum(room.held(row.host, beside[row.host]) for row in coming if row.host in room.free)
    return held < min(_waiting_alike(context, wish.attempt), context.policy.provisioning)


def _waiting_alike(context: Context, attempt: Attempt) -> int:
    """How many VMs are wanted by the first jobs in the queue that ask for the same."""
    state = context.state
    first = (state.attempts[id_] for _, id_ in state.queue.candidates.first(ALIKE))
    return sum(one.request.nodes for one in first if one.request == attempt.request)


def _is_due(context: Context, broken: Template) -> bool:
    """Whether a template that is broken may be built again."""
    return context.state.now >= broken.since + context.policy.backoff(broken.tries)
