"""Admission: may a queued attempt start now? Admit, wait or revoke, always with a reason.

Attempts are considered in the scheduler's order. The first one that waits for capacity blocks the attempts behind it,
unless they do not delay it by the time limits. One that waits for its template, back-off or a limit blocks no other.
Jobs that may be moved here from a partition of physical nodes come last. Instead of being revoked they are set aside.

Each attempt is checked once, and again when it, its job or the hosts change:

 1. The request cannot be served at all: revoke.
 2. No host that takes VMs and makes such clones could ever hold the job: revoke, or set it aside while another might.

Then the cases, in the order in which `Admission.consider` tries them, for attempts whose jobs are eligible:

 3. The attempt is in its back-off: nothing is decided.
 4. An earlier run of the job may still go on, or the job was evicted for another one that still waits: wait.
 5. A limit of the scheduler's is used up, or a reservation of the scheduler's keeps all nodes: wait.
 6. It would fit only on hosts that are to be drained before it has surely ended: wait.
 7. An earlier job waits for capacity: wait behind it; but start ahead of it if it waits for room, and is not delayed by
    that (`backfill`), and 9 to 13 do not say otherwise.
 8. There surely is no such user: revoke. The name service has not said yet who the user is: wait. In the first two
    seconds nothing is decided about those behind it either.
 9. A joined spare fits: take it. A job that was saved is restored instead, as soon as a host has room.
10. As many VMs are being made as may be: wait, and block.
11. No host can make its VMs now, for want of a template: wait; block if the template has no room.
12. The pace lets no clone be made now: wait.
13. There is no room, or no address: wait, and block.
14. Otherwise: admit.

Before all others go saved jobs whose states are in the memory of a host: they take no room.

Behind the attempt that blocks, only a limited number is looked at. Attempts that ask for the same wait for the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from multiverse.core.admission.backfill import Overtaking, reserve, told_before
from multiverse.core.admission.obstacles import (
    ForeignMemory,
    release_spares,
    retire_a_template,
    why_not_restored_anywhere,
    why_unfit,
)
from multiverse.core.capacity.room import Blockage, HostLimits, others_on, room_of
from multiverse.core.capacity.sizes import template_claim, vm_claims
from multiverse.core.capacity.usable_hosts import for_attempt
from multiverse.core.clones.kinds import Choice, choose_clones, may_fork, node_request, on_hosts_making
from multiverse.core.clones.spares import joined_for
from multiverse.core.clones.supply import CloneSupply, NoRoom, claims_of, describe, placed_by
from multiverse.core.context import Context
from multiverse.core.machines.attempt import admit_attempt, revoke_attempt
from multiverse.core.machines.offer import withdraw_offer
from multiverse.core.machines.saved import limit_of_next_run
from multiverse.core.machines.vm import plan_vm, take_vm
from multiverse.core.model.basics import ClaimKey, CloneKind, Key, Size
from multiverse.core.model.host import Host
from multiverse.core.model.job import WAITING_STATES, Attempt, AttemptState, Job, Request, went_on
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import COMPLETE, Saved, SavedState
from multiverse.core.model.vm import OfferState, Vm, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Parent, why_stays
from multiverse.core.queue import BEHIND, PASSED_OVER, FirstReasons
from multiverse.core.state import State, quarantine_on_error, why_earlier_run
from multiverse.core.transition import Event

PATIENCE = 2.0  # seconds that the jobs behind wait for an answer, too, so that the order does not depend on it
ASKED_AHEAD = 20  # so many users at the head of the queue are asked for together


class UnknownUsers:
    """The users that one round of admission asks for. Since when each was asked for is kept in the state."""

    def __init__(self, state: State, world: World) -> None:
        self._state, self._world = state, world
        self._before: Mapping[int, float] = state.users_asked
        state.users_asked = {}
        for uid in state.queue.unknown_users:
            self.ask(uid)

    def ask_patiently(self, uid: int) -> bool:
        """Ask for a user whose turn it is. Whether those behind wait for the answer, too."""
        self.ask(uid)
        for _, attempt_id in self._state.queue.candidates.first(ASKED_AHEAD):
            other = self._state.attempts[attempt_id].uid
            if self._world.user_known_since(other) == float("inf"):
                self.ask(other)
        return all(self._state.now - since < PATIENCE for since in self._state.users_asked.values())

    def ask(self, uid: int) -> None:
        self._state.users_asked.setdefault(uid, self._before.get(uid, self._state.now))


LOOK_AGAIN = 5.0  # seconds after which jobs that could not go ahead of the first one are looked at again

_ADMITTED = tuple(s for s in AttemptState if s not in (*WAITING_STATES, AttemptState.ALLOCATED))
"""The states of attempts whose jobs may be counted by no limit of the scheduler's yet."""


