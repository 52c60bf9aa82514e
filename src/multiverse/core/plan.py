"""The planner: from the committed rows and what was seen of the world, all the moves of one pass.

Pure: no I/O, no clock, no chance, no iteration over a set. Steps free, then admission uses. The pass
repeats until nothing more follows, so that a look is answered in one commit however many rows it moves.

Three rules run through all of it. Unknown is not absent: a source that is None moves nothing, and a
deadline has passed only if a look that began after it still did not show the thing. Absence counts
only in a look that began after the object's last effect ended. And a pair of state and sight that
cannot be puts that one record in quarantine, with a reason, and stops nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from multiverse.core.admission import (
    able_hosts,
    admit,
    need_template,
    plan_vms,
    room_of,
    settle,
    story_of,
    template_key,
)
from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.core.lifecycle import EffectKind, Event
from multiverse.core.model import (
    Attempt,
    AttemptState,
    Claim,
    CloneKind,
    Depth,
    Host,
    Job,
    JobState,
    Key,
    NodeState,
    Offer,
    Outcome,
    Request,
    Row,
    SchedulerView,
    Size,
    Template,
    TemplateCondition,
    TemplateKey,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
    World,
)
from multiverse.core.pacing import Policy
from multiverse.core.placement import vm_claim, vm_claims
from multiverse.core.pool import is_spare
from multiverse.core.refill import keep
from multiverse.core.rows import Change, Command, Done, Draft, Message, Move, Rows, at_worst_one

A, V, T = AttemptState, VmState, TemplateState

COMING, UNSERVED = 30.0, 5.0
"""Seconds after which a spare that was taken is given up, if no look since has shown the job that took it: slurmctld
lets others go first between job_submit.lua and the job's making. And if one has, but a job that cannot be served."""

ROUNDS = 16
"""More rounds than the longest chain of moves that one look can set off; a guard, never reached."""


def plan(rows: Rows, world: World, messages: Sequence[Message], now: float, policy: Policy) -> list[Move]:
    """All moves of one pass, in the order in which they are to be applied."""
    draft = Draft(rows, now, world.forecast.paced)
    for message in messages:
        if isinstance(message, Done):
            with at_worst_one(draft, message.key):
                _heed(draft, message)
        else:
            _obey(draft, message, world.hypervisor.value.hosts if world.hypervisor else {}, policy)
    for _ in range(ROUNDS):
        before = len(draft.moves)
        _open_attempts(draft, world)
        for template_id in sorted(draft.templates):
            with at_worst_one(draft, Key("template", template_id)):
                _step_template(draft, template_id, world)
        for vm_id in sorted(draft.vms):
            with at_worst_one(draft, Key("vm", vm_id)):
                _step_vm(draft, vm_id, world, policy)
        for attempt_id in sorted(draft.attempts):
            with at_worst_one(draft, Key("attempt", attempt_id)):
                _step_attempt(draft, attempt_id, world, policy)
        keep(draft, world, policy, admit(draft, world, policy))
        if len(draft.moves) == before:
            break
    return draft.moves


def orphans(rows: Rows, world: World) -> list[str]:
    """Names of our site that were seen, on a host or in the scheduler, without a live row. A node on
    which the scheduler runs a job is never among them."""
    if world.scheduler is None or world.hypervisor is None:
        return []
    known = {vm.name for vm in rows.vms.values()}
    nodes = world.scheduler.value.nodes
    names = {*nodes, *world.hypervisor.value.vms} - known
    names -= _occupied(world.scheduler.value)
    return sorted(n for n in names if n not in nodes or nodes[n].state is not NodeState.BUSY)


# --- messages --------------------------------------------------------------------------------------

_DEFINITE = (Refused, Exhausted, Gone, Broken)


