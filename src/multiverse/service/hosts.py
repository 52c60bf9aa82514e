"""Hosts and leases as operators see them: what is on them, whether they are reached and take VMs, and what to do.

Pure; `now` is the present monotonic time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from multiverse.api import EvictionView, HostFaultView, HostView, LeaseView, NumaView, SavedView, SizeView
from multiverse.core.capacity.room import left_behind
from multiverse.core.capacity.usable_hosts import total
from multiverse.core.machines.host import silent_since
from multiverse.core.model.basics import Size
from multiverse.core.model.eviction import Step
from multiverse.core.model.host import Host, HostFault, HostState, HypervisorView, KnownHost
from multiverse.core.model.job import OPEN_LEASES, Lease, LeaseState
from multiverse.core.model.machine import HOST_CPU, MachineKind, common_model
from multiverse.core.model.reason import Reason, moment, some, text_of
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import Vm
from multiverse.core.model.world import World
from multiverse.core.rows import Rows
from multiverse.service.convert import job_of, size_view

AVAILABLE_STEP = 128  # MiB by which a host's available memory has to change until viewers are sent it again
_NOTHING = Host("", Size(0, 0, 0), template_copies=0)


@dataclass(frozen=True, slots=True)
class Troubles:
    """What goes wrong with hosts, by name."""

    sources: Mapping[str, str]  # why reaching them fails
    held_back: Mapping[str, Reason]  # why silent ones are not fenced
    fences: Mapping[str, str]  # what a fence command that fails has said
    staying: Mapping[str, str]  # why a VM stays on a drained host from which VMs are to move
    images: frozenset[str] = frozenset()  # that the settings name: hosts may lack them


def host_views(rows: Rows, world: World, now: float, troubles: Troubles) -> list[HostView]:
    there, leases = _by_host(rows), {lease.name: lease for lease in rows.leases.values()}
    machines = _machines(rows, world)
    models = _common_models(machines)
    features = [one.features for one in machines.values()]
    common = frozenset.intersection(*features) if features else frozenset[str]()
    return [
        replace(
            _view(host, there[host.name], world, now, troubles, leases.get(host.name)),
            moves=_machine_text(machines[host.name], common) if host.name in machines else "",
            common_cpu=models.get(host.name, ""),
        )
        for _, host in sorted(rows.hosts.items())
        if host.state is not HostState.REMOVED
    ]


@dataclass(slots=True)
class _OnHost:
    """The rows on a host."""

    held: list[Size] = field(default_factory=list)  # by claims
    vms: list[Vm] = field(default_factory=list)  # by number
    jobs: dict[str, None] = field(default_factory=dict)  # of these VMs


def _by_host(rows: Rows) -> Mapping[str, _OnHost]:
    found: defaultdict[str, _OnHost] = defaultdict(_OnHost)
    places = [place for vm in rows.vms.values() for place in vm.places]
    for claim in (*rows.claims, *left_behind(places, rows.templates)):
        found[claim.domain].held.append(claim.size)
    for _, vm in sorted(rows.vms.items()):
        found[vm.host].vms.append(vm)
        if job := job_of(vm, rows.attempt_of(vm)):
            found[vm.host].jobs[job] = None
    return found


def saved_view(saved: Saved, tell: Callable[[Reason | None], str] = text_of) -> SavedView:
    return SavedView(
        name=saved.name,
        job_id=saved.job.job_id,
        uid=saved.uid,
        checkpoint=saved.checkpoint,
        state=str(saved.state),
        since=round(saved.begun, 1),
        vm=saved.vm_name,
        vms=[part.vm_name for part in saved.parts],
        spread=round(saved.spread, 3) if saved.spread is not None else None,
        bytes=saved.bytes,
        storage="" if saved.kept else saved.storage,
        copy=saved.copy,
        in_memory=bool(saved.kept),
        held=saved.hold,
        reason=tell(saved.quarantined or saved.reason or saved.copy_reason or saved.asked),
    )


def lease_views(rows: Rows, epoch: float) -> list[LeaseView]:
    """All leases by number, also those without a host as yet. `epoch` is the Unix time of the monotonic clock's 0."""
    return [_lease_view(lease, epoch) for _, lease in sorted(rows.leases.items())]


