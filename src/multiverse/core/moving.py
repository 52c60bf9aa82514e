"""Which VMs go to other hosts while their jobs run, and where: as an operator asks for it, and off hosts that are
drained."""

from __future__ import annotations

from multiverse.core.capacity.room import (
    HostLimits,
    Room,
    every_host,
    others_on,
    place_vms,
    placement_request,
    room_of,
)
from multiverse.core.capacity.sizes import vm_claim
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.machines.vm import move_vm
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Claim, Host, MachineKind, why_other_machine
from multiverse.core.model.job import Attempt, AttemptState, JobState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import MOVING_STATES, Place, Vm, VmState
from multiverse.core.transition import Command

_SHOWN = 4  # hosts of which a refusal says what they lack
_HINT = "multiverse hosts shows the hosts between which VMs move"


def follow_command(context: Context, command: Command) -> None:
    """Move a VM, which is named itself or by its job. A refusal is kept for whoever asked."""
    try:
        move(context, _meant(context, command.job), command.host, Why.OPERATOR())
    except Refused as error:
        context.state.refusals.append((command, error))


def _meant(context: Context, name: str) -> Vm:
    state = context.state
    if name in state.vm_named:
        return state.vms[state.vm_named[name]]
    running = [one for one in state.attempts_of_job(name) if one.state is AttemptState.ALLOCATED]
    vms = [vm for attempt in running for vm in state.serving_vms_of(attempt)]
    if not vms:
        raise Refused(f"there is no VM or running job {name}", hint="multiverse vms lists the VMs")
    if len(vms) > 1:
        named = ", ".join(f"{vm.name} on {vm.host}" for vm in vms)
        raise Refused(f"job {name} has several VMs: {named}", hint="name one of them: they move one at a time")
    return vms[0]


def move(context: Context, vm: Vm, host: str, why: Reason) -> None:
    """Begin to move a VM to that host, or to any if it is empty. Raises `Refused` if it cannot."""
    attempt, machine = _movable(context, vm)
    chosen, claim = _target(context, room_of(context), vm, attempt, machine, host)
    place = Place(chosen, context.state.source_of(chosen))
    context.state.move(move_vm(vm, place, why), make=[Claim(vm.key, chosen, claim)])


def move_off_drained(context: Context) -> None:
    """Begin to move the VMs of hosts that are to be emptied. Those that find no place now are tried in later passes; a
    VM that came back from a move waits for a while."""
    state, again = context.state, context.policy.move_again
    leaving = [name for name, drain in sorted(state.drains.items()) if drain.moves and name in state.closed]
    for vm in (vm for name in leaving for vm in state.vms_on(name)):
        if vm.state is VmState.SERVING and (not vm.moves or state.now - vm.since > again):
            try:
                move(context, vm, "", Why.HOST_DRAINED(host=vm.host))
            except Refused:
                continue


def why_stay(context: Context) -> dict[str, str]:
    """Why a VM stays now on each host that is to be emptied, by host. Nothing is changed."""
    state, found = context.state, dict[str, str]()
    for name in (name for name, drain in state.drains.items() if drain.moves and name in state.closed):
        for vm in state.vms_on(name):
            try:
                if vm.state is VmState.SERVING:
                    attempt, machine = _movable(context, vm)
                    _target(context, room_of(context).copy(), vm, attempt, machine, "")
            except Refused as error:
                found[name] = error.message
                break
    return found


def _movable(context: Context, vm: Vm) -> tuple[Attempt, MachineKind]:
    """The attempt of a VM that can leave its host now, and the machine that it needs. Raises `Refused`."""
    state, attempt = context.state, context.state.attempt_of(vm)
    if vm.state in MOVING_STATES:
        raise Refused(f"VM {vm.name} moves already", hint="multiverse vms shows where to")
    if attempt is None or attempt.state is not AttemptState.ALLOCATED or vm.state is not VmState.SERVING:
        raise Refused(f"VM {vm.name} runs no job now", hint="only VMs of running jobs move")
    job_id = attempt.job.job_id
    job = context.scheduler.jobs.get(job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job or job.state not in (JobState.RUNNING, JobState.SUSPENDED):
        raise Refused(f"the scheduler does not show that job {job_id} runs", hint="try again in a moment")
    if state.saved_of_job(job_id):
        raise Refused(f"job {job_id} is being saved or resumed", hint="multiverse saved shows how far it is")
    if other := next((one.name for one in state.vms_of(attempt) if one.state in MOVING_STATES), ""):
        raise Refused(f"VM {other} of the same job moves now", hint="they move one at a time: try again when it has")
    host = context.in_sight.get(vm.host)
    if host is None:
        raise Refused(f"host {vm.host} of VM {vm.name} is out of reach", hint="see `multiverse hosts`")
    if host.moves is None:
        raise Refused(f"no VM moves from host {vm.host}", hint="set move.enabled for its agent")
    if _is_busy(context, vm.host):
        what = f"as many VMs as may move at once (move.at_once) move from or to host {vm.host}"
        raise Refused(what, hint="try again when one has: multiverse vms shows them")
    return attempt, host.moves


def _target(
    context: Context, room: Room, vm: Vm, attempt: Attempt, machine: MachineKind, name: str
) -> tuple[str, Size]:
    """The host for a VM, `name` if that is given, and what the VM claims there. Raises `Refused` if there is none."""
    limit = others_on(context.state, attempt)

    def accepts(host: str) -> bool:
        return name in ("", host) and host != vm.host and limit(host) > 0 and not _is_busy(context, host)

    able = every_host(context, vm.size, lambda host: not _why_unfit(vm, machine, host))
    claims = able.map(lambda host, size: vm_claim(size, host, vm.image, vm.kind))
    wanted = placement_request(context, attempt, vm.kind, 1)
    chosen = place_vms(context, room, wanted, claims, attempt, HostLimits(accepts))
    if chosen is None:
        others = [name] if name else [host for host in sorted(context.in_sight) if host != vm.host]
        reasons = [f"{host}: {_why_not_on(context, vm, machine, limit(host), host)}" for host in others[:_SHOWN]]
        listed = "; ".join(reasons) + ("; and others" if len(others) > _SHOWN else "")
        where = f"host {name}" if name else "another host"
        raise Refused(f"VM {vm.name} cannot move to {where}" + (f": {listed}" if listed else ""), hint=_HINT)
    return chosen[0], claims[chosen[0]]


def _why_unfit(vm: Vm, machine: MachineKind, host: Host) -> str:
    """What equal hosts lack for a VM, however busy they are."""
    if host.moves is None:
        return "no VM moves to it (move.enabled)"
    if vm.image not in host.images:
        return f"it has no image {vm.image}"
    return why_other_machine(machine, host.moves)


def _why_not_on(context: Context, vm: Vm, machine: MachineKind, more: int, name: str) -> str:
    """`more`: how many more VMs of the job may be there."""
    host = context.in_sight.get(name)
    if host is None:
        return "it is out of reach" if name in context.state.hosts else "there is no such host"
    if name == vm.host:
        return "the VM is there"
    if name in context.closed:
        return "it takes no VMs now"
    busy = "as many VMs as may move at once (move.at_once) move from or to it" if _is_busy(context, name) else ""
    others = "" if more > 0 else "its job wants no more of its VMs on one host"
    return _why_unfit(vm, machine, host) or busy or others or "it has no room"


def _is_busy(context: Context, host: str) -> bool:
    moving = (vm for vm in context.state.vms_in(*MOVING_STATES) for place in vm.places if place.host == host)
    return len(list(moving)) >= context.policy.moves_at_once
