"""Why a job waits, in which stage it is, or how it ended, in words. Pure, and computed on request.

The first sentence of a job that waits contains what `reasons.reason_of` says, which is also what its user reads in the
scheduler (`controller.comments`): that is the short form of the same explanation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from multiverse.core.expansion import why_stays
from multiverse.core.model import Attempt, AttemptState, Job, JobState, Vm, VmState
from multiverse.core.policy import Policy
from multiverse.core.provisioning.backfill import when
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.draining import moment
from multiverse.core.provisioning.host_verdicts import HostVerdict, host_verdicts
from multiverse.core.provisioning.obstacles import why_earlier_run
from multiverse.core.provisioning.reasons import BEHIND, reason_of
from multiverse.core.state import State

A = AttemptState


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is to be said of one attempt. `short` is what its user reads in the scheduler while it waits. `sentences`
    are one to three; `todo` is what its user can do, empty if nothing. `ahead` are the attempts before it in the queue,
    `behind` is the id of the job that keeps it waiting, if one does, and `expected` by when it starts at the latest
    (Unix time; infinity: nobody can tell). `hosts` is empty unless it waits for VMs."""

    short: str
    sentences: tuple[str, ...]
    todo: str = ""
    ahead: int = 0
    behind: str = ""
    expected: float = inf
    hosts: Sequence[HostVerdict] = ()


def explain(context: Context, attempt: Attempt, now: float) -> Explanation:
    """Explain a live attempt; `now` is the present monotonic time."""
    since = for_long(now - attempt.since)
    if attempt.quarantined:
        why = f"Its record has been quarantined for {since}: {attempt.quarantined}."
        return Explanation("", (why,), f"an operator has to decide: multiverse repair {attempt.job.job_id}")
    match attempt.state:
        case A.QUEUED:
            return _waiting(context, attempt, now)
        case A.UNGATED:
            return Explanation("", (f"It left the gate {since} ago, and is being put back there.",))
        case A.RESTORING:
            why = f"It waits at the gate, and has been on its way back to partition {attempt.origin} for {since}."
            return Explanation("", (why,))
        case A.HOLDING:
            return Explanation("", (f"It is about to be held: {attempt.note}.",))
        case A.STRAY:
            why = f"The scheduler started it {since} ago on a VM of an earlier attempt; it is being queued again."
            return Explanation("", (why,))
        case _:
            return Explanation("", tuple(_stage(context, attempt, since)))


# --- attempts that wait ----------------------------------------------------------------------------


