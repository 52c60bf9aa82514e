"""Admission: may a queued attempt start now? Admit, wait or revoke, always with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache

from multiverse.core.model.host import Claim, Host
from multiverse.core.model.job import Attempt, AttemptState, Job, Request, SchedulerView
from multiverse.core.model.keys import Key
from multiverse.core.model.sizes import CloneKind, Size
from multiverse.core.model.template import Template, TemplateState
from multiverse.core.model.vm import Offer, Vm, VmState, is_parked_spare
from multiverse.core.model.world import World
from multiverse.core.policy import Policy, image_of
from multiverse.core.provisioning.capacity import Blockage, Room, could_ever_fit, largest, room_of
from multiverse.core.provisioning.clones import (
    Choice,
    able_hosts,
    choose_clones,
    forks,
    may_fork,
    parents_of,
    plan_vms,
    story_of,
    template_on_its_way,
    templates_of,
)
from multiverse.core.provisioning.eviction import release_spares, retire_a_template
from multiverse.core.provisioning.pacing import wait_for
from multiverse.core.provisioning.sizes import template_claim, vm_claim, vm_claims
from multiverse.core.provisioning.spares import give_back, joined_for, parked_for, withdraw
from multiverse.core.state import PlanState, Rows, quarantine_on_error
from multiverse.core.transition import Change, Event

PROVISIONING = (VmState.PLANNED, VmState.PARKED, VmState.STARTING)


def admit(state: PlanState, world: World, policy: Policy) -> Blockage:
    """Plan the admission of whatever may start now. Needs both sources; with one unknown, all wait. Says what jobs
    wait for."""
    if world.scheduler is None or world.hypervisor is None:
        return Blockage.TURN
    state.waiting.clear()  # each round of a pass decides anew
    state.wanted = None
    jobs, view = world.scheduler.value.jobs, world.hypervisor.value
    hosts, room = view.hosts, room_of(state, view, policy)
    queue = sorted(
        (a for a in state.attempts.values() if a.state is AttemptState.QUEUED and not a.quarantined),
        key=lambda a: (_rank(jobs.get(a.job.job_id)), a.id),
    )
    left = _limits_left(state, world.scheduler.value)
    promised: set[int] = set()  # spares that jobs wait for until they are withdrawn from others
    blocked, blockage = "", Blockage.NONE

    def room_without(gone: Collection[Key]) -> Room:
        return room_of(state, view, policy, without=gone)

    @cache
    def empty() -> Room:
        return room_without(state.claims)

    said: dict[tuple[Request, CloneKind, bool], str] = {}

    def beyond(attempt: Attempt, choice: Choice, parents: Mapping[str, Size]) -> str:
        """See `_beyond`; where no more is claimed than declared, nobody looks what others have."""
        if policy.overcommit <= 1:
            return ""
        alike = (attempt.request, choice.kind, TOO_LITTLE in attempt.note)
        if alike not in said:
            said[alike] = _beyond(attempt, choice, parents, hosts, empty(), policy)
        return said[alike]

    def clear_the_way(attempt: Attempt, count: int, claims: Mapping[str, Size]) -> Blockage:
        """What the first in the queue waits for: if spares that give way are enough, only until they are gone."""
        if release_spares(state, image_of(attempt, policy), count, claims, room_without):
            return Blockage.TURN
        retire_a_template(state, attempt, queue, hosts, policy)
        return Blockage.ROOM

    for attempt in queue:
        with quarantine_on_error(state, attempt.key):
            job = jobs.get(attempt.job.job_id)
            if job is None or job.ref != attempt.job:
                continue
            told, nodes = attempt.request.size, attempt.request.nodes
            choice, parents = choose_clones(state, attempt, hosts, world, policy)
            if job.problem:
                _revoke(state, attempt, job.problem)
                continue
            if not could_ever_fit(told, nodes, parents, hosts, policy):
                why, hope = _unfit(state, attempt, hosts, parents, policy)
                if not hope:
                    _revoke(state, attempt, why)
                elif job.eligible:
                    _tell(state, attempt, why, policy)
                continue
            if not job.eligible or not attempt.gated or attempt.stray or state.now < attempt.not_before:
                continue
            if earlier := _earlier_run(state, attempt):
                _tell(state, attempt, earlier, policy)
                continue
            if over := next((limit for limit, count in job.uses if count > left[limit]), ""):
                _tell(state, attempt, f"held back by {over}", policy)
                continue
            if blocked:
                _tell(state, attempt, blocked, policy)
                continue
            spare = _joined_for(state, attempt, promised, world, policy)
            if spare is not None:
                left.subtract(dict(job.uses))
                _take_joined(state, attempt, spare, promised, policy)
                continue
            starting = sum(vm.state in PROVISIONING and not is_parked_spare(vm) for vm in state.vms.values())
            if starting and starting + nodes > policy.provisioning:
                blockage = Blockage.TURN
                blocked = "waiting for a turn: as many VMs as may be made at once are being made"
                _tell(state, attempt, blocked, policy)
                continue
            among, why = _usable_hosts(state, attempt, choice, hosts, parents, policy, room)
            if not among:
                if not why and not (why := beyond(attempt, choice, parents)):
                    # Its template too needs room, and nobody may take that before it.
                    image = image_of(attempt, policy)
                    blocked = why = f"waiting for capacity: no host has room for the template of image {image}"
                    able = able_hosts(attempt, choice.kind, hosts, policy)
                    template_claims = {name: template_claim(parents[name], hosts[name]) for name in able}
                    blockage = clear_the_way(attempt, 1, template_claims)
                _tell(state, attempt, why, policy)
                continue
            claims = vm_claims(told, {name: parents[name] for name in among}, policy)
            parked = (
                parked_for(state, attempt, image_of(attempt, policy), parents, room, world, policy)
                if forks(choice)
                else []
            )
            unpaced, why = _unpaced(state, attempt, choice, among, nodes - len(parked), policy)
            chosen = room.place(nodes - len(parked), {name: claims[name] for name in unpaced})
            if chosen is None:
                give_back(parked, room)
                if not why and not (why := beyond(attempt, choice, parents)):
                    blocked = why = _spread(state, attempt, choice, hosts, parents, policy, room) or _full(
                        room, claims, policy
                    )
                    blockage = clear_the_way(attempt, nodes, claims)
                _tell(state, attempt, why, policy)
                continue
            vms = plan_vms(state, attempt, choice.kind, chosen, parents, policy)
            if vms is None:
                blockage = Blockage.ROOM
                blocked = "waiting for a free address"
                _tell(state, attempt, blocked, policy)
                continue
            _admit(state, attempt, choice, [vm for vm, _ in parked], vms, policy)
            left.subtract(dict(job.uses))
    return blockage


def _joined_for(
    state: PlanState, attempt: Attempt, promised: Collection[int], world: World, policy: Policy
) -> Vm | None:
    """A node that is there already, if one fits that is `promised` to no other and it may be an instant clone."""
    if not policy.pools or not may_fork(attempt, policy):
        return None
    return joined_for(state, attempt, image_of(attempt, policy), world, policy, promised)


def _take_joined(state: PlanState, attempt: Attempt, vm: Vm, promised: set[int], policy: Policy) -> None:
    """Admit it at once to a node that is there already; if that is on offer, withdraw it from those that come first."""
    if vm.offer in (Offer.OPEN, Offer.CLOSING):
        promised.add(vm.id)
        if vm.offer is Offer.OPEN:
            withdraw(state, vm, f"job {attempt.job.job_id} is to have it")
        return
    taken = replace(vm, attempt=attempt.id)
    _admit(state, replace(attempt, pin=vm.feature), Choice(CloneKind.INSTANT), [taken], [], policy)


def _admit(state: PlanState, attempt: Attempt, choice: Choice, taken: list[Vm], made: list[Vm], policy: Policy) -> None:
    """One move: the attempt is claimed with all its VMs, those out of the pool and those to be made."""
    story = story_of(choice, (*taken, *made), "".join(f", {vm.pool} before" for vm in taken[:1]))
    state.move(
        Change(replace(attempt, state=AttemptState.CLAIMED, note="", choice=story), Event.ADMITTED, story),
        *(Change(vm, Event.TAKEN, f"by job {attempt.job.job_id}") for vm in taken),
        *(Change(vm, Event.PLANNED) for vm in made),
        free=[vm.key for vm in taken],
        make=(Claim(vm.key, vm.host, vm_claim(vm.size, policy)) for vm in (*taken, *made)),
    )


def _unpaced(
    state: PlanState, attempt: Attempt, choice: Choice, among: list[str], count: int, policy: Policy
) -> tuple[list[str], str]:
    """Of these hosts, those on which a clone may be made now; when there are none, why."""
    image = image_of(attempt, policy)
    waits = {host: wait_for((host, image, choice.kind), state.paced, state.now, policy) for host in among}
    ready = [host for host, wait in waits.items() if wait <= 0]
    if ready or not count:
        return ready, ""
    state.waiting[min(waits, key=lambda host: (waits[host], host)), image, choice.kind] += count
    return [], f"waiting for a turn: {choice.kind} clones of {image} are made at {policy.rates[choice.kind]:g} a second"


TOO_LITTLE = "of which others there leave too little"


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
    margin = policy.floor // 8 if TOO_LITTLE in attempt.note else 0
    for name, parent in parents.items():
        frozen = template_claim(parent, hosts[name]).memory if forks(choice) else 0
        room.take(name, Size(0, frozen + margin, 0))
    if room.place(nodes, vm_claims(attempt.request.size, parents, policy)) is not None:
        return ""
    lacking = ", ".join(sorted(empty.tight & parents.keys()))
    return f"waiting for memory: {lacking} must keep {policy.floor} MiB available, {TOO_LITTLE}"


def _full(room: Room, claims: Mapping[str, Size], policy: Policy) -> str:
    if tight := room.lack_memory(claims):
        return f"waiting for memory: {', '.join(tight)} must keep {policy.floor} MiB available"
    return "waiting for capacity: the hosts are full"


def _limits_left(state: PlanState, view: SchedulerView) -> Counter[str]:
    """What each limit lets run beside what is admitted: the scheduler counts only what it has started."""
    left = Counter(view.limits)
    for _, attempt in sorted(state.attempts.items()):
        job = view.jobs.get(attempt.job.job_id)
        if attempt.state is not AttemptState.QUEUED and job is not None and job.ref == attempt.job:
            left.subtract(dict(job.uses))
    return left


def _earlier_run(state: PlanState, attempt: Attempt) -> str:
    """Why an earlier run of the same job may still go on, if it may: the scheduler queues a job again as soon
    as its node is silent, and nothing may run twice."""
    for _, vm in sorted(state.vms.items()):
        owner = state.attempt_of(vm)
        if owner and owner.job.job_id == attempt.job.job_id and owner.job.restarts < attempt.job.restarts:
            if vm.state is VmState.LOST:
                return (
                    f"its earlier run may go on in {vm.name}: host {vm.host} is out of reach, neither back nor fenced"
                )
            return f"waiting until {vm.name} of its earlier run is gone"
    return ""


def _rank(job: Job | None) -> int:
    return job.rank if job else 1 << 62


def _unfit(
    state: PlanState, attempt: Attempt, hosts: Mapping[str, Host], parents: Mapping[str, Size], policy: Policy
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
    away = sorted(state.hosts - set(hosts))
    return why + (f"; out of reach now: {', '.join(away)}" if away else ""), hope or bool(away) or not hosts


def _usable_hosts(
    state: PlanState,
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
    if not forks(choice):  # booted from the image: no template in it
        if choice.prepare:
            forking = able_hosts(attempt, CloneKind.INSTANT, hosts, policy)
            forked = parents_of(state, attempt, hosts, policy)
            rows = templates_of(state, attempt, forking, forked, policy)
            template_on_its_way(state, rows, hosts, policy, room, "others like this job will need it")
        return able, ""
    rows = templates_of(state, attempt, able, parents, policy)
    ready = [which.host for which, row in rows.items() if row and row.state is TemplateState.READY]
    if ready:
        return ready, ""
    why = template_on_its_way(state, rows, hosts, policy, room, f"job {attempt.job.job_id} needs it")
    broken = next((row for row in rows.values() if row), None)
    if not why and broken:
        why = f"the template of image {image} is broken on {broken.host}: {broken.reason}"
    return [], why


def _spread(
    state: PlanState,
    attempt: Attempt,
    choice: Choice,
    hosts: Mapping[str, Host],
    parents: Mapping[str, Size],
    policy: Policy,
    room: Room,
) -> str:
    """The hosts that have the template are too full, or too small for all of a gang: see to one more."""
    if not forks(choice):
        return ""
    able = able_hosts(attempt, choice.kind, hosts, policy)
    rows = templates_of(state, attempt, able, parents, policy)
    lacking = {which: row for which, row in rows.items() if not (row and row.state is TemplateState.READY)}
    return template_on_its_way(state, lacking, hosts, policy, room, f"job {attempt.job.job_id} needs it")


def references(state: PlanState | Rows, template: Template) -> int:
    """How many live VMs were, or are about to be, forked from it."""
    return sum(vm.template == template.which for vm in state.vms.values())


def _revoke(state: PlanState, attempt: Attempt, reason: str) -> None:
    state.move(
        Change(
            replace(attempt, state=AttemptState.RECLAIMING, outcome="revoked", reason=reason), Event.IMPOSSIBLE, reason
        )
    )


def _tell(state: PlanState, attempt: Attempt, why: str, policy: Policy) -> None:
    """Note why an attempt waits, once it has waited long enough for its user to wonder."""
    if attempt.note != why and state.now - attempt.since >= policy.patience:
        state.move(Change(replace(attempt, note=why), Event.NOTED, why))
