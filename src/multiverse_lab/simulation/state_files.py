"""slurmctld writes its state seconds late. If it is killed meanwhile, it knows an earlier state as it starts again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from multiverse.core.model.job import JobState
from multiverse_lab.simulation.jobs import JobRecord, NodeRecord
from multiverse_lab.simulation.tables import KeptNodes

KILLED = (0.02, 5.0)  # seconds after a requeue
AWAY = (1.0, 15.0)  # seconds until it is started again
MISSED = (1.0, 10.0)  # seconds until it has noticed that a node that answers does not run the job

_OF_RUN = ("state", "restarts", "submitted", "batch", "begin", "pin", "pinned_nodes", "took_offer", "held", "delayed",
           "nodes", "again", "result", "started", "suspended")  # fmt: skip


@dataclass(frozen=True)
class KeptRun:
    """What slurmctld has kept of a job that runs, when it had not been told of a requeue."""

    job: JobRecord
    nodes: tuple[NodeRecord, ...]  # that with the script first
    fields: dict[str, object]

    @classmethod
    def of(cls, job: JobRecord, nodes: Iterable[NodeRecord]) -> KeptRun:
        return cls(job, tuple(nodes), {name: getattr(job, name) for name in _OF_RUN})

    @property
    def may_be_latest(self) -> bool:
        """Whether nothing has happened since but that the job was queued again, and perhaps pinned."""
        same = self.job.restarts - int(str(self.fields["restarts"])) <= 1
        return same and self.job.state in (JobState.COMPLETING, JobState.PENDING) and not self.job.by_user

    def show_again(self, nodes: KeptNodes, now: float) -> None:
        """The job runs on its nodes, which the controller may have deleted meanwhile."""
        for name, value in self.fields.items():
            setattr(self.job, name, value)
        for kept in self.nodes:
            if kept.name not in nodes:
                nodes.add(kept)
            node = nodes[kept.name]
            node.job, node.drained, node.down, node.reason = self.job, True, False, ""
            if not node.guest.reachable and node.silent is None:
                node.silent = now
        self.job.busy, self.job.by_controller = [node.name for node in self.nodes], True
