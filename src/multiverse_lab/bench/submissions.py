"""How many submissions a second the controller sustains, with its store on disk.

The controller's own loop runs, in real time: it observes, plans, commits and acts. The scheduler, the hosts and their
VMs are fakes that answer at once, so that what is measured is the controller. Jobs are submitted at a rate, and the
scheduler gives a hint for each. Two things are measured:

- *queued*: the VMs that exist run jobs that do not end, so all jobs that come are taken in and wait: until the attempt
  of each is committed;
- *served*: each job gets a VM, is pinned, runs for a moment and ends: until nothing is left of its VM.

The baseline is the store alone, which records that each job was submitted, in as many commits.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import cast

from multiverse.config import PacingSettings, Settings
from multiverse.controller.loop import Controller
from multiverse.core.model.basics import Size
from multiverse.core.model.host import Host, HypervisorView
from multiverse.core.model.identity import Identity, NodeBootstrap, User
from multiverse.core.model.job import Attempt, Job, JobRef, JobState, Node, NodeSpec, NodeState, Request, SchedulerView
from multiverse.core.model.vm import TemplateCondition, TemplateKey, TemplateSeen, VmCondition, VmRef, VmSeen, VmSpec
from multiverse.core.transition import Change, Event, Move
from multiverse.ports import Hypervisor, Scheduler
from multiverse.store import Store, Transaction
from multiverse_lab.bench.planner import ABILITIES, MonotonicClock
from multiverse_lab.bench.stats import Summary, summary

CPUS = 64
"""CPUs of a host, and of all its jobs together."""

TICK = 0.01
"""Seconds between two submissions: of as many jobs as are due by then."""

REQUEST = Request(1, Size(1, 100))
SETTLING = 1.0
"""Seconds until all hosts are known, before the first job comes."""

PROVISIONING = 10_000  # VMs at the same time: the pace of hosts is none of the controller's work


@dataclass(frozen=True, slots=True)
class Plan:
    """`rate` jobs a second for `seconds`. With `ends` each job runs for `runs` seconds, or else for ever. `hosts` of 64
    CPUs each, which hold a VM of one CPU for each job that runs."""

    rate: float
    seconds: float
    hosts: int
    ends: bool
    runs: float = 0.2


@dataclass(frozen=True, slots=True)
class SubmissionTimes:
    """What became of `jobs` that came at `rate` a second. Times in seconds, of all jobs together.

    `done` are jobs a second, from the first submission until the last one was queued or served. `lag` is how long each
    took until its attempt was committed. `passes` is the CPU time of passes without their commits, `committing` the
    time of the `commits`, and `beside` the CPU time of effects, observations and fakes. `alone` is the baseline, in
    attempts a second.
    """

    rate: float
    jobs: int
    served: bool
    done: float
    lag: Summary
    commits: int
    passes: float
    committing: float
    beside: float
    alone: float


class TimedStore(Store):
    """Measures its commits."""

    def __init__(self, path: Path, clock: MonotonicClock) -> None:
        super().__init__(path, clock, site="bench")
        self.seconds = self.cpu = 0.0

    @contextmanager
    def transaction(self, *, releasing: bool = False) -> Iterator[Transaction]:
        with super().transaction(releasing=releasing) as tx:
            yield tx
            seconds, cpu = time.perf_counter(), time.process_time()
        self.seconds += time.perf_counter() - seconds
        self.cpu += time.process_time() - cpu


class TimedController(Controller):
    """Measures its passes, and notes when each attempt was committed."""

    cpu = 0.0
    first = 0
    """The number of the first attempt: a store that took long to be made leaves some out. The others follow it."""
    committed: list[float]

    def run_pass(self) -> bool:
        began = time.process_time()
        kept = super().run_pass()
        self.cpu += time.process_time() - began
        now = time.perf_counter()
        if not self.committed:
            self.first = min(self.state.attempts, default=0)
        while self.first + len(self.committed) in self.state.attempts:
            self.committed.append(now)
        return kept

    def is_empty(self) -> bool:
        """Whether nothing is left of jobs and of their VMs."""
        return not (self.state.attempts or self.state.vms)


class FakeCluster:
    """A scheduler, a hypervisor and its sources that do at once what they are asked for."""

    offers = submission = users = membership = parts = silence = addresses = groups = None

    def __init__(self, plan: Plan) -> None:
        self.plan, self.jobs, self.nodes = plan, dict[str, Job](), dict[str, Node]()
        self.sources = [FakeHost(f"h{number}") for number in range(plan.hosts)]
        self.hosts = {source.name: source for source in self.sources}
        self.on: dict[str, str] = {}  # jobs by node
        self.submitted: list[float] = []
        self.templates = self

    def submit(self) -> None:
        number = len(self.submitted) + 1
        ref = JobRef(str(number), 500)
        self.jobs[ref.job_id] = Job(ref, "job", 1000, JobState.PENDING, REQUEST, rank=number, limit=3600.0)
        self.submitted.append(time.perf_counter())

    def _end(self, node: str) -> None:
        job = self.jobs[self.on[node]]
        self.jobs[job.ref.job_id] = job._replace(state=JobState.ENDED, result="COMPLETED", nodes=(), ends=None)
        self.nodes[node] = Node(node, NodeState.IDLE)

    # --- `ports.Scheduler`

    async def observe(self) -> SchedulerView:
        return SchedulerView(dict(self.jobs), dict(self.nodes))

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        return NodeBootstrap()

    async def pin(
        self,
        job: JobRef,
        tag: str,
        nodes: list[str],
        text: str = "",
        *,
        at_once: bool = False,
        limit: float | None = None,
    ) -> None:
        (node,) = nodes
        self.on[node] = job.job_id
        self.nodes[node] = Node(node, NodeState.BUSY)
        now = self.jobs[job.job_id]
        self.jobs[job.job_id] = now._replace(state=JobState.RUNNING, gated=False, pinned=tag, nodes=(node,),
                                             ends=time.time() + 3600.0)  # fmt: skip
        if self.plan.ends:
            asyncio.get_running_loop().call_later(self.plan.runs, self._end, node)

    async def delete_node(self, node: str) -> None:
        self.nodes.pop(node, None)
        if job := self.on.pop(node, None):
            del self.jobs[job]

    async def explain(self, jobs: list[JobRef], text: str) -> None: ...

    # --- `ports.Hypervisor`

    async def build_template(self, template: TemplateKey) -> tuple[()]:
        seen = TemplateSeen("t", template.host, template.image, TemplateCondition.READY, template.size)
        self.hosts[template.host].templates[template] = seen
        return ()

    async def create(self, vm: VmSpec) -> tuple[()]:
        self.hosts[vm.host].vms[vm.name] = VmSeen(vm.name, vm.host, VmCondition.PARKED, token=vm.token, size=vm.size)
        return ()

    async def start(self, vm: VmRef, size: Size, identity: Identity) -> tuple[()]:
        vms = self.hosts[vm.source].vms
        vms[vm.name] = replace(vms[vm.name], condition=VmCondition.RUNNING, size=size)
        self.nodes[vm.name] = Node(vm.name, NodeState.IDLE)
        return ()

    async def destroy(self, vm: VmRef, grace: float) -> None:
        self.hosts[vm.source].vms.pop(vm.name, None)


class FakeHost:
    """One host as a source."""

    silence = None

    def __init__(self, name: str) -> None:
        self.name, self.hosts = name, (name,)
        self.vms: dict[str, VmSeen] = {}
        self.templates: dict[TemplateKey, TemplateSeen] = {}
        self.host = Host(name, Size(CPUS, 1 << 20, 1 << 20), frozenset({"instant"}), images={"slim": ABILITIES})

    async def observe(self) -> HypervisorView:
        return HypervisorView({self.name: self.host}, dict(self.vms), dict(self.templates))


def measure(plan: Plan) -> SubmissionTimes:
    """Submit the jobs of a plan to a controller of its own, and wait until all are queued or served. Raises whatever
    ends the controller before."""
    found = asyncio.run(_measure(plan))
    return replace(found, alone=commits_alone(found.jobs, found.commits))


async def _measure(plan: Plan) -> SubmissionTimes:
    jobs, clock = FakeCluster(plan), MonotonicClock()
    settings = Settings(pacing=PacingSettings(provisioning=PROVISIONING))
    with tempfile.TemporaryDirectory(prefix="mvbench-") as directory:
        store = TimedStore(Path(directory) / "multiverse.db", clock)
        ports = cast(Scheduler, jobs), cast(Hypervisor, jobs)
        controller = TimedController(store, *ports, clock, settings, Random(1))
        controller.committed = []
        controller.users.remember(User("user", 1000, 1000, "/home/user", "/bin/sh"))
        working = asyncio.create_task(controller.run())
        try:
            await asyncio.sleep(SETTLING)
            return await _submit(plan, jobs, controller, store, working)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            store.close()


async def _submit(
    plan: Plan, jobs: FakeCluster, controller: TimedController, store: TimedStore, working: asyncio.Task[None]
) -> SubmissionTimes:
    most = round(plan.rate * plan.seconds)
    before = _used(controller, store)
    began = time.perf_counter()
    while len(controller.committed) < most or (plan.ends and not controller.is_empty()):
        due = min(most, int((time.perf_counter() - began) * plan.rate) + 1) - len(jobs.submitted)
        for _ in range(due):
            jobs.submit()
        if due:
            controller.hint(uid=1000)
        await asyncio.wait([working], timeout=TICK)
        if working.done():
            working.result()  # the controller ends only by a bug: raise it here
    elapsed = time.perf_counter() - began
    commits, passes, committing, beside = [
        now - then for now, then in zip(_used(controller, store), before, strict=True)
    ]
    lag = summary([done - came for came, done in zip(jobs.submitted, controller.committed, strict=True)])
    assert lag is not None
    return SubmissionTimes(
        plan.rate, most, plan.ends, most / elapsed, lag, round(commits), passes, committing, beside, 0.0
    )


def _used(controller: TimedController, store: TimedStore) -> tuple[float, float, float, float]:
    """The number of commits, the CPU time of passes without them, the time of commits, and all other CPU time."""
    return store.commits, controller.cpu - store.cpu, store.seconds, time.process_time() - controller.cpu


def commits_alone(jobs: int, commits: int) -> float:
    """Attempts a second that the store records in so many commits, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="mvbench-") as directory:
        store = Store(Path(directory) / "multiverse.db", MonotonicClock(), site="bench")
        began = time.perf_counter()
        for part in range(commits):
            with store.transaction() as tx:
                for number in range(part * jobs // commits + 1, (part + 1) * jobs // commits + 1):
                    ref = JobRef(str(number), 500)
                    attempt = Attempt(number, 0.0, ref, "job", 1000, REQUEST)
                    tx.apply(Move((Change(attempt, Event.SUBMITTED),)))
        seconds = time.perf_counter() - began
        store.close()
    return jobs / seconds
