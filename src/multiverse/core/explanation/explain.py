"""Why a job waits, in which stage it is, how it ended, and what each host lacks for it. Pure, and computed on request.

The first sentence of a job that waits contains what `reasons.reason_of` says, which is also what its user reads in the
scheduler (`controller.comments`). Hosts with the same verdict are one group, because a site may have 10,000 of them.
Their figures come from where admission takes them: the same sizes, claims, templates and room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from multiverse.core.admission.reasons import BEHIND, reason_of
from multiverse.core.capacity.room import Room, room_of
from multiverse.core.capacity.sizes import could_ever_fit, short_of_disk, template_claim, vm_claim, vm_size
from multiverse.core.capacity.usable_hosts import for_attempt, why_avoided
from multiverse.core.capacity_index import Free
from multiverse.core.clones.kinds import Choice, choose_clones, makes, node_request, template_key
from multiverse.core.context import Context
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HostState
from multiverse.core.model.job import Attempt, AttemptState, Job, JobState
from multiverse.core.model.reason import Reason, Why, said
from multiverse.core.model.vm import Template, TemplateState, VmState
from multiverse.core.policy import Policy, wait_for, why_stays
from multiverse.core.rows import plus
from multiverse.core.runs import why_earlier_run
from multiverse.core.state import State

# --- hosts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """What is true of some hosts, for one attempt. `fits`: they could take at least one of its VMs now."""

    hosts: tuple[str, ...]
    why: Reason
    fits: bool = False


@dataclass(slots=True)
class _Group:
    """Hosts for which the same is true, but for a figure: `figures` are the least and the most of it."""

    hosts: list[str] = field(default_factory=list)
    figures: tuple[int, int] | None = None

    def add(self, host: str, figure: int | None) -> None:
        self.hosts.append(host)
        if figure is not None:
            least, most = self.figures or (figure, figure)
            self.figures = min(least, figure), max(most, figure)


_Finding = tuple[bool, Reason, int | None]
"""Whether the host fits, why, and the figure in which it may differ from others of which the same is true."""


def host_verdicts(context: Context, attempt: Attempt) -> list[HostVerdict]:
    """Each host of the site in one group: those that fit first, then the largest groups. Costs a look at each host."""
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
    """Judges one host after the other for one attempt."""

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
        """Why the host takes no VM of the attempt whatever is free: by an operator's word, or its lease's."""
        context = self._context
        if name not in context.closed:
            return None
        if name in context.avoided and name not in context.with_avoided().closed:
            return Why.IS_AVOIDED(why_avoided(context, name, self._image))
        drain = context.state.drains.get(name)
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
        claim = vm_claim(vm_size(self._attempt.request.size, template, host, self._context.policy), host, self._image,
                         self._choice.kind)  # fmt: skip
        build = Size(0, 0, 0)
        if self._choice.forks and row is None:
            build = template_claim(template, host, self._image)
        if lack := self._lack(name, claim, build):
            return lack
        if self._choice.forks and (why := self._template(row)):
            return False, why, None
        state, policy = self._context.state, self._context.policy
        if wait_for((name, self._image, self._choice.kind), state.paced, state.now, policy) > 0:
            return False, Why.PACED_THERE(clones=self._choice.kind), None
        return True, Why.HAS_ROOM(), self._room.held(name, claim)

    def _never(self, name: str, host: Host, template: Size) -> Reason | None:
        """Why the host could not hold one of the VMs if it were empty."""
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
        for what, need, have in zip(amounts, plus(claim, build).amounts, free, strict=True):
            if need > have:
                beside = bool(build.memory) and what in amounts[1:3]
                held = what == "MiB of memory" and name in self._room.tight
                return False, Why.LACKS(need=need, what=what, beside=int(beside), held=int(held)), max(0, have)
        return None

    def _template(self, row: Template | None) -> Reason | None:
        """Why no VM can be forked there now although there is room for it."""
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


def explain(context: Context, attempt: Attempt, now: float) -> Explanation:
    """Explain a live attempt; `now` is the present monotonic time."""
    time = now - attempt.since
    if attempt.quarantined:
        todo = f"an operator has to decide: multiverse repair {attempt.job.job_id}"
        return _of(Why.QUARANTINED(attempt.quarantined, time=time), todo=todo)
    match attempt.state:
        case A.QUEUED:
            return _waiting(context, attempt, now)
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


def _waiting(context: Context, attempt: Attempt, now: float) -> Explanation:
    # Attempts may have been given up meanwhile; Slurm gives a job that it queues again a new submit time.
    time, state = max(0.0, context.unix(now) - attempt.job.submitted), context.state
    job = context.scheduler.jobs.get(attempt.job.job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job:
        kind = Why.NOT_OBSERVED if context.world.scheduler is None else Why.NOT_SHOWN
        return _of(kind(time=time))
    if not job.eligible or attempt.waits_for_delay(job):
        return _of(*_kept_by_the_scheduler(context, attempt, job, time))
    short, note = reason_of(attempt, job, state.reasons, now), attempt.note
    own = short if short not in (None, BEHIND) else _own_obstacle(context, attempt)
    sentences = [Why.HAS_WAITED(own or short or Why.ABOUT_TO_CONSIDER(), time=time)]
    if job.at_origin:
        sentences.append(Why.EITHER(partition=job.origin))
    if note and now < attempt.not_before:
        sentences.append(Why.AGAIN_IN(time=attempt.not_before - now, tries=attempt.tries))
    elif note:
        sentences.append(Why.GIVEN_UP_BEFORE(note))
    ahead, behind = _before(state, attempt, job), ""
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
    """What keeps the attempt from being admitted whoever is ahead of it."""
    state = context.state
    if attempt.id in state.queue.why_unfit:
        return state.queue.why_unfit[attempt.id]
    job, left = state.queue.job_of(attempt.id), context.scheduler.limits
    if limit := next((limit for limit, count in job.uses if count > left.get(limit, 0)), ""):
        return Why.LIMIT(limit=limit)
    if kept := context.kept_by(job):
        return kept.why()
    return why_earlier_run(state, context.world, attempt)


def _before(state: State, attempt: Attempt, job: Job) -> int:
    return state.queue.candidates.before((job.rank, attempt.id))


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
    if attempt.id in context.state.queue.unfit:
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
            return [_running(context, attempt, where, time), _chosen(attempt)]
        case A.RETURNING:
            return [Why.GOING_BACK(attempt.reason, time=time)]
        case A.REVOKING:
            return [Why.CANCELLING(attempt.reason, time=time)]
        case _:
            return [Why.RELEASING(time=time, vms=len(vms))]


def _chosen(attempt: Attempt) -> Reason | None:
    return Why.CHOSEN(attempt.choice, partition=attempt.origin) if attempt.choice else None


def _running(context: Context, attempt: Attempt, where: Sequence[Reason], time: float) -> Reason:
    job = context.scheduler.jobs.get(attempt.job.job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job:
        return Why.HAS_RUN(*where, time=time)
    if job.state is JobState.SUSPENDED:
        return Why.SUSPENDED(*where, time=time)
    return Why.HAS_RUN(*where, time=time, ends=job.ends)


# --- what has ended --------------------------------------------------------------------------------


def explain_ended(attempt: Attempt, ended: float) -> Explanation:
    """Explain an attempt that has ended, so many seconds ago."""
    why = attempt.reason
    match attempt.state:
        case A.DONE:
            return _of(Why.ENDED(why, time=ended), _chosen(attempt))
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
    """Explain a job that has no attempt yet."""
    if job.at_origin and job.state is not JobState.PENDING:
        return _of(Why.RUNS_AT_ORIGIN(partition=job.origin))
    if job.at_origin and (why := why_stays(job, policy)):
        return _of(Why.STAYS(why, partition=job.origin))
    if job.problem:
        return _of(Why.CANNOT_BE_SERVED(Why.PROBLEM(text=job.problem)), todo="submit it again without that")
    return _of(Why.NEW())
