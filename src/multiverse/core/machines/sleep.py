"""VMs that sleep while their jobs are suspended: they free their memory.

What the scheduler asks of a node while it falls asleep, sleeps or wakes may reach nobody. So a VM that wakes is told
whether its job runs (`Vm.runs`), until an observation of the job that began after that shows the same. Sleeps of a VM
are numbered in its row, so that a host can refuse a call that comes late.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from multiverse.core.model.basics import Size
from multiverse.core.model.host import Claim
from multiverse.core.model.job import Job, JobState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import World
from multiverse.core.state import State
from multiverse.core.transition import Change, Event

V = VmState

STAND_IN = 32  # MiB that what stands in for a node takes

# --- changes ---------------------------------------------------------------------------------------


def put_to_sleep(vm: Vm, why: Reason) -> Change:
    falling = replace(vm, state=V.FALLING_ASLEEP, sleeps=vm.sleeps + 1, reason=None, runs=None, left=None)
    return Change(falling, Event.SLEEP, why)


def stay_awake(vm: Vm, why: Reason) -> Change:
    """It does not sleep. Whatever was begun of that is undone."""
    why = Why.STAYS_AWAKE(why)
    return Change(replace(vm, state=V.WAKING, runs=False, left=None, reason=why), Event.WAKE, why)


def wake_vm(vm: Vm, runs: bool, left: float | None, why: Reason) -> Change:
    """Let it go on. `runs`: its job was resumed when its time limit had `left` so many seconds (None: any)."""
    return Change(replace(vm, state=V.WAKING, runs=runs, left=left), Event.WAKE, why)


def delay_vm(vm: Vm, left: float | None, why: Reason) -> Change:
    """Its job was resumed, and there is no room."""
    return Change(replace(vm, state=V.DELAYED, runs=True, left=left, reason=why), Event.DELAY, why)


def find_asleep(state: State, vm: Vm) -> None:
    """It sleeps, though its row did not say so: from now on it claims what a sleeping VM does."""
    asleep = replace(vm, state=V.ASLEEP, runs=None, left=None, reason=None)
    _claim_less(state, Change(asleep, Event.FOUND, Why.FOUND_ASLEEP()))


def _claim_less(state: State, change: Change) -> None:
    """Make a change after which the VM claims its disk, and the memory of what stands in for it."""
    vm = change.row
    assert isinstance(vm, Vm)
    claims = [claim for key in vm.claim_keys if (claim := state.claims.get(key)) is not None]
    less = [Claim(one.owner, one.domain, Size(0, min(STAND_IN, one.size.memory), one.size.disk)) for one in claims]
    state.move(change, make=less, free=[one.key for one in claims])


# --- step ------------------------------------------------------------------------------------------


def job_of(state: State, vm: Vm, world: World) -> Job | None:
    """The run that a VM serves, as the scheduler shows it."""
    attempt = state.attempt_of(vm)
    job = world.scheduler.value.jobs.get(attempt.job.job_id) if attempt and world.scheduler is not None else None
    return job if job is not None and attempt is not None and job.ref == attempt.job else None


def step_sleep(state: State, vm: Vm, seen: VmSeen, began: float, world: World) -> None:
    """`seen` is of an observation that began then. A sleeping VM wakes when there is room: see `core.sleeping`."""
    ended = world.ended_at(vm.key, inf)
    after = ended > vm.since and began > ended
    asleep = seen.condition is VmCondition.ASLEEP
    job = job_of(state, vm, world)
    if seen.sleeps > vm.sleeps:  # after the database was lost or restored
        vm = replace(vm, sleeps=seen.sleeps)
        if vm.state is V.WAKING:
            state.move(wake_vm(replace(vm, since=state.now), bool(vm.runs), vm.left, Why.FOUND_ASLEEP()))
            return
    match vm.state:
        case V.SERVING if asleep:
            find_asleep(state, vm)
        case V.FALLING_ASLEEP if asleep and after:
            _claim_less(state, Change(replace(vm, state=V.ASLEEP), Event.SLEPT, Why.MEMORY_FREED(host=vm.host)))
        case V.FALLING_ASLEEP if job is not None and job.state is JobState.RUNNING:
            state.move(wake_vm(vm, True, None, Why.JOB_RESUMED()))
        case V.DELAYED if job is not None and job.state is JobState.SUSPENDED:
            again = replace(vm, state=V.ASLEEP, runs=None, left=None, reason=None)
            state.move(Change(again, Event.SLEEP, Why.JOB_SUSPENDED()))
        case V.WAKING if after and seen.runs and seen.told is vm.runs:
            _step_awake(state, vm, job, ended, world)


def _step_awake(state: State, vm: Vm, job: Job | None, ended: float, world: World) -> None:
    """It runs again, and was told whether its job does."""
    if job is None or world.job_began(job.ref.job_id) <= ended:
        return
    runs = job.state is JobState.RUNNING
    if job.state in (JobState.RUNNING, JobState.SUSPENDED) and runs is not vm.runs:
        why = Why.JOB_RESUMED() if runs else Why.JOB_SUSPENDED()
        state.move(wake_vm(replace(vm, since=state.now), runs, None, why))
    else:
        state.move(Change(replace(vm, state=V.SERVING, runs=None, left=None), Event.WOKE, Why.IS_AWAKE(host=vm.host)))
