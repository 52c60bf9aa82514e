"""Which jobs are saved, and when: as somebody asks for it."""

from __future__ import annotations

from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.machines.saved import ask_to_save, resume_saved
from multiverse.core.model.job import Attempt, AttemptState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import WAITS_FOR_RUN, Saved, SavedState
from multiverse.core.model.vm import VmState
from multiverse.core.state import State
from multiverse.core.transition import Command


def follow_command(context: Context, command: Command) -> None:
    """Save a running job, or resume a saved one. A refusal is kept for whoever asked."""
    try:
        if command.verb == "save":
            save(context, _running(context.state, command.job), Why.SAVE_ORDERED(), hold=command.hold)
        else:
            _resume(context.state, command)
    except Refused as error:
        context.state.refusals.append((command, error))


def _running(state: State, job_id: str) -> Attempt:
    for attempt in state.attempts_of_job(job_id):
        if attempt.state is AttemptState.ALLOCATED:
            return attempt
    raise Refused(f"job {job_id} runs in no VM", hint="multiverse jobs shows which jobs do")


def save(context: Context, attempt: Attempt, asked: Reason, *, hold: bool = False) -> None:
    """Begin to save a running job, whose next run waits until somebody releases it if `hold`. Raises `Refused` if it
    cannot be saved."""
    state, job_id = context.state, attempt.job.job_id
    if attempt.request.nodes > 1:
        raise Refused(f"job {job_id} has {attempt.request.nodes} VMs", hint="only jobs of one VM can be saved")
    vms = [vm for vm in state.serving_vms_of(attempt) if vm.state is VmState.SERVING]
    host = context.in_sight.get(vms[0].host) if vms else None
    if not vms or host is None or host.storage is None:
        on = f" on host {vms[0].host}" if vms else ""
        raise Refused(f"job {job_id} cannot be saved{on}: no storage is in reach", hint="see `multiverse hosts`")
    if any(one.is_for(attempt.job) or one.job == attempt.job for one in state.saved_of_job(job_id)):
        raise Refused(f"job {job_id} is being saved already", hint="multiverse saved shows how far it is")
    (vm,) = vms
    saved = Saved(
        id=state.numbers.new_saved_id(),
        since=state.now,
        job=attempt.job,
        uid=attempt.uid,
        vm=vm.id,
        vm_name=vm.name,
        token=vm.token,
        mac=vm.mac,
        address=vm.address,
        image=vm.image,
        kind=vm.kind,
        size=vm.size,
        node_size=vm.node_size,
        account=vm.account,
        source=vm.place.source,
        storage=host.storage.name,
        machine=host.storage.machine,
        asked=asked,
        hold=hold,
    )
    state.move(ask_to_save(saved))


def _resume(state: State, command: Command) -> None:
    saved = next((one for one in state.saved_of_job(command.job) if one.state in WAITS_FOR_RUN), None)
    if saved is None:
        raise Refused(f"job {command.job} is not saved", hint="multiverse saved shows the jobs that are")
    if saved.state is SavedState.STORED and saved.hold:
        state.move(resume_saved(saved, Why.OPERATOR()))
