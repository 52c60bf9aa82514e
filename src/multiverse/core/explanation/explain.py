"""Why a job waits, in which stage it is, or how it ended. Pure, and computed on request.

The first sentence of a job that waits contains what `reasons.reason_of` says, which is also what its user reads in the
scheduler (`controller.comments`): that is the short form of the same explanation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from multiverse.core.admission.reasons import BEHIND, reason_of
from multiverse.core.context import Context
from multiverse.core.explanation.host_verdicts import HostVerdict, host_verdicts
from multiverse.core.model import Attempt, AttemptState, Job, JobState, Reason, VmState, Why
from multiverse.core.overflow import why_stays
from multiverse.core.policy import Policy
from multiverse.core.runs import why_earlier_run
from multiverse.core.state import State

A = AttemptState


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is to be said of one attempt. `short` is what its user reads in the scheduler while it waits. `sentences`
    are one to three; `todo` is what its user can do, empty if nothing. `ahead` are the attempts before it in the queue,
    `behind` is the id of the job that keeps it waiting, if one does, and `expected` by when it starts at the latest
    (Unix time; infinity: nobody can tell). `hosts` is empty unless it waits for VMs."""

    sentences: tuple[Reason, ...]
    short: Reason | None = None
    todo: str = ""
    ahead: int = 0
    behind: str = ""
    expected: float = inf
    hosts: Sequence[HostVerdict] = ()


def _of(*sentences: Reason | None, todo: str = "") -> Explanation:
    return Explanation(tuple(one for one in sentences if one), todo=todo)


def explain(context: Context, attempt: Attempt, now: float) -> Explanation:
    """Explain a live attempt; `now` is the present monotonic time."""
    time = now - attempt.since
    if attempt.quarantined:
        todo = f"an operator has to decide: multiverse repair {attempt.job.job_id}"
        return _of(Why.QUARANTINED(attempt.quarantined, time=time), todo=todo)
    match attempt.state:
        case A.QUEUED:
            return _waiting(context, attempt, now)
        case A.UNGATED:
            return _of(Why.UNGATED(time=time))
        case A.RESTORING:
            return _of(Why.RESTORING(partition=attempt.origin, time=time))
        case A.HOLDING:
            return _of(Why.TO_BE_HELD(attempt.note))
        case A.STRAY:
            return _of(Why.STRAY(time=time))
        case _:
            return _of(*_stage(context, attempt, time))


# --- attempts that wait ----------------------------------------------------------------------------


