"""Jobs of the benchmarks of moves and of checkpoints, which compute and report how far they are.

Such a job counts work, and reports each hundredth of a second how far it is and the longest time that it did not run.
The clock of an emulated guest stands still with it: then only the longest pause between two reports tells how long a
job stood still.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from multiverse.client import Client
from multiverse_lab.bench.latency import until
from multiverse_lab.lab.session import LabSession

_PROGRAM = """
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

SETTLED = 3.0
"""Seconds of work with which the work during a move or a checkpoint is compared."""
_UNDER_WAY = 0.3  # seconds within which a report arrives


@dataclass(frozen=True, slots=True)
class ComputingCase:
    """A job that asks for so much memory (MiB), fills so many MiB, and writes to them at a rate (MiB/s)."""

    name: str
    memory: int
    filled: int = 0
    rate: int = 0


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

    def between(self, began: float, ended: float) -> Progress:
        """What the job did from one monotonic time to another one, which has just come."""
        time.sleep(_UNDER_WAY)
        taken = list(self.taken)
        meanwhile = [one for one in taken if began <= one.at <= ended]
        before = [one for one in taken if began - SETTLED <= one.at <= began]
        return Progress(
            pause=_longest_pause(meanwhile),
            usual=_longest_pause(before),
            inside=max((one.worst for one in meanwhile), default=0.0),
            slowdown=1.0 - _pace(meanwhile) / _pace(before) if _pace(before) else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Seconds, but for `slowdown`."""

    pause: float  # the longest pause between two reports of the job
    usual: float  # the same in `SETTLED` seconds before
    inside: float  # the longest time that the job did not run, by its own clock
    slowdown: float  # the share of its work that the job did not do


def _longest_pause(reports: list[ProgressReport]) -> float:
    return max((b.at - a.at for a, b in pairwise(reports)), default=0.0)


def _pace(reports: list[ProgressReport]) -> float:
    """Work a second."""
    if len(reports) < 2:
        return 0.0
    return (reports[-1].done - reports[0].done) / (reports[-1].at - reports[0].at)


@contextmanager
def computing(lab: LabSession, client: Client, reports: ProgressReports, case: ComputingCase) -> Iterator[str]:
    """The id of a job of that case, which has filled its memory. Its VM is gone afterwards."""
    program = lab.user.home / "computing.py"
    program.write_text(_PROGRAM)
    command = f"python3 {program} {reports.host} {reports.port} {case.filled} {case.rate}"
    reports.taken.clear()
    job = lab.submit(f"#!/bin/sh\n{command}\n", "--output=/dev/null", f"--mem={case.memory}", "--time=60")
    try:
        until(lambda: any(one.filled for one in reports.taken[-1:]), f"job {job} did not fill its memory")
        time.sleep(SETTLED)
        yield job
    finally:
        lab.run("scancel", job)
        gone = lambda: all(one["job_id"] != job for one in client.vms())  # noqa: E731
        until(gone, f"the VM of job {job} was not released")
