"""Saved jobs: the processes of a job are stopped, its run ends, and its next run goes on with them in a restored VM.

Until CUTTING everything can be undone. From CUTTING on the run is over: the scheduler queues the job again, and the
state belongs to the run that follows (`Saved.is_for`), to no other. A restore may be repeated until THAWING, which is
recorded before any process goes on. Nothing attaches to a state twice, because it leaves THAWING for DISCARDING only.

Where a host has another storage for copies, the files are copied there once they are complete (COPYING). The job may go
on meanwhile, and goes on from whichever storage a host reaches. So nothing waits for a copy.

A state that cannot be written stays where it is: its VM, stopped, in the memory of its host. A job that cannot go on is
held with the reason (HOLDING), or begins anew if its user agreed.

The row of a job of several VMs has a part for each. It passes from one state to the next when all parts have: so all
VMs are frozen or none, and its state is complete or of no use. It is not kept in memory, but written until that
succeeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import inf

from multiverse.core.model.basics import ClaimKey, Size
from multiverse.core.model.host import Claim, Host
from multiverse.core.model.job import AttemptState, Job, JobState, NodeState
from multiverse.core.model.reason import Reason, Why, text_of
from multiverse.core.model.saved import COMPLETE, HOLDS_VM, WAITS_FOR_RUN, Saved, SavedPart, SavedSeen, SavedState
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
    *transitions([None], Event.FOUND, S.UNDOING),
    *transitions([S.PREPARING], Event.READY, S.FREEZING),
    *transitions([S.FREEZING], Event.FROZEN, S.CUTTING),
    *transitions([None], Event.CHECKPOINT_DUE, S.CAPTURING),
    *transitions([S.CAPTURING], Event.STORED, S.STORED),
    *transitions([S.CUTTING], Event.QUEUED_AGAIN, S.WRITING),
    *transitions([S.WRITING, S.KEEPING], Event.STORED, S.STORED),
    *transitions([S.WRITING], Event.UNWRITTEN, S.KEEPING),
    *transitions([S.STORED], Event.COPY_DUE, S.COPYING),
    *transitions([S.COPYING], Event.COPIED, S.STORED),
    *transitions([S.COPYING], Event.UNCOPIED, S.STORED),
    *transitions([*COMPLETE, S.HOLDING], Event.RESUMED, S.RESUMING),
    *transitions([S.RESUMING], Event.RESUMED, S.STORED),
    *transitions([*COMPLETE, S.RESUMING], Event.FORGOTTEN, S.QUEUEING),
    *transitions([S.QUEUEING], Event.QUEUED_AGAIN, S.STORED),
    *transitions([*COMPLETE, S.RESUMING], Event.RUNS, S.THAWING),
    *transitions([S.THAWING], Event.THAWED, S.DISCARDING),
    *transitions([S.THAWING], Event.KEPT, S.STORED),
    *transitions([S.PREPARING, S.FREEZING, S.CUTTING, S.CAPTURING], Event.ABANDONED, S.UNDOING),
    *transitions([S.WRITING, S.KEEPING, *COMPLETE, S.RESUMING, S.QUEUEING], Event.HELD_BACK, S.HOLDING),
    *transitions([S.HOLDING], Event.HELD, S.STORED),
    *transitions([*WAITS_FOR_RUN, S.THAWING, S.CAPTURING], Event.ABANDONED, S.DISCARDING),
    *transitions([S.UNDOING], Event.THAWED, S.GONE),
    *transitions([S.DISCARDING], Event.ABSENT, S.GONE),
    *unchanged(_LIVE, Event.NOTED, Event.QUARANTINED, Event.RETRIED),
)

AWAITED_SAVED = dict.fromkeys(
    (S.PREPARING, S.CUTTING, S.RESUMING, S.QUEUEING, S.HOLDING, S.UNDOING), Awaiting.AFTER_EFFECT
)
"""In which states the scheduler is read for the job, and for its node."""

# --- changes ---------------------------------------------------------------------------------------


def ask_to_save(saved: Saved) -> Change:
    return Change(saved, Event.ASKED, saved.asked)


def undo_unexplained(saved: Saved) -> Change:
    """The job of a VM was found frozen, and no row tells why: let it go on."""
    return Change(replace(saved, state=S.UNDOING, froze=True, reason=saved.asked), Event.FOUND, saved.asked)


def resume_saved(saved: Saved, why: Reason, *, anew: bool) -> Change:
    """Let the job go on, or begin `anew` without its state."""
    return Change(replace(saved, state=S.RESUMING, ends=anew), Event.RESUMED, why)


def note_spread(saved: Saved, seconds: float) -> Change:
    """Keep how far apart its VMs were frozen."""
    return Change(replace(saved, spread=seconds), Event.NOTED)


MOST_TRIES = 3  # to write a state: a full storage, or one with errors, is not tried for ever


def count_failure(saved: Saved, why: Reason) -> Change:
    """It could not be written. That is tried again a few times; then it stays in the memory of its host. The VMs of a
    job of several stay as they are, and that is tried again and again: some of them may have been written."""
    tries = saved.tries + 1
    if tries < MOST_TRIES or saved.others:
        return Change(replace(saved, tries=tries, reason=why), Event.NOTED, why)
    why = Why.SAVE_FAILED(why, tries=tries)
    return Change(replace(saved, state=S.KEEPING, tries=tries, reason=why), Event.UNWRITTEN, why)


MOST_COPY_TRIES = 12  # a storage that is away for some hours is waited for; one that is not there any more is not
_COPY_AGAIN, _COPY_AGAIN_LIMIT = 60.0, 3600.0  # seconds between two tries: the first pause, and the longest


def count_failed_copy(saved: Saved, why: Reason) -> Change:
    """It could not be copied. It stays in its one storage, and that is tried again later, some times."""
    tries = saved.copy_tries + 1
    why = Why.COPY_FAILED(why, tries=tries)
    return Change(replace(saved, state=S.STORED, copy_tries=tries, copy_reason=why), Event.UNCOPIED, why)


def drop_storage(saved: Saved, storage: str, why: Reason) -> Change | None:
    """The files in one of its storages are damaged: from now on it is read from the other one. None if it has none."""
    left = [name for name in saved.storages if name != storage]
    if len(left) != 1 or len(saved.storages) != 2:
        return None
    why = Why.COPY_DAMAGED(why, storage=storage)
    on = replace(saved, storage=left[0], copy="", copy_tries=MOST_COPY_TRIES, copy_reason=why)
    return Change(on, Event.NOTED, why)


def hold_saved(saved: Saved, why: Reason, *, ends: bool = False) -> Change:
    """It cannot go on as it is: its job is held with the reason. `ends`: its state is given up then."""
    return Change(replace(saved, state=S.HOLDING, hold=True, ends=ends, reason=why), Event.HELD_BACK, why)


def give_up(state: State, saved: Saved, why: Reason) -> Change:
    """The state is lost. The job goes on from a checkpoint, or is held, and begins anew when it is released; at once if
    its user agreed to that."""
    goes_on = saved.may_restart or saved.checkpoint or any(one.stands for one in state.saved_of_job(saved.job.job_id))
    return abandon(saved, why) if goes_on else hold_saved(saved, why, ends=True)


def is_unfit(saved: Saved, why: Reason) -> Change:
    """No VM can be restored from it. Its job is held: perhaps that is mended. A checkpoint is given up: there may be
    another one, and the job need not have any."""
    return abandon(saved, why) if saved.checkpoint else hold_saved(saved, why)


def abandon(saved: Saved, why: Reason) -> Change:
    """It is not saved, or the state is of no use any more. Until the job was cut off, its processes go on."""
    if saved.state in (S.PREPARING, S.FREEZING):
        return undo_save(saved, why)
    return Change(replace(saved, state=S.DISCARDING, reason=why, quarantined=None), Event.ABANDONED, why)


def undo_save(saved: Saved, why: Reason) -> Change:
    """Let its processes go on in their run, unless they were cut off from it: a guest refuses that then."""
    return Change(replace(saved, state=S.UNDOING, reason=why, quarantined=None), Event.ABANDONED, why)


# --- step ------------------------------------------------------------------------------------------


def step_saved(state: State, number: int, world: World, policy: Policy) -> None:
    saved = state.saved.get(number)
    if saved is None or saved.quarantined or world.scheduler is None:
        return
    job = world.scheduler.value.jobs.get(saved.job.job_id)
    if _note_run(state, saved, job, world):
        return
    match saved.state:
        case S.DISCARDING:
            _step_discarding(state, saved, world)
        case S.UNDOING:
            _step_undoing(state, saved, job, world)
        case S.HOLDING:
            _step_holding(state, saved, job, world)
        case S.STORED | S.COPYING | S.RESUMING | S.QUEUEING | S.THAWING:
            _step_stored(state, saved, job, world, policy)
        case _:
            _step_saving(state, saved, job, world, policy)


_QUEUED_AGAIN = (S.WRITING, S.KEEPING, *COMPLETE, S.RESUMING, S.QUEUEING, S.HOLDING)
"""In these states the scheduler has queued the job again, and no process goes on yet."""


def _is_forgotten(saved: Saved, job: Job) -> bool:
    """Whether the scheduler shows the run that was cut off. It was killed before it had kept that it queued the job
    again. It would do that once more as it finds that the node of the run does not answer, but end the job before if
    its time limit is over."""
    return saved.state in _QUEUED_AGAIN and job.ref == saved.job and job.state is not JobState.PENDING


def _is_queued_anew(saved: Saved, job: Job) -> bool:
    """Whether the scheduler had forgotten that it queued the job again, and did so by itself before it was seen."""
    before, now = saved.again, job.ref
    same = before is not None and (now.job_id, now.restarts) == (before.job_id, before.restarts)
    return same and before is not None and now.submitted > before.submitted


def _note_run(state: State, saved: Saved, job: Job | None, world: World) -> bool:
    """Keep which run is to go on with the state: another one if the scheduler has forgotten the first. Then it is told
    once more to queue the job again, as soon as the state is complete."""
    if job is None or saved.state not in _QUEUED_AGAIN or world.job_began(job.ref.job_id) <= saved.since:
        return False
    known = replace(saved, again=job.ref)
    if _is_queued_anew(saved, job):
        state.move(Change(known, Event.NOTED, Why.REQUEUE_FORGOTTEN()))
    elif _is_forgotten(saved, job) and saved.state in (*COMPLETE, S.RESUMING):
        queueing = replace(saved, state=S.QUEUEING, again=None)
        state.move(Change(queueing, Event.FORGOTTEN, Why.REQUEUE_FORGOTTEN()))
    elif _is_forgotten(saved, job) and saved.again is not None:
        state.move(Change(replace(saved, again=None), Event.NOTED, Why.REQUEUE_FORGOTTEN()))
    elif saved.again is None and saved.is_for(job.ref) and saved.state is S.QUEUEING:
        again = replace(known, state=S.STORED)
        state.move(Change(again, Event.QUEUED_AGAIN, Why.RESTART(number=job.ref.restarts)))
    elif saved.again is None and saved.is_for(job.ref):
        state.move(Change(known, Event.NOTED, Why.RESTART(number=job.ref.restarts)))
    else:
        return False
    return True


def vms_of_saved(state: State, saved: Saved) -> list[Vm]:
    """The VMs that are being saved, the one with the script first. One that was lost is there no more."""
    return [vm for part in saved.parts if (vm := state.vms.get(part.vm)) is not None]


def _step_saving(state: State, saved: Saved, job: Job | None, world: World, policy: Policy) -> None:
    """Its VMs are still the first run's."""
    vms = vms_of_saved(state, saved)
    serving = [vm for vm in vms if vm.state is VmState.SERVING]
    if why := _why_over(state, saved, job, world):
        state.move(abandon(saved, why))
    elif saved.state in (S.WRITING, S.KEEPING) and _is_written(state, saved, serving, world):
        pass
    elif len(serving) < len(saved.parts) and saved.state is S.CUTTING and _may_be_cut_off(saved, vms):
        pass  # its processes may be cut off already: nothing else than the requeue brings the job on
    elif len(serving) < len(saved.parts):
        there = {vm.name for vm in serving}
        lost = Why.SAVED_VM_LOST(vm=next(part.vm_name for part in saved.parts if part.vm_name not in there))
        cut_off = saved.state in (S.WRITING, S.KEEPING)
        state.move(give_up(state, saved, lost) if cut_off else abandon(saved, lost))
    elif saved.state is S.PREPARING and (mute := next((vm for vm in vms if is_mute(vm, world)), None)):
        state.move(abandon(saved, Why.SAVE_MUTE(vm=mute.name)))
    elif saved.state in (S.PREPARING, S.FREEZING) and state.now - saved.since > policy.save_timeout:
        state.move(abandon(saved, Why.SAVE_LATE(step=saved.state, limit=policy.save_timeout)))
    else:  # what was cut off cannot be undone: it is tried for as long as the scheduler does not answer
        _advance(state, saved, vms, job, world)


