"""Which jobs are saved, and when: as somebody asks for it, and ahead of their time limits; and what names in the
storage no row explains."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.machines.attempt import evict_job, not_saved
from multiverse.core.machines.checkpoint import checkpoints_of
from multiverse.core.machines.saved import abandon, ask_to_save, is_mute, resume_saved, undo_unexplained
from multiverse.core.model.basics import ClaimKey
from multiverse.core.model.eviction import cause_of
from multiverse.core.model.host import Host
from multiverse.core.model.job import Attempt, AttemptState, Eviction, Job, JobState
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.saved import COMPLETE, UNWRITTEN, WAITS_FOR_RUN, Saved, SavedPart, SavedState, Storage
from multiverse.core.model.vm import MOVING_STATES, SLEEPING_STATES, Vm, VmState
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.state import State
from multiverse.core.transition import Command

_LEAST = 10.0  # seconds before its time limit: a job is not saved any more, because the scheduler may end it meanwhile


def follow_command(context: Context, command: Command) -> None:
    """Save a running job, or resume a saved one. A refusal is kept for whoever asked."""
    try:
        if command.verb == "save":
            ordered = command.uid is None
            asked = Why.SAVE_ORDERED() if ordered else Why.SAVE_ASKED()
            save(context, running(context.state, command), asked, hold=command.hold, evicts=ordered)
        else:
            _resume(context.state, command)
    except Refused as error:
        context.state.refusals.append((command, error))


def running(state: State, command: Command) -> Attempt:
    """The running job that is meant. A user is told the same of jobs of others as of those that do not exist."""
    for attempt in state.attempts_of_job(command.job):
        if attempt.state is AttemptState.ALLOCATED and command.uid in (None, attempt.uid):
            return attempt
    hint = "multiverse jobs shows which jobs do" if command.uid is None else "squeue --me shows your jobs"
    raise Refused(f"job {command.job} runs in no VM{perhaps_inside(state, command)}", hint=hint)


def perhaps_inside(state: State, command: Command) -> str:
    """What a refusal adds for a job that may run in another partition, with VMs inside it. A user is told the same of
    jobs of others."""
    job = state.queue.jobs.get(command.job)
    ours = job is not None and not job.at_origin and command.uid in (None, job.uid)
    return "" if ours else " of its own (VMs inside a job are neither saved nor moved)"


def save(
    context: Context,
    attempt: Attempt,
    asked: Reason,
    *,
    hold: bool = False,
    evicts: bool = False,
    restarts: bool = False,
) -> None:
    """Begin to save a running job, whose next run waits until somebody releases it if `hold`. `evicts`: so that it
    leaves its host, not as its user wished. `restarts`: it would begin anew otherwise, and does so if its state is
    lost. Raises `Refused` if it cannot be saved."""
    saved = replace(new_state(context, attempt, asked), hold=hold)
    if restarts and saved.requeues:
        saved = replace(saved, may_restart=True)
    if not evicts:
        context.state.move(ask_to_save(replace(saved, evictions=attempt.evictions)))
        return
    vms = [context.state.vms[part.vm] for part in saved.parts]
    eviction = Eviction(context.now, "save", vms[0].host, asked, sum(vm.size.memory for vm in vms))
    evicted = attempt.with_eviction(eviction)
    context.state.move(ask_to_save(replace(saved, evictions=evicted.evictions)), evict_job(evicted, asked))


def new_state(context: Context, attempt: Attempt, asked: Reason) -> Saved:
    """The row of a state that a running job is to have. Raises `Refused` if it can have none now."""
    what, wish = what_to_save(context, attempt), attempt.request.save
    return replace(
        _row_of(context, what.vms[0], what.job, asked),
        others=tuple(map(_part_of, what.vms[1:])),
        storage=what.storage.name,
        machine=what.storage.machine,
        runs=attempt.runs,
        bound=what.bound,
        encrypted=context.policy.save_encrypt,
        may_restart=wish is not None and wish.restart,
    )


class ToSave(NamedTuple):
    """What is saved of a running job."""

    job: Job
    vms: list[Vm]  # the one with its script first
    storage: Storage
    bound: int  # bytes that their states may take


def what_to_save(context: Context, attempt: Attempt) -> ToSave:
    """What would be saved of a running job. Raises `Refused` if it cannot be saved now. Nothing is changed."""
    state, job_id = context.state, attempt.job.job_id
    job = context.scheduler.jobs.get(job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job:
        raise Refused(f"the scheduler does not show this run of job {job_id}", hint="try again in a moment")
    _check(job, attempt, context.policy)
    if any(vm.state in MOVING_STATES for vm in state.vms_of(attempt)):
        raise Refused(f"job {job_id} cannot be saved now: its VM moves", hint="try again when it has moved")
    if any(vm.state in SLEEPING_STATES for vm in state.vms_of(attempt)):
        raise Refused(f"job {job_id} cannot be saved now: its VM sleeps", hint="resume it first: scontrol resume")
    vms = _script_first(attempt, job, [vm for vm in state.serving_vms_of(attempt) if vm.state is VmState.SERVING])
    host, storage = _host_that_saves(context, job_id, vms)
    _check_idle(state, attempt)
    if mute := next((vm for vm in vms if is_mute(vm, context.world)), None):
        raise Refused(f"job {job_id} cannot be saved: {Why.SAVE_MUTE(vm=mute.name)}", hint="see what it does as root")
    bound = sum(bound_of(state, vm) for vm in vms)
    if why := why_no_room(context, attempt.uid, host, bound):
        raise Refused(f"job {job_id} cannot be saved: {why}", hint="multiverse saved shows what takes the room")
    return ToSave(job, vms, storage, bound)


def _script_first(attempt: Attempt, job: Job, vms: list[Vm]) -> list[Vm]:
    """The VMs of a job, the one with its script first. Raises `Refused` if they are not all there."""
    found = sorted(vms, key=lambda vm: vm.name != job.script_node)
    alone = len(found) == attempt.request.nodes == 1
    if not alone and (len(found) != attempt.request.nodes or found[0].name != job.script_node):
        what = f"job {job.ref.job_id} cannot be saved: not all of its VMs are in sight"
        raise Refused(what, hint="multiverse vms shows them; try again when they serve")
    return found


def _host_that_saves(context: Context, job_id: str, vms: list[Vm]) -> tuple[Host, Storage]:
    """The host of the first VM and its storage, if those of all VMs write there. Raises `Refused` otherwise."""
    found: tuple[Host, Storage] | None = None
    for vm in vms:
        host = context.in_sight.get(vm.host)
        if host is None or host.storage is None:
            what = f"job {job_id} cannot be saved on host {vm.host}: no storage is in reach"
            raise Refused(what, hint="see `multiverse hosts`")
        found = found or (host, host.storage)
        if host.storage != found[1]:
            what = f"job {job_id} cannot be saved: hosts {found[0].name} and {vm.host} of its VMs share no storage"
            raise Refused(what, hint="save.directory must be on a file system that both have, and both the same QEMU")
    assert found is not None, "a job that runs has a VM"
    return found


def _part_of(vm: Vm) -> SavedPart:
    return SavedPart(vm.id, vm.name, vm.token, vm.mac, vm.address, vm.size, vm.place.source)


def _row_of(context: Context, vm: Vm, job: Job, asked: Reason) -> Saved:
    """A row for the job that runs in a VM."""
    return Saved(
        id=context.state.numbers.new_saved_id(),
        since=context.state.now,
        job=job.ref,
        uid=job.uid,
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
        storage="",
        machine="",
        asked=asked,
        begun=context.now,
        requeues=job.requeues,
    )


def with_its_state(state: State, attempt: Attempt, why: Reason | None) -> Reason | None:
    """Why a job waits; of a saved one since when it is saved, for which other job or why else if it was evicted, and
    where its state is, before that. Likewise of one that was queued again for another job."""
    saved = state.saved_for(attempt.job)
    if saved is None and why is not None and (eviction := attempt.preempted) is not None:
        return Why.REQUEUED_SINCE(eviction.why, at=eviction.at).also(why)
    if saved is None or why is None:
        return why
    cause, job, by = why_evicted(saved), "", None
    if cause is not None and cause.kind is Why.PREEMPTED:
        (job,), by, cause = cause.jobs, dict(cause.figures)["by"], None
    if saved.kept:
        return Why.SAVED_SINCE(cause, why, at=saved.begun, host=saved.kept, job=job, by=by)
    size = saved.bytes >> 20 or None
    return Why.SAVED_SINCE(cause, why, at=saved.begun, size=size, storage=saved.storage, job=job, by=by)


def why_evicted(saved: Saved) -> Reason | None:
    """Why the job was saved, if that was an eviction."""
    return saved.asked if not saved.checkpoint and cause_of(saved.asked) else None


def let_frozen_jobs_go_on(context: Context) -> None:
    """Jobs whose processes are stopped though no row tells why, as after a database was lost. A guest that was cut off
    from its run refuses that, and its VM ends."""
    state = context.state
    for name in sorted(chain.from_iterable(state.compared.frozen.values())):
        vm = state.vms.get(state.vm_named.get(name, 0))
        seen = context.world.vm(vm) if vm is not None else None
        if vm is None or seen is None or state.saved_of(vm) or state.saved_named(vm.saved):
            continue
        job = _job_on(context, vm) if seen.frozen or seen.freezing else None
        if job is not None:
            state.move(undo_unexplained(_row_of(context, vm, job, Why.FOUND_FROZEN())))


def _job_on(context: Context, vm: Vm) -> Job | None:
    """The job that runs on a VM, as its attempt knows it, or on an orphan. One that is to end is on it, too: what is
    stopped cannot end."""
    attempt = context.state.attempt_of(vm)
    if context.world.scheduler is None or vm.state not in (VmState.SERVING, VmState.ORPHAN):
        return None
    job = context.scheduler.jobs.get(attempt.job.job_id if attempt is not None else vm.job_id)
    runs = job is not None and job.state in (JobState.RUNNING, JobState.COMPLETING) and vm.name in job.nodes
    serves = attempt is not None and attempt.state in (AttemptState.ALLOCATED, AttemptState.RECLAIMING)
    mine = attempt is None or (job is not None and serves and job.ref == attempt.job)
    return job if runs and mine else None


def _check_idle(state: State, attempt: Attempt) -> None:
    """Raise `Refused` if another state of the job is being made, or used."""
    job_id = attempt.job.job_id
    for one in state.saved_of_job(job_id):
        if one.state is SavedState.CAPTURING:
            raise Refused(f"a checkpoint of job {job_id} is being made", hint="try again when it is complete")
        if not one.stands and (one.is_for(attempt.job) or one.job == attempt.job):
            raise Refused(f"job {job_id} is being saved already", hint="multiverse saved shows how far it is")


def bound_of(state: State, vm: Vm) -> int:
    """Bytes that the state of a VM may take: all its memory, and what its disk can grow to. What compression saves is
    not known before."""
    claim = state.claims.get(ClaimKey(vm.key, vm.host))
    return (vm.size.memory + (claim.size.disk if claim is not None else vm.size.disk)) << 20


def why_no_room(context: Context, uid: int, host: Host, size: int) -> Reason | None:
    """Why no state of `size` bytes may be written for a user from that host. Each state counts as what it may take
    until it is complete, and from then on as what it takes."""
    policy, states = context.policy, context.state.saved.values()
    of_user, of_site = sum(one.claimed for one in states if one.uid == uid), sum(one.claimed for one in states)
    for why, quota, taken in (
        (Why.SAVE_USER_QUOTA, policy.save_user_quota, of_user),
        (Why.SAVE_SITE_QUOTA, policy.save_site_quota, of_site),
    ):
        if quota and taken + size > quota:
            return why(need=size >> 20, taken=taken >> 20, quota=quota >> 20)
    if host.storage is None or host.storage_free is None:
        return None
    awaited = sum(one.bound for one in states if one.storage == host.storage.name and one.state in UNWRITTEN)
    if awaited + size > host.storage_free:
        free = max(0, host.storage_free - awaited)
        return Why.STORAGE_FULL(need=size >> 20, free=free >> 20, storage=host.storage.name)
    return None


def unexplained_states(state: State, world: World, policy: Policy) -> list[tuple[str, str]]:
    """Names of saved VMs of our site that a source shows and no row has, each with a source that shows it. If the
    database may have lost the row, its job may still go on by hand from files that are complete: such a state counts
    once it is older than any. What a host keeps in its memory would take room that nothing claims."""
    found = {}
    for source, names in sorted(state.compared.stray.items(), reverse=True):  # of several the same one each time
        latest = world.latest(source)
        shown = latest.value.saved if latest is not None else {}
        for name in names:
            seen, number = shown.get(name), name.rpartition("-")[2]
            if seen is None or state.saved_named(name):
                continue
            ended = number.isdigit() and state.numbers.has_given_saved(int(number))
            age = state.now + world.epoch - seen.written
            old = policy.save_keep and seen.written and age > policy.save_keep
            if ended or old or seen.kept or not seen.complete:
                found[name] = source
    return sorted(found.items())


def _check(job: Job, attempt: Attempt, policy: Policy) -> None:
    """Raise `Refused` if no host could help the job to be saved."""
    job_id = attempt.job.job_id
    if not job.batch:
        what = f"job {job_id} is of srun or salloc, which the scheduler cannot queue again"
        raise Refused(what, hint="submit it with sbatch")
    if not job.requeues and not policy.save_no_requeue:
        hint = "submit it with --requeue, or ask an administrator to set save.no_requeue"
        raise Refused(f"job {job_id} is not to be queued again (--no-requeue)", hint=hint)


def is_busy(state: State, attempt: Attempt) -> bool:
    """Whether the job is saved, resumed or captured now, or its VM moves or sleeps."""
    elsewhere = any(vm.state in (*MOVING_STATES, *SLEEPING_STATES) for vm in state.vms_of(attempt))
    return elsewhere or not all(one.stands for one in state.saved_of_job(attempt.job.job_id))


def save_at_limits(context: Context) -> None:
    """Save the jobs that asked for it and whose time limits are nearly over. One that is not saved is told why."""
    if context.world.scheduler is None:
        return
    for attempt in context.state.asking_to_be_saved():
        job = context.scheduler.jobs.get(attempt.job.job_id)
        if job is None or job.ref != attempt.job or not _is_due(context, attempt, job):
            continue
        if is_busy(context.state, attempt) or (attempt.note and attempt.note.kind is Why.NOT_SAVED):
            continue
        try:
            save(context, attempt, Why.SAVE_AT_LIMIT())
        except Refused as error:
            context.state.move(not_saved(attempt, said(str(error))))


def _is_due(context: Context, attempt: Attempt, job: Job) -> bool:
    due = saved_at(context, attempt, job)
    return due is not None and due <= context.now and job.deadline is not None and context.now < job.deadline - _LEAST


def saved_at(context: Context, attempt: Attempt, job: Job) -> float | None:
    """The Unix time from which on a running job is saved ahead of its time limit; None if it is not. Half of its time
    passes first: otherwise a job whose time limit was shortened would be saved again and again, and compute nothing."""
    wish, policy = attempt.request.save, context.policy
    if wish is None or job.deadline is None or attempt.runs >= policy.save_max_runs:
        return None
    began = context.unix(attempt.since)
    return max(job.deadline - (wish.before or policy.save_before), (began + job.deadline) / 2)


def _forget_checkpoints(state: State, command: Command) -> bool:
    """Let a job begin anew that waits, and has checkpoints. False if there is no such job."""
    mine = [one for one in checkpoints_of(state, command.job) if command.uid in (None, one.uid) and one.stands]
    unused = [one for one in mine if not state.restored_from(one)]
    job = state.queue.jobs.get(command.job)
    if not unused or job is None or job.state is not JobState.PENDING:
        return False
    why = Why.SAVED_GIVEN_UP()
    state.move(*(abandon(one, why) for one in unused))
    return True


def _resume(state: State, command: Command) -> None:
    job_id = command.job
    mine = (one for one in state.saved_of_job(job_id) if command.uid in (None, one.uid))
    saved = next((one for one in mine if one.state in WAITS_FOR_RUN and not one.checkpoint), None)
    if saved is None and command.anew and _forget_checkpoints(state, command):
        return
    if saved is None:
        raise Refused(f"job {job_id} is not saved", hint="multiverse saved shows the jobs that are")
    by_operator = saved.hold and saved.reason is None and saved.asked.kind is not Why.SAVE_ASKED
    if by_operator and command.uid is not None:
        raise Refused(f"job {job_id} was saved and is held by an operator", hint="ask the operators to resume it")
    waits = saved.state is SavedState.HOLDING or (saved.state in COMPLETE and not state.restored_from(saved))
    if command.anew and not waits:
        hint = "multiverse saved shows how far it is"
        raise Refused(f"job {job_id} cannot begin anew while it is saved or restored", hint=hint)
    if command.anew or (waits and saved.hold and not saved.ends):
        why = Why.OPERATOR() if command.uid is None else Why.RESUME_ASKED()
        state.move(resume_saved(saved, why, anew=command.anew))
