"""Effects: what rows ask for is done here, beside the planner, one lane for each object.

A lane does one thing at a time, so that the destruction of a VM never overtakes its creation. An
effect means *ensure*: as long as its row asks for it, it is repeated, each time after a longer pause.
Nothing here writes a row; what came of an effect goes back to the planner as a message and, above all,
is looked at.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import structlog

from multiverse.core.errors import Broken, Gone, MultiverseError, Refused, Stale, Unknown
from multiverse.core.machines.tables import effect_of
from multiverse.core.model import Attempt, Depth, Identity, Key, Mount, Row, Stage, Template, User, Vm, VmRef, VmSpec
from multiverse.core.provisioning.spares import node_spec
from multiverse.core.state import Rows
from multiverse.core.transition import Done, Effect, EffectKind
from multiverse.ports import Clock, Hypervisor, Scheduler

log = structlog.get_logger()

AGAIN, AGAIN_LIMIT = 2.0, 60.0
"""Pause before an effect is repeated, doubled each time up to the limit; seconds."""

TIMEOUTS: dict[EffectKind, float] = {EffectKind.BUILD: 600.0, EffectKind.CREATE: 300.0, EffectKind.START: 300.0}
OTHER_TIMEOUT = 60.0

TELLING = 2
"""Jobs that are told why they wait, at the same time: hundreds may wait, and none of that is urgent."""


@dataclass
class _Lane:
    effect: Effect
    state: str
    task: asyncio.Task[None] | None = None
    began: float = 0.0
    ended: float | None = None
    runs: int = 0
    failures: int = 0  # in a row
    why: str = ""


@dataclass
class Surroundings:
    """What effects need beside the row itself: its relatives, and what every guest is given."""

    gateway: str
    hosts: tuple[tuple[str, str], ...]
    mounts: tuple[Mount, ...]
    grace: float
    rows: Rows = field(default_factory=lambda: Rows(""))


class Effects:
    """Runs what the live rows ask for. `done` is called, on the loop, with each effect's end."""

    def __init__(
        self,
        scheduler: Scheduler,
        hypervisor: Hypervisor,
        clock: Clock,
        around: Surroundings,
        done: Callable[[Done], None],
    ) -> None:
        self._scheduler, self._hypervisor, self._clock = scheduler, hypervisor, clock
        self._around, self._done = around, done
        self._lanes: dict[Key, _Lane] = {}
        self._effect_ended_at: dict[Key, float] = {}
        self._telling = asyncio.Semaphore(TELLING)

    # --- what runs, and when something is due -------------------------------------------------------

    def ended_at(self) -> Mapping[Key, float]:
        """For each live row, when its last effect ended; infinity while one runs."""
        return dict(self._effect_ended_at)

    def next_due(self) -> float:
        """When the next repetition is due."""
        return min((self._due(lane) for lane in self._lanes.values() if lane.task is None), default=float("inf"))

    def failing(self, often: int) -> list[tuple[Effect, int, str, float]]:
        """Effects that failed at least `often` times in a row: how often, why, and when they are tried again."""
        return [
            (lane.effect, lane.failures, lane.why, self._due(lane))
            for _, lane in sorted(self._lanes.items())
            if lane.failures >= often
        ]

    @staticmethod
    def _due(lane: _Lane) -> float:
        if lane.ended is None:
            return 0.0
        if lane.effect.kind is EffectKind.EXPLAIN:
            return float("inf")
        return lane.ended + min(AGAIN_LIMIT, AGAIN * 2.0 ** min(lane.runs - 1, 16))

    def ensure(self, rows: Rows, strangers: Sequence[str] = ()) -> None:
        """Make the lanes follow the rows. `strangers` are names of our site that no row explains."""
        self._around.rows = rows
        live: dict[Key, tuple[Effect | None, Row | str]] = {}
        for table in (rows.attempts, rows.vms, rows.templates):
            for row in table.values():
                live[row.key] = (effect_of(row), row)
        for name in strangers:
            key = Key("vm", serial_of(name))
            if key not in live:
                live[key] = (Effect(EffectKind.RELEASE, key, name), name)
        for key in [key for key, lane in self._lanes.items() if live.get(key, (None, ""))[0] != lane.effect]:
            lane = self._lanes[key]
            if lane.task is None:
                del self._lanes[key]
            elif not lane.task.cancelling():
                lane.task.cancel()  # its end wakes the loop, and the lane is free then
        for key, (effect, subject) in live.items():
            if effect is None:
                continue
            lane = self._lanes.setdefault(key, _Lane(effect, _state(subject)))
            if lane.task is None and lane.effect == effect and self._due(lane) <= self._clock.now():
                self._begin(lane, subject)
        for key in [key for key in self._effect_ended_at if key not in live and key not in self._lanes]:
            del self._effect_ended_at[key]

    def _begin(self, lane: _Lane, subject: Row | str) -> None:
        lane.began, lane.state = self._clock.now(), _state(subject)
        lane.runs += 1
        self._effect_ended_at[lane.effect.key] = float("inf")
        lane.task = asyncio.create_task(self._run(lane, subject), name=f"{lane.effect.kind} {lane.effect.key}")
        lane.task.add_done_callback(lambda task: self._never_ran(lane, task))

    def _never_ran(self, lane: _Lane, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step does not even reach its `finally`."""
        if lane.task is task:
            self._ended(lane, None, ())

    def _ended(self, lane: _Lane, error: MultiverseError | None, stages: Sequence[Stage]) -> None:
        lane.task = None
        lane.ended = self._effect_ended_at[lane.effect.key] = self._clock.now()
        failed = error is not None and not isinstance(error, Stale)
        lane.failures, lane.why = (lane.failures + 1, str(error)) if failed else (0, "")
        if failed:
            log.warning("effect failed", effect=lane.effect.kind, key=str(lane.effect.key), why=str(error))
        self._done(Done(lane.effect.key, lane.effect.kind, lane.state, error, tuple(stages)))

    async def _run(self, lane: _Lane, subject: Row | str) -> None:
        error: MultiverseError | None = None
        stages: Sequence[Stage] = ()
        limit = TIMEOUTS.get(lane.effect.kind, OTHER_TIMEOUT)
        try:
            turn = self._telling if lane.effect.kind is EffectKind.EXPLAIN else nullcontext()
            async with turn, asyncio.timeout(limit):
                stages = await self._act(lane.effect, subject) or ()
        except MultiverseError as caught:
            error = caught
        except TimeoutError:
            error = Unknown(f"{lane.effect.kind} did not end within {limit:g} s")
        except Exception as caught:  # a bug in a driver must not stop the loop, and is never lost
            log.exception("effect failed unexpectedly", effect=lane.effect.kind, key=str(lane.effect.key))
            error = Unknown(f"{type(caught).__name__}: {caught}")
        finally:
            self._ended(lane, error, stages)

    async def close(self) -> None:
        """Stop all that runs. What was begun is found again by the first look of whoever comes next."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the effects themselves ----------------------------------------------------------------------

    async def _act(self, effect: Effect, subject: Row | str) -> Sequence[Stage] | None:
        match effect.kind, subject:
            case EffectKind.GATE, Attempt():
                await self._scheduler.unpin(subject.job)
            case EffectKind.EXPLAIN, Attempt():
                await self._scheduler.explain(subject.job, effect.text)
            case EffectKind.PIN, Attempt():
                await self._introduce(subject)
                await self._scheduler.pin(subject.job, subject.feature, self._nodes_of(subject), effect.text)
            case EffectKind.REQUEUE, Attempt():
                await self._scheduler.requeue(subject.job)
            case EffectKind.REVOKE, Attempt():
                await self._scheduler.revoke(subject.job, effect.text)
            case EffectKind.CREATE, Vm():
                vm = subject
                return await self._hypervisor.create(
                    VmSpec(vm.name, vm.host, vm.image, vm.kind, vm.size, vm.mac, vm.template, vm.pool is Depth.PARKED)
                )
            case EffectKind.START, Vm():
                return await self._start(subject)
            case EffectKind.OFFER, Vm() if self._scheduler.offers is not None:
                await self._scheduler.offers.offer(node_spec(subject, None))
            case EffectKind.WITHDRAW, Vm() if self._scheduler.offers is not None:
                await self._scheduler.offers.withdraw(subject.name)
            case ((EffectKind.END | EffectKind.RELEASE), Vm()):
                if subject.failed:
                    await self._scheduler.set_down(subject.name, "multiverse: its VM is gone")
                await self._destroy(subject)
                if effect.kind is EffectKind.RELEASE:
                    await self._scheduler.delete_node(subject.name)
            case EffectKind.RELEASE, str():
                await self._scheduler.set_down(subject, "multiverse: nothing explains it")
                await self._hypervisor.destroy(VmRef(subject), 0.0)
                await self._scheduler.delete_node(subject)
            case EffectKind.BUILD, Template() if self._hypervisor.templates is not None:
                return await self._hypervisor.templates.build_template(subject.which)
            case EffectKind.DROP, Template() if self._hypervisor.templates is not None:
                await self._hypervisor.templates.delete_template(subject.which)
            case _:
                raise AssertionError(f"no such effect: {effect}")
        return None

    def _nodes_of(self, attempt: Attempt) -> list[str]:
        return [vm.name for vm in self._around.rows.vms.values() if vm.attempt == attempt.id]

    async def _destroy(self, vm: Vm) -> None:
        try:
            await self._hypervisor.destroy(VmRef(vm.name), 0.0 if vm.failed else self._around.grace)
        except MultiverseError:
            if not vm.fenced:  # its host is off: what is left of it goes when the host is back
                raise

    async def _introduce(self, attempt: Attempt) -> None:
        """A VM that joined before its job came is told whom it serves, before the job may start there."""
        joined = [vm for vm in self._around.rows.vms.values() if vm.attempt == attempt.id and vm.pool is Depth.JOINED]
        users = self._hypervisor.users
        if joined and users is None:
            raise Refused(f"{joined[0].name} cannot be told of its user: its hypervisor adds none to a running guest")
        for vm in joined:
            try:
                assert users is not None
                await users.add_user(VmRef(vm.name), await self._user(attempt.uid))
            except Broken as error:  # another VM may take it in; this one never will
                raise Refused(f"{vm.name} could not be told of its user: {error.message}") from error

    async def _user(self, uid: int) -> User:
        try:
            return await self._scheduler.user(uid)
        except Gone as error:
            raise Refused(f"the job's user is unknown here: {error.message}") from error

    async def _start(self, vm: Vm) -> Sequence[Stage]:
        attempt = self._around.rows.attempt_of(vm)
        peers = tuple(
            (peer.name, peer.address.partition("/")[0])
            for peer in self._around.rows.vms.values()
            if vm.attempt is not None and peer.attempt == vm.attempt and peer.id != vm.id and not peer.failed
        )
        users = (await self._user(attempt.uid),) if attempt else ()
        bootstrap = await self._scheduler.bootstrap(node_spec(vm, attempt))
        identity = Identity(
            hostname=vm.name,
            mac=vm.mac,
            address=vm.address,
            gateway=self._around.gateway,
            machine_id=machine_id(vm.name),
            users=users,
            mounts=self._around.mounts,
            peers=(*self._around.hosts, *peers),
            bootstrap=bootstrap,
        )
        return await self._hypervisor.start(VmRef(vm.name), vm.size, identity)


def _state(subject: Row | str) -> str:
    return "" if isinstance(subject, str) else str(subject.state)


def machine_id(name: str) -> str:
    """32 hex digits (machine-id(5)) that are this VM's alone, for names never recur; the same each time, so
    that an identity that is sent again is the same identity."""
    return hashlib.sha256(f"multiverse machine-id {name}".encode()).hexdigest()[:32]


def serial_of(name: str) -> int:
    """The serial in a VM's name, `mv<site>-<serial>`; 0 if it has none."""
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else 0
