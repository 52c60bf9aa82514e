"""What reaches a pass from outside: observations, what no row explains, results of effects, and commands of operators.

Observations are compared by identity first, then by equality: drivers hand out the same object for what did not change.
VMs and templates that no row explains, after a database was lost or restored, get rows: they are claimed for and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import ne
from typing import TypeVar

from multiverse.core import checkpoints, moving, saving
from multiverse.core.avoidance import tried_at_once
from multiverse.core.capacity.sizes import template_claim
from multiverse.core.clones.kinds import build_template
from multiverse.core.context import Context
from multiverse.core.errors import Broken, Damaged, Exhausted, Gone, MultiverseError, Refused
from multiverse.core.machines.attempt import begin_grace, is_unread, no_checkpoint, not_saved, return_attempt
from multiverse.core.machines.host import add_host, drain_host, fence, remove_host, resume_host
from multiverse.core.machines.lease import release_lease
from multiverse.core.machines.saved import (
    MOST_TRIES,
    abandon,
    count_failed_copy,
    count_failure,
    drop_storage,
    give_up,
    is_unfit,
    note_spread,
    undo_save,
    vms_of_saved,
)
from multiverse.core.machines.sleep import stay_awake
from multiverse.core.machines.template import (
    adopt_template,
    break_template,
    drop_template,
    is_present,
    lose_template,
    remove_templates,
)
from multiverse.core.machines.vm import adopt_vm, end_vm, end_vms, fail_vm, is_occupied, keep_vm_there
from multiverse.core.model.basics import CloneKind, Size, number_of
from multiverse.core.model.host import OFF_STATES, Claim, Host, HostState, HypervisorView, KnownHost
from multiverse.core.model.identity import serial_of
from multiverse.core.model.job import OPEN_LEASES, Attempt, AttemptState, Job, JobState, Lease, LeaseState
from multiverse.core.model.reason import Reason, Why
from multiverse.core.model.saved import COMPLETE, Saved, SavedState, Storage
from multiverse.core.model.vm import (
    Place,
    Template,
    TemplateCondition,
    TemplateKey,
    TemplateSeen,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
)
from multiverse.core.model.world import Observation, Row, World
from multiverse.core.policy import Policy
from multiverse.core.rows import Compared
from multiverse.core.state import State, retry
from multiverse.core.transition import Change, Command, Done, EffectKind, Event, Message

T = TypeVar("T")


LOOK_AT_STATES = 60.0  # seconds between two looks at the age of all saved jobs, and whether their files are there


def mark_changes(state: State, world: World, policy: Policy) -> None:
    """Mark the rows that the latest observations may move, and keep every host as it was observed last."""
    compared = state.compared
    if state.now - compared.saved_at >= LOOK_AT_STATES:
        compared.saved_at = state.now
        state.dirty.saved.update(state.saved)
    for host in world.declared:  # what it could hold may be unknown, and is not nothing
        if host.name not in state.hosts:
            state.know_host(host)
    if world.scheduler is not None and world.scheduler is not compared.scheduler:
        _mark_jobs(state, world.scheduler.value.jobs)
        _note_unexplained(state, "", compared.nodes, world.scheduler.value.nodes)
        _mark_deleted(state, compared.nodes, world.scheduler.value.nodes)
        compared.scheduler, compared.nodes = world.scheduler, world.scheduler.value.nodes
        _mark_read(state, world)
    if world.users is not compared.seen_users:
        seen = world.users
        users = {uid: (user.exists, user.since) for uid, user in seen.items()} if seen is not None else None
        if users != compared.users:
            state.queue.consider_users_again()
        compared.users, compared.seen_users = users, seen
    anew = world.sources.keys() | compared.sources.keys() if world.anew is None else world.anew
    for name in sorted(anew):
        if (observation := world.sources.get(name)) is not None:
            _mark_source(state, compared, name, observation, policy)
        elif name in compared.sources:
            _follow_hosts(state, compared, name, {})
            del compared.sources[name]
            compared.vms.pop(name, None)
            compared.frozen.pop(name, None)
    _know_hosts(state, compared)


def _mark_read(state: State, world: World) -> None:
    """Mark the attempts whose jobs were read for the first time since they came into their states."""
    unread = [state.attempts[id_] for id_ in state.dirty.unread if id_ in state.attempts]
    read = {one.id for one in unread if not is_unread(one, world)}
    state.dirty.unread = {one.id for one in unread} - read
    state.dirty.attempts |= read


def _mark_jobs(state: State, jobs: Mapping[str, Job]) -> None:
    before, state.queue.jobs = state.queue.jobs, jobs
    if before != jobs:
        for job_id in changed(before, jobs, ne):
            state.mark_job(job_id)
            if job_id in jobs and jobs[job_id].state is JobState.SUSPENDED:
                state.compared.suspended.setdefault(job_id, state.now)
            else:
                state.compared.suspended.pop(job_id, None)


def changed(before: Mapping[str, T], after: Mapping[str, T], differ: Callable[[T, T], bool]) -> list[str]:
    """The keys under which the two differ: new and changed ones in the order of `after`, then gone ones."""
    if list(before) == list(after):  # the usual case, compared without a look-up for each
        pairs = zip(after, before.values(), after.values(), strict=True)
        return [key for key, old, new in pairs if old is not new and differ(old, new)]
    get = before.get
    differing = [
        key for key, new in after.items() if (old := get(key)) is not new and (old is None or differ(old, new))
    ]
    return differing + [key for key in before if key not in after]


def _mark_source(state: State, compared: Compared, name: str, observation: Observation, policy: Policy) -> None:
    old = compared.sources.get(name)
    compared.sources[name] = observation
    if old is not None and _shows_as_before(old, observation):
        return
    silent = observation.latest is None and state.now - observation.since > policy.silence
    before = old.latest.value.hosts.keys() if old and old.latest else None
    hosts = observation.latest.value.hosts if observation.latest else None
    shows_others = before != (hosts.keys() if hosts is not None else None)
    if old is None or silent != (name in compared.silent) or shows_others:
        (compared.silent.add if silent else compared.silent.discard)(name)
        state.mark_source(name)
    if old is None or old.latest is not observation.latest:
        state.mark_observed(name)
        _follow_hosts(state, compared, name, hosts or {})
    compared.stray.pop(name, None)
    if observation.latest is None:
        return
    if stray := [one for one in observation.latest.value.saved if not state.saved_named(one)]:
        compared.stray[name] = tuple(sorted(stray))
    known, shown = compared.vms.get(name, {}), observation.latest.value.vms
    compared.frozen.pop(name, None)
    if frozen := [one for one, seen in shown.items() if seen.frozen or seen.freezing]:
        compared.frozen[name] = tuple(frozen)
    for vm_name in changed(known, shown, _moves):
        state.mark_vm(vm_name)
    _note_unexplained(state, name, known, shown)
    compared.vms[name] = shown


def _shows_as_before(old: Observation, new: Observation) -> bool:
    """Whether a known source shows just what it showed before, by identity. What is saved is compared each time."""
    before, after = old.latest, new.latest
    if before is None or after is None:
        return False
    return before is after or (before.value is after.value and not after.value.saved)


def _note_unexplained(state: State, source: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Keep the names that a source shows, or shows no more, and that no row has."""
    if before is not after and list(before) != list(after):
        came = (name for name in after.keys() - before.keys() if name not in state.vm_named)
        state.compared.unexplained.update((name, source) for name in came)


