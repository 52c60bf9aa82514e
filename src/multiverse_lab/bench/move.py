"""How long it takes to move a VM between two hosts, and how long it stands still meanwhile.

The time down is measured from inside, by the longest gap of the job's own clock, and from outside, by the longest pause
between two of its reports.

The CPU time of both hosts includes what the job computes meanwhile. Beside it is what its QEMU took in as long before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse.host.process import cpu_seconds
from multiverse_lab.bench.computing import SETTLED, ComputingCase, ProgressReports, computing
from multiverse_lab.bench.latency import until
from multiverse_lab.lab.hosts import control_groups
from multiverse_lab.lab.session import LabSession

CPU_PERIOD = 0.05  # seconds between two looks at the CPU time of processes: the last of a process that ends is lost
_POLL = 0.02


CASES = (
    ComputingCase("small idle", 150),
    ComputingCase("small, 10 MiB/s", 150, 32, 10),
    ComputingCase("small, 100 MiB/s", 150, 32, 100),
    ComputingCase("2 GiB idle", 1900),
    ComputingCase("2 GiB filled", 1900, 1024),
    ComputingCase("10 MiB/s", 1900, 512, 10),
    ComputingCase("100 MiB/s", 1900, 512, 100),
    ComputingCase("1000 MiB/s", 1900, 512, 1000),
)
LARGE = ComputingCase("8 GiB idle", 7900)


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


@dataclass
class MoveRun:
    """Measures moves. `sent` gives the bytes that a host has sent so far."""

    lab: LabSession
    client: Client
    reports: ProgressReports
    samples: dict[str, list[MoveSample]] = field(default_factory=dict)

    def run(self, case: ComputingCase, moves: int) -> list[MoveSample]:
        """Move the VM of a job of that case so many times, there and back."""
        with computing(self.lab, self.client, self.reports, case) as job:
            found = [self._move(job) for _ in range(moves)]
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
        progress = self.reports.between(began, began + total + 0.2)
        stages = self._stages(job)
        return MoveSample(
            total,
            progress.inside,
            progress.pause,
            progress.usual,
            sent,
            progress.slowdown,
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
