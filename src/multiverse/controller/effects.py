"""Effects: what rows permit is done here, beside the planner, one lane for each object.

A lane does one thing at a time, so that the destruction of a VM never overtakes its creation. An effect means *ensure*:
it is repeated while its row permits it, after growing pauses. Nothing here writes a row; results go back as messages
and, above all, are observed. Of the effects on jobs, which may be thousands, only some run at a time.
"""

from __future__ import annotations

import asyncio
import heapq
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import TypeVar

import structlog

from multiverse.controller.publication import AGAIN_LIMIT, AddressBook, GroupBook, Publication, end_tasks, pause
from multiverse.controller.saved_keys import SavedKeys
from multiverse.controller.users import UserDirectory
from multiverse.core.clones.spares import node_spec
from multiverse.core.errors import Broken, Damaged, Gone, MultiverseError, NotYet, Refused, Stale, Unknown
from multiverse.core.machines.tables import permitted_effects
from multiverse.core.model.basics import Depth, Key
from multiverse.core.model.host import JobLimits, KnownHost
from multiverse.core.model.identity import Identity, Mount, NodeBootstrap, Reach, machine_id, serial_of
from multiverse.core.model.job import Attempt, Lease, Node
from multiverse.core.model.saved import Saved, SavedPart
from multiverse.core.model.vm import Stage, Template, Vm, VmRef, VmSpec
from multiverse.core.model.world import Row
from multiverse.core.state import State
from multiverse.core.transition import RELEASING_EFFECTS, TERMINAL, Done, Effect, EffectKind, Move
from multiverse.ports import Clock, Fencing, Hypervisor, Saves, Saving, Scheduler

log = structlog.get_logger()

T = TypeVar("T")

JOBS_AT_ONCE = 8
"""Effects of each of these kinds that run at the same time: each is a few commands of the scheduler. A kind does not
wait for another: thousands of jobs that are cancelled free nothing, and a few that go back to the gate free VMs."""

_FOR_USERS = (EffectKind.START, EffectKind.PIN)  # effects that need the job's user

_ON_JOBS = (
    EffectKind.PREPARE,
    EffectKind.CUT,
    EffectKind.GATE,
    EffectKind.REQUEUE,
    EffectKind.REVOKE,
    EffectKind.RESTORE,
    EffectKind.HOLD,
    EffectKind.WARN,
    EffectKind.PREEMPT,
)

TIMEOUTS: dict[EffectKind, float] = {EffectKind.BUILD: 600.0, EffectKind.CREATE: 300.0, EffectKind.START: 300.0,
                                   EffectKind.FENCE: 3600.0, EffectKind.SAVE: 3600.0, EffectKind.CAPTURE: 3600.0,
                                   EffectKind.COPY: 3600.0, EffectKind.MOVE: 3600.0,
                                   EffectKind.SLEEP: 3600.0, EffectKind.WAKE: 3600.0}  # fmt: skip
OTHER_TIMEOUT = 60.0
_REPEATED = 2 * AGAIN_LIMIT  # seconds within which an effect is repeated


@dataclass(frozen=True, slots=True)
class PilotRef:
    """A pilot that no lease explains, by its name and the scheduler's id."""

    name: str
    id: str

    @property
    def key(self) -> Key:
        return Key("lease", -1 - zlib.crc32(self.id.encode()))


@dataclass(frozen=True, slots=True)
class SavedRef:
    """A saved VM in a storage that no row explains, and a source that shows it."""

    name: str
    source: str

    @property
    def key(self) -> Key:
        return Key("saved", -1 - zlib.crc32(self.name.encode()))


Subject = Row | VmRef | PilotRef | SavedRef  # what an effect acts on: a row, or an orphan


@dataclass
class _Lane:
    effect: Effect
    state: str
    task: asyncio.Task[None] | None = None
    due: float = 0.0
    runs: int = 0
    failures: int = 0  # in a row
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """An effect that fails again and again: how often in a row, why, and when it is tried again (monotonic)."""

    effect: Effect
    times: int
    reason: str
    again_at: float


