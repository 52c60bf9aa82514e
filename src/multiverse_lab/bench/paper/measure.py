"""Runs the paper's jobs on a lab and records their times."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multiverse.api import TimelineView, decode
from multiverse.client import Client
from multiverse.core.errors import Broken
from multiverse_lab.bench.burst import check_completed, not_started
from multiverse_lab.bench.density import busy, cpu_times
from multiverse_lab.bench.latency import JobKind
from multiverse_lab.bench.paper.programs import computed
from multiverse_lab.bench.paper.records import (
    BARE_METAL,
    FULL,
    INSTANT,
    PaperJobTimes,
    PaperRunTimes,
    parts,
    without_vm,
)
from multiverse_lab.bench.paper.workload import (
    LARGE_CPUS,
    PROGRAMS,
    SHORT_CPUS,
    PaperJob,
    PaperScale,
    RoundCosts,
    cost_name,
    rounds,
)
from multiverse_lab.bench.throughput import TaskReports, until_no_job_is_left
from multiverse_lab.lab.session import LabSession

IMAGE = "paper"
JOB_KINDS = {
    FULL: JobKind(FULL, (f"--constraint={IMAGE}&full",)),
    INSTANT: JobKind(INSTANT, (f"--constraint={IMAGE}&instant",)),
    BARE_METAL: JobKind(BARE_METAL, ("--partition=bare",), vm=False),
}
PATIENCE = 900.0
"""Seconds without the end of any job after which the missing jobs are given up."""

_SCRIPT = """#!/bin/bash
exec 3<>/dev/tcp/{host}/{port}
echo "$SLURM_JOB_ID" >&3
bash {here}/job.sh {job.program} {job.cpus} {rounds} {job.seconds:.6f} {root} > {here}/said.$SLURM_JOB_ID 2>&1
status=$?
echo end >&3
exit $status
"""

Progress = Callable[[str, int, int, float], None]
"""Called with a run, the number of its jobs that have ended, the number of all, and the seconds since it began."""


@dataclass
class MachineUse:
    """Samples the use of this machine's CPUs in steps of so many seconds while its context lasts."""

    step: float
    shares: list[float] = field(default_factory=list)

    def __enter__(self) -> MachineUse:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="machine-use", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _sample(self) -> None:
        due, before = time.monotonic() + self.step, cpu_times()
        while not self._ending.wait(max(0.0, due - time.monotonic())):
            now = cpu_times()
            self.shares.append(busy(before, now))
            due, before = due + self.step, now


