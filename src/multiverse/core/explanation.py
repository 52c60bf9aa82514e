"""Answers on request: why a job waits, what each host lacks for it, what would become of a request. Nothing changes.

The first sentence of a job that waits contains what its user reads in the scheduler (`queue.reason_of`). Hosts with the
same verdict are one group, because a site may have 10,000. Figures come from where admission takes them.

A job that is tried is put behind all that wait, admission runs as in a pass, and all of it is undone. Immediate
capacity counts joined spares and what has room on open hosts with the template ready, as admission would.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf

from multiverse.core.admission.admit import Admission, Waiting
from multiverse.core.admission.backfill import reserve
from multiverse.core.capacity.placement_policies import BUILT_IN
from multiverse.core.capacity.room import Blockage, Room, room_of
from multiverse.core.capacity.sizes import (
    claimable,
    could_ever_fit,
    short_of_disk,
    template_claim,
    template_size,
    vm_claim,
    vm_claims,
    vm_size,
)
from multiverse.core.capacity.usable_hosts import for_attempt, why_avoided
from multiverse.core.capacity_index import Free
from multiverse.core.checkpoints import next_checkpoint
from multiverse.core.clones.kinds import (
    Choice,
    choose_clones,
    makes,
    may_fork,
    node_request,
    on_hosts_making,
    template_key,
    wish_of,
)
from multiverse.core.clones.spares import joined_for
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.machines.attempt import submit_attempt
from multiverse.core.machines.checkpoint import checkpoints_of
from multiverse.core.machines.host import silent_since
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.host import Host, HostState
from multiverse.core.model.identity import UserSeen
from multiverse.core.model.job import Attempt, AttemptState, Job, JobRef, JobState, Request
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.saved import SavedState
from multiverse.core.model.vm import MOVING_STATES, Template, TemplateState, Vm, VmState
from multiverse.core.policy import Policy, wait_for, why_stays
from multiverse.core.queue import BEHIND, reason_of
from multiverse.core.saving import saved_at, why_evicted
from multiverse.core.state import State, why_earlier_run


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """What is true of some hosts, for one attempt. `fits`: they could take at least one of its VMs now."""

    hosts: tuple[str, ...]
    why: Reason
    fits: bool = False


@dataclass(slots=True)
class _Group:
    """Hosts with the same verdict but for a figure: `figures` are the least and the most of it."""

    hosts: list[str] = field(default_factory=list)
    figures: tuple[int, int] | None = None

    def add(self, host: str, figure: int | None) -> None:
        self.hosts.append(host)
        if figure is not None:
            least, most = self.figures or (figure, figure)
            self.figures = min(least, figure), max(most, figure)


_Finding = tuple[bool, Reason, int | None]  # whether the host fits, why, and the figure that may differ within a group


def host_verdicts(context: Context, attempt: Attempt) -> list[HostVerdict]:
    """All hosts of the site in groups: hosts that fit first, then the largest groups. Looks at each host."""
    judge = _Judge(context, attempt)
    groups: dict[tuple[bool, Reason], _Group] = {}
    names = sorted({*context.in_sight, *context.state.hosts})
    for name in names:
        known = context.state.hosts.get(name)
        if known is not None and known.state is HostState.REMOVED:
            continue
        fits, why, figure = judge.of(name)
        groups.setdefault((fits, why), _Group()).add(name, figure)
    found = [HostVerdict(tuple(one.hosts), _with(why, one.figures), fits) for (fits, why), one in groups.items()]
    return sorted(found, key=lambda one: (not one.fits, -len(one.hosts), str(one.why)))


def _with(why: Reason, figures: tuple[int, int] | None) -> Reason:
    if figures is None:
        return why
    least, most = figures
    found = (("least", least), ("most", most))[: 1 if least == most else 2]
    return replace(why, figures=(*why.figures, *found))


class _Judge:
    def __init__(self, context: Context, attempt: Attempt) -> None:
        self._context, self._attempt = for_attempt(context, attempt), attempt
        self._image = context.image_of(attempt)
        self._choice: Choice = choose_clones(self._context, attempt)
        self._room: Room = room_of(self._context)
        self._too_small: dict[tuple[int, Size], Reason | None] = {}  # by class of hosts and size of the template

    def of(self, name: str) -> _Finding:
        context, host = self._context, self._context.in_sight.get(name)
        if (known := context.state.hosts.get(name)) is not None and known.is_off:
            return False, Why.IS_OFF(), None
        if host is None:
            return False, Why.IS_AWAY(), None
        if closed := self._closed(name):
            return False, closed, None
        kind = self._choice.kind
        if self._image not in host.images:
            return False, Why.LACKS_IMAGE(image=self._image), None
        if not makes(host, self._image, kind):
            return False, Why.MAKES_NONE(clones=kind, image=self._image), None
        return self._of_open(name, host, self._choice.sizes[name])

    def _closed(self, name: str) -> Reason | None:
        context = self._context
        if name not in context.closed:
            return None
        if name in context.avoided and name not in context.with_avoided().closed:
            return Why.IS_AVOIDED(why_avoided(context, name, self._image))
        drain = context.state.drains.get(name)
        waking = [vm.name for vm in context.state.vms_in(VmState.DELAYED) if vm.host == name]
        if drain is None and waking:
            return Why.WAKES_FIRST(vm=waking[0])
        if drain is None:
            return Why.LEASE_ENDS() if name in context.without else Why.TAKES_NONE()
        return (Why.WILL_BE_DRAINED if name in context.without else Why.IS_DRAINED)(said(drain.reason))

    def _of_open(self, name: str, host: Host, template: Size) -> _Finding:
        if why := self._never(name, host, template):
            return False, why, None
        if short_of_disk(host):
            return False, Why.SHORT_OF_DISK(floor=host.overcommit.disk_floor), None
        row = self._context.state.template_for(template_key(self._context, self._attempt, name, template))
        row = row if self._choice.forks else None
        size = vm_size(self._attempt.request.size, template, host, self._context.policy)
        claim = vm_claim(size, host, self._image, self._choice.kind)
        builds = self._choice.forks and row is None
        build = template_claim(template, host, self._image) if builds else Size(0, 0)
        if lack := self._lack(name, claim, build):
            return lack
        if self._choice.forks and (why := self._template(row)):
            return False, why, None
        state, policy = self._context.state, self._context.policy
        if wait_for((name, self._image, self._choice.kind), state.paced, state.now, policy) > 0:
            return False, Why.PACED_THERE(clones=self._choice.kind), None
        return True, Why.HAS_ROOM(), self._room.held(name, claim)

    def _never(self, name: str, host: Host, template: Size) -> Reason | None:
        kind = self._context.state.free.class_of.get(name)
        key = (id(kind), template)
        if key not in self._too_small:
            wanted = node_request(self._context, self._attempt, self._choice.kind)
            sizes: Mapping[str, Size] = {name: template}
            one = replace(self._attempt.request, nodes=1)
            fits = could_ever_fit(wanted, one, sizes, {name: host}, self._context.policy)
            capacity = host.capacity
            net = capacity.net if self._attempt.request.size.net else None
            small = Why.TOO_SMALL(cpus=capacity.cpus, memory=capacity.memory, net=net)
            self._too_small[key] = None if fits else small
        return self._too_small[key]

    def _lack(self, name: str, claim: Size, build: Size) -> _Finding | None:
        free: Free = self._room.free[name]
        amounts = ("CPUs", "MiB of memory", "MiB of disk", "Mbit/s")
        for what, need, have in zip(amounts, (claim + build).amounts, free, strict=True):
            if need > have:
                beside = bool(build.memory) and what in amounts[1:3]
                held = what == "MiB of memory" and name in self._room.tight
                what = "CPU" if (need, what) == (1, "CPUs") else what
                return False, Why.LACKS(need=need, what=what, beside=int(beside), held=int(held)), max(0, have)
        return None

    def _template(self, row: Template | None) -> Reason | None:
        match row.state if row else None:
            case TemplateState.READY:
                return None
            case TemplateState.BUILDING:
                return Why.BEING_BUILT(image=self._image)
            case TemplateState.BROKEN if row:
                return Why.TEMPLATE_BROKEN(row.reason, image=self._image)
            case TemplateState.RETIRING:
                return Why.BEING_REMOVED(image=self._image)
            case _:
                return Why.NOT_YET_THERE(image=self._image)


# --- jobs -------------------------------------------------------------------------------------------


A = AttemptState


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is to be said of one attempt."""

    sentences: tuple[Reason, ...]  # one to three
    short: Reason | None = None  # what its user reads in the scheduler while it waits
    todo: str = ""  # what its user can do; empty: nothing
    ahead: int = 0  # attempts before it in the queue
    behind: str = ""  # the job that keeps it waiting
    expected: float = inf  # Unix time by which it starts; infinity: nobody can tell
    hosts: Sequence[HostVerdict] = ()  # empty unless it waits for VMs


