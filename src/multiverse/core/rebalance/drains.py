"""Jobs leave hosts that are to be emptied: their VMs move, and those that no other host takes are saved if the operator
said so, or else are waited for."""

from __future__ import annotations

from collections.abc import Iterator

from multiverse.core.capacity.room import Room, room_of
from multiverse.core.context import Context
from multiverse.core.errors import Refused
from multiverse.core.model.eviction import Method, Step
from multiverse.core.model.reason import Why
from multiverse.core.model.vm import Vm, VmState
from multiverse.core.moving import search_for, why_busy
from multiverse.core.saving import what_to_save


def plan_drains(context: Context, room: Room) -> Iterator[Step]:
    """What would empty the hosts that are drained. Takes the room of those that move. A VM that came back from a move
    waits for a while."""
    state, again = context.state, context.policy.move_again
    saved = set[int]()  # attempts whose jobs are to be saved, with all their VMs
    for vm in _to_leave(context):
        if vm.state is VmState.SERVING and vm.attempt not in saved and not (vm.moves and state.now - vm.since <= again):
            try:
                step = _step_off(context, vm, room)
            except Refused:
                continue
            if step is not None:
                saved.update([] if step.to else [step.attempt.id])
                yield step


def _step_off(context: Context, vm: Vm, room: Room) -> Step | None:
    """How a VM leaves its host: by a move, or else by a save if nothing but other moves keeps it. None if no other host
    takes it now. Raises `Refused` if it cannot leave for a reason of its own."""
    drain, why = context.state.drains[vm.host], Why.HOST_DRAINED(host=vm.host)
    try:
        if drain.moves:
            search = search_for(context, vm)
            if (found := search.find("", room)) is not None:
                return Step(Method.DRAIN, search.attempt, vm, found[0], why, vm.size.memory)
            if not drain.saves or search.find("", room_of(context).copy(), busy=True) is not None:
                return None
    except Refused:
        if not drain.saves or why_busy(context, vm.host):
            raise
    attempt = context.state.attempt_of(vm)
    if attempt is None:
        raise Refused(f"VM {vm.name} runs no job now", hint="only running jobs are saved")
    vms = what_to_save(context, attempt).vms
    return Step(Method.DRAIN, attempt, vm, "", why, sum(one.size.memory for one in vms))


def why_stay(context: Context) -> dict[str, str]:
    """Why a VM stays now on each host that is to be emptied, by host. Nothing is changed."""
    found = dict[str, str]()
    for vm in _to_leave(context):
        if vm.host in found or vm.state is not VmState.SERVING:
            continue
        try:
            if _step_off(context, vm, room_of(context).copy()) is None:
                raise search_for(context, vm).refusal("")
        except Refused as error:
            found[vm.host] = error.message
    return found


def _to_leave(context: Context) -> list[Vm]:
    """The VMs of hosts that are to be emptied."""
    state = context.state
    emptied = [name for name, drain in sorted(state.drains.items()) if drain.moves or drain.saves]
    return [vm for name in emptied if name in state.closed for vm in state.vms_on(name)]
