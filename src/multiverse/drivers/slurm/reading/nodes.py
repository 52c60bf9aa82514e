"""Reads the nodes of our site with sinfo, and what slurmctld says of itself: reservations, backfill, its release.

sinfo groups nodes with equal cells in one row, so a large cluster of bare-metal nodes is a few rows.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from multiverse.core.errors import Unknown
from multiverse.core.model.identity import vm_prefix
from multiverse.core.model.job import Maintenance, Node, NodeReservation
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.site.requirements import Version

_CELL = "\x1f"
_COLUMNS = ("NodeList", "StateComplete", "features_act", "Reason")
NODE_FORMAT = ",".join(f"{column}:0{_CELL}" for column in _COLUMNS)  # with the width 0 a column is printed in full


class NodeTable:
    """The nodes of the latest tables. A node that did not change stays the same object."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._rows: dict[str, tuple[Node, ...]] = {}

    def read(self, output: str, site: str) -> dict[str, Node]:
        """The dynamic nodes of the site, by name. Raises `Unknown` for an incomplete table."""
        rows = output.split(_CELL + "\n")
        if rows.pop() or not rows or not all(_cells(rows[0])):
            raise Unknown("sinfo's table is incomplete", hint="see whether sinfo works on this machine")
        # A row of one node is not kept when others are read; it costs little to convert it again.
        parsed = {row: self._rows.get(row) or self._nodes(row, site) for row in rows[1:]}
        self._rows = parsed
        return {node.name: node for nodes in parsed.values() for node in nodes}

    def _nodes(self, row: str, site: str) -> tuple[Node, ...]:
        names, state, features, reason = _cells(row)
        if vm_prefix(site) not in names:
            return ()
        reason = "" if reason == "none" else reason
        found = (parse.node(name, state.split("+"), features, reason) for name in parse.hosts(names))
        ours = (node for node in found if node.name.startswith(vm_prefix(site)))
        return tuple(before if (before := self.nodes.get(node.name)) == node else node for node in ours)


async def first_listed(commands: SlurmCommands, nodes: Collection[str]) -> str:
    """That one of some nodes which slurmctld lists first. Raises as `SlurmCommands.run`. scontrol lists nodes in the
    order of slurmctld's table, in which a new node takes the first place that is free; sinfo sorts them."""
    lines = (await commands.run("scontrol", "show", "nodes", "--oneliner")).splitlines()
    names = (line.partition(" ")[0].removeprefix("NodeName=") for line in lines)
    return next((name for name in names if name in nodes), "")


async def reached_nodes(commands: SlurmCommands, site: str) -> list[str]:
    """The nodes of the site that slurmctld reaches, by name. Raises as `SlurmCommands.run`."""
    found = NodeTable().read(await commands.run("sinfo", "-a", "-O", NODE_FORMAT), site)
    return [name for name, node in found.items() if node.answers]


def _cells(row: str) -> list[str]:
    cells = row.split(_CELL)
    if len(cells) != len(_COLUMNS):
        raise Unknown("a row of sinfo's table is damaged", hint="see whether sinfo works on this machine")
    return cells


_TERM = 600.0  # seconds for which what slurmctld said of its release holds: it may be upgraded beside us
_CRASHES_BEFORE = (22, 5, 9)
_CRASHES = (23, 2, 0)
_BF_INTERVAL = 30  # seconds between two cycles of backfill, if slurm.conf does not say (slurm.conf(5))
_SHORTEST_PATIENCE = 600


@dataclass(frozen=True, slots=True)
class Deletions:
    """The behaviour of this slurmctld when nodes are deleted."""

    # Whether the next cycle of backfill crashes it after a node was deleted that backfill plans to use
    # (`_handle_planned` in backfill.c; mended in 22.05.9 and 23.02.1).
    planned_crash: bool = True
    patience: float = _SHORTEST_PATIENCE  # seconds after which backfill has surely begun a cycle


def deletions(config: str) -> Deletions:
    """Read the output of `scontrol show config`, which has slurmctld's own version. Raises `Unknown` if it has none."""
    found = re.search(r"^SLURM_VERSION\s*=\s*(\d+)\.(\d+)(?:\.(\d+))?", config, re.MULTILINE)
    if found is None:
        raise Unknown("slurmctld does not say which release it is", hint="see scontrol show config")
    release = Version(int(found[1]), int(found[2]), int(found[3] or 0))
    interval = re.search(r"^SchedulerParameters\s*=.*\bbf_interval=(\d+)", config, re.MULTILINE)
    seconds = int(interval[1]) if interval else _BF_INTERVAL
    return Deletions(release < _CRASHES_BEFORE or release == _CRASHES, max(_SHORTEST_PATIENCE, 10 * seconds))


