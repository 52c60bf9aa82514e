"""From rows, observations, the journal and reports of guests to the types of the API. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from multiverse import api
from multiverse.controller.observers import Observer
from multiverse.core.model.basics import Depth, Size
from multiverse.core.model.identity import without_prefix_length
from multiverse.core.model.job import ENDING_STATES, PINNED_STATES, WAITING_STATES, Attempt, AttemptState, Job
from multiverse.core.model.reason import Reason, Why, text_of
from multiverse.core.model.usage import JobUsage
from multiverse.core.model.vm import Vm, VmCondition, VmSeen
from multiverse.core.model.world import Row, World
from multiverse.core.policy import Policy, image_of
from multiverse.core.pools import PoolStatus
from multiverse.core.queue import reason_of
from multiverse.core.rows import Rows
from multiverse.core.transition import Event
from multiverse.images.catalog import Image
from multiverse.service.statistics import PHASES
from multiverse.store import Entry

Tell = Callable[[Reason | None], str]  # words a reason, as far as whoever asks may be told of it

# --- jobs -------------------------------------------------------------------------------------------------

UNKNOWN_ORDER = 1 << 52
"""The place of a job that the scheduler does not show: behind all others. JavaScript can represent it."""

_SCHEDULER = "scheduler"  # counts jobs that wait for no reason of ours: for a hold or a dependency in the scheduler

_STAGE_OF_A_JOB = {
    **dict.fromkeys(WAITING_STATES, "waiting"),
    AttemptState.CLAIMED: "provisioning",
    AttemptState.SPAWNING: "provisioning",
    **dict.fromkeys(PINNED_STATES, "provisioning"),
    AttemptState.ALLOCATED: "running",
    **dict.fromkeys(ENDING_STATES, "ending"),
}


def stage_counts(attempts: Iterable[Attempt]) -> dict[str, int]:
    """The number of these live attempts in each stage that a user knows."""
    found = Counter(_STAGE_OF_A_JOB[one.state] for one in attempts)
    return {stage: found[stage] for stage in api.STAGES}


class ShownJob(NamedTuple):
    """What is shown of a job beside its attempt."""

    waiting: str  # why it waits
    order: int
    user: str  # its name, or uid
    vms: tuple[str, ...]
    evicted: bool = False  # its last eviction goes on


def job_facts(
    attempts: Iterable[Attempt],
    vms: Iterable[Vm],
    waiting: Mapping[int, Reason],
    jobs: Mapping[str, Job],
    user_name: Callable[[int], str],
    evicted: Collection[int] = (),
) -> Iterator[tuple[Attempt, ShownJob]]:
    """The facts for each attempt, from all their VMs, why they wait, the jobs that the scheduler shows, and the
    attempts whose jobs are being evicted."""
    names: defaultdict[int | None, list[str]] = defaultdict(list)
    for vm in vms:
        names[vm.attempt].append(vm.name)
    for one in attempts:
        job = jobs.get(one.job.job_id)
        order = job.rank if job else UNKNOWN_ORDER
        why, owner, of_job = text_of(waiting.get(one.id)), user_name(one.uid), tuple(names.get(one.id, ()))
        yield one, ShownJob(why, order, owner, of_job, one.id in evicted)


def job_view(
    attempt: Attempt, facts: ShownJob, policy: Policy, epoch: float, usage: JobUsage | None = None
) -> api.JobView:
    """`epoch` is the Unix time of the monotonic clock's 0, here and below; `usage` is what the job used, if known."""
    request, used = attempt.request, None
    if usage is not None and usage.text and usage.seconds is not None:
        figures = (usage.seconds, usage.cpus_used, usage.efficiency, usage.peak)
        used = api.JobUsageView(*figures, usage.suggestion, usage.text)
    return api.JobView(
        job_id=attempt.job.job_id,
        name=attempt.job_name,
        uid=attempt.uid,
        user=facts.user,
        attempt=attempt.id,
        state=str(attempt.state),
        stage=_STAGE_OF_A_JOB.get(attempt.state, ""),
        nodes=request.nodes,
        cpus=request.size.cpus,
        memory=request.size.memory,
        image=image_of(attempt, policy),
        kind=str(request.kind or policy.kind),
        since=round(epoch + attempt.since, 1),
        order=facts.order,
        waiting=facts.waiting,
        reason=text_of(attempt.reason),
        restarts=attempt.job.restarts,
        vms=facts.vms,
        quarantined=text_of(attempt.quarantined),
        usage=used,
        origin=attempt.origin,
        evictions=job_evictions(attempt, facts.evicted),
    )


