"""By when jobs end, and what their VMs hold is free again, at the latest: by the time limits. Unix time; infinity where
nobody can tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from multiverse.core.context import Context
from multiverse.core.model import (
    ENDING_STATES,
    WAITING_STATES,
    Attempt,
    AttemptState,
    ClaimKey,
    CloneKind,
    JobState,
    Key,
    OfferState,
    Size,
    TemplateState,
    Vm,
    VmState,
)

A = AttemptState

STARTING = 5.0
"""Seconds that the scheduler takes to start a job once its nodes have joined, and we to see that."""

OVERDUE = 60.0
"""Seconds after an expected end that has not come. Then nobody knows when it will come."""


class Release(NamedTuple):
    """What is free again on a host from a time on. `steady`: that time stays the same while nothing changes there, as
    long as it has not come."""

    at: float
    size: Size
    steady: bool = True


def ends_by(context: Context, attempt: Attempt, kind: CloneKind | None = None) -> float:
    """By when the job of an attempt has ended at the latest. The job of an attempt that waits is taken to be admitted
    now, and to get clones of that `kind`."""
    job = context.state.queue.jobs.get(attempt.job.job_id)
    if job is None or job.ref != attempt.job:
        return inf
    now, limit = context.now, inf if job.limit is None else job.limit
    match job.state:
        case JobState.PENDING:
            return _starts_by(context, attempt, kind) + limit
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
            return expected(context.unix(attempt.since) + 2 * reclaim, now)
        return ends_by(context, attempt) + reclaim
    if vm.is_spare and state.offer_of(vm) is not OfferState.TAKEN:
        return now + reclaim
    job = state.queue.jobs.get(vm.job_id)
    if vm.state is VmState.ORPHAN and job is not None and job.state is JobState.RUNNING and job.ends is not None:
        return expected(job.ends, now) + reclaim
    return inf


def releases_on(context: Context, host: str) -> list[Release]:
    """What is free again on a host, and from when on at the latest; the earliest first. Templates stay, but those that
    are being retired, and those whose rows have ended: they go with the last of their VMs."""
    state, found = context.state, []
    left_behind: defaultdict[int, float] = defaultdict(float)
    memory: dict[int, int] = {}
    for vm in state.vms_on(host):
        at = frees_by(context, vm)
        attempt = state.attempt_of(vm)
        steady = at == inf or (vm.state is VmState.SERVING and attempt is not None and attempt.state is A.ALLOCATED)
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
    """What a row claims on a host."""
    claim = context.state.claims.get(ClaimKey(owner, host))
    return claim.size if claim else Size(0, 0)


def total(sizes: Iterable[Size]) -> Size:
    """The sum of sizes."""
    cpus = memory = disk = net = 0
    for size in sizes:
        cpus, memory, disk, net = cpus + size.cpus, memory + size.memory, disk + size.disk, net + size.net
    return Size(cpus, memory, disk, net)
