"""What goes wrong, by seed: on the way to a port and back, and in the world itself.

`Wire` decides the fate of each call; `FaultyScheduler` and `FaultyHypervisor` put every call of a port
through one. A wire can also be severed: the caller has died, and what it had begun may or may not come
to its end, but nobody hears of it and nothing new is begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, TypeVar

from multiverse.core.errors import Broken, Exhausted, MultiverseError, Unknown
from multiverse.core.model import (
    Attempt,
    HypervisorView,
    Identity,
    JobRef,
    Membership,
    SchedulerView,
    Size,
    Stage,
    User,
    Vm,
    VmSpec,
)
from multiverse.ports import Hypervisor, Scheduler
from multiverse.simulation.world import World

T = TypeVar("T")


class Fault(StrEnum):
    """The fate of one call."""

    UNREACHED = "unreached"  # Unknown, and not done
    FAILED = "failed"  # a definite error, and not done
    SLOW = "slow"  # done, much later than usual
    HUNG = "hung"  # not done, and no reply for a long time, then Unknown
    LOST = "lost"  # done, and no reply for a long time, then Unknown
    CUT = "cut"  # stopped somewhere in the middle, then Unknown
    TWICE = "twice"  # done again at once, as by a transport that tries again


DEFINITE: Mapping[str, tuple[type[MultiverseError], ...]] = {
    "prepare": (Exhausted, Broken),
    "create": (Exhausted, Broken),
    "start": (Broken,),
}
"""The definite errors that a call may meet without anybody's fault; others have none."""


@dataclass(frozen=True)
class Odds:
    """How likely each fault is, for each call, until `until` (virtual seconds since the loop began).
    Calls in `spared` always succeed. Times in seconds, ranges that are drawn from."""

    rates: Mapping[Fault, float] = field(default_factory=dict)
    until: float = float("inf")
    spared: tuple[str, ...] = ()
    slow: tuple[float, float] = (1.0, 15.0)
    silence: tuple[float, float] = (5.0, 30.0)

    @staticmethod
    def even(rate: float, until: float = float("inf")) -> Odds:
        """Every fault as likely as every other, `rate` together."""
        return Odds({fault: rate / len(Fault) for fault in Fault}, until)


