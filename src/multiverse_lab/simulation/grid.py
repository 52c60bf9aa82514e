"""A simulated Grid Engine: jobs wait on a hold of ours and are released to nodes by name.

It has no features, no partitions and no offers. Tasks of arrays have ids like `4711.3`. A requeued job keeps its id and
its submit time, and its restarts are counted. A node that was set down is shown as disabled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from multiverse.core.errors import Refused
from multiverse.core.model.identity import NodeBootstrap
from multiverse.core.model.job import NodeSpec, SchedulerView
from multiverse_lab.simulation.cluster import Cluster
from multiverse_lab.simulation.guests import Registration
from multiverse_lab.simulation.jobs import JobRecord, NodeRecord
from multiverse_lab.simulation.scheduler import SimulatedScheduler


class GridCluster(Cluster):
    """The qmaster and its queue."""

    separator = "."
    counts_twice = False
    plans_ahead = False

    def _is_unsatisfiable(self, job: JobRecord) -> bool:
        return False  # a job that names hosts which do not exist just stays pending

    def _usable(self, job: JobRecord) -> Sequence[NodeRecord]:
        return [self.nodes[name] for name in sorted(job.pinned_nodes) if name in self.nodes]

    def _requeued(self, job: JobRecord) -> None:
        """The job keeps its submit time, and may start at once, on the nodes that it names."""

    def _ends(self, job: JobRecord) -> float | None:
        return None  # it shows the limits of jobs only

    def set_down(self, name: str, reason: str) -> None:
        super().set_down(name, reason if reason == "Not responding" else f"disabled: {reason}")


class SimulatedGrid(SimulatedScheduler):
    """See `ports.Scheduler`. The tag of a pinned job is kept in the context of the job."""

    offers = None
    parts = None
    submission = None
    addresses = None
    leases = None
    overflow = None
    saving = None
    standing_in = None
    preempting = None

    def _view(self) -> SchedulerView:
        return replace(super()._view(), offers=None)

    def _tie(self, record: JobRecord, tag: str, nodes: Sequence[str]) -> None:
        missing = [node for node in nodes if node not in self.cluster.nodes]
        if missing or not nodes:
            record.unpin()
            raise Refused(f"no such nodes: {', '.join(missing) or 'none named'}", hint="pin after they have registered")
        record.pin, record.pinned_nodes = tag, tuple(nodes)

    async def bootstrap(self, node: NodeSpec) -> NodeBootstrap:
        return Registration(node.name, (), node.size, node.sockets).pack()
