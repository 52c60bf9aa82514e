"""How much later a job starts that has the highest priority and fits, when thousands of jobs wait in Slurm.

One lab, three phases: an empty queue, the long queue, and the empty queue again. In all of them one job holds half of
the CPUs. Half of the waiting jobs in Multiverse's partition are held. The others ask for more CPUs than are left, each
with another size, and have a lower priority than the measured jobs. More jobs wait in another partition, half of them
held, because each asks for all CPUs of its only node, a plain slurmd on this machine, and one job holds all but one.

Jobs in VMs and jobs of that node, both of the highest priority, are measured in turns. The latter show what the long
queue costs in Slurm alone. Beside the times of jobs, the CPU time of the idle controller is measured, and the lengths
of slurmctld's scheduling cycles (sdiag).
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from multiverse.client import Client
from multiverse.core.errors import Broken, Refused
from multiverse.system.processes import cpu_seconds_with_children
from multiverse_lab.bench.latency import JobKind, LatencySamples, StartListener, run_job
from multiverse_lab.bench.stats import percentile
from multiverse_lab.lab.configure import environment
from multiverse_lab.lab.services import SERVICES
from multiverse_lab.lab.session import LabSession

HOLDER = "#!/bin/sh\nexec sleep 100000\n"
LOWER = "--nice=10000"
"""The priority of the jobs that wait: below that of the measured ones."""

SUBMITTERS = 4
"""Submissions at the same time."""

INSTANT = JobKind("instant", ("--mem=100",))
BARE = JobKind("bare metal", ("--partition=bare", "--mem=10"), vm=False)

STAGES = ("sbatch", "seen", "queued", "clone", "join", "start")
"""The stages of a job in a VM, in their order. `seen` includes `sbatch`; the sum of the others is the whole time."""


@dataclass(frozen=True, slots=True)
class LongQueuePlan:
    """`jobs` of each kind are measured in each phase. `waiting` jobs wait in Multiverse's partition, `others` in
    another one. The idle controller is measured for `idle` seconds."""

    jobs: int
    waiting: int
    others: int
    idle: float
    seed: int = 1


@dataclass
class Phase:
    """What was measured in one phase: the seconds from submission to the first instruction of jobs in VMs, `start`, and
    on bare metal, `bare`; the medians of their stages. `idle` is the share of one CPU that the idle controller took,
    and that slurmctld took meanwhile; `cycles` the mean lengths of slurmctld's scheduling cycles, in microseconds, by
    scheduler."""

    name: str
    start: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    bare_stages: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    cycles: dict[str, float] = field(default_factory=dict)


Progress = Callable[[str], None]


def run(lab: LabSession, client: Client, plan: LongQueuePlan, progress: Progress) -> list[Phase]:
    """Measure the three phases. The bare node of the lab must be up. Raises `Refused` if it has one CPU only."""
    cores, own = lab.lab.plan.cores, os.cpu_count() or 1
    if own < 2:
        raise Refused("the plain slurmd of this machine has one CPU", hint="the benchmark needs two")
    lab.submit(HOLDER, "--output=/dev/null", f"--cpus-per-task={cores // 2}", "--mem=200")
    lab.submit(HOLDER, "--output=/dev/null", "--partition=bare", f"--cpus-per-task={own - 1}", "--mem=10")
    phases: list[Phase] = []
    run_jobs(lab, client, (INSTANT, BARE), 2, plan.seed)  # builds the template, and is not counted
    for name in ("empty", "long", "empty again"):
        if name == "long":
            began = time.monotonic()
            fill(lab, plan)
            progress(f"{plan.waiting} and {plan.others} jobs submitted in {time.monotonic() - began:.0f} s")
        elif phases:
            cancel_all_waiting(lab)
        phases.append(_measure(lab, client, plan, name))
        progress(f"{name}: {len(phases[-1].start)} jobs measured")
    return phases


def fill(lab: LabSession, plan: LongQueuePlan) -> None:
    """Submit the jobs that wait."""
    cores = lab.lab.plan.cores
    chance = random.Random(plan.seed)
    orders: list[list[str]] = []
    for number in range(plan.waiting):
        size = [f"--cpus-per-task={chance.randint(cores // 2 + 1, cores)}", f"--mem={chance.randint(100, 1000)}"]
        orders.append([LOWER, *size, *(["--hold"] if number % 2 else [])])
    orders += [
        [
            *(LOWER, "--partition=bare", f"--cpus-per-task={os.cpu_count()}", f"--mem={chance.randint(100, 1000)}"),
            *(["--hold"] if number % 2 else []),
        ]
        for number in range(plan.others)
    ]
    submit_all(lab, orders)


def submit_all(lab: LabSession, orders: Sequence[Sequence[str]]) -> None:
    """Submit a job that does not end for each of these lists of options."""
    with ThreadPoolExecutor(SUBMITTERS) as pool:
        for _ in pool.map(lambda order: lab.submit(HOLDER, "--output=/dev/null", *order), orders):
            pass


def _measure(lab: LabSession, client: Client, plan: LongQueuePlan, name: str) -> Phase:
    phase = Phase(name)
    time.sleep(5.0)  # observations settle
    as_root(lab, "sdiag", "--reset")
    phase.idle = _idle(lab, plan.idle)
    found = run_jobs(lab, client, (INSTANT, BARE), plan.jobs, plan.seed)
    vm, bare = found[INSTANT.name], found[BARE.name]
    phase.start, phase.bare = vm.submit_to_start, bare.submit_to_start
    phase.stages = {name: percentile(vm.stages[name], 0.5) for name in STAGES if name in vm.stages}
    phase.bare_stages = {name: percentile(values, 0.5) for name, values in bare.stages.items()}
    phase.cycles = mean_cycles(as_root(lab, "sdiag"))
    return phase


def run_jobs(
    lab: LabSession, client: Client, kinds: Sequence[JobKind], jobs: int, seed: int
) -> dict[str, LatencySamples]:
    """Run `jobs` of each kind in turns, one after the other, with gaps. Returns the samples by the kind's name."""
    chance, samples = random.Random(seed), {kind.name: LatencySamples() for kind in kinds}
    with StartListener(lab.settings.network.gateway) as listener:
        for _ in range(jobs):
            for kind in kinds:
                time.sleep(chance.random())
                run_job(lab, client, listener, kind, samples[kind.name], lambda _: None)
    return samples


