"""What has changed in the observations since the pass before, and the rows that this concerns.

Observations are compared by identity first and by equality second: drivers hand out the same object for what did not
change, so that an equal observation costs a comparison of pointers for each job and VM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import ne
from typing import TypeVar

from multiverse.core.model import OFF_STATES, OPEN_LEASES, Host, Job, KnownHost, Observation, VmSeen, VmState, World
from multiverse.core.policy import Policy
from multiverse.core.rows import Compared
from multiverse.core.state import State

T = TypeVar("T")


def mark_changes(state: State, world: World, policy: Policy) -> None:
    """Mark the rows that the latest observations may move, and keep every host as it was observed last."""
    compared = state.compared
    for host in world.declared:  # what it could hold may be unknown, and is not nothing
        if host.name not in state.hosts:
            state.know_host(host)
    if world.scheduler is not None and world.scheduler is not compared.scheduler:
        _mark_jobs(state, world.scheduler.value.jobs)
        _note_unexplained(state, "", compared.nodes, world.scheduler.value.nodes)
        _mark_deleted(state, compared.nodes, world.scheduler.value.nodes)
        compared.scheduler, compared.nodes = world.scheduler, world.scheduler.value.nodes
    users = {uid: (user.exists, user.since) for uid, user in world.users.items()} if world.users is not None else None
    if users != compared.users:
        state.queue.consider_users_again()
        compared.users = users
    anew = world.sources.keys() | compared.sources.keys() if world.anew is None else world.anew
    for name in sorted(anew):
        if (observation := world.sources.get(name)) is not None:
            _mark_source(state, compared, name, observation, policy)
        elif name in compared.sources:
            _follow_hosts(state, compared, name, {})
            del compared.sources[name]
            compared.vms.pop(name, None)
    _know_hosts(state, compared)


def _mark_jobs(state: State, jobs: Mapping[str, Job]) -> None:
    before, state.queue.jobs = state.queue.jobs, jobs
    if before != jobs:
        for job_id in changed(before, jobs, ne):
            state.mark_job(job_id)


def changed(before: Mapping[str, T], after: Mapping[str, T], differ: Callable[[T, T], bool]) -> list[str]:
    """The keys under which the two differ: those that came and changed in the order of `after`, then those that
    went."""
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
    if old is not None and old.latest is observation.latest is not None:
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
    if observation.latest is None:
        return
    known, shown = compared.vms.get(name, {}), observation.latest.value.vms
    for vm_name in changed(known, shown, _moves):
        state.mark_vm(vm_name)
    _note_unexplained(state, name, known, shown)
    compared.vms[name] = shown


def _note_unexplained(state: State, source: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Keep the names that a source shows, or shows no more, and that no row has."""
    if before is not after and list(before) != list(after):
        came = (name for name in after.keys() - before.keys() if name not in state.vm_named)
        state.compared.unexplained.update((name, source) for name in came)


def _mark_deleted(state: State, before: Mapping[str, object], after: Mapping[str, object]) -> None:
    """Mark the VMs whose nodes are shown no more."""
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


def _moves(old: VmSeen, new: VmSeen) -> bool:
    """Whether the second observation may move the VM's row, or those that depend on it. What a VM uses changes all the
    time."""
    return (
        old.condition is not new.condition
        or old.token != new.token
        or old.users_added != new.users_added
        or old.host != new.host
    )


def _know_hosts(state: State, compared: Compared) -> None:
    """Keep every host in sight as it was observed last, and the source that answers for it. What it has available at
    the moment, and its load, are not kept: they change all the time."""
    for name in sorted(compared.unlearned):
        if (host := state.free.hosts.get(name)) is not None:
            steady = replace(host, available=0, available_disk=None, load=None, numa=())
            known = state.hosts.get(name) or KnownHost(name, "")
            state.know_host(replace(known, source=max(compared.showing[name]), value=steady))
    compared.unlearned.clear()


def unexplained(state: State, world: World) -> dict[str, str]:
    """The names that are shown and that no row has, as of the last `mark_changes`, each with the source that shows it
    (empty: only the scheduler does). What is explained or shown no more is forgotten. Needs the scheduler."""
    assert world.scheduler is not None, "while the scheduler is unknown nobody asks"
    found: dict[str, str] = {}
    for name, source in sorted(state.compared.unexplained):
        latest = world.latest(source)
        if latest is None and source in world.sources:
            continue  # it may still be there
        shown = name in (world.scheduler.value.nodes if source == "" else latest.value.vms if latest else ())
        if not shown or name in state.vm_named:
            state.compared.unexplained.discard((name, source))
        else:
            found[name] = source
    return found


def close_hosts(state: State, world: World) -> None:
    """Keep which hosts take no new VM. After an operator's commands, and as the times of drains come."""
    closed = {name for name, drain in state.drains.items() if drain.begins <= state.now + world.epoch}
    closed |= {host.name for host in state.hosts_in(*OFF_STATES)}
    closed |= {lease.name for lease in state.leases.values() if lease.state not in OPEN_LEASES}
    closed |= state.free.hosts.keys() - state.hosts.keys()  # its lease has ended in this pass
    state.close_hosts(frozenset(closed), frozenset(state.drains.keys() - closed))
