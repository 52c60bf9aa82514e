"""Which hosts take VMs of an attempt, and by when jobs end, in Unix time; infinity where nobody can tell.

A host takes none if it is drained, ends before the attempt's job has surely ended, or VMs of the image fail there. Jobs
end, and free what their VMs hold, by their time limits at the latest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from multiverse.core.context import Context
from multiverse.core.machines.saved import next_run_takes
from multiverse.core.model.basics import ClaimKey, CloneKind, Key, Size
from multiverse.core.model.job import ENDING_STATES, WAITING_STATES, Attempt, AttemptState, JobState
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.saved import SAVING
from multiverse.core.model.vm import OfferState, TemplateState, Vm, VmState

A = AttemptState

STARTING = 5.0  # seconds that the scheduler takes to start a job once its nodes have joined, and we to see that
OVERDUE = 60.0  # Seconds after an expected end that has not come. Then nobody knows when it will come


class Release(NamedTuple):
    """What is free again on a host from a time on."""

    at: float
    size: Size
    steady: bool = True  # the time stays the same while nothing changes there, until it has come


def ends_by(context: Context, attempt: Attempt, kind: CloneKind | None = None) -> float:
    """By when the job has ended at the latest. If it waits, it is taken to start now, as clones of `kind`."""
    job = context.state.queue.jobs.get(attempt.job.job_id)
    if job is None or job.ref != attempt.job:
        return inf
    now, limit = context.now, inf if job.limit is None else job.limit
    match job.state:
        case JobState.PENDING:
            saved = context.state.saved_for(attempt.job)
            return _starts_by(context, attempt, kind) + (limit if saved is None else next_run_takes(saved, job))
        case JobState.RUNNING:
            # A row that is older than the job's start says nothing of it.
            start = context.unix(attempt.since) if attempt.state is A.ALLOCATED else now
            return expected(start + limit if job.ends is None else job.ends, now)
        case JobState.SUSPENDED:
            return inf
        case JobState.COMPLETING | JobState.ENDED:
            return now


def _starts_by(context: Context, attempt: Attempt, kind: CloneKind | None) -> float:
    """By when the job of an attempt runs whose VMs are being made, or would be from now on."""
    vms = context.state.vms_of(attempt)
    image, kind = context.image_of(attempt), vms[0].kind if vms else kind or CloneKind.INSTANT
    making = context.policy.takes(image, kind, context.world.forecast)
    waits = attempt.state in WAITING_STATES
    since = context.now if waits else context.unix(attempt.since)
    return max(context.now, since + (making if attempt.state is not A.SPAWNED else 0.0) + STARTING)


def expected(at: float, now: float) -> float:
    """An end that should have come counts as coming now, and no more once it is long overdue."""
    if at >= now:
        return at
    return now if now - at <= OVERDUE else inf


def frees_by(context: Context, vm: Vm) -> float:
    """By when the capacity that a VM claims is free again at the latest. Spares give way to jobs."""
    state, now, reclaim = context.state, context.now, context.policy.reclaim
    attempt = state.attempt_of(vm)
    if vm.leaving or vm.state is VmState.RETIRING:
        return expected(context.unix(vm.since) + reclaim, now)
    if vm.state is VmState.LOST:
        return inf
    if attempt is not None:
        if attempt.state in ENDING_STATES:
            grace = attempt.grace if attempt.state is A.WARNED else 0.0
            return expected(context.unix(attempt.since) + grace + 2 * reclaim, now)
        return ends_by(context, attempt) + reclaim
    if vm.is_spare and state.offer_of(vm) is not OfferState.TAKEN:
        return now + reclaim
    job = state.queue.jobs.get(vm.job_id)
    if vm.state is VmState.ORPHAN and job is not None and job.state is JobState.RUNNING and job.ends is not None:
        return expected(job.ends, now) + reclaim
    return inf


def _leaves(context: Context, vm: Vm, host: str) -> bool:
    """Whether a VM whose job runs is on its way off a host: it moves to another one, or is being saved."""
    if vm.state is VmState.MOVING:
        return vm.host == host
    return any(one.state in SAVING for one in context.state.saved_of(vm))


def releases_on(context: Context, host: str) -> list[Release]:
    """What is free again on a host and when, the earliest first. Templates that stay are left out."""
    state, found = context.state, []
    left_behind: defaultdict[int, float] = defaultdict(float)
    memory: dict[int, int] = {}
    for vm in state.vms_on(host):
        leaves = _leaves(context, vm, host)
        at = context.now + context.policy.reclaim if leaves else frees_by(context, vm)
        attempt = state.attempt_of(vm)
        runs = vm.state is VmState.SERVING and attempt is not None and attempt.state is A.ALLOCATED
        steady = at == inf or (runs and not leaves)
        found.append(Release(at, claimed(context, vm.key, host), steady))
        place = vm.place_on(host)
        if (id_ := place.template_id) is not None and place.template and id_ not in state.templates:
            left_behind[id_] = max(left_behind[id_], at)
            memory[id_] = place.template.size.memory
    found += (Release(at, Size(0, memory[id_], 0), steady=False) for id_, at in left_behind.items())
    for template in state.templates_on(host):
        if template.state is TemplateState.RETIRING:
            at = expected(context.unix(template.since) + context.policy.reclaim, context.now)
            found.append(Release(at, claimed(context, template.key, host), steady=False))
    return sorted(found)


def claimed(context: Context, owner: Key, host: str) -> Size:
    claim = context.state.claims.get(ClaimKey(owner, host))
    return claim.size if claim else Size(0, 0)


def total(sizes: Iterable[Size]) -> Size:
    return sum(sizes, Size(0, 0))


def for_attempt(context: Context, attempt: Attempt) -> Context:
    """The context without hosts that end before the attempt's job, that it may not use, or that are avoided."""
    state = context.state
    if state.closing or state.leases:
        ends = surely_ends_by(context, attempt)
        drained = {name for name in state.closing if state.drains[name].begins < ends}
        context = replace(context, without=frozenset(drained | _unfit_leases(context, attempt, ends)))
    return context.without_avoided(context.image_of(attempt)) if state.faults else context


