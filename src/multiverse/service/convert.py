"""From rows and observations to the types of the API, and to the findings that alerts are made of.

The only module of the service that reads fields of rows, claims, observed objects, pools and observers. Pure; `now` is
the present monotonic time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from multiverse.api import (
    Alert,
    JobUsageView,
    JobView,
    PoolView,
    SizeView,
    SourceView,
    TemplateView,
    TimelineView,
    VmView,
)
from multiverse.controller.effects import Failure
from multiverse.controller.observers import Observer
from multiverse.controller.users import LookupFailure
from multiverse.core.model import (
    ENDING_STATES,
    OPEN_LEASES,
    PINNED_STATES,
    WAITING_STATES,
    Attempt,
    AttemptState,
    Depth,
    Drain,
    HostState,
    Key,
    KnownHost,
    Lease,
    LeaseState,
    Offer,
    Row,
    Size,
    Template,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
    World,
)
from multiverse.core.model.job_usage import JobUsage
from multiverse.core.model.names import without_prefix_length
from multiverse.core.policy import Policy, image_of
from multiverse.core.provisioning.pools import PoolStatus
from multiverse.core.provisioning.reasons import reason_of
from multiverse.core.provisioning.sizes import short_of_disk, short_of_memory
from multiverse.core.rows import Rows
from multiverse.core.transition import Command, EffectKind
from multiverse.service.findings import (
    BrokenTemplate,
    FailingEffect,
    FencedVms,
    Findings,
    HostAvoided,
    HostAway,
    HostShortOfDisk,
    HostShortOfMemory,
    JobBackingOff,
    MissingImage,
    OrphanVm,
    QuarantinedRecord,
    UnknownUser,
)
from multiverse.service.hosts import avoided_for
from multiverse.service.identity import KnownVm
from multiverse.service.timeline import timeline
from multiverse.store import Entry

# --- views -----------------------------------------------------------------------------------------

_STAGE_OF_A_JOB = {
    **dict.fromkeys(WAITING_STATES, "waiting"),
    AttemptState.CLAIMED: "provisioning",
    AttemptState.SPAWNING: "provisioning",
    **dict.fromkeys(PINNED_STATES, "provisioning"),
    AttemptState.ALLOCATED: "running",
    **dict.fromkeys(ENDING_STATES, "ending"),
}


def stage_of(attempt: Attempt) -> str:
    """The stage of its job that a user knows: waiting, provisioning, running or ending."""
    return _STAGE_OF_A_JOB[attempt.state]


def job_counts(rows: Rows) -> dict[str, int]:
    """The number of live attempts in each stage that a user knows."""
    return stage_counts(rows.attempts.values())


def stage_counts(attempts: Iterable[Attempt]) -> dict[str, int]:
    """The number of these attempts in each stage."""
    found = Counter(map(stage_of, attempts))
    return {stage: found[stage] for stage in ("waiting", "provisioning", "running", "ending")}


def row_counts(rows: Rows) -> dict[str, Counter[str]]:
    """The number of live rows by state, for each kind of row."""
    return {kind: Counter(str(row.state) for row in table.values()) for kind, table in _tables(rows).items()}


def _tables(rows: Rows) -> Mapping[str, Mapping[int, Row]]:
    hosts = {host.id: host for host in rows.hosts.values()}
    return {
        "attempt": rows.attempts,
        "vm": rows.vms,
        "template": rows.templates,
        "offer": rows.offers,
        "host": hosts,
        "lease": rows.leases,
    }


def source_view(source: Observer[Any], now: float) -> SourceView:
    return SourceView(
        name=source.name,
        known=source.latest is not None,
        observations=source.observations,
        age=now - source.latest.began if source.latest else 0.0,
        unknown_for=0.0 if source.latest else now - source.since,
        failure=source.failure,
    )


def size_view(size: Size) -> SizeView:
    return SizeView(*size.amounts)


def pool_view(one: PoolStatus) -> PoolView:
    pool = one.pool
    joined = pool.size if pool.depth is Depth.JOINED else Size(0, 0)
    return PoolView(
        image=pool.image,
        depth=str(pool.depth),
        cpus=joined.cpus,
        memory=joined.memory,
        least=pool.least,
        most=pool.most,
        wanted=one.wanted,
        ready=one.ready,
        making=one.making,
        offered=one.offered,
    )


def vm_names(vms: Sequence[Vm]) -> dict[int, list[str]]:
    """The names of the VMs that serve each attempt, by the attempt's number."""
    names: dict[int, list[str]] = {}
    for vm in vms:
        if vm.attempt is not None:
            names.setdefault(vm.attempt, []).append(vm.name)
    return names