def _lease_view(lease: Lease, epoch: float) -> LeaseView:
    return LeaseView(
        name=lease.name,
        state=str(lease.state),
        partition=lease.spec.partition,
        account=lease.spec.account,
        cpus=lease.spec.size.cpus,
        memory=lease.spec.size.memory,
        pilot=lease.pilot,
        node=lease.node,
        ends=lease.ends,
        since=round(epoch + lease.since, 1),
        reason=text_of(lease.quarantined or lease.reason),
    )


def _view(
    known: KnownHost, there: _OnHost, world: World, now: float, troubles: Troubles, lease: Lease | None
) -> HostView:
    name = known.name
    host = world.hosts.get(name) or known.value or _NOTHING
    source = world.source_of.get(name)
    seen = world.views[source] if source is not None else HypervisorView()
    held, mine, size, more = there.held, there.vms, host.capacity, host.overcommit
    vms = [vm for _, vm in sorted(seen.vms.items()) if vm.host == name]
    reachable = name in world.hosts
    state = _state(known, lease, reachable=reachable, free=not held, now=now + world.epoch)
    why = "" if reachable else troubles.sources.get(known.source, "")
    return HostView(
        name=name,
        reachable=reachable,
        declared=size_view(size),
        usable=SizeView(
            int(size.cpus * more.cpus), int(size.memory * more.memory), int(size.disk * more.disk), size.net
        ),
        claimed=size_view(total(held)),
        machine=size_view(host.machine) if host.machine else None,
        accelerator=host.accelerator,
        abilities=tuple(sorted(host.abilities)),
        images={image: tuple(sorted(can)) for image, can in sorted(host.images.items())},
        lacks=tuple(sorted(troubles.images - host.images.keys())) if reachable else (),
        vms=len(mine),
        available=host.available if reachable else 0,
        private=sum(vm.private for vm in vms),
        shared=sum(vm.shared for vm in vms),
        templates=sum(one.held for _, one in sorted(seen.templates.items()) if one.host == name),
        template_copies=host.template_copies,
        overcommit=more.memory,
        floor=more.floor,
        cpu_overcommit=more.cpus,
        disk_overcommit=more.disk,
        state=state,
        reason=_reason(known, lease, state),
        drain_from=known.drain.begins if known.drain else None,
        away_since=None if reachable else float(round(world.epoch + min(now, silent_since(known, world)))),
        why=why,
        jobs=tuple(there.jobs),
        todo=_todo(known, state, troubles, vms=bool(mine)) if lease is None else _todo_of_leased(lease, state),
        features=tuple(sorted(host.features)),
        features_off=dict(sorted(host.features_off.items())),
        lease=_lease_view(lease, world.epoch) if lease is not None else None,
        numa=tuple(
            NumaView(one.number, one.cpus, one.memory, one.free, size_view(one.taken), one.distances)
            for one in (host.numa if reachable else ())
        ),
        faults=tuple(HostFaultView(one.image, one.failures, one.until, text_of(one.reason)) for one in known.faults),
    )


def _machines(rows: Rows, world: World) -> dict[str, MachineKind]:
    """The machines of hosts from and to which VMs move, by host."""
    known = {name: world.hosts.get(name) or row.value for name, row in rows.hosts.items()}
    return {name: host.moves for name, host in known.items() if host and host.moves}


def _common_models(machines: Mapping[str, MachineKind]) -> dict[str, str]:
    """By host, the CPU model with which VMs would move between all hosts whose CPUs have the same vendor, if they do
    not as it is."""
    alike: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, one in machines.items():
        alike[one.vendor, one.release, one.board, one.page_size].append(name)
    groups = [(names, common_model([machines[name] for name in names])) for names in alike.values()]
    return {name: model for names, model in groups if model for name in names}


def _machine_text(machine: MachineKind, common: frozenset[str]) -> str:
    """The machine, with features of the CPU that not all hosts have."""
    release = machine.release.removeprefix("QEMU emulator version ")
    tsc = f", {machine.tsc_khz} kHz" if machine.tsc_khz else ""
    text = f"{machine.board} of QEMU {release}, {machine.accelerator}, CPU {machine.cpu}{tsc}"
    if machine.cpu == HOST_CPU:
        more = sorted(machine.features - common)
        text += f": {machine.processor}" + (f", with {some(more)}" if more else "")
    if machine.wanted:
        lacks = some(machine.lacking) if machine.lacking else "something"
        text += f"; it lacks {lacks} of {machine.wanted}"
    return text


