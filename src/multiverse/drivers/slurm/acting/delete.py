"""Deletes nodes in batches, because each deletion takes slurmctld's write locks, for one node or many.

Slurm 22.05.8 crashes if a node is deleted that backfill plans to use: its plan keeps the node's number, and the next
cycle looks there. So on such releases a node is deleted only when surely none of backfill's plans has it (decision 85):

- No cycle is under way, and after that was seen the node is not shown as PLANNED. A cycle shows at its end which nodes
  it plans. A cycle that begins later plans none of ours, because no pending job is tied to them.
- Or a cycle has begun after the node was drained. At its beginning it forgets all earlier plans, and it plans no node
  that is drained. Such a node may be shown as PLANNED for ever after slurmctld was restarted.

A node that cannot be deleted yet is drained, and `NotYet` is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from multiverse.core.errors import Gone, MultiverseError, NotYet, Refused
from multiverse.drivers.slurm.command import SlurmCommands
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.reading.nodes import STATE_FORMAT, BackfillState, DeletionRules, backfill, node_words

_BUSY = frozenset(("ALLOCATED", "MIXED", "COMPLETING"))
_DRAIN = "State=DRAIN", "Reason=multiverse: its VM is gone"
_DOWN = "State=DOWN", "Reason=multiverse: its VM is gone"

Verdicts = dict[str, asyncio.Future[None]]


class NodeDeleter:
    """Nodes whose deletion is requested while a deletion runs are deleted together in the next one."""

    def __init__(self, commands: SlurmCommands, reserved: Callable[[str], bool] = lambda _: False) -> None:
        """`reserved` says whether a node was in a reservation as of the latest observation."""
        self._commands, self._rules = commands, DeletionRules(commands)
        self._reserved = reserved
        self._waiting: Verdicts = {}
        self._lock = asyncio.Lock()
        self._drained: dict[str, int] = {}  # nodes that are to be deleted, and since when they are surely drained

    async def delete(self, node: str) -> None:
        """Return when Slurm has deleted the node. Raises the errors of `Scheduler.delete_node`."""
        if self._reserved(node):
            raise NotYet(f"node {node} is in a reservation")
        verdict = self._waiting.setdefault(node, asyncio.get_running_loop().create_future())
        async with self._lock:
            batch, self._waiting = self._waiting, {}
            try:
                await self._delete_all(batch)
            finally:
                # After a cancellation: nodes without an answer go into the next batch. Deleting twice is harmless.
                self._waiting = {n: f for n, f in batch.items() if not f.done()} | self._waiting
        await asyncio.shield(verdict)  # other callers may wait for the same node

    async def _delete_all(self, batch: Verdicts) -> None:
        rules = await self._rules.deletions()
        if may_have_jobs := await self._keep_planned(batch) if rules.planned_crash else set(batch):
            await self._keep_busy(batch, may_have_jobs)
        if len(batch) > 1:
            try:
                await self._commands.run("scontrol", "delete", f"NodeName={','.join(batch)}")
            except (Gone, Refused):
                pass  # one node makes Slurm refuse all of them: delete them one by one
            else:
                for node in list(batch):
                    self._tell(batch, node)
                return
        for node in list(batch):
            error: Exception | None = None
            try:
                with suppress(Gone):
                    await self._delete_one(node)
            except Exception as caught:
                error = caught
            self._tell(batch, node, error)

    def _tell(self, batch: Verdicts, node: str, error: Exception | None = None) -> None:
        verdict = batch.pop(node)
        if error is None:
            self._drained.pop(node, None)
            verdict.set_result(None)
        else:
            verdict.set_exception(error)
            verdict.exception()  # marks it as retrieved: perhaps no caller waits any more

    # --- what a plan of backfill may have ------------------------------------------------------------

    async def _keep_planned(self, batch: Verdicts) -> set[str]:
        """Take out the nodes that backfill may plan to use. Of the others, those on which a job may be."""
        seen = backfill(await self._commands.run("sdiag"))
        words = await self._words(batch)  # after sdiag: a cycle that has ended meanwhile shows its plans here
        unsafe = [node for node in batch if node in words and await self._is_planned(node, seen, words[node])]
        if unsafe:
            await self._drain([node for node in unsafe if node not in self._drained])
        for node in unsafe:
            self._tell(batch, node, NotYet(f"backfill may plan to use node {node}"))
        # Slurm itself refuses to delete a busy node, but a DOWN one.
        return {node for node in batch if "DOWN" in words.get(node, ())}

    async def _is_planned(self, node: str, seen: BackfillState, words: Collection[str]) -> bool:
        since = self._drained.get(node)
        if since is not None and seen.began > since:
            return False
        if seen.active:
            return True
        patience = (await self._rules.deletions()).patience
        return "PLANNED" in words and (since is None or seen.now - since <= patience)

    async def _drain(self, nodes: Collection[str]) -> None:
        """Let no later cycle plan to use the nodes."""
        if not nodes:
            return
        try:
            await self._commands.run("scontrol", "update", f"NodeName={','.join(nodes)}", *_DRAIN)
        except (Gone, Refused):
            return  # one of them is no more: they are drained as they are asked for again
        now = backfill(await self._commands.run("sdiag")).now
        self._drained.update(dict.fromkeys(nodes, now))

    async def _words(self, nodes: Collection[str]) -> Mapping[str, frozenset[str]]:
        """The words of the nodes' states. Nodes that Slurm does not know are missing."""
        which = ("-h", "-a", "-N", "-n", ",".join(nodes))
        return node_words(await self._commands.run("sinfo", *which, "-O", STATE_FORMAT))

    # --- what Slurm takes for busy -------------------------------------------------------------------

    async def _keep_busy(self, batch: Verdicts, nodes: Collection[str]) -> None:
        """Take out the nodes that a job is on. Slurm refuses to delete a busy node, but not a DOWN one whose job is
        completing: slurmctld 22.05 crashes then (decision 7)."""
        text = await self._commands.run("squeue", "-h", "-a", "-t", "RUNNING,SUSPENDED,COMPLETING", "-o", "%N")
        busy = {node for line in text.splitlines() for node in parse.hosts(line.strip())}
        for node in [node for node in nodes if node in busy]:
            self._tell(batch, node, Refused(f"a job is on node {node}", hint="wait until it has left"))

    async def _delete_one(self, node: str) -> None:
        try:
            await self._commands.run("scontrol", "delete", f"NodeName={node}")
        except Refused as refused:
            await self._resolve(node, refused)

    async def _resolve(self, node: str, refused: MultiverseError) -> None:
        """Slurm did not delete the node. After `scontrol reconfigure` slurmctld 22.05 counts the jobs on dynamic nodes
        twice, so a node stays ALLOCATED when its job has left it; it can be deleted once it is DOWN."""
        words = (await self._words([node])).get(node, frozenset())
        if words & parse.RESERVED:
            raise NotYet(f"node {node} is in a reservation") from refused
        if not words & _BUSY:
            raise refused
        if await self._commands.run("squeue", "-h", "-a", "-w", node, "-o", "%i"):
            raise Refused(f"a job is on node {node}", hint="wait until it has left") from refused
        for state in (_DRAIN, _DOWN):  # both: with ReturnToService=2 a slurmd that still answers brings it back
            await self._commands.run("scontrol", "update", f"NodeName={node}", *state)
        await self._commands.run("scontrol", "delete", f"NodeName={node}")
