"""Reads jobs from squeue's table, and converts only the rows that changed.

squeue prints 15,000 jobs in a fifteenth of the time that it needs for their JSON, and asks slurmctld for one job or one
user if it is told to; the JSON of 22.05 is always that of the whole cluster (decision 26). With -r it prints a row for
each task of an array.

A user chooses some of the text: names of jobs and directories may contain any character but NUL. The cells of a row are
separated by a text that only this process knows, so that no job can pretend to have other cells. It is given to squeue
in the environment, which other users cannot read. The rows of unchanged jobs are equal from load to load, and give the
same `Job` objects. That makes a large table cheap here, and the comparison of two observations cheap in the planner.

The table leaves two things out. `scontrol show job` tells them, which asks slurmctld for one job or array: how many
tasks of an array may run at once, and in a few cases whether the requested memory is that of a CPU or of a node.
Nothing else is taken from this output: a user chooses a job's name, in which any text may stand. Both may be changed
while the job waits, and the table looks the same afterwards. multiverse.lua leaves a hint then that names the job.
Should that be lost, some jobs are read again with each whole table, in turn.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from multiverse.core.errors import Gone, Unknown
from multiverse.core.model.job import Job
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.reading.accounting_limits import MIB, AccountingLimits, licences, tres
from multiverse.drivers.slurm.reading.parse import Record, SiteNames
from multiverse.drivers.slurm.site.conf import NEVER, minutes_of

_CELL = "\x1f"  # after numbers and words of Slurm's own

# squeue's columns, by the key that the record has for each. The first ones are followed by _CELL.
_WORDS = {
    "id": "JobArrayID",
    "partition": "Partition",
    "job_state": "State",
    "restart_cnt": "RestartCnt",
    "submit_time": "SubmitTime",
    "end_time": "EndTime",
    "eligible_time": "EligibleTime",
    "user_id": "UserID",
    "priority": "PriorityLong",
    "exit_code": "exit_code",
    "het_job_id": "HetJobID",
    "node_count": "NumNodes",
    "cpus": "NumCPUs",
    "tasks": "NumTasks",
    "tasks_per_node": "NTPerNode",
    "cpus_per_task": "CPUsPerTask",
    "memory": "MinMemory",
    "minimum_cpus_per_node": "MinCPUs",
    "minimum_tmp_disk_per_node": "MinTmpDisk",
    "association_id": "AssocID",
    "core_spec": "CoreSpec",
    "profile": "Profile",
    "time_limit": "TimeLimit",
    "sockets_per_node": "Sockets",
    "tasks_per_socket": "NTPerSocket",
    "requeue": "Requeue",
    "batch_flag": "BatchFlag",
    "job_id": "JobID",  # of a task of an array that has a record of its own another number than its array
    "tres_req_str": "tres-alloc",  # of a waiting job: its request
}
_TEXTS = {
    "state_reason": "Reason",
    "features": "Feature",
    "dependency": "Dependency",
    "nodes": "NodeList",
    "batch_host": "BatchHost",
    "account": "Account",
    "qos": "QOS",
    "resv_name": "Reservation",
    "required_nodes": "ReqNodes",
    "tres_per_job": "tres-per-job",
    "tres_per_node": "tres-per-node",
    "tres_per_socket": "tres-per-socket",
    "tres_per_task": "tres-per-task",
    "cluster_features": "ClusterFeature",
    "prefer": "Prefer",
    "licenses": "Licenses",
    "container_id": "ContainerID",
    "comment": "Comment",
    "name": "Name",
    "current_working_directory": "WorkDir",
}
# Columns that tell whether a VM can serve a job of physical nodes: read only where a partition overflows into VMs.
_PHYSICAL = {
    "oversubscribe": "OverSubscribe",
    "reboot": "Reboot",
    "threads_per_core": "Threads",
    "tasks_per_core": "NTPerCore",
    "container": "Container",
    "network": "Network",
    "burst_buffer": "BurstBuffer",
}
_LATER = {"container_id", *_PHYSICAL}
"""Columns that a release may lack: it prints them empty, with an empty title. 22.05 lacks the first."""

_NOTHING = ("(null)", "N/A", "NotSet")
_FREE = {"name", "current_working_directory"}  # a user may choose any text, these words too

# Descriptions that squeue shows in place of the reason, if there is one. Both texts say that the gate's nodes,
# which are drained, are not available (node_scheduler.c, job_scheduler.c).
_DESCRIPTIONS = (
    ("ReqNodeNotAvail", "ReqNodeNotAvail"),
    ("Nodes required for job are DOWN, DRAINED", "Resources"),
)


class JobColumns:
    """The format and the reader of a table of jobs. `physical` adds the columns of jobs of physical nodes."""

    def __init__(self, secret: str | None = None, *, physical: bool = False) -> None:
        self._texts = _TEXTS | _PHYSICAL if physical else _TEXTS
        self._end = f"{_CELL}{secret or secrets.token_hex(6)}{_CELL}"
        words = [f"{column}:0{_CELL}" for column in _WORDS.values()]
        words[-1] = words[-1][: -len(_CELL)] + self._end
        # With the width 0 a column is printed in full.
        self.env = {
            "SQUEUE_FORMAT2": ",".join([*words, *(f"{column}:0{self._end}" for column in self._texts.values())])
        }

    def rows(self, output: str) -> list[str]:
        """The rows of a table. Raises `Unknown` if it is incomplete or a column has no title."""
        rows = output.split(self._end + "\n")
        if rows.pop() or not rows:
            raise Unknown("squeue's table is incomplete", hint="see whether squeue works on this machine")
        titles = self._cells(rows[0])
        missing = [key for key, title in titles.items() if not title and key not in _LATER]
        if missing:
            raise Unknown(f"squeue's table has no column {', '.join(missing)}", hint="report scontrol --version")
        return rows[1:]

    def record(self, row: str) -> Record:
        """A row with the keys and values of a job in the JSON of 22.05. Raises `Unknown` for a damaged row."""
        cells = self._cells(row)
        try:
            return _record({k: "" if text in _NOTHING and k not in _FREE else text for k, text in cells.items()})
        except ValueError as error:
            raise Unknown(f"cannot understand a row of squeue: {error}", hint="report scontrol --version") from error

    def _cells(self, row: str) -> dict[str, str]:
        first, *texts = row.split(self._end)
        words = first.split(_CELL)
        if len(words) != len(_WORDS) or len(texts) != len(self._texts):
            raise Unknown("a row of squeue's table is damaged", hint="see whether squeue works on this machine")
        return dict(zip((*_WORDS, *self._texts), (*words, *texts), strict=True))


def _record(cells: dict[str, str]) -> Record:
    base, task = cells.pop("id"), None
    if "_" in base:
        base, _, task = base.partition("_")
    nodes, cpus = _number(cells["node_count"]) or 1, _number(cells["cpus"]) or 1
    memory = int(_mib(cells.pop("memory")))
    per_cpu = is_per_cpu(memory, nodes, cpus, cells["tres_req_str"])
    threads = re.fullmatch(r"(\d+) Threads", cells["core_spec"])
    reason = cells.pop("state_reason")
    if cells["batch_host"] == "n/a":
        cells["batch_host"] = ""
    return {
        **cells,
        **{key: _number(cells[key]) for key in _NUMBERS},
        "job_id": int(base.partition("+")[0] if task is None else cells["job_id"]),
        "array_job_id": int(base) if task is not None else 0,
        "array_task_id": int(task) if task is not None else None,
        "time_limit": minutes_of(cells["time_limit"]),
        "end_time": NEVER if cells["end_time"] == "NONE" else _number(cells["end_time"]),
        "exit_code": _exit_status(cells["exit_code"]),
        "minimum_tmp_disk_per_node": int(_mib(cells["minimum_tmp_disk_per_node"])),
        "memory_per_node": None if per_cpu else memory,
        "memory_per_cpu": memory if per_cpu else None,
        # The total of the memory is the same for both, and a node may get more CPUs than the total says: also with
        # --overcommit and --ntasks-per-node.
        "memory_is_ambiguous": bool(memory) and nodes == cpus and _least_cpus(cells) > 1,
        "core_spec": None if threads else _number(cells["core_spec"]),
        "thread_spec": int(threads[1]) if threads else None,
        "state_reason": next((word for text, word in _DESCRIPTIONS if reason.startswith(text)), reason),
        "state_description": reason if " " in reason else "",
    }


_NUMBERS = (
    "restart_cnt",
    "submit_time",
    "eligible_time",
    "user_id",
    "priority",
    "het_job_id",
    "node_count",
    "cpus",
    "tasks",
    "tasks_per_node",
    "cpus_per_task",
    "minimum_cpus_per_node",
    "association_id",
    "requeue",
    "batch_flag",
)


def _least_cpus(cells: Mapping[str, str]) -> int:
    """The fewest CPUs of a node for the job, as far as the row tells."""
    return max(_number(cells[key]) or 1 for key in ("minimum_cpus_per_node", "tasks_per_node"))


def is_per_cpu(memory: int, nodes: int, cpus: int, requested: str) -> bool:
    """Whether the memory of a job is per CPU, not per node. squeue does not tell, but the job's total does
    (job_get_tres_mem in job_mgr.c)."""
    total = tres(requested).get("mem", 0)
    return bool(memory) and total == memory * cpus and total != memory * nodes


def _number(text: str) -> int | None:
    return int(text) if text else None


def _mib(text: str) -> float:
    return float(text[:-1]) * MIB[text[-1]] if text and not text[-1].isdigit() else float(text or 0)


def _exit_status(text: str) -> int:
    """The wait status: 22.05 prints it as it is, later releases as `CODE:SIGNAL`."""
    code, _, signal = text.partition(":")
    return int(code) << 8 | int(signal) if signal else int(code or 0)


_AT_ONCE = 4  # processes
_NEW = 200  # jobs that are read in one go for the first time; others follow with the next table
_AGAIN = 3  # jobs that were read before and are read again with a whole table: those that were read longest ago
_AGE = 1.0  # seconds for which a job that was read is not read again, unless a hint names it


@dataclass(frozen=True, slots=True)
class JobDetails:
    at_most: int = 0  # tasks of the array that may run at once; 0: no limit
    memory_per_cpu: bool = False


UNKNOWN_DETAILS = JobDetails(memory_per_cpu=True)
"""Assumed as long as the details of a job are unknown: the larger of the two requests."""


class DetailReader:
    """Reads details of jobs and arrays, by the base id, and remembers them."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: dict[tuple[str, int], tuple[JobDetails, float]] = {}

    def of(self, key: tuple[str, int]) -> JobDetails:
        """The details of a job by its base id and its submit time, or of an array by its id and 0."""
        return self._known[key][0] if key in self._known else UNKNOWN_DETAILS

    def keep(self, keys: Collection[tuple[str, int]]) -> None:
        self._known = {key: known for key, known in self._known.items() if key in keys}

    async def complete(self, keys: Collection[tuple[str, int]], named: Collection[tuple[str, int]] = ()) -> None:
        """Read the details of these that are unknown, and of known jobs that are `named`."""
        new = sorted(set(keys) - self._known.keys())[:_NEW]
        await self._read_all([*new, *sorted(set(named) & self._known.keys())])

    async def read_again(self) -> None:
        """Read the jobs again that were read longest ago."""
        before = time.monotonic() - _AGE
        old = sorted((at, key) for key, (_, at) in self._known.items() if at <= before)
        await self._read_all([key for _, key in old[:_AGAIN]])

    async def _read_all(self, keys: Collection[tuple[str, int]]) -> None:
        turn = asyncio.Semaphore(_AT_ONCE)

        async def read(key: tuple[str, int]) -> None:
            async with turn:
                began = time.monotonic()
                self._known[key] = await self._read(key[0]), began

        await asyncio.gather(*map(read, keys))

    async def _read(self, base: str) -> JobDetails:
        try:
            text = await self._commands.run("scontrol", "-o", "show", "job", base)
        except Gone:
            return UNKNOWN_DETAILS
        return parse_details(text)


