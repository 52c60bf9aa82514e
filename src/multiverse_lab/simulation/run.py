"""Run the real controller and store against the simulated world, with faults and crashes, by seed."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from multiverse.agent.hypervisor import AgentSource
from multiverse.config import Settings, reloaded
from multiverse.controller.loop import Controller
from multiverse.core.changes import orphans
from multiverse.core.errors import Exhausted, Refused
from multiverse.core.model.job import LeaseState
from multiverse.core.model.vm import VmState
from multiverse.core.transition import Command
from multiverse.ports import Clock, Hypervisor
from multiverse.store import Store, Transaction
from multiverse_lab.simulation.clock import VirtualClock
from multiverse_lab.simulation.faults import FaultPlan, FaultyLink, Incident, IncidentKind
from multiverse_lab.simulation.faulty import faulty
from multiverse_lab.simulation.loop import run
from multiverse_lab.simulation.outcome import Outcome, journal_line, transition_name
from multiverse_lab.simulation.promises import (
    BrakeWatch,
    LeaseWatch,
    OverflowWatch,
    PromisedStarts,
    moves_at_rest,
    orphans_by_looking_at_all,
    overfull_pools,
    unclaimed_templates,
    unclaimed_vms,
    violations_at_end,
)
from multiverse_lab.simulation.saving import SAVE_ACTIONS, Savers, SaveWatch
from multiverse_lab.simulation.scenario import Arrival, Scenario, UserAction
from multiverse_lab.simulation.sites import BY_OPERATORS, OF_SITES, HostWatch, Operators
from multiverse_lab.simulation.sleeping import SleepWatch
from multiverse_lab.simulation.world import SimulatedWorld

SITE = "simul"

AT_REST = 8
"""At every eighth commit the simulation checks that the rows that are not looked at would not move."""

HINT_DELAY = (0.5, 10.0)  # seconds that a late hint takes
DECISION = 30.0  # seconds between two looks of the operator at what no record explains
UNNAMED = 0.2  # the share of hints of submissions that name no user, as another scheduler's may
CONFIRMED = 20.0  # seconds between two looks of the operator at leased hosts whose pilots are over
OF_PILOTS = (
    IncidentKind.PILOT_PREEMPTED,
    IncidentKind.PILOT_CANCELLED,
    IncidentKind.PILOT_REQUEUED,
    IncidentKind.PILOT_LOST,
    IncidentKind.PILOT_NODE_DOWN,
)
OF_FAILING = (
    IncidentKind.HOST_REFUSES,
    IncidentKind.HOST_SPOILS,
    IncidentKind.HOST_MUTES,
    IncidentKind.LAUNCHES_FAIL,
)
OF_STORAGES = (IncidentKind.STORAGE_AWAY, IncidentKind.STORAGE_FULL, IncidentKind.STORAGE_LOST)
USED_UP = 0.3  # the share of full disks on which not even releases are committed
SLOW = 600.0  # seconds that an observation of a slow source takes


def simulate(scenario: Scenario, most: int = 0) -> Outcome:
    """Run a scenario in virtual time, from the first submission until nothing is left to do. The loop may turn `most`
    times (0: as often as one scenario of a fuzz run needs at the very most)."""
    return run(_Simulation.whole(scenario), scenario.seed, most)


class ControllerCrashed(BaseException):
    """The controller's process has ended. Not an error, so that no handler catches it."""


class CrashingStore(Store):
    """A store whose disk may be `full`, and its reserve for releases `used_up`; its process may end at a commit."""

    def __init__(self, path: str, clock: Clock, at_commit: Callable[[bool], None], *, recovered: bool = False) -> None:
        super().__init__(path, clock, site=SITE, recovered=recovered)
        self.full = self.used_up = False
        self.at_commit = at_commit  # called before (False) and after (True) each commit that changes anything

    @contextmanager
    def transaction(self, *, releasing: bool = False) -> Iterator[Transaction]:
        before = self._changes()
        with super().transaction(releasing=releasing) as tx:
            yield tx
            changed = self._changes() > before
            if changed and self.full and (self.used_up or not releasing):
                raise Exhausted("the database did not take it: database or disk is full", hint="make room")
            if changed:
                self.at_commit(False)
        if changed:
            self.at_commit(True)

    def forget(self) -> None:
        """Drop everything that is only in memory, as the end of a process does."""
        self._forget()

    def copy(self) -> sqlite3.Connection:
        """The database as it is now."""
        copied = sqlite3.connect(":memory:")
        self._driver().backup(copied)
        return copied

    def restore(self, copied: sqlite3.Connection, *, elsewhere: bool = False) -> None:
        """Put a copy in place of the database, and open it anew; `elsewhere`: on another machine."""
        copied.backup(self._driver())
        self._forget()
        with self._begin():
            if elsewhere:
                self._put_meta("boot", "that of another machine")
            self._skip_numbers()
            self._active = None


