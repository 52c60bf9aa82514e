"""Jobs as they are at the moment of a change, and AdminComment: what a job's user reads there of Multiverse.

Slurm keeps one AdminComment for each of its job records. An array is one record until a task is changed or started
alone: the waiting tasks that were not yet separated share the record `ID_[…]`. An update of `ID_[…]` with all tasks of
the record changes the record as a whole; an update of some of its tasks makes a record of each of these first, and an
update of `ID` changes all tasks of the array, those that run too (slurmctld/job_mgr.c, `update_job_str`, the same from
22.05 to 25.11). Tasks only ever leave the shared record, so the tasks that were read a moment before are still all of
it, and the record is never split by an update of them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf

from ClusterShell.RangeSet import RangeSet

from multiverse.config import SlurmSettings
from multiverse.core.errors import Gone, Stale
from multiverse.core.model.job import JobRef
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.site import gate
from multiverse.drivers.slurm.site.conf import minutes_of

_LONGEST_LINE = 500  # characters of a line for a user
_LONGEST_COMMENT = 30_000  # characters; a longer comment, which is not ours, is left as it is
_LONGEST_TASKS = 100_000  # characters of a list of tasks; Linux lets one argument of a command have 131,071 bytes
_OURS = re.compile(r"\[multiverse: [^\[\]]*\]")
_NO_COMMENT = ("", "(null)", "N/A")
_BRACKETS = str.maketrans("[]", "()")


# --- the text --------------------------------------------------------------------------------------


def plain_line(text: str) -> str:
    """One printable line without double quotes: scontrol would take them as a part of the value."""
    plain = "".join(c if c.isprintable() else " " for c in text.replace('"', "'"))
    return " ".join(plain.split())[:_LONGEST_LINE]


def compose(present: str, text: str) -> str:
    """The AdminComment after `present`, if the job's user is told `text`. Our part is `[multiverse: TEXT]`, in place of
    our earlier part or after the text of others, which stays. A comment that is very long or not UTF-8 is returned as
    it is: it could not be written again unchanged."""
    ours = our_part(text)
    if "\ufffd" in present or len(present) > _LONGEST_COMMENT:
        return present
    if _OURS.search(present) is None:
        return f"{present} {ours}" if present else ours
    return _OURS.sub(lambda _: ours, present, count=1)


def our_part(text: str) -> str:
    """Our part of an AdminComment, if the job's user is told `text`."""
    return f"[multiverse: {plain_line(text).translate(_BRACKETS)}]"


def survives_sacctmgr(present: str) -> bool:
    """Whether the text of others in an AdminComment stays as it is if sacctmgr writes the comment: sacctmgr of 22.05
    turns letters into small ones, and quotes into backquotes (`strip_quotes` in slurm_protocol_api.c)."""
    others = _OURS.sub("", present, count=1)
    return others == others.lower() and not {'"', "'"} & set(others)


# --- the records of waiting jobs -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommentColumn:
    """squeue's column of AdminComments in full, as the last column. Users cannot guess the text that ends it."""

    end: str

    @classmethod
    def new(cls) -> CommentColumn:
        return cls(f";{secrets.token_hex(8)}")

    @property
    def format(self) -> str:
        return f"admin_comment:0{self.end}"  # of width 0: not padded and not cut, in 22.05 to 25.11

    def rows(self, text: str) -> list[str]:
        return [row.removeprefix("\n") for row in text.split(self.end)[:-1]]


def comment_of(cell: str) -> str:
    return "" if cell in _NO_COMMENT else cell


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """A pending record of slurmctld."""

    base: str
    tasks: tuple[int, ...]  # that share the record; empty: no array
    submitted: int
    restarts: int
    at_gate: bool
    held: bool  # also by Slurm itself
    comment: str

    @property
    def address(self) -> str:
        """The name of the whole record for scontrol."""
        return f"{self.base}_[{ranges(self.tasks)}]" if self.tasks else self.base

    def is_run(self, job: JobRef) -> bool:
        """Whether this run of a job is the record, or one of its tasks."""
        base, _, task = job.job_id.partition("_")
        mine = int(task) in self.tasks if task else not self.tasks
        return base == self.base and mine and (self.submitted, self.restarts) == (job.submitted, job.restarts)


# These columns have no fixed width, and hold no text of users and no space.
_WAITING_COLUMNS = ("JobID", "ArrayJobID", "ArrayTaskID", "Partition", "RestartCnt", "SubmitTime", "PriorityLong")


