"""How many short tasks a minute a partition of a few CPUs runs, and what bounds that: an array on bare metal, in VMs
that are made for their tasks, and in joined spares that are refilled meanwhile.

A task waits for a second or so, as one of CPUs of its own would compute, and so leaves the machine's real CPUs to what
starts and ends tasks. It reports its first instruction and its end, which one clock measures. A task that does not run,
or does not complete, ends the benchmark with an error.

What a CPU spends on a task is the time of all CPUs, from the submission to the end of the last task, by the number of
tasks. Of that only the task computes; the parts of the rest are the phases of the tasks' timelines.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from multiverse.api import TimelineView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse.core.transition import Event
from multiverse.system.processes import cpu_seconds_with_children
from multiverse_lab.bench.burst import check_completed, not_started
from multiverse_lab.bench.density import busy, cpu_times
from multiverse_lab.bench.latency import JobKind
from multiverse_lab.lab.services import SERVICES
from multiverse_lab.lab.session import LabSession

BARE = JobKind("bare_metal", ("--partition=bare", "--mem=10"), vm=False)
INSTANT = JobKind("instant", ("--constraint=slim&instant", "--mem=150"))
JOINED = JobKind("joined", ("--constraint=slim&instant", "--mem=150"))
KINDS = (BARE, INSTANT, JOINED)

SCRIPT = """#!/bin/bash
exec 3<>/dev/tcp/{host}/{port}
echo "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}" >&3
sleep {seconds:g}
echo end >&3
"""

END_LIMIT = 300.0
"""Seconds without the end of any task after which the missing tasks are given up."""

PAPER = {"provisioning": 36.0, "jobs": 100, "all": 581.0}
"""Multiverse's paper, instant clones on vSphere: the mean provisioning time, and how long 100 jobs of 140 to 350 s took
on 220 CPUs, which could be claimed twice; in seconds."""

SATURATED = 0.85
"""The share of CPUs, or of the one CPU that a daemon's main thread can have, from which on that is what bounds."""


def pool(cpus: int) -> str:
    """Settings with as many joined spares as there are CPUs, and CPUs that these may claim beside the tasks. The array
    runs no more tasks at once than there are CPUs, so the others hold spares only. None is on offer at submission: an
    array takes none there, and its first tasks would wait until the offers are withdrawn."""
    return (
        "[host]\ncpu_overcommit = 2.0\n\n"
        f'[[pool]]\nimage = "slim"\ndepth = "joined"\nmin = {cpus}\ncpus = 1\nmemory = 150\n'
        "offer = false\n"
    )


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """`tasks` of so many `seconds` on so many `cpus`, of each kind."""

    tasks: int
    seconds: float
    cpus: int
    kinds: Sequence[JobKind] = KINDS


@dataclass
class ThroughputSamples:
    """What was measured of one kind: when it was submitted; when each task began and ended, in the same monotonic
    seconds; the timelines of those in VMs; the used share of the machine's CPUs, and of one CPU by each daemon."""

    submitted: float
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    timelines: list[TimelineView] = field(default_factory=list)
    machine: float = 0.0
    daemons: dict[str, float] = field(default_factory=dict)


class TaskReports:
    """Receives the reports of tasks in a thread of its own: when each began, and when it ended."""

    def __init__(self, host: str, seconds: float = 0.0) -> None:
        self._socket = socket.create_server((host, 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self.script = SCRIPT.format(host=host, port=self.port, seconds=seconds)
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self._selector, self._words = selectors.DefaultSelector(), dict[socket.socket, bytes]()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._receive, name="reports", daemon=True)
        self._thread.start()

    def __enter__(self) -> TaskReports:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._thread.join()
        for connection in (self._socket, *self._words):
            connection.close()
        self._selector.close()

    def wait(self, tasks: Sequence[str], patience: float, progress: Callable[[int], None], alive: Callable[[], bool]
             ) -> list[str]:  # fmt: skip
        """Wait until each of these tasks has ended, or until none has for `patience` seconds. Returns those that have
        not. Raises `Broken` once `alive()` is false, because then nothing can start them any more."""
        done, last = 0, time.monotonic()
        while done < len(tasks) and time.monotonic() - last < patience:
            time.sleep(0.1)
            if not alive():
                raise Broken("the lab went down while tasks ran", hint="see the lab's log/controller.log")
            if (now := sum(task in self.ended for task in tasks)) > done:
                done, last = now, time.monotonic()
                progress(done)
        return [task for task in tasks if task not in self.ended]

    def _receive(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.2):
                if key.fileobj is self._socket:
                    connection, _ = self._socket.accept()
                    connection.setblocking(False)
                    self._words[connection] = b""
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj, time.monotonic())

    def _read(self, connection: socket.socket, at: float) -> None:
        try:
            got = connection.recv(256)
        except OSError:
            got = b""
        words = self._words[connection] = self._words[connection] + got
        task, *rest = words.decode(errors="replace").split("\n")
        if rest and task:
            self.began.setdefault(task, at)
            if rest[0] == "end":
                self.ended.setdefault(task, at)
        if not got:
            self._selector.unregister(connection)
            del self._words[connection]
            connection.close()


