"""The controller: observes the world, plans, commits, and lets the effects follow. The only writer of rows."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from random import Random, SystemRandom
from typing import Protocol

import structlog

from multiverse.config import Settings
from multiverse.controller.comments import CommentPlan, CommentWriter
from multiverse.controller.effects import Effects, Failure, PilotRef, SavedRef, Surroundings
from multiverse.controller.learned import Exclusions, ForecastRecorder, MissingHints
from multiverse.controller.observers import Awaited, FollowedHosts, ObserverTasks, SchedulerObserver
from multiverse.controller.policy import policy_of
from multiverse.controller.publication import wait_at_most
from multiverse.controller.saved_keys import SavedKeys
from multiverse.controller.users import LookupFailure, UserDirectory
from multiverse.core.capacity.sizes import claimable_cpus
from multiverse.core.changes import may_add, orphans
from multiverse.core.context import Context
from multiverse.core.errors import Exhausted, MultiverseError, Refused
from multiverse.core.machines.host import held_back
from multiverse.core.machines.lease import unexplained_pilots
from multiverse.core.machines.tables import TABLES, awaited_rows, note_unconfirmed
from multiverse.core.model.basics import Size
from multiverse.core.model.eviction import Step
from multiverse.core.model.host import HypervisorView, JobLimits, KnownHost
from multiverse.core.model.job import Attempt
from multiverse.core.model.reason import Reason
from multiverse.core.model.saved import Saved
from multiverse.core.model.vm import Offer, Vm, VmRef
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.planner import plan
from multiverse.core.policy import Policy
from multiverse.core.pools import PoolStatus, pool_status
from multiverse.core.quiet import can_wait, expected_sources
from multiverse.core.rebalance.drains import why_stay
from multiverse.core.rebalance.plan import proposals
from multiverse.core.saving import unexplained_states, with_its_state
from multiverse.core.state import State
from multiverse.core.transition import Awaiting, Command, Done, Message, Move, ShownBy
from multiverse.ports import Clock, Fencing, Hypervisor, Scheduler
from multiverse.store import Store


class CommandInbox:
    """Messages that no committed pass has taken yet, in their order."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._messages: deque[Message] = deque()
        self._asked: list[tuple[Command, asyncio.Future[None]]] = []  # for each command among them

    def put(self, message: Message) -> None:
        """Keep a message for the next pass. It does not make the next pass come sooner."""
        self._messages.append(message)

    def ask(self, command: Command) -> asyncio.Future[None]:
        """Keep a command, and wake the loop. Done when it is committed; raises `Refused` if it may not be done."""
        self.put(command)
        self._wake()
        committed = asyncio.get_running_loop().create_future()
        self._asked.append((command, committed))
        return committed

    def of_pass(self, *, releasing: bool) -> list[Message]:
        """The messages for a pass; with `releasing` only messages that add nothing."""
        return [message for message in self._messages if not (releasing and may_add(message))]

    def committed(self, messages: Sequence[Message], refusals: Iterable[tuple[Command, Refused]]) -> None:
        kept = {id(message) for message in messages}
        self._messages = deque(message for message in self._messages if id(message) not in kept)
        refused = {id(command): error for command, error in refusals}
        for command, committed in self._asked:
            if id(command) in kept and not committed.done():  # whoever asked may have gone
                if error := refused.get(id(command)):
                    committed.set_exception(error)
                else:
                    committed.set_result(None)
        self._asked = [(command, committed) for command, committed in self._asked if id(command) not in kept]


