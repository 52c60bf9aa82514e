"""Reads one job again just before it is changed, and checks that it is still the run that the caller means."""

from __future__ import annotations

from dataclasses import dataclass

from multiverse.config import SlurmSettings
from multiverse.core.errors import Gone, Stale
from multiverse.core.model import JobRef
from multiverse.drivers.slurm.acting.comment import CommentColumn, comment_of
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.site import gate

# squeue's columns have a fixed width, so a user's text (a list of features) is never taken for another field. This form
# asks slurmctld for one job; the JSON of 22.05 always contains all jobs.
_COLUMNS = (
    ("JobArrayID", 40),
    ("State", 16),
    ("Partition", 256),
    ("Feature", 2048),
    ("RestartCnt", 12),
    ("SubmitTime", 24),
    ("StartTime", 24),
    ("PriorityLong", 24),
    ("Nice", 24),
    ("BatchFlag", 8),
    ("NodeList", 1024),
    ("Licenses", 1024),
    ("Reason", 512),
)
_FORMAT = ",".join(f"{name}:{width}" for name, width in _COLUMNS)


@dataclass(frozen=True, slots=True)
class CurrentJob:
    """The state of a job at this moment. `requeued`: the run that the caller means is completing, and the job will be
    queued again. `comment` is its AdminComment, empty if it has none. `licences` are those of its user. `licensed`: it
    has the gate's licence. `gate_nodes` are the nodes of the gate that a job was given that got past the licence."""

    state: str
    partition: str
    own: tuple[str, ...]
    pinned: str | None
    at_gate: bool
    priority: int
    reason: str
    description: str
    requeued: bool
    comment: str
    licences: tuple[str, ...] = ()
    licensed: bool = False
    nice: int = 0
    batch: bool = True
    gate_nodes: tuple[str, ...] = ()
    origin: str = ""
    """The partition that it was moved from, by its features."""

    @property
    def pending(self) -> bool:
        return self.state == "PENDING"

    @property
    def active(self) -> bool:
        return self.state in ("RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "RESIZING")

    @property
    def ended(self) -> bool:
        return not self.pending and not self.active and self.state != "COMPLETING"


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
    own, pinned = parse.features("" if row["Feature"] == "(null)" else row["Feature"], slurm.gate_feature)
    nodes = parse.hosts(row["NodeList"])
    return CurrentJob(
        state=row["State"],
        partition=row["Partition"],
        own=own,
        pinned=pinned,
        at_gate=slurm.gate_feature in row["Feature"].replace(",", "&").split("&"),
        priority=int(row["PriorityLong"] or 0),
        reason=row["Reason"],
        description=row["Reason"],
        requeued=requeued,
        comment=comment_of(row["comment"]),
        licences=gate.own_licences(row["Licenses"], slurm.licence),
        licensed=gate.has_licence(row["Licenses"], slurm.licence),
        nice=int(row["Nice"] or 0),
        batch=row["BatchFlag"] != "0",
        gate_nodes=nodes if gate.on_gate(nodes) else (),
        origin=parse.moved_from(row["Feature"]),
    )


def _cells(line: str) -> dict[str, str]:
    cells, at = {}, 0
    for name, width in _COLUMNS:
        cells[name] = line[at : at + width].strip()
        at += width
    return cells | {"comment": line[at:]}