def _may_be_cut_off(saved: Saved, vms: list[Vm]) -> bool:
    """Whether none of its VMs is known to have ended: some are out of sight."""
    return len(vms) == len(saved.parts) and all(vm.state in (VmState.SERVING, VmState.LOST) for vm in vms)


def _why_over(state: State, saved: Saved, job: Job | None, world: World) -> Reason | None:
    """Why nobody needs the state any more: its job has ended, or went on without it."""
    if world.job_began(saved.job.job_id) <= saved.since:
        return None
    if job is None or job.state is JobState.ENDED:
        return Why.SAVED_JOB_OVER(job=saved.job.job_id)
    if _is_forgotten(saved, job):
        return None
    if _went_on_without(state, saved, job):
        return Why.SAVED_RUN_OVER(job=saved.job.job_id, restart=job.ref.restarts)
    expected = (saved.job.restarts, saved.job.restarts + 1)
    if job.ref.restarts not in expected[saved.state not in (S.PREPARING, S.FREEZING, S.CUTTING) :]:
        return Why.SAVED_RUN_OVER(job=saved.job.job_id, restart=job.ref.restarts)
    if job.ref.restarts == saved.job.restarts + 1 and saved.state in (S.PREPARING, S.FREEZING):
        return Why.SAVED_RUN_OVER(job=saved.job.job_id, restart=job.ref.restarts)
    return None