def without_noise(host: HostView) -> HostView:
    """The host for a snapshot, without figures that change all the time."""
    available = host.available // AVAILABLE_STEP * AVAILABLE_STEP
    return replace(host, available=available, private=0.0, shared=0.0, templates=0.0, numa=())


def avoided_for(known: KnownHost) -> list[HostFault]:
    """Why the host is avoided, by image. Images that are gone, and those that an operator has had tried, do not
    count."""
    there = known.value.images if known.value is not None else {}
    return [one for one in known.faults if one.failures and one.image in there]


def _reason(known: KnownHost, lease: Lease | None, state: str) -> str:
    if known.drain and known.state is HostState.KNOWN:
        return known.drain.reason
    if known.reason:
        return text_of(known.reason)
    if lease is not None and lease.state not in OPEN_LEASES and lease.reason:
        return text_of(lease.reason)
    if state != "avoided":
        return ""
    return "; ".join(
        f"avoided for {one.image} until {moment(one.until)}, and then tried with one job at a time, because its VMs "
        f"fail there{f' ({one.failures} times in a row)' if one.failures > 1 else ''}: {one.reason}"
        for one in avoided_for(known)
    )


def _state(host: KnownHost, lease: Lease | None, *, reachable: bool, free: bool, now: float) -> str:
    """One word: what stops the most goes first. `now` is Unix time."""
    if host.state is not HostState.KNOWN:
        return str(host.state)
    if lease is not None and lease.state not in OPEN_LEASES:
        return str(lease.state)
    if not reachable:
        return "away"
    if host.drain is None:
        return "avoided" if avoided_for(host) else "up"
    if host.drain.begins > now:
        return "closing"
    return "drained" if free else "draining"


def _todo_of_leased(lease: Lease, state: str) -> str:
    confirm = (
        f"if nothing of pilot {lease.pilot} is left on node {lease.node} for certain, because it was rebooted or "
        f"switched off, confirm that: multiverse repair {lease.name} --fenced"
    )
    match lease.state:
        case LeaseState.LOST:
            return f"its jobs wait until its node is clean of its pilot; {confirm}"
        case LeaseState.STARTING:
            return "its agent is awaited"
        case LeaseState.ENDING:
            return "its jobs are ended, and queued again where that is possible"
        case _ if state in ("away", "silent", "fencing"):
            return f"see that slurmctld answers, and what became of its pilot: scontrol show job {lease.pilot}"
        case _ if state == "draining":
            return "it is given back when its jobs have ended"
        case _:
            return ""


def eviction_view(step: Step, epoch: float) -> EvictionView:
    job, vm, held = step.attempt.job.job_id, step.vm, str(step.held or "")
    since = round(epoch + step.held_since, 1) if step.held else None
    why = str(step.why)
    return EvictionView(step.method, job, vm.name, vm.host, step.to, step.memory, why, held, since, step.ends)


def _todo(host: KnownHost, state: str, troubles: Troubles, *, vms: bool) -> str:
    name = host.name
    confirm = f"if it is switched off for certain, confirm that: multiverse repair {name} --fenced"
    match state:
        case "away":
            return f"see that it runs, and its agent: systemctl status multiverse-agent; {confirm}"
        case "silent" if held := troubles.held_back.get(name):
            return f"it is not fenced by command, because {held}; bring it back; {confirm}"
        case "silent":
            return f"its jobs wait until it is back or fenced; bring it back; {confirm}"
        case "fencing" if said := troubles.fences.get(name):
            return f"the fence command fails, and is repeated: {said}; {confirm}"
        case "fencing":
            return "the fence command is running"
        case "fenced":
            return f"repair it and switch it on; if it does not come back: multiverse hosts remove {name}"
        case "avoided":
            return f"remove the cause; it is tried by itself, and at once after: multiverse hosts resume {name}"
        case "drained":
            return f"it is free; to use it again: multiverse hosts resume {name}"
        case "draining" if vms and (why := troubles.staying.get(name)):
            return f"it is free when its jobs have ended or moved away; now they stay: {why}"
        case "draining" if vms and host.drain is not None and host.drain.moves:
            return "it is free when its jobs have ended or moved away"
        case "draining" if vms:
            return "it is free when its jobs have ended"
        case _:
            return ""
