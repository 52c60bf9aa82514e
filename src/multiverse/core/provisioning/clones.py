"""How an attempt's VMs are made: which kind of clone, of which template, and their rows.

The Multiverse paper leaves a "mixed system" of full and instant clones to the future; this is one. A clone of a
template that is ready wins nearly always. It does not where the image cannot be forked, where its template is broken or
waits behind others for its pace, and where a template would have to be made for a single job.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    Depth,
    Host,
    Size,
    Template,
    TemplateKey,
    TemplateState,
    Vm,
    VmState,
)
from multiverse.core.model.names import mac_of, token_of, vm_name
from multiverse.core.provisioning.capacity import Room, could_ever_fit, room_of
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.pacing import ARRIVALS_FADE, paid, wait_for
from multiverse.core.provisioning.placement import address_of
from multiverse.core.provisioning.sizes import (
    NodeRequest,
    serves_as,
    template_claim,
    template_size,
    vm_claim,
    vm_claims,
    vm_size,
)
from multiverse.core.provisioning.spares import fit_to_serve, spares
from multiverse.core.rows import VmsMissing
from multiverse.core.transition import Change, Event

# --- the kind of clone -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind of clone, and why it was chosen (empty: it was asked for). `prepare`: its template is worth making for the
    jobs that come after, though this job does not wait for it. `templates` is the size of the template that the VMs are
    forked from, or as if they were, on each host that has their image."""

    kind: CloneKind
    why: str = ""
    prepare: bool = False
    templates: Mapping[str, Size] | None = None

    @property
    def forks(self) -> bool:
        return self.kind is CloneKind.INSTANT

    @property
    def sizes(self) -> Mapping[str, Size]:
        return self.templates or {}


def choose_clones(context: Context, attempt: Attempt) -> Choice:
    """The kind of the attempt's clones, and the size of the template that they are forked from."""
    sizes = template_sizes(context, attempt)
    forking = hosts_making(context.image_of(attempt), CloneKind.INSTANT, context.hosts)
    choice = choose_kind(context, attempt, templates_of(context, attempt, forking, sizes))
    if choice.kind is CloneKind.LINKED and attempt.request.kind is not CloneKind.LINKED and forking:
        choice = _unless_too_large(context, attempt, {name: sizes[name] for name in forking}, choice)
    return replace(choice, templates=sizes if choice.forks else dict.fromkeys(sizes, context.policy.base))


def _unless_too_large(context: Context, attempt: Attempt, sizes: Mapping[str, Size], choice: Choice) -> Choice:
    """A clone that boots may be larger than one that is forked: fork where no host could ever hold the former."""
    if (attempt.request.kind or context.policy.kind) is not CloneKind.AUTO or may_boot(context, attempt):
        return choice
    if could_hold(context, attempt, CloneKind.INSTANT, sizes):
        return Choice(CloneKind.INSTANT, "no host could hold it booted")
    return choice


def may_boot(context: Context, attempt: Attempt) -> bool:
    """Whether the hosts that boot clones of the image could ever hold the attempt's VMs as such clones."""
    able = hosts_making(context.image_of(attempt), CloneKind.LINKED, context.hosts)
    return could_hold(context, attempt, CloneKind.LINKED, dict.fromkeys(able, context.policy.base))


def could_hold(context: Context, attempt: Attempt, kind: CloneKind, templates: Mapping[str, Size]) -> bool:
    """Whether the hosts of `templates`, were they empty, could hold the attempt's VMs as clones of that kind."""
    wanted, nodes = node_request(context, attempt, kind), attempt.request.nodes
    return could_ever_fit(wanted, nodes, templates, context.hosts, context.policy)


def node_request(context: Context, attempt: Attempt, kind: CloneKind) -> NodeRequest:
    """What each of the attempt's VMs is to be."""
    return NodeRequest(attempt.request.size, context.image_of(attempt), kind)


Way = tuple[CloneKind, Mapping[str, Size]]
"""A kind of clone, and the size of the template, or of the base, on each host."""


def ways_to_make(context: Context, attempt: Attempt) -> Sequence[Way]:
    """The kinds of clones that the attempt's VMs could be, the likeliest first, each with the size of the template on
    each host that has the image: forked from it, or, of clones that boot, as if they were."""
    sizes = template_sizes(context, attempt)
    bases = dict.fromkeys(sizes, context.policy.base)
    match attempt.request.kind or context.policy.kind:
        case CloneKind.INSTANT:
            return [(CloneKind.INSTANT, sizes)]
        case CloneKind.AUTO:
            forks = any(CloneKind.INSTANT.value in host.abilities for host in context.hosts.values())
            boots = any(CloneKind.LINKED.value in host.abilities for host in context.hosts.values())
            ways = [(CloneKind.INSTANT, sizes)] if forks else []
            return ways + ([(CloneKind.LINKED if boots else CloneKind.FULL, bases)] if boots or not forks else [])
        case kind:
            return [(kind, bases)]


