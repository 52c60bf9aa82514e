"""Jobs of records as the JSON of 22.05 has them, where the waiting tasks of an array share one record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from multiverse.core.model.job import Job
from multiverse.drivers.slurm.reading import parse
from multiverse.drivers.slurm.reading.parse import Record, SiteNames, Uses


def task_ids(text: str) -> list[int]:
    """`0-2,5,8-12:2%1` as task ids, in order."""
    found: list[int] = []
    for first, last, step in re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?(?:,|$)", text.partition("%")[0].strip("[]")):
        found.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return found


def tasks_of(record: Record) -> Iterator[Record]:
    """The record, or one for each task that shares it, as squeue's table shows them with -r."""
    if record.get("array_job_id") and record.get("array_task_id") is None:
        yield from ({**record, "array_task_id": task} for task in task_ids(record.get("array_task_string") or ""))
    else:
        yield record


def jobs_of(
    records: Iterable[Record], names: SiteNames, now: float, uses: Callable[[Record], Uses] = lambda record: ()
) -> dict[str, Job]:
    """The jobs of Multiverse's partitions by id."""
    tasks = (task for record in records if parse.is_ours(record, names) for task in tasks_of(record))
    return parse.newest(parse.job(task, names, now, uses(task)) for task in tasks)