def _went_on_without(state: State, saved: Saved, job: Job) -> bool:
    """Whether the next run goes on in no VM of which a row tells that it is restored from the state: it began anew, or
    the database is older than that VM."""
    runs = job.state is JobState.RUNNING and saved.is_for(job.ref) and saved.state in WAITS_FOR_RUN
    return runs and not state.restored_from(saved)


def _advance(state: State, saved: Saved, vms: list[Vm], job: Job | None, world: World) -> None:
    match saved.state:
        case S.PREPARING:
            drained = all(_is_drained(vm, saved.since, world) for vm in vms)
            if drained and job is not None and job.state is JobState.RUNNING and job.requeues:
                state.move(Change(replace(saved, state=S.FREEZING, froze=True), Event.READY))
        case S.FREEZING:
            if all(_is_frozen(vm, saved.since, world) for vm in vms):
                state.move(Change(_cut(state, saved, job, world), Event.FROZEN))
        case S.CUTTING:
            if job is not None and saved.is_for(job.ref):
                again = replace(saved, state=S.WRITING, again=job.ref)
                state.move(Change(again, Event.QUEUED_AGAIN, Why.RESTART(number=job.ref.restarts)))
        case S.KEEPING:
            _take_into_memory(state, saved, vms[0], world)


def _is_drained(vm: Vm, since: float, world: World) -> bool:
    assert world.scheduler is not None
    node = world.scheduler.value.nodes.get(vm.name)
    return node is not None and node.state is NodeState.DRAINED and world.node_began(vm.name) > since


