"""What is wrong, in words for an operator: made from rows, what the observers know, and the effects that fail.

A trouble's `name` is what `multiverse repair` takes. One that no repair is for ends by itself, or when its
cause is mended; `todo` says how. Pure; times in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from multiverse.core.model import Attempt, AttemptState, Host, Key, Row, Template, TemplateState, Vm, VmState
from multiverse.core.policy import Policy, image_of
from multiverse.core.provisioning.sizes import short_of_memory
from multiverse.core.state import Rows
from multiverse.core.transition import Command

OFTEN = 3
"""Failures in a row from which on a repeated effect is worth an operator's while."""

_SOURCES = {
    "scheduler": "the scheduler does not answer",
    "hypervisor": "the host side does not answer",
}
_SOURCES_TODO = {
    "scheduler": "no job is started or given up until it answers; see whether slurmctld is well: scontrol ping",
    "hypervisor": "no VM is made or given up until it answers; the daemon's log has more",
}


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A source that is unknown, for how long, and what its last look said."""

    source: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Failing:
    """An effect that failed `times` in a row; it is tried again in `again` seconds."""

    kind: str
    subject: str
    times: int
    why: str
    again: float


@dataclass(frozen=True, slots=True)
class Situation:
    """All that troubles are read from. `uncommitted` is (for how long, why) while passes are not kept; `standing` are
    those that were there from the start."""

    rows: Rows
    now: float
    unanswered: Sequence[Unanswered] = ()
    failing: Sequence[Failing] = ()
    strangers: Sequence[str] = ()
    uncommitted: tuple[float, str] | None = None
    hosts: Sequence[Host] | None = None  # in reach; None while that is unknown
    standing: Sequence[Trouble] = ()


@dataclass(frozen=True, slots=True)
class Trouble:
    """`wrong` is what is the matter, `todo` what an operator can do, `repair` what `multiverse repair NAME` would do
    (empty: nothing). `version` rises when its record has moved: what is wrong after a repair is wrong anew."""

    kind: Literal[
        "source",
        "store",
        "memory",
        "image",
        "quarantine",
        "back-off",
        "template",
        "host",
        "fenced",
        "effect",
        "stranger",
        "unserved",
    ]
    name: str
    wrong: str
    todo: str
    repair: str = ""
    needs_fenced: bool = False
    version: int = 0
    jobs: tuple[str, ...] = field(default=())


def troubles(s: Situation, policy: Policy) -> list[Trouble]:
    """Everything that is wrong, what stops most first."""
    return [
        *_store(s),
        *_sources(s),
        *_hosts(s),
        *_short_hosts(s, policy),
        *_images(s, policy),
        *_quarantined(s),
        *_templates(s, policy),
        *_back_offs(s),
        *_effects(s),
        *_strangers(s),
        *s.standing,
    ]


def name_of(key: Key) -> str:
    return f"{key.kind}-{key.id}"


def command_for(trouble: Trouble) -> Command:
    """What the controller is asked for when this is to be repaired."""
    if trouble.kind == "host":
        return Command("fence", host=trouble.name)
    kind, _, number = trouble.name.partition("-")
    return Command("retry", key=Key(kind, int(number)))  # type: ignore[arg-type]  # made by name_of


def _store(s: Situation) -> Iterator[Trouble]:
    if s.uncommitted is not None:
        seconds, why = s.uncommitted
        yield Trouble(
            "store",
            "store",
            f"for {_span(seconds)} nothing could be written down: {why}",
            "nothing is done that is not written down: make room in the state directory, the rest comes by itself",
        )


def _sources(s: Situation) -> Iterator[Trouble]:
    for one in s.unanswered:
        wrong = f"{_SOURCES[one.source]}, for {_span(one.seconds)}: {one.why}"
        yield Trouble("source", one.source, wrong, _SOURCES_TODO[one.source])


def _out_of_reach(s: Situation) -> frozenset[str]:
    """The hosts that are known and not in sight; none while what is in sight is unknown."""
    return s.rows.hosts - {host.name for host in s.hosts} if s.hosts is not None else frozenset()


def _hosts(s: Situation) -> Iterator[Trouble]:
    losing = {vm.host for vm in s.rows.vms.values() if vm.state is VmState.LOST}
    for host in sorted(_out_of_reach(s) - losing):
        yield Trouble(
            "host",
            host,
            f"host {host} is out of reach; nothing runs there, but jobs that only it could hold wait for it",
            "bring it back; if it is off for good, say so with --fenced",
            f"forgets {host} until it is seen again: jobs that no other host can hold are then refused",
            needs_fenced=True,
        )
    for host in sorted(losing):
        lost = [vm for _, vm in sorted(s.rows.vms.items()) if vm.host == host and vm.state is VmState.LOST]
        jobs = _jobs_of(s.rows, lost)
        waiting = f"; waiting for them: job {', '.join(jobs)}" if jobs else ""
        yield Trouble(
            "host",
            host,
            f"host {host} is out of reach, with {_names(lost)}{waiting}",
            "bring it back: what is left there is then ended; if it is off for certain, say so with --fenced",
            f"takes your word that {host} is off: {_names(lost)} will count as ended, and their jobs may run again",
            needs_fenced=True,
            version=max(vm.version for vm in lost),
            jobs=jobs,
        )
    fenced = [vm for _, vm in sorted(s.rows.vms.items()) if vm.fenced]
    if fenced:
        yield Trouble(
            "fenced",
            "fenced",
            f"{_names(fenced)}: fenced, and on the way out",
            "keep their host off; when it comes back, what is left of them there is ended",
        )


def _short_hosts(s: Situation, policy: Policy) -> Iterator[Trouble]:
    for host in s.hosts or ():
        if short_of_memory(host, policy):
            yield Trouble(
                "memory",
                f"memory-{host.name}",
                f"{host.name} is short of memory: {host.available} MiB are available, {policy.floor} are to be kept",
                "no VM starts there until jobs have ended, and those that nobody needs now give way; if it comes to "
                "nothing left, the kernel ends a VM, and its job is queued again: see what else takes memory there, or "
                "lower host.overcommit",
            )


def _images(s: Situation, policy: Policy) -> Iterator[Trouble]:
    """Images that jobs or pools want, and no host in reach has. One that came a moment ago is in the next look."""
    if not s.hosts:
        return
    there = {image for host in s.hosts for image in host.images}
    away = _out_of_reach(s)
    wanted: dict[str, list[str]] = {pool.image: [] for pool in policy.pools}
    for _, row in sorted(s.rows.attempts.items()):
        if row.state is AttemptState.QUEUED and s.now - row.since >= policy.patience:
            wanted.setdefault(image_of(row, policy), []).append(row.job.job_id)
    for image in sorted(wanted.keys() - there):
        jobs = tuple(wanted[image])
        who = [f"job {_some(jobs)}"] if jobs else []
        who += ["a pool"] if any(pool.image == image for pool in policy.pools) else []
        yield Trouble(
            "image",
            f"image-{image}",
            f"no host{' in reach' * bool(away)} has image {image}; waiting for it: {' and '.join(who)}",
            f"build it: multiverse image build slim --name {image}, or stock; or end what asks for it",
            jobs=jobs,
        )


def _jobs_of(rows: Rows, vms: Sequence[Vm]) -> tuple[str, ...]:
    owners = [rows.attempts.get(vm.attempt) for vm in vms if vm.attempt is not None]
    return tuple(dict.fromkeys(attempt.job.job_id for attempt in owners if attempt is not None))


def _quarantined(s: Situation) -> Iterator[Trouble]:
    tables: tuple[Iterator[Row], ...] = (
        iter(s.rows.attempts.values()),
        iter(s.rows.vms.values()),
        iter(s.rows.templates.values()),
    )
    for row in (row for table in tables for row in table if row.quarantined):
        jobs = _about(s.rows, row)
        story = (
            f"multiverse timeline {jobs[0]} --events tells how it came to that" if jobs else "the daemon's log has more"
        )
        yield Trouble(
            "quarantine",
            name_of(row.key),
            f"{_called(s.rows, row)} is quarantined, {row.state}: {row.quarantined}",
            f"it is left alone until its job has ended; {story}",
            "has the controller look at it afresh and go on with it",
            version=row.version,
            jobs=jobs,
        )


def _templates(s: Situation, policy: Policy) -> Iterator[Trouble]:
    for row in s.rows.templates.values():
        if row.state is TemplateState.BROKEN and not row.quarantined:
            left = row.since + policy.backoff(row.tries) - s.now
            again = f"in {_span(left)} at the soonest" if left > 0 else "at once"
            yield Trouble(
                "template",
                name_of(row.key),
                f"{_of_template(row)} is broken{_times(row.tries)}: {row.reason}",
                f"mend the image: multiverse image build; when a job needs it, it is tried again {again}",
                "builds it again now",
                version=row.version,
            )


def _back_offs(s: Situation) -> Iterator[Trouble]:
    for row in s.rows.attempts.values():
        if row.state is AttemptState.QUEUED and row.not_before > s.now and not row.quarantined:
            yield Trouble(
                "back-off",
                name_of(row.key),
                f"job {row.job.job_id} could not be given its VMs{_times(row.tries)}",
                f"multiverse timeline {row.job.job_id} --events tells why; it is tried again in "
                f"{_span(row.not_before - s.now)}",
                "lets it be tried again now",
                version=row.version,
                jobs=(row.job.job_id,),
            )


def _effects(s: Situation) -> Iterator[Trouble]:
    for one in s.failing:
        yield Trouble(
            "effect",
            one.subject.replace(" ", "-"),
            f"{one.kind} of {one.subject} failed {one.times} times in a row: {one.why}",
            f"mend the cause; it is tried again in {_span(max(0.0, one.again))}",
        )


def _strangers(s: Situation) -> Iterator[Trouble]:
    for name in s.strangers:
        yield Trouble(
            "stranger",
            name,
            f"{name} bears our site's name, and no record explains it",
            "it is removed when two looks have shown it so; nothing is to be done",
        )


def _about(rows: Rows, row: Row) -> tuple[str, ...]:
    if isinstance(row, Attempt):
        return (row.job.job_id,)
    return _jobs_of(rows, [row]) if isinstance(row, Vm) else ()


def _called(rows: Rows, row: Row) -> str:
    match row:
        case Attempt():
            return f"the attempt of job {row.job.job_id}"
        case Vm():
            return f"VM {row.name}" + "".join(f" of job {job}" for job in _jobs_of(rows, [row]))
        case Template():
            return _of_template(row)


def _of_template(row: Template) -> str:
    return f"the template of {row.image} on {row.host}" + (f" for account {row.account}" if row.account else "")


def _names(vms: Sequence[Vm]) -> str:
    return _some([vm.name for vm in vms])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _times(tries: int) -> str:
    return f", {tries} times in a row" if tries > 1 else ""


def _span(seconds: float) -> str:
    """Whole seconds, minutes or hours: no more is known than the last look."""
    if seconds < 120:
        return f"{max(0, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 7200 else f"{round(seconds / 3600)} h"
