"""Alerts for operators: each is defined once, and found in rows, observations and what the controller reports.

An alert without a repair ends by itself, or when its cause is removed; its remedy says how. The words are written as
those of reasons (`core.model.reason`). Pure; `now` is the present monotonic time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multiverse.api import Alert, AlertKind, Severity
from multiverse.controller.effects import Failure
from multiverse.controller.users import LookupFailure
from multiverse.core.capacity.sizes import short_of_disk, short_of_memory
from multiverse.core.model.basics import Key
from multiverse.core.model.eviction import LIMITS, Step
from multiverse.core.model.host import HostState, KnownHost
from multiverse.core.model.job import OPEN_LEASES, Attempt, AttemptState, Lease, LeaseState
from multiverse.core.model.reason import Reason, worded
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import Offer, Template, TemplateState, Vm, VmCondition, VmState
from multiverse.core.model.world import Row, World
from multiverse.core.policy import Policy, image_of
from multiverse.core.rows import Rows
from multiverse.core.transition import Command, EffectKind
from multiverse.service.convert import tables
from multiverse.service.hosts import avoided_for

# --- definitions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something that can be wrong."""

    kind: AlertKind
    severity: Severity
    concerns: str  # the alert's name: a record, a host or a user
    message: str
    remedy: str
    repair: str = ""
    needs_fenced: bool = False

    def __call__(self, *, version: int = 0, jobs: Sequence[str] = (), **figures: Any) -> Alert:
        """The alert that this is so. Times are in seconds, memory and disk in MiB."""
        values = {**figures, "jobs": list(jobs)}
        words = (self.concerns, self.message, self.remedy, self.repair)
        name, message, remedy, repair = (worded(one, values) for one in words)
        fenced, found = self.needs_fenced, tuple(jobs)
        return Alert(self.kind, name, message, remedy, repair, fenced, version, found, self.severity)

    def of(self, row: Row, **more: Any) -> Alert:
        return self(version=row.version, name=_name_of(row.key), **more)


