"""Admission: may a queued attempt start now? Admit, wait or revoke, always with a reason.

Attempts are taken in the scheduler's order. The first one that waits for capacity blocks those behind
it, so that nothing overtakes it for ever; one that waits for something of its own (its template, its
back-off) or for a limit of the scheduler's blocks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from enum import StrEnum
from functools import cache

from multiverse.core.kinds import Choice, choose
from multiverse.core.lifecycle import Event
from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    Host,
    HypervisorView,
    Job,
    Key,
    Offer,
    Request,
    SchedulerView,
    Size,
    Template,
    TemplateKey,
    TemplateState,
    Vm,
    VmState,
    World,
)
from multiverse.core.pacing import Policy, image_of, paid, wait_for
from multiverse.core.placement import (
    Room,
    address_of,
    could_ever_fit,
    largest,
    left_behind,
    mac_of,
    parent_size,
    serves_as,
    template_claim,
    vm_claim,
    vm_claims,
    vm_size,
    yet_to_come,
)
from multiverse.core.pool import (
    give_back,
    is_parked_spare,
    is_spare,
    joined_for,
    make_way,
    parked_for,
    withdraw,
)
from multiverse.core.rows import Change, Draft, at_worst_one

PROVISIONING = (VmState.PLANNED, VmState.PARKED, VmState.STARTING)


class Crowd(StrEnum):
    """What jobs wait for that might start otherwise: nothing for those that have not come yet may be in their way."""

    NONE = ""
    TURN = "turn"  # as many VMs as may be made at once are being made, or the room that it needs is being left
    ROOM = "room"  # or an address


def admit(draft: Draft, world: World, policy: Policy) -> Crowd:
    """Plan the admission of whatever may start now. Needs both sources; with one unknown, all wait. Says what jobs
    wait for."""
    if world.scheduler is None or world.hypervisor is None:
        return Crowd.TURN
    draft.waiting.clear()  # each round of a pass decides anew
    draft.wanted = None
    jobs, view = world.scheduler.value.jobs, world.hypervisor.value
    hosts, room = view.hosts, room_of(draft, view, policy)
    queue = sorted(
        (a for a in draft.attempts.values() if a.state is AttemptState.QUEUED and not a.quarantined),
        key=lambda a: (_rank(jobs.get(a.job.job_id)), a.id),
    )
    left = _limits_left(draft, world.scheduler.value)
    promised: set[int] = set()  # spares that jobs wait for until they are withdrawn from others
    blocked, crowd = "", Crowd.NONE

    def room_without(gone: Collection[Key]) -> Room:
        return room_of(draft, view, policy, without=gone)

    @cache
    def empty() -> Room:
        return room_without(draft.claims)

    said: dict[tuple[Request, CloneKind, bool], str] = {}

    def beyond(attempt: Attempt, choice: Choice, parents: Mapping[str, Size]) -> str:
        """See `_beyond`; where no more is claimed than declared, nobody looks what others have."""
        if policy.overcommit <= 1:
            return ""
        alike = (attempt.request, choice.kind, _TOO_LITTLE in attempt.note)
        if alike not in said:
            said[alike] = _beyond(attempt, choice, parents, hosts, empty(), policy)
        return said[alike]

    def clear_the_way(attempt: Attempt, count: int, claims: Mapping[str, Size]) -> Crowd:
        """What the first in the queue waits for: if spares that give way are enough, only until they are gone."""
        if make_way(draft, image_of(attempt, policy), count, claims, room_without):
            return Crowd.TURN
        _make_way(draft, attempt, queue, hosts, policy)
        return Crowd.ROOM

    for attempt in queue:
        with at_worst_one(draft, attempt.key):
            job = jobs.get(attempt.job.job_id)
            if job is None or job.ref != attempt.job:
                continue
            told, nodes = attempt.request.size, attempt.request.nodes
            choice, parents = settle(draft, attempt, hosts, world, policy)
            if job.problem:
                _revoke(draft, attempt, job.problem)
                continue
            if not could_ever_fit(told, nodes, parents, hosts, policy):
                why, hope = _unfit(draft, attempt, hosts, parents, policy)
                if not hope:
                    _revoke(draft, attempt, why)
                elif job.eligible:
                    _tell(draft, attempt, why, policy)
                continue
            if not job.eligible or not attempt.gated or attempt.stray or draft.now < attempt.not_before:
                continue
            if earlier := _earlier_run(draft, attempt):
                _tell(draft, attempt, earlier, policy)
                continue
            if over := next((limit for limit, count in job.uses if count > left[limit]), ""):
                _tell(draft, attempt, f"held back by {over}", policy)
                continue
            if blocked:
                _tell(draft, attempt, blocked, policy)
                continue
            spare = _joined_for(draft, attempt, promised, world, policy)
            if spare is not None:
                left.subtract(dict(job.uses))
                _take_joined(draft, attempt, spare, promised, policy)
                continue
            starting = sum(vm.state in PROVISIONING and not is_parked_spare(vm) for vm in draft.vms.values())
            if starting and starting + nodes > policy.provisioning:
                crowd = Crowd.TURN
                blocked = "waiting for a turn: as many VMs as may be made at once are being made"
                _tell(draft, attempt, blocked, policy)
                continue
            among, why = _usable_hosts(draft, attempt, choice, hosts, parents, policy, room)
            if not among:
                if not why and not (why := beyond(attempt, choice, parents)):
                    # Its template too needs room, and nobody may take that before it.
                    image = image_of(attempt, policy)
                    blocked = why = f"waiting for capacity: no host has room for the template of image {image}"
                    able = able_hosts(attempt, choice.kind, hosts, policy)
                    template_claims = {name: template_claim(parents[name], hosts[name]) for name in able}
                    crowd = clear_the_way(attempt, 1, template_claims)
                _tell(draft, attempt, why, policy)
                continue
            claims = vm_claims(told, {name: parents[name] for name in among}, policy)
            parked = (
                parked_for(draft, attempt, image_of(attempt, policy), parents, room, world, policy)
                if _forks(choice)
                else []
            )
            unpaced, why = _unpaced(draft, attempt, choice, among, nodes - len(parked), policy)
            chosen = room.place(nodes - len(parked), {name: claims[name] for name in unpaced})
            if chosen is None:
                give_back(parked, room)
                if not why and not (why := beyond(attempt, choice, parents)):
                    blocked = why = _spread(draft, attempt, choice, hosts, parents, policy, room) or _full(
                        room, claims, policy
                    )
                    crowd = clear_the_way(attempt, nodes, claims)
                _tell(draft, attempt, why, policy)
                continue
            vms = plan_vms(draft, attempt, choice.kind, chosen, parents, policy)
            if vms is None:
                crowd = Crowd.ROOM
                blocked = "waiting for a free address"
                _tell(draft, attempt, blocked, policy)
                continue
            _admit(draft, attempt, choice, [vm for vm, _ in parked], vms, policy)
            left.subtract(dict(job.uses))
    return crowd


def settle(
    draft: Draft, attempt: Attempt, hosts: Mapping[str, Host], world: World, policy: Policy
) -> tuple[Choice, dict[str, Size]]:
    """The kind of the attempt's clones, and the size of template that they are forked from, or as if, on each host
    that has their image."""
    parents = parents_of(draft, attempt, hosts, policy)
    forking = able_hosts(attempt, CloneKind.INSTANT, hosts, policy)
    rows = _templates_of(draft, attempt, forking, parents, policy)
    choice = choose(draft, attempt, rows, hosts, world, policy)
    return choice, parents if _forks(choice) else dict.fromkeys(parents, policy.base)


def _forks(choice: Choice) -> bool:
    return choice.kind is CloneKind.INSTANT


def _may_fork(attempt: Attempt, policy: Policy) -> bool:
    return (attempt.request.kind or policy.kind) in (CloneKind.INSTANT, CloneKind.AUTO)


def _joined_for(draft: Draft, attempt: Attempt, promised: Collection[int], world: World, policy: Policy) -> Vm | None:
    """A node that is there already, if one fits that is `promised` to no other and it may be an instant clone."""
    if not policy.pools or not _may_fork(attempt, policy):
        return None
    return joined_for(draft, attempt, image_of(attempt, policy), world, policy, promised)


def _take_joined(draft: Draft, attempt: Attempt, vm: Vm, promised: set[int], policy: Policy) -> None:
    """Admit it at once to a node that is there already; if that is on offer, withdraw it from those that come first."""
    if vm.offer in (Offer.OPEN, Offer.CLOSING):
        promised.add(vm.id)
        if vm.offer is Offer.OPEN:
            withdraw(draft, vm, f"job {attempt.job.job_id} is to have it")
        return
    taken = replace(vm, attempt=attempt.id)
    _admit(draft, replace(attempt, pin=vm.feature), Choice(CloneKind.INSTANT), [taken], [], policy)


def _admit(draft: Draft, attempt: Attempt, choice: Choice, taken: list[Vm], made: list[Vm], policy: Policy) -> None:
    """One move: the attempt is claimed with all its VMs, those out of the pool and those to be made."""
    story = story_of(choice, (*taken, *made), "".join(f", {vm.pool} before" for vm in taken[:1]))
    draft.move(
        Change(replace(attempt, state=AttemptState.CLAIMED, note="", choice=story), Event.ADMITTED, story),
        *(Change(vm, Event.TAKEN, f"by job {attempt.job.job_id}") for vm in taken),
        *(Change(vm, Event.PLANNED) for vm in made),
        free=[vm.key for vm in taken],
        make=(Claim(vm.key, vm.host, vm_claim(vm.size, policy)) for vm in (*taken, *made)),
    )


def story_of(choice: Choice, vms: Iterable[Vm], before: str = "") -> str:
    """What was chosen for an attempt, as its user is told."""
    hosts = ", ".join(vm.host for vm in vms)
    return f"{choice.kind} on {hosts}{before}{', ' if choice.why else ''}{choice.why}"


def _unpaced(
    draft: Draft, attempt: Attempt, choice: Choice, among: list[str], count: int, policy: Policy
) -> tuple[list[str], str]:
    """Of these hosts, those on which a clone may be made now; when there are none, why."""
    image = image_of(attempt, policy)
    waits = {host: wait_for((host, image, choice.kind), draft.paced, draft.now, policy) for host in among}
    ready = [host for host, wait in waits.items() if wait <= 0]
    if ready or not count:
        return ready, ""
    draft.waiting[min(waits, key=lambda host: (waits[host], host)), image, choice.kind] += count
    return [], f"waiting for a turn: {choice.kind} clones of {image} are made at {policy.rates[choice.kind]:g} a second"


def room_of(draft: Draft, view: HypervisorView, policy: Policy, *, without: Collection[Key] = ()) -> Room:
    """What is free on the hosts in sight, as far as declared, or over-committed; `without` some rows, as if what they
    claim and hold had been given back."""
    staying = [vm for vm in draft.vms.values() if vm.key not in without]
    room = Room(view.hosts, (claim for claim in draft.claims.values() if claim.owner not in without))
    mapped = left_behind(staying, draft.templates)
    for claim in mapped:
        room.take(claim.host, claim.size)
    if policy.overcommit > 1:
        coming: Counter[str] = Counter()
        for claim in draft.claims.values():
            held, settled = _held(draft, claim.owner, view, policy)
            gone = claim.owner in without
            coming[claim.host] += -int(held) if gone else yet_to_come(claim.size, held, policy, settled=settled)
        for claim in left_behind(draft.vms.values(), draft.templates):
            coming[claim.host] -= claim.size.memory if claim not in mapped else 0
        for name, host in sorted(view.hosts.items()):
            room.overcommit(host, coming[name], policy)
    return room


def _held(draft: Draft, owner: Key, view: HypervisorView, policy: Policy) -> tuple[float, bool]:
    """MiB that a row holds of its host's machine, and whether it has settled. One on its way out may yet take the rest
    of its claim too, for its end may be long in coming."""
    match row := draft.get(owner):
        case Vm() if (vm := view.vms.get(row.name)) is not None:
            settled = vm.private > 0 and row.state is VmState.SERVING and draft.now - row.since >= policy.settle
            return vm.private, settled
        case Template() if (template := view.templates.get(row.which)) is not None:
            return template.held, False
        case _:
            return 0.0, False


_TOO_LITTLE = "of which others there leave too little"


def _beyond(
    attempt: Attempt,
    choice: Choice,
    parents: Mapping[str, Size],
    hosts: Mapping[str, Host],
    empty: Room,
    policy: Policy,
) -> str:
    """Why the attempt would have no room now on `empty` hosts either, with nothing of ours on them: others on their
    machines have the memory, which nobody behind it is to wait for. What these hold is not known to the MiB: who was
    told this once is told so until there is some more than enough."""
    room, nodes = deepcopy(empty), attempt.request.nodes
    margin = policy.floor // 8 if _TOO_LITTLE in attempt.note else 0
    for name, parent in parents.items():
        frozen = template_claim(parent, hosts[name]).memory if _forks(choice) else 0
        room.take(name, Size(0, frozen + margin, 0))
    if room.place(nodes, vm_claims(attempt.request.size, parents, policy)) is not None:
        return ""
    lacking = ", ".join(sorted(empty.tight & parents.keys()))
    return f"waiting for memory: {lacking} must keep {policy.floor} MiB available, {_TOO_LITTLE}"


def _full(room: Room, claims: Mapping[str, Size], policy: Policy) -> str:
    if tight := room.lack_memory(claims):
        return f"waiting for memory: {', '.join(tight)} must keep {policy.floor} MiB available"
    return "waiting for capacity: the hosts are full"


def _limits_left(draft: Draft, view: SchedulerView) -> Counter[str]:
    """What each limit lets run beside what is admitted: the scheduler counts only what it has started."""
    left = Counter(view.limits)
    for _, attempt in sorted(draft.attempts.items()):
        job = view.jobs.get(attempt.job.job_id)
        if attempt.state is not AttemptState.QUEUED and job is not None and job.ref == attempt.job:
            left.subtract(dict(job.uses))
    return left


def _earlier_run(draft: Draft, attempt: Attempt) -> str:
    """Why an earlier run of the same job may still go on, if it may: the scheduler queues a job again as soon
    as its node is silent, and nothing may run twice."""
    for _, vm in sorted(draft.vms.items()):
        owner = draft.attempt_of(vm)
        if owner and owner.job.job_id == attempt.job.job_id and owner.job.restarts < attempt.job.restarts:
            if vm.state is VmState.LOST:
                return (
                    f"its earlier run may go on in {vm.name}: host {vm.host} is out of reach, neither back nor fenced"
                )
            return f"waiting until {vm.name} of its earlier run is gone"
    return ""


def _rank(job: Job | None) -> int:
    return job.rank if job else 1 << 62


def parents_of(draft: Draft, attempt: Attempt, hosts: Mapping[str, Host], policy: Policy) -> dict[str, Size]:
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
            for template in draft.templates.values()
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
    draft: Draft, attempt: Attempt, kind: CloneKind, hosts: list[str], parents: Mapping[str, Size], policy: Policy
) -> list[Vm] | None:
    """New rows for VMs of the attempt, one on each of `hosts`; None when addresses have run out."""
    told, image, account = attempt.request.size, image_of(attempt, policy), attempt.request.account
    sizes = {host: vm_size(told, parents[host], policy) for host in hosts}
    vms = make_vms(draft, hosts, image, kind, sizes, told, parents, account, policy)
    return [replace(vm, attempt=attempt.id) for vm in vms] if vms is not None else None


def make_vms(
    draft: Draft,
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
    used = draft.addresses()
    instant = kind is CloneKind.INSTANT
    for host in hosts:
        template = draft.template_for(TemplateKey(host, image, parents[host], account)) if instant else None
        serial = draft.serial()
        address = address_of(serial, used, policy)
        if address is None:
            return None
        used.add(address)
        vms.append(
            Vm(
                id=serial,
                version=0,
                state=VmState.PLANNED,
                since=draft.now,
                name=f"mv{draft.site}-{serial}",
                host=host,
                image=image,
                kind=kind,
                size=sizes[host],
                told=told,
                mac=mac_of(draft.site, serial),
                address=address,
                parent=parents[host] if instant else None,
                account=account,
                origin=template.id if template else None,
            )
        )
    for host in hosts:
        draft.paced[host, image, kind] = paid((host, image, kind), draft.paced, draft.now, policy)
    return vms


def need_template(draft: Draft, which: TemplateKey, hosts: Mapping[str, Host], reason: str) -> None:
    """Plan the building of a template, whether it was never there or is broken."""
    host, image, size, account = which
    row = draft.template_for(which) or Template(
        draft.template_id(), 0, TemplateState.ABSENT, draft.now, host, image, size, account=account
    )
    draft.move(
        Change(replace(row, state=TemplateState.BUILDING, reason=""), Event.NEEDED, reason),
        make=[] if row.key in draft.claims else [Claim(row.key, host, template_claim(size, hosts.get(host)))],
    )


def _unfit(
    draft: Draft, attempt: Attempt, hosts: Mapping[str, Host], parents: Mapping[str, Size], policy: Policy
) -> tuple[str, bool]:
    """Why none of the hosts that have its image could hold the job, were they empty, and whether others may yet:
    those that its image can still come to, and those out of reach, of which nobody knows what they could hold."""
    told, nodes, image = attempt.request.size, attempt.request.nodes, image_of(attempt, policy)
    without = sorted(hosts.keys() - parents.keys())
    hope = could_ever_fit(told, nodes, {**parents, **dict.fromkeys(without, policy.base)}, hosts, policy)
    if not hosts:
        why = "no host is in sight"
    elif hope and not parents:
        why = f"no host has image {image}"
    else:
        fit = largest({name: hosts[name] for name in parents or hosts}, image, policy)
        many = f"{nodes} VMs of " if nodes > 1 else "a VM of "
        why = f"{many}{told} fits on no host; the largest that fits is {fit} per node"
        why += f"; without image {image}: {', '.join(without)}" if hope else ""
    away = sorted(draft.hosts - set(hosts))
    return why + (f"; out of reach now: {', '.join(away)}" if away else ""), hope or bool(away) or not hosts


def _usable_hosts(
    draft: Draft,
    attempt: Attempt,
    choice: Choice,
    hosts: Mapping[str, Host],
    parents: Mapping[str, Size],
    policy: Policy,
    room: Room,
) -> tuple[list[str], str]:
    """Hosts that can make this attempt's VMs now; when there are none, why. Asks for a template where
    one is missing."""
    kind, image = choice.kind, image_of(attempt, policy)
    able = able_hosts(attempt, kind, hosts, policy)
    if not able:
        return [], f"no host can make {kind} clones of image {image}"
    if not _forks(choice):  # booted from the image: no template in it
        if choice.prepare:
            forking = able_hosts(attempt, CloneKind.INSTANT, hosts, policy)
            forked = parents_of(draft, attempt, hosts, policy)
            rows = _templates_of(draft, attempt, forking, forked, policy)
            template_on_its_way(draft, rows, hosts, policy, room, "others like this job will need it")
        return able, ""
    rows = _templates_of(draft, attempt, able, parents, policy)
    ready = [which.host for which, row in rows.items() if row and row.state is TemplateState.READY]
    if ready:
        return ready, ""
    why = template_on_its_way(draft, rows, hosts, policy, room, f"job {attempt.job.job_id} needs it")
    broken = next((row for row in rows.values() if row), None)
    if not why and broken:
        why = f"the template of image {image} is broken on {broken.host}: {broken.reason}"
    return [], why


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


def _templates_of(
    draft: Draft, attempt: Attempt, hosts: Iterable[str], parents: Mapping[str, Size], policy: Policy
) -> dict[TemplateKey, Template | None]:
    keys = [template_key(attempt, name, parents[name], policy) for name in hosts]
    return {which: draft.template_for(which) for which in keys}


def _spread(
    draft: Draft,
    attempt: Attempt,
    choice: Choice,
    hosts: Mapping[str, Host],
    parents: Mapping[str, Size],
    policy: Policy,
    room: Room,
) -> str:
    """The hosts that have the template are too full, or too small for all of a gang: see to one more."""
    if not _forks(choice):
        return ""
    able = able_hosts(attempt, choice.kind, hosts, policy)
    rows = _templates_of(draft, attempt, able, parents, policy)
    lacking = {which: row for which, row in rows.items() if not (row and row.state is TemplateState.READY)}
    return template_on_its_way(draft, lacking, hosts, policy, room, f"job {attempt.job.job_id} needs it")


def template_on_its_way(
    draft: Draft,
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
        retry = row is not None and draft.now >= row.since + policy.backoff(row.tries)
        if (row is None or retry) and (row is not None or room.fits(which.host, claim)):
            if row is None:
                room.take(which.host, claim)
            need_template(draft, which, hosts, wanted)
            return f"the template of image {which.image} is being built on {which.host}"
    return ""


def _make_way(draft: Draft, attempt: Attempt, queue: list[Attempt], hosts: Mapping[str, Host], policy: Policy) -> None:
    """Retire one template that nothing uses, so that the attempt may have its room: one that nobody in the queue
    needs, kept only while they fit, or else one that this attempt does not need, where templates alone are in its
    way. One after the other: the room of the first may be enough."""
    if any(
        template.state is TemplateState.RETIRING and template.host in hosts for template in draft.templates.values()
    ):
        return
    having = {name for name, host in hosts.items() if image_of(attempt, policy) in host.images}
    spare_keys = {vm.key for vm in draft.vms.values() if is_spare(vm)}  # they go with their template
    serving = [vm for vm in draft.vms.values() if vm.key not in spare_keys]
    busy = {c.host for c in draft.claims.values() if c.owner.kind == "vm" and c.owner not in spare_keys}
    # Jobs that ask for the same want the same: one of each speaks for all.
    wanted = {key for one in {a.request: a for a in queue}.values() for key in _wanted(draft, one, hosts, policy)}
    mine = set(_wanted(draft, attempt, hosts, policy))
    idle = [
        template
        for _, template in sorted(draft.templates.items(), key=lambda item: (item[1].since, item[0]))
        if template.state in (TemplateState.READY, TemplateState.BROKEN)
        and template.host in having
        and not any(vm.template == template.which for vm in serving)
    ]
    unwanted = (t for t in idle if t.which not in wanted and t.state is TemplateState.READY)
    in_the_way = (t for t in idle if t.which not in mine and t.host not in busy)
    spare = next(unwanted, None) or next(in_the_way, None)
    if spare:
        draft.move(Change(replace(spare, state=TemplateState.RETIRING), Event.DROPPED, "its memory is needed"))


def _wanted(draft: Draft, attempt: Attempt, hosts: Mapping[str, Host], policy: Policy) -> list[TemplateKey]:
    if not _may_fork(attempt, policy):
        return []
    parents = parents_of(draft, attempt, hosts, policy)
    if not could_ever_fit(attempt.request.size, attempt.request.nodes, parents, hosts, policy):
        return []  # if it is to run, then by booting, perhaps where such a template is now
    return [template_key(attempt, name, size, policy) for name, size in parents.items()]


def references(draft: Draft, template: Template) -> int:
    """How many live VMs were, or are about to be, forked from it."""
    return sum(vm.template == template.which for vm in draft.vms.values())


def _revoke(draft: Draft, attempt: Attempt, reason: str) -> None:
    draft.move(
        Change(
            replace(attempt, state=AttemptState.RECLAIMING, outcome="revoked", reason=reason), Event.IMPOSSIBLE, reason
        )
    )


def _tell(draft: Draft, attempt: Attempt, why: str, policy: Policy) -> None:
    """Note why an attempt waits, once it has waited long enough for its user to wonder."""
    if attempt.note != why and draft.now - attempt.since >= policy.patience:
        draft.move(Change(replace(attempt, note=why), Event.NOTED, why))