def _of(*sentences: Reason | None, todo: str = "") -> Explanation:
    return Explanation(tuple(one for one in sentences if one), todo=todo)


_AWAY = "it goes on by itself once that answers; operators see what to do: multiverse status"


def explain(context: Context, attempt: Attempt, now: float) -> Explanation:
    """Explain a live attempt; `now` is the present monotonic time."""
    found, away = _explained(context, attempt, now), _what_is_away(context, attempt, now)
    return replace(found, sentences=(*found.sentences, *away), todo=found.todo or _AWAY) if away else found


def _what_is_away(context: Context, attempt: Attempt, now: float) -> list[Reason]:
    """Which parts of the site do not answer without which the attempt does not go on."""
    world, found = context.world, list[Reason]()
    if world.scheduler is None:
        found.append(Why.SCHEDULER_AWAY(time=now - world.scheduler_since))
    if attempt.state is not A.QUEUED:
        names = [place.host for vm in context.state.vms_of(attempt) for place in vm.places]
    else:
        names = [] if context.in_sight else sorted(context.state.hosts)
    known = [context.state.hosts[name] for name in dict.fromkeys(names) if name in context.state.hosts]
    silent = {one.name: silent_since(one, world) for one in known if one.is_member and not one.is_off}
    if hosts := [name for name, since in silent.items() if since < inf]:
        found.append(Why.HOSTS_AWAY(time=now - max(silent[name] for name in hosts), hosts=hosts))
    return found


