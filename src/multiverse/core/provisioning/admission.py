"""Admission: may a queued attempt start now? Admit, wait or revoke, always with a reason.

Attempts are considered in the scheduler's order. The first one that waits for capacity blocks those behind it, so that
nothing overtakes it for ever; one that waits for something of its own (its template, its back-off) or for a limit of
the scheduler's blocks no other.

Each attempt is checked once, and again when it, its job or the hosts change:

 1. The request cannot be served at all: revoke.
 2. No host that makes such clones could ever hold the job: revoke, or set it aside while there is a host that might.

Then the cases, in the order in which `Admission.consider` tries them, for attempts whose jobs are eligible:

 3. The attempt is in its back-off: nothing is decided.
 4. An earlier run of the job may still go on: wait.
 5. A limit of the scheduler's is used up: wait.
 6. An earlier job waits for capacity: wait behind it.
 7. There surely is no such user: revoke. The name service has not said yet who the user is: wait. In the first two
    seconds nothing is decided about those behind it either.
 8. A joined spare fits: take it.
 9. As many VMs are being made as may be: wait, and block.
10. No host can make its VMs now, for want of a template: wait; block if the template has no room.
11. The pace lets no clone be made now: wait.
12. There is no room, or no address: wait, and block.
13. Otherwise: admit.

Nothing is decided about attempts behind the one that blocks. What one attempt waits for, all those behind it that ask
for the same wait for too, so that a long queue is not looked at one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from multiverse.core.model import (
    LEAVING_STATES,
    WAITING_STATES,
    Attempt,
    AttemptState,
    CloneKind,
    Job,
    Key,
    OfferState,
    Request,
    Size,
    Vm,
    VmState,
)
from multiverse.core.provisioning.capacity import Blockage, index_of, memory_beyond, must_keep, room_of
from multiverse.core.provisioning.clones import (
    Choice,
    choose_clones,
    claims_of,
    describe,
    may_fork,
    on_hosts_making,
    placed_by,
)
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.eviction import release_spares, retire_a_template
from multiverse.core.provisioning.inquiries import Inquiries
from multiverse.core.provisioning.making import NO_ADDRESS, Making, NoRoom
from multiverse.core.provisioning.obstacles import why_earlier_run, why_unfit
from multiverse.core.provisioning.pacing import Parent
from multiverse.core.provisioning.reasons import PASSED_OVER, FirstReasons
from multiverse.core.provisioning.sizes import template_claim, vm_claims
from multiverse.core.provisioning.spares import joined_for, withdraw
from multiverse.core.provisioning.templates import (
    node_request,
)
from multiverse.core.state import quarantine_on_error
from multiverse.core.transition import Change, Event

TOO_LITTLE = "of which others there leave too little"
"""Part of the reason of a job that waits for memory which others on the machine hold."""

_ADMITTED = tuple(s for s in AttemptState if s not in (*WAITING_STATES, AttemptState.ALLOCATED))
"""The states of attempts whose jobs may be counted by no limit of the scheduler's yet."""


def admit(context: Context) -> Blockage:
    """Plan the admission of whatever may start now, and say what keeps jobs waiting. Needs the scheduler and at least
    one source of the hypervisor; while they are unknown, all wait."""
    if context.world.scheduler is None or not context.world.sees_hosts:
        return Blockage.TURN
    return Admission(context).run()


@dataclass(frozen=True, slots=True)
class Waiting:
    """What all attempts of one shape wait for. `paced`: for the pace of clones of that parent."""

    reason: str
    paced: Parent | None = None