async def waiting_records(
    commands: SlurmCommands, bases: Collection[str], partition: str, gate_feature: str
) -> list[WaitingRecord]:
    """The pending records of jobs and arrays with these ids. For several ids slurmctld sends all jobs, and squeue
    chooses.

    squeue shows a row for each task (-r): otherwise it shows tasks with records of their own as if they shared the
    record of their array. Tasks of one record have the same JobID."""
    column = CommentColumn.new()
    columns = ",".join((*(f"{name}:0 " for name in _WAITING_COLUMNS), f"Feature:0{column.end}", column.format))
    listing = ("squeue", "-h", "-a", "-r", "-t", "PENDING", "-j", ",".join(sorted(bases)), "-O", columns)
    try:
        text = await commands.run(*listing)
    except Gone:  # the only job that was asked for
        return []
    # A long array with a long comment is megabytes of text.
    return await asyncio.to_thread(_records, column.rows(text), partition, gate_feature)


def _records(cells: Sequence[str], partition: str, gate_feature: str) -> list[WaitingRecord]:
    """`cells` has two items for each task: the first columns with its features, and its comment."""
    tasks: dict[str, list[int]] = {}
    found: dict[str, WaitingRecord] = {}
    for head, comment in zip(cells[::2], cells[1::2], strict=True):
        job_id, base, task, its_partition, restarts, submitted, priority, words = head.split(" ", len(_WAITING_COLUMNS))
        tasks.setdefault(job_id, []).extend([int(task)] if task.isdigit() else [])
        if job_id not in found:
            _, pinned = parse.features(words, gate_feature)
            found[job_id] = WaitingRecord(
                base=base,
                tasks=(),
                submitted=int(submitted),
                restarts=int(restarts),
                at_gate=partition in its_partition.split(",") and pinned is None,
                held=priority == "0",
                comment=comment_of(comment),
            )
    return [replace(record, tasks=tuple(tasks[job_id])) for job_id, record in found.items()]


def ranges(tasks: Iterable[int]) -> str:
    """`1,2,3,7` as `1-3,7`: scontrol understands no steps."""
    return str(RangeSet.fromlist(map(str, tasks)))


def updates(records: Sequence[WaitingRecord], jobs: Iterable[JobRef], text: str) -> Iterator[tuple[str, list[str]]]:
    """The comments that tell the users of these jobs `text`, each with the addresses of its records. A task stands for
    all records of its array that wait at the gate. Held records, and records that have the text already, are left
    alone."""
    wanted = {job.job_id.partition("_")[0] for job in jobs if any(one.is_run(job) and one.at_gate for one in records)}
    found: dict[str, list[str]] = {}
    for record in records:
        new = compose(record.comment, text)
        if record.base not in wanted or not record.at_gate or record.held or new == record.comment:
            continue
        if len(address := record.address) <= _LONGEST_TASKS:
            found.setdefault(new, []).append(address)
    yield from found.items()


# --- turns -----------------------------------------------------------------------------------------


class CommentTurns:
    """Keeps explanations apart from changes of the same job or array: an explanation must not overwrite the text of a
    pin that came after its records were read. Changes do not exclude each other."""

    def __init__(self) -> None:
        self._changing: Counter[str] = Counter()
        self._explaining: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def changing(self, job: JobRef) -> AsyncIterator[None]:
        """A change of a job. Waits while the job, or its array, is being explained."""
        base = job.job_id.partition("_")[0]
        while (busy := self._explaining.get(base)) is not None:
            await busy.wait()
        self._changing[base] += 1
        try:
            yield
        finally:
            self._changing[base] -= 1
            if not self._changing[base]:
                del self._changing[base]

    @asynccontextmanager
    async def explaining(self, jobs: Iterable[JobRef]) -> AsyncIterator[list[JobRef]]:
        """An explanation of waiting jobs. Gives the jobs that are not being changed."""
        jobs = list(jobs)
        bases = {job.job_id.partition("_")[0] for job in jobs}
        while busy := next((self._explaining[base] for base in sorted(bases) if base in self._explaining), None):
            await busy.wait()
        bases = {base for base in bases if not self._changing[base]}
        event = asyncio.Event()
        self._explaining.update(dict.fromkeys(bases, event))
        try:
            yield [job for job in jobs if job.job_id.partition("_")[0] in bases]
        finally:
            for base in bases:
                del self._explaining[base]
            event.set()


