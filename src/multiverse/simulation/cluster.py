"""A simulated Slurm: its jobs and nodes, its one-second beat, and what it does when nodes fall silent.

It behaves as Slurm 22.05 was seen to (DESIGN 4). Everything here happens at once; the latencies of
commands belong to the port (`simulation.scheduler`), those of daemons to their callbacks here.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from multiverse.core.errors import Refused
from multiverse.core.model import CloneKind, JobState, NodeSpec, SchedulerView, Size
from multiverse.simulation.clock import EPOCH
from multiverse.simulation.guests import LIVE, Guest, Joining, Run
from multiverse.simulation.jobs import Batch, JobRecord, NodeRecord


@dataclass(frozen=True)
class ClusterSettings:
    """Times in seconds; ranges are drawn from. `flavor` is the largest size that the gate lets through. No user may
    run more than `max_jobs`, nor on more than `max_cpus`, at once (0: as many as he likes)."""

    beat: float = 1.0
    silence: float = 60.0  # SlurmdTimeout
    requeue_delay: float = 121.0  # the begin time that slurmctld gives to what it queues again
    launch: tuple[float, float] = (0.02, 0.2)  # from start to the script's first instruction
    epilog: tuple[float, float] = (0.02, 0.6)  # from a run's end to a node that is free of it
    memory: tuple[float, float] = (2.0, 90.0)  # how long an ended job is remembered (MinJobAge)
    flavor: Size = field(default=Size(64, 262_144))
    max_nodes: int = 16
    first_id: int = 1
    last_id: int = 60_000  # then ids come again
    node_feature: str = "vm"
    max_jobs: int = 0
    max_cpus: int = 0
    heeded: float = 10.0  # how long the list of spares holds after we looked last
    probes: float = 0.0  # the share of submissions before which their user asks what would come of it


@dataclass
class Spare:
    """A node on offer: what of, and whether a job that names no image, or no kind, may take it."""

    node: NodeSpec
    any_image: bool
    any_kind: bool
    taken: bool = False

    def suits(self, batch: Batch) -> bool:
        """Whether a job may take it as it is submitted (multiverse.lua, take_spare)."""
        named = {*batch.features, *([batch.image] if batch.image else []), *([batch.kind.value] if batch.kind else [])}
        kinds = {CloneKind.INSTANT.value, CloneKind.AUTO.value}
        told = self.node.size
        return (
            named <= {self.node.image} | kinds
            and (self.any_image or self.node.image in named)
            and (self.any_kind or bool(named & kinds))
            and batch.nodes == 1
            and (batch.size.cpus, batch.account) == (told.cpus, self.node.account)
            and batch.size.memory <= told.memory
            and batch.size.disk <= told.disk
            and not (batch.held or batch.delay or batch.after or batch.at_most)
        )


class Cluster:
    """slurmctld and its queue. `up` is whether it answers."""

    def __init__(self, rng: Random, settings: ClusterSettings) -> None:
        self.settings = settings
        self.up = True
        self.jobs: dict[str, JobRecord] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self.history: list[JobRecord] = []  # every job there ever was
        self.violations: list[str] = []
        self.hint: Callable[[], None] = lambda: None  # what job_submit.lua and EpilogSlurmctld call
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._next = settings.first_id
        self._spares: dict[str, Spare] = {}
        self._made: set[str] = set()  # nodes that were ever offered, or withdrawn before
        self._looked = -math.inf
        self._missed: list[Callable[[], None]] = []
        self._back = asyncio.Event()
        self._back.set()
        self._loop.call_later(rng.uniform(0.0, settings.beat), self._beat)

    # --- what users do

    def submit(self, batch: Batch) -> str:
        """Queue a job at the gate; its id. `Refused` if no flavor holds it."""
        if self.settings.probes and self._rng.random() < self.settings.probes:
            self._take_spare(batch)  # sbatch --test-only: job_submit.lua cannot tell it from a submission
        job = self._queue(batch, self._new_id())
        job.pin = self._take_spare(batch)
        job.took = job.pin is not None
        if job.pin and self._rng.random() < 0.5:
            self._try(job, job.pin)  # what srun and salloc ask for is looked at at once, a batch job at the next beat
        return job.job_id

    def submit_array(self, batch: Batch, tasks: int) -> list[str]:
        """Queue an array; the ids of its tasks."""
        base = self._new_id()
        return [self._queue(batch, f"{base}_{task}").job_id for task in range(tasks)]

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

    def release(self, job_id: str) -> None:
        self.jobs[job_id].held = False

    def change(self, job_id: str, **changes: Any) -> None:
        """Change what a pending job asks for: fields of `Batch`."""
        job = self.jobs[job_id]
        if job.state is JobState.PENDING:
            job.changed = (self._loop.time(), job.batch)
            job.batch = replace(job.batch, **{what: to for what, to in changes.items() if to is not None})

    def requeue(self, job_id: str) -> None:
        """Stop a running job; it is queued again, with the features it has, after slurmctld's delay."""
        job = self.jobs[job_id]
        if job.state in LIVE:
            job.again = True
            self._stop(job, "")

    def suspend(self, job_id: str) -> None:
        self._suspend(self.jobs[job_id], JobState.RUNNING, JobState.SUSPENDED)

    def resume(self, job_id: str) -> None:
        self._suspend(self.jobs[job_id], JobState.SUSPENDED, JobState.RUNNING)

    # --- what daemons tell it

    def register(self, guest: Guest, joining: Joining, *, small: bool = False) -> bool:
        """A node's daemon comes up, `small` with less memory than it was to have. False if nobody answers; it
        tries again then."""
        if not self.up:
            return False
        known = self.nodes.get(joining.name)
        if known is None:
            node = self.nodes[joining.name] = NodeRecord(joining.name, joining.features, joining.size, guest)
            if small:
                node.down, node.reason = True, "Low RealMemory"
        elif known.guest is guest:
            known.silent = None
        else:  # another VM under a name that must never recur
            self.violations.append(f"node {joining.name} registered from a second VM")
        return True

    def fell_silent(self, guest: Guest) -> None:
        """Its daemon is gone. Slurm notices only after `silence`."""
        node = self.nodes.get(guest.name)
        if node is not None and node.guest is guest:
            node.silent = self._loop.time()

    def answers_again(self, guest: Guest) -> None:
        """A node that could not be reached can: slurmctld hears of it with its next ping."""
        node = self.nodes.get(guest.name)
        if node is None or node.guest is not guest:
            guest.register_again()
            return
        node.silent = None
        if node.down and node.reason == "Not responding":
            node.down, node.reason = False, ""  # ReturnToService=2
        job = node.job
        if job is not None and job.state in LIVE and job.nodes[0] == node.name and not guest.has_run(job):
            job.again = job.batch.requeue  # it was launched into the void
            self._stop(job, "NODE_FAIL")

    def script_ended(self, job: JobRecord, run: Run) -> None:
        """The daemon of the job's first node says that its script has ended."""
        if job.state in LIVE and job.restarts == run.restarts:
            run.heard = True
            job.exit_code = job.batch.exit_code
            self._stop(job, "FAILED" if job.exit_code else "COMPLETED")

    def stopped_by_us(self, job: JobRecord, how: str) -> None:
        """We end a run. That may be done to one that has lost a VM or has not begun, and never to one that is whole."""
        guests = [self.nodes[name].guest for name in job.nodes if name in self.nodes]
        whole = all(guest.alive and guest.serves() is job and not guest.waits for guest in guests)
        if job.state in LIVE and whole:
            self.violations.append(f"job {job.job_id} ran on VMs that were all well, and {how}")

    # --- what operators do

    def set_down(self, name: str, reason: str) -> None:
        """Set a node DOWN: what runs there loses it. Nothing to do for one that does not exist."""
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
        self._let_go(job, name)

    def delete(self, name: str) -> None:
        """Forget a node. `Refused` while a job is on it; absent is success."""
        node = self.nodes.get(name)
        if node is None:
            return
        if node.job is not None:
            raise Refused(f"node {name} is in use by job {node.job.job_id}", hint="wait until the job has left it")
        del self.nodes[name]

    def go_away(self) -> None:
        """slurmctld stops answering; guests go on."""
        self.up = False
        self._back.clear()

    def reconfigure(self) -> None:
        """slurmctld reads its configuration again, as at its start: it looks at what every job asks for."""
        for job in self.jobs.values():
            if job.state is JobState.PENDING and job.pin is not None and not self.offers(job.pin):
                job.bad = True

    def come_back(self) -> None:
        """slurmctld answers again, and hears what it missed."""
        self.up = True
        self._back.set()
        missed, self._missed = self._missed, []
        for tell in missed:
            tell()

    async def answers(self) -> None:
        """Wait until slurmctld answers."""
        await self._back.wait()

    # --- spares that jobs take by themselves

    def offer(self, spare: Spare) -> None:
        """Put a spare on offer, unless it was before, or was withdrawn."""
        if spare.node.name not in self._made:
            self._made.add(spare.node.name)
            self._spares[spare.node.name] = spare

    def withdraw(self, node: str) -> None:
        self._made.add(node)
        if node in self._spares and not self._spares[node].taken:
            del self._spares[node]

    def forget(self, node: str) -> None:
        self._spares.pop(node, None)

    def observe_offers(self) -> dict[str, bool]:
        """The nodes on offer, and whether they were taken. As long as somebody looks, jobs may take them."""
        self._looked = self._loop.time()
        return {node: spare.taken for node, spare in self._spares.items()}

    def _take_spare(self, batch: Batch) -> str | None:
        if self._loop.time() - self._looked > self.settings.heeded:
            return None
        for name, spare in self._spares.items():
            if not spare.taken and spare.suits(batch):
                if name not in self.nodes:
                    self.violations.append(f"{name} is on offer, and is no node: its job would be refused")
                spare.taken = True
                return spare.node.tag
        return None

    # --- what it shows

    def view(self) -> SchedulerView:
        ranked = sorted(self.jobs.values(), key=self._order)
        jobs = {
            job.job_id: job.shown(rank, self._eligible(job, delayed=job.delayed), self._uses(job))
            for rank, job in enumerate(ranked)
        }
        nodes = {name: node.shown() for name, node in sorted(self.nodes.items())}
        return SchedulerView(jobs, nodes, self._limits_left())

    def offers(self, feature: str) -> bool:
        """Whether any node has this feature; a job cannot be given one that none has."""
        return any(feature in node.features for node in self.nodes.values())

    # --- inside

    def _uses(self, job: JobRecord) -> dict[str, int]:
        """What a job takes of which limit while it runs."""
        batch, array = job.batch, job.job_id.partition("_")[0]
        limits = (
            (self.settings.max_jobs, f"jobs of {batch.uid}", 1),
            (self.settings.max_cpus, f"CPUs of {batch.uid}", batch.nodes * batch.size.cpus),
            (batch.at_most, f"array {array}", 1),
        )
        return {limit: count for most, limit, count in limits if most}

    def _limits_left(self) -> Counter[str]:
        """What is left of each limit beside what runs."""
        left: Counter[str] = Counter()
        for job in self.jobs.values():
            most = {"jobs": self.settings.max_jobs, "CPUs": self.settings.max_cpus, "array": job.batch.at_most}
            for limit in self._uses(job):
                left.setdefault(limit, most[limit.partition(" ")[0]])
        for job in self._live():
            left.subtract(self._uses(job))
        return left

    def _live(self) -> list[JobRecord]:
        return [job for job in self.jobs.values() if job.state in LIVE]

    def _new_id(self) -> int:
        taken = {job_id.partition("_")[0] for job_id in self.jobs}
        while str(self._next) in taken:
            self._next += 1
        base, self._next = self._next, self._next + 1
        if self._next > self.settings.last_id:
            self._next = self.settings.first_id
        return base

    def _queue(self, batch: Batch, job_id: int | str) -> JobRecord:
        flavor = self.settings.flavor
        if batch.size.cpus > flavor.cpus or batch.size.memory > flavor.memory or batch.nodes > self.settings.max_nodes:
            raise Refused(f"no host holds {batch.size} on {batch.nodes} nodes", hint=f"at most {flavor} fits")
        job = JobRecord(
            len(self.history), str(job_id), self._wall(), batch, self._loop.time() + batch.delay, held=batch.held
        )
        self.jobs[job.job_id] = job
        self.history.append(job)
        self.hint()
        return job

    def _order(self, job: JobRecord) -> tuple[int, int, int, int]:
        base, _, task = job.job_id.partition("_")
        return (-job.batch.priority, job.submitted, int(base), int(task or 0))

    def _eligible(self, job: JobRecord, delayed: bool = False) -> bool:
        """`delayed`: its begin time is not its user's, and our pin lifts it."""
        before = self.jobs.get(job.batch.after)
        waits = before is not None and before.state is not JobState.ENDED
        return not (job.held or job.bad or waits or (job.begin > self._loop.time() and not delayed))

    def _beat(self) -> None:
        self._loop.call_later(self.settings.beat, self._beat)
        if not self.up:
            return
        now = self._loop.time()
        for node in list(self.nodes.values()):
            if node.silent is not None and now - node.silent >= self.settings.silence:
                self.set_down(node.name, "Not responding")
        for job in [job for job in self.jobs.values() if job.state is JobState.ENDED and job.ended <= now]:
            del self.jobs[job.job_id]
        for job in sorted(self.jobs.values(), key=self._order):
            if job.state is JobState.PENDING and job.pin is not None:
                self._try(job, job.pin)

    def _try(self, job: JobRecord, pin: str) -> None:
        if not self.offers(pin):
            # Slurm finds out when it happens to look at the job's constraints, not at once.
            job.bad = job.bad or self._rng.random() < 0.5
        if not self._eligible(job):
            return
        needed = (pin, *job.batch.features)
        size = job.batch.size
        fit = [
            node
            for _, node in sorted(self.nodes.items())
            if not node.down and node.silent is None and node.job is None and set(needed) <= set(node.features)
            if node.size.cpus >= size.cpus and node.size.memory >= size.memory
        ][: job.batch.nodes]
        if len(fit) < job.batch.nodes:
            return
        left = self._limits_left()
        over = [limit for limit, count in self._uses(job).items() if count > left[limit]]
        # A job that took a spare may have overtaken one that was admitted before: that waits for its turn.
        if over and not any(one.took and over[0] in self._uses(one) for one in (job, *self._live())):
            self.violations.append(f"job {job.job_id} has its VMs, and a limit holds it back: {over[0]}")
        elif not over:
            self._start(job, fit)

    def _start(self, job: JobRecord, nodes: list[NodeRecord]) -> None:
        job.state, job.nodes, job.delayed = JobState.RUNNING, tuple(node.name for node in nodes), False
        job.busy = list(job.nodes)
        for node in nodes:
            node.job = job
            node.guest.allot(job)
        restarts = job.restarts

        def launch() -> None:
            if job.state in LIVE and job.restarts == restarts:
                nodes[0].guest.launch(job)
            if job.state is JobState.SUSPENDED:
                nodes[0].guest.suspend(job)

        self._after(self.settings.launch, launch)

    def _stop(self, job: JobRecord, result: str) -> None:
        """End what runs of a job; it is COMPLETING until every node has let go of it."""
        job.state, job.result = JobState.COMPLETING, result
        self.hint()
        for name in list(job.busy):
            guest = self.nodes[name].guest
            guest.kill(job)
            least, most = self.settings.epilog
            lingers = 0.0 if result in ("COMPLETED", "FAILED") else job.batch.lingers
            self._after((least + lingers, most + lingers), self._epilog(job, job.restarts, guest))

    def _epilog(self, job: JobRecord, restarts: int, guest: Guest) -> Callable[[], None]:
        def done() -> None:
            if guest.alive:  # the dead send no word: their node goes DOWN by and by
                let_go = lambda: self._let_go(job, guest.name) if job.restarts == restarts else None  # noqa: E731
                guest.after_prolog(lambda: guest.tell(let_go))

        return done

    def _let_go(self, job: JobRecord, name: str) -> None:
        if name not in job.busy:
            return
        job.busy.remove(name)
        self.nodes[name].job = None
        if job.busy or job.state is not JobState.COMPLETING:
            return
        if not job.again:
            self._end(job, job.result)
            return
        # Its features stay as they are, the pin among them: only we know that its nodes are no good.
        job.state, job.again, job.result, job.nodes = JobState.PENDING, False, "", ()
        job.restarts += 1
        job.submitted = self._wall()  # so does Slurm 22.05: what is queued again counts as submitted then
        job.begin, job.delayed = self._loop.time() + self.settings.requeue_delay, True

    def _end(self, job: JobRecord, result: str) -> None:
        job.state, job.result = JobState.ENDED, result
        job.ended = self._loop.time() + self._rng.uniform(*self.settings.memory)

    def _suspend(self, job: JobRecord, before: JobState, after: JobState) -> None:
        if job.state is before and job.nodes:
            job.state = after
            guest = self.nodes[job.nodes[0]].guest
            (guest.suspend if after is JobState.SUSPENDED else guest.resume)(job)

    def hear(self, tell: Callable[[], None]) -> None:
        if self.up:
            tell()
        else:
            self._missed.append(tell)

    def _after(self, pace: tuple[float, float], do: Callable[[], None]) -> None:
        self._loop.call_later(self._rng.uniform(*pace), do)

    def _wall(self) -> int:
        return int(EPOCH + self._loop.time())