STORE = Wrong(
    "store", "critical", "store",
    "nothing could be committed for {seconds:span}: {reason}",
    "make room in the state directory; until then only what has ended is released; the controller goes on by itself",
)  # fmt: skip
SCHEDULER = Wrong(
    "source", "critical", "{source}",
    "the scheduler has not answered for {seconds:span}: {reason}",
    "check slurmctld: scontrol ping; until it answers, no job is started and none is given up",
)  # fmt: skip
SOURCE = Wrong(
    "source", "critical", "{source}",
    "source {source} has not answered for {seconds:span}: {reason}",
    "of a host: start its agent there (systemctl start multiverse-agent); see the daemon's log, too; until it answers, "
    "none of its VMs is created, changed or given up",
)  # fmt: skip
HINTS = Wrong(
    "hints", "warning", "hints",
    "jobs have come without hints for {seconds:span}: a new job is noticed up to {poll:g} s late",
    "where slurmctld runs now (see scontrol ping), install job_submit.lua and multiverse.lua, share the directory "
    "{inbox} with that machine under the same name, and let SlurmUser write to it",
)  # fmt: skip
EMPTY_HOST_AWAY = Wrong(
    "host", "warning", "{host}",
    "host {host} is out of reach; it has no VMs, but jobs that only this host could hold wait for it",
    "bring the host back; if it is switched off for good, confirm that: multiverse repair {host} --fenced",
    "forgets {host} until it is seen again; jobs that no other host can hold are then refused",
    needs_fenced=True,
)  # fmt: skip
HOST_AWAY = Wrong(
    "host", "critical", "{host}",
    "host {host} is out of reach, with its VMs ({vms:four})[; affected: job {jobs:list}]",
    "bring the host back, or start its agent: jobs whose VMs still run then go on; if it is switched off for certain, "
    "confirm that: multiverse repair {host} --fenced",
    "relies on your word that {host} is switched off: its VMs ({vms:four}) then count as ended, and their jobs may "
    "run again",
    needs_fenced=True,
)  # fmt: skip
AVOIDED = Wrong(
    "avoided", "warning", "{name}",
    "VMs of {images:list} do not come up on host {host}[, {times} times in a row]: {reason}",
    "see what is wrong there, in the log of its agent or with the image; other hosts are used meanwhile; one job at a "
    "time is tried there again {left:or now}",
    "lets a job be tried there now",
)  # fmt: skip
FENCED = Wrong(
    "fenced", "notice", "fenced",
    "VMs of fenced hosts are not yet removed: {vms:four}",
    "keep their hosts switched off; if one comes back, what is left of its VMs is ended",
)  # fmt: skip
SHORT_OF_DISK = Wrong(
    "disk", "warning", "disk-{host}",
    "host {host} is short of disk[: {available} MiB are available], {floor} MiB are to be kept",
    "make room on the file system of qemu.vms, or lower host.disk_floor; until then no VM starts there",
)  # fmt: skip
FULL_DISK = Wrong(
    "disk", "critical", "disk-{host}",
    "the disk of host {host} is full[: {available} MiB are available]; paused until it has room: {vms:four}"
    "[ (affected: job {jobs:four})]",
    "make room on the file system of qemu.vms, or cancel jobs that write much: scancel; the VMs then go on by "
    "themselves; until then Slurm does not reach their nodes, and sets them DOWN after its SlurmdTimeout",
)  # fmt: skip
SHORT_OF_MEMORY = Wrong(
    "memory", "warning", "memory-{host}",
    "host {host} is short of memory: {available} MiB are available, {floor} MiB are to be kept",
    "see what else uses memory on the host, or lower host.overcommit; until jobs have ended, no VM starts there and "
    "spares are removed; if no memory is left, the kernel ends a VM and its job is queued again",
)  # fmt: skip
NO_IMAGE = Wrong(
    "image", "warning", "image-{image}",
    "no host[ in reach{away:if}] has image {image}; waiting for it: [job {jobs:four}][ and {both:if}][a pool{pool:if}]",
    "build the image: multiverse image build slim --name {image} (slim, stock, or a file that describes it); or cancel "
    "what asks for it",
)  # fmt: skip
QUARANTINED = Wrong(
    "quarantine", "warning", "{name}",
    "{label} is quarantined in state {state}: {reason}",
    "[see how that came about: multiverse timeline {first} --events][see the daemon's log{log:if}]; the controller "
    "leaves the record alone until its job has ended or it is repaired",
    "lets the controller judge the record anew and go on with it",
)  # fmt: skip
TEMPLATE_BROKEN = Wrong(
    "template", "warning", "{name}",
    "{label} is broken[, {times} times in a row]: {reason}",
    "build a better image: multiverse image build; when a job needs the template, it is built again {left:or at once}",
    "builds the template again now",
)  # fmt: skip
_BACK_OFF = (
    "see the reason: multiverse timeline {job} --events; the next attempt is in {left:span}",
    "lets the next attempt begin now",
)
BACK_OFF = Wrong(
    "back-off", "warning", "{name}", "job {job} could not be given its VMs[, {times} times in a row]", *_BACK_OFF,
)  # fmt: skip
SHORT_RUNS = Wrong(
    "back-off", "warning", "{name}",
    "the last {runs} runs of job {job} ended within seconds and were queued again", *_BACK_OFF,
)  # fmt: skip
UNKNOWN_USER = Wrong(
    "user", "warning", "user-{uid}",
    "the name service has not said for {seconds:span} who uid {uid} is: {reason}[; waiting for it: job {jobs:four}]",
    "see what answers: getent passwd UID; the jobs wait and are not given up; if the user does not exist any more, "
    "cancel the jobs: scancel",
)  # fmt: skip
PLACEMENT = Wrong(
    "placement", "warning", "placement-{policy}",
    "the placement policy {policy} was not followed: {reason}",
    "correct the package that registers it, and restart the daemon; until then worst-fit places its jobs' VMs",
)  # fmt: skip
SETTINGS_WRONG = Wrong(
    "settings", "warning", "settings",
    "the settings were not read again, because of mistakes: {reason}",
    "correct them (multiverse config check), and reload: systemctl reload multiverse; until then the earlier "
    "settings count",
)  # fmt: skip
SETTINGS_WAIT = Wrong(
    "settings", "warning", "settings-restart",
    "settings changed that need a restart: {keys:list}",
    "restart the controller, and the agents if they use these keys: systemctl restart multiverse; VMs and jobs stay "
    "as they are",
)  # fmt: skip
EFFECT = Wrong(
    "effect", "warning", "{name}",
    "{doing} failed {failures} times in a row: {reason}",
    "remove the cause; it is tried again in {left:span}",
)  # fmt: skip
DOING = {
    EffectKind.GATE: "putting {} back among the jobs that wait for VMs",
    EffectKind.PIN: "tying {} to its VMs, so that Slurm starts it there,",
    EffectKind.REQUEUE: "queuing {} again",
    EffectKind.REVOKE: "cancelling {}",
    EffectKind.HOLD: "holding {}",
    EffectKind.WARN: "telling {} to end",
    EffectKind.PREEMPT: "ending the run of {}",
    EffectKind.RESTORE: "putting {} back into its own partition",
    EffectKind.CREATE: "creating {}",
    EffectKind.START: "starting {}",
    EffectKind.OFFER: "making {}",
    EffectKind.WITHDRAW: "withdrawing {}",
    EffectKind.END: "ending {}",
    EffectKind.REMOVE: "removing {}",
    EffectKind.RELEASE: "ending {}",
    EffectKind.DELETE: "deleting the node of {}",
    EffectKind.SWEEP: "removing {}, which no record explains,",
    EffectKind.BUILD: "building {}",
    EffectKind.DROP: "removing {}",
    EffectKind.FENCE: "fencing {}",
    EffectKind.REQUEST: "submitting the pilot of {}",
    EffectKind.GIVE_BACK: "cancelling the pilot of {}",
    EffectKind.PREPARE: "keeping other jobs off the nodes of {}, which is to be saved,",
    EffectKind.FREEZE: "stopping the processes of {}, which is to be saved,",
    EffectKind.CUT: "having Slurm queue {} again, which is being saved,",
    EffectKind.SAVE: "writing the state of {}",
    EffectKind.CAPTURE: "writing a checkpoint of {}",
    EffectKind.COPY: "copying the state of {}",
    EffectKind.KEEP: "keeping the state of {} in memory",
    EffectKind.QUEUE: "having Slurm queue {} again",
    EffectKind.RESUME: "releasing {}, which was saved,",
    EffectKind.THAW: "letting {} go on from its state",
    EffectKind.UNDO: "letting {} go on, which was not saved,",
    EffectKind.DISCARD: "removing the state of {}",
    EffectKind.MOVE: "moving {}",
    EffectKind.SETTLE: "ending the move of {}",
    EffectKind.SLEEP: "freeing the memory of {}, whose job is suspended,",
    EffectKind.DELAY: "extending the time limit of the job of {}",
    EffectKind.WAKE: "letting {} go on, whose job was resumed,",
    EffectKind.CANCEL: "cancelling pilot {}, which no record explains,",
}
"""What each effect does to what it is of, in an operator's words."""
HELD_BACK = Wrong(
    "eviction", "warning", "{setting}-{name}",
    "[host {host} is not emptied][job {waiting} gets no room]: for {seconds:span} a limit has held back the eviction "
    "of [job {jobs:four}]: {limit}",
    "see what waits: multiverse rebalance --dry-run; it goes on by itself once the limit permits; if hosts, network "
    "and storage can bear more, raise rebalance.{setting}",
)  # fmt: skip
ORPHAN_IDLE = Wrong(
    "orphan", "notice", "{name}",
    "VM {vm} is on host {host}, and no record explains it",
    "nothing is to be done: it is removed once two observations have shown that no job is on it",
)  # fmt: skip
ORPHAN_BUSY = Wrong(
    "orphan", "warning", "{name}",
    "VM {vm} on host {host} runs job {job}, and no record explains it: the database was restored from a copy, or lost",
    "let the job end, and the VM is removed then; or end it now: multiverse repair {name}",
    "ends VM {vm} and with it job {job}, which Slurm queues again if it may be requeued",
)  # fmt: skip
ORPHAN = Wrong(
    "orphan", "notice", "{name}",
    "{name} has our site's name, but no record explains it",
    "nothing is to be done: it is removed once two observations have shown it",
)  # fmt: skip