def _is_frozen(vm: Vm, since: float, world: World) -> bool:
    seen, latest = world.vm(vm), world.latest(vm.place.source)
    return seen is not None and seen.frozen and latest is not None and latest.began > since


def _is_written(state: State, saved: Saved, serving: list[Vm], world: World) -> bool:
    """Whether its files are complete, which need its VMs no more. Once its VM is to be kept they count only if that is
    lost."""
    size = size_of_files(saved, world)
    ended = world.ended_at(saved.key) < inf or len(serving) < len(saved.parts)
    if size is None or not ended or (saved.state is S.KEEPING and serving):
        return False
    state.move(keep_stored(state, saved, size, world))
    return True


def keep_stored(state: State, saved: Saved, size: int, world: World) -> Change:
    """Its files are complete, and take `size` bytes."""
    whole = replace(saved, state=S.STORED, bytes=size, written=state.now + world.epoch, reason=None)
    return Change(whole, Event.STORED)


def size_of_files(saved: Saved, world: World) -> int | None:
    """Bytes of the files of all its VMs in the storage to which it was written; None if some are not complete."""
    shown = [_shown_of(saved, part, world) for part in saved.parts]
    sizes = [next((one.size for one in files if one.storage == saved.storage), None) for files in shown]
    return None if None in sizes else sum(filter(None, sizes))


