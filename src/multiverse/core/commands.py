"""What effects report and what operators ask for, applied to the rows."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.avoidance import tried_at_once
from multiverse.core.clones.kinds import build_template
from multiverse.core.context import Context
from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.core.machines.attempt import return_attempt
from multiverse.core.machines.host import add_host, drain_host, fence, remove_host, resume_host
from multiverse.core.machines.lease import release_lease
from multiverse.core.machines.template import break_template, drop_template, is_present, remove_templates
from multiverse.core.machines.vm import end_vm, fail_vm
from multiverse.core.model.host import HostState, KnownHost
from multiverse.core.model.job import Attempt, AttemptState, Lease, LeaseState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.vm import Template, TemplateKey, TemplateState, Vm, VmState
from multiverse.core.model.world import Row, World
from multiverse.core.policy import Policy
from multiverse.core.state import State, retry
from multiverse.core.transition import Command, Done, EffectKind, Event, Message

_ADDING = ("build", "retry", "add", "resume")  # commands after which something may be made

_DEFINITE = (Refused, Exhausted, Gone, Broken)


def may_add(message: Message) -> bool:
    """Whether a VM or a template may be made because of it."""
    return isinstance(message, Command) and message.verb in _ADDING


def apply_result(state: State, done: Done, world: World, policy: Policy) -> None:
    """Move the row whose effect failed for good. Success is observed, but for a host that was switched off."""
    row = state.get(done.key)
    if isinstance(row, KnownHost) and done.kind is EffectKind.FENCE and done.error is None:
        if row.state is HostState.FENCING and done.state == row.state:  # the only observation of a machine that is off
            fence(state, row, Why.COMMAND_OFF(host=row.name))
        return
    if not isinstance(done.error, _DEFINITE) or row is None or row.state != done.state or row.quarantined:
        return
    why = Why.SAID(text=str(done.error))
    match row:
        case Vm(state=VmState.PLANNED | VmState.STARTING) if done.kind in (EffectKind.CREATE, EffectKind.START):
            if isinstance(done.error, Gone):  # its template or its user, which is no fault of its host
                state.move(end_vm(row, Event.FAILED, why))
            else:
                state.move(*fail_vm(state, row, Event.FAILED, why, world, policy))
        case Template(state=TemplateState.BUILDING) if done.kind is EffectKind.BUILD:
            state.move(break_template(row, why))
        case Lease(state=LeaseState.PLANNED) if done.kind is EffectKind.REQUEST:
            state.move(release_lease(row, Event.FAILED, why))
        case Attempt(state=AttemptState.SPAWNED) if isinstance(done.error, Refused):
            # A job that took its spare by itself may run already: its attempt adds the user, and its step decides.
            state.move(return_attempt(row, Event.GAVE_UP, why, failed=True))


def apply_command(state: State, command: Command, world: World, policy: Policy) -> None:
    """Do what an operator asks for. A command that names nothing there is has no effect."""
    why = Why.OPERATOR()
    match command.verb:
        case "build":
            which = TemplateKey(command.host, command.image, command.size or policy.base, command.account or "")
            row = state.template_for(which)
            if row is None or row.state is TemplateState.BROKEN:
                build_template(Context(state, world, policy), which, why)
        case "drop":
            for _, row in sorted(state.templates.items()):
                if _describes(command, row) and is_present(row):
                    state.move(drop_template(row, why))
        case "retry" if command.key is not None and (record := state.get(command.key)) is not None:
            _retry(Context(state, world, policy), record, why)
        case "end" if command.key is not None and (record := state.get(command.key)) is not None:
            if isinstance(record, Vm) and record.state is VmState.ORPHAN:
                state.move(end_vm(record, Event.RELEASED, why))
        case "fence":
            _fence(state, command.host, world)
        case _:
            _apply_to_host(state, command)


def _describes(command: Command, row: Template) -> bool:
    return (
        (row.host, row.image) == (command.host, command.image)
        and command.size in (None, row.size)
        and command.account in (None, row.account)
    )


def _retry(context: Context, row: Row, why: Reason) -> None:
    state = context.state
    if isinstance(row, Attempt) and (row.quarantined or row.not_before > state.now):
        state.move(retry(replace(row, not_before=0.0), why))
    elif not isinstance(row, Attempt) and row.quarantined:
        state.move(retry(row, why))
    elif isinstance(row, KnownHost) and row != tried_at_once(row):
        state.move(retry(tried_at_once(row), why))
    elif isinstance(row, Template) and row.state is TemplateState.BROKEN:
        build_template(context, row.which, why)


def _fence(state: State, host: str, world: World) -> None:
    """An operator says that the host is off. One in sight is not."""
    known = state.hosts.get(host)
    if known is None or known.is_off or host in world.hosts:
        return
    fence(state, known, Why.OPERATOR_OFF(host=host))


# --- hosts -----------------------------------------------------------------------------------------


def _apply_to_host(state: State, command: Command) -> None:
    """Add, drain, resume or remove a host. A refusal is kept for whoever asked."""
    try:
        _add(state, command.host) if command.verb == "add" else _change_host(state, command)
    except Refused as error:
        state.refusals.append((command, error))


def _add(state: State, name: str) -> None:
    known = state.hosts.get(name)
    if known is None:
        state.know_host(KnownHost(name, name))
    elif known.state is HostState.REMOVED:
        state.move(add_host(known, Why.OPERATOR_ADDED()))


def _change_host(state: State, command: Command) -> None:
    """Drain, resume or remove a host. Raises `Refused`."""
    host = state.hosts.get(command.host)
    if host is None or host.state is HostState.REMOVED:
        raise Refused(f"there is no host {command.host}", hint="multiverse hosts lists the hosts")
    why = Why.OPERATOR()
    if command.verb == "remove":
        _remove(state, host, why)
    elif command.verb == "resume" or command.drain is not None:
        change = drain_host(host, command.drain, why) if command.drain is not None else resume_host(host, why)
        if change.row != host:
            state.move(change)


def _remove(state: State, host: KnownHost, why: Reason) -> None:
    """Take a host out of the site: nothing is claimed on it, or it is off. Raises `Refused`."""
    if state.lease_of(host.name) is not None:
        raise Refused(
            f"host {host.name} is leased: it goes when its lease ends",
            hint=f"multiverse hosts drain {host.name} gives it back once its jobs have ended",
        )
    vms, templates = state.vms_on(host.name), state.templates_on(host.name)
    if not host.is_off and (vms or templates):
        jobs = dict.fromkeys(vm.job_id or (a.job.job_id if (a := state.attempt_of(vm)) else "") for vm in vms)
        of = f" of job {', '.join(filter(None, jobs))}" if any(jobs) else ""
        kept = [f"{len(vms)} VMs{of}"] * bool(vms) + [f"{len(templates)} templates"] * bool(templates)
        raise Refused(
            f"host {host.name} still has {' and '.join(kept)}",
            hint=f"multiverse hosts drain {host.name}, and remove it once it is drained; if it is off for good, first "
            f"confirm that: multiverse repair {host.name} --fenced",
        )
    gone = remove_templates(templates, why)
    state.move(remove_host(host, why), *gone, free=[row.claim_key for row in templates])
