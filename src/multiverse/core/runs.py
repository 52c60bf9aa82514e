"""In which VMs an earlier run of a job may still go on. The scheduler queues a job again as soon as its node is silent,
and no job may run twice: its next run waits until these VMs are surely gone."""

from __future__ import annotations

from multiverse.core.model import WAITING_STATES, Attempt, Reason, Vm, VmState, Why, World
from multiverse.core.state import State


def may_hold_earlier_run(state: State, vm: Vm, attempt: Attempt) -> bool:
    """Whether an earlier run of the attempt's job may go on in the VM. An orphan has no attempt."""
    other = state.attempt_of(vm)
    if other is None:
        return vm.job_id == attempt.job.job_id
    return other.job.job_id == attempt.job.job_id and other.job.restarts < attempt.job.restarts


def is_waited_for(state: State, vm: Vm) -> bool:
    """Whether a job waits because its earlier run may go on in the VM."""
    attempt = state.attempt_of(vm)
    job_id = attempt.job.job_id if attempt is not None else vm.job_id
    waiting = (one for one in state.attempts_of_job(job_id) if one.state in WAITING_STATES)
    return any(may_hold_earlier_run(state, vm, one) for one in waiting)


def node_without_record(state: State, world: World, attempt: Attempt) -> str:
    """A node or VM without a record in which an earlier run may go on; empty if there is none. After a database was
    lost, only the scheduler shows VMs on hosts out of reach, and not their jobs. Once found, such a VM is kept as an
    orphan."""
    if not attempt.job.restarts or world.scheduler is None:
        return ""
    if found := next((vm.name for vm in state.vms_in(VmState.ORPHAN) if not vm.job_id), ""):
        return found
    nodes = world.scheduler.value.nodes
    shown = (name for name, source in state.compared.unexplained if not source and name in nodes)
    node = min((name for name in shown if name not in state.vm_named), default="")
    if not node or all(host.is_off or name in world.hosts for name, host in state.hosts.items()):
        return ""
    return node


def why_earlier_run(state: State, world: World, attempt: Attempt) -> Reason | None:
    """Why an earlier run of the attempt's job may go on; None if it surely does not."""
    job_id = attempt.job.job_id
    mine = [vm for other in state.attempts_of_job(job_id) for vm in state.vms_of(other)]
    for vm in (*mine, *state.vms_seen_with(job_id)):
        if may_hold_earlier_run(state, vm, attempt):
            if vm.job_id:
                return Why.EARLIER_RUN_FOUND(vm=vm.name)
            away = vm.state is VmState.LOST
            return Why.EARLIER_RUN_AWAY(vm=vm.name, host=vm.host) if away else Why.EARLIER_RUN_ENDS(vm=vm.name)
    unknown = node_without_record(state, world, attempt)
    return Why.EARLIER_RUN_UNKNOWN(vm=unknown) if unknown else None