def _explained(context: Context, attempt: Attempt, now: float) -> Explanation:
    time = now - attempt.since
    if attempt.quarantined:
        todo = f"an operator has to decide: multiverse repair {attempt.job.job_id}"
        return _of(Why.QUARANTINED(attempt.quarantined, time=time), todo=todo)
    match attempt.state:
        case A.QUEUED:
            return _with_its_state(context, attempt, _waiting(context, attempt, now))
        case A.UNGATED:
            return _of(Why.UNGATED(time=time))
        case A.RESTORING:
            return _of(Why.RESTORING(partition=attempt.origin, time=time))
        case A.HOLDING:
            return _of(Why.TO_BE_HELD(attempt.note))
        case A.STRAY:
            return _of(Why.STRAY(time=time))
        case _:
            return _of(*_stage(context, attempt, time))


# --- attempts that wait ----------------------------------------------------------------------------


def _with_its_state(context: Context, attempt: Attempt, found: Explanation) -> Explanation:
    """Say first of a job that was saved since when, and how large and where its state is."""
    saved = context.state.saved_for(attempt.job)
    if saved is None:
        return found
    size = saved.bytes >> 20 or None
    sentence = Why.HAS_STATE(why_evicted(saved), at=saved.begun, size=size, storage=saved.storage)
    if saved.kept:
        sentence = Why.IN_MEMORY(host=saved.kept)
    job = context.job_of(attempt)
    if saved.hold and (job is None or job.held):
        held = Why.HELD_WITH_STATE(saved.reason)
        return replace(found, sentences=(sentence, held), todo=f"multiverse resume {attempt.job.job_id} lets it go on")
    return replace(found, sentences=(sentence, *found.sentences))


def _waiting(context: Context, attempt: Attempt, now: float) -> Explanation:
    # Attempts may have been given up meanwhile; Slurm gives a job that it queues again a new submit time.
    time, state = max(0.0, context.unix(now) - attempt.job.submitted), context.state
    job = context.job_of(attempt)
    if job is None:
        return _of((Why.WAITS if context.world.scheduler is None else Why.NOT_SHOWN)(time=time))
    if not job.eligible or attempt.waits_for_delay(job):
        return _of(*_kept_by_the_scheduler(context, attempt, job, time))
    short, note = reason_of(attempt, job, state.reasons, now), attempt.note
    if not context.in_sight:  # admission does nothing then, and what it found before may be over
        short = Why.NO_HOST_IN_REACH()
    own = short if short not in (None, BEHIND) else _own_obstacle(context, attempt)
    sentences = [Why.HAS_WAITED(own or short or Why.ABOUT_TO_CONSIDER(), time=time)]
    if job.at_origin:
        sentences.append(Why.EITHER(partition=job.origin))
    if note and now < attempt.not_before:
        sentences.append(Why.AGAIN_IN(time=attempt.not_before - now, tries=attempt.tries))
    elif note:
        sentences.append(Why.GIVEN_UP_BEFORE(note))
    ahead, behind = state.queue.candidates.before((job.rank, attempt.id)), ""
    if ahead and attempt.id not in state.promised:
        behind, why = _first(state, attempt, ahead)
        sentences.append(why)
    hosts = host_verdicts(context, attempt) if context.world.sees_hosts else []
    expected = state.promised.get(attempt.id, inf)
    return Explanation(tuple(sentences), short, _advice(context, attempt), ahead, behind, expected, hosts)


