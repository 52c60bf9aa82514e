"""Attempts: tries at giving jobs their VMs. They only go forward: a job back at the gate gets a new one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from multiverse.core.avoidance import forget_hosts, whose_fault
from multiverse.core.machines.offer import take_offer
from multiverse.core.machines.saved import is_held_for_saving, is_unfit
from multiverse.core.machines.vm import end_vm, may_take_job, release_vm, run_job_on_vm, start_vm, take_vm
from multiverse.core.model.basics import Size
from multiverse.core.model.job import (
    ENDING_STATES,
    MOST_SHORT_RUNS,
    PINNED_STATES,
    PREEMPTED_STATES,
    SHORT_RUN,
    WAITING_STATES,
    Attempt,
    AttemptState,
    Eviction,
    Job,
    JobRef,
    JobState,
    Outcome,
    Request,
    SchedulerView,
    first_keeping,
    went_on,
)
from multiverse.core.model.reason import Reason, Why, said, text_of
from multiverse.core.model.saved import COMPLETE, HOLDS_VM, WAITS_FOR_RUN, Saved
from multiverse.core.model.vm import OfferState, Vm, VmCondition, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Policy, why_stays
from multiverse.core.rows import VmsMissing
from multiverse.core.state import State, quarantine, why_earlier_run
from multiverse.core.transition import Awaiting, Change, EffectKind, Event, Transition, transitions, unchanged

A = AttemptState

# --- table -----------------------------------------------------------------------------------------

_MAKING = (A.CLAIMED, A.SPAWNING)
_RUNNING = (A.ALLOCATED, *PREEMPTED_STATES)
_LIVE = (*WAITING_STATES, *_MAKING, *PINNED_STATES, *_RUNNING)

ATTEMPT: tuple[Transition, ...] = (
    *transitions([None], Event.SUBMITTED, A.QUEUED, A.UNGATED, A.HOLDING),
    *transitions([A.HOLDING], Event.HELD, A.QUEUED, A.UNGATED, A.RESTORING),
    *transitions([A.UNGATED, A.STRAY, A.RESTORING], Event.AT_GATE, A.QUEUED),
    *transitions([A.QUEUED, A.STRAY, A.RESTORING], Event.LEFT_GATE, A.UNGATED),
    *transitions([A.QUEUED, A.UNGATED, A.STRAY], Event.SENT_BACK, A.RESTORING),
    *transitions([A.QUEUED, A.UNGATED, A.RESTORING, A.HOLDING], Event.STRAYED, A.STRAY),
    *transitions([A.UNGATED], Event.TOOK, A.ADDING_USER),
    *transitions([A.QUEUED], Event.ADMITTED, A.CLAIMED),
    *transitions([A.CLAIMED], Event.CREATED, A.SPAWNING),
    *transitions([A.SPAWNING], Event.ALL_JOINED, A.SPAWNED),
    *transitions(PINNED_STATES, Event.RUNS, A.ALLOCATED),
    *transitions([A.QUEUED, A.UNGATED, A.STRAY, A.HOLDING], Event.IMPOSSIBLE, A.REVOKING),
    *transitions(_MAKING, Event.GAVE_UP, A.RETURNING, A.REVOKING),
    *transitions(PINNED_STATES, Event.GAVE_UP, A.RETURNING),
    *transitions(PINNED_STATES, Event.PIN_EXPIRED, A.RETURNING),
    *transitions([A.ALLOCATED], Event.PREEMPTED, *PREEMPTED_STATES),
    *transitions([A.WARNED], Event.GRACE_OVER, A.PREEMPTING),
    *transitions([*_MAKING, *PINNED_STATES, *_RUNNING], Event.CHANGED, A.RETURNING),
    *transitions([*PINNED_STATES, *_RUNNING], Event.ENDED, A.RECLAIMING),
    *transitions([*WAITING_STATES, *_MAKING, *PINNED_STATES], Event.CANCELLED, A.RECLAIMING),
    *transitions(_LIVE, Event.RESTARTED, A.RECLAIMING),
    *transitions([A.RETURNING], Event.RETURNED, A.RECLAIMING),
    *transitions([A.RETURNING], Event.STARTED_LATE, A.RECLAIMING),
    *transitions([A.RECLAIMING], Event.LEFT_GATE, A.RETURNING),
    *transitions([A.REVOKING], Event.CHANGED, A.RETURNING),
    *transitions([A.REVOKING], Event.CANCELLED, A.RECLAIMING),
    *transitions([A.RECLAIMING], Event.RECLAIMED, A.DONE, A.CANCELLED, A.REQUEUED, A.REVOKED, A.FAILED),
    *unchanged(_MAKING, Event.REPLACED),
    *unchanged(
        [A.QUEUED, A.UNGATED, A.RESTORING, A.HOLDING, *_MAKING, A.ALLOCATED, A.WARNED, A.RECLAIMING], Event.NOTED
    ),
    *unchanged([A.QUEUED], Event.OVERTAKEN),
    *unchanged([A.RECLAIMING], Event.RESTARTED),
    *unchanged([*_LIVE, *ENDING_STATES], Event.QUARANTINED, Event.RETRIED),
)

AWAITED_ATTEMPTS = {
    **dict.fromkeys((A.SPAWNED, A.ADDING_USER, A.PREEMPTING, A.RETURNING, A.REVOKING), Awaiting.AFTER_EFFECT),
    A.RECLAIMING: Awaiting.AT_ONCE,
}
"""In which states the scheduler is read for the attempt's job, and for the nodes of its VMs."""

