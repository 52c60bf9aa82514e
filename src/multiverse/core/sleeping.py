"""Which VMs sleep, and when they wake: as their jobs have been suspended for long, and are resumed."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.capacity.room import room_of
from multiverse.core.capacity.sizes import vm_claim
from multiverse.core.capacity_index import fits
from multiverse.core.clones.spares import release_spare, spares
from multiverse.core.context import Context
from multiverse.core.machines.saved import is_mute
from multiverse.core.machines.sleep import delay_vm, job_of, put_to_sleep, wake_vm
from multiverse.core.machines.template import drop_template, is_present
from multiverse.core.model.host import Claim, Host
from multiverse.core.model.job import AttemptState, Job, JobState
from multiverse.core.model.reason import Why
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.saving import is_busy

AGAIN = 600.0  # seconds until a VM that did not sleep is tried again


def follow_suspended(context: Context) -> None:
    """Let VMs go on whose jobs were resumed, and let others sleep whose jobs have been suspended for long."""
    wake_resumed(context)
    put_suspended_to_sleep(context)


def put_suspended_to_sleep(context: Context) -> None:
    """Let VMs sleep whose jobs have been suspended for long."""
    state, limit = context.state, context.policy.sleep_after
    if not limit or context.world.scheduler is None:
        return
    for job_id, since in sorted(state.compared.suspended.items()):
        if state.now - since < limit:
            continue
        for attempt in state.attempts_of_job(job_id):
            vms = state.serving_vms_of(attempt)
            ready = attempt.state is AttemptState.ALLOCATED and len(vms) == attempt.request.nodes == 1
            if ready and not is_busy(state, attempt) and _may_sleep(context, vms[0]):
                state.move(put_to_sleep(vms[0], Why.SUSPENDED_LONG(limit=limit)))


def _may_sleep(context: Context, vm: Vm) -> bool:
    job, host = job_of(context.state, vm, context.world), context.in_sight.get(vm.host)
    refused = vm.reason is not None and vm.reason.kind is Why.STAYS_AWAKE and context.state.now - vm.since < AGAIN
    shown = vm.state is VmState.SERVING and job is not None and job.state is JobState.SUSPENDED
    heard = not is_mute(vm, context.world)
    return shown and heard and not refused and host is not None and host.storage is not None


def wake_resumed(context: Context) -> None:
    """Let VMs go on whose jobs were resumed, the first ones first, where their hosts have room for them. Nothing else
    takes room there before."""
    state = context.state
    waiting = sorted(state.vms_in(VmState.DELAYED), key=lambda vm: (vm.since, vm.id))
    short = set[str]()
    for vm in (*waiting, *state.vms_in(VmState.ASLEEP)):
        job, host = job_of(state, vm, context.world), context.in_sight.get(vm.host)
        if job is None or host is None or vm.quarantined:
            continue
        runs, anyway = job.state is JobState.RUNNING, _goes_on(context, vm)
        if not (runs or anyway):
            continue
        claim = _claim_awake(context, vm, host)
        left = vm.left if vm.state is VmState.DELAYED or not runs else _left(context, job)
        if anyway or (vm.host not in short and _fits(context, vm, claim)):
            state.move(wake_vm(vm, runs, left, Why.JOB_RESUMED()), make=[claim], free=vm.claim_keys)
            continue
        short.add(vm.host)
        if vm.state is VmState.ASLEEP:
            state.move(delay_vm(vm, left, Why.NO_ROOM_TO_WAKE(host=vm.host)))
        _give_way(context, vm)


def _goes_on(context: Context, vm: Vm) -> bool:
    """Whether it is shown to go on, though nobody has let it: a call that was late has."""
    seen, latest = context.world.vm(vm), context.world.latest(vm.place.source)
    return seen is not None and seen.runs and latest is not None and latest.began > vm.since


def _claim_awake(context: Context, vm: Vm, host: Host) -> Claim:
    """What it claims when it goes on. Its disk it has kept."""
    whole, has = vm_claim(vm.size, host, vm.image, vm.kind), context.state.claims.get(vm.claim_keys[0])
    return Claim(vm.key, vm.host, replace(whole, disk=has.size.disk) if has is not None else whole)


def _fits(context: Context, vm: Vm, claim: Claim) -> bool:
    has = context.state.claims.get(claim.key)
    more = replace(claim.size, memory=claim.size.memory - (has.size.memory if has is not None else 0), disk=0)
    return fits(more, room_of(context).free[vm.host])


def _give_way(context: Context, vm: Vm) -> None:
    """Release the spares of its host, and then the templates that nothing uses."""
    state, why = context.state, Why.GIVES_WAY_TO(vm=vm.name)
    here = [one for one in spares(state) if one.host == vm.host]
    for spare in here:
        release_spare(state, spare, why)
    for template in state.idle_templates() if not here else ():
        if template.host == vm.host and is_present(template):
            state.move(drop_template(template, why))


def _left(context: Context, job: Job) -> float | None:
    return max(0.0, job.deadline - context.now) if job.deadline is not None else None
