"""What the API shows: plain values, made from rows, the last looks and the journal. Times in seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multiverse.core.model import Attempt, AttemptState, Depth, Host, HypervisorView, Size, VmCondition, VmSeen
from multiverse.core.policy import Policy
from multiverse.core.provisioning.capacity import left_behind
from multiverse.core.provisioning.pools import PoolStatus
from multiverse.core.state import Rows
from multiverse.core.transition import Event
from multiverse.service.troubles import Trouble
from multiverse.store import Entry


@dataclass(frozen=True, slots=True)
class JobView:
    """One attempt of a job. `waiting` is why it waits, `reason` how it ended; `age` since its state began."""

    job_id: str
    name: str
    uid: int
    attempt: int
    state: str
    nodes: int
    cpus: int
    memory: int
    image: str
    kind: str
    age: float
    waiting: str
    reason: str
    restarts: int
    vms: tuple[str, ...]
    quarantined: str


@dataclass(frozen=True, slots=True)
class VmView:
    """A live VM. Memory in MiB: `private` is its own alone (unique) and goes with it; `shared` is what it maps of its
    template and of programs, whole, however many others map the same; `pss` is the former with its part of the latter,
    0 unless it was asked for exactly."""

    name: str
    state: str
    host: str
    image: str
    kind: str
    cpus: int
    memory: int
    address: str
    attempt: int | None
    job_id: str
    age: float
    cpu_s: float
    private: float
    shared: float
    pss: float
    reason: str
    quarantined: str


@dataclass(frozen=True, slots=True)
class TemplateView:
    """`account` is the one whose jobs' VMs alone are forked from it; empty: all."""

    host: str
    image: str
    state: str
    cpus: int
    memory: int
    account: str
    age: float
    references: int
    reason: str


@dataclass(frozen=True, slots=True)
class HostView:
    """A host: what it declares, what of that is claimed, and what the machine itself has. Memory in MiB: `available`
    of the machine's own (0: unknown), `private` to its VMs, `shared` as they map it (what two map counts twice), and
    `templates`, what these and the copies of them take. `overcommit` times what is declared may be claimed, above 1
    while the machine keeps `floor` available. `images` says of each image what it can do here."""

    name: str
    reachable: bool
    declared: Size
    claimed: Size
    machine: Size | None
    accelerator: str
    abilities: tuple[str, ...]
    images: Mapping[str, tuple[str, ...]]
    vms: int
    available: int
    private: float
    shared: float
    templates: float
    template_copies: int
    overcommit: float
    floor: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A named part of an attempt's time. `stages` are what an effect in it reported: (name, seconds)."""

    name: str
    began: float
    seconds: float
    stages: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    at: float  # seconds since the first entry
    subject: str
    event: str
    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimelineView:
    """Where one attempt's time went, and all that happened to it and its VMs."""

    job_id: str
    attempt: int
    state: str
    wall: float  # Unix time of the first entry
    phases: tuple[Phase, ...]
    entries: tuple[TimelineEntry, ...]


@dataclass(frozen=True, slots=True)
class SourceView:
    """`age` of the last look that succeeded (0: none did), `unknown_for` how long there has been none."""

    name: str
    known: bool
    looks: int
    age: float
    unknown_for: float
    failure: str


@dataclass(frozen=True, slots=True)
class PoolView:
    """A warm pool: what it keeps between `least` and `most` of, and how many it wants now, has ready, is making, has on
    offer to jobs as they come."""

    image: str
    depth: str
    cpus: int  # of joined ones; parked ones become of any size
    memory: int
    least: int
    most: int
    wanted: int
    ready: int
    making: int
    offered: int


@dataclass(frozen=True, slots=True)
class StatusView:
    """The controller itself: its process, its site, its two sources; how much there is of what; what is wrong."""

    pid: int
    version: str
    site: str
    up: float
    sources: tuple[SourceView, ...]
    jobs: Mapping[str, int]  # waiting, provisioning, running, ending
    attempts: Mapping[str, int]
    vms: Mapping[str, int]
    templates: Mapping[str, int]
    pools: tuple[PoolView, ...]
    troubles: tuple[Trouble, ...]


_STAGE_OF_A_JOB = {
    AttemptState.QUEUED: "waiting",
    AttemptState.CLAIMED: "provisioning",
    AttemptState.SPAWNING: "provisioning",
    AttemptState.SPAWNED: "provisioning",
    AttemptState.ALLOCATED: "running",
    AttemptState.RECLAIMING: "ending",
}


def job_counts(rows: Rows) -> dict[str, int]:
    """Live attempts by what a user would say of them."""
    found = Counter(_STAGE_OF_A_JOB[attempt.state] for attempt in rows.attempts.values())
    return {stage: found[stage] for stage in ("waiting", "provisioning", "running", "ending")}