class Admission:
    """One round of admission: the queue, what is free, and what has been promised so far."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.state, self.policy, self.hosts = context.state, context.policy, context.hosts
        self.queue = context.state.queue
        self.room = room_of(context)
        self.making = Making(context, self.room)
        self.limits = self._limits_left()
        self.orphaned = {vm.job_id: vm for vm in self.state.vms_in(VmState.ORPHAN, *LEAVING_STATES) if vm.job_id}
        self.promised: set[int] = set()  # spares that jobs wait for until they are withdrawn from other jobs
        self.blocked = ""  # why the first job that waits for capacity waits
        self.blockage = Blockage.NONE
        self.inquiries = Inquiries(self.state, context.world)
        self.undecided = False  # about those that come next, until the name service has had its time
        self.reasons = FirstReasons(self.queue)
        self.alike: dict[int, Waiting] = {}  # what all attempts of a shape wait for
        self._beyond: dict[tuple[Request, CloneKind, bool], str] = {}
        self._unfit: dict[Request, tuple[str, bool]] = {}

    def run(self) -> Blockage:
        """Consider the queue, up to the attempt that blocks it."""
        self.state.waiting.clear()  # each round of a pass decides anew
        self.state.wanted = None
        for attempt_id in self.queue.take_unchecked():
            with quarantine_on_error(self.state, Key("attempt", attempt_id)):
                self.check(self.state.attempts[attempt_id])
        behind = 0
        for rank, attempt_id in self.queue.candidates.entries():
            if self.undecided or (self.blocked and (self.reasons.full or behind >= PASSED_OVER)):
                break
            behind += bool(self.blocked)
            if waiting := self.alike.get(self.queue.shape_of(attempt_id)):
                self._wait_alike(rank, attempt_id, waiting)
                continue
            with quarantine_on_error(self.state, Key("attempt", attempt_id)):
                self.consider(self.state.attempts[attempt_id])
        if self.undecided:
            return Blockage.TURN  # and what was said of the first jobs still holds
        self.state.reasons = self.reasons.of(self.state.attempts)
        return self.blockage

    def _wait_alike(self, rank: int, attempt_id: int, waiting: Waiting) -> None:
        self.reasons.add(rank, attempt_id, self.blocked or waiting.reason)
        if waiting.paced:
            self.state.waiting[waiting.paced] += self.state.attempts[attempt_id].request.nodes

    def _limits_left(self) -> Counter[str]:
        """How much more each limit lets run beside what is admitted: the scheduler counts only what it has started."""
        left = Counter(self.context.scheduler.limits)
        if left:
            for attempt in self.state.attempts_in(*_ADMITTED):
                job = self.queue.jobs.get(attempt.job.job_id)
                if job is not None and job.ref == attempt.job:
                    left.subtract(dict(job.uses))
        return left

    # --- the cases ---------------------------------------------------------------------------------

    def check(self, attempt: Attempt) -> None:
        """Check whether the attempt could ever be served: cases 1 and 2."""
        job = self.queue.job_of(attempt.id)
        if job.problem:  # 1
            self._revoke(attempt, job.problem)
            return
        if attempt.request not in self._unfit:
            self._unfit[attempt.request] = why_unfit(self.context, attempt)
        why, hope = self._unfit[attempt.request]
        if why and not hope:  # 2
            self._revoke(attempt, why)
        elif why:
            self.queue.set_aside(attempt.id, why)

    def consider(self, attempt: Attempt) -> None:
        """Decide about one attempt: see the cases above."""
        job = self.queue.job_of(attempt.id)
        if self.state.now < attempt.not_before:  # 3
            return
        if why := why_earlier_run(self.state, attempt, self.orphaned):  # 4
            self._tell(attempt, why)
        elif why := self._limit_reached(job):  # 5
            self._wait(attempt, why)
        elif self.blocked:  # 6
            self._tell(attempt, self.blocked)
        elif self.context.world.user_known_since(attempt.uid) == float("inf"):  # 7
            self._refuse_or_ask(attempt)
        elif spare := self._joined_spare(attempt):  # 8
            self.limits.subtract(dict(job.uses))
            self._take_joined(attempt, spare)
        elif self._is_turn_over(attempt):  # 9
            self._block(attempt, Blockage.TURN, "waiting for a turn: as many VMs as may be made at once are being made")
        elif self._provision(attempt, choose_clones(self.context, attempt)):  # 10 to 13
            self.limits.subtract(dict(job.uses))

    def _limit_reached(self, job: Job) -> str:
        """Case 5."""
        limit = next((limit for limit, count in job.uses if count > self.limits[limit]), "")
        return f"held back by {limit}" if limit else ""

    def _refuse_or_ask(self, attempt: Attempt) -> None:
        """Case 7: the job's user is not known to exist. The user may have been added since an older answer."""
        if (user := (self.context.world.users or {}).get(attempt.uid)) and user.began > attempt.since:
            self._revoke(attempt, f"{user.reason}: its job cannot run")
        elif self.inquiries.ask_patiently(attempt.uid):
            self.undecided = True
        else:
            self.queue.await_user(attempt.id, f"waiting until the name service says who uid {attempt.uid} is")

    def _joined_spare(self, attempt: Attempt) -> Vm | None:
        """Case 8: a node that is there already, if one fits that is promised to no other job."""
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
        """Case 9: whether as many VMs are being made as may be made at once."""
        starting = self.state.count_vms(VmState.PLANNED, VmState.STARTING)
        starting += sum(not vm.is_spare for vm in self.state.vms_in(VmState.PARKED))
        return bool(starting) and starting + attempt.request.nodes > self.policy.provisioning

    def _provision(self, attempt: Attempt, choice: Choice) -> bool:
        """Cases 10 to 13: hosts, spares, pace, room, addresses. Whether the attempt was admitted."""
        usable, why = self.making.usable_hosts(attempt, choice)
        if not usable:
            self._wait_for_template(attempt, choice, why)
            return False
        placed = self.making.place(attempt, choice, usable)
        if isinstance(placed, NoRoom):
            if placed.why == NO_ADDRESS:
                self._block(attempt, Blockage.ROOM, NO_ADDRESS)
            else:
                self._wait_for_room(attempt, choice, placed.claims, placed.why)
            return False
        self._admit(attempt, choice, *placed)
        return True

    def _wait_for_template(self, attempt: Attempt, choice: Choice, why: str) -> None:
        if not why and not (why := self._memory_of_others(attempt, choice)):
            # Its template needs room too, which no later job may take.
            image = self.context.image_of(attempt)
            able = on_hosts_making(image, choice.kind, choice.sizes)
            claims = able.map(lambda host, size: template_claim(size, host, image))
            why = self.room.why_full(claims, f"no host has room for the template of image {image}")
            self._block(attempt, self._make_room(attempt, 1, claims), why)
            return
        self._wait(attempt, why)

    def _wait_for_room(self, attempt: Attempt, choice: Choice, claims: Mapping[str, Size], why: str) -> None:
        """Case 12."""
        if paced := why:
            # Another kind of clone may be quicker for those behind it, where the kind is not asked for.
            asked = attempt.request.kind or self.policy.kind
            self._tell(attempt, paced) if asked is CloneKind.AUTO else self._wait(attempt, paced, self.making.paced)
        elif why := self._memory_of_others(attempt, choice):
            self._wait(attempt, why)
        else:
            why = self.making.template_elsewhere(attempt, choice)
            why = why or self.room.why_full(claims, "the hosts are full")
            self._block(attempt, self._make_room(attempt, attempt.request.nodes, claims), why)

    def _make_room(self, attempt: Attempt, count: int, claims: Mapping[str, Size]) -> Blockage:
        """What the first job in the queue waits for: if releasing spares is enough, only until they are gone."""
        if all(name in self.room.full for name in claims):  # nothing that could be released gives back enough disk
            return Blockage.ROOM
        if release_spares(self.context, self.context.image_of(attempt), count, claims):
            return Blockage.TURN
        retire_a_template(self.context, attempt)
        return Blockage.ROOM

    def _memory_of_others(self, attempt: Attempt, choice: Choice) -> str:
        """Why the attempt would have no room on empty hosts either, with nothing of ours on them: others on their
        machines have the memory, and no job behind it is to wait for that. Empty where no more is claimed than
        declared: there nobody looks at what others have. How much others hold is not known to the MiB: who was told
        this once is told so until there is some more than enough."""
        if all(one.host.overcommit.memory <= 1 for one in index_of(self.context).classes.values()):
            return ""
        lacking = (attempt.request, choice.kind) in self.state.lacking
        alike = (attempt.request, choice.kind, lacking)
        if alike not in self._beyond:
            self._beyond[alike] = self._memory_of_others_for(attempt, choice, lacking=lacking)
            (self.state.lacking.add if self._beyond[alike] else self.state.lacking.discard)(alike[:2])
        return self._beyond[alike]

    def _memory_of_others_for(self, attempt: Attempt, choice: Choice, *, lacking: bool) -> str:
        wanted = node_request(self.context, attempt, choice.kind)
        sizes = on_hosts_making(wanted.image, choice.kind, choice.sizes)
        frozen: Mapping[str, Size] = {}
        if choice.forks:
            frozen = sizes.map(lambda host, size: template_claim(size, host, wanted.image))
        claims = vm_claims(wanted, sizes, self.hosts, self.policy)
        floors = memory_beyond(self.context, claims, frozen, attempt.request.nodes, margin=lacking)
        return f"waiting for memory: {must_keep(floors, 'keep')}, {TOO_LITTLE}" if floors is not None else ""

    # --- what is decided ---------------------------------------------------------------------------

    def _admit(self, attempt: Attempt, choice: Choice, taken: list[Vm], made: list[Vm]) -> None:
        """One move: the attempt is claimed with all its VMs, spares that it takes and VMs that are to be made."""
        vms = (*taken, *made)
        before = "".join(f", {vm.pool} before" for vm in taken[:1])
        story = describe(choice, vms, before + placed_by(self.context, attempt, choice, made))
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

    def _wait(self, attempt: Attempt, why: str, paced: Parent | None = None) -> None:
        """All attempts of this shape that come later wait for the same."""
        self.alike[self.queue.shape_of(attempt.id)] = Waiting(why, paced)
        self._tell(attempt, why)

    def _tell(self, attempt: Attempt, why: str) -> None:
        self.reasons.add(self.queue.job_of(attempt.id).rank, attempt.id, why)