@dataclass
class Surroundings:
    """What effects need beside the row itself: its relatives, its user, and what every guest is given."""

    gateway: str
    hosts: tuple[tuple[str, str], ...]
    mounts: tuple[Mount, ...]
    grace: float
    state: State
    users: UserDirectory
    saved_keys: SavedKeys | None = None
    encrypts: bool = False  # what VMs are saved to
    fencing: Fencing | None = None
    reach: Reach = Reach.USER


class Effects:
    """Runs what the live rows permit. `done` is called, on the loop, with each effect's end."""

    def __init__(
        self,
        scheduler: Scheduler,
        hypervisor: Hypervisor,
        clock: Clock,
        around: Surroundings,
        done: Callable[[Done], None],
        rng: Random,
    ) -> None:
        self._scheduler, self._hypervisor, self._clock = scheduler, hypervisor, clock
        self._around, self._done, self._rng = around, done, rng
        self._lanes: dict[Key, _Lane] = {}
        self._ended_at: dict[Key, float] = {}
        self._refused: dict[Key, str] = {}
        self._limits = Publication[JobLimits]("largest job", clock, rng)
        self._excluded = Publication[frozenset[int]]("excluded users", clock, rng, known=frozenset())
        self._addresses = AddressBook(around.state.vms.values(), clock, rng)
        self._groups = GroupBook(around.state, around.reach, clock, rng)

    # --- what runs, and when something is due -------------------------------------------------------

    def ended_at(self) -> Mapping[Key, float]:
        """For each live row, when its last effect ended; infinity while one runs. Follows what happens."""
        return MappingProxyType(self._ended_at)

    def refused(self) -> Mapping[Key, str]:
        """The rows whose last effect was refused for good, and why. Follows what happens."""
        return MappingProxyType(self._refused)

    def next_due(self) -> float:
        """When the next repetition is due. An effect that waits for others begins when one of these ends."""
        full = {kind for kind, left in self._jobs_left().items() if not left}
        idle = (lane for lane in self._lanes.values() if lane.task is None and lane.effect.kind not in full)
        return min((lane.due for lane in idle), default=float("inf"))

    def _jobs_left(self) -> Mapping[EffectKind, int]:
        running = Counter(lane.effect.kind for lane in self._lanes.values() if lane.task is not None)
        return {kind: max(0, JOBS_AT_ONCE - running[kind]) for kind in _ON_JOBS}

    def failing(self, often: int) -> list[Failure]:
        return [
            Failure(lane.effect, lane.failures, lane.reason, lane.due)
            for _, lane in sorted(self._lanes.items())
            if lane.failures >= often
        ]

    def note(self, moves: Iterable[Move]) -> None:
        """These moves were committed. Nobody asks any more when the last effect of a row that has ended ended."""
        moves = list(moves)
        self._addresses.note(moves)
        self._groups.note(moves)
        for change in (change for move in moves for change in move.changes):
            if change.row.state in TERMINAL:
                self._forget_ended(change.row.key)

    def _forget_ended(self, key: Key) -> None:
        if key not in self._lanes and self._around.state.get(key) is None:
            self._ended_at.pop(key, None)
            self._refused.pop(key, None)

    def ensure(self, orphans: Sequence[VmRef | PilotRef | SavedRef] = (), *, releasing: bool = False) -> None:
        """Make the lanes follow the rows. `orphans` are what of our site no row explains. With
        `releasing` only effects that release are begun. Its cost is that of the effects that there are."""
        state = self._around.state
        wanted: dict[Key, tuple[Effect, Subject]] = {
            effect.key: (effect, row) for row, effect in permitted_effects(state)
        }
        for orphan in orphans:
            if isinstance(orphan, PilotRef | SavedRef):
                kind = EffectKind.CANCEL if isinstance(orphan, PilotRef) else EffectKind.DISCARD
                wanted[orphan.key] = (Effect(kind, orphan.key, orphan.name), orphan)
                continue
            key = Key("vm", serial_of(orphan.name))
            if state.get(key) is None:
                wanted[key] = (Effect(EffectKind.SWEEP, key, orphan.name), orphan)
        for key in [key for key, lane in self._lanes.items() if key not in wanted or wanted[key][0] != lane.effect]:
            lane = self._lanes[key]
            if lane.task is None:
                del self._lanes[key]
                self._forget_ended(key)
            elif not lane.task.cancelling():
                lane.task.cancel()  # its end wakes the loop, and the lane is free then
        for key, (effect, subject) in wanted.items():
            if not releasing or effect.kind in RELEASING_EFFECTS:
                self._lanes.setdefault(key, _Lane(effect, _state(subject)))
        for key in self._due_ones(releasing=releasing):
            self._begin(self._lanes[key], wanted[key][1])

    def try_again_for_users(self) -> None:
        """Repeat at once what failed and needs a user: one who was unknown is known now."""
        for lane in self._lanes.values():
            if lane.failures and lane.effect.kind in _FOR_USERS and lane.task is None:
                lane.due = 0.0

    def _due_ones(self, *, releasing: bool) -> list[Key]:
        """The lanes that are to begin now. Of those on jobs only some may: the ones due longest."""
        now, left = self._clock.now(), self._jobs_left()
        due: dict[EffectKind, list[tuple[float, Key]]] = {}
        for key, lane in self._lanes.items():
            may_begin = lane.task is None and not (releasing and lane.effect.kind not in RELEASING_EFFECTS)
            if may_begin and lane.due <= now:
                due.setdefault(lane.effect.kind, []).append((lane.due, key))
        first = [heapq.nsmallest(left[kind], some) if kind in left else some for kind, some in due.items()]
        return [key for some in first for _, key in some]

    def publish(self, limits: JobLimits | None, excluded: frozenset[int]) -> None:
        """Tell the scheduler and hosts what they are to know, as of the latest commit: the `limits` of submissions, if
        known, where nodes are, which VMs reach each other, and users who are `excluded` from offers."""
        submission, offers = self._scheduler.submission, self._scheduler.offers
        if submission is not None and limits is not None:
            self._limits.ensure(limits, submission.publish)
        self._addresses.ensure(self._scheduler.addresses)
        self._groups.ensure(self._hypervisor.groups)
        if offers is not None:
            self._excluded.ensure(excluded, offers.exclude)

    def _begin(self, lane: _Lane, subject: Subject) -> None:
        lane.state = _state(subject)
        lane.runs += 1
        self._ended_at[lane.effect.key] = float("inf")
        lane.task = asyncio.create_task(self._run(lane, subject), name=f"{lane.effect.kind} {lane.effect.key}")
        lane.task.add_done_callback(lambda task: self._never_ran(lane, task))

    def _never_ran(self, lane: _Lane, task: asyncio.Task[None]) -> None:
        """A task that is cancelled before its first step does not even reach its `finally`."""
        if lane.task is task:
            self._ended(lane, None, ())

    def _ended(self, lane: _Lane, error: MultiverseError | None, stages: Sequence[Stage]) -> None:
        lane.task = None
        now = self._ended_at[lane.effect.key] = self._clock.now()
        lane.due = now + pause(lane.runs, self._rng)
        failed = error is not None and not isinstance(error, Stale | NotYet)
        lane.failures, lane.reason = (lane.failures + 1, str(error)) if failed else (0, "")
        if isinstance(error, Refused):
            self._refused[lane.effect.key] = str(error)
        else:
            self._refused.pop(lane.effect.key, None)
        if failed:
            log.warning("effect failed", effect=lane.effect.kind, key=str(lane.effect.key), reason=str(error))
        self._done(Done(lane.effect.key, lane.effect.kind, lane.state, error, tuple(stages)))

    async def _run(self, lane: _Lane, subject: Subject) -> None:
        error: MultiverseError | None = None
        stages: Sequence[Stage] = ()
        limit = TIMEOUTS.get(lane.effect.kind, OTHER_TIMEOUT)
        try:
            async with asyncio.timeout(limit):
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
        """Stop all that runs. What was begun is found again by the first observation of the next controller."""
        await end_tasks(lane.task for lane in self._lanes.values())
        for told in (self._limits, self._excluded, self._addresses, self._groups):
            await told.close()

    # --- the effects themselves ----------------------------------------------------------------------

    async def _act(self, effect: Effect, subject: Subject) -> Sequence[Stage] | None:
        match subject:
            case Attempt():
                await self._act_on_job(effect, subject)
            case Vm():
                return await self._act_on_vm(effect, subject)
            case Template():
                return await self._act_on_template(effect, subject)
            case Saved():
                return await self._act_on_saved(effect, subject)
            case KnownHost():
                if self._around.fencing is None:
                    raise Refused("the site has no fence command", hint="set fence.command")
                lease = self._around.state.lease_of(subject.name)
                await self._around.fencing.fence(lease.node if lease is not None else subject.name)
            case Lease() | PilotRef():
                await self._act_on_pilot(effect, subject)
            case SavedRef() if self._hypervisor.saves is not None:
                await self._hypervisor.saves.discard(subject.source, subject.name)
            case VmRef():
                await self._scheduler.set_down(subject.name, "multiverse: nothing explains it")
                if subject.source:  # otherwise only the scheduler shows the name, and no source has a VM of it
                    await self._hypervisor.destroy(subject, 0.0)
                await self._scheduler.delete_node(subject.name)
            case _:
                raise AssertionError(f"no such effect: {effect}")
        return None

    async def _act_on_job(self, effect: Effect, attempt: Attempt) -> None:
        job = attempt.job
        match effect.kind:
            case EffectKind.GATE:
                await self._scheduler.unpin(job)
            case EffectKind.RESTORE:
                if (overflow := self._scheduler.overflow) is None:
                    raise Refused("the scheduler moves no jobs", hint="move the job by hand to where it belongs")
                await overflow.restore(job)
            case EffectKind.PIN:
                await self._add_user(attempt)
                nodes = [vm.name for vm in self._around.state.serving_vms_of(attempt)]
                text, limit = effect.text, attempt.limit
                saved = self._around.state.saved_for(job)
                if saved is not None and saved.others and self._scheduler.saving is not None:
                    await self._scheduler.saving.check_script(_nodes(saved))
                await self._scheduler.pin(job, attempt.feature, nodes, text, at_once=attempt.at_once, limit=limit)
            case EffectKind.HOLD:
                await self._scheduler.hold(job, effect.text)
            case EffectKind.REQUEUE:
                await self._scheduler.requeue(job)
            case EffectKind.REVOKE:
                await self._scheduler.revoke(job, effect.text)
            case EffectKind.WARN | EffectKind.PREEMPT:
                await self._preempt(effect, attempt)
            case _:
                raise AssertionError(f"no such effect: {effect}")

    async def _preempt(self, effect: Effect, attempt: Attempt) -> None:
        preempting, eviction = self._scheduler.preempting, attempt.preempted
        if preempting is None or eviction is None:
            raise Refused("the scheduler ends no run for another job", hint="end the job by hand")
        if effect.kind is EffectKind.WARN:
            await preempting.warn(attempt.job, effect.text)
        else:
            await preempting.preempt(attempt.job, requeue=eviction.way == "requeue", text=effect.text)

    async def _act_on_pilot(self, effect: Effect, subject: Lease | PilotRef) -> None:
        leases = self._scheduler.leases
        if leases is None:
            raise Refused("the scheduler lends no hosts", hint="remove the [[lease]] sections from the settings")
        match subject:
            case Lease() if effect.kind is EffectKind.REQUEST:
                await leases.request(subject.spec)
            case Lease():
                await leases.release(subject.name, ())
            case PilotRef():
                await leases.release(subject.name, (subject.id,))

    async def _act_on_vm(self, effect: Effect, vm: Vm) -> Sequence[Stage] | None:
        match effect.kind:
            case EffectKind.CREATE:
                return await self._hypervisor.create(replace(_specification(vm), key=self._key_of_restored(vm)))
            case EffectKind.START:
                return await self._start(vm)
            case EffectKind.OFFER | EffectKind.WITHDRAW:
                await self._offer(effect.kind, vm)
            case EffectKind.END | EffectKind.REMOVE:
                if self._node_of(vm) is not None:
                    await self._scheduler.set_down(vm.name, "multiverse: its VM is gone")
                await self._destroy(vm, 0.0)
            case EffectKind.RELEASE:
                await self._destroy(vm, self._around.grace)
            case EffectKind.MOVE | EffectKind.SETTLE:
                return await self._move(effect.kind, vm)
            case EffectKind.SLEEP | EffectKind.DELAY | EffectKind.WAKE:
                return await self._sleep_or_wake(effect.kind, vm)
            case EffectKind.DELETE:
                pass
            case _:
                raise AssertionError(f"no such effect: {effect}")
        if effect.kind in (EffectKind.REMOVE, EffectKind.RELEASE, EffectKind.DELETE):
            await self._delete_node(vm)
        return None

    def _node_of(self, vm: Vm) -> Node | None:
        """The VM's own node as it was shown last. A VM that is restored later has a node of the same name. Therefore a
        node that does not exist is not set DOWN either: the command could come late. Raises `Unknown` while nobody
        knows."""
        compared = self._around.state.compared
        if compared.scheduler is None:
            raise Unknown("the scheduler has not been read yet", hint="see whether it runs")
        node = compared.nodes.get(vm.name)
        return node if node is not None and vm.owns(node.features) else None

    async def _delete_node(self, vm: Vm) -> None:
        """Also if it is not shown: the scheduler may keep something of it all the same."""
        if self._node_of(vm) is not None or vm.name not in self._around.state.compared.nodes:
            await self._scheduler.delete_node(vm.name)

    async def _move(self, kind: EffectKind, vm: Vm) -> Sequence[Stage]:
        """Let a VM go from its first place to its second, or end its move: it is at one of them then."""
        moves, (first, second) = self._hypervisor.moves, vm.places
        if moves is None:
            raise Refused("VMs do not move here", hint="set move.enabled for the controller and all agents")
        if kind is EffectKind.MOVE:
            target = replace(_specification(vm), host=second.host, source=second.source, template=None)
            return await moves.move(vm.ref_at(first), vm.moves, target)
        await moves.settle(vm.ref_at(first), vm.moves, vm.ref_at(second))
        return ()

    async def _sleep_or_wake(self, kind: EffectKind, vm: Vm) -> Sequence[Stage]:
        sleeps, standing_in, attempt = (
            self._hypervisor.sleeps,
            self._scheduler.standing_in,
            self._around.state.attempt_of(vm),
        )
        if sleeps is None or standing_in is None or attempt is None:
            raise Refused("VMs do not sleep here", hint="set save.enabled for the controller and all agents")
        keys, name = self._around.saved_keys, f"{vm.name}-asleep"
        if kind is EffectKind.SLEEP:
            stands_in = await standing_in.stand_in(node_spec(vm, attempt))
            key = keys.make(attempt.uid, name) if keys is not None and self._around.encrypts else ""
            return await sleeps.sleep(vm.ref, vm.sleeps, self._stand_in(vm, stands_in), key)
        stages: Sequence[Stage] = ()
        if kind is EffectKind.WAKE:
            key = keys.find(attempt.uid, name) if keys is not None else ""
            stages = await sleeps.wake(vm.ref, vm.sleeps, runs=bool(vm.runs), key=key)
        if vm.left is not None:  # more than what passes until this effect is repeated
            beyond = _REPEATED if kind is EffectKind.DELAY else 0.0
            with suppress(Gone, Stale):
                await standing_in.keep_time(attempt.job, vm.left + beyond)
        return stages

    def _stand_in(self, vm: Vm, bootstrap: NodeBootstrap) -> Identity:
        return Identity(vm.name, vm.mac, vm.address, self._around.gateway, machine_id(vm.name), bootstrap=bootstrap)

    async def _act_on_template(self, effect: Effect, template: Template) -> Sequence[Stage] | None:
        templates = self._hypervisor.templates
        if templates is None:
            raise Refused(f"host {template.host} has no templates", hint="choose full clones for its images")
        if effect.kind is EffectKind.BUILD:
            return await templates.build_template(template.which)
        await templates.delete_template(template.which)
        return None

    async def _act_on_saved(self, effect: Effect, saved: Saved) -> Sequence[Stage] | None:
        saves, saving = self._hypervisor.saves, self._scheduler.saving
        if saves is None or saving is None:
            raise Refused("jobs cannot be saved here", hint="set save.enabled on the controller and all hosts")
        match effect.kind:
            case EffectKind.PREPARE:
                await saving.prepare(saved.job, _nodes(saved), requeues=saved.requeues)
            case EffectKind.FREEZE:
                return await self._freeze(saved, saves)
            case EffectKind.CUT | EffectKind.QUEUE:
                await self._queue_again(effect, saved, saves, saving)
            case EffectKind.SAVE | EffectKind.CAPTURE | EffectKind.KEEP | EffectKind.COPY:
                return await self._write(effect.kind, saved, saves)
            case EffectKind.HOLD:
                await self._scheduler.hold(saved.again or saved.job, effect.text)
            case EffectKind.RESUME:
                await saving.release(saved.again or saved.job)
            case EffectKind.THAW:
                if not saved.requeues:
                    await saving.forbid_requeue(saved.again or saved.job)
                await together(saves.thaw(vm.ref) for vm in self._around.state.restored_from(saved))
            case EffectKind.UNDO:
                await self._undo(saved, saves, saving)
            case EffectKind.DISCARD:
                await self._discard(saved, saves)
            case _:
                raise AssertionError(f"no such effect: {effect}")
        return None

    @staticmethod
    async def _queue_again(effect: Effect, saved: Saved, saves: Saves, saving: Saving) -> None:
        if effect.kind is EffectKind.CUT:
            await together(saves.cut(_ref(part)) for part in saved.parts)
        await saving.requeue(saved.job, hold=saved.hold, text=effect.text)

    @staticmethod
    async def _undo(saved: Saved, saves: Saves, saving: Saving) -> None:
        async def thaw(part: Saved | SavedPart) -> None:
            with suppress(Gone):  # its run is over
                await saves.thaw(_ref(part))

        if saved.froze:  # otherwise its guests, which may be mute, have nothing to undo
            await together(map(thaw, saved.parts))
        if saved.checkpoint:  # nothing was told to the scheduler
            return
        with suppress(Gone, Stale):
            await saving.undo(saved.job, _nodes(saved), requeues=saved.requeues)

    async def _freeze(self, saved: Saved, saves: Saves) -> Sequence[Stage]:
        """Freeze all its VMs at the same time. How far apart that was is the time between the first and the last
        answer."""
        ends: list[float] = []

        async def freeze(part: Saved | SavedPart) -> None:
            await saves.freeze(_ref(part), script=part is saved)
            ends.append(self._clock.now())

        await together(map(freeze, saved.parts))
        return (Stage("spread", max(ends) - min(ends)),) if saved.others else ()

    async def _write(self, kind: EffectKind, saved: Saved, saves: Saves) -> Sequence[Stage]:
        if kind is EffectKind.KEEP:
            await saves.keep_in_memory(_ref(saved), saved.name)
            return ()
        if kind is EffectKind.COPY:
            source = self._around.state.source_copying(saved) or saved.source
            await together(saves.copy(source, name, self._key(saved, name)) for name in saved.names)
            return ()
        if kind is EffectKind.SAVE:
            written = await together(
                saves.save(_ref(part), name, self._new_key(saved, name))
                for part, name in zip(saved.parts, saved.names, strict=True)
            )
            return [stage for stages in written for stage in stages]
        earlier = any(one.stands for one in self._around.state.saved_of_job(saved.job.job_id))
        if not earlier and self._scheduler.saving is not None:  # before the first one: what is checked stays so
            await self._scheduler.saving.check(saved.job)
        key = self._new_key(saved, saved.name)
        return await saves.checkpoint(_ref(saved), saved.name, key, shared_files=saved.shared_files)

    async def _discard(self, saved: Saved, saves: Saves) -> None:
        """In all storages. One of them may be out of reach."""
        failed = None
        for source in self._around.state.sources_discarding(saved):
            try:
                await together(saves.discard(source, name) for name in saved.names)
            except MultiverseError as error:
                failed = error
        if failed is not None:
            raise failed

    def _key_of_restored(self, vm: Vm) -> str:
        """The key of the saved VM that this one is restored from; empty if it has none. Raises `Damaged` if that is
        gone: unencrypted files in its place are not what was saved."""
        saved = next(iter(self._around.state.saved_named(vm.saved)), None) if vm.saved else None
        return self._key(saved, vm.saved) if saved is not None and not saved.kept else ""

    def _new_key(self, saved: Saved, name: str) -> str:
        keys = self._around.saved_keys
        return keys.make(saved.uid, name) if keys is not None and saved.encrypted else ""

    def _key(self, saved: Saved, name: str) -> str:
        keys = self._around.saved_keys
        if keys is None or not saved.encrypted:
            return ""
        if not (key := keys.find(saved.uid, name)):
            what = f"the saved VM {name} is encrypted, and the key of user {saved.uid} is gone"
            raise Damaged(what, hint="is it in a backup of saved-keys in the controller's state directory?")
        return key

    async def _offer(self, kind: EffectKind, vm: Vm) -> None:
        offers = self._scheduler.offers
        if offers is None:
            raise Refused("the scheduler lets no job take a node by itself", hint="set offer = false for its pool")
        if kind is EffectKind.OFFER:
            await offers.offer(node_spec(vm, None))
        else:
            await offers.withdraw(vm.name)

    async def _destroy(self, vm: Vm, grace: float) -> None:
        """At all its places. One of them may be out of reach."""
        failed = None
        for place in vm.places:
            try:
                await self._hypervisor.destroy(vm.ref_at(place), grace)
            except MultiverseError as error:
                if not self._around.state.is_fenced(place.host):  # then what is left of it goes when the host is back
                    failed = error
        if failed is not None:
            raise failed

    async def _add_user(self, attempt: Attempt) -> None:
        """A VM that joined before its job came learns whom it serves, before the job may start there."""
        joined = [vm for vm in self._around.state.vms_of(attempt) if vm.pool is Depth.JOINED]
        users = self._hypervisor.users
        for vm in joined:
            if users is None:
                raise Refused(f"{vm.name} cannot learn of its user: its hypervisor adds none to a guest that runs")
            try:
                await users.add_user(vm.ref, await self._around.users.user(attempt.uid), self._groups.group(vm))
            except Broken as error:  # another VM may take the user in; this one never will
                raise Refused(f"{vm.name} could not be told of its user: {error.message}") from error

    async def _start(self, vm: Vm) -> Sequence[Stage]:
        attempt = self._around.state.attempt_of(vm)
        relatives = self._around.state.vms_of(attempt) if attempt else []
        peers = tuple(
            (peer.name, peer.address.partition("/")[0]) for peer in relatives if peer.id != vm.id and not peer.failed
        )
        users = (await self._around.users.user(attempt.uid),) if attempt else ()
        bootstrap = await self._scheduler.bootstrap(node_spec(vm, attempt, peers))
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
            group=self._groups.group(vm),
        )
        return await self._hypervisor.start(vm.ref, vm.size, identity)


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The answers to calls that run at the same time. Waits for all of them, and then raises the error of the first
    that failed: one that says for sure that its call did nothing, if there is any."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, Unknown))
    return [one for one in found if not isinstance(one, BaseException)]


def _ref(part: Saved | SavedPart) -> VmRef:
    return VmRef(part.vm_name, part.source, part.token)


def _nodes(saved: Saved) -> list[str]:
    return [part.vm_name for part in saved.parts]


def _specification(vm: Vm) -> VmSpec:
    return VmSpec(
        name=vm.name,
        host=vm.host,
        image=vm.image,
        kind=vm.kind,
        size=vm.size,
        mac=vm.mac,
        template=vm.place.template,
        spare=vm.pool is Depth.PARKED,
        token=vm.token,
        address=vm.address,
        source=vm.place.source,
        saved=vm.saved,
        storage=vm.storage,
    )


def _state(subject: Subject) -> str:
    return "" if isinstance(subject, VmRef | PilotRef | SavedRef) else str(subject.state)
