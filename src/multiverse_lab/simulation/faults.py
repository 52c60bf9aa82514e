"""Faults of calls, and incidents of the simulated world, both drawn from a seed.

Every call of a port goes through a `FaultyLink`. `FaultPlan` draws the fault of each call from the seed and the call's
own identity (method, object, how many such calls came before). The fault of one call therefore does not depend on the
number of other calls, and a scenario can be made smaller without changing the faults of the calls that remain. The plan
records all faults that it drew; the same scenario can be simulated again with that list, or a part of it, in place of
probabilities.

A link can be disconnected when its caller has crashed: calls that are under way may or may not be completed, no caller
learns their result, and no new call is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar, cast

from multiverse.core.errors import Broken, Damaged, Exhausted, MultiverseError, Refused, Unknown
from multiverse.core.model.job import SchedulerPart, SchedulerView

T = TypeVar("T")
Port = Literal["scheduler", "hypervisor"]
Make = Callable[[], Coroutine[Any, Any, T]]
"""Makes the call once. It may be used more than once."""


class FaultKind(StrEnum):
    """What goes wrong with one call."""

    UNREACHED = "unreached"  # not executed; Unknown
    FAILED = "failed"  # not executed; a definite error
    SLOW = "slow"  # executed much later than usual
    HUNG = "hung"  # not executed; Unknown after a long time
    LOST = "lost"  # executed; Unknown after a long time
    CUT = "cut"  # stopped somewhere in the middle; then Unknown
    TWICE = "twice"  # executed twice in a row, as by a transport that tries again
    LATE = "late"  # Unknown at once, and executed much later all the same
    STALE = "stale"  # an observation shows what an earlier one showed
    TORN = "torn"  # an observation shows jobs of an earlier time with nodes of this time, or the reverse


DEFINITE: Mapping[str, tuple[type[MultiverseError], ...]] = {
    "build_template": (Exhausted, Broken),
    "create": (Exhausted, Broken),
    "start": (Broken,),
    "add_user": (Broken,),
    "freeze": (Broken,),
    "cut": (Broken,),
    "save": (Exhausted,),
    "sleep": (Refused, Exhausted, Broken),
    "wake": (Exhausted, Broken),
    "copy": (Exhausted, Damaged),
    "checkpoint": (Exhausted, Broken),
}
"""The definite errors that a call may raise although its arguments are right. Other calls have none."""

CALL_IDS: Mapping[tuple[Port, str], str] = {
    ("scheduler", "observe"): "s1",
    ("scheduler", "pin"): "s2",
    ("scheduler", "unpin"): "s3",
    ("scheduler", "requeue"): "s4",
    ("scheduler", "revoke"): "s5",
    ("scheduler", "set_down"): "s6",
    ("scheduler", "delete_node"): "s7",
    ("scheduler", "explain"): "s8",
    ("scheduler", "offer"): "s9",
    ("scheduler", "withdraw"): "s10",
    ("scheduler", "bootstrap"): "s11",
    ("scheduler", "user"): "s12",
    ("scheduler", "publish"): "s13",
    ("scheduler", "read"): "s14",
    ("scheduler", "exclude"): "s15",
    ("scheduler", "request"): "s16",
    ("scheduler", "release"): "s17",
    ("scheduler", "restore"): "s18",
    ("scheduler", "hold"): "s19",
    ("scheduler", "prepare"): "s20",
    ("scheduler", "undo"): "s21",
    ("scheduler", "forbid_requeue"): "s22",
    ("hypervisor", "observe"): "h1",
    ("hypervisor", "build_template"): "h2",
    ("hypervisor", "delete_template"): "h3",
    ("hypervisor", "create"): "h4",
    ("hypervisor", "start"): "h5",
    ("hypervisor", "add_user"): "h6",
    ("hypervisor", "destroy"): "h7",
    ("hypervisor", "freeze"): "h8",
    ("hypervisor", "cut"): "h9",
    ("hypervisor", "save"): "h10",
    ("hypervisor", "thaw"): "h11",
    ("hypervisor", "discard"): "h12",
    ("hypervisor", "keep_in_memory"): "h13",
    ("hypervisor", "move"): "h14",
    ("hypervisor", "settle"): "h15",
    ("hypervisor", "copy"): "h16",
    ("hypervisor", "checkpoint"): "h17",
    ("hypervisor", "sleep"): "h18",
    ("hypervisor", "wake"): "h19",
    ("scheduler", "check"): "s23",
    ("scheduler", "check_script"): "s24",
    ("scheduler", "stand_in"): "s25",
    ("scheduler", "keep_time"): "s26",
    ("scheduler", "warn"): "s27",
    ("scheduler", "preempt"): "s28",
}
"""Faults are drawn from these ids and not from the methods' names, so that each seed still gives the same history after
a method has been renamed. An id never changes and is never given to another method."""

FOREVER = 1e12  # seconds; JSON has no infinity

FRESH = 3.0
"""Seconds: the largest age of a stale observation, and of the older half of a torn one. slurmctld answers from memory
under one lock, so only the reply can be slow; but jobs and nodes are asked for by two commands."""


def stable_id(call: str) -> str:
    """The name of a call with the id of its method in place of the method's name."""
    name, _, rest = call.partition(" ")
    port, _, method = name.partition(".")
    return f"{CALL_IDS[cast(Port, port), method]} {rest}"