# --- changes ---------------------------------------------------------------------------------------


def submit_attempt(attempt: Attempt, why: Reason | None = None) -> Change:
    return Change(attempt, Event.SUBMITTED, why)


def admit_attempt(attempt: Attempt, choice: Reason) -> Change:
    return Change(replace(attempt, state=A.CLAIMED, note=None, choice=choice), Event.ADMITTED, choice)


def evict_job(attempt: Attempt, why: Reason) -> Change:
    """Its job begins to leave its host, as its last eviction tells."""
    return Change(attempt, Event.NOTED, why)


def preempt_job(attempt: Attempt, eviction: Eviction, grace: float) -> Change:
    """The run of its job ends for another one, after `grace` seconds in which the job may end by itself."""
    state = A.WARNED if grace else A.PREEMPTING
    ending = replace(attempt.with_eviction(eviction), state=state, grace=grace, reason=eviction.why, note=None)
    return Change(ending, Event.PREEMPTED, eviction.why)


def begin_grace(attempt: Attempt, now: float) -> Change:
    """The processes of its job were told to end: from now on the grace time runs."""
    late = now - attempt.since
    return Change(replace(attempt, warned=True, grace=attempt.grace + late), Event.NOTED, attempt.reason)


def captured(attempt: Attempt, at: float, why: Reason) -> Change:
    """A checkpoint of its job is begun, at a Unix time."""
    return Change(replace(attempt, captured=at), Event.NOTED, why)


def forget_no_checkpoint(attempt: Attempt) -> Change | None:
    """A checkpoint of its job was made after all. None if none had failed."""
    if attempt.note is None or attempt.note.kind is not Why.NO_CHECKPOINT:
        return None
    return Change(replace(attempt, note=None), Event.NOTED, Why.CHECKPOINT_MADE())


def no_checkpoint(attempt: Attempt, why: Reason | None) -> Change:
    """No checkpoint of its job was made."""
    note = Why.NO_CHECKPOINT(why)
    return Change(replace(attempt, note=note), Event.NOTED, note)


def not_saved(attempt: Attempt, why: Reason | None) -> Change:
    """Its job asked to be saved at its time limit, and is not."""
    note = Why.NOT_SAVED(why)
    return Change(replace(attempt, note=note), Event.NOTED, note)


def overtake_attempt(attempt: Attempt, why: Reason) -> Change:
    return Change(replace(attempt, overtaken=attempt.overtaken + 1), Event.OVERTAKEN, why)


def replace_vms(attempt: Attempt, missing: VmsMissing, choice: Reason) -> Change:
    replaced = attempt.replaced + (missing.count if missing.counts else 0)
    again = replace(attempt, replaced=replaced, choice=Why.AND(attempt.choice, Why.THEN(choice)))
    return Change(again, Event.REPLACED, Why.AND(missing.reason, Why.NOW(choice)))


def return_attempt(attempt: Attempt, event: Event, why: Reason, *, failed: bool = False) -> Change:
    """It is on its way out, its job to go back to the gate; `failed` counts as a try that failed."""
    tries = attempt.tries + failed
    returning = replace(attempt, state=A.RETURNING, outcome="requeued", reason=why, tries=tries, note=None)
    return Change(returning, event, why)


def revoke_attempt(attempt: Attempt, outcome: Outcome, event: Event, why: Reason) -> Change:
    revoking = replace(attempt, state=A.REVOKING, outcome=outcome, reason=why, note=None, quarantined=None)
    return Change(revoking, event, why)


def reclaim_attempt(attempt: Attempt, outcome: Outcome, event: Event, why: Reason | None) -> Change:
    """It is on its way out, its job over or started anew by the scheduler."""
    reclaiming = replace(attempt, state=A.RECLAIMING, outcome=outcome, reason=why, note=None, quarantined=None)
    return Change(reclaiming, event, why)


# --- what an observation says of an attempt's job --------------------------------------------------


class JobStatus(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    ENDED = "ended"
    RESTARTED = "restarted"
    ELSEWHERE = "elsewhere"  # it runs, or has run, in the partition that it was submitted to, without a VM of ours
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True)
class Sighting:
    """An attempt's job as the latest reading of it showed it."""

    status: JobStatus
    job: Job | None  # None exactly when it is unseen
    view: SchedulerView
    began: float  # when that reading began

    @property
    def shown(self) -> Job:
        assert self.job is not None, "only a job that is shown is asked for"
        return self.job

    def is_on(self, nodes: set[str]) -> bool:
        return self.job is not None and any(node in nodes for node in self.job.nodes)


def job_status(expected: JobRef, view: SchedulerView) -> tuple[JobStatus, Job | None]:
    job = view.jobs.get(expected.job_id)
    if job is None:
        return JobStatus.UNSEEN, None
    if _is_next_run(expected, job.ref):
        return JobStatus.RESTARTED, job  # Slurm gives a requeued job a new submit time
    if job.ref != expected:
        return JobStatus.UNSEEN, None  # another job with the same id
    # One that was cancelled may have ended without a start. While it is completing it had a node.
    started = job.state is not JobState.PENDING and (job.state is not JobState.ENDED or job.result != "CANCELLED")
    if job.at_origin and started:
        return JobStatus.ELSEWHERE, job
    state = JobState.RUNNING if job.state is JobState.SUSPENDED else job.state
    return JobStatus(state.value), job