class PaperBench:
    """Runs jobs of the paper as the lab's user. `here` has the programs, and `root` those for bare metal."""

    def __init__(self, lab: LabSession, client: Client, here: Path, root: Path, progress: Progress) -> None:
        self._lab, self._client, self._here, self._root, self._progress = lab, client, here, root, progress

    def run(
        self, workload: str, kind: str, seed: int, jobs: Sequence[PaperJob], scale: PaperScale, costs: RoundCosts
    ) -> PaperRunTimes:
        """Run the jobs of a workload. On return nothing is left of them. Raises `Broken` if one does not complete.
        Templates are there before the first job, as in the paper: jobs that are not counted see to that."""
        counts = [rounds(job, scale, costs) for job in jobs]
        step = 10.0 * scale.second_of_jobs
        if kind == INSTANT:
            self._run(
                "templates", kind, [PaperJob(1, 0.0, "cg", cpus, 0.0) for cpus in (SHORT_CPUS, LARGE_CPUS)], [1, 1]
            )
        with MachineUse(step) as use:
            times, again = self._run(f"{workload}, {kind}", kind, jobs, counts)
        return PaperRunTimes(
            workload, kind, seed, scale.claimable(workload), tuple(times), step, tuple(use.shares), again
        )

    def provisioning_of_full(self, samples: int) -> list[float]:
        """Seconds that a full clone takes, one at a time. The first one is not counted: it fills the page cache."""
        job = PaperJob(1, 0.0, "cg", SHORT_CPUS, 0.0)
        every = [self._run("full clone alone", FULL, [job], [1])[0][0] for _ in range(samples + 1)]
        return [one.provisioning for one in every[1:]]

    def costs(self) -> dict[str, float]:
        """What a round of each program costs in a VM that has the machine alone. A job of each size that is not counted
        builds its template."""
        found, real = dict[str, float](), os.cpu_count() or 1
        for cpus in (SHORT_CPUS, LARGE_CPUS):
            for program in (PROGRAMS[0], *PROGRAMS):
                job = PaperJob(1, 0.0, program, cpus, 0.0)
                ((times,), _) = self._run(f"{cost_name(program, cpus)} alone", INSTANT, [job], [1])
                found[cost_name(program, cpus)] = times.computed * min(cpus, real)
        return found

    def _run(
        self, name: str, kind: str, jobs: Sequence[PaperJob], counts: Sequence[int]
    ) -> tuple[list[PaperJobTimes], int]:
        """The times of the jobs, and the number of attempts beyond one for each."""
        submitted: dict[str, float] = {}
        with TaskReports(self._lab.settings.network.gateway) as reports:
            began = time.monotonic()
            self._progress(name, 0, len(jobs), 0.0)  # else the run before this one would be shown until a job has ended
            for job, count in zip(jobs, counts, strict=True):
                time.sleep(max(0.0, began + job.at - time.monotonic()))
                at = time.monotonic()
                submitted[self._submit(kind, job, count, reports.port)] = at
            missing = reports.wait(
                list(submitted),
                PATIENCE + max(job.seconds for job in jobs),
                lambda done: self._progress(name, done, len(jobs), time.monotonic() - began),
                self._lab.settings.socket.exists,
            )
        if missing:
            raise Broken(not_started(self._client, JOB_KINDS[kind], missing), hint="see the lab's log/controller.log")
        if JOB_KINDS[kind].vm:
            until_no_job_is_left(self._client)
        took = {which: self._computed(which) for which in submitted}  # says more of a failure than Slurm does
        check_completed(self._lab, submitted)
        first, attempts = min(submitted.values()), 0
        times = []
        for (which, at), job, count in zip(submitted.items(), jobs, counts, strict=True):
            timelines = decode(list[TimelineView], self._client.timeline(which)) if JOB_KINDS[kind].vm else []
            attempts += max(1, len(timelines))
            moments = (at, reports.began[which], reports.ended[which])
            times.append(_times(job, count, took[which], timelines, moments, first))
        return times, attempts - len(jobs)

    def _submit(self, kind: str, job: PaperJob, count: int, port: int) -> str:
        vm = JOB_KINDS[kind].vm
        script = _SCRIPT.format(
            host=self._lab.settings.network.gateway,
            port=port,
            here=self._here,
            job=job,
            rounds=count,
            root="" if vm else self._root,
        )
        return self._lab.submit(
            script,
            "--output=/dev/null",
            f"--cpus-per-task={job.cpus}",
            f"--mem={job.memory if vm else 10}",
            *JOB_KINDS[kind].options,
        )

    def _computed(self, which: str) -> float:
        said = self._here / f"said.{which}"
        took = computed(said.read_text(errors="replace"))
        said.unlink()
        return took


def _times(
    job: PaperJob,
    count: int,
    took: float,
    timelines: Sequence[TimelineView],
    moments: tuple[float, float, float],
    first: float,
) -> PaperJobTimes:
    """The times of a job that was submitted, began and ended at these moments. `first` is that of the first one."""
    submitted, began, ended = moments
    clone, overheads, split = 0.0, without_vm(submitted, began), True
    if timelines:
        clone, overheads, split = parts(timelines[-1].phases, submitted, began)
    return PaperJobTimes(
        job.number, job.program, job.cpus, job.seconds, count, submitted - first, began - first, ended - first, took,
        clone, overheads, split,
    )  # fmt: skip
