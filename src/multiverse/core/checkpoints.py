"""Of which jobs checkpoints are made, and when: as their users asked for them, and as somebody asks now."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.machines.attempt import captured, no_checkpoint
from multiverse.core.machines.checkpoint import ask_for_checkpoint
from multiverse.core.model.job import Attempt, JobState
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.saving import is_busy, new_state, running
from multiverse.core.transition import Command


def follow_command(context: Context, command: Command) -> None:
    """Make a checkpoint of a running job. A refusal is kept for whoever asked."""
    try:
        attempt = running(context.state, command)
        asked = Why.SAVE_ORDERED() if command.uid is None else Why.SAVE_ASKED()
        _begin(context, attempt, asked, shared_files=command.shared_files)
    except Refused as error:
        context.state.refusals.append((command, error))


def capture_due(context: Context) -> None:
    """Make the checkpoints that are due. If one is refused, its job's user is told why, and the next one is made when
    it is due."""
    if context.world.scheduler is None:
        return
    for attempt in context.state.asking_to_be_saved():
        job = context.scheduler.jobs.get(attempt.job.job_id)
        wish, due = attempt.request.checkpoint, next_checkpoint(context, attempt)
        if wish is None or due is None or due > context.now:
            continue
        runs = job is not None and job.ref == attempt.job and job.state is JobState.RUNNING
        if not runs or is_busy(context.state, attempt):
            continue
        try:
            _begin(context, attempt, Why.CHECKPOINT_DUE(pause=wish.every), shared_files=wish.shared_files)
        except Refused as error:
            refused = no_checkpoint(replace(attempt, captured=context.now), said(str(error)))
            context.state.move(refused)


def next_checkpoint(context: Context, attempt: Attempt) -> float | None:
    """The Unix time at which the next checkpoint of a running job is due; None if its user asked for none."""
    wish = attempt.request.checkpoint
    if wish is None:
        return None
    return max(attempt.captured, context.unix(attempt.since)) + max(wish.every, context.policy.save_checkpoint_every)


def _begin(context: Context, attempt: Attempt, asked: Reason, *, shared_files: bool) -> None:
    if attempt.request.nodes > 1:
        what = f"job {attempt.job.job_id} has {attempt.request.nodes} VMs"
        raise Refused(what, hint="checkpoints are made of jobs of one VM; multiverse save saves it")
    saved = new_state(context, attempt, asked)
    begun = captured(attempt, context.now, asked)
    context.state.move(ask_for_checkpoint(saved, shared_files=shared_files), begun)
