"""From rows and observations to the types of the API, and to the findings that alerts are made of.

The only module of the service that reads fields of rows, claims, observed objects, pools and observers. Pure; `now` is
the present monotonic time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from multiverse.api import JobUsageView, JobView, PoolView, SizeView, SourceView, TemplateView, TimelineView, VmView
from multiverse.controller.observers import Observer
from multiverse.core.model import (
    ENDING_STATES,
    PINNED_STATES,
    WAITING_STATES,
    Attempt,
    AttemptState,
    Depth,
    Drain,
    Reason,
    Row,
    Size,
    Vm,
    VmCondition,
    VmSeen,
    Why,
    World,
    text_of,
)
from multiverse.core.model.identity import without_prefix_length
from multiverse.core.model.usage import JobUsage
from multiverse.core.policy import Policy, image_of
from multiverse.core.pools import PoolStatus
from multiverse.core.queue import reason_of
from multiverse.core.rows import Rows
from multiverse.core.transition import Command
from multiverse.service.identity import KnownVm
from multiverse.service.timeline import Tell, timeline
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
    return {kind: Counter(str(row.state) for row in table.values()) for kind, table in tables(rows).items()}


def tables(rows: Rows) -> Mapping[str, Mapping[int, Row]]:
    """The live rows, by kind."""
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
    waiting: Mapping[int, Reason],
    now: float,
    policy: Policy,
    usages: Mapping[int, JobUsage] = MappingProxyType({}),
) -> list[JobView]:
    """One view for each attempt, in their order. `vms` are all VMs of these attempts; `waiting` is why attempts wait,
    see `waiting_reasons`; `usages` is what they used, as far as it is known."""
    names = vm_names(vms)
    views = [
        _job_view(attempt, names.get(attempt.id, ()), text_of(waiting.get(attempt.id)), now, policy)
        for attempt in attempts
    ]
    return [replace(view, usage=_job_usage(usages.get(view.attempt))) for view in views]


def _job_usage(usage: JobUsage | None) -> JobUsageView | None:
    if usage is None or not usage.text or usage.seconds is None:
        return None
    figures = (usage.seconds, usage.cpus_used, usage.efficiency, usage.peak)
    return JobUsageView(*figures, usage.suggestion, usage.text)


_SCHEDULER = "scheduler"
"""By this word those are counted that wait for no reason of ours: for a hold or a dependency in the scheduler."""


def waiting_reasons(
    attempts: Sequence[Attempt], world: World, reasons: Mapping[int, Reason], now: float
) -> dict[int, Reason]:
    """Why each of these attempts waits, as far as that is known: `reasons` is what `State.reasons` says of the first in
    the queue. Where that says nothing, it is why the attempt before did not come to its end."""
    jobs = world.scheduler.value.jobs if world.scheduler else {}
    waiting = (one for one in attempts if one.state in WAITING_STATES)
    found = ((one.id, reason_of(one, jobs.get(one.job.job_id), reasons, now) or one.note) for one in waiting)
    return {attempt_id: why for attempt_id, why in found if why}


def counted(attempts: Sequence[Attempt], reasons: Mapping[int, Reason]) -> Counter[str]:
    """How many of these attempts wait for which kind of reason; each word is there, also with none."""
    found = Counter(dict.fromkeys((*(kind.counted for kind in Why), _SCHEDULER), 0))
    waiting = (one for one in attempts if one.state in WAITING_STATES)
    found.update(reasons[one.id].kind.counted if one.id in reasons else _SCHEDULER for one in waiting)
    return found


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
        reason=text_of(attempt.reason),
        restarts=attempt.job.restarts,
        vms=tuple(vms),
        quarantined=text_of(attempt.quarantined),
        origin=attempt.origin,
    )


def timeline_view(
    attempt: Attempt, entries: Sequence[Entry], now: float, waiting: Reason | None = None, tell: Tell = text_of
) -> TimelineView:
    """The timeline of one attempt. `entries` are those of the attempt and of its VMs, in order; `waiting` is why it
    waits; `tell` words reasons."""
    return replace(
        timeline(attempt.job.job_id, attempt.id, str(attempt.state), entries, now, tell), waiting=tell(waiting)
    )


def vm_views(rows: Rows, world: World, exact: Mapping[str, tuple[float, float, float]], now: float) -> list[VmView]:
    """All live VMs with the figures of the last observation; for a VM in `exact`, with its CPU seconds, unique MiB and
    proportional MiB instead."""
    views = []
    for vm in rows.vms.values():
        attempt = rows.attempt_of(vm)
        last = world.vm(vm) or VmSeen(vm.name, vm.host, VmCondition.CREATING)
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
                reason=text_of(vm.reason),
                quarantined=text_of(vm.quarantined),
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
            reason=text_of(row.reason),
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


# --- commands -------------------------------------------------------------------------------------


def template_command(verb: str, image: str, host: str, size: tuple[int, int] | None, account: str | None) -> Command:
    """The command to the controller that builds or drops (`verb`) templates. `size` is CPUs and MiB."""
    return Command(verb, host, image, size=Size(*size) if size else None, account=account)


def host_command(verb: str, host: str, reason: str, begins: float) -> Command:
    """The command to the controller that adds, drains, resumes or removes (`verb`) a host."""
    return Command(verb, host=host, drain=Drain(begins, reason) if verb == "drain" else None)