# --- creation --------------------------------------------------------------------------------------


def open_attempts(state: State, world: World, policy: Policy, *, only_taken: bool = False) -> None:
    """Open an attempt for each pending job without one that may be served, and for each job that took a spare as it was
    submitted. With `only_taken` those that wait are left to a later pass."""
    if world.scheduler is None or not state.unserved:
        return
    joined = state.vms_in(VmState.JOINED, VmState.RETIRING)
    spares = {vm.feature: vm for vm in joined if vm.is_spare and state.offer_of(vm)}
    for job_id in sorted(state.unserved):
        job = world.scheduler.value.jobs.get(job_id)
        lives = job is not None and job.state in (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED)
        if job is None or not lives or state.serves_job(job.ref) or _stays(job, policy):
            state.unserved.discard(job_id)
            continue
        spare = spares.pop(job.pinned, None) if job.pinned else None
        if (job.state is JobState.PENDING and not only_taken) or spare:
            state.unserved.discard(job_id)
            attempt = _open(state, job, _after_earlier_run(state, _new(state, job), job, policy))
            if spare and not job.problem:
                _take_spare(state, attempt, spare)


def _stays(job: Job, policy: Policy) -> bool:
    return job.at_origin and (job.state is not JobState.PENDING or bool(why_stays(job, policy)))


def _new(state: State, job: Job) -> Attempt:
    return Attempt(
        id=state.numbers.new_attempt_id(),
        since=state.now,
        job=job.ref,
        job_name=job.name,
        uid=job.uid,
        request=_request_of(job),
        work_dir=job.work_dir,
        origin=job.origin,
    )


def _after_earlier_run(state: State, attempt: Attempt, job: Job, policy: Policy) -> Attempt:
    """The new attempt with what is known from the attempt of the run before, if that still lives."""
    earlier = [one for one in state.attempts_of_job(job.ref.job_id) if _is_next_run(one.job, job.ref)]
    if not earlier:
        return attempt
    ended = _with_cause(state, _after_its_run(state, earlier[-1]), job)
    # As long as a save holds the VM, the scheduler has queued the job again while the VM's node answered. A state may
    # not know yet that it is for this run, if the scheduler had forgotten that it queued the job again.
    waiting = [one.state for one in state.saved_of_job(job.ref.job_id) if one.state in WAITS_FOR_RUN]
    found = state.saved_for(job.ref)
    goes_on = bool(waiting) and (found is None or found.state not in HOLDS_VM)
    pause = policy.pause_after(ended.short_runs, lost=ended.caused == job.ref.restarts, goes_on=goes_on)
    why = ended.reason or _why_requeued(state, ended)
    launch = Why.LAUNCH_PENDING(why, limit=SHORT_RUN) if ended.short_runs else Why.END_PENDING(why)
    note = _many_short_runs(ended.short_runs, why) or (launch if pause else None)
    not_before = state.now + pause if pause else 0.0
    return replace(
        attempt,
        not_before=not_before,
        note=note,
        caused=ended.caused,
        short_runs=ended.short_runs,
        evictions=ended.evictions,
    )


def _open(state: State, job: Job, attempt: Attempt) -> Attempt:
    opened = replace(attempt, state=A.QUEUED if _at_gate(job) else A.UNGATED)
    if attempt.short_runs >= MOST_SHORT_RUNS and job.state is JobState.PENDING:
        opened = replace(opened, state=A.HOLDING, short_runs=0, not_before=0.0)
    state.move(submit_attempt(opened, Why.RESTART(number=job.ref.restarts) if job.ref.restarts else None))
    return state.attempts[attempt.id]


def _is_next_run(before: JobRef, job: JobRef) -> bool:
    return job.job_id == before.job_id and job.restarts > before.restarts and job.submitted >= before.submitted


def _many_short_runs(number: int, why: Reason | None) -> Reason | None:
    """What the user is told if several runs in a row ended within seconds."""
    if number <= 1:
        return None
    return Why.SHORT_RUNS(why, held=int(number >= MOST_SHORT_RUNS), runs=number, limit=SHORT_RUN)


def _take_spare(state: State, attempt: Attempt, spare: Vm) -> None:
    """The job has taken a spare by itself and is tied to it. The guest is still to learn of the user."""
    choice = Why.TOOK_SPARE(clones=spare.kind, host=spare.host)
    taken = replace(attempt, state=A.ADDING_USER, pin=spare.feature, choice=choice)
    by = Why.AS_IT_CAME(job=attempt.job.job_id)
    changes = [Change(taken, Event.TOOK, choice), take_vm(spare, attempt, by)]
    offer = state.offers[spare.id]
    if offer.state is not OfferState.TAKEN:
        changes.append(take_offer(offer, by))
    state.move(*changes)


def _at_gate(job: Job) -> bool:
    """Whether the job waits where it may be pinned: at the gate, or in the partition that it was submitted to."""
    return (job.gated or job.at_origin) and job.pinned is None


def _request_of(job: Job) -> Request:
    return job.request or Request(0, Size(0, 0))


# --- step ------------------------------------------------------------------------------------------