class _Confirmation:
    """Confirms names with their sources by a second observation: a single one destroys nothing."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], float] = {}  # when the observation began that showed it first

    def confirmed(self, shown: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
        """What an earlier observation has shown, too. `shown`: what is shown, and when that observation began."""
        self._first = {one: self._first.get(one, began) for one, began in shown.items()}
        return [one for one, began in shown.items() if self._first[one] < began]


class OrphanConfirmation:
    """VMs, pilots of leases, and saved VMs that no row explains."""

    def __init__(self, state: State, policy: Policy) -> None:
        self._state, self.policy = state, policy
        self._vms, self._pilots, self._states = (_Confirmation() for _ in range(3))
        self._names: list[str] = []
        self.confirmed: list[VmRef | PilotRef | SavedRef] = []  # to be removed, as of the latest commit

    def names(self) -> list[str]:
        return self._names

    def committed(self, world: World) -> None:
        self.confirmed = []
        if world.scheduler is not None:
            began, unexplained = world.scheduler.began, unexplained_pilots(self._state.leases, world.scheduler.value)
            vms = self._orphaned_vms(world)
            self._names = sorted({name for name, _ in vms})
            self.confirmed += [VmRef(*one) for one in self._vms.confirmed(vms)]
            self.confirmed += [PilotRef(*one) for one in self._pilots.confirmed(dict.fromkeys(unexplained, began))]
        states = {
            (name, source): latest.began if (latest := world.latest(source)) is not None else -inf
            for name, source in unexplained_states(self._state, world, self.policy)
        }
        self.confirmed += [SavedRef(*one) for one in self._states.confirmed(states)]

    def _orphaned_vms(self, world: World) -> dict[tuple[str, str], float]:
        found = {}
        for name, source in orphans(self._state, world):
            latest = world.latest(source)
            # A source that is unknown may hold the VM of a node that only the scheduler shows.
            if source == "" and any(one.latest is None for one in world.sources.values()):
                continue
            found[name, source] = min([world.node_began(name), *([latest.began] if latest else [])])
        return found


class Watcher(Protocol):
    """Is told at once, within the controller's loop: it takes no time and raises nothing."""

    def moved(self, moves: Sequence[Move], now: float) -> None:
        """These moves were committed at `now` (monotonic seconds), in this order."""

    def ended(self, done: Done) -> None:
        """This effect has ended."""


log = structlog.get_logger()

EXPECTING = 0.1  # seconds between observations of the scheduler while a node's registration or a job's end is awaited
AWAIT_BACKOFF = 0.05  # pauses grow to this share of the time waited
UNCOMMITTED = 1.0  # seconds until a pass that was not committed is tried again


