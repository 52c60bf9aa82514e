"""Which hosts take VMs of an attempt, and what is said of the others.

A host takes none if it is drained, if it is to be drained or given back before the attempt's job has surely ended, or
if VMs of the attempt's image fail there.
"""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.capacity.job_ends import ends_by
from multiverse.core.context import Context
from multiverse.core.model import Attempt, Reason, Why, said


def for_attempt(context: Context, attempt: Attempt) -> Context:
    """The context without the hosts that are to be drained before the attempt's job has surely ended, the leased ones
    that end before, or that it may not use, and those that are avoided for its image."""
    state = context.state
    if state.closing or state.leases:
        ends = surely_ends_by(context, attempt)
        drained = {name for name in state.closing if state.drains[name].begins < ends}
        context = replace(context, without=frozenset(drained | _unfit_leases(context, attempt, ends)))
    return context.without_avoided(context.image_of(attempt)) if state.faults else context


def _unfit_leases(context: Context, attempt: Attempt, ends: float) -> set[str]:
    """The leased hosts on which a job that ends by then may not be: their leases end before, or may end at any time and
    the job could not be queued again."""
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
    """Whether the attempt's job may be on a host that is taken away at any time: it can be queued again, and has a time
    limit."""
    job = context.state.queue.jobs.get(attempt.job.job_id)
    return job is not None and job.requeues and job.limit is not None


def surely_ends_by(context: Context, attempt: Attempt) -> float:
    """By when, in Unix time, the attempt's job and its VMs are surely gone if it is admitted now. Infinity where nobody
    can tell: its job has no time limit, or the scheduler does not tell it."""
    return ends_by(context, attempt) + context.policy.reclaim


def avoided_hosts(context: Context, image: str) -> list[Reason]:
    """What is said of the hosts in sight that are avoided for an image, each with why."""
    names = sorted(context.avoided & context.in_sight.keys())
    return [Why.AVOIDED_HOST(why_avoided(context, name, image), host=name) for name in names]


def why_avoided(context: Context, host: str, image: str) -> Reason:
    """Until when a host is avoided for an image, and why."""
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
