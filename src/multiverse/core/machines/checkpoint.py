"""Checkpoints: states that are made of a job while it goes on, so that less is computed again if its VM is lost.

A checkpoint that is complete waits (STORED, COPYING) as long as its job runs. If its run is over before its end,
because its VM was lost or somebody had it queued again, the next run goes on with the newest checkpoint. That serves
one run at a time: the row says which (`again`) before any process goes on, and the VM of an earlier run is gone by
then. It is not consumed: a later run that is lost before its own first checkpoint begins with it again.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from multiverse.core.machines.attempt import forget_no_checkpoint
from multiverse.core.machines.saved import (
    abandon,
    copy_if_due,
    go_on,
    keep_stored,
    note_copied,
    size_of_files,
    step_saved,
)
from multiverse.core.model.job import AttemptState, Job, JobState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import COMPLETE, Saved, SavedState
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Change, Event

S = SavedState


def ask_for_checkpoint(saved: Saved, *, shared_files: bool) -> Change:
    """Begin one. `shared_files`: also of a job that writes to files that other machines share."""
    begun = replace(saved, state=S.CAPTURING, checkpoint=True, froze=True, shared_files=shared_files)
    return Change(begun, Event.CHECKPOINT_DUE, saved.asked)


def step_state(state: State, number: int, world: World, policy: Policy) -> None:
    """Step a state of a job, whether it is a checkpoint or of a job that was saved."""
    saved = state.saved.get(number)
    if saved is None or not saved.checkpoint or saved.state in (S.UNDOING, S.DISCARDING):
        step_saved(state, number, world, policy)
    elif saved.quarantined is None and world.scheduler is not None:
        _step_checkpoint(state, saved, world.scheduler.value.jobs.get(saved.job.job_id), world, policy)


def _step_checkpoint(state: State, saved: Saved, job: Job | None, world: World, policy: Policy) -> None:
    vm = state.vms.get(saved.vm)
    if saved.state is S.CAPTURING:
        _step_capturing(state, saved, vm, job, world, policy)
    elif why := _why_useless(state, saved, job, world, policy):
        state.move(abandon(saved, why))
    elif saved.state is S.THAWING:
        _step_thawing(state, saved, world)
    else:
        _step_standing(state, saved, world)


def _step_capturing(state: State, saved: Saved, vm: Vm | None, job: Job | None, world: World, policy: Policy) -> None:
    seen = world.job_began(saved.job.job_id) > saved.since
    size = size_of_files(saved, world)
    if seen and (job is None or job.ref != saved.job or job.state is JobState.ENDED):
        state.move(abandon(saved, Why.SAVED_JOB_OVER(job=saved.job.job_id)))
    elif vm is None or vm.state is not VmState.SERVING:
        state.move(abandon(saved, Why.SAVED_VM_LOST(vm=saved.vm_name)))
    elif size is not None and world.ended_at(saved.key) < inf:
        standing = [one for one in checkpoints_of(state, saved.job.job_id) if one.stands]
        older = standing[: max(0, len(standing) + 1 - policy.save_checkpoints)]
        noted = filter(None, map(forget_no_checkpoint, state.attempts_of_job(saved.job)))
        stored = keep_stored(state, saved, size, world)
        state.move(stored, *(abandon(one, Why.CHECKPOINT_OLD()) for one in older), *noted)


def checkpoints_of(state: State, job_id: str) -> list[Saved]:
    """The checkpoints of a job, the newest one last."""
    return sorted((one for one in state.saved_of_job(job_id) if one.checkpoint), key=lambda one: one.id)


def _why_useless(state: State, saved: Saved, job: Job | None, world: World, policy: Policy) -> Reason | None:
    if world.job_began(saved.job.job_id) > saved.since and (job is None or job.state is JobState.ENDED):
        return Why.SAVED_JOB_OVER(job=saved.job.job_id)
    others = (one for one in state.saved_of_job(saved.job.job_id) if not one.checkpoint)
    if saved.state in COMPLETE and any(one.state in (*COMPLETE, S.RESUMING, S.THAWING) for one in others):
        return Why.CHECKPOINT_OLD()
    age = state.now + world.epoch - saved.written
    if policy.save_keep and age > policy.save_keep and job is not None and job.state is JobState.PENDING:
        return Why.SAVED_TOO_OLD(age=age)
    return None


def _step_standing(state: State, saved: Saved, world: World) -> None:
    vm = next(iter(state.restored_from(saved)), None)
    attempt = state.attempt_of(vm) if vm is not None else None
    if note_copied(state, saved, world):
        return
    if vm is not None and attempt is not None and saved.is_for(attempt.job):
        if attempt.state is AttemptState.ALLOCATED and vm.state is VmState.SERVING:
            state.move(Change(replace(saved, state=S.THAWING, again=attempt.job), Event.RUNS))
    else:
        copy_if_due(state, saved)


def _step_thawing(state: State, saved: Saved, world: World) -> None:
    """From when its processes go on the checkpoint, and the older ones, are of that run: they serve later ones."""
    vm = next(iter(state.restored_from(saved)), None)
    attempt = state.attempt_of(vm) if vm is not None else None
    assert saved.again is not None
    if vm is None or attempt is None or attempt.job != saved.again or attempt.state is not AttemptState.ALLOCATED:
        why = Why.CHECKPOINT_UNUSED(job=saved.job.job_id, restart=saved.again.restarts)
        state.move(Change(replace(saved, state=S.STORED, again=None), Event.KEPT, why))
        return
    if go_on(saved, [vm], world):
        others = [one for one in checkpoints_of(state, saved.job.job_id) if one.stands]
        why = Why.RESTART(number=saved.again.restarts)
        kept = replace(saved, state=S.STORED, job=saved.again, again=None, runs=attempt.runs)
        state.move(
            Change(kept, Event.KEPT, why), *(Change(replace(one, job=saved.again), Event.NOTED, why) for one in others)
        )
