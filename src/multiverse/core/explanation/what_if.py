"""What admission would decide about a job that does not exist: would it start now, and if not, why and until when.

The job is put behind all that wait, admission runs as in a pass, and all of it is undone. So the answer is that of the
planner, and nothing comes of it: no move, no claim, and nothing that is kept between passes.
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
from multiverse.core.capacity.room import Blockage, room_of
from multiverse.core.capacity.usable_hosts import for_attempt
from multiverse.core.clones.kinds import choose_clones
from multiverse.core.context import Context
from multiverse.core.explanation.host_verdicts import HostVerdict, host_verdicts
from multiverse.core.machines.attempt import submit_attempt
from multiverse.core.model import Attempt, AttemptState, Job, JobRef, JobState, Reason, Request, UserSeen, VmState
from multiverse.core.state import State

NAME = "(this one)"
"""The id of the job that does not exist. The scheduler gives no job such an id."""

_UID = -1  # nobody's


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """What would become of a job that is submitted now. `starts`: its VMs would be claimed at once, on `hosts`.
    `never`: it would be cancelled. Else `why` it would wait, behind `ahead` attempts of which job `behind` is the one
    that blocks the others (empty: none), until `expected` at the latest (Unix time; infinity: nobody can tell).
    `alone` is when it would start at the latest if no other job waited."""

    starts: bool
    why: Reason | None
    never: bool = False
    hosts: tuple[str, ...] = ()
    ahead: int = 0
    behind: str = ""
    expected: float = inf
    alone: float = inf
    verdicts: tuple[HostVerdict, ...] = ()


def what_if(context: Context, request: Request, limit: float | None, now: float) -> WhatIfAnswer:
    """Try a job that asks for this and runs for `limit` seconds at most. `now` is the present monotonic time. The
    scheduler and a host must be in sight."""
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
