"""How long it takes to move a VM between two hosts, and how long it stands still meanwhile.

The job counts work, and reports each hundredth of a second how far it is and the longest time that it did not run. So
the time down is measured from inside, by the longest gap of its own clock, and from outside, by the longest pause
between two reports. The clock of an emulated guest stands still with it: then only the pause tells.

The CPU time of both hosts includes what the job computes meanwhile. Beside it is what its QEMU took in as long before.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse.host.process import cpu_seconds
from multiverse_lab.bench.latency import until
from multiverse_lab.lab.hosts import control_groups
from multiverse_lab.lab.session import LabSession

PROGRAM = """
import hashlib, mmap, os, socket, struct, sys, time
host, port, size, rate = sys.argv[1], *map(int, sys.argv[2:5])
shared = mmap.mmap(-1, 9)  # what is done; whether the memory is filled
if os.fork() == 0:  # the work of the job
    done = 0
    while True:
        hashlib.sha256(bytes(4096)).digest()
        done += 1
        shared[:8] = struct.pack("=q", done)
if size and os.fork() == 0:  # it writes to its memory, MiB by MiB, at a rate
    memory, block, written = bytearray(size << 20), os.urandom(1 << 20), 0
    for at in range(0, size << 20, 1 << 20):
        memory[at : at + len(block)] = block
    shared[8] = 1
    began = time.monotonic()
    while rate:
        at = written % size << 20
        memory[at : at + len(block)] = block
        written += 1
        time.sleep(max(0.0, began + written / rate - time.monotonic()))
    time.sleep(1 << 20)
reports, last, worst = socket.create_connection((host, port)), time.monotonic(), 0.0
due = last
while True:
    time.sleep(0.001)
    now = time.monotonic()
    worst, last = max(worst, now - last), now
    if now >= due:
        reports.sendall(b"%d %.6f %d\\n" % (*struct.unpack("=q", shared[:8]), worst, shared[8] or not size))
        due, worst = now + 0.01, 0.0
"""

CPU_PERIOD = 0.05  # seconds between two looks at the CPU time of processes: the last of a process that ends is lost
SETTLED = 3.0  # seconds of work before and after a move, beside which it is compared
_POLL = 0.02


@dataclass(frozen=True, slots=True)
class MoveCase:
    """A job that asks for so much memory (MiB), fills so many MiB, and writes to them at a rate (MiB/s)."""

    name: str
    memory: int
    filled: int = 0
    rate: int = 0


CASES = (
    MoveCase("small idle", 150),
    MoveCase("2 GiB idle", 1900),
    MoveCase("2 GiB filled", 1900, 1024),
    MoveCase("10 MiB/s", 1900, 512, 10),
    MoveCase("100 MiB/s", 1900, 512, 100),
    MoveCase("1000 MiB/s", 1900, 512, 1000),
)
LARGE = MoveCase("8 GiB idle", 7900)


@dataclass(frozen=True, slots=True)
class MoveSample:
    """Seconds, but for `sent` and `slowdown`."""

    total: float  # from the command until the VM is at its new host alone
    inside: float  # the longest time that the job did not run, by its own clock
    outside: float  # the longest pause between two of its reports
    usual: float  # the same pause while it did not move
    sent: int  # bytes that the old host sent to the new one
    slowdown: float  # the share of its work that the job did not do meanwhile
    cpu_old: float  # CPU time of QEMU at the old host
    cpu_new: float  # the same at the new host
    cpu_agents: float  # of all other processes of both hosts, which are agents and what these start
    cpu_usual: float  # of QEMU at the old host, in as long before the move
    stages: Mapping[str, float]


class HostsCpu:
    """CPU seconds of the processes of some hosts while this is entered, by host: QEMU's, and those of all others."""

    def __init__(self, control_group: str, hosts: Collection[str]) -> None:
        self._group, self._hosts = control_group, hosts
        self._first: dict[int, float] = {}
        self._last: dict[int, tuple[str, bool, float]] = {}  # by pid: the host, whether it is QEMU, its seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> HostsCpu:
        self._look()
        self._first = {pid: seconds for pid, (_, _, seconds) in self._last.items()}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    def of(self, host: str, *, qemu: bool) -> float:
        return sum(seconds - self._first.get(pid, 0.0) for pid, (at, is_qemu, seconds) in self._last.items()
                   if (at, is_qemu) == (host, qemu))  # fmt: skip

    def _follow(self) -> None:
        while not self._ended.wait(CPU_PERIOD):
            self._look()

    def _look(self) -> None:
        for host in self._hosts:
            for pid in control_groups.processes(self._group, host):
                try:
                    program = Path(f"/proc/{pid}/comm").read_text()
                except OSError:  # it has ended
                    continue
                if seconds := cpu_seconds(pid):
                    self._last[pid] = host, program.startswith("qemu"), seconds


@dataclass(frozen=True, slots=True)
class ProgressReport:
    at: float
    done: int
    worst: float
    filled: bool


