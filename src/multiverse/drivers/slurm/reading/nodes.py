"""Reads the nodes of our site with sinfo.

sinfo groups nodes with equal cells in one row, so a large cluster of bare-metal nodes is a few rows.
"""

from __future__ import annotations

from multiverse.core.errors import Unknown
from multiverse.core.model import Node, vm_prefix
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse

_CELL = "\x1f"
_COLUMNS = ("NodeList", "StateComplete", "features_act", "Reason")
FORMAT = ",".join(f"{column}:0{_CELL}" for column in _COLUMNS)
"""With the width 0 a column is printed in full."""


class NodeTable:
    """The nodes of the latest tables. A node that did not change stays the same object."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._rows: dict[str, tuple[Node, ...]] = {}

    def read(self, output: str, site: str) -> dict[str, Node]:
        """The dynamic nodes of the site, by name. Raises `Unknown` for an output that is not a complete table."""
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


async def reached_nodes(commands: SlurmCommands, site: str) -> list[str]:
    """The nodes of the site that slurmctld reaches, by name. Raises as `SlurmCommands.run`."""
    found = NodeTable().read(await commands.run("sinfo", "-a", "-O", FORMAT), site)
    return [name for name, node in found.items() if node.answers]


def _cells(row: str) -> list[str]:
    cells = row.split(_CELL)
    if len(cells) != len(_COLUMNS):
        raise Unknown("a row of sinfo's table is damaged", hint="see whether sinfo works on this machine")
    return cells