def _unfit_leases(context: Context, attempt: Attempt, ends: float) -> set[str]:
    """The leased hosts that the job may not use: they may end before it and it could not be queued again."""
    if not context.state.leases:
        return set()
    may = may_be_preempted(context, attempt)
    return {
        lease.name
        for lease in context.state.leases.values()
        if (lease.ends is not None and lease.ends < ends)
        or not (may or context.policy.lease_from(lease.spec.partition).preemptable_ok)
    }


def may_be_preempted(context: Context, attempt: Attempt) -> bool:
    """Whether the job may be on a host that can be taken away: it can be queued again, and has a time limit."""
    job = context.state.queue.jobs.get(attempt.job.job_id)
    return job is not None and job.requeues and job.limit is not None


def surely_ends_by(context: Context, attempt: Attempt) -> float:
    """By when the job and its VMs are surely gone if it is admitted now; infinity if nobody can tell."""
    return ends_by(context, attempt) + context.policy.reclaim


def avoided_hosts(context: Context, image: str) -> list[Reason]:
    names = sorted(context.avoided & context.in_sight.keys())
    return [Why.AVOIDED_HOST(why_avoided(context, name, image), host=name) for name in names]


def why_avoided(context: Context, host: str, image: str) -> Reason:
    fault = context.state.faults[image][host]
    if context.now < fault.until:
        return Why.FAILS_UNTIL(fault.reason, until=fault.until, image=image)
    return Why.FAILED_TRIED(fault.reason, image=image)


def drained_hosts(context: Context) -> list[Reason]:
    """What is said of the hosts in sight that take no VM of an attempt, each with why. Empty if there are none."""
    state, found = context.state, []
    leased = state.leased
    for name in sorted((state.closed | context.without) & context.in_sight.keys()):
        if name in state.drains:
            found.append(Why.THIS_HOST(said(state.drains[name].reason), host=name))
        elif name in leased:
            found.append(Why.THIS_HOST(Why.LEASE_MAY_END(), host=name))
    return found