def _kept_by_the_scheduler(context: Context, attempt: Attempt, job: Job, time: float) -> list[Reason | None]:
    note = attempt.note
    if not job.eligible or job.delayed_until is None:
        kept = context.kept_by(job)
        why = (Why.IS_HELD if job.held else Why.SLURM_KEEPS)(word=job.reason)
        besides = Why.BESIDES(kept.why()) if kept else None
        return [Why.HAS_WAITED(why, time=time), besides, Why.BEFORE_THAT(note) if note else None]
    delay = Why.SLURM_DELAYS(until=job.delayed_until, time=job.delayed_until - context.now)
    return [Why.HAS_WAITED(delay, time=time), Why.WAITS_LONGER(note) if note else None]


def _own_obstacle(context: Context, attempt: Attempt) -> Reason | None:
    state = context.state
    if attempt.id in state.queue.why_unfit:
        return state.queue.why_unfit[attempt.id]
    job, left = state.queue.job_of(attempt.id), context.scheduler.limits
    if limit := next((limit for limit, count in job.uses if count > left.get(limit, 0)), ""):
        return Why.LIMIT(limit=limit)
    if kept := context.kept_by(job):
        return kept.why()
    return why_earlier_run(state, context.world, attempt)


def _first(state: State, attempt: Attempt, ahead: int) -> tuple[str, Reason]:
    """The job that keeps those behind it waiting, if it is before this attempt, and a sentence about those before."""
    first = state.attempts.get(state.blocking) if state.blocking is not None else None
    if first is None or first.id not in state.queue.candidates or first.id == attempt.id:
        return "", Why.AHEAD(number=ahead)
    if state.queue.job_of(first.id).rank > state.queue.job_of(attempt.id).rank:
        return "", Why.AHEAD(number=ahead)
    behind = first.job.job_id
    return behind, Why.AHEAD(state.reasons.get(first.id, Why.CAPACITY()), number=ahead, job=behind)


def _advice(context: Context, attempt: Attempt) -> str:
    if (why := context.state.queue.why_unfit.get(attempt.id)) is not None:
        if why.kind is Why.NO_IMAGE:
            return "request an image of multiverse images by sbatch -C, or ask the operators for this one"
        if not context.hosts:
            return "it goes on by itself once a host takes new VMs; operators see why none does: multiverse hosts"
        return "wait for such hosts, or ask for less: multiverse capacity shows what would start at once"
    if attempt.id == context.state.blocking:
        return "wait, or ask for less: multiverse capacity shows what would start at once"
    return ""


# --- attempts that have VMs ------------------------------------------------------------------------


def _stage(context: Context, attempt: Attempt, time: float) -> list[Reason | None]:
    vms = context.state.vms_of(attempt)
    where = [Why.ON(vm=vm.name, host=vm.host) for vm in vms]
    match attempt.state:
        case A.CLAIMED:
            return [Why.BEING_CREATED(*where, time=time, vms=len(vms)), _chosen(attempt)]
        case A.SPAWNING:
            joined = sum(vm.state is VmState.JOINED for vm in vms)
            return [Why.BEING_STARTED(*where, time=time, joined=joined, vms=len(vms)), _chosen(attempt)]
        case A.SPAWNED:
            return [Why.ABOUT_TO_START(*where, time=time), _chosen(attempt)]
        case A.ADDING_USER:
            return [Why.ADDING_USER(*where, time=time), _chosen(attempt)]
        case A.ALLOCATED:
            later = (*_of_its_saves(context, attempt), *_of_its_checkpoints(context, attempt), *_evictions(attempt))
            return [_running(context, attempt, where, time), *later, _chosen(attempt, vms)]
        case A.WARNED:
            return [Why.IS_WARNED(attempt.reason, time=time), _chosen(attempt, vms)]
        case A.PREEMPTING:
            return [Why.IS_PREEMPTED(attempt.reason), _chosen(attempt, vms)]
        case A.RETURNING:
            return [Why.GOING_BACK(attempt.reason, time=time)]
        case A.REVOKING:
            return [Why.CANCELLING(attempt.reason, time=time)]
        case _:
            return [Why.RELEASING(time=time, vms=len(vms))]


