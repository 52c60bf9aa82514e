"""A simulated slurmctld with its jobs and nodes. It behaves as Slurm 22.05 was observed to (DESIGN 5).

Methods take no time. The latencies of commands belong to the port (`simulation.scheduler`), those of daemons to the
callbacks here.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from multiverse.core.errors import NotYet, Refused
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.host import JobLimits
from multiverse.core.model.job import (
    MOST_SHORT_RUNS,
    SHORT_RUN,
    YEAR,
    Job,
    JobState,
    Maintenance,
    Node,
    NodeReservation,
    NodeSpec,
    Preemption,
    SchedulerView,
)
from multiverse_lab.simulation.clock import EPOCH
from multiverse_lab.simulation.guests import LIVE, Guest, Registration, Run
from multiverse_lab.simulation.jobs import KILL_WAIT, Batch, JobRecord, NodeRecord
from multiverse_lab.simulation.processes import Ledger
from multiverse_lab.simulation.state_files import AWAY, KILLED, MISSED, KeptRun
from multiverse_lab.simulation.tables import KeptJobs, KeptNodes

NOTICED = 5.0
"""Seconds by which the controller may notice the start of a run later than its end."""

RETRIED = 12.0
"""Seconds for which slurmctld tries to tell a node that does not answer to end a job (slurm_send_addr_recv_msgs of
22.05.8: ten seconds, and TCPTimeout, 2 s). A node of the same name that answers meanwhile ends the job's next run."""


@dataclass(frozen=True)
class ClusterSettings:
    """Times are in seconds; ranges are drawn from. `flavor` is the largest size that the gate accepts. No user may run
    more than `max_jobs` jobs, or jobs on more than `max_cpus` CPUs, at once (0: no limit)."""

    release_after: float = 30.0  # from the controller's hold of a job until its user releases it
    cycle: float = 1.0  # between two runs of the scheduler
    restart: tuple[float, float] = (0.0, 0.0)  # that slurmctld takes to know new nodes; none: it needs no restart
    node_timeout: float = 60.0  # SlurmdTimeout
    requeue_delay: float = 121.0  # from the requeue of a job to the begin time that slurmctld gives to the job
    launch: tuple[float, float] = (0.02, 0.2)  # from start to the script's first instruction
    epilog: tuple[float, float] = (0.02, 0.6)  # from the end of a run to a node that has released the job
    min_job_age: tuple[float, float] = (2.0, 90.0)  # how long an ended job is shown (MinJobAge)
    flavor: Size = field(default=Size(64, 262_144))
    max_nodes: int = 16
    first_id: int = 1
    last_id: int = 60_000  # afterwards ids are used again
    node_feature: str = "vm"
    max_jobs: int = 0
    max_cpus: int = 0
    offers_valid_for: float = 10.0  # how long jobs may take offers after the last observation
    limits_valid_for: float = 60.0  # how long the published largest sizes hold after the last observation
    test_only_share: float = 0.0  # the share of submissions that a `sbatch --test-only` precedes
    tester: int = 0  # a user who calls `sbatch --test-only` again and again, and submits nothing; 0: nobody
    test_interval: float = 1.0  # of that user, until `tests_end`
    tests_end: float = 240.0
    bf_interval: tuple[float, float] = (5.0, 30.0)  # between two cycles of backfill
    bf_cycle: tuple[float, float] = (0.0, 3.0)  # from the beginning of such a cycle to its end
    min_wait: float = 0.0  # seconds that a job waits for physical nodes before it may be moved to a VM
    forgets: float = 0.0  # the share of requeues of saved jobs after which slurmctld is killed before it has kept them
    preemption: Preemption | None = None  # as it is shown; the scheduler itself preempts no job
    maintenance: tuple[Maintenance, ...] = ()  # of machines, in virtual time


@dataclass
class OfferedNode:
    """A node on offer, and whether a job that names no image, or no kind, may take it."""

    node: NodeSpec
    any_image: bool
    any_kind: bool
    taken: bool = False
    taker: int = 0  # the uid of the user who took it

    def suits(self, batch: Batch) -> bool:
        """Whether a job may take this node as it is submitted (multiverse.lua, take_spare)."""
        named = {*batch.features, *([batch.image] if batch.image else []), *([batch.kind.value] if batch.kind else [])}
        kinds = {CloneKind.INSTANT.value, CloneKind.AUTO.value}
        size = self.node.size
        return (
            named <= {self.node.image} | kinds
            and (self.any_image or self.node.image in named)
            and (self.any_kind or bool(named & kinds))
            and batch.nodes == batch.sockets == 1
            and not batch.size.net
            and (batch.size.cpus, batch.account) == (size.cpus, self.node.account)
            and batch.size.memory <= size.memory
            and batch.size.disk <= size.disk
            and not (batch.held or batch.delay or batch.after or batch.at_most)
        )