def job_views(
    attempts: Sequence[Attempt],
    vms: Sequence[Vm],
    waiting: Mapping[int, str],
    now: float,
    policy: Policy,
    usages: Mapping[int, JobUsage] = MappingProxyType({}),
) -> list[JobView]:
    """One view for each attempt, in their order. `vms` are all VMs of these attempts; `waiting` is why attempts wait,
    see `waiting_reasons`; `usages` is what they used, as far as it is known."""
    names = vm_names(vms)
    views = [
        _job_view(attempt, names.get(attempt.id, ()), waiting.get(attempt.id, ""), now, policy) for attempt in attempts
    ]
    return [replace(view, usage=_job_usage(usages.get(view.attempt))) for view in views]


def _job_usage(usage: JobUsage | None) -> JobUsageView | None:
    if usage is None or not usage.text or usage.seconds is None:
        return None
    figures = (usage.seconds, usage.cpus_used, usage.efficiency, usage.peak)
    return JobUsageView(*figures, usage.suggestion, usage.text)


def waiting(rows: Rows) -> list[Attempt]:
    """The attempts that have no VM yet."""
    return [attempt for attempt in rows.attempts.values() if attempt.state in WAITING_STATES]


def waiting_reasons(
    attempts: Sequence[Attempt], world: World, reasons: Mapping[int, str], now: float
) -> dict[int, str]:
    """Why each of these attempts waits, as far as that is known: `reasons` is what `State.reasons` says of the first in
    the queue. Where that says nothing, it is why the attempt before did not come to its end."""
    jobs = world.scheduler.value.jobs if world.scheduler else {}
    return {
        attempt.id: reason_of(attempt, jobs.get(attempt.job.job_id), reasons, now) or attempt.note
        for attempt in attempts
        if attempt.state in WAITING_STATES
    }


def _job_view(attempt: Attempt, vms: Sequence[str], waiting: str, now: float, policy: Policy) -> JobView:
    request = attempt.request
    return JobView(
        job_id=attempt.job.job_id,
        name=attempt.job_name,
        uid=attempt.uid,
        attempt=attempt.id,
        state=str(attempt.state),
        nodes=request.nodes,
        cpus=request.size.cpus,
        memory=request.size.memory,
        image=image_of(attempt, policy),
        kind=str(request.kind or policy.kind),
        age=max(0.0, now - attempt.since),
        waiting=waiting,
        reason=attempt.reason,
        restarts=attempt.job.restarts,
        vms=tuple(vms),
        quarantined=attempt.quarantined,
        origin=attempt.origin,
    )


def timeline_view(attempt: Attempt, entries: Sequence[Entry], now: float, waiting: str = "") -> TimelineView:
    """The timeline of one attempt. `entries` are those of the attempt and of its VMs, in order; `waiting` is why it
    waits."""
    return timeline(attempt.job.job_id, attempt.id, str(attempt.state), entries, now, waiting)


def vm_views(rows: Rows, world: World, exact: Mapping[str, tuple[float, float, float]], now: float) -> list[VmView]:
    """All live VMs with the figures of the last observation; for a VM in `exact`, with its CPU seconds, unique MiB and
    proportional MiB instead."""
    views = []
    for vm in rows.vms.values():
        attempt = rows.attempt_of(vm)
        last = world.vm(vm) or VmSeen(vm.name, vm.host, VmCondition.MAKING)
        cpu_s, private, pss = exact.get(vm.name, (last.cpu_s, last.private, 0.0))
        views.append(
            VmView(
                name=vm.name,
                state=str(vm.state),
                host=vm.host,
                image=vm.image,
                kind=str(vm.kind),
                cpus=vm.size.cpus,
                memory=vm.size.memory,
                address=without_prefix_length(vm.address),
                attempt=vm.attempt,
                job_id=attempt.job.job_id if attempt else "",
                age=max(0.0, now - vm.since),
                cpu_s=cpu_s,
                private=private,
                shared=last.shared,
                pss=pss,
                reason=vm.reason,
                quarantined=vm.quarantined,
            )
        )
    return views


def template_views(rows: Rows, now: float) -> list[TemplateView]:
    forked = Counter(place.template for vm in rows.vms.values() for place in vm.places)
    return [
        TemplateView(
            host=row.host,
            image=row.image,
            state=str(row.state),
            cpus=row.size.cpus,
            memory=row.size.memory,
            account=row.account,
            age=now - row.since,
            references=forked[row.which],
            reason=row.reason,
        )
        for row in rows.templates.values()
    ]


def known_vms(rows: Rows) -> dict[str, KnownVm]:
    """What each live VM was told about itself, by name."""
    found = {}
    for vm in rows.vms.values():
        attempt = rows.attempt_of(vm)
        found[vm.name] = KnownVm(
            job_id=attempt.job.job_id if attempt is not None else "",
            mac=vm.mac,
            address=without_prefix_length(vm.address),
        )
    return found


