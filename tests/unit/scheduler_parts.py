"""A part of a scheduler's view, as a scheduler that reads parts answers it."""

from __future__ import annotations

from collections.abc import Collection

from multiverse.core.model.job import SchedulerPart, SchedulerView


def part_of(
    view: SchedulerView, jobs: Collection[str], users: Collection[int], nodes: Collection[str]
) -> SchedulerPart:
    """What a view shows of these jobs, users and nodes."""
    return SchedulerPart(
        jobs={job_id: job for job_id, job in view.jobs.items() if job_id in jobs or job.uid in users},
        nodes={name: view.nodes[name] for name in nodes if name in view.nodes},
        job_ids=frozenset(jobs),
        users=frozenset(users),
        node_names=frozenset(nodes),
        limits=view.limits,
        offers=view.offers,
        takers=view.takers,
    )