def _waiting(context: Context, attempt: Attempt, now: float) -> Explanation:
    # Attempts may have been given up meanwhile; Slurm gives a job that it queues again a new submit time.
    since, state = for_long(max(0.0, context.unix(now) - attempt.job.submitted)), context.state
    job = context.scheduler.jobs.get(attempt.job.job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job:
        seen = (
            "The scheduler has not been observed yet"
            if context.world.scheduler is None
            else "The scheduler does not show it"
        )
        return Explanation("", (f"It has waited for {since}. {seen}.",))
    if not job.eligible or attempt.waits_for_delay(job):
        return _kept_by_the_scheduler(context, attempt, job, since)
    short = reason_of(attempt, job, state.reasons, now)
    own = short if short not in ("", BEHIND) else _own_obstacle(context, attempt)
    sentences = [f"It has waited for {since}: {own or short or 'it is about to be considered'}."]
    if job.at_origin:
        sentences.append(f"It starts in a VM or in partition {job.origin}, whichever has room first.")
    if now < attempt.not_before and attempt.note:
        times = "once" if attempt.tries == 1 else f"{attempt.tries} times in a row"
        failed = f" It failed {times}." if attempt.tries else ""
        sentences.append(f"It is considered again in {for_long(attempt.not_before - now)}.{failed}")
    elif attempt.note:
        sentences.append(f"Its previous attempt was given up: {attempt.note}.")
    ahead, behind = _before(state, attempt, job), ""
    if ahead and attempt.id not in state.promised:
        behind, why = _first(state, attempt, ahead)
        sentences.append(why)
    hosts = host_verdicts(context, attempt) if context.world.sees_hosts else []
    expected = state.promised.get(attempt.id, inf)
    return Explanation(short, tuple(sentences), _advice(context, attempt), ahead, behind, expected, hosts)


def _kept_by_the_scheduler(context: Context, attempt: Attempt, job: Job, since: str) -> Explanation:
    if not job.eligible or job.delayed_until is None:
        kept = context.kept_by(job)
        besides = [f"Besides, {kept.why()}."] if kept else []
        if attempt.note:
            besides.append(f"Before that: {attempt.note}.")
        return Explanation("", (f"It has waited for {since}: {_kept_by_slurm(job)}.", *besides))
    delay = (
        f"It has waited for {since}: the scheduler queued it again, not because of Multiverse, and lets it start "
        f"{moment(job.delayed_until)} (in {for_long(job.delayed_until - context.now)}) at the earliest."
    )
    note = (f"It waits longer, because {attempt.note}.",) if attempt.note else ()
    return Explanation("", (delay, *note))


def _kept_by_slurm(job: Job) -> str:
    """Why the scheduler itself keeps a job waiting."""
    if job.held:
        return f"it is held ({job.reason})" if job.reason else "it is held"
    return (
        f"the scheduler itself keeps it waiting ({job.reason})"
        if job.reason
        else "the scheduler itself keeps it waiting"
    )


def _own_obstacle(context: Context, attempt: Attempt) -> str:
    """What keeps the attempt from being admitted whoever is ahead of it."""
    state = context.state
    if attempt.id in state.queue.why_unfit:
        return state.queue.why_unfit[attempt.id]
    job, left = state.queue.job_of(attempt.id), context.scheduler.limits
    if limit := next((limit for limit, count in job.uses if count > left.get(limit, 0)), ""):
        return f"held back by {limit}"
    if kept := context.kept_by(job):
        return kept.why()
    unexplained = state.vms_in(VmState.ORPHAN, VmState.LOST)
    return why_earlier_run(state, context.world, attempt, {vm.job_id: vm for vm in unexplained if vm.job_id})


def _before(state: State, attempt: Attempt, job: Job) -> int:
    """How many attempts are before it in the queue."""
    return state.queue.candidates.before((job.rank, attempt.id))


def _first(state: State, attempt: Attempt, ahead: int) -> tuple[str, str]:
    """The job that keeps those behind it waiting, if it is before this attempt, and a sentence about those before."""
    jobs = "1 job is" if ahead == 1 else f"{ahead} jobs are"
    first = state.attempts.get(state.blocking) if state.blocking is not None else None
    if first is None or first.id not in state.queue.candidates or first.id == attempt.id:
        return "", f"{jobs} ahead of it."
    if state.queue.job_of(first.id).rank > state.queue.job_of(attempt.id).rank:
        return "", f"{jobs} ahead of it."
    why = state.reasons.get(first.id, "waiting for capacity")
    return first.job.job_id, f"{jobs} ahead of it; job {first.job.job_id} keeps them waiting: {why}."


def _advice(context: Context, attempt: Attempt) -> str:
    """What the user of a job that waits can do."""
    if attempt.id in context.state.queue.unfit:
        return "wait for such hosts, or ask for less: multiverse capacity shows what would start at once"
    if attempt.id == context.state.blocking:
        return "wait, or ask for less: multiverse capacity shows what would start at once"
    return ""


# --- attempts that have VMs ------------------------------------------------------------------------


def _stage(context: Context, attempt: Attempt, since: str) -> list[str]:
    state = context.state
    vms = state.vms_of(attempt)
    where = _where(vms)
    match attempt.state:
        case A.CLAIMED:
            return [f"It was admitted {since} ago, and its {_vms(vms)} being created{where}.", *_chosen(attempt)]
        case A.SPAWNING:
            joined = sum(vm.state is VmState.JOINED for vm in vms)
            said = f"Its VMs were created {since} ago and are being started{where}; {joined} of {len(vms)} joined."
            return [said, *_chosen(attempt)]
        case A.SPAWNED:
            return [f"Its VMs joined {since} ago{where}, and the scheduler is about to start it.", *_chosen(attempt)]
        case A.INTRODUCING:
            return [f"It took an idle node{where} {since} ago, whose guest is learning of its user.", *_chosen(attempt)]
        case A.ALLOCATED:
            return [f"It has run for {since}{where}.{_until(context, attempt)}", *_chosen(attempt)]
        case A.RETURNING:
            return [f"It has been on its way back to the gate for {since}: {attempt.reason}."]
        case A.REVOKING:
            return [f"Multiverse has been cancelling it for {since}: {attempt.reason}."]
        case _:
            left = f" {len(vms)} of its VMs are left." if vms else ""
            return [f"It has been over for {since}, and its VMs are being released.{left}"]


def _chosen(attempt: Attempt) -> list[str]:
    if not attempt.choice:
        return []
    moved = f" It is one of partition {attempt.origin}, which was full." if attempt.origin else ""
    return [f"Chosen for it: {attempt.choice}.{moved}"]


def _where(vms: Sequence[Vm]) -> str:
    shown = [f"{vm.name} on {vm.host}" for vm in vms[:4]]
    more = f" and {len(vms) - 4} more" if len(vms) > 4 else ""
    return f" ({', '.join(shown)}{more})" if shown else ""


def _vms(vms: Sequence[Vm]) -> str:
    return "VM is" if len(vms) == 1 else f"{len(vms)} VMs are"


def _until(context: Context, attempt: Attempt) -> str:
    """By when a job that runs has ended, by its time limit."""
    job = context.scheduler.jobs.get(attempt.job.job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job:
        return ""
    if job.state is JobState.SUSPENDED:
        return " It is suspended."
    return f" It ends {when(job.ends)} at the latest." if job.ends is not None else ""


# --- what has ended --------------------------------------------------------------------------------


def explain_ended(attempt: Attempt, ended: float) -> Explanation:
    """Explain an attempt that has ended, so many seconds ago."""
    ago, why = for_long(ended), attempt.reason
    because = f": {why}" if why else ""
    match attempt.state:
        case A.DONE:
            return Explanation("", (f"It ended {ago} ago{because}.", *_chosen(attempt)))
        case A.REQUEUED:
            todo = f"its next attempt waits in the queue; where the time went: multiverse timeline {attempt.job.job_id}"
            return Explanation("", (f"Its attempt was given up {ago} ago{because}.",), todo)
        case A.CANCELLED:
            what = "Its attempt ended" if attempt.origin else "It was cancelled"  # it may run on a physical node
            return Explanation("", (f"{what} {ago} ago{because}.",))
        case A.REVOKED:
            todo = "submit it again with a request that fits: multiverse capacity shows sizes"
            return Explanation("", (f"Multiverse cancelled it {ago} ago{because}.",), todo)
        case _:
            look = f"multiverse timeline {attempt.job.job_id} --events"
            todo = f"submit it again; if it fails again, operators find the cause with: {look}"
            return Explanation("", (f"It failed {ago} ago{because}.",), todo)


def explain_new(job: Job, policy: Policy) -> Explanation:
    """Explain a job that has no attempt yet."""
    if job.at_origin and job.state is not JobState.PENDING:
        return Explanation("", (f"It runs in partition {job.origin} on a physical node, or has run there.",))
    if job.at_origin and (why := why_stays(job, policy)):
        return Explanation("", (f"It waits in partition {job.origin} and is not moved to a VM: {why}.",))
    if job.problem:
        return Explanation("", (f"It cannot be served: {job.problem}.",), "submit it again without that")
    return Explanation("", ("The scheduler shows it, and the next pass considers it.",))


# --- words -----------------------------------------------------------------------------------------


def for_long(seconds: float) -> str:
    """A length of time for a sentence: 4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = max(0, round(seconds))
    for unit, below, word, smaller in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {word}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