def job_evictions(
    attempt: Attempt, under_way: bool, tell: Tell = text_of, *, hosts: bool = True
) -> tuple[api.JobEvictionView, ...]:
    """The evictions of its job. `under_way`: the last one goes on; `hosts`: they may be named."""
    last = len(attempt.evictions) - 1
    return tuple(
        api.JobEvictionView(
            at=round(one.at, 1),
            way=one.way,
            host=one.host if hosts else "",
            reason=tell(one.why),
            memory=one.memory,
            took=one.took if one.took is None else round(one.took, 1),
            under_way=under_way and number == last,
        )
        for number, one in enumerate(attempt.evictions)
    )


def waiting_reasons(
    attempts: Iterable[Attempt], world: World, reasons: Mapping[int, Reason], now: float
) -> dict[int, Reason]:
    """Why each of these attempts waits, as far as known: by `State.reasons`, which has the first in the queue, or else
    why the attempt before failed. `now` is the monotonic time."""
    jobs = world.scheduler.value.jobs if world.scheduler else {}
    waiting = (one for one in attempts if one.state in WAITING_STATES)
    found = ((one.id, reason_of(one, jobs.get(one.job.job_id), reasons, now) or one.note) for one in waiting)
    return {attempt_id: why for attempt_id, why in found if why}


def counted(attempts: Iterable[Attempt], reasons: Mapping[int, Reason]) -> Counter[str]:
    """How many of these attempts wait for which kind of reason; each word is there, also with none."""
    found = Counter(dict.fromkeys((*(kind.counted for kind in Why), _SCHEDULER), 0))
    waiting = (one for one in attempts if one.state in WAITING_STATES)
    found.update(reasons[one.id].kind.counted if one.id in reasons else _SCHEDULER for one in waiting)
    return found


# --- other rows, sources and pools ------------------------------------------------------------------------


def tables(rows: Rows) -> Mapping[str, Mapping[int, Row]]:
    return {
        "attempt": rows.attempts,
        "vm": rows.vms,
        "template": rows.templates,
        "offer": rows.offers,
        "host": {host.id: host for host in rows.hosts.values()},
        "lease": rows.leases,
    }


def row_counts(rows: Rows) -> dict[str, Counter[str]]:
    return {kind: Counter(str(row.state) for row in table.values()) for kind, table in tables(rows).items()}


def source_view(source: Observer[Any], now: float) -> api.SourceView:
    return api.SourceView(
        name=source.name,
        known=source.latest is not None,
        observations=source.observations,
        age=now - source.latest.began if source.latest else 0.0,
        unknown_for=0.0 if source.latest else now - source.since,
        failure=source.failure,
        awaited=0.0 if source.asked is None else now - source.asked,
    )


def about_image(image: Image | None) -> str:
    """What is in an image, for who chooses one."""
    if image is None:
        return ""
    origin = image.made_from[0] if image.made_from else f"Debian {image.suite}"
    kind = "with systemd" if image.flavour == "stock" else "without systemd"
    return f"{origin}, {kind}" + (f"; with {', '.join(image.packages)}" if image.packages else "")


def size_view(size: Size) -> api.SizeView:
    return api.SizeView(*size.amounts)


def pool_view(one: PoolStatus) -> api.PoolView:
    pool = one.pool
    joined = pool.size if pool.depth is Depth.JOINED else Size(0, 0)
    return api.PoolView(
        image=pool.image,
        depth=str(pool.depth),
        cpus=joined.cpus,
        memory=joined.memory,
        least=pool.least,
        most=pool.most,
        wanted=one.wanted,
        ready=one.ready,
        creating=one.creating,
        offered=one.offered,
    )


