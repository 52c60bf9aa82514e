"""Which kind of clone an attempt's VMs are, and of which template.

The Multiverse paper leaves a "mixed system" of full and instant clones to the future; this is one. A clone of a ready
template wins, unless the template is broken, waits behind others for its pace, or would be made for a single job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from multiverse.core.capacity.placement_policies import BUILT_IN
from multiverse.core.capacity.room import HostLimits, Room, every_host
from multiverse.core.capacity.sizes import (
    NodeRequest,
    could_ever_fit,
    serves_as,
    template_claim,
    template_size,
    vm_claims,
)
from multiverse.core.capacity_index import HostMap, Part
from multiverse.core.clones.spares import fit_to_serve, spares
from multiverse.core.context import Context
from multiverse.core.machines.template import need_template
from multiverse.core.model.basics import CloneKind, Depth, Placement, Size
from multiverse.core.model.host import Claim, Host
from multiverse.core.model.job import Attempt, AttemptState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import Template, TemplateKey, TemplateState, VmState
from multiverse.core.policy import ARRIVALS_FADE, wait_for


def could_hold(context: Context, attempt: Attempt, kind: CloneKind, templates: HostMap[Size]) -> bool:
    """Whether the hosts of `templates`, were they empty, could hold the attempt's VMs as clones of that kind."""
    wanted = node_request(context, attempt, kind)
    return could_ever_fit(wanted, attempt.request, templates, context.hosts, context.policy)


def node_request(context: Context, attempt: Attempt, kind: CloneKind) -> NodeRequest:
    return NodeRequest(attempt.request.size, context.image_of(attempt), kind)


def template_sizes(context: Context, attempt: Attempt) -> HostMap[Size]:
    """The size of the template that the VMs are forked from, by host with their image. A larger template that is ready
    serves too, for what the image cannot plug, unless a gang could never have room with it."""
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
    """Those of the hosts with a ready template that serves instead of `own`: the smallest of each host."""
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
        return TemplateKey(host, self.image, self.sizes[host], self.account)

    def is_for(self, which: TemplateKey | None) -> bool:
        if which is None or (which.image, which.account) != (self.image, self.account):
            return False
        return self.sizes.get(which.host) == which.size

    def ready(self) -> HostMap[Size]:
        return HostMap(
            Part(
                part.kind, part.kind.ready_with(self.image, self.account, part.value), part.value, part.but, part.names
            )
            for part in self.sizes.parts
        )

    def lacking(self) -> TemplateWish:
        parts = []
        for part in self.sizes.parts:
            ready = part.kind.ready_with(self.image, self.account, part.value)
            if len(ready) < len(part.hosts):  # or else all have it: they are hosts of the same class
                parts.append(replace(part, but=(*part.but, ready)))
        return replace(self, sizes=HostMap(parts))

    def rows(self, context: Context, *states: TemplateState) -> list[Template]:
        found = [row for row in context.state.templates_in(*states) if self.is_for(row.which)]
        return sorted(found, key=lambda row: row.host)


def wish_of(context: Context, attempt: Attempt, sizes: HostMap[Size]) -> TemplateWish:
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


ALIKE = 100  # of so many jobs at the head of the queue it is counted how many ask for the same
MayBuild = Callable[[TemplateKey], bool]  # whether a template may be built that is not there


def any_template(_which: TemplateKey) -> bool:
    return True


def ask_for_template(
    context: Context, wish: TemplateWish, room: Room, wanted: Reason, may: MayBuild = any_template
) -> Reason | None:
    """Ask for one of these templates, unless enough are being built. Says so, or None if none can be had now."""
    image = wish.image
    coming = wish.rows(context, TemplateState.BUILDING, TemplateState.RETIRING)
    beside = _vms_beside(context, wish)
    if coming and not _are_too_few(context, wish, coming, room, beside):
        return Why.BEING_BUILT(image=image, host=coming[0].host)
    state, policy = context.state, context.policy
    broken = [
        row.host
        for row in wish.rows(context, TemplateState.BROKEN)
        if state.now >= row.since + policy.backoff(row.tries)
    ]
    name = _where_to_build(context, wish, room, may, beside)
    both = template_claim(wish.sizes[name], context.hosts[name], image) + beside[name] if name and beside else None
    if coming and not (both and room.fits(name, both)):
        name = ""  # more than one at a time are of use only where VMs have room beside them now
    if broken and not coming and not name:  # a host where it has not failed comes first
        build_template(context, wish.key(broken[0]), wanted)
        return Why.BEING_BUILT(image=image, host=broken[0])
    if name:
        room.take(name, template_claim(wish.sizes[name], context.hosts[name], image))
        build_template(context, wish.key(name), wanted)
    if name or coming:
        return Why.BEING_BUILT(image=image, host=name or coming[0].host)
    return None


def _where_to_build(context: Context, wish: TemplateWish, room: Room, may: MayBuild, beside: Mapping[str, Size]) -> str:
    """The first host with room for the template and a VM beside it, or else for the template; empty: none."""
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


