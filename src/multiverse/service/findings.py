"""What is wrong according to rows, observations and what the controller reports, as alerts. `now` is the present
monotonic time. What an alert's name means for `multiverse repair` is here, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from multiverse.api import Alert
from multiverse.controller.effects import Failure
from multiverse.controller.users import LookupFailure
from multiverse.core.capacity.sizes import short_of_disk, short_of_memory
from multiverse.core.model import (
    OPEN_LEASES,
    Attempt,
    AttemptState,
    HostState,
    Key,
    KnownHost,
    Lease,
    LeaseState,
    Offer,
    Row,
    Template,
    TemplateState,
    Vm,
    VmCondition,
    VmState,
    World,
)
from multiverse.core.policy import Policy, image_of
from multiverse.core.rows import Rows
from multiverse.core.transition import Command, EffectKind
from multiverse.service import alerts
from multiverse.service.convert import tables
from multiverse.service.hosts import avoided_for


def findings(rows: Rows, world: World, policy: Policy, now: float) -> list[Alert]:
    """What is wrong according to the rows and to the last observations. What stops the most comes first."""
    return [
        *_hosts_away(rows, world, policy, now),
        *_hosts_avoided(rows, now + world.epoch),
        *_fenced_vms(rows),
        *_hosts_short_of_disk(rows, world),
        *_hosts_short_of_memory(world),
        *_missing_images(rows, world, policy, now),
        *_quarantined_records(rows),
        *_broken_templates(rows, policy, now),
        *_jobs_backing_off(rows, now),
        *_orphan_vms(rows),
    ]


def sources_away(sources: Iterable[tuple[str, float, str]]) -> list[Alert]:
    """The sources, by name, of which every observation has failed for so many seconds, and why (empty: none has)."""
    failing = (one for one in sources if one[2])
    return [
        (alerts.SCHEDULER if source == "scheduler" else alerts.SOURCE)(source=source, seconds=seconds, reason=reason)
        for source, seconds, reason in failing
    ]


def unknown_user(failure: LookupFailure, rows: Rows, now: float) -> Alert:
    """A user of whom the name service does not tell, and the jobs that wait for that."""
    owners = (row for _, row in sorted(rows.attempts.items()) if row.uid == failure.uid)
    jobs = tuple(dict.fromkeys(row.job.job_id for row in owners))
    return alerts.UNKNOWN_USER(jobs=jobs, uid=failure.uid, seconds=now - failure.since, reason=failure.reason)


def failing_effect(failure: Failure, now: float) -> Alert:
    """An effect that fails again and again."""
    effect = failure.effect
    subject = f"host {effect.text}" if effect.kind is EffectKind.FENCE else str(effect.key)
    figures: dict[str, Any] = {"effect": effect.kind, "failures": failure.times, "reason": failure.reason}
    return alerts.EFFECT(name=subject.replace(" ", "-"), subject=subject, left=failure.again_at - now, **figures)


def _orphan_vms(rows: Rows) -> Iterator[Alert]:
    """The VMs that no record explained when they were found, each with the job that was seen on it."""
    for _, vm in sorted(rows.vms.items()):
        if vm.state is VmState.ORPHAN and not vm.quarantined:
            figures: dict[str, Any] = {"name": _name_of(vm.key), "vm": vm.name, "host": vm.host, "version": vm.version}
            if vm.job_id:
                yield alerts.ORPHAN_BUSY(jobs=(vm.job_id,), job=vm.job_id, **figures)
            else:
                yield alerts.ORPHAN_IDLE(**figures)


def _hosts_away(rows: Rows, world: World, policy: Policy, now: float) -> Iterator[Alert]:
    """The known hosts that are out of reach; those without VMs come first."""
    losing = {vm.host for vm in rows.vms.values() if vm.state is VmState.LOST}
    for host in sorted(_out_of_reach(rows, world, policy, now) - losing):
        yield alerts.EMPTY_HOST_AWAY(host=host)
    for host in sorted(losing):
        lost = [vm for _, vm in sorted(rows.vms.items()) if vm.host == host and vm.state is VmState.LOST]
        version = max(vm.version for vm in lost)
        yield alerts.HOST_AWAY(version=version, jobs=_jobs_of(rows, lost), host=host, vms=[vm.name for vm in lost])


def _hosts_avoided(rows: Rows, now: float) -> Iterator[Alert]:
    """The hosts that are avoided at a Unix time, each with the image that failed there last, and the others."""
    for _, host in sorted(rows.hosts.items()):
        if host.is_member and (faults := avoided_for(host)):
            yield alerts.AVOIDED(
                version=host.version,
                name=_name_of(host.key),
                host=host.name,
                images=[one.image for one in faults],
                times=_times(max(one.failures for one in faults)),
                reason=faults[-1].reason,
                left=min(one.until for one in faults) - now,
            )


def _fenced_vms(rows: Rows) -> Iterator[Alert]:
    """The VMs whose host an operator has declared to be switched off, until they are gone."""
    fenced = {host.name for host in rows.hosts.values() if host.state is HostState.FENCED}
    if vms := [vm.name for _, vm in sorted(rows.vms.items()) if vm.host in fenced]:
        yield alerts.FENCED(vms=vms)


def _hosts_short_of_memory(world: World) -> Iterator[Alert]:
    for _, host in sorted(world.hosts.items()):
        if short_of_memory(host):
            yield alerts.SHORT_OF_MEMORY(host=host.name, available=host.available, floor=host.overcommit.floor)


def _hosts_short_of_disk(rows: Rows, world: World) -> Iterator[Alert]:
    shown = [(vm, world.vm(vm)) for _, vm in sorted(rows.vms.items())]
    paused = [vm for vm, seen in shown if seen is not None and seen.condition is VmCondition.PAUSED]
    for _, host in sorted(world.hosts.items()):
        waiting = [vm for vm in paused if vm.host == host.name]
        available = None if host.available_disk is None else str(host.available_disk)
        if waiting:
            jobs, vms = _jobs_of(rows, waiting), [vm.name for vm in waiting]
            yield alerts.FULL_DISK(jobs=jobs, host=host.name, available=available, vms=vms)
        elif short_of_disk(host):
            yield alerts.SHORT_OF_DISK(host=host.name, available=available, floor=host.overcommit.disk_floor)


def _missing_images(rows: Rows, world: World, policy: Policy, now: float) -> Iterator[Alert]:
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
        yield alerts.NO_IMAGE(
            jobs=wanted[image], image=image, away=away, pool=image in pools, both=bool(wanted[image]) and image in pools
        )


def _quarantined_records(rows: Rows) -> Iterator[Alert]:
    for row in (row for table in tables(rows).values() for row in table.values() if row.quarantined):
        jobs = _affected_jobs(rows, row)
        yield alerts.QUARANTINED(
            version=row.version,
            jobs=jobs,
            name=_name_of(row.key),
            label=_label(rows, row),
            state=str(row.state),
            reason=row.quarantined,
            first=jobs[0] if jobs else None,
            log=not jobs,
        )


def _broken_templates(rows: Rows, policy: Policy, now: float) -> Iterator[Alert]:
    for row in rows.templates.values():
        if row.state is TemplateState.BROKEN and not row.quarantined:
            figures: dict[str, Any] = {"times": _times(row.tries), "reason": row.reason, "label": _template_label(row)}
            left = row.since + policy.backoff(row.tries) - now
            yield alerts.TEMPLATE_BROKEN(version=row.version, name=_name_of(row.key), left=left, **figures)


def _jobs_backing_off(rows: Rows, now: float) -> Iterator[Alert]:
    for row in rows.attempts.values():
        if row.state is AttemptState.QUEUED and row.not_before > now and not row.quarantined:
            job = row.job.job_id
            figures: dict[str, Any] = {"name": _name_of(row.key), "job": job, "left": row.not_before - now}
            wrong = alerts.SHORT_RUNS if row.short_runs > 1 else alerts.BACK_OFF
            yield wrong(version=row.version, jobs=(job,), times=_times(row.tries), runs=row.short_runs, **figures)


def _times(failures: int) -> int | None:
    """How often in a row, which is said from the second time on."""
    return failures if failures > 1 else None


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


# --- names and repairs -----------------------------------------------------------------------------


def _name_of(key: Key) -> str:
    """A record's name in alerts; `repair_command` reads it."""
    return f"{key.kind}-{key.id}"


def repair_command(alert: Alert) -> Command:
    """The command to the controller that repairs this alert."""
    if alert.kind == "host":
        return Command("fence", host=alert.name)
    kind, _, number = alert.name.partition("-")
    verb = "end" if alert.kind == "orphan" else "retry"
    return Command(verb, key=Key(kind, int(number)))  # type: ignore[arg-type]  # made by _name_of