def _idle(lab: LabSession, seconds: float) -> dict[str, float]:
    """The share of one CPU that the controller and slurmctld take while nothing is submitted."""
    pids = {}
    for service in SERVICES:
        running = service.running(lab.where)
        if service.name in ("controller", "slurmctld") and running is not None:
            pids[service.name] = running.pid
    before = {name: _cpu_seconds(pid) for name, pid in pids.items()}
    began = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return {name: (_cpu_seconds(pid) - before[name]) / took for name, pid in pids.items()}


def _cpu_seconds(pid: int) -> float:
    found = cpu_seconds_with_children(pid)
    if found is None:
        raise Broken(f"process {pid} has ended", hint="see the lab's log directory")
    return found


def mean_cycles(sdiag: str) -> dict[str, float]:
    """The mean lengths of cycles, in microseconds, of `main` and `backfill`, as sdiag prints them."""
    main, _, backfill = sdiag.partition("Backfilling stats")
    found = {}
    for name, text in (("main", main), ("backfill", backfill)):
        match = re.search(r"Mean cycle:\s+(\d+)", text)
        if match:
            found[name] = float(match[1])
    return found


def cancel_all_waiting(lab: LabSession) -> None:
    """Cancel all jobs that wait, whoever has submitted them, and return when they have left the queue."""
    as_root(lab, "scancel", "--state=PENDING")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if not as_root(lab, "squeue", "-h", "-t", "PENDING").strip():
            return
        time.sleep(1.0)
    raise Broken("the cancelled jobs did not leave the queue within 300 s", hint="see the lab's log/slurmctld.log")


def as_root(lab: LabSession, *argv: str) -> str:
    """The output of a command of Slurm's, run as root. Raises `Broken` if it fails."""
    done = subprocess.run(
        argv, env={**os.environ, **environment(lab.where)}, text=True, capture_output=True, timeout=300, check=False
    )
    if done.returncode:
        raise Broken(f"{' '.join(argv)} failed: {done.stderr.strip()}", hint="see the lab's log/slurmctld.log")
    return done.stdout