def admit(context: Context) -> Blockage:
    """Plan the admission of whatever may start now, and say what keeps jobs waiting."""
    if context.world.scheduler is None or not context.world.sees_hosts:
        return Blockage.TURN
    if context.state.queue.is_idle:
        nothing_waits(context.state)
        return Blockage.NONE
    return Admission(context).run()


def nothing_waits(state: State) -> None:
    """What a round of admission comes to that has nobody to consider, at the cost of none."""
    state.waiting.clear()
    state.wanted, state.users_asked, state.reasons, state.blocking, state.promised = None, {}, {}, None, {}


@dataclass(frozen=True, slots=True)
class Waiting:
    """What all attempts of one shape wait for; `paced`: the parent whose pace they wait for."""

    reason: Reason
    paced: Parent | None = None


class Admission:
    """One round of admission: the queue, what is free, and what has been promised so far."""

    def __init__(self, context: Context) -> None:
        self.whole = self.context = context  # `context`: with the hosts that are open to the attempt considered
        self.state, self.policy = context.state, context.policy
        self.queue = context.state.queue
        self.room = room_of(context)
        self.supply = CloneSupply(context, self.room)
        self.limits = self._limits_left()
        self.promised: set[int] = set()  # spares that jobs wait for until they are withdrawn from other jobs
        self.blocked: Reason | None = None  # why the first job that waits for capacity waits
        self.blocking: int | None = None  # its attempt
        self.blockage = Blockage.NONE
        self.overtaking: Overtaking | None = None  # what may start ahead of that job
        self.promises: dict[int, float] = {}  # by when it starts
        self.before: dict[int, Reason] = {}  # what was said of the others, if that still holds
        self.unknown_users = UnknownUsers(self.state, context.world)
        self.undecided = False  # nothing about later attempts, until the name service has had its time
        self.reasons = FirstReasons(self.queue)
        self.alike: dict[tuple[object, ...], Waiting] = {}  # what all attempts wait for that have the same `_kin`
        self.foreign_memory = ForeignMemory()
        self._unfit: dict[Request, tuple[Reason | None, bool]] = {}

    @property
    def hosts(self) -> Mapping[str, Host]:
        return self.context.hosts

    def run(self) -> Blockage:
        self.state.waiting.clear()  # each round of a pass decides anew
        before = len(self.state.moves)
        self.state.wanted = None
        for attempt_id in self.queue.take_unchecked():
            with quarantine_on_error(self.state, Key("attempt", attempt_id)):
                self.check(self.state.attempts[attempt_id])
        self._take_from_memory()
        behind = 0
        for rank, attempt_id in self.queue.candidates.entries():
            told = self.reasons.full or behind >= PASSED_OVER
            enough = told and (self.overtaking is None or self.overtaking.is_over(behind))
            if self.undecided or (self.blocked and enough):
                break
            behind += bool(self.blocked)
            shape = self.queue.shape_of(attempt_id)
            self.context = self.supply.context = for_attempt(self.whole, self.state.attempts[attempt_id])
            if waiting := self.alike.get(self._kin(attempt_id)):
                self._wait_alike(rank, attempt_id, waiting)
                continue
            if self.overtaking is not None and self.blocked and self.overtaking.is_hopeless(attempt_id, shape):
                self.reasons.add(rank, attempt_id, self.blocked)
                continue
            with quarantine_on_error(self.state, Key("attempt", attempt_id)):
                self.consider(self.state.attempts[attempt_id])
        if self.undecided:
            return Blockage.TURN  # and what was said of the first jobs still holds
        self.state.reasons, self.state.blocking = self.reasons.of(self.state.attempts), self.blocking
        if self.blockage is not Blockage.TURN or not self.state.promised.keys() <= self.state.reasons.keys():
            self.state.promised = self.promises
        if self.overtaking is not None and len(self.state.moves) == before:
            first = self.overtaking.reservation.attempt
            self.state.looked = (self.state.touched.count, first, self.state.now + LOOK_AGAIN)
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
        if job.at_origin and (why := why_stays(job, self.policy)):
            self.queue.set_aside(attempt.id, why)
            return
        if saved := self.state.saved_for(attempt.job):  # it ran, and is never refused: it waits for other hosts
            if why := why_not_restored_anywhere(self.context, attempt, saved):
                self.queue.set_aside(attempt.id, why)
            return
        if job.problem:  # 1
            self._revoke(attempt, Why.PROBLEM(text=job.problem))
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
        if why := why_earlier_run(self.state, self.context.world, attempt) or self._gives_way(attempt):  # 4
            self._tell(attempt, why)
        elif attempt.origin and job.gated:
            return  # its own step sends it back to its partition
        elif why := self._held_back(attempt, job):  # 5, 6
            self._wait(attempt, why)
        elif self.overtaking is not None and not self.overtaking.is_over():  # 7
            self._overtake(attempt, job, self.overtaking)
        elif self.blocked:
            self._tell(attempt, self.before.get(attempt.id, self.blocked))
        elif self.context.world.user_known_since(attempt.uid) == float("inf"):  # 8
            self._refuse_or_ask(attempt)
        elif saved := self.state.saved_for(attempt.job):
            self._restore(attempt, saved)
        elif spare := self._joined_spare(attempt):  # 9
            self.limits.subtract(dict(job.uses))
            self._take_joined(attempt, spare)
        elif self._is_turn_over(attempt):  # 10
            # What its user was told of its start still holds.
            told = self.state.reasons.get(attempt.id) if attempt.id in self.state.promised else None
            self._block(attempt, Blockage.TURN, Why.TURN(), told)
        elif self._provision(attempt, choose_clones(self.context, attempt)):  # 11 to 14
            self.limits.subtract(dict(job.uses))

    def _gives_way(self, attempt: Attempt) -> Reason | None:
        """Case 4: the job was evicted for an urgent one that is still the first that waits for room."""
        last = attempt.evictions[-1].why if attempt.evictions else None
        if last is None or last.kind is not Why.PREEMPTED:
            return None
        first = self.state.attempts.get(self.state.blocking) if self.state.blocking is not None else None
        waits = first is not None and first.job.job_id == last.jobs[0] and first.id in self.queue.candidates
        return Why.GIVES_WAY(job=last.jobs[0]) if waits else None

    def _limit_reached(self, job: Job, first: Job | None = None) -> Reason | None:
        """Case 5. What the first job that waits for room will use of a limit is left to it."""
        kept = dict(first.uses) if first else {}
        limit = next((limit for limit, count in job.uses if count > self.limits[limit] - kept.get(limit, 0)), "")
        return Why.LIMIT(limit=limit) if limit else None

    def _held_back(self, attempt: Attempt, job: Job) -> Reason | None:
        """Cases 5 and 6."""
        if why := self._limit_reached(job):
            return why
        if kept := self.context.kept_by(job):
            return kept.why()
        if not self.context.without:
            return None
        saved = self.state.saved_for(attempt.job)
        return why_not_restored_anywhere(self.context, attempt, saved) if saved else why_unfit(self.context, attempt)[0]

    def _refuse_or_ask(self, attempt: Attempt) -> None:
        """Case 8: the job's user is not known to exist. The user may have been added since an older answer."""
        if (user := (self.context.world.users or {}).get(attempt.uid)) and user.began > attempt.since:
            self._revoke(attempt, Why.NO_USER(text=user.reason))
        elif self.unknown_users.ask_patiently(attempt.uid):
            self.undecided = True
        else:
            self.queue.await_user(attempt.id, Why.USER_AWAITED(uid=attempt.uid))

    def _joined_spare(self, attempt: Attempt, kept: Collection[int] = ()) -> Vm | None:
        """Case 9: a node that is there already, if one fits that is promised to no other job, nor `kept` for one."""
        if not self.policy.pools or not may_fork(self.context, attempt):
            return None
        return joined_for(self.context, attempt, self.promised.union(kept))

    def _take_joined(self, attempt: Attempt, vm: Vm, ahead: Reason | None = None) -> None:
        """Admit the attempt to a node that is there already. An offered node is first withdrawn from others."""
        offer = self.state.offers.get(vm.id)
        if offer is not None and offer.state in (OfferState.OPEN, OfferState.CLOSING):
            self.promised.add(vm.id)
            if offer.state is OfferState.OPEN:
                self.state.move(withdraw_offer(offer, Why.IS_TO_HAVE(job=attempt.job.job_id)))
            return
        self._admit(replace(attempt, pin=vm.feature), Choice(CloneKind.INSTANT), [vm], [], ahead)

    def _restore(self, attempt: Attempt, saved: Saved) -> None:
        """Case 9 for a job that was saved."""
        if why := self._why_not_restored(attempt, saved):
            self._tell(attempt, why)
        elif self._is_turn_over(attempt):
            self._block(attempt, Blockage.TURN, Why.TURN())
        elif isinstance(vms := self.supply.restore(attempt, saved), NoRoom):
            if vms.why:
                self._tell(attempt, vms.why)
            else:
                why = self.room.why_full(vms.claims, Why.FULL(per_host=attempt.request.per_host))
                self._block(attempt, self._make_room(attempt, len(saved.parts), vms.claims), why)
        else:
            self._admit_restored(attempt, saved, vms)

    def _why_not_restored(self, attempt: Attempt, saved: Saved) -> Reason | None:
        """Why its state cannot be used now, on whatever host."""
        if saved.state is SavedState.HOLDING:
            return Why.SAVED_HOLDING(saved.reason)
        if saved.state not in COMPLETE:
            return Why.BEING_SAVED()
        for part in saved.parts:
            if part.vm_name in self.state.vm_named:  # its node may still be there, and the new one has the same name
                return Why.EARLIER_RUN_ENDS(vm=part.vm_name)
        if not saved.holds(attempt.request):
            return Why.SAVED_TOO_SMALL(cpus=saved.node_size.cpus, memory=saved.node_size.memory)
        return None

    def _admit_restored(self, attempt: Attempt, saved: Saved, vms: list[Vm]) -> None:
        job = self.queue.job_of(attempt.id)
        story, uses = Why.RESTORED(hosts=dict.fromkeys(vm.host for vm in vms)), dict(job.uses)
        evictions = attempt.evictions if saved.checkpoint else went_on(saved.evictions, self.context.now - saved.begun)
        limit = limit_of_next_run(saved, job)
        going_on = replace(attempt, runs=saved.runs + 1, limit=limit, evictions=evictions)
        kept = [ClaimKey(saved.key, saved.kept)] if saved.kept else []
        self.state.move(
            admit_attempt(going_on, story), *map(plan_vm, vms), make=claims_of(self.context, vms), free=kept
        )
        self.limits.subtract(uses)

    def _take_from_memory(self) -> None:
        """Jobs whose states are in the memory of a host go on before all others: they take no room, and the first job
        in the queue may wait for theirs."""
        for saved in self.state.kept_in_memory():
            waiting = (one for one in self.state.attempts_of_job(saved.job.job_id) if saved.is_for(one.job))
            attempt = next((one for one in waiting if one.id in self.queue.candidates), None)
            if attempt is None or self._why_not_restored(attempt, saved) or self._is_turn_over(attempt):
                continue
            self.context = self.supply.context = for_attempt(self.whole, attempt)
            early = self.state.now < attempt.not_before or why_earlier_run(self.state, self.context.world, attempt)
            if early or self._held_back(attempt, self.queue.job_of(attempt.id)):
                continue
            with quarantine_on_error(self.state, Key("attempt", attempt.id)):
                if self.context.world.user_known_since(attempt.uid) == inf:  # nobody else may ever ask
                    self._refuse_or_ask(attempt)
                elif not isinstance(vms := self.supply.restore(attempt, saved), NoRoom):
                    self._admit_restored(attempt, saved, vms)

    def _is_turn_over(self, attempt: Attempt) -> bool:
        """Case 10: whether as many VMs are being made as may be made at once."""
        starting = self.state.count_vms(VmState.PLANNED, VmState.STARTING)
        starting += sum(not vm.is_spare for vm in self.state.vms_in(VmState.PARKED))
        return bool(starting) and starting + attempt.request.nodes > self.policy.provisioning

    def _provision(self, attempt: Attempt, choice: Choice) -> bool:
        """Cases 11 to 14: hosts, spares, pace, room, addresses. Whether the attempt was admitted."""
        usable, why = self.supply.usable_hosts(attempt, choice)
        if not usable:
            self._wait_for_template(attempt, choice, why)
            return False
        placed = self.supply.place(attempt, choice, usable)
        if isinstance(placed, NoRoom):
            if placed.why and placed.why.kind is Why.NO_ADDRESS:
                self._block(attempt, Blockage.ROOM, placed.why)
            else:
                self._wait_for_room(attempt, choice, placed.claims, placed.why)
            return False
        self._admit(attempt, choice, *placed)
        return True

    def _wait_for_template(self, attempt: Attempt, choice: Choice, why: Reason | None) -> None:
        if not why and not (why := self.foreign_memory.why(self.context, attempt, choice)):
            # Its template needs room too, which no later job may take.
            image = self.context.image_of(attempt)
            able = on_hosts_making(image, choice.kind, choice.sizes)
            claims = able.map(lambda host, size: template_claim(size, host, image))
            why = self.room.why_full(claims, Why.NO_TEMPLATE_ROOM(image=image))
            self._block(attempt, self._make_room(attempt, 1, claims), why)
            return
        self._wait(attempt, why)

    def _wait_for_room(self, attempt: Attempt, choice: Choice, claims: Mapping[str, Size], why: Reason | None) -> None:
        if paced := why:
            # Another kind of clone may be quicker for those behind it, where the kind is not asked for.
            asked = attempt.request.kind or self.policy.kind
            self._tell(attempt, paced) if asked is CloneKind.AUTO else self._wait(attempt, paced, self.supply.paced)
        elif why := self.foreign_memory.why(self.context, attempt, choice):
            self._wait(attempt, why)
        else:
            why = self.supply.template_elsewhere(attempt, choice)
            why = why or self.room.why_full(claims, Why.FULL(per_host=attempt.request.per_host))
            blockage = self._make_room(attempt, attempt.request.nodes, claims)
            room = blockage is Blockage.ROOM and not self.room.all_full(claims)
            expected = self._let_overtake(attempt, choice) if room else None
            self._block(attempt, blockage, why, why.also(expected))

    def _let_overtake(self, attempt: Attempt, choice: Choice) -> Reason | None:
        """Jobs behind this attempt may start ahead of it, unless they delay it. Says when it is expected to start."""
        if self.policy.backfill is None:
            return None
        count, first, until = self.state.looked
        if (count, first) == (self.state.touched.count, attempt.id) and self.state.now < until:
            # Nothing could go ahead, and nothing has changed since.
            self.before, self.promises = self.state.reasons, self.state.promised
            return self._expected(attempt)
        reservation = reserve(self.context, self.room, attempt, choice)
        self.overtaking = Overtaking(self.context, self.room, reservation, self.policy.backfill)
        if reservation.at < inf:
            self.promises[attempt.id] = told_before(self.context, reservation)
        return self._expected(attempt)

    def _expected(self, attempt: Attempt) -> Reason | None:
        return Why.EXPECTED(at=self.promises[attempt.id]) if attempt.id in self.promises else None

    def _overtake(self, attempt: Attempt, job: Job, overtaking: Overtaking) -> None:
        """Case 7: start the attempt ahead of the first one that waits for room, without a delay for that."""
        shape = self.queue.shape_of(attempt.id)
        if self.state.saved_for(attempt.job):
            pass  # its room is not what jobs of its shape take
        elif self.context.world.user_known_since(attempt.uid) == inf:
            self.unknown_users.ask(attempt.uid)
        elif not self._is_turn_over(attempt):
            overtaking.looked_at += 1
            choice = choose_clones(self.context, attempt)
            in_time = overtaking.ends_in_time(attempt, choice.kind)
            why = None if in_time else self._limit_reached(job, overtaking.reservation.job)
            why = why or self._start_ahead(attempt, choice, overtaking, in_time=in_time)
            if not why:
                self.limits.subtract(dict(job.uses))
                overtaking.count(attempt)
                return
            overtaking.refuse(shape, job, in_time=in_time)
            self._tell(attempt, why)
            return
        self._tell(attempt, self.blocked or BEHIND)

    def _start_ahead(self, attempt: Attempt, choice: Choice, overtaking: Overtaking, *, in_time: bool) -> Reason | None:
        """Admit the attempt if there is room for it, beside what is kept unless it ends in time; or why not."""
        ahead = overtaking.why_allowed(in_time=in_time)
        kept = () if in_time else overtaking.spares_kept()
        if spare := self._joined_spare(attempt, kept):
            self._take_joined(attempt, spare, ahead)
            return None
        claims = vm_claims(node_request(self.context, attempt, choice.kind), choice.sizes, self.hosts, self.policy)
        may = partial(overtaking.may_build, claims, in_time=in_time)
        usable, why = self.supply.usable_hosts(attempt, choice, may)
        if not usable:
            return why or self.blocked
        with nullcontext() if in_time else overtaking.kept_free():
            placed = self.supply.place(attempt, choice, usable, kept, may)
        if not isinstance(placed, NoRoom):
            self._admit(attempt, choice, *placed, ahead)
            return None
        if placed.why:
            return placed.why
        why = self.supply.template_elsewhere(attempt, choice, may)
        if why or in_time or self.reasons.full:
            return why or self.blocked
        return overtaking.why_refused(attempt.request.nodes, placed.claims) or self.blocked

    def _make_room(self, attempt: Attempt, count: int, claims: Mapping[str, Size]) -> Blockage:
        """What the first job in the queue waits for: if releasing spares is enough, only until they are gone."""
        if self.room.all_full(claims):  # nothing that could be released gives back enough disk
            return Blockage.ROOM
        hosts = HostLimits(limit=others_on(self.state, attempt))
        if release_spares(self.context, self.context.image_of(attempt), count, claims, hosts):
            return Blockage.TURN
        retire_a_template(self.context, attempt)
        return Blockage.ROOM

    # --- what is decided ---------------------------------------------------------------------------

    def _admit(
        self, attempt: Attempt, choice: Choice, taken: list[Vm], made: list[Vm], ahead: Reason | None = None
    ) -> None:
        """Claim the attempt with all its VMs in one move: spares that it takes, and VMs that are made."""
        vms = (*taken, *made)
        placed = {"pool": taken[0].pool if taken else None, **placed_by(self.context, attempt, choice, made)}
        story = Why.AND(describe(choice, vms, **placed), ahead)
        self.state.move(
            admit_attempt(attempt, story),
            *(take_vm(vm, attempt, Why.FOR_JOB(job=attempt.job.job_id)) for vm in taken),
            *map(plan_vm, made),
            free=[key for vm in taken for key in vm.claim_keys],
            make=claims_of(self.context, vms),
        )

    def _revoke(self, attempt: Attempt, reason: Reason) -> None:
        if attempt.origin:  # it needs no VM: it waits for physical nodes, as it was submitted
            self.queue.set_aside(attempt.id, reason)
        else:
            self.state.move(revoke_attempt(attempt, "revoked", Event.IMPOSSIBLE, reason))

    def _block(self, attempt: Attempt, blockage: Blockage, why: Reason, own: Reason | None = None) -> None:
        """This attempt waits for capacity, and so do those behind it. Its user is told its `own` reason."""
        self.blocked, self.blocking, self.blockage = why, attempt.id, blockage
        self._tell(attempt, own or why)

    def _wait(self, attempt: Attempt, why: Reason, paced: Parent | None = None) -> None:
        self.alike[self._kin(attempt.id)] = Waiting(why, paced)
        self._tell(attempt, why)

    def _kin(self, attempt_id: int) -> tuple[object, ...]:
        """Attempts with the same value wait for the same: their shape, closed hosts, reservation, and saved state."""
        job = self.queue.job_of(attempt_id)
        saved = self.state.saved_for(self.state.attempts[attempt_id].job) if self.state.saved else None
        return self.queue.shape_of(attempt_id), self.context.without, self.context.kept_by(job), saved and saved.id

    def _tell(self, attempt: Attempt, why: Reason) -> None:
        self.reasons.add(self.queue.job_of(attempt.id).rank, attempt.id, why)