def possible(port: Port, method: str, kind: FaultKind) -> bool:
    """Whether a call of this method can have a fault of this kind.

    A scheduler's command is a process of its own, so it may arrive after its caller has given up. A host library does
    nothing after its caller has gone, and a file is written by the caller itself."""
    if kind in (FaultKind.STALE, FaultKind.TORN):
        return port == "scheduler" and method in ("observe", "read")
    if kind is FaultKind.LATE:
        return port == "scheduler" and method not in ("observe", "read", "bootstrap", "user", "publish", "exclude")
    return True


@dataclass(frozen=True)
class Odds:
    """The probability of each kind of fault, for each call, until `until` (virtual seconds since the loop began).

    `slow` and `silence` are ranges in seconds: how late slow calls are, and how long hung calls take."""

    rates: Mapping[FaultKind, float] = field(default_factory=dict)
    until: float = FOREVER
    slow: tuple[float, float] = (1.0, 15.0)
    silence: tuple[float, float] = (5.0, 30.0)

    @staticmethod
    def even(rate: float, until: float = FOREVER) -> Odds:
        """All kinds of faults with the same probability, which add up to `rate`."""
        return Odds({kind: rate / len(FaultKind) for kind in FaultKind}, until)


class Call(NamedTuple):
    """A call as it was made: when (virtual seconds), the id of its method, and its arguments."""

    at: float
    id: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class PlannedFault:
    """The fault of one call. `call` names the call; the meaning of `seconds` depends on the kind."""

    call: str
    kind: FaultKind
    seconds: float = 0.0


