"""Which kind of clone an attempt's VMs are, and of which template.

The Multiverse paper leaves a "mixed system" of full and instant clones to the future; this is one. A clone of a
template that is ready wins nearly always. It does not where the image cannot be forked, where its template is broken or
waits behind others for its pace, and where a template would have to be made for a single job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from multiverse.core.capacity.room import every_host
from multiverse.core.capacity_index import HostMap
from multiverse.core.clones.pacing import ARRIVALS_FADE, wait_for
from multiverse.core.clones.spares import fit_to_serve, spares
from multiverse.core.clones.templates import TemplateWish, could_hold, template_sizes, wish_of
from multiverse.core.context import Context
from multiverse.core.model import (
    Attempt,
    AttemptState,
    CloneKind,
    Depth,
    Host,
    Reason,
    Size,
    TemplateState,
    VmState,
    Why,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind of clone, and why it was chosen (None: it was asked for). `prepare`: its template is worth making for the
    jobs that come after, though this job does not wait for it. `templates` is the size of the template that the VMs are
    forked from, or as if they were, on each host that has their image."""

    kind: CloneKind
    why: Reason | None = None
    prepare: bool = False
    templates: HostMap[Size] | None = None

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
    """A clone that boots may be larger than one that is forked: fork where no host could ever hold the former."""
    if (attempt.request.kind or context.policy.kind) is not CloneKind.AUTO or may_boot(context, attempt):
        return choice
    if could_hold(context, attempt, CloneKind.INSTANT, sizes):
        return Choice(CloneKind.INSTANT, Why.NO_ROOM_BOOTED())
    return choice


def may_boot(context: Context, attempt: Attempt) -> bool:
    """Whether the hosts that boot clones of the image could ever hold the attempt's VMs as such clones."""
    bases = hosts_making(context, context.image_of(attempt), CloneKind.LINKED)
    return could_hold(context, attempt, CloneKind.LINKED, bases)


Way = tuple[CloneKind, HostMap[Size]]
"""A kind of clone, and the size of the template, or of the base, on each host."""


def ways_to_make(context: Context, attempt: Attempt) -> Sequence[Way]:
    """The kinds of clones that the attempt's VMs could be, the likeliest first, each with the size of the template on
    each host that has the image: forked from it, or, of clones that boot, as if they were."""
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
    """The hosts that have the image and cannot make such clones of it."""
    unable = [(kind, list(sizes.where(lambda host, kind=kind: not makes(host, image, kind)))) for kind, sizes in ways]  # type: ignore[misc]
    return [Why.UNABLE(clones=kind, hosts=names) for kind, names in unable if names]


def choose_kind(context: Context, attempt: Attempt, forking: HostMap[Size]) -> Choice:
    """The kind for an attempt that is to be admitted now: as asked for, or else the one that will be a node first.
    `forking` are the hosts that fork its image, with the size of the template that it could be forked from there."""
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
    """Whether a fork or a boot is a node first."""
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
    """How many VMs of the image other jobs were given of late, or want now: jobs that wait and are not held, and those
    that this very pass has admitted, of which the forecast does not know yet."""
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
    """Whether the attempt's VMs may be instant clones."""
    return (attempt.request.kind or context.policy.kind) in (CloneKind.INSTANT, CloneKind.AUTO)


def makes(host: Host, image: str, kind: CloneKind) -> bool:
    """Whether the host can make clones of that kind and image at all, with a template or without."""
    forks = kind is not CloneKind.INSTANT or host.image_can(image, "fork")
    return image in host.images and kind.value in host.abilities and forks


def hosts_making(context: Context, image: str, kind: CloneKind) -> HostMap[Size]:
    """The hosts that can make such clones, all with the base size."""
    return every_host(context, context.policy.base, lambda host: makes(host, image, kind))


def on_hosts_making(image: str, kind: CloneKind, sizes: HostMap[Size]) -> HostMap[Size]:
    """Those of the hosts that can make such clones."""
    return sizes.where(lambda host: makes(host, image, kind))


def _as_base(context: Context, sizes: HostMap[Size]) -> HostMap[Size]:
    """The same hosts with the base size, which clones that boot are made as if they were forked from."""
    return sizes.map(lambda _host, _size: context.policy.base)