Progress = Callable[[str, int, int, float], None]
"""Called with a kind, the number of its tasks that have ended, the number of all, and the seconds since submission."""


def run_kind(
    lab: LabSession, client: Client, plan: ThroughputPlan, kind: JobKind, progress: Progress
) -> ThroughputSamples:
    """Run the array of one kind. On return nothing is left of its VMs but spares. For `JOINED` the pool must be there,
    and full; the bare node for `BARE`."""
    throttle = f"%{plan.cpus}" if kind is JOINED else ""
    with TaskReports(lab.settings.network.gateway, plan.seconds) as reports:
        before = _cpu_seconds(lab), cpu_times()
        began = time.monotonic()
        array = lab.submit(
            reports.script, f"--array=1-{plan.tasks}{throttle}", "--output=/dev/null", *kind.options
        )  # fmt: skip
        tasks = [f"{array}_{number}" for number in range(1, plan.tasks + 1)]
        missing = reports.wait(
            tasks,
            END_LIMIT + plan.seconds,
            lambda done: progress(kind.name, done, plan.tasks, time.monotonic() - began),
            lab.settings.socket.exists,
        )
        took, after = time.monotonic() - began, (_cpu_seconds(lab), cpu_times())
    if missing:
        raise Broken(not_started(client, kind, missing), hint="see the lab's log/controller.log")
    samples = ThroughputSamples(
        began,
        reports.began,
        reports.ended,
        machine=busy(before[1], after[1]),
        daemons={name: (seconds - before[0].get(name, 0.0)) / took for name, seconds in after[0].items()},
    )
    if kind.vm:
        until_no_job_is_left(client)
        samples.timelines = decode(list[TimelineView], client.timeline(array))
    check_completed(lab, dict.fromkeys(tasks, began))
    return samples


def until_no_job_is_left(client: Client) -> None:
    """Wait until the controller has no live job: then nothing is left of their VMs either."""
    deadline = time.monotonic() + END_LIMIT
    while client.jobs():
        if time.monotonic() > deadline:
            raise Broken(f"tasks were not reclaimed within {END_LIMIT:g} s", hint="see the lab's log/controller.log")
        time.sleep(0.1)


def _cpu_seconds(lab: LabSession) -> dict[str, float]:
    """CPU seconds of each daemon of the lab, with those of its children that have ended."""
    found = {}
    for service in SERVICES:
        running = service.running(lab.where)
        seconds = cpu_seconds_with_children(running.pid) if running is not None else None
        if seconds is not None:
            found[service.name] = seconds
    return found


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """The figures of one kind, as `--json` prints them. `all_ran` are the seconds from the submission to the end of the
    last task, `computing` the share of the CPUs' time that is the tasks' own seconds. `stages` are the seconds that a
    CPU spends on a task, by what for; together they are the time of all CPUs by the number of tasks. `spares` is the
    number of tasks that found a joined spare, `again` that of attempts beyond one for each task."""

    all_ran: float
    tasks_per_minute: float
    computing: float
    stages: dict[str, float]
    spares: int
    again: int
    machine: float
    daemons: dict[str, float]
    bounded_by: str


def result(samples: ThroughputSamples, plan: ThroughputPlan) -> ThroughputResult:
    all_ran = max(samples.ended.values()) - samples.submitted
    parts = stages(samples, plan)
    return ThroughputResult(
        all_ran=all_ran,
        tasks_per_minute=plan.tasks * 60 / all_ran,
        computing=plan.tasks * plan.seconds / (all_ran * plan.cpus),
        stages=parts,
        spares=sum(took_spare(one) for one in samples.timelines),
        again=max(0, len(samples.timelines) - plan.tasks),
        machine=samples.machine,
        daemons=samples.daemons,
        bounded_by=bounded_by(parts, samples.machine, samples.daemons),
    )