def _shown_of(saved: Saved, part: Saved | SavedPart, world: World) -> list[SavedSeen]:
    """The complete files of one of its VMs, as each source shows them."""
    shown = world.saved(saved.name_of(part))
    return [one for one in shown if one.token == part.token and not one.kept]


def _take_into_memory(state: State, saved: Saved, vm: Vm, world: World) -> None:
    """Its host keeps it: the state claims what its VM did, which is shown as a VM no more."""
    if _is_kept(saved, vm.host, vm.place.source, world):
        claims = [Claim(saved.key, vm.host, claim.size) for key in vm.claim_keys if (claim := state.claims.get(key))]
        kept = replace(saved, state=S.STORED, kept=vm.host, written=state.now + world.epoch, reason=None)
        why = Why.SAVED_KEPT(saved.reason, host=vm.host)
        state.move(Change(kept, Event.STORED, why), make=claims, free=vm.claim_keys)


def _is_kept(saved: Saved, host: str, source: str, world: World) -> bool:
    latest = world.latest(source)
    shown = latest.value.saved.get(saved.name) if latest is not None and host in latest.value.hosts else None
    return shown is not None and shown.kept and shown.token == saved.token


def _cut(state: State, saved: Saved, job: Job | None, world: World) -> Saved:
    """The run is over now. The next one may take what is left of the time limit; for a job that is saved at its time
    limit it may take as long as this one."""
    attempt = next(iter(state.attempts_of_job(saved.job)), None)
    wished = attempt is not None and attempt.request.save is not None
    deadline = job.deadline if job is not None and not wished else None
    remaining = max(0.0, deadline - state.now - world.epoch) if deadline is not None else None
    beyond = job.ends - job.deadline if job is not None and job.ends is not None and job.deadline is not None else 0.0
    return replace(saved, state=S.CUTTING, limit=job and job.limit, remaining=remaining, beyond=beyond)


