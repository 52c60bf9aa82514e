"""EASY backfill: which jobs may start although an earlier job waits for room. Pure.

The first job that waits for room has a *reservation*: hosts, from the earliest time at which all its VMs fit there by
the time limits. A later job may start on any other host; on a host of the reservation if it ends before that time, or
fits beside the first job. So none delays the first job, as long as time limits hold. (Lifka, "The ANL/IBM SP scheduling
system", 1995; here for several resources and hosts, as in Slurm's sched/backfill.) If no such time is known, the first
job may be overtaken a limited number of times: its row counts them (decision 38).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf

from multiverse.core.capacity.room import Room
from multiverse.core.capacity.sizes import template_claim, vm_claims
from multiverse.core.capacity.usable_hosts import Release, claimed, ends_by, releases_on, total
from multiverse.core.capacity_index import HostSlots, Slot, SlotTable, changed
from multiverse.core.clones.kinds import Choice, node_request, on_hosts_making, template_key
from multiverse.core.context import Context
from multiverse.core.machines.attempt import overtake_attempt
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.job import Attempt, AttemptState, Job
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import TemplateKey, TemplateState
from multiverse.core.policy import Backfill

_LATER = 60.0  # seconds by which the first job may have to wait longer than its user was told before it is told anew
_PASSED = 10  # jobs that are passed at most for each job that may be looked at
_KEPT = 8  # of so many different requests it is remembered when hosts will have room for them
_UNBUILT = 5.0  # seconds by which a slot may be too early where nobody builds the template: it is not computed anew
_SOONER = 300.0  # seconds by which it starts sooner at least, and a quarter of what is left, to be told anew


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the first job that waits for room is to have."""

    attempt: int
    job: Job
    at: float  # Unix time from when on; infinity: nobody can tell, and nothing is held
    held: Mapping[str, Size] = field(default_factory=dict)  # by host
    emptied: frozenset[str] = frozenset()  # hosts where no other VM may be then


def reserve(context: Context, room: Room, attempt: Attempt, choice: Choice) -> Reservation:
    state, job, nodes = context.state, context.state.queue.job_of(attempt.id), attempt.request.nodes
    wanted = node_request(context, attempt, choice.kind)
    able = on_hosts_making(wanted.image, choice.kind, choice.sizes)
    claims = vm_claims(wanted, able, context.hosts, context.policy)
    asked = (wanted, attempt.request.account, nodes, attempt.request.per_host, context.without)
    table = state.slots.pop(asked, None) or SlotTable()
    state.slots[asked] = table
    while len(state.slots) > _KEPT:
        del state.slots[next(iter(state.slots))]
    compute = partial(_slots_on, context, room, attempt, choice, claims)
    table.refresh(claims, state.touched, context.now, compute, room.tight)
    found = table.first(nodes, room.full)
    at = max(context.now, found[-1].at) if len(found) == nodes else inf
    if at == inf:
        return Reservation(attempt.id, job, inf)
    held = {
        slot.host: total([slot.template, *(claims[one.host] for one in found if one.host == slot.host)])
        for slot in found
    }
    return Reservation(attempt.id, job, at, held, frozenset(slot.host for slot in found if slot.emptied))


def _slots_on(
    context: Context, room: Room, attempt: Attempt, choice: Choice, claims: Mapping[str, Size], host: str
) -> HostSlots:
    """When the attempt's VMs would have room on the host, or as many of them as ever will."""
    if claims[host].cpus > context.in_sight[host].capacity.cpus:
        return HostSlots()  # however many CPUs may be claimed together, one VM has no more than are declared
    delay, build, now = 0.0, Size(0, 0), context.now
    right_for = inf  # seconds, because of the template
    if choice.forks:
        row = context.state.template_for(template_key(context, attempt, host, choice.sizes[host]))
        delay = context.policy.template_seconds
        match row.state if row else None:
            case TemplateState.READY:
                delay = 0.0
            case TemplateState.BUILDING if row:
                delay = right_for = max(0.0, context.unix(row.since) + delay - now)
            case None:
                right_for = _UNBUILT
                build = template_claim(choice.sizes[host], context.hosts[host], context.image_of(attempt))
            case _:
                return HostSlots()  # it is broken, or on its way out: nobody can tell when there is another
    free = changed(room.free[host], build, -1)
    releases = releases_on(context, host)
    last = max((one.at for one in releases), default=now)
    cleared = _cleared(context, attempt, choice, host, last)
    slots: list[Slot] = []
    for step, (at, size) in enumerate([(now, Size(0, 0)), *(one[:2] for one in releases), cleared[:2]]):
        free = changed(free, size, 1)
        held = min(attempt.request.nodes, _holds(free, claims[host]))
        more = attempt.request.most_on_a_host(held) - len(slots)
        slots += [Slot(max(at, now) + delay, host, build, step > len(releases))] * more
    steady = all(one.steady for one in releases) and bool(releases or not cleared.size.memory)
    if not steady or (delay and releases):
        return HostSlots(slots, now)
    return HostSlots(slots, min((one.at for one in releases), default=now + right_for if delay else inf))


def _cleared(context: Context, attempt: Attempt, choice: Choice, host: str, last: float) -> Release:
    """What templates in the way give back, and when: one after the other is retired once the host has no VM."""
    mine = template_key(context, attempt, host, choice.sizes[host]) if choice.forks else None
    others = [
        one
        for one in context.state.templates_on(host)
        if one.which != mine and one.state in (TemplateState.READY, TemplateState.BROKEN)
    ]
    at = max(last, context.now) + len(others) * context.policy.reclaim
    return Release(at, total(claimed(context, one.key, host) for one in others))


