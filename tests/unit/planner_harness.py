"""A harness for the planner: rows in a real store, a world and a clock that a test sets."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

from multiverse.bundles.contract import PlatformContext
from multiverse.config import Settings
from multiverse.core.changes import orphans
from multiverse.core.machines.tables import TABLES, permitted_effects
from multiverse.core.model.basics import Key, Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.job import (
    Attempt,
    Job,
    JobRef,
    JobState,
    Node,
    NodeReservation,
    NodeState,
    Request,
    SchedulerView,
)
from multiverse.core.model.vm import TemplateCondition, TemplateKey, TemplateSeen, Vm, VmCondition, VmSeen, VmState
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.planner import plan
from multiverse.core.policy import Policy
from multiverse.core.rows import Rows
from multiverse.core.state import State
from multiverse.core.transition import Done, Event, Message, Move
from multiverse.store import Store
from multiverse_lab.simulation.promises import moves_at_rest, orphans_by_looking_at_all
from tests.unit.rows import IMAGES, SOURCE, effects_of, indexes_of

POLICY = Policy(subnet=ipaddress.IPv4Network("10.9.0.0/16"), gateway="10.9.0.1")

SELF_EXPLAINING = frozenset(
    {
        Event.SUBMITTED, Event.NOTED, Event.AT_GATE, Event.LEFT_GATE, Event.CREATED, Event.ALL_JOINED, Event.RUNS,
        Event.PLANNED, Event.EXISTS, Event.START, Event.REGISTERED, Event.FOUND, Event.ABSENT, Event.BUILT,
        Event.READY, Event.FROZEN, Event.STORED, Event.THAWED, Event.RESUMED,
        Event.COPY_DUE, Event.COPIED,
    }
)  # fmt: skip
"""Events with which the journal need not give a reason."""


def context_of(settings: Settings, store: Store) -> PlatformContext:
    """What a platform is opened with."""
    return PlatformContext(settings, store.site, ManualClock(), store.rows(), store.epoch, store.keep_epoch)


class ManualClock:
    def __init__(self, now: float = 1000.0, boot: str = "boot-1") -> None:
        self.time, self.boot = now, boot

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1_700_000_000.0 + self.time

    def boot_id(self) -> str:
        return self.boot


class PlannerHarness:
    """`observe()` makes the views of the scheduler and of the one source as of now; `run()` plans one pass and commits
    it.

    After each commit the state in memory is compared with what the store has, and its indexes with indexes made
    anew."""

    def __init__(
        self, policy: Policy = POLICY, cpus: int = 4, memory: int = 8192, path: Path | str = ":memory:"
    ) -> None:
        self.clock, self.policy = ManualClock(), policy
        self.store = Store(path, self.clock, site="test0")
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, Node] = {}
        abilities = frozenset({"instant", "full"})
        self.hosts: dict[str, Host] = {"h1": Host("h1", Size(cpus, memory, 65536), abilities, images=IMAGES)}
        self.vms: dict[str, VmSeen] = {}
        self.templates: dict[TemplateKey, TemplateSeen] = {}
        self.effect_ended_at: dict[Key, float] = {}
        self.scheduler_known = self.hypervisor_known = True
        self.unknown_since = 0.0
        self.refused: dict[Key, str] = {}
        self.offers: dict[str, bool] | None = {}
        self.reservations: tuple[NodeReservation, ...] = ()
        self.world = World()
        self.state = State(self.store.rows(), TABLES)

    @property
    def rows(self) -> Rows:
        return self.store.rows()

    def attempt(self, attempt_id: int = 1) -> Attempt:
        return next(a for a in self.store.attempts() if a.id == attempt_id)

    def all_vms(self, attempt_id: int = 1) -> list[Vm]:
        return self.store.vms_of([attempt_id])

    def job(self, job_id: str = "7", *, nodes: int = 1, size: Size | None = None, **more: object) -> Job:
        """Submit, or change, a job as the scheduler shows it."""
        fresh = Job(
            ref=JobRef(job_id, 500),
            name="hello",
            uid=1000,
            state=JobState.PENDING,
            request=Request(nodes, size or Size(1, 100)),
        )
        self.jobs[job_id] = self.jobs.get(job_id, fresh)._replace(**more)  # type: ignore[arg-type]
        return self.jobs[job_id]

    def template(self, image: str = "slim", size: Size | None = None, host: str = "h1") -> TemplateKey:
        """Show a template that is ready, of the base size unless `size` is given."""
        seen = TemplateSeen("t", host, image, TemplateCondition.READY, size or self.policy.base)
        self.templates[seen.which] = seen
        return seen.which

    def second_host(self) -> None:
        """Another host that is like the first, with a template that is ready."""
        self.hosts["h2"] = replace(self.hosts["h1"], name="h2")
        self.template(host="h2")

    def seen(self, name: str, condition: VmCondition) -> None:
        host = next((vm.host for vm in self.rows.vms.values() if vm.name == name), "h1")
        self.vms[name] = VmSeen(name, host, condition)

    def node(self, name: str, state: NodeState = NodeState.IDLE) -> None:
        self.nodes[name] = Node(name, state)

    def ended(self, key: Key) -> None:
        """That row's effect has ended, now."""
        self.effect_ended_at[key] = self.clock.time

    def pass_time(self, seconds: float) -> None:
        self.clock.time += seconds

    def observe(self) -> None:
        now = self.clock.time
        latest = Seen(HypervisorView(dict(self.hosts), dict(self.vms), dict(self.templates)), now)
        offers = None if self.offers is None else dict(self.offers)
        nodes, reservations = dict(self.nodes), self.reservations
        scheduler = SchedulerView(dict(self.jobs), nodes, offers=offers, reservations=reservations)
        self.world = World(
            scheduler=Seen(scheduler, now) if self.scheduler_known else None,
            sources={
                SOURCE: Observation(latest, 0.0) if self.hypervisor_known else Observation(None, self.unknown_since)
            },
            effect_ended_at=dict(self.effect_ended_at),
            refused=dict(self.refused),
            entropy="test",
            epoch=self.clock.wall() - self.clock.now(),
        )

    def run(self, *messages: Message) -> list[Move]:
        """Let time pass, observe both sides, plan one pass and commit it."""
        self.pass_time(1.0)
        self.observe()
        self.pass_time(0.01)
        return self.commit(*messages)

    def commit(self, *messages: Message) -> list[Move]:
        """Plan one pass on the world as observed, and commit it."""
        with self.store.transaction() as tx:
            moves = plan(self.state, self.world, list(messages), self.clock.time, self.policy)
            for host in self.state.learned.values():
                tx.keep_host(host)
            for move in moves:
                tx.apply(move)
        unexplained = [c for move in moves for c in move.changes if not c.reason and c.event not in SELF_EXPLAINING]
        assert not unexplained, "the journal says why"
        assert self.state.rows() == self.store.rows(), "memory and database agree"
        self.compare_with_a_state_made_anew()
        return moves

    def compare_with_a_state_made_anew(self) -> None:
        """The indexes are kept, rows that are not looked at again would not move, and the queue is the same."""
        anew = State(self.store.rows(), TABLES)
        assert indexes_of(self.state) == indexes_of(anew), "the indexes are kept"
        assert _held(self.state) == _held(anew), "and what claims hold"
        assert moves_at_rest(self.state, self.world, self.clock.time, self.policy) == []
        assert orphans(self.state, self.world) == orphans_by_looking_at_all(self.state, self.world)
        assert list(permitted_effects(self.state)) == list(effects_of(self.state.rows()))
        if self.world.scheduler is not None:
            anew.queue.jobs = self.world.scheduler.value.jobs
            for attempt in anew.attempts.values():
                anew.queue.put(attempt)
            queue = self.state.queue
            assert sorted([*queue.candidates.entries(), *queue.unfit.entries()]) == anew.queue.candidates.entries()
            assert (queue.wanted, dict(queue._shape_uses)) == (anew.queue.wanted, dict(anew.queue._shape_uses))

    @property
    def reasons(self) -> dict[str, str]:
        """Why jobs wait, as far as they are told."""
        return {self.state.attempts[id_].job.job_id: str(why) for id_, why in self.state.reasons.items()}

    def reserve(self, begins: float = 0.0, seconds: float = 600.0) -> NodeReservation:
        """Show a reservation of all nodes that begins so many seconds from now."""
        at = self.clock.wall() + begins
        self.reservations = (NodeReservation("maintenance", at, at + seconds),)
        return self.reservations[0]

    # --- the way of a job ---------------------------------------------------------------------------

    def to_claimed(self, **job: object) -> Attempt:
        self.template()
        self.job(**job)  # type: ignore[arg-type]
        self.run()  # the template's row is made, then found built
        self.run()
        self.run()
        return self.attempt()

    def to_spawning(self, **job: object) -> Attempt:
        self.to_claimed(**job)
        for vm in self.all_vms():
            self.seen(vm.name, VmCondition.PARKED)
            self.ended(vm.key)
        self.run()
        return self.attempt()

    def to_spawned(self, **job: object) -> Attempt:
        self.to_spawning(**job)
        for vm in self.all_vms():
            self.seen(vm.name, VmCondition.RUNNING)
            self.node(vm.name)
            self.ended(vm.key)
        self.run()
        return self.attempt()

    def to_allocated(self, **job: object) -> Attempt:
        attempt = self.to_spawned(**job)
        names = tuple(vm.name for vm in self.all_vms())
        for name in names:
            self.node(name, NodeState.BUSY)
        self.jobs[attempt.job.job_id] = self.jobs[attempt.job.job_id]._replace(
            state=JobState.RUNNING, nodes=names, gated=False, pinned=attempt.feature
        )
        self.ended(attempt.key)
        self.run()
        return self.attempt()

    def fill(self) -> None:
        """Let the pools be made, as far as they go."""
        for _ in range(6):
            self.run()
            for vm in self.rows.vms.values():
                self.ended(vm.key)
                awake = vm.state in (VmState.STARTING, VmState.JOINED)
                self.seen(vm.name, VmCondition.RUNNING if awake else VmCondition.PARKED)
                if vm.state is VmState.STARTING:
                    self.node(vm.name)

    def clear(self) -> None:
        """The hosts and the scheduler have forgotten all VMs, and their destruction has ended."""
        for vm in self.rows.vms.values():
            self.ended(vm.key)
        self.vms.clear()
        self.nodes.clear()


def failed(row: Attempt | Vm, kind: object, error: object) -> Done:
    return Done(row.key, kind, str(row.state), error)  # type: ignore[arg-type]


def _held(state: State) -> dict[str, Size]:
    return {domain: size for domain, size in state.claims.used.items() if size != Size(0, 0, 0)}