_MILESTONES: tuple[tuple[str, Event, Event], ...] = (
    ("queued", Event.SUBMITTED, Event.ADMITTED),
    ("clone", Event.ADMITTED, Event.MADE),
    ("join", Event.MADE, Event.ALL_JOINED),
    ("launch", Event.ALL_JOINED, Event.RUNS),
    ("run", Event.RUNS, Event.ENDED),
    ("reclaim", Event.ENDED, Event.RECLAIMED),
)

_STAGED = {"create": "clone", "start": "join"}


def phases(entries: Sequence[Entry], now: float) -> tuple[Phase, ...]:
    """An attempt's phases from its journal, in order; one that has not ended lasts until `now`. A phase
    that was cut short ends where reclaiming began, whatever ended it."""
    moments: dict[str, float] = {}
    reclaiming = None
    for entry in entries:
        if entry.kind != "attempt":
            continue
        moments.setdefault(entry.event, entry.mono)
        if entry.target == "reclaiming" and entry.source != "reclaiming":
            reclaiming = entry.mono
    if (took := moments.get(Event.TOOK)) is not None:  # what it took had been cloned and had joined before
        moments |= dict.fromkeys((Event.ADMITTED, Event.MADE, Event.ALL_JOINED), took)
    stages: dict[str, list[tuple[str, float]]] = {}
    for entry in entries:
        phase = _STAGED.get(entry.event)
        if phase and phase not in stages and "stages" in entry.detail:
            stages[phase] = [(str(name), float(seconds)) for name, seconds in entry.detail["stages"]]
    found: list[Phase] = []
    for name, first, last in _MILESTONES:
        began = reclaiming if name == "reclaim" else moments.get(first)
        if began is None:
            continue
        ended = moments.get(last)
        if name != "reclaim" and ended is None:
            ended = reclaiming
        found.append(Phase(name, began, (ended if ended is not None else now) - began, tuple(stages.get(name, ()))))
    return tuple(found)


def timeline(attempt: Attempt, entries: Sequence[Entry], now: float) -> TimelineView:
    """One attempt's story. `entries` are its own and its VMs', in order."""
    first = entries[0].mono if entries else 0.0
    return TimelineView(
        job_id=attempt.job.job_id,
        attempt=attempt.id,
        state=str(attempt.state),
        wall=entries[0].wall if entries else 0.0,
        phases=phases(entries, now),
        entries=tuple(
            TimelineEntry(
                at=entry.mono - first,
                subject=f"{entry.kind} {entry.id}",
                event=entry.event,
                state=entry.target or "",
                reason=entry.reason
                or ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in entry.detail.get("stages", ())),
            )
            for entry in entries
        ),
    )


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


def job_view(attempt: Attempt, vms: Sequence[str], now: float, image: str, kind: str) -> JobView:
    """`image` and `kind` are the site's defaults, for requests that name none."""
    size = attempt.request.size
    return JobView(
        job_id=attempt.job.job_id,
        name=attempt.job_name,
        uid=attempt.uid,
        attempt=attempt.id,
        state=str(attempt.state),
        nodes=attempt.request.nodes,
        cpus=size.cpus,
        memory=size.memory,
        image=attempt.request.image or image,
        kind=str(attempt.request.kind or kind),
        age=max(0.0, now - attempt.since),
        waiting=attempt.note,
        reason=attempt.reason,
        restarts=attempt.job.restarts,
        vms=tuple(vms),
        quarantined=attempt.quarantined,
    )


def host_view(host: Host, rows: Rows, seen: HypervisorView, policy: Policy) -> HostView:
    claims = (*rows.claims, *left_behind(rows.vms.values(), rows.templates))
    held = [claim.size for claim in claims if claim.host == host.name]
    vms = [vm for _, vm in sorted(seen.vms.items()) if vm.host == host.name]
    return HostView(
        name=host.name,
        reachable=True,
        declared=host.capacity,
        claimed=Size(sum(s.cpus for s in held), sum(s.memory for s in held), sum(s.disk for s in held)),
        machine=host.machine,
        accelerator=host.accelerator,
        abilities=tuple(sorted(host.abilities)),
        images={image: tuple(sorted(can)) for image, can in sorted(host.images.items())},
        vms=sum(vm.host == host.name for vm in rows.vms.values()),
        available=host.available,
        private=sum(vm.private for vm in vms),
        shared=sum(vm.shared for vm in vms),
        templates=sum(one.held for _, one in sorted(seen.templates.items()) if one.host == host.name),
        template_copies=host.template_copies,
        overcommit=policy.overcommit,
        floor=policy.floor,
    )


def vm_views(
    rows: Rows, seen: Mapping[str, VmSeen], exact: Mapping[str, tuple[float, float, float]], now: float
) -> list[VmView]:
    """As the last look saw them; of those in `exact`, (CPU seconds, unique and proportional MiB) are as given."""
    views = []
    for vm in rows.vms.values():
        attempt = rows.attempt_of(vm)
        last = seen.get(vm.name) or VmSeen(vm.name, vm.host, VmCondition.MAKING)
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
                address=vm.address.partition("/")[0],
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