def _vms_beside(context: Context, wish: TemplateWish) -> Mapping[str, Size]:
    """What one of the VMs would claim beside its template; empty if that is not known."""
    if wish.attempt is None:
        return {}
    return vm_claims(node_request(context, wish.attempt, CloneKind.INSTANT), wish.sizes, context.hosts, context.policy)


def _are_too_few(
    context: Context, wish: TemplateWish, coming: list[Template], room: Room, beside: Mapping[str, Size]
) -> bool:
    """Whether more VMs that may be made at once wait for the template than the hosts that build it hold."""
    if wish.attempt is None or any(row.state is TemplateState.RETIRING for row in coming):
        return False
    held = sum(room.held(row.host, beside[row.host]) for row in coming if row.host in room.free)
    first = (context.state.attempts[id_] for _, id_ in context.state.queue.candidates.first(ALIKE))
    alike = sum(one.request.nodes for one in first if one.request == wish.attempt.request)
    return held < min(alike, context.policy.provisioning)


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind of clone for an attempt."""

    kind: CloneKind
    why: Reason | None = None  # None: it was asked for
    prepare: bool = False  # its template is worth making for later jobs
    templates: HostMap[Size] | None = None  # the size of the template, by host that has the image

    @property
    def forks(self) -> bool:
        return self.kind is CloneKind.INSTANT

    @property
    def sizes(self) -> HostMap[Size]:
        return self.templates or HostMap(())


def choose_clones(context: Context, attempt: Attempt) -> Choice:
    """The kind of the attempt's clones, and the size of the template that they are forked from."""
    sizes = template_sizes(context, attempt)
    forking = on_hosts_making(context.image_of(attempt), CloneKind.INSTANT, sizes)
    choice = choose_kind(context, attempt, forking)
    if choice.kind is CloneKind.LINKED and attempt.request.kind is not CloneKind.LINKED and forking:
        choice = _unless_too_large(context, attempt, forking, choice)
    return replace(choice, templates=sizes if choice.forks else _as_base(context, sizes))


def _unless_too_large(context: Context, attempt: Attempt, sizes: HostMap[Size], choice: Choice) -> Choice:
    """Fork instead of booting where no host could ever hold the larger, booted clone."""
    if (attempt.request.kind or context.policy.kind) is not CloneKind.AUTO:
        return choice
    bases = hosts_making(context, context.image_of(attempt), CloneKind.LINKED)
    if could_hold(context, attempt, CloneKind.LINKED, bases):
        return choice
    if could_hold(context, attempt, CloneKind.INSTANT, sizes):
        return Choice(CloneKind.INSTANT, Why.NO_ROOM_BOOTED())
    return choice


Way = tuple[CloneKind, HostMap[Size]]  # a kind of clone, and the size of the template, or of the base, on each host


def ways_to_make(context: Context, attempt: Attempt) -> Sequence[Way]:
    """The kinds of clones that the VMs could be, the likeliest first, with the size of the template by host."""
    sizes = template_sizes(context, attempt)
    bases = _as_base(context, sizes)
    match attempt.request.kind or context.policy.kind:
        case CloneKind.INSTANT:
            return [(CloneKind.INSTANT, sizes)]
        case CloneKind.AUTO:
            forks, boots = _is_any_able(context, CloneKind.INSTANT), _is_any_able(context, CloneKind.LINKED)
            ways = [(CloneKind.INSTANT, sizes)] if forks else []
            return ways + ([(CloneKind.LINKED if boots else CloneKind.FULL, bases)] if boots or not forks else [])
        case kind:
            return [(kind, bases)]


def ways_now(context: Context, attempt: Attempt, ways: Sequence[Way]) -> Sequence[Way]:
    """The same ways, each on the hosts that make such clones of the image now, without kinds that no host makes."""
    image = context.image_of(attempt)
    on = [(kind, on_hosts_making(image, kind, sizes)) for kind, sizes in ways]
    return [(kind, sizes) for kind, sizes in on if sizes]


def unable_to_make(image: str, ways: Sequence[Way]) -> list[Reason]:
    unable = [(kind, list(sizes.where(lambda host, kind=kind: not makes(host, image, kind)))) for kind, sizes in ways]  # type: ignore[misc]
    return [Why.UNABLE(clones=kind, hosts=names) for kind, names in unable if names]


