"""How long one pass of the controller takes, by the number of queued jobs and of VMs.

A pass compares the latest observations with the rows, plans, commits to a database on disk, and starts the effects. The
queue is blocked: every VM runs a job until some time of the next day, the hosts are full, and nothing can go ahead of
the first job. Each host is a source of its own. Measured are

- a pass on observations that are new and equal to those before, as drivers make them: what did not change is the same
  object,
- the same where every object is another one and equal,
- a pass for which a single host was observed anew,
- a pass in which one job has ended,
- the baseline: a pass that looks at every row, as if all had changed,
- with `candidates`, a pass in which evictions for the first job are planned among so many running jobs. All other
  passes are without evictions. The baseline of this one is the pass for which a single host was observed anew.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, cast

from multiverse.config import Settings
from multiverse.controller.loop import Controller
from multiverse.core.model.basics import CloneKind, Size
from multiverse.core.model.eviction import Method
from multiverse.core.model.host import Claim, Host, HypervisorView
from multiverse.core.model.identity import User
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    Job,
    JobRef,
    JobState,
    Node,
    NodeState,
    Preemption,
    Request,
    SchedulerView,
)
from multiverse.core.model.saved import Storage
from multiverse.core.model.vm import (
    Place,
    Template,
    TemplateCondition,
    TemplateKey,
    TemplateSeen,
    TemplateState,
    Vm,
    VmCondition,
    VmSeen,
    VmState,
)
from multiverse.core.model.world import Seen
from multiverse.core.transition import Change, Event, Move
from multiverse.ports import Hypervisor, Scheduler
from multiverse.store import Store
from multiverse_lab.bench.stats import Summary, summary
from multiverse_lab.simulation.generate_moving import KIND

VMS_PER_HOST = 50
REQUESTS = (Size(1, 100), Size(1, 1000), Size(2, 500), Size(4, 2000))
BASE = Size(Settings().qemu.base_cpus, Settings().qemu.base_memory)
DAY = 86400
ABILITIES = frozenset({"fork", "plug_cpus", "plug_memory"})
URGENT_VMS = 32  # of the job for which others are evicted


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Milliseconds of passes with so many queued jobs, VMs and hosts."""

    jobs: int
    vms: int
    hosts: int
    one_host: Summary
    unchanged: Summary
    equal: Summary
    one_ended: Summary
    all_rows: Summary
    candidates: int = field(default=0, kw_only=True)  # running jobs that may be evicted
    evicting: Summary | None = field(default=None, kw_only=True)  # None: there are none


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def boot_id(self) -> str:
        return "bench"


class Endless:
    """A scheduler, a hypervisor and its sources, whose calls never return: only passes are measured."""

    offers = submission = users = templates = membership = silence = addresses = groups = None

    def __init__(self, name: str = "", hosts: Iterable[str] = ()) -> None:
        self.name, self.hosts, self.sources = name, (), [Endless(host) for host in hosts]
        self.saves = self.saving = self  # jobs are being saved for ever

    def __getattr__(self, _name: str) -> Callable[..., Any]:
        async def call(*_arguments: object) -> None:
            await asyncio.Event().wait()

        return call


