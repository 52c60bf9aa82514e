"""How an attempt's VMs are made: the kind of clone, the template, the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from multiverse.core.model.host import Claim, Host
from multiverse.core.model.job import Attempt, AttemptState
from multiverse.core.model.sizes import CloneKind, Depth, Size
from multiverse.core.model.template import Template, TemplateKey, TemplateState
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Policy, image_of
from multiverse.core.provisioning.capacity import Room, could_ever_fit
from multiverse.core.provisioning.forecast import ARRIVALS_FADE
from multiverse.core.provisioning.pacing import paid, wait_for
from multiverse.core.provisioning.placement import address_of, mac_of
from multiverse.core.provisioning.sizes import parent_size, serves_as, template_claim, vm_size
from multiverse.core.provisioning.spares import fit_to_serve, spares
from multiverse.core.state import PlanState
from multiverse.core.transition import Change, Event


@dataclass(frozen=True, slots=True)
class Choice:
    """A kind, and why it was chosen (empty: it was asked for). `prepare`: its template is worth making for the jobs
    that come after, though this one does not wait for it."""

    kind: CloneKind
    why: str = ""
    prepare: bool = False


def choose(state: PlanState, attempt: Attempt, templates: Mapping[TemplateKey, Template | None],
           hosts: Mapping[str, Host], world: World, policy: Policy) -> Choice:  # fmt: skip
    """The kind for an attempt that is to be admitted now. `templates` are those that it could be forked from, on the
    hosts that fork its image, None where there is none."""
    asked = attempt.request.kind or policy.kind
    if asked is not CloneKind.AUTO:
        return Choice(asked)
    image = image_of(attempt, policy)
    boots = any(CloneKind.LINKED.value in host.abilities for host in hosts.values())
    if not boots:
        return Choice(CloneKind.INSTANT, "no host boots clones")
    if not templates:
        return Choice(CloneKind.LINKED, "no host can fork its image")
    parents = {which.host: which.size for which in templates}
    if not could_ever_fit(attempt.request.size, attempt.request.nodes, parents, hosts, policy):
        return Choice(CloneKind.LINKED, "no host could hold the template beside it")
    if policy.pools and any(
        vm.state is VmState.PARKED and vm.template in templates and fit_to_serve(vm, state, world, policy)
        for vm in spares(state, Depth.PARKED)
    ):
        return Choice(CloneKind.INSTANT, "one is parked")
    forecast = world.forecast
    fork, boot = policy.takes(image, CloneKind.INSTANT, forecast), policy.takes(image, CloneKind.LINKED, forecast)
    rows = [row for row in templates.values() if row is not None]
    ready = [row.host for row in rows if row.state is TemplateState.READY]
    if ready:
        return _of_ready(image, ready, fork, boot, state, policy)
    return _without(attempt, image, rows, fork, boot, state, world, policy)


def _of_ready(image: str, ready: list[str], fork: float, boot: float, state: PlanState, policy: Policy) -> Choice:
    kind = CloneKind.INSTANT
    wait = min(
        wait_for((name, image, kind), state.paced, state.now, policy)
        + state.waiting[name, image, kind] * policy.interval(kind)
        for name in ready
    )
    if wait + fork > boot:
        return Choice(CloneKind.LINKED, f"clones queued on its template take {wait:.1f} s more, a boot {boot:.1f} s")
    return Choice(CloneKind.INSTANT, f"its template is ready: {fork + wait:.1f} s, a boot {boot:.1f} s")


def _others(state: PlanState, attempt: Attempt, image: str, world: World, policy: Policy) -> float:
    """How many VMs of the image others were given of late, or want now: those that wait, and are not held, and those
    that this very pass has admitted, of which the forecast does not know yet."""
    jobs = world.scheduler.value.jobs if world.scheduler else {}

    def wanted(one: Attempt) -> int:
        if one.state is AttemptState.QUEUED:
            wants = (job := jobs.get(one.job.job_id)) is not None and job.eligible
        else:
            wants = one.state is AttemptState.CLAIMED and one.since >= state.now
        return one.request.nodes if wants else 0

    if state.wanted is None:  # once for all who ask in this pass: who is admitted meanwhile counts as before
        state.wanted = Counter()
        for one in state.attempts.values():
            state.wanted[image_of(one, policy)] += wanted(one)
    now = state.wanted[image] - wanted(attempt)
    return world.forecast.arrivals.get(image, 0.0) * ARRIVALS_FADE + now


def _without(attempt: Attempt, image: str, rows: list[Template], fork: float, boot: float, state: PlanState,
             world: World, policy: Policy) -> Choice:  # fmt: skip
    """No template is ready."""
    building = [row for row in rows if row.state is TemplateState.BUILDING]
    if not building:
        worth = _others(state, attempt, image, world, policy) >= 1
        broken = next((row for row in rows if row.state is TemplateState.BROKEN), None)
        if broken:
            return Choice(CloneKind.LINKED, f"its template is broken on {broken.host}", prepare=worth)
        if not worth:
            return Choice(CloneKind.LINKED, "no other job wants this image of late: not worth a template")
    # What is overdue is expected to take as long again as it is.
    waits = [abs(row.since + policy.template_seconds - state.now) for row in building]
    wait = min(waits, default=policy.template_seconds)
    if wait + fork < boot:
        return Choice(CloneKind.INSTANT, f"its template is ready in {wait:.0f} s, sooner than a boot of {boot:.1f} s")
    return Choice(CloneKind.LINKED, f"a boot takes {boot:.1f} s, its template {wait:.0f} s more", prepare=not building)


def choose_clones(
    state: PlanState, attempt: Attempt, hosts: Mapping[str, Host], world: World, policy: Policy
) -> tuple[Choice, dict[str, Size]]:
    """The kind of the attempt's clones, and the size of template that they are forked from, or as if, on each host
    that has their image."""
    parents = parents_of(state, attempt, hosts, policy)
    forking = able_hosts(attempt, CloneKind.INSTANT, hosts, policy)
    rows = templates_of(state, attempt, forking, parents, policy)
    choice = choose(state, attempt, rows, hosts, world, policy)
    return choice, parents if forks(choice) else dict.fromkeys(parents, policy.base)


def forks(choice: Choice) -> bool:
    return choice.kind is CloneKind.INSTANT


def may_fork(attempt: Attempt, policy: Policy) -> bool:
    return (attempt.request.kind or policy.kind) in (CloneKind.INSTANT, CloneKind.AUTO)


def story_of(choice: Choice, vms: Iterable[Vm], before: str = "") -> str:
    """What was chosen for an attempt, as its user is told."""
    hosts = ", ".join(vm.host for vm in vms)
    return f"{choice.kind} on {hosts}{before}{', ' if choice.why else ''}{choice.why}"


def parents_of(state: PlanState, attempt: Attempt, hosts: Mapping[str, Host], policy: Policy) -> dict[str, Size]:
    """The size of the template that the attempt's VMs are forked from, on each host that has their image: of what
    that cannot plug, a ready one with more of it is as good as one that would have to be built, unless a gang could
    never have room with it."""
    told, image = attempt.request.size, image_of(attempt, policy)
    having = {name: host for name, host in sorted(hosts.items()) if image in host.images}
    own = {name: parent_size(told, host, image, policy) for name, host in having.items()}
    nearest = dict(own)
    for name, host in having.items():
        if host.image_can(image, "plug_cpus") and host.image_can(image, "plug_memory"):
            continue
        ready = [
            template.size
            for template in state.templates.values()
            if template.state is TemplateState.READY
            and template.which == template_key(attempt, name, template.size, policy)
            and serves_as(template.size, own[name], host, image, policy)
        ]
        nearest[name] = min(ready, key=lambda size: (size.memory, size.cpus), default=own[name])
    if nearest == own or could_ever_fit(told, attempt.request.nodes, nearest, hosts, policy):
        return nearest
    return own


def template_key(attempt: Attempt, host: str, size: Size, policy: Policy) -> TemplateKey:
    return TemplateKey(host, image_of(attempt, policy), size, attempt.request.account)


def plan_vms(
    state: PlanState, attempt: Attempt, kind: CloneKind, hosts: list[str], parents: Mapping[str, Size], policy: Policy
) -> list[Vm] | None:
    """New rows for VMs of the attempt, one on each of `hosts`; None when addresses have run out."""
    told, image, account = attempt.request.size, image_of(attempt, policy), attempt.request.account
    sizes = {host: vm_size(told, parents[host], policy) for host in hosts}
    vms = make_vms(state, hosts, image, kind, sizes, told, parents, account, policy)
    return [replace(vm, attempt=attempt.id) for vm in vms] if vms is not None else None


def make_vms(
    state: PlanState,
    hosts: list[str],
    image: str,
    kind: CloneKind,
    sizes: Mapping[str, Size],
    told: Size,
    parents: Mapping[str, Size],
    account: str,
    policy: Policy,
) -> list[Vm] | None:
    """New rows for VMs that serve nobody yet, one on each of `hosts`; None when addresses have run out."""
    vms: list[Vm] = []
    used = state.addresses()
    instant = kind is CloneKind.INSTANT
    for host in hosts:
        template = state.template_for(TemplateKey(host, image, parents[host], account)) if instant else None
        serial = state.serial()
        address = address_of(serial, used, policy)
        if address is None:
            return None
        used.add(address)
        vms.append(
            Vm(
                id=serial,
                version=0,
                state=VmState.PLANNED,
                since=state.now,
                name=f"mv{state.site}-{serial}",
                host=host,
                image=image,
                kind=kind,
                size=sizes[host],
                told=told,
                mac=mac_of(state.site, serial),
                address=address,
                parent=parents[host] if instant else None,
                account=account,
                origin=template.id if template else None,
            )
        )
    for host in hosts:
        state.paced[host, image, kind] = paid((host, image, kind), state.paced, state.now, policy)
    return vms


def need_template(state: PlanState, which: TemplateKey, hosts: Mapping[str, Host], reason: str) -> None:
    """Plan the building of a template, whether it was never there or is broken."""
    host, image, size, account = which
    row = state.template_for(which) or Template(
        state.template_id(), 0, TemplateState.ABSENT, state.now, host, image, size, account=account
    )
    state.move(
        Change(replace(row, state=TemplateState.BUILDING, reason=""), Event.NEEDED, reason),
        make=[] if row.key in state.claims else [Claim(row.key, host, template_claim(size, hosts.get(host)))],
    )


def able_hosts(attempt: Attempt, kind: CloneKind, hosts: Mapping[str, Host], policy: Policy) -> list[str]:
    """Hosts that can make clones of that kind of the attempt's image at all, with a template or without."""
    return makers_of(image_of(attempt, policy), kind, hosts)


