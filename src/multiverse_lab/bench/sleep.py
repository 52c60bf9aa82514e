"""How long it takes until suspended jobs have freed their memory, and until they compute again once they are resumed.

The jobs are suspended at once, and resumed at once. Each reports again and again. For comparison, the same is done with
jobs whose VMs stay awake: Slurm itself takes two seconds to stop the processes of a job.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from multiverse.api import VmView, decode
from multiverse.client import Client
from multiverse_lab.bench.latency import until
from multiverse_lab.bench.long_queue import as_root
from multiverse_lab.bench.save import JobReports
from multiverse_lab.lab.session import LabSession

SCRIPT = """#!/bin/bash
while [ ! -e over ]; do
  exec 3<>/dev/tcp/{host}/{port}; echo "$SLURM_JOB_ID goes" >&3; exec 3>&-
  sleep 0.3
done
"""
OPTIONS = ("--output=/dev/null", "--mem=150", "--time=60", "--constraint=slim&instant")
STOPPED = 5.0  # seconds until Slurm has surely stopped jobs that stay awake
_POLL = 0.05


@dataclass(frozen=True, slots=True)
class SleepSample:
    """Seconds, but for memory (MiB)."""

    asleep: float  # from the command until the last VM sleeps; 0: they stay awake
    first: float  # from the command until the first job reports again
    middle: float  # the same, of the job in the middle
    last: float  # the same, of the last job
    memory: float  # that the VMs had to themselves before
    left: float  # that they had while the jobs were suspended


@dataclass
class SleepRun:
    """Measures so many jobs at a time, each in a VM of its own."""

    lab: LabSession
    client: Client
    reports: JobReports
    jobs: int

    def run(self, *, sleeps: bool) -> SleepSample:
        (self.lab.user.home / "over").unlink(missing_ok=True)
        script = SCRIPT.format(host=self.reports.host, port=self.reports.port)
        jobs = [self.lab.submit(script, *OPTIONS) for _ in range(self.jobs)]
        for job in jobs:
            self.reports.wait(job, "goes")
        memory = self._private()
        began = time.monotonic()
        as_root(self.lab, "scontrol", "suspend", ",".join(jobs))
        if sleeps:
            until(lambda: self._asleep() == self.jobs, "not all VMs sleep", pause=_POLL)
        asleep = time.monotonic() - began if sleeps else 0.0
        time.sleep(STOPPED)
        left, again = self._private(), time.monotonic()
        as_root(self.lab, "scontrol", "resume", ",".join(jobs))
        after = sorted(self.reports.wait(job, after=again) - again for job in jobs)
        (self.lab.user.home / "over").touch()
        until(lambda: not self.client.jobs(), "the jobs did not end")
        return SleepSample(asleep, after[0], median(after), after[-1], memory, left)

    def _vms(self) -> list[VmView]:
        return decode(list[VmView], self.client.vms())

    def _asleep(self) -> int:
        return sum(vm.state == "asleep" for vm in self._vms())

    def _private(self) -> float:
        return sum(vm.private for vm in self._vms())