@dataclass
class _Process:
    """The process of a controller that runs, with its connections."""

    run: str
    controller: Controller
    links: tuple[FaultyLink, FaultyLink]
    hypervisor: Hypervisor
    agents: asyncio.Task[None] | None
    task: asyncio.Task[None]

    def disconnect(self) -> None:
        """It has ended, and nothing of it reaches the world any more. A crashed process does not clean up."""
        for link in self.links:
            link.disconnect()

    def close(self) -> None:
        """Release what it had."""
        if self.agents is not None:
            self.agents.cancel()  # with the process its sockets are closed
        self.task.cancel()  # never awaited: its calls do not return
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.settings = scenario.settings
        self.loop = asyncio.get_running_loop()
        self.clock = VirtualClock()
        self.world = SimulatedWorld(scenario.seed, scenario.world)
        self.plan = FaultPlan(
            scenario.seed,
            {"scheduler": scenario.scheduler_odds, "hypervisor": scenario.hypervisor_odds},
            scenario.faults,
        )
        self.scheduler = self.world.scheduler(Random(f"{scenario.seed}/scheduler"), self.settings.image)
        self.hypervisor = self.world.hypervisor(Random(f"{scenario.seed}/hypervisor"))
        self.events: list[tuple[float, str]] = []
        self.commits = self.crash_count = self.hints = 0
        self.rng = Random(f"{scenario.seed}/controller")  # of all controllers, one after the other
        self.crashes = {(crash.commit, crash.after): crash for crash in scenario.crashes}
        self.seconds_down = 0.0
        self.unclaimed: set[str] = set()
        self.overfull: set[str] = set()
        self.restless: set[str] = set()
        self.hosts = HostWatch(self.world.machines)
        self.leases = LeaseWatch(self.world)
        self.starts = PromisedStarts(scenario)
        self.overflow = OverflowWatch()
        self.brakes = BrakeWatch(scenario)
        self.disk_full = 0
        self.process: _Process | None = None
        self.processes: list[_Process] = []  # kept, so that no crashed one ends when the collector happens to run
        self.older: _Process | None = None  # a controller that goes on beside the one that runs
        self.unheard: set[str] = set()  # hosts that no later controller than that has commanded yet
        self.replacement: Callable[[], None] | None = None  # of the database, before the controller starts again
        self.inherited: set[str] = set()  # VMs that existed when the database was replaced
        self.store = self._open()
        self.crashed = asyncio.Event()
        self.world.cluster.hint = self._hint
        self.world.log = self.world.cluster.log = self._log
        self.plan.log = self._log
        for host, agent in self.world.site.agents.items():
            agent.epochs.taken = partial(self._inherit, host)
        self.saves = SaveWatch(scenario, self.world)
        self.sleeps = SleepWatch()
        self.savers = Savers(self._give, lambda: self.store.rows(), self._log)
        self.operators = Operators(self._give, lambda: self.store.rows(), self._log, self.clock.wall)

    @classmethod
    async def whole(cls, scenario: Scenario) -> Outcome:
        self = cls(scenario)
        tasks = [asyncio.create_task(self._submit(arrival)) for arrival in scenario.arrivals]
        tasks += [asyncio.create_task(self._apply_in_time(incident)) for incident in scenario.incidents]
        tasks += [asyncio.create_task(self._reload_at(at, settings)) for at, settings in scenario.reloads]
        confirming = asyncio.create_task(self._confirm_leases())
        controllers = asyncio.create_task(self._run_controllers())
        try:
            while self.loop.time() < scenario.limit and not (all(task.done() for task in tasks) and self._is_idle()):
                if controllers.done():
                    controllers.result()
                if all(task.done() for task in tasks) and not self.world.unfinished():
                    self._remove_pools()
                await asyncio.sleep(1.0)  # idleness is a state of many parts, none of which announces it
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in (controllers, confirming, *tasks):
                task.cancel()
        return self._outcome()

    def _remove_pools(self) -> None:
        """After all jobs, the operator removes the pools from the settings, so that no spare has to remain."""
        if self.settings.pool and self.controller is not None:
            self._reload(replace(self.settings, pool=()))

    async def _reload_at(self, at: float, settings: Settings) -> None:
        await asyncio.sleep(at)
        self._reload(settings)

    def _reload(self, settings: Settings) -> None:
        """The operator changes the settings, and the controller that runs reads them, or else the next one."""
        self._log("operator: changes the settings and reloads them")
        self.settings, waiting = reloaded(self.settings, settings)
        assert not waiting, waiting
        if self.controller is not None:
            self.controller.decide_by(self.settings)

    def _log(self, text: str) -> None:
        self.events.append((self.loop.time(), text))

    # --- users

    async def _submit(self, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at)
        cluster = self.world.cluster
        await cluster.answers()  # users try again until they get an answer
        batch, tasks = arrival.batch, arrival.tasks
        try:
            ids = cluster.submit_array(batch, tasks) if tasks else [cluster.submit(batch)]
        except Refused as error:
            self._log(f"a job of {batch.nodes} x {batch.size} is refused: {error}")
            return
        self._log(f"user submits {', '.join(ids)}: {batch.nodes} x {batch.size}, {batch.seconds:g} s")
        records = [cluster.jobs[job_id] for job_id in ids]
        passed = 0.0
        for action in sorted(arrival.actions, key=lambda action: action.after):
            await asyncio.sleep(action.after - passed)
            passed = action.after
            await cluster.answers()
            for record in records:
                if cluster.jobs.get(record.job_id) is record:
                    self._log(f"user: {action.kind} {record.job_id}, which is {record.state}")
                    self._act(action, record.job_id)

    def _act(self, action: UserAction, job_id: str) -> None:
        if action.kind == "change":
            self.world.cluster.change(job_id, size=action.size, nodes=action.nodes)
        elif action.kind in SAVE_ACTIONS:
            self.savers.act(action.kind, self.world.cluster.jobs[job_id])
        else:
            getattr(self.world.cluster, action.kind)(job_id)

    def _hint(self, uid: int | None, job_id: str) -> None:
        self.hints += 1
        point = self.plan.chance("hint", self.hints)
        if uid is not None and self.plan.chance("hint", self.hints, "unnamed") < UNNAMED:
            uid = None
        if point < self.scenario.hints:
            self._deliver_hint(uid, job_id)
            if point < self.scenario.hints / 10:
                self._deliver_hint(uid, job_id)
        elif point < (1 + self.scenario.hints) / 2:
            delay = self.plan.between(HINT_DELAY, "hint", self.hints, "late")
            self.loop.call_later(delay, self._deliver_hint, uid, job_id)

    def _deliver_hint(self, uid: int | None, job_id: str) -> None:
        if self.controller is not None:
            self.controller.hint(uid, job_id)

    # --- incidents

    async def _apply_in_time(self, incident: Incident) -> None:
        await asyncio.sleep(incident.at)
        if incident.kind in OF_PILOTS:
            self._apply_to_pilot(incident)
        elif incident.kind in OF_SITES:
            await self._apply_to_site(self.world.host(incident.pick), incident)
        elif incident.kind is IncidentKind.VM_MOVES:
            self._order_move(incident)
        elif incident.kind in OF_FAILING:
            await self._fail(self.world.host(incident.pick), incident)
        elif incident.kind in OF_STORAGES:
            await self._lose_storage(self.world.host(incident.pick), incident)
        else:
            await self._apply(incident)

    async def _apply(self, incident: Incident) -> None:
        match incident.kind:
            case IncidentKind.VM_DIES | IncidentKind.GUEST_FLOODS | IncidentKind.REGISTERS_AGAIN:
                self._apply_to_vm(incident)
            case (
                IncidentKind.CLUSTER_AWAY
                | IncidentKind.CLUSTER_RESTARTS
                | IncidentKind.RECONFIGURED
                | IncidentKind.RESERVED
            ):
                await self._apply_to_cluster(incident)
            case IncidentKind.HOST_AWAY | IncidentKind.HOST_FENCED:
                await self._apply_to_host(self.world.host(incident.pick), incident)
            case IncidentKind.HOST_DISK_FULL:
                await self._fill_host(self.world.host(incident.pick), incident)
            case IncidentKind.NAME_SERVICE_SILENT:
                await self._silence_name_service(incident)
            case IncidentKind.SOURCE_SLOW:
                await self._slow_down(self.world.host(incident.pick), incident)
            case IncidentKind.TEMPLATE_DELETED:
                self._delete_template(incident.pick)
            case IncidentKind.DATABASE_RESTORED | IncidentKind.DATABASE_LOST:
                await self._replace_database(incident)
            case IncidentKind.DISK_FULL:
                await self._fill_disk(incident)
            case IncidentKind.CONTROLLER_RIVAL:
                await self._start_rival(incident)
            case IncidentKind.CONTROLLER_CRASH if self.controller is not None:
                self._crash(incident.seconds)

    def _apply_to_vm(self, incident: Incident) -> None:
        world = self.world
        if incident.kind is IncidentKind.REGISTERS_AGAIN:
            if guest := world.guest(incident.pick):
                how = "registers again" if guest.alive else "is heard only now"
                self._log(f"incident: the daemon of {guest.name} {how}")
                guest.register_again()
        elif name := world.vm(incident.pick):
            self._log(f"incident: {incident.kind}: {name}")
            if incident.kind is IncidentKind.VM_DIES:
                world.kill_vm(name)
            else:
                world.machines.flood(name)

    def _apply_to_pilot(self, incident: Incident) -> None:
        pilots = self.world.pilots
        pilot = pilots.running(incident.pick)
        if pilot is None:
            return
        self._log(f"incident: {incident.kind}: {pilot.id} of {pilot.spec.name}, which is {pilot.state}")
        match incident.kind:
            case IncidentKind.PILOT_PREEMPTED:
                pilots.end(pilot, "PREEMPTED")
            case IncidentKind.PILOT_CANCELLED:
                pilots.end(pilot, "CANCELLED by root")
            case IncidentKind.PILOT_REQUEUED:
                pilots.requeue(pilot)
            case IncidentKind.PILOT_LOST:
                pilots.lose(pilot)
            case _:
                pilots.fail_node(pilot)

    async def _confirm_leases(self) -> None:
        """An operator confirms of leased hosts whose pilots have ended that nothing is left on their nodes, once that
        is so and the controller cannot know it."""
        while True:
            await asyncio.sleep(CONFIRMED)
            for lease in self.store.rows().leases.values():
                host = self.store.rows().hosts.get(lease.name)
                known = host is not None and not host.is_off
                if known and lease.state is LeaseState.LOST and self.world.pilots.is_off(lease.name):
                    self._log(f"operator confirms that nothing is left of {lease.name}")
                    self._give(Command("fence", host=lease.name))

    async def _apply_to_cluster(self, incident: Incident) -> None:
        cluster = self.world.cluster
        if incident.kind is IncidentKind.RESERVED:
            delay = (0.0, 20.0, 120.0)[int(incident.pick * 1000) % 3]
            self._log(f"incident: {incident.kind} for {incident.seconds:.1f} s, in {delay:g} s")
            cluster.reserve("maintenance", delay, incident.seconds)
            return
        if incident.kind is IncidentKind.RECONFIGURED:
            await cluster.answers()
            self._log(f"incident: {incident.kind}")
            cluster.reconfigure()
            return
        self._log(f"incident: {incident.kind}, {incident.seconds:.1f} s")
        cluster.go_away()
        await asyncio.sleep(incident.seconds)
        if incident.kind is IncidentKind.CLUSTER_RESTARTS:
            cluster.restart()
        cluster.come_back()

    async def _apply_to_site(self, host: str, incident: Incident) -> None:
        """What happens to a host, its agent or its link, and what operators do to it."""
        site = self.world.site
        if incident.kind in BY_OPERATORS:
            await self.operators.apply(host, incident)
            return
        if host in self.world.machines.away:
            return
        self._log(f"incident: {incident.kind}: {host}, {incident.seconds:.1f} s")
        match incident.kind:
            case IncidentKind.HOST_CRASHES:
                await site.crash(host, incident.seconds)
            case IncidentKind.AGENT_DIES:
                await site.stop_agent(host, incident.seconds)
            case IncidentKind.AGENT_REPLACED:
                await site.replace_agent(host, incident.seconds)
            case IncidentKind.LINK_HANGS:
                await site.hang_link([host], incident.seconds)
            case _:
                await site.hang_link(list(site.agents), incident.seconds)
        self._log(f"the end of: {incident.kind}: {host}")

    def _give(self, command: Command) -> None:
        """An operator's command to the controller that runs. It may be refused, or lost with the controller."""
        if self.controller is not None:
            self.controller.command(command).add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _apply_to_host(self, host: str, incident: Incident) -> None:
        machines, site = self.world.machines, self.world.site
        if host in machines.away:
            return
        self._log(f"incident: host {host} is out of reach, {incident.seconds:.1f} s")
        site.cut_off(host)
        if incident.kind is IncidentKind.HOST_FENCED:
            await asyncio.sleep(incident.seconds / 2)
            await site.switch_off(host)
            until = self.loop.time() + incident.seconds / 2
            if self.scenario.world.pair.has_cloud:
                self._log("incident: a rack of the cloud fails")
                await asyncio.sleep(incident.seconds / 2)
            else:
                await self._fence(host, until)
        else:
            await asyncio.sleep(incident.seconds)
        self._log(f"host {host} is back")
        site.reconnect(host)

    async def _fill_host(self, host: str, incident: Incident) -> None:
        machines = self.world.machines
        if host in machines.full or self.scenario.world.pair.has_cloud:  # a cloud has disks of its own
            return
        self._log(f"incident: the disk of host {host} is full, {incident.seconds:.1f} s")
        machines.fill_disk(host)
        await asyncio.sleep(incident.seconds)
        self._log(f"the disk of host {host} has room again")
        machines.make_room(host)

    async def _lose_storage(self, host: str, incident: Incident) -> None:
        """A storage of a host is out of its reach, or has no room, for a while, or loses its files: that to which it
        writes, or copies."""
        machines, one = self.world.machines, self.world.machines.hosts[host]
        copies = one.copies is not None and int(incident.pick * 10_000) % 2 == 0
        storage = one.copies if copies else one.storage
        if storage is not None and incident.kind is IncidentKind.STORAGE_LOST:
            await self._lose_files(storage.name, incident)
            return
        away = incident.kind is IncidentKind.STORAGE_AWAY
        cut_off = machines.detached_copies if copies else machines.detached
        what, where = (host, cut_off) if away else (storage.name if storage else "", machines.full_storages)
        if storage is None or what in where:
            return
        self._log(f"incident: {incident.kind}: {what}, {incident.seconds:.1f} s")
        where.add(what)
        await asyncio.sleep(incident.seconds)
        self._log(f"the end of: {incident.kind}: {what}")
        where.discard(what)

    async def _lose_files(self, storage: str, incident: Incident) -> None:
        lost = self.world.machines.lose_files(storage)
        self._log(f"incident: {incident.kind}: {storage}, {', '.join(sorted(lost)) or 'none'}")
        await asyncio.sleep(incident.seconds)
        if int(incident.pick * 1000) % 2:
            self._log(f"the files of {storage} are put back from a backup")
            self.world.machines.put_back(storage, lost)
        self.savers.mend()

    def _order_move(self, incident: Incident) -> None:
        """An operator has a VM moved that runs a job: to any host, or to one that may not even take it."""
        serving = [vm for vm in self.store.rows().vms.values() if vm.state is VmState.SERVING]
        if not serving:
            return
        vm = serving[int(incident.pick * len(serving))]
        hosts = ["", "", *(host for host in sorted(self.world.static) if host != vm.host)]
        host = hosts[int(incident.pick * 1000) % len(hosts)]
        self._log(f"operator: moves {vm.name} from {vm.host} to {host or 'any host'}")
        self._give(Command("move", host, job=vm.name))

    async def _fail(self, host: str, incident: Incident) -> None:
        """VMs fail on a host, or launches of a user's jobs. For good if the time is longer than the scenario."""
        machines, uids = self.world.machines, self.scenario.world.users
        uid = uids[int(incident.pick * len(uids))]
        of_hosts = {
            IncidentKind.HOST_REFUSES: machines.refusing,
            IncidentKind.HOST_SPOILS: machines.spoiling,
            IncidentKind.HOST_MUTES: machines.muting,
        }
        hosts, users = of_hosts.get(incident.kind, set[str]()), self.world.cluster.unlaunchable
        subject = f"host {host}" if incident.kind in of_hosts else f"uid {uid}"
        self._log(f"incident: {incident.kind}: {subject}, {incident.seconds:g} s")
        hosts.add(host) if incident.kind in of_hosts else users.add(uid)
        if incident.seconds < self.scenario.limit:
            await asyncio.sleep(incident.seconds)
            self._log(f"the end of: {incident.kind}: {subject}")
            hosts.discard(host) if incident.kind in of_hosts else users.discard(uid)

    async def _slow_down(self, host: str, incident: Incident) -> None:
        machines = self.world.machines
        source = machines.source_of(host)
        self._log(f"incident: source {source} answers after {SLOW:g} s, for {incident.seconds:.1f} s")
        machines.delays[source] = SLOW
        await asyncio.sleep(incident.seconds)
        machines.delays.pop(source, None)
        self._log(f"source {source} answers at once again")

    async def _silence_name_service(self, incident: Incident) -> None:
        self._log(f"incident: {incident.kind}, {incident.seconds:.1f} s")
        self.world.silent_name_services += 1
        await asyncio.sleep(incident.seconds)
        self.world.silent_name_services -= 1

    async def _fence(self, host: str, until: float) -> None:
        self._log(f"operator switches host {host} off, and repeats the fence command until no VM is lost")
        while self.loop.time() < until or any(
            vm.host == host and vm.state == "lost" for vm in self.store.rows().vms.values()
        ):
            if self.controller is not None:
                self.controller.command(Command("fence", host))
            await asyncio.sleep(5.0)

    def _delete_template(self, pick: float) -> None:
        rows = [row for _, row in sorted(self.store.rows().templates.items())]
        if rows and self.controller is not None:
            row = rows[int(pick * len(rows))]
            self._log(f"operator deletes template {row.id}, which is {row.state}")
            self.controller.command(Command("drop", row.host, row.image, size=row.size, account=row.account))

    async def _replace_database(self, incident: Incident) -> None:
        """The operator restores a copy, or has none and starts with an empty database."""
        if incident.kind is IncidentKind.DATABASE_RESTORED:
            copied = self.store.copy()
            self._log("incident: a copy of the database is made")
            await asyncio.sleep(incident.seconds)
            self.replacement = lambda: self._restore_database(copied)
        else:
            self.replacement = self._lose_database
        self._log(f"incident: {incident.kind}")
        self._crash(1.0)
        await self._end_orphans()

    def _restore_database(self, copied: sqlite3.Connection) -> None:
        self.store.restore(copied)
        self.hosts.take_over(self.store.rows())

    async def _start_rival(self, incident: Incident) -> None:
        """A controller starts on another machine, with a copy of the database, while the older one goes on, which
        reaches the hosts, and not the scheduler. Which one is older, only the epoch says that it has taken."""
        epochs = [agent.epochs.highest(SITE) for agent in self.world.site.agents.values()]
        if self.older or self.process is None or self.process.run not in [epoch.holder for epoch in epochs]:
            return
        self._log(f"incident: {incident.kind}, {incident.seconds:.1f} s")
        self.older, self.process, copied = self.process, None, self.store.copy()
        self.older.links[0].disconnect()
        self.store.at_commit = lambda _: None
        self.store = self._open()
        self.store.restore(copied, elsewhere=True)
        self.unheard = set(self.world.site.agents)
        self.world.cluster.unlist_offers()
        self.seconds_down = 0.0
        self.crashed.set()
        await asyncio.sleep(incident.seconds)
        for source in self.older.hypervisor.sources:
            if isinstance(source, AgentSource):
                self._log(f"the older controller ends; of {source.name} it knows: {source.connection.reason}")
        if self.older.task.done() and not self.older.task.cancelled():
            self.older.task.result()
        self.older.disconnect()
        self.older.close()
        self.older = None
        await self._end_orphans()

    def _inherit(self, host: str, run: str) -> None:
        """A controller commands the host. What an older one has had made there until now is for it to find."""
        if host in self.unheard and (self.older is None or self.older.run != run):
            self.inherited |= self.world.site.agents[host].local.asked
            self.unheard.discard(host)

    async def _end_orphans(self) -> None:
        """The operator ends VMs that nobody remembers and whose jobs wait in vain."""
        await asyncio.sleep(DECISION)
        while orphans := [vm for vm in self.store.rows().vms.values() if vm.state is VmState.ORPHAN]:
            for vm in orphans:
                machine = self.world.machines.vms.get(vm.name)
                guest = machine.guest if machine is not None else None
                waits = guest is not None and guest.waits_for_user
                if waits and guest is not None and self.controller is not None:
                    guest.given_up = True
                    self._log(f"operator ends {vm.name}, whose job {vm.job_id} waits in vain")
                    self.controller.command(Command("end", key=vm.key))
            await asyncio.sleep(DECISION)

    def _lose_database(self) -> None:
        self.store.close()
        self.store = self._open(recovered=True)

    async def _fill_disk(self, incident: Incident) -> None:
        self._log(f"incident: {incident.kind}, {incident.seconds:.1f} s")
        self.disk_full += 1
        self.store.full, self.store.used_up = True, incident.pick < USED_UP
        await asyncio.sleep(incident.seconds)
        self.disk_full -= 1
        self.store.full = self.disk_full > 0

    # --- the controller and its crashes

    def _open(self, *, recovered: bool = False) -> CrashingStore:
        store = CrashingStore(self.scenario.database, self.clock, self._at_commit, recovered=recovered)
        store.full = self.disk_full > 0
        store.used_up = self.store.used_up if self.disk_full else False
        return store

    def _at_commit(self, after: bool) -> None:
        self.commits += not after
        if after:
            rows = self.store.rows()
            for host in self.unheard:
                self.inherited |= self.world.site.agents[host].local.asked
            self.unclaimed.update(unclaimed_vms(rows, self.world, self.inherited))
            self.hosts.look(rows, self.clock.wall())
            self.leases.look(rows)
            self.saves.look(rows)
            self.sleeps.look(rows)
            if self.controller is not None:
                self.overfull.update(overfull_pools(rows, self.controller.policy))
                self.starts.check(self.controller.state, self.clock.wall())
                self.overflow.look(self.controller.state)
                self.brakes.look(self.controller.state)
            if self.controller is not None and self.commits % AT_REST == 0:
                self._check_rows_at_rest(self.controller)
        crash = self.crashes.pop((self.commits, after), None)
        if crash is not None and self.controller is not None:
            self._crash(crash.seconds)
            raise ControllerCrashed

    def _check_rows_at_rest(self, controller: Controller) -> None:
        state, world = controller.state, controller.observed
        for move in moves_at_rest(state, world, state.now, controller.policy):
            rows = ", ".join(f"{change.row.key} would be {change.row.state}" for change in move.changes)
            self.restless.add(f"{rows}, and is not looked at")
        if (found := orphans(state, world)) != (there := orphans_by_looking_at_all(state, world)):
            self.restless.add(f"orphans are {there}, and {found} are known")

    def _crash(self, seconds: float) -> None:
        """Disconnect the controller from the world at once: a crashed process does not clean up."""
        self._log(f"the controller crashes at commit {self.commits}, for {seconds:.1f} s")
        self.seconds_down = seconds
        if self.process is not None:
            self.process.disconnect()
        self.process = None
        self.crashed.set()

    @property
    def controller(self) -> Controller | None:
        """The controller that runs."""
        return self.process.controller if self.process else None

    def _start_controller(self) -> _Process:
        run, agents = f"run-{len(self.processes)}", None
        links = FaultyLink(self.plan, "scheduler"), FaultyLink(self.plan, "hypervisor")
        if self.scenario.world.agents:
            self.hypervisor = behind_agents = self.world.site.connect(self.store, run)
            agents = asyncio.create_task(behind_agents.run())
        ports = faulty(self.scheduler, self.hypervisor, links)
        controller = Controller(self.store, *ports, self.clock, self.settings, self.rng)
        controller.fence_by(self.world.site)
        process = _Process(run, controller, links, self.hypervisor, agents, asyncio.create_task(controller.run()))
        if agents is not None:
            agents.add_done_callback(partial(self._end_superseded, process))
        return process

    def _end_superseded(self, process: _Process, agents: asyncio.Task[None]) -> None:
        """The connections have ended by themselves: another controller commands a host. The process ends with them."""
        if agents.cancelled():
            return
        self._log(f"the controller {process.run} ends: {agents.exception()}")
        if process is not self.older:
            self.world.machines.violations.append(f"the latest controller, {process.run}, was superseded")
        process.disconnect()
        process.task.cancel()

    async def _run_controllers(self) -> None:
        """Run a controller, and another one after each crash."""
        while True:
            self.crashed.clear()
            self.process = process = self._start_controller()
            self.processes.append(process)
            end = asyncio.create_task(self.crashed.wait())
            await asyncio.wait([process.task, end], return_when=asyncio.FIRST_COMPLETED)
            if not self.crashed.is_set():
                process.task.result()
            if process is not self.older:
                self.crash_count += 1
                process.close()
            await asyncio.sleep(self.seconds_down)
            self.store.forget()
            if self.replacement is not None:
                self.replacement()
                self.replacement = None
                self.inherited |= self.world.machines.vms.keys()
                self.world.cluster.unlist_offers()
            if self.scenario.database != ":memory:":
                self.store.close()
                self.store = self._open()

    # --- the end

    def _is_idle(self) -> bool:
        if self.world.unfinished() or self.world.leftovers() or self.controller is None or self.disk_full:
            return False
        rows = self.store.rows()
        unheard = any(source.latest is None for source in self.controller.sources.values())
        if unheard and unclaimed_templates(rows, self.world):
            return False  # a controller with another database has not seen them yet
        if self.world.cluster.addresses:
            return False  # the end of a VM was committed at this moment
        return not (rows.attempts or rows.vms or rows.leases or rows.saved) and self.world.site.is_settled

    def _outcome(self) -> Outcome:
        rows, entries = self.store.rows(), self.store.journal()
        violations = violations_at_end(self.scenario, self.world, rows)
        violations += (
            sorted(self.unclaimed)
            + sorted(self.overfull)
            + sorted(self.restless)
            + sorted(self.hosts.broken)
            + sorted(self.leases.broken)
            + self.saves.violations()
            + self.sleeps.violations()
            + sorted(self.starts.broken)
            + sorted(self.overflow.broken)
            + self.brakes.violations(self.world, self.loop.time())
            + unclaimed_templates(rows, self.world)
        )
        violations += [f"{e.kind} {e.id} quarantined: {e.reason}" for e in entries if e.event == "quarantined"]
        ahead = self.clock.now() - self.loop.time()
        events = sorted([*self.events, *((e.mono - ahead, journal_line(e)) for e in entries)], key=lambda line: line[0])
        changes = [e for e in entries if e.target is not None]
        return Outcome(
            scenario=self.scenario,
            seconds=self.loop.time(),
            crash_count=self.crash_count,
            commits=self.commits,
            faults=tuple(self.plan.applied),
            calls=tuple(self.plan.calls),
            entries=tuple(entries),
            results={f"{job.number}: {job.job_id}": job.result for job in self.world.cluster.history},
            journal=[f"{e.mono:10.3f} {journal_line(e)}" for e in entries],
            events=events,
            runs=tuple(
                (self.world.cluster.history[one.job].batch.name, one.began, one.ended)
                for one in self.world.runs
                if one.ended is not None
            ),
            evictions={
                one.job.job_id: one.evictions
                for one in sorted(self.store.attempts(limit=1 << 40), key=lambda one: one.id)
            },
            starts_kept=self.starts.kept,
            told=tuple(text for job in self.world.cluster.history for text in job.told),
            transitions=Counter(transition_name(e.kind, e.source, e.event, e.target) for e in changes),
            violations=violations,
        )