def _heed(draft: Draft, done: Done) -> None:
    """An effect said that it failed for good. What it says of success is not heeded: that is looked at."""
    if not isinstance(done.error, _DEFINITE):
        return
    row = draft.get(done.key)
    if row is None or row.state != done.state or row.quarantined:
        return
    why = str(done.error)
    making = (V.PLANNED, V.STARTING)
    if isinstance(row, Vm) and done.kind in (EffectKind.CREATE, EffectKind.START) and row.state in making:
        draft.move(Change(_releasing(row, why), Event.FAILED, why))
    elif isinstance(row, Template) and done.kind is EffectKind.BUILD and row.state is T.BUILDING:
        draft.move(Change(replace(row, state=T.BROKEN, reason=why, tries=row.tries + 1), Event.BROKE, why))
    elif isinstance(row, Attempt) and row.state is A.SPAWNED and isinstance(done.error, Refused):
        if not any(vm.offer is Offer.TAKEN for vm in draft.vms_of(row)):
            draft.move(Change(_given_back(row, why, tries=row.tries + 1), Event.GAVE_UP, why))
        elif row.reason != why:  # its job may be in there already, let in by an earlier word: see `_let_down`
            draft.move(Change(replace(row, reason=why), Event.NOTED, why))


def _obey(draft: Draft, command: Command, hosts: Mapping[str, Host], policy: Policy) -> None:
    why = "an operator asked for it"
    match command.verb:
        case "build":
            which = TemplateKey(command.host, command.image, command.size or policy.base, command.account or "")
            row = draft.template_for(which)
            if row is None or row.state is T.BROKEN:
                need_template(draft, which, hosts, why)
        case "drop":
            for _, row in sorted(draft.templates.items()):
                if _meant(command, row) and row.state in (T.READY, T.BROKEN, T.BUILDING):
                    draft.move(Change(replace(row, state=T.RETIRING), Event.DROPPED, why))
        case "retry" if command.key is not None and (record := draft.get(command.key)) is not None:
            _retry(draft, record, hosts, why)
        case "fence":
            for _, vm in sorted(draft.vms.items()):
                if vm.state is V.LOST and vm.host == command.host:
                    fenced = replace(_releasing(vm, vm.reason), fenced=True, quarantined="")
                    draft.move(Change(fenced, Event.FENCED, f"an operator says that host {vm.host} is off"))
        case _:
            pass


def _meant(command: Command, row: Template) -> bool:
    return (
        (row.host, row.image) == (command.host, command.image)
        and command.size in (None, row.size)
        and command.account in (None, row.account)
    )


def _retry(draft: Draft, row: Row, hosts: Mapping[str, Host], why: str) -> None:
    if isinstance(row, Attempt) and (row.quarantined or row.not_before > draft.now):
        draft.move(Change(replace(row, quarantined="", not_before=0.0), Event.RETRIED, why))
    elif not isinstance(row, Attempt) and row.quarantined:
        draft.move(Change(replace(row, quarantined=""), Event.RETRIED, why))
    elif isinstance(row, Template) and row.state is T.BROKEN:
        need_template(draft, row.which, hosts, why)


# --- the scheduler's word --------------------------------------------------------------------------


