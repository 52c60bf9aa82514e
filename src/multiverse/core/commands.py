"""What effects report and what operators ask for, applied to the rows."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.core.model import (
    Attempt,
    AttemptState,
    HostState,
    Row,
    Template,
    TemplateKey,
    TemplateState,
    Vm,
    VmState,
    World,
)
from multiverse.core.policy import Policy
from multiverse.core.provisioning.context import Context
from multiverse.core.provisioning.templates import need_template
from multiverse.core.state import State
from multiverse.core.transition import Change, Command, Done, EffectKind, Event, Message

_ADDING = ("build", "retry")
"""Commands after which something may be made."""

_DEFINITE = (Refused, Exhausted, Gone, Broken)


def may_add(message: Message) -> bool:
    """Whether a VM or a template may be made because of it."""
    return isinstance(message, Command) and message.verb in _ADDING


def apply_result(state: State, done: Done) -> None:
    """Move the row whose effect failed for good, if the row is still in the state in which the effect began. An
    effect's report of success moves nothing: success is observed."""
    row = state.get(done.key)
    if not isinstance(done.error, _DEFINITE) or row is None or row.state != done.state or row.quarantined:
        return
    why = str(done.error)
    match row:
        case Vm(state=VmState.PLANNED | VmState.STARTING) if done.kind in (EffectKind.CREATE, EffectKind.START):
            state.move(Change(replace(row, state=VmState.ENDING, reason=why), Event.FAILED, why))
        case Template(state=TemplateState.BUILDING) if done.kind is EffectKind.BUILD:
            broken = replace(row, state=TemplateState.BROKEN, reason=why, tries=row.tries + 1)
            state.move(Change(broken, Event.BROKE, why))
        case Attempt(state=AttemptState.SPAWNED) if isinstance(done.error, Refused):
            # A job that took its spare by itself may run already: its attempt is introducing, and its step decides.
            state.move(Change(row.returning(why, failed=True), Event.GAVE_UP, why))


def apply_command(state: State, command: Command, world: World, policy: Policy) -> None:
    """Do what an operator asks for. A command that names nothing there is has no effect."""
    why = "an operator asked for it"
    match command.verb:
        case "build":
            which = TemplateKey(command.host, command.image, command.size or policy.base, command.account or "")
            row = state.template_for(which)
            if row is None or row.state is TemplateState.BROKEN:
                need_template(Context(state, world, policy), which, why)
        case "drop":
            present = (TemplateState.READY, TemplateState.BROKEN, TemplateState.BUILDING)
            for _, row in sorted(state.templates.items()):
                if _describes(command, row) and row.state in present:
                    state.move(Change(replace(row, state=TemplateState.RETIRING), Event.DROPPED, why))
        case "retry" if command.key is not None and (record := state.get(command.key)) is not None:
            _retry(Context(state, world, policy), record, why)
        case "end" if command.key is not None and (record := state.get(command.key)) is not None:
            if isinstance(record, Vm) and record.state is VmState.ORPHAN:
                ending = replace(record, state=VmState.ENDING, quarantined="", reason=why)
                state.move(Change(ending, Event.RELEASED, why))
        case "fence":
            _fence(state, command.host, world)


def _describes(command: Command, row: Template) -> bool:
    return (
        (row.host, row.image) == (command.host, command.image)
        and command.size in (None, row.size)
        and command.account in (None, row.account)
    )


def _retry(context: Context, row: Row, why: str) -> None:
    state = context.state
    if isinstance(row, Attempt) and (row.quarantined or row.not_before > state.now):
        state.move(Change(replace(row, quarantined="", not_before=0.0), Event.RETRIED, why))
    elif not isinstance(row, Attempt) and row.quarantined:
        state.move(Change(replace(row, quarantined=""), Event.RETRIED, why))
    elif isinstance(row, Template) and row.state is TemplateState.BROKEN:
        need_template(context, row.which, why)


def _fence(state: State, host: str, world: World) -> None:
    """The operator vouches that a host is off. A host in sight is not off, whoever says so."""
    known = state.hosts.get(host)
    if known is None or host in world.hosts:
        return
    state.know_host(replace(known, state=HostState.FENCED))
    for vm in state.vms_on(host):
        if not vm.leaving:
            why = f"an operator says that host {host} is off"
            ending = replace(vm, state=VmState.ENDING, quarantined="", reason=vm.reason or why)
            state.move(Change(ending, Event.FENCED, why))
