"""Saved jobs: the processes of a job are stopped, its run ends, and its next run goes on with them in a restored VM.

Until CUTTING everything can be undone. From CUTTING on the run is over: the scheduler queues the job again, and the
state belongs to the run that follows (`Saved.is_for`), to no other. A restore may be repeated until THAWING, which is
recorded before any process goes on. Nothing attaches to a state twice, because it leaves THAWING for DISCARDING only.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from multiverse.core.model.job import AttemptState, Job, JobState, NodeState
from multiverse.core.model.reason import Reason, Why, text_of
from multiverse.core.model.saved import HOLDS_VM, Saved, SavedState
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Awaiting, Change, EffectKind, Event, Transition, transitions, unchanged

S = SavedState

# --- table -----------------------------------------------------------------------------------------

_LIVE = tuple(state for state in S if state is not S.GONE)

SAVED: tuple[Transition, ...] = (
    *transitions([None], Event.ASKED, S.PREPARING),
    *transitions([S.PREPARING], Event.READY, S.FREEZING),
    *transitions([S.FREEZING], Event.FROZEN, S.CUTTING),
    *transitions([S.CUTTING], Event.QUEUED_AGAIN, S.WRITING),
    *transitions([S.WRITING], Event.STORED, S.STORED),
    *transitions([S.STORED], Event.RESUMED, S.RESUMING),
    *transitions([S.RESUMING], Event.RESUMED, S.STORED),
    *transitions([S.STORED, S.RESUMING], Event.RUNS, S.THAWING),
    *transitions([S.THAWING], Event.THAWED, S.DISCARDING),
    *transitions([S.PREPARING, S.FREEZING], Event.ABANDONED, S.UNDOING),
    *transitions([S.CUTTING, S.WRITING, S.STORED, S.RESUMING, S.THAWING], Event.ABANDONED, S.DISCARDING),
    *transitions([S.UNDOING], Event.THAWED, S.GONE),
    *transitions([S.DISCARDING], Event.ABSENT, S.GONE),
    *unchanged(_LIVE, Event.NOTED, Event.QUARANTINED, Event.RETRIED),
)

AWAITED_SAVED = dict.fromkeys((S.PREPARING, S.CUTTING, S.RESUMING, S.UNDOING), Awaiting.AFTER_EFFECT)
"""In which states the scheduler is read for the job, and for its node."""

# --- changes ---------------------------------------------------------------------------------------


def ask_to_save(saved: Saved) -> Change:
    return Change(saved, Event.ASKED, saved.asked)


def resume_saved(saved: Saved, why: Reason) -> Change:
    return Change(replace(saved, state=S.RESUMING), Event.RESUMED, why)


def note_trouble(saved: Saved, why: Reason) -> Change:
    """Its effect failed, and is tried again."""
    return Change(replace(saved, reason=why), Event.NOTED, why)


def abandon(saved: Saved, why: Reason) -> Change:
    """It is not saved, or the state is of no use any more. Until the job was cut off, its processes go on."""
    state = S.UNDOING if saved.state in (S.PREPARING, S.FREEZING) else S.DISCARDING
    return Change(replace(saved, state=state, reason=why, quarantined=None), Event.ABANDONED, why)


# --- step ------------------------------------------------------------------------------------------


def step_saved(state: State, number: int, world: World, policy: Policy) -> None:
    saved = state.saved.get(number)
    if saved is None or saved.quarantined or world.scheduler is None:
        return
    job = world.scheduler.value.jobs.get(saved.job.job_id)
    vm = state.vms.get(saved.vm)
    match saved.state:
        case S.DISCARDING:
            _step_discarding(state, saved, world)
        case S.UNDOING:
            _step_undoing(state, saved, vm, job, world)
        case S.STORED | S.RESUMING | S.THAWING:
            _step_stored(state, saved, job, world)
        case _:
            _step_saving(state, saved, vm, job, world, policy)


def _step_saving(state: State, saved: Saved, vm: Vm | None, job: Job | None, world: World, policy: Policy) -> None:
    """Its VM is still the first run's."""
    if why := _why_over(state, saved, job, world):
        state.move(abandon(saved, why))
    elif vm is None or vm.state is not VmState.SERVING:
        state.move(abandon(saved, Why.SAVED_VM_LOST(vm=saved.vm_name)))
    elif saved.state is not S.WRITING and state.now - saved.since > policy.save_timeout:
        # What was cut off cannot be undone: it is tried for as long as the scheduler does not answer.
        if saved.state is not S.CUTTING:
            state.move(abandon(saved, Why.SAVE_LATE(step=saved.state, limit=policy.save_timeout)))
    else:
        _advance(state, saved, vm, job, world)


