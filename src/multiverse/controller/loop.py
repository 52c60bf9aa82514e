"""The controller: looks at the world, plans, commits, and lets the effects follow. The only writer of rows."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from collections.abc import Sequence

import structlog

from multiverse.config import Settings
from multiverse.controller.effects import Effects, Surroundings
from multiverse.controller.observe import Observer
from multiverse.core.errors import MultiverseError
from multiverse.core.model import AttemptState, CloneKind, HypervisorView, SchedulerView, Size, VmState, World
from multiverse.core.planner import orphans, plan
from multiverse.core.policy import Policy, Pool
from multiverse.core.provisioning.forecast import ForecastRecorder
from multiverse.core.provisioning.pools import PoolStatus, pool_status
from multiverse.core.state import Rows
from multiverse.core.transition import Command, Done, Effect, EffectKind, Message
from multiverse.ports import Clock, Hypervisor, Scheduler
from multiverse.store import Store, Transaction

log = structlog.get_logger()

EXPECTING = 0.1
"""Seconds between looks at the scheduler while a node's registration or a job's end is awaited."""

WANING = 0.05
"""What has been awaited for long is looked for less often: pauses grow to this share of the time waited."""

UNCOMMITTED = 1.0
"""Seconds until a pass that was not committed is tried again: whatever is due stays due, and must not make us spin."""

_SCHEDULER_EFFECTS = (EffectKind.GATE, EffectKind.PIN, EffectKind.REQUEUE, EffectKind.REVOKE, EffectKind.START)
_LOOKED_FOR = (EffectKind.WITHDRAW, EffectKind.END, EffectKind.RELEASE)

_AWAITED_OF_VMS = (VmState.STARTING, VmState.RELEASING)
_AWAITED_OF_ATTEMPTS = (AttemptState.SPAWNED, AttemptState.RECLAIMING)


def policy_of(settings: Settings) -> Policy:
    """The planner's policy from the settings."""
    s, p = settings, settings.pacing
    return Policy(
        subnet=ipaddress.IPv4Network(s.network.subnet),
        gateway=s.network.gateway,
        first_address=s.network.first,
        image=s.image.default,
        kind=s.image.kind,
        base=Size(s.qemu.base_cpus, s.qemu.base_memory),
        guest_reserve=s.image.guest_reserve,
        overcommit=s.host.overcommit,
        floor=s.host.floor,
        provisioning=p.provisioning,
        spawn_timeout=p.spawn_timeout,
        pin_timeout=p.pin_timeout,
        complete_timeout=p.complete_timeout,
        retry_base=p.retry_base,
        retry_limit=p.retry_limit,
        replacements=p.replacements,
        attempts=p.attempts,
        pools=tuple(
            Pool(
                pool.image,
                pool.depth,
                pool.min,
                pool.max or pool.min,
                Size(pool.cpus, pool.memory),
                pool.max_age,
                pool.offer,
            )
            for pool in s.pool
        ),
        rates={
            CloneKind.INSTANT: p.instant_rate,
            CloneKind.LINKED: p.linked_rate,
            CloneKind.FULL: p.full_rate,
        },
    )


def _switched_off(messages: Sequence[Message]) -> set[str]:
    """The hosts that an operator says are off: they are known again when they are seen again."""
    return {one.host for one in messages if isinstance(one, Command) and one.verb == "fence"}


