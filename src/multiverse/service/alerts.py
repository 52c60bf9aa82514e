"""Alerts for operators, each defined once: what it concerns, what is wrong, what to do, and what `multiverse repair`
would do.

An alert without a repair ends by itself, or when its cause is removed; its remedy says how. The words are written as
those of reasons (`core.model.reason`). Pure; `service.findings` finds what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiverse.api import Alert
from multiverse.api.status import AlertKind, Severity
from multiverse.core.model.reason import worded


@dataclass(frozen=True, slots=True)
class Wrong:
    """Something that can be wrong. `concerns` is the alert's name: of the record, host or user that it is about."""

    kind: AlertKind
    severity: Severity
    concerns: str
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
    "see the daemon's log; until it answers, none of its VMs is created, changed or given up",
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
    "bring the host back, and what is left of these VMs is ended; if it is switched off for certain, confirm that: "
    "multiverse repair {host} --fenced",
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
    "build the image: multiverse image build slim --name {image} (or stock); or cancel what asks for it",
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
EFFECT = Wrong(
    "effect", "warning", "{name}",
    "{effect} of {subject} failed {failures} times in a row: {reason}",
    "remove the cause; the next attempt is in {left:span}",
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
STRANGER = Wrong(
    "orphan", "notice", "{name}",
    "{name} has our site's name, but no record explains it",
    "nothing is to be done: it is removed once two observations have shown it",
)  # fmt: skip