# --- findings --------------------------------------------------------------------------------------


def findings(rows: Rows, world: World, policy: Policy, now: float) -> Findings:
    """What is wrong according to the rows and to the last observations."""
    return Findings(
        hosts_away=tuple(_hosts_away(rows, world, policy, now)),
        avoided=tuple(_hosts_avoided(rows, now + world.epoch)),
        fenced=_fenced_vms(rows),
        short_of_memory=tuple(_hosts_short_of_memory(world)),
        short_of_disk=tuple(_hosts_short_of_disk(rows, world)),
        missing_images=tuple(_missing_images(rows, world, policy, now)),
        quarantined=tuple(_quarantined_records(rows)),
        orphan_vms=tuple(
            OrphanVm(_name_of(vm.key), vm.name, vm.host, vm.job_id, vm.version)
            for _, vm in sorted(rows.vms.items())
            if vm.state is VmState.ORPHAN and not vm.quarantined
        ),
        broken_templates=tuple(_broken_templates(rows, policy, now)),
        backing_off=tuple(_jobs_backing_off(rows, now)),
    )


def unknown_user(failure: LookupFailure, rows: Rows, now: float) -> UnknownUser:
    owners = (row for _, row in sorted(rows.attempts.items()) if row.uid == failure.uid)
    jobs = tuple(dict.fromkeys(row.job.job_id for row in owners))
    return UnknownUser(failure.uid, now - failure.since, failure.reason, jobs)


def failing_effect(failure: Failure, now: float) -> FailingEffect:
    effect = failure.effect
    return FailingEffect(
        kind=str(effect.kind),
        subject=f"host {effect.text}" if effect.kind is EffectKind.FENCE else str(effect.key),
        failures=failure.times,
        reason=failure.reason,
        retry_in=failure.again_at - now,
    )


def _hosts_away(rows: Rows, world: World, policy: Policy, now: float) -> Iterator[HostAway]:
    """The known hosts that are out of reach; those without VMs come first."""
    losing = {vm.host for vm in rows.vms.values() if vm.state is VmState.LOST}
    for host in sorted(_out_of_reach(rows, world, policy, now) - losing):
        yield HostAway(host)
    for host in sorted(losing):
        lost = [vm for _, vm in sorted(rows.vms.items()) if vm.host == host and vm.state is VmState.LOST]
        yield HostAway(host, tuple(vm.name for vm in lost), _jobs_of(rows, lost), max(vm.version for vm in lost))


def _hosts_avoided(rows: Rows, now: float) -> Iterator[HostAvoided]:
    """The hosts that are avoided at a Unix time, each with the image that failed there last, and the others."""
    for _, host in sorted(rows.hosts.items()):
        if host.is_member and (faults := avoided_for(host)):
            last, images = faults[-1], ", ".join(one.image for one in faults)
            failures, left = max(one.failures for one in faults), min(one.until for one in faults) - now
            yield HostAvoided(_name_of(host.key), host.name, images, failures, last.reason, left, host.version)


def _fenced_vms(rows: Rows) -> FencedVms:
    """The VMs whose host an operator has declared to be switched off, until they are gone."""
    fenced = {host.name for host in rows.hosts.values() if host.state is HostState.FENCED}
    return FencedVms(tuple(vm.name for _, vm in sorted(rows.vms.items()) if vm.host in fenced))


def _hosts_short_of_memory(world: World) -> Iterator[HostShortOfMemory]:
    for _, host in sorted(world.hosts.items()):
        if short_of_memory(host):
            yield HostShortOfMemory(host.name, host.available, host.overcommit.floor)


def _hosts_short_of_disk(rows: Rows, world: World) -> Iterator[HostShortOfDisk]:
    shown = [(vm, world.vm(vm)) for _, vm in sorted(rows.vms.items())]
    paused = [vm for vm, seen in shown if seen is not None and seen.condition is VmCondition.PAUSED]
    for _, host in sorted(world.hosts.items()):
        waiting = [vm for vm in paused if vm.host == host.name]
        if waiting or short_of_disk(host):
            names, jobs = tuple(vm.name for vm in waiting), _jobs_of(rows, waiting)
            yield HostShortOfDisk(host.name, host.available_disk, host.overcommit.disk_floor, names, jobs)


def _missing_images(rows: Rows, world: World, policy: Policy, now: float) -> Iterator[MissingImage]:
    """Images that jobs or pools want and no host in reach has. A job counts once it has waited for the policy's
    patience, because a new image is seen at the next observation only."""
    if not world.hosts:
        return
    there = {image for host in world.hosts.values() for image in host.images}
    away = any(host.name not in world.hosts for host in rows.hosts.values() if not host.is_off)
    pools = {pool.image for pool in policy.pools}
    wanted: dict[str, list[str]] = {image: [] for image in pools}
    for _, row in sorted(rows.attempts.items()):
        if row.state is AttemptState.QUEUED and now - row.since >= policy.patience:
            wanted.setdefault(image_of(row, policy), []).append(row.job.job_id)
    for image in sorted(wanted.keys() - there):
        yield MissingImage(image, tuple(wanted[image]), image in pools, away)