_LEFT_BY = {"move": Why.WAS_MOVED, "save": Why.WAS_SAVED, "requeue": Why.WAS_REQUEUED, "cancel": Why.WAS_REQUEUED}


def _evictions(attempt: Attempt) -> list[Reason | None]:
    """How often a running job has left a host, and why it did so last."""
    gone = [one for one in attempt.evictions if one.took is not None]
    if not gone:
        return []
    last = gone[-1]
    return [
        _LEFT_BY[last.way](
            last.why, host=last.host, at=last.at, took=last.took, times=len(gone) if len(gone) > 1 else None
        )
    ]


def is_being_evicted(state: State, attempt: Attempt) -> bool:
    """Whether the last eviction of its job goes on: its VM moves, it is being saved or waits to go on, or its run is
    about to be ended."""
    last = attempt.evictions[-1] if attempt.evictions else None
    if last is None or last.took is not None:
        return False
    if attempt.preempted:
        return attempt.outcome is None
    if last.way == "move":
        return any(vm.state in MOVING_STATES for vm in state.vms_of(attempt))
    return any(not one.checkpoint for one in state.saved_of_job(attempt.job.job_id))


def _chosen(attempt: Attempt, vms: Iterable[Vm] = ()) -> Reason | None:
    first = "at first" if any(vm.moves for vm in vms) else ""
    return Why.CHOSEN(attempt.choice, partition=attempt.origin, first=first) if attempt.choice else None


def _running(context: Context, attempt: Attempt, where: Sequence[Reason], time: float) -> Reason:
    job = context.job_of(attempt)
    if job is None:
        return Why.HAS_RUN(*where, time=time)
    if job.state is JobState.SUSPENDED:
        return Why.SUSPENDED(*where, time=time)
    return Why.HAS_RUN(*where, time=time, ends=job.ends)


def _of_its_saves(context: Context, attempt: Attempt) -> list[Reason | None]:
    """What becomes of a running job that moves or is being saved, or that asks for that, and why it was not saved."""
    if moving := next((vm for vm in context.state.vms_of(attempt) if vm.state in MOVING_STATES), None):
        why = Why.IS_MOVING if moving.state is VmState.MOVING else Why.IS_SETTLING
        return [why(vm=moving.name, hosts=[place.host for place in moving.places])]
    if (sleep := _of_its_sleep(context, attempt)) is not None:
        return [sleep]
    states = [one for one in context.state.saved_of_job(attempt.job.job_id) if one.job == attempt.job]
    if saved := next((one for one in states if not one.checkpoint), None):
        return [Why.IS_BEING_SAVED(saved.asked, step=saved.state)]
    note = attempt.note
    undone = Why.WAS_NOT_SAVED(*note.because) if note and note.kind is Why.SAVE_UNDONE else None
    return [undone, _at_its_limit(context, attempt)]


def _at_its_limit(context: Context, attempt: Attempt) -> Reason | None:
    """Whether and when a running job is saved that asks for it."""
    job = context.job_of(attempt)
    if attempt.request.save is None or job is None:
        return None
    if attempt.note and attempt.note.kind is Why.NOT_SAVED:
        return Why.CANNOT_BE_SAVED(*attempt.note.because)
    if attempt.runs >= context.policy.save_max_runs:
        return Why.LAST_RUN(runs=attempt.runs)
    at = saved_at(context, attempt, job)
    return Why.WILL_BE_SAVED(at=at) if at is not None else None


_SLEEP = {VmState.FALLING_ASLEEP: Why.FALLS_ASLEEP, VmState.ASLEEP: Why.IS_ASLEEP, VmState.DELAYED: Why.IS_DELAYED,
          VmState.WAKING: Why.IS_WAKING}  # fmt: skip


