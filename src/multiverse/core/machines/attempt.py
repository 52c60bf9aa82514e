"""Attempts: one try at giving a job its VMs."""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum

from multiverse.core.machines.vm import occupied_nodes, releasing
from multiverse.core.model.host import Claim
from multiverse.core.model.job import Attempt, AttemptState, Job, JobState, NodeState, Outcome, Request, SchedulerView
from multiverse.core.model.sizes import CloneKind, Size
from multiverse.core.model.template import TemplateKey, TemplateState
from multiverse.core.model.vm import Offer, Vm, VmState, is_spare
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.provisioning.capacity import room_of
from multiverse.core.provisioning.clones import able_hosts, choose_clones, plan_vms, story_of, template_key
from multiverse.core.provisioning.sizes import vm_claim, vm_claims
from multiverse.core.state import PlanState
from multiverse.core.transition import _OF_ANY, Change, Event, Transition, _arrows

_EARLY = (AttemptState.QUEUED, AttemptState.CLAIMED, AttemptState.SPAWNING, AttemptState.SPAWNED)


_LIVE = (*_EARLY, AttemptState.ALLOCATED)


ATTEMPT: tuple[Transition, ...] = (
    *_arrows([None], Event.SUBMITTED, AttemptState.QUEUED),
    *_arrows([AttemptState.QUEUED], Event.ADMITTED, AttemptState.CLAIMED),
    *_arrows([AttemptState.QUEUED], Event.TOOK, AttemptState.SPAWNED),
    *_arrows([AttemptState.CLAIMED], Event.MADE, AttemptState.SPAWNING),
    *_arrows([AttemptState.SPAWNING], Event.ALL_JOINED, AttemptState.SPAWNED),
    *_arrows([AttemptState.SPAWNED], Event.RUNS, AttemptState.ALLOCATED),
    *_arrows([AttemptState.QUEUED], Event.IMPOSSIBLE, AttemptState.RECLAIMING),
    *_arrows([AttemptState.SPAWNED], Event.PIN_EXPIRED, AttemptState.RECLAIMING),
    *_arrows(
        [AttemptState.CLAIMED, AttemptState.SPAWNING, AttemptState.SPAWNED], Event.GAVE_UP, AttemptState.RECLAIMING
    ),
    *_arrows([AttemptState.SPAWNED, AttemptState.ALLOCATED], Event.ENDED, AttemptState.RECLAIMING),
    *_arrows(_EARLY, Event.CANCELLED, AttemptState.RECLAIMING),
    *_arrows(_LIVE, Event.RESTARTED, AttemptState.RECLAIMING),
    *_arrows(
        [AttemptState.CLAIMED, AttemptState.SPAWNING, AttemptState.SPAWNED, AttemptState.ALLOCATED],
        Event.CHANGED,
        AttemptState.RECLAIMING,
    ),
    *_arrows(
        [AttemptState.RECLAIMING],
        Event.RECLAIMED,
        AttemptState.DONE,
        AttemptState.CANCELLED,
        AttemptState.REQUEUED,
        AttemptState.REVOKED,
        AttemptState.FAILED,
    ),
    *(Transition(s, Event.REPLACED, s) for s in (AttemptState.CLAIMED, AttemptState.SPAWNING)),
    *(Transition(s, Event.NOTED, s) for s in (AttemptState.QUEUED, AttemptState.SPAWNED, AttemptState.RECLAIMING)),
    *(Transition(s, event, s) for s in (*_LIVE, AttemptState.RECLAIMING) for event in _OF_ANY),
)