class Sight(StrEnum):
    """What a look says of an attempt's job."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    ENDED = "ended"
    RESTARTED = "restarted"
    UNSEEN = "unseen"


def _sight(attempt: Attempt, view: SchedulerView) -> tuple[Sight, Job | None]:
    job = view.jobs.get(attempt.job.job_id)
    if job is None:
        return Sight.UNSEEN, None
    if job.ref.restarts > attempt.job.restarts and job.ref.submitted >= attempt.job.submitted:
        return Sight.RESTARTED, job  # Slurm gives what it requeues a new submit time
    if job.ref != attempt.job:
        return Sight.UNSEEN, None  # another job that got the same id
    match job.state:
        case JobState.PENDING:
            return Sight.PENDING, job
        case JobState.RUNNING | JobState.SUSPENDED:
            return Sight.RUNNING, job
        case JobState.COMPLETING:
            return Sight.COMPLETING, job
        case JobState.ENDED:
            return Sight.ENDED, job


def _open_attempts(draft: Draft, world: World) -> None:
    """A pending job without a live attempt gets one, and so does one that took a spare as it was submitted: that may
    run already."""
    if world.scheduler is None:
        return
    served = {a.job for a in draft.attempts.values()}
    spares = {vm.feature: vm for vm in draft.vms.values() if is_spare(vm) and vm.state is V.JOINED and vm.offer}
    for _, job in sorted(world.scheduler.value.jobs.items()):
        if job.ref in served or job.state not in (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED):
            continue
        spare = spares.pop(job.pinned, None) if job.pinned else None
        if job.state is JobState.PENDING or spare:
            attempt = _open(draft, job)
            if spare and not job.problem:
                _take(draft, attempt, spare)


def _take(draft: Draft, attempt: Attempt, spare: Vm) -> None:
    """Its job has taken a spare by itself, and is tied to it already. What is left to do is to introduce its user."""
    story = f"{spare.kind} on {spare.host}, joined before, taken as it was submitted"
    taken = replace(attempt, state=A.SPAWNED, gated=False, pin=spare.feature, choice=story)
    serving = replace(spare, attempt=attempt.id, offer=Offer.TAKEN, unwanted="")
    draft.move(
        Change(taken, Event.TOOK, story), Change(serving, Event.TAKEN, f"by job {attempt.job.job_id}, as it came")
    )


def _open(draft: Draft, job: Job, *, tries: int = 0, not_before: float = 0.0, note: str = "") -> Attempt:
    attempt = Attempt(
        id=draft.attempt_id(),
        version=0,
        state=A.QUEUED,
        since=draft.now,
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
    draft.move(Change(attempt, Event.SUBMITTED, f"restart {job.ref.restarts}" if job.ref.restarts else ""))
    return draft.attempts[attempt.id]


def _at_gate(job: Job) -> bool:
    return job.gated and job.pinned is None


# --- attempts --------------------------------------------------------------------------------------


def _step_attempt(draft: Draft, attempt_id: int, world: World, policy: Policy) -> None:
    attempt = draft.attempts.get(attempt_id)
    if attempt is None or world.scheduler is None:
        return
    began = world.scheduler.began
    if began < attempt.since and attempt.state is not A.RECLAIMING:
        # The look is older than the state: what it says of the job was already heeded.
        if attempt.state in (A.CLAIMED, A.SPAWNING):
            _see_to_vms(draft, attempt, world, policy)
        return
    sight, job = _sight(attempt, world.scheduler.value)
    if attempt.quarantined and sight not in (Sight.ENDED, Sight.UNSEEN):
        return
    if attempt.state is A.RECLAIMING:
        _finish(draft, attempt, sight, job, world, policy)
    elif not _ended(draft, attempt, sight, job, world):
        match attempt.state:
            case A.QUEUED:
                _step_queued(draft, attempt, sight, job)
            case A.CLAIMED | A.SPAWNING:
                _step_making(draft, attempt, sight, job, world, policy)
            case A.SPAWNED:
                _step_spawned(draft, attempt, sight, job, world, policy)
            case A.ALLOCATED:
                _step_allocated(draft, attempt, sight)
            case _:
                pass


def _given_back(attempt: Attempt, reason: str, *, tries: int) -> Attempt:
    """The attempt on its way out, its job to go back to the gate."""
    return replace(attempt, state=A.RECLAIMING, outcome="requeued", reason=reason, gated=False, tries=tries, note="")


def _ended(draft: Draft, attempt: Attempt, sight: Sight, job: Job | None, world: World) -> bool:
    """What ends an attempt from any state: the job ended, or was started over by the scheduler."""
    assert world.scheduler is not None
    if sight is Sight.UNSEEN and world.scheduler.began <= world.quiet.get(attempt.key, attempt.since):
        return True  # not there, but the look is too old to say so
    if sight in (Sight.ENDED, Sight.UNSEEN):
        result = job.result if job else ""
        ran = attempt.state is A.ALLOCATED or (attempt.state is A.SPAWNED and result != "CANCELLED")
        event, outcome = (Event.ENDED, "done") if ran else (Event.CANCELLED, "cancelled")
        why = result if job else "the scheduler no longer shows the job"
        _reclaim(draft, attempt, event, outcome, why)  # type: ignore[arg-type]
        return True
    if sight is Sight.RESTARTED:
        _reclaim(draft, attempt, Event.RESTARTED, "requeued", "the scheduler requeued the job")
        return True
    return False


def _reclaim(draft: Draft, attempt: Attempt, event: Event, outcome: Outcome, reason: str) -> None:
    draft.move(
        Change(
            replace(attempt, state=A.RECLAIMING, outcome=outcome, reason=reason, note="", quarantined=""),
            event,
            reason,
        )
    )


def _quarantine(draft: Draft, attempt: Attempt, why: str) -> None:
    draft.move(Change(replace(attempt, quarantined=why), Event.QUARANTINED, why))


def _step_queued(draft: Draft, attempt: Attempt, sight: Sight, job: Job | None) -> None:
    assert job is not None
    if sight is Sight.PENDING:
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
            draft.move(Change(fresh, Event.NOTED, "changed while waiting" if request != attempt.request else ""))
    elif sight is Sight.RUNNING and not attempt.stray:
        # Requeued by Slurm with its old pin, it was started on a VM that is about to go.
        draft.move(Change(replace(attempt, stray=True), Event.NOTED, "it runs on a VM of an earlier attempt"))


def _step_making(draft: Draft, attempt: Attempt, sight: Sight, job: Job | None, world: World, policy: Policy) -> None:
    assert job is not None
    if sight is not Sight.PENDING:
        _quarantine(draft, attempt, f"the job is {sight} before it was given its nodes")
        return
    if job.held:
        _give_back(draft, attempt, Event.CHANGED, "the job was held")
    elif job.request != attempt.request:
        _give_back(draft, attempt, Event.CHANGED, "the job's request was changed")
    else:
        _see_to_vms(draft, attempt, world, policy)


def _give_back(draft: Draft, attempt: Attempt, event: Event, reason: str, *, failed: bool = False) -> None:
    draft.move(Change(_given_back(attempt, reason, tries=attempt.tries + failed), event, reason))


def _see_to_vms(draft: Draft, attempt: Attempt, world: World, policy: Policy) -> None:
    """Claimed and spawning: replace what failed, and go on when all VMs have come as far."""
    if attempt.quarantined:
        return
    vms = draft.serving_vms_of(attempt)
    missing = attempt.request.nodes - len(vms)
    if missing > 0:
        _replace_vms(draft, attempt, missing, world, policy)
    elif attempt.state is A.CLAIMED and all(vm.state is not V.PLANNED for vm in vms):
        started = [Change(replace(vm, state=V.STARTING), Event.START) for vm in vms if vm.state is V.PARKED]
        draft.move(Change(replace(attempt, state=A.SPAWNING), Event.MADE), *started)
    elif attempt.state is A.SPAWNING and all(vm.state is V.JOINED for vm in vms):
        draft.move(Change(replace(attempt, state=A.SPAWNED, gated=False), Event.ALL_JOINED))


def _replace_vms(draft: Draft, attempt: Attempt, missing: int, world: World, policy: Policy) -> None:
    failures = [vm.reason for vm in draft.vms_of(attempt) if vm.failed and vm.reason]
    why = failures[-1] if failures else "a VM was lost"
    # Once a gang's VMs start, they know each other by name and let nobody else in: then it is all of them or none.
    told = attempt.state is A.SPAWNING and attempt.request.nodes > 1
    if told or attempt.replaced + missing > policy.replacements:
        if attempt.tries + 1 >= policy.attempts:
            text = f"no VM could be made for it in {policy.attempts} attempts: {why}"
            _reclaim(draft, attempt, Event.GAVE_UP, "failed", text)
        else:
            _give_back(draft, attempt, Event.GAVE_UP, why, failed=True)
        return
    if world.hypervisor is None:
        return
    hosts = world.hypervisor.value.hosts
    choice, parents = settle(draft, attempt, hosts, world, policy)
    able = {
        name: parents[name]
        for name in able_hosts(attempt, choice.kind, hosts, policy)
        if choice.kind is not CloneKind.INSTANT
        or _template_ready(draft, template_key(attempt, name, parents[name], policy))
    }
    room = room_of(draft, world.hypervisor.value, policy)
    chosen = room.place(missing, vm_claims(attempt.request.size, able, policy))
    vms = plan_vms(draft, attempt, choice.kind, chosen, parents, policy) if chosen else None
    if vms is None:
        imageless = hosts and not parents
        lacks = "no host has its image" if imageless else "no room for another VM"
        _give_back(draft, attempt, Event.GAVE_UP, f"{why}; {lacks}", failed=not imageless)
        return
    story = story_of(choice, vms)
    again = replace(attempt, replaced=attempt.replaced + missing, choice=f"{attempt.choice}; then {story}")
    draft.move(
        Change(again, Event.REPLACED, f"{why}; now {story}"),
        *(Change(vm, Event.PLANNED) for vm in vms),
        make=(Claim(vm.key, vm.host, vm_claim(vm.size, policy)) for vm in vms),
    )


def _template_ready(draft: Draft, which: TemplateKey) -> bool:
    template = draft.template_for(which)
    return template is not None and template.state is T.READY


def _step_spawned(draft: Draft, attempt: Attempt, sight: Sight, job: Job | None, world: World, policy: Policy) -> None:
    assert job is not None and world.scheduler is not None
    began = world.scheduler.began
    waits = _let_down(draft, attempt, world, policy)
    vms = draft.serving_vms_of(attempt)
    if sight in (Sight.RUNNING, Sight.COMPLETING):
        own = {vm.name for vm in draft.vms_of(attempt)}  # those too that were lost in this very moment
        if not own.issuperset(job.nodes) and sight is Sight.RUNNING:
            _quarantine(draft, attempt, f"its job runs on {', '.join(job.nodes)}, not on its own VMs")
            return
        if waits:
            return  # so does its end
        serving = [Change(replace(vm, state=V.SERVING), Event.RUNS) for vm in vms if vm.state is V.JOINED]
        draft.move(Change(replace(attempt, state=A.ALLOCATED), Event.RUNS), *serving)
    elif job.held:
        _give_back(draft, attempt, Event.CHANGED, "the job was held")
    elif job.request != attempt.request:
        _give_back(draft, attempt, Event.CHANGED, "the job's request was changed")
    elif len(vms) < attempt.request.nodes or any(vm.failed for vm in vms):
        _give_back(draft, attempt, Event.GAVE_UP, "a VM was lost before the job ran", failed=True)
    elif down := next((vm.name for vm in vms if vm.offer and _is_down(vm, world.scheduler.value)), ""):
        _give_back(draft, attempt, Event.GAVE_UP, f"node {down} is down", failed=True)
    elif began - attempt.since > (policy.pin_timeout if job.eligible or not job.pinned else policy.held_timeout):
        why = f"the scheduler did not start it: {job.reason or 'no reason'}"
        _give_back(draft, attempt, Event.PIN_EXPIRED, why, failed=True)


def _is_down(vm: Vm, view: SchedulerView) -> bool:
    return vm.name in view.nodes and view.nodes[vm.name].state is NodeState.DOWN


def _let_down(draft: Draft, attempt: Attempt, world: World, policy: Policy) -> bool:
    """Whether the job, which took its spare by itself, waits in it until its user is known, or its user is being told
    what it has. A spare that cannot be told of its user, or was not in time, is given up: its node goes DOWN, and the
    scheduler queues the job again."""
    unmet = [vm for vm in draft.vms_of(attempt) if _unmet(vm, attempt, world)]
    if unmet and world.hypervisor is not None:
        began = world.hypervisor.began
        heard = began > world.quiet.get(attempt.key, math.inf)  # what was said last may have let it in
        if heard and (attempt.reason or began - attempt.since > policy.pin_timeout):
            why = attempt.reason or f"it was not told of its user within {policy.pin_timeout:g} s"
            down = [Change(_releasing(vm, why), Event.DIED, why) for vm in unmet if vm.state is not V.LOST]
            if down:
                draft.move(*down)
    took = any(vm.offer is Offer.TAKEN for vm in draft.vms_of(attempt))
    return bool(unmet) or (took and world.quiet.get(attempt.key) == math.inf)


def _unmet(vm: Vm, attempt: Attempt, world: World) -> bool:
    """Whether its job took this VM by itself and nobody has seen yet that its guest knows the user. One on its way out
    never will."""
    if vm.offer is not Offer.TAKEN or vm.state is V.RELEASING or (vm.failed and vm.state is not V.LOST):
        return False
    seen = world.hypervisor.value.vms.get(vm.name) if world.hypervisor else None
    return seen is None or attempt.uid not in seen.introduced


def _step_allocated(draft: Draft, attempt: Attempt, sight: Sight) -> None:
    if sight is Sight.COMPLETING:
        _reclaim(draft, attempt, Event.ENDED, "done", "its job is completing")
    elif sight is Sight.PENDING:
        # Pending again with the same restart count: the launch was taken back before it counted.
        _give_back(draft, attempt, Event.CHANGED, "the scheduler took the launch back")


def _learn_the_end(draft: Draft, attempt: Attempt, sight: Sight, job: Job | None) -> Attempt:
    """A job that is completing has not said yet how it ends: over, or queued again."""
    if attempt.outcome != "done" or job is None:
        return attempt
    if sight is Sight.RESTARTED:
        told = replace(attempt, outcome="requeued", reason="the scheduler requeued the job", gated=True)
    elif sight is Sight.ENDED and job.result:
        told = replace(attempt, reason=job.result)
    else:
        return attempt
    if told != attempt:
        draft.move(Change(told, Event.NOTED, told.reason))
    return draft.attempts[attempt.id]


def _other_wish(job: Job, attempt: Attempt) -> bool:
    """Whether the job asks for something else than what was refused. What this scheme cannot read is no wish."""
    return job.request is not None and job.request != attempt.request


def _finish(draft: Draft, attempt: Attempt, sight: Sight, job: Job | None, world: World, policy: Policy) -> None:
    """Reclaiming: the job must be off our nodes and off their feature before the VMs may go, and the
    VMs must be gone before the attempt is over."""
    assert world.scheduler is not None
    began = world.scheduler.began
    if began <= world.quiet.get(attempt.key, 0.0) or began < attempt.since:
        return  # nothing seen yet since our last word in this matter
    attempt = _learn_the_end(draft, attempt, sight, job)
    if attempt.outcome == "revoked" and sight is Sight.PENDING and job is not None and _other_wish(job, attempt):
        again = replace(attempt, outcome="requeued", gated=_at_gate(job))
        draft.move(Change(again, Event.NOTED, "changed before it was refused"))
        attempt = draft.attempts[attempt.id]
    vms = draft.vms_of(attempt)
    names = {vm.name for vm in vms}
    on_ours = job is not None and any(node in names for node in job.nodes)
    if job is not None and job.state is JobState.COMPLETING and on_ours:
        if began - attempt.since <= policy.complete_timeout:
            return
    elif job is not None and job.state in (JobState.RUNNING, JobState.SUSPENDED) and on_ours:
        unmet = [vm for vm in vms if _unmet(vm, attempt, world) and vm.state is not V.LOST]
        said = max(attempt.since, world.quiet.get(attempt.key, 0.0))
        if unmet and world.hypervisor is not None and world.hypervisor.began > said:
            why = "its job started when nobody introduced its user any more"
            draft.move(*(Change(_releasing(vm, why), Event.DIED, why) for vm in unmet))
            return
        if attempt.outcome == "requeued" and sight is Sight.RUNNING:
            # Our pin was answered after we had given up on it: the job has its nodes, so let it run.
            draft.move(Change(replace(attempt, outcome="done"), Event.NOTED, "the job started after all"))
        if sight is not Sight.RESTARTED or began - attempt.since <= policy.complete_timeout:
            return  # a restarted one is being requeued by the attempt that came after this
    elif job is not None and job.state is JobState.PENDING and (job.pinned == attempt.feature):
        if attempt.gated and sight is Sight.PENDING:
            draft.move(Change(replace(attempt, gated=False), Event.NOTED))
        return  # the gate first: a pending job on a feature that no node has may never start
    if attempt.outcome in ("revoked", "failed") and sight in (Sight.PENDING, Sight.RUNNING):
        return  # not cancelled yet
    if attempt.outcome == "requeued" and not attempt.gated:
        draft.move(Change(replace(attempt, gated=True), Event.NOTED, "its job is off our nodes"))
        attempt = draft.attempts[attempt.id]
    leaving = [vm for vm in vms if vm.state not in (V.RELEASING, V.LOST)]
    if leaving:
        stuck = names & _occupied(world.scheduler.value)  # a limit has passed: their nodes go DOWN first
        released = [
            _releasing(vm, "", failed=vm.failed or vm.name in stuck, forget=vm.name not in stuck) for vm in leaving
        ]
        # Its job is over, and so is a quarantine, which was for the job's sake.
        draft.move(*(Change(replace(vm, quarantined=""), Event.RELEASED, attempt.reason) for vm in released))
    if vms:
        return
    outcome = attempt.outcome or "done"
    draft.move(Change(replace(attempt, state=A(outcome), quarantined=""), Event.RECLAIMED, attempt.reason))
    if outcome == "requeued" and sight is Sight.PENDING and job is not None:
        wait = policy.backoff(attempt.tries)
        _open(draft, job, tries=attempt.tries, not_before=draft.now + wait if wait else 0.0, note=attempt.reason)


# --- VMs -------------------------------------------------------------------------------------------


def _releasing(vm: Vm, reason: str, *, failed: bool = True, forget: bool = False) -> Vm:
    return replace(vm, state=V.RELEASING, reason=reason or vm.reason, failed=failed, forget=forget)


def _step_vm(draft: Draft, vm_id: int, world: World, policy: Policy) -> None:
    vm = draft.vms.get(vm_id)
    if vm is None or vm.quarantined or world.hypervisor is None:
        return
    hypervisor, began = world.hypervisor.value, world.hypervisor.began
    if vm.host not in hypervisor.hosts and not vm.fenced:
        if vm.state is not V.LOST:
            draft.move(Change(replace(vm, state=V.LOST, failed=True), Event.LOST, f"host {vm.host} is out of reach"))
        return
    if vm.state is V.LOST:
        _find_again(draft, vm, hypervisor.vms.get(vm.name))
        return
    if vm.state is V.RELEASING:
        _step_releasing(draft, vm, world)
        return
    seen = hypervisor.vms.get(vm.name)
    absent = seen is None and began > world.quiet.get(vm.key, vm.since) and began > vm.since
    dead = seen is not None and seen.condition is VmCondition.DEAD
    if vm.state is V.PLANNED:
        if seen is not None and seen.condition not in (VmCondition.MAKING, VmCondition.DEAD):
            draft.move(Change(replace(vm, state=V.PARKED), Event.EXISTS))
        elif seen is not None and dead and began > world.quiet.get(vm.key, vm.since):
            _fail(draft, vm, Event.FAILED, seen.reason or "the VM died while it was made")
        elif began - vm.since > policy.spawn_timeout and began > world.quiet.get(vm.key, 0.0):
            # Not while it is under way: to copy a large disk may take longer, and that has a time limit of its own.
            _fail(draft, vm, Event.FAILED, f"it was not made within {policy.spawn_timeout:g} s")
        return
    if dead or absent:
        why = (seen.reason if seen else "") or "the VM died"
        if vm.state in (V.JOINED, V.SERVING) and _job_is_pinned(draft, vm, world):
            # Unpin first: the row stays until the attempt has put its job back at the gate.
            if not vm.failed:
                draft.move(Change(replace(vm, failed=True, reason=why), Event.NOTED, why))
            return
        _fail(draft, vm, Event.DIED, why)
        return
    attempt = draft.attempt_of(vm)
    to_join = vm.pool is Depth.JOINED and is_spare(vm)
    if vm.state is V.PARKED and (to_join or (attempt is not None and attempt.state is A.SPAWNING)):
        draft.move(Change(replace(vm, state=V.STARTING), Event.START))
    elif vm.state is V.STARTING:
        _step_starting(draft, vm, seen, world, policy)
    elif vm.state is V.JOINED and is_spare(vm) and vm.offer:
        _step_offered(draft, vm, world)


def _step_offered(draft: Draft, vm: Vm, world: World) -> None:
    """Whether it was taken, or is withdrawn, a look must show that began after our last word in the matter."""
    if world.scheduler is None or world.scheduler.began <= max(world.quiet.get(vm.key, 0.0), vm.offered):
        return
    taken = world.scheduler.value.offers.get(vm.name)
    if vm.offer is Offer.TAKEN:
        busy = vm.name in _occupied(world.scheduler.value)  # by a job that cannot be served: its node goes DOWN
        if world.scheduler.began - vm.offered > (UNSERVED if busy else COMING):
            why = "the job that took it did not come"
            gone = replace(vm, state=V.RELEASING, reason=why, failed=busy, forget=not busy)
            draft.move(Change(gone, Event.RELEASED, why))
    elif taken:
        draft.move(Change(replace(vm, offer=Offer.TAKEN, offered=draft.now), Event.NOTED, "taken by a submission"))
    elif vm.offer is Offer.CLOSING and taken is None and vm.key in world.quiet:
        draft.move(Change(replace(vm, offer=Offer.CLOSED, offered=draft.now), Event.NOTED))


def _find_again(draft: Draft, vm: Vm, seen: VmSeen | None) -> None:
    """Its host is back. A VM whose job runs on goes on with it; any other has missed too much."""
    attempt = draft.attempt_of(vm)
    running = seen is not None and seen.condition is VmCondition.RUNNING
    let_in = seen is not None and attempt is not None and attempt.uid in seen.introduced and vm.offer is Offer.TAKEN
    if attempt and running and (attempt.state is A.ALLOCATED or (attempt.state is A.SPAWNED and let_in)):
        draft.move(Change(replace(vm, state=V.SERVING, failed=False, reason=""), Event.FOUND, "its job runs on"))
    else:
        draft.move(Change(_releasing(vm, f"host {vm.host} was out of reach"), Event.FOUND))


def _job_is_pinned(draft: Draft, vm: Vm, world: World) -> bool:
    """Whether its attempt's job waits, tied to it, or may: a pin may be on its way, unseen as yet."""
    attempt = draft.attempt_of(vm)
    if attempt is None:
        return False
    if world.scheduler is None or attempt.state is A.SPAWNED:
        return True
    if attempt.state is A.RECLAIMING and attempt.outcome == "requeued" and not attempt.gated:
        return True
    job = world.scheduler.value.jobs.get(attempt.job.job_id)
    return job is not None and job.state is JobState.PENDING and job.pinned == attempt.feature


