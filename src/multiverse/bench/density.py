"""How many VMs with a running job each a host holds, before its memory or its CPUs give out.

Jobs are added in steps. Each reports that it runs and then waits to be let go, so all that its VM takes from there on
is what an idle one takes. After each step the host is left alone for a few seconds and measured. It ends when there are
as many as were asked for, or when something has given out; then all are let go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from multiverse.bench.arrivals import Arrivals, until_nothing_is_left
from multiverse.bench.stats import median
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse.lab.session import LabSession

ALONE = 5.0
"""Seconds over which CPU time is taken, with nothing asked of any VM."""

BUSY = 0.95
"""Of the machine's CPUs: when VMs that only wait use more, nothing is left to run their jobs with."""

OPTIONS = ("--constraint=slim&instant", "--output=/dev/null")
AN_END = 300.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Stop at `most` VMs, `by` so many at a time; or when less than `floor` MiB are available, or none of a step's jobs
    has started for `patience` seconds."""

    most: int
    by: int
    floor: int
    patience: float


@dataclass(frozen=True, slots=True)
class Step:
    """The host with so many jobs running. Memory in MiB: medians of VMs, and the machine's; `busy` is the share of the
    machine's CPUs that is used, by whomever, while nothing is asked of any VM, `vm_cpu` the mean VM's share of one CPU;
    `slowest` is from submission to the start of the last job of this step."""

    vms: int
    slowest: float
    private: float
    shared: float
    used: int
    available: int
    busy: float
    vm_cpu: float


@dataclass(frozen=True, slots=True)
class Found:
    """`gave_out` says what ended it; empty: nothing did, there were as many as were asked for."""

    steps: tuple[Step, ...]
    gave_out: str

    @property
    def most(self) -> int:
        """So many VMs ran jobs at once, with nothing given out."""
        return self.steps[-1].vms if self.steps else 0


Progress = Callable[[Step], None]


def run(lab: LabSession, client: Client, bounds: Bounds, progress: Progress) -> Found:
    """Add jobs until a bound is met or something has given out. All have ended when it returns."""
    steps: list[Step] = []
    before = _available(client)
    with Arrivals(lab.settings.network.gateway, hold=True) as arrivals:
        gave_out = ""
        while not gave_out and (there := len(arrivals.at)) < bounds.most:
            count = min(bounds.by, bounds.most - there)
            began = time.monotonic()
            array = lab.submit(arrivals.script, f"--array=1-{count}", *OPTIONS)
            jobs = [f"{array}_{task}" for task in range(1, count + 1)]
            missing = arrivals.wait(jobs, bounds.patience, lab.settings.socket.exists)
            if missing:
                gave_out = f"{len(missing)} more did not start: {_why(client, missing[0])}"
                lab.run("scancel", array)
                break
            slowest = max(arrivals.at[job] for job in jobs) - began
            step = _measured(client, len(arrivals.at), slowest, before)
            steps.append(step)
            progress(step)
            gave_out = _given_out(step, bounds.floor, client)
    until_nothing_is_left(client, AN_END)
    return Found(tuple(steps), gave_out)


def _measured(client: Client, vms: int, slowest: float, before: int) -> Step:
    began = time.monotonic()
    seconds = {one["name"]: one["cpu_s"] for one in client.vms(exact=True)}
    idle = _cpu_times()
    time.sleep(ALONE)
    spent, passed = _cpu_times(), time.monotonic() - began
    over = client.vms(exact=True)  # what it costs to ask is in neither reading of the machine's time
    shares = [(one["cpu_s"] - seconds[one["name"]]) / passed for one in over if one["name"] in seconds]
    available = _available(client)
    return Step(
        vms=vms,
        slowest=slowest,
        private=median([one["private"] for one in over]),
        shared=median([one["shared"] for one in over]),
        used=before - available,
        available=available,
        busy=busy(idle, spent),
        vm_cpu=fmean(shares),
    )


def _cpu_times() -> tuple[int, ...]:
    """The machine's CPU time by kind, in clock ticks (proc(5), stat)."""
    return tuple(int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9])


def busy(before: Sequence[int], after: Sequence[int]) -> float:
    """The share of CPU time between two readings that was neither idle nor waiting for a disk."""
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return 1.0 - (spent[3] + spent[4]) / max(1, sum(spent))


def _available(client: Client) -> int:
    """MiB that the machine has left, when it has been looked at."""
    deadline = time.monotonic() + AN_END
    while not (hosts := client.hosts()):
        if time.monotonic() > deadline:
            raise Broken("no host came in sight", hint="see the lab's log/controller.log")
        time.sleep(0.1)
    return sum(int(host["available"]) for host in hosts)


def _given_out(step: Step, floor: int, client: Client) -> str:
    running = client.status()["jobs"]["running"]
    if running < step.vms:
        return f"{step.vms - running} jobs that ran have been lost"
    if step.available < floor:
        return f"memory: {step.available} MiB are available, {floor} were to be left"
    if (used := step.vms * step.vm_cpu / (os.cpu_count() or 1)) > BUSY:
        return f"the CPUs: VMs that only wait use {used:.0%} of them"
    return ""


def _why(client: Client, job: str) -> str:
    one: dict[str, Any] = next((one for one in client.jobs() if one["job_id"] == job), {})
    return f"job {job}: {one.get('waiting') or one.get('reason') or one.get('state') or 'nobody knows of it'}"


def overcommit(vms: int, claim: int, declared: int) -> float:
    """How many times what is declared has to be claimed for so many VMs, and a template held twice; to one decimal."""
    return max(1.0, -(-10 * (vms * claim + 4 * claim) // declared) / 10)


def machine_memory() -> int:
    """MiB that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