class BlockedCluster:
    """The rows and the observations of a cluster with a blocked queue."""

    def __init__(self, jobs: int, vms: int, per_host: int = VMS_PER_HOST, candidates: int = 0) -> None:
        self.per_host = per_host
        storage, moves = (Storage("shared", "qemu"), KIND) if candidates else (None, None)
        self.hosts = {
            name: Host(name, Size(per_host, 512 * per_host, 1 << 20), frozenset({"instant"}),
                       images={"slim": ABILITIES}, storage=storage, moves=moves)
            for name in (f"h{n}" for n in range(max(1, -(-vms // per_host))))
        }  # fmt: skip
        self.began = time.time()
        self.running = [self._running(number) for number in range(1, vms + 1)]
        self.jobs = {job.ref.job_id: job for _, _, job in self.running}
        for number in range(vms + 1, vms + jobs + 1):
            request = Request(1, REQUESTS[number % len(REQUESTS)])
            job = Job(JobRef(str(number), 500), "job", 1000, JobState.PENDING, request, rank=number,
                      eligible=number % 2 == 0, held=number % 2 == 1, limit=7200.0)  # fmt: skip
            self.jobs[job.ref.job_id] = job
        self.preemption = self._rank(vms, candidates) if candidates else None
        self.nodes = {vm.name: Node(vm.name, NodeState.BUSY) for _, vm, _ in self.running}
        self.vms: dict[str, dict[str, VmSeen]] = {host: {} for host in self.hosts}
        for _, vm, _ in self.running:
            self.vms[vm.host][vm.name] = VmSeen(vm.name, vm.host, VmCondition.RUNNING, private=100.0, token=vm.token)
        self.limits: dict[str, int] = {}
        self.templates = {host: TemplateSeen("t", host, "slim", TemplateCondition.READY, BASE) for host in self.hosts}

    def _running(self, number: int) -> tuple[Attempt, Vm, Job]:
        place = (number - 1) // self.per_host
        name, host = f"mvbench-{number}", f"h{place}"
        places = (Place(host, host, TemplateKey(host, "slim", BASE), 1 + place),)
        ref, request = JobRef(str(number), 500), Request(1, Size(1, 200))
        attempt = Attempt(number, 0.0, ref, "job", 1000, request, state=AttemptState.ALLOCATED)
        vm = Vm(number, 0.0, name, places, "slim", CloneKind.INSTANT, Size(1, 300), Size(1, 200), "",
                f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}/8", attempt=number,
                token=str(number), state=VmState.SERVING)  # fmt: skip
        job = Job(ref, "job", 1000, JobState.RUNNING, request, gated=False, pinned=attempt.feature, nodes=(name,),
                  limit=DAY, ends=self.began + 3600 + number * 7919 % DAY)  # fmt: skip
        return attempt, vm, job

    def _rank(self, vms: int, candidates: int) -> Preemption:
        """Let the first job that waits preempt so many of the running ones, all over the hosts. It needs several."""
        for number in range(1, vms + 1):
            low = number * candidates // vms > (number - 1) * candidates // vms
            job = self.jobs[str(number)]
            self.jobs[str(number)] = job._replace(preempt_class="low" if low else "normal", script_node=job.nodes[0])
        first = next(job for job in self.jobs.values() if job.eligible and job.state is JobState.PENDING)
        urgent = first._replace(request=Request(min(URGENT_VMS, candidates), Size(1, 200)), preempt_class="high")
        self.jobs[first.ref.job_id] = urgent
        return Preemption({"high": frozenset({"low"})}, exempt={}, modes={"low": "requeue"}, grace={})

    def moves(self) -> Iterator[Move]:
        """The moves that make the rows, however they came about."""
        for number, host in enumerate(self.hosts, 1):
            row = Template(number, 0.0, host, "slim", BASE, source=host, state=TemplateState.READY)
            yield Move((Change(row, Event.NEEDED),), (Claim(row.key, host, Size(0, BASE.memory)),))
        for attempt, vm, _ in self.running:
            changes = (Change(attempt, Event.SUBMITTED), Change(vm, Event.PLANNED))
            yield Move(changes, (Claim(vm.key, vm.host, Size(1, 320)),))

    def scheduler(self) -> SchedulerView:
        """A new observation, of the same objects."""
        return SchedulerView(dict(self.jobs), dict(self.nodes), dict(self.limits), preemption=self.preemption)

    def source(self, host: str) -> HypervisorView:
        """A new observation of one host, of the same objects."""
        template = self.templates[host]
        return HypervisorView({host: self.hosts[host]}, dict(self.vms[host]), {template.which: template})

    def renew(self) -> None:
        """Replace every object by an equal one."""
        self.jobs = _copies(self.jobs)
        self.nodes = _copies(self.nodes)
        self.vms = {host: _copies(vms) for host, vms in self.vms.items()}

    def end_a_job(self, number: int) -> None:
        """One of the jobs that run has ended."""
        job = self.jobs[str(number)]
        self.jobs[str(number)] = job._replace(state=JobState.ENDED, result="COMPLETED", nodes=())
        name = job.nodes[0]
        self.nodes[name] = replace(self.nodes[name], state=NodeState.IDLE)


def _copies(some: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copy(one) for key, one in some.items()}


class UncheckedTables(dict[Any, Any]):
    """Tables that allow every transition: the rows of this benchmark begin in the middle of their lives."""

    def allowed(self, *_: object) -> bool:
        return True


class Passes:
    """A controller whose observations are set by hand."""

    def __init__(self, cluster: BlockedCluster, store: Store) -> None:
        self.cluster, self.clock = cluster, MonotonicClock()
        scheduler, hypervisor = cast(Scheduler, Endless()), cast(Hypervisor, Endless(hosts=cluster.hosts))
        self.controller = Controller(store, scheduler, hypervisor, self.clock, Settings(), Random(1))
        self.controller.users.remember(User("user", 1000, 1000, "/home/user", "/bin/sh"))

    def observe(self) -> None:
        """Set new observations."""
        now = self.clock.now()
        self.controller.scheduler.answered(Seen(self.cluster.scheduler(), now))
        for host in self.cluster.hosts:
            self.observe_host(host)

    def observe_host(self, host: str) -> None:
        """Set a new observation of one host."""
        self.controller.sources[host].answered(Seen(self.cluster.source(host), self.clock.now()))

    def timed(self) -> float:
        """Milliseconds of one pass on new observations."""
        self.observe()
        return self.timed_pass()

    def timed_pass(self) -> float:
        """Milliseconds of one pass."""
        began = time.perf_counter()
        if not self.controller.run_pass():
            raise RuntimeError(f"a pass was not committed: {self.controller.uncommitted}")
        return (time.perf_counter() - began) * 1000

    def timed_plan(self) -> float:
        """Milliseconds of a pass after a new observation of one host, in which evictions are planned. Only one begins,
        and none ends: so each plan is as long as the one before."""
        controller, usual = self.controller, self.controller.policy
        controller.policy = replace(usual, evict_preemption=True, evict_at_once=1)
        controller.state.looked_for_room = (None, 0.0, 0)
        self.observe_host("h0")
        taken = self.timed_pass()
        controller.policy = usual
        if not controller.state.held_back[Method.PREEMPTION]:
            raise RuntimeError("no eviction was planned")
        return taken

    def look_at_all(self) -> None:
        """Mark every row, as if all had changed."""
        state = self.controller.state
        state.dirty.attempts.update(state.attempts)
        state.dirty.vms.update(state.vms)
        state.unserved.update(self.cluster.jobs)
        state.queue.check_all()
        state.compared.scheduler = None
        state.queue.jobs = {}


async def measure(
    jobs: int, vms: int, repetitions: int = 9, per_host: int = VMS_PER_HOST, candidates: int = 0
) -> PassTimes:
    """Measure passes with so many queued jobs and so many VMs, of which so many jobs are `candidates` for evictions."""
    cluster = BlockedCluster(jobs, vms, per_host, candidates)
    with tempfile.TemporaryDirectory(prefix="mvbench-") as directory:
        store = Store(
            Path(directory) / "multiverse.db", MonotonicClock(), site="bench", tables=cast(Any, UncheckedTables())
        )
        with store.transaction() as tx:
            for move in cluster.moves():
                tx.apply(move)
        passes = Passes(cluster, store)
        passes.controller.policy = replace(passes.controller.policy, evict_preemption=False)
        for _ in range(3):
            passes.timed()  # opens the attempts, and lets all rows come to rest
        gc.freeze()
        one_host, unchanged, equal, ended, everything = [], [], [], [], []
        for number in range(1, repetitions + 1):
            passes.observe_host("h0")
            one_host.append(passes.timed_pass())
            unchanged.append(passes.timed())
            cluster.renew()
            equal.append(passes.timed())
            cluster.end_a_job(number)
            ended.append(passes.timed())
            passes.timed()
            passes.look_at_all()
            everything.append(passes.timed())
            passes.timed()
        plans = [passes.timed_plan() for _ in range(1 + repetitions)][1:] if candidates else []
        await passes.controller.close()
        store.close()
        gc.unfreeze()
    found = [summary(samples) for samples in (one_host, unchanged, equal, ended, everything)]
    times = PassTimes(jobs, vms, len(cluster.hosts), *cast(list[Summary], found))
    return replace(times, candidates=candidates, evicting=summary(plans)) if plans else times