def _waiting(context: Context, attempt: Attempt, now: float) -> Explanation:
    # Attempts may have been given up meanwhile; Slurm gives a job that it queues again a new submit time.
    time, state = max(0.0, context.unix(now) - attempt.job.submitted), context.state
    job = context.scheduler.jobs.get(attempt.job.job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job:
        kind = Why.NOT_OBSERVED if context.world.scheduler is None else Why.NOT_SHOWN
        return _of(kind(time=time))
    if not job.eligible or attempt.waits_for_delay(job):
        return _of(*_kept_by_the_scheduler(context, attempt, job, time))
    short, note = reason_of(attempt, job, state.reasons, now), attempt.note
    own = short if short not in (None, BEHIND) else _own_obstacle(context, attempt)
    sentences = [Why.HAS_WAITED(own or short or Why.ABOUT_TO_CONSIDER(), time=time)]
    if job.at_origin:
        sentences.append(Why.EITHER(partition=job.origin))
    if note and now < attempt.not_before:
        sentences.append(Why.AGAIN_IN(time=attempt.not_before - now, tries=attempt.tries))
    elif note:
        sentences.append(Why.GIVEN_UP_BEFORE(note))
    ahead, behind = _before(state, attempt, job), ""
    if ahead and attempt.id not in state.promised:
        behind, why = _first(state, attempt, ahead)
        sentences.append(why)
    hosts = host_verdicts(context, attempt) if context.world.sees_hosts else []
    expected = state.promised.get(attempt.id, inf)
    return Explanation(tuple(sentences), short, _advice(context, attempt), ahead, behind, expected, hosts)


def _kept_by_the_scheduler(context: Context, attempt: Attempt, job: Job, time: float) -> list[Reason | None]:
    note = attempt.note
    if not job.eligible or job.delayed_until is None:
        kept = context.kept_by(job)
        why = (Why.IS_HELD if job.held else Why.SLURM_KEEPS)(word=job.reason)
        besides = Why.BESIDES(kept.why()) if kept else None
        return [Why.HAS_WAITED(why, time=time), besides, Why.BEFORE_THAT(note) if note else None]
    delay = Why.SLURM_DELAYS(until=job.delayed_until, time=job.delayed_until - context.now)
    return [Why.HAS_WAITED(delay, time=time), Why.WAITS_LONGER(note) if note else None]


def _own_obstacle(context: Context, attempt: Attempt) -> Reason | None:
    """What keeps the attempt from being admitted whoever is ahead of it."""
    state = context.state
    if attempt.id in state.queue.why_unfit:
        return state.queue.why_unfit[attempt.id]
    job, left = state.queue.job_of(attempt.id), context.scheduler.limits
    if limit := next((limit for limit, count in job.uses if count > left.get(limit, 0)), ""):
        return Why.LIMIT(limit=limit)
    if kept := context.kept_by(job):
        return kept.why()
    unexplained = state.vms_in(VmState.ORPHAN, VmState.LOST)
    return why_earlier_run(state, context.world, attempt, {vm.job_id: vm for vm in unexplained if vm.job_id})


def _before(state: State, attempt: Attempt, job: Job) -> int:
    """How many attempts are before it in the queue."""
    return state.queue.candidates.before((job.rank, attempt.id))


def _first(state: State, attempt: Attempt, ahead: int) -> tuple[str, Reason]:
    """The job that keeps those behind it waiting, if it is before this attempt, and a sentence about those before."""
    first = state.attempts.get(state.blocking) if state.blocking is not None else None
    if first is None or first.id not in state.queue.candidates or first.id == attempt.id:
        return "", Why.AHEAD(number=ahead)
    if state.queue.job_of(first.id).rank > state.queue.job_of(attempt.id).rank:
        return "", Why.AHEAD(number=ahead)
    behind = first.job.job_id
    return behind, Why.AHEAD(state.reasons.get(first.id, Why.CAPACITY()), number=ahead, job=behind)


def _advice(context: Context, attempt: Attempt) -> str:
    """What the user of a job that waits can do."""
    if attempt.id in context.state.queue.unfit:
        return "wait for such hosts, or ask for less: multiverse capacity shows what would start at once"
    if attempt.id == context.state.blocking:
        return "wait, or ask for less: multiverse capacity shows what would start at once"
    return ""


# --- attempts that have VMs ------------------------------------------------------------------------


def _stage(context: Context, attempt: Attempt, time: float) -> list[Reason | None]:
    vms = context.state.vms_of(attempt)
    where = [Why.ON(vm=vm.name, host=vm.host) for vm in vms]
    match attempt.state:
        case A.CLAIMED:
            return [Why.BEING_CREATED(*where, time=time, vms=len(vms)), _chosen(attempt)]
        case A.SPAWNING:
            joined = sum(vm.state is VmState.JOINED for vm in vms)
            return [Why.BEING_STARTED(*where, time=time, joined=joined, vms=len(vms)), _chosen(attempt)]
        case A.SPAWNED:
            return [Why.ABOUT_TO_START(*where, time=time), _chosen(attempt)]
        case A.ADDING_USER:
            return [Why.ADDING_USER(*where, time=time), _chosen(attempt)]
        case A.ALLOCATED:
            return [_running(context, attempt, where, time), _chosen(attempt)]
        case A.RETURNING:
            return [Why.GOING_BACK(attempt.reason, time=time)]
        case A.REVOKING:
            return [Why.CANCELLING(attempt.reason, time=time)]
        case _:
            return [Why.RELEASING(time=time, vms=len(vms))]


def _chosen(attempt: Attempt) -> Reason | None:
    return Why.CHOSEN(attempt.choice, partition=attempt.origin) if attempt.choice else None


def _running(context: Context, attempt: Attempt, where: Sequence[Reason], time: float) -> Reason:
    """That a job runs, and by when it has ended, by its time limit."""
    job = context.scheduler.jobs.get(attempt.job.job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job:
        return Why.HAS_RUN(*where, time=time)
    if job.state is JobState.SUSPENDED:
        return Why.SUSPENDED(*where, time=time)
    return Why.HAS_RUN(*where, time=time, ends=job.ends)


# --- what has ended --------------------------------------------------------------------------------


def explain_ended(attempt: Attempt, ended: float) -> Explanation:
    """Explain an attempt that has ended, so many seconds ago."""
    why = attempt.reason
    match attempt.state:
        case A.DONE:
            return _of(Why.ENDED(why, time=ended), _chosen(attempt))
        case A.REQUEUED:
            todo = f"its next attempt waits in the queue; where the time went: multiverse timeline {attempt.job.job_id}"
            return _of(Why.GIVEN_UP(why, time=ended), todo=todo)
        case A.CANCELLED:  # one that was moved may run on a physical node
            return _of((Why.ATTEMPT_ENDED if attempt.origin else Why.CANCELLED)(why, time=ended))
        case A.REVOKED:
            todo = "submit it again with a request that fits: multiverse capacity shows sizes"
            return _of(Why.REVOKED(why, time=ended), todo=todo)
        case _:
            look = f"multiverse timeline {attempt.job.job_id} --events"
            todo = f"submit it again; if it fails again, operators find the cause with: {look}"
            return _of(Why.FAILED(why, time=ended), todo=todo)


def explain_new(job: Job, policy: Policy) -> Explanation:
    """Explain a job that has no attempt yet."""
    if job.at_origin and job.state is not JobState.PENDING:
        return _of(Why.RUNS_AT_ORIGIN(partition=job.origin))
    if job.at_origin and (why := why_stays(job, policy)):
        return _of(Why.STAYS(why, partition=job.origin))
    if job.problem:
        return _of(Why.CANNOT_BE_SERVED(Why.PROBLEM(text=job.problem)), todo="submit it again without that")
    return _of(Why.NEW())