def parse_details(text: str) -> JobDetails:
    """The details in the lines of `scontrol -o show job`, one for each record of an array."""
    throttles = re.findall(r"^JobId=\d+ ArrayJobId=\d+ ArrayTaskId=\S+ ArrayTaskThrottle=(\d+) ", text, re.MULTILINE)
    return JobDetails(max(map(int, throttles), default=0), re.search(r" MinMemoryCPU=\S+ ", text) is not None)


@dataclass(frozen=True, slots=True)
class _Basis:
    """Values that the conversion of every row depends on."""

    names: SiteNames
    structure: object


class JobRow:
    """A row and its job, which is right for `basis` until the Unix time `until`."""

    __slots__ = ("base", "basis", "details", "job", "needs_details", "needs_licences", "record", "until", "waits")

    def __init__(self, record: Record, names: SiteNames) -> None:
        self.record = record
        self.details: JobDetails | None = None
        self.job: Job | None = None
        self.basis: _Basis | None = None
        self.until = 0.0
        array = record["array_job_id"]
        # The base id, and the submit time; 0 for an array, whose tasks' submit times differ after one was requeued.
        self.base = str(array or record["job_id"]), 0 if array else int(record["submit_time"] or 0)
        self.waits = parse.is_waiting(record, names)
        incomplete = bool(record["array_job_id"]) or record["memory_is_ambiguous"]
        # What the table leaves out matters as long as the job, or a task of its array, waits.
        self.needs_details = incomplete and record["job_state"] == "PENDING"
        self.needs_licences = self.waits and bool(licences(record, names.licence))

    def complete(self, details: JobDetails) -> None:
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
    # All jobs of Multiverse's partitions as of the latest whole table and the parts that were read since.
    jobs: dict[str, Job] = field(default_factory=dict)
    of_users: Counter[int] = field(default_factory=Counter)  # rows of each user (uid) in the latest whole table
    _rows: dict[str, JobRow] = field(default_factory=dict)
    _basis: _Basis | None = None

    def read(self, output: str, names: SiteNames) -> dict[str, JobRow]:
        """The rows of Multiverse's partitions by their text. Raises `Unknown` for an incomplete table."""
        rows, known = {}, self._rows
        for text in self.columns.rows(output):
            row = known.get(text)
            if row is None:
                record = self.columns.record(text)
                if not parse.is_ours(record, names):
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
        job = parse.job(row.record, basis.names, now, limits.uses(row.record))
        before = self.jobs.get(job.ref.job_id)
        row.job = before if before == job else job
        row.basis, row.until = basis, parse.changes_at(row.record, basis.names, now)
        return row.job

    def keep_whole(self, rows: dict[str, JobRow], jobs: dict[str, Job]) -> None:
        self._rows, self.jobs = rows, jobs
        self.of_users = Counter(job.uid for job in jobs.values())

    def keep_part(self, rows: dict[str, JobRow], jobs: dict[str, Job], gone: Collection[str]) -> None:
        """These rows and jobs are new or newer; the jobs `gone` do not exist any more."""
        self._rows = {**self._rows, **rows}
        self.jobs = {job_id: job for job_id, job in self.jobs.items() if job_id not in gone} | jobs