class SimulatedBackfill:
    """slurmctld's backfill: which nodes it plans to use. It forgets that as a cycle begins, and shows it as one ends.
    In between slurmctld acts on requests. A node that is deleted while a plan has it crashes 22.05.8."""

    def __init__(self, cluster: Cluster, rng: Random) -> None:
        self._cluster, self._rng = cluster, rng
        self._loop = asyncio.get_running_loop()
        self._planned: set[str] = set()
        self._starts = 0  # of slurmctld
        self.active = False
        self.began = -math.inf
        if cluster.plans_ahead:
            self._wait()

    def restart(self) -> None:
        """slurmctld was restarted. What nodes are shown as it takes from its saved state, but not the plans."""
        self._planned.clear()
        if self.active:
            self._wait()
        self.active = False
        self._starts += 1

    def _wait(self) -> None:
        self._loop.call_later(self._rng.uniform(*self._cluster.settings.bf_interval), self._begin)

    def _begin(self) -> None:
        if not self._cluster.up:
            self._wait()
            return
        self._check()
        for name in self._planned & self._cluster.nodes.keys():
            self._cluster.nodes[name].planned = False
        self._planned.clear()
        self.active, self.began = True, self._loop.time()
        self._planned |= self._cluster.waited_for()
        starts = self._starts
        end = lambda: self._end() if starts == self._starts else None  # noqa: E731
        self._loop.call_later(self._rng.uniform(*self._cluster.settings.bf_cycle), end)

    def _end(self) -> None:
        self._check()
        self._wait()
        self.active = False
        for name in sorted(self._planned & self._cluster.nodes.keys()):
            node = self._cluster.nodes[name]
            if node.job is None:
                node.planned = True
            else:
                self._planned.discard(name)

    def _check(self) -> None:
        for name in sorted(self._planned - self._cluster.nodes.keys()):
            self._cluster.violations.append(f"slurmctld crashes: {name} was deleted while backfill planned to use it")
            self._planned.discard(name)


