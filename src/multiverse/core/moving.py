"""How VMs go to other hosts while their jobs run: which may, and where to. As an operator asks for it, or an
eviction."""

from __future__ import annotations

from dataclasses import dataclass

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
from multiverse.core.capacity.usable_hosts import for_attempt
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.machines.attempt import evict_job
from multiverse.core.machines.vm import move_vm
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Claim, Host
from multiverse.core.model.job import Attempt, AttemptState, Eviction, JobState
from multiverse.core.model.machine import MachineKind, why_other_machine
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import MOVING_STATES, SLEEPING_STATES, Place, Vm, VmState
from multiverse.core.saving import perhaps_inside
from multiverse.core.transition import Command

_SHOWN = 4  # hosts of which a refusal says what they lack
_HINT = "multiverse hosts shows the hosts between which VMs move"


def follow_command(context: Context, command: Command) -> None:
    """Move a VM, which is named itself or by its job. A refusal is kept for whoever asked."""
    try:
        move(context, _meant(context, command), command.host, Why.OPERATOR())
    except Refused as error:
        context.state.refusals.append((command, error))


def _meant(context: Context, command: Command) -> Vm:
    state, name = context.state, command.job
    if name in state.vm_named:
        return state.vms[state.vm_named[name]]
    running = [one for one in state.attempts_of_job(name) if one.state is AttemptState.ALLOCATED]
    vms = [vm for attempt in running for vm in state.serving_vms_of(attempt)]
    if not vms:
        what = f"job {name} runs in no VM{perhaps_inside(state, command)}" if name[:1].isdigit() else f"no VM is {name}"
        raise Refused(what, hint="multiverse vms lists the VMs and their jobs")
    if len(vms) > 1:
        named = ", ".join(f"{vm.name} on {vm.host}" for vm in vms)
        raise Refused(f"job {name} has several VMs: {named}", hint="name one of them: they move one at a time")
    return vms[0]


def move(context: Context, vm: Vm, host: str, why: Reason) -> None:
    """Begin to move a VM to that host, or to any if it is empty. Raises `Refused` if it cannot."""
    search = search_for(context, vm)
    if not search.begin(host, why):
        raise search.refusal(host)


def why_busy(context: Context, host: str) -> str:
    """Why no other VM moves from or to a host now; empty if one may."""
    moving = (vm for vm in context.state.vms_in(*MOVING_STATES) for place in vm.places if place.host == host)
    busy = len(list(moving)) >= context.policy.moves_at_once
    return f"as many VMs as may move at once (move.at_once) move from or to host {host}" if busy else ""


def search_for(context: Context, vm: Vm) -> TargetSearch:
    """The search for a host for a VM. Raises `Refused` if it cannot leave its own now."""
    state, attempt = context.state, context.state.attempt_of(vm)
    if vm.state is VmState.MOVING:
        raise Refused(f"VM {vm.name} moves already", hint="multiverse vms shows where to")
    if vm.state is VmState.SETTLING:
        what = f"hosts {' and '.join(place.host for place in vm.places)} settle which of them keeps VM {vm.name}"
        raise Refused(what, hint="multiverse hosts shows whether both are in reach")
    if vm.state in SLEEPING_STATES:
        raise Refused(f"VM {vm.name} sleeps: it goes on where it is", hint="it can move once its job was resumed")
    if attempt is None or attempt.state is not AttemptState.ALLOCATED or vm.state is not VmState.SERVING:
        raise Refused(f"VM {vm.name} runs no job now", hint="only VMs of running jobs move")
    job_id = attempt.job.job_id
    job = context.scheduler.jobs.get(job_id) if context.world.scheduler else None
    if job is None or job.ref != attempt.job or job.state not in (JobState.RUNNING, JobState.SUSPENDED):
        raise Refused(f"the scheduler does not show that job {job_id} runs", hint="try again in a moment")
    if not all(one.stands for one in state.saved_of_job(job_id)):
        raise Refused(f"job {job_id} is being saved or resumed", hint="multiverse saved shows how far it is")
    if other := next((one.name for one in state.vms_of(attempt) if one.state in MOVING_STATES), ""):
        raise Refused(f"VM {other} of the same job moves now", hint="they move one at a time: try again when it has")
    host = context.in_sight.get(vm.host)
    if host is None:
        raise Refused(f"host {vm.host} of VM {vm.name} is out of reach", hint="see `multiverse hosts`")
    if host.moves is None:
        raise Refused(f"no VM moves from host {vm.host}", hint="set move.enabled for its agent")
    if what := why_busy(context, vm.host):
        raise Refused(what, hint="try again when one has: multiverse vms shows them")
    return TargetSearch(for_attempt(context, attempt), vm, attempt, host.moves)


