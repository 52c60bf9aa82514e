"""Deletes nodes in batches, because each deletion takes slurmctld's write locks, for one node or many."""

from __future__ import annotations

import asyncio

from multiverse.core.errors import Gone, Refused
from multiverse.drivers.slurm import parse
from multiverse.drivers.slurm.command import SlurmCommands


class NodeDeleter:
    """Nodes whose deletion is requested while a deletion runs are deleted together in the next one."""

    def __init__(self, commands: SlurmCommands) -> None:
        self._commands = commands
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._lock = asyncio.Lock()

    async def delete(self, node: str) -> None:
        """Return when Slurm has deleted the node. Raises the errors of `Scheduler.delete_node`."""
        verdict = self._waiting.setdefault(node, asyncio.get_running_loop().create_future())
        async with self._lock:
            batch, self._waiting = self._waiting, {}
            try:
                await self._delete_all(batch)
            finally:
                # After a cancellation: nodes without an answer go into the next batch. Deleting twice is harmless.
                self._waiting = {n: f for n, f in batch.items() if not f.done()} | self._waiting
        await asyncio.shield(verdict)  # other callers may wait for the same node

    async def _delete_all(self, batch: dict[str, asyncio.Future[None]]) -> None:
        # Slurm refuses to delete a busy node, but not a DOWN one whose job is completing: slurmctld 22.05 crashes then
        # (decision 7).
        text = await self._commands.run("squeue", "-h", "-a", "-t", "RUNNING,SUSPENDED,COMPLETING", "-o", "%N")
        busy = {node for line in text.splitlines() for node in parse.hosts(line.strip())}
        for node in [node for node in batch if node in busy]:
            verdict = batch.pop(node)
            verdict.set_exception(Refused(f"a job is on node {node}", hint="wait until it has left"))
            verdict.exception()
        if len(batch) > 1:
            try:
                await self._commands.run("scontrol", "delete", f"NodeName={','.join(batch)}")
            except (Gone, Refused):
                pass  # one node makes Slurm refuse all of them: delete them one by one
            else:
                for verdict in batch.values():
                    verdict.set_result(None)
                return
        for node, verdict in batch.items():
            try:
                await self._commands.run("scontrol", "delete", f"NodeName={node}")
            except Gone:
                verdict.set_result(None)
            except Exception as error:
                verdict.set_exception(error)
                verdict.exception()  # marks it as retrieved: perhaps no caller waits any more
            else:
                verdict.set_result(None)