def limit_of_next_run(saved: Saved, job: Job) -> float | None:
    """Seconds that the next run may take, if its time limit is longer. A change of the limit meanwhile counts."""
    if saved.remaining is None:
        return None
    changed = job.limit - saved.limit if job.limit is not None and saved.limit is not None else 0.0
    return max(0.0, saved.remaining + changed)


def next_run_takes(saved: Saved, job: Job) -> float:
    """Seconds that the next run takes at most, until the scheduler has ended it. One that counts minutes, like Slurm,
    may give it some seconds more: a VM that is still there as its lease ends leaves it like any other."""
    whole, left = inf if job.limit is None else job.limit, limit_of_next_run(saved, job)
    return whole if left is None else min(whole, left + saved.beyond)


def _step_holding(state: State, saved: Saved, job: Job | None, world: World) -> None:
    """Its job is to be held. What is of no use any more goes then: somebody who releases the job lets it begin anew."""
    if why := _why_over(state, saved, job, world):
        state.move(abandon(saved, why))
    elif job is not None and job.held and world.job_began(job.ref.job_id) > saved.since:
        held = replace(saved, state=S.DISCARDING if saved.ends else S.STORED)
        told = _tell_waiting(state, saved) if saved.ends else []
        state.move(Change(held, Event.ABANDONED if saved.ends else Event.HELD, saved.reason), *told)


def _tell_waiting(state: State, saved: Saved) -> list[Change]:
    """The user of a held job is told why it cannot go on, also once no row of its state is left."""
    waiting = (one for one in state.attempts_of_job(saved.job.job_id) if one.state is AttemptState.QUEUED)
    return [Change(replace(one, note=saved.reason), Event.NOTED, saved.reason) for one in waiting]


def _step_stored(state: State, saved: Saved, job: Job | None, world: World, policy: Policy) -> None:
    """It waits for the next run, or that has begun in the restored VM."""
    if why := _why_over(state, saved, job, world):
        state.move(abandon(saved, why))
        return
    if saved.state is S.RESUMING and job is not None and not job.held and world.job_began(job.ref.job_id) > saved.since:
        on = replace(saved, state=S.STORED, hold=False, reason=None)
        state.move(abandon(saved, Why.SAVED_GIVEN_UP()) if saved.ends else Change(on, Event.RESUMED))
        return
    if note_copied(state, saved, world):
        return
    vms = state.restored_from(saved)
    attempt = state.attempt_of(vms[0]) if vms else None
    if len(vms) < len(saved.parts) or attempt is None:
        if saved.state is S.THAWING:
            there = {vm.name for vm in vms}
            lost = next((part.vm_name for part in saved.parts if part.vm_name not in there), saved.vm_name)
            state.move(abandon(saved, Why.SAVED_VM_LOST(vm=lost)))
        elif not vms:
            _step_waiting(state, saved, world, policy)
        return
    if saved.state is not S.THAWING:
        serve = all(vm.state is VmState.SERVING for vm in vms)
        if attempt.state is AttemptState.ALLOCATED and serve and saved.is_for(attempt.job):
            state.move(Change(replace(saved, state=S.THAWING), Event.RUNS))
        return
    if go_on(saved, vms, world):
        state.move(Change(replace(saved, state=S.DISCARDING), Event.THAWED))


def go_on(saved: Saved, vms: Iterable[Vm], world: World) -> bool:
    """Whether its processes were seen to go on in all restored VMs, after the guests were told so."""
    since = max(saved.since, world.ended_at(saved.key, inf))
    seen = [(world.vm(vm), world.latest(vm.place.source)) for vm in vms]
    return all(
        one is not None and one.runs and not one.frozen and latest is not None and latest.began > since
        for one, latest in seen
    )


