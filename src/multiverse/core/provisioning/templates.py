"""Templates that VMs could be forked from: of which size on which host, which are ready, and asking for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from multiverse.core.free import ByHost, Part
from multiverse.core.model import Attempt, Claim, CloneKind, Placement, Size, Template, TemplateKey, TemplateState
from multiverse.core.provisioning.capacity import Room, every_host
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.largest import could_ever_fit
from multiverse.core.provisioning.placement import BUILT_IN
from multiverse.core.provisioning.sizes import NodeRequest, serves_as, template_claim, template_size
from multiverse.core.transition import Change, Event


def could_hold(context: Context, attempt: Attempt, kind: CloneKind, templates: ByHost[Size]) -> bool:
    """Whether the hosts of `templates`, were they empty, could hold the attempt's VMs as clones of that kind."""
    wanted, nodes = node_request(context, attempt, kind), attempt.request.nodes
    return could_ever_fit(wanted, nodes, templates, context.hosts, context.policy)


def node_request(context: Context, attempt: Attempt, kind: CloneKind) -> NodeRequest:
    """What each of the attempt's VMs is to be."""
    return NodeRequest(attempt.request.size, context.image_of(attempt), kind)


def template_sizes(context: Context, attempt: Attempt) -> ByHost[Size]:
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
    if len(nearest) == len(own) or could_hold(context, attempt, CloneKind.INSTANT, ByHost(nearest)):
        return ByHost(nearest)
    return ByHost(own)


def _ready_parts(part: Part[None], own: Size, image: str, account: str) -> list[Part[Size]]:
    """Of these hosts those with ready templates that serve where one of the size `own` is meant, the smallest of each
    host."""
    ready = part.kind.ready.get((image, account), {})
    serving = [size for size in ready if serves_as(size, own, part.kind.host, image)]
    parts: list[Part[Size]] = []
    for size in sorted(serving, key=lambda size: (size.memory, size.cpus)):
        parts.append(replace(part, hosts=ready[size], value=size, but=tuple(one.hosts for one in parts)))
    return parts


def template_key(context: Context, attempt: Attempt, host: str, size: Size) -> TemplateKey:
    return TemplateKey(host, context.image_of(attempt), size, attempt.request.account)


@dataclass(frozen=True, slots=True)
class TemplateWish:
    """The templates that VMs of an image could be forked from: on each of some hosts, one of a size."""

    image: str
    account: str
    sizes: ByHost[Size]

    def key(self, host: str) -> TemplateKey:
        """Which template it is there."""
        return TemplateKey(host, self.image, self.sizes[host], self.account)

    def is_for(self, which: TemplateKey | None) -> bool:
        """Whether it is one of these templates."""
        if which is None or (which.image, which.account) != (self.image, self.account):
            return False
        return self.sizes.get(which.host) == which.size

    def ready(self) -> ByHost[Size]:
        """The hosts that have theirs ready."""
        return ByHost(
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
        return replace(self, sizes=ByHost(parts))

    def rows(self, context: Context, *states: TemplateState) -> list[Template]:
        """The rows of these templates in one of the states, by host."""
        found = [row for row in context.state.templates_in(*states) if self.is_for(row.which)]
        return sorted(found, key=lambda row: row.host)


def wish_of(context: Context, attempt: Attempt, sizes: ByHost[Size]) -> TemplateWish:
    """The templates that the attempt's VMs could be forked from."""
    return TemplateWish(context.image_of(attempt), attempt.request.account, sizes)


def need_template(context: Context, which: TemplateKey, reason: str) -> None:
    """Plan the building of a template, whether it was never there or is broken."""
    state, (host, image, size, account) = context.state, which
    row = state.template_for(which) or Template(
        id=state.new_template_id(),
        version=0,
        state=TemplateState.ABSENT,
        since=state.now,
        host=host,
        image=image,
        size=size,
        account=account,
        source=state.source_of(host),
    )
    claimed = state.claims_of(row.key)
    state.move(
        Change(replace(row, state=TemplateState.BUILDING, reason=""), Event.NEEDED, reason),
        make=[] if claimed else [Claim(row.key, host, template_claim(size, context.hosts.get(host), image))],
    )


MayBuild = Callable[[TemplateKey], bool]
"""Whether a template may be built that is not there."""


def any_template(_which: TemplateKey) -> bool:
    """Every template may be built."""
    return True


def ask_for_template(
    context: Context, wish: TemplateWish, room: Room, wanted: str, may: MayBuild = any_template
) -> str:
    """Ask for one of these templates that may be built, because it is `wanted`, unless one of them is being built
    already. Says so, or nothing if none of them can be had now."""
    state, image = context.state, wish.image
    if coming := wish.rows(context, TemplateState.BUILDING, TemplateState.RETIRING):
        return f"the template of image {image} is being built on {coming[0].host}"
    broken = [row.host for row in wish.rows(context, TemplateState.BROKEN) if _is_due(context, row)]
    claims = wish.sizes.map(lambda host, size: template_claim(size, host, image))
    first_fit = BUILT_IN[Placement.FIRST_FIT]

    def accept(name: str) -> bool:
        return state.template_for(wish.key(name)) is None and may(wish.key(name))

    free = room.place(1, claims, accept=accept, choose=first_fit)
    for name in sorted((*broken[:1], *(free or ())))[:1]:
        if free and name not in free:
            room.give(free[0], claims[free[0]])
        need_template(context, wish.key(name), wanted)
        return f"the template of image {image} is being built on {name}"
    return ""


def _is_due(context: Context, broken: Template) -> bool:
    """Whether a template that is broken may be built again."""
    return context.state.now >= broken.since + context.policy.backoff(broken.tries)