class Controller:
    """Runs until cancelled. A restart needs no code of its own: it is the first look."""

    def __init__(
        self, store: Store, scheduler: Scheduler, hypervisor: Hypervisor, clock: Clock, settings: Settings
    ) -> None:
        self._store, self._clock, self._settings = store, clock, settings
        self.policy = policy_of(settings)
        self._meter = ForecastRecorder(self.policy)
        self._wake = asyncio.Event()
        self._inbox: deque[Message] = deque()
        self._asked: list[asyncio.Future[None]] = []  # one for each command in the inbox
        self._rows = Rows(store.site)
        self._expecting: float | None = None  # since when the newest of what is awaited is
        self._strangers: dict[str, float] = {}
        # Hosts to be kept as known in the next commit: those that were seen since the last one and, at the start, those
        # that the settings name. One that has not answered yet may hold what those that have answered cannot.
        self._sighted: set[str] = {host for source in hypervisor.sources for host in source.hosts}
        self.began = clock.now()
        self.uncommitted: tuple[float, str] | None = None
        """Since when passes are not kept, and why."""
        self.effects_ended: Counter[tuple[str, str]] = Counter()
        """By kind, and the error's class or "done"."""
        self.scheduler: Observer[SchedulerView] = Observer(
            "scheduler", scheduler.observe, clock, self._scheduler_interval, self._wake.set
        )
        self.hypervisor: Observer[HypervisorView] = Observer(
            "hypervisor", hypervisor.sources[0].observe, clock, lambda: settings.poll, self._wake.set
        )
        self._effects = Effects(
            scheduler,
            hypervisor,
            clock,
            Surroundings(
                gateway=settings.network.gateway,
                hosts=settings.network.hosts,
                mounts=settings.mounts,
                grace=settings.pacing.reclaim_grace,
            ),
            self._effect_ended,
        )

    # --- from outside --------------------------------------------------------------------------------

    def hint(self) -> None:
        """Something may have changed in the scheduler: look sooner."""
        self.scheduler.poke(burst=True)

    def strangers(self) -> list[str]:
        """Names of our site that no row explained at the last pass."""
        return sorted(self._strangers)

    def pools(self) -> list[PoolStatus]:
        """The warm pools, as of the last pass."""
        world = World(self.scheduler.latest, forecast=self._meter.forecast(self._clock.now()))
        return pool_status(self._rows, world, self.policy)

    def failing(self, often: int) -> list[tuple[Effect, int, str, float]]:
        """Effects that failed at least `often` times in a row: how often, why, and when they are tried again."""
        return self._effects.failing(often)

    def command(self, command: Command) -> asyncio.Future[None]:
        """Take an operator's wish; what comes of it is seen in the rows. Done when it is committed: till then it is
        lost if the daemon dies."""
        self._inbox.append(command)
        self._wake.set()
        committed = asyncio.get_running_loop().create_future()
        self._asked.append(committed)
        return committed

    # --- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Observe, plan and act until cancelled."""
        tasks = [asyncio.create_task(self.scheduler.run()), asyncio.create_task(self.hypervisor.run())]
        try:
            while True:
                self._wake.clear()
                if self._pass():
                    await self._sleep(tasks)
                else:
                    await asyncio.sleep(UNCOMMITTED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._effects.close()

    async def _sleep(self, observers: list[asyncio.Task[None]]) -> None:
        now = self._clock.now()
        left = min(self._settings.poll, self._effects.next_due() - now, self._meter.next_due(now) - now)
        if left > 0:
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                pass
        for task in observers:
            if task.done():
                task.result()  # an observer ends only by a bug: raise it here

    def _pass(self) -> bool:
        """One pass: the world first, the rows second, one commit, then the effects. Awaits nothing. False if
        it was not committed: then nothing of it has happened."""
        now = self._clock.now()
        world = World(
            self.scheduler.latest, self.hypervisor.latest, self._effects.ended_at(), self._meter.forecast(now)
        )
        messages = list(self._inbox)
        in_sight = set(world.hypervisor.value.hosts) if world.hypervisor else set()
        self._sighted |= in_sight
        try:
            with self._store.transaction() as tx:
                known = tx.load_active().hosts | self._sighted
                tx.keep_hosts(known - _switched_off(messages) | in_sight)
                rows = tx.load_active()
                moves = plan(rows, world, messages, now, self.policy)
                for move in moves:
                    tx.apply(move)
                for message in messages:
                    if isinstance(message, Done):
                        self._journal_done(tx, rows, message)
                rows = tx.load_active() if moves else rows
        except MultiverseError as error:
            # Nothing was kept, and nothing will be done that is not kept: the messages stay, we try again.
            log.error("the pass was not committed", why=str(error))
            self.uncommitted = (self.uncommitted[0] if self.uncommitted else self._clock.now(), str(error))
            return False
        self.uncommitted = None
        self._sighted.clear()
        self._meter.note(moves, now)
        for _ in messages:
            self._inbox.popleft()
        for committed in self._asked:
            if not committed.done():  # whoever asked may have gone
                committed.set_result(None)
        self._asked.clear()
        self._rows = rows
        awaited = [vm.since for vm in rows.vms.values() if vm.state in _AWAITED_OF_VMS]
        awaited += [a.since for a in rows.attempts.values() if a.state in _AWAITED_OF_ATTEMPTS]
        self._expecting = max(awaited, default=None)
        self._effects.ensure(rows, self._confirmed_strangers(rows, world))
        return True

    @staticmethod
    def _journal_done(tx: Transaction, rows: Rows, done: Done) -> None:
        row = rows.get(done.key)
        if row is not None and (done.stages or done.error):
            tx.measured(row, str(done.kind), done.stages, str(done.error) if done.error else "")

    def _confirmed_strangers(self, rows: Rows, world: World) -> list[str]:
        """Of the names that no row explains, those seen so in two looks: a single one destroys nothing."""
        if world.scheduler is None or world.hypervisor is None:
            return []
        began = min(world.scheduler.began, world.hypervisor.began)
        names = orphans(rows, world)
        self._strangers = {name: self._strangers.get(name, began) for name in names}
        confirmed = [name for name in names if self._strangers[name] < began]
        return confirmed

    # --- pace ----------------------------------------------------------------------------------------

    def _scheduler_interval(self) -> float:
        if self._expecting is None:
            return self._settings.poll
        waited = self._clock.now() - self._expecting
        return min(self._settings.poll, max(EXPECTING, WANING * waited))

    def _effect_ended(self, done: Done) -> None:
        self._inbox.append(done)
        self.effects_ended[str(done.kind), type(done.error).__name__.lower() if done.error else "done"] += 1
        if done.key.kind != "attempt" or done.kind is EffectKind.PIN:
            self.hypervisor.poke()
        if done.kind in _SCHEDULER_EFFECTS or done.kind in _LOOKED_FOR:
            self.scheduler.poke(burst=done.kind in _SCHEDULER_EFFECTS)
        self._wake.set()
