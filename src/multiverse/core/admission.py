"""Admission: may a queued attempt start now? Admit, wait or revoke, always with a reason.

Attempts are taken in the scheduler's order. The first one that waits for capacity blocks those behind
it, so that nothing overtakes it for ever; one that waits for something of its own (its template, its
back-off) or for a limit of the scheduler's blocks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from multiverse.core.lifecycle import Event
from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    Host,
    HypervisorView,
    Job,
    SchedulerView,
    Size,
    Template,
    TemplateState,
    Vm,
    VmState,
    World,
)
from multiverse.core.pacing import Policy
from multiverse.core.placement import (
    Room,
    address_of,
    could_ever_fit,
    largest,
    mac_of,
    template_claim,
    vm_claim,
    vm_size,
    yet_to_come,
)
from multiverse.core.rows import Change, Draft

PROVISIONING = (VmState.PLANNED, VmState.PARKED, VmState.STARTING)


def admit(draft: Draft, world: World, policy: Policy) -> None:
    """Plan the admission of whatever may start now. Needs both sources; with one unknown, all wait."""
    if world.scheduler is None or world.hypervisor is None:
        return
    jobs = world.scheduler.value.jobs
    hosts = world.hypervisor.value.hosts
    room = room_of(draft, world.hypervisor.value, policy)
    queue = sorted(
        (a for a in draft.attempts.values() if a.state is AttemptState.QUEUED and not a.quarantined),
        key=lambda a: (_rank(jobs.get(a.job.job_id)), a.id),
    )
    left = _limits_left(draft, world.scheduler.value)
    blocked = ""
    for attempt in queue:
        job = jobs.get(attempt.job.job_id)
        if job is None or job.ref != attempt.job:
            continue
        if job.problem or not could_ever_fit(attempt.request.size, attempt.request.nodes, hosts, policy):
            if hosts:  # without a host in sight nothing is known to be impossible
                _revoke(draft, attempt, job.problem or too_large(attempt, hosts, policy))
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
        starting = sum(vm.state in PROVISIONING for vm in draft.vms.values())
        if starting and starting + attempt.request.nodes > policy.provisioning:
            blocked = "waiting for a turn: as many VMs as may be made at once are being made"
            _tell(draft, attempt, blocked, policy)
            continue
        among, why = _usable_hosts(draft, attempt, hosts, policy, room)
        if not among:
            _tell(draft, attempt, why, policy)
            continue
        size = vm_size(attempt.request.size, policy)
        chosen = room.place(vm_claim(size, policy), attempt.request.nodes, among)
        if chosen is None:
            blocked = _spread(draft, attempt, hosts, policy, room) or _full(room, vm_claim(size, policy), among, policy)
            _make_way(draft, queue, hosts, policy)
            _tell(draft, attempt, blocked, policy)
            continue
        vms = plan_vms(draft, attempt, chosen, policy)
        if vms is None:
            blocked = "waiting for a free address"
            _tell(draft, attempt, blocked, policy)
            continue
        draft.move(
            Change(replace(attempt, state=AttemptState.CLAIMED, note=""), Event.ADMITTED, f"on {', '.join(chosen)}"),
            *(Change(vm, Event.PLANNED) for vm in vms),
            make=(Claim(vm.key, vm.host, vm_claim(vm.size, policy)) for vm in vms),
        )
        left.subtract(dict(job.uses))


def room_of(draft: Draft, view: HypervisorView, policy: Policy) -> Room:
    """What is free on the hosts in sight, as far as declared, or over-committed."""
    room = Room(view.hosts, draft.claims.values())
    if policy.overcommit > 1:
        coming: Counter[str] = Counter()
        for claim in draft.claims.values():
            coming[claim.host] += _yet_to_come(draft, claim, view, policy)
        for name, host in sorted(view.hosts.items()):
            room.overcommit(host, coming[name], policy)
    return room


def _yet_to_come(draft: Draft, claim: Claim, view: HypervisorView, policy: Policy) -> int:
    """MiB that a row may yet take of its host's machine; one on its way out too, for its end may be long in coming."""
    row = draft.get(claim.owner)
    held, settled = 0.0, False
    match row:
        case Vm() if (vm := view.vms.get(row.name)) is not None:
            held = vm.private
            settled = held > 0 and row.state is VmState.SERVING and draft.now - row.since >= policy.settle
        case Template() if (template := view.templates.get((row.host, row.image))) is not None:
            held = template.held
        case _:
            pass
    return yet_to_come(claim.size, held, policy, settled=settled)


def _full(room: Room, size: Size, among: list[str], policy: Policy) -> str:
    if tight := room.lack_memory(size, among):
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


def kind_of(attempt: Attempt, policy: Policy) -> CloneKind:
    return attempt.request.kind or policy.kind


def image_of(attempt: Attempt, policy: Policy) -> str:
    return attempt.request.image or policy.image


