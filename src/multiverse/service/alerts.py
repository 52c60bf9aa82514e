"""The wording of alerts for operators: what is wrong, what to do, and what `multiverse repair` would do.

An alert without a repair ends by itself, or when its cause is removed; its remedy says how. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from multiverse.api import Alert
from multiverse.service.findings import (
    BrokenTemplate,
    FailingEffect,
    FencedVms,
    Findings,
    HintsMissing,
    HostAvoided,
    HostAway,
    HostShortOfDisk,
    HostShortOfMemory,
    JobBackingOff,
    MissingImage,
    OrphanVm,
    PlacementFault,
    QuarantinedRecord,
    SourceFailure,
    StoreFailure,
    UnknownUser,
)

_SHOWN_NAMES = 4
"""The most names that a sentence lists before it says how many more there are."""

_SCHEDULER_REMEDY = "check slurmctld: scontrol ping; until it answers, no job is started and none is given up"
_SOURCE_REMEDY = "see the daemon's log; until it answers, none of its VMs is created, changed or given up"


def alerts(found: Findings) -> list[Alert]:
    """All alerts. Those that stop the most come first."""
    return [
        *([_store(found.store)] if found.store else ()),
        *map(_source, found.sources),
        *([_hints(found.hints)] if found.hints else ()),
        *map(_host, found.hosts_away),
        *map(_avoided, found.avoided),
        *([_fenced(found.fenced)] if found.fenced.vms else ()),
        *map(_disk, found.short_of_disk),
        *map(_memory, found.short_of_memory),
        *map(_image, found.missing_images),
        *map(_quarantined, found.quarantined),
        *map(_template, found.broken_templates),
        *map(_back_off, found.backing_off),
        *map(_user, found.unknown_users),
        *map(_placement, found.placement_faults),
        *map(_effect, found.failing_effects),
        *map(_orphan_vm, found.orphan_vms),
        *map(_orphan, found.orphans),
        *found.permanent,
    ]


def _store(one: StoreFailure) -> Alert:
    return Alert(
        "store",
        "store",
        f"nothing could be committed for {_span(one.seconds)}: {one.reason}",
        "make room in the state directory; until then only what has ended is released; the controller goes on by "
        "itself",
    )


def _source(one: SourceFailure) -> Alert:
    subject, remedy = f"source {one.source}", _SOURCE_REMEDY
    if one.source == "scheduler":
        subject, remedy = "the scheduler", _SCHEDULER_REMEDY
    return Alert("source", one.source, f"{subject} has not answered for {_span(one.seconds)}: {one.reason}", remedy)


def _hints(one: HintsMissing) -> Alert:
    return Alert(
        "hints",
        "hints",
        f"jobs have come without hints for {_span(one.seconds)}: a new job is noticed up to {one.poll:g} s late",
        "where slurmctld runs now (see scontrol ping), install job_submit.lua and multiverse.lua, share the directory "
        f"{one.inbox} with that machine under the same name, and let SlurmUser write to it",
    )


def _host(one: HostAway) -> Alert:
    host = one.host
    if not one.vms:
        return Alert(
            "host",
            host,
            f"host {host} is out of reach; it has no VMs, but jobs that only this host could hold wait for it",
            f"bring the host back; if it is switched off for good, confirm that: multiverse repair {host} --fenced",
            f"forgets {host} until it is seen again; jobs that no other host can hold are then refused",
            needs_fenced=True,
        )
    names = _some(one.vms)
    waiting = f"; affected: job {', '.join(one.jobs)}" if one.jobs else ""
    return Alert(
        "host",
        host,
        f"host {host} is out of reach, with its VMs ({names}){waiting}",
        "bring the host back, and what is left of these VMs is ended; if it is switched off for certain, confirm that: "
        f"multiverse repair {host} --fenced",
        f"relies on your word that {host} is switched off: its VMs ({names}) then count as ended, and their jobs may "
        "run again",
        needs_fenced=True,
        version=one.version,
        jobs=one.jobs,
    )


def _avoided(one: HostAvoided) -> Alert:
    again = f"in {_span(one.retry_in)} at the earliest" if one.retry_in > 0 else "now"
    return Alert(
        "avoided",
        one.name,
        f"VMs of {one.image} do not come up on host {one.host}{_times(one.failures)}: {one.reason}",
        "see what is wrong there, in the log of its agent or with the image; other hosts are used meanwhile; one job "
        f"at a time is tried there again {again}",
        "lets a job be tried there now",
        version=one.version,
    )


def _fenced(one: FencedVms) -> Alert:
    return Alert(
        "fenced",
        "fenced",
        f"VMs of fenced hosts are not yet removed: {_some(one.vms)}",
        "keep their hosts switched off; if one comes back, what is left of its VMs is ended",
    )


def _disk(one: HostShortOfDisk) -> Alert:
    free = "" if one.available is None else f": {one.available} MiB are available"
    if not one.paused:
        return Alert(
            "disk",
            f"disk-{one.host}",
            f"host {one.host} is short of disk{free}, {one.floor} MiB are to be kept",
            "make room on the file system of qemu.vms, or lower host.disk_floor; until then no VM starts there",
        )
    affected = f" (affected: job {_some(one.jobs)})" if one.jobs else ""
    return Alert(
        "disk",
        f"disk-{one.host}",
        f"the disk of host {one.host} is full{free}; paused until it has room: {_some(one.paused)}{affected}",
        "make room on the file system of qemu.vms, or cancel jobs that write much: scancel; the VMs then go on by "
        "themselves; until then Slurm does not reach their nodes, and sets them DOWN after its SlurmdTimeout",
        jobs=one.jobs,
    )


def _memory(one: HostShortOfMemory) -> Alert:
    return Alert(
        "memory",
        f"memory-{one.host}",
        f"host {one.host} is short of memory: {one.available} MiB are available, {one.floor} MiB are to be kept",
        "see what else uses memory on the host, or lower host.overcommit; until jobs have ended, no VM starts there "
        "and spares are removed; if no memory is left, the kernel ends a VM and its job is queued again",
    )


def _image(one: MissingImage) -> Alert:
    waiting = [f"job {_some(one.jobs)}"] if one.jobs else []
    waiting += ["a pool"] if one.for_pool else []
    return Alert(
        "image",
        f"image-{one.image}",
        f"no host{' in reach' * one.hosts_away} has image {one.image}; waiting for it: {' and '.join(waiting)}",
        f"build the image: multiverse image build slim --name {one.image} (or stock); or cancel what asks for it",
        jobs=one.jobs,
    )


def _quarantined(one: QuarantinedRecord) -> Alert:
    history = (
        f"see how that came about: multiverse timeline {one.jobs[0]} --events" if one.jobs else "see the daemon's log"
    )
    return Alert(
        "quarantine",
        one.name,
        f"{one.label} is quarantined in state {one.state}: {one.reason}",
        f"{history}; the controller leaves the record alone until its job has ended or it is repaired",
        "lets the controller judge the record anew and go on with it",
        version=one.version,
        jobs=one.jobs,
    )


def _template(one: BrokenTemplate) -> Alert:
    again = f"in {_span(one.retry_in)} at the earliest" if one.retry_in > 0 else "at once"
    return Alert(
        "template",
        one.name,
        f"{one.label} is broken{_times(one.failures)}: {one.reason}",
        f"build a better image: multiverse image build; when a job needs the template, it is built again {again}",
        "builds the template again now",
        version=one.version,
    )


def _placement(one: PlacementFault) -> Alert:
    return Alert(
        "placement",
        f"placement-{one.policy}",
        f"the placement policy {one.policy} was not followed: {one.reason}",
        "correct the package that registers it, and restart the daemon; until then worst-fit places its jobs' VMs",
    )


def _back_off(one: JobBackingOff) -> Alert:
    what = f"job {one.job_id} could not be given its VMs{_times(one.failures)}"
    if one.short_runs > 1:
        what = f"the last {one.short_runs} runs of job {one.job_id} ended within seconds and were queued again"
    return Alert(
        "back-off",
        one.name,
        what,
        f"see the reason: multiverse timeline {one.job_id} --events; the next attempt is in {_span(one.retry_in)}",
        "lets the next attempt begin now",
        version=one.version,
        jobs=(one.job_id,),
    )


def _user(one: UnknownUser) -> Alert:
    waiting = f"; waiting for it: job {_some(one.jobs)}" if one.jobs else ""
    return Alert(
        "user",
        f"user-{one.uid}",
        f"the name service has not said for {_span(one.seconds)} who uid {one.uid} is: {one.reason}{waiting}",
        "see what answers: getent passwd UID; the jobs wait and are not given up; if the user does not exist any more, "
        "cancel the jobs: scancel",
        jobs=one.jobs,
    )


def _effect(one: FailingEffect) -> Alert:
    return Alert(
        "effect",
        one.subject.replace(" ", "-"),
        f"{one.kind} of {one.subject} failed {one.failures} times in a row: {one.reason}",
        f"remove the cause; the next attempt is in {_span(max(0.0, one.retry_in))}",
    )


def _orphan(name: str) -> Alert:
    return Alert(
        "stranger",
        name,
        f"{name} has our site's name, but no record explains it",
        "nothing is to be done: it is removed once two observations have shown it",
    )


def _orphan_vm(one: OrphanVm) -> Alert:
    if not one.job_id:
        return Alert(
            "stranger",
            one.name,
            f"VM {one.vm} is on host {one.host}, and no record explains it",
            "nothing is to be done: it is removed once two observations have shown that no job is on it",
            version=one.version,
        )
    return Alert(
        "stranger",
        one.name,
        f"VM {one.vm} on host {one.host} runs job {one.job_id}, and no record explains it: the database was restored "
        "from a copy, or lost",
        f"let the job end, and the VM is removed then; or end it now: multiverse repair {one.name}",
        f"ends VM {one.vm} and with it job {one.job_id}, which Slurm queues again if it may be requeued",
        version=one.version,
        jobs=(one.job_id,),
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    more = len(names) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _times(failures: int) -> str:
    return f", {failures} times in a row" if failures > 1 else ""


def _span(seconds: float) -> str:
    """Whole seconds, minutes or hours: the figure is as old as the last observation, so more digits would mislead."""
    if seconds < 120:
        return f"{max(0, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 7200 else f"{round(seconds / 3600)} h"
