"""Whether another partition is harmed: the start of its jobs, and slurmctld's scheduling cycles, beside a full gate.

One lab, four phases: nothing else, jobs at the gate that are not held and wait behind a job that holds half of the
CPUs, the same while VMs are started one after the other, and nothing else again. In each phase jobs of another
partition, which has a node of its own on bare metal, are measured from submission to their first instruction.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from multiverse.client import Client
from multiverse_lab.bench.latency import JobKind
from multiverse_lab.bench.long_queue import (
    HOLDER,
    LOWER,
    Phase,
    as_root,
    cancel_all_waiting,
    mean_cycles,
    run_jobs,
    submit_all,
)
from multiverse_lab.lab.session import LabSession

OTHER = JobKind("other", ("--partition=bare", "--mem=10"), vm=False)
SHORT = "#!/bin/sh\nsleep 1\n"


@dataclass(frozen=True, slots=True)
class NeighboursPlan:
    """`jobs` of the other partition are measured in each phase, beside `waiting` jobs at the gate and, in one phase,
    `starting` VMs that are started meanwhile."""

    jobs: int
    waiting: int
    starting: int
    seed: int = 1


def run(lab: LabSession, client: Client, plan: NeighboursPlan, progress: Callable[[str], None]) -> list[Phase]:
    """Measure the four phases. The bare node of the lab must be up."""
    cores = lab.lab.plan.cores
    lab.submit(HOLDER, "--output=/dev/null", f"--cpus-per-task={cores // 2}", "--mem=200")
    run_jobs(lab, client, (OTHER,), 2, plan.seed)  # are not counted
    phases = [_phase(lab, client, plan, "alone")]
    progress("alone: measured")
    chance = random.Random(plan.seed)
    sizes = [f"--cpus-per-task={chance.randint(cores // 2 + 1, cores)}" for _ in range(plan.waiting)]
    submit_all(lab, [[LOWER, size, f"--mem={chance.randint(100, 1000)}"] for size in sizes])
    phases.append(_phase(lab, client, plan, "full gate"))
    progress("full gate: measured")
    with _vms_that_start(lab, plan.starting):
        phases.append(_phase(lab, client, plan, "VMs starting"))
    progress("VMs starting: measured")
    cancel_all_waiting(lab)
    phases.append(_phase(lab, client, plan, "alone again"))
    return phases


def _phase(lab: LabSession, client: Client, plan: NeighboursPlan, name: str) -> Phase:
    time.sleep(5.0)  # the submissions settle
    as_root(lab, "sdiag", "--reset")
    start = run_jobs(lab, client, (OTHER,), plan.jobs, plan.seed)[OTHER.name].submit_to_start
    return Phase(name, start, cycles=mean_cycles(as_root(lab, "sdiag")))


@contextmanager
def _vms_that_start(lab: LabSession, count: int) -> Iterator[None]:
    """Jobs of one CPU, before all that wait, each in a VM of its own that ends soon after it has started."""
    job = lab.submit(SHORT, "--output=/dev/null", f"--array=1-{count}", "--mem=100")
    try:
        yield
    finally:
        as_root(lab, "scancel", job)
