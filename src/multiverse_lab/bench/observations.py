"""How long it takes to observe Slurm's jobs and nodes, for slurmctld, for this machine and for the event loop.

A lab with thousands of jobs, of which ten others change each second. The baseline is the JSON that squeue and sinfo
print, as the driver read it before decision 26. Nothing runs: the jobs wait, and the lab has no VMs and no controller.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from multiverse.core.errors import Broken
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading.reader import SlurmReader
from multiverse.system.processes import stat_fields
from multiverse_lab.bench.stats import median
from multiverse_lab.lab.configure import environment
from multiverse_lab.lab.services import SERVICES
from multiverse_lab.lab.session import LabSession

OTHERS = "others"
"""The other partition."""

SITE = f"""\
NodeName=mvother[1-400] NodeAddr=127.0.1.1 Port=1 CPUs=64 RealMemory=256000 State=DOWN
PartitionName={OTHERS} Nodes=mvother[1-400] MaxTime=INFINITE State=UP
"""
"""The lab's site.conf: nodes that never run anything."""

ARRAY = 1000
"""Tasks of each array. Slurm's default permits 1,001."""

CHANGES = 10
"""Jobs that change each second."""

HEARTBEAT = 0.002
"""Seconds between two turns of the task that measures the pauses of the event loop."""

SCRIPT = "#!/bin/sh\nexec sleep 100\n"


@dataclass(frozen=True, slots=True)
class ObservationPlan:
    """`ours` jobs wait in Multiverse's partition, all of one user, and `others` in another one."""

    ours: int
    others: int
    rounds: int


@dataclass(frozen=True, slots=True)
class ObservationCost:
    """What one kind of observation costs: medians in seconds, `pause` the longest of all rounds.

    `commands` is the CPU time of Slurm's commands, `process` that of this process.
    """

    name: str
    took: float
    commands: float
    process: float
    slurmctld: float
    pause: float


def run(lab: LabSession, plan: ObservationPlan, progress: Callable[[str], None]) -> list[ObservationCost]:
    """Measure all kinds. The controller of the lab must not run."""
    began = time.monotonic()
    others = fill(lab, plan)
    progress(f"{plan.ours} and {plan.others} jobs submitted in {time.monotonic() - began:.0f} s")
    one = lab.submit(SCRIPT, "--output=/dev/null", "--mem=100")
    with _changing(lab, others):
        return asyncio.run(_measure_all(lab, plan, one))


def fill(lab: LabSession, plan: ObservationPlan) -> str:
    """Submit the jobs, as arrays whose tasks are split off at once: each is a record of its own in slurmctld. Returns
    the id of the last array of the other partition."""
    base = ""
    for partition, jobs in (("vm", plan.ours), (OTHERS, plan.others)):
        for number, first in enumerate(range(0, jobs, ARRAY)):
            tasks = min(ARRAY, jobs - first)
            options = [f"--array=0-{tasks - 1}", f"--partition={partition}", f"--cpus-per-task={number % 4 + 1}"]
            base = lab.submit(SCRIPT, "--output=/dev/null", f"--mem={200 + number}", *options)
            if tasks > 1:  # all of them at once would not be split off
                _as_root(lab, "scontrol", "update", f"JobId={base}_0-{tasks - 2}", f"Nice={number + 1}")
    return base


@contextmanager
def _changing(lab: LabSession, base: str) -> Iterator[None]:
    """While this lasts, change some tasks of an array each second."""
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.wait(1.0):
            first = number * CHANGES % (ARRAY // 2)
            tasks = f"{base}_{first}-{first + CHANGES - 1}"
            _as_root(lab, "scontrol", "update", f"JobId={tasks}", f"Nice={100 + number}")
            number += 1

    thread = threading.Thread(target=change, name="changes")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _measure_all(lab: LabSession, plan: ObservationPlan, one: str) -> list[ObservationCost]:
    commands = SlurmCommands(lab.settings.slurm)
    reader = SlurmReader(lab.settings, "bench", commands)
    ctld = _slurmctld(lab)
    uid, nobody = lab.user.uid, 1

    async def as_json() -> None:
        for program in (("squeue", "-a", "-t", "all"), ("sinfo", "-a")):
            text = await commands.run(*program, "--json")
            document = await asyncio.to_thread(json.loads, text)
            if program[0] == "squeue" and len(document["jobs"]) < plan.ours + plan.others:
                raise Broken(f"squeue shows {len(document['jobs'])} jobs", hint=f"{document['errors']}")

    async def first() -> None:
        await SlurmReader(lab.settings, "bench", commands).whole()

    async def again() -> None:
        await reader.whole()

    async def user() -> None:
        await reader.part({}, [uid], ())

    async def no_jobs() -> None:
        await reader.part({}, [nobody], ())

    async def job() -> None:
        await reader.part({one: None}, (), ())

    async def node() -> None:
        await reader.part({}, (), ["mvbench-1"])

    kinds: Sequence[tuple[str, Callable[[], Awaitable[None]]]] = (
        ("all jobs and nodes, JSON", as_json),
        ("all jobs and nodes, first table", first),
        ("all jobs and nodes, table", again),
        (f"one user with {plan.ours:,} jobs", user),
        ("one user without jobs", no_jobs),
        ("one job", job),
        ("nodes", node),
    )
    return [await _measure(name, kind, plan.rounds, ctld) for name, kind in kinds]


async def _measure(name: str, kind: Callable[[], Awaitable[None]], rounds: int, ctld: int) -> ObservationCost:
    samples: list[tuple[float, float, float, float]] = []
    longest = 0.0
    for number in range(rounds + 1):
        before = _usage(ctld)
        with _heartbeat() as pauses:
            await kind()
            await asyncio.sleep(2 * HEARTBEAT)
        if number:  # the first round warms up
            took, commands, process, slurmctld = (b - a for a, b in zip(before, _usage(ctld), strict=True))
            samples.append((took - 2 * HEARTBEAT, commands, process, slurmctld))
            longest = max(longest, *pauses)
    took, commands, process, slurmctld = (median(column) for column in zip(*samples, strict=True))
    return ObservationCost(name, took, commands, process, slurmctld, longest)


@contextmanager
def _heartbeat() -> Iterator[list[float]]:
    """The pauses of the event loop beyond what was asked for."""
    pauses: list[float] = []

    async def beat() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(HEARTBEAT)
            pauses.append(time.perf_counter() - began - HEARTBEAT)

    task = asyncio.ensure_future(beat())
    try:
        yield pauses
    finally:
        task.cancel()


def _usage(ctld: int) -> tuple[float, float, float, float]:
    """Now, and the CPU seconds of commands that have ended, of this process and of slurmctld."""
    children, own = (resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
    fields = stat_fields(ctld)
    if fields is None:
        raise Broken("slurmctld has ended", hint="see the lab's log/slurmctld.log")
    slurmctld = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return (
        time.perf_counter(),
        children.ru_utime + children.ru_stime,
        own.ru_utime + own.ru_stime,
        slurmctld,
    )


def _slurmctld(lab: LabSession) -> int:
    running = next(service for service in SERVICES if service.name == "slurmctld").running(lab.where)
    if running is None:
        raise Broken("slurmctld does not run", hint="see the lab's log/slurmctld.log")
    return running.pid


def _as_root(lab: LabSession, *argv: str) -> None:
    done = subprocess.run(
        argv, env={**os.environ, **environment(lab.where)}, text=True, capture_output=True, timeout=300, check=False
    )
    if done.returncode:
        raise Broken(f"{' '.join(argv)} failed: {done.stderr.strip()}", hint="see the lab's log/slurmctld.log")