def _quarantined_records(rows: Rows) -> Iterator[QuarantinedRecord]:
    for row in (row for table in _tables(rows).values() for row in table.values() if row.quarantined):
        yield QuarantinedRecord(
            name=_name_of(row.key),
            label=_label(rows, row),
            state=str(row.state),
            reason=row.quarantined,
            jobs=_affected_jobs(rows, row),
            version=row.version,
        )


def _broken_templates(rows: Rows, policy: Policy, now: float) -> Iterator[BrokenTemplate]:
    for row in rows.templates.values():
        if row.state is TemplateState.BROKEN and not row.quarantined:
            yield BrokenTemplate(
                name=_name_of(row.key),
                label=_template_label(row),
                failures=row.tries,
                reason=row.reason,
                retry_in=row.since + policy.backoff(row.tries) - now,
                version=row.version,
            )


def _jobs_backing_off(rows: Rows, now: float) -> Iterator[JobBackingOff]:
    for row in rows.attempts.values():
        if row.state is AttemptState.QUEUED and row.not_before > now and not row.quarantined:
            left = row.not_before - now
            yield JobBackingOff(_name_of(row.key), row.job.job_id, row.tries, left, row.version, row.short_runs)


def _out_of_reach(rows: Rows, world: World, policy: Policy, now: float) -> frozenset[str]:
    """The hosts of the site that no source shows. While a source has been unknown for a short time only, nothing is
    concluded about its hosts."""
    sources = world.sources.items()
    unknown = {name for name, one in sources if one.latest is None and now - one.since <= policy.silence}
    unready = {lease.name for lease in rows.leases.values() if lease.state not in (*OPEN_LEASES, LeaseState.LOST)}
    return frozenset(
        host.name
        for host in rows.hosts.values()
        if not host.is_off and host.name not in world.hosts and host.source not in unknown and host.name not in unready
    )


def _jobs_of(rows: Rows, vms: Sequence[Vm]) -> tuple[str, ...]:
    owners = [rows.attempts.get(vm.attempt) for vm in vms if vm.attempt is not None]
    return tuple(dict.fromkeys(attempt.job.job_id for attempt in owners if attempt is not None))


def _affected_jobs(rows: Rows, row: Row) -> tuple[str, ...]:
    match row:
        case Attempt():
            return (row.job.job_id,)
        case Vm():
            return _jobs_of(rows, [row])
        case Offer():
            return _jobs_of(rows, [vm]) if (vm := rows.vms.get(row.id)) else ()
        case Template() | KnownHost() | Lease():
            return ()


def _label(rows: Rows, row: Row) -> str:
    match row:
        case Attempt():
            return f"the attempt of job {row.job.job_id}"
        case Vm():
            return f"VM {row.name}" + "".join(f" of job {job}" for job in _jobs_of(rows, [row]))
        case Offer():
            vm = rows.vms.get(row.id)
            return f"the offer of VM {vm.name if vm else row.id}"
        case Template():
            return _template_label(row)
        case KnownHost():
            return f"host {row.name}"
        case Lease():
            return f"lease {row.name}"


def _template_label(row: Template) -> str:
    return f"the template of {row.image} on {row.host}" + (f" for account {row.account}" if row.account else "")


# --- names and commands ----------------------------------------------------------------------------


def _name_of(key: Key) -> str:
    """A record's name in alerts; `repair_command` reads it."""
    return f"{key.kind}-{key.id}"


def repair_command(alert: Alert) -> Command:
    """The command to the controller that repairs this alert."""
    if alert.kind == "host":
        return Command("fence", host=alert.name)
    kind, _, number = alert.name.partition("-")
    verb = "end" if alert.kind == "stranger" else "retry"
    return Command(verb, key=Key(kind, int(number)))  # type: ignore[arg-type]  # made by _name_of


def template_command(verb: str, image: str, host: str, size: tuple[int, int] | None, account: str | None) -> Command:
    """The command to the controller that builds or drops (`verb`) templates. `size` is CPUs and MiB."""
    return Command(verb, host, image, size=Size(*size) if size else None, account=account)


def host_command(verb: str, host: str, reason: str, begins: float) -> Command:
    """The command to the controller that adds, drains, resumes or removes (`verb`) a host."""
    return Command(verb, host=host, drain=Drain(begins, reason) if verb == "drain" else None)