def _why_over(state: State, saved: Saved, job: Job | None, world: World) -> Reason | None:
    """Why nobody needs the state any more: its job has ended, or went on without it."""
    if world.job_began(saved.job.job_id) <= saved.since:
        return None
    if job is None or job.state is JobState.ENDED:
        return Why.SAVED_JOB_OVER(job=saved.job.job_id)
    expected = (saved.job.restarts, saved.job.restarts + 1)
    if job.ref.restarts not in expected[saved.state not in (S.PREPARING, S.FREEZING, S.CUTTING) :]:
        return Why.SAVED_RUN_OVER(job=saved.job.job_id, restart=job.ref.restarts)
    if job.ref.restarts == saved.job.restarts + 1 and saved.state in (S.PREPARING, S.FREEZING):
        return Why.SAVED_RUN_OVER(job=saved.job.job_id, restart=job.ref.restarts)
    return None


def _advance(state: State, saved: Saved, vm: Vm, job: Job | None, world: World) -> None:
    assert world.scheduler is not None
    seen, node = world.vm(vm), world.scheduler.value.nodes.get(vm.name)
    ended = max(saved.since, world.ended_at(saved.key))
    match saved.state:
        case S.PREPARING:
            drained = node is not None and node.state is NodeState.DRAINED and world.node_began(vm.name) > saved.since
            if drained and job is not None and job.state is JobState.RUNNING and job.requeues:
                state.move(Change(replace(saved, state=S.FREEZING), Event.READY))
        case S.FREEZING:
            latest = world.latest(vm.place.source)
            if seen is not None and seen.frozen and latest is not None and latest.began > saved.since:
                state.move(Change(_cut(state, saved, job, world), Event.FROZEN))
        case S.CUTTING:
            if job is not None and saved.is_for(job.ref):
                again = replace(saved, state=S.WRITING, again=job.ref)
                state.move(Change(again, Event.QUEUED_AGAIN, Why.RESTART(number=job.ref.restarts)))
        case S.WRITING if (files := world.saved(saved.name)) is not None and ended < inf:
            if files.token == saved.token:
                whole = replace(saved, state=S.STORED, bytes=files.size, written=state.now + world.epoch, reason=None)
                state.move(Change(whole, Event.STORED))


def _cut(state: State, saved: Saved, job: Job | None, world: World) -> Saved:
    """The run is over now. The next one may take what is left of the time limit; for a job that is saved at its time
    limit it may take as long as this one."""
    attempt = next(iter(state.attempts_of_job(saved.job)), None)
    wished = attempt is not None and attempt.request.save is not None
    deadline = job.deadline if job is not None and not wished else None
    remaining = max(0.0, deadline - state.now - world.epoch) if deadline is not None else None
    return replace(saved, state=S.CUTTING, limit=job and job.limit, remaining=remaining)


def limit_of_next_run(saved: Saved, job: Job) -> float | None:
    """Seconds that the next run may take, if its time limit is longer. A change of the limit meanwhile counts."""
    if saved.remaining is None:
        return None
    changed = job.limit - saved.limit if job.limit is not None and saved.limit is not None else 0.0
    return max(0.0, saved.remaining + changed)