def _mark_deleted(state: State, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    for vm in state.vms_in(VmState.DELETING) if before is not after else ():
        if vm.name not in after:
            state.mark_vm(vm.name)


def _follow_hosts(state: State, compared: Compared, source: str, hosts: Mapping[str, Host]) -> None:
    """The source shows these hosts. Of several sources that show a host the last by name answers for it."""
    index = state.free
    before = compared.hosts_of.get(source, frozenset())
    compared.hosts_of[source] = frozenset(hosts)
    for name in sorted(before | hosts.keys()):
        sources = compared.showing.setdefault(name, {})
        if name in hosts:
            sources[source] = hosts[name]
        else:
            sources.pop(source, None)
        host = sources[max(sources)] if sources else None
        old = index.hosts.get(name)
        if host is None:
            del compared.showing[name]
            index.hide(name)
        else:
            index.show(host)
        if (host is None) != (old is None):
            state.queue.check_all()
            state.touched.note(name)
        if host is not old:
            compared.unlearned.add(name)
            if _storages(host) != _storages(old):  # states may be to be copied now
                state.dirty.saved.update(state.saved)


def _storages(host: Host | None) -> tuple[Storage | None, ...]:
    return (host.storage, host.copies) if host is not None else (None, None)


def _moves(old: VmSeen, new: VmSeen) -> bool:
    """Whether the new observation may move rows. What a VM uses changes all the time, and moves none."""
    return (
        old.condition is not new.condition
        or old.token != new.token
        or old.users_added != new.users_added
        or old.host != new.host
    )


def _know_hosts(state: State, compared: Compared) -> None:
    """Keep every host in sight as observed last, and its source; not its load, which changes all the time."""
    for name in sorted(compared.unlearned):
        if (host := state.free.hosts.get(name)) is not None:
            known, source = state.hosts.get(name), max(compared.showing[name])
            if known is None or known.value is None or known.source != source or not known.value.lasts_as(host):
                state.know_host(replace(known or KnownHost(name, ""), source=source, value=host.lasting()))
    compared.unlearned.clear()


def orphans(state: State, world: World) -> list[tuple[str, str]]:
    """Names of our site without a row, as of the last `mark_changes`, each with its source (empty: only the scheduler).
    Never a node that has a job or may get one, nor a VM on a host in sight, which has a row. Forgets other names."""
    if world.scheduler is None:
        return []
    view, found = world.scheduler.value, dict[str, str]()
    for name, source in sorted(state.compared.unexplained):
        latest = world.latest(source)
        if latest is None and source in world.sources:
            continue  # it may still be there
        shown = name in (view.nodes if source == "" else latest.value.vms if latest else ())
        if not shown or name in state.vm_named:
            state.compared.unexplained.discard((name, source))
        else:
            found[name] = source
    return sorted((name, source) for name, source in found.items() if not view.may_have_a_job(name))


def close_hosts(state: State, world: World) -> None:
    """Keep which hosts take no new VM. After an operator's commands, and as the times of drains come."""
    closed = {name for name, drain in state.drains.items() if drain.begins <= state.now + world.epoch}
    closed |= {host.name for host in state.hosts_in(*OFF_STATES)}
    closed |= {vm.host for vm in state.vms_in(VmState.DELAYED)}  # what is free there is for these
    closed |= {lease.name for lease in state.leases.values() if lease.state not in OPEN_LEASES}
    closed |= state.unknown_in_sight()  # its lease has ended in this pass
    state.close_hosts(frozenset(closed), frozenset(state.drains.keys() - closed))


# --- what no row explains ---------------------------------------------------------------------------


WHY = Why.FOUND_THERE()


def adopt_unexplained(context: Context) -> None:
    """Give rows to VMs and templates that have none, and take spares that serve others out of their pools."""
    state = context.state
    for vm in state.vms_in(VmState.PARKED, VmState.JOINED, VmState.RETIRING):
        if vm.is_spare and _serves_another(context, vm):
            _make_orphan(context, vm)
    for source in state.take_unadopted():
        latest = context.world.latest(source)
        view = latest.value if latest else HypervisorView()
        for which, seen in view.templates.items():
            if seen.condition is not TemplateCondition.BROKEN and seen.host in context.in_sight:
                _drop_earlier_build(state, which, seen)
                if state.template_for(which) is None:
                    _adopt_template(context, source, seen)
        for name in sorted(name for name in view.vms if name not in state.vm_named):
            if view.vms[name].host in context.in_sight:
                _adopt_vm(context, source, view.vms[name], view.templates)


def _serves_another(context: Context, vm: Vm) -> bool:
    """Whether a spare serves what no row tells of, because its row is of an older database: its row is parked and it
    was started, its guest knows a user, or a job is on its node that took no offer."""
    state, world, seen = context.state, context.world, context.world.vm(vm)
    if seen is None:
        return False
    if vm.state is not VmState.PARKED and seen.users_added:
        return True
    if world.scheduler is None or world.scheduler.began <= vm.since:
        return False
    if vm.state is VmState.PARKED:
        return seen.condition in (VmCondition.STARTING, VmCondition.RUNNING, VmCondition.PAUSED)
    return state.offer_of(vm) is None and vm.name in world.scheduler.value.occupied


def _make_orphan(context: Context, vm: Vm) -> None:
    """Take a spare that serves another out of its pool. Its claim grows to what it has."""
    seen, host = context.world.vm(vm), context.in_sight.get(vm.host)
    size = (seen.size if seen else None) or vm.size
    orphan = replace(vm, pool=None, size=size)
    claims = [Claim(vm.key, vm.host, _claim_of(size, seen, host))] if seen and host else []
    why = Why.SERVES_UNTOLD()
    context.state.move(adopt_vm(orphan, why), make=claims, free=vm.claim_keys if claims else ())


def _claim_of(size: Size, seen: VmSeen, host: Host) -> Size:
    """What a VM claims if no row says what it was made of: of the disk, what its host lets it write."""
    return Size(size.cpus, size.memory + host.vm_overhead, seen.disk or size.disk, size.net)


def _drop_earlier_build(state: State, which: TemplateKey, seen: TemplateSeen) -> None:
    """End the row of a template that was rebuilt. Memory of the earlier build counts until its VMs end."""
    row = state.template_for(which)
    if row is not None and row.state is TemplateState.READY and row.build and seen.build not in ("", row.build):
        state.move(lose_template(row, Why.REBUILT()), free=[row.claim_key])


def _place_of(
    context: Context, serial: int, source: str, seen: VmSeen, shown: Mapping[TemplateKey, TemplateSeen]
) -> Place:
    """Where a VM was found, and its template. If no row is of that build, VMs of the build share a number that no row
    has: the serial of one of them, negative. So the memory of the build counts once."""
    state, host, build = context.state, seen.host, seen.template_build
    if not build:
        return Place(host, source)
    for row in state.templates_on(host):
        if row.build == build or (row.which in shown and shown[row.which].build == build):
            return Place(host, source, row.which, row.id)
    for place, vm in ((vm.place_on(host), vm) for vm in state.vms_on(host)):
        if place.template and (other := context.world.at(vm, place)) and other.template_build == build:
            return place
    return Place(host, source, TemplateKey(host, "", Size(0, seen.template_memory)), -serial)


def _adopt_vm(context: Context, source: str, seen: VmSeen, shown: Mapping[TemplateKey, TemplateSeen]) -> None:
    """Give a VM a row under a new number: an ended row may have the number that is in its name."""
    state, policy = context.state, context.policy
    state.numbers.skip_serials(serial_of(seen.name) + 1)
    size = seen.size or policy.base
    serial = state.numbers.new_serial()
    has_prefix = not seen.address or "/" in seen.address
    vm = Vm(
        id=serial,
        since=state.now,
        name=seen.name,
        places=(_place_of(context, serial, source, seen, shown),),
        image="",
        kind=CloneKind.FULL,
        size=size,
        node_size=size,
        mac=seen.mac,
        address=seen.address if has_prefix else f"{seen.address}/{policy.subnet.prefixlen}",
        token=seen.token,
    )
    claim = Claim(vm.key, seen.host, _claim_of(size, seen, context.in_sight[seen.host]))
    state.move(adopt_vm(vm, WHY), make=[claim])


def _adopt_template(context: Context, source: str, seen: TemplateSeen) -> None:
    state = context.state
    template = Template(
        id=state.numbers.new_template_id(),
        since=state.now,
        host=seen.host,
        image=seen.image,
        size=seen.size,
        account=seen.account,
        source=source,
        build=seen.build,
    )
    claim = Claim(template.key, seen.host, template_claim(seen.size, context.in_sight[seen.host], seen.image))
    found = adopt_template(template, WHY, ready=seen.condition is TemplateCondition.READY)
    state.move(found, make=[claim])


# --- results and commands ---------------------------------------------------------------------------


_ADDING = ("build", "retry", "add", "resume")  # commands after which something may be made

_DEFINITE = (Refused, Exhausted, Gone, Broken)


def may_add(message: Message) -> bool:
    return isinstance(message, Command) and message.verb in _ADDING


def apply_result(state: State, done: Done, world: World, policy: Policy) -> None:
    """Move the row whose effect failed for good. Success is observed, but for a few effects."""
    row = state.get(done.key)
    if done.error is None:
        _note_success(state, row, done)
        return
    if not isinstance(done.error, _DEFINITE) or row is None or row.state != done.state or row.quarantined:
        return
    why = Why.SAID(text=str(done.error))
    match row:
        case Vm():
            _note_failed_vm(state, row, done, why, world, policy)
        case Template(state=TemplateState.BUILDING) if done.kind is EffectKind.BUILD:
            state.move(break_template(row, why))
        case Saved():
            _note_failed_save(state, row, done.error, why, world)
        case Lease(state=LeaseState.PLANNED) if done.kind is EffectKind.REQUEST:
            state.move(release_lease(row, Event.FAILED, why))
        case Attempt(state=AttemptState.SPAWNED) if isinstance(done.error, Refused):
            # A job that took its spare by itself may run already: its attempt adds the user, and its step decides.
            state.move(return_attempt(row, Event.GAVE_UP, why, failed=True))


def _note_failed_vm(state: State, vm: Vm, done: Done, why: Reason, world: World, policy: Policy) -> None:
    match vm.state:
        case VmState.PLANNED | VmState.STARTING if done.kind in (EffectKind.CREATE, EffectKind.START):
            _note_failed_start(state, vm, done.error, why, world, policy)
        case VmState.MOVING if done.kind is EffectKind.MOVE:
            state.move(keep_vm_there(vm, why))
        case VmState.FALLING_ASLEEP if done.kind is EffectKind.SLEEP:
            state.move(stay_awake(vm, why))
        case VmState.WAKING if done.kind is EffectKind.WAKE:
            seen = world.vm(vm)
            mute = seen is not None and seen.mute
            if mute or isinstance(done.error, Damaged | Gone):
                state.move(end_vm(vm, Event.DIED, why))  # it never goes on: its job is that of a lost one


def _note_failed_start(
    state: State, vm: Vm, error: MultiverseError | None, why: Reason, world: World, policy: Policy
) -> None:
    if world.scheduler is None or is_occupied(vm, world):
        return  # a database restored from an older copy told to make it again, and it may serve a job
    if isinstance(error, Damaged):
        _hold_damaged(state, vm, why)
    elif isinstance(error, Gone):  # its template or its user, which is no fault of its host
        state.move(end_vm(vm, Event.FAILED, why))
    else:
        state.move(*fail_vm(state, vm, Event.FAILED, why, world, policy))


def _note_success(state: State, row: Row | None, done: Done) -> None:
    """What no observation shows: that a machine is off, how far apart the VMs of a job were frozen, and that a job was
    told to end."""
    match row:
        case Attempt(state=AttemptState.WARNED, warned=False) if done.kind is EffectKind.WARN:
            state.move(begin_grace(row, state.now))
        case KnownHost(state=HostState.FENCING) if done.kind is EffectKind.FENCE and done.state == row.state:
            fence(state, row, Why.COMMAND_OFF(host=row.name))
        case Saved() if done.kind is EffectKind.FREEZE and done.stages:
            state.move(note_spread(row, done.stages[0].seconds))


def _hold_damaged(state: State, vm: Vm, why: Reason) -> None:
    """A VM cannot be restored: its state is not as it was saved. It goes on from its other storage, if there is one.
    Otherwise it is kept, and its job is held: perhaps it is mended. What was kept in memory is lost; and a job whose
    user agreed begins anew."""
    state.move(end_vm(vm, Event.FAILED, why))
    for saved in state.saved_named(vm.saved):
        if saved.state not in (*COMPLETE, SavedState.RESUMING):
            continue
        other = None if saved.kept else drop_storage(saved, vm.storage, why)
        damaged = Why.SAVED_DAMAGED(why)
        lost = saved.kept or saved.may_restart
        state.move(other or (give_up(state, saved, damaged) if lost else is_unfit(saved, damaged)))


def _note_failed_save(state: State, saved: Saved, error: MultiverseError | None, why: Reason, world: World) -> None:
    match saved.state:
        case SavedState.PREPARING | SavedState.FREEZING:
            state.move(abandon(saved, why), *_told_not_saved(state, saved, error, why))
        case SavedState.CAPTURING if isinstance(error, Refused | Broken | Exhausted | Gone):  # its job goes on
            running = [one for one in state.attempts_of_job(saved.job) if one.state is AttemptState.ALLOCATED]
            state.move(undo_save(saved, why), *(no_checkpoint(one, why) for one in running))
        case SavedState.WRITING if saved.others and isinstance(error, Broken) and saved.tries + 1 >= MOST_TRIES:
            state.move(give_up(state, saved, why))  # a guest does not answer any more: it will never be written
        case SavedState.WRITING:
            state.move(count_failure(saved, why))
        case SavedState.COPYING:
            state.move(count_failed_copy(saved, why))
        case SavedState.KEEPING if isinstance(error, Broken):  # its guest does not answer any more
            state.move(give_up(state, saved, why))
        case SavedState.CUTTING | SavedState.THAWING | SavedState.UNDOING if isinstance(error, Broken):
            _end_unanswering(state, saved, why, world)


def _end_unanswering(state: State, saved: Saved, why: Reason, world: World) -> None:
    """What is frozen in a guest that does not answer would stay so for ever, and its job with it. Its VM is ended."""
    thaws = saved.state is SavedState.THAWING
    vms = state.restored_from(saved) if thaws else vms_of_saved(state, saved)
    seen = [world.vm(vm) for vm in vms]
    if saved.state is SavedState.CUTTING:
        state.move(undo_save(saved, why))  # its guest may have refused before it was cut off
        return
    if None in seen:  # after a restart its host has not answered yet: the effect is repeated
        return
    if saved.state is not SavedState.UNDOING:
        state.move(abandon(saved, why))
    if any(one is not None and (one.frozen or one.freezing) for one in seen):
        end_vms(state, vms, Event.DIED, why)


def _told_not_saved(state: State, saved: Saved, error: MultiverseError | None, why: Reason) -> list[Change]:
    """A job that was refused at its time limit is not tried again."""
    attempts = [one for one in state.attempts_of_job(saved.job) if one.state is AttemptState.ALLOCATED]
    at_limit = isinstance(error, Refused) and saved.asked.kind is Why.SAVE_AT_LIMIT
    return [not_saved(one, why) for one in attempts] if at_limit else []


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
        case "save" | "resume_saved" | "checkpoint" | "move":
            follow = {"move": moving.follow_command, "checkpoint": checkpoints.follow_command}
            follow.get(command.verb, saving.follow_command)(Context(state, world, policy), command)
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
    states = state.saved_in_memory_of(host.name)
    if not host.is_off and (vms or templates or states):
        jobs = dict.fromkeys(vm.job_id or (a.job.job_id if (a := state.attempt_of(vm)) else "") for vm in vms)
        saved = ", ".join(one.job.job_id for one in states)
        of = f" of job {', '.join(filter(None, jobs))}" if any(jobs) else ""
        kept = [number_of(len(vms), "VM") + of] * bool(vms)
        kept += [number_of(len(templates), "template")] * bool(templates)
        kept += [f"saved jobs in its memory ({saved})"] * bool(states)
        raise Refused(
            f"host {host.name} still has {' and '.join(kept)}",
            hint=f"multiverse hosts drain {host.name}, and remove it once it is drained; if it is off for good, first "
            f"confirm that: multiverse repair {host.name} --fenced",
        )
    gone = remove_templates(templates, why)
    state.move(remove_host(host, why), *gone, free=[row.claim_key for row in templates])