# squeue's columns have a fixed width, so a user's text (a list of features) is never taken for another field. This form
# asks slurmctld for one job; the JSON of 22.05 always contains all jobs.
_COLUMNS = (
    ("JobArrayID", 40),
    ("JobID", 24),
    ("State", 16),
    ("Partition", 256),
    ("Feature", 2048),
    ("RestartCnt", 12),
    ("SubmitTime", 24),
    ("StartTime", 24),
    ("PriorityLong", 24),
    ("Nice", 24),
    ("BatchFlag", 8),
    ("TimeLimit", 24),
    ("NodeList", 1024),
    ("Licenses", 1024),
    ("Reason", 512),
)
_FORMAT = ",".join(f"{name}:{width}" for name, width in _COLUMNS)


@dataclass(frozen=True, slots=True)
class CurrentJob:
    """The state of a job at this moment."""

    state: str
    partition: str
    own: tuple[str, ...]  # the features that its user asked for
    pinned: str | None
    at_gate: bool  # whether it has the gate's feature
    priority: int
    reason: str
    requeued: bool  # the run that the caller means is completing, and the job will be queued again
    comment: str  # AdminComment
    record: str = ""  # the id of its record: the only one that some commands know of a task of an array
    licences: tuple[str, ...] = ()  # that its user asked for
    licensed: bool = False  # whether it has the gate's licence
    nice: int = 0
    batch: bool = True
    takes: float = inf  # minutes of a run at most, by its time limit
    gate_nodes: tuple[str, ...] = ()  # nodes of the gate that it was given, because it got past the licence
    origin: str = ""  # the partition that it was moved from, by its features

    @property
    def pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def active(self) -> bool:
        return self.state in ("RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "RESIZING")

    @property
    def ended(self) -> bool:
        return not self.pending and not self.active and self.state != "COMPLETING"

    @property
    def held_by_slurm(self) -> bool:
        return self.priority == 0 and parse.slurms_hold(self.reason)

    def check_pending(self, job: JobRef) -> None:
        """Raise `Stale` if the job, whose state this is, does not wait any more."""
        if not self.pending:
            raise Stale(f"job {job.job_id} is {self.state.lower()}")


async def reread(commands: SlurmCommands, job: JobRef, slurm: SlurmSettings) -> CurrentJob:
    """The job's current state. `Gone` if there is no such job, `Stale` if it is another run, or another job."""
    column = CommentColumn.new()
    columns = f"{_FORMAT},{column.format}"
    text = await commands.run("squeue", "-h", "-a", "-r", "-t", "all", "-j", job.job_id, "-O", columns)
    rows = [row for row in map(_cells, column.rows(text)) if row["JobArrayID"] == job.job_id]
    if not rows:
        raise Gone(f"Slurm has no job {job.job_id}")
    row = max(rows, key=lambda row: int(row["SubmitTime"]))
    restarts, submitted = int(row["RestartCnt"]), int(row["SubmitTime"])
    requeued = row["State"] == "COMPLETING" and restarts == job.restarts + 1 and submitted == job.submitted
    if not requeued and (submitted, restarts) != (job.submitted, job.restarts):
        raise Stale(
            f"job {job.job_id} has changed: submitted {submitted}, restarts {restarts}; "
            f"expected {job.submitted}, {job.restarts}"
        )
    own, pinned = parse.features(row["Feature"], slurm.gate_feature)
    nodes = parse.hosts(row["NodeList"])
    return CurrentJob(
        state=row["State"],
        partition=row["Partition"],
        own=own,
        pinned=pinned,
        at_gate=slurm.gate_feature in row["Feature"].replace(",", "&").split("&"),
        priority=int(row["PriorityLong"] or 0),
        reason=row["Reason"],
        requeued=requeued,
        comment=comment_of(row["comment"]),
        record=row["JobID"],
        licences=gate.own_licences(row["Licenses"], slurm.licence),
        licensed=gate.has_licence(row["Licenses"], slurm.licence),
        nice=int(row["Nice"] or 0),
        batch=row["BatchFlag"] != "0",
        takes=inf if (minutes := minutes_of(row["TimeLimit"])) is None else minutes,
        gate_nodes=nodes if gate.on_gate(nodes) else (),
        origin=parse.moved_from(row["Feature"]),
    )


def _cells(line: str) -> dict[str, str]:
    cells, at = {}, 0
    for name, width in _COLUMNS:
        cells[name] = line[at : at + width].strip()
        at += width
    return cells | {"comment": line[at:]}