def _fail(draft: Draft, vm: Vm, event: Event, why: str) -> None:
    draft.move(Change(_releasing(vm, why), event, why))


def _step_starting(draft: Draft, vm: Vm, seen: VmSeen | None, world: World, policy: Policy) -> None:
    """Joined when both sides say so: the node is registered, and the guest is all itself."""
    if world.scheduler is None:
        return
    node = world.scheduler.value.nodes.get(vm.name)
    registered = node is not None and node.state in (NodeState.IDLE, NodeState.BUSY)
    if registered and seen is not None and seen.condition is VmCondition.RUNNING:
        draft.move(Change(replace(vm, state=V.JOINED), Event.REGISTERED))
    elif node is not None and node.state is NodeState.DOWN:
        _fail(draft, vm, Event.FAILED, f"its node came up down: {node.reason or 'no reason given'}")
    elif world.scheduler.began - vm.since > policy.spawn_timeout:
        _fail(draft, vm, Event.FAILED, f"its node did not register within {policy.spawn_timeout:g} s")


def _step_releasing(draft: Draft, vm: Vm, world: World) -> None:
    """Gone only when a destruction has ended and, in looks begun since, neither side shows it."""
    ended = world.quiet.get(vm.key)
    if ended is None or world.scheduler is None or world.hypervisor is None:
        return
    if min(world.scheduler.began, world.hypervisor.began) <= max(ended, vm.since):
        return
    if vm.name not in world.hypervisor.value.vms and vm.name not in world.scheduler.value.nodes:
        draft.move(Change(replace(vm, state=V.GONE), Event.ABSENT), free=[vm.key])
    elif not vm.forget and vm.name not in _occupied(world.scheduler.value):
        draft.move(Change(replace(vm, forget=True), Event.NOTED, "no job is on its node"))


