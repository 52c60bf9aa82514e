"""submitit: a function, an array, a batch of calls, and a checkpoint after which the job is queued again."""

import json
import os
import sys
import time
from pathlib import Path

import submitit


def said(number: int) -> str:
    """Run in a job: its partition with a number."""
    return f"{os.environ['SLURM_JOB_PARTITION']} {number}"


def failing() -> None:
    raise ValueError("on purpose")


class Counting:
    """Runs until it is interrupted; its second run has what the first one had counted."""

    def __init__(self, directory: Path, counted: int = 0) -> None:
        self.directory = directory
        self.counted = counted

    def __call__(self) -> list[int]:
        if self.counted:
            return [self.counted, int(os.environ["SLURM_RESTART_COUNT"])]
        (self.directory / "counting").touch()
        while True:
            self.counted += 1
            time.sleep(0.1)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(Counting(self.directory, 1))


partition = sys.argv[1]
directory = Path.cwd()
executor = submitit.AutoExecutor(folder=directory / "logs" / "%j")
executor.update_parameters(
    name="client",
    timeout_min=20,
    mem_gb=1,
    slurm_partition=partition,
    slurm_array_parallelism=2,
    slurm_setup=["umask 027"],
)
counting = executor.submit(Counting(directory))
one = executor.submit(said, 1)
failed = executor.submit(failing)
several = executor.map_array(said, range(2, 5))
with executor.batch():
    batch = [executor.submit(said, number) for number in (5, 6)]
while not (directory / "counting").exists():
    time.sleep(0.5)
counting._interrupt()
found = {
    "one": one.result(),
    "failed": "ValueError: on purpose" in str(failed.exception()),
    "several": [job.result() for job in several],
    "batch": [job.result() for job in batch],
    "arrays": [len({job.job_id.partition("_")[0] for job in jobs}) for jobs in (several, batch)],
    "again": counting.result(),
    "states": [],
}
while not all(
    job.get_info("force").get("State", "") in ("COMPLETED", "FAILED")
    for job in [counting, one, failed, *several, *batch]
):
    time.sleep(1)
found["states"] = [job.state for job in (counting, one, failed, *several, *batch)]
print(json.dumps(found))