def _of_its_sleep(context: Context, attempt: Attempt) -> Reason | None:
    """What becomes of the memory of a job that is suspended, or was."""
    for vm in context.state.vms_of(attempt):
        if vm.state in _SLEEP:
            return _SLEEP[vm.state](vm=vm.name, hosts=[vm.host], time=context.state.now - vm.since)
        if vm.state is VmState.SERVING and vm.reason is not None and vm.reason.kind is Why.STAYS_AWAKE:
            return Why.KEEPS_MEMORY(*vm.reason.because)
    return None


def _of_its_checkpoints(context: Context, attempt: Attempt) -> list[Reason | None]:
    """Which checkpoint a running job would go on from, when the next one is made, and why the last one was not."""
    found = checkpoints_of(context.state, attempt.job.job_id)
    at = next_checkpoint(context, attempt)
    if being := next((one for one in found if one.state is SavedState.CAPTURING), None):
        return [Why.IS_CAPTURED(being.asked)]
    lacks = None
    if attempt.note and attempt.note.kind is Why.NO_CHECKPOINT:
        lacks = Why.LACKS_CHECKPOINT(*attempt.note.because)
    if standing := [one for one in found if one.stands]:
        last = standing[-1]
        return [lacks, Why.HAS_CHECKPOINT(at=last.begun, size=last.bytes >> 20 or None, next=at)]
    return [lacks, Why.CHECKPOINT_AT(at=at) if at is not None else None]


# --- what has ended --------------------------------------------------------------------------------


_FILES_IN_VMS = (
    "submit it again from a directory that VMs have, such as your home, or name its files in such directories; /tmp is "
    "the VM's own"
)


def explain_ended(attempt: Attempt, ended: float) -> Explanation:
    """Explain an attempt that has ended, so many seconds ago."""
    why = attempt.reason
    match attempt.state:
        case A.DONE:
            todo = _FILES_IN_VMS if why is not None and why.kind is Why.UNOPENED else ""
            return _of(Why.ENDED(why, time=ended), _chosen(attempt), todo=todo)
        case A.REQUEUED:
            todo = f"its next attempt waits in the queue; where the time went: multiverse timeline {attempt.job.job_id}"
            return _of(Why.GIVEN_UP(why, time=ended), todo=todo)
        case A.CANCELLED:  # one that was moved may run on a physical node
            return _of((Why.ATTEMPT_ENDED if attempt.origin else Why.CANCELLED)(why, time=ended))
        case A.REVOKED:
            todo = "submit it again with a request that fits: multiverse capacity shows sizes"
            return _of(Why.REVOKED(why, time=ended), todo=todo)
        case _:
            look = f"multiverse timeline {attempt.job.job_id} --events"
            todo = f"submit it again; if it fails again, operators find the cause with: {look}"
            return _of(Why.FAILED(why, time=ended), todo=todo)


def explain_new(job: Job, policy: Policy) -> Explanation:
    if job.at_origin and job.state is not JobState.PENDING:
        return _of(Why.RUNS_AT_ORIGIN(partition=job.origin))
    if job.at_origin and (why := why_stays(job, policy)):
        return _of(Why.STAYS(why, partition=job.origin))
    if job.problem:
        return _of(Why.CANNOT_BE_SERVED(Why.PROBLEM(text=job.problem)), todo="submit it again without that")
    return _of(Why.NEW())


# --- jobs that do not exist -------------------------------------------------------------------------


NAME = "(this one)"  # The id of the job that does not exist. The scheduler gives no job such an id
_UID = -1  # nobody's


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """What would become of a job that is submitted now."""

    starts: bool  # its VMs would be claimed at once, on `hosts`
    why: Reason | None  # it would wait, or was chosen so
    never: bool = False  # it would be refused
    hosts: tuple[str, ...] = ()
    ahead: int = 0  # attempts before it
    behind: str = ""  # the job that blocks the others; empty: none
    expected: float = inf  # Unix time by which it starts; infinity: nobody can tell
    alone: float = inf  # the same if no other job waited
    verdicts: tuple[HostVerdict, ...] = ()