def ways_now(context: Context, attempt: Attempt, ways: Sequence[Way]) -> Sequence[Way]:
    """The same ways, each on the hosts that make such clones of the image now, without kinds that no host makes."""
    image, hosts = context.image_of(attempt), context.hosts
    on = [(kind, {name: sizes[name] for name in hosts_making(image, kind, hosts)}) for kind, sizes in ways]
    return [(kind, sizes) for kind, sizes in on if sizes]


def unable_to_make(image: str, ways: Sequence[Way], hosts: Mapping[str, Host]) -> str:
    """Part of a reason: the hosts that have the image and cannot make such clones of it."""
    unable = [(kind, sorted(sizes.keys() - set(hosts_making(image, kind, hosts)))) for kind, sizes in ways]
    return "".join(f"; unable to make {kind} clones: {', '.join(names)}" for kind, names in unable if names)


def choose_kind(context: Context, attempt: Attempt, templates: Mapping[TemplateKey, Template | None]) -> Choice:
    """The kind for an attempt that is to be admitted now: as asked for, or else the one that will be a node first.
    `templates` are those that it could be forked from, on the hosts that fork its image, None where there is none."""
    policy, hosts = context.policy, context.hosts
    asked = attempt.request.kind or policy.kind
    boots = any(CloneKind.LINKED.value in host.abilities for host in hosts.values())
    if asked is not CloneKind.AUTO:
        return Choice(asked)
    if not boots:
        forks = any(CloneKind.INSTANT.value in host.abilities for host in hosts.values())
        return Choice(CloneKind.INSTANT, "no host boots clones") if forks else Choice(CloneKind.FULL, "no host forks")
    if not templates:
        return Choice(CloneKind.LINKED, "no host can fork its image")
    sizes = {which.host: which.size for which in templates}
    if not could_hold(context, attempt, CloneKind.INSTANT, sizes):
        return Choice(CloneKind.LINKED, "no host could hold the template beside it")
    if policy.pools and any(
        vm.state is VmState.PARKED and vm.template in templates and fit_to_serve(context, vm)
        for vm in spares(context.state, Depth.PARKED)
    ):
        return Choice(CloneKind.INSTANT, "one is parked")
    return _quicker(context, attempt, [row for row in templates.values() if row is not None])


def _quicker(context: Context, attempt: Attempt, rows: list[Template]) -> Choice:
    """Whether a fork or a boot is a node first."""
    policy, forecast, image = context.policy, context.world.forecast, context.image_of(attempt)
    fork, boot = policy.takes(image, CloneKind.INSTANT, forecast), policy.takes(image, CloneKind.LINKED, forecast)
    ready = [row.host for row in rows if row.state is TemplateState.READY]
    if ready:
        return _of_ready(context, image, ready, fork, boot)
    building = [row for row in rows if row.state is TemplateState.BUILDING]
    if not building:
        worth = _wanted_by_others(context, attempt, image) >= 1
        broken = next((row for row in rows if row.state is TemplateState.BROKEN), None)
        if broken:
            return Choice(CloneKind.LINKED, f"its template is broken on {broken.host}", prepare=worth)
        if not worth:
            return Choice(CloneKind.LINKED, "no other job wants this image of late: not worth a template")
    # A template that is overdue is expected to take as long again as it is overdue.
    waits = [abs(row.since + policy.template_seconds - context.state.now) for row in building]
    wait = min(waits, default=policy.template_seconds)
    if wait + fork < boot:
        return Choice(CloneKind.INSTANT, f"its template is ready in {wait:.0f} s, sooner than a boot of {boot:.1f} s")
    return Choice(CloneKind.LINKED, f"a boot takes {boot:.1f} s, its template {wait:.0f} s more", prepare=not building)


def _of_ready(context: Context, image: str, ready: list[str], fork: float, boot: float) -> Choice:
    kind, state, policy = CloneKind.INSTANT, context.state, context.policy
    wait = min(
        wait_for((name, image, kind), state.paced, state.now, policy)
        + state.waiting[name, image, kind] * policy.interval(kind)
        for name in ready
    )
    if wait + fork > boot:
        return Choice(CloneKind.LINKED, f"clones queued on its template take {wait:.1f} s more, a boot {boot:.1f} s")
    return Choice(CloneKind.INSTANT, f"its template is ready: {fork + wait:.1f} s, a boot {boot:.1f} s")


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


def hosts_making(image: str, kind: CloneKind, hosts: Mapping[str, Host]) -> list[str]:
    """Hosts that can make clones of that kind and image at all, with a template or without."""
    return [
        name
        for name, host in sorted(hosts.items())
        if image in host.images
        and kind.value in host.abilities
        and (kind is not CloneKind.INSTANT or host.image_can(image, "fork"))
    ]


# --- templates -------------------------------------------------------------------------------------