class ProgressReports:
    """Takes the reports of one job at a time, in monotonic seconds."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self.host, self.port = host, self._server.getsockname()[1]
        self.taken: list[ProgressReport] = []
        self._ending = threading.Event()

    def __enter__(self) -> ProgressReports:
        threading.Thread(target=self._take, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.close()

    def _take(self) -> None:
        while not self._ending.is_set():
            try:
                connection, _ = self._server.accept()
                self.taken.clear()
                with connection, connection.makefile("rb") as lines:
                    for line in lines:
                        done, worst, filled = line.split()
                        report = ProgressReport(time.monotonic(), int(done), float(worst), filled != b"0")
                        self.taken.append(report)
            except (OSError, ValueError):
                continue

    def between(self, began: float, ended: float) -> list[ProgressReport]:
        return [one for one in list(self.taken) if began <= one.at <= ended]


def longest_pause(reports: list[ProgressReport]) -> float:
    return max((b.at - a.at for a, b in pairwise(reports)), default=0.0)


def pace(reports: list[ProgressReport]) -> float:
    """Work a second."""
    if len(reports) < 2:
        return 0.0
    return (reports[-1].done - reports[0].done) / (reports[-1].at - reports[0].at)


@dataclass
class MoveRun:
    """Measures moves. `sent` gives the bytes that a host has sent so far."""

    lab: LabSession
    client: Client
    reports: ProgressReports
    samples: dict[str, list[MoveSample]] = field(default_factory=dict)

    def run(self, case: MoveCase, moves: int) -> list[MoveSample]:
        """Move the VM of a job of that case so many times, there and back."""
        program = self.lab.user.home / "moves.py"
        program.write_text(PROGRAM)
        command = f"python3 {program} {self.reports.host} {self.reports.port} {case.filled} {case.rate}"
        self.reports.taken.clear()
        job = self.lab.submit(f"#!/bin/sh\n{command}\n", "--output=/dev/null", f"--mem={case.memory}", "--time=60")
        try:
            until(lambda: any(one.filled for one in self.reports.taken[-1:]), f"job {job} did not fill its memory")
            time.sleep(SETTLED)
            found = [self._move(job) for _ in range(moves)]
        finally:
            self.lab.run("scancel", job)
            gone = lambda: all(one["job_id"] != job for one in self.client.vms())  # noqa: E731
            until(gone, f"the VM of job {job} was not released")
        self.samples.setdefault(case.name, []).extend(found)
        return found

    def _move(self, job: str) -> MoveSample:
        with self._cpu() as usually:
            time.sleep(SETTLED)
        source = self._is_where(job)
        before = sent_by(self.lab, source)
        with self._cpu() as cpu:
            began = time.monotonic()
            target = self.client.move(job)["target"]
            until(lambda: bool(self._is_where(job)), f"the VM of job {job} did not move", pause=_POLL)
            total = time.monotonic() - began
        if self._is_where(job) != target:
            raise Broken(f"the VM of job {job} did not move to {target}", hint=f"multiverse timeline -e {job}")
        sent = sent_by(self.lab, source) - before
        time.sleep(0.3)  # for the reports that are under way
        meanwhile = self.reports.between(began, began + total + 0.2)
        usual = self.reports.between(began - SETTLED, began)
        stages = self._stages(job)
        slower = 1.0 - pace(meanwhile) / pace(usual) if pace(usual) else 0.0
        worst = max((one.worst for one in meanwhile), default=0.0)
        return MoveSample(
            total,
            worst,
            longest_pause(meanwhile),
            longest_pause(usual),
            sent,
            slower,
            cpu_old=cpu.of(source, qemu=True),
            cpu_new=cpu.of(target, qemu=True),
            cpu_agents=cpu.of(source, qemu=False) + cpu.of(target, qemu=False),
            cpu_usual=usually.of(source, qemu=True) * total / SETTLED,
            stages=stages,
        )

    def _cpu(self) -> HostsCpu:
        return HostsCpu(self.lab.where.control_group, [host.name for host in self.lab.lab.plan.own_hosts])

    def _is_where(self, job: str) -> str:
        """The host of the job's VM, once it does not move; empty until then."""
        vm = next((one for one in self.client.vms() if one["job_id"] == job), None)
        if vm is None:
            raise Broken(f"the VM of job {job} has ended", hint=f"multiverse timeline -e {job}")
        return str(vm["host"]) if vm["state"] == "serving" else ""

    def _stages(self, job: str) -> Mapping[str, float]:
        """Those of the latest move."""
        entries = self.client.timeline(job)[-1]["entries"]
        told = [one["reason"] for one in entries if one["event"] == "move" and not one["state"]]
        parts = (part.rsplit(" ", 2) for part in told[-1].split(", ")) if told else ()
        return {name: float(milliseconds) / 1000 for name, milliseconds, _ in parts}


def sent_by(lab: LabSession, host: str) -> int:
    """Bytes that a host has sent: what its port at the lab's switch has received."""
    port = next(one.uplink for one in lab.lab.plan.own_hosts if one.name == host)
    return int(Path(f"/sys/class/net/{port}/statistics/rx_bytes").read_text())
