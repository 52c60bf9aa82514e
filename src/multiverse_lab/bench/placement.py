"""How long the admission of a job takes, and the pass that does it, on a site of many hosts.

Each host is a source of its own. The hosts are 90 % full of VMs that run jobs, some of them to the last CPU, and a
thousand jobs wait. Between two passes some hosts and the scheduler are observed anew, equal to before. Measured are,
for each placement policy,

- an admission, from the job's turn until its VM is planned and claimed, in a pass that admits all that wait,
- a pass that admits as many jobs as are usually made at once,
- a pass that admits none, because the first job in the queue asks for a whole host,
- the same as a job has ended on one of the hosts,
- the baseline: the search that looked at every host, alone, for the same claims on the same hosts, in the same run.

All times are CPU time of the thread, so that other processes on the machine do not count.

Passes are planned and rolled back; nothing is committed to a database (`multiverse bench planner` measures that).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from random import Random
from typing import Any, cast

from multiverse.core.admission.admit import Admission
from multiverse.core.capacity_index import fits
from multiverse.core.model.basics import CloneKind, Placement, Size
from multiverse.core.model.host import Claim, Host, HypervisorView
from multiverse.core.model.job import (
    Attempt,
    AttemptState,
    Job,
    JobRef,
    JobState,
    Node,
    NodeState,
    Request,
    SchedulerView,
)
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
from multiverse.core.model.world import Observation, Seen, World
from multiverse.core.planner import plan
from multiverse.core.policy import Policy
from multiverse.core.rows import Rows
from multiverse.core.state import State
from multiverse_lab.bench.planner import ABILITIES, BASE, UncheckedTables
from multiverse_lab.bench.stats import percentile

SHARE = 0.9
"""Of the CPUs of all hosts, so many are claimed."""

SIZES = (Size(1, 500), Size(1, 800), Size(2, 1000))
"""What waiting jobs ask for."""

AT_ONCE = 20
"""Jobs that an ordinary pass admits."""

OBSERVED = 50
"""Hosts that are observed anew between two passes."""

VM = Size(1, 1024)
OVERHEAD = 32


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of `n` samples."""

    n: int
    p50: float
    p99: float
    max: float

    @staticmethod
    def of(samples: list[float]) -> Times:
        return Times(len(samples), percentile(samples, 0.5), percentile(samples, 0.99), max(samples))


@dataclass(frozen=True, slots=True)
class PlacementTimes:
    """With one policy: an admission, a pass that admits `AT_ONCE` jobs, one in which the first job has no room, the
    same as a job has ended, and the search alone as it was."""

    policy: str
    admission: Times
    whole_pass: Times
    blocked: Times
    one_ended: Times
    scan: Times


class FullSite:
    """Rows and observations of hosts that are nearly full, with jobs that wait."""

    def __init__(self, hosts: int, vms: int, waiting: int, seed: int = 1) -> None:
        rng = Random(seed)
        self.cpus = cpus = max(1, round(vms / hosts / SHARE))
        capacity = Size(cpus, (VM.memory + OVERHEAD) * cpus + BASE.memory, 1 << 20)
        self.names = [f"h{number:05d}" for number in range(hosts)]
        places = [place for place in range(hosts) for _ in range(cpus)]
        rng.shuffle(places)
        rows = [self._running(number, place) for number, place in enumerate(sorted(places[:vms]), 1)]
        templates = {n: self._template(n, name) for n, name in enumerate(self.names, 1)}
        claims = [Claim(row.key, row.host, Size(0, BASE.memory)) for row in templates.values()]
        claims += [Claim(vm.key, vm.host, Size(1, VM.memory + OVERHEAD)) for _, vm, _ in rows]
        self.rows = Rows(
            "bench", vms + 1, vms + 1, hosts + 1, {one.id: one for one, _, _ in rows},
            {vm.id: vm for _, vm, _ in rows}, templates, {}, claims,
        )  # fmt: skip
        self.jobs = {job.ref.job_id: job for _, _, job in rows}
        for number in range(vms + 1, vms + waiting + 1):
            request = Request(1, SIZES[number % len(SIZES)])
            self.jobs[str(number)] = Job(JobRef(str(number), 500), "job", 1000, JobState.PENDING, request, rank=number)
        self.nodes = {vm.name: Node(vm.name, NodeState.BUSY) for _, vm, _ in rows}
        shown: dict[str, dict[str, VmSeen]] = {name: {} for name in self.names}
        for _, vm, _ in rows:
            shown[vm.host][vm.name] = VmSeen(vm.name, vm.host, VmCondition.RUNNING, private=100.0, token=vm.token)
        self.views = {
            name: HypervisorView(
                {name: Host(name, capacity, frozenset({"instant"}), images={"slim": ABILITIES}, vm_overhead=OVERHEAD)},
                shown[name],
                {one.which: one for one in (TemplateSeen("t", name, "slim", TemplateCondition.READY, BASE),)},
            )
            for name in self.names
        }

    def _running(self, number: int, place: int) -> tuple[Attempt, Vm, Job]:
        name, host, ref = f"mvbench-{number}", self.names[place], JobRef(str(number), 500)
        request = Request(1, Size(1, 900))
        attempt = Attempt(number, 0.0, ref, "job", 1000, request, state=AttemptState.ALLOCATED)
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}/8"
        places = (Place(host, host, TemplateKey(host, "slim", BASE), place + 1),)
        vm = Vm(number, 0.0, name, places, "slim", CloneKind.INSTANT, VM, request.size, "", address,
                attempt=number, token=str(number), state=VmState.SERVING)  # fmt: skip
        job = Job(ref, "job", 1000, JobState.RUNNING, request, gated=False, pinned=attempt.feature, nodes=(name,))
        return attempt, vm, job

    def ask_for_a_host(self) -> None:
        """A job that asks for all CPUs of a host comes to the head of the queue."""
        request = Request(1, Size(self.cpus, 100))
        self.jobs["first"] = Job(JobRef("first", 500), "job", 1000, JobState.PENDING, request, rank=0)

    def end_a_job(self) -> Job:
        """The first job has ended; returns it as it ran."""
        running = self.jobs["1"]
        self.jobs["1"] = running._replace(state=JobState.ENDED, result="COMPLETED", nodes=())
        return running

    @staticmethod
    def _template(number: int, host: str) -> Template:
        return Template(number, 0.0, host, "slim", BASE, source=host, state=TemplateState.READY)