def step_attempt(state: State, attempt_id: int, world: World, policy: Policy) -> None:
    attempt = state.attempts.get(attempt_id)
    if attempt is None or world.scheduler is None:
        return
    view, began = world.scheduler.value, world.job_began(attempt.job.job_id)
    if is_unread(attempt, world) and attempt.state is not A.RECLAIMING:
        # The observation is older than the state: what it says of the job has been considered before.
        if attempt.state in _MAKING:
            _advance_vms(state, attempt, policy)
        return
    status, job = job_status(attempt.job, view)
    if attempt.quarantined and status not in _OVER:
        return
    seen = Sighting(status, job, view, began)
    if attempt.state in ENDING_STATES and attempt.state not in PREEMPTED_STATES:
        _step_ending(state, attempt, seen, world, policy)
    elif not _step_if_over(state, attempt, seen, world):
        match attempt.state:
            case A.QUEUED | A.UNGATED | A.STRAY | A.RESTORING | A.HOLDING:
                _step_waiting(state, attempt, seen, world)
            case A.CLAIMED | A.SPAWNING:
                _step_making(state, attempt, seen, world, policy)
            case A.SPAWNED | A.ADDING_USER:
                _step_pinned(state, attempt, seen, world, policy)
            case _:
                _step_running(state, attempt, seen)


def is_unread(attempt: Attempt, world: World) -> bool:
    """Whether the latest reading of its job is older than its state: only a later one moves it, or its VMs."""
    return world.job_began(attempt.job.job_id) < attempt.since


def attempt_is_settled(attempt: Attempt, world: World) -> bool:
    """Whether neither time nor an equal observation moves the attempt."""
    if world.scheduler is None or is_unread(attempt, world):
        return False
    status, job = job_status(attempt.job, world.scheduler.value)
    if attempt.quarantined:
        return status not in _OVER
    match attempt.state:
        case A.QUEUED:  # a job that was moved waits at the gate only until its earlier run is surely over
            return status is JobStatus.PENDING and not (job is not None and job.gated and job.origin)
        case A.ALLOCATED:
            return status is JobStatus.RUNNING
        case _:
            return False


_OVER = (JobStatus.ENDED, JobStatus.ELSEWHERE, JobStatus.UNSEEN)  # the job needs no VM of ours any more


def _step_if_over(state: State, attempt: Attempt, seen: Sighting, world: World) -> bool:
    if seen.status is JobStatus.UNSEEN and seen.began <= world.ended_at(attempt.key, attempt.since):
        return True  # the job is not shown, but the observation is too old to tell that it is gone
    if seen.status is JobStatus.ELSEWHERE:
        why: Reason | None = Why.ON_PHYSICAL(partition=seen.shown.origin)
        state.move(reclaim_attempt(attempt, "cancelled", _over(attempt), why))
        return True
    if seen.status in (JobStatus.ENDED, JobStatus.UNSEEN):
        result = seen.job.result if seen.job else ""
        ran = attempt.state in _RUNNING or (attempt.state in PINNED_STATES and result != "CANCELLED")
        why = _result_of(seen.job) if seen.job else Why.SHOWN_NO_MORE()
        outcome: Outcome = "done" if ran else "cancelled"
        state.move(reclaim_attempt(attempt, outcome, Event.ENDED if ran else Event.CANCELLED, why))
        return True
    if seen.status is JobStatus.RESTARTED:
        why = _why_requeued(state, attempt)
        ended = _with_cause(state, _after_its_run(state, attempt), seen.shown)
        state.move(reclaim_attempt(ended, "requeued", Event.RESTARTED, why))
        return True
    return False


def _result_of(job: Job) -> Reason | None:
    """How a job has ended, in the scheduler's word; None if it does not say."""
    if not job.result:
        return None
    if job.unopened:
        return Why.UNOPENED(word=job.result)
    return Why.RESULT(word=job.result, code=job.exit_code if job.result == "FAILED" else None)


def _after_its_run(state: State, attempt: Attempt) -> Attempt:
    """The attempt as its job's run ends. A run that began and ended between two observations lasted for no time."""
    if attempt.preempted or _saved_run(state, attempt) is not None:
        return attempt.ran_for(inf)  # it did not end by itself, however short it was
    if attempt.state is A.ALLOCATED:
        return attempt.ran_for(state.now - attempt.since)
    return attempt.ran_for(0.0) if attempt.state in PINNED_STATES else attempt


def _with_cause(state: State, attempt: Attempt, job: Job) -> Attempt:
    """Note whether we caused the job's restart. For any other restart the scheduler's own delay is waited for."""
    lost = any((vm.failed and vm.reason) or vm.state is VmState.LOST for vm in state.vms_of(attempt))
    found = state.saved_for(job.ref)
    saved = found is not None and not found.checkpoint  # nobody is queued again for a checkpoint
    taken_back = attempt.state in (A.STRAY, A.UNGATED)  # ungated: from the nodes of the gate
    preempted = attempt.preempted is not None and not attempt.grace  # in its grace time only its user queues it again
    ours = saved or taken_back or lost or preempted
    next_run = job.ref.restarts == attempt.job.restarts + 1
    return replace(attempt, caused=job.ref.restarts) if ours and next_run else attempt


def _over(attempt: Attempt) -> Event:
    return Event.ENDED if attempt.state in _RUNNING else Event.CANCELLED


