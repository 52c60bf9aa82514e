"""What goes wrong, by seed: on the way to a port and back, and in the world itself.

`Wire` puts every call of a port through its fate, which `Fates` draws from the seed and the call's own name
(port, method, subject, how often so far): what happens to one call does not hang on how many others there
were, so that a scenario can be made smaller and still meet the same end. All that was drawn is kept as a list
of blows, and the same scenario can be played again with that list, or a part of it, instead of dice.

A wire can also be severed: the caller has died, and what it had begun may or may not come to its end, but
nobody hears of it and nothing new is begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from random import Random
from typing import Any, Literal, NamedTuple, TypeVar, cast

from multiverse.core.errors import Broken, Exhausted, MultiverseError, Unknown
from multiverse.core.model import (
    SchedulerView,
)

T = TypeVar("T")
Port = Literal["scheduler", "hypervisor"]


class Fault(StrEnum):
    """The fate of one call."""

    UNREACHED = "unreached"  # Unknown, and not done
    FAILED = "failed"  # a definite error, and not done
    SLOW = "slow"  # done, much later than usual
    HUNG = "hung"  # not done, and no reply for a long time, then Unknown
    LOST = "lost"  # done, and no reply for a long time, then Unknown
    CUT = "cut"  # stopped somewhere in the middle, then Unknown
    TWICE = "twice"  # done again at once, as by a transport that tries again
    LATE = "late"  # Unknown at once, and done all the same, much later
    STALE = "stale"  # a look shows what an earlier one showed
    TORN = "torn"  # a look shows jobs of an earlier moment beside nodes of this one, or the other way round


DEFINITE: Mapping[str, tuple[type[MultiverseError], ...]] = {
    "build_template": (Exhausted, Broken),
    "create": (Exhausted, Broken),
    "start": (Broken,),
    "add_user": (Broken,),
}
"""The definite errors that a call may meet without anybody's fault; others have none."""

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
    ("hypervisor", "observe"): "h1",
    ("hypervisor", "build_template"): "h2",
    ("hypervisor", "delete_template"): "h3",
    ("hypervisor", "create"): "h4",
    ("hypervisor", "start"): "h5",
    ("hypervisor", "add_user"): "h6",
    ("hypervisor", "destroy"): "h7",
}
"""What faults are drawn from in place of a call's name: a port's method may be renamed, and each seed still makes the
same history. An id is never changed and never given to another call."""


def stable_id(call: str) -> str:
    """A call's name with the id of its method in place of that method's name."""
    name, _, rest = call.partition(" ")
    port, _, method = name.partition(".")
    return f"{CALL_IDS[cast(Port, port), method]} {rest}"


FOREVER = 1e12  # seconds; JSON has no infinity

FRESH = 3.0
"""Seconds: no stale look is older, and none is torn further apart. slurmctld answers from memory, under one lock; a
reply can only be slow. But jobs and nodes are asked for in two questions."""


def possible(port: Port, method: str, fault: Fault) -> bool:
    """Whether this can happen to such a call. A command that was given up may yet arrive at slurmctld, for it
    is a process of its own; a host's own library does nothing behind its caller's back."""
    if fault in (Fault.STALE, Fault.TORN):
        return (port, method) == ("scheduler", "observe")
    if fault is Fault.LATE:
        return port == "scheduler" and method not in ("observe", "bootstrap", "user")
    return True


@dataclass(frozen=True)
class Odds:
    """How likely each fault is, for each call, until `until` (virtual seconds since the loop began).
    Times in seconds, ranges that are drawn from."""

    rates: Mapping[Fault, float] = field(default_factory=dict)
    until: float = FOREVER
    slow: tuple[float, float] = (1.0, 15.0)
    silence: tuple[float, float] = (5.0, 30.0)

    @staticmethod
    def even(rate: float, until: float = FOREVER) -> Odds:
        """Every fault as likely as every other, `rate` together."""
        return Odds({fault: rate / len(Fault) for fault in Fault}, until)


class Call(NamedTuple):
    """A call as it was made: when (virtual seconds), the id of its method, and its arguments."""

    at: float
    id: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Blow:
    """A fault that one call meets: `call` names it, `seconds` is how slow, how silent, when cut or how late."""

    call: str
    fault: Fault
    seconds: float = 0.0


