"""What would become of jobs that do not exist: whether one would start now, and how many nodes of a size would.

A job that is tried is put behind all that wait, admission runs as in a pass, and all of it is undone. So the answer is
that of the planner, and nothing comes of it: no move, no claim, and nothing that is kept between passes.

Immediate capacity is counted as admission would admit jobs of one node after the other: on hosts that take new VMs and
have the template ready (or boot the image), as many as have room; and the joined spares of that size.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from multiverse.core.admission.admit import Admission, Waiting
from multiverse.core.admission.backfill import reserve
from multiverse.core.admission.reasons import BEHIND
from multiverse.core.capacity.placement_policies import BUILT_IN
from multiverse.core.capacity.room import Blockage, room_of
from multiverse.core.capacity.sizes import claimable_cpus, claimable_disk, template_size, vm_claim, vm_claims, vm_size
from multiverse.core.capacity.usable_hosts import for_attempt
from multiverse.core.clones.kinds import choose_clones, may_fork, node_request, on_hosts_making, wish_of
from multiverse.core.clones.spares import joined_for
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.explanation.explain import HostVerdict, host_verdicts
from multiverse.core.machines.attempt import submit_attempt
from multiverse.core.model.basics import CloneKind, Depth, Size
from multiverse.core.model.identity import UserSeen
from multiverse.core.model.job import Attempt, AttemptState, Job, JobRef, JobState, Request
from multiverse.core.model.reason import Reason
from multiverse.core.model.vm import VmState
from multiverse.core.policy import wait_for
from multiverse.core.rows import plus
from multiverse.core.state import State

NAME = "(this one)"  # The id of the job that does not exist. The scheduler gives no job such an id

_UID = -1  # nobody's


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """What would become of a job that is submitted now."""

    starts: bool  # its VMs would be claimed at once, on `hosts`
    why: Reason | None  # it would wait, or was chosen so
    never: bool = False  # it would be cancelled
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
    """By when the attempt would start if no other job waited. Infinity: nobody can tell."""
    context = for_attempt(context, attempt)
    return reserve(context, room_of(context), attempt, choose_clones(context, attempt)).at


# --- immediate capacity -----------------------------------------------------------------------------


LADDER = 10  # the most sizes that are shown beside those that jobs and pools ask for


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
    """How many joined spares a job of one such node could take."""
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
    """What is used and what is free."""
    state, room = context.state, room_of(context)
    sums = dict.fromkeys(("total", "job", "spare", "template", "free", "closed"), Size(0, 0))

    def add(what: str, size: Size) -> None:
        sums[what] = plus(sums[what], size)

    closed = 0
    for name, host in context.in_sight.items():
        most = int(host.capacity.memory * host.overcommit.memory)
        add("total", Size(claimable_cpus(host), most, claimable_disk(host), host.capacity.net))
        for claim in state.claims.on(name):
            row = state.get(claim.owner)
            what = "template" if claim.owner.kind == "template" else "job"
            what = "spare" if getattr(row, "is_spare", False) else what
            add(what, claim.size)
        free = Size(*(max(0, one) for one in room.free[name]))
        if name in context.closed:
            closed += 1
            add("closed", free)
        else:
            add("free", free)
    return CapacityUsage(
        len(context.in_sight), sums["total"], sums["job"], sums["spare"], sums["template"],
        sums["free"], sums["closed"], closed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompatibleHost:
    """A host with room for such a VM."""

    name: str
    free: Size  # may still be claimed there
    claim: Size  # of the VM
    holds: int  # how many of them fit
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