def _holds(free: Sequence[int], claim: Size) -> int:
    return max(0, min((have // want for have, want in zip(free, claim.amounts, strict=True) if want), default=0))


class Overtaking:
    """What may start ahead of the first job that waits for room, in one round of admission."""

    def __init__(self, context: Context, room: Room, reservation: Reservation, limits: Backfill) -> None:
        self.context, self.room, self.reservation, self.limits = context, room, reservation, limits
        self.looked_at = 0  # so many jobs behind the first one
        self._keeps = False  # whether the room lacks just now what the first job is to have
        self._refused: dict[int, float] = {}  # by shape: the shortest run that found no room
        self._most: tuple[int, int] | None = None  # the most CPUs, and the most memory, that any host had free

    def is_over(self, passed: int = 0) -> bool:
        """Whether nothing more may start ahead of the first job, once `passed` jobs behind it were looked at."""
        unbounded = self.reservation.at == inf and self._first.overtaken >= self.limits.overtakes
        return unbounded or self.looked_at >= self.limits.depth or passed >= _PASSED * self.limits.depth

    @property
    def _first(self) -> Attempt:
        return self.context.state.attempts[self.reservation.attempt]

    def count(self, attempt: Attempt) -> None:
        """The attempt was admitted ahead of the first one: count that where nobody knows when that one starts."""
        state, first = self.context.state, self._first
        if self.reservation.at == inf and state.attempts[attempt.id].state is AttemptState.CLAIMED:
            why = Why.OVERTAKEN(job=attempt.job.job_id, times=first.overtaken + 1, most=self.limits.overtakes)
            state.move(overtake_attempt(first, why))

    def ends_in_time(self, attempt: Attempt, kind: CloneKind) -> bool:
        """Whether the attempt's VMs, made now, are gone when the first job is to start."""
        return ends_by(self.context, attempt, kind) + self.context.policy.reclaim <= self.reservation.at < inf

    def is_hopeless(self, attempt_id: int, shape: int) -> bool:
        """Whether an attempt surely has no room: an equal one had none in this round, or no host has as much free."""
        job, state = self.context.state.queue.job_of(attempt_id), self.context.state
        if self._refused.get(shape, inf) <= (inf if job.limit is None else job.limit):
            return True
        if self._most is None:
            self._most = self.room.most_free()
        size = state.attempts[attempt_id].request.size
        # A spare that has joined needs no more room.
        return not self.context.policy.pools and (size.cpus > self._most[0] or size.memory > self._most[1])

    def refuse(self, shape: int, job: Job, *, in_time: bool) -> None:
        """Such a job found no room. Where it would end in time, no shorter one does."""
        least = 0.0 if in_time else inf if job.limit is None else job.limit
        self._refused[shape] = min(least, self._refused.get(shape, inf))

    @contextmanager
    def kept_free(self) -> Iterator[None]:
        """Meanwhile the room lacks what the first job is to have. Within another such time nothing more is kept."""
        if self._keeps:
            yield
            return
        kept = {host: self._kept(host) for host in self.reservation.held}
        for host, size in kept.items():
            self.room.take(host, size)
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False
            for host, size in kept.items():
                self.room.give(host, size)

    def _kept(self, host: str) -> Size:
        """What is free on a host now and has to be free when the first job is to start."""
        free, held = self.room.free[host], self.reservation.held[host]
        if host in self.reservation.emptied:
            extra = [0, 0, 0, 0]
        else:
            ending = total(one.size for one in releases_on(self.context, host) if one.at <= self.reservation.at)
            extra = changed(changed(free, ending, 1), held, -1)
        return Size(*(have - min(have, max(0, left)) for have, left in zip(free, extra, strict=True)))

    def may_build(self, claims: Mapping[str, Size], which: TemplateKey, *, in_time: bool) -> bool:
        """Whether there is room for a template, which stays, beside what is kept, and for a VM beside it."""
        template = template_claim(which.size, self.context.in_sight[which.host], which.image)
        both = template + claims[which.host]
        with self.kept_free():
            fits = self.room.fits(which.host, template if in_time else both)
        return fits and self.room.fits(which.host, both)

    def spares_kept(self) -> set[int]:
        """Spares on hosts of the reservation. They give way to it, so only a job that ends in time takes one."""
        return {vm.id for host in self.reservation.held for vm in self.context.state.vms_on(host) if vm.is_spare}

    def why_refused(self, nodes: int, claims: Mapping[str, Size]) -> Reason | None:
        """Why a job waits though there is room now: not beside what is kept."""
        chosen = self.room.place(nodes, claims)
        for host in chosen or ():
            self.room.give(host, claims[host])
        return Why.MAY_DELAY(job=self.reservation.job.ref.job_id) if chosen else None

    def why_allowed(self, *, in_time: bool) -> Reason:
        first, at = self.reservation.job.ref.job_id, self.reservation.at
        if at == inf:
            return Why.AHEAD_UNKNOWN(job=first)
        return (Why.AHEAD_IN_TIME if in_time else Why.AHEAD_BESIDE)(job=first, at=at)


def told_before(context: Context, reservation: Reservation) -> float:
    """When the first job starts, as its user is told: the last time again while that is nearly right."""
    state, at = context.state, reservation.at
    before = state.promised.get(reservation.attempt, inf)
    sooner = max(_SOONER, (before - context.now) / 4)
    keep = at <= before + _LATER and at >= before - sooner
    return before if keep and before < inf else at