# --- findings ---------------------------------------------------------------------------------------


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
    """Sources that fail. A source is its name, the seconds for which every observation has failed, and why (or "")."""
    return [
        (SCHEDULER if source == "scheduler" else SOURCE)(source=source, seconds=seconds, reason=reason)
        for source, seconds, reason in sources
        if reason
    ]


def unknown_user(failure: LookupFailure, rows: Rows, now: float) -> Alert:
    """A user whom the name service does not tell, and the jobs that wait for that."""
    owners = (row for _, row in sorted(rows.attempts.items()) if row.uid == failure.uid)
    jobs = tuple(dict.fromkeys(row.job.job_id for row in owners))
    return UNKNOWN_USER(jobs=jobs, uid=failure.uid, seconds=now - failure.since, reason=failure.reason)


def of_reload(mistakes: str, waiting: Sequence[str]) -> list[Alert]:
    """What became of settings that were read again: mistakes in the file, and keys that wait for a restart."""
    wrong = [SETTINGS_WRONG(reason=mistakes)] if mistakes else []
    return [*wrong, *([SETTINGS_WAIT(keys=list(waiting))] if waiting else [])]


def failing_effect(failure: Failure, rows: Rows, now: float) -> Alert:
    effect, left = failure.effect, failure.again_at - now
    name = f"host-{effect.text}" if effect.kind is EffectKind.FENCE else _name_of(effect.key)
    row = tables(rows)[effect.key.kind].get(effect.key.id)
    if isinstance(row, Attempt | Saved):
        subject = f"job {row.job.job_id}"
    else:
        subject = _label(rows, row) if row is not None else effect.text or str(effect.key)
    doing = DOING[effect.kind].format(subject)
    return EFFECT(name=name, doing=doing, failures=failure.times, reason=failure.reason, left=left)