class Wire:
    """Between one caller and the world's ports."""

    def __init__(self, rng: Random, odds: Odds | None = None, *, outlives: bool = True) -> None:
        """`outlives`: what was begun may go on without its caller, as a command that runs as a process of
        its own does, and a library's call does not."""
        self._rng = rng
        self._outlives = outlives
        self._odds = odds or Odds()
        self._severed = False
        self._running: dict[int, asyncio.Task[Any]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._calls = 0
        self.met: dict[str, int] = {}  # faults, by "call: fault", for the test's report

    def sever(self) -> None:
        """The caller dies: each of its calls is cut short or runs to its end unheard, by chance."""
        self._severed = True
        for task in list(self._running.values()):
            if not self._outlives or self._rng.random() < 0.5:
                task.cancel()

    async def call(self, name: str, do: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make one call, or let it meet its fate."""
        self._calls += 1
        number = self._calls
        if self._severed:
            await self._nothing(number)
        task = asyncio.create_task(self._meet(name, do))
        self._running[number] = task
        # A call that outlives its caller must not be collected half-way, nor its error be reported.
        task.add_done_callback(lambda ended: self._over(number, ended))
        try:
            result = await asyncio.shield(task)
        except BaseException:
            if self._severed:
                await self._nothing(number)
            task.cancel()
            raise
        if self._severed:
            await self._nothing(number)
        return result

    def _over(self, number: int, task: asyncio.Task[Any]) -> None:
        self._running.pop(number, None)
        if not task.cancelled():
            task.exception()

    async def _nothing(self, number: int) -> None:
        # Kept here, or the collector would end the severed caller at a moment of its own choosing.
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._waiting[number]

    async def _meet(self, name: str, do: Callable[[], Coroutine[Any, Any, T]]) -> T:
        fault = self._draw(name)
        if fault is None:
            return await do()
        self.met[f"{name}: {fault}"] = self.met.get(f"{name}: {fault}", 0) + 1
        match fault:
            case Fault.UNREACHED:
                raise Unknown(f"{name} got no answer", hint="simulated")
            case Fault.FAILED:
                definite = DEFINITE.get(name, (Unknown,))
                raise self._rng.choice(definite)(f"{name} failed", hint="simulated")
            case Fault.SLOW:
                await asyncio.sleep(self._rng.uniform(*self._odds.slow))
                return await do()
            case Fault.HUNG:
                await asyncio.sleep(self._rng.uniform(*self._odds.silence))
                raise Unknown(f"{name} hung", hint="simulated")
            case Fault.LOST:
                await do()
                await asyncio.sleep(self._rng.uniform(*self._odds.silence))
                raise Unknown(f"the reply to {name} was lost", hint="simulated")
            case Fault.CUT:
                try:
                    await asyncio.wait_for(do(), self._rng.uniform(0.001, 0.3))
                except TimeoutError:
                    pass
                raise Unknown(f"{name} was cut short", hint="simulated")
            case Fault.TWICE:
                result = await do()
                try:
                    await do()
                except MultiverseError:
                    pass
                return result

    def _draw(self, name: str) -> Fault | None:
        point = self._rng.random()
        if name in self._odds.spared or asyncio.get_running_loop().time() >= self._odds.until:
            return None
        for fault, rate in self._odds.rates.items():
            point -= rate
            if point < 0:
                return fault
        return None


class FaultyScheduler:
    """A `ports.Scheduler` at the other end of a wire."""

    def __init__(self, inner: Scheduler, wire: Wire) -> None:
        self._inner = inner
        self._call = wire.call

    async def look(self) -> SchedulerView:
        return await self._call("look", lambda: self._inner.look())

    async def pin(self, job: JobRef, feature: str) -> None:
        await self._call("pin", lambda: self._inner.pin(job, feature))

    async def unpin(self, job: JobRef) -> None:
        await self._call("unpin", lambda: self._inner.unpin(job))

    async def requeue(self, job: JobRef) -> None:
        await self._call("requeue", lambda: self._inner.requeue(job))

    async def revoke(self, job: JobRef, reason: str) -> None:
        await self._call("revoke", lambda: self._inner.revoke(job, reason))

    async def fail(self, node: str, reason: str) -> None:
        await self._call("fail", lambda: self._inner.fail(node, reason))

    async def remove(self, node: str) -> None:
        await self._call("remove", lambda: self._inner.remove(node))

    async def explain(self, job: JobRef, text: str) -> None:
        await self._call("explain", lambda: self._inner.explain(job, text))

    async def membership(self, vm: Vm, attempt: Attempt | None) -> Membership:
        return await self._call("membership", lambda: self._inner.membership(vm, attempt))

    async def user(self, uid: int) -> User:
        return await self._call("user", lambda: self._inner.user(uid))


class FaultyHypervisor:
    """A `ports.Hypervisor` at the other end of a wire."""

    def __init__(self, inner: Hypervisor, wire: Wire) -> None:
        self._inner = inner
        self._call = wire.call

    async def look(self) -> HypervisorView:
        return await self._call("look", lambda: self._inner.look())

    async def prepare(self, host: str, image: str, size: Size) -> Sequence[Stage]:
        return await self._call("prepare", lambda: self._inner.prepare(host, image, size))

    async def drop(self, host: str, image: str) -> None:
        await self._call("drop", lambda: self._inner.drop(host, image))

    async def create(self, vm: VmSpec) -> Sequence[Stage]:
        return await self._call("create", lambda: self._inner.create(vm))

    async def start(self, name: str, size: Size, identity: Identity) -> Sequence[Stage]:
        return await self._call("start", lambda: self._inner.start(name, size, identity))

    async def destroy(self, name: str, grace: float) -> None:
        await self._call("destroy", lambda: self._inner.destroy(name, grace))


@dataclass(frozen=True)
class Mishaps:
    """What befalls the world itself until `until`: the mean seconds between two, 0 for never."""

    vm_dies: float = 0.0
    cluster_away: float = 0.0
    away: tuple[float, float] = (2.0, 40.0)  # for how long, in seconds
    until: float = 600.0


def befall(world: World, rng: Random, mishaps: Mishaps) -> list[asyncio.Task[None]]:
    """Let mishaps befall the world from now on; the tasks end by themselves after `until`."""

    async def every(mean: float, do: Callable[[], Awaitable[None]]) -> None:
        if mean <= 0:
            return
        while True:
            await asyncio.sleep(rng.expovariate(1.0 / mean))
            if asyncio.get_running_loop().time() >= mishaps.until:
                return
            await do()

    async def vm_dies() -> None:
        names = sorted(world.machines.vms)
        if names:
            world.kill_vm(rng.choice(names))

    async def cluster_away() -> None:
        world.cluster.go_away()
        await asyncio.sleep(rng.uniform(*mishaps.away))
        world.cluster.come_back()

    return [
        asyncio.create_task(every(mishaps.vm_dies, vm_dies)),
        asyncio.create_task(every(mishaps.cluster_away, cluster_away)),
    ]
