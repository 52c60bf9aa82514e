"""The start of a VM inside a job, part by part, in Slurm-V's ways and as an instant clone; and that of many such VMs on
the bare-metal nodes of a lab, one by one and at once; and what two VMs of a job pass through memory that they share.

A way's time in all is that of a real job of Slurm on a bare-metal node, from `sbatch` to the script's first
instruction, and of the VM that is made then, on this machine. `SLURM` is the whole in one piece: a job that asks for
a VM, from `sbatch` to its script's first instruction in the guest. All are measured in rounds, in shuffled order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from multiverse.core.errors import Broken
from multiverse_lab.bench.arrivals import Arrivals
from multiverse_lab.bench.ivshmem import PassingFigures, measure_passing
from multiverse_lab.bench.latency import SCRIPT, StartListener
from multiverse_lab.bench.launches import WAYS, Launches
from multiverse_lab.lab.session import LabSession

SLURM = "by Slurm"
SUBMISSION, WHOLE = "submission", "whole"

PAPER = {"copy_over_snapshot": 2.64, "spank": 24.6, "overlapped": 23.8, "one_by_one": 260.11, "at_once": 34.88}
"""Slurm-V: how many times shorter snapshots made the start; seconds in all by its plugin and with overlap; seconds of
32 VMs on 4 nodes. On hardware virtualization, with an image of 2.2 GB."""

LIMIT = 300.0
"""Seconds within which a job must start or end."""

VM_MEMORY = 490
"""MiB that a job has for each VM: of the smallest VM, and of its QEMU."""

_PHYSICAL = "--partition=physical"
_TASK = """exec 3<>/dev/tcp/{host}/{port}
echo "$SLURM_JOB_ID.$SLURM_PROCID" >&3
read -r _ <&3
"""

Progress = Callable[[str, int, int, float], None]
"""Called with what was measured, the number of measurements done, the number of all, and the seconds it took."""


@dataclass
class StartSamples:
    """Seconds of the parts of each way, one value for each start. A start by Slurm has one part."""

    parts: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {way: {} for way in (*WAYS, SLURM)})

    def totals(self, way: str, *, submission: bool = True) -> list[float]:
        """The time in all of each start, with or without the job's submission."""
        chosen = [values for part, values in self.parts[way].items() if submission or part != SUBMISSION]
        return [sum(values) for values in zip(*chosen, strict=True)]


@dataclass(frozen=True, slots=True)
class InjobPlan:
    """Each way is measured `repeat` times, in an order and with gaps that `seed` determines; then so many `vms`,
    `repeat` rounds of passing data, and each application `runs` times."""

    image: str
    repeat: int
    vms: int
    seed: int
    runs: int


def measure_starts(lab: LabSession, launches: Launches, plan: InjobPlan, progress: Progress) -> StartSamples:
    """Measure the ways. The first start in each is not counted: it builds the templates, and reads the image."""
    found, chance, every = StartSamples(), random.Random(plan.seed), (*WAYS, SLURM)
    order = [way for _ in range(plan.repeat) for way in chance.sample(every, len(every))]
    with StartListener(lab.settings.network.gateway) as listener:
        for way in every:
            _start(lab, launches, listener, plan.image, way)
        for number, way in enumerate(order, 1):
            time.sleep(chance.random())  # slurmctld's loop runs once a second
            parts = _start(lab, launches, listener, plan.image, way)
            for part, seconds in parts.items():
                found.parts[way].setdefault(part, []).append(seconds)
            progress(way, number, len(order), sum(parts.values()))
    return found


def _start(lab: LabSession, launches: Launches, listener: StartListener, image: str, way: str) -> Mapping[str, float]:
    """Start one VM in that way. Returns the seconds of its parts."""
    if way == SLURM:
        return {WHOLE: _job(lab, listener, f"--mem={VM_MEMORY}", f"--vm-image={image}")}
    return {SUBMISSION: _job(lab, listener, "--mem=100"), **launches.measure(way)}


def _job(lab: LabSession, listener: StartListener, *options: str) -> float:
    """Run a job on a bare-metal node. Returns the seconds from its submission to its script's first instruction."""
    script = SCRIPT.format(host=listener.host, port=listener.port)
    began = time.monotonic()
    job = lab.submit(script, "--output=/dev/null", _PHYSICAL, "--nodes=1", *options)
    arrived, connection = listener.wait(job, LIMIT, lambda: _exists(lab, job))
    with connection:
        connection.sendall(b"go\n")
    _until_idle(lab)
    return arrived - began