def _saved_run(state: State, attempt: Attempt) -> Saved | None:
    """What was saved of the run of the attempt, if the next run goes on with it."""
    found = (one for vm in state.vms_of(attempt) for one in state.saved_of(vm) if one.state in WAITS_FOR_RUN)
    return next((one for one in found if not one.checkpoint), None)


def _why_requeued(state: State, attempt: Attempt) -> Reason:
    if (saved := _saved_run(state, attempt)) is not None:
        return Why.IS_SAVED(saved.asked)
    if (eviction := attempt.preempted) is not None:
        return eviction.why
    return Why.REQUEUED(next((vm.reason for vm in state.vms_of(attempt) if vm.reason), None))


def _step_waiting(state: State, attempt: Attempt, seen: Sighting, world: World) -> None:
    job = seen.shown
    if seen.status is JobStatus.PENDING:
        request = _request_of(job)
        target, moved = _where_it_belongs(state, attempt, job, world)
        if attempt.state is A.HOLDING:
            target, moved = (target, Event.HELD) if job.held else (A.HOLDING, Event.NOTED)
        known = (attempt.state, attempt.request, attempt.job_name, attempt.uid, attempt.work_dir, attempt.origin)
        origin = job.origin or attempt.origin  # a move that Slurm refused in part may leave no mark
        told = (request, job.name, job.uid, job.work_dir, origin)
        if known == (target, *told):
            return  # the usual case, for every job that waits
        fresh = replace(
            attempt, state=target, request=request, job_name=job.name, uid=job.uid, work_dir=job.work_dir,
            origin=origin,
        )  # fmt: skip
        reason = Why.CHANGED_WAITING() if request != attempt.request else None
        if moved is Event.HELD and not reason:
            reason = attempt.note
        if target is A.RESTORING and not reason:
            reason = Why.MAY_START_THERE(partition=origin)
        state.move(Change(fresh, moved if target is not attempt.state else Event.NOTED, reason))
    elif seen.status is JobStatus.RUNNING and not _has_explained_node(state, seen):
        _leave_to_the_scheduler(state, attempt, job)
    elif seen.status is JobStatus.RUNNING and attempt.state is not A.STRAY:
        # The scheduler requeued the job with its old pin and started it on a VM that is about to go.
        state.move(Change(replace(attempt, state=A.STRAY), Event.STRAYED, Why.ON_EARLIER_VM()))


def _where_it_belongs(state: State, attempt: Attempt, job: Job, world: World) -> tuple[AttemptState, Event]:
    """The state of an attempt whose job waits. A moved job goes back once no earlier run of it may go on."""
    if not _at_gate(job):
        return A.UNGATED, Event.LEFT_GATE
    moved = job.origin and job.gated
    if moved and not why_earlier_run(state, world, attempt):
        return A.RESTORING, Event.SENT_BACK
    return A.QUEUED, Event.AT_GATE


def _has_explained_node(state: State, seen: Sighting) -> bool:
    """Whether the job is on the node of a VM that is not an orphan, or its nodes are not known."""
    nodes = seen.shown.nodes
    vms = [state.vms[state.vm_named[name]] for name in nodes if name in state.vm_named]
    return not nodes or any(vm.state is not VmState.ORPHAN and _is_its_node(vm, seen.view) for vm in vms)


def _is_its_node(vm: Vm, view: SchedulerView) -> bool:
    node = view.nodes.get(vm.name)
    return node is None or vm.owns(node.features)


def _is_anothers(state: State, attempt: Attempt, seen: Sighting) -> bool:
    """Whether the job runs on VMs that no record explains: orphans, or nodes of another attempt's tag."""
    job = seen.shown
    orphaned = any(name in state.vm_named for name in job.nodes)
    return (orphaned or job.pinned not in (None, attempt.feature)) and not _has_explained_node(state, seen)


def _leave_to_the_scheduler(state: State, attempt: Attempt, job: Job) -> None:
    """The job runs on VMs that no record explains: make nothing for it, and do not stop it."""
    why = Why.ON_UNEXPLAINED(hosts=job.nodes)
    state.move(reclaim_attempt(attempt, "cancelled", Event.CANCELLED, why))


def _step_making(state: State, attempt: Attempt, seen: Sighting, world: World, policy: Policy) -> None:
    vms = state.serving_vms_of(attempt)
    started = seen.status in (JobStatus.RUNNING, JobStatus.COMPLETING)
    own, nodes = {vm.name for vm in vms}, set(seen.shown.nodes)
    dying = {vm.name for vm in state.vms_of(attempt)} - own
    whole = len(own) == attempt.request.nodes and bool(nodes) and own >= nodes
    if started and _is_anothers(state, attempt, seen):
        _leave_to_the_scheduler(state, attempt, seen.shown)
    elif started and whole:
        _advance_vms(state, attempt, policy)  # the row is older than the job's start: see how far its VMs are
    elif seen.status is JobStatus.COMPLETING or (started and nodes & dying and nodes <= own | dying):
        pass  # the row is older than the job's start, and a VM has died since: the scheduler ends or requeues the job
    elif seen.status is not JobStatus.PENDING:
        state.move(quarantine(attempt, Why.TOO_SOON(status=seen.status)))
    elif _return_if_changed(state, attempt, seen, world):
        pass
    elif seen.shown.pinned == attempt.feature and len(vms) < attempt.request.nodes:
        # The row is older than the pin: the job starts on the lost VM once that is back, perhaps beside another one.
        state.move(return_attempt(attempt, Event.GAVE_UP, Why.VM_LOST_BEFORE()))
    else:
        blocked = any(may_take_job(state, vm, world) for vm in state.vms_of(attempt))
        _advance_vms(state, attempt, policy, blocked=blocked or _may_start_elsewhere(attempt, vms, seen.view))