def evictions_held_back(held: Iterable[Step], policy: Policy, now: float) -> Iterator[Alert]:
    """The evictions that a limit has held back for long, together if they are for the same reason."""
    groups: dict[tuple[Reason, str], list[Step]] = {}
    for step in held:
        if step.held is not None and now - step.held_since > policy.evict_alert:
            groups.setdefault((step.why, LIMITS[step.held.kind]), []).append(step)
    for (why, setting), steps in groups.items():
        host, waiting = next(iter(why.hosts), ""), next(iter(why.jobs), "")
        yield HELD_BACK(
            jobs=tuple(dict.fromkeys(step.attempt.job.job_id for step in steps)),
            setting=setting,
            name=host or waiting,
            host=host,
            waiting=waiting,
            seconds=now - steps[0].held_since,
            limit=steps[0].held,
        )


def _orphan_vms(rows: Rows) -> Iterator[Alert]:
    """The VMs that no record explained when they were found, each with the job that was seen on it."""
    for _, vm in sorted(rows.vms.items()):
        if vm.state is VmState.ORPHAN and not vm.quarantined:
            if vm.job_id:
                yield ORPHAN_BUSY.of(vm, jobs=(vm.job_id,), job=vm.job_id, vm=vm.name, host=vm.host)
            else:
                yield ORPHAN_IDLE.of(vm, vm=vm.name, host=vm.host)


def _hosts_away(rows: Rows, world: World, policy: Policy, now: float) -> Iterator[Alert]:
    """The known hosts that are out of reach; those without VMs come first."""
    losing = {vm.host for vm in rows.vms.values() if vm.state is VmState.LOST}
    for host in sorted(_out_of_reach(rows, world, policy, now) - losing):
        yield EMPTY_HOST_AWAY(host=host)
    for host in sorted(losing):
        lost = [vm for _, vm in sorted(rows.vms.items()) if vm.host == host and vm.state is VmState.LOST]
        version = max(vm.version for vm in lost)
        yield HOST_AWAY(version=version, jobs=_jobs_of(rows, lost), host=host, vms=[vm.name for vm in lost])


