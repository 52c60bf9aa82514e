"""How an attempt's VMs are made: which kind of clone, of which template, and their rows.

The Multiverse paper leaves a "mixed system" of full and instant clones to the future; this is one. A clone of a
template that is ready wins nearly always. It does not where the image cannot be forked, where its template is broken or
waits behind others for its pace, and where a template would have to be made for a single job.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multiverse.core.free import ByHost
from multiverse.core.machines.attempt import replace_vms, return_attempt
from multiverse.core.machines.vm import plan_vm
from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    Depth,
    Host,
    Place,
    Reason,
    Size,
    TemplateKey,
    TemplateState,
    Vm,
    VmState,
    Why,
)
from multiverse.core.model.names import mac_of, token_of, vm_name
from multiverse.core.provisioning.capacity import every_host, room_of
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.draining import for_attempt
from multiverse.core.provisioning.pacing import ARRIVALS_FADE, paid, wait_for
from multiverse.core.provisioning.permitted import Open, others_on
from multiverse.core.provisioning.placement import address_of
from multiverse.core.provisioning.placing import FALLBACK, place_vms, placement_of, placement_request
from multiverse.core.provisioning.sizes import (
    vm_claim,
    vm_claims,
    vm_size,
)
from multiverse.core.provisioning.spares import fit_to_serve, spares
from multiverse.core.provisioning.templates import (
    TemplateWish,
    could_hold,
    node_request,
    template_sizes,
    wish_of,
)
from multiverse.core.rows import VmsMissing
from multiverse.core.transition import Event

# --- the kind of clone -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind of clone, and why it was chosen (None: it was asked for). `prepare`: its template is worth making for the
    jobs that come after, though this job does not wait for it. `templates` is the size of the template that the VMs are
    forked from, or as if they were, on each host that has their image."""

    kind: CloneKind
    why: Reason | None = None
    prepare: bool = False
    templates: ByHost[Size] | None = None

    @property
    def forks(self) -> bool:
        return self.kind is CloneKind.INSTANT

    @property
    def sizes(self) -> ByHost[Size]:
        return self.templates or ByHost(())


def choose_clones(context: Context, attempt: Attempt) -> Choice:
    """The kind of the attempt's clones, and the size of the template that they are forked from."""
    sizes = template_sizes(context, attempt)
    forking = on_hosts_making(context.image_of(attempt), CloneKind.INSTANT, sizes)
    choice = choose_kind(context, attempt, forking)
    if choice.kind is CloneKind.LINKED and attempt.request.kind is not CloneKind.LINKED and forking:
        choice = _unless_too_large(context, attempt, forking, choice)
    return replace(choice, templates=sizes if choice.forks else _as_base(context, sizes))


def _unless_too_large(context: Context, attempt: Attempt, sizes: ByHost[Size], choice: Choice) -> Choice:
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


Way = tuple[CloneKind, ByHost[Size]]
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


def choose_kind(context: Context, attempt: Attempt, forking: ByHost[Size]) -> Choice:
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


def hosts_making(context: Context, image: str, kind: CloneKind) -> ByHost[Size]:
    """The hosts that can make such clones, all with the base size."""
    return every_host(context, context.policy.base, lambda host: makes(host, image, kind))


def on_hosts_making(image: str, kind: CloneKind, sizes: ByHost[Size]) -> ByHost[Size]:
    """Those of the hosts that can make such clones."""
    return sizes.where(lambda host: makes(host, image, kind))


def _as_base(context: Context, sizes: ByHost[Size]) -> ByHost[Size]:
    """The same hosts with the base size, which clones that boot are made as if they were forked from."""
    return sizes.map(lambda _host, _size: context.policy.base)


# --- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CloneRequest:
    """VMs to be planned: of which image, kind and account, what their nodes declare, and by host the size of their
    template, which is also where their sizes come from unless `sizes` gives them."""

    image: str
    kind: CloneKind
    node: Size
    templates: Mapping[str, Size]
    account: str = ""
    pool: Depth | None = None
    attempt: int | None = None
    sizes: Mapping[str, Size] | None = None


def _skip_names_of_nodes(context: Context, count: int) -> None:
    """Let the next serials be ones whose names no node has, also in a database that has lost its place."""
    state, nodes = context.state, context.world.scheduler.value.nodes if context.world.scheduler else {}
    while taken := [n for n in range(count) if vm_name(state.site, state.next_serial + n) in nodes]:
        state.skip_serials(state.next_serial + taken[-1] + 1)