def job_of(vm: Vm, attempt: Attempt | None) -> str:
    """The job of the VM: its attempt's, or the job that was seen on it."""
    return attempt.job.job_id if attempt else vm.job_id


def vm_view(vm: Vm, job_id: str, epoch: float, figures: tuple[float, float, float, float]) -> api.VmView:
    """The `figures` are CPU seconds and unique, shared and proportional MiB."""
    cpu_s, private, shared, pss = figures
    return api.VmView(
        name=vm.name,
        state=str(vm.state),
        host=vm.host,
        image=vm.image,
        kind=str(vm.kind),
        cpus=vm.size.cpus,
        memory=vm.size.memory,
        address=without_prefix_length(vm.address),
        attempt=vm.attempt,
        job_id=job_id,
        since=round(epoch + vm.since, 1),
        cpu_s=cpu_s,
        private=private,
        shared=shared,
        pss=pss,
        reason=text_of(vm.reason),
        quarantined=text_of(vm.quarantined),
        other_host=vm.places[1].host if len(vm.places) > 1 else "",
    )


def vm_views(rows: Rows, world: World, exact: Mapping[str, tuple[float, float, float]]) -> list[api.VmView]:
    """All live VMs as last observed. `exact` has newer CPU seconds, unique and proportional MiB of VMs, by name."""
    views = []
    for vm in rows.vms.values():
        last = world.vm(vm) or VmSeen(vm.name, vm.host, VmCondition.CREATING)
        cpu_s, private, pss = exact.get(vm.name, (last.cpu_s, last.private, 0.0))
        job_id = job_of(vm, rows.attempt_of(vm))
        views.append(vm_view(vm, job_id, world.epoch, (cpu_s, private, last.shared, pss)))
    return views


def template_views(rows: Rows, epoch: float) -> list[api.TemplateView]:
    forked = Counter(place.template for vm in rows.vms.values() for place in vm.places)
    return [
        api.TemplateView(
            host=row.host,
            image=row.image,
            state=str(row.state),
            cpus=row.size.cpus,
            memory=row.size.memory,
            account=row.account,
            since=round(epoch + row.since, 1),
            references=forked[row.which],
            reason=text_of(row.reason),
        )
        for row in rows.templates.values()
    ]


# --- timelines --------------------------------------------------------------------------------------------

_PHASES = ("queued", "clone", "join", "launch", "run", "reclaim")
_PHASE_OF_EFFECT = {"create": "clone", "start": "join"}  # phases whose stages an effect reports


def timeline_view(
    attempt: Attempt, entries: Sequence[Entry], now: float, waiting: Reason | None = None, tell: Tell = text_of
) -> api.TimelineView:
    """The timeline of one attempt. `entries` are those of the attempt and its VMs, in order. A phase that has not ended
    lasts until `now` (monotonic)."""
    first = entries[0].mono if entries else 0.0
    return api.TimelineView(
        job_id=attempt.job.job_id,
        attempt=attempt.id,
        state=str(attempt.state),
        wall=entries[0].wall if entries else 0.0,
        phases=phases(entries, now),
        entries=tuple(
            api.TimelineEntry(
                at=entry.mono - first,
                subject=f"{entry.kind} {entry.id}",
                event=entry.event,
                state=entry.target or "",
                reason=tell(entry.reason)
                or ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in entry.detail.get("stages", ())),
            )
            for entry in entries
        ),
        waiting=tell(waiting),
    )


def phases(entries: Sequence[Entry], now: float) -> tuple[api.PhaseView, ...]:
    """The phases of an attempt, in order. A phase that was interrupted ends when the reclaim begins."""
    moments, reclaiming = _moments(entries)
    stages = _stages(entries)
    found: list[api.PhaseView] = []
    for name in _PHASES:
        first, last = PHASES[name]
        began = reclaiming if name == "reclaim" else moments.get(first)
        if began is None:
            continue
        ended = moments.get(last)
        if name != "reclaim" and ended is None:
            ended = reclaiming
        found.append(api.PhaseView(name, began, (ended if ended is not None else now) - began, stages.get(name, ())))
    return tuple(found)


