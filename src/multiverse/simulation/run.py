"""Run the real controller and store against the simulated world, through faults and crashes, by seed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.core.errors import Exhausted
from multiverse.core.model import Size, TemplateCondition
from multiverse.core.transition import Command
from multiverse.ports import Clock
from multiverse.simulation.clock import VirtualClock
from multiverse.simulation.faults import (
    Blow,
    Call,
    Death,
    Fates,
    Mishap,
    Odds,
    What,
    Wire,
)
from multiverse.simulation.faulty import FaultyHypervisor, FaultyScheduler
from multiverse.simulation.guests import GuestPace
from multiverse.simulation.hypervisor import SimulatedHypervisor
from multiverse.simulation.jobs import Batch, JobRecord
from multiverse.simulation.loop import run
from multiverse.simulation.scheduler import SimulatedScheduler
from multiverse.simulation.world import World, WorldSettings
from multiverse.store import Entry, Store, Transaction

SITE = "simul"
HINT_DELAY = (0.5, 10.0)  # seconds that a late hint takes


@dataclass(frozen=True)
class Deed:
    """What a user does to a job `after` seconds: `what` is a method of `Cluster` that takes a job id; a
    `change` changes its size."""

    after: float
    what: Literal["cancel", "hold", "release", "requeue", "suspend", "resume", "change"]
    size: Size | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class Arrival:
    """A job, or an array of `tasks`, submitted `at` seconds, and what its user does to it later."""

    at: float
    batch: Batch
    tasks: int = 0
    deeds: tuple[Deed, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """One simulation: the same scenario gives the same journal.

    What calls meet is drawn from `scheduler_odds` and `hypervisor_odds`, unless `blows` lists it. Mishaps
    befall the world at their times, `deaths` the controller at its commits. `hints` is the share of hints
    that arrive at once; of the others one half comes late and the other never, and one in ten comes twice.
    `limit` is how long, in virtual seconds, all may take.
    """

    seed: int
    arrivals: tuple[Arrival, ...]
    world: WorldSettings = field(default_factory=WorldSettings)
    settings: Settings = field(default_factory=Settings)
    scheduler_odds: Odds = field(default_factory=Odds)
    hypervisor_odds: Odds = field(default_factory=Odds)
    blows: tuple[Blow, ...] | None = None
    mishaps: tuple[Mishap, ...] = ()
    deaths: tuple[Death, ...] = ()
    hints: float = 0.9
    limit: float = 4000.0
    database: str = ":memory:"


@dataclass(frozen=True)
class Outcome:
    """What became of it. `wrongs` is empty if all promises were kept; `blows` is what its calls met."""

    scenario: Scenario
    seconds: float
    crashes: int
    commits: int
    blows: tuple[Blow, ...]
    results: dict[str, str]  # by the world's number and the job id
    journal: list[str]
    told: list[tuple[float, str]]  # what happened outside the controller, by virtual time
    wrongs: list[str]
    calls: tuple[Call, ...] = ()
    entries: tuple[Entry, ...] = ()
    arrows: Counter[str] = field(default_factory=Counter)  # how often each arrow of the tables was taken, see `arrow`

    def faults(self) -> Counter[str]:
        """How often each fault was met, by "port.method: fault"."""
        return Counter(f"{blow.call.partition(' ')[0]}: {blow.fault}" for blow in self.blows)

    def story(self, lines: int = 0) -> str:
        """The wrongs, and before them all that happened, in order; only the last `lines`, if given."""
        told = [f"{at:9.3f}  {what}" for at, what in self.told]
        if lines and len(told) > lines:
            told = [f"({len(told) - lines} lines before)", *told[-lines:]]
        wrongs = [f"WRONG: {wrong}" for wrong in self.wrongs] or ["all promises were kept"]
        head = f"seed {self.scenario.seed}: {self.seconds:.1f} s of virtual time, {self.commits} commits"
        return "\n".join([f"{head}, {len(self.blows)} faults, {self.crashes} deaths of the controller", *told, *wrongs])


def simulate(scenario: Scenario) -> Outcome:
    """Run a scenario in virtual time, from the first submission until nothing is left to do."""
    return run(_Simulation.whole(scenario), scenario.seed)


class Died(BaseException):
    """The controller's process is no more. Not an error: nothing may catch it."""


