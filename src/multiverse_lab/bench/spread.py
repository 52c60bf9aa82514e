"""How far apart the VMs of a job are frozen when the job is saved.

A task in each VM reports again and again. The spread is the time between the last report of the VM that was frozen
first and that of the last. Beside it, as its resolution: the same at a moment at which the job runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from multiverse.client import Client
from multiverse_lab.bench.latency import until
from multiverse_lab.bench.save import JobReports, saved_job
from multiverse_lab.lab.session import LabSession

SCRIPT = """#!/bin/bash
srun bash -c 'while [ ! -e over ]; do
  exec 3<>/dev/tcp/{host}/{port}; echo "$SLURM_JOB_ID.$SLURM_PROCID goes" >&3; exec 3>&-; sleep 0.02
done'
"""
MEMORY = {2: 2200, 4: 1300, 8: 600}
"""MiB that each VM of a job of so many asks for: a host of `HOST_MEMORY` MiB holds half of them and no more."""
HOST_MEMORY = 4096
RUNS = 2.0  # seconds for which a job reports before it is saved
_POLL = 0.02


@dataclass(frozen=True, slots=True)
class SpreadSample:
    """Seconds."""

    frozen: float  # from the command until the last report of any VM
    spread: float  # between the last reports of the VMs
    usual: float  # between the latest reports of the VMs while the job runs
    resume: float  # from the command until all VMs have reported again


@dataclass
class SpreadRun:
    lab: LabSession
    client: Client
    reports: JobReports

    def run(self, vms: int) -> SpreadSample:
        """Save a job of so many VMs, a key of `MEMORY`, and resume it."""
        (self.lab.user.home / "over").unlink(missing_ok=True)
        script = SCRIPT.format(host=self.reports.host, port=self.reports.port)
        wishes = f"--mem={MEMORY[vms]}", f"--nodes={vms}", "--ntasks-per-node=1", "--constraint=slim&instant"
        job = self.lab.submit(script, "--output=/dev/null", *wishes)
        tasks = [f"{job}.{task}" for task in range(vms)]
        for task in tasks:
            self.reports.wait(task)
        time.sleep(RUNS)
        usual = self._spread(tasks)
        asked = time.monotonic()
        self.client.save(job, hold=True)
        until(lambda: saved_job(self.client, job).state == "stored", f"job {job} was not saved", pause=_POLL)
        frozen = max(self.reports.last(task) for task in tasks) - asked
        spread = self._spread(tasks)
        until(lambda: not self.client.vms(), "its VMs were not released")
        again = time.monotonic()
        self.client.resume(job)
        resumed = max(self.reports.wait(task, after=again) for task in tasks)
        (self.lab.user.home / "over").touch()
        until(lambda: not self.client.jobs(), f"job {job} did not end")
        until(lambda: not self.client.saved(), f"the state of job {job} was not removed")
        return SpreadSample(frozen, spread, usual, resumed - again)

    def _spread(self, tasks: list[str]) -> float:
        last = [self.reports.last(task) for task in tasks]
        return max(last) - min(last)
