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
    HostAway,
    HostShortOfMemory,
    JobBackingOff,
    MissingImage,
    QuarantinedRecord,
    SourceFailure,
    StoreFailure,
)

_SHOWN_NAMES = 4
"""The most names that a sentence lists before it says how many more there are."""

_SOURCES = {
    "scheduler": "the scheduler does not answer",
    "hypervisor": "the host side does not answer",
}
_SOURCE_REMEDIES = {
    "scheduler": "no job is started or given up until it answers; see whether slurmctld is well: scontrol ping",
    "hypervisor": "no VM is made or given up until it answers; the daemon's log has more",
}


def alerts(found: Findings) -> list[Alert]:
    """All alerts. Those that stop the most come first."""
    return [
        *([_store(found.store)] if found.store else ()),
        *map(_source, found.sources),
        *map(_host, found.hosts_away),
        *([_fenced(found.fenced)] if found.fenced.vms else ()),
        *map(_memory, found.short_of_memory),
        *map(_image, found.missing_images),
        *map(_quarantined, found.quarantined),
        *map(_template, found.broken_templates),
        *map(_back_off, found.backing_off),
        *map(_effect, found.failing_effects),
        *map(_orphan, found.orphans),
        *found.permanent,
    ]


def _store(one: StoreFailure) -> Alert:
    return Alert(
        "store",
        "store",
        f"for {_span(one.seconds)} nothing could be written down: {one.reason}",
        "nothing is done that is not written down: make room in the state directory, the rest comes by itself",
    )


def _source(one: SourceFailure) -> Alert:
    message = f"{_SOURCES[one.source]}, for {_span(one.seconds)}: {one.reason}"
    return Alert("source", one.source, message, _SOURCE_REMEDIES[one.source])


def _host(one: HostAway) -> Alert:
    host = one.host
    if not one.vms:
        return Alert(
            "host",
            host,
            f"host {host} is out of reach; nothing runs there, but jobs that only it could hold wait for it",
            "bring it back; if it is off for good, say so with --fenced",
            f"forgets {host} until it is seen again: jobs that no other host can hold are then refused",
            needs_fenced=True,
        )
    names = _some(one.vms)
    waiting = f"; waiting for them: job {', '.join(one.jobs)}" if one.jobs else ""
    return Alert(
        "host",
        host,
        f"host {host} is out of reach, with {names}{waiting}",
        "bring it back: what is left there is then ended; if it is off for certain, say so with --fenced",
        f"takes your word that {host} is off: {names} will count as ended, and their jobs may run again",
        needs_fenced=True,
        version=one.version,
        jobs=one.jobs,
    )


def _fenced(one: FencedVms) -> Alert:
    return Alert(
        "fenced",
        "fenced",
        f"{_some(one.vms)}: fenced, and on the way out",
        "keep their host off; when it comes back, what is left of them there is ended",
    )


def _memory(one: HostShortOfMemory) -> Alert:
    return Alert(
        "memory",
        f"memory-{one.host}",
        f"{one.host} is short of memory: {one.available} MiB are available, {one.floor} are to be kept",
        "no VM starts there until jobs have ended, and those that nobody needs now give way; if it comes to "
        "nothing left, the kernel ends a VM, and its job is queued again: see what else takes memory there, or "
        "lower host.overcommit",
    )


def _image(one: MissingImage) -> Alert:
    waiting = [f"job {_some(one.jobs)}"] if one.jobs else []
    waiting += ["a pool"] if one.for_pool else []
    return Alert(
        "image",
        f"image-{one.image}",
        f"no host{' in reach' * one.hosts_away} has image {one.image}; waiting for it: {' and '.join(waiting)}",
        f"build it: multiverse image build slim --name {one.image}, or stock; or end what asks for it",
        jobs=one.jobs,
    )


def _quarantined(one: QuarantinedRecord) -> Alert:
    story = (
        f"multiverse timeline {one.jobs[0]} --events tells how it came to that"
        if one.jobs
        else "the daemon's log has more"
    )
    return Alert(
        "quarantine",
        one.name,
        f"{one.label} is quarantined, {one.state}: {one.reason}",
        f"it is left alone until its job has ended; {story}",
        "has the controller look at it afresh and go on with it",
        version=one.version,
        jobs=one.jobs,
    )


def _template(one: BrokenTemplate) -> Alert:
    again = f"in {_span(one.retry_in)} at the soonest" if one.retry_in > 0 else "at once"
    return Alert(
        "template",
        one.name,
        f"{one.label} is broken{_times(one.failures)}: {one.reason}",
        f"mend the image: multiverse image build; when a job needs it, it is tried again {again}",
        "builds it again now",
        version=one.version,
    )


def _back_off(one: JobBackingOff) -> Alert:
    return Alert(
        "back-off",
        one.name,
        f"job {one.job_id} could not be given its VMs{_times(one.failures)}",
        f"multiverse timeline {one.job_id} --events tells why; it is tried again in {_span(one.retry_in)}",
        "lets it be tried again now",
        version=one.version,
        jobs=(one.job_id,),
    )


def _effect(one: FailingEffect) -> Alert:
    return Alert(
        "effect",
        one.subject.replace(" ", "-"),
        f"{one.kind} of {one.subject} failed {one.failures} times in a row: {one.reason}",
        f"mend the cause; it is tried again in {_span(max(0.0, one.retry_in))}",
    )


def _orphan(name: str) -> Alert:
    return Alert(
        "stranger",
        name,
        f"{name} bears our site's name, and no record explains it",
        "it is removed when two looks have shown it so; nothing is to be done",
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