@dataclass(frozen=True)
class TargetSearch:
    """Looks for a host for a VM that can leave its own. `machine` is what the VM needs."""

    context: Context
    vm: Vm
    attempt: Attempt
    machine: MachineKind

    def begin(self, name: str, why: Reason) -> bool:
        """Begin to move the VM to the host of that name, or to any if it is empty. False if none takes it now."""
        state, vm = self.context.state, self.vm
        if (found := self.find(name, room_of(self.context))) is None:
            return False
        host, claim = found
        eviction = Eviction(self.context.now, "move", vm.host, why, vm.size.memory)
        moving = move_vm(vm, Place(host, state.source_of(host)), why)
        evicted = evict_job(self.attempt.with_eviction(eviction), why)
        state.move(moving, evicted, make=[Claim(vm.key, host, claim)])
        return True

    def find(self, name: str, room: Room, *, busy: bool = False) -> tuple[str, Size] | None:
        """That host, or any, and what the VM claims there. Takes the room. `busy`: also hosts from or to which as many
        VMs move as may at once."""
        context, vm = self.context, self.vm
        limit = others_on(context.state, self.attempt)

        def accepts(host: str) -> bool:
            free = name in ("", host) and host != vm.host and limit(host) > 0
            return free and (busy or not why_busy(context, host))

        able = every_host(context, vm.size, lambda host: not self._why_unfit(host))
        claims = able.map(lambda host, size: vm_claim(size, host, vm.image, vm.kind))
        wanted = placement_request(context, self.attempt, vm.kind, 1)
        chosen = place_vms(context, room, wanted, claims, self.attempt, HostLimits(accepts))
        return (chosen[0], claims[chosen[0]]) if chosen is not None else None

    def refusal(self, name: str) -> Refused:
        """Says what that host lacks, or the first ones of all. Made for people alone: it looks at many hosts."""
        vm = self.vm
        others = [name] if name else [host for host in sorted(self.context.in_sight) if host != vm.host]
        reasons = [f"{host}: {self._why_not_on(host)}" for host in others[:_SHOWN]]
        listed = "; ".join(reasons) + ("; and others" if len(others) > _SHOWN else "")
        where = f"host {name}" if name else "another host"
        return Refused(f"VM {vm.name} cannot move to {where}" + (f": {listed}" if listed else ""), hint=_HINT)

    def _why_unfit(self, host: Host) -> str:
        """What equal hosts lack for the VM, however busy they are."""
        if host.moves is None:
            return "no VM moves to it (move.enabled)"
        if self.vm.image not in host.images:
            return f"it has no image {self.vm.image}"
        return why_other_machine(self.machine, host.moves)

    def _why_not_on(self, name: str) -> str:
        context = self.context
        host = context.in_sight.get(name)
        if host is None:
            return "it is out of reach" if name in context.state.hosts else "there is no such host"
        if name == self.vm.host:
            return "the VM is there"
        if name in context.without:
            return "it is drained, or its lease ends, before the job has surely ended, or VMs of the image fail there"
        if name in context.closed:
            return "it takes no VMs now"
        if unfit := self._why_unfit(host):
            return unfit
        if busy := why_busy(context, name):
            return busy
        if others_on(context.state, self.attempt)(name) < 1:
            return "its job wants no more of its VMs on one host"
        return "it has no room"
