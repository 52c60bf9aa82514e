"""How long it takes to save a job and to resume it, for small and large VMs, idle ones and ones with full memory.

Each job reports its first instruction and then again and again, so that one clock measures when it was frozen and when
it went on. Beside that, in the same run: a fresh clone of the same size, and the speed of the storage itself.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from multiverse.api import SavedView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.latency import JOB_LIMIT, LOG_HINT, until
from multiverse_lab.lab.session import LabSession

SCRIPT = """#!/bin/bash
report() {{ exec 3<>/dev/tcp/{host}/{port}; echo "$SLURM_JOB_ID $1" >&3; exec 3>&-; }}
report began
if [ {touched} -gt 0 ]; then
  head -c {part}M /dev/urandom > /dev/shm/part
  for i in $(seq {times}); do cat /dev/shm/part; done > /dev/shm/all
fi
report touched
while [ ! -e over ]; do report goes; sleep 0.05; done
"""

PART = 150  # MiB of random bytes, written again and again: zstd does not look back as far
_POLL = 0.02  # seconds between two looks at how far a job is saved
_BLOCK = 8 << 20


@dataclass(frozen=True, slots=True)
class SaveCase:
    """Jobs that ask for so much memory (MiB), and fill so many MiB with bytes that nothing compresses."""

    name: str
    memory: int
    touched: int = 0

    @property
    def script_values(self) -> dict[str, int]:
        part = min(self.touched, PART)
        return {"touched": self.touched, "part": part, "times": max(0, round(self.touched / max(part, 1)) - 1)}


CASES = (
    SaveCase("small idle", 150),
    SaveCase("small touched", 250, 100),
    SaveCase("2 GiB idle", 1900),
    SaveCase("2 GiB touched", 1900, 900),
)


@dataclass(frozen=True, slots=True)
class SaveSample:
    """Seconds, but for `size`."""

    start: float  # from sbatch to the first instruction of a fresh clone
    frozen: float  # from the command until the last report of the job
    requeued: float  # from the command until the scheduler has queued the job again
    written: float  # from the command until the state is complete
    resume: float  # from the command until the job reports again
    size: int  # bytes of the state


class JobReports:
    """Takes the reports of jobs: when which job said what, in monotonic seconds."""

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), backlog=128)
        self._socket.settimeout(0.2)
        self.host, self.port = host, self._socket.getsockname()[1]
        self._all: list[tuple[float, str, str]] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)

    def __enter__(self) -> JobReports:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._socket.close()

    def _take(self) -> None:
        while not self._ending.is_set():
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            arrived = time.monotonic()
            with connection:
                connection.settimeout(2.0)
                try:
                    job, _, word = connection.recv(64).decode(errors="replace").strip().partition(" ")
                except OSError:
                    continue
                self._all.append((arrived, job, word))

    def last(self, job: str) -> float:
        return max((at for at, one, _ in list(self._all) if one == job), default=0.0)

    def wait(self, job: str, word: str = "", after: float = 0.0) -> float:
        """When the job first said that word, or anything, after a moment. Raises `Broken` if it does not in time."""
        deadline = time.monotonic() + JOB_LIMIT
        while time.monotonic() < deadline:
            for at, one, said in list(self._all):
                if one == job and at > after and word in ("", said):
                    return at
            time.sleep(0.01)
        raise Broken(f"job {job} did not report within {JOB_LIMIT:g} s", hint=LOG_HINT)


@dataclass
class SaveRun:
    """Measures jobs, one after the other."""

    lab: LabSession
    client: Client
    reports: JobReports
    samples: dict[str, list[SaveSample]] = field(default_factory=dict)

    def run(self, case: SaveCase) -> SaveSample:
        (self.lab.user.home / "over").unlink(missing_ok=True)
        script = SCRIPT.format(host=self.reports.host, port=self.reports.port, **case.script_values)
        began = time.monotonic()
        job = self.lab.submit(script, "--output=/dev/null", f"--mem={case.memory}", "--constraint=slim&instant")
        start = self.reports.wait(job, "began") - began
        self.reports.wait(job, "goes")
        asked, entered = self._save(job)
        frozen = self.reports.last(job)
        size = saved_job(self.client, job).bytes
        until(lambda: not self.client.vms(), "its VM was not released")
        again = time.monotonic()
        self.client.resume(job)
        resumed = self.reports.wait(job, after=again)
        (self.lab.user.home / "over").touch()
        until(lambda: not self.client.jobs(), f"job {job} did not end")
        until(lambda: not self.client.saved(), f"the state of job {job} was not removed")
        sample = SaveSample(
            start, frozen - asked, entered["writing"] - asked, entered["stored"] - asked, resumed - again, size
        )
        self.samples.setdefault(case.name, []).append(sample)
        return sample

    def _save(self, job: str) -> tuple[float, dict[str, float]]:
        """Save a job. Returns when that was asked for, and when each of its states was seen first."""
        entered: dict[str, float] = {}
        asked = time.monotonic()
        self.client.save(job, hold=True)
        deadline = asked + JOB_LIMIT
        while "stored" not in entered:
            if time.monotonic() > deadline:
                raise Broken(f"job {job} was not saved within {JOB_LIMIT:g} s", hint=LOG_HINT)
            state = saved_job(self.client, job).state
            for one in ("writing", "stored") if state == "stored" else (state,):
                entered.setdefault(one, time.monotonic())
            time.sleep(_POLL)
        return asked, entered


def saved_job(client: Client, job: str) -> SavedView:
    """A job that is being saved, or was. Raises `Broken` if its save was given up."""
    found = [one for one in decode(list[SavedView], client.saved()) if one.job_id == job]
    if not found:
        raise Broken(f"job {job} was not saved: its save was given up", hint=LOG_HINT)
    return found[0]


def disk_speed(directory: Path, size: int) -> float:
    """Bytes a second at which a file of `size` random bytes is written to the storage, and synced."""
    block, path = os.urandom(_BLOCK), directory / ".speed"
    began = time.monotonic()
    try:
        with path.open("wb") as file:
            for _ in range(max(1, size // _BLOCK)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return max(1, size // _BLOCK) * _BLOCK / (time.monotonic() - began)
    finally:
        path.unlink(missing_ok=True)