class DeletionRules:
    """Asks slurmctld about itself, and remembers the answer for a while."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._known: tuple[float, Deletions] | None = None

    async def deletions(self) -> Deletions:
        if self._known is None or time.monotonic() - self._known[0] > _TERM:
            self._known = time.monotonic(), deletions(await self._commands.run("scontrol", "show", "config"))
        return self._known[1]


@dataclass(frozen=True, slots=True)
class BackfillState:
    """The state of slurmctld's backfill. Times are Unix times by slurmctld's clock, whole seconds."""

    now: int
    active: bool  # a cycle is under way
    began: int  # of the last cycle that had jobs to look at, the present one included


def backfill(sdiag: str) -> BackfillState:
    """Read the output of sdiag. Raises `Unknown` for any other text."""
    now = re.search(r"^sdiag output at .*\((\d+)\)$", sdiag, re.MULTILINE)
    title = re.search(r"^Backfilling stats(.*)$", sdiag, re.MULTILINE)
    began = re.search(r"Last cycle when: (?:N/A|.*\((\d+)\))$", sdiag, re.MULTILINE)
    if now is None or title is None or began is None:
        raise Unknown("cannot understand what sdiag prints", hint="report scontrol --version")
    return BackfillState(int(now[1]), "in the middle" in title[1], int(began[1] or 0))


def reservations(text: str, partitions: Collection[str]) -> tuple[NodeReservation, ...]:
    """The reservations that keep all nodes of VMs from jobs. Reads the output of `scontrol show reservation --oneliner`
    with times in Unix seconds; raises `Unknown` for any other text.

    A dynamic node joins a reservation with the flag ALL_NODES (Nodes=ALL), and one of all nodes of its partition. Nodes
    that a reservation names exist already: no VM of a waiting job is among them. A reservation of licences has no
    nodes. Jobs that do not ask for a MAGNETIC reservation may use it.
    """
    found = []
    for fields, flags, begins, ends in _reservations(text):
        everywhere = "ALL_NODES" in flags or ("PART_NODES" in flags and fields.get("PartitionName") in partitions)
        if everywhere and not flags & {"LICENSE_ONLY", "ANY_NODES", "MAGNETIC"}:
            found.append(NodeReservation(fields["ReservationName"], begins, ends))
    return tuple(found)


def maintenance(text: str) -> tuple[Maintenance, ...]:
    """The reservations of nodes for maintenance (flag MAINT), but for those of all nodes. Reads the same text."""
    return tuple(
        Maintenance(fields["ReservationName"], begins, ends, nodes)
        for fields, flags, begins, ends in _reservations(text)
        if "MAINT" in flags and "ALL_NODES" not in flags and (nodes := parse.hosts(fields.get("Nodes", "")))
    )


def _reservations(text: str) -> Iterator[tuple[dict[str, str], set[str], float, float]]:
    """The fields of each reservation, its flags, and its times."""
    lines = text.splitlines()
    if not all(line.startswith("ReservationName=") for line in lines) and not text.startswith("No reservations"):
        raise Unknown("cannot understand Slurm's reservations", hint="see scontrol show reservation")
    for line in lines if lines and lines[0].startswith("ReservationName=") else ():
        fields: dict[str, str] = {}
        for key, value in re.findall(r"(\w+)=(\S*)", line):
            fields.setdefault(key, value)
        times = [fields.get(key, "") for key in ("StartTime", "EndTime")]
        if not all(time.isdecimal() for time in times):
            raise Unknown("a reservation of Slurm has no times", hint="see scontrol show reservation")
        yield fields, set(fields.get("Flags", "").split(",")), float(times[0]), float(times[1])


STATE_FORMAT = "NodeList:0|,StateComplete:0|"


def node_words(sinfo: str) -> dict[str, frozenset[str]]:
    """The words of each node's state, by name, in rows of `STATE_FORMAT`. Raises `Unknown` for a damaged row."""
    found = {}
    for line in filter(None, sinfo.splitlines()):
        names, state, end = line.split("|") if line.count("|") == 2 else ("", "", "damaged")
        if end or not names or not state:
            raise Unknown("a row of sinfo's table is damaged", hint="see whether sinfo works on this machine")
        found.update(dict.fromkeys(parse.hosts(names), frozenset(state.upper().split("+"))))
    return found