def _moments(entries: Sequence[Entry]) -> tuple[dict[str, float], float | None]:
    """When each event of the attempt first happened, and when the reclaim began (None: it has not)."""
    moments: dict[str, float] = {}
    reclaiming = None
    for entry in entries:
        if entry.kind != "attempt":
            continue
        moments.setdefault(entry.event, entry.mono)
        if entry.target == "reclaiming" and entry.source != "reclaiming":
            reclaiming = entry.mono
    if (took := moments.get(Event.TOOK)) is not None:  # the spare had been cloned and had joined before
        moments |= dict.fromkeys((Event.ADMITTED, Event.CREATED, Event.ALL_JOINED), took)
    return moments, reclaiming


def _stages(entries: Sequence[Entry]) -> dict[str, tuple[tuple[str, float], ...]]:
    """The stages of the first effect of each phase, by phase."""
    stages: dict[str, tuple[tuple[str, float], ...]] = {}
    for entry in entries:
        phase = _PHASE_OF_EFFECT.get(entry.event)
        if phase and phase not in stages and "stages" in entry.detail:
            stages[phase] = tuple((str(name), float(seconds)) for name, seconds in entry.detail["stages"])
    return stages


# --- the audit of identities ------------------------------------------------------------------------------

Facts = Mapping[str, str | int]
"""What a guest reports, by property; `skew` is its clock minus the host's in milliseconds. A guest that did not answer
has only `error`."""

UNIQUE = {
    "hostname": "host name",
    "machine_id": "machine-id",
    "boot_id": "boot id",
    "mac": "MAC",
    "address": "address",
    "host_keys": "host keys",
    "random": "random bytes drawn first",
    "fresh": "random bytes drawn now",
}
"""What no two VMs may have in common, with its name in messages."""

_OPTIONAL = "host_keys"  # an image without host keys has none to share
_MAX_SKEW = 1000  # milliseconds that a guest's clock may be off


def audit(rows: Rows, reported: Mapping[str, Facts]) -> api.IdentityAudit:
    """Compare reports of guests, by name, with each other, and with the live VMs. A report that lacks something is a
    problem."""
    known = {vm.name: vm for vm in rows.vms.values()}
    holders: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, facts in reported.items():
        for key in UNIQUE:
            if facts.get(key):
                holders[key, str(facts[key])].append(name)
    found = []
    for name, facts in sorted(reported.items()):
        vm = known.get(name)
        attempt = rows.attempt_of(vm) if vm is not None else None
        skew = facts.get("skew", 0)
        found.append(
            api.VmIdentity(
                name,
                attempt.job.job_id if attempt is not None else "",
                skew if isinstance(skew, int) else 0,
                {key: str(facts.get(key, "")) for key in UNIQUE},
                (*_problems(name, vm, facts), *_shared(name, holders)),
            )
        )
    return api.IdentityAudit(tuple(found), len(found) > 1 and not any(vm.problems for vm in found))


def _problems(name: str, vm: Vm | None, facts: Facts) -> Iterator[str]:
    """What is wrong with one guest's report, apart from all others."""
    if "error" in facts:
        yield f"it did not answer: {facts['error']}"
        return
    for key in UNIQUE:
        if not facts.get(key) and key != _OPTIONAL:
            yield f"it did not report its {UNIQUE[key]}"
    told = {"mac": vm.mac, "address": without_prefix_length(vm.address)} if vm is not None else {}
    expected = {"hostname": name} | told
    for key, value in expected.items():
        if facts.get(key) and facts[key] != value:
            yield f"its {UNIQUE[key]} is {facts[key]} instead of {value}"
    skew = facts.get("skew", 0)
    if not isinstance(skew, int) or abs(skew) >= _MAX_SKEW:
        yield f"its clock is {skew} ms off"


def _shared(name: str, holders: Mapping[tuple[str, str], list[str]]) -> Iterator[str]:
    for (key, value), names in holders.items():
        others = ", ".join(other for other in names if other != name)
        if name in names and others:
            yield f"the same {UNIQUE[key]} as {others}: {value}"
