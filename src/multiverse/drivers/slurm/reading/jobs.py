"""Converts tables of squeue to jobs, and converts only what changed.

A row that was in the table before gives the same `Job` object. That makes a large table cheap here, and the comparison
of two observations cheap in the planner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from multiverse.core.model import Job
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.reading.accounting_limits import AccountingLimits, licences
from multiverse.drivers.slurm.reading.details import JobDetails
from multiverse.drivers.slurm.reading.parse import SiteNames
from multiverse.drivers.slurm.reading.table import JobColumns, Record


@dataclass(frozen=True, slots=True)
class _Basis:
    """What the conversion of every row depends on."""

    names: SiteNames
    structure: object


class JobRow:
    """One row and what it was converted to: `job` is right for `basis` until the Unix time `until`."""

    __slots__ = (
        "base",
        "basis",
        "details",
        "job",
        "needs_details",
        "needs_licences",
        "record",
        "until",
        "waits",
    )

    def __init__(self, record: Record, names: SiteNames) -> None:
        self.record = record
        self.details: JobDetails | None = None
        self.job: Job | None = None
        self.basis: _Basis | None = None
        self.until = 0.0
        array = record["array_job_id"]
        self.base = str(array or record["job_id"]), 0 if array else int(record["submit_time"] or 0)
        """The base id, and the submit time: those of the tasks of an array differ after one was requeued (0)."""
        self.waits = parse.is_waiting(record, names)
        incomplete = bool(record["array_job_id"]) or record["memory_is_ambiguous"]
        self.needs_details = incomplete and record["job_state"] == "PENDING"
        """Whether the table leaves out something of this job. It matters as long as the job waits, or a task of its
        array."""
        self.needs_licences = self.waits and bool(licences(record, names.licence))

    def complete(self, details: JobDetails) -> None:
        """Add the details that the table leaves out."""
        if details == self.details:
            return
        added: dict[str, int | None] = {"array_max_tasks": details.at_most}
        if self.record["memory_is_ambiguous"]:
            memory = self.record["memory_per_node"] or self.record["memory_per_cpu"]
            per_cpu = details.memory_per_cpu
            added |= {"memory_per_cpu": memory if per_cpu else None, "memory_per_node": None if per_cpu else memory}
        self.record = {**self.record, **added}
        self.details, self.basis = details, None


@dataclass(slots=True)
class JobTable:
    """The rows of the latest tables, and the jobs that they were converted to."""

    columns: JobColumns = field(default_factory=JobColumns)
    jobs: dict[str, Job] = field(default_factory=dict)
    """All jobs of Multiverse's partitions as of the latest whole table and the parts that were read since."""
    of_users: Counter[int] = field(default_factory=Counter)
    """How many rows each user had in the latest whole table, by uid."""
    _rows: dict[str, JobRow] = field(default_factory=dict)
    _basis: _Basis | None = None

    def read(self, output: str, names: SiteNames) -> dict[str, JobRow]:
        """The rows of Multiverse's partitions by their text. Raises `Unknown` for an output that is not a complete
        table."""
        rows, known = {}, self._rows
        for text in self.columns.rows(output):
            row = known.get(text)
            if row is None:
                record = self.columns.record(text)
                if not parse.ours([record], names):
                    continue
                row = JobRow(record, names)
            rows[text] = row
        return rows

    def convert(self, rows: Iterable[JobRow], names: SiteNames, limits: AccountingLimits, now: float) -> dict[str, Job]:
        """The jobs of the rows, by id; `now` is Unix time."""
        basis = _Basis(names, limits.structure)
        if self._basis == basis:
            basis = self._basis  # identity is enough to compare the rows' bases
        self._basis = basis
        return parse.newest(self._job(row, basis, limits, now) for row in rows)

    def _job(self, row: JobRow, basis: _Basis, limits: AccountingLimits, now: float) -> Job:
        if row.job is not None and row.basis is basis and now < row.until:
            return row.job
        (job,) = parse.expand(row.record, basis.names, now, limits.uses(row.record))
        before = self.jobs.get(job.ref.job_id)
        row.job = before if before == job else job
        row.basis, row.until = basis, parse.changes_at(row.record, basis.names, now)
        return row.job

    def keep_whole(self, rows: dict[str, JobRow], jobs: dict[str, Job]) -> None:
        """These are all rows and all jobs."""
        self._rows, self.jobs = rows, jobs
        self.of_users = Counter(job.uid for job in jobs.values())

    def keep_part(self, rows: dict[str, JobRow], jobs: dict[str, Job], gone: Collection[str]) -> None:
        """These rows and jobs are new or newer; the jobs `gone` are no more."""
        self._rows = {**self._rows, **rows}
        self.jobs = {job_id: job for job_id, job in self.jobs.items() if job_id not in gone} | jobs