class MortalStore(Store):
    """A store whose disk may be full, and at whose commits its process may die."""

    def __init__(self, path: str, clock: Clock, site: str, at_commit: Callable[[bool], None]) -> None:
        super().__init__(path, clock, site=site)
        self.full = False
        self._at_commit = at_commit  # called before (False) and after (True) each commit that changes anything

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        before = self._changes()
        with super().transaction() as tx:
            yield tx
            changed = self._changes() > before
            if changed and self.full:
                raise Exhausted("the database did not take it: database or disk is full", hint="make room")
            if changed:
                self._at_commit(False)
        if changed:
            self._at_commit(True)

    def forget(self) -> None:
        """All that is only in memory is lost, as when a process dies."""
        self._forget()

    def _changes(self) -> int:
        return int(self._connection.connection.dbapi_connection.total_changes)  # type: ignore[union-attr]


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.settings = scenario.settings
        self.loop = asyncio.get_running_loop()
        self.clock = VirtualClock()
        self.world = World(scenario.seed, scenario.world)
        self.fates = Fates(
            scenario.seed,
            {"scheduler": scenario.scheduler_odds, "hypervisor": scenario.hypervisor_odds},
            scenario.blows,
        )
        self.scheduler = SimulatedScheduler(self.world, Random(f"{scenario.seed}/scheduler"), image=self.settings.image)
        self.hypervisor = SimulatedHypervisor(self.world, Random(f"{scenario.seed}/hypervisor"))
        self.told: list[tuple[float, str]] = []
        self.commits = self.crashes = self.hints = 0
        self.deaths = {(death.commit, death.after): death for death in scenario.deaths}
        self.down = 0.0
        self.unclaimed: set[str] = set()
        self.disk_full = 0
        self.wires: list[Wire] = []
        self.controller: Controller | None = None
        self.store = self._open()
        self.killed = asyncio.Event()
        self.world.cluster.hint = self._hint
        self.world.ran = self._tell
        self.fates.told = self._tell

    @classmethod
    async def whole(cls, scenario: Scenario) -> Outcome:
        self = cls(scenario)
        tasks = [asyncio.create_task(self._live(arrival)) for arrival in scenario.arrivals]
        tasks += [asyncio.create_task(self._befall(mishap)) for mishap in scenario.mishaps]
        reign = asyncio.create_task(self._reign())
        try:
            while self.loop.time() < scenario.limit and not (all(task.done() for task in tasks) and self._at_rest()):
                if reign.done():
                    reign.result()
                if all(task.done() for task in tasks) and not self.world.unfinished():
                    self._end_pools()
                await asyncio.sleep(1.0)  # virtual: rest is a state of many parts, and none of them announces it
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in (reign, *tasks):
                task.cancel()
        return self._judge()

    def _end_pools(self) -> None:
        """All jobs are over: the operator takes the pools out of the settings, so that nothing has to remain."""
        if self.settings.pool and self.controller is not None:
            self._tell("operator: no pools any more, and the daemon anew")
            self.settings = replace(self.settings, pool=())
            self._die(1.0)

    def _tell(self, what: str) -> None:
        self.told.append((self.loop.time(), what))

    # --- users

    async def _live(self, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at)
        cluster = self.world.cluster
        await cluster.answers()  # whoever gets no answer tries again
        batch, tasks = arrival.batch, arrival.tasks
        ids = cluster.submit_array(batch, tasks) if tasks else [cluster.submit(batch)]
        self._tell(f"user submits {', '.join(ids)}: {batch.nodes} x {batch.size}, {batch.seconds:g} s")
        records = [cluster.jobs[job_id] for job_id in ids]
        passed = 0.0
        for deed in sorted(arrival.deeds, key=lambda deed: deed.after):
            await asyncio.sleep(deed.after - passed)
            passed = deed.after
            await cluster.answers()
            for record in records:
                if cluster.jobs.get(record.job_id) is record:
                    self._tell(f"user: {deed.what} {record.job_id}, which is {record.state}")
                    if deed.what == "change":
                        cluster.change(record.job_id, size=deed.size, nodes=deed.nodes)
                    else:
                        getattr(cluster, deed.what)(record.job_id)

    def _hint(self) -> None:
        self.hints += 1
        point = self.fates.chance("hint", self.hints)
        if point < self.scenario.hints:
            self._poke()
            if point < self.scenario.hints / 10:
                self._poke()
        elif point < (1 + self.scenario.hints) / 2:
            self.loop.call_later(self.fates.between(HINT_DELAY, "hint", self.hints, "late"), self._poke)

    def _poke(self) -> None:
        if self.controller is not None:
            self.controller.hint()

    # --- mishaps

    async def _befall(self, mishap: Mishap) -> None:
        await asyncio.sleep(mishap.at)
        world, cluster = self.world, self.world.cluster
        match mishap.what:
            case What.VM_DIES:
                if name := world.vm(mishap.pick):
                    self._tell(f"mishap: {name} dies")
                    world.kill_vm(name)
            case What.FLOODS:
                if name := world.vm(mishap.pick):
                    self._tell(f"mishap: the guest of {name} floods its channel")
                    world.machines.flood(name)
            case What.REGISTERS_AGAIN:
                if guest := world.guest(mishap.pick):
                    how = "starts again" if guest.alive else "is heard only now"
                    self._tell(f"mishap: the daemon of {guest.name} {how}")
                    guest.register_again()
            case What.CLUSTER_AWAY | What.CLUSTER_RESTARTS:
                self._tell(f"mishap: {mishap.what}, {mishap.seconds:.1f} s")
                cluster.go_away()
                await asyncio.sleep(mishap.seconds)
                if mishap.what is What.CLUSTER_RESTARTS:
                    cluster.reconfigure()
                cluster.come_back()
            case What.RECONFIGURED:
                await cluster.answers()
                self._tell(f"mishap: {mishap.what}")
                cluster.reconfigure()
            case What.HOST_AWAY | What.HOST_FENCED:
                await self._host_away(world.host(mishap.pick), mishap)
            case What.DROPPED:
                rows = [row for _, row in sorted(self.store.rows().templates.items())]
                if rows and self.controller is not None:
                    row = rows[int(mishap.pick * len(rows))]
                    self._tell(f"operator drops template {row.id}, which is {row.state}")
                    self.controller.command(Command("drop", row.host, row.image, size=row.size, account=row.account))
            case What.DISK_FULL:
                self._tell(f"mishap: {mishap.what}, {mishap.seconds:.1f} s")
                self.disk_full += 1
                self.store.full = True
                await asyncio.sleep(mishap.seconds)
                self.disk_full -= 1
                self.store.full = self.disk_full > 0
            case What.CRASH:
                if self.controller is not None:
                    self._die(mishap.seconds)

    async def _host_away(self, host: str, mishap: Mishap) -> None:
        machines = self.world.machines
        if host in machines.away:
            return
        self._tell(f"mishap: host {host} is out of reach, {mishap.seconds:.1f} s")
        machines.leave(host)
        if mishap.what is What.HOST_FENCED:
            await asyncio.sleep(mishap.seconds / 2)
            self._tell(f"operator switches host {host} off, and says so until nothing is lost any more")
            machines.switch_off(host)
            until = self.loop.time() + mishap.seconds / 2
            while self.loop.time() < until or any(
                vm.host == host and vm.state == "lost" for vm in self.store.rows().vms.values()
            ):
                if self.controller is not None:
                    self.controller.command(Command("fence", host))
                await asyncio.sleep(5.0)
        else:
            await asyncio.sleep(mishap.seconds)
        self._tell(f"host {host} is back")
        machines.come_back(host)

    # --- the controller, again and again

    def _open(self) -> MortalStore:
        store = MortalStore(self.scenario.database, self.clock, SITE, self._at_commit)
        store.full = self.disk_full > 0
        return store

    def _at_commit(self, after: bool) -> None:
        self.commits += not after
        if after:
            self._account()
        death = self.deaths.pop((self.commits, after), None)
        if death is not None and self.controller is not None:
            self._die(death.seconds)
            raise Died

    def _account(self) -> None:
        """What is claimed against what there is: each VM has a row that lives and a claim on its host."""
        rows, machines = self.store.rows(), self.world.machines
        claimed = {(claim.owner, claim.host) for claim in rows.claims}
        live = {vm.name: vm for vm in rows.vms.values()}
        for name, machine in machines.vms.items():
            vm = live.get(name)
            if vm is None or (vm.key, machine.spec.host) not in claimed:
                self.unclaimed.add(f"VM {name} is on {machine.spec.host} and nothing is claimed for it")

    def _die(self, seconds: float) -> None:
        """Cut all that the controller has to do with the world, at once: the dead do not tidy up."""
        self._tell(f"the controller dies at commit {self.commits}, for {seconds:.1f} s")
        self.down = seconds
        self.controller = None
        for wire in self.wires:
            wire.sever()
        self.killed.set()

    async def _reign(self) -> None:
        while True:
            self.killed.clear()
            self.wires = [Wire(self.fates, "scheduler"), Wire(self.fates, "hypervisor")]
            self.controller = Controller(
                self.store,
                FaultyScheduler(self.scheduler, self.wires[0]),
                FaultyHypervisor(self.hypervisor, self.wires[1]),
                self.clock,
                self.settings,
            )
            task = asyncio.create_task(self.controller.run())
            end = asyncio.create_task(self.killed.wait())
            await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
            if not self.killed.is_set():
                task.result()
            self.crashes += 1
            task.cancel()  # never awaited: its calls just never return
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.sleep(self.down)
            self.store.forget()
            if self.scenario.database != ":memory:":
                self.store.close()
                self.store = self._open()

    # --- the end

    def _at_rest(self) -> bool:
        if self.world.unfinished() or self.world.leftovers() or self.controller is None or self.disk_full:
            return False
        rows = self.store.rows()
        return not rows.attempts and not rows.vms

    def _judge(self) -> Outcome:
        rows = self.store.rows()
        wrongs = [*self.world.violations(), *self.world.unfinished(), *self.world.leftovers(), *self._unreasoned()]
        wrongs += [f"{row.key} is still {row.state}: {row.reason}" for row in rows.attempts.values()]
        wrongs += [f"{row.key} is still {row.state}: {row.reason}" for row in rows.vms.values()]
        wrongs += [f"claim of {claim.owner} is left" for claim in rows.claims if claim.owner.kind != "template"]
        wrongs += sorted(self.unclaimed) + self._templates_claimed()
        entries = self.store.journal()
        ahead = self.clock.now() - self.loop.time()
        told = sorted([*self.told, *((e.mono - ahead, _line(e)) for e in entries)], key=lambda line: line[0])
        return Outcome(
            scenario=self.scenario,
            seconds=self.loop.time(),
            crashes=self.crashes,
            commits=self.commits,
            blows=tuple(self.fates.met),
            calls=tuple(self.fates.calls),
            entries=tuple(entries),
            results={f"{job.number}: {job.job_id}": job.result for job in self.world.cluster.history},
            journal=[f"{e.mono:10.3f} {_line(e)}" for e in entries],
            told=told,
            arrows=Counter(arrow(e.kind, e.source, e.event, e.target) for e in entries if e.target is not None),
            wrongs=wrongs + [f"{e.kind} {e.id} quarantined: {e.reason}" for e in entries if e.event == "quarantined"],
        )

    def _templates_claimed(self) -> list[str]:
        """Templates that are there and not claimed; a claim for one that is gone is only too much."""
        rows = self.store.rows()
        claimed = {rows.templates[claim.owner.id].which for claim in rows.claims if claim.owner.kind == "template"}
        seen = self.world.machines.templates.items()
        there = {which for which, one in seen if one.condition is not TemplateCondition.BROKEN}
        return [f"template {which} is there and nothing is claimed for it" for which in sorted(there - claimed)]

    def _unreasoned(self) -> list[str]:
        """Jobs that ended without having run, and neither their user nor a reason that holds explains it. Why a run
        was lost is judged when it is: see `Machines.destroy` and `Cluster.stopped_by_us`."""
        scenario, wrong = self.scenario, []
        trouble = bool(
            scenario.mishaps
            or scenario.blows
            or scenario.hypervisor_odds.rates
            or scenario.scheduler_odds.rates
            or scenario.world.guests != GuestPace()
        )
        given_up = any(mishap.what is What.HOST_FENCED for mishap in scenario.mishaps)
        boots = {image.name: image.boots for image in scenario.world.images}
        for job in self.world.cluster.history:
            if job.result != "CANCELLED" or job.by_user:
                continue
            because = {
                job.batch.problem: bool(job.batch.problem),
                "fits on no host": given_up or not all(map(self._surely_fits, _wishes(job))),
                "no VM could be made": trouble or not boots.get(job.batch.image or "slim", False),
            }
            if not any(right and why in job.revoked for why, right in because.items()):
                wrong.append(f"job {job.job_id} was cancelled by us, which nothing justifies: {job.revoked!r}")
        return wrong

    def _surely_fits(self, batch: Batch) -> bool:
        """Whether the empty hosts hold a job by far: with four times the memory that it asks for."""
        each, size = 4 * (batch.size.memory + 256), batch.size
        holds = (min(h.capacity.cpus // size.cpus, h.capacity.memory // each) for h in self.scenario.world.hosts)
        return sum(holds) >= batch.nodes


def _wishes(job: JobRecord) -> list[Batch]:
    """What it asked for when it was cancelled, and shortly before: a command that was given up may arrive late."""
    if job.changed is None or job.cancelled - job.changed[0] >= 20.0:
        return [job.batch]
    return [job.batch, job.changed[1]]


def arrow(kind: str, source: object, event: object, target: object) -> str:
    """How an arrow of a table is called."""
    return f"{kind}: {source or 'nothing'} - {event} -> {target}"


def _line(entry: Entry) -> str:
    """A journal entry as a story tells it."""
    who = f"{entry.kind} {entry.id}"
    if entry.kind == "vm" and entry.attempt is not None:
        who += f" of attempt {entry.attempt}"
    if entry.target is None:
        return f"{who}: effect {entry.event} {'failed: ' + entry.reason if entry.reason else 'ended'}"
    way = entry.target if entry.source in (None, entry.target) else f"{entry.source} -> {entry.target}"
    return f"{who}: {way} ({entry.event}{', ' + entry.reason if entry.reason else ''})"
