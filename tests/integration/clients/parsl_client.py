"""parsl: a block of workers in a job runs functions and commands, some of which wait for the results of others."""

import json
import sys
from pathlib import Path

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import SlurmProvider

partition, address = sys.argv[1:]
directory = Path.cwd()


@parsl.python_app
def said(number: int) -> str:
    import os

    return f"{os.environ['SLURM_JOB_PARTITION']} {number}"


@parsl.python_app
def joined(*parts: str) -> str:
    return ", ".join(parts)


@parsl.bash_app
def written(words: str, stdout: str) -> str:
    return f"echo $SLURM_JOB_PARTITION: '{words}'"


@parsl.python_app
def failing() -> None:
    raise ValueError("on purpose")


provider = SlurmProvider(
    partition=partition,
    init_blocks=1,
    max_blocks=1,
    cores_per_node=1,
    mem_per_node=1,
    walltime="00:30:00",
    worker_init=f"export PATH={Path(sys.executable).parent}:$PATH",
)
executor = HighThroughputExecutor(
    label="jobs", address=address, max_workers_per_node=1, provider=provider, encrypted=False
)
with parsl.load(Config(executors=[executor], run_dir=str(directory / "runs"), strategy="none", usage_tracking=0)):
    parts = [said(number) for number in range(3)]
    together = joined(*parts)
    out = directory / "written.out"
    code = written(together, stdout=str(out)).result()
    found = {
        "parts": [part.result() for part in parts],
        "together": together.result(),
        "code": code,
        "out": out.read_text().strip(),
        "failed": repr(failing().exception()),
        "blocks": [status.state.name for status in executor.status().values()],
    }
print(json.dumps(found))