def plan_vms(draft: Draft, attempt: Attempt, hosts: list[str], policy: Policy) -> list[Vm] | None:
    """New rows for VMs of the attempt, one on each of `hosts`; None when addresses have run out."""
    vms: list[Vm] = []
    used = draft.addresses()
    for host in hosts:
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
                image=image_of(attempt, policy),
                kind=kind_of(attempt, policy),
                size=vm_size(attempt.request.size, policy),
                told=attempt.request.size,
                mac=mac_of(draft.site, serial),
                address=address,
                attempt=attempt.id,
            )
        )
    return vms


def need_template(draft: Draft, host: str, image: str, hosts: Mapping[str, Host], policy: Policy, reason: str) -> None:
    """Plan the building of a template, whether it was never there or is broken."""
    old = draft.template_for(host, image)
    row = old or Template(draft.template_id(), 0, TemplateState.ABSENT, draft.now, host, image, policy.base)
    draft.move(
        Change(replace(row, state=TemplateState.BUILDING, reason=""), Event.NEEDED, reason),
        make=[] if row.key in draft.claims else [Claim(row.key, host, template_claim(policy, hosts.get(host)))],
    )


def too_large(attempt: Attempt, hosts: Mapping[str, Host], policy: Policy) -> str:
    """The sentence for a job that no empty host could hold."""
    fit = largest(hosts, policy)
    many = f"{attempt.request.nodes} VMs of " if attempt.request.nodes > 1 else "a VM of "
    return f"{many}{attempt.request.size} fits on no host; the largest that fits is {fit} per node"


def _usable_hosts(
    draft: Draft, attempt: Attempt, hosts: Mapping[str, Host], policy: Policy, room: Room
) -> tuple[list[str], str]:
    """Hosts that can make this attempt's VMs now; when there are none, why. Asks for a template where
    one is missing."""
    kind, image = kind_of(attempt, policy), image_of(attempt, policy)
    able = [name for name, host in sorted(hosts.items()) if kind.value in host.abilities]
    if not able:
        return [], f"no host can make {kind} clones"
    if kind is not CloneKind.INSTANT:  # booted from the image: no template in it
        return able, ""
    rows = {name: draft.template_for(name, image) for name in able}
    ready = [name for name, row in rows.items() if row and row.state is TemplateState.READY]
    if ready:
        return ready, ""
    why = _template_on_its_way(draft, attempt, rows, hosts, policy, room)
    broken = next((row for row in rows.values() if row), None)
    if not why and broken:
        why = f"the template of image {image} is broken on {broken.host}: {broken.reason}"
    return [], why or f"no host has room for the template of image {image}"


def _spread(draft: Draft, attempt: Attempt, hosts: Mapping[str, Host], policy: Policy, room: Room) -> str:
    """The hosts that have the template are too full, or too small for all of a gang: see to one more."""
    if kind_of(attempt, policy) is not CloneKind.INSTANT:
        return ""
    image = image_of(attempt, policy)
    able = [name for name, host in sorted(hosts.items()) if CloneKind.INSTANT.value in host.abilities]
    rows = {name: draft.template_for(name, image) for name in able}
    lacking = {name: row for name, row in rows.items() if not (row and row.state is TemplateState.READY)}
    return _template_on_its_way(draft, attempt, lacking, hosts, policy, room)


def _template_on_its_way(
    draft: Draft,
    attempt: Attempt,
    rows: Mapping[str, Template | None],
    hosts: Mapping[str, Host],
    policy: Policy,
    room: Room,
) -> str:
    """Ask for the template on one of these hosts, unless it is being built on one already; says so, or
    nothing if none of them can have it now."""
    image = image_of(attempt, policy)
    for name, row in rows.items():
        if row and row.state in (TemplateState.BUILDING, TemplateState.RETIRING):
            return f"the template of image {image} is being built on {name}"
    for name, row in rows.items():
        retry = row is not None and draft.now >= row.since + policy.backoff(row.tries)
        claim = template_claim(policy, hosts[name])
        if (row is None or retry) and (row is not None or room.fits(name, claim)):
            if row is None:
                room.take(name, claim)
            need_template(draft, name, image, hosts, policy, f"job {attempt.job.job_id} needs it")
            return f"the template of image {image} is being built on {name}"
    return ""


def _make_way(draft: Draft, queue: list[Attempt], hosts: Mapping[str, Host], policy: Policy) -> None:
    """Retire one template that nothing uses and nobody in the queue needs: kept only while they fit. One after
    the other: the room of the first may be enough."""
    if any(
        template.state is TemplateState.RETIRING and template.host in hosts for template in draft.templates.values()
    ):
        return
    wanted = {image_of(a, policy) for a in queue}
    for _, template in sorted(draft.templates.items(), key=lambda item: (item[1].since, item[0])):
        if template.state is TemplateState.READY and template.image not in wanted and not references(draft, template):
            draft.move(Change(replace(template, state=TemplateState.RETIRING), Event.DROPPED, "its memory is needed"))
            return


def references(draft: Draft, template: Template) -> int:
    """How many live VMs were, or are about to be, forked from it."""
    return sum(
        vm.host == template.host and vm.image == template.image and vm.kind is CloneKind.INSTANT
        for vm in draft.vms.values()
    )


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