def template_sizes(context: Context, attempt: Attempt) -> dict[str, Size]:
    """The size of the template that the attempt's VMs are forked from, on each host that has their image. Of what the
    image cannot plug, a ready template with more of it is as good as one that would have to be built, unless a gang
    could never have room with it."""
    node, image, policy = attempt.request.size, context.image_of(attempt), context.policy
    having = {name: host for name, host in sorted(context.hosts.items()) if image in host.images}
    own = {name: template_size(node, host, image, policy) for name, host in having.items()}
    nearest = dict(own)
    for name, host in having.items():
        if host.image_can(image, "plug_cpus") and host.image_can(image, "plug_memory"):
            continue
        ready = [
            template.size
            for template in context.state.templates.values()
            if template.state is TemplateState.READY
            and template.which == template_key(context, attempt, name, template.size)
            and serves_as(template.size, own[name], host, image, policy)
        ]
        nearest[name] = min(ready, key=lambda size: (size.memory, size.cpus), default=own[name])
    if nearest == own or could_hold(context, attempt, CloneKind.INSTANT, nearest):
        return nearest
    return own


def template_key(context: Context, attempt: Attempt, host: str, size: Size) -> TemplateKey:
    return TemplateKey(host, context.image_of(attempt), size, attempt.request.account)


def templates_of(
    context: Context, attempt: Attempt, hosts: Iterable[str], sizes: Mapping[str, Size]
) -> dict[TemplateKey, Template | None]:
    """The templates that the attempt's VMs could be forked from on these hosts, None where there is none."""
    keys = [template_key(context, attempt, name, sizes[name]) for name in hosts]
    return {which: context.state.template_for(which) for which in keys}


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


def ask_for_template(context: Context, rows: Mapping[TemplateKey, Template | None], room: Room, wanted: str) -> str:
    """Ask for one of these templates, because it is `wanted`, unless one of them is being built already. Says so, or
    nothing if none of them can be had now."""
    state = context.state
    for which, row in rows.items():
        if row and row.state in (TemplateState.BUILDING, TemplateState.RETIRING):
            return f"the template of image {which.image} is being built on {which.host}"
    for which, row in rows.items():
        claim = template_claim(which.size, context.hosts[which.host], which.image)
        retry = row is not None and state.now >= row.since + context.policy.backoff(row.tries)
        if (row is None or retry) and (row is not None or room.fits(which.host, claim)):
            if row is None:
                room.take(which.host, claim)
            need_template(context, which, wanted)
            return f"the template of image {which.image} is being built on {which.host}"
    return ""


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
        template = state.template_for(TemplateKey(name, wanted.image, size, wanted.account)) if instant else None
        vms.append(
            Vm(
                id=serial,
                version=0,
                state=VmState.PLANNED,
                since=state.now,
                name=vm_name(state.site, serial),
                host=name,
                image=wanted.image,
                kind=wanted.kind,
                size=wanted.sizes[name] if wanted.sizes else vm_size(wanted.node, size, host, policy),
                node_size=wanted.node,
                mac="" if assigned else mac_of(state.site, serial),
                address=address,
                attempt=wanted.attempt,
                template_size=size if instant else None,
                account=wanted.account,
                template_id=template.id if template else None,
                pool=wanted.pool,
                source=state.source_of(name),
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


def describe(choice: Choice, vms: Iterable[Vm], before: str = "") -> str:
    """What was chosen for an attempt, as its user is told."""
    hosts = ", ".join(vm.host for vm in vms)
    return f"{choice.kind} on {hosts}{before}{', ' if choice.why else ''}{choice.why}"


def claims_of(context: Context, vms: Iterable[Vm]) -> list[Claim]:
    """What these VMs claim, each where it is placed."""
    hosts = context.hosts
    return [Claim(vm.key, vm.host, vm_claim(vm.size, hosts[vm.host], vm.image, vm.kind)) for vm in vms]


def supply_missing(context: Context, missing: VmsMissing) -> None:
    """Plan the VMs that an attempt lacks, or give its job back to the gate if there is no room for them."""
    state = context.state
    attempt = state.attempts.get(missing.attempt)
    if attempt is None or not context.world.views:
        return
    choice = choose_clones(context, attempt)
    image = context.image_of(attempt)
    able = {
        name: choice.sizes[name]
        for name in hosts_making(image, choice.kind, context.hosts)
        if not choice.forks or _is_ready(context, template_key(context, attempt, name, choice.sizes[name]))
    }
    room = room_of(context)
    wanted = node_request(context, attempt, choice.kind)
    chosen = room.place(missing.count, vm_claims(wanted, able, context.hosts, context.policy))
    vms = plan_vms(context, request_of(context, attempt, choice), chosen) if chosen else None
    if vms is None:
        imageless = bool(context.hosts) and not choice.sizes
        why = f"{missing.reason}; {'no host has its image' if imageless else 'no room for another VM'}"
        state.move(Change(attempt.returning(why, failed=not imageless), Event.GAVE_UP, why))
        return
    story = describe(choice, vms)
    again = replace(attempt, replaced=attempt.replaced + missing.count, choice=f"{attempt.choice}; then {story}")
    state.move(
        Change(again, Event.REPLACED, f"{missing.reason}; now {story}"),
        *(Change(vm, Event.PLANNED) for vm in vms),
        make=claims_of(context, vms),
    )


def _is_ready(context: Context, which: TemplateKey) -> bool:
    template = context.state.template_for(which)
    return template is not None and template.state is TemplateState.READY