def _occupied(view: SchedulerView) -> set[str]:
    """Nodes that a job runs on, or is not done with. slurmctld 22.05 lets such a node be deleted once it is
    DOWN, and dies of it when it comes to the job's last step (a null pointer in step_mgr.c)."""
    return {
        node for job in view.jobs.values() if job.state not in (JobState.PENDING, JobState.ENDED) for node in job.nodes
    }


# --- templates -------------------------------------------------------------------------------------


def _step_template(draft: Draft, template_id: int, world: World) -> None:
    row = draft.templates.get(template_id)
    if row is None or row.quarantined or world.hypervisor is None:
        return
    ended = world.quiet.get(row.key)
    if world.hypervisor.began <= max(ended or 0.0, row.since) or row.host not in world.hypervisor.value.hosts:
        return
    seen = world.hypervisor.value.templates.get(row.which)
    ready = seen is not None and seen.condition is TemplateCondition.READY
    if row.state is T.BUILDING and ready:
        draft.move(Change(replace(row, state=T.READY, tries=0), Event.BUILT))
    elif row.state is T.READY and not ready:
        why = seen.reason if seen else "it is no longer there"
        draft.move(Change(replace(row, state=T.ABSENT), Event.VANISHED, why), free=[row.key])
    elif row.state is T.RETIRING and ended is not None and seen is None:
        draft.move(Change(replace(row, state=T.ABSENT), Event.ABSENT), free=[row.key])