def _hosts_avoided(rows: Rows, now: float) -> Iterator[Alert]:
    """The hosts that are avoided at a Unix time, each with the image that failed there last, and the others."""
    for _, host in sorted(rows.hosts.items()):
        if host.is_member and (faults := avoided_for(host)):
            yield AVOIDED.of(
                host,
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
        yield FENCED(vms=vms)


def _hosts_short_of_memory(world: World) -> Iterator[Alert]:
    for _, host in sorted(world.hosts.items()):
        if short_of_memory(host):
            yield SHORT_OF_MEMORY(host=host.name, available=host.available, floor=host.overcommit.floor)


def _hosts_short_of_disk(rows: Rows, world: World) -> Iterator[Alert]:
    shown = [(vm, world.vm(vm)) for _, vm in sorted(rows.vms.items())]
    paused = [vm for vm, seen in shown if seen is not None and seen.condition is VmCondition.PAUSED]
    for _, host in sorted(world.hosts.items()):
        waiting = [vm for vm in paused if vm.host == host.name]
        available = None if host.available_disk is None else str(host.available_disk)
        if waiting:
            jobs, vms = _jobs_of(rows, waiting), [vm.name for vm in waiting]
            yield FULL_DISK(jobs=jobs, host=host.name, available=available, vms=vms)
        elif short_of_disk(host):
            yield SHORT_OF_DISK(host=host.name, available=available, floor=host.overcommit.disk_floor)


def _missing_images(rows: Rows, world: World, policy: Policy, now: float) -> Iterator[Alert]:
    """Images that jobs or pools want and no host in reach has. A job counts after the policy's patience, because a new
    image is seen at the next observation only."""
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
        yield NO_IMAGE(
            jobs=wanted[image], image=image, away=away, pool=image in pools, both=bool(wanted[image]) and image in pools
        )


def _quarantined_records(rows: Rows) -> Iterator[Alert]:
    for row in (row for table in tables(rows).values() for row in table.values() if row.quarantined):
        jobs = _affected_jobs(rows, row)
        yield QUARANTINED.of(
            row,
            jobs=jobs,
            label=_label(rows, row),
            state=str(row.state),
            reason=row.quarantined,
            first=jobs[0] if jobs else None,
            log=not jobs,
        )


def _broken_templates(rows: Rows, policy: Policy, now: float) -> Iterator[Alert]:
    for row in rows.templates.values():
        if row.state is TemplateState.BROKEN and not row.quarantined:
            left, label = row.since + policy.backoff(row.tries) - now, _template_label(row)
            yield TEMPLATE_BROKEN.of(row, left=left, times=_times(row.tries), reason=row.reason, label=label)


def _jobs_backing_off(rows: Rows, now: float) -> Iterator[Alert]:
    for row in rows.attempts.values():
        if row.state is AttemptState.QUEUED and row.not_before > now and not row.quarantined:
            job = row.job.job_id
            wrong, left = SHORT_RUNS if row.short_runs > 1 else BACK_OFF, row.not_before - now
            yield wrong.of(row, jobs=(job,), job=job, left=left, times=_times(row.tries), runs=row.short_runs)


def _times(failures: int) -> int | None:
    """How often in a row, which is said from the second time on."""
    return failures if failures > 1 else None


def _out_of_reach(rows: Rows, world: World, policy: Policy, now: float) -> frozenset[str]:
    """The hosts that no source shows. A source that has been unknown for a short time only says nothing about its
    hosts."""
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
    if isinstance(row, Attempt | Saved):
        return (row.job.job_id,)
    vm = rows.vms.get(row.id) if isinstance(row, (Vm, Offer)) else None
    return _jobs_of(rows, [vm]) if vm else ()


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
        case Saved():
            return f"the saved job {row.job.job_id}"


def _template_label(row: Template) -> str:
    return f"the template of {row.image} on {row.host}" + (f" for account {row.account}" if row.account else "")


# --- names and repairs -----------------------------------------------------------------------------


def _name_of(key: Key) -> str:
    """A record's name in alerts; `repair_command` reads it."""
    return f"{key.kind}-{key.id}"


def repair_command(alert: Alert) -> Command:
    if alert.kind == "host":
        return Command("fence", host=alert.name)
    kind, _, number = alert.name.partition("-")
    verb = "end" if alert.kind == "orphan" else "retry"
    return Command(verb, key=Key(kind, int(number)))  # type: ignore[arg-type]  # made by _name_of


_COMMAND = re.compile(r"\bmultiverse [a-z][^;,()]*")


def command_of(alert: Alert) -> str:
    """The command that an operator can copy: the alert's repair, or the command that its remedy names; or none."""
    if alert.repair:
        return f"multiverse repair {alert.name}" + " --fenced" * alert.needs_fenced
    named = _COMMAND.search(alert.remedy)
    return named[0].strip() if named else ""