def _step_waiting(state: State, saved: Saved, world: World, policy: Policy) -> None:
    """No VM is being restored from it: it may be too old, lost with the memory of its host, or be to be copied."""
    age = state.now + world.epoch - saved.written
    latest = world.latest(saved.source)
    if policy.save_keep and age > policy.save_keep:
        state.move(give_up(state, saved, Why.SAVED_TOO_OLD(age=age)))
    elif not saved.kept:
        copy_if_due(state, saved)
    elif state.is_fenced(saved.kept):
        state.move(give_up(state, saved, Why.SAVED_KEPT_LOST(host=saved.kept)))
    elif latest is None or saved.kept not in latest.value.hosts or latest.began <= saved.since:
        return
    elif not _is_kept(saved, saved.kept, saved.source, world):
        state.move(give_up(state, saved, Why.SAVED_KEPT_LOST(host=saved.kept)))
    elif ClaimKey(saved.key, saved.kept) not in state.claims:  # its VM was to take it over, and did not
        claim = Claim(saved.key, saved.kept, Size(saved.size.cpus, saved.size.memory, saved.bound >> 20))
        state.move(Change(saved, Event.NOTED), make=[claim])


def may_be_copied(state: State, saved: Saved) -> bool:
    """Whether a host that reaches it has another storage for copies, in which it is not yet."""
    wanted = saved.state is S.STORED and not saved.kept and not saved.copy and saved.copy_tries < MOST_COPY_TRIES
    return wanted and bool(state.source_copying(saved))


def copy_if_due(state: State, saved: Saved) -> None:
    """Begin to copy it. If that failed before, a pause passes first."""
    if may_be_copied(state, saved) and state.now >= saved.since + _copy_pause(saved):
        state.move(Change(replace(saved, state=S.COPYING), Event.COPY_DUE))


def _copy_pause(saved: Saved) -> float:
    return min(_COPY_AGAIN * 2.0 ** (saved.copy_tries - 1), _COPY_AGAIN_LIMIT) if saved.copy_tries else 0.0


def note_copied(state: State, saved: Saved, world: World) -> bool:
    """Keep that its copy is complete. False if it is not, or none is being made."""
    copy = _copied_to(saved, world) if saved.state is S.COPYING else ""
    if copy:
        state.move(Change(replace(saved, state=S.STORED, copy=copy, copy_reason=None), Event.COPIED))
    return bool(copy)


def _copied_to(saved: Saved, world: World) -> str:
    """The storage that has a complete copy of all its VMs; empty if none does."""
    copies = [
        {name for one in _shown_of(saved, part, world) for name in (one.storage, one.copy)} - {"", saved.storage}
        for part in saved.parts
    ]
    return min(set.intersection(*copies), default="")


def _step_undoing(state: State, saved: Saved, job: Job | None, world: World) -> None:
    """Its processes go on, and its nodes serve as before; or its run is over for another reason."""
    since = max(saved.since, world.ended_at(saved.key, inf))
    vms = [vm for vm in vms_of_saved(state, saved) if not vm.leaving]
    over = not vms or job is None or job.ref != saved.job
    if over or all(_is_back(vm, saved, since, world) for vm in vms):
        state.move(Change(replace(saved, state=S.GONE), Event.THAWED, saved.reason), *_undone(state, saved))


def _undone(state: State, saved: Saved) -> list[Change]:
    """The user of a job that goes on is told why it was not saved."""
    if saved.checkpoint or saved.asked.kind is Why.FOUND_FROZEN:
        return []
    note = Why.SAVE_UNDONE(saved.reason)
    running = (one for one in state.attempts_of_job(saved.job) if one.state is AttemptState.ALLOCATED)
    untold = (one for one in running if one.note is None or one.note.kind is not Why.NOT_SAVED)
    return [Change(replace(one, note=note), Event.NOTED, note) for one in untold]


