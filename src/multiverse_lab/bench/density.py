"""How many VMs with a running job each a host holds before its memory or its CPUs are exhausted.

Jobs are added in steps. Each job reports that it runs and then waits, so everything that its VM uses from then on is
what an idle VM uses. After each step the host is left alone for a few seconds and measured. The benchmark ends when
there are as many VMs as were asked for, or when something is exhausted; then all jobs end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from multiverse.api import HostView, JobView, StatusView, VmView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.arrivals import Arrivals, until_nothing_is_left
from multiverse_lab.bench.stats import median
from multiverse_lab.lab.session import LabSession

IDLE_SECONDS = 5.0
"""Seconds over which CPU time is measured while no VM is given anything to do."""

MAX_BUSY = 0.95
"""The share of the machine's CPUs above which idle VMs leave nothing to run jobs with."""

OPTIONS = ("--constraint=slim&instant", "--output=/dev/null")
END_LIMIT = 300.0


@dataclass(frozen=True, slots=True)
class DensityBounds:
    """Add `by` VMs at a time, up to `most`. Stop earlier when less than `floor` MiB are available, or when no job of a
    step has started for `patience` seconds."""

    most: int
    by: int
    floor: int
    patience: float


@dataclass(frozen=True, slots=True)
class DensityStep:
    """The host with `vms` jobs running. `private` and `shared` are medians over the VMs in MiB, `used` and `available`
    the machine's in MiB. `busy` is the used share of the machine's CPUs, whoever uses them, while the VMs are idle;
    `vm_cpu` is the share of one CPU that a VM uses, on average. `slowest` is the time from the submission to the start
    of the last job of the step, in seconds."""

    vms: int
    slowest: float
    private: float
    shared: float
    used: int
    available: int
    busy: float
    vm_cpu: float


@dataclass(frozen=True, slots=True)
class DensityResult:
    """`gave_out` says what was exhausted; empty: nothing, there were as many VMs as were asked for."""

    steps: tuple[DensityStep, ...]
    gave_out: str

    @property
    def most(self) -> int:
        """The number of VMs that ran jobs at once before anything was exhausted."""
        return self.steps[-1].vms if self.steps else 0


Progress = Callable[[DensityStep], None]


def run(lab: LabSession, client: Client, bounds: DensityBounds, progress: Progress) -> DensityResult:
    """Add jobs until a bound is reached or something is exhausted. All jobs have ended when this returns."""
    steps: list[DensityStep] = []
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
                gave_out = f"{len(missing)} more did not start: {_reason(client, missing[0])}"
                lab.run("scancel", array)
                break
            slowest = max(arrivals.at[job] for job in jobs) - began
            step = _measured(client, len(arrivals.at), slowest, before)
            steps.append(step)
            progress(step)
            gave_out = _exhausted(step, bounds.floor, client)
    until_nothing_is_left(client, END_LIMIT)
    return DensityResult(tuple(steps), gave_out)


def _measured(client: Client, vms: int, slowest: float, before: int) -> DensityStep:
    began = time.monotonic()
    seconds = {one.name: one.cpu_s for one in _vms(client)}
    idle = cpu_times()
    time.sleep(IDLE_SECONDS)
    spent, passed = cpu_times(), time.monotonic() - began
    over = _vms(client)  # measuring the VMs takes CPU time too, so it is done outside the interval of the machine's
    shares = [(one.cpu_s - seconds[one.name]) / passed for one in over if one.name in seconds]
    available = _available(client)
    return DensityStep(
        vms=vms,
        slowest=slowest,
        private=median([one.private for one in over]),
        shared=median([one.shared for one in over]),
        used=before - available,
        available=available,
        busy=busy(idle, spent),
        vm_cpu=fmean(shares),
    )


def _vms(client: Client) -> list[VmView]:
    """All VMs, measured now and exactly."""
    return decode(list[VmView], client.vms(exact=True))


def cpu_times() -> tuple[int, ...]:
    """The machine's CPU time in clock ticks, by kind: the first eight fields of `cpu` in /proc/stat (proc(5))."""
    return tuple(int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9])


def busy(before: Sequence[int], after: Sequence[int]) -> float:
    """The share of CPU time between two readings that was neither idle nor waiting for I/O."""
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return 1.0 - (spent[3] + spent[4]) / max(1, sum(spent))


def _available(client: Client) -> int:
    """The machine's available memory in MiB, once the controller has observed it."""
    deadline = time.monotonic() + END_LIMIT
    while not (hosts := [one for one in decode(list[HostView], client.hosts()) if one.reachable]):
        if time.monotonic() > deadline:
            raise Broken(f"no host was observed within {END_LIMIT:g} s", hint="see the lab's log/controller.log")
        time.sleep(0.1)
    return sum(host.available for host in hosts)


def _exhausted(step: DensityStep, floor: int, client: Client) -> str:
    """What is exhausted after this step; empty: nothing."""
    running = decode(StatusView, client.status()).jobs["running"]
    if running < step.vms:
        return f"{step.vms - running} jobs that ran have been lost"
    if step.available < floor:
        return f"memory: {step.available} MiB are available, {floor} were to be left"
    if (used := step.vms * step.vm_cpu / (os.cpu_count() or 1)) > MAX_BUSY:
        return f"the CPUs: VMs that only wait use {used:.0%} of them"
    return ""


def _reason(client: Client, job: str) -> str:
    found = next((one for one in decode(list[JobView], client.jobs()) if one.job_id == job), None)
    reason = found and (found.waiting or found.reason or found.state)
    return f"job {job}: {reason or 'the controller does not know it'}"


def overcommit(vms: int, claim: int, declared: int) -> float:
    """The factor, rounded up to one decimal, by which `vms` VMs that claim `claim` MiB each exceed `declared` MiB. Four
    more claims are added for a template whose memory is held twice."""
    return max(1.0, -(-10 * (vms * claim + 4 * claim) // declared) / 10)


def machine_memory() -> int:
    """This machine's memory in MiB."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