def _may_start_elsewhere(attempt: Attempt, vms: list[Vm], view: SchedulerView) -> bool:
    """Whether a node that is not its own has its tag, once its VMs have joined. The database is older than that node,
    which is on its way out as no record explains it."""
    if attempt.state is not A.SPAWNING or any(vm.state is not VmState.JOINED for vm in vms):
        return False
    own, tag = {vm.name for vm in vms}, attempt.feature
    return any(tag in node.features and name not in own and not node.is_unusable for name, node in view.nodes.items())


def _return_if_changed(state: State, attempt: Attempt, seen: Sighting, world: World) -> bool:
    """Give the job back to the gate if it is held, was changed, or is kept by a reservation."""
    job = seen.shown
    kept = first_keeping(seen.view.reservations, state.now + world.epoch, job.limit)
    if job.held:
        state.move(return_attempt(attempt, Event.CHANGED, Why.JOB_HELD()))
    elif kept:
        state.move(return_attempt(attempt, Event.CHANGED, kept.why()))
    elif job.request != attempt.request:
        state.move(return_attempt(attempt, Event.CHANGED, Why.REQUEST_CHANGED()))
    return attempt != state.attempts[attempt.id]


def _advance_vms(state: State, attempt: Attempt, policy: Policy, *, blocked: bool = False) -> None:
    """Replace failed VMs, and go on when all are ready. `blocked`: the job might start on a VM that ends."""
    if attempt.quarantined:
        return
    vms = state.serving_vms_of(attempt)
    missing = attempt.request.nodes - len(vms)
    if missing > 0:
        _ask_for_vms(state, attempt, missing, policy)
    elif attempt.state is A.CLAIMED and all(vm.state is not VmState.PLANNED for vm in vms):
        parked = [vm for vm in vms if vm.state is VmState.PARKED and not state.waits_to_join(vm)]
        state.move(Change(replace(attempt, state=A.SPAWNING), Event.CREATED), *map(start_vm, parked))
    elif attempt.state is A.SPAWNING and not blocked and all(vm.state is VmState.JOINED for vm in vms):
        state.move(Change(replace(attempt, state=A.SPAWNED), Event.ALL_JOINED))


def _ask_for_vms(state: State, attempt: Attempt, missing: int, policy: Policy) -> None:
    """Record that VMs are missing, or give up after too many. A host's fault does not count."""
    failures = [vm for vm in state.vms_of(attempt) if vm.failed]
    why = next((vm.reason for vm in reversed(failures) if vm.reason), Why.VM_LOST())
    fault = whose_fault(failures[-missing:])
    # The VMs of a gang know each other by name from their start on: later, all of them are made again or none. A
    # restored VM has the name of the one before, which must be gone first.
    saved = state.saved_for(attempt.job)
    started = saved is not None or (attempt.state is A.SPAWNING and attempt.request.nodes > 1)
    may_replace = fault == "host" or (fault != "job" and attempt.replaced + missing <= policy.replacements)
    if not started and may_replace:
        state.missing.append(VmsMissing(attempt.id, missing, why, counts=fault != "host"))
    elif saved is not None:  # whoever is at fault: perhaps no host can restore it
        last = attempt.tries + 1 >= policy.attempts
        state.move(return_attempt(replace(attempt, tries=0) if last else attempt, Event.GAVE_UP, why, failed=not last))
        if last and saved.state in COMPLETE:
            state.move(is_unfit(saved, Why.SAVED_FAILS(why, tries=policy.attempts)))
    elif fault == "host":
        state.move(return_attempt(attempt, Event.GAVE_UP, why))
    elif attempt.tries + 1 >= policy.attempts and not attempt.origin:  # which needs no VM: it may start without
        text = Why.NO_VM_CREATED(why, attempts=policy.attempts)
        state.move(revoke_attempt(attempt, "failed", Event.GAVE_UP, text))
    else:
        state.move(return_attempt(attempt, Event.GAVE_UP, why, failed=True))


def _step_pinned(state: State, attempt: Attempt, seen: Sighting, world: World, policy: Policy) -> None:
    job = seen.shown
    waits = attempt.state is A.ADDING_USER and _waits_for_its_user(state, attempt, world, policy)
    vms = state.serving_vms_of(attempt)
    if seen.status in (JobStatus.RUNNING, JobStatus.COMPLETING):
        own = {vm.name for vm in state.vms_of(attempt)}  # the VMs that were lost in this very moment too
        if not own.issuperset(job.nodes) and seen.status is JobStatus.RUNNING:
            if _is_anothers(state, attempt, seen):
                _leave_to_the_scheduler(state, attempt, job)
            else:
                state.move(quarantine(attempt, Why.NOT_ON_OWN(hosts=job.nodes)))
        elif not waits:  # the end of the job waits too
            joined = [vm for vm in vms if vm.state is VmState.JOINED]
            begun = forget_hosts(_runs_again(attempt, state.now + world.epoch))
            runs = Change(replace(begun, state=A.ALLOCATED), Event.RUNS)
            state.move(runs, *map(run_job_on_vm, joined))
        return
    if _return_if_changed(state, attempt, seen, world):
        return
    unusable = next((vm.name for vm in vms if state.offer_of(vm) and seen.view.is_unusable(vm.name)), "")
    if len(vms) < attempt.request.nodes or any(vm.state is VmState.DEAD for vm in vms):
        state.move(return_attempt(attempt, Event.GAVE_UP, Why.VM_LOST_BEFORE(), failed=True))
    elif unusable:
        why = Why.NODE_UNUSABLE(node=unusable, found=seen.view.nodes[unusable].state)
        state.move(return_attempt(attempt, Event.GAVE_UP, why, failed=True))
    elif seen.began - attempt.since > (policy.pin_timeout if job.eligible or not job.pinned else policy.held_timeout):
        why = Why.NOT_STARTED(word=job.reason or "no reason")
        state.move(return_attempt(attempt, Event.PIN_EXPIRED, why, failed=True))


