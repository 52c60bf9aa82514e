"""Traces in the Standard Workload Format, version 2.2: one job a line, 18 numbers, -1 for what is not known (Chapin,
Cirne, Feitelson et al., "Benchmarks and Standards for the Evaluation of Parallel Job Schedulers", JSSPP 1999;
https://www.cs.huji.ac.il/labs/parallel/workload/swf.html)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiverse.core.errors import Refused

_FIELDS = 18
_SUBMITTED, _RUNS, _GIVEN, _ASKED, _LIMIT, _USER = 1, 3, 4, 7, 8, 11  # the fields that are used, counted from 0


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of a trace. Times in seconds: `submitted` since the trace begins, `runs` as long as it is let, `limit` as
    its user estimated."""

    number: int
    submitted: float
    runs: float
    processors: int
    limit: float
    user: int = 0

    @property
    def seconds(self) -> float:
        """How long it runs before it ends, or is ended by its limit."""
        return min(self.runs, self.limit)


def read(path: Path) -> list[TraceJob]:
    """The jobs of a trace in the order of their submission. Those that never ran, or whose processors are not known,
    are left out. A job without a limit gets its run time as one. Raises `Refused`, also if no job is left."""
    found = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"cannot read {path}: {error}", hint="give a trace in the Standard Workload Format") from error
    for at, line in enumerate(lines, 1):
        text = line.partition(";")[0].split()
        if not text:
            continue
        try:
            numbers = [float(word) for word in text]
        except ValueError:
            numbers = []
        if len(numbers) != _FIELDS or not all(map(math.isfinite, numbers)):
            raise Refused(f"{path}, line {at}: not {_FIELDS} numbers", hint="give a trace in that format, unpacked")
        processors = int(numbers[_ASKED] if numbers[_ASKED] > 0 else numbers[_GIVEN])
        runs, limit = numbers[_RUNS], numbers[_LIMIT]
        if runs > 0 and processors > 0:
            limit = limit if limit > 0 else runs
            user = max(0, int(numbers[_USER]))
            found.append(TraceJob(int(numbers[0]), numbers[_SUBMITTED], runs, processors, limit, user))
    if not found:
        raise Refused(f"{path} has no job that ran on a known number of processors", hint="give a trace with such jobs")
    return sorted(found, key=lambda job: (job.submitted, job.number))


def write(jobs: Iterable[TraceJob], path: Path, comments: Sequence[str] = ()) -> None:
    """Write a trace, with comments of the form `Name: text` at its head."""
    lines = [f"; {text}" for text in ("Version: 2.2", *comments)]
    for job in jobs:
        numbers = [-1] * _FIELDS
        numbers[0], numbers[_SUBMITTED], numbers[_RUNS] = job.number, round(job.submitted), round(job.runs)
        numbers[_GIVEN] = numbers[_ASKED] = job.processors
        numbers[_LIMIT], numbers[10] = round(job.limit), 1
        lines.append(" ".join(str(number) for number in numbers))
    path.write_text("\n".join(lines) + "\n")
