"""psij: jobs are polled while they wait, run and end; one is cancelled as it waits, another as it runs."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psij

partition, cpus = sys.argv[1], int(sys.argv[2])
executor = psij.JobExecutor.get_instance(
    "slurm",
    config=psij.executors.batch.slurm.SlurmExecutorConfig(queue_polling_interval=1, initial_queue_polling_delay=1),
)
seen: dict[str, list[str]] = {}


def submit(name: str, *command: str) -> psij.Job:
    """A job that takes the whole partition, so that it waits for the one before."""
    spec = psij.JobSpec(
        name=name,
        executable=command[0],
        arguments=list(command[1:]),
        directory=Path.cwd(),
        stdout_path=Path.cwd() / f"{name}.out",
        resources=psij.ResourceSpecV1(node_count=1, process_count=1, cpu_cores_per_process=cpus),
        attributes=psij.JobAttributes(queue_name=partition, custom_attributes={"slurm.mem": "200"}),
    )
    job = psij.Job(spec)
    states = seen[name] = []

    class Noted(psij.JobStatusCallback):
        def job_status_changed(self, job: psij.Job, job_status: psij.JobStatus) -> None:
            states.append(job_status.state.name)

    job.set_job_status_callback(Noted())
    executor.submit(job)
    return job


def until(met: Callable[[], bool]) -> None:
    while not met():
        time.sleep(0.2)


running = submit("running", "/bin/sleep", "600")
until(lambda: running.status.state == psij.JobState.ACTIVE)
waiting = submit("waiting", "/bin/sh", "-c", "echo $SLURM_JOB_PARTITION")
failing = submit("failing", "/bin/sh", "-c", "exit 3")
unwanted = submit("unwanted", "/bin/true")
time.sleep(8)  # they are polled as they wait
polled = [job.status.state.name for job in (waiting, failing, unwanted)]
unwanted.cancel()
unwanted.wait()
running.cancel()
ended = [job.wait() for job in (running, waiting, failing)]
print(
    json.dumps(
        {
            "polled": polled,
            "seen": seen,
            "codes": [status.exit_code for status in ended],
            "out": (Path.cwd() / "waiting.out").read_text().strip(),
        }
    )
)