class Cluster:
    """slurmctld and its queue. `up` is whether slurmctld answers."""

    separator = "_"  # between the id of an array and the number of a task
    plans_ahead = True  # which jobs are to start later on which nodes
    counts_twice = True  # jobs on nodes, as it reads its configuration again: so does 22.05

    def __init__(self, rng: Random, settings: ClusterSettings) -> None:
        self.settings = settings
        self.up = True
        self.jobs = KeptJobs(self.separator)
        self.nodes = KeptNodes()
        self.physical: dict[str, NodeRecord] = {}  # of the partition that overflows; each runs one job at a time
        self.history: list[JobRecord] = []  # all jobs that ever were submitted
        self.submitted = 0  # how many
        self.ended: Callable[[JobRecord], None] = lambda job: None  # is told of each job that has ended
        self.violations: list[str] = []
        self.ledger = Ledger()  # of the scripts
        # What job_submit.lua and EpilogSlurmctld call, with the uid of the job's user or the job's id.
        self.epoch = EPOCH  # Unix time when the time of the event loop is 0
        self.hint: Callable[[int | None, str], None] = lambda uid, job_id: None
        self.host_of: Callable[[str], str] = lambda node: node  # on which host a node is
        self.log: Callable[[str], None] = lambda text: None
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._next = settings.first_id
        self.refused: list[Batch] = []  # as no host could hold them
        self._limits: JobLimits | None = None  # as published
        self.addresses: Mapping[str, str] = {}  # where users' commands find nodes
        self._offers: dict[str, OfferedNode] = {}
        self._used_offers: set[str] = set()  # nodes that were ever offered or withdrawn
        self.excluded: frozenset[int] = frozenset()  # users whose jobs take no offer
        self.unlaunchable: set[int] = set()  # users whose jobs slurmctld makes no credentials for
        self.hasty: list[str] = []  # starts before slurmctld's own delay was over, and holds without a reason
        self._observed = -math.inf
        self._forgotten: set[tuple[int, int]] = set()  # runs whose requeue it was killed after, once each
        self._retried: dict[str, float] = {}  # until when a node is told to end a job
        self._undelivered: list[Callable[[], None]] = []
        self._answering = asyncio.Event()
        self._answering.set()
        self._loop.call_later(rng.uniform(0.0, settings.cycle), self._run_cycle)
        self.backfill = SimulatedBackfill(self, rng)
        self._for_restart: list[Callable[[], None]] = []
        self._restarts = False
        self.reservation: NodeReservation | None = None  # of all nodes
        if settings.tester:
            self._loop.call_later(settings.test_interval, self._test_only)

    # --- actions of users

    def submit(self, batch: Batch) -> str:
        """Queue a job at the gate and return its id. Raises `Refused` if the job is larger than the largest flavor."""
        if self.settings.test_only_share and self._rng.random() < self.settings.test_only_share:
            self._take_offer(batch)  # job_submit.lua cannot tell `sbatch --test-only` from a submission
        job = self._queue(batch, self._new_id())
        if job.at_origin:
            return job.job_id
        job.pin = self._take_offer(batch)
        job.took_offer = job.pin is not None
        if job.pin and self._rng.random() < 0.5:
            self._try(job)  # jobs of srun and salloc are tried at once, batch jobs in the next cycle
        return job.job_id

    def _test_only(self) -> None:
        """The user who submits nothing tests jobs of all sizes that are usual here."""
        if self._loop.time() >= self.settings.tests_end:
            return
        self._loop.call_later(self.settings.test_interval, self._test_only)
        for size in (Size(1, 64), Size(2, 64)) if self.up else ():
            self._take_offer(Batch(uid=self.settings.tester, size=size))

    def submit_array(self, batch: Batch, tasks: int) -> list[str]:
        """Queue an array and return the ids of its tasks."""
        base = self._new_id()
        queued = [self._queue(batch, f"{base}{self.separator}{task}") for task in range(tasks)]
        for job in queued:
            job.array = str(base)
        return [job.job_id for job in queued]

    def tasks_beside(self, job: JobRecord) -> list[JobRecord]:
        """The job itself, or all tasks of its array."""
        if not job.array:
            return [job]
        return [one for _, one in sorted(self.jobs.items()) if one.array == job.array]

    def cancel(self, job_id: str, by_user: bool = True) -> None:
        job = self.jobs[job_id]
        job.by_user = job.by_user or by_user
        if job.state is JobState.PENDING:
            self._end(job, "CANCELLED")
        elif job.state in LIVE:
            self._stop(job, "CANCELLED")
        elif job.state is JobState.COMPLETING and job.again:
            job.again, job.result = False, "CANCELLED"

    def hold(self, job_id: str) -> None:
        self.jobs[job_id].held = True

    def held_by_controller(self, job: JobRecord, reason: str) -> None:
        """The controller holds a job whose runs end at once. Its user reads that, and releases it a while later."""
        if job.short_runs < MOST_SHORT_RUNS or not reason:
            self.hasty.append(f"job {job.job_id} was held after {job.short_runs} short runs: {reason!r}")
        job.held, job.short_runs = True, 0

        def release() -> None:
            job.held = False

        self._loop.call_later(self.settings.release_after, release)

    def release(self, job_id: str) -> None:
        self.jobs[job_id].held = False

    def change(self, job_id: str, **changes: Any) -> None:
        """Change the request of a pending job: fields of `Batch`."""
        job = self.jobs[job_id]
        if job.state is JobState.PENDING:
            job.changed = (self._loop.time(), job.batch)
            if (size := changes.get("size")) is not None:  # a bandwidth is in the comment, which keeps it
                changes["size"] = replace(size, net=job.batch.size.net)
            job.batch = replace(job.batch, **{name: value for name, value in changes.items() if value is not None})

    def requeue(self, job_id: str) -> None:
        """Stop a running job and queue it again, with the features that it has, after slurmctld's delay."""
        job = self.jobs[job_id]
        if job.state in LIVE:
            job.again = True
            node = self.nodes.get(job.nodes[0])
            job.by_controller |= node is not None and node.guest.is_frozen  # it cannot be told from a requeue of ours
            self._stop(job, "")

    def requeue_saved(self, job: JobRecord, *, hold: bool) -> None:
        """Queue a job again whose processes are frozen and cut off. Its run did not end by itself, however short."""
        guest = self.nodes[job.nodes[0]].guest if job.nodes and job.nodes[0] in self.nodes else None
        others = [self.nodes[name].guest for name in job.nodes[1:] if name in self.nodes]
        if guest is not None and guest.is_cut_off and any(one.alive and not one.is_cut_off for one in others):
            self.violations.append(f"job {job.job_id} was queued again before all of its VMs were cut off")
        if guest is None or not guest.is_cut_off:
            self.stopped_by_controller(job, "was queued again before it was cut off")
        run = (job.number, job.restarts)
        may_forget = self.settings.forgets > 0 and guest is not None and run not in self._forgotten
        if may_forget and self._rng.random() < self.settings.forgets:
            self._forgotten.add(run)
            kept = KeptRun.of(job, (self.nodes[name] for name in job.nodes if name in self.nodes))
            self._after(KILLED, lambda: self._be_killed(kept))
        job.by_controller = True
        self.requeue(job.job_id)
        job.run_seconds = math.inf
        job.held |= hold

    def warn(self, job: JobRecord) -> None:
        """Tell the processes of a job whose place is taken to end. They do not listen."""
        job.warned = self._loop.time() if job.warned is None else job.warned

    def preempt(self, job: JobRecord, *, requeue: bool) -> None:
        """The controller ends the run of a job for another one: as it must, by the rules that are shown to it."""
        rules, now, own = self.settings.preemption, self._loop.time(), job.batch.preempt_class
        mode = rules.modes.get(own, "") if rules is not None else ""
        grace, exempt = (rules.grace.get(own, 0.0), rules.exempt.get(own, 0.0)) if rules is not None else (0.0, 0.0)
        wrong = {
            f"although its mode is {mode or 'off'}": mode not in ("requeue", "cancel"),
            "for no job that may": not any(rules and own in rules.takes.get(one.batch.preempt_class, ())
                                           for one in self.history),
            "but not as its mode says": requeue != (mode == "requeue" and job.batch.requeue),
            "before its grace time was over": grace > 0 and (job.warned is None or now - job.warned < grace),
            "in its exempt time": not job.suspended and now - job.started < exempt,
        }  # fmt: skip
        self.violations += [f"job {job.job_id} was preempted {how}" for how, is_so in wrong.items() if is_so]
        job.by_controller, job.preempted = True, job.preempted + 1
        if requeue and job.batch.requeue:
            self.requeue(job.job_id)
        else:
            self._stop(job, "CANCELLED")
        job.run_seconds = math.inf

    def _be_killed(self, kept: KeptRun) -> None:
        """slurmctld is killed before it has kept that it queued a job again, and is started again."""
        if not self.up or not kept.may_be_latest:
            return
        self.log(f"slurmctld is killed, and has not kept that it queued {kept.job.job_id} again")
        self.go_away()

        def start() -> None:
            if kept.may_be_latest and kept.job.job_id in self.jobs:
                kept.show_again(self.nodes, self._loop.time())
            self.restart()
            self.come_back()
            self._after(MISSED, lambda: self._miss(kept))

        self._after(AWAY, start)

    def _miss(self, kept: KeptRun) -> None:
        """The daemon of a node has registered without the job that slurmctld takes for running there."""
        job, node = kept.job, self.nodes.get(kept.nodes[0].name)
        shown = job.state in LIVE and job.restarts == kept.fields["restarts"]
        guest = node.guest if node is not None and node.job is job and not node.down else None
        if shown and guest is not None and guest.reachable and not guest.executes(job):
            job.again = job.batch.requeue
            self._stop(job, "NODE_FAIL")

    def suspend(self, job_id: str) -> None:
        self._suspend(self.jobs[job_id], JobState.RUNNING, JobState.SUSPENDED)

    def resume(self, job_id: str) -> None:
        self._suspend(self.jobs[job_id], JobState.SUSPENDED, JobState.RUNNING)

    # --- messages of daemons

    def register(self, guest: Guest, registration: Registration, *, small: bool = False) -> bool:
        """A node's daemon starts; `small`: with less memory than the node was configured with. False if slurmctld does
        not answer; the daemon then tries again."""
        if not self.up:
            return False
        known = self.nodes.get(registration.name)
        if known is None:
            node = NodeRecord(registration.name, registration.features, registration.size, guest)
            node.sockets = registration.sockets
            self.nodes.add(node)
            if small:
                node.down, node.reason = True, "Low RealMemory"
        elif known.guest is guest:
            known.silent = None
        elif guest.is_restored and not known.guest.alive:  # a late message of the VM that was saved
            known.guest, known.silent = guest, None
        elif guest.alive:  # names of VMs must never be used again
            self.violations.append(f"node {registration.name} registered from a second VM")
        return True

    def after_restart(self, do: Callable[[], None]) -> None:
        """Do something once slurmctld has been restarted, which has not begun yet, or at once if it needs no restart.
        A restart serves all who wait as it begins. Meanwhile slurmctld answers, as with a backup controller."""
        if not self.settings.restart[1]:
            do()
            return
        self._for_restart.append(do)
        if not self._restarts:
            self._restart_for_nodes()

    def _restart_for_nodes(self) -> None:
        waiting, self._for_restart, self._restarts = self._for_restart, [], True

        def end() -> None:
            for do in waiting:
                do()
            self._restarts = False
            if self._for_restart:
                self._restart_for_nodes()

        self._after(self.settings.restart, end)

    def first_listed(self, names: Sequence[str]) -> str:
        """That one of some nodes on which a job's script would run; empty if there is none."""
        nodes = [self.nodes[name] for name in names if name in self.nodes]
        return min(nodes, key=lambda node: node.place).name if nodes else ""

    def stopped_answering(self, guest: Guest) -> None:
        """The daemon of a guest has ended. Slurm notices only after `node_timeout`."""
        node = self.nodes.get(guest.name)
        if node is not None and node.guest is guest:
            node.silent = self._loop.time()

    def answers_again(self, guest: Guest) -> None:
        """A node can be reached again. slurmctld learns that from its next ping."""
        node = self.nodes.get(guest.name)
        if node is None or node.guest is not guest:
            guest.register_again()
            return
        node.silent = None
        if node.down and node.reason == "Not responding":
            node.down, node.reason = False, ""  # ReturnToService=2
        job = node.job
        if job is not None and job.state in LIVE and job.nodes[0] == node.name and not guest.has_run(job):
            job.again = job.batch.requeue  # the message that launched the job was lost
            self._stop(job, "NODE_FAIL")

    def script_ended(self, job: JobRecord, run: Run) -> None:
        """The daemon of the job's first node reports the end of the script."""
        if job.state in LIVE and job.restarts == run.restarts:
            run.reported = True
            job.exit_code = job.batch.exit_code
            self._stop(job, "FAILED" if job.exit_code else "COMPLETED")

    def stopped_by_controller(self, job: JobRecord, how: str) -> None:
        """The controller ends a run. That is a violation if the run has begun and all its VMs are well, and none had an
        earlier run of the job, whatever became of that: the scheduler may start a job that was queued again on VMs
        that are about to go. Nor is a VM well that was handed over to a host which is off: nobody can know whether it
        had gone on there, and so it must not go on from where it stands."""
        guests = [self.nodes[name].guest for name in job.nodes if name in self.nodes]
        whole = all(guest.alive and guest.serves() is job and not guest.waits_for_user for guest in guests)
        whole = whole and job.repeats == 1 and not any(guest.has_run_before(job) for guest in guests)
        whole = whole and not any(one.may_be_stuck or one.is_cut_off or one.given_up or one.stranded for one in guests)
        if job.state in LIVE and whole:
            self.violations.append(f"job {job.job_id} ran on VMs that were all well, and {how}")

    # --- actions of operators

    def set_down(self, name: str, reason: str) -> None:
        """Set a node DOWN, so that the job there loses it. Nothing to do if there is no such node."""
        node = self.nodes.get(name)
        if node is None or node.down:
            return
        node.down, node.reason = True, reason
        job = node.job
        if job is None:
            return
        if job.state in LIVE:
            job.again = job.batch.requeue
            self._stop(job, "NODE_FAIL")
        self._release_node(job, name)

    def delete(self, name: str) -> None:
        """Delete a node. Raises `Refused` while a job is on it. Nothing to do if there is no such node."""
        node = self.nodes.get(name)
        if node is None:
            return
        if self.is_reserved():
            raise NotYet(f"node {name} is in a reservation")
        if node.job is not None:
            raise Refused(f"node {name} is in use by job {node.job.job_id}", hint="wait until the job has left it")
        if node.stuck and not node.down:
            raise Refused(f"node {name} is in use", hint="set it DOWN")
        self.nodes.remove(name)

    def drain(self, name: str) -> None:
        """Let no job start on a node. Nothing to do if there is no such node."""
        if name in self.nodes:
            self.nodes[name].drained = True

    def undrain(self, name: str) -> None:
        """Let jobs start on a node again. Nothing to do if there is no such node."""
        if name in self.nodes:
            self.nodes[name].drained = False

    def reserve(self, name: str, delay: float, seconds: float) -> None:
        """From some seconds on let no job run on any node, for so long."""
        begins = self.epoch + self._loop.time() + delay
        self.reservation = NodeReservation(name, begins, begins + seconds)

    def is_reserved(self) -> bool:
        """Whether the reservation of all nodes has begun, and is not over."""
        return self.reservation is not None and self.reservation.is_on(self.epoch + self._loop.time())

    def _kept(self, job: JobRecord) -> bool:
        """Whether the job cannot start because of the reservation."""
        limit = YEAR if job.batch.limit is None else job.batch.limit
        return self.reservation is not None and self.reservation.keeps(self.epoch + self._loop.time(), limit)

    def waited_for(self) -> set[str]:
        """The nodes on which backfill lets jobs start later. Now and then it plans one for a job that may start."""
        waiting = [job for job in self.jobs.values() if job.state is JobState.PENDING and job.pin is not None]
        return {
            node.name
            for job in sorted(waiting, key=lambda job: job.job_id)
            if self._kept(job) or not self._eligible(job) or self._rng.random() < 0.2
            for node in self._usable(job)
            if not node.down and not node.drained
        }

    def go_away(self) -> None:
        """slurmctld stops answering. Guests go on."""
        self.up = False
        self._answering.clear()

    def reconfigure(self) -> None:
        """slurmctld reads its configuration again, as at its start, and checks the features of every pending job."""
        self._check_features()
        for node in self.nodes.values():
            node.counted_twice |= self.counts_twice and node.job is not None

    def restart(self) -> None:
        """slurmctld has ended, and starts."""
        self._check_features()
        self.backfill.restart()
        for node in self.nodes.values():
            node.counted_twice = node.stuck = False

    def _check_features(self) -> None:
        for job in self.jobs.values():
            if job.state is JobState.PENDING and job.pin is not None and self._is_unsatisfiable(job):
                job.bad = True

    def come_back(self) -> None:
        """slurmctld answers again and receives the messages of daemons."""
        self.up = True
        self._answering.set()
        messages, self._undelivered = self._undelivered, []
        for message in messages:
            message()

    async def answers(self) -> None:
        """Wait until slurmctld answers."""
        await self._answering.wait()

    # --- offers

    def offer(self, offered: OfferedNode) -> None:
        """Offer a node, unless it was offered or withdrawn before."""
        name = offered.node.name
        if name not in self._used_offers:
            self._used_offers.add(name)
            self._offers[name] = offered

    def withdraw(self, node: str) -> None:
        self._used_offers.add(node)
        if node in self._offers and not self._offers[node].taken:
            del self._offers[node]

    def unlist_offers(self) -> None:
        """A controller that knows of no offers has started: jobs may take what was offered before no more."""
        self._offers = {node: offered for node, offered in self._offers.items() if offered.taken}
        self.excluded = frozenset()

    def forget(self, node: str) -> None:
        self._offers.pop(node, None)

    def observe_offers(self) -> dict[str, bool]:
        """The offered nodes, and whether they were taken. Jobs may take offers for some time after each observation."""
        self._observed = self._loop.time()
        return {node: offered.taken for node, offered in self._offers.items()}

    def takers(self) -> dict[str, int]:
        """Who took nodes, by node."""
        return {node: offered.taker for node, offered in self._offers.items() if offered.taken}

    def _take_offer(self, batch: Batch) -> str | None:
        late = self._loop.time() - self._observed > self.settings.offers_valid_for
        if late or batch.uid in self.excluded:
            return None
        for name, offered in self._offers.items():
            if not offered.taken and offered.suits(batch):
                if name not in self.nodes:
                    self.violations.append(f"{name} is on offer, and is no node: its job would be refused")
                offered.taken, offered.taker = True, batch.uid
                return offered.node.tag
        return None

    # --- observation

    def view(self) -> SchedulerView:
        jobs, nodes = self.shown_jobs(self.jobs.values()), self.shown_nodes(self.nodes)
        found = (
            (self.reservation,) if self.reservation and self.reservation.ends > self.epoch + self._loop.time() else ()
        )
        maintenance = tuple(
            replace(one, begins=self.epoch + one.begins, ends=self.epoch + one.ends)
            for one in self.settings.maintenance
            if self._loop.time() < one.ends
        )
        return SchedulerView(
            jobs,
            nodes,
            self.limits_left(),
            reservations=found,
            preemption=self.settings.preemption,
            maintenance=maintenance,
        )

    def shown_jobs(self, jobs: Iterable[JobRecord]) -> dict[str, Job]:
        """Jobs as slurmctld shows them, in the order of the queue."""
        return {
            job.job_id: job.shown(
                self._rank(job), self._may_be_served(job), self._uses(job), self._ends(job), self._delayed_until(job)
            )
            for job in sorted(jobs, key=self._order)
        }

    def shown_nodes(self, names: Iterable[str]) -> dict[str, Node]:
        reserved = self.is_reserved()
        return {name: self.nodes[name].shown(reserved=reserved) for name in sorted(names) if name in self.nodes}

    def _ends(self, job: JobRecord) -> float | None:
        """The Unix time by which a job that runs has ended at the latest; None if it does not run."""
        return self.epoch + job.runs_until + KILL_WAIT if job.state is JobState.RUNNING else None

    def _delayed_until(self, job: JobRecord) -> float | None:
        return self.epoch + job.begin if job.delayed and job.begin > self._loop.time() else None

    def any_node_has(self, feature: str) -> bool:
        """Whether any node has this feature. Slurm refuses features that no node has."""
        return bool(self.nodes.having(feature))

    # --- scheduling

    def _uses(self, job: JobRecord) -> dict[str, int]:
        """How much a job takes of each limit while it runs."""
        batch = job.batch
        if not self._is_limited(job):
            return {}
        array = job.job_id.partition(self.separator)[0]
        limits = (
            (self.settings.max_jobs, f"jobs of {batch.uid}", 1),
            (self.settings.max_cpus, f"CPUs of {batch.uid}", batch.nodes * batch.size.cpus),
            (batch.at_most, f"array {array}", 1),
        )
        return {limit: count for most, limit, count in limits if most}

    def limits_left(self) -> Counter[str]:
        """How much is left of each limit beside the running jobs."""
        left: Counter[str] = Counter()
        every = bool(self.settings.max_jobs or self.settings.max_cpus)
        limited = [*(self.jobs if every else self.jobs.groups.limited).values()]
        for job in limited:
            most = {"jobs": self.settings.max_jobs, "CPUs": self.settings.max_cpus, "array": job.batch.at_most}
            for limit in self._uses(job):
                left.setdefault(limit, most[limit.partition(" ")[0]])
        for job in limited:
            if job.state in LIVE:
                left.subtract(self._uses(job))
        return left

    def _is_limited(self, job: JobRecord) -> bool:
        return bool(self.settings.max_jobs or self.settings.max_cpus or job.batch.at_most)

    def _live(self) -> list[JobRecord]:
        return [job for job in self.jobs.values() if job.state in LIVE]

    def _new_id(self) -> int:
        while self.jobs.has_base(self._next):
            self._next += 1
        base, self._next = self._next, self._next + 1
        if self._next > self.settings.last_id:
            self._next = self.settings.first_id
        return base

    def limit_submissions(self, limits: JobLimits) -> None:
        """From now on refuse the jobs that these limits do not allow."""
        self._limits = limits

    def _allows(self, batch: Batch) -> bool:
        """Whether the published limits allow the job. They hold for some time after each observation."""
        if self._limits is None or self._loop.time() - self._observed > self.settings.limits_valid_for:
            return True
        return self._limits.allow(batch.image, batch.kind, batch.nodes, batch.size, batch.per_host)

    def _queue(self, batch: Batch, job_id: int | str) -> JobRecord:
        flavor = self.settings.flavor
        if batch.size.cpus > flavor.cpus or batch.size.memory > flavor.memory or batch.nodes > self.settings.max_nodes:
            raise Refused(f"no host holds {batch.size} on {batch.nodes} nodes", hint=f"at most {flavor} fits")
        if not batch.origin and not self._allows(batch):
            self.refused.append(batch)
            raise Refused(f"no hosts could ever hold {batch.nodes} x {batch.size}", hint="request less")
        job = JobRecord(
            self.submitted, str(job_id), self._wall(), batch, self._loop.time() + batch.delay, held=batch.held
        )
        self.submitted += 1
        self.jobs[job.job_id] = job
        self.history.append(job)
        job.at_origin = bool(batch.origin)
        if not job.at_origin:
            self.hint(batch.uid, "")
        return job

    def _order(self, job: JobRecord) -> tuple[int, int, int, int]:
        base, _, task = job.job_id.partition(self.separator)
        return (-job.batch.priority, job.submitted, int(base), int(task or 0))

    def _rank(self, job: JobRecord) -> int:
        """The order as one number. It is the same whichever other jobs there are."""
        priority, submitted, base, task = self._order(job)
        rank = (0xFFFFFFFF + priority) << 104 | submitted << 64 | base << 32 | task
        return rank + (1 << 137 if job.at_origin else 0)

    def _may_be_served(self, job: JobRecord) -> bool:
        """Whether nothing but the gate keeps the job waiting; of one that waits for physical nodes, whether it has
        waited for them long enough."""
        if not job.at_origin:
            return self._eligible(job, delayed=job.delayed)
        waited = self._loop.time() - job.begin >= self.settings.min_wait
        return self._eligible(job) and job.waits_for_nodes and waited

    def check_move(self, job: JobRecord) -> None:
        """The controller moves a job out of its partition: only one that waits there for nodes."""
        if not job.waits_for_nodes or self._loop.time() - job.begin < self.settings.min_wait:
            self.violations.append(f"job {job.job_id} was moved to a VM before it had waited for physical nodes")

    def _node(self, name: str) -> NodeRecord:
        return self.physical[name] if name in self.physical else self.nodes[name]

    def _eligible(self, job: JobRecord, delayed: bool = False) -> bool:
        """`delayed`: the begin time was set by slurmctld, and a pin removes it."""
        before = self.jobs.get(job.batch.after)
        waits = before is not None and before.state is not JobState.ENDED
        return not (job.held or job.bad or waits or (job.begin > self._loop.time() and not delayed))

    def _run_cycle(self) -> None:
        self._loop.call_later(self.settings.cycle, self._run_cycle)
        if not self.up:
            return
        now = self._loop.time()
        for node in [node for node in self.nodes.values() if node.silent is not None]:
            if node.silent is not None and now - node.silent >= self.settings.node_timeout:
                self.set_down(node.name, "Not responding")
        groups = self.jobs.groups
        overdue, pinned = groups.overdue(now), sorted(groups.pinned.values(), key=self._order)
        at_origin = sorted(groups.at_origin.values(), key=self._order)
        for job in [job for job in groups.ended.values() if job.ended <= now]:
            del self.jobs[job.job_id]
        for job in overdue:
            self._stop(job, "TIMEOUT")
        for job in pinned:
            self._try(job)
        for job in at_origin:
            if self._eligible(job) and not self._kept(job):
                self._try_physical(job)

    def _try_physical(self, job: JobRecord) -> None:
        """Start a job on physical nodes if enough are free, in the order of the queue."""
        waiting = (one for one in self.jobs.values() if one.at_origin and one.state is JobState.PENDING)
        first = not any(self._eligible(one) and self._order(one) < self._order(job) for one in waiting)
        free = [node for _, node in sorted(self.physical.items()) if node.job is None]
        if first and len(free) >= job.batch.nodes:
            job.waits_for_nodes = False
            self._start(job, free[: job.batch.nodes])
        else:
            job.waits_for_nodes = True

    def _is_unsatisfiable(self, job: JobRecord) -> bool:
        """Whether Slurm would set the job's reason to BadConstraints."""
        return job.pin is not None and not self.any_node_has(job.pin)

    def _usable(self, job: JobRecord) -> Collection[NodeRecord]:
        """The nodes that the constraints of a pinned job permit."""
        features = {job.pin, *job.batch.features}
        return [node for node in self.nodes.having(job.pin or "") if features <= set(node.features)]

    def _try(self, job: JobRecord) -> None:
        """Start a pinned job if it is eligible and all its nodes are free."""
        if self._is_unsatisfiable(job):
            # Slurm notices when it happens to check the job's constraints, not at once.
            job.bad = job.bad or self._rng.random() < 0.5
        if not self._eligible(job) or self._kept(job):
            return
        size = job.batch.size
        fit = [
            node
            for node in sorted(self._usable(job), key=lambda node: node.place)
            if not (node.down or node.drained or node.stuck) and node.silent is None and node.job is None
            if node.size.cpus >= size.cpus and node.size.memory >= size.memory and node.sockets >= job.batch.sockets
        ][: job.batch.nodes]
        if len(fit) < job.batch.nodes:
            return
        uses = self._uses(job)
        left = self.limits_left() if uses else {}
        over = [limit for limit, count in uses.items() if count > left[limit]]
        # A job that took an offer may have overtaken one that was admitted before; that one may wait for the limit.
        if over and not any(one.took_offer and over[0] in self._uses(one) for one in (job, *self._live())):
            self.violations.append(f"job {job.job_id} has its VMs, and a limit holds it back: {over[0]}")
        elif not over:
            self._start(job, fit)

    def _start(self, job: JobRecord, nodes: list[NodeRecord]) -> None:
        job.state, job.nodes, job.delayed = JobState.RUNNING, tuple(node.name for node in nodes), False
        now = self._loop.time()
        if now < job.not_before:
            self.hasty.append(
                f"job {job.job_id} started {job.not_before - now:.1f} s before slurmctld's delay was over"
            )
        job.busy, job.started, job.by_controller = list(job.nodes), now, False
        job.warned = None
        # slurmctld starts a job again on the VMs that it has until the controller has seen the first start fail.
        guests = tuple(node.guest for node in nodes)
        if guests == job.placed:
            job.repeats += 1
        else:
            job.placed, job.repeats = guests, 1
            if not any(guest.is_restored for guest in guests):  # a saved job goes on there: its run did not fail
                job.placements.append(now)
        if job.repeats > 10:
            self.hasty.append(f"job {job.job_id} started {job.repeats} times on the same VMs")
        if len(recent := [at for at in job.placements if at > now - 600]) > 13:
            self.hasty.append(f"job {job.job_id} started on {len(recent)} sets of VMs in ten minutes")
        on_hosts = Counter(self.host_of(node.name) for node in nodes)
        if (most := job.batch.per_host) and max(on_hosts.values()) > most:
            self.violations.append(
                f"job {job.job_id} asked for {most} VMs on a host at most, and runs on {dict(on_hosts)}"
            )
        for node in nodes:
            node.job = job
            node.guest.allocate(job)
        restarts = job.restarts

        def launch() -> None:
            if job.batch.uid in self.unlaunchable and job.state in LIVE and job.restarts == restarts:
                job.again = True  # job_complete() asks for it, whether or not the job may be queued again
                self._stop(job, "")
            if job.state in LIVE and job.restarts == restarts:
                nodes[0].guest.launch(job)
                self._tell_late(job)
            if job.state is JobState.SUSPENDED:
                nodes[0].guest.suspend(job)

        self._after(self.settings.launch, launch)

    def _tell_late(self, job: JobRecord) -> None:
        """A node gets the message that was meant for a VM of its name, and ends the run."""
        if any(self._loop.time() < self._retried.get(name, 0.0) for name in job.nodes):
            self._stop(job, "FAILED")

    def _stop(self, job: JobRecord, result: str) -> None:
        """End a run. The job is COMPLETING until every node has released it."""
        job.state, job.result = JobState.COMPLETING, result
        job.run_seconds = self._loop.time() - job.started
        job.by_controller = job.by_controller or result == "NODE_FAIL"
        self.hint(None, job.job_id)
        for name in list(job.busy):
            guest = self._node(name).guest
            guest.kill(job)
            if not guest.alive:
                self._retried[name] = self._loop.time() + min(RETRIED, self.settings.requeue_delay)
            least, most = self.settings.epilog
            lingers = 0.0 if result in ("COMPLETED", "FAILED") else job.batch.lingers
            self._after((least + lingers, most + lingers), self._epilog(job, job.restarts, guest))

    def _epilog(self, job: JobRecord, restarts: int, guest: Guest) -> Callable[[], None]:
        def done() -> None:
            if guest.alive:  # the node of a dead guest goes DOWN after `node_timeout`
                release = lambda: self._release_node(job, guest.name) if job.restarts == restarts else None  # noqa: E731
                guest.after_prolog(lambda: guest.send(release))

        return done

    def _release_node(self, job: JobRecord, name: str) -> None:
        if name not in job.busy or job.state in LIVE:  # or slurmctld has forgotten that the run has ended
            return
        job.busy.remove(name)
        node = self._node(name)
        node.job, node.stuck, node.counted_twice = None, node.counted_twice and not node.down, False
        if job.busy or job.state is not JobState.COMPLETING:
            return
        if not job.again:
            self._end(job, job.result)
            return
        # The job keeps its constraints, the pin among them: the scheduler does not know that the nodes are no good.
        job.state, job.again, job.result, job.nodes = JobState.PENDING, False, "", ()
        job.restarts += 1
        job.short_runs = job.short_runs + 1 if job.run_seconds < SHORT_RUN + NOTICED else 0
        self._requeued(job)

    def _requeued(self, job: JobRecord) -> None:
        job.submitted = self._wall()  # Slurm 22.05 gives a requeued job a new submit time
        job.begin, job.delayed = self._loop.time() + self.settings.requeue_delay, True
        job.not_before = 0.0 if job.by_controller else job.begin

    def _end(self, job: JobRecord, result: str) -> None:
        job.state, job.result = JobState.ENDED, result
        job.ended = self._loop.time() + self._rng.uniform(*self.settings.min_job_age)
        self.ended(job)

    def _suspend(self, job: JobRecord, before: JobState, after: JobState) -> None:
        if job.state is before and job.nodes:
            job.state = after
            if after is JobState.SUSPENDED:
                job.suspended = self._loop.time()
            else:
                job.started += self._loop.time() - job.suspended
            guest = self._node(job.nodes[0]).guest
            (guest.suspend if after is JobState.SUSPENDED else guest.resume)(job)

    def receive(self, message: Callable[[], None]) -> None:
        """Handle a message of a daemon, now or when slurmctld answers again."""
        if self.up:
            message()
        else:
            self._undelivered.append(message)

    def _after(self, bounds: tuple[float, float], do: Callable[[], None]) -> None:
        self._loop.call_later(self._rng.uniform(*bounds), do)

    def _wall(self) -> int:
        return int(self.epoch + self._loop.time())
