"""simple_slurm: a script, a dependency, an array, a step by srun, what squeue says of a held job, and scancel."""

import json
import sys
import time
from pathlib import Path

from simple_slurm import Slurm


def until_written(name: str) -> str:
    path = Path(name)
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.5)
    return path.read_text().strip()


def slurm(**options: object) -> Slurm:
    return Slurm(partition=sys.argv[1], mem="200", time="10", job_name="client", **options)


held = slurm(hold=True, output="/dev/null")
number = held.sbatch("true", verbose=False)
held.squeue.update_squeue()
shown = held.squeue.jobs[number]
held.scancel.cancel_job(number)
held.squeue.update_squeue()
script = slurm(output="first.out")
script.add_cmd("cd /tmp")
first = script.sbatch(f"echo {Slurm.SLURM_JOB_PARTITION} {Slurm.SLURM_JOB_NAME}", verbose=False)
slurm(output="second.out", dependency={"afterok": first}).sbatch("cat first.out", verbose=False)
array = slurm(output=f"{Slurm.JOB_ARRAY_MASTER_ID}.{Slurm.JOB_ARRAY_ID}.out", array=range(2, 5))
tasks = array.sbatch(f"echo {Slurm.SLURM_ARRAY_TASK_ID}", verbose=False)
code = slurm(output="step.out").srun("printenv SLURM_JOB_PARTITION")
print(
    json.dumps(
        {
            "held": [shown["NAME"], shown["ST"], shown["NODELIST(REASON)"]],
            "cancelled": number not in held.squeue.jobs,
            "first": until_written("first.out"),
            "second": until_written("second.out"),
            "array": [until_written(f"{tasks}.{task}.out") for task in range(2, 5)],
            "step": until_written("step.out"),
            "code": code,
        }
    )
)