def _is_back(vm: Vm, saved: Saved, since: float, world: World) -> bool:
    """Whether the processes in a VM were seen to go on after that, and its node to serve."""
    assert world.scheduler is not None
    seen, node, latest = world.vm(vm), world.scheduler.value.nodes.get(vm.name), world.latest(vm.place.source)
    goes_on = seen is not None and not seen.frozen and latest is not None and latest.began > since
    serves = saved.checkpoint or node is None or node.state is not NodeState.DRAINED
    return goes_on and serves and world.node_began(vm.name) > since


def _step_discarding(state: State, saved: Saved, world: World) -> None:
    """It is gone once nobody shows any file of it after its removal. While all its storages are out of sight nothing is
    concluded, nor while a VM of it exists: that may still be being written, unless it is a checkpoint. What one storage
    out of sight still has is explained by no row then, and is removed once it is seen."""
    since = max(saved.since, world.ended_at(saved.key, inf))
    showing = [
        latest
        for observation in world.sources.values()
        if (latest := observation.latest) is not None and any(map(partial(_shows, saved), latest.value.hosts.values()))
    ]
    absent = showing and all(one.began > since and one.value.saved.keys().isdisjoint(saved.names) for one in showing)
    gone = absent and (saved.kept or saved.checkpoint or not vms_of_saved(state, saved))
    if gone or (saved.kept and state.is_fenced(saved.kept)):
        claim = ClaimKey(saved.key, saved.kept)  # it has one if it was kept in memory
        state.move(Change(replace(saved, state=S.GONE), Event.ABSENT, saved.reason), free=[claim])


def _shows(saved: Saved, host: Host) -> bool:
    if saved.kept:
        return host.name == saved.kept
    return host.reaches(saved.storages)


SAVED_EFFECTS = {
    S.PREPARING: EffectKind.PREPARE,
    S.FREEZING: EffectKind.FREEZE,
    S.CUTTING: EffectKind.CUT,
    S.CAPTURING: EffectKind.CAPTURE,
    S.WRITING: EffectKind.SAVE,
    S.COPYING: EffectKind.COPY,
    S.KEEPING: EffectKind.KEEP,
    S.HOLDING: EffectKind.HOLD,
    S.RESUMING: EffectKind.RESUME,
    S.QUEUEING: EffectKind.QUEUE,
    S.THAWING: EffectKind.THAW,
    S.UNDOING: EffectKind.UNDO,
    S.DISCARDING: EffectKind.DISCARD,
}


def text_of_saved(saved: Saved) -> str:
    """What the user of the job is told as it is queued again, or held."""
    if saved.state is S.HOLDING:
        return text_of(saved.reason)
    if saved.state not in (S.CUTTING, S.QUEUEING):
        return ""
    if saved.hold:
        return text_of(Why.SAVED_HELD(at=saved.begun, id=saved.job.job_id))
    return text_of(Why.SAVED_SINCE(saved.asked, at=saved.begun))


def saved_is_settled(state: State, saved: Saved, world: World) -> bool:
    """Whether only a change of its job, of a VM, or of what storages hosts reach moves it, and its age: see
    `changes.LOOK_AT_STATES`."""
    if saved.quarantined is not None:
        return True
    seen = world.job_began(saved.job.job_id) > saved.since
    return saved.state is S.STORED and seen and not may_be_copied(state, saved)


def is_kept_in_memory(state: State, vm: Vm, world: World) -> bool:
    """Whether a VM is shown no more because its host keeps it as a saved one."""
    return any(one.kept or _is_kept(one, vm.host, vm.place.source, world) for one in state.saved_of(vm))


def is_mute(vm: Vm, world: World) -> bool:
    """Whether its guest cannot be told anything: it could stop its job half way, and would then have to be ended."""
    seen = world.vm(vm)
    return seen is not None and seen.mute


def is_held_for_saving(state: State, vm: Vm) -> bool:
    """Whether a VM is needed after the run of its job has ended, because it is being saved."""
    return any(one.state in HOLDS_VM for one in state.saved_of(vm))