def _step_stored(state: State, saved: Saved, job: Job | None, world: World) -> None:
    """It waits for the next run, or that has begun in the restored VM."""
    if why := _why_over(state, saved, job, world):
        state.move(abandon(saved, why))
        return
    if saved.state is S.RESUMING and job is not None and not job.held and world.job_began(job.ref.job_id) > saved.since:
        state.move(Change(replace(saved, state=S.STORED, hold=False), Event.RESUMED))
        return
    vm = state.restored_from(saved)
    attempt = state.attempt_of(vm) if vm is not None else None
    if vm is None or attempt is None:
        if saved.state is S.THAWING:
            state.move(abandon(saved, Why.SAVED_VM_LOST(vm=saved.vm_name)))
        return
    if saved.state is not S.THAWING:
        if attempt.state is AttemptState.ALLOCATED and vm.state is VmState.SERVING and saved.is_for(attempt.job):
            state.move(Change(replace(saved, state=S.THAWING), Event.RUNS))
        return
    seen, latest = world.vm(vm), world.latest(vm.place.source)
    since = max(saved.since, world.ended_at(saved.key, inf))
    if seen is not None and seen.runs and not seen.frozen and latest is not None and latest.began > since:
        state.move(Change(replace(saved, state=S.DISCARDING), Event.THAWED))


def _step_undoing(state: State, saved: Saved, vm: Vm | None, job: Job | None, world: World) -> None:
    """Its processes go on, and its node serves as before; or its run is over for another reason."""
    assert world.scheduler is not None
    since = max(saved.since, world.ended_at(saved.key, inf))
    seen = world.vm(vm) if vm is not None else None
    over = vm is None or vm.leaving or (job is not None and job.ref != saved.job) or job is None
    node = world.scheduler.value.nodes.get(saved.vm_name)
    back = node is None or node.state is not NodeState.DRAINED
    latest = world.latest(saved.source)
    goes_on = seen is not None and not seen.frozen and latest is not None and latest.began > since
    if over or (goes_on and back and world.node_began(saved.vm_name) > since):
        state.move(Change(replace(saved, state=S.GONE), Event.THAWED, saved.reason))


def _step_discarding(state: State, saved: Saved, world: World) -> None:
    """It is gone once nobody shows any file of it after its removal. While its storage is out of sight nothing is
    concluded, nor while its VM exists: that may still be being written."""
    since = max(saved.since, world.ended_at(saved.key, inf))
    showing = [
        latest
        for observation in world.sources.values()
        if (latest := observation.latest) is not None
        and any(h.storage is not None and h.storage.name == saved.storage for h in latest.value.hosts.values())
    ]
    absent = all(one.began > since and saved.name not in one.value.saved for one in showing)
    if showing and absent and saved.vm not in state.vms:
        state.move(Change(replace(saved, state=S.GONE), Event.ABSENT, saved.reason))


SAVED_EFFECTS = {
    S.PREPARING: EffectKind.PREPARE,
    S.FREEZING: EffectKind.FREEZE,
    S.CUTTING: EffectKind.CUT,
    S.WRITING: EffectKind.SAVE,
    S.RESUMING: EffectKind.RESUME,
    S.THAWING: EffectKind.THAW,
    S.UNDOING: EffectKind.UNDO,
    S.DISCARDING: EffectKind.DISCARD,
}


def text_of_saved(saved: Saved) -> str:
    """What the user of the job is told as it is queued again."""
    if saved.state is not S.CUTTING:
        return ""
    if saved.hold:
        return text_of(Why.SAVED_HELD(at=saved.begun, id=saved.job.job_id))
    return text_of(Why.SAVED_SINCE(saved.asked, at=saved.begun))


def saved_is_settled(saved: Saved) -> bool:
    """Whether only a change of its job or of a VM moves it."""
    return saved.state is S.STORED or saved.quarantined is not None


def is_held_for_saving(state: State, vm: Vm) -> bool:
    """Whether a VM is needed after the run of its job has ended, because it is being saved."""
    return any(one.state in HOLDS_VM for one in state.saved_of(vm))