class Fates:
    """What is to happen to each call of one simulation: drawn from the seed, or as a list says."""

    def __init__(self, seed: int, odds: Mapping[Port, Odds], blows: Sequence[Blow] | None = None) -> None:
        self.met: list[Blow] = []
        self.calls: list[Call] = []
        self.told: Callable[[str], None] = lambda _: None
        self._seed, self._odds = seed, odds
        self._blows = None if blows is None else {blow.call: blow for blow in blows}
        self._times: dict[str, int] = {}
        self._view: tuple[float, SchedulerView] | None = None

    def chance(self, *what: object) -> float:
        """A number from 0 to 1 that is always the same for the same thing and seed."""
        digest = blake2b(f"{self._seed}/{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / (1 << 64)

    def between(self, bounds: tuple[float, float], *what: object) -> float:
        low, high = bounds
        return low + (high - low) * self.chance(*what)

    def draw(self, port: Port, method: str, subject: str) -> tuple[str, Blow | None]:
        """The call's name, and what it meets."""
        base = f"{port}.{method} {subject}".rstrip()
        self._times[base] = self._times.get(base, 0) + 1
        call = f"{base} #{self._times[base]}"
        blow = self._roll(port, method, call) if self._blows is None else self._blows.get(call)

        if blow is not None:
            self.met.append(blow)
            self.told(f"{blow.call}: {blow.fault}" + (f", {blow.seconds:.1f} s" if blow.seconds else ""))
        return call, blow

    def _roll(self, port: Port, method: str, call: str) -> Blow | None:
        odds = self._odds[port]
        if not odds.rates or asyncio.get_running_loop().time() >= odds.until:
            return None
        stable = stable_id(call)
        point = self.chance(stable)
        for fault, rate in odds.rates.items():
            point -= rate
            if point < 0:
                return Blow(call, fault, self._seconds(odds, fault, stable)) if possible(port, method, fault) else None
        return None

    def _seconds(self, odds: Odds, fault: Fault, call: str) -> float:
        match fault:
            case Fault.SLOW | Fault.LATE:
                return round(self.between(odds.slow, call, "slow"), 3)
            case Fault.HUNG | Fault.LOST:
                return round(self.between(odds.silence, call, "silence"), 3)
            case Fault.CUT:
                return round(self.between((0.001, 0.3), call, "cut"), 3)
            case _:
                return 0.0

    def old_view(self, fresh: SchedulerView, blow: Blow | None) -> SchedulerView:
        """What a look shows: the view before, where it is to be stale and that one is not too old."""
        now = asyncio.get_running_loop().time()
        old = self._view[1] if self._view and now - self._view[0] <= FRESH else fresh
        if blow and blow.fault is Fault.STALE:
            return replace(old, offers=fresh.offers)  # those are on our own disk
        self._view = (now, fresh)
        if blow and blow.fault is Fault.TORN:
            if self.chance(stable_id(blow.call), "torn") < 0.5:
                return replace(fresh, jobs=old.jobs, limits=old.limits)
            return replace(fresh, nodes=old.nodes)
        return fresh


class Wire:
    """Between one caller and one of the world's ports."""

    def __init__(self, fates: Fates, port: Port) -> None:
        self._fates, self._port = fates, port
        self._severed = False
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def sever(self) -> None:
        """The caller dies: each of its calls is cut short or runs to its end unheard, by chance. A command
        is a process of its own and may go on; a library's call does not."""
        self._severed = True
        for call, task in list(self._running.items()):
            if self._port == "hypervisor" or self._fates.chance("sever", stable_id(call)) < 0.5:
                task.cancel()

    async def call(self, method: str, subject: str, do: Callable[[], Coroutine[Any, Any, T]], *arguments: object) -> T:
        """Make one call, or let it meet its fate. `arguments` are kept as made, for whoever compares two checkouts."""
        if self._severed:
            await self._nothing()
        now = asyncio.get_running_loop().time()
        self._fates.calls.append(Call(now, CALL_IDS[self._port, method], arguments))
        call, blow = self._fates.draw(self._port, method, subject)
        task = asyncio.create_task(self._meet(method, blow, do))
        self._running[call] = task
        # A call that outlives its caller must not be collected half-way, nor its error be reported.
        task.add_done_callback(lambda ended: self._over(call, ended))
        try:
            result = await asyncio.shield(task)
        except BaseException:
            if self._severed:
                await self._nothing()
            task.cancel()
            raise
        if self._severed:
            await self._nothing()
        return result

    def _over(self, call: str, task: asyncio.Task[Any]) -> None:
        self._running.pop(call, None)
        if not task.cancelled():
            task.exception()

    async def _nothing(self) -> None:
        # Kept here, or the collector would end the severed caller at a moment of its own choosing.
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    async def _meet(self, method: str, blow: Blow | None, do: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if blow is None:
            return self._shown(await do(), None)
        match blow.fault:
            case Fault.UNREACHED:
                raise Unknown(f"{method} got no answer", hint="simulated")
            case Fault.FAILED:
                definite = DEFINITE.get(method, (Unknown,))
                which = int(self._fates.chance(stable_id(blow.call), "error") * len(definite))
                raise definite[which](f"{method} failed", hint="simulated")
            case Fault.SLOW:
                await asyncio.sleep(blow.seconds)
                return self._shown(await do(), None)
            case Fault.HUNG:
                await asyncio.sleep(blow.seconds)
                raise Unknown(f"{method} hung", hint="simulated")
            case Fault.LOST:
                await do()
                await asyncio.sleep(blow.seconds)
                raise Unknown(f"the reply to {method} was lost", hint="simulated")
            case Fault.CUT:
                try:
                    await asyncio.wait_for(do(), blow.seconds)
                except TimeoutError:
                    pass
                raise Unknown(f"{method} was cut short", hint="simulated")
            case Fault.TWICE:
                result = await do()
                try:
                    await do()
                except MultiverseError:
                    pass
                return self._shown(result, None)
            case Fault.LATE:
                self._later(blow, do)
                raise Unknown(f"{method} was given up", hint="simulated")
            case Fault.STALE | Fault.TORN:
                return self._shown(await do(), blow)

    def _shown(self, result: T, blow: Blow | None) -> T:
        if isinstance(result, SchedulerView):
            return cast(T, self._fates.old_view(result, blow))
        return result

    def _later(self, blow: Blow, do: Callable[[], Coroutine[Any, Any, object]]) -> None:
        async def arrive() -> None:
            await asyncio.sleep(blow.seconds)
            await do()

        task = asyncio.create_task(arrive())
        self._running[f"{blow.call}, late"] = task
        task.add_done_callback(lambda ended: self._over(f"{blow.call}, late", ended))


# --- what befalls the world ------------------------------------------------------------------------


class What(StrEnum):
    """The kinds of mishap, and which part of the simulation does them."""

    VM_DIES = "a VM dies"
    FLOODS = "a guest floods its channel"
    REGISTERS_AGAIN = "a node registers again"
    CLUSTER_AWAY = "slurmctld is away"
    CLUSTER_RESTARTS = "slurmctld restarts"
    RECONFIGURED = "slurmctld reads its configuration again"
    HOST_AWAY = "a host is out of reach"
    HOST_FENCED = "a host is out of reach, switched off and fenced"
    DROPPED = "an operator drops a template"
    DISK_FULL = "the store's disk is full"
    CRASH = "the controller dies"


@dataclass(frozen=True)
class Mishap:
    """Something that befalls the world `at` some time, for some `seconds`. `pick`, from 0 to 1, chooses
    among what there then is to befall."""

    at: float
    what: What
    seconds: float = 0.0
    pick: float = 0.0


@dataclass(frozen=True)
class Death:
    """The controller dies at its `commit`th commit that changes anything, right before or right `after` it,
    and stays away for `seconds`."""

    commit: int
    after: bool = False
    seconds: float = 1.0


LASTS: Mapping[What, tuple[float, float]] = {
    What.CLUSTER_AWAY: (2.0, 150.0),
    What.CLUSTER_RESTARTS: (1.0, 10.0),
    What.HOST_AWAY: (2.0, 300.0),
    What.HOST_FENCED: (20.0, 200.0),
    What.DISK_FULL: (0.5, 60.0),
    What.CRASH: (0.1, 20.0),
}
"""For how long, in seconds: a range that is drawn from."""


def every(mean: float, what: What, rng: Random, until: float) -> tuple[Mishap, ...]:
    """Mishaps of one kind, `mean` seconds apart by chance, until `until`; none for 0."""
    found: list[Mishap] = []
    at = 0.0
    while mean > 0 and (at := at + rng.expovariate(1.0 / mean)) < until:
        found.append(Mishap(round(at, 3), what, round(rng.uniform(*LASTS.get(what, (0.0, 0.0))), 3), rng.random()))
    return tuple(found)