class Controller:
    """Runs until cancelled. A restart needs no code of its own: it is the first observation.

    `rng` gives the random text of each pass, for the tokens of new VMs, and the jitter of pauses.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        hypervisor: Hypervisor,
        clock: Clock,
        settings: Settings,
        rng: Random | None = None,
    ) -> None:
        self._store, self._clock, self._settings = store, clock, settings
        self._rng = rng or SystemRandom()
        self.policy = policy_of(settings)
        self.state = State(store.rows(), TABLES, clock.now())  # the live rows as committed, between passes
        note_unconfirmed(self.state)
        self.observed = World()  # what the latest pass was planned upon
        self._forecast = ForecastRecorder(self.policy)
        self.missing_hints = MissingHints(clock)
        self._watchers: list[Watcher] = []
        self._exclusions = Exclusions()
        self._wake = asyncio.Event()
        self._inbox = CommandInbox(self._wake.set)
        self._expecting: float | None = None  # since when the newest of what is awaited is
        self._orphans = OrphanConfirmation(self.state, self.policy)
        self._placement_faults: dict[str, str] = {}  # as logged
        self._limits: JobLimits | None = None  # what no job must exceed
        self._leasable: Mapping[str, Size] = {}  # their basis
        self.began = clock.now()
        self.uncommitted: tuple[float, str] | None = None  # since when passes are not kept, and why
        self.effects_ended: Counter[tuple[str, str]] = Counter()  # by kind, and the error's class or "done"
        self.scheduler = SchedulerObserver(
            scheduler, clock, settings.poll, self._scheduler_interval, self._awaited, self._wake.set
        )
        self._tasks = ObserverTasks(self._wake.set)
        self._hosts = FollowedHosts(hypervisor, self.state, clock, settings.poll, self.began, self._tasks)
        self._hosts.can_wait = self._can_wait
        self._expected: Collection[str] | None = None  # see `expected_sources`, asked once after each pass
        self._knows_expected = False
        self.sources = self._hosts.sources  # one observer for each source of the hypervisor, by the source's name
        self.users = UserDirectory(
            lambda uid: scheduler.user(uid), clock, self._wake.set, lambda: self._effects.try_again_for_users()
        )
        surroundings = Surroundings(
            gateway=settings.network.gateway,
            hosts=settings.network.hosts,
            mounts=settings.mounts,
            grace=settings.pacing.reclaim_grace,
            state=self.state,
            users=self.users,
            reach=settings.network.reach,
            saved_keys=SavedKeys(settings.state_dir / "saved-keys"),
            encrypts=settings.save.encrypt,
        )
        self._around = surroundings
        self._effects = Effects(scheduler, hypervisor, clock, surroundings, self._effect_ended, self._rng)
        comments = CommentPlan(self.policy, self.state.attempts.values(), partial(with_its_state, self.state))
        self._comments = CommentWriter(
            scheduler, clock, comments, lambda: self.scheduler.latest.value.jobs if self.scheduler.latest else {}
        )

    # --- from outside --------------------------------------------------------------------------------

    def fence_by(self, fencing: Fencing) -> None:
        """Fence hosts by these means of the site, if the settings have a fence command."""
        self._around.fencing = fencing

    def place_by(self, placements: Mapping[str, Callable[..., Sequence[str]]]) -> None:
        """Place VMs by these policies of the site, too, where they are named."""
        self.policy = replace(self.policy, placements=placements)

    def decide_by(self, settings: Settings) -> None:
        """Decide by these settings from the next pass on. They differ from the present ones in keys alone that reload
        applies (`config.reloaded`). What was decided stays."""
        self._settings = settings
        self.policy = replace(policy_of(settings), placements=self.policy.placements)
        self._forecast.policy = self._orphans.policy = self.policy
        self._around.encrypts, self._around.mounts = settings.save.encrypt, settings.mounts
        if self._limits is not None:
            self._limits = self._job_limits()
        self.state.look_again()
        self._wake.set()

    def watch(self, watcher: Watcher) -> None:
        self._watchers.append(watcher)

    def hint(self, uid: int | None = None, job_id: str = "") -> None:
        """Something of this user's or this job, if known, may have changed in the scheduler: observe it sooner."""
        self.scheduler.hint(uid, job_id)

    def orphans(self) -> list[str]:
        return self._orphans.names()

    def world(self) -> World:
        return self._world(self._hosts.observations())

    def _world(self, sources: Mapping[str, Observation], anew: Collection[str] | None = None) -> World:
        return World(
            scheduler=self.scheduler.latest,
            scheduler_since=self.scheduler.since,
            sources=sources,
            anew=anew,
            effect_ended_at=self._effects.ended_at(),
            refused=self._effects.refused(),
            forecast=self._forecast.forecast(self._clock.now()),
            entropy=f"{self._rng.getrandbits(128):032x}",
            users=self.users.seen(),
            epoch=self._clock.wall() - self._clock.now(),
            declared=self._hosts.declared,
        )

    def context(self) -> Context:
        return Context(self.state, self.observed, self.policy, self.state.free.hosts)

    def pools(self) -> list[PoolStatus]:
        return pool_status(Context(self.state, self.world(), self.policy))

    def failing(self, often: int) -> list[Failure]:
        return self._effects.failing(often)

    def held_back(self) -> Mapping[str, Reason]:
        """Why silent hosts are not fenced by the site's command though they could be, by host."""
        return held_back(self.state, self.world(), self.policy)

    def staying(self) -> Mapping[str, str]:
        """Why a VM stays now on a host from which VMs are to move, by host."""
        return why_stay(Context(self.state, self.world(), self.policy)) if self.state.drains else {}

    def evictions(self) -> list[Step]:
        """Which running jobs would leave their hosts now. Nothing is changed."""
        return proposals(self.context())

    def held_evictions(self) -> list[Step]:
        """The evictions that a limit held back in the latest pass."""
        return [step for steps in self.state.held_back.values() for step in steps]

    def known_hosts(self) -> dict[str, KnownHost]:
        return self._hosts.known_hosts()

    def claimable_cpus(self) -> int:
        """CPUs that VMs may claim together on all known hosts, also if these are drained, off or out of reach."""
        return sum(claimable_cpus(host.value) for host in self.known_hosts().values() if host.value)

    def unknown_users(self) -> list[LookupFailure]:
        """The users of jobs whom the name service does not tell."""
        return self.users.failures()

    def command(self, command: Command) -> asyncio.Future[None]:
        """Take an operator's command. Done when it is committed; raises `Refused` if it may not be done."""
        return self._inbox.ask(command)

    def _can_wait(self, source: str, told: Observation | None, now: Seen[HypervisorView] | None) -> bool:
        if not self._knows_expected:
            self._expected, self._knows_expected = expected_sources(self.state, self.policy), True
        return self._expected is not None and source not in self._expected and can_wait(told, now)

    # --- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        comments = self._tasks.watched(asyncio.create_task(self._comments.run()))
        self._tasks.begin(self.scheduler, *self.sources.values())
        try:
            while True:
                self._wake.clear()
                if self.run_pass():
                    await self._sleep()
                else:  # what is due stays due
                    await asyncio.sleep(UNCOMMITTED)
        finally:
            await self._tasks.end(comments)
            await self.close()

    async def close(self) -> None:
        """Stop the effects that run. What they have begun is found again by the next controller's observations."""
        await self.users.close()
        await self._effects.close()

    async def _sleep(self) -> None:
        now = self._clock.now()
        due = min(self._effects.next_due(), self._forecast.next_due(now), self.users.next_due())
        left = min(self._settings.poll, due - now)
        if left > 0:
            await wait_at_most(self._wake, left)
        self._tasks.raise_bugs()

    def run_pass(self) -> bool:
        """One pass: observe, plan, one commit, then the effects. Awaits nothing. False if it was not committed: then
        nothing of it has happened. If that is for want of disk, what only releases is planned and committed by itself,
        in room that is reserved for it, and the effects that only release go on, whether or not that succeeded."""
        world = self.observed = self._world(self._hosts.tell(), frozenset(self._hosts.anew))
        self._knows_expected = False
        problem = self._plan_and_commit(world)
        if problem is None:
            self.uncommitted = None
            self._hosts.committed(world)
        else:
            log.error("pass not committed", reason=str(problem))
            self.uncommitted = (self.uncommitted[0] if self.uncommitted else self._clock.now(), str(problem))
            if not isinstance(problem, Exhausted):
                return False
            if failure := self._plan_and_commit(world, releasing=True):
                log.error("releases not committed", reason=str(failure))
        if self._hosts.have_changed:
            self._limits = self._job_limits()
            self._hosts.follow()
        elif world.scheduler is not None and world.scheduler.value.leasable != self._leasable:
            self._limits = self._job_limits()
        self._effects.publish(self._limits, self._exclusions.excluded(self._clock.now()))
        self.users.look_up(self.state.users_asked)
        self._effects.ensure(self._orphans.confirmed, releasing=problem is not None)
        self._store.note_use()
        return problem is None

    def _job_limits(self) -> JobLimits | None:
        self._leasable = self.observed.scheduler.value.leasable if self.observed.scheduler else self._leasable
        return self._hosts.job_limits(self.policy, self._leasable)

    def _plan_and_commit(self, world: World, *, releasing: bool = False) -> MultiverseError | None:
        """Plan and commit. Returns the error if nothing was kept: then the messages stay."""
        now, state = self._clock.now(), self.state
        messages = self._inbox.of_pass(releasing=releasing)
        done = [(message, state.get(message.key)) for message in messages if isinstance(message, Done)]
        try:
            with self._store.transaction(releasing=releasing) as tx:
                moves = plan(state, world, messages, now, self.policy, releasing=releasing)
                for learned in state.learned.values():
                    tx.keep_host(learned)
                for move in moves:
                    tx.apply(move)
                for message, row in done:
                    if row is not None and (message.stages or message.error):
                        error = str(message.error) if message.error else ""
                        tx.measured(row, str(message.kind), message.stages, error)
        except BaseException as error:
            state.rollback()
            if not isinstance(error, MultiverseError):
                raise
            return error
        self._forecast.note(moves, now)
        self._effects.note(moves)
        self._comments.passed(moves, state.reasons)
        self._log_placement_faults()
        self.missing_hints.note(moves)
        self._exclusions.note(moves, now)
        for watcher in self._watchers:
            watcher.moved(moves, now)
        self._committed(messages)
        self._orphans.committed(world)
        return None

    def _log_placement_faults(self) -> None:
        """A fault is logged once for as long as it repeats."""
        for name, reason in self.state.placement_faults.items():
            if self._placement_faults.get(name) != reason:
                log.warning("placement policy not followed", policy=name, reason=reason)
        self._placement_faults = dict(self.state.placement_faults)

    def _committed(self, messages: list[Message]) -> None:
        self._inbox.committed(messages, self.state.refusals)
        since = [row.since for row, when in awaited_rows(self.state) if self._is_awaited(row, when)]
        expecting = max(since, default=None)
        if expecting != self._expecting:
            self._expecting = expecting
            self.scheduler.reconsider()

    def _is_awaited(self, row: Vm | Attempt | Saved, when: Awaiting) -> bool:
        """Whether the scheduler may show at any moment that the row goes on. It will not before the effect of the row's
        state has ended, and asking it ten times a second costs a VM that starts on the same machine a tenth of its
        pace."""
        ended = self._effects.ended_at().get(row.key, -inf)
        return when is Awaiting.AT_ONCE or (when is Awaiting.AFTER_EFFECT and row.since <= ended < inf)

    def _awaited(self) -> Awaited:
        state, rows = self.state, [row for row, _ in awaited_rows(self.state)]
        vms = [row for row in rows if isinstance(row, Vm)]
        attempts = {row.id: row for row in rows if isinstance(row, Attempt)}
        serving = {vm.attempt for vm in vms if vm.attempt is not None} - attempts.keys()
        attempts |= {id_: state.attempts[id_] for id_ in serving if id_ in state.attempts}
        nodes = {vm.name for vm in vms} | {vm.name for one in attempts.values() for vm in state.vms_of(one)}
        saved = [row for row in rows if isinstance(row, Saved)]
        jobs = {one.job.job_id: one.uid for one in attempts.values()}
        jobs |= {one.job.job_id: one.uid for one in saved}
        return Awaited(jobs, frozenset(nodes | {part.vm_name for one in saved for part in one.parts}))

    def _scheduler_interval(self) -> float:
        if self._expecting is None:
            return self._settings.poll
        waited = self._clock.now() - self._expecting
        return min(self._settings.poll, max(EXPECTING, AWAIT_BACKOFF * waited))

    def _effect_ended(self, done: Done) -> None:
        self._inbox.put(done)
        self.effects_ended[str(done.kind), type(done.error).__name__.lower() if done.error else "done"] += 1
        for watcher in self._watchers:
            watcher.ended(done)
        shown_by = done.kind.shown_by
        if shown_by & ShownBy.WHOLE_SCHEDULER:
            self.scheduler.hint()
        if shown_by & ShownBy.SOURCE:
            self._observe_source_of(done)
        if shown_by & (ShownBy.SCHEDULER | ShownBy.SCHEDULER_SOON):
            self.scheduler.poke(burst=ShownBy.SCHEDULER_SOON in shown_by)
            row = self.state.get(done.key)
            if isinstance(row, Attempt | Saved):
                self.scheduler.hint(job_id=row.job.job_id)
        self._wake.set()

    def _observe_source_of(self, done: Done) -> None:
        """Observe sooner what the effect may have changed: the sources of its row or of its VMs, or all."""
        row = self.state.get(done.key)
        vms = [row] if isinstance(row, Vm) else []
        names = [getattr(row, "source", "")]
        if isinstance(row, Saved):
            vms = self.state.restored_from(row)
            names = [part.source for part in row.parts] if not vms else []
        elif isinstance(row, Attempt):
            vms = self.state.vms_of(row)
        elif isinstance(row, Offer):
            vms = [self.state.vms[row.id]] if row.id in self.state.vms else []
        names += [place.source for vm in vms for place in vm.places]
        for one in [
            self.sources[name] for name in dict.fromkeys(names) if name in self.sources
        ] or self.sources.values():
            one.poke()
