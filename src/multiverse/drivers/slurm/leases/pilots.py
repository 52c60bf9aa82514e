"""Reads pilots with squeue, and the nodes that they are leased from with sinfo.

slurmctld filters by one user, so the pilots of a user cost what that user's jobs cost. What a pilot's end says about
its node depends on whether that node was in reach all the time, and is remembered here from table to table.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from multiverse.core.errors import Unknown
from multiverse.core.model import PilotSeen, PilotState, Size
from multiverse.drivers.slurm.reading import parse

_CELL = "\x1f"
ENDING = "ending"
"""Follows the token in the comment of a pilot's job that was told to end: a job whose grace time runs (GraceTime) is
shown as running."""

_PILOT = ("JobID", "Name", "State", "Comment", "EndTime", "NodeList", "Reason", "RestartCnt", "Partition")
_NODE = ("NodeList", "Partition", "CPUs", "Memory", "StateComplete")
NODE_FORMAT = ",".join(f"{column}:0{_CELL}" for column in _NODE)

_ENDED = parse.ENDED_WORDS
_DOWN = frozenset(("DOWN", "POWERED_DOWN", "POWERING_DOWN", "FUTURE"))
_SILENT = frozenset(("*", "NOT_RESPONDING", "REBOOT_ISSUED", "UNKNOWN"))
"""Of a node that slurmctld does not reach at this moment, for example because slurmctld has just started."""


@dataclass(frozen=True, slots=True)
class PilotRow:
    """A pilot as squeue shows it. `ends` is Unix time: of one that has ended, when it did."""

    id: str
    name: str
    token: str
    state: PilotState
    word: str
    node: str
    ends: float
    reason: str
    restarts: int
    partition: str


class PilotColumns:
    """The format of a table of pilots, and the reader of its rows. A user can choose the name and the comment of jobs,
    but no text that looks like the end of a cell."""

    def __init__(self, secret: str | None = None) -> None:
        self._end = f"{_CELL}{secret or secrets.token_hex(6)}{_CELL}"
        self.format = ",".join(f"{column}:0{self._end}" for column in _PILOT)

    def pilots(self, output: str) -> list[PilotRow]:
        """All rows of jobs that are named as leases are. Raises `Unknown` for an output that is no complete table."""
        rows = output.split(self._end + "\n")
        if rows.pop() or not rows or rows[0].count(self._end) != len(_PILOT) - 1:
            raise Unknown("squeue's table of pilots is incomplete", hint="see whether squeue works on this machine")
        return [self._row(row) for row in rows[1:]]

    def _row(self, row: str) -> PilotRow:
        try:
            job, name, word, comment, end, node, reason, restarts, partition = row.split(self._end)
            token, _, told = comment.partition(" ")
            state = _state(word, told)
            ended = state is PilotState.ENDED
            ends = float(end) if end.isdigit() and (ended or state is not PilotState.PENDING) else inf
            node = "" if node in ("(null)", "") else node
            reason = "" if reason in ("None", "") else reason
            return PilotRow(job, name, token, state, word, node, ends, reason, int(restarts), partition)
        except ValueError as error:
            raise Unknown(f"cannot understand a row of squeue: {error}", hint="report scontrol --version") from error


def _state(word: str, told: str) -> PilotState:
    if word in _ENDED:
        return PilotState.ENDED
    if word in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        return PilotState.PENDING
    if word in ("COMPLETING", "SIGNALING", "STAGE_OUT") or told == ENDING:
        return PilotState.ENDING
    return PilotState.RUNNING


@dataclass(frozen=True, slots=True)
class PhysicalNode:
    """A node that leases are taken from. Memory in MiB. slurmctld ends the jobs of a node that is `down` by itself."""

    name: str
    partition: str
    size: Size
    answers: bool
    down: bool


def read_nodes(output: str) -> list[PhysicalNode]:
    """The rows of a table of nodes; a node of several partitions has several. Raises `Unknown` as above."""
    rows = output.split(_CELL + "\n")
    if rows.pop() or not rows or rows[0].count(_CELL) != len(_NODE) - 1:
        raise Unknown("sinfo's table is incomplete", hint="see whether sinfo works on this machine")
    found = []
    for row in rows[1:]:
        names, partition, cpus, memory, state = row.split(_CELL)
        words = {word.upper() for word in re.findall(r"\w+|\*", state)}
        size = Size(int(cpus.rstrip("+")), int(memory.rstrip("+")))
        down = bool(words & _DOWN)
        answers = not down and not words & _SILENT
        found += [PhysicalNode(name, partition.rstrip("*"), size, answers, down) for name in parse.hosts(names)]
    return found


def leasable(nodes: Collection[PhysicalNode], reserve: int) -> dict[str, Size]:
    """What a host made of a whole node has at least, by partition; `reserve` MiB of a node are not for VMs."""
    found: dict[str, Size] = {}
    for node in nodes:
        least = found.get(node.partition, node.size)
        found[node.partition] = Size(min(least.cpus, node.size.cpus), min(least.memory, node.size.memory))
    return {name: Size(size.cpus, max(0, size.memory - reserve)) for name, size in found.items()}


class PilotHistory:
    """Which pilots' nodes have been down while these were completing."""

    def __init__(self) -> None:
        self._clean: dict[str, bool] = {}  # of the latest tables, by id
        self._abandoned: set[str] = set()  # Slurm may have ended these without a word of their nodes
        self._first: dict[str, str] = {}  # the nodes of first runs: a job that is queued again shows none

    def view(self, rows: Collection[PilotRow], nodes: Collection[PhysicalNode]) -> dict[str, PilotSeen]:
        """The pilots by the scheduler's id. Of two rows with one id the one that has not ended counts."""
        by_name = {node.name: node for node in nodes}
        rows = sorted(rows, key=lambda row: row.state is not PilotState.ENDED)
        known = {row.id for row in rows}
        self._abandoned &= known
        self._first = {id_: node for id_, node in self._first.items() if id_ in known}
        self._clean = {row.id: self._judged(row, by_name) for row in rows}
        return {row.id: _seen(row, clean=self._clean[row.id]) for row in rows}

    def _judged(self, row: PilotRow, nodes: Mapping[str, PhysicalNode]) -> bool:
        """Whether nothing of the pilot can be left once it has ended. A job leaves COMPLETING when its node has said
        that all is over, or when the node is set DOWN; the latter shows in the node's state, or in the job's. A node
        that is set DOWN under a job that runs makes it NODE_FAIL. VMs are on the node of the first run alone."""
        if not row.restarts:
            self._first[row.id] = row.node
            if not row.node or row.word == "RUNNING":
                self._abandoned.discard(row.id)
                return True
        node = nodes.get(self._first.get(row.id, ""))
        if row.word == "NODE_FAIL" or (node is not None and node.down):
            self._abandoned.add(row.id)
        return row.id not in self._abandoned and node is not None and node.answers

    def unclean(self, rows: Collection[PilotRow]) -> Iterator[PilotRow]:
        """Those that have ended, and may have left something on the nodes that they show."""
        return (row for row in rows if row.state is PilotState.ENDED and not row.restarts and not self._clean[row.id])


def _seen(row: PilotRow, *, clean: bool) -> PilotSeen:
    ended = row.state is PilotState.ENDED
    reason = row.word.lower() if ended else row.reason
    if row.state is PilotState.ENDING and not reason:
        reason = "completing" if row.word == "COMPLETING" else "it was told to end"
    return PilotSeen(row.name, row.token, row.state, row.node, row.ends, reason, row.restarts, clean)


def boot_time(shown: str) -> float:
    """When a node has booted (Unix time), by `scontrol show node`; 0 if it does not say."""
    found = re.search(r"\bBootTime=(\d+)", shown)
    return float(found[1]) if found else 0.0


def cleaned(pilots: Mapping[str, PilotSeen], ids: Collection[str]) -> dict[str, PilotSeen]:
    """The same, with these pilots known to have left nothing."""
    return {job: replace(seen, clean=True) if job in ids else seen for job, seen in pilots.items()}