def _runs_again(attempt: Attempt, now: float) -> Attempt:
    """The attempt as its job runs, perhaps again after its run was ended for another job. `now` is a Unix time."""
    eviction = attempt.preempted
    if eviction is None:
        return attempt
    return replace(attempt, evictions=went_on(attempt.evictions, now - eviction.at))


def _waits_for_its_user(state: State, attempt: Attempt, world: World, policy: Policy) -> bool:
    """Whether the job, which took its spare by itself, waits until the guest knows its user. A spare that refused the
    user, or learns of it too late, is given up: its node goes DOWN, and the scheduler queues the job again."""
    lacking = [vm for vm in state.vms_of(attempt) if lacks_user(state, vm, attempt, world)]
    for vm in lacking:
        latest = world.latest(vm.place.source)
        # The effect that ended last may have added the user: only a later observation tells.
        if latest is None or latest.began <= world.ended_at(attempt.key, float("inf")) or vm.state is VmState.LOST:
            continue
        # A name service that does not answer is waited for.
        late = latest.began - max(attempt.since, world.user_known_since(attempt.uid)) > policy.pin_timeout
        not_told = Why.USER_NOT_TOLD(limit=policy.pin_timeout) if late else None
        if why := said(world.refused.get(attempt.key, "")) or not_told:
            state.move(end_vm(vm, Event.DIED, why))
    return bool(lacking) or world.ended_at(attempt.key) == float("inf")


def lacks_user(state: State, vm: Vm, attempt: Attempt, world: World) -> bool:
    """Whether the job took this VM by itself and its guest is not known to know the user."""
    if state.offer_of(vm) is not OfferState.TAKEN or vm.leaving or vm.state is VmState.DEAD:
        return False
    seen = world.vm(vm)
    return seen is None or attempt.uid not in seen.users_added


def _step_running(state: State, attempt: Attempt, seen: Sighting) -> None:
    if seen.status is JobStatus.COMPLETING:
        state.move(reclaim_attempt(_after_its_run(state, attempt), "done", Event.ENDED, Why.COMPLETING()))
    elif seen.status is JobStatus.PENDING:
        # Pending again with the same restart count: the launch was taken back before it counted.
        why = Why.TAKEN_BACK()
        state.move(return_attempt(_after_its_run(state, attempt), Event.CHANGED, why))
    elif attempt.state is A.WARNED and attempt.warned and seen.began - attempt.since >= attempt.grace:
        state.move(Change(replace(attempt, state=A.PREEMPTING, grace=0.0), Event.GRACE_OVER, attempt.reason))


# --- the end ---------------------------------------------------------------------------------------


def _step_ending(state: State, attempt: Attempt, seen: Sighting, world: World, policy: Policy) -> None:
    """First the job leaves the nodes and their tag, then the VMs go, and then the attempt is over."""
    if seen.began <= world.ended_at(attempt.key) or seen.began < attempt.since:
        return  # no observation yet since the last effect in this matter
    attempt = _learn_the_outcome(state, attempt, seen)
    vms = state.vms_of(attempt)
    names = {vm.name for vm in vms}
    if attempt.state is A.REVOKING and _asks_anew(attempt, seen):
        why = Why.CHANGED_LATE()
        state.move(Change(replace(attempt, state=A.RETURNING, outcome="requeued"), Event.CHANGED, why))
        attempt = state.attempts[attempt.id]
    if _keeps_its_nodes(state, attempt, seen, world, policy):
        return
    if attempt.state is A.REVOKING:
        if seen.status in (JobStatus.PENDING, JobStatus.RUNNING):
            return  # not cancelled yet
        state.move(Change(replace(attempt, state=A.RECLAIMING), Event.CANCELLED, attempt.reason))
    elif attempt.state is A.RETURNING:
        state.move(Change(replace(attempt, state=A.RECLAIMING), Event.RETURNED, Why.OFF_NODES()))
    attempt = state.attempts[attempt.id]
    # If a job has not left a node in time, the node goes DOWN first.
    to_leave = (vm for vm in vms if not vm.leaving and vm.state is not VmState.LOST)
    if leaving := [vm for vm in to_leave if not is_held_for_saving(state, vm)]:
        occupied = names & seen.view.occupied
        state.move(*(release_vm(vm, attempt.reason, occupied=vm.name in occupied) for vm in leaving))
    if not vms:
        _finish(state, attempt, seen, policy)