def _exists(lab: LabSession, job: str) -> bool:
    """Whether a job can still report. Raises `Broken` if it has ended, as it does without its VM."""
    if not lab.run("squeue", "-h", "-j", job, "-t", "PD,R,CF").stdout.strip():
        raise Broken(f"job {job} ended before its script ran", hint="see the agents' logs in the lab's log directory")
    return True


@dataclass(frozen=True, slots=True)
class ManyVms:
    """Seconds until the scripts or tasks of all VMs ran, from the first submission; `each` are those of each job that
    was submitted after the one before ran."""

    one_by_one: float
    each: tuple[float, ...]
    at_once: float


def measure_many(lab: LabSession, plan: InjobPlan, progress: Progress) -> ManyVms:
    """Make VMs on all nodes, for a job each, one after the other; then as many for one job that has all nodes. All run
    until the last of them does."""
    nodes, image, vms = [node.name for node in lab.lab.plan.physical_nodes], plan.image, plan.vms
    _warm_up(lab, image, len(nodes))
    began, each = time.monotonic(), list[float]()
    with Arrivals(lab.settings.network.gateway, hold=True) as arrivals:
        for number in range(vms):
            options = (f"--nodelist={nodes[number % len(nodes)]}", "--nodes=1", f"--mem={VM_MEMORY}")
            submitted = time.monotonic()
            job = lab.submit(arrivals.script, "--output=/dev/null", _PHYSICAL, f"--vm-image={image}", *options)
            _all_run(lab, arrivals, [job])
            each.append(arrivals.at[job] - submitted)
            progress("one by one", number + 1, vms, each[-1])
        one_by_one = max(arrivals.at.values()) - began
    _until_idle(lab)
    per_node = vms // len(nodes)
    with Arrivals(lab.settings.network.gateway, hold=True) as arrivals:
        place = lab.user.home / "task.sh"
        place.write_text(_TASK.format(host=lab.settings.network.gateway, port=arrivals.port))
        size = f"--ntasks-per-node={per_node}", f"--vm-per-node={per_node}", f"--mem={per_node * VM_MEMORY}"
        script = f"#!/bin/bash\nsrun --quiet --kill-on-bad-exit bash {place}\n"
        began = time.monotonic()
        job = lab.submit(script, "--output=/dev/null", _PHYSICAL, f"--vm-image={image}", f"--nodes={len(nodes)}", *size)
        _all_run(lab, arrivals, [f"{job}.{task}" for task in range(vms)])
        at_once = max(arrivals.at.values()) - began
        progress("at once", 1, 1, at_once)
    _until_idle(lab)
    return ManyVms(one_by_one, tuple(each), at_once)


def _warm_up(lab: LabSession, image: str, nodes: int) -> None:
    """Run a task in a VM of each node, which copies the image and builds a template for it."""
    options = (f"--nodes={nodes}", "--mem=700", f"--vm-image={image}")
    done = lab.run("srun", "--quiet", _PHYSICAL, *options, "true", timeout=LIMIT)
    if done.returncode:
        raise Broken(
            f"no VM on each node: {done.stderr.strip()}", hint="see the agents' logs in the lab's log directory"
        )
    _until_idle(lab)


def measure_shared(lab: LabSession, plan: InjobPlan, progress: Progress) -> PassingFigures:
    """Measure how two VMs of a job on one node pass data, in so many rounds as each way has starts."""

    def srun(argv: Sequence[str]) -> str:
        began = time.monotonic()
        options = (_PHYSICAL, "--nodes=1", "--mem=1300", f"--vm-image={plan.image}")
        done = lab.run("srun", "--quiet", *options, *argv, timeout=LIMIT)
        if done.returncode:
            raise Broken(
                f"two VMs did not pass data: {done.stderr.strip()}",
                hint="see the agents' logs in the lab's log directory",
            )
        progress("ivshmem", 1, 1, time.monotonic() - began)
        return done.stdout

    found = measure_passing(srun, plan.repeat)
    _until_idle(lab)
    return found


def _all_run(lab: LabSession, arrivals: Arrivals, jobs: Sequence[str]) -> None:
    if missing := arrivals.wait(jobs, LIMIT, lambda: _exists(lab, jobs[0].partition(".")[0])):
        raise Broken(f"jobs did not start: {' '.join(missing)}", hint="see the lab's log/slurmctld.log")


def _until_idle(lab: LabSession) -> None:
    """Wait until no job is left, and thus no VM: the next one is not to be measured beside the end of this one."""
    deadline = time.monotonic() + LIMIT
    while lab.run("squeue", "-h").stdout.strip():
        if time.monotonic() > deadline:
            raise Broken(f"jobs did not end within {LIMIT:g} s", hint="see the lab's log/slurmctld.log")
        time.sleep(0.05)
