"""Admission: may a queued attempt start now? Admit, wait or revoke, always with a reason.

Attempts are considered in the scheduler's order. The first one that waits for capacity blocks those behind it, so that
nothing overtakes it for ever; one that waits for something of its own (its template, its back-off) or for a limit of
the scheduler's blocks no other.

The cases, in the order in which `Admission.consider` tries them:

 1. The scheduler no longer shows the job as it was: nothing is decided.
 2. The request cannot be served at all: revoke.
 3. No host could ever hold the job: revoke, or wait while there is a host that might.
 4. The job is held, not at the gate, or in its back-off: nothing is decided.
 5. An earlier run of the job may still go on: wait.
 6. A limit of the scheduler's is used up: wait.
 7. An earlier job waits for capacity: wait behind it.
 8. There surely is no such user: revoke. The name service has not said yet who the user is: wait.
 9. A joined spare fits: take it.
10. As many VMs are being made as may be: wait, and block.
11. No host can make its VMs now, for want of a template: wait; block if the template has no room.
12. The pace lets no clone be made now: wait.
13. There is no room, or no address: wait, and block.
14. Otherwise: admit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

from multiverse.core.model import (
    UPCOMING_STATES,
    WAITING_STATES,
    Attempt,
    AttemptState,
    CloneKind,
    Job,
    OfferState,
    Request,
    Size,
    TemplateKey,
    TemplateState,
    Vm,
    VmState,
)
from multiverse.core.provisioning.capacity import Blockage, Room, could_ever_fit, largest_on, room_of
from multiverse.core.provisioning.clones import (
    Choice,
    ask_for_template,
    choose_clones,
    claims_of,
    describe,
    hosts_making,
    may_fork,
    plan_vms,
    request_of,
    template_sizes,
    templates_of,
)
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.eviction import release_spares, retire_a_template
from multiverse.core.provisioning.pacing import wait_for
from multiverse.core.provisioning.sizes import template_claim, vm_claims
from multiverse.core.provisioning.spares import give_back, joined_for, parked_for, withdraw
from multiverse.core.state import State, quarantine_on_error
from multiverse.core.transition import Change, Event

TOO_LITTLE = "of which others there leave too little"
"""Part of the reason of a job that waits for memory which others on the machine hold."""


def admit(context: Context) -> Blockage:
    """Plan the admission of whatever may start now, and say what keeps jobs waiting. Needs the scheduler and at least
    one source of the hypervisor; while they are unknown, all wait."""
    if context.world.scheduler is None or not context.world.views:
        return Blockage.TURN
    return Admission(context).run()


class Admission:
    """One round of admission: the queue, what is free, and what has been promised so far."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.state, self.policy, self.hosts = context.state, context.policy, context.hosts
        self.jobs = context.scheduler.jobs
        self.queue = self._queue()
        self.room = room_of(context)
        self.limits = self._limits_left()
        self.promised: set[int] = set()  # spares that jobs wait for until they are withdrawn from other jobs
        self.blocked = ""  # why the first job that waits for capacity waits
        self.blockage = Blockage.NONE
        self._empty: Room | None = None
        self._beyond: dict[tuple[Request, CloneKind, bool], str] = {}

    def run(self) -> Blockage:
        self.state.waiting.clear()  # each round of a pass decides anew
        self.state.unknown_users.clear()
        self.state.wanted = None
        for attempt in self.queue:
            with quarantine_on_error(self.state, attempt.key):
                self.consider(attempt)
        return self.blockage

    def _queue(self) -> list[Attempt]:
        def rank(attempt: Attempt) -> tuple[int, int]:
            job = self.jobs.get(attempt.job.job_id)
            return (job.rank if job else 1 << 62, attempt.id)

        waiting = self.state.attempts_in(*WAITING_STATES)
        return sorted((attempt for attempt in waiting if not attempt.quarantined), key=rank)

    def _limits_left(self) -> Counter[str]:
        """How much more each limit lets run beside what is admitted: the scheduler counts only what it has started."""
        left = Counter(self.context.scheduler.limits)
        for attempt in (self.state.attempts[id_] for id_ in sorted(self.state.attempts)):
            job = self.jobs.get(attempt.job.job_id)
            waiting = attempt.state in WAITING_STATES
            if not waiting and job is not None and job.ref == attempt.job:
                left.subtract(dict(job.uses))
        return left

    # --- the cases ---------------------------------------------------------------------------------

    def consider(self, attempt: Attempt) -> None:
        """Decide about one attempt: see the cases above."""
        job = self.jobs.get(attempt.job.job_id)
        if job is None or job.ref != attempt.job:  # 1
            return
        if job.problem:  # 2
            self._revoke(attempt, job.problem)
            return
        choice = choose_clones(self.context, attempt)
        if not self._could_ever_fit(attempt, choice.sizes):  # 3
            self._refuse_or_wait(attempt, job, choice)
        elif not job.eligible or attempt.state is not AttemptState.QUEUED or self.state.now < attempt.not_before:  # 4
            return
        elif why := self._earlier_run(attempt) or self._limit_reached(job) or self.blocked:  # 5, 6, 7
            self._tell(attempt, why)
        elif self.context.world.user_known_since(attempt.uid) == float("inf"):  # 8
            self._refuse_or_ask(attempt)
        elif spare := self._joined_spare(attempt):  # 9
            self.limits.subtract(dict(job.uses))
            self._take_joined(attempt, spare)
        elif self._is_turn_over(attempt):  # 10
            self._block(attempt, Blockage.TURN, "waiting for a turn: as many VMs as may be made at once are being made")
        elif self._provision(attempt, choice):  # 11 to 14
            self.limits.subtract(dict(job.uses))

    def _could_ever_fit(self, attempt: Attempt, templates: Mapping[str, Size]) -> bool:
        request = attempt.request
        return could_ever_fit(request.size, request.nodes, templates, self.hosts, self.policy)

    def _refuse_or_wait(self, attempt: Attempt, job: Job, choice: Choice) -> None:
        """Case 3: no host in sight that has the image could ever hold the job."""
        why, hope = self._why_unfit(attempt, choice)
        if not hope:
            self._revoke(attempt, why)
        elif job.eligible:
            self._tell(attempt, why)

    def _why_unfit(self, attempt: Attempt, choice: Choice) -> tuple[str, bool]:
        """Why none of the hosts that have the image could hold the job, were they empty, and whether other hosts may
        yet: those that the image can still come to, and those out of reach, of which nobody knows what they could
        hold."""
        node, nodes, image = attempt.request.size, attempt.request.nodes, self.context.image_of(attempt)
        templates = choice.sizes
        without = sorted(self.hosts.keys() - templates.keys())
        hope = self._could_ever_fit(attempt, {**templates, **dict.fromkeys(without, self.policy.base)})
        if not self.hosts:
            why = "no host is in sight"
        elif hope and not templates:
            why = f"no host has image {image}"
        else:
            names = templates or self.hosts
            most = (largest_on(self.hosts[name], image, self.policy, forks=choice.forks) for name in names)
            fit = max(most, key=lambda size: (size.memory, size.cpus))
            many = f"{nodes} VMs of " if nodes > 1 else "a VM of "
            why = f"{many}{node} fits on no host; the largest that fits is {fit} per node"
            why += f"; without image {image}: {', '.join(without)}" if hope else ""
        away = sorted(name for name in self.state.hosts if name not in self.hosts and not self.state.is_fenced(name))
        return why + (f"; out of reach now: {', '.join(away)}" if away else ""), hope or bool(away) or not self.hosts

    def _earlier_run(self, attempt: Attempt) -> str:
        """Case 5: why an earlier run of the same job may still go on, if it may. The scheduler queues a job again as
        soon as its node is silent, and no job may run twice."""
        for other in self.state.attempts_of_job(attempt.job.job_id):
            if other.job.restarts >= attempt.job.restarts:
                continue
            for vm in self.state.vms_of(other):
                if vm.state is VmState.LOST:
                    where = f"host {vm.host} is out of reach, neither back nor fenced"
                    return f"its earlier run may go on in {vm.name}: {where}"
                return f"waiting until {vm.name} of its earlier run is gone"
        return ""

    def _limit_reached(self, job: Job) -> str:
        """Case 6."""
        limit = next((limit for limit, count in job.uses if count > self.limits[limit]), "")
        return f"held back by {limit}" if limit else ""

    def _refuse_or_ask(self, attempt: Attempt) -> None:
        """Case 8: the job's user is not known to exist. An answer that is older than the attempt does not count: the
        user may have been added since."""
        user = (self.context.world.users or {}).get(attempt.uid)
        if user is not None and user.began > attempt.since:
            self._revoke(attempt, f"{user.reason}: its job cannot run")
            return
        self.state.unknown_users.add(attempt.uid)
        self._tell(attempt, f"waiting until the name service says who uid {attempt.uid} is")

    def _joined_spare(self, attempt: Attempt) -> Vm | None:
        """Case 9: a node that is there already, if one fits that is promised to no other job."""
        if not self.policy.pools or not may_fork(self.context, attempt):
            return None
        return joined_for(self.context, attempt, self.promised)

    def _take_joined(self, attempt: Attempt, vm: Vm) -> None:
        """Admit the attempt at once to a node that is there already. A node on offer is withdrawn from other jobs
        first, which may come before."""
        offer = self.state.offers.get(vm.id)
        if offer is not None and offer.state in (OfferState.OPEN, OfferState.CLOSING):
            self.promised.add(vm.id)
            if offer.state is OfferState.OPEN:
                withdraw(self.state, offer, f"job {attempt.job.job_id} is to have it")
            return
        taken = replace(vm, attempt=attempt.id)
        self._admit(replace(attempt, pin=vm.feature), Choice(CloneKind.INSTANT), [taken], [])

    def _is_turn_over(self, attempt: Attempt) -> bool:
        """Case 10: whether as many VMs are being made as may be made at once."""
        upcoming = self.state.vms_in(*UPCOMING_STATES)
        starting = sum(not (vm.is_spare and vm.state is VmState.PARKED) for vm in upcoming)
        return bool(starting) and starting + attempt.request.nodes > self.policy.provisioning

    def _provision(self, attempt: Attempt, choice: Choice) -> bool:
        """Cases 11 to 14: hosts, spares, pace, room, addresses. Whether the attempt was admitted."""
        usable, why = self._usable_hosts(attempt, choice)
        if not usable:
            self._wait_for_template(attempt, choice, why)
            return False
        request, sizes = attempt.request, {name: choice.sizes[name] for name in usable}
        claims = vm_claims(request.size, sizes, self.hosts, self.policy)
        parked = parked_for(self.context, attempt, choice.sizes, self.room) if choice.forks else []
        count = request.nodes - len(parked)
        in_pace, why = self._hosts_in_pace(attempt, choice, usable, count)
        chosen = self.room.place(count, {name: claims[name] for name in in_pace})
        if chosen is None:
            give_back(parked, self.room)
            self._wait_for_room(attempt, choice, claims, why)
            return False
        vms = plan_vms(self.context, request_of(self.context, attempt, choice), chosen)
        if vms is None:
            self._block(attempt, Blockage.ROOM, "waiting for a free address")
            return False
        self._admit(attempt, choice, [vm for vm, _ in parked], vms)
        return True

    def _usable_hosts(self, attempt: Attempt, choice: Choice) -> tuple[list[str], str]:
        """Case 11: hosts that can make this attempt's VMs now; when there are none, why. Asks for a template where one
        is missing."""
        context, image = self.context, self.context.image_of(attempt)
        able = hosts_making(image, choice.kind, self.hosts)
        if not able:
            return [], f"no host can make {choice.kind} clones of image {image}"
        if not choice.forks:  # booted from the image, without a template
            if choice.prepare:
                forking = hosts_making(image, CloneKind.INSTANT, self.hosts)
                rows = templates_of(context, attempt, forking, template_sizes(context, attempt))
                ask_for_template(context, rows, self.room, "others like this job will need it")
            return able, ""
        rows = templates_of(context, attempt, able, choice.sizes)
        ready = [which.host for which, row in rows.items() if row and row.state is TemplateState.READY]
        if ready:
            return ready, ""
        why = ask_for_template(context, rows, self.room, f"job {attempt.job.job_id} needs it")
        broken = next((row for row in rows.values() if row), None)
        if not why and broken:
            why = f"the template of image {image} is broken on {broken.host}: {broken.reason}"
        return [], why

    def _wait_for_template(self, attempt: Attempt, choice: Choice, why: str) -> None:
        if not why and not (why := self._memory_of_others(attempt, choice)):
            # Its template needs room too, which no later job may take.
            image = self.context.image_of(attempt)
            why = f"waiting for capacity: no host has room for the template of image {image}"
            able = hosts_making(image, choice.kind, self.hosts)
            claims = {name: template_claim(choice.sizes[name], self.hosts[name]) for name in able}
            self._block(attempt, self._make_room(attempt, 1, claims), why)
            return
        self._tell(attempt, why)

    def _hosts_in_pace(self, attempt: Attempt, choice: Choice, usable: list[str], count: int) -> tuple[list[str], str]:
        """Case 12: of these hosts, those on which a clone may be made now; when there are none, why."""
        image, kind, state = self.context.image_of(attempt), choice.kind, self.state
        waits = {host: wait_for((host, image, kind), state.paced, state.now, self.policy) for host in usable}
        ready = [host for host, wait in waits.items() if wait <= 0]
        if ready or not count:
            return ready, ""
        state.waiting[min(waits, key=lambda host: (waits[host], host)), image, kind] += count
        rate = self.policy.rates[kind]
        return [], f"waiting for a turn: {kind} clones of {image} are made at {rate:g} a second"

    def _wait_for_room(self, attempt: Attempt, choice: Choice, claims: Mapping[str, Size], why: str) -> None:
        """Case 13."""
        if not why and not (why := self._memory_of_others(attempt, choice)):
            why = self._template_elsewhere(attempt, choice) or self._why_full(claims)
            self._block(attempt, self._make_room(attempt, attempt.request.nodes, claims), why)
            return
        self._tell(attempt, why)

    def _template_elsewhere(self, attempt: Attempt, choice: Choice) -> str:
        """The hosts that have the template are too full, or too small for all of a gang: build it on one more host."""
        if not choice.forks:
            return ""
        able = hosts_making(self.context.image_of(attempt), choice.kind, self.hosts)
        rows = templates_of(self.context, attempt, able, choice.sizes)
        lacking = {which: row for which, row in rows.items() if not (row and row.state is TemplateState.READY)}
        return ask_for_template(self.context, lacking, self.room, f"job {attempt.job.job_id} needs it")

    def _why_full(self, claims: Mapping[str, Size]) -> str:
        if tight := self.room.lack_memory(claims):
            return f"waiting for memory: {', '.join(tight)} must keep {self.policy.floor} MiB available"
        return "waiting for capacity: the hosts are full"

    def _make_room(self, attempt: Attempt, count: int, claims: Mapping[str, Size]) -> Blockage:
        """What the first job in the queue waits for: if releasing spares is enough, only until they are gone."""
        if release_spares(self.context, self.context.image_of(attempt), count, claims):
            return Blockage.TURN
        retire_a_template(self.context, attempt, self.queue)
        return Blockage.ROOM

    def _memory_of_others(self, attempt: Attempt, choice: Choice) -> str:
        """Why the attempt would have no room on empty hosts either, with nothing of ours on them: others on their
        machines have the memory, and no job behind it is to wait for that. Empty where no more is claimed than
        declared: there nobody looks at what others have. How much others hold is not known to the MiB: who was told
        this once is told so until there is some more than enough."""
        if self.policy.overcommit <= 1:
            return ""
        alike = (attempt.request, choice.kind, TOO_LITTLE in attempt.note)
        if alike not in self._beyond:
            self._beyond[alike] = self._memory_of_others_for(attempt, choice)
        return self._beyond[alike]

    def _memory_of_others_for(self, attempt: Attempt, choice: Choice) -> str:
        if self._empty is None:
            self._empty = room_of(self.context, without={key.owner for key in self.state.claims})
        room, policy = deepcopy(self._empty), self.policy
        margin = policy.floor // 8 if TOO_LITTLE in attempt.note else 0
        for name, template in choice.sizes.items():
            frozen = template_claim(template, self.hosts[name]).memory if choice.forks else 0
            room.take(name, Size(0, frozen + margin, 0))
        claims = vm_claims(attempt.request.size, choice.sizes, self.hosts, policy)
        if room.place(attempt.request.nodes, claims) is not None:
            return ""
        lacking = ", ".join(sorted(self._empty.tight & choice.sizes.keys()))
        return f"waiting for memory: {lacking} must keep {policy.floor} MiB available, {TOO_LITTLE}"

    # --- what is decided ---------------------------------------------------------------------------

    def _admit(self, attempt: Attempt, choice: Choice, taken: list[Vm], made: list[Vm]) -> None:
        """One move: the attempt is claimed with all its VMs, spares that it takes and VMs that are to be made."""
        vms = (*taken, *made)
        story = describe(choice, vms, "".join(f", {vm.pool} before" for vm in taken[:1]))
        admitted = replace(attempt, state=AttemptState.CLAIMED, note="", choice=story)
        self.state.move(
            Change(admitted, Event.ADMITTED, story),
            *(Change(vm, Event.TAKEN, f"by job {attempt.job.job_id}") for vm in taken),
            *(Change(vm, Event.PLANNED) for vm in made),
            free=[vm.key for vm in taken],
            make=claims_of(self.context, vms),
        )

    def _revoke(self, attempt: Attempt, reason: str) -> None:
        self.state.move(Change(attempt.revoking("revoked", reason), Event.IMPOSSIBLE, reason))

    def _block(self, attempt: Attempt, blockage: Blockage, why: str) -> None:
        """This attempt waits for capacity, and so do those behind it."""
        self.blocked, self.blockage = why, blockage
        self._tell(attempt, why)

    def _tell(self, attempt: Attempt, why: str) -> None:
        """Note why an attempt waits, once it has waited long enough for its user to wonder."""
        if attempt.note != why and self.state.now - attempt.since >= self.policy.patience:
            self.state.move(Change(replace(attempt, note=why), Event.NOTED, why))


def references(state: State, which: TemplateKey) -> int:
    """How many live VMs were, or are about to be, forked from a template."""
    return sum(vm.template == which for vm in state.vms_on(which.host))