def what_if(context: Context, request: Request, limit: float | None, now: float) -> WhatIfAnswer:
    """Try a job that runs for `limit` seconds at most. Needs the scheduler and a host in sight; `now` is monotonic."""
    state, world = context.state, context.world
    if world.users is not None:
        users = {**world.users, _UID: UserSeen(True, now, -inf)}
        context = replace(context, world=replace(world, users=users))
    with _undone(state):
        state.begin(now, state.paced, state.entropy)
        rank = max((rank for rank, _ in state.queue.candidates.entries()[-1:]), default=0) + 1
        ref = JobRef(NAME, int(context.now))
        job = Job(ref, NAME, _UID, JobState.PENDING, request, rank=rank, limit=limit)
        state.queue.jobs = ChainMap({NAME: job}, dict(state.queue.jobs))
        tried = Attempt(state.numbers.new_attempt_id(), now, ref, NAME, _UID, request)
        state.move(submit_attempt(tried))
        trial = _Trial(context, tried.id)
        trial.run()
        return _answer(context, trial, state.attempts[tried.id])


@contextmanager
def _undone(state: State) -> Iterator[None]:
    """Undo all that is done to the state meanwhile, also what a rollback of a pass leaves to the next one."""
    jobs, kept = state.queue.jobs, (state.reasons, state.promised, state.looked, state.users_asked, state.blocking)
    faults, lacking, entropy = dict(state.placement_faults), set(state.lacking), state.entropy
    now, paced, waiting = state.now, dict(state.paced), state.waiting.copy()
    try:
        yield
    finally:
        state.rollback()
        state.queue.jobs = jobs
        state.reasons, state.promised, state.looked, state.users_asked, state.blocking = kept
        state.placement_faults, state.lacking, state.entropy = faults, lacking, entropy
        state.now, state.paced, state.waiting = now, paced, waiting


class _Trial(Admission):
    """Admission that remembers what it says of one attempt."""

    def __init__(self, context: Context, attempt: int) -> None:
        super().__init__(context)
        self.attempt = attempt
        self.why: Reason | None = None

    def _tell(self, attempt: Attempt, why: Reason) -> None:
        if attempt.id == self.attempt:
            self.why = why
        super()._tell(attempt, why)

    def _wait_alike(self, rank: int, attempt_id: int, waiting: Waiting) -> None:
        if attempt_id == self.attempt:
            self.why = self.blocked or waiting.reason
        super()._wait_alike(rank, attempt_id, waiting)


def _answer(context: Context, trial: _Trial, attempt: Attempt) -> WhatIfAnswer:
    state = context.state
    if attempt.state is AttemptState.CLAIMED:
        vms = [vm for vm in state.vms_of(attempt) if vm.state is not VmState.GONE]
        return WhatIfAnswer(True, attempt.choice, hosts=tuple(sorted(vm.host for vm in vms)))
    if attempt.state is AttemptState.REVOKING:
        return WhatIfAnswer(False, attempt.reason, never=True)
    if attempt.id in state.queue.why_unfit:
        return WhatIfAnswer(False, state.queue.why_unfit[attempt.id], verdicts=tuple(host_verdicts(context, attempt)))
    first = state.attempts.get(trial.blocking) if trial.blocking is not None else None
    behind = first.job.job_id if first is not None and first.id != attempt.id else ""
    return WhatIfAnswer(
        False,
        trial.why or trial.blocked or BEHIND,
        ahead=state.queue.candidates.before((state.queue.job_of(attempt.id).rank, attempt.id)),
        behind=behind,
        expected=state.promised.get(attempt.id, inf),
        alone=_alone(context, attempt) if trial.blockage is not Blockage.NONE else inf,
        verdicts=tuple(host_verdicts(context, attempt)),
    )


def _alone(context: Context, attempt: Attempt) -> float:
    context = for_attempt(context, attempt)
    return reserve(context, room_of(context), attempt, choose_clones(context, attempt)).at


# --- immediate capacity -----------------------------------------------------------------------------


LADDER = 10  # the most sizes that are shown, beside sizes that jobs and pools ask for


@dataclass(frozen=True, slots=True)
class ImmediateCapacity:
    """How many nodes of a size would start at once."""

    size: Size
    now: int
    with_template: int  # how many more as soon as hosts have built the template


@dataclass(frozen=True, slots=True)
class CapacityUsage:
    """What VMs may claim on all hosts in sight, over-commitment included."""

    hosts: int  # their number
    total: Size
    jobs: Size  # claims of jobs' VMs
    spares: Size
    templates: Size
    free: Size  # on hosts that take new VMs
    closed: Size  # free on hosts that take none
    closed_hosts: int


