"""Collects what is known about each job at the end of a test: from sacct, the controller and the records."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from multiverse.api import JobView
from multiverse_lab.lab.session import LabSession
from multiverse_lab.soak.judge import OVER, JobFacts, JudgedAttempt
from multiverse_lab.soak.record import parse, whole
from multiverse_lab.soak.workload import SubmittedJob

ACCOUNTING_LIMIT = 90.0
"""Seconds after which Slurm's accounting must know the end of every job."""


@dataclass(frozen=True, slots=True)
class Account:
    """A job in Slurm's accounting. `ended` is Unix time."""

    job_id: str
    state: str
    exit_code: str
    ended: float | None


def read_accounts(text: str) -> dict[str, Account]:
    """Lines `JobID|JobName|State|ExitCode|End` by the name of the job, or of the array's task; the last one counts.
    The tasks of an array that never started share one line, whose name ends with `_`."""
    found: dict[str, Account] = {}
    for line in text.splitlines():
        job_id, name, state, code, end = line.split("|")
        task = re.search(r"_(\d*)", job_id)
        key = name + (f"_{task[1]}" if task else "")
        ended = float(end) if end.isdigit() else None
        found[key] = Account(job_id, state.partition(" ")[0], code, ended)
    return found


async def accounts(lab: LabSession) -> dict[str, Account]:
    """The jobs in Slurm's accounting, once all have ended there, or after `ACCOUNTING_LIMIT`. Jobs that were cancelled
    while they were held are not accounted for: of those slurmctld's memory of the last minutes is taken."""
    clock = replace(lab, env={**lab.env, "SLURM_TIME_FORMAT": "%s"})
    accounted = ("sacct", "-a", "-X", "-n", "-P", "-S", "2020-01-01", "-o", "JobID,JobName,State,ExitCode,End")
    remembered = ("squeue", "-a", "-h", "-t", "all", "-o", "%i|%j|%T||%e")
    deadline = time.monotonic() + ACCOUNTING_LIMIT
    found: dict[str, Account] = {}
    while True:
        try:
            answers = [await asyncio.to_thread(clock.run, *argv) for argv in (remembered, accounted)]
            found = read_accounts("".join(answer.stdout for answer in answers))
            # A job with a final state, but without an end, has the exit code 0:0: slurmctld has reported its start only
            # after its end, and slurmdbd does not have the report of the end yet.
            if all(one.state in OVER and one.ended is not None for one in found.values()):
                return found
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            return found
        await asyncio.sleep(1.0)


def names(job: SubmittedJob) -> list[str]:
    """The names under which the job, or each task of the array, writes its record."""
    return [job.name] if job.kind.tasks == 1 else [f"{job.name}_{task}" for task in range(1, job.kind.tasks + 1)]


def collect(
    jobs: Iterable[SubmittedJob],
    known: Mapping[str, Account],
    attempts: Iterable[JobView],
    records: Path,
    stopped: float | None,
) -> Iterator[JobFacts]:
    """The facts of each job and of each task."""
    by_id: dict[str, list[JobView]] = {}
    for view in sorted(attempts, key=lambda view: view.attempt):
        by_id.setdefault(view.job_id, []).append(view)
    for job in jobs:
        for name in names(job):
            account = known.get(name) or known.get(f"{job.name}_") or Account(job.job_id, "", "", None)
            task = name.removeprefix(job.name)
            job_id = f"{account.job_id.partition('_')[0]}{task}" if account.job_id else ""
            runs, damaged = parse(_lines(records / f"{name}.record"))
            output = _lines(records / f"{name}.out")
            yield JobFacts(
                name,
                job.kind,
                job.at,
                job_id,
                job.refusal,
                job.acted,
                account.state,
                account.exit_code,
                account.ended,
                tuple(JudgedAttempt(view.state, view.reason, view.vms) for view in by_id.get(job_id, ())),
                runs,
                damaged,
                whole(name) in output,
                stopped,
            )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