def makers_of(image: str, kind: CloneKind, hosts: Mapping[str, Host]) -> list[str]:
    """Hosts that can make clones of that kind and image at all."""
    return [
        name
        for name, host in sorted(hosts.items())
        if image in host.images
        and kind.value in host.abilities
        and (kind is not CloneKind.INSTANT or host.image_can(image, "fork"))
    ]


def templates_of(
    state: PlanState, attempt: Attempt, hosts: Iterable[str], parents: Mapping[str, Size], policy: Policy
) -> dict[TemplateKey, Template | None]:
    keys = [template_key(attempt, name, parents[name], policy) for name in hosts]
    return {which: state.template_for(which) for which in keys}


def template_on_its_way(
    state: PlanState,
    rows: Mapping[TemplateKey, Template | None],
    hosts: Mapping[str, Host],
    policy: Policy,
    room: Room,
    wanted: str,
) -> str:
    """Ask for one of these templates, because it is `wanted`, unless one of them is being built already; says so,
    or nothing if none of them can be had now."""
    for which, row in rows.items():
        if row and row.state in (TemplateState.BUILDING, TemplateState.RETIRING):
            return f"the template of image {which.image} is being built on {which.host}"
    for which, row in rows.items():
        claim = template_claim(which.size, hosts[which.host])
        retry = row is not None and state.now >= row.since + policy.backoff(row.tries)
        if (row is None or retry) and (row is not None or room.fits(which.host, claim)):
            if row is None:
                room.take(which.host, claim)
            need_template(state, which, hosts, wanted)
            return f"the template of image {which.image} is being built on {which.host}"
    return ""