def stages(samples: ThroughputSamples, plan: ThroughputPlan) -> dict[str, float]:
    """The seconds that a CPU spends on a task, by what for, in their order. `start` is from the node to the task's
    first instruction, `task` the task itself as it was measured, `end` from its end until the controller saw that,
    `reclaim` until its VM and its claims are gone. `free` is the rest, in which no VM holds the CPU; of tasks on bare
    metal it is all between two tasks. A part beyond the end of the last task is not counted."""
    over = max(samples.ended.values())
    spent: dict[str, float] = {}

    def add(name: str, began: float, ended: float) -> None:
        spent[name] = spent.get(name, 0.0) + max(0.0, min(ended, over) - min(began, over))

    for one in samples.timelines:
        began, ended = samples.began.get(one.job_id), samples.ended.get(one.job_id)
        moments = {phase.name: phase for phase in one.phases}
        for name in ("clone", "join"):
            if name in moments:
                add(name, moments[name].began, moments[name].began + moments[name].seconds)
        if one.state != "done" or began is None or ended is None:
            continue
        if "launch" in moments:
            add("start", moments["launch"].began, began)
        add("task", began, ended)
        if "reclaim" in moments:
            add("end", ended, moments["reclaim"].began)
            add("reclaim", moments["reclaim"].began, moments["reclaim"].began + moments["reclaim"].seconds)
    if not samples.timelines:
        for job, began in samples.began.items():
            add("task", began, samples.ended[job])
    found = {name: seconds / plan.tasks for name, seconds in spent.items()}
    whole = (over - samples.submitted) * plan.cpus / plan.tasks
    return found | {"free": max(0.0, whole - sum(found.values()))}


def took_spare(one: TimelineView) -> bool:
    """Whether the task's VM was a joined spare."""
    return any(
        entry.event in (Event.TAKEN, Event.TOOK) and entry.state in ("joined", "adding_user") for entry in one.entries
    )


_WORDS = {
    "agent": "agent and its VMs",  # the CPU time of those that have ended
    "task": "the tasks themselves",
    "free": "the wait of free CPUs for their next task",
}


def bounded_by(parts: Mapping[str, float], machine: float, daemons: Mapping[str, float]) -> str:
    """What bounds the throughput, in words: this machine's CPUs, a daemon that uses up one CPU, or else the part of a
    CPU's time that is longest beside the task."""
    if machine >= SATURATED:
        cpus = os.cpu_count() or 1
        shown = [
            f"{_WORDS.get(name, name)} {share / cpus:.0%}" for name, share in largest(daemons) if share / cpus >= 0.01
        ]
        rest = max(0.0, machine - sum(daemons.values()) / cpus)
        return f"this machine's {cpus} CPUs: {machine:.0%} busy ({', '.join([*shown, f'all else {rest:.0%}'])})"
    for name in ("controller", "slurmctld"):
        if daemons.get(name, 0.0) >= SATURATED:
            return f"{name}: it uses {daemons[name]:.0%} of one CPU"
    name, seconds = max(parts.items(), key=lambda one: one[1])
    whole = sum(parts.values())
    return f"{_WORDS.get(name, f'the stage {name}')}: {seconds:.2f} of the {whole:.2f} s that a CPU spends on a task"


def largest(daemons: Mapping[str, float]) -> list[tuple[str, float]]:
    """The three daemons that use most, the first one first."""
    return sorted(daemons.items(), key=lambda one: -one[1])[:3]


def paper(plan: ThroughputPlan) -> dict[str, float]:
    """What the paper's published figures give for such tasks: each CPU is provisioned for as long as the mean, and then
    computes. `jobs_per_minute` are those of its own workload of 100 jobs."""
    cycle = PAPER["provisioning"] + plan.seconds
    return {
        **PAPER,
        "tasks_per_minute": plan.cpus * 60 / cycle,
        "computing": plan.seconds / cycle,
        "jobs_per_minute": PAPER["jobs"] * 60 / PAPER["all"],
    }