def immediate_capacity(context: Context, size: Size, image: str | None = None) -> ImmediateCapacity:
    """How many nodes of a size, and of an image (None: the site's), would start at once."""
    attempt = Attempt(0, context.state.now, JobRef("", 0), "", 0, Request(1, size, image))
    choice = choose_clones(context, attempt)
    name, kind = context.image_of(attempt), choice.kind
    able = on_hosts_making(name, kind, choice.sizes)
    ready = wish_of(context, attempt, able).ready() if choice.forks else able
    claims = vm_claims(node_request(context, attempt, kind), able, context.hosts, context.policy)
    room, state = room_of(context), context.state
    held = {host: room.held(host, claims[host]) for host in able}

    def is_due(host: str) -> bool:
        return wait_for((host, name, kind), state.paced, state.now, context.policy) <= 0

    now = sum(held[host] for host in ready if is_due(host)) + _joined(context, attempt)
    return ImmediateCapacity(size, now, sum(count for host, count in held.items() if host not in ready))


def _joined(context: Context, attempt: Attempt) -> int:
    if not context.policy.pools or not may_fork(context, attempt):
        return 0
    found: set[int] = set()
    while vm := joined_for(context, attempt, found):
        found.add(vm.id)
    return len(found)


def sizes_to_show(context: Context) -> list[Size]:
    """1, 2, 4, … CPUs with as much memory each as hosts have, and what waiting jobs and pools ask for."""
    hosts = list(context.hosts.values())
    if not hosts:
        return []
    each = min(host.capacity.memory // host.capacity.cpus for host in hosts)
    each = max(128, 1 << (each * 3 // 4).bit_length() - 1)  # guests need some memory beside that, and templates do
    most = max(host.capacity.cpus for host in hosts)
    ladder = [Size(1 << step, each << step) for step in range(LADDER) if 1 << step <= most]
    asked = [one.request.size for one in context.state.queue.one_of_each_request()[:LADDER]]
    pools = [pool.size for pool in context.policy.pools if pool.depth is Depth.JOINED]
    return sorted({*ladder, *asked, *pools})


def usage(context: Context) -> CapacityUsage:
    state, room = context.state, room_of(context)
    sums = dict.fromkeys(("total", "jobs", "spares", "templates", "free", "closed"), Size(0, 0))
    closed = 0
    for name, host in context.in_sight.items():
        sums["total"] += claimable(host)
        for claim in state.claims.on(name):
            row = state.get(claim.owner)
            what = "templates" if claim.owner.kind == "template" else "jobs"
            what = "spares" if getattr(row, "is_spare", False) else what
            sums[what] += claim.size
        free = Size(*(max(0, one) for one in room.free[name]))
        closed += name in context.closed
        sums["closed" if name in context.closed else "free"] += free
    return CapacityUsage(len(context.in_sight), closed_hosts=closed, **sums)


@dataclass(frozen=True, slots=True)
class CompatibleHost:
    """A host with room for such a VM."""

    name: str
    free: Size  # may still be claimed there
    claim: Size  # of the VM
    holds: int  # how many such VMs fit
    use: float  # the share of its CPUs or memory that is in use


def compatible_hosts(
    context: Context, node: Size, image: str = "", kind: CloneKind | None = None, policy: str = ""
) -> list[CompatibleHost]:
    """The hosts with room for a VM of such a node: the one that the policy would take first, then by their use. A
    template that has to be built is not counted. Empty or None: as in the settings. Raises `Refused`."""
    name = policy or context.policy.placement
    if name not in BUILT_IN:
        raise Refused(f"{name} is no placement policy that is built in", hint=f"give one of {', '.join(BUILT_IN)}")
    image, kind, room = image or context.policy.image, kind or context.policy.kind, room_of(context).copy()
    claims = {}
    for host in context.hosts.values():
        makes = kind is CloneKind.AUTO or kind.value in host.abilities
        if image in host.images and makes and host.name in room.free:
            size = vm_size(node, template_size(node, host, image, context.policy), host, context.policy)
            claims[host.name] = vm_claim(size, host, image, kind)
    found = [
        CompatibleHost(one, Size(*room.free[one]), claims[one], room.held(one, claims[one]), room.use(one))
        for one in room.holding(claims)
    ]
    first = room.place(1, claims, choose=BUILT_IN[name], seed=context.state.entropy) or [""]
    return sorted(found, key=lambda one: (one.name != first[0], one.use, one.name))