class Planning:
    """Plans passes upon a site, and takes each back."""

    def __init__(self, site: FullSite) -> None:
        self.site = site
        self.state = State(site.rows, cast(Any, UncheckedTables()), 1.0)
        self._now = 1000.0
        self._sources = {name: Observation(Seen(view, 1000.0), 0.0) for name, view in site.views.items()}
        self._scheduler = Seen(SchedulerView(site.jobs, site.nodes), 1000.0)

    def run(self, policy: Policy, keep: bool = False) -> float:
        """Milliseconds of a pass, from the building of its world on."""
        self._now += 1.0
        first = int(self._now) * OBSERVED % len(self.site.names)
        anew = self.site.names[first : first + OBSERVED] if self.state.compared.sources else self.site.names
        view = SchedulerView(dict(self.site.jobs), dict(self.site.nodes))
        for name in anew:
            old = self.site.views[name]
            copied = HypervisorView(dict(old.hosts), dict(old.vms), dict(old.templates))
            self._sources[name] = Observation(Seen(copied, self._now), 0.0)
        began = time.thread_time()
        world = World(Seen(view, self._now), self._sources, entropy=str(self._now), anew=anew)
        plan(self.state, world, [], self._now, policy)
        took = (time.thread_time() - began) * 1000
        if not keep:
            self.state.rollback()
        return took


def scan(free: Mapping[str, list[int]], claims: Mapping[str, Size]) -> str | None:
    """The search that the index replaces: the emptiest of all hosts that fit."""
    fitting = [name for name, claim in claims.items() if fits(claim, free[name])]
    return min(fitting, key=lambda name: (-free[name][0], -free[name][1], name), default=None)


def measure(
    hosts: int = 10_000,
    vms: int = 100_000,
    waiting: int = 1000,
    passes: int = 20,
    done: Callable[[PlacementTimes], None] = lambda _: None,
) -> list[PlacementTimes]:
    """Measure every policy on one site."""
    planning = Planning(FullSite(hosts, vms, waiting))
    policy = Policy(IPv4Network("10.0.0.0/8"), "10.0.0.1", base=BASE)
    planning.run(replace(policy, provisioning=0), keep=True)  # opens the attempts, and lets all rows come to rest
    planning.run(replace(policy, provisioning=0), keep=True)
    gc.collect()
    gc.freeze()
    found = []
    for name in Placement:
        own = replace(policy, placement=name, provisioning=AT_ONCE)
        ordinary = [planning.run(own) for _ in range(passes)]
        admissions = _admissions(planning, replace(own, provisioning=waiting + 1))
        blocked, ended = _blocked(planning, own, passes)
        times = (admissions, ordinary, blocked, ended, _scans(planning, waiting))
        one = PlacementTimes(name, *map(Times.of, times))
        found.append(one)
        done(one)
    gc.unfreeze()
    return found


def _blocked(planning: Planning, policy: Policy, passes: int) -> tuple[list[float], list[float]]:
    """Milliseconds of passes in which the first job asks for a whole host: without news, and after a job has ended."""
    site = planning.site
    site.ask_for_a_host()
    planning.run(policy, keep=True)
    times = [planning.run(policy) for _ in range(passes)]
    running = site.end_a_job()
    ended = [planning.run(policy) for _ in range(passes)]
    site.jobs[running.ref.job_id] = running
    del site.jobs["first"]
    planning.run(replace(policy, provisioning=0), keep=True)
    return times, ended


def _admissions(planning: Planning, policy: Policy) -> list[float]:
    """Milliseconds of each admission in a pass that admits all jobs that wait."""
    times: list[float] = []
    consider = Admission.consider

    def timed(self: Admission, attempt: Attempt) -> None:
        began = time.thread_time()
        consider(self, attempt)
        if self.state.attempts[attempt.id].state is AttemptState.CLAIMED:
            times.append((time.thread_time() - began) * 1000)

    Admission.consider = timed  # type: ignore[method-assign]
    try:
        planning.run(policy)
    finally:
        Admission.consider = consider  # type: ignore[method-assign]
    return times


def _scans(planning: Planning, count: int) -> list[float]:
    """Milliseconds of `count` searches by looking at every host, each of which takes what it finds."""
    free = {name: list(one) for name, one in planning.state.free.free.items()}
    times = []
    for number in range(min(count, 100)):
        size = SIZES[number % len(SIZES)]
        claim = Size(size.cpus, size.memory + OVERHEAD)
        claims = dict.fromkeys(free, claim)
        began = time.thread_time()
        chosen = scan(free, claims)
        times.append((time.thread_time() - began) * 1000)
        if chosen is not None:
            free[chosen][0] -= claim.cpus
            free[chosen][1] -= claim.memory
    return times
