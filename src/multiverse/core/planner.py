"""One pass: apply results, step the state machines, admit, refill the pools."""

from __future__ import annotations

from collections.abc import Sequence

from multiverse.core.commands import apply_command, apply_result
from multiverse.core.machines.attempt import open_attempts, step_attempt
from multiverse.core.machines.tables import TABLES
from multiverse.core.machines.template import step_template
from multiverse.core.machines.vm import occupied_nodes, step_vm
from multiverse.core.model.job import NodeState
from multiverse.core.model.keys import Key
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.provisioning.admission import admit
from multiverse.core.provisioning.pools import reconcile_pools
from multiverse.core.state import PlanState, Rows, quarantine_on_error
from multiverse.core.transition import Done, Message, Move

ROUNDS = 16
"""More rounds than the longest chain of moves that one look can set off; a guard, never reached."""


def plan(rows: Rows, world: World, messages: Sequence[Message], now: float, policy: Policy) -> list[Move]:
    """All moves of one pass, in the order in which they are to be applied."""
    state = PlanState(rows, now, TABLES, world.forecast.paced)
    for message in messages:
        if isinstance(message, Done):
            with quarantine_on_error(state, message.key):
                apply_result(state, message)
        else:
            apply_command(state, message, world.hypervisor.value.hosts if world.hypervisor else {}, policy)
    for _ in range(ROUNDS):
        before = len(state.moves)
        open_attempts(state, world)
        for template_id in sorted(state.templates):
            with quarantine_on_error(state, Key("template", template_id)):
                step_template(state, template_id, world)
        for vm_id in sorted(state.vms):
            with quarantine_on_error(state, Key("vm", vm_id)):
                step_vm(state, vm_id, world, policy)
        for attempt_id in sorted(state.attempts):
            with quarantine_on_error(state, Key("attempt", attempt_id)):
                step_attempt(state, attempt_id, world, policy)
        reconcile_pools(state, world, policy, admit(state, world, policy))
        if len(state.moves) == before:
            break
    return state.moves


def orphans(rows: Rows, world: World) -> list[str]:
    """Names of our site that were seen, on a host or in the scheduler, without a live row. A node on
    which the scheduler runs a job is never among them."""
    if world.scheduler is None or world.hypervisor is None:
        return []
    known = {vm.name for vm in rows.vms.values()}
    nodes = world.scheduler.value.nodes
    names = {*nodes, *world.hypervisor.value.vms} - known
    names -= occupied_nodes(world.scheduler.value)
    return sorted(n for n in names if n not in nodes or nodes[n].state is not NodeState.BUSY)
