"""The planner: from the live rows and what was observed of the world, all the moves of one pass.

Pure: no I/O, clock or chance, no iteration over a set. Unknown is not absent: a source that is None moves nothing, and
a deadline has passed only if an observation that began after it did not show the thing. Absence counts only in one that
began after the object's last effect ended. An impossible pair of state and observation quarantines that record alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiverse.core.admission.admit import admit
from multiverse.core.admission.obstacles import empty_drained
from multiverse.core.changes import adopt_unexplained, apply_command, apply_result, close_hosts, mark_changes
from multiverse.core.checkpoints import capture_due
from multiverse.core.clones.supply import supply_missing
from multiverse.core.context import Context
from multiverse.core.leases import reconcile_leases
from multiverse.core.machines.attempt import attempt_is_settled, is_unread, open_attempts, step_attempt
from multiverse.core.machines.checkpoint import step_state
from multiverse.core.machines.host import hold_fencing, hosts_to_step, step_host
from multiverse.core.machines.lease import step_lease
from multiverse.core.machines.offer import step_offer
from multiverse.core.machines.saved import saved_is_settled
from multiverse.core.machines.template import step_template, template_is_settled
from multiverse.core.machines.vm import step_vm, vm_is_settled
from multiverse.core.model.basics import Key
from multiverse.core.model.world import World
from multiverse.core.policy import Policy
from multiverse.core.pools import reconcile_pools
from multiverse.core.rebalance.plan import leave_hosts, preempt
from multiverse.core.saving import let_frozen_jobs_go_on, save_at_limits
from multiverse.core.sleeping import follow_suspended
from multiverse.core.state import State, quarantine_on_error
from multiverse.core.transition import Done, Message, Move

ROUNDS = 16  # more rounds than the longest chain of moves that one observation can set off; a guard, never reached


def plan(
    state: State, world: World, messages: Sequence[Message], now: float, policy: Policy, *, releasing: bool = False
) -> list[Move]:
    """Plan one pass, and return its moves in order. They change `state`; the caller rolls back if they cannot be kept.
    Steps free before admission uses, and rounds repeat until nothing more follows: one commit answers an observation.
    With `releasing` nothing is added."""
    state.begin(now, world.forecast.paced, world.entropy)
    mark_changes(state, world, policy)
    context = Context(state, world, policy, state.free.hosts)
    adopt_unexplained(context)
    for message in messages:
        if isinstance(message, Done):
            with quarantine_on_error(state, message.key):
                apply_result(state, message, world, policy)
        else:
            apply_command(state, message, world, policy)
    for _ in range(ROUNDS):
        before = len(state.moves)
        step_all(state, world, policy, releasing=releasing)
        if state.compared.unadopted:  # another VM may have the name of a row that has ended
            adopt_unexplained(context)
        if not releasing:
            _provide(context)
        if len(state.moves) == before:
            break
    return state.moves


def _provide(context: Context) -> None:
    empty_drained(context)
    leave_hosts(context)
    follow_suspended(context)
    save_at_limits(context)
    let_frozen_jobs_go_on(context)
    capture_due(context)
    while context.state.missing:
        missing = context.state.missing.pop(0)
        with quarantine_on_error(context.state, Key("attempt", missing.attempt)):
            supply_missing(context, missing)
    reconcile_pools(context, preempt(context, admit(context)))
    reconcile_leases(context)


def step_all(state: State, world: World, policy: Policy, *, releasing: bool = False) -> None:
    hold = hold_fencing(state, world, policy)
    for name in hosts_to_step(state):
        with quarantine_on_error(state, state.hosts[name].key):
            step_host(state, name, world, policy, hold)
    for number in sorted(state.leases):
        with quarantine_on_error(state, Key("lease", number)):
            step_lease(state, number, world, policy)
    close_hosts(state, world)
    open_attempts(state, world, policy, only_taken=releasing)
    for template_id in sorted(state.dirty.templates):
        state.dirty.templates.discard(template_id)
        with quarantine_on_error(state, Key("template", template_id)):
            step_template(state, template_id, world)
        if (template := state.templates.get(template_id)) and not template_is_settled(template):
            state.dirty.templates.add(template_id)
    for offer_id in sorted(state.offers):
        with quarantine_on_error(state, Key("offer", offer_id)):
            step_offer(state, offer_id, world)
    for saved_id in sorted(state.dirty.saved):
        state.dirty.saved.discard(saved_id)
        with quarantine_on_error(state, Key("saved", saved_id)):
            step_state(state, saved_id, world, policy)
        if (saved := state.saved.get(saved_id)) and not saved_is_settled(state, saved, world):
            state.dirty.saved.add(saved_id)
    for vm_id in sorted(state.dirty.vms):
        state.dirty.vms.discard(vm_id)  # what its own move, or another row's, marks is stepped in the next round
        with quarantine_on_error(state, Key("vm", vm_id)):
            step_vm(state, vm_id, world, policy)
        if (vm := state.vms.get(vm_id)) and not vm_is_settled(state, vm, world):
            state.dirty.vms.add(vm_id)
    for attempt_id in sorted(state.dirty.attempts):
        state.dirty.attempts.discard(attempt_id)
        with quarantine_on_error(state, Key("attempt", attempt_id)):
            step_attempt(state, attempt_id, world, policy)
        if (attempt := state.attempts.get(attempt_id)) and not attempt_is_settled(attempt, world):
            (state.dirty.unread if is_unread(attempt, world) else state.dirty.attempts).add(attempt_id)