class FaultPlan:
    """Decides the fault of each call of one simulation: drawn from the seed, or read from `faults` if that is given."""

    def __init__(self, seed: int, odds: Mapping[Port, Odds], faults: Sequence[PlannedFault] | None = None) -> None:
        self.applied: list[PlannedFault] = []
        self.calls: list[Call] = []
        self.log: Callable[[str], None] = lambda _: None
        self._seed, self._odds = seed, odds
        self._faults = None if faults is None else {fault.call: fault for fault in faults}
        self._counts: dict[str, int] = {}
        self._view: tuple[float, SchedulerView] | None = None

    def chance(self, *what: object) -> float:
        """A number from 0 to 1 that depends only on the arguments and the seed."""
        digest = blake2b(f"{self._seed}/{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / (1 << 64)

    def between(self, bounds: tuple[float, float], *what: object) -> float:
        """A number within the bounds that depends only on the arguments and the seed."""
        low, high = bounds
        return low + (high - low) * self.chance(*what)

    def next_fault(self, port: Port, method: str, subject: str) -> tuple[str, PlannedFault | None]:
        """The name of the next call of this method for this object, and its fault."""
        base = f"{port}.{method} {subject}".rstrip()
        self._counts[base] = self._counts.get(base, 0) + 1
        call = f"{base} #{self._counts[base]}"
        fault = self._draw(port, method, call) if self._faults is None else self._faults.get(call)
        if fault is not None:
            self.applied.append(fault)
            self.log(f"{fault.call}: {fault.kind}" + (f", {fault.seconds:.1f} s" if fault.seconds else ""))
        return call, fault

    def _draw(self, port: Port, method: str, call: str) -> PlannedFault | None:
        odds = self._odds[port]
        if not odds.rates or asyncio.get_running_loop().time() >= odds.until:
            return None
        stable = stable_id(call)
        point = self.chance(stable)
        for kind, rate in odds.rates.items():
            point -= rate
            if point < 0:
                able = possible(port, method, kind)
                return PlannedFault(call, kind, self._seconds(odds, kind, stable)) if able else None
        return None

    def _seconds(self, odds: Odds, kind: FaultKind, call: str) -> float:
        match kind:
            case FaultKind.SLOW | FaultKind.LATE:
                return round(self.between(odds.slow, call, "slow"), 3)
            case FaultKind.HUNG | FaultKind.LOST:
                return round(self.between(odds.silence, call, "silence"), 3)
            case FaultKind.CUT:
                return round(self.between((0.001, 0.3), call, "cut"), 3)
            case _:
                return 0.0

    def shown_view(self, fresh: SchedulerView, fault: PlannedFault | None) -> SchedulerView:
        """What an observation returns: the fresh view, or an older one in whole or in part if the fault says so."""
        now = asyncio.get_running_loop().time()
        old = self._view[1] if self._view and now - self._view[0] <= FRESH else fresh
        if fault and fault.kind is FaultKind.STALE:
            return replace(old, offers=fresh.offers, takers=fresh.takers)  # offers are read from the local disk
        self._view = (now, fresh)
        if fault and fault.kind is FaultKind.TORN:
            if self.chance(stable_id(fault.call), "torn") < 0.5:
                return replace(fresh, jobs=old.jobs, limits=old.limits)
            return replace(fresh, nodes=old.nodes)
        return fresh

    def shown_part(self, fresh: SchedulerPart, fault: PlannedFault | None) -> SchedulerPart:
        """What a reading of a part returns: the fresh part, or what the reading before showed of it."""
        now = asyncio.get_running_loop().time()
        if self._view is None or now - self._view[0] > FRESH:
            return fresh
        whole, old = self._view
        if fault is None or fault.kind is not FaultKind.STALE:
            self._view = (whole, replace(old.merged(fresh, now), jobs_began={}, nodes_began={}))
        if fault is None:
            return fresh
        jobs = {job_id: job for job_id, job in old.jobs.items() if job_id in fresh.job_ids or job.uid in fresh.users}
        nodes = {name: node for name, node in old.nodes.items() if fresh.all_nodes or name in fresh.node_names}
        if fault.kind is FaultKind.STALE:
            return replace(fresh, jobs=jobs, nodes=nodes, limits=old.limits)
        if self.chance(stable_id(fault.call), "torn") < 0.5:
            return replace(fresh, jobs=jobs, limits=old.limits)
        return replace(fresh, nodes=nodes)


class FaultyLink:
    """Connects one caller with one of the simulated ports and applies the faults of its calls."""

    def __init__(self, plan: FaultPlan, port: Port) -> None:
        self._plan, self._port = plan, port
        self._disconnected = False
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._abandoned: list[asyncio.Future[None]] = []

    def disconnect(self) -> None:
        """The caller has crashed: stop each of its calls or let it complete, by chance.

        A scheduler's command is a process of its own and may complete; a call of a host library does not."""
        self._disconnected = True
        for call, task in list(self._running.items()):
            if self._port == "hypervisor" or self._plan.chance("sever", stable_id(call)) < 0.5:
                task.cancel()

    async def call(self, method: str, subject: str, make: Make[T], *arguments: object) -> T:
        """Make one call, with its fault. `arguments` are recorded for the comparison of two checkouts."""
        if self._disconnected:
            await self._never_return()
        now = asyncio.get_running_loop().time()
        self._plan.calls.append(Call(now, CALL_IDS[self._port, method], arguments))
        call, fault = self._plan.next_fault(self._port, method, subject)
        task = asyncio.create_task(self._with_fault(method, fault, make))
        self._running[call] = task
        # A call that outlives its caller must not be collected before its end, nor may its error be reported.
        task.add_done_callback(lambda ended: self._forget(call, ended))
        try:
            result = await asyncio.shield(task)
        except BaseException:
            if self._disconnected:
                await self._never_return()
            task.cancel()
            raise
        if self._disconnected:
            await self._never_return()
        return result

    def _forget(self, call: str, task: asyncio.Task[Any]) -> None:
        self._running.pop(call, None)
        if not task.cancelled():
            task.exception()

    async def _never_return(self) -> None:
        # The future is kept, or the garbage collector would end the crashed caller at an arbitrary time.
        self._abandoned.append(asyncio.get_running_loop().create_future())
        await self._abandoned[-1]

    async def _with_fault(self, method: str, fault: PlannedFault | None, make: Make[T]) -> T:
        if fault is None:
            return self._shown(await make(), None)
        match fault.kind:
            case FaultKind.SLOW:
                await asyncio.sleep(fault.seconds)
                return self._shown(await make(), None)
            case FaultKind.TWICE:
                result = await make()
                try:
                    await make()
                except MultiverseError:
                    pass
                return self._shown(result, None)
            case FaultKind.STALE | FaultKind.TORN:
                return self._shown(await make(), fault)
        return await self._without_reply(method, fault, make)

    async def _without_reply(self, method: str, fault: PlannedFault, make: Make[T]) -> T:
        """Apply a fault after which the caller gets an error and no result."""
        match fault.kind:
            case FaultKind.FAILED:
                definite = DEFINITE.get(method, (Unknown,))
                which = int(self._plan.chance(stable_id(fault.call), "error") * len(definite))
                raise definite[which](f"{method} failed", hint="simulated")
            case FaultKind.HUNG:
                await asyncio.sleep(fault.seconds)
            case FaultKind.LOST:
                await make()
                await asyncio.sleep(fault.seconds)
            case FaultKind.CUT:
                try:
                    await asyncio.wait_for(make(), fault.seconds)
                except TimeoutError:
                    pass
            case FaultKind.LATE:
                self._make_later(fault, make)
        raise Unknown(f"{method} got no answer ({fault.kind})", hint="simulated")

    def _shown(self, result: T, fault: PlannedFault | None) -> T:
        if isinstance(result, SchedulerView):
            return cast(T, self._plan.shown_view(result, fault))
        if isinstance(result, SchedulerPart):
            return cast(T, self._plan.shown_part(result, fault))
        return result

    def _make_later(self, fault: PlannedFault, make: Make[object]) -> None:
        async def arrive() -> None:
            await asyncio.sleep(fault.seconds)
            await make()

        task = asyncio.create_task(arrive())
        self._running[f"{fault.call}, late"] = task
        task.add_done_callback(lambda ended: self._forget(f"{fault.call}, late", ended))


# --- incidents of the world ------------------------------------------------------------------------


class IncidentKind(StrEnum):
    VM_DIES = "a VM dies"
    GUEST_FLOODS = "a guest floods its channel"
    REGISTERS_AGAIN = "a node registers again"
    CLUSTER_AWAY = "slurmctld is away"
    CLUSTER_RESTARTS = "slurmctld restarts"
    RECONFIGURED = "slurmctld reads its configuration again"
    RESERVED = "all nodes are reserved"
    HOST_AWAY = "a host is out of reach"
    HOST_FENCED = "a host is out of reach, switched off and fenced"
    HOST_CRASHES = "a host loses its power"
    HOST_DRAINED = "an operator drains a host, and resumes it"
    HOST_CLOSING = "an operator has a host drained later, and resumes it"
    HOST_REMOVED = "an operator removes a host when it is free, and adds it again"
    AGENT_DIES = "an agent ends, and is started again"
    AGENT_REPLACED = "an agent of another release runs for a while"
    LINK_HANGS = "the controller does not reach a host, and the scheduler does"
    CONTROLLER_CUT_OFF = "the controller reaches no host, and the scheduler does"
    HOST_DISK_FULL = "the disk of a host is full"
    STORAGE_AWAY = "a host does not reach the storage of saved VMs"
    STORAGE_FULL = "the storage of saved VMs is full"
    STORAGE_LOST = "the files in a storage of saved VMs are lost"
    NAME_SERVICE_SILENT = "the name service does not answer"
    SOURCE_SLOW = "a source answers observations after ten minutes"
    TEMPLATE_DELETED = "an operator deletes a template"
    DISK_FULL = "the store's disk is full"
    DATABASE_RESTORED = "the database is restored from a copy"
    DATABASE_LOST = "the database is lost"
    CONTROLLER_CRASH = "the controller crashes"
    PILOT_PREEMPTED = "a pilot is preempted"
    PILOT_CANCELLED = "an operator cancels a pilot"
    PILOT_REQUEUED = "an operator queues a pilot again"
    PILOT_LOST = "slurmctld forgets a pilot that has ended"
    PILOT_NODE_DOWN = "the node of a pilot is set DOWN, and its VMs go on"
    HOST_REFUSES = "a host refuses to create VMs"
    HOST_SPOILS = "a host cannot start VMs of the image slim"
    HOST_MUTES = "VMs do not register from a host"
    LAUNCHES_FAIL = "slurmctld makes no credentials for the jobs of a user"
    VM_MOVES = "an operator has a VM moved to another host"
    CONTROLLER_RIVAL = "another controller starts with a copy of the database, and the older one goes on"


@dataclass(frozen=True)
class Incident:
    """Something that happens to the world at virtual second `at` and lasts `seconds`. `pick`, from 0 to 1, chooses
    one of the objects that exist then. A database is restored from a copy that was made at `at`, `seconds` later.
    Every other time the files of a storage are put back from a backup `seconds` after they were lost."""

    at: float
    kind: IncidentKind
    seconds: float = 0.0
    pick: float = 0.0


@dataclass(frozen=True)
class ControllerCrash:
    """The controller crashes at its `commit`th commit that changes anything, right before or right `after` it, and is
    started again `seconds` later."""

    commit: int
    after: bool = False
    seconds: float = 1.0


DURATIONS: Mapping[IncidentKind, tuple[float, float]] = {
    IncidentKind.CLUSTER_AWAY: (2.0, 150.0),
    IncidentKind.CLUSTER_RESTARTS: (1.0, 10.0),
    IncidentKind.RESERVED: (5.0, 200.0),
    IncidentKind.HOST_AWAY: (2.0, 300.0),
    IncidentKind.HOST_FENCED: (20.0, 200.0),
    IncidentKind.HOST_CRASHES: (20.0, 600.0),
    IncidentKind.HOST_DRAINED: (5.0, 200.0),
    IncidentKind.HOST_CLOSING: (20.0, 200.0),
    IncidentKind.HOST_REMOVED: (5.0, 100.0),
    IncidentKind.AGENT_DIES: (0.5, 100.0),
    IncidentKind.AGENT_REPLACED: (5.0, 200.0),
    IncidentKind.LINK_HANGS: (2.0, 200.0),
    IncidentKind.CONTROLLER_CUT_OFF: (5.0, 300.0),
    IncidentKind.HOST_DISK_FULL: (1.0, 100.0),
    IncidentKind.STORAGE_AWAY: (1.0, 100.0),
    IncidentKind.STORAGE_FULL: (1.0, 100.0),
    IncidentKind.STORAGE_LOST: (5.0, 100.0),
    IncidentKind.NAME_SERVICE_SILENT: (5.0, 300.0),
    IncidentKind.SOURCE_SLOW: (10.0, 200.0),
    IncidentKind.DATABASE_RESTORED: (0.1, 60.0),
    IncidentKind.DISK_FULL: (0.5, 60.0),
    IncidentKind.CONTROLLER_CRASH: (0.1, 20.0),
    IncidentKind.CONTROLLER_RIVAL: (10.0, 200.0),
}
"""How long incidents last, in seconds: ranges that are drawn from. Other kinds are momentary."""


def every(mean: float, kind: IncidentKind, rng: Random, until: float) -> tuple[Incident, ...]:
    """Incidents of one kind until `until`, as a Poisson process with `mean` seconds between two; none for 0."""
    found: list[Incident] = []
    at = 0.0
    while mean > 0 and (at := at + rng.expovariate(1.0 / mean)) < until:
        seconds = round(rng.uniform(*DURATIONS.get(kind, (0.0, 0.0))), 3)
        found.append(Incident(round(at, 3), kind, seconds, rng.random()))
    return tuple(found)
