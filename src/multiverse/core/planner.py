"""The planner: from the live rows and what was observed of the world, all the moves of one pass.

Pure: no I/O, no clock, no chance, no iteration over a set. Three rules hold in all of it. Unknown is not absent: a
source that is None moves nothing, and a deadline has passed only if an observation that began after it still did not
show the thing. Absence counts only in an observation that began after the object's last effect ended. A pair of state
and observation that cannot be quarantines that one record, with a reason, and stops no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from multiverse.core.commands import apply_command, apply_result
from multiverse.core.machines.attempt import open_attempts, step_attempt
from multiverse.core.machines.offer import step_offer
from multiverse.core.machines.template import step_template
from multiverse.core.machines.vm import step_vm
from multiverse.core.model import Key, KnownHost, NodeState, World
from multiverse.core.policy import Policy
from multiverse.core.provisioning.admission import admit
from multiverse.core.provisioning.clones import supply_missing
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.pools import reconcile_pools
from multiverse.core.state import State, quarantine_on_error
from multiverse.core.transition import Done, Message, Move

ROUNDS = 16
"""More rounds than the longest chain of moves that one observation can set off; a guard, never reached."""


def plan(state: State, world: World, messages: Sequence[Message], now: float, policy: Policy) -> list[Move]:
    """Plan one pass, and return its moves in the order in which they are to be applied. `state` is changed by them; the
    caller rolls it back if they cannot be kept. Steps free before admission uses, and rounds repeat until nothing more
    follows, so that one commit answers an observation however many rows it moves."""
    context = Context(state, world, policy)
    state.begin(now, world.forecast.paced, world.entropy)
    know_hosts(state, world)
    for message in messages:
        if isinstance(message, Done):
            with quarantine_on_error(state, message.key):
                apply_result(state, message)
        else:
            apply_command(state, message, world, policy)
    for _ in range(ROUNDS):
        before = len(state.moves)
        step_all(state, world, policy)
        while state.missing:
            missing = state.missing.pop(0)
            with quarantine_on_error(state, Key("attempt", missing.attempt)):
                supply_missing(context, missing)
        reconcile_pools(context, admit(context))
        if len(state.moves) == before:
            break
    return state.moves


def step_all(state: State, world: World, policy: Policy) -> None:
    """Step every state machine once."""
    open_attempts(state, world)
    for template_id in sorted(state.templates):
        with quarantine_on_error(state, Key("template", template_id)):
            step_template(state, template_id, world)
    for offer_id in sorted(state.offers):
        with quarantine_on_error(state, Key("offer", offer_id)):
            step_offer(state, offer_id, world)
    for vm_id in sorted(state.vms):
        with quarantine_on_error(state, Key("vm", vm_id)):
            step_vm(state, vm_id, world, policy)
    for attempt_id in sorted(state.attempts):
        with quarantine_on_error(state, Key("attempt", attempt_id)):
            step_attempt(state, attempt_id, world, policy)


def know_hosts(state: State, world: World) -> None:
    """Keep every host in sight as it was observed last, and the source that answers for it. What it has available at
    the moment is not kept: it changes all the time."""
    for name, host in world.hosts.items():
        steady = replace(host, available=0) if host.available else host
        state.know_host(KnownHost(name, world.source_of[name], value=steady))


def orphans(state: State, world: World) -> list[tuple[str, str]]:
    """Names of our site that were observed, on a host or in the scheduler, without a live row, each with the source
    that shows it (empty: only the scheduler does). A node on which the scheduler runs a job is never among them."""
    if world.scheduler is None:
        return []
    view = world.scheduler.value
    shown = {name: source for source, one in world.views.items() for name in one.vms}
    shown = {**dict.fromkeys(view.nodes, ""), **shown}
    known = {vm.name for vm in state.vms.values()} | view.occupied()
    busy = {name for name, node in view.nodes.items() if node.state is NodeState.BUSY}
    return sorted((name, source) for name, source in shown.items() if name not in known and name not in busy)
