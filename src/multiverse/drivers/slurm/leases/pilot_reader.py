"""Reads the pilots of our site's leases, and what may be leased, with each observation of the whole scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress

from multiverse.config import LEASE_RESERVE, Settings
from multiverse.core.errors import Gone, Refused
from multiverse.core.model import LeaseSpec, PilotSeen, Size, lease_name
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.leases.lease_jobs import user_of
from multiverse.drivers.slurm.leases.pilots import (
    NODE_FORMAT,
    PilotColumns,
    PilotHistory,
    PilotRow,
    boot_time,
    cleaned,
    leasable,
    read_nodes,
)

_INVALID_USER = "Invalid user"  # squeue 22.05 shows no job then, and exits with 0


class PilotReader:
    def __init__(
        self, settings: Settings, site: str, commands: SlurmCommands, leased: Collection[LeaseSpec] = ()
    ) -> None:
        """`leased` are the leases of an earlier run: the settings need not name their partitions and users any more."""
        self._commands = commands
        lent = [(one.partition, one.user) for one in settings.lease] + [(one.partition, one.user) for one in leased]
        self._users = {user for _, user in lent}
        self._partitions = ",".join(dict.fromkeys(partition for partition, _ in lent))
        self._prefix = lease_name(site, 1)[:-1]
        self._columns, self._history = PilotColumns(), PilotHistory()

    async def read(self) -> tuple[Mapping[str, PilotSeen], Mapping[str, Size]]:
        """The pilots by the scheduler's id, and what a whole node of each partition has at least. Costs nothing where
        nothing is leased. Raises as `SlurmCommands.run`, and `Unknown` for what cannot be understood."""
        if not self._partitions:
            return {}, {}
        users = set(map(user_of, self._users))
        tables = await asyncio.gather(*map(self._pilots, sorted(users)))
        rows = [row for table in tables for row in table]
        # Nodes second: a pilot that has ended is judged by what its node was at that time, or later.
        nodes = read_nodes(await self._commands.run("sinfo", "-N", "-p", self._partitions, "-O", NODE_FORMAT))
        pilots = self._history.view(rows, nodes)
        return cleaned(pilots, await self._rebooted(rows)), leasable(nodes, LEASE_RESERVE)

    async def _pilots(self, user: str) -> list[PilotRow]:
        command = ("squeue", "-a", "-t", "all", "-u", user)
        try:
            output = await self._commands.run(
                *command, env={"SQUEUE_FORMAT2": self._columns.format}, refused=_INVALID_USER
            )
        except Refused:
            return []
        return [row for row in self._columns.pilots(output) if row.name.startswith(self._prefix)]

    async def _rebooted(self, rows: Collection[PilotRow]) -> set[str]:
        """The pilots whose nodes have booted since they ended, of those that may have left something there."""
        found = set()
        for row in self._history.unclean(rows):
            with suppress(Gone, Refused):
                shown = await self._commands.run("scontrol", "show", "node", row.node, "-o")
                if boot_time(shown) > row.ends:
                    found.add(row.id)
        return found
