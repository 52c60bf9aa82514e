"""What effects report and what operators ask for, applied to the rows."""

from __future__ import annotations

from dataclasses import replace

from multiverse.core.avoidance import failing, tried_at_once
from multiverse.core.errors import Broken, Exhausted, Gone, Refused
from multiverse.core.machines.host import fence
from multiverse.core.model import (
    Attempt,
    AttemptState,
    HostState,
    KnownHost,
    Lease,
    LeaseState,
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

_ADDING = ("build", "retry", "add", "resume")
"""Commands after which something may be made."""

_DEFINITE = (Refused, Exhausted, Gone, Broken)


def may_add(message: Message) -> bool:
    """Whether a VM or a template may be made because of it."""
    return isinstance(message, Command) and message.verb in _ADDING


def apply_result(state: State, done: Done, world: World, policy: Policy) -> None:
    """Move the row whose effect failed for good, if the row is still in the state in which the effect began. An
    effect's report of success moves nothing: success is observed. But a host that is off cannot be observed."""
    row = state.get(done.key)
    if isinstance(row, KnownHost) and done.kind is EffectKind.FENCE and done.error is None:
        if row.state is HostState.FENCING and done.state == row.state:  # the only observation of a machine that is off
            fence(state, row, f"the fence command says that host {row.name} is off")
        return
    if not isinstance(done.error, _DEFINITE) or row is None or row.state != done.state or row.quarantined:
        return
    why = str(done.error)
    match row:
        case Vm(state=VmState.PLANNED | VmState.STARTING) if done.kind in (EffectKind.CREATE, EffectKind.START):
            if isinstance(done.error, Gone):  # its template or its user, which is no fault of its host
                state.move(Change(replace(row, state=VmState.ENDING, reason=why), Event.FAILED, why))
            else:
                state.move(*failing(state, row, Event.FAILED, why, world, policy))
        case Template(state=TemplateState.BUILDING) if done.kind is EffectKind.BUILD:
            broken = replace(row, state=TemplateState.BROKEN, reason=why, tries=row.tries + 1)
            state.move(Change(broken, Event.BROKE, why))
        case Lease(state=LeaseState.PLANNED) if done.kind is EffectKind.REQUEST:
            state.move(Change(row.releasing(why), Event.FAILED, why))
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
        case _:
            _apply_to_host(state, command)


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
    elif isinstance(row, KnownHost) and row != tried_at_once(row):
        state.move(Change(tried_at_once(row), Event.RETRIED, why))
    elif isinstance(row, Template) and row.state is TemplateState.BROKEN:
        need_template(context, row.which, why)


def _fence(state: State, host: str, world: World) -> None:
    """The operator vouches that a host is off. A host in sight is not off, whoever says so."""
    known = state.hosts.get(host)
    if known is None or known.is_off or host in world.hosts:
        return
    fence(state, known, f"an operator says that host {host} is off")


# --- hosts -----------------------------------------------------------------------------------------


def _apply_to_host(state: State, command: Command) -> None:
    """Add, drain, resume or remove a host. Who asked is told why, if that may not be."""
    try:
        _add(state, command.host) if command.verb == "add" else _change_host(state, command)
    except Refused as error:
        state.refusals.append((command, error))


def _add(state: State, name: str) -> None:
    """A host belongs to the site, or does again. Its agent is its source."""
    known = state.hosts.get(name)
    if known is None:
        state.know_host(KnownHost(name, name))
    elif known.state is HostState.REMOVED:
        again = replace(known, state=HostState.KNOWN, source=name, reason="", drain=None, faults=())
        state.move(Change(again, Event.ADDED, "an operator added it"))


def _change_host(state: State, command: Command) -> None:
    """Drain, resume or remove a host. Raises `Refused` if it is unknown, or may not be removed yet."""
    host = state.hosts.get(command.host)
    if host is None or host.state is HostState.REMOVED:
        raise Refused(f"there is no host {command.host}", hint="multiverse hosts lists the hosts")
    why = "an operator asked for it"
    match command.verb:
        case "drain" if command.drain is not None:
            drained = replace(host, drain=command.drain)
            if drained != host:
                state.move(Change(drained, Event.DRAINED, command.drain.reason or why))
        case "resume":
            resumed = tried_at_once(replace(host, state=HostState.KNOWN, reason="", drain=None))
            if resumed != host:
                state.move(Change(resumed, Event.RESUMED, why))
        case "remove":
            _remove(state, host, why)


def _remove(state: State, host: KnownHost, why: str) -> None:
    """Take a host out of the site. What is claimed on it has to be gone, or the host surely off."""
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
    gone = [Change(replace(row, state=TemplateState.ABSENT), Event.REMOVED, why) for row in templates]
    removed = replace(host, state=HostState.REMOVED, reason="", drain=None)
    state.move(Change(removed, Event.REMOVED, why), *gone, free=[row.key for row in templates])