def choose_kind(context: Context, attempt: Attempt, forking: HostMap[Size]) -> Choice:
    """The kind that is asked for, or else is a node first. `forking`: hosts that fork, with template sizes."""
    policy = context.policy
    asked = attempt.request.kind or policy.kind
    if asked is not CloneKind.AUTO:
        return Choice(asked)
    if not _is_any_able(context, CloneKind.LINKED):
        forks = _is_any_able(context, CloneKind.INSTANT)
        return Choice(CloneKind.INSTANT, Why.NONE_BOOTS()) if forks else Choice(CloneKind.FULL, Why.NONE_FORKS())
    if not forking:
        return Choice(CloneKind.LINKED, Why.IMAGE_NOT_FORKED())
    if not could_hold(context, attempt, CloneKind.INSTANT, forking):
        return Choice(CloneKind.LINKED, Why.NO_ROOM_BESIDE())
    wish = wish_of(context, attempt, forking)
    if policy.pools and any(
        vm.state is VmState.PARKED and wish.is_for(vm.place.template) and fit_to_serve(context, vm)
        for vm in spares(context.state, Depth.PARKED)
    ):
        return Choice(CloneKind.INSTANT, Why.PARKED())
    return _quicker(context, attempt, wish)


def _is_any_able(context: Context, kind: CloneKind) -> bool:
    return bool(every_host(context, None, lambda host: kind.value in host.abilities))


def _quicker(context: Context, attempt: Attempt, wish: TemplateWish) -> Choice:
    policy, forecast, image = context.policy, context.world.forecast, context.image_of(attempt)
    fork, boot = policy.takes(image, CloneKind.INSTANT, forecast), policy.takes(image, CloneKind.LINKED, forecast)
    if ready := wish.ready():
        return _of_ready(context, image, ready, fork, boot)
    building = wish.rows(context, TemplateState.BUILDING)
    if not building:
        worth = _wanted_by_others(context, attempt, image) >= 1
        broken = next(iter(wish.rows(context, TemplateState.BROKEN)), None)
        if broken:
            return Choice(CloneKind.LINKED, Why.BROKEN_THERE(host=broken.host), prepare=worth)
        if not worth:
            return Choice(CloneKind.LINKED, Why.RARE())
    # A template that is overdue is expected to take as long again as it is overdue.
    waits = [abs(row.since + policy.template_seconds - context.state.now) for row in building]
    wait = min(waits, default=policy.template_seconds)
    if wait + fork < boot:
        return Choice(CloneKind.INSTANT, Why.TEMPLATE_SOONER(wait=wait, boot=boot))
    return Choice(CloneKind.LINKED, Why.BOOT_SOONER(wait=wait, boot=boot), prepare=not building)


def _of_ready(context: Context, image: str, ready: Iterable[str], fork: float, boot: float) -> Choice:
    kind, state, policy = CloneKind.INSTANT, context.state, context.policy
    interval, wait = policy.interval(kind), float("inf")
    for name in ready:
        own = wait_for((name, image, kind), state.paced, state.now, policy)
        wait = min(wait, own + state.waiting[name, image, kind] * interval)
        if wait <= 0:
            break
    if wait + fork > boot:
        return Choice(CloneKind.LINKED, Why.QUEUED_FORKS(wait=wait, boot=boot))
    return Choice(CloneKind.INSTANT, Why.FORK_SOONER(fork=fork + wait, boot=boot))


def _wanted_by_others(context: Context, attempt: Attempt, image: str) -> float:
    """How many VMs of the image other jobs were given of late, or want now."""
    state, queue = context.state, context.state.queue

    def admitted_now(one: Attempt) -> bool:
        return one.state is AttemptState.CLAIMED and one.since >= state.now

    if state.wanted is None:  # computed once for all that ask in this pass: jobs admitted meanwhile count as before
        state.wanted = Counter()
        for named, nodes in queue.wanted.items():
            state.wanted[named or context.policy.image] += nodes
        for one in state.attempts_in(AttemptState.CLAIMED):
            state.wanted[context.image_of(one)] += one.request.nodes if admitted_now(one) else 0
    own = attempt.request.nodes if queue.wants(attempt.id) or admitted_now(attempt) else 0
    now = state.wanted[image] - own
    return context.world.forecast.arrivals.get(image, 0.0) * ARRIVALS_FADE + now


def may_fork(context: Context, attempt: Attempt) -> bool:
    return (attempt.request.kind or context.policy.kind) in (CloneKind.INSTANT, CloneKind.AUTO)


def makes(host: Host, image: str, kind: CloneKind) -> bool:
    """Whether the host can make clones of that kind and image at all, with a template or without."""
    forks = kind is not CloneKind.INSTANT or host.image_can(image, "fork")
    return image in host.images and kind.value in host.abilities and forks


def hosts_making(context: Context, image: str, kind: CloneKind) -> HostMap[Size]:
    """The hosts that can make such clones, all with the base size."""
    return every_host(context, context.policy.base, lambda host: makes(host, image, kind))


def on_hosts_making(image: str, kind: CloneKind, sizes: HostMap[Size]) -> HostMap[Size]:
    return sizes.where(lambda host: makes(host, image, kind))


def _as_base(context: Context, sizes: HostMap[Size]) -> HostMap[Size]:
    """The same hosts with the base size: clones that boot are made as if they were forked from that."""
    return sizes.map(lambda _host, _size: context.policy.base)