class JobStatus(StrEnum):
    """What a look says of an attempt's job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    ENDED = "ended"
    RESTARTED = "restarted"
    UNSEEN = "unseen"


def _job_status(attempt: Attempt, view: SchedulerView) -> tuple[JobStatus, Job | None]:
    job = view.jobs.get(attempt.job.job_id)
    if job is None:
        return JobStatus.UNSEEN, None
    if job.ref.restarts > attempt.job.restarts and job.ref.submitted >= attempt.job.submitted:
        return JobStatus.RESTARTED, job  # Slurm gives what it requeues a new submit time
    if job.ref != attempt.job:
        return JobStatus.UNSEEN, None  # another job that got the same id
    match job.state:
        case JobState.PENDING:
            return JobStatus.PENDING, job
        case JobState.RUNNING | JobState.SUSPENDED:
            return JobStatus.RUNNING, job
        case JobState.COMPLETING:
            return JobStatus.COMPLETING, job
        case JobState.ENDED:
            return JobStatus.ENDED, job


def open_attempts(state: PlanState, world: World) -> None:
    """A pending job without a live attempt gets one, and so does one that took a spare as it was submitted: that may
    run already."""
    if world.scheduler is None:
        return
    served = {a.job for a in state.attempts.values()}
    spares = {vm.feature: vm for vm in state.vms.values() if is_spare(vm) and vm.state is VmState.JOINED and vm.offer}
    for _, job in sorted(world.scheduler.value.jobs.items()):
        if job.ref in served or job.state not in (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED):
            continue
        spare = spares.pop(job.pinned, None) if job.pinned else None
        if job.state is JobState.PENDING or spare:
            attempt = open_attempt(state, job)
            if spare and not job.problem:
                take_spare(state, attempt, spare)


def take_spare(state: PlanState, attempt: Attempt, spare: Vm) -> None:
    """Its job has taken a spare by itself, and is tied to it already. What is left to do is to introduce its user."""
    story = f"{spare.kind} on {spare.host}, joined before, taken as it was submitted"
    taken = replace(attempt, state=AttemptState.SPAWNED, gated=False, pin=spare.feature, choice=story)
    serving = replace(spare, attempt=attempt.id, offer=Offer.TAKEN, unwanted="")
    state.move(
        Change(taken, Event.TOOK, story), Change(serving, Event.TAKEN, f"by job {attempt.job.job_id}, as it came")
    )


def open_attempt(state: PlanState, job: Job, *, tries: int = 0, not_before: float = 0.0, note: str = "") -> Attempt:
    attempt = Attempt(
        id=state.attempt_id(),
        version=0,
        state=AttemptState.QUEUED,
        since=state.now,
        job=job.ref,
        job_name=job.name,
        uid=job.uid,
        request=job.request or Request(0, Size(0, 0)),
        gated=_at_gate(job),
        tries=tries,
        not_before=not_before,
        note=note,
        work_dir=job.work_dir,
    )
    state.move(Change(attempt, Event.SUBMITTED, f"restart {job.ref.restarts}" if job.ref.restarts else ""))
    return state.attempts[attempt.id]


def _at_gate(job: Job) -> bool:
    return job.gated and job.pinned is None


def step_attempt(state: PlanState, attempt_id: int, world: World, policy: Policy) -> None:
    attempt = state.attempts.get(attempt_id)
    if attempt is None or world.scheduler is None:
        return
    began = world.scheduler.began
    if began < attempt.since and attempt.state is not AttemptState.RECLAIMING:
        # The look is older than the state: what it says of the job was already heeded.
        if attempt.state in (AttemptState.CLAIMED, AttemptState.SPAWNING):
            replace_or_advance_vms(state, attempt, world, policy)
        return
    sight, job = _job_status(attempt, world.scheduler.value)
    if attempt.quarantined and sight not in (JobStatus.ENDED, JobStatus.UNSEEN):
        return
    if attempt.state is AttemptState.RECLAIMING:
        _finish(state, attempt, sight, job, world, policy)
    elif not _ended(state, attempt, sight, job, world):
        match attempt.state:
            case AttemptState.QUEUED:
                _step_queued(state, attempt, sight, job)
            case AttemptState.CLAIMED | AttemptState.SPAWNING:
                _step_making(state, attempt, sight, job, world, policy)
            case AttemptState.SPAWNED:
                _step_spawned(state, attempt, sight, job, world, policy)
            case AttemptState.ALLOCATED:
                _step_allocated(state, attempt, sight)
            case _:
                pass


def given_back(attempt: Attempt, reason: str, *, tries: int) -> Attempt:
    """The attempt on its way out, its job to go back to the gate."""
    return replace(
        attempt, state=AttemptState.RECLAIMING, outcome="requeued", reason=reason, gated=False, tries=tries, note=""
    )


def _ended(state: PlanState, attempt: Attempt, sight: JobStatus, job: Job | None, world: World) -> bool:
    """What ends an attempt from any state: the job ended, or was started over by the scheduler."""
    assert world.scheduler is not None
    if sight is JobStatus.UNSEEN and world.scheduler.began <= world.effect_ended_at.get(attempt.key, attempt.since):
        return True  # not there, but the look is too old to say so
    if sight in (JobStatus.ENDED, JobStatus.UNSEEN):
        result = job.result if job else ""
        ran = attempt.state is AttemptState.ALLOCATED or (
            attempt.state is AttemptState.SPAWNED and result != "CANCELLED"
        )
        event, outcome = (Event.ENDED, "done") if ran else (Event.CANCELLED, "cancelled")
        why = result if job else "the scheduler no longer shows the job"
        _reclaim(state, attempt, event, outcome, why)  # type: ignore[arg-type]
        return True
    if sight is JobStatus.RESTARTED:
        _reclaim(state, attempt, Event.RESTARTED, "requeued", "the scheduler requeued the job")
        return True
    return False


def _reclaim(state: PlanState, attempt: Attempt, event: Event, outcome: Outcome, reason: str) -> None:
    state.move(
        Change(
            replace(attempt, state=AttemptState.RECLAIMING, outcome=outcome, reason=reason, note="", quarantined=""),
            event,
            reason,
        )
    )


def _quarantine(state: PlanState, attempt: Attempt, why: str) -> None:
    state.move(Change(replace(attempt, quarantined=why), Event.QUARANTINED, why))


def _step_queued(state: PlanState, attempt: Attempt, sight: JobStatus, job: Job | None) -> None:
    assert job is not None
    if sight is JobStatus.PENDING:
        request = job.request or Request(0, Size(0, 0))
        fresh = replace(
            attempt,
            request=request,
            job_name=job.name,
            uid=job.uid,
            work_dir=job.work_dir,
            gated=_at_gate(job),
            stray=False,
        )
        if fresh != attempt:
            state.move(Change(fresh, Event.NOTED, "changed while waiting" if request != attempt.request else ""))
    elif sight is JobStatus.RUNNING and not attempt.stray:
        # Requeued by Slurm with its old pin, it was started on a VM that is about to go.
        state.move(Change(replace(attempt, stray=True), Event.NOTED, "it runs on a VM of an earlier attempt"))


def _step_making(
    state: PlanState, attempt: Attempt, sight: JobStatus, job: Job | None, world: World, policy: Policy
) -> None:
    assert job is not None
    if sight is not JobStatus.PENDING:
        _quarantine(state, attempt, f"the job is {sight} before it was given its nodes")
        return
    if job.held:
        _give_back(state, attempt, Event.CHANGED, "the job was held")
    elif job.request != attempt.request:
        _give_back(state, attempt, Event.CHANGED, "the job's request was changed")
    else:
        replace_or_advance_vms(state, attempt, world, policy)


def _give_back(state: PlanState, attempt: Attempt, event: Event, reason: str, *, failed: bool = False) -> None:
    state.move(Change(given_back(attempt, reason, tries=attempt.tries + failed), event, reason))


def replace_or_advance_vms(state: PlanState, attempt: Attempt, world: World, policy: Policy) -> None:
    """Claimed and spawning: replace what failed, and go on when all VMs have come as far."""
    if attempt.quarantined:
        return
    vms = state.serving_vms_of(attempt)
    missing = attempt.request.nodes - len(vms)
    if missing > 0:
        replace_vms(state, attempt, missing, world, policy)
    elif attempt.state is AttemptState.CLAIMED and all(vm.state is not VmState.PLANNED for vm in vms):
        started = [Change(replace(vm, state=VmState.STARTING), Event.START) for vm in vms if vm.state is VmState.PARKED]
        state.move(Change(replace(attempt, state=AttemptState.SPAWNING), Event.MADE), *started)
    elif attempt.state is AttemptState.SPAWNING and all(vm.state is VmState.JOINED for vm in vms):
        state.move(Change(replace(attempt, state=AttemptState.SPAWNED, gated=False), Event.ALL_JOINED))


def _step_spawned(
    state: PlanState, attempt: Attempt, sight: JobStatus, job: Job | None, world: World, policy: Policy
) -> None:
    assert job is not None and world.scheduler is not None
    began = world.scheduler.began
    waits = waits_for_its_user(state, attempt, world, policy)
    vms = state.serving_vms_of(attempt)
    if sight in (JobStatus.RUNNING, JobStatus.COMPLETING):
        own = {vm.name for vm in state.vms_of(attempt)}  # those too that were lost in this very moment
        if not own.issuperset(job.nodes) and sight is JobStatus.RUNNING:
            _quarantine(state, attempt, f"its job runs on {', '.join(job.nodes)}, not on its own VMs")
            return
        if waits:
            return  # so does its end
        serving = [Change(replace(vm, state=VmState.SERVING), Event.RUNS) for vm in vms if vm.state is VmState.JOINED]
        state.move(Change(replace(attempt, state=AttemptState.ALLOCATED), Event.RUNS), *serving)
    elif job.held:
        _give_back(state, attempt, Event.CHANGED, "the job was held")
    elif job.request != attempt.request:
        _give_back(state, attempt, Event.CHANGED, "the job's request was changed")
    elif len(vms) < attempt.request.nodes or any(vm.failed for vm in vms):
        _give_back(state, attempt, Event.GAVE_UP, "a VM was lost before the job ran", failed=True)
    elif down := next((vm.name for vm in vms if vm.offer and _is_down(vm, world.scheduler.value)), ""):
        _give_back(state, attempt, Event.GAVE_UP, f"node {down} is down", failed=True)
    elif began - attempt.since > (policy.pin_timeout if job.eligible or not job.pinned else policy.held_timeout):
        why = f"the scheduler did not start it: {job.reason or 'no reason'}"
        _give_back(state, attempt, Event.PIN_EXPIRED, why, failed=True)


def _is_down(vm: Vm, view: SchedulerView) -> bool:
    return vm.name in view.nodes and view.nodes[vm.name].state is NodeState.DOWN


def waits_for_its_user(state: PlanState, attempt: Attempt, world: World, policy: Policy) -> bool:
    """Whether the job, which took its spare by itself, waits in it until its user is known, or its user is being told
    what it has. A spare that cannot be told of its user, or was not in time, is given up: its node goes DOWN, and the
    scheduler queues the job again."""
    unmet = [vm for vm in state.vms_of(attempt) if lacks_its_user(vm, attempt, world)]
    if unmet and world.hypervisor is not None:
        began = world.hypervisor.began
        heard = began > world.effect_ended_at.get(attempt.key, math.inf)  # what was said last may have let it in
        if heard and (attempt.reason or began - attempt.since > policy.pin_timeout):
            why = attempt.reason or f"it was not told of its user within {policy.pin_timeout:g} s"
            down = [Change(releasing(vm, why), Event.DIED, why) for vm in unmet if vm.state is not VmState.LOST]
            if down:
                state.move(*down)
    took = any(vm.offer is Offer.TAKEN for vm in state.vms_of(attempt))
    return bool(unmet) or (took and world.effect_ended_at.get(attempt.key) == math.inf)


def lacks_its_user(vm: Vm, attempt: Attempt, world: World) -> bool:
    """Whether its job took this VM by itself and nobody has seen yet that its guest knows the user. One on its way out
    never will."""
    if vm.offer is not Offer.TAKEN or vm.state is VmState.RELEASING or (vm.failed and vm.state is not VmState.LOST):
        return False
    seen = world.hypervisor.value.vms.get(vm.name) if world.hypervisor else None
    return seen is None or attempt.uid not in seen.introduced


def _step_allocated(state: PlanState, attempt: Attempt, sight: JobStatus) -> None:
    if sight is JobStatus.COMPLETING:
        _reclaim(state, attempt, Event.ENDED, "done", "its job is completing")
    elif sight is JobStatus.PENDING:
        # Pending again with the same restart count: the launch was taken back before it counted.
        _give_back(state, attempt, Event.CHANGED, "the scheduler took the launch back")


def _learn_the_end(state: PlanState, attempt: Attempt, sight: JobStatus, job: Job | None) -> Attempt:
    """A job that is completing has not said yet how it ends: over, or queued again."""
    if attempt.outcome != "done" or job is None:
        return attempt
    if sight is JobStatus.RESTARTED:
        told = replace(attempt, outcome="requeued", reason="the scheduler requeued the job", gated=True)
    elif sight is JobStatus.ENDED and job.result:
        told = replace(attempt, reason=job.result)
    else:
        return attempt
    if told != attempt:
        state.move(Change(told, Event.NOTED, told.reason))
    return state.attempts[attempt.id]


def _other_wish(job: Job, attempt: Attempt) -> bool:
    """Whether the job asks for something else than what was refused. What this scheme cannot read is no wish."""
    return job.request is not None and job.request != attempt.request


def _finish(
    state: PlanState, attempt: Attempt, sight: JobStatus, job: Job | None, world: World, policy: Policy
) -> None:
    """Reclaiming: the job must be off our nodes and off their feature before the VMs may go, and the
    VMs must be gone before the attempt is over."""
    assert world.scheduler is not None
    began = world.scheduler.began
    if began <= world.effect_ended_at.get(attempt.key, 0.0) or began < attempt.since:
        return  # nothing seen yet since our last word in this matter
    attempt = _learn_the_end(state, attempt, sight, job)
    if attempt.outcome == "revoked" and sight is JobStatus.PENDING and job is not None and _other_wish(job, attempt):
        again = replace(attempt, outcome="requeued", gated=_at_gate(job))
        state.move(Change(again, Event.NOTED, "changed before it was refused"))
        attempt = state.attempts[attempt.id]
    vms = state.vms_of(attempt)
    names = {vm.name for vm in vms}
    on_ours = job is not None and any(node in names for node in job.nodes)
    if job is not None and job.state is JobState.COMPLETING and on_ours:
        if began - attempt.since <= policy.complete_timeout:
            return
    elif job is not None and job.state in (JobState.RUNNING, JobState.SUSPENDED) and on_ours:
        unmet = [vm for vm in vms if lacks_its_user(vm, attempt, world) and vm.state is not VmState.LOST]
        said = max(attempt.since, world.effect_ended_at.get(attempt.key, 0.0))
        if unmet and world.hypervisor is not None and world.hypervisor.began > said:
            why = "its job started when nobody introduced its user any more"
            state.move(*(Change(releasing(vm, why), Event.DIED, why) for vm in unmet))
            return
        if attempt.outcome == "requeued" and sight is JobStatus.RUNNING:
            # Our pin was answered after we had given up on it: the job has its nodes, so let it run.
            state.move(Change(replace(attempt, outcome="done"), Event.NOTED, "the job started after all"))
        if sight is not JobStatus.RESTARTED or began - attempt.since <= policy.complete_timeout:
            return  # a restarted one is being requeued by the attempt that came after this
    elif job is not None and job.state is JobState.PENDING and (job.pinned == attempt.feature):
        if attempt.gated and sight is JobStatus.PENDING:
            state.move(Change(replace(attempt, gated=False), Event.NOTED))
        return  # the gate first: a pending job on a feature that no node has may never start
    if attempt.outcome in ("revoked", "failed") and sight in (JobStatus.PENDING, JobStatus.RUNNING):
        return  # not cancelled yet
    if attempt.outcome == "requeued" and not attempt.gated:
        state.move(Change(replace(attempt, gated=True), Event.NOTED, "its job is off our nodes"))
        attempt = state.attempts[attempt.id]
    leaving = [vm for vm in vms if vm.state not in (VmState.RELEASING, VmState.LOST)]
    if leaving:
        stuck = names & occupied_nodes(world.scheduler.value)  # a limit has passed: their nodes go DOWN first
        released = [
            releasing(vm, "", failed=vm.failed or vm.name in stuck, forget=vm.name not in stuck) for vm in leaving
        ]
        # Its job is over, and so is a quarantine, which was for the job's sake.
        state.move(*(Change(replace(vm, quarantined=""), Event.RELEASED, attempt.reason) for vm in released))
    if vms:
        return
    outcome = attempt.outcome or "done"
    state.move(Change(replace(attempt, state=AttemptState(outcome), quarantined=""), Event.RECLAIMED, attempt.reason))
    if outcome == "requeued" and sight is JobStatus.PENDING and job is not None:
        wait = policy.backoff(attempt.tries)
        open_attempt(state, job, tries=attempt.tries, not_before=state.now + wait if wait else 0.0, note=attempt.reason)


def replace_vms(state: PlanState, attempt: Attempt, missing: int, world: World, policy: Policy) -> None:
    failures = [vm.reason for vm in state.vms_of(attempt) if vm.failed and vm.reason]
    why = failures[-1] if failures else "a VM was lost"
    # Once a gang's VMs start, they know each other by name and let nobody else in: then it is all of them or none.
    told = attempt.state is AttemptState.SPAWNING and attempt.request.nodes > 1
    if told or attempt.replaced + missing > policy.replacements:
        if attempt.tries + 1 >= policy.attempts:
            text = f"no VM could be made for it in {policy.attempts} attempts: {why}"
            _reclaim(state, attempt, Event.GAVE_UP, "failed", text)
        else:
            _give_back(state, attempt, Event.GAVE_UP, why, failed=True)
        return
    if world.hypervisor is None:
        return
    hosts = world.hypervisor.value.hosts
    choice, parents = choose_clones(state, attempt, hosts, world, policy)
    able = {
        name: parents[name]
        for name in able_hosts(attempt, choice.kind, hosts, policy)
        if choice.kind is not CloneKind.INSTANT
        or _template_ready(state, template_key(attempt, name, parents[name], policy))
    }
    room = room_of(state, world.hypervisor.value, policy)
    chosen = room.place(missing, vm_claims(attempt.request.size, able, policy))
    vms = plan_vms(state, attempt, choice.kind, chosen, parents, policy) if chosen else None
    if vms is None:
        imageless = hosts and not parents
        lacks = "no host has its image" if imageless else "no room for another VM"
        _give_back(state, attempt, Event.GAVE_UP, f"{why}; {lacks}", failed=not imageless)
        return
    story = story_of(choice, vms)
    again = replace(attempt, replaced=attempt.replaced + missing, choice=f"{attempt.choice}; then {story}")
    state.move(
        Change(again, Event.REPLACED, f"{why}; now {story}"),
        *(Change(vm, Event.PLANNED) for vm in vms),
        make=(Claim(vm.key, vm.host, vm_claim(vm.size, policy)) for vm in vms),
    )


def _template_ready(state: PlanState, which: TemplateKey) -> bool:
    template = state.template_for(which)
    return template is not None and template.state is TemplateState.READY