def _learn_the_outcome(state: State, attempt: Attempt, seen: Sighting) -> Attempt:
    """A job that is completing does not show yet how it ends: over, or queued again."""
    if attempt.outcome != "done" or seen.job is None:
        return attempt
    if seen.status is JobStatus.RESTARTED:
        learnt = replace(attempt, outcome="requeued", reason=_why_requeued(state, attempt))
        learnt = _with_cause(state, learnt, seen.job)
    elif seen.status is JobStatus.ENDED and seen.job.result:
        learnt = replace(attempt, reason=_result_of(seen.job))
    else:
        return attempt
    if learnt != attempt:
        event = Event.NOTED if learnt.outcome == attempt.outcome else Event.RESTARTED
        state.move(Change(learnt, event, learnt.reason))
    return state.attempts[attempt.id]


def _asks_anew(attempt: Attempt, seen: Sighting) -> bool:
    """Whether a pending job now asks for something else that can be served."""
    job = seen.job
    impossible = attempt.outcome == "revoked" and seen.status is JobStatus.PENDING
    return impossible and job is not None and job.request is not None and job.request != attempt.request


def _keeps_its_nodes(state: State, attempt: Attempt, seen: Sighting, world: World, policy: Policy) -> bool:
    """Whether the job still has the attempt's nodes, or is tied to them: then the VMs have to stay."""
    job = seen.job
    if job is None:
        return False
    vms = state.vms_of(attempt)
    names = {vm.name for vm in vms}
    paused = any((shown := world.vm(vm)) and shown.condition is VmCondition.PAUSED for vm in vms)
    # A paused guest does not answer the scheduler, and ending it makes room for others.
    in_time = seen.began - attempt.since <= (policy.paused_timeout if paused else policy.complete_timeout)
    match job.state:
        case JobState.COMPLETING if seen.is_on(names):
            return in_time
        case JobState.RUNNING | JobState.SUSPENDED if seen.is_on(names):
            if _end_vms_without_user(state, attempt, world):
                return True
            if attempt.state is A.RETURNING and seen.status is JobStatus.RUNNING:
                # The pin was answered after the attempt had given up on it: the job has its nodes, and runs.
                why = Why.STARTED_AFTER_ALL()
                state.move(Change(replace(attempt, state=A.RECLAIMING, outcome="done"), Event.STARTED_LATE, why))
            # A job that was restarted is being requeued by the attempt that came after this one.
            return seen.status is not JobStatus.RESTARTED or in_time
        case JobState.PENDING if job.pinned == attempt.feature:
            # The gate first: a pending job with a tag that no node has may never start.
            requeued = attempt.state is A.RECLAIMING and attempt.outcome == "requeued"
            if requeued and seen.status is JobStatus.PENDING:
                state.move(Change(replace(attempt, state=A.RETURNING), Event.LEFT_GATE, Why.TIED()))
            return True
        case _:
            return False


def _end_vms_without_user(state: State, attempt: Attempt, world: World) -> bool:
    """A job that took its spare started after all, and nobody adds its user: end its VMs."""
    vms = [vm for vm in state.vms_of(attempt) if vm.state is not VmState.LOST and lacks_user(state, vm, attempt, world)]
    since = max(attempt.since, world.ended_at(attempt.key))
    if not vms or any((latest := world.latest(vm.place.source)) is None or latest.began <= since for vm in vms):
        return False
    why = Why.NO_USER_ADDED()
    state.move(*(end_vm(vm, Event.DIED, why) for vm in vms))
    return True


def _finish(state: State, attempt: Attempt, seen: Sighting, policy: Policy) -> None:
    outcome = attempt.outcome or "done"
    state.move(Change(replace(attempt, state=A(outcome), quarantined=None), Event.RECLAIMED, attempt.reason))
    if outcome == "requeued" and seen.status is JobStatus.PENDING and seen.job is not None:
        # The pause after short runs is not begun anew: it followed the last run, and there was none since.
        later = max(attempt.not_before, state.now + policy.backoff(attempt.tries))
        again = replace(
            _new(state, seen.job),
            tries=attempt.tries,
            not_before=later if later > state.now else 0.0,
            note=_many_short_runs(attempt.short_runs, attempt.reason) or attempt.reason,
            overtaken=attempt.overtaken,
            caused=attempt.caused,
            short_runs=attempt.short_runs,
            failed_on=attempt.failed_on,
            evictions=attempt.evictions,
        )
        _open(state, seen.job, again)


ATTEMPT_EFFECTS = {
    A.STRAY: EffectKind.REQUEUE,
    A.UNGATED: EffectKind.GATE,
    A.RETURNING: EffectKind.GATE,
    A.RESTORING: EffectKind.RESTORE,
    A.HOLDING: EffectKind.HOLD,
    A.SPAWNED: EffectKind.PIN,
    A.ADDING_USER: EffectKind.PIN,
    A.WARNED: EffectKind.WARN,
    A.PREEMPTING: EffectKind.PREEMPT,
    A.REVOKING: EffectKind.REVOKE,
}


def effect_text(attempt: Attempt) -> str:
    match ATTEMPT_EFFECTS[attempt.state]:
        case EffectKind.HOLD:
            return text_of(attempt.note)
        case EffectKind.PIN:
            return text_of(attempt.choice)
        case EffectKind.WARN | EffectKind.PREEMPT | EffectKind.REVOKE:
            return text_of(attempt.reason)
        case _:
            return ""