def plan_vms(context: Context, wanted: CloneRequest, hosts: list[str]) -> list[Vm] | None:
    """New rows for VMs, one on each of `hosts`; None when addresses have run out."""
    state, policy = context.state, context.policy
    instant = wanted.kind is CloneKind.INSTANT
    vms: list[Vm] = []
    _skip_names_of_nodes(context, len(hosts))
    fresh: dict[str, int] = {}
    used = ChainMap(fresh, state.addresses)
    for serial, name in enumerate(hosts, state.next_serial):
        host, size = context.hosts[name], wanted.templates[name]
        assigned = "assigns_addresses" in host.abilities
        address = "" if assigned else address_of(serial, used, policy)
        if address is None:
            return None
        fresh[address] = serial
        which = TemplateKey(name, wanted.image, size, wanted.account) if instant else None
        template = state.template_for(which) if which else None
        place = Place(name, state.source_of(name), which, template.id if template else None)
        vms.append(
            Vm(
                id=serial,
                since=state.now,
                name=vm_name(state.site, serial),
                places=(place,),
                image=wanted.image,
                kind=wanted.kind,
                size=wanted.sizes[name] if wanted.sizes else vm_size(wanted.node, size, host, policy),
                node_size=wanted.node,
                mac="" if assigned else mac_of(state.site, serial),
                address=address,
                attempt=wanted.attempt,
                account=wanted.account,
                pool=wanted.pool,
                token=token_of(state.entropy, serial),
            )
        )
    for name in hosts:
        state.new_serial()  # not before all have an address: a serial that is counted has a row
        pace = (name, wanted.image, wanted.kind)
        state.paced[pace] = paid(pace, state.paced, state.now, policy)
    return vms


def request_of(context: Context, attempt: Attempt, choice: Choice) -> CloneRequest:
    """What an attempt's VMs are to be."""
    request = attempt.request
    image = context.image_of(attempt)
    return CloneRequest(image, choice.kind, request.size, choice.sizes, request.account, attempt=attempt.id)


def describe(choice: Choice, vms: Iterable[Vm], **figures: Any) -> Reason:
    """What was chosen for an attempt, as its user is told."""
    return Why.CHOICE(choice.why, clones=choice.kind, hosts=[vm.host for vm in vms], **figures)


def placed_by(context: Context, attempt: Attempt, choice: Choice, made: Sequence[Vm]) -> dict[str, str]:
    """Figures of what the user is told: which policy chose the hosts of new VMs, and among how many. None where
    there is one host."""
    if not made or len(context.hosts) < 2:
        return {}
    able = on_hosts_making(context.image_of(attempt), choice.kind, choice.sizes)
    which = f"{len(able)} hosts"
    if choice.forks:
        which = f"{len(wish_of(context, attempt, able).ready())} of {which} with its template"
    name = placement_of(context, attempt)
    followed = name not in context.state.placement_faults
    return {"policy": name, "among": which} if followed else {"policy": FALLBACK, "among": which, "failed": name}


def claims_of(context: Context, vms: Iterable[Vm]) -> list[Claim]:
    """What these VMs claim, each where it is placed."""
    hosts = context.with_avoided().hosts  # of a joined spare, which is taken wherever it is
    return [Claim(vm.key, vm.host, vm_claim(vm.size, hosts[vm.host], vm.image, vm.kind)) for vm in vms]


def supply_missing(context: Context, missing: VmsMissing) -> None:
    """Plan the VMs that an attempt lacks, or give its job back to the gate if there is no room for them."""
    state = context.state
    attempt = state.attempts.get(missing.attempt)
    if attempt is None or not context.world.sees_hosts:
        return
    imageless = bool(context.hosts) and not choose_clones(context, attempt).sizes
    context = for_attempt(context, attempt)
    room = room_of(context)
    choice = choose_clones(context, attempt)
    able = on_hosts_making(context.image_of(attempt), choice.kind, choice.sizes)
    if choice.forks:
        able = wish_of(context, attempt, able).ready()
    claims = vm_claims(node_request(context, attempt, choice.kind), able, context.hosts, context.policy)
    wanted = placement_request(context, attempt, choice.kind, missing.count)
    chosen = place_vms(context, room, wanted, claims, attempt, Open(limit=others_on(state, attempt)))
    vms = plan_vms(context, request_of(context, attempt, choice), chosen) if chosen else None
    if vms is None:
        why = Why.AND(missing.reason, Why.IMAGELESS() if imageless else Why.NO_ROOM_LEFT())
        state.move(return_attempt(attempt, Event.GAVE_UP, why, failed=missing.counts and not imageless))
        return
    story = describe(choice, vms, **placed_by(context, attempt, choice, vms))
    again = replace_vms(attempt, missing, story)
    state.move(again, *(plan_vm(vm) for vm in vms), make=claims_of(context, vms))
